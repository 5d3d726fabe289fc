"""Epochs on unbounded data: groups of records, each followed by its epoch watermark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, final

from streamiter.clock import Clock, TimerHandle
from streamiter.errors import GraphError, user_line
from streamiter.flow.graph_checks import check_function, check_name, check_seconds
from streamiter.flow.stream import Stream
from streamiter.operators.functions import fail_at, records_of
from streamiter.operators.operator import Boundary, BoundaryOutput, Context, OperatorFactory
from streamiter.operators.output import Output
from streamiter.records import Batch, Control, EndOfInput, EpochWatermark, Idle, slice_batch
from streamiter.runtime.controls import InputEnded
from streamiter.runtime.gate_epochs import BEFORE_ALL_EPOCHS
from streamiter.runtime.graph import Step

__all__ = [
    "Stamper",
    "StampingClock",
    "TimedStamper",
    "epochs_every",
]


def epochs_every(
    stream: Stream,
    *,
    records: int | None = None,
    seconds: float | None = None,
    marks: Callable[[Any], object] | None = None,
    idle_timeout: float | None = None,
    name: str | None = None,
) -> Stream:
    """Stamp a stream with epochs, so that in an unbounded iteration listeners hear of them on endless input.

    The records of each subtask are cut into groups: the first gets epoch 0, the next 1, …, and each is
    followed in-band by its ``EpochWatermark``. One of these says where a group ends:

    - ``records=n``: after n records of the subtask.
    - ``seconds=s``: every s seconds of the job's clock, at all subtasks at the same time; what has no records
      in that time goes along. Where nobody has any, no epoch ends.
    - ``marks=predicate``: at each record for which ``marks(record)`` is true (a row of ``Columns`` is a dict).
      The mark is not passed on. Two in a row make an epoch without records. What the predicate raises ends
      the job, naming the record.

    When its input ends, a subtask's last group ends too.

    **Subtasks without input.** An epoch is complete when every subtask has completed it, so in synchronous
    training the model waits for the slowest. Not for a subtask that no partition belongs to: it goes along
    with the others. With ``idle_timeout`` neither for one that nothing has come to for so many seconds, since
    the start or since its last record: the group it is in ends, smaller than the others, and it goes along
    with them. Then each epoch is trained on the records of those who have some. What comes to it later is in
    the epoch after those that all others have completed, so nothing is lost and nothing comes late. The model
    waits that long once, each time a partition falls silent: choose a time that is longer than the pauses of
    a healthy one. Without it the others wait for as long as the partition is silent. With ``seconds`` nobody
    waits for a silent subtask, and it changes nothing.

    Subtasks go along with others of the same step only: of two streams that are stamped apart, an iteration
    waits for the slower. Stamp their union where that is not wanted.

    Raises GraphError inside an iteration body, and for other than one of ``records``, ``seconds``, ``marks``.

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
    check_name(name)
    step = name or "epochs_every"
    _check_one_of(records=records, seconds=seconds, marks=marks)
    _check_records(records)
    check_seconds(seconds, "seconds", "end epochs by records or marks", step=step)
    check_seconds(idle_timeout, "idle_timeout", "wait for silent partitions", step=step)
    if marks is not None:
        check_function(marks, "epochs_every(marks)", ["record"], step=name)
    flow = stream.flow
    if flow.loop is not None or stream.loop is not None:
        raise GraphError(
            f"epochs_every: expected a stream outside an iteration body, given {stream.name!r} inside; "
            "stamp the data stream before it is passed to the iteration"
        )
    edges = stream.edges()
    unique_name = flow.graph.unique_name(step, named=name is not None)
    stamper = Step(
        name=unique_name,
        parallelism=stream.parallelism,
        where=user_line(),
        factory=_factory(records, seconds, marks, idle_timeout),
        inputs=edges,
        has_lasting_name=name is not None and not flow.graph.is_numbered(unique_name),
        bounded=stream.is_bounded,
        stamped=True,
        shape="iteration",
    )
    flow.graph.add(stamper)
    return Stream(flow, stamper)


