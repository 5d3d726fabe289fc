"""Epochs by number of records, by time and at marks."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from iteration.iteration_support import SMALL, cut_items, ended, run_shuffled
from iteration.partitions_support import (
    KINDS,
    WAYS,
    before,
    callbacks_in,
    check,
    is_mark,
    made,
    number_of,
    records_in,
    settled,
    timed_job,
    tracked,
    write,
)
from support.soak import in_soak
from support.waiting import until

from streamiter import Flow, Operator, epochs_every
from streamiter.engine.checkpointing.commit import JobSnapshot
from streamiter.engine.job.job import Job
from streamiter.errors import JobFailed
from streamiter.iteration.stamping_pace import StampingClock
from streamiter.testing import VirtualClock
from streamiter.topics.topic import Topic

# -- marks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("way", "group_of"), [("marks", lambda x: (x + 3) // 7), ("records", lambda x: x // 4)])
def test_groups_do_not_depend_on_where_batches_are_cut(
    way: str, group_of: Callable[[int], int], kind: str, seed: int
) -> None:
    """A mark at the start or end of a batch was passed on, and the truth value of an array raised an error."""
    flow = Flow("stamps")
    items = cut_items(flow, range(40), seed=seed).map_batch(KINDS[kind])
    seen = tracked(epochs_every(items, **WAYS[way]))
    flow.run()
    numbers = [number for number in range(40) if way == "records" or not is_mark(number)]
    assert records_in(seen.items, 0) == [(number, group_of(number)) for number in numbers]
    assert callbacks_in(seen.items, 0) == list(range(group_of(39) + 1))
    check(seen.items, 1)


def test_a_restored_group_is_not_larger_than_groups_are_now() -> None:
    """A group had three of four records; restored with groups of two, it waited for minus one record."""

    async def run_on(topic: Topic, records: int, count: int, snapshot: JobSnapshot | None) -> tuple[JobSnapshot, Any]:
        flow = Flow("stamps")
        seen = tracked(epochs_every(flow.source(topic), records=records))
        job = await flow.start(snapshot=snapshot)
        await until(lambda: len(records_in(seen.items, 0)) == count)
        taken = await job.snapshot()
        await job.stop("abort")
        return taken, seen

    async def main() -> None:
        topic = await made(1)
        await write(topic, 0, range(7))
        snapshot, _ = await run_on(topic, 4, 7, None)
        await write(topic, 0, range(7, 10))
        _, seen = await run_on(topic, 2, 10, snapshot)
        assert [epoch for _, epoch in records_in(seen.items, 0)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]
        check(seen.items, 1)

    run_shuffled(main())


def test_marks_without_records_between_them_end_epochs() -> None:
    """Two marks without records between them ended only one epoch, so epochs differed from the number of marks."""
    flow = Flow("stamps")
    seen = tracked(epochs_every(flow.from_items([0, 0, 1, 0, 0, 2, 0]), marks=lambda number: number == 0))
    flow.run()
    assert records_in(seen.items, 0) == [(1, 2), (2, 4)]
    assert callbacks_in(seen.items, 0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_a_predicate_that_raises_names_the_record(kind: str) -> None:
    """The error of a predicate did not name the record, which was one of a million."""
    flow = Flow("stamps")
    items = flow.from_items(range(5, -1, -1)).map_batch(KINDS[kind])
    tracked(epochs_every(items, marks=lambda record: 1 / number_of(record) < 0, name="stamp"))
    with pytest.raises(JobFailed, match=r"step 'stamp' \(.*\) on record .*0.*: ZeroDivisionError") as caught:
        flow.run()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# -- the clock -------------------------------------------------------------------------------------------


def test_an_epoch_ends_after_its_time_unless_it_is_empty() -> None:
    """Nights without a click made thousands of epochs, each with the same model as before."""

    async def main() -> None:
        clock, topic, job, seen = await timed_job(1, partitions=1, seconds=10)
        for second in range(25):
            await write(topic, 0, [second])
            await clock.advance(1)
        assert callbacks_in(seen.items, 0) == [0, 1]
        await clock.advance(95)
        assert callbacks_in(seen.items, 0) == [0, 1, 2]
        await write(topic, 0, [120])
        await clock.advance(9)
        assert callbacks_in(seen.items, 0) == [0, 1, 2]
        await clock.advance(1)
        assert callbacks_in(seen.items, 0) == [0, 1, 2, 3]
        await job.stop("drain")
        assert records_in(seen.items, 0) == [(number, number // 10) for number in range(25)] + [(120, 3)]
        check(seen.items, 1)

    run_shuffled(main())


@pytest.mark.parametrize("seed", range(4))
def test_records_of_the_same_time_are_of_the_same_epoch_at_all_subtasks(seed: int) -> None:
    """A subtask that had been silent for an hour counted from its last epoch, and was 360 epochs behind the others."""

    async def main() -> None:
        clock, topic, job, seen = await timed_job(3, seconds=10)
        for partition, numbers in [(0, [1]), (0, [2]), (1, [3, 4]), (0, [5]), (1, [6]), (0, [7])]:
            await write(topic, partition, numbers)
            await clock.advance(10)
        await write(topic, 0, [8])
        await write(topic, 1, [9])
        await clock.advance(10)
        for subtask in range(3):
            assert callbacks_in(seen.items, subtask) == list(range(7))
        await job.stop("drain")
        assert records_in(seen.items, 0) == [(1, 0), (2, 1), (5, 3), (7, 5), (8, 6)]
        assert records_in(seen.items, 1) == [(3, 2), (4, 2), (6, 4), (9, 6)]
        check(seen.items, 3)

    run_shuffled(main(), seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_blocked_subtask_skips_to_the_present_epoch(seed: int) -> None:
    """A blocked subtask handled each epoch that had ended meanwhile, one after the other, between its records."""
    may_continue = asyncio.Event()

    class Blocks(Operator):
        async def process(self, record: Any, out: Any) -> None:
            if record < 100:
                await may_continue.wait()
            out.emit(record)

    async def main() -> None:
        clock, topic, flow = VirtualClock(), await made(2), Flow("stamps")
        source = before("tasks", flow.source(topic, parallelism=2), seed)
        seen = tracked(epochs_every(source, seconds=10).process(Blocks))
        job = await flow.start(clock=clock, channel_limits=SMALL)
        await write(topic, 0, range(30))
        for number in range(100, 105):
            await write(topic, 1, [number])
            await clock.advance(10)
        may_continue.set()
        await settled(clock)
        await clock.advance(10)
        assert callbacks_in(seen.items, 0) == callbacks_in(seen.items, 1) == list(range(6))
        await job.stop("drain")
        of_0 = records_in(seen.items, 0)
        assert [number for number, _ in of_0] == list(range(30))
        assert {epoch for _, epoch in of_0} == {0, 5}
        check(seen.items, 2)

    run_shuffled(main(), seed)


class LateClock(VirtualClock):
    """Calls everything some time after it is due, as on a busy machine."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self._late_s = late_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        return super().call_later(delay_s + self._late_s, callback)


