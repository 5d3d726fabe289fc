"""A job that resumes with another parallelism has the same result as a job that was never stopped."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import (
    NUMBERS,
    PAIRS,
    PARTITIONS,
    Stops,
    new_broker,
    numbers,
    outputs,
    write,
    written,
)
from iteration.iteration_support import Dawdle, ended
from support.waiting import until

from streamiter import Flow, Operator, connect, topic
from streamiter.operators import Join, Output, ReduceAll, Sort
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker

# After about this number of turns of the event loop, the jobs of these tests are half done.
TURNS = 60

everywhere = pytest.mark.parametrize(("before", "after"), PAIRS)


def times(before: int, after: int) -> list[int]:
    """Return a parallelism, another one, and the first one again."""
    return [before, after, before]


class Count(Operator):
    """Numbers the records of each key."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        state = self._context.state
        state["seen"] = state.get("seen", 0) + 1
        out.emit(["count", self._context.key, state["seen"]])


def by_key(broker: MemoryBroker, parallelism: int) -> Flow:
    """Return a flow with every operator that has state by key."""
    flow = Flow("keyed", parallelism=parallelism)
    read = numbers(flow, broker)
    counted = read.key_by(lambda x: x % 7).process(Count, name="count")
    reduced = read.key_by(lambda x: f"key {x % 5}").reduce(lambda a, _: a, name="first")
    mapped = read.key_by(lambda x: (x % 3, b"")).stateful_map(
        lambda seen, x: (seen + 1, ["map", x % 3, seen + 1]), 0, name="map"
    )
    counted.union(mapped, reduced.map(lambda x: ["first", x % 5, 0])).sink(broker.topic("out"))
    return flow


