"""The chain: the operators of a task, and the effect of control records on them.

A :class:`Chain` passes a control record through the operators of a task, from the first to the last, and then into the
channels. :class:`Rounds` gives each epoch an operator of its own, if the first step of the task works in rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, final

from streamiter.engine.graph.graph import SINGLE_INPUT, Step
from streamiter.engine.graph.output import Writer
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.tasks.feeder import Feeder
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.operators.functions import refuse
from streamiter.operators.operator import Boundary, BoundaryOutput, Operator, Progress, known_of
from streamiter.operators.output import RecordFailure, pass_watermark
from streamiter.values.deferred import PlainValue
from streamiter.values.origins import BatchOrigin
from streamiter.values.records import Batch, Control, EndOfData, EndOfInput, EpochWatermark, EventTimeWatermark, untimed
from streamiter.values.times import MAX_TIME


@final
class Chain:
    """Passes control records through the operators of one task, one after the other, then into the channels."""

    def __init__(
        self,
        task: str,
        instances: Sequence[OperatorInstance],
        writers: Sequence[Writer],
        progress: Progress,
        *,
        rounds: Rounds | None,
        feeder: Feeder | None,
        room: Callable[[], Awaitable[None]],
    ) -> None:
        """``room`` waits until the channels behind the task have room."""
        self._task = task
        self._room = room
        self._instances = list(instances)
        self._first = self._instances[0]
        self.timed = [instance for instance in instances if instance.times is not None]
        """The operators that have an event time."""
        # ``Rounds`` calls the operators of a step with rounds. The first operator of a boundary is no listener.
        lasting = self._instances if rounds is None else self._instances[1:]
        self._listeners = [instance for instance in lasting if instance.is_listener]
        self._writers = list(writers)
        self.epoch_writers = [writer for writer in writers if not writer.leaves_loop]
        """The writers that epoch watermarks pass."""
        self.tells_of_epochs = bool(self._listeners) or rounds is not None
        """Whether operators of the task are told of complete epochs."""
        self._progress = progress
        self._rounds = rounds
        self._feeder = feeder
        self.interior_input_ended = False
        """Whether the operators behind the first one have been told that their input has ended."""
        self.closing: asyncio.Task[None] | None = None
        """The asyncio task that closes an operator now, if there is one."""

    def restore(self, *, watermark: int, interior_input_ended: bool) -> None:
        self._progress.watermark = watermark
        self.interior_input_ended = interior_input_ended

    async def pass_on(self, control: Control, *, after_first: bool) -> None:
        """Pass a control record on. With ``after_first`` the first operator has sent it, and is not told of it."""
        if isinstance(control, EpochWatermark):
            if self.tells_of_epochs:
                for epoch in range(self._progress.watermark + 1, control.epoch + 1):
                    if self._rounds is not None:
                        await self._rounds.end(epoch)
                    for listener in self._listeners:
                        await self._call_back(listener, epoch)
            self._progress.watermark = control.epoch
        elif isinstance(control, EndOfInput):
            await self._end(control, self._instances[after_first:])
        elif isinstance(control, EndOfData):
            await self._pass_end_of_data(control, self._instances[after_first:])
        elif isinstance(control, EventTimeWatermark):
            await self._pass_event_time(control, after_first=after_first)
            return
        for writer in self._writers:
            writer.control(control)

    async def catch_up(self) -> None:
        """Let the operators emit all that is due by their event-time watermarks, as the channels have room."""
        for instance in self.timed:
            await instance.catch_up(self._room)

    def write_control(self, control: Control) -> None:
        """Put a control record into the channels; the operators are not told of it."""
        for writer in self._writers:
            writer.control(control)

    async def input_ended(self, instance: OperatorInstance, input_name: str) -> None:
        """Tell an operator that one of its inputs has ended, while the iteration continues."""
        # The operator may emit here. These records must not come after the watermark of their epoch.
        self._progress.epoch = self._progress.watermark + 1
        await instance.input_ended(input_name)

    async def close_now(self, close: Callable[[], Coroutine[object, object, None]]) -> None:
        """Close an operator or source that has ended. If the job fails meanwhile, ``Task.close`` waits for this."""
        closing = self.closing = asyncio.create_task(close(), name=f"close {self._task}")
        try:
            await asyncio.shield(closing)
        finally:
            if closing.done():
                self.closing = None

    async def _pass_event_time(self, control: EventTimeWatermark, *, after_first: bool) -> None:
        """Give an event-time watermark to the first operator, or to its readers; it then goes the way of records."""
        # What operators emit because of it must not come after the watermark of their epoch.
        self._progress.epoch = self._progress.watermark + 1
        if after_first:
            pass_watermark(self._first.out, control)
        elif self._rounds is None:  # In rounds, each operator has an event time of its own.
            await self._first.advance_awaited(control)
            await self._first.catch_up(self._room)

    async def _pass_end_of_data(self, control: EndOfData, instances: Sequence[OperatorInstance]) -> None:
        """Tell each operator in turn that its input has ended, then of the epochs that this end completes."""
        self.interior_input_ended = True
        epochs = range(self._progress.watermark + 1, control.epoch + 1)
        for instance in instances:
            instance.end_event_time()
            await self.catch_up()
            if instance is not self._first:
                await self.input_ended(instance, SINGLE_INPUT)
            elif self._rounds is not None:
                for epoch in epochs:
                    await self._rounds.end(epoch)
            for epoch in epochs if instance in self._listeners else ():
                await self._call_back(instance, epoch)
            instance.no_more_timers()
        self._progress.watermark = max(self._progress.watermark, control.epoch)

    async def _call_back(self, listener: OperatorInstance, epoch: int) -> None:
        self._progress.epoch = epoch
        await listener.call("on_epoch_watermark_incremented", epoch, listener.context, listener.out)

    async def _end(self, control: EndOfInput, instances: Sequence[OperatorInstance]) -> None:
        told, self.interior_input_ended = self.interior_input_ended, True
        self._progress.is_ending = True
        if control.epoch is not None:
            self._progress.epoch = control.epoch
        for instance in instances:
            if self._rounds is not None and instance is self._first:
                await self._rounds.terminate()
                continue
            instance.end_event_time()
            await self.catch_up()
            if instance is not self._first and not told:
                await instance.input_ended(SINGLE_INPUT)
            if instance.is_listener and instance.step.loop is not None:
                await instance.call("on_iteration_terminated", instance.context, instance.out)
            await instance.call("finish", instance.out)
            await self.close_now(instance.close)
        if self._feeder is not None:
            await self.close_now(self._feeder.close)


def is_per_round(step: Step, operator: Operator) -> bool:
    """Return whether each epoch has its own operator.

    Without state, that makes no difference; a boundary holds watermarks back, so it has no records at the end of one.
    """
    return step.per_round and not (known_of(operator).is_stateless or isinstance(operator, Boundary))


CloseNow = Callable[[Callable[[], Coroutine[object, object, None]]], Awaitable[None]]


@final
class ChainOutput(BoundaryOutput):
    """The output of a boundary that is the first operator of a chain."""

    def __init__(self, chain: Chain, *, end: Callable[[EndOfInput], Awaitable[None]]) -> None:
        """``end`` is called instead of ``chain.pass_on`` with a control record that ends the task."""
        self._chain, self._end, self._out, self._progress = chain, end, chain._first.out, chain._progress
        step = chain._first.step
        self._drops_times = step.reads_times and not step.timed

    def emit_batch(self, records: Batch, epoch: int) -> None:
        out, progress = self._out, self._progress
        progress.epoch = epoch
        if self._drops_times:
            records = untimed(records)
        if progress.origin is not None or out._gathered or not len(records):
            out.emit_batch(records)
            return
        out.records_emitted += len(records)  # As out.emit_batch does, without a call: each round comes here.
        for receiver in out._receivers:
            receiver(records)

    def refuse(self, record: Any, error: Exception, epoch: int, origin: BatchOrigin | None) -> None:
        out, progress = self._out, self._progress
        progress.epoch, progress.origin, progress.records = epoch, origin, None
        refuse(out, record, error)
        out.flush()

    async def room(self) -> None:
        await self._chain._room()

    async def control(self, control: Control) -> None:
        chain = self._chain
        if type(control) is EpochWatermark and not chain.tells_of_epochs:  # As chain.pass_on does.
            self._progress.watermark = control.epoch
            for writer in chain.epoch_writers:
                writer.control(control)
            return
        if isinstance(control, EndOfInput):
            await self._end(control)
        else:
            await chain.pass_on(control, after_first=True)


@final
class Rounds:
    """Makes and ends the operators of a step with rounds, which is the first step of its task.

    Each epoch has an operator of its own; one operator exists at a time. It is made when the first record of its epoch
    arrives. An input has ended for it when no more records of that epoch can arrive. When all inputs have ended, its
    callback is called, then ``finish`` and ``close``.
    """

    def __init__(
        self, instance: OperatorInstance, inbox: Inbox, progress: Progress, make_operator: Callable[[], Operator]
    ) -> None:
        self.epoch: int | None = None
        """The epoch of the current operator, if there is one."""
        self._instance = instance
        self._inbox = inbox
        self._progress = progress
        self._make_operator = make_operator
        self._told: list[str] = []
        """The inputs of which the current operator has been told that they have ended."""
        self._close_now: CloseNow | None = None

    def close_with(self, close_now: CloseNow) -> None:
        """Set the function that closes an operator so that an abort does not interrupt it."""
        self._close_now = close_now

    async def begin(self, epoch: int) -> None:
        """Make and open an operator for this epoch, because its first record has arrived."""
        self._instance.renew(self._new_operator())
        self.epoch = epoch
        self._told = []
        await self._instance.open()

    def _new_operator(self) -> Operator:
        name = self._instance.step.name
        try:
            operator = self._make_operator()
        except StreamiterError as error:
            raise RecordFailure(name) from error
        if operator is self._instance.operator:
            raise RecordFailure(name) from ConfigurationError(
                f"step {name!r}: expected its factory to make a new operator for each round, given the same again; "
                "make it inside the factory"
            )
        return operator

    async def tell_ended_inputs(self, *, but: str | None = None) -> bool:
        """Tell the current operator which inputs have ended since the last call; return whether any have.

        ``but`` is the input of the records that the operator gets next.
        """
        if self.epoch is None:
            return False
        complete = self._inbox.inputs_complete(self.epoch)
        ended = [name for name in complete if name not in self._told and name != but]
        for name in ended:
            await self._tell(name)
        return bool(ended)

    async def _tell(self, input_name: str) -> None:
        assert self.epoch is not None
        self._told.append(input_name)
        if hasattr(self._instance.operator, "input_ended"):
            self._progress.epoch = self.epoch
            await self._instance.input_ended(input_name)

    async def end(self, epoch: int) -> None:
        """End the operator of this epoch, if there is one, because the epoch is complete."""
        if self.epoch == epoch:
            await self._end(epoch, "on_epoch_watermark_incremented", epoch)

    async def terminate(self) -> None:
        """End the current operator in its own epoch, if there is one, because the iteration has ended."""
        if self.epoch is not None:
            await self._end(self.epoch, "on_iteration_terminated")

    async def _end(self, epoch: int, callback: str, *arguments: int) -> None:
        instance, self._progress.epoch = self._instance, epoch
        for name in instance.step.input_names():
            if name not in self._told:
                await self._tell(name)
        if instance.is_listener:
            await instance.call(callback, *arguments, instance.context, instance.out)
        if instance.times is not None:
            await instance.advance_awaited(EventTimeWatermark(MAX_TIME))
            await instance.catch_up(_no_wait)
        await instance.call("finish", instance.out)
        self.epoch = None
        self._inbox.want(None)
        assert self._close_now is not None
        await self._close_now(instance.close)

    # -- state -------------------------------------------------------------------------------------------

    async def snapshot(self) -> dict[str, PlainValue]:
        """Return the state as plain data."""
        if self.epoch is None:
            return {"epoch": None}
        return {"epoch": self.epoch, "told": list(self._told), "instance": await self._instance.snapshot()}

    async def restore(self, state: dict[str, PlainValue]) -> None:
        if state["epoch"] is None:
            return
        await self.begin(state["epoch"])
        self._told = list(state["told"])
        await self._instance.restore(state["instance"])


async def _no_wait() -> None:
    pass