@dataclass
class Told:
    """A subtask that is told which epochs are complete, and when the next one will be."""

    catch_up: Callable[[int, float], None]


@pytest.mark.parametrize(("late_s", "epochs"), [(0.25, 19), (2.5, 6)])
async def test_lateness_does_not_add_up(late_s: float, epochs: int) -> None:
    """Minutes became 61 seconds, the epoch of noon ended at 12:15, and after a pause all epochs ended at once."""
    clock, told = LateClock(late_s), list[int]()
    stamping = StampingClock(clock, seconds=1.0)
    stamping.join(0, Told(lambda epoch, _: told.append(epoch)))
    for _ in range(200):
        stamping.add_records(0, told[-1] + 1)
        await clock.advance(0.1)
    assert told == [-1, *range(epochs)]


@pytest.mark.parametrize("stop", ["drain", "suspend", "abort"])
@pytest.mark.parametrize("way", ["seconds", "records, idle", "marks, idle"])
def test_timers_are_cancelled_when_the_job_stops(way: str, stop: Any) -> None:
    """A forgotten timer held the operator, and posted to a task that had ended."""

    async def main() -> None:
        clock, topic, job, _ = await timed_job(**WAYS[way])
        await write(topic, 0, [1, 2])
        await settled(clock)
        assert clock.timers > 1  # One timer is the watchdog's.
        await job.stop(stop)
        assert clock.timers == 0

    run_shuffled(main())