@everywhere
def test_states_move_with_their_keys(before: int, after: int) -> None:
    """Keys that had moved to another subtask were counted from 1 again."""
    got = outputs(by_key, times(before, after), turns=TURNS, seed=before * 10 + after)
    expected: Counter[tuple[Any, ...]] = Counter()
    for number in range(NUMBERS):
        expected["count", number % 7, number // 7 + 1] += 1
        expected["map", number % 3, number // 3 + 1] += 1
        expected["first", number % 5, 0] += 1
    assert Counter(map(tuple, got)) == expected


def in_batches(broker: MemoryBroker, parallelism: int) -> Flow:
    """Return a flow with mini-batches of three."""
    flow = Flow("batches", parallelism=parallelism)
    numbers(flow, broker).rebalance().batch(3, name="batch").map(list).sink(broker.topic("out"))
    return flow


def in_batches_at_the_source(broker: MemoryBroker, parallelism: int) -> Flow:
    """Return the same flow with the mini-batches in the source's own task, of which some subtasks end before others."""
    flow = Flow("batches", parallelism=parallelism)
    numbers(flow, broker).batch(3, name="batch").map(list).sink(broker.topic("out"))
    return flow


@pytest.mark.parametrize("make_flow", [in_batches, in_batches_at_the_source])
@everywhere
def test_remaining_records_of_mini_batches_are_not_lost(make_flow: Any, before: int, after: int) -> None:
    """Three subtasks became one, and the remaining records of two were lost, or made a batch of five."""
    got = outputs(make_flow, times(before, after), turns=TURNS, seed=before * 10 + after)
    assert Counter(number for batch in got for number in batch) == Counter(range(NUMBERS))
    assert all(len(batch) <= 3 for batch in got)


def at_the_end(broker: MemoryBroker, parallelism: int) -> Flow:
    """Return a flow of steps that keep all records, in several subtasks."""
    flow = Flow("at the end", parallelism=parallelism)
    left = numbers(flow, broker).process(lambda: Dawdle(1)).key_by(lambda x: x % 20)
    right = numbers(flow, broker, "in2").key_by(lambda x: x % 20)
    joined = connect(left=left, right=right).process(lambda: Join(on=lambda x: x % 20), name="join")
    pairs = joined.map(lambda pair: ["pair", *pair])
    sorted_ones = numbers(flow, broker, "in3").rebalance().process(Sort, name="sort")
    sums = sorted_ones.rebalance().process(lambda: ReduceAll(lambda a, b: a + b), name="sum")
    pairs.union(sums.map(lambda x: ["sum", x])).sink(broker.topic("out"))
    return flow


@everywhere
def test_steps_that_keep_all_their_records_lose_none(before: int, after: int) -> None:
    """The sum of all records became the sum of one subtask."""
    got = outputs(at_the_end, times(before, after), turns=TURNS, seed=before * 10 + after)
    pairs = Counter((a, b) for kind, *pair in got if kind == "pair" for a, b in [pair])
    assert pairs == Counter((a, b) for a in range(NUMBERS) for b in range(NUMBERS) if a % 20 == b % 20)
    assert sum(each[1] for each in got if each[0] == "sum") == sum(range(NUMBERS))


class LeftFirst(Operator):
    """Reads its left input to the end before the right one."""

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("left",)

    def process_left(self, record: Any, out: Output) -> None:
        out.emit(["left", record])

    def process_right(self, record: Any, out: Output) -> None:
        out.emit(["right", record])


@pytest.mark.parametrize("how", ["forward", "rebalance", "key", "function"])
@everywhere
def test_records_that_wait_for_another_input_are_redistributed(how: str, before: int, after: int) -> None:
    """Records that an inbox held for an unwanted input were sent to a subtask that no longer existed."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("left first", parallelism=parallelism)
        left = numbers(flow, broker).process(lambda: Dawdle(1))
        right: Any = numbers(flow, broker, "in2")
        if how == "rebalance":
            left, right = left.rebalance(), right.rebalance()
        elif how == "key":
            right = right.key_by(lambda x: x)
        elif how == "function":
            right = right.partition_by(lambda x: x)
        connect(left=left, right=right).process(LeftFirst, name="left first").sink(broker.topic("out"))
        return flow

    got = outputs(make_flow, times(before, after), turns=TURNS, seed=before * 10 + after)
    assert Counter(map(tuple, got)) == Counter(
        (side, number) for side in ("left", "right") for number in range(NUMBERS)
    )


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
async def test_an_end_that_waits_after_records_arrives_once(before: int, after: int) -> None:
    """The end of an unwanted input was lost with the channel from which it came, and the job never ended."""
    broker, stops = await new_broker(), Stops(0)

    def make_flow(parallelism: int, stop: Any) -> Flow:
        flow = Flow("left first", parallelism=parallelism)
        left = flow.source(broker.topic("in"), stop=stop, name="in")
        right = flow.from_items(["a", "b", "c"], name="items")
        connect(left=left, right=right).process(LeftFirst, name="left first").sink(broker.topic("out"))
        return flow

    job = await stops.start(make_flow(before, None))
    await until(lambda: job.statistics().step("left first").records_in == NUMBERS)
    await stops.suspend(job)
    await ended(await stops.start(make_flow(after, "latest")))
    got = await written(broker.topic("out"))
    assert sorted(record for side, record in got if side == "right") == ["a", "b", "c"]
    assert len(got) == NUMBERS + 3


@everywhere
def test_remaining_items_are_read_once(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The items of a faster subtask were read again by another subtask."""
    monkeypatch.setattr("streamiter.operators.source.BATCH_RECORDS", 3)

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("items", parallelism=parallelism)
        items = flow.from_items(list(range(NUMBERS)), name="items")
        items.process(lambda: Dawdle(before)).sink(broker.topic("out"))
        return flow

    got = outputs(make_flow, [before, after, before, after], turns=40, seed=before * 10 + after)
    assert sorted(got) == list(range(NUMBERS))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 1), (4, 2)])
def test_only_some_steps_change(before: int, after: int) -> None:
    """A step with an unchanged parallelism had more channels than its snapshot, or was chained to the step before."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("some")
        read = numbers(flow, broker, parallelism=2)
        mapped = read.map(lambda x: x, parallelism=parallelism)
        counted = mapped.key_by(lambda x: x % 7).process(Count, name="count", parallelism=2)
        again = counted.map(lambda x: x, parallelism=parallelism)
        again.batch(2, name="batch", parallelism=1).flat_map(list).sink(broker.topic("out"))
        return flow

    for seed in range(4):
        got = outputs(make_flow, times(before, after), turns=TURNS, seed=seed)
        assert Counter(map(tuple, got)) == Counter(("count", number % 7, number // 7 + 1) for number in range(NUMBERS))


class Remind(Operator):
    """Emits the number of records of a key ten seconds after its first record."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        seen = self._context.state.get("seen", 0)
        self._context.state["seen"] = seen + 1
        if not seen:
            self._context.set_timer(10.0, payload=self._context.key)

    def on_timer(self, payload: Any, out: Output) -> None:
        out.emit([payload, self._context.key, self._context.state["seen"]])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4), (4, 3)])
