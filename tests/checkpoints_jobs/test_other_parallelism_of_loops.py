"""A loop that resumes with another parallelism has the same result as a loop that was never stopped."""

from collections import Counter
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import NUMBERS, PAIRS, Stops, new_broker, numbers, outputs, written
from iteration.iteration_support import Dawdle, ended
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    Stream,
    epochs_every,
    feedback_through,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.topics import MemoryBroker

everywhere = pytest.mark.parametrize(("before", "after"), PAIRS)


class Seen(Operator):
    """Emits each record with the number of its passes."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        times = self._context.state.get("times", 0) + 1
        self._context.state["times"] = times
        out.emit([*record, times])


def going_round(ahead: int | None, *, stamped: bool, feedback: str) -> Any:
    """Return a function that makes a flow of records (number, remaining rounds), which counts their rounds."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("going round", parallelism=parallelism)
        initial = numbers(flow, broker, "in2").map(lambda n: [1000 + n, n % 3])
        data = numbers(flow, broker).map(lambda n: [n, n % 4])
        if stamped:
            data = epochs_every(data, records=2, name="stamp")

        def body(variables: list[Stream], entered: list[Stream]) -> IterationBodyResult:
            every = variables[0].rebalance().union(entered[0].rebalance())
            slow = every.rebalance().process(lambda: Dawdle(1), name="slow")
            seen = slow.key_by(lambda x: x[0]).process(Seen, name="seen")
            back: Any = seen.filter(lambda x: x[1] > 0).map(lambda x: [x[0], x[1] - 1])
            if feedback == "rebalance":
                back = back.rebalance()
            elif feedback == "key":
                back = back.partition_by(lambda x: x[0])
            return IterationBodyResult([back], [seen])

        config = IterationConfig(max_epochs_ahead=ahead)
        [passed] = iterate_unbounded_streams([initial], [data], body, config)
        passed.sink(broker.topic("out"))
        return flow

    return make_flow


@pytest.mark.parametrize(
    ("ahead", "stamped", "feedback"),
    [(None, False, "rebalance"), (None, True, "forward"), (0, True, "key"), (1, True, "rebalance")],
)
@everywhere
def test_circulating_records_resume_at_their_places(
    ahead: int | None, stamped: bool, feedback: str, before: int, after: int
) -> None:
    """Feedback that a head held, or that came with the barrier, was lost with the head, or the loop never ended."""
    make_flow = going_round(ahead, stamped=stamped, feedback=feedback)
    check_rounds(outputs(make_flow, [before, after, before], turns=150, seed=before * 10 + after))


def check_rounds(got: list[Any]) -> None:
    expected: Counter[tuple[int, ...]] = Counter()
    for first, rounds in ((0, 4), (1000, 3)):
        for number in range(NUMBERS):
            left = number % rounds
            expected.update((first + number, left - back, back + 1) for back in range(left + 1))
    assert Counter(map(tuple, got)) == expected


@pytest.mark.parametrize("turns", [40, 80, 120, 160])
def test_a_loop_resumes_with_another_staleness(turns: int) -> None:
    """Records that a synchronous loop had set aside were lost when the loop was asynchronous after a restart."""

    def make_flow(broker: MemoryBroker, ahead: int) -> Flow:
        return going_round(ahead, stamped=True, feedback="rebalance")(broker, 2)

    check_rounds(outputs(make_flow, [0, 1, 0], turns=turns, seed=turns))


