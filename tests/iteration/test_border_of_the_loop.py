"""The border of a loop, and the numbers of its members."""

import asyncio
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from iteration.iteration_support import Endless, called, ended
from operators.operator_harness import stored
from runtime.inbox_run import spill_queue
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    Operator,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.engine.graph.feedback import FeedbackChannel, Surroundings
from streamiter.engine.inbox.inbox import Inbox, Posted
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.inbox.port_progress import InputEnded
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.engine.tasks.entries import EntryCounts
from streamiter.iteration import all_reduce, terminate_after
from streamiter.iteration.border import FEEDBACK, INITIAL, Head, JoinLoop, LoopMember
from streamiter.iteration.coordinator import LoopCoordinator, LoopDecisions, RestoredMember
from streamiter.iteration.marked_streams import Replayer
from streamiter.iteration.progress import Completed, Ended, LoopProgress, ReleasedEpoch
from streamiter.operators import Output
from streamiter.operators.operator import Boundary, BoundaryOutput, Context, JobScope, Notice, Progress
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Control, DataBatch, EndOfInput, EpochWatermark


class Passed(BoundaryOutput):
    """Keeps the output of a border operator: records with their epochs, and watermarks."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def emit_batch(self, records: Any, epoch: int) -> None:
        self.all += [(record, epoch) for record in records]

    async def room(self) -> None:
        """Return at once: this output always has room."""

    async def control(self, control: Control) -> None:
        kind = type(control).__name__
        self.all.append((kind, control.epoch) if isinstance(control, (EpochWatermark, EndOfInput)) else kind)

    def taken(self) -> list[Any]:
        """Return all output since the last call."""
        taken, self.all = self.all, []
        return taken


OPENED: list[Boundary | Inbox] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close the files of the operators and inboxes, as a task would."""
    yield
    while OPENED:
        OPENED.pop().close()


class Bench:
    """Drives one border operator as its task and its loop would."""

    def __init__(self, operator: LoopMember, coordinator: LoopCoordinator) -> None:
        self.operator = operator
        self.coordinator = coordinator
        self.out = Passed()
        self.posted: list[Notice] = []
        self.feedback = FeedbackChannel("tail → head", spill_queue())
        self.inbox = Inbox([Port(0, FEEDBACK, self.feedback)], make_queue=spill_queue)
        OPENED.extend((operator, self.inbox))
        operator.attach(
            Surroundings(
                member=0,
                feedback_channels=[],
                inbox=self.inbox,
                make_replay_cache=lambda memory_bytes: ReplayCache(
                    name="bench",
                    memory_limit_bytes=memory_bytes,
                    disk_limit_bytes=1 << 30,
                    directory=tempfile.gettempdir(),
                ),
            )
        )
        operator.open(
            Context(
                name="bench",
                subtask_index=0,
                parallelism=1,
                clock=SystemClock(),
                progress=Progress(),
                statistics=lambda: None,  # type: ignore[arg-type,return-value]
                scope=JobScope(),
                post=self.posted.append,
                set_timer=lambda *_: None,
                in_iteration=True,
                keyed=None,
                encode=PlainData().encode,
            )
        )

    async def feed(self, input_name: str, *records: Any, epoch: int = 0) -> None:
        """Pass records of one epoch to the operator."""
        if input_name != FEEDBACK:
            await self._handle(input_name, list(records), epoch)
            return
        self.feedback.put(DataBatch(list(records), epoch))
        while (polled := self.inbox.poll()) is not None:
            assert isinstance(polled[1], DataBatch)
            await self._handle(input_name, polled[1].records, polled[1].epoch)

    async def _handle(self, input_name: str, records: Any, epoch: int) -> None:
        if (under_way := self.operator.on_batch(input_name, records, epoch, self.out)) is not None:
            await under_way

    async def control(self, control: Control) -> None:
        """Pass a control record to the operator."""
        await self.operator.on_control(control, self.out)

    async def settle(self) -> list[Any]:
        """Handle the notices that were posted to the operator, and return its new output."""
        while self.posted:
            await called(self.posted.pop(0), self.out)
        return self.out.taken()


