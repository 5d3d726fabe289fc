"""Epochs on unbounded data: ``epochs_every`` cuts a stream into groups of records, and a watermark follows each group.

A ``Stamper`` cuts by the number of records or at marks, and a ``TimedStamper`` by the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from streamiter.engine.graph.graph import SINGLE_INPUT
from streamiter.engine.inbox.order import BEFORE_ALL_EPOCHS
from streamiter.engine.inbox.port_progress import InputEnded
from streamiter.engine.plan.messages import shared_object
from streamiter.errors import GraphError
from streamiter.flow.building import add_next_step, loop_of
from streamiter.flow.graph_checks import check_count, check_seconds, check_user_function
from streamiter.flow.options import StepOptions
from streamiter.flow.stream import Stream
from streamiter.iteration.stamping_pace import Silence, StampingClock, StampingPace
from streamiter.operators.declared_state import EVERY, GREATEST, SharedOperator, again, declared
from streamiter.operators.functions import fail_at, records_of
from streamiter.operators.operator import Boundary, BoundaryOutput, Context, Notice, OperatorFactory
from streamiter.operators.output import Output
from streamiter.values.records import Batch, Control, EndOfInput, EpochWatermark, Idle, slice_batch
from streamiter.values.times import Seconds

T = TypeVar("T")


def epochs_every(
    stream: Stream,
    *,
    records: int | None = None,
    seconds: Seconds | None = None,
    marks: Callable[[Any], object] | None = None,
    idle_timeout: Seconds | None = None,
    name: str | None = None,
) -> Stream:
    """Stamp a stream with epochs, so that listeners in an unbounded iteration are told of epochs on endless input.

    The records of each subtask are cut into groups. The first group has epoch 0, the next 1, …, and an
    ``EpochWatermark`` follows each group in-band. One of these options says where a group ends:

    - ``records=n``: after n records of the subtask.
    - ``seconds=s``: every s seconds of the job's clock, at all subtasks at the same time; a subtask without records in
      that time completes the epoch, too. If no subtask has records, no epoch ends.
    - ``marks=predicate``: at each record for which ``marks(record)`` is true (a row of ``Columns`` is a dict). The mark
      is not passed on. Two marks in a row make an epoch without records. If the predicate raises, the job ends, and the
      error names the record.

    When the input of a subtask ends, its last group ends, too.

    **Subtasks without input.** An epoch is complete when every subtask has completed it, so in synchronous training the
    model waits for the slowest subtask. A subtask without any partition delays no other: it completes the epochs of the
    others. With ``idle_timeout``, a subtask is silent if no record has arrived for this many seconds, since the start
    or since its last record. Its current group ends, smaller than the others, and it then completes the epochs of the
    others, which are trained on the records of the other subtasks. Later records of the silent subtask belong to the
    epoch after those that all others have completed, so no record is lost or late. Each time a partition falls silent,
    the model waits once for that time: choose a time that is longer than the pauses of a healthy partition. Without
    ``idle_timeout`` the others wait as long as the partition is silent. With ``seconds`` no subtask waits for a silent
    one, and ``idle_timeout`` has no effect.

    This holds for the subtasks of one step: if two streams are stamped separately, an iteration waits for the slower
    one. Stamp their union to avoid this.

    Raises GraphError inside an iteration body, and unless exactly one of ``records``, ``seconds``, ``marks`` is given.

    >>> from streamiter import Flow, Operator
    >>> class WithEpoch(Operator):
    ...     def open(self, context):
    ...         self.context = context
    ...     def process(self, record, out):
    ...         out.emit((self.context.epoch, record))
    >>> flow = Flow("groups")
    >>> lines = flow.from_items(["a", "b", "--", "c", "d", "e"])
    >>> by_count = epochs_every(lines, records=4).process(WithEpoch).collect()
    >>> by_mark = epochs_every(lines, marks=lambda line: line == "--").process(WithEpoch).collect()
    >>> by_time = epochs_every(lines, seconds=3600).process(WithEpoch).collect()
    >>> flow.run().state, by_count.items
    ('finished', [(0, 'a'), (0, 'b'), (0, '--'), (0, 'c'), (1, 'd'), (1, 'e')])
    >>> by_mark.items
    [(0, 'a'), (0, 'b'), (1, 'c'), (1, 'd'), (1, 'e')]
    >>> by_time.items
    [(0, 'a'), (0, 'b'), (0, '--'), (0, 'c'), (0, 'd'), (0, 'e')]
    """
    if not isinstance(stream, Stream):
        raise GraphError(f"epochs_every: expected a stream, given {stream!r}; write epochs_every(stream, …)")
    step = name or "epochs_every"
    _check_one_of(records=records, seconds=seconds, marks=marks)
    if records is not None:
        check_count(records, "records", step=step)
    seconds = check_seconds(seconds, "seconds", "end epochs by records or marks", step=step)
    idle_timeout = check_seconds(idle_timeout, "idle_timeout", "wait for silent partitions", step=step)
    if marks is not None:
        check_user_function(marks, "epochs_every(marks)", ["record"], step=name)
    if stream.flow.graph.loop is not None or loop_of(stream) is not None:
        raise GraphError(
            f"epochs_every: expected a stream outside an iteration body, given {stream.name!r} inside; "
            "stamp the data stream before it is passed to the iteration"
        )
    factory: OperatorFactory
    if seconds is not None:
        factory = partial(TimedStamper, seconds)
    elif marks is not None:
        factory = partial(Stamper, groups_up_to_marks(marks), idle_timeout)
    elif records is not None:
        factory = partial(Stamper, groups_of(records), idle_timeout)
    options: StepOptions = {"name": name, "parallelism": stream.parallelism}
    output = add_next_step(
        {SINGLE_INPUT: stream}, "epochs_every", factory, options, shape="iteration", begins_epochs=True
    )
    return Stream(stream.flow, output)


def _check_one_of(**ways: Any) -> None:
    given = [way for way, value in ways.items() if value is not None]
    if len(given) != 1:
        raise GraphError(
            f"epochs_every: expected one of {', '.join(ways)}, given {' and '.join(given) or 'none of them'}; "
            f"{'leave out all but one' if given else 'write epochs_every(stream, records=1000)'}"
        )


class CatchingUp(SharedOperator, Boundary):
    """Base of the stampers: keeps the epoch that other subtasks have completed, as it was told last.

    With another parallelism all subtasks continue in the furthest epoch of any, so that no record is late.
    """

    gives_epochs = True
    _post: Callable[[Notice], None]
    _epoch = declared(0, share=GREATEST)
    _ended = declared(False, share=EVERY)
    _reached = BEFORE_ALL_EPOCHS

    def catch_up(self, epoch: int, due_in_s: float = 0.0) -> None:
        """Take the news of other subtasks; the task completes the epochs once for all news that come before."""
        is_new = self._reached < self._epoch <= epoch
        self._reached = max(self._reached, epoch)
        if is_new:
            self._post(self._complete_others)

    async def _complete_others(self, out: BoundaryOutput) -> None:
        """Complete the epochs that others have completed."""
        raise NotImplementedError


def shared_by_subtasks(context: Context, create: Callable[[], T]) -> T:
    """Return the object that all subtasks of a step report to; in another process than its own, what stands for it."""
    return context.scope.get(
        ("stamping", context.name), lambda: shared_object(context.scope, f"stamping of {context.name}", create)
    )


class Stamper(CatchingUp):
    """Gives epochs to the records of its subtask by their number or at marks; it cuts batches where an epoch ends.

    A subtask without input completes the epochs of the others: one without any partition, or one that no record has
    reached for ``idle_timeout_s``. If it is told late, and has records again, its current group ends early.
    """

    _count = declared(0, share=again(0))
    """The number of records of that epoch; with another parallelism a new group begins."""
    _idle = declared(False, share=again(False))

    def __init__(self, cut: CutEpochs, idle_timeout_s: float | None) -> None:
        self._cut = cut
        self._idle_timeout_s = idle_timeout_s

    def open(self, context: Context) -> None:
        self._step = context.name
        self._index = context.subtask_index
        self._post = context.post
        self._pace = shared_by_subtasks(context, lambda: StampingPace(context.parallelism))
        self._pace.join(self._index, self)
        self._silence = Silence(context, self._idle_timeout_s, self._become_idle)
        self._silence.start()

    def close(self) -> None:
        self._silence.stop()

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if self._idle:
            self._idle = False
            self._pace.set_active(self._index, self._epoch - 1)
            self._silence.start()
        self._silence.interrupt()
        for piece, ends_epoch in self._cut(records, self._count, self._step):
            if len(piece):
                out.emit_batch(piece, self._epoch)
                self._count += len(piece)
            if ends_epoch:
                await self._complete(out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            await self._end(out)
        elif isinstance(control, Idle):
            await self._become_idle(out)
        elif isinstance(control, EndOfInput):
            await out.control(EndOfInput())

    async def _complete(self, out: BoundaryOutput) -> None:
        await out.control(EpochWatermark(self._epoch))
        self._pace.complete_epoch(self._index, self._epoch)
        self._epoch += 1
        self._count = 0

    async def _end(self, out: BoundaryOutput) -> None:
        self._silence.stop()
        if self._count:
            await self._complete(out)
        self._ended = True
        self._pace.end(self._index, self._epoch - 1)

    async def _become_idle(self, out: BoundaryOutput) -> None:
        self._silence.stop()
        if self._count:
            await self._complete(out)
        self._idle = True
        self._pace.set_idle(self._index)

    async def _complete_others(self, out: BoundaryOutput) -> None:
        if self._reached >= self._epoch:
            await out.control(EpochWatermark(self._reached))
            self._epoch = self._reached + 1
            self._count = 0
            if not (self._idle or self._ended):
                self._pace.complete_epoch(self._index, self._reached)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._pace.complete_epoch(self._index, self._epoch - 1)
        if self._ended:
            self._pace.end(self._index, self._epoch - 1)
        elif self._idle:
            self._pace.set_idle(self._index)
        if self._ended or self._idle:
            self._silence.stop()

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.at_start()


class TimedStamper(CatchingUp):
    """Gives epochs to the records of its subtask by time: all belong to the current epoch of the step's clock."""

    _has_records = declared(False, share=again(False))
    """Whether it has passed on records of that epoch."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due_s = 0.0
        """When the clock ends the next epoch, as it has told last."""

    def open(self, context: Context) -> None:
        self._index = context.subtask_index
        self._post = context.post
        self._now_s = context.clock.monotonic_s
        self._clock = shared_by_subtasks(context, lambda: StampingClock(context.clock, self._seconds))
        self._clock.join(self._index, self)

    def catch_up(self, epoch: int, due_in_s: float = 0.0) -> None:
        self._due_s = self._now_s() + due_in_s
        super().catch_up(epoch, due_in_s)

    def close(self) -> None:
        self._clock.leave(self._index)

    def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        out.emit_batch(records, self._epoch)
        if not self._has_records:
            self._has_records = True
            self._clock.add_records(self._index, self._epoch)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            if self._has_records:
                await self._complete(self._epoch, out)
            self._ended = True
            self._clock.leave(self._index)
        elif isinstance(control, EndOfInput):
            await out.control(EndOfInput())

    async def _complete_others(self, out: BoundaryOutput) -> None:
        await self._complete(self._reached, out)

    async def _complete(self, epoch: int, out: BoundaryOutput) -> None:
        if epoch >= self._epoch:
            await out.control(EpochWatermark(epoch))
            self._epoch = epoch + 1
            self._has_records = False

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"remaining_s": self._due_s - self._now_s()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._clock.resume_after(self._index, self._epoch - 1, state["remaining_s"])
        if self._has_records:
            self._clock.add_records(self._index, self._epoch)
        if self._ended:
            self._clock.leave(self._index)

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.at_start() | {"remaining_s": self._seconds}

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Let the furthest epoch of any subtask end after the shortest remaining time."""
        shares = super().redistribute(states, parallelism)
        furthest = [state for state in states if state["epoch"] == shares[0]["epoch"]]
        has_records = any(state["has records"] for state in furthest)
        remaining_s = min(state["remaining_s"] for state in states)
        return [share | {"has records": has_records, "remaining_s": remaining_s} for share in shares]