class WithEpoch(Operator):
    """Emits the epoch of each record."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        out.emit([self._context.epoch, record])


class Total(Operator):
    """Emits the sum of its records at the end, and the number of records of each key."""

    def __init__(self) -> None:
        self._total = 0

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        self._total += record
        seen = self._context.state.get("seen", 0) + 1
        self._context.state["seen"] = seen
        out.emit([self._context.epoch, "seen", self._context.key, seen])

    def finish(self, out: Output) -> None:
        out.emit([self._context.epoch, "total", self._total])

    def snapshot(self) -> int:
        return self._total

    def restore(self, state: int) -> None:
        self._total = state

    @staticmethod
    def redistribute(states: list[int], parallelism: int) -> list[int]:
        return [sum(states[subtask::parallelism]) for subtask in range(parallelism)]


ROUNDS = 4


def in_rounds(*, per_round: bool) -> Any:
    """Return a function that makes a flow with all data in every epoch, or with the results of a per-round step."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("rounds", parallelism=parallelism)
        initial = numbers(flow, broker, "in2").map(lambda n: [n, 0])

        def body(variables: list[Stream], entered: list[Stream]) -> IterationBodyResult:
            data = entered[0].process(lambda: Dawdle(2), name="slow")
            if per_round:
                [told] = for_each_round(
                    [data], lambda streams: [streams[0].key_by(lambda x: x % 7).process(Total, name="total")]
                )
            else:
                told = data.process(WithEpoch, name="told")
            back = variables[0].map(lambda x: [x[0], x[1] + 1]).filter(lambda x: x[1] < ROUNDS)
            return IterationBodyResult([back.rebalance()], [told])

        data = replayed(numbers(flow, broker))
        [passed] = iterate_bounded_streams_until_termination([initial], [data], body)
        passed.sink(broker.topic("out"))
        return flow

    return make_flow


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make many batches of the replayed data, so that a job can be stopped between them."""
    monkeypatch.setattr("streamiter.engine.storage.replay_cache._JOINED_RECORDS_MAX", 4)


@pytest.mark.usefixtures("_small_pieces")
@everywhere
def test_replayed_data_comes_once_in_every_round(before: int, after: int) -> None:
    """In the current round and in all later rounds, replayed data was missing or came twice."""
    got = outputs(in_rounds(per_round=False), [before, after], turns=500, seed=before * 10 + after)
    assert Counter(map(tuple, got)) == Counter((epoch, number) for epoch in range(ROUNDS) for number in range(NUMBERS))


@pytest.mark.usefixtures("_small_pieces")
@everywhere
def test_a_per_round_step_continues_in_the_current_round(before: int, after: int) -> None:
    """The operators of the current round were lost, and the operators of the next round started with their state."""
    got = outputs(in_rounds(per_round=True), [before, after], turns=500, seed=before * 10 + after)
    totals: Counter[int] = Counter()
    for epoch, kind, total, *_ in got:
        totals[epoch] += total if kind == "total" else 0
    assert totals == dict.fromkeys(range(ROUNDS), sum(range(NUMBERS)))
    assert Counter(tuple(each) for each in got if each[1] == "seen") == Counter(
        (epoch, "seen", number % 7, number // 7 + 1) for epoch in range(ROUNDS) for number in range(NUMBERS)
    )


async def test_the_parallelism_outside_a_loop_through_a_topic_may_change() -> None:
    """The inboxes of the heads were created again without their records in the topic."""
    broker, stops = await new_broker(), Stops(0)
    await broker.topic("loop").create(partitions=2)
    tokens, rounds = 6, 60

    def make_flow(parallelism: int) -> Flow:
        flow = Flow("tokens")

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            gone = variables[0].map(lambda at: [at[0], at[1] + 1])
            back = gone.filter(lambda at: at[1] < rounds).rebalance()
            return IterationBodyResult([feedback_through(back, broker.topic("loop"))], [gone])

        items = flow.from_items([[token, 0] for token in range(tokens)], name="items", parallelism=parallelism)
        initial = items.map(lambda at: at, parallelism=2)
        [passed] = iterate_unbounded_streams([initial], [], body)
        passed.map(lambda at: at, parallelism=parallelism).sink(broker.topic("out"))
        return flow

    for parallelism in (1, 3, 4):
        job = await stops.start(make_flow(parallelism))
        await until(lambda job=job: job.statistics().step("sink out").records_in > 60)  # type: ignore[misc]
        await stops.suspend(job)
    await ended(await stops.start(make_flow(1)))
    assert Counter(map(tuple, await written(broker.topic("out")))) == Counter(
        (token, at) for token in range(tokens) for at in range(1, rounds + 1)
    )


class InOrder(Operator):
    """Handles one epoch after the other."""

    epochs_in_order = True

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        out.emit([record, self._context.epoch])


@everywhere
def test_records_set_aside_for_later_epochs_are_redistributed(before: int, after: int) -> None:
    """Records of later epochs, sent by a fast subtask, were lost with the subtask that held them."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("in order", parallelism=parallelism)
        stamped = epochs_every(numbers(flow, broker).rebalance().map(lambda n: n), records=2, name="stamp")
        late = epochs_every(numbers(flow, broker, "in2").process(lambda: Dawdle(1)), records=9, name="stamp later")

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            ordered = data[0].rebalance().union(data[1].rebalance()).process(InOrder, name="in order")
            return IterationBodyResult([variables[0].filter(lambda _: False)], [ordered])

        config = IterationConfig(max_epochs_ahead=None)
        [passed] = iterate_unbounded_streams([flow.from_items([], name="none")], [stamped, late], body, config)
        passed.sink(broker.topic("out"))
        return flow

    got = outputs(make_flow, [before, after, before], turns=120, seed=before * 10 + after)
    assert Counter(number for number, _ in got) == Counter([*range(NUMBERS), *range(NUMBERS)])


@everywhere
def test_a_loop_does_not_end_with_records_in_it(before: int, after: int) -> None:
    """The counts of heads for an epoch were lost, so the epoch seemed to have no feedback, and the loop ended."""
    tokens, rounds = 5, 30

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("tokens", parallelism=parallelism)

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            gone = variables[0].process(lambda: Dawdle(3), name="slow").map(lambda at: [at[0], at[1] + 1])
            back = gone.filter(lambda at: at[1] < rounds).partition_by(lambda at: at[0] + at[1])
            return IterationBodyResult([back], [gone])

        initial = flow.from_items([[token, 0] for token in range(tokens)], name="items")
        config = IterationConfig(max_epochs_ahead=0)
        [passed] = iterate_bounded_streams_until_termination([initial], [], body, config)
        passed.sink(broker.topic("out"))
        return flow

    got = outputs(make_flow, [before, after, before, after], turns=300, seed=before * 10 + after)
    assert Counter(map(tuple, got)) == Counter((token, at) for token in range(tokens) for at in range(1, rounds + 1))