def joining(coordinator: LoopCoordinator, number: int) -> JoinLoop:
    def join(context: Context, member: LoopMember) -> tuple[LoopCoordinator, int]:
        coordinator.join(number, member)
        return coordinator, number

    return join


class OtherHead(LoopDecisions):
    """Another head, which stops at once."""

    def __init__(self, coordinator: LoopCoordinator, number: int) -> None:
        self.coordinator = coordinator
        self.number = number

    def stop(self, epoch: int) -> None:
        self.coordinator.stopped(self.number, epoch)


def complete(coordinator: LoopCoordinator) -> int:
    """Return the last complete epoch."""
    return coordinator.statistics([], []).epoch_complete


def head(ahead: int | None, *, others: int = 0) -> Bench:
    coordinator = LoopCoordinator(heads=["head"] * (1 + others), entrances=[], where="")
    for other in range(1, 1 + others):
        coordinator.join(other, OtherHead(coordinator, other))
    return Bench(Head(joining(coordinator, 0), ahead), coordinator)


def replayer(memory_bytes: int) -> Bench:
    coordinator = LoopCoordinator(heads=["head"], entrances=["replayer"], where="")
    return Bench(Replayer(joining(coordinator, 1), memory_bytes), coordinator)


async def test_feedback_that_is_set_aside_counts_as_input_of_its_head_once() -> None:
    """In the statistics of a synchronous loop, its head received the initial variables only."""
    first, counts = head(0), EntryCounts()
    first.inbox.aside.counts = counts
    await first.feed(FEEDBACK, 1, 2, epoch=1)
    first.inbox.admit_up_to(1)
    taken, more = first.inbox.aside.take(1)
    assert taken is not None
    assert not more
    assert (counts.records_in, counts.batches_in, first.inbox.aside.take(1)) == (2, 1, (None, False))


async def test_feedback_behind_the_end_of_the_iteration_is_not_kept() -> None:
    """Feedback of later epochs stayed on disk and in each checkpoint, and no epoch ever took it."""
    first = head(0)
    assert isinstance(first.operator, Head)
    first.operator.stop(1)
    await first.feed(FEEDBACK, 1, 2, epoch=2)
    await first.feed(FEEDBACK, 3, epoch=1)
    assert first.inbox.held_records == 1


async def test_a_head_that_stops_at_a_barrier_counts_no_feedback_if_the_iteration_ends_meanwhile() -> None:
    """The end set the last epoch of a head that dropped all feedback, and it counted feedback behind its state."""
    first = head(0)
    assert isinstance(first.operator, Head)
    first.inbox.only_feedback()
    first.operator.stop(2)
    await first.feed(FEEDBACK, 1, 2, epoch=1)
    assert (first.operator.received.state()["counts"], first.inbox.held_records) == ({"runs": []}, 0)


async def test_a_producer_sets_feedback_aside_itself_if_the_head_rests_or_it_is_its_own() -> None:
    """Feedback that came while the state was taken would have been in the snapshot, and its count would not."""
    first = head(0)
    inbox, [port] = first.inbox, first.inbox.feedback.ports

    def waits_in_channel(*, at_barrier: bool = False) -> bool:
        inbox.is_at_barrier = at_barrier
        before = inbox.held_records
        first.feedback.put(DataBatch([1], 1))
        first.feedback.put_control(EpochWatermark(0))
        in_channel = first.feedback.waiting > 0
        while inbox.poll() is not None:
            pass
        assert inbox.held_records == before + 1
        return in_channel

    assert waits_in_channel()
    port.is_own = True
    assert [waits_in_channel(at_barrier=at_barrier) for at_barrier in (False, True)] == [False, True]
    port.is_own, inbox.rests = False, True
    assert not waits_in_channel()


