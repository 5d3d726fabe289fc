"""Members of a loop and its coordinator agree although their messages are late, as between two processes."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from iteration.iteration_support import called, ended
from iteration.loop_ways import RARELY_S, simulated
from runtime.checkpointed_sums import written
from simulation.flows import MakeFlow, online_learner
from simulation.flows_with_loops import (
    bounded_loop_of_many,
    bounded_loop_with_replay,
    feedback_in_a_topic,
    per_round_operators,
    stale_loop_with_an_idle_subtask,
    unbounded_asynchronous_loop,
    unbounded_synchronous_loop,
)
from simulation.simulation_runs import run, undisturbed
from support.late_messages import DELAYS_S, make_late
from support.soak import in_soak
from support.waiting import until

from streamiter import (
    Checkpoints,
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    epochs_every,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
)
from streamiter.engine.job.job import Job
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import JobFailed
from streamiter.iteration.border import Head
from streamiter.iteration.coordinator import LoopCoordinator, LoopDecisions, RestoredMember
from streamiter.iteration.stamping import Stamper, groups_of
from streamiter.operators.operator import JobScope, Notice
from streamiter.testing import SimulationFailed, VirtualClock, simulate
from streamiter.topics import MemoryBroker, OutgoingBatch
from streamiter.values.helpers.clock import Clock
from streamiter.values.records import EpochWatermark


@pytest.mark.parametrize("seed", [0, 1, *in_soak(*range(2, 6))])
@pytest.mark.parametrize(
    "flow",
    [
        unbounded_synchronous_loop,
        unbounded_asynchronous_loop,
        stale_loop_with_an_idle_subtask,
        feedback_in_a_topic,
        bounded_loop_of_many,
        bounded_loop_with_replay,
        per_round_operators,
        online_learner,
    ],
)
def test_late_messages_do_not_change_the_committed_records(
    flow: MakeFlow, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The criteria head waited for a barrier that a head had ended before, and the loop stood still.

    Without the alignment of reports, the learner publishes another model after a restart with seed 0.
    """
    caplog.set_level(logging.CRITICAL)
    undisturbed(flow)  # It is kept for the other tests of this process, whose messages are not late.
    make_late(monkeypatch, seed, [0.0, 0.001] if seed % 2 else DELAYS_S)
    run(flow, seed)


