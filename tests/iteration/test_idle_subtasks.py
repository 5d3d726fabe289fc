"""A source subtask without a partition holds no epoch back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from iteration.iteration_support import SMALL, CutItems, Log, callbacks, check_listener, cut_items, ended, run_shuffled
from iteration.partitions_support import before, data_of, made, train, write
from support.waiting import until

from streamiter import Flow, epochs_every
from streamiter.topics.topic import Topic


@pytest.mark.parametrize("seed", range(3))
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
