"""Event time of partitions, and windows and joins that resume with another parallelism."""

import asyncio
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import NUMBERS, numbers, outputs
from event_time.operators import Countdown, Stamped, WindowCounts, events, window_counts
from support.soak import in_soak
from support.waiting import until

from streamiter import Checkpoints, Flow, Json, Operator, RocksState, session, sliding, tumbling
from streamiter.engine.job.job import Job
from streamiter.errors import JobFailed
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.operators import Context, Output
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch
from streamiter.values.times import MAX_TIME


async def broker_with(partitions: int) -> MemoryBroker:
    broker = MemoryBroker()
    await broker.topic("events").create(partitions=partitions)
    return broker


async def write(broker: MemoryBroker, times: list[Any], partition: int = 0) -> None:
    writer = await broker.topic("events").open_writer()
    values = [time if isinstance(time, bytes) else b'{"at":%d}' % time for time in times]
    await writer.write(OutgoingBatch(values, partition=partition))
    await writer.close()


def stamping(broker: MemoryBroker, **options: Any) -> tuple[Flow, Any]:
    flow = Flow("test")
    stop = options.pop("stop", None)
    source = flow.source(broker.topic("events"), stop=stop, decode=Json())
    timed = source.event_time("at", unit="ms", check_unit=False, **options)
    return flow, timed.process(Stamped).collect()


def watermarks(job: Job) -> set[int | None]:
    return {task.event_time for task in job.statistics().tasks if task.event_time is not None}


async def test_a_silent_partition_holds_back_the_others_only_for_a_while() -> None:
    broker, clock = await broker_with(2), VirtualClock()
    await write(broker, [10], 0)
    await write(broker, [5], 1)
    flow, seen = stamping(broker, idle_after_s=10)
    job = await flow.start(clock=clock)
    await until(lambda: watermarks(job) == {5})
    await write(broker, [20], 0)
    await until(lambda: len(seen) == 3)
    await clock.advance(9)
    assert watermarks(job) == {5}
    await write(broker, [18], 0)
    await until(lambda: len(seen) == 4)
    await clock.advance(4)
    assert watermarks(job) == {20}, "only the silent one is left out"
    await write(broker, [12], 1)
    await until(lambda: len(seen) == 5)
    assert watermarks(job) == {20}, "it does not go back"
    await write(broker, [30], 0)
    await write(broker, [25], 1)
    await until(lambda: watermarks(job) == {25})
    await job.stop("drain")
    assert watermarks(job) == {MAX_TIME}
    assert seen.items[-1][:2] == ({"at": 25}, 25)


@pytest.mark.parametrize(("when_idle", "expected"), [("wait", 10), ("advance", 3_010)])
async def test_while_all_are_silent_time_stops_or_advances_with_the_clock(when_idle: Any, expected: int) -> None:
    broker, clock = await broker_with(2), VirtualClock()
    await write(broker, [10], 0)
    flow, _ = stamping(broker, idle_after_s=2, when_idle=when_idle)
    job = await flow.start(clock=clock)
    await until(lambda: job.statistics().step("event_time").records_in == 1)
    await clock.advance(5)
    assert watermarks(job) == {expected}
    await job.stop("abort")


async def test_subtasks_without_partitions_hold_back_nothing() -> None:
    broker = await broker_with(1)
    await write(broker, [10])
    flow = Flow("test", parallelism=3)
    source = flow.source(broker.topic("events"))
    timed = source.event_time("at", unit="ms", check_unit=False)
    timed.key_by(lambda record: 0).process(Stamped, parallelism=1, name="reader").collect()
    job = await flow.start()
    await until(lambda: [task.event_time for task in job.statistics().tasks if task.name == "reader[0]"] == [10])
    await job.stop("abort")


async def test_partitions_that_have_ended_or_never_had_a_record_do_not_count() -> None:
    broker = await broker_with(3)
    await write(broker, [10], 0)
    await write(broker, [5], 1)
    await write(broker, [99], 1)
    flow, seen = stamping(broker, stop={0: 1, 1: 1, 2: 0})
    job = await flow.start()
    await job.wait()
    assert sorted(row[1] for row in seen.items) == [5, 10]


async def test_a_new_partition_counts_from_the_beginning() -> None:
    broker, clock = await broker_with(1), VirtualClock()
    await write(broker, [10], 0)
    flow, _ = stamping(broker, idle_after_s=None)
    job = await flow.start(clock=clock)
    await until(lambda: watermarks(job) == {10})
    await broker.topic("events").create(partitions=2)
    await clock.advance(60)
    await write(broker, [20], 0)
    await write(broker, [12], 1)
    await until(lambda: watermarks(job) == {12})
    await job.stop("abort")