@pytest.mark.parametrize("seed", [315, 483])
@pytest.mark.parametrize("is_heard", [True, False])
def test_a_snapshot_that_is_late_in_one_process_has_no_epoch_that_is_complete_in_another(
    is_heard: bool, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop completed an epoch between the snapshots of two processes. One seed in forty shows it."""
    caplog.set_level(logging.CRITICAL)
    expected = undisturbed(unbounded_synchronous_loop)
    if is_heard:
        simulate(unbounded_synchronous_loop, seed, processes=3, undisturbed=expected)
        return
    monkeypatch.setattr(LoopCoordinator, "checkpoint_begins", lambda *_: None)
    with pytest.raises(SimulationFailed, match=r"loop: epoch \d is complete, but heads resume after"):
        simulate(unbounded_synchronous_loop, seed, processes=3, undisturbed=expected)


@pytest.mark.parametrize("ahead", [0, None])
def test_a_loop_ends_although_its_messages_take_longer_than_the_time_between_checkpoints(
    ahead: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint began before the loop had heard of the end of the one before, so it kept all decisions back."""
    make_late(monkeypatch, 1, lambda way: 0.5 if way == ("from", 1) else 0.0)
    flow = Flow("loop", parallelism=2)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        more = variables[0].map(lambda number: number + 1, name="more").filter(lambda number: number < 5, name="below")
        return IterationBodyResult([more], [variables[0]])

    start = flow.from_items([0], name="start")
    config = IterationConfig(max_epochs_ahead=ahead)
    [passed] = iterate_bounded_streams_until_termination([start.rebalance()], [], body, config)
    collected = passed.collect(name="passed")

    async def main(clock: Clock) -> None:
        job = await flow.start(checkpoints=Checkpoints(MemoryStore(), interval_s=0.1), clock=clock)
        await job.wait()

    simulated(main, seed=1)
    assert collected.items == [0, 1, 2, 3, 4]


class Door:
    """The door of a step, which passes records on while it is open."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()

    def behind(self, stream: Stream, name: str) -> Stream:
        """Return the records of the stream that have passed the step of this name."""
        is_open = self.is_open

        class Pass(Operator):
            async def process(self, record: Any, out: Any) -> None:
                await is_open.wait()
                out.emit(record)

        return stream.process(Pass, name=name)


@pytest.mark.parametrize("is_aligned", [True, False])
async def test_no_epoch_is_complete_in_a_snapshot_because_of_feedback_that_comes_again(
    is_aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoch 1 was complete behind the snapshot of the head, and before that of an entrance behind a slow step.

    Without the alignment of reports, a restart from that checkpoint fails.
    """
    before, inside, broker, store = Door(), Door(), MemoryBroker(), MemoryStore()
    begun, begins = set[int](), LoopCoordinator.checkpoint_begins

    def note(loop: LoopCoordinator, member: int, checkpoint: int) -> None:
        begun.add(member)
        if is_aligned:
            begins(loop, member, checkpoint)

    monkeypatch.setattr(LoopCoordinator, "checkpoint_begins", note)

    async def started(store: MemoryStore) -> Job:
        flow = Flow("loop")
        fast, slow = (
            epochs_every(flow.source(broker.topic(name), name=name), records=1, name=f"stamp {name}")
            for name in ("fast", "slow")
        )

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            every = variables[0].union(*data).filter(lambda number: number < 9, name="below")
            return IterationBodyResult([inside.behind(every.map(lambda number: number + 5), "inside")], [every])

        start = flow.from_items([9], name="start")
        [passed] = iterate_unbounded_streams([start], [fast, before.behind(slow, "before")], body)
        passed.sink(broker.topic("passed"))
        return await flow.start(checkpoints=Checkpoints(store, interval_s=RARELY_S), restore="last")

    async def write(name: str, *numbers: int) -> None:
        writer = await broker.topic(name).open_writer()
        await writer.write(OutgoingBatch([b"%d" % number for number in numbers]))
        await writer.close()

    for name in ("fast", "slow", "passed"):
        await broker.topic(name).create()
    before.is_open.set()
    await write("slow", 9, 9, 9)
    job = await started(store)
    await until(lambda: job.statistics().step("data 1").records_in == 3)
    before.is_open.clear()
    await write("slow", 4)
    await write("fast", 1, 2)
    await until(lambda: job.statistics().step("before").records_in == 4)
    await until(
        lambda: job.statistics().step("data 0").records_in == 2 and job.statistics().loops[0].epoch_complete == 0
    )
    taking = asyncio.create_task(job.checkpoint())
    await until(lambda: begun == {0, 1})  # The head, and the entrance of the fast stream.
    inside.is_open.set()
    await until(lambda: job.statistics().loops[0].fed_back_records == 2)
    await until(lambda: is_aligned or job.statistics().loops[0].epoch_complete == 1)
    before.is_open.set()
    await taking
    await job.stop("abort")
    if is_aligned:
        await (await started(store.another())).stop("drain")
        assert sorted(await written(broker.topic("passed"))) == [1, 2, 4, 6, 7]
    else:
        with pytest.raises(JobFailed, match="loop: epoch 1 is complete, but heads resume after"):
            await started(store.another())


class Told(LoopDecisions):
    """A member that keeps the epochs that it is told to be complete."""

    def __init__(self, number: int, told: list[tuple[int, int]]) -> None:
        self.number = number
        self.told = told

    def advance(self, epoch: int) -> None:
        self.told.append((self.number, epoch))


async def test_a_subtask_that_was_faster_than_the_others_does_not_return_to_their_epoch() -> None:
    """The answer came while the subtask completed later epochs: the next records were in an epoch that was over."""
    posted, passed = list[Notice](), list[tuple[str, int]]()

    class Passed:
        def emit_batch(self, records: Any, epoch: int) -> None:
            passed.append(("records", epoch))

        async def control(self, control: EpochWatermark) -> None:
            passed.append(("watermark", control.epoch))

    context: Any = SimpleNamespace(
        name="stamp", subtask_index=0, parallelism=2, post=posted.append, scope=JobScope(), clock=VirtualClock()
    )
    out: Any = Passed()
    stamper = Stamper(groups_of(1), None)
    stamper.open(context)
    stamper.catch_up(1)
    await stamper.on_batch("", [1, 2, 3], 0, out)
    [notice] = posted
    await called(notice, out)
    await stamper.on_batch("", [4], 0, out)
    assert passed == [(kind, epoch) for epoch in range(4) for kind in ("records", "watermark")]


def test_heads_that_replace_others_know_the_decisions_that_one_of_those_was_told() -> None:
    """The count of an epoch was lost with the head that knew it to be complete, and the loop ended with records in it.

    Head a was told that epoch 5 is complete, and has forgotten its two records; head b was not told.
    """
    told = {"released": 5, "initial ended": True, "feedback ended": False, "ended in": None}
    received = {"counts": {"runs": []}, "reported": 5, "has ended": False}
    states = [
        told | {"advanced": 5, "complete": 5, "passed watermark": 5, "received": received | {"unacknowledged": {}}},
        told | {"advanced": 4, "complete": 4, "passed watermark": 4, "received": received | {"unacknowledged": {5: 0}}},
    ]
    [state] = Head(lambda *_: (loop, 0), None).redistribute(states, 1)
    assert (state["advanced"], state["complete"]) == (4, 5)
    loop, epochs = LoopCoordinator(["head"], [], where=""), list[tuple[int, int]]()
    loop.join(0, Told(0, epochs))
    loop.restored(0, RestoredMember(None, state["advanced"], state["complete"], 5, reported=5, counts=[(5, 0)]))
    assert len(epochs) == 1


class EmitAtTheEnd(Operator, IterationListener):
    """Emits a record when the iteration has ended."""

    def process(self, record: Any, out: Any) -> None:
        """Drop the record."""

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        out.emit("too late")


@pytest.mark.parametrize("seed", [10, 23, 29])
async def test_records_of_the_end_are_not_fed_back_to_a_head_that_is_told_later(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of the other variable passed the records on, which it drops if it is told at the same time."""
    make_late(monkeypatch, seed, [0.0, 0.01])
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        last = variables[0].process(EmitAtTheEnd)
        return IterationBodyResult([variables[0].filter(lambda _: False), last], [variables[1]])

    [passed] = iterate_unbounded_streams([flow.from_items([1]), flow.from_items(["initial"])], [], body)
    collected = passed.collect()
    await ended(await flow.start())
    assert collected.items == ["initial"]