class _Thrice(Operator):
    """Counts a record up to 20, while the loop comes to rest, then feeds three records back, each in its own batch."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def process_number(self, number: int, out: Any) -> None:
        self.seen.append(number)
        for following in {20: range(21, 24)}.get(number, range(number + 1, min(number + 2, 21))):
            out.emit_batch([following])

    def process_nothing(self, record: int, out: Any) -> None:
        raise AssertionError(f"expected no record, given {record}")


async def test_feedback_that_a_producer_passes_on_for_the_head_waits_for_room() -> None:
    """Nobody cleared the lanes of a head that rested, and a record stayed there until another one came."""
    flow, seen = Flow("thrice"), list[int]()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        thrice = connect(number=variables[0], nothing=data[0]).process(lambda: _Thrice(seen), name="thrice")
        return IterationBodyResult([thrice], [])

    iterate_unbounded_streams([flow.from_items([0])], [flow.from_source(Endless())], body)
    job = await flow.start(channel_limits=ChannelLimits(records=2))
    await until(lambda: seen == [*range(24)])
    await job.stop("abort")


async def test_a_head_gives_way_while_it_sets_much_feedback_aside() -> None:
    """A head read all feedback of an epoch from disk in one turn, and no other task ran meanwhile."""
    first = head(0)
    for number in range(10):
        first.feedback.put(DataBatch([number], 1))
    turns = 0
    while (polled := first.inbox.poll()) is not None:
        assert isinstance(polled[1], Posted)
        turns += 1
    assert (turns, first.inbox.held_records, first.feedback.records) == (2, 10, 0)


async def test_a_head_reports_epochs_and_passes_watermarks_when_they_are_released() -> None:
    """A head sent a watermark before all heads had reported the epoch, so callbacks came too early."""
    bench = head(0, others=1)
    await bench.feed(INITIAL, 1)
    await bench.control(InputEnded(INITIAL))
    # Nothing of epoch 0 can follow, so steps that merge in order need not wait. Later watermarks wait for all heads.
    assert await bench.settle() == [(1, 0), ("EpochWatermark", 0)]
    assert bench.coordinator.statistics([], []).epoch_received == -1  # The other head has not reported the epoch.
    bench.coordinator.received(1, 0, 0)
    assert await bench.settle() == []
    await bench.feed(FEEDBACK, 4, epoch=1)
    await bench.control(EpochWatermark(1))
    assert await bench.settle() == []
    bench.coordinator.received(1, 1, 0)  # The count 1 of this head keeps the loop going.
    assert await bench.settle() == [(4, 1), ("EpochWatermark", 1)]
    await bench.control(EpochWatermark(2))
    bench.coordinator.received(1, 2, 0)
    assert await bench.settle() == [("EndOfInput", 2)]


@pytest.mark.parametrize("ahead", [None, 0])
async def test_a_restored_head_receives_logged_feedback_again_and_counts_all_feedback(ahead: int | None) -> None:
    """A restored head lost logged feedback.

    (100, 5) comes before the snapshot; (101, 5), (102, 5), (103, 6) and watermark 5 come between snapshot and barrier.
    """
    first = head(ahead, others=1)
    await first.control(InputEnded(INITIAL))
    for epoch in range(5):
        first.coordinator.received(1, epoch, 1)
        if epoch:
            await first.control(EpochWatermark(epoch))
        await first.settle()
    await first.feed(FEEDBACK, 100, epoch=5)
    assert await first.settle() == ([(100, 5)] if ahead is None else [])
    state = stored(first.operator.snapshot())()
    aside = stored(first.inbox.snapshot())()

    second = head(ahead)
    second.operator.restore(state)
    second.inbox.restore(aside, PlainData())
    assert complete(second.coordinator) == 4
    await second.feed(FEEDBACK, 101, 102, epoch=5)
    await second.feed(FEEDBACK, 103, epoch=6)
    assert isinstance(second.operator, Head)
    assert second.operator.received.state()["counts"] == {"runs": [[5, 5, 3], [6, 6, 1]]}
    free = [(101, 5), (102, 5), (103, 6)]
    assert await second.settle() == (free if ahead is None else [])
    await second.control(EpochWatermark(5))
    assert complete(second.coordinator) == 5
    of_5 = [] if ahead is None else [(100, 5), (101, 5), (102, 5)]
    assert await second.settle() == [*of_5, ("EpochWatermark", 5)]
    await second.control(EpochWatermark(6))
    assert await second.settle() == [*([] if ahead is None else [(103, 6)]), ("EpochWatermark", 6)]


def test_five_heads_of_two_variables_report_an_epoch_together() -> None:
    """A loop ended at a count of one head instead of the counts of all heads.

    Epoch 0 without feedback does not end the loop, epoch 2 without feedback does; one record at any head keeps it
    running; an epoch without criteria ends it.
    """
    for of_epoch_2, criteria, expected in (
        ([0, 0, 0, 0, 0], None, Ended(2)),
        ([0, 0, 3, 0, 0], None, Completed(2)),
        ([0, 0, 0, 0, 1], None, Completed(2)),
        ([4, 0, 0, 0, 1], 0, Ended(2)),
        ([4, 0, 0, 0, 1], 2, Completed(2)),
    ):
        progress = LoopProgress(heads=5, entrances=0, criteria_heads=0 if criteria is None else 1)
        more = [] if criteria is None else [criteria]
        for epoch, counts, last in (
            (0, [0] * 5 + [0 for _ in more], Completed(0)),
            (1, [0, 1, 0, 0, 0] + [1 for _ in more], Completed(1)),
            (2, of_epoch_2 + more, expected),
        ):
            decided = [progress.head_received(number, epoch=epoch, count=count) for number, count in enumerate(counts)]
            assert decided == [*([[]] * (len(counts) - 1)), [ReleasedEpoch(epoch), last]]


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
async def test_a_replayer_sends_all_its_records_in_each_released_epoch(memory_bytes: int) -> None:
    """A replayer sent other records in a later epoch than in epoch 0, or sent them before the epoch was released."""
    bench = replayer(memory_bytes)
    for start in (0, 4, 7):
        await bench.feed("input", *range(start, {0: 4, 4: 7, 7: 10}[start]))
    await bench.control(InputEnded("input"))
    assert await bench.settle() == [*((number, 0) for number in range(10)), ("EpochWatermark", 0)]
    bench.operator.advance(0)
    assert await bench.settle() == []
    for epoch in (1, 2):
        bench.operator.advance(epoch)
        expected = [*((number, epoch) for number in range(10)), ("EpochWatermark", epoch)]
        assert await bench.settle() == expected


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
async def test_a_replayer_restored_in_the_middle_of_epoch_0_replays_all_of_it(memory_bytes: int) -> None:
    """A restored replayer replayed only the records that came after the restore."""
    first = replayer(memory_bytes)
    await first.feed("input", *range(5))
    state = stored(first.operator.snapshot())()
    second = replayer(memory_bytes)
    second.operator.restore(state)
    await second.feed("input", *range(5, 10))
    await second.control(InputEnded("input"))
    assert await second.settle() == [*((number, 0) for number in range(5, 10)), ("EpochWatermark", 0)]
    second.operator.advance(0)
    second.operator.advance(1)
    assert await second.settle() == [*((number, 1) for number in range(10)), ("EpochWatermark", 1)]


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
async def test_a_replayer_restored_in_the_middle_of_a_replay_sends_the_rest(memory_bytes: int) -> None:
    """A restored replay started again, so its first records came twice."""
    first = replayer(memory_bytes)
    big = "x" * 300_000  # Each record is large enough to stay a batch of its own.
    for number in range(4):
        await first.feed("input", f"{number}{big}")
    await first.control(InputEnded("input"))
    first.operator.advance(0)
    await first.settle()
    first.operator.advance(1)
    await called(first.posted.pop(), first.out)
    sent = [record[0] for record, epoch in first.out.taken()]
    state = stored(first.operator.snapshot())()
    second = replayer(memory_bytes)
    second.operator.restore(state)
    rest = await second.settle()
    assert rest[-1] == ("EpochWatermark", 1)
    assert sent + [record[0] for record, epoch in rest[:-1]] == ["0", "1", "2", "3"]
    assert 0 < len(sent) < 4


async def test_the_end_comes_after_the_requested_replays() -> None:
    """Feedback that did not wait for the data ended the loop while the replay was epochs behind."""
    bench = replayer(1 << 20)
    await bench.feed("input", 7)
    await bench.control(InputEnded("input"))
    await bench.settle()
    for epoch in range(4):
        bench.operator.advance(epoch)
    bench.operator.terminate(4)
    assert await bench.settle() == [
        *(entry for epoch in (1, 2, 3) for entry in ((7, epoch), ("EpochWatermark", epoch))),
        ("EndOfInput", 4),
    ]


class OpensLate(Operator):
    """Opens after this many turns of the event loop. The operators before it in its task are opened after it."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def open(self, context: Any) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)

    def process(self, record: Any, out: Output) -> None:
        out.emit(record)


