"""A partition without records for some time does not hold the others back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from iteration.iteration_support import SMALL, Log, callbacks, check_listener, run_shuffled
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
from support.waiting import until

from streamiter import Flow, Operator, epochs_every
from streamiter.engine.job.job import Job
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