CutEpochs = Callable[[Batch, int, str], Iterator[tuple[Batch, bool]]]
"""Cuts a batch into pieces (some may be empty), each with whether its epoch ends after it.

Its arguments are the batch, the number of records that the epoch has already, and the name of the step for errors.
It keeps no state between two batches."""


def groups_of(size: int) -> CutEpochs:
    """Return a function that cuts groups of a number of records.

    >>> list(groups_of(3)(["b", "c", "d", "e"], 1, "stamp"))
    [(['b', 'c'], True), (['d', 'e'], False)]
    """

    def cut(batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        start, length = 0, len(batch)
        while start < length:
            # A restored step may now make smaller groups than its current one is already.
            missing = max(0, size - count)
            stop = min(length, start + missing)
            yield slice_batch(batch, start, stop), stop - start == missing
            start, count = stop, 0

    return cut


def groups_up_to_marks(marks: Callable[[Any], object]) -> CutEpochs:
    """Return a function that cuts groups of the records between two marks; the marks are left out.

    >>> list(groups_up_to_marks(lambda record: record == "|")(["a", "b", "|", "c"], 0, "stamp"))
    [(['a', 'b'], True), (['c'], False)]
    """

    def cut(batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        records, progress = records_of(batch)
        try:
            places = [index for index, record in enumerate(records) if marks(record)]
        except Exception as error:
            fail_at(batch, progress, error, Output(step))
        start = 0
        for place in places:
            yield slice_batch(batch, start, place), True
            start = place + 1
        yield slice_batch(batch, start, len(batch)) if start else batch, False

    return cut