class Average(Operator):
    """Moves the variable by the numbers of an epoch; the result depends on their order."""

    epochs_in_order = True

    def __init__(self) -> None:
        self._value = 0.0

    def process_variable(self, value: float, out: Output) -> None:
        self._value = self._value * 0.7 + value
        out.emit(self._value)

    def process_number(self, number: float, out: Output) -> None:
        self._value = self._value * 0.9 + number
        out.emit(self._value)


def averaging(seed: int) -> tuple[Flow, Any]:
    """Return a loop of nine heads and three entrances; the seed decides the order in which they are opened."""
    drawn = random.Random(seed)
    flow = Flow("averages", parallelism=3)
    numbers = [random.Random(1).uniform(-1, 1) * 10**n for n in range(-8, 8)]

    def body(variables: Any, data: Any) -> IterationBodyResult:
        [late, later] = [each.process(lambda: OpensLate(drawn.randrange(9))) for each in variables]
        number = data[0].process(lambda: OpensLate(drawn.randrange(9)))
        values = connect(variable=late, number=number).process(Average, name="average")
        total = all_reduce(values, lambda a, b: a + b)
        feedback = total.rebalance().map(lambda value: value / 3)
        return IterationBodyResult([feedback, later.filter(lambda _: False)], [total], terminate_after(later, rounds=4))

    starts = [flow.from_items([0.5, 0.25, 1 / 3]), flow.from_items([1.0])]
    [totals] = iterate_bounded_streams_until_termination(starts, [replayed(flow.from_items(numbers))], body)
    return flow, totals.collect()