def _factory(
    records: int | None,
    seconds: float | None,
    marks: Callable[[Any], object] | None,
    idle_timeout: float | None,
) -> OperatorFactory:
    if seconds is not None:
        return lambda: TimedStamper(seconds)
    if marks is not None:
        return lambda: Stamper(GroupsUpToMarks(marks), idle_timeout)
    assert records is not None
    return lambda: Stamper(GroupsOf(records), idle_timeout)


def _check_one_of(**ways: Any) -> None:
    given = [way for way, value in ways.items() if value is not None]
    if len(given) != 1:
        raise GraphError(
            f"epochs_every: expected one of {', '.join(ways)}, given {' and '.join(given) or 'none of them'}; "
            f"{'leave out all but one' if given else 'write epochs_every(stream, records=1000)'}"
        )


def _check_records(records: Any) -> None:
    if records is not None and (isinstance(records, bool) or not isinstance(records, int) or records < 1):
        raise GraphError(
            f"epochs_every: expected records of at least 1, given {records!r}; use a whole number"
        )


class Stamper(Boundary):
    """Cuts batches where an epoch ends; without input it goes along with the others.

    Without input is who no partition belongs to, and who nothing has come to for ``idle_timeout_s``. What is
    posted to it is handled before what is in its channels: when data comes, it has gone along as far as the
    others have come, and when its input ends, nothing that was posted is still to come.

    The stamper: gives the records of its subtask epochs as they come, by their number or at marks.
    """

    gives_epochs = True

    def __init__(self, groups: EpochGrouping, idle_timeout_s: float | None) -> None:
        self._groups = groups
        self._idle_timeout_s = idle_timeout_s
        self._epoch = 0
        self._count = 0
        """Records of that epoch."""
        self._idle = False
        self._ended = False

    def open(self, context: Context) -> None:
        self._step = context.name
        self._index = context.subtask_index
        self._post = context.post
        self._pace: StampingPace = context.scope.get(
            ("stamping", context.name), lambda: StampingPace(context.parallelism)
        )
        self._silence = Silence(context, self._idle_timeout_s)
        self._silence.begin()

    def close(self) -> None:
        self._silence.stop()

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if self._idle:
            self._wake_up()
        self._silence.broken()
        for piece, ends_epoch in self._groups.cut(records, self._count, self._step):
            if len(piece):
                out.emit_batch(piece, self._epoch)
                self._count += len(piece)
            if ends_epoch:
                await self._complete(out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            await self._end(out)
        elif isinstance(control, Idle):
            await self._fall_idle(out)
        elif isinstance(control, SilenceDue):
            if self._silence.has_lasted():
                await self._fall_idle(out)
        elif isinstance(control, GoAlong):
            self._pace.told(self._index)
            await self._go_along(self._pace.reached, out)
        elif isinstance(control, EndOfInput):
            await out.control(EndOfInput())

    async def _complete(self, out: BoundaryOutput) -> None:
        await out.control(EpochWatermark(self._epoch))
        self._pace.has_completed(self._index, self._epoch)
        self._epoch += 1
        self._count = 0

    async def _end(self, out: BoundaryOutput) -> None:
        self._silence.stop()
        if self._count:
            await self._complete(out)
        self._ended = True
        self._pace.has_ended(self._index, self._epoch - 1)

    async def _fall_idle(self, out: BoundaryOutput) -> None:
        self._silence.stop()
        if self._count:
            await self._complete(out)
        self._idle = True
        self._pace.is_idle(self._index, self._post)

    def _wake_up(self) -> None:
        self._idle = False
        self._pace.goes_on(self._index, self._epoch - 1)
        self._silence.begin()

    async def _go_along(self, reached: int, out: BoundaryOutput) -> None:
        if reached >= self._epoch:
            await out.control(EpochWatermark(reached))
            self._epoch = reached + 1

    def snapshot(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "count": self._count, "idle": self._idle, "ended": self._ended}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._count = state["count"]
        self._idle = state["idle"]
        self._ended = state["ended"]
        self._pace.has_completed(self._index, self._epoch - 1)
        if self._ended:
            self._pace.has_ended(self._index, self._epoch - 1)
        elif self._idle:
            self._pace.is_idle(self._index, self._post)
        if self._ended or self._idle:
            self._silence.stop()

    @staticmethod
    def redistribute(states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """All go on in the epoch of whoever has come furthest: nothing comes late, and groups begin anew."""
        epoch = max(state["epoch"] for state in states)
        ended = all(state["ended"] for state in states)
        return [{"epoch": epoch, "count": 0, "idle": False, "ended": ended} for _ in range(parallelism)]


class TimedStamper(Boundary):
    """Passes records on in the epoch under way, until the clock of its step ends that.

    The timed stamper: gives the records of its subtask epochs by the clock.
    """

    gives_epochs = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._epoch = 0
        self._has_records = False
        """Whether some are of that epoch."""
        self._ended = False

    def open(self, context: Context) -> None:
        self._index = context.subtask_index
        self._clock: StampingClock = context.scope.get(
            ("stamping", context.name), lambda: StampingClock(context.clock, self._seconds)
        )
        self._clock.join(self._index, context.post)

    def close(self) -> None:
        self._clock.leave(self._index)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        out.emit_batch(records, self._epoch)
        self._has_records = True
        self._clock.has_records(self._epoch)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, GoAlong):
            self._clock.told(self._index)
            await self._complete(self._clock.last_ended, out)
        elif isinstance(control, InputEnded):
            if self._has_records:
                await self._complete(self._epoch, out)
            self._ended = True
            self._clock.leave(self._index)
        elif isinstance(control, EndOfInput):
            await out.control(EndOfInput())

    async def _complete(self, epoch: int, out: BoundaryOutput) -> None:
        if epoch >= self._epoch:
            await out.control(EpochWatermark(epoch))
            self._epoch = epoch + 1
            self._has_records = False

    def snapshot(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "has records": self._has_records,
            "ended": self._ended,
            "remaining_s": self._clock.remaining_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._has_records = state["has records"]
        self._ended = state["ended"]
        self._clock.go_on_after(self._epoch - 1, state["remaining_s"])
        if self._has_records:
            self._clock.has_records(self._epoch)
        if self._ended:
            self._clock.leave(self._index)

    @staticmethod
    def redistribute(states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """All go on in the epoch of whoever has come furthest, until the time comes that was to come."""
        epoch = max(state["epoch"] for state in states)
        shared = {
            "epoch": epoch,
            "has records": any(state["has records"] and state["epoch"] == epoch for state in states),
            "ended": all(state["ended"] for state in states),
            "remaining_s": min(state["remaining_s"] for state in states),
        }
        return [dict(shared) for _ in range(parallelism)]


class EpochGrouping(Protocol):
    """A way to cut. It keeps nothing between two batches.

    Where the records of a subtask are cut into epochs, one class for each way.
    """

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """The pieces of a batch (some may be empty), each with whether its epoch ends behind it.

        ``count`` is how many records the epoch has already; ``step`` is for errors.
        """


@final
class GroupsOf:
    """Groups of so many records.

    >>> list(GroupsOf(3).cut(["b", "c", "d", "e"], 1, "stamp"))
    [(['b', 'c'], True), (['d', 'e'], False)]
    """

    def __init__(self, records: int) -> None:
        self._records = records

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """See :class:`Groups`."""
        start, length = 0, len(batch)
        while start < length:
            # A restored step may have been told to make smaller groups than the one it is in.
            missing = max(0, self._records - count)
            stop = min(length, start + missing)
            yield slice_batch(batch, start, stop), stop - start == missing
            start, count = stop, 0


@final
class GroupsUpToMarks:
    """Groups of the records between two marks, which are left out.

    >>> list(GroupsUpToMarks(lambda record: record == "|").cut(["a", "b", "|", "c"], 0, "stamp"))
    [(['a', 'b'], True), (['c'], False)]
    """

    def __init__(self, marks: Callable[[Any], object]) -> None:
        self._marks = marks

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """See :class:`Groups`."""
        start = 0
        for mark in self._places(batch, step):
            yield slice_batch(batch, start, mark), True
            start = mark + 1
        yield slice_batch(batch, start, len(batch)) if start else batch, False

    def _places(self, batch: Batch, step: str) -> list[int]:
        marks = self._marks
        records, progress = records_of(batch)
        try:
            return [index for index, record in enumerate(records) if marks(record)]
        except Exception as error:
            fail_at(batch, progress, error, Output(step))


@final
class StampingClock:
    """Shared by the subtasks of one step, in one event loop.

    Every so many seconds, counted from when the first subtask has joined, the epoch under way ends if any of
    them has records of it. They are told, with at most one ``GoAlong`` under way to each; one that is blocked
    meanwhile goes along with several epochs at once. So what comes in at the same time is of the same epoch,
    at whichever subtask.

    The clock of a stamping step: ends its epochs at all subtasks at once.

    >>> import asyncio
    >>> from streamiter.testing import VirtualClock
    >>> async def main():
    ...     clock, posted = VirtualClock(), []
    ...     epochs = StampingClock(clock, seconds=5.0)
    ...     epochs.join(0, posted.append)
    ...     await clock.advance(5.0)
    ...     before = epochs.last_ended, len(posted)
    ...     epochs.has_records(0)
    ...     await clock.advance(5.0)
    ...     return before, (epochs.last_ended, len(posted))
    >>> asyncio.run(main())
    ((-1, 0), (0, 1))
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._due_s = clock.monotonic_s() + seconds
        self._timer: TimerHandle | None = None
        self._posts: dict[int, Callable[[Control], None]] = {}
        self._told: set[int] = set()
        self._last_with_records = BEFORE_ALL_EPOCHS
        self.last_ended = BEFORE_ALL_EPOCHS

    @property
    def remaining_s(self) -> float:
        """Seconds until the time comes again."""
        return self._due_s - self._clock.monotonic_s()

    def join(self, subtask: int, post: Callable[[Control], None]) -> None:
        """A subtask is there."""
        self._posts[subtask] = post
        if self._timer is None:
            self._wait()

    def leave(self, subtask: int) -> None:
        """A subtask has no more records; when all have left, the clock stops."""
        self._posts.pop(subtask, None)
        if not self._posts:
            self._stop()

    def has_records(self, epoch: int) -> None:
        """A subtask has passed on records of ``epoch``."""
        self._last_with_records = max(self._last_with_records, epoch)

    def told(self, subtask: int) -> None:
        """A subtask has heard ``GoAlong``."""
        self._told.discard(subtask)

    def go_on_after(self, epoch: int, remaining_s: float) -> None:
        """A joined subtask is restored: it had gone along with ``epoch``, so the others have to as well.

        The time comes again when as much of it has passed as was left at the snapshot.
        """
        self.last_ended = max(self.last_ended, epoch)
        self._tell()
        self._due_s = self._clock.monotonic_s() + min(max(0.0, remaining_s), self._seconds)
        self._stop()
        self._wait()

    def _wait(self) -> None:
        self._timer = self._clock.call_later(max(0.0, self.remaining_s), self._time_has_come)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_has_come(self) -> None:
        # From one due time to the next, whatever it is now: lateness must not add up. After a pause of the
        # whole machine only once.
        late_s = max(0.0, -self.remaining_s)
        self._due_s += self._seconds * (1 + late_s // self._seconds)
        self._wait()
        if self._last_with_records > self.last_ended:
            self.last_ended = self._last_with_records
            self._tell()

    def _tell(self) -> None:
        for subtask, post in self._posts.items():
            if subtask not in self._told:
                self._told.add(subtask)
                post(GoAlong())


@final
class GoAlong(Control):
    """Posted to a subtask: others have come further."""

    __slots__ = ()


@final
class StampingPace:
    """Shared by the subtasks of one step, in one event loop.

    Idle ones are told, with at most one ``GoAlong`` under way to each, when the slowest of the others has
    completed an epoch. Those that have ended are waited for no more. Where nobody has input, all go along to
    the last epoch that anyone has completed: what was passed on is not to wait for what may never come.

    How far the subtasks of a stamping step have come, so that those without input hold nobody back.

    >>> pace, posted = StampingPace(subtasks=3), []
    >>> pace.is_idle(2, posted.append)
    >>> pace.has_completed(0, 4), len(posted)
    (None, 0)
    >>> pace.has_completed(1, 3), len(posted)
    (None, 1)
    >>> pace.told(2), pace.reached
    (None, 3)
    """

    def __init__(self, subtasks: int) -> None:
        self._completed = dict.fromkeys(range(subtasks), BEFORE_ALL_EPOCHS)
        """By subtask that has input: the last epoch it has completed."""
        self._idle: dict[int, Callable[[Control], None]] = {}
        self._furthest = BEFORE_ALL_EPOCHS
        self._told: set[int] = set()

    @property
    def reached(self) -> int:
        """The epoch that those without input go along to."""
        return min(self._completed.values(), default=self._furthest)

    def has_completed(self, subtask: int, epoch: int) -> None:
        """A subtask with input has completed an epoch."""
        self._completed[subtask] = epoch
        self._furthest = max(self._furthest, epoch)
        if self._idle:
            self._tell()

    def has_ended(self, subtask: int, epoch: int) -> None:
        """A subtask completes no further epoch after this one."""
        self._completed.pop(subtask, None)
        self._idle.pop(subtask, None)
        self._furthest = max(self._furthest, epoch)
        self._tell()

    def is_idle(self, subtask: int, post: Callable[[Control], None]) -> None:
        """A subtask has no input for now."""
        self._completed.pop(subtask, None)
        self._idle[subtask] = post
        self._tell()

    def goes_on(self, subtask: int, epoch: int) -> None:
        """A subtask that was idle has input again; it has gone along up to this epoch."""
        self._idle.pop(subtask, None)
        self._completed[subtask] = epoch

    def told(self, subtask: int) -> None:
        """A subtask has heard ``GoAlong``."""
        self._told.discard(subtask)

    def _tell(self) -> None:
        if self.reached == BEFORE_ALL_EPOCHS:
            return
        for subtask, post in self._idle.items():
            if subtask not in self._told:
                self._told.add(subtask)
                post(GoAlong())


# Silence counts as over this much early: rounding in the sum of a time and a delay must not put it off.
_ROUNDING_S: Final = 1e-6


@final
class SilenceDue(Control):
    """Posted to a subtask: it is time to ask whether the silence has lasted."""

    __slots__ = ()


@final
class Silence:
    """Follows how long nothing has come; with ``timeout_s`` None it never lasts long enough.

    A task that is blocked handles nothing, although there is something for it: what it is posted comes first
    when it goes on, and only then what has come meanwhile. So silence has lasted only if it was asked for
    before, half the time earlier, and nothing has come in between. It begins anew in a restored job, whose
    sources may need a while.

    Silence: when nothing has come to a subtask for so long that nothing is to be expected.
    """

    def __init__(self, context: Context, timeout_s: float | None) -> None:
        self._clock = context.clock
        self._post = context.post
        self._timeout_s = timeout_s
        self._since_s = 0.0
        self._was_asked_for = False
        self._timer: TimerHandle | None = None

    def begin(self) -> None:
        """From now on listen: ``SilenceDue`` is posted until it has lasted."""
        if self._timeout_s is not None:
            self.broken()
            self._ask_in(self._timeout_s / 2)

    def broken(self) -> None:
        """Something has come."""
        if self._timeout_s is not None:
            self._since_s = self._clock.monotonic_s()
            self._was_asked_for = False

    def has_lasted(self) -> bool:
        """``SilenceDue`` has come: whether the silence has lasted. If not, it will be asked for again."""
        assert self._timeout_s is not None
        missing_s = self._since_s + self._timeout_s - self._clock.monotonic_s()
        if not self._was_asked_for:
            self._was_asked_for = True
            missing_s = self._timeout_s / 2
        elif missing_s <= _ROUNDING_S:
            return True
        self._ask_in(missing_s)
        return False

    def stop(self) -> None:
        """Listen no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask_in(self, delay_s: float) -> None:
        self.stop()
        self._timer = self._clock.call_later(delay_s, lambda: self._post(SilenceDue()))
