"""A silent partition, a source subtask without one, and a silent subtask of another process hold no epoch back."""

import asyncio
import logging
from typing import Any

import pytest
from iteration.iteration_support import SMALL, CutItems, Log, callbacks, check_listener, cut_items, ended, run_shuffled
from iteration.partitions_support import (
    before,
    callbacks_in,
    check,
    data_of,
    made,
    records_in,
    settled,
    timed_job,
    tracked,
    train,
    write,
)
from processes.linked_jobs import piped_jobs
from support.soak import in_soak
from support.waiting import until

from streamiter import Flow, Operator, epochs_every
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.testing import VirtualClock
from streamiter.topics.topic import Topic


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("between", ["nothing", "chain", "tasks"])
def test_a_silent_partition_does_not_hold_a_synchronous_loop(between: str, seed: int) -> None:
    """The model was not trained for a night, because one of two partitions had no writer."""
    flow, log = Flow("loop"), Log()

    async def main() -> None:
        clock, topic = VirtualClock(), await made(2)
        source = before(between, flow.source(topic, parallelism=2), seed)
        train(epochs_every(source, records=4, idle_timeout=5), log)
        job = await flow.start(clock=clock, channel_limits=SMALL)
        await write(topic, 0, range(12))
        await clock.advance(4.9)
        assert callbacks(log["train", 0]) == []
        await clock.advance(0.2)
        assert callbacks(log["train", 0]) == [0, 1, 2]
        await write(topic, 0, range(12, 22))
        await settled(clock)
        assert callbacks(log["train", 0]) == [0, 1, 2, 3, 4]
        # The partition receives records in the middle of an epoch.
        await write(topic, 1, range(100, 106))
        await settled(clock)
        assert (104, 6) not in data_of(log)  # Epoch 5 is not complete at the other subtask.
        await write(topic, 0, range(22, 24))
        await settled(clock)
        assert callbacks(log["train", 0]) == [0, 1, 2, 3, 4, 5]
        await write(topic, 0, range(24, 28))
        await settled(clock)
        assert callbacks(log["train", 0]) == [0, 1, 2, 3, 4, 5]
        # The partition becomes silent again: its last two records are a separate group.
        await clock.advance(4)
        await write(topic, 0, range(28, 29))
        await clock.advance(1.1)
        assert callbacks(log["train", 0]) == [0, 1, 2, 3, 4, 5, 6]
        await job.stop("drain")
        assert sorted(data_of(log)) == [
            *((number, number // 4) for number in range(29)),
            *((number, 5 if number < 104 else 6) for number in range(100, 106)),
        ]

    run_shuffled(main(), seed)
    check_listener(log["train", 0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", [{"records": 4, "idle_timeout": 5}, {"seconds": 5}])
def test_nothing_waits_when_all_partitions_are_silent(way: dict[str, Any], seed: int) -> None:
    """Both partitions became silent, the slower one first, and records of the faster one waited until the morning."""
    flow, log = Flow("loop"), Log()

    async def main() -> None:
        clock, topic = VirtualClock(), await made(2)
        train(epochs_every(flow.source(topic, parallelism=3), **way), log)
        job = await flow.start(clock=clock, channel_limits=SMALL)
        await write(topic, 0, range(18))
        await write(topic, 1, [100])
        for _ in range(3):
            await clock.advance(5)
        assert sorted(number for number, _ in data_of(log)) == [*range(18), 100]
        assert len(callbacks(log["train", 0])) == 1 + max(epoch for _, epoch in data_of(log))
        await write(topic, 1, [101])
        for _ in range(3):
            await clock.advance(5)
        assert data_of(log)[-1] == (101, callbacks(log["train", 0])[-1])
        await job.stop("drain")

    run_shuffled(main(), seed)
    check_listener(log["train", 0])


async def test_silence_counts_from_the_last_record() -> None:
    """A partition with a record every four seconds was idle after five seconds, half of the time."""
    clock, topic, job, seen = await timed_job(1, partitions=1, records=100, idle_timeout=5)
    for number in range(20):
        await write(topic, 0, [number])
        await clock.advance(4.75)
    assert callbacks_in(seen.items, 0) == []
    await clock.advance(0.25)
    assert callbacks_in(seen.items, 0) == [0]
    await clock.advance(1000)
    await write(topic, 0, [20])
    await clock.advance(4.75)
    assert callbacks_in(seen.items, 0) == [0]
    await clock.advance(0.25)
    assert callbacks_in(seen.items, 0) == [0, 1]
    await job.stop("drain")
    assert records_in(seen.items, 0) == [*((number, 0) for number in range(20)), (20, 1)]


@pytest.mark.parametrize("seed", range(4))
def test_a_subtask_that_is_blocked_is_not_silent(seed: int) -> None:
    """The groups of a subtask became smaller, because it had no turn while the model was saved."""
    may_continue = asyncio.Event()

    class Blocks(Operator):
        async def process(self, record: Any, out: Any) -> None:
            await may_continue.wait()
            out.emit(record)

    async def main() -> None:
        clock, topic, flow = VirtualClock(), await made(1), Flow("stamps")
        source = before("tasks", flow.source(topic), seed)
        seen = tracked(epochs_every(source, records=6, idle_timeout=5).process(Blocks))
        job = await flow.start(clock=clock, channel_limits=SMALL)
        await write(topic, 0, range(33))
        for _ in range(20):
            await clock.advance(2)
        may_continue.set()
        await until(lambda: len(records_in(seen.items, 0)) == 33)
        assert callbacks_in(seen.items, 0) == [0, 1, 2, 3, 4]
        await clock.advance(5)
        assert callbacks_in(seen.items, 0) == [0, 1, 2, 3, 4, 5]
        await job.stop("drain")
        assert records_in(seen.items, 0) == [(number, number // 6) for number in range(33)]

    run_shuffled(main(), seed)


@pytest.mark.parametrize("was_idle", [True, False])
def test_an_idle_subtask_is_idle_after_a_restore(was_idle: bool) -> None:
    """After each restart, the model waited again for a partition that had been silent for weeks."""

    async def main() -> None:
        clock, topic, job, _ = await timed_job(records=4, idle_timeout=20)
        await clock.advance(15)
        await write(topic, 0, range(4))
        await clock.advance(10 if was_idle else 1)
        snapshot = await job.snapshot()
        await job.stop("abort")
        clock, flow = VirtualClock(), Flow("stamps")
        seen = tracked(epochs_every(flow.source(topic, parallelism=2), records=4, idle_timeout=20))
        job = await flow.start(clock=clock, snapshot=snapshot)
        await write(topic, 0, range(4, 8))
        await clock.advance(19)
        assert callbacks_in(seen.items, 1) == ([0, 1] if was_idle else [])
        await clock.advance(2)
        assert callbacks_in(seen.items, 1) == [0, 1]
        await job.stop("drain")
        check(seen.items, 2)

    run_shuffled(main())


@pytest.mark.parametrize("seed", range(6))
def test_a_restored_loop_is_not_held_by_a_silent_partition_either(seed: int) -> None:
    """Records that the loop had trained on before the snapshot were below the watermark of the restored loop."""
    log, again = Log(), Log()

    async def started(topic: Topic, log: Log, **options: Any) -> tuple[VirtualClock, Job]:
        clock, flow = VirtualClock(), Flow("loop")
        source = before("tasks", flow.source(topic, parallelism=2), seed)
        train(epochs_every(source, records=4, idle_timeout=5), log)
        return clock, await flow.start(clock=clock, channel_limits=SMALL, **options)

    async def main() -> None:
        topic = await made(2)
        await write(topic, 0, range(20))
        clock, job = await started(topic, log)
        await clock.advance(5 if seed % 2 else 3)
        await write(topic, 0, range(20, 30))
        for _ in range(7 * seed):
            await asyncio.sleep(0)
        snapshot = await job.snapshot()
        seen = data_of(log)
        await job.stop("abort")
        clock, job = await started(topic, again, snapshot=snapshot)
        await write(topic, 1, range(100, 105))
        for _ in range(3):
            await clock.advance(5)
        trained = {number for number, _ in [*seen, *data_of(again)]}
        assert trained == {*range(30), *range(100, 105)}
        assert callbacks(again["train", 0])[-1] == max(epoch for _, epoch in data_of(again))
        await job.stop("drain")

    run_shuffled(main(), seed)
    check_listener([("callback", epoch) for epoch in range(callbacks(again["train", 0])[0])] + again["train", 0])


async def test_the_log_says_which_partition_a_held_loop_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    """The log named the partition with data, and a step that the user had not written, but not the silent partition."""
    caplog.set_level(logging.WARNING, logger="streamiter.job")
    flow, log = Flow("loop"), Log()
    clock, topic = VirtualClock(), await made(2)
    train(epochs_every(flow.source(topic, parallelism=2), records=4), log)
    job = await flow.start(clock=clock, channel_limits=SMALL)
    await write(topic, 0, range(40))
    await clock.advance(700)
    assert (
        "data 0[0] is held: its data is ahead of epoch 0, which waits for data at data 0[1] (a silent source needs "
        "idle_timeout= of epochs_every)"
    ) in caplog.text
    await job.stop("abort")


@pytest.mark.parametrize("seed", [0, *in_soak(1, 2)])
@pytest.mark.parametrize("between", ["nothing", "chain", "tasks"])
@pytest.mark.parametrize(("partitions", "parallelism"), [(1, 2), (2, 3), (1, 4), (3, 3)])
def test_epochs_complete_though_there_are_more_subtasks_than_partitions(
    partitions: int, parallelism: int, between: str, seed: int
) -> None:
    """A synchronous loop on a topic of two partitions, with parallelism three, stalled silently."""
    flow, log = Flow("loop"), Log()

    async def main() -> None:
        topic = await made(partitions)
        for partition in range(partitions):
            await write(topic, partition, range(20))
        source = flow.source(topic, parallelism=parallelism)
        train(epochs_every(before(between, source, seed), records=4), log)
        job = await flow.start(channel_limits=SMALL)
        await until(lambda: len(callbacks(log["train", 0])) == 5)
        [loop] = job.statistics().loops
        assert loop.epoch_complete == 4
        await job.stop("drain")

    run_shuffled(main(), seed)
    check_listener(log["train", 0])
    assert sorted(data_of(log)) == sorted([(number, number // 4) for number in range(20)] * partitions)


@pytest.mark.parametrize("seed", range(3))
def test_an_added_partition_starts_at_the_epoch_of_the_others(seed: int) -> None:
    """Records of the new partition arrived in epochs whose callbacks had been called."""
    flow, log = Flow("loop"), Log()

    async def main() -> None:
        topic = await made(1)
        await write(topic, 0, range(20))
        train(epochs_every(flow.source(topic, parallelism=2), records=4), log)
        job = await flow.start(channel_limits=SMALL)
        await until(lambda: len(callbacks(log["train", 0])) == 5)
        await topic.create(partitions=2)
        await write(topic, 1, range(100, 108))
        # In a synchronous loop the records of subtask 1 come after those of subtask 0.
        await until(lambda: any(task.held_records for task in job.statistics().tasks if task.name == "train[0]"))
        await write(topic, 0, range(20, 28))
        await until(lambda: len(callbacks(log["train", 0])) == 7)
        await job.stop("drain")

    run_shuffled(main(), seed)
    check_listener(log["train", 0])
    assert sorted(data_of(log)) == sorted(
        (number, (number - 80 if number >= 100 else number) // 4) for number in [*range(28), *range(100, 108)]
    )


@pytest.mark.parametrize("seed", range(6))
def test_an_idle_subtask_holds_no_epoch_back_after_a_restore(seed: int) -> None:
    """The subtask had reported that it is idle before the snapshot, and did not report it again after the restore."""
    log, again = Log(), Log()

    def flow_of(topic: Topic, log: Log) -> Flow:
        flow = Flow("loop")
        train(epochs_every(before("tasks", flow.source(topic, parallelism=3), seed), records=4), log)
        return flow

    async def main() -> None:
        topic = await made(2)
        for partition in range(2):
            await write(topic, partition, range(20))
        job = await flow_of(topic, log).start(channel_limits=SMALL)
        await until(lambda: len(data_of(log)) > 3 * seed)
        snapshot = await job.snapshot()
        seen = data_of(log)
        await job.stop("abort")
        job = await flow_of(topic, again).start(channel_limits=SMALL, snapshot=snapshot)
        for partition in range(2):
            await write(topic, partition, range(20, 28))
        await until(lambda: len(data_of(again)) + len(seen) >= 56)
        await until(lambda: 6 in callbacks(again["train", 0]))
        await job.stop("drain")
        assert set(data_of(again)) | set(seen) == {(number, number // 4) for number in range(28)}

    run_shuffled(main(), seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_subtask_is_idle_after_its_other_input_has_ended(seed: int) -> None:
    """A bounded stream ended before the topic: one subtask had no more input, and the others waited for it."""
    flow, log = Flow("loop"), Log()

    async def main() -> None:
        topic = await made(1)
        await write(topic, 0, range(20))
        past = cut_items(flow, [1000, 1001, 1002], seed=seed, parallelism=2)
        both = past.union(flow.source(topic, parallelism=2))
        train(epochs_every(both, records=4), log)
        job = await flow.start(channel_limits=SMALL)
        await until(lambda: len(callbacks(log["train", 0])) == 5)
        await job.stop("drain")

    run_shuffled(main(), seed)
    check_listener(log["train", 0])
    assert sorted(number for number, _ in data_of(log)) == [*range(20), 1000, 1001, 1002]


@pytest.mark.parametrize("seed", range(3))
def test_the_last_epochs_of_ended_subtasks_complete_with_an_idle_one(seed: int) -> None:
    """All partitions had ended, but the loop stopped one epoch too early."""
    flow, log, all_others_ended = Flow("loop"), Log(), asyncio.Event()

    class Ends(CutItems):
        """Gives items in one subtask; the other subtask has no partition and no end."""

        def open(self, context: Any, positions: Any) -> None:
            super().open(context, positions)
            self._none: bool = context.subtask_index > 0
            self._items = [] if self._none else list(range(10))
            self._at_end = all_others_ended.wait if self._none else None

        def is_idle(self) -> bool:
            return self._none

    async def main() -> None:
        train(epochs_every(flow.from_source(lambda: Ends([], seed), parallelism=2), records=4), log)
        job = await flow.start(channel_limits=SMALL)
        await until(lambda: callbacks(log["train", 0]) == [0, 1, 2])
        all_others_ended.set()
        await ended(job)

    run_shuffled(main(), seed)
    check_listener(log["train", 0])


@pytest.mark.parametrize("ways", [{"seconds": 5}, {"records": 2, "idle_timeout": 5}], ids=["seconds", "idle"])
async def test_a_silent_subtask_in_another_process_completes_the_epochs_of_the_others(ways: dict[str, Any]) -> None:
    """The model waited for a partition of another process that had no records."""
    clock, topic, flow = VirtualClock(), await made(2), Flow("stamps")
    seen = tracked(epochs_every(flow.source(topic, parallelism=2), **ways))
    jobs = piped_jobs(flow, 2, 1, JobOptions(clock=clock))
    await asyncio.gather(*(job.start() for job in jobs))
    await write(topic, 0, [1, 2])
    await until(lambda: len(seen.items) >= 2)
    for _ in range(4):
        await clock.advance(2.5)
    await until(lambda: callbacks_in(seen.items, 0) == callbacks_in(seen.items, 1) == [0])
    await jobs[0].stop("drain")
    await asyncio.gather(*(job.wait() for job in jobs))
    check(seen.items, 2)
