"""A flow that was stopped at any point and restored has the results of a flow that was never stopped."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from flow.small_flows import Fed
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.probe import tasks_left, turns

from streamiter import Flow, Operator, Stream, connect
from streamiter.engine.checkpointing.commit import JobSnapshot
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import ConfigurationError
from streamiter.operators import Collected, Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.testing import VirtualClock
from streamiter.values.plain_data import PlainData


@dataclass
class Schedule:
    """The schedule of one run: the cuts of batches, the waits of steps, the sizes of channels."""

    seed: int
    limit: int
    stops_after: list[int]
    """The turns of the event loop before each snapshot."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    async def wait(self) -> None:
        """Wait for a few turns, sometimes."""
        if self.random.random() < 0.3:
            await turns(self.random.randrange(1, 4))


class Cut(Source):
    """Emits a subtask's share of the records in batches of random size; waits at the end for ``release``."""

    def __init__(self, records: list[Any], schedule: Schedule, release: asyncio.Event) -> None:
        self._records = records
        self._schedule = schedule
        self._release = release

    def open(self, context: Context, positions: Positions | None) -> None:
        self._name = f"{context.name}[{context.subtask_index}]"
        self._share = self._records[context.subtask_index :: context.parallelism]
        self._next = (positions or {}).get(self._name, 0)

    async def read(self) -> SourceBatch | None:
        await self._schedule.wait()
        size = self._schedule.random.randrange(1, 5)
        batch = self._share[self._next : self._next + size]
        if not batch:
            await self._release.wait()
            return None
        self._next += len(batch)
        return SourceBatch(batch, {self._name: self._next})


class Waits(Operator):
    """Passes records on, and waits sometimes."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    async def process_batch(self, batch: Any, out: Output) -> None:
        await self._schedule.wait()
        out.emit_batch(batch)


class Counting(Operator):
    """Emits key and count, and ten seconds after a key's first record its total."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None:
        state = self.context.state
        if not state:
            self.context.set_timer(10, "total")
        state["count"] = state.get("count", 0) + 1
        out.emit((self.context.key, state["count"]))

    def on_timer(self, payload: str, out: Output) -> None:
        out.emit((self.context.key, payload, self.context.state["count"]))


class Zip(Operator):
    """Pairs the records of two inputs, one of each in turn; records without a partner are emitted alone."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("b",) if self.left else ("a",)

    def process_a(self, record: Any, out: Output) -> None:
        if self.left:
            out.emit((self.left.pop(), None))
        self.left.append(record)

    def process_b(self, record: Any, out: Output) -> None:
        out.emit((self.left.pop() if self.left else None, record))

    def finish(self, out: Output) -> None:
        out.emit(("left", list(self.left)))

    def snapshot(self) -> list[Any]:
        return list(self.left)

    def restore(self, state: list[Any]) -> None:
        self.left = list(state)


MakeStream = Callable[[str, list[Any]], Stream]
Build = Callable[[MakeStream, Schedule], Stream]


def keyed_state_and_timers(make: MakeStream, schedule: Schedule) -> Stream:
    return make("in", list(range(40))).key_by(lambda x: x % 7).process(Counting, name="count")


def mini_batches(make: MakeStream, schedule: Schedule) -> Stream:
    single = make("in", list(range(40))).process(lambda: Waits(schedule), parallelism=1)
    return single.batch(7).map(sum)


def running_totals(make: MakeStream, schedule: Schedule) -> Stream:
    keyed = make("in", list(range(40))).process(lambda: Waits(schedule)).key_by(lambda x: x % 3)
    return keyed.reduce(lambda a, b: a + b).union(keyed.stateful_map(lambda seen, x: ([*seen, x], len(seen)), []))


def at_the_end(make: MakeStream, schedule: Schedule) -> Stream:
    numbers = make("in", list(range(20)))
    other = make("other", [{"id": x, "square": x * x} for x in range(0, 20, 3)])
    joined = numbers.map(lambda x: {"id": x}).join(other, on="id").map(lambda pair: pair[1]["square"])
    return numbers.reduce_all(lambda a, b: a + b).union(numbers.sort(lambda x: -x), joined)


def pairs(make: MakeStream, schedule: Schedule) -> Stream:
    a = make("a", list(range(15))).process(lambda: Waits(schedule), parallelism=1)
    b = make("b", list(range(100, 120))).map(lambda x: x, parallelism=1)
    return connect(a=a, b=b).process(Zip, name="zip")


def diamond(make: MakeStream, schedule: Schedule) -> Stream:
    numbers = make("in", list(range(30)))
    slow = numbers.process(lambda: Waits(schedule)).map(lambda x: ("slow", x))
    return slow.union(numbers.rebalance().map(lambda x: ("fast", x)), numbers.map(lambda x: ("same", x)))


FLOWS: dict[str, Build] = {
    build.__name__: build
    for build in (keyed_state_and_timers, mini_batches, running_totals, at_the_end, pairs, diamond)
}
# The order of records from several subtasks is not fixed, so results that depend on it are left out.
ORDER_OF_SUBTASKS_MATTERS = frozenset({"mini_batches", "running_totals", "pairs"})


class Run:
    """One flow, and all random choices of its run."""

    def __init__(self, build: Build, schedule: Schedule, parallelism: int) -> None:
        self.schedule = schedule
        self.release = asyncio.Event()
        self.clock = VirtualClock()
        self.flow = Flow("f", parallelism=parallelism)
        stream = build(self._stream, schedule).process(lambda: Waits(schedule), parallelism=1)
        self.collected: Collected = stream.collect()

    def _stream(self, name: str, records: list[Any]) -> Stream:
        return self.flow.from_source(lambda: Cut(records, self.schedule, self.release), name=name)

    async def results(self) -> list[Any]:
        """Return all results of a run with a snapshot and a crash at each of the schedule's stops."""
        snapshot: JobSnapshot | None = None
        plain = PlainData()
        for stop in self.schedule.stops_after:
            job = await self.flow.start(clock=self.clock, channel_limits=self._limits(), snapshot=snapshot)
            await turns(stop)
            # Some results after the snapshot are lost with the crash.
            snapshot = plain.decode(plain.encode(await job.snapshot()))
            await turns(self.schedule.random.randrange(30))
            await job.stop("abort")
        job = await self.flow.start(clock=self.clock, channel_limits=self._limits(), snapshot=snapshot)
        while any(channel.records for task in job.statistics().tasks for channel in task.inputs):
            await turns(5)
        await self.clock.advance(0)
        await turns(200)
        await self.clock.advance(11)
        self.release.set()
        assert (await job.wait()).state == "finished"
        assert tasks_left() == []
        return self.collected.items

    def _limits(self) -> ChannelLimits:
        return ChannelLimits(records=self.schedule.limit)


SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 2**16),
    limit=st.integers(1, 4),
    stops_after=st.lists(st.integers(0, 120), min_size=1, max_size=3),
)


def run(name: str, schedule: Schedule, parallelism: int) -> list[Any]:
    async def main() -> list[Any]:
        return await Run(FLOWS[name], schedule, parallelism).results()

    return asyncio.run(main())


def comparable(results: list[Any]) -> Counter[str]:
    return Counter(map(repr, results))


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("name", FLOWS)
@settings(max_examples=8, deadline=None)
@given(schedule=SCHEDULES)
def test_a_restored_flow_equals_one_that_was_never_stopped(name: str, parallelism: int, schedule: Schedule) -> None:
    """State, timers, half-filled batches, held records or ended inputs were lost or doubled by a restore."""
    source_parallelism = 1 if name in ORDER_OF_SUBTASKS_MATTERS else parallelism
    undisturbed = run(name, Schedule(0, 1000, []), source_parallelism)
    assert undisturbed
    disturbed = run(name, schedule, source_parallelism)
    assert comparable(disturbed) == comparable(undisturbed)


async def test_an_input_that_had_ended_is_not_read_again() -> None:
    """A bounded table was joined with an endless stream, and after a restore its records came a second time."""
    fed = [Fed(), Fed()]
    sources = iter(fed)
    flow = Flow("f")
    table = flow.from_items([1, 2, 3], name="table")
    kept = table.collect(name="kept")
    both = table.rebalance().union(flow.from_source(lambda: next(sources), name="clicks")).collect(name="both")
    job = await flow.start()
    fed[0].give(10)
    await turns()
    snapshot = await job.snapshot()
    await job.stop("abort")
    job = await flow.start(snapshot=snapshot)
    fed[1].give(20)
    fed[1].end()
    statistics = await job.wait()
    assert sorted(both.items) == [1, 2, 3, 10, 20]
    assert kept.items == [1, 2, 3]
    assert statistics.state == "finished"


async def test_the_state_of_a_snapshot_does_not_change_with_the_job() -> None:
    """The job continued while the snapshot was written, and the snapshot contained counts of later records."""
    fed = Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed).key_by(lambda x: x).process(Counting, name="count")
    job = await flow.start(clock=VirtualClock())
    fed.give("a")
    await turns()
    snapshot = await job.snapshot()
    before = PlainData().encode(snapshot)
    fed.give("a", "b")
    await turns()
    await job.stop("abort")
    assert PlainData().encode(snapshot) == before
    # A job that is restored from the snapshot does not change it, either.
    job = await flow.start(snapshot=snapshot, clock=VirtualClock())
    fed.give("a")
    await turns()
    await job.stop("abort")
    assert PlainData().encode(snapshot) == before


