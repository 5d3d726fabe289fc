"""A body that never ends: its statistics while it runs, and all ways to stop it."""

import asyncio
from typing import Any

import pytest
from iteration.iteration_support import (
    SMALL,
    Dawdle,
    Endless,
    Log,
    Witness,
    callbacks,
    check_listener,
    cut_items,
    ended,
    run_shuffled,
)
from support.waiting import PATIENCE_S, until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    Stream,
    connect,
    epochs_every,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.engine.checkpointing.commit import JobSnapshot
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.operators.source import Collected

SEEDS = range(2)
LOOPS = pytest.mark.parametrize(
    ("ahead", "parallelism", "seed"), [(0, 1, 0), (2, 3, 1), (None, 1, 2), (0, 3, 3), (2, 1, 2), (None, 3, 1)]
)


class SumOfRound(Operator):
    """Emits the sum of its records in one round."""

    def __init__(self) -> None:
        self._sum = 0

    def process(self, record: int, out: Any) -> None:
        self._sum += record

    def finish(self, out: Any) -> None:
        out.emit(self._sum)

    def snapshot(self) -> int:
        return self._sum

    def restore(self, state: int) -> None:
        self._sum = state


def endless(log: Log, *, ahead: int | None, parallelism: int, seed: int) -> tuple[Flow, Collected]:
    """Return a flow in which three tokens circulate forever, with replayed data that is summed in each round."""
    flow = Flow("endless")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        dealt = variables[0].rebalance().process(lambda: Dawdle(seed), parallelism=parallelism)
        step = dealt.process(lambda: Witness(log), name="step")
        [sums] = for_each_round(data, lambda streams: [streams[0].process(SumOfRound, name="sum", parallelism=1)])
        both = connect(left=step.rebalance(), right=sums).process(
            lambda: Witness(log, on_record=lambda *_: None), name="both", parallelism=1
        )
        return IterationBodyResult([step.rebalance().union(both.filter(lambda x: False).rebalance())], [sums])

    initial = cut_items(flow, ["a", "b", "c"], seed=seed, parallelism=parallelism)
    data = replayed(cut_items(flow, range(10), seed=seed, parallelism=parallelism))
    config = IterationConfig(max_epochs_ahead=ahead)
    [sums] = iterate_bounded_streams_until_termination([initial], [data], body, config)
    return flow, sums.collect()


async def going(flow: Flow, epoch: int) -> Job:
    """Start a job, and wait until its loop has reached this epoch."""
    job = await flow.start(channel_limits=SMALL)
    await until(lambda: job.statistics().loops[0].epoch_complete >= epoch)
    return job


@LOOPS
def test_a_drained_endless_loop_ends_with_the_present_epoch(ahead: int | None, parallelism: int, seed: int) -> None:
    """A loop without criteria could not be ended with its results."""
    log = Log()

    async def main() -> None:
        flow, sums = endless(log, ahead=ahead, parallelism=parallelism, seed=seed)
        job = await going(flow, 5)
        before = job.statistics().loops[0].epoch_complete
        statistics = await asyncio.wait_for(job.stop("drain"), PATIENCE_S)
        assert statistics.state == "finished"
        [loop] = statistics.loops
        assert loop.ended_in is not None
        assert before < loop.ended_in <= before + 3
        assert sums.items == [45] * loop.ended_in
        for entries in log.values():
            check_listener(entries)
            assert callbacks(entries) == list(range(loop.ended_in))

    run_shuffled(main(), seed)
    assert len(log) == parallelism + 1


@LOOPS
@pytest.mark.parametrize(("mode", "state"), [("suspend", "suspended"), ("abort", "aborted")])
def test_no_step_of_a_suspended_or_aborted_loop_receives_an_end(
    mode: Any, state: str, ahead: int | None, parallelism: int, seed: int
) -> None:
    """SIGTERM suspends a job: a suspended step received an end in the middle of an epoch, a replay or a round. An
    aborted loop left operators open.
    """
    log = Log()

    async def main() -> None:
        flow, _ = endless(log, ahead=ahead, parallelism=parallelism, seed=seed)
        job = await going(flow, 3)
        for _ in range(seed * 7):
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(job.stop(mode), PATIENCE_S)).state == state

    run_shuffled(main(), seed)
    for entries in log.values():
        assert {entry[0] for entry in entries[:-1]} == {"record", "callback"}
        assert entries[-1] == ("close",)
        assert callbacks(entries) == list(range(len(callbacks(entries))))