@pytest.mark.parametrize("way", ["seconds", "records, idle", "marks, idle"])
def test_timers_are_cancelled_when_the_input_has_ended_before_the_job(way: str) -> None:
    """After the end of the input, timers ended epochs without records until the job stopped."""

    async def main() -> None:
        clock, topic, flow = VirtualClock(), await made(1), Flow("stamps")
        seen = tracked(epochs_every(flow.from_items(range(2), name="past"), **WAYS[way]))
        flow.source(topic).collect()
        job = await flow.start(clock=clock)
        await settled(clock)
        assert clock.timers == 1  # The only timer is the watchdog's.
        assert callbacks_in(seen.items, 0) == [0]
        await job.stop("abort")

    run_shuffled(main())


@pytest.mark.parametrize("way", ["seconds", "records, idle", "marks, idle"])
def test_timers_are_not_set_again_for_an_input_that_had_ended_before_the_restore(way: str) -> None:
    """The restored step set timers for an input that had ended."""

    def flow_of(topic: Topic) -> Flow:
        flow = Flow("stamps")
        tracked(epochs_every(flow.from_items(range(2), name="past"), **WAYS[way]))
        flow.source(topic).collect()
        return flow

    async def main() -> None:
        topic = await made(1)
        job = await flow_of(topic).start(clock=VirtualClock())
        await until(lambda: job.statistics().step("track").records_in == 2)
        await settled(VirtualClock())
        snapshot = await job.snapshot()
        await job.stop("abort")
        clock = VirtualClock()
        job = await flow_of(topic).start(clock=clock, snapshot=snapshot)
        await settled(clock)
        assert clock.timers == 1  # The only timer is the watchdog's.
        await job.stop("abort")

    run_shuffled(main())


@pytest.mark.parametrize("way", ["seconds", "records, idle"])
def test_timers_are_cancelled_when_a_step_fails(way: str) -> None:
    """The job had failed, but its timers still ran."""

    async def main() -> None:
        clock, flow = VirtualClock(), Flow("stamps")
        tracked(epochs_every(flow.from_items(["no number"]), **WAYS[way]))
        job = await flow.start(clock=clock)
        with pytest.raises(JobFailed, match="no number"):
            await ended(job)
        assert clock.timers == 0

    run_shuffled(main())


def test_a_restored_job_waits_for_the_rest_of_the_time() -> None:
    """With a snapshot each minute and epochs of five minutes, no epoch ever ended."""

    async def started(topic: Topic, snapshot: JobSnapshot | None) -> tuple[VirtualClock, Job, Any]:
        clock, flow = VirtualClock(), Flow("stamps")
        seen = tracked(epochs_every(flow.source(topic, parallelism=2), seconds=10))
        return clock, await flow.start(clock=clock, snapshot=snapshot), seen

    async def main() -> None:
        topic, snapshot = await made(2), None
        for run in range(4):
            clock, job, seen = await started(topic, snapshot)
            await write(topic, 0, [run])
            await clock.advance(4)
            snapshot = await job.snapshot()
            await job.stop("abort")
        assert records_in(seen.items, 0) == [(0, 0), (1, 0), (2, 0), (3, 1)]
        assert callbacks_in(seen.items, 0) == callbacks_in(seen.items, 1) == [0]
        # The epoch of the snapshot ends with the input, as any other epoch.
        clock, job, seen = await started(topic, snapshot)
        await settled(clock)
        await job.stop("drain")
        assert callbacks_in(seen.items, 0) == [0, 1]
        check(seen.items, 2)

    run_shuffled(main())