async def test_timers_set_in_open_are_those_of_the_snapshot_after_a_restore() -> None:
    """A flush every ten seconds was set in ``open``, and each restore added one more of these timers."""
    fired: list[float] = []

    class Periodic(Operator):
        def open(self, context: Context) -> None:
            self.context = context
            context.set_timer(10, "flush")

        def process(self, record: Any, out: Output) -> None: ...

        def on_timer(self, payload: str, out: Output) -> None:
            fired.append(self.context.clock.monotonic_s())
            self.context.set_timer(10, payload)

    clock = VirtualClock()
    flow = Flow("f")
    flow.from_source(Fed).process(Periodic)
    job = await flow.start(clock=clock)
    for _ in range(3):
        await clock.advance(4)
        snapshot = await job.snapshot()
        await job.stop("abort")
        job = await flow.start(clock=clock, snapshot=snapshot)
    await clock.advance(20)
    assert fired == [10.0, 20.0, 30.0]
    await job.stop("abort")


async def test_a_timer_that_became_due_before_the_restart_fires_at_once() -> None:
    """The service was down for an hour, and a due timer was lost, or started again."""
    clock, fed = VirtualClock(), Fed()
    flow = Flow("f")
    got = flow.from_source(lambda: fed).key_by(lambda x: x).process(Counting).collect()
    job = await flow.start(clock=clock)
    fed.give("a")
    await clock.advance(1)
    snapshot = await job.snapshot()
    await job.stop("abort")
    await clock.advance(3600)
    assert got.items == [("a", 1)]
    job = await flow.start(clock=clock, snapshot=snapshot)
    await clock.advance(0)
    assert got.items == [("a", 1), ("a", "total", 1)]
    await job.stop("abort")


async def test_a_time_to_live_resumes_after_a_restore() -> None:
    """State that was restored several times was never forgotten, or lost its own timers."""
    clock = VirtualClock()
    sources: list[Fed] = []

    def source() -> Fed:
        sources.append(Fed())
        return sources[-1]

    flow = Flow("f")
    keyed = flow.from_source(source).key_by(lambda x: x)
    got = keyed.process(Counting, name="count", time_to_live_s=30).collect()
    job = await flow.start(clock=clock)
    sources[-1].give("a")
    await clock.advance(5)
    snapshot = await job.snapshot()
    await job.stop("abort")
    job = await flow.start(clock=clock, snapshot=snapshot)
    await clock.advance(5)
    assert got.items == [("a", 1), ("a", "total", 1)]
    await clock.advance(100)
    snapshot = await job.snapshot()
    [state] = [task["operators"]["count"] for task in snapshot.values() if "count" in task["operators"]]
    assert state["keyed"] == []
    await job.stop("abort")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], r"'b\[0\]' is only in the flow"),
        ([], r"'a\[0\]' is only in the snapshot"),
        (["b"], r"'a\[0\]' is only in the snapshot"),
    ],
)
async def test_a_snapshot_of_other_steps_is_refused(names: list[str], message: str) -> None:
    """State without a step was lost, and a step without state started again, both silently."""

    def flow_of(names: list[str]) -> Flow:
        flow = Flow("f")
        stream = flow.from_source(Fed, name="in")
        for name in names:
            stream.rebalance().map(str, name=name, parallelism=2)
        return flow

    job = await flow_of(["a"]).start()
    snapshot = await job.snapshot()
    await job.stop("abort")
    with pytest.raises(ConfigurationError, match=message):
        await flow_of(names).start(snapshot=snapshot)
    assert tasks_left() == []


async def test_records_given_in_turn_continue_with_the_next_subtask() -> None:
    """After a restore each subtask received the records of another subtask, so the result differed."""

    class Tagged(Operator):
        def open(self, context: Context) -> None:
            self._subtask = context.subtask_index

        def process(self, record: Any, out: Output) -> None:
            out.emit((record, self._subtask))

    def build(fed: Fed) -> tuple[Flow, Collected]:
        flow = Flow("f", parallelism=2)
        numbers = flow.from_source(lambda: fed, name="in", parallelism=1)
        return flow, numbers.rebalance().process(Tagged, parallelism=2).collect()

    first, second = Fed(), Fed()
    flow, _ = build(first)
    job = await flow.start()
    first.give(0)
    await turns(20)
    first.give(1, 2)
    await turns(20)
    snapshot = await job.snapshot()
    await job.stop("abort")
    flow, collected = build(second)
    job = await flow.start(snapshot=snapshot)
    second.give(3, 4)
    second.end()
    await job.wait()
    assert sorted(collected.items) == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]