@LOOPS
def test_an_endless_loop_resumes_from_a_snapshot_and_can_then_be_drained(
    ahead: int | None, parallelism: int, seed: int
) -> None:
    """After a restart, the sum of an unfinished round was wrong, or a round was lost or came twice."""
    log = Log()

    async def main() -> None:
        flow, _ = endless(Log(), ahead=ahead, parallelism=parallelism, seed=seed)
        job = await going(flow, 4)
        for _ in range(seed * 11):
            await asyncio.sleep(0)
        snapshot = await asyncio.wait_for(job.snapshot(), PATIENCE_S)
        await job.stop("abort")
        flow, sums = endless(log, ahead=ahead, parallelism=parallelism, seed=seed)
        job = await flow.start(channel_limits=SMALL, snapshot=snapshot)
        await until(lambda: job.statistics().loops[0].epoch_complete >= 9)
        statistics = await asyncio.wait_for(job.stop("drain"), PATIENCE_S)
        assert sums.items == [45] * (statistics.loops[0].ended_in or 0)

    run_shuffled(main(), seed)


def a_long_way_round(seed: int) -> Flow:
    """Return a flow with a loop through which a barrier takes many turns of the event loop."""
    flow = Flow("long")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        stream = variables[0]
        for number in range(8):
            stream = stream.rebalance().process(lambda number=number: Dawdle(seed + number), parallelism=2)  # type: ignore[misc]
        return IterationBodyResult([stream.rebalance()], [])

    iterate_bounded_streams_until_termination([cut_items(flow, range(9), seed=seed)], [], body)
    return flow


@pytest.mark.parametrize("seed", range(6))
def test_a_cancelled_snapshot_does_not_delay_the_next(seed: int) -> None:
    """With two barriers in one loop, the first returned to a head that knew only the second, and the head stalled."""

    async def main() -> None:
        job = await going(a_long_way_round(seed), 3)
        given_up = asyncio.create_task(job.snapshot())
        for _ in range(3 + seed):
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait({given_up})
        snapshot = await asyncio.wait_for(job.snapshot(), PATIENCE_S)
        await asyncio.wait_for(job.stop("abort"), PATIENCE_S)
        job = await a_long_way_round(seed).start(channel_limits=SMALL, snapshot=snapshot)
        statistics = await asyncio.wait_for(job.stop("drain"), PATIENCE_S)
        # Each record comes once in each round since the snapshot.
        assert statistics.loops[0].fed_back_records % 9 == 0

    run_shuffled(main(), seed)


@pytest.mark.parametrize("ahead", [0, 2, None])
def test_the_statistics_of_an_endless_loop_show_its_progress(ahead: int | None) -> None:
    """The statistics of a loop that ran for hours did not show whether it made progress."""

    async def main() -> None:
        flow, _ = endless(Log(), ahead=ahead, parallelism=2, seed=1)
        job = await going(flow, 1)
        epochs = []
        for target in (3, 6, 9):
            await until(lambda target=target: job.statistics().loops[0].epoch_complete >= target)  # type: ignore[misc]
            [loop] = job.statistics().loops
            assert loop.epoch_complete <= loop.epoch_received <= loop.epoch_reached
            assert loop.ended_in is None
            assert loop.heads == ("variable 0",)
            epochs.append((loop.epoch_complete, loop.fed_back_records))
            if ahead == 0:
                assert loop.fed_back_records <= 3 * (loop.epoch_complete + 2)
        assert epochs == sorted(set(epochs))
        assert job.statistics().step("data 0").records_in == 10
        assert job.statistics().state == "running"
        await job.stop("abort")

    run_shuffled(main())


async def test_a_loop_drained_before_the_end_of_its_data_completes_epoch_0() -> None:
    """A drained loop dropped records that it had read, instead of ending after its inputs."""
    log = Log()
    flow, sums = endless(log, ahead=0, parallelism=1, seed=2)
    job = await flow.start(channel_limits=SMALL)
    statistics = await asyncio.wait_for(job.stop("drain"), PATIENCE_S)
    assert (await ended(job)).state == "finished"
    assert statistics.loops[0].ended_in == 1
    assert len(sums.items) <= 1
    for entries in log.values():
        check_listener(entries)
        assert callbacks(entries) == [0]


