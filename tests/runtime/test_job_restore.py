"""What a job takes from a snapshot: ended inputs, timers, the turns of subtasks; tests/restore compares whole runs."""

from typing import Any

import pytest
from flow.small_flows import Fed
from runtime.probe import tasks_left, turns

from streamiter import Flow, Operator
from streamiter.errors import ConfigurationError
from streamiter.operators import Collected, Output
from streamiter.operators.operator import Context
from streamiter.testing import VirtualClock
from streamiter.values.plain_data import PlainData


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