async def test_the_timestamps_of_the_topic_are_used_without_a_field() -> None:
    broker = await broker_with(1)
    writer = await broker.topic("events").open_writer()
    values = [b'{"n":%d}' % number for number in range(4)]
    values[1] = b"no json"
    await writer.write(OutgoingBatch(values, timestamps_ms=[5, 6, 7, 8]))
    await writer.close()
    flow = Flow("test")
    source = flow.source(broker.topic("events"), stop="latest", on_error="skip")
    seen = source.event_time().process(Stamped).collect()
    job = await flow.start()
    await job.wait()
    assert [(record["n"], time) for record, time, _ in seen.items] == [(0, 5), (2, 7), (3, 8)]


async def test_a_record_of_the_topic_without_a_timestamp_is_refused() -> None:
    broker = await broker_with(1)
    writer = await broker.topic("events").open_writer()
    await writer.write(OutgoingBatch([b"1"], timestamps_ms=[-1]))
    await writer.close()
    flow = Flow("test")
    flow.source(broker.topic("events"), stop="latest").event_time().collect()
    job = await flow.start()
    with pytest.raises(JobFailed, match="expected a timestamp of the topic, given none"):
        await job.wait()


# -- stops and restarts ------------------------------------------------------------------------------------


def counting(broker: MemoryBroker, parallelism: int, stop: Any) -> tuple[Flow, Any, Any]:
    flow = Flow("test", parallelism=parallelism)
    source = flow.source(broker.topic("events"), stop=stop, name="events")
    timed = source.event_time("at", unit="ms", out_of_orderness_s=0.04, check_unit=False, name="times")
    counts = timed.key_by(lambda event: event["user"]).process(WindowCounts, name="counts").collect(name="collect")
    pending = timed.batch(1_000, name="thousands").collect(name="batches")
    return flow, counts, pending


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (1, 3), (3, 1), (2, 3), (3, 2)])
async def test_after_a_restart_with_any_parallelism_nothing_is_missing_or_twice(
    before: int, after: int, tmp_path: Path
) -> None:
    broker, given = await broker_with(3), events(300)
    parts = [[b'{"id":%d,"user":%d,"at":%d}' % tuple(event.values()) for event in given[part::3]] for part in range(3)]
    checkpoints = Checkpoints(str(tmp_path), interval_s=100)
    flow, counts, _ = counting(broker, before, None)
    job = await flow.start(checkpoints=checkpoints)
    for part in range(3):
        await write(broker, parts[part][: 30 + 10 * part], part)
    await until(lambda: job.statistics().step("times").records_in == 120)
    await job.stop("suspend")
    assert 0 < len(counts) < len(window_counts(given))
    for part in range(3):
        await write(broker, parts[part][30 + 10 * part :], part)
    flow, counts, pending = counting(broker, after, "latest")
    job = await flow.start(checkpoints=checkpoints)
    await job.wait()
    assert sorted(counts.items) == window_counts(given)
    assert sum(map(len, pending.items)) == 300


@pytest.mark.parametrize("how", ["drain", "suspend", "abort"])
async def test_only_a_drained_job_reaches_the_end_of_time(how: Any) -> None:
    broker = await broker_with(1)
    await write(broker, [b'{"at":1,"timer":50}'])
    flow = Flow("test")
    source = flow.source(broker.topic("events"))
    fired = source.event_time("at", unit="ms", check_unit=False).process(Countdown, name="timers").collect()
    job = await flow.start()
    await until(lambda: watermarks(job) == {1})
    await job.stop(how)
    assert fired.items == ([(None, 50)] if how == "drain" else [])


async def test_late_records_are_counted_and_the_task_that_holds_back_is_named() -> None:
    broker = await broker_with(2)
    await write(broker, [10, 3, 20], 0)
    flow, _ = stamping(broker)
    job = await flow.start()
    await until(lambda: job.statistics().step("event_time").records_in == 3)
    await asyncio.sleep(0)
    [source] = [task for task in job.statistics().tasks if task.name == "events[0]"]
    assert (source.event_time, source.late_records, source.event_time_held_by) == (None, 0, "partition 1")
    await write(broker, [15], 1)
    await until(lambda: watermarks(job) == {15})
    await write(broker, [14], 0)
    await until(lambda: job.statistics().tasks[0].late_records == 1)
    await job.stop("abort")


async def test_the_watchdog_names_the_partition_that_stops_time(caplog: pytest.LogCaptureFixture) -> None:
    """Windows stayed open for days, because one of 50 partitions had no records."""
    broker, clock = await broker_with(2), VirtualClock()
    flow, seen = stamping(broker, idle_after_s=None)
    job = await flow.start(clock=clock, stall_after_s=4)
    for number in range(8):
        await write(broker, [number], 0)
        await until(lambda: len(seen) == number + 1)  # noqa: B023
        await clock.advance(1)
    await job.stop("abort")
    messages = [record.getMessage() for record in caplog.records if "event time" in record.getMessage()]
    assert messages == [
        "the event time of events[0] stays at before all times although records arrive: held back by partition 1"
    ]