async def test_epochs_that_pass_a_blocked_replay_are_stored_as_one_number() -> None:
    """A loop that ran past a slow step stored a note for each of its epochs, one megabyte a second."""
    flow, may_continue, seen = Flow("endless"), asyncio.Event(), list[int]()

    class Slow(Operator):
        def open(self, context: Any) -> None:
            self._context = context

        async def process_batch(self, batch: Any, out: Any) -> None:
            if self._context.epoch:
                await may_continue.wait()
            seen.append(self._context.epoch)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        data[0].process(Slow)
        return IterationBodyResult([variables[0].map(lambda x: x)], [])

    data = replayed(flow.from_items([bytes(100)] * 10))
    iterate_bounded_streams_until_termination([flow.from_items([0])], [data], body)
    job = await flow.start(channel_limits=ChannelLimits(records=2))
    await until(lambda: job.statistics().loops[0].epoch_complete >= 500)
    [replayer] = [task for task in job._tasks if task.name == "data 0[0]"]
    assert replayer.waits_for_room_in is not None
    assert len(replayer.inbox.posted) <= 3
    may_continue.set()
    statistics = await asyncio.wait_for(job.stop("drain"), PATIENCE_S)
    [loop] = statistics.loops
    assert loop.ended_in is not None
    assert list(dict.fromkeys(seen)) == list(range(loop.ended_in))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_unbounded_loop_with_circulating_records_ends_when_it_is_drained_twice(seed: int) -> None:
    """A drain waits for circulating records, which may belong to input, and only an abort ended the loop."""
    log, flow = Log(), Flow("token")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].process(lambda: Witness(log), name="step").map(lambda n: n + 1)
        return IterationBodyResult([raised], [raised])

    [raised] = iterate_unbounded_streams([flow.from_items([0])], [], body)
    seen = raised.collect()

    async def main() -> None:
        job = await flow.start()
        await until(lambda: len(callbacks(log["step", 0])) > 5)
        first = asyncio.create_task(job.stop("drain"))
        before = len(callbacks(log["step", 0]))
        await until(lambda: len(callbacks(log["step", 0])) > before + 50)
        assert not first.done()
        statistics = await asyncio.wait_for(job.stop("drain"), PATIENCE_S)
        assert (statistics.state, statistics.loops[0].end_reason) == ("finished", "the job was drained")
        assert (await first).state == "finished"

    run_shuffled(main(), seed)
    check_listener(log["step", 0])
    assert seen.items == list(range(1, len(seen.items) + 1))


@pytest.mark.parametrize("records", [2, 3, 12])
async def test_data_that_is_held_at_the_entrance_when_its_source_has_ended(records: int) -> None:
    """The end was queued after data of an epoch that never came, and the barrier waited for that end."""
    items = list(range(records))

    def made() -> tuple[Flow, Any]:
        flow = Flow("loop")
        held = epochs_every(flow.from_items(items), records=1)
        silent = epochs_every(flow.from_source(Endless()), records=1)

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            every = variables[0].union(*data).rebalance().process(Dawdle)
            return IterationBodyResult([every.filter(lambda x: False)], [every])

        config = IterationConfig(max_epochs_ahead=0)
        [passed] = iterate_unbounded_streams([flow.from_items([])], [held, silent], body, config)
        return flow, passed.collect()

    snapshot: JobSnapshot | None = None
    for _ in range(3):
        flow, passed = made()
        job = await flow.start(snapshot=snapshot)
        await until(lambda passed=passed: len(passed.items) == 1)  # type: ignore[misc]
        for _ in range(50):
            await asyncio.sleep(0)
        snapshot = await asyncio.wait_for(job.snapshot(), PATIENCE_S)
        await job.stop("abort")
    flow, passed = made()
    job = await flow.start(snapshot=snapshot)
    await asyncio.wait_for(job.stop("drain"), PATIENCE_S)
    assert sorted(passed.items) == items