async def test_timers_move_with_their_keys(before: int, after: int) -> None:
    """A timer fired at a subtask without the state of its key."""
    broker, clock, stops = await new_broker(), VirtualClock(), Stops(0)

    def make_flow(parallelism: int) -> Flow:
        flow = Flow("remind", parallelism=parallelism)
        read = flow.source(broker.topic("in"), name="in")
        read.key_by(lambda x: x % 7).process(Remind, name="remind").sink(broker.topic("out"))
        return flow

    job = await stops.start(make_flow(before), clock=clock)
    await until(lambda: job.statistics().step("remind").records_in == NUMBERS)
    await clock.advance(4.0)
    await stops.suspend(job)
    job = await stops.start(make_flow(after), clock=clock)
    await clock.advance(5.0)
    assert job.statistics().step("remind").records_out == 0
    await clock.advance(1.5)
    await until(lambda: job.statistics().step("remind").records_out == 7)
    await stops.suspend(job)
    counts = Counter(number % 7 for number in range(NUMBERS))
    assert sorted(await written(broker.topic("out"))) == [[key, key, counts[key]] for key in range(7)]


class Countdown(Source):
    """A source of a user that counts down, with its own ``redistribute``."""

    def open(self, context: Context, positions: Positions | None) -> None:
        mine = range(context.subtask_index, 6, context.parallelism)
        self._left = dict.fromkeys(mine, 10) if positions is None else dict(positions)
        self._left = {part: left for part, left in self._left.items() if left}

    def positions(self) -> Positions:
        return self._left

    async def read(self) -> SourceBatch | None:
        for part in self._left:
            await asyncio.sleep(0)
            left = self._left[part] = self._left[part] - 1
            if not left:
                del self._left[part]
            return SourceBatch([[part, left]], {part: left})
        return None

    @staticmethod
    def redistribute(positions: list[Positions], parallelism: int) -> list[Positions]:
        merged = sorted((part, left) for each in positions for part, left in each.items())
        return [dict(merged[subtask::parallelism]) for subtask in range(parallelism)]


class Total(Operator):
    """Emits the number of records at the end; it has its own ``redistribute``."""

    def __init__(self) -> None:
        self._total = 0

    def process(self, record: Any, out: Output) -> None:
        self._total += 1

    def finish(self, out: Output) -> None:
        out.emit(self._total)
        self._total = 0

    def snapshot(self) -> int:
        return self._total

    def restore(self, state: int) -> None:
        self._total = state

    @staticmethod
    def redistribute(states: list[int], parallelism: int) -> list[int]:
        return [sum(states), *[0] * (parallelism - 1)]


@everywhere
def test_sources_and_operators_of_users_redistribute_their_state(before: int, after: int) -> None:
    """Only the engine's own steps could change their parallelism."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("users", parallelism=parallelism)
        read = flow.from_source(Countdown, name="countdown")
        read.rebalance().process(Total, name="total").sink(broker.topic("out"))
        return flow

    got = outputs(make_flow, times(before, after), turns=40, seed=before * 10 + after)
    assert sum(got) == 60


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
async def test_partitions_of_a_file_move_to_other_subtasks(before: int, after: int, tmp_path: Path) -> None:
    """A partition of another subtask was new to its next subtask, which read it from the beginning."""
    url = f"sqlite:///{tmp_path}/topics.db"
    source, out = topic(f"{url}?topic=in"), topic(f"{url}?topic=out")
    await source.create(partitions=PARTITIONS)
    await out.create()
    stops = Stops(0)

    def make_flow(parallelism: int) -> Flow:
        flow = Flow("file", parallelism=parallelism)
        flow.source(source, name="in").key_by(lambda x: x % 7).process(Count, name="count").sink(out)
        return flow

    for parallelism, first in ((before, 0), (after, NUMBERS)):
        await write(source, range(first, first + NUMBERS), partitions=PARTITIONS)
        job = await stops.start(make_flow(parallelism))
        await until(lambda job=job: job.statistics().step("count").records_in == NUMBERS)  # type: ignore[misc]
        await stops.suspend(job)
    expected = Counter(("count", number % 7, number // 7 + 1) for number in range(2 * NUMBERS))
    assert Counter(map(tuple, await written(out))) == expected


async def test_collected_items_stay() -> None:
    """Items that the subtasks had already collected were lost."""
    stops = Stops(0)
    broker = await new_broker()

    def made(parallelism: int, stop: Any) -> tuple[Flow, Any]:
        flow = Flow("collected", parallelism=parallelism)
        collected = flow.source(broker.topic("in"), stop=stop, name="in").collect(name="collect")
        return flow, collected

    flow, collected = made(3, None)
    job = await stops.start(flow)
    await until(lambda: len(collected.items) == NUMBERS)
    await stops.suspend(job)
    flow, collected = made(2, "latest")
    await ended(await stops.start(flow))
    assert sorted(collected.items) == list(range(NUMBERS))