async def started(seed: int) -> tuple[Job, Any, dict[int, str]]:
    flow, totals = averaging(seed)
    job = await flow.start()
    [loop] = job._loops
    members = loop._members(job._scope)  # type: ignore[attr-defined]
    return job, totals, {each.number: f"{each.context.name}[{each.context.subtask_index}]" for each in members}


@pytest.mark.parametrize("seed", range(1, 6))
async def test_neither_numbers_nor_results_depend_on_the_order_of_opening(seed: int) -> None:
    """Heads were numbered as they opened, so each process would have given the same head another number."""
    expected_job, expected, _ = await started(0)
    job, totals, numbers = await started(seed)
    heads = [f"variable {stream}[{subtask}]" for stream in range(2) for subtask in range(3)]
    entrances = [f"data 0[{subtask}]" for subtask in range(3)]
    criteria = [numbers[number] for number in range(6, len(numbers) - 3)]
    assert all(name.startswith("termination criteria[") for name in criteria)
    assert dict(enumerate([*heads, *criteria, *entrances])) == numbers
    assert list(numbers) != sorted(numbers)  # They were opened in another order.
    await ended(expected_job)
    await ended(job)
    assert totals.items == expected.items
    assert len(totals.items) > 3


class Resuming(LoopCoordinator):
    """Keeps what the members that resume tell."""

    def restored(self, member: int, state: RestoredMember) -> None:
        self.resumes_with = state


@pytest.mark.parametrize("ends", [(FEEDBACK, INITIAL), (INITIAL, FEEDBACK)])
async def test_a_head_that_resumes_knows_which_of_its_inputs_have_ended(ends: tuple[str, str]) -> None:
    """It waited for the end of its feedback, which does not come twice, so the loop never ended."""
    for number in range(3):
        resuming = Resuming(heads=["head"], entrances=[], where="")
        first, second = (Bench(Head(joining(resuming, 0), 0), resuming) for _ in range(2))
        for name in ends[:number]:
            await first.control(InputEnded(name))
        second.operator.restore(first.operator.snapshot())
        assert resuming.resumes_with.has_ended == (number == 2)
        for name in ends[number:]:
            await second.control(InputEnded(name))
        assert second.operator.snapshot()["received"]["has ended"]
