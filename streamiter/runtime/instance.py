"""An operator at work in one subtask, and the feeder of a source."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from streamiter.channels import Channel, Intake
from streamiter.clock import Clock, TimerHandle
from streamiter.deferred import Encode
from streamiter.errors import ConfigurationError
from streamiter.operators.keyed_state import KeyedState
from streamiter.operators.operator import (
    Context,
    IterationListener,
    JobScope,
    Operator,
    OperatorStatistics,
    Progress,
)
from streamiter.operators.output import Output, rows_if_table
from streamiter.operators.rejection import RecordFailure, shortened
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Batch, Control, EndOfInput
from streamiter.runtime.entries import Entry, handler_of, is_awaited, make_async_entry, make_entry
from streamiter.runtime.failure import call_unless_cancelled, unless_cancelled
from streamiter.runtime.graph import Step

__all__ = [
    "Feeder",
    "OperatorInstance",
    "TimerDue",
]


@final
class TimerDue(Control):
    """Posted to a task when a timer of one of its operators is due.

    One operator instance with what surrounds it: context, output, timers, keyed state.
    """

    __slots__ = ("instance", "number")

    def __init__(self, instance: OperatorInstance, number: int) -> None:
        self.instance = instance
        self.number = number


@final
class OperatorInstance:
    """An operator at work in one subtask; used by its task only."""

    def __init__(
        self,
        step: Step,
        operator: Operator,
        subtask: int,
        *,
        clock: Clock,
        progress: Progress,
        scope: JobScope,
        post: Callable[[Control], None],
        encode: Encode,
    ) -> None:
        self.step = step
        self.operator = operator
        self.subtask = subtask
        self.out = Output(step.name, step.policy)
        self.progress = progress
        self._clock = clock
        self._post = post
        self._timers: dict[int, tuple[int, Any, Any]] = {}
        self._timer_handles: dict[int, TimerHandle] = {}
        self._timers_set = 0
        self._takes_timers = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self.records_in = 0
        self.batches_in = 0
        self.opened = False
        self.is_listener = isinstance(operator, IterationListener)
        self.keyed: KeyedState | None = None
        if step.keys is not None:
            self.keyed = KeyedState(
                clock,
                step.keys.time_to_live_s,
                name=step.name,
                encode=encode,
                in_thread=operator.runs_in_thread,
            )
        self.context = Context(
            name=step.name,
            subtask_index=subtask,
            parallelism=step.parallelism,
            clock=clock,
            progress=progress,
            statistics=self.statistics,
            scope=scope,
            post=post,
            set_timer=self._set_timer,
            in_iteration=step.loop is not None or step.stamped,
            keyed=self.keyed,
            encode=encode,
        )

    def renew(self, operator: Operator) -> None:
        """Go on with a new operator that knows nothing of the one before, which has been closed."""
        self.operator = operator
        self.is_listener = isinstance(operator, IterationListener)
        self._takes_timers = True
        if self.keyed is not None:
            self.keyed.clear()

    def entry(self, input_name: str) -> Entry:
        """What the step before calls with a batch."""
        handle = make_entry(self.operator, input_name, self.out, self.context, self._key_of)
        return self._counted(handle)

    def async_entry(self, input_name: str) -> Callable[[Batch], Any]:
        """The same for an operator that is awaited."""
        handle = make_async_entry(
            self.operator, input_name, self.out, self.context, self._key_of, self.progress
        )
        return self._counted(handle)

    def takes_batches(self, input_name: str) -> bool:
        """Whether an input is handled by batches, not record by record."""
        return handler_of(self.operator, input_name, step=self.step.name, keyed=self.keyed is not None)[1]

    def is_awaited(self, input_names: Sequence[str]) -> bool:
        """Whether handling records is a coroutine, or done in a thread."""
        return is_awaited(self.operator, input_names, step=self.step.name, keyed=self.keyed is not None)

    def count(self, batch: Batch) -> None:
        """Note that a batch was given to it."""
        self.records_in += len(batch)
        self.batches_in += 1

    def _counted(self, handle: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        def entry(batch: Batch) -> Any:
            self.records_in += len(batch)
            self.batches_in += 1
            return handle(batch)

        return entry

    @property
    def _key_of(self) -> Callable[[Any], Any] | None:
        return None if self.step.keys is None else self.step.keys.key_of

    def statistics(self) -> OperatorStatistics:
        """What it has handled so far."""
        out = self.out
        return OperatorStatistics(self.records_in, self.batches_in, out.records_emitted, out.rejected)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the operator that may be a coroutine function; name the step if it fails."""
        self.progress.handled += 1
        try:
            result = getattr(self.operator, method)(*arguments)
            if inspect.isawaitable(result):
                result = await unless_cancelled(result, self.step.name)
        except RecordFailure:
            raise
        except Exception as error:
            raise RecordFailure(self.step.name) from error
        self.out.flush()
        return result

    async def open(self) -> None:
        """Open the operator."""
        self.opened = True
        self._loop = asyncio.get_running_loop()
        await self.call("open", self.context)
        if self.keyed is not None and self.keyed.time_to_live_s is not None:
            self._sweep_later()

    async def close(self) -> None:
        """Call timers off and close the operator."""
        self._call_timers_off()
        if self.opened:
            self.opened = False
            await self.call("close")

    # -- timers ---------------------------------------------------------------------------------------

    def _set_timer(self, delay_s: float, key: Any, payload: Any) -> None:
        if payload is not _SWEEP and not hasattr(self.operator, "on_timer"):
            raise ConfigurationError(
                f"context.set_timer: expected {type(self.operator).__name__} to define on_timer(payload, out), "
                "given none; define it, or nothing would hear of the timer"
            )
        if not self._takes_timers and payload is not _SWEEP:
            raise ConfigurationError(
                "context.set_timer: expected a step whose input goes on, given one whose data has ended: what a timer "
                "would emit there has no epoch any more; emit it in input_ended"
            )
        self._timers_set += 1
        if _in_event_loop():
            self._schedule(self._timers_set, delay_s, key, payload)
        else:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._schedule, self._timers_set, delay_s, key, payload)

    def no_more_timers(self) -> None:
        """Its data has ended, though the iteration goes on: those who read from it count on no more epochs of it."""
        self._call_timers_off()
        self._takes_timers = False

    def _call_timers_off(self) -> None:
        for handle in self._timer_handles.values():
            handle.cancel()
        self._timer_handles.clear()
        self._timers.clear()

    def _schedule(self, number: int, delay_s: float, key: Any, payload: Any) -> None:
        self._timers[number] = (self._clock.now_ms() + round(delay_s * 1000), key, payload)
        due = TimerDue(self, number)
        self._timer_handles[number] = self._clock.call_later(max(0.0, delay_s), lambda: self._post(due))

    async def timer_due(self, number: int) -> None:
        """A timer is due: call ``on_timer`` with its key and payload."""
        self._timer_handles.pop(number, None)
        timer = self._timers.pop(number, None)
        if timer is None:
            return
        _, key, payload = timer
        if self.keyed is not None and payload is _SWEEP:
            self.keyed.drop_expired()
            self._sweep_later()
            return
        self.context.key = key
        await self.call("on_timer", payload, self.out)

    def _sweep_later(self) -> None:
        assert self.keyed is not None
        assert self.keyed.time_to_live_s is not None
        self._set_timer(self.keyed.time_to_live_s, None, _SWEEP)

    # -- state ----------------------------------------------------------------------------------------

    async def snapshot(self) -> dict[str, Any]:
        """All of its state: plain data, with what is ``Deferred`` in it."""
        return {
            "operator": await self.call("snapshot"),
            "keyed": None if self.keyed is None else self.keyed.snapshot(),
            "timers": [timer for timer in self._timers.values() if timer[2] is not _SWEEP],
            "takes timers": self._takes_timers,
        }

    async def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``snapshot`` gave; its timers take the place of those that were set in ``open``."""
        self._call_timers_off()
        await self.call("restore", state["operator"])
        if self.keyed is not None and state["keyed"] is not None:
            self.keyed.restore(state["keyed"])
            if self.keyed.time_to_live_s is not None:
                self._sweep_later()
        now_ms = self._clock.now_ms()
        for due_ms, key, payload in state["timers"]:
            self._set_timer((due_ms - now_ms) / 1000, key, payload)
        self._takes_timers = state["takes timers"]


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Sweep:
    """Payload of the timer that drops expired keyed state."""


_SWEEP = _Sweep()


@final
class Feeder:
    """Reads a source into a channel of its own; ``run`` is an asyncio task beside that of the operators.

    All that was read is handled: whoever stops it says what comes behind in the channel.

    The feeder: brings what a source reads to the gate of its task, ahead of need.
    """

    def __init__(self, source: Source, channel: Channel, step: str) -> None:
        self.channel = channel
        self.intake = Intake()
        """Shut by channels further down that have no room for what it would read."""
        self._source = source
        self._step = step
        self.is_idle = False
        """Whether nothing is to be expected for now, known once it is open."""
        self._opened = False
        self._is_reading = False
        self._stopped = False
        self._then: Control = EndOfInput()
        self._running: asyncio.Task[None] | None = None
        self._last_lag: Mapping[int, int] = {}
        self._carriers: set[type[Any]] = {list}
        """Types of records that the source has brought and that are no tables."""

    async def open(self, context: Context, positions: Positions | None) -> Positions:
        """Open the source; gives where it begins."""
        self._opened = True
        try:
            result = self._source.open(context, positions)
            if inspect.isawaitable(result):
                await result
            self.is_idle = self._source.is_idle()
            return self._source.positions()
        except Exception as error:
            raise RecordFailure(self._step) from error

    def start(self, group: asyncio.TaskGroup) -> None:
        """Begin to read, as a task of ``group``."""
        reading = call_unless_cancelled(self._run, self._step)
        self._running = group.create_task(reading, name=f"feed {self.channel.name}")

    def stop(self, then: Control) -> None:
        """Read no more; ``then`` comes behind what was read. Asked again, it goes on as it was asked first.

        All sources of a job are asked in the same order. Were a later ``then`` to take the place of the first, it would
        do so only where that has not come through yet: some sources would end, and others go on after a restart.
        """
        if self._stopped:
            return
        self._stopped = True
        self._then = then
        if self._is_reading:
            assert self._running is not None
            self._running.cancel()

    async def _run(self) -> None:
        while not self._stopped and (batch := await self._read()) is not None:
            # A channel looks at the records only, whatever carries them.
            while not self.channel.try_put(batch):  # type: ignore[arg-type]
                await self.channel.wait_for_room()
            # A source that always has something must leave others their turn.
            await asyncio.sleep(0)
        self.channel.put_control(self._then)

    async def _read(self) -> SourceBatch | None:
        """The next batch; None at the end, or where it was stopped while it waited."""
        self._is_reading = True
        try:
            await self.intake.wait()
            batch = self._source.read()
            return self._checked((await batch) if inspect.isawaitable(batch) else batch)
        except asyncio.CancelledError:
            if self._stopped and self._running is not None and self._running.uncancel() == 0:
                return None
            raise
        except Exception as error:
            raise RecordFailure(self._step) from error
        finally:
            self._is_reading = False

    def _checked(self, batch: Any) -> SourceBatch | None:
        if batch is None:
            return None
        if isinstance(batch, SourceBatch):
            if type(batch.records) not in self._carriers:
                batch.records = rows_if_table(f"{type(self._source).__name__}.read", batch.records)
                self._carriers.add(type(batch.records))
            return batch
        raise ConfigurationError(
            f"{type(self._source).__name__}.read: expected a SourceBatch, or None at the end, given "
            f"{shortened(batch)}; return SourceBatch(records, positions)"
        )

    async def close(self) -> None:
        """Close the source, if it was opened."""
        if not self._opened:
            return
        self._last_lag = self.lag()
        self._opened = False
        try:
            result = self._source.close()
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            raise RecordFailure(self._step) from error

    async def report_positions(self, group: str, positions: Positions) -> None:
        """Have the source tell tools that show lag how far a checkpoint has come."""
        result = self._source.report_positions(group, positions)
        if inspect.isawaitable(result):
            await result

    def redistribute(self, positions: Sequence[Positions], parallelism: int) -> Sequence[Positions] | None:
        """What another number of subtasks goes on from; None if the source does not say."""
        redistribute = getattr(self._source, "redistribute", None)
        return None if redistribute is None else redistribute(positions, parallelism)

    def lag(self) -> Mapping[int, int]:
        """What the source says, or said last before it was closed."""
        return dict(self._source.lag()) if self._opened else self._last_lag