async def test_a_subtask_restored_behind_the_others_skips_to_their_epoch() -> None:
    """One subtask gave its state before the end of an epoch, another after it, and the first ended the epoch again."""
    clock, told = VirtualClock(), dict[int, tuple[int, float]]()
    stamping = StampingClock(clock, seconds=10.0)
    for subtask, (completed, remaining_s) in enumerate([(3, 0.5), (4, 9.5), (-1, 99.0)]):
        stamping.join(subtask, Told(lambda *news, subtask=subtask: told.update({subtask: news})))
        stamping.resume_after(subtask, completed, remaining_s)
    assert [*told.values()] == [(4, 10.0)] * 3
    assert clock.timers == 1


# -- anything may happen ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(3), *in_soak(*range(3, 6))])
@pytest.mark.parametrize("way", WAYS)
def test_each_record_has_one_epoch_in_random_runs(way: str, seed: int) -> None:
    """A record had two epochs, or none, after a restore inside a group, a silent partition or other cuts of batches."""
    chance = random.Random(f"{way} {seed}")
    partitions, parallelism = chance.choice([(1, 1), (2, 2), (3, 2), (2, 3), (4, 2)])
    kind, between = chance.choice(list(KINDS)), chance.choice(["nothing", "chain", "tasks"])

    async def started(topic: Topic, snapshot: JobSnapshot | None) -> tuple[VirtualClock, Job, Any]:
        clock, flow = VirtualClock(), Flow("stamps")
        source = before(between, flow.source(topic, parallelism=parallelism), seed).map_batch(KINDS[kind])
        seen = tracked(epochs_every(source, **WAYS[way]))
        return clock, await flow.start(clock=clock, channel_limits=SMALL, snapshot=snapshot), seen

    async def main() -> None:
        topic = await made(partitions)
        clock, job, seen = await started(topic, None)
        written: list[list[int]] = [[] for _ in range(partitions)]
        for _ in range(25):
            action = chance.choice(["write", "write", "wait", "turn", "restore"])
            if action == "write":
                partition = chance.randrange(partitions)
                numbers = [1000 * partition + len(written[partition]) + more for more in range(chance.randint(1, 12))]
                written[partition] += numbers
                await write(topic, partition, numbers)
            elif action == "wait":
                await clock.advance(chance.choice([0.5, 2, 4, 9]))
            elif action == "turn":
                for _ in range(chance.randrange(20)):
                    await asyncio.sleep(0)
            elif chance.random() < 0.5:
                snapshot = await job.snapshot()
                await job.stop("abort")
                clock, job, seen = await started(topic, snapshot)
        expected = [[number for number in numbers if "marks" not in way or not is_mark(number)] for numbers in written]
        await until(lambda: sum(entry[1] == "record" for entry in seen.items) == sum(map(len, expected)))
        if (
            "idle" in way or "seconds" in way
        ) and seed % 2:  # No subtask is held back, not even if all the others are idle.
            for _ in range(4):
                await clock.advance(5)
            last = max((entry[2] for entry in seen.items), default=-1)
            assert all(callbacks_in(seen.items, subtask)[-1:] == [last] for subtask in range(parallelism)) or (
                last == -1
            )
        await job.stop("drain")
        assert clock.timers == 0
        check(seen.items, parallelism)
        for subtask in range(parallelism):
            got = records_in(seen.items, subtask)
            for partition in range(subtask, partitions, parallelism):
                assert [n for n, _ in got if n // 1000 == partition] == expected[partition]
            assert len(callbacks_in(seen.items, subtask)) > max((epoch for _, epoch in got), default=-1)
            if way == "records" and partitions <= parallelism:
                assert [epoch for _, epoch in got] == [at // 4 for at in range(len(got))]

    run_shuffled(main(), seed)