async def test_a_restarted_job_knows_its_watermark_without_new_records(tmp_path: Path) -> None:
    """After a restart no window closed until every partition had a new record."""
    broker = await broker_with(2)
    await write(broker, [10], 0)
    await write(broker, [20], 1)
    for start in range(2):
        flow = Flow("test", parallelism=2)
        source = flow.source(broker.topic("events"), name="events")
        timed = source.event_time("at", unit="ms", check_unit=False, name="times")
        timed.rebalance().process(Stamped, name="seen", parallelism=1).collect(name="all")
        job = await flow.start(checkpoints=Checkpoints(str(tmp_path), interval_s=100))
        await until(lambda: {task.name: task.event_time for task in job.statistics().tasks}.get("seen[0]") == 10)  # noqa: B023
        assert job.statistics().step("seen").records_in == (2 if not start else 0)
        await job.stop("suspend")


TURNS = 60
KEYS = 5


def keyed(flow: Flow, broker: MemoryBroker, name: str = "in") -> KeyedStream:
    timed = numbers(flow, broker, name).event_time(lambda n: n, unit="ms", check_unit=False, name=f"times of {name}")
    return timed.key_by(lambda n: n % KEYS)


def windows(broker: MemoryBroker, parallelism: int, state: RocksState | None) -> Flow:
    flow = Flow("windows", parallelism=parallelism, state=state)
    stream = keyed(flow, broker)
    for name, window in {"tumbling": tumbling(0.02), "session": session(0.006), "sliding": sliding(0.012)}.items():
        results = stream.window(window, name=name).aggregate("collect")
        results.map(lambda result, name=name: [name, result.start, *result.value]).sink(broker.topic("out"))
    return flow


def joins(broker: MemoryBroker, parallelism: int, state: RocksState | None) -> Flow:
    flow = Flow("joins", parallelism=parallelism, state=state)
    left, right = keyed(flow, broker), keyed(flow, broker, "in2")
    pairs = left.interval_join(right, lower_s=0.001, upper_s=0.005, how="full", name="interval")
    as_of = left.join_table(right, strict=True, name="as of")
    before = left.as_of_window(right, 0.011, name="before").aggregate("count")
    pairs.map(lambda pair: ["interval", *pair]).sink(broker.topic("out"))
    as_of.map(lambda pair: ["as of", *pair]).sink(broker.topic("out"))
    before.map(lambda pair: ["before", *pair]).sink(broker.topic("out"))
    return flow


class Later(Operator):
    """Emits each number 9 ms later."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, number: int, out: Output) -> None:
        self._context.set_event_timer(number + 9, number)

    def on_event_timer(self, number: int, out: Output) -> None:
        out.emit([self._context.key, number, self._context.event_time])


def timers(broker: MemoryBroker, parallelism: int, state: RocksState | None) -> Flow:
    flow = Flow("timers", parallelism=parallelism, state=state)
    keyed(flow, broker).process(Later, name="later").sink(broker.topic("out"))
    return flow


def expected_windows() -> Counter[Any]:
    found: Counter[Any] = Counter()
    for key in range(KEYS):
        own = list(range(key, NUMBERS, KEYS))
        for start in {n // 20 * 20 for n in own}:
            found["tumbling", start, *(n for n in own if start <= n < start + 20)] += 1
        found["session", key, *own] += 1
        for n in own:
            found["sliding", n - 11, *(each for each in own if n - 12 < each <= n)] += 1
    return found


def expected_joins() -> Counter[Any]:
    found: Counter[Any] = Counter()
    for n in range(NUMBERS):
        found["interval", n, n + KEYS if n + KEYS < NUMBERS else None] += 1
        if n < KEYS:
            found["interval", None, n] += 1
        found["as of", n, n - KEYS if n >= KEYS else None] += 1
        found["before", n, (n >= KEYS) + (n >= 2 * KEYS)] += 1
    return found


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        *((1, 3, kept) for kept in ("in memory", "on disk")),  # and back to one subtask
        (2, 3, "either"),
        (2, 2, "on disk"),
        *in_soak((2, 3, "in memory"), (3, 1, "in memory"), (3, 1, "on disk"), (2, 2, "either")),
    ],
)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (windows, expected_windows()),
        (joins, expected_joins()),
        (timers, Counter((n % KEYS, n, n + 9) for n in range(NUMBERS))),
    ],
    ids=["windows", "joins", "timers"],
)
def test_states_move_with_their_keys(
    make: Any, expected: Counter[Any], before: int, after: int, kept: str, tmp_path: Path
) -> None:
    on_disk = RocksState(tmp_path, memory_bytes=16 << 20)
    states = cycle({"in memory": [None], "on disk": [on_disk], "either": [on_disk, None]}[kept])
    got = outputs(
        lambda broker, parallelism: make(broker, parallelism, next(states)),
        [before, after, before],
        turns=TURNS,
        seed=before * 10 + after,
    )
    assert Counter(map(tuple, got)) == expected
