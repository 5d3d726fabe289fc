"""The task: an inbox, a chain of operators and output channels, run by one asyncio task.

A :class:`Task` takes one batch or control record after the other from its inbox, and hands it to the first operator of
its chain. It waits while the output channels are full, and gives way to other tasks now and then. Checkpoint barriers
are handled by :class:`~streamiter.engine.tasks.task_barriers.TaskBarriers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

from streamiter.engine.graph.channels import Channel, Intake
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.graph.output import EdgeWriter, Writer, restore_turns, turns_of
from streamiter.engine.inbox.alignment import BarrierReturned
from streamiter.engine.inbox.inbox import Inbox, Polled, Posted, nothing
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.inbox.port_progress import InputEnded
from streamiter.engine.inbox.turn import GIVE_WAY, TURN_S
from streamiter.engine.tasks.chain import Chain, ChainOutput, Rounds
from streamiter.engine.tasks.entries import AsyncEntry, Entry, entry_in_thread
from streamiter.engine.tasks.failures import within_batch
from streamiter.engine.tasks.feeder import Feeder
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.engine.tasks.task_barriers import Acknowledge, ClockAlignment, Suspension, TaskBarriers, TaskState
from streamiter.errors import StreamiterError
from streamiter.operators.event_time import PartState
from streamiter.operators.operator import Boundary, BoundaryOutput, Progress, serve_with
from streamiter.operators.output import RecordFailure
from streamiter.operators.services import ServiceWorker
from streamiter.operators.source import Positions, SourceBatch
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import close_each
from streamiter.values.plain_data import PlainData
from streamiter.values.records import (
    BATCH_RECORDS,
    Batch,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfInput,
    EventTimeWatermark,
    Idle,
    slice_batch,
)

# The number of batches after which a task gives way to other tasks. With some 100 µs for a batch, the other tasks wait
# for one or two milliseconds. In a loop a task gives way after each batch, so that feedback returns soon.
_BATCHES_IN_A_ROW: Final = 16

# The task compares with them for each control record, and Python is slow to look up a member of an enum.
_STOPPED: Final = Suspension.DONE
_RUNS: Final = Suspension.NONE


class Task:
    """Runs one chain of operators for one subtask.

    All operators of the chain share the epoch and the watermark, because a batch passes all of them in one turn. Only
    the asyncio task of this object calls its methods, except for those that post a notice.
    """

    def __init__(
        self,
        *,
        name: str,
        inbox: Inbox,
        instances: Sequence[OperatorInstance],
        input_names: Sequence[str],
        writers: Sequence[Writer],
        progress: Progress,
        clock: Clock,
        acknowledge: Acknowledge,
        plain_data: PlainData,
        executor: Executor | None = None,
        feeder: Feeder | None = None,
        rounds: Rounds | None = None,
        cuts_by_time: bool = True,
    ) -> None:
        """``cuts_by_time``: whether batches of slow steps are cut by the time that their records take."""
        self.name = name
        self.inbox = inbox
        self.instances = list(instances)
        self.first = self.instances[0]
        """The first operator of the chain."""
        self.writers = list(writers)
        self.progress = progress
        self.feeder = feeder
        """Reads the source, if the first operator has one."""
        self.positions: Positions = {}
        """Of a source: the positions behind the records that were handled."""
        self.ended = False
        """Whether the task has passed on the end of its input, or has stopped at a barrier. Only the task sets it."""
        self._handling_since_s: float | None = None
        """When the handling of a batch or control record began that is under way."""
        self._held_since_s: float | None = None
        """Since when the task waits, with input that it does not want yet."""
        self._handled_s = self._held_s = 0.0
        self.holds_back: Sequence[Intake] = ()
        """Intakes of other processes, which the inbox holds back from the begin of the run on; set before ``open``."""
        self.waits_for_room_in: Channel | None = None
        """The full channel that the task waits for."""
        self._clock = clock
        self._now_s = clock.monotonic_s
        self._executor = executor
        self._plain_data = plain_data
        self._input_names = list(input_names)
        self._in_loop = self.first.step.loop is not None
        channels = (port.channel for port in inbox.ports)
        self._feedback_channels = [channel for channel in channels if isinstance(channel, FeedbackChannel)]
        self._rounds = rounds
        """Makes an operator for each epoch, if the first step works in rounds."""
        self._lasting_instances = self.instances if rounds is None else self.instances[1:]
        """All operators but the one that ``Rounds`` makes and ends."""
        self._cuts_by_time = cuts_by_time
        self._lanes = [lane for writer in self.writers for lane in writer.lanes]
        self._batches_in_a_row = self._records_in_a_row = 0
        self._seconds_in_a_row = 0.0
        self._others_ran = False
        """Whether other tasks have run while a batch was awaited."""
        operator = self.first.operator
        self._boundary = operator if isinstance(operator, Boundary) else None
        inbox.aside.counts = self.first
        names = {instance.step.name for instance in self.instances}
        for port in inbox.feedback.ports:
            origin = port.origin
            port.is_own = origin is not None and (origin.upstream in names and origin.subtask == self.first.subtask)
        if len(self.instances) == 1 and all(isinstance(writer, EdgeWriter) for writer in self.writers):
            inbox.handle = self._handle_for_producer
        self._wanted: Callable[[], Iterable[str] | None] | None = None
        self._looks_after = True
        """Whether ``_after_handling`` has something to do."""
        self._is_direct = False
        """Whether a batch is handled by a call of an entry, and nothing else."""
        self._awaited = self._boundary is None and self.first.is_awaited(self._input_names)
        self._entries: dict[str, Entry] = {}
        self._async_entries: dict[str, AsyncEntry] = {}
        """The entries of a first operator that is awaited."""
        self._by_batch: frozenset[str] = frozenset()
        """The inputs of the first operator that take whole batches."""
        self.chain = Chain(
            name, self.instances, self.writers, progress, rounds=rounds, feeder=feeder, room=self.clear_lanes
        )
        self._boundary_out = ChainOutput(self.chain, end=self._end)
        self.barriers = TaskBarriers(self, self._boundary, acknowledge, plain_data)
        if rounds is None:
            self._bind()
        else:
            rounds.close_with(self.chain.close_now)

    def _bind(self) -> None:
        """Look up the methods of the first operator, which the task calls from now on."""
        first, names = self.first, self._input_names
        self._wanted = getattr(first.operator, "wanted_inputs", None)
        if self._boundary is not None:
            if type(self._boundary).wanted_inputs is Boundary.wanted_inputs:
                self._wanted = None  # It wants all inputs at any time.
            self._looks_after = self._wanted is not None or bool(self.chain.timed)
            return
        self._looks_after = self._rounds is not None or self._wanted is not None or bool(self.chain.timed)
        self._is_direct = not self._awaited and self._rounds is None and self._wanted is None
        self._by_batch = frozenset(name for name in names if first.takes_batches(name))
        if first.operator.runs_in_thread:
            self._async_entries = {
                name: entry_in_thread(first.entry(name), first.out, self._executor) for name in names
            }
        elif self._awaited:
            self._async_entries = {name: first.async_entry(name) for name in names}
        else:
            self._entries = {name: first.entry(name) for name in names}
        if self._cuts_by_time:
            # A step that awaits whole batches lets other tasks run meanwhile, and each batch may be one slow request.
            self.inbox.cut_turns(set(names) - (self._by_batch if self._awaited else set()))

    def serve_with(self, worker: ServiceWorker, clocks: ClockAlignment, *, keeps_last_state: bool) -> None:
        """Connect the first step with its parameter server, before ``open``.

        ``keeps_last_state``: whether a suspended job leaves a checkpoint.
        """
        self.barriers.serve_with(worker, clocks, keeps_last_state=keeps_last_state)
        self._looks_after, self._is_direct = True, False
        serve_with(self.first.context, worker)

    @property
    def is_handling(self) -> bool:
        """Whether a batch or control record is being handled."""
        return self._handling_since_s is not None

    @property
    def handled_s(self) -> float:
        """The seconds in which batches and control records were handled, also while the task waited for room."""
        return self._handled_s + (0.0 if self._handling_since_s is None else self._now_s() - self._handling_since_s)

    @property
    def held_s(self) -> float:
        """The seconds in which the task has waited with input that it did not want yet."""
        return self._held_s + (0.0 if self._held_since_s is None else self._now_s() - self._held_since_s)

    @property
    def event_time(self) -> int | None:
        """The event-time watermark that all steps of the task have passed on; None if it has none yet."""
        known = [time for each in self.instances if (time := each.event_time) is not None]
        return min(known, default=None)

    def lag_of(self, time: int) -> float:
        """Return the seconds by which the clock is ahead of a time."""
        return (self._clock.now_ms() - time) / 1000

    @property
    def suspended(self) -> bool:
        """Whether the task has ended at a barrier, and not at the end of its input."""
        return self.barriers.suspension is _STOPPED

    # -- life ------------------------------------------------------------------------------------------

    async def open(self, state: TaskState | None = None) -> None:
        """Open all operators, the last one first, because operators may emit to those behind them; then restore."""
        for instance in reversed(self._lasting_instances):
            await instance.open()
        if state is not None:
            await self._restore(state)
        if not self.ended:
            self._update_wanted_inputs()
            if state is None and self._wanted is not None and (loop := self.first.step.loop) is not None:
                loop.check_wanted(self.first.step, self.inbox.wanted.names)
        if self.feeder is not None and not self.ended:
            is_restored = state is not None and state["positions"] is not None
            start = await self.feeder.open(self.first.context, self.positions if is_restored else None)
            self.positions = {**start, **self.positions}

    def _begin(self) -> None:
        self._update_wanted_inputs()
        self.inbox.hold_back(self.holds_back)
        if self.feeder is not None and self.feeder.is_idle:
            self.chain.write_control(Idle())
        for instance in self.instances:
            instance.repeat_watermark()

    async def close(self) -> list[Exception]:
        """Close everything that is open, even if some operators fail to close; return the errors."""
        self._handled_s, self._held_s = self.handled_s, self.held_s
        self._handling_since_s = self._held_since_s = None
        closing: list[Callable[[], object]] = [instance.close for instance in self.instances]
        if (under_way := self.chain.closing) is not None:
            closing.insert(0, lambda: under_way)
        if self.feeder is not None:
            closing.append(self.feeder.close)
        closing += [channel.close for channel in self._feedback_channels]
        return await close_each([*closing, self.barriers.release, self.inbox.close])

    @property
    def may_hold_back_barriers(self) -> bool:
        """Whether the task may leave input unread, so that the task must expect a barrier behind the input."""
        return self.barriers.clocks is not None or hasattr(self.first.operator, "wanted_inputs")

    def held_for(self) -> str:
        """Return the reason why the task leaves input unread, for the log."""
        reason = None if self._boundary is None else self._boundary.held_for()
        return reason or self.inbox.waits_for() or "it has input that it does not want now"

    @property
    def is_held(self) -> bool:
        """Whether it handles nothing, although it has input that it leaves unread, or records that it works on."""
        has_work = self.inbox.has_parked or (self._boundary is not None and self._boundary.has_work())
        return has_work and not self.is_handling and not self.inbox.barriers.awaited()

    @property
    def brings_input(self) -> bool:
        """Whether the task brings input into the job, and must stop it when the job is drained."""
        return self.feeder is not None or (self._boundary is not None and self._boundary.brings_input)

    # -- notices of the job ----------------------------------------------------------------------------

    def expect_barrier(self, barrier: CheckpointBarrier) -> None:
        """Post that a checkpoint begins, to a task where barriers start, or that may leave input unread."""

        async def expect(_: BoundaryOutput) -> None:
            for event in self.barriers.expect(barrier):
                await self._handle_event(event)

        self.inbox.post(expect)

    def abandon(self, checkpoint: int) -> None:
        """Post that the state for this checkpoint is dropped. Its barrier is still passed on."""
        self.inbox.post(lambda _: self.barriers.abandon(checkpoint))

    def drain(self) -> None:
        """Post that the task brings no more input into the job, and goes to the end of what was read."""

        def drain(_: BoundaryOutput) -> None:
            if self.feeder is not None:
                self.feeder.stop(EndOfInput())
            elif self._boundary is not None:
                self._boundary.drain()

        self.inbox.post(drain)

    def parts(self) -> Mapping[int | None, PartState]:
        """Return how far the partitions of the source have been read; without a source, the input is one part."""
        if self.feeder is None:
            waits = any(port.peek() is not None for port in self.inbox.ports)
            return {None: PartState.READING if waits else PartState.AT_END}
        return self.feeder.parts(self.positions)

    # -- turns -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle one batch or control record after the other, and wait while there is none.

        It returns when the input has ended, or when a barrier with ``suspend`` has passed.
        """
        if not self.ended:
            self._begin()
        poll, accept, posted = self.inbox.poll, self.inbox.accept, self.inbox.posted
        polled: Polled | None
        while not self.ended:
            if posted and self.inbox.served is None:  # As poll does, without a call: each round of a loop comes here.
                polled = None, posted.popleft()
            else:
                try:
                    polled = poll()
                except StreamiterError as error:  # Records set aside exceed the disk limit, or are not plain data.
                    raise RecordFailure(self.first.step.name) from error
            if polled is None:
                if self._rounds is not None and await self._rounds.tell_ended_inputs():
                    await self._after_handling()
                    await self.clear_lanes()
                    continue
                self._batches_in_a_row = self._records_in_a_row = self._seconds_in_a_row = 0
                if self.inbox.has_parked:
                    self._held_since_s = self._now_s()
                self.inbox.rests = True
                await self.inbox.wait()
                self.inbox.rests = False
                if self._held_since_s is not None:
                    self._held_s += self._now_s() - self._held_since_s
                    self._held_since_s = None
                continue
            port, message = polled
            self.progress.handled += 1
            self._handling_since_s = began_s = self._now_s()
            if is_control := isinstance(message, Control):
                self.progress.origin = None
            if isinstance(message, Control) and not isinstance(message, Posted):
                for event in (message,) if port is None else accept(port, message):
                    await self._handle_event(event)
            else:
                records_before = self.first.records_in
                try:
                    if isinstance(message, Posted):
                        # If the snapshot is taken already, a job that is restored from it makes the notice again.
                        if (
                            self.barriers.suspension is _RUNS
                            and (called := message.notice(self._boundary_out)) is not None
                        ):
                            await called
                    elif port is not None and (under_way := self._handle_batch(port, message)) is not None:
                        await (self._noting_others(under_way) if self._awaited else under_way)
                except RecordFailure as failure:
                    if isinstance(message, SourceBatch) and failure.within is None:
                        failure.within = within_batch(message)
                    raise
                except Exception as error:  # As FailuresOf does, in a tenth of the time.
                    if self._boundary is None:
                        raise
                    raise RecordFailure(self.first.step.name) from error
                if port is not None and (size := port.turn_size) is not None:
                    seconds, handled = self._now_s() - began_s, self.first.records_in - records_before
                    self._seconds_in_a_row += seconds
                    if handled:
                        size.took(handled, seconds)
            if self._looks_after:
                await self._after_handling()
            for lane in self._lanes:
                if lane.waiting:
                    await self.clear_lanes()
                    break
            self._handled_s += self._now_s() - began_s
            self._handling_since_s = None
            if self._others_ran:
                # Others have run, so the next batch can begin at once: beside a step in a thread, they run again.
                self._others_ran = False
                self._batches_in_a_row = self._records_in_a_row = self._seconds_in_a_row = 0
                continue
            self._batches_in_a_row += 1 if port is not None else 2  # A notice may be a whole round of a loop.
            if (
                (self._in_loop and not is_control)
                or self._batches_in_a_row >= _BATCHES_IN_A_ROW
                or self._records_in_a_row >= BATCH_RECORDS
                or 2 * self._seconds_in_a_row >= TURN_S
            ):
                self._batches_in_a_row = self._records_in_a_row = self._seconds_in_a_row = 0
                self.inbox.rests = True
                await GIVE_WAY
                self.inbox.rests = False
        for channel in self._feedback_channels:
            channel.close()  # Feedback to a task that has ended is dropped, and not kept until the job ends.

    async def _noting_others(self, under_way: Awaitable[None]) -> None:
        """Await the handling of a batch; note whether other tasks have run meanwhile."""
        others = asyncio.get_running_loop().call_soon(self._note_others)
        try:
            await under_way
        finally:
            others.cancel()

    def _note_others(self) -> None:
        self._others_ran = True

    async def _after_handling(self) -> None:
        if not self.ended:
            if self._rounds is not None:
                await self._rounds.tell_ended_inputs()
            if self._wanted is not None:
                self._update_wanted_inputs()
            if self.barriers.clocks is not None:
                self.barriers.arrange_stop()
        if self.chain.timed:
            await self.chain.catch_up()

    async def clear_lanes(self) -> None:
        for lane in self._lanes:
            if lane.waiting:
                self.waits_for_room_in = lane.channel
                await lane.clear(self._clock)
                self._batches_in_a_row = self._records_in_a_row = self._seconds_in_a_row = 0
                self.waits_for_room_in = None

    def _update_wanted_inputs(self) -> None:
        if self._wanted is None or (self._rounds is not None and self._rounds.epoch is None):
            return
        try:
            self.inbox.want(self._wanted())
        except Exception as error:
            raise RecordFailure(self.first.step.name) from error

    def _handle_for_producer(self, port: Port, feedback: DataBatch) -> bool:
        """Handle feedback in the turn of its producer, while this task rests; return whether it has.

        No operator follows in this task, so the producer calls no function of the user but those that give keys.
        """
        for lane in self._lanes:
            if lane.waiting:
                return False
        self.progress.handled += 1
        self._handle_batch(port, feedback)
        for lane in self._lanes:
            if lane.waiting:
                self.inbox.post(nothing)
                break
        return True

    def _handle_batch(self, port: Port, message: DataBatch | SourceBatch) -> Awaitable[None] | None:
        """Handle a batch; return what to await until it is handled. Mostly that is nothing, which saves a coroutine."""
        progress, records, origin = self.progress, message.records, message.origin
        epoch = message.epoch if isinstance(message, DataBatch) else 0
        progress.epoch, progress.origin = epoch, origin
        progress.records = None if origin is None or origin.originals is None else records
        self._records_in_a_row += len(records)
        if self._boundary is not None:
            self.first.count(records)
            self._boundary_out.port, self._boundary_out.origin = port.index, origin
            return self._boundary.on_batch(port.input_name, records, epoch, self._boundary_out)
        if self._is_direct:
            self._entries[port.input_name](records)
            if isinstance(message, SourceBatch):
                self.positions.update(message.positions)
            return None
        return self._handle_slowly(port, message, epoch)

    async def _handle_slowly(self, port: Port, message: DataBatch | SourceBatch, epoch: int) -> None:
        """Handle a batch of an operator that is awaited, works in rounds, or says what it wants to read."""
        name, records = port.input_name, message.records
        if self._rounds is not None and not await self._enter_round(self._rounds, port, records, epoch):
            return
        if (self._wanted is not None or self.barriers.clocks is not None) and name not in self._by_batch:
            await self._handle_while_wanted(port, records, epoch)
        elif self._awaited:
            await self._async_entries[name](records)
        else:
            self._entries[name](records)
        if isinstance(message, SourceBatch):
            self.positions.update(message.positions)

    async def _enter_round(self, rounds: Rounds, port: Port, records: Batch, epoch: int) -> bool:
        """Make an operator for the epoch of these records, if necessary; return whether it wants them now."""
        if rounds.epoch != epoch:
            if rounds.epoch is not None:
                # Records of several epochs remain only if the iteration has ended.
                self.progress.is_ending = True
                await rounds.terminate()
            await rounds.begin(epoch)
            self._bind()
            await rounds.tell_ended_inputs(but=port.input_name)
        elif not await rounds.tell_ended_inputs(but=port.input_name):
            return True
        # An ended input may change which inputs are wanted: the record before may have been the last of its input.
        self._update_wanted_inputs()
        self.progress.epoch = epoch
        if self.inbox.may_continue(port):
            return True
        self.inbox.put_back(port, records, epoch, self.progress.origin)
        return False

    async def _handle_while_wanted(self, port: Port, records: Batch, epoch: int) -> None:
        """Handle records one by one, because each may change which inputs are wanted."""
        name, origin = port.input_name, self.progress.origin
        for index in range(len(records)):
            record = slice_batch(records, index, index + 1)
            if origin is not None and origin.originals is not None:
                self.progress.origin, self.progress.records = origin.taken(range(index, index + 1)), record
            if self._awaited:
                await self._async_entries[name](record)
            else:
                self._entries[name](record)
            self.progress.handled += 1
            self._update_wanted_inputs()
            if self.barriers.clocks is not None:
                self.barriers.arrange_stop()
            if index + 1 < len(records) and not self.inbox.may_continue(port):
                rest = slice_batch(records, index + 1, len(records))
                self.inbox.put_back(port, rest, epoch, origin and origin.taken(range(index + 1, len(records))))
                return

    # -- control records -------------------------------------------------------------------------------

    async def _handle_event(self, event: Control) -> None:
        if self.barriers.suspension is not _RUNS and not isinstance(event, BarrierReturned):
            return  # The snapshot is taken already. A job that is restored from it makes this event again.
        if isinstance(event, CheckpointBarrier):
            await self.barriers.pass_barrier(event)
            self.ended = self.suspended
        elif isinstance(event, BarrierReturned):
            self.barriers.barrier_returned(event)
            self.ended = self.suspended
        elif self._boundary is not None:
            try:
                if not isinstance(event, EventTimeWatermark):
                    await self._boundary.on_control(event, self._boundary_out)
                elif self.first.step.watermarked:
                    await self._boundary.on_event_time(event, self._boundary_out)
            except RecordFailure:
                raise
            except Exception as error:
                raise RecordFailure(self.first.step.name) from error
        elif isinstance(event, InputEnded):
            if self._rounds is None:  # With rounds, an input ends in each round.
                await self.chain.input_ended(self.first, event.input_name)
        else:
            await self.chain.pass_on(event, after_first=False)
            if isinstance(event, EndOfInput):
                self.ended = True

    async def _end(self, end: EndOfInput) -> None:
        await self.chain.pass_on(end, after_first=True)
        self.ended = True

    # -- state -----------------------------------------------------------------------------------------

    async def snapshot(self) -> TaskState:
        """Return the state of the task before it is encoded. It may change with the next record."""
        return {
            "operators": {each.step.name: await each.snapshot() for each in self._lasting_instances},
            "steps": [instance.step.name for instance in self.instances],
            "round": None if self._rounds is None else await self._rounds.snapshot(),
            "watermark": self.progress.watermark,
            "ended": self.ended,
            "interior input ended": self.chain.interior_input_ended,
            "positions": dict(self.positions if self.feeder is None else self.feeder.source.settled(self.positions)),
            "turns": turns_of(self.writers),
            "inbox": self.inbox.snapshot(),
        }

    async def _restore(self, state: TaskState) -> None:
        for instance in self._lasting_instances:
            if (of_step := state["operators"].get(instance.step.name)) is not None:
                await instance.restore(of_step)
        if self._rounds is not None:
            await self._rounds.restore(state["round"])
            self._bind()
        self.chain.restore(watermark=state["watermark"], interior_input_ended=state["interior input ended"])
        self.positions = dict(state["positions"] or {})
        restore_turns(self.writers, state["turns"])
        if state["inbox"] is not None:  # None: an input that had ended is read on.
            self.inbox.restore(state["inbox"], self._plain_data, state.get("logged"))
        self.ended = state["ended"]
