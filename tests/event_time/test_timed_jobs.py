"""Windows and joins in flows: timestamps, columns, clocks, refused records, and wrong settings."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from event_time.cases import Record
from event_time.operators import Singles, Stamped
from operators.operator_harness import frozen

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    Operator,
    OutputTag,
    Stream,
    fold,
    for_each_round,
    hopping,
    iterate_bounded_streams_until_termination,
    replayed,
    tumbling,
)
from streamiter.errors import JobFailed
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.operators import Context, Output, Source, SourceBatch
from streamiter.testing import VirtualClock

LATE = OutputTag("late")


def by_key(flow: Flow, records: list[Any], bound_s: float = 0.0) -> KeyedStream:
    stream = flow.from_source(lambda: Singles(records)).event_time(
        lambda record: record.time, unit="ms", check_unit=False, out_of_orderness_s=bound_s
    )
    return stream.key_by(lambda record: record.key)


def test_results_have_the_timestamp_of_the_end_of_their_window() -> None:
    class Timestamps(Operator):
        def open(self, context: Context) -> None:
            self.context = context

        def process(self, record: Any, out: Output) -> None:
            out.emit(self.context.timestamp)

    flow = Flow("timestamps")
    found = by_key(flow, [Record("a", 1), Record("a", 25)]).window(tumbling(0.01)).aggregate("count")
    timestamps = found.process(Timestamps).collect()
    again = found.key_by(lambda result: 0).window(tumbling(0.1)).aggregate("count").collect()
    assert flow.run().state == "finished"
    assert timestamps.items == [9, 29]
    assert [(result.end, result.value) for result in again.items] == [(100, 2)]


def test_columns_and_single_records_have_the_same_results() -> None:
    random = np.random.default_rng(3)
    count = 2_000
    columns = Columns(
        {
            "user": random.integers(0, 9, count),
            "at": np.arange(count) - random.integers(0, 50, count),
            "x": random.random(count),
        }
    )

    def results(keyed: Callable[[Stream], Any]) -> list[Any]:
        flow = Flow("columns", parallelism=2)
        source = flow.from_items(columns, parallelism=1)
        timed = source.event_time("at", unit="ms", check_unit=False, out_of_orderness_s=0.05)
        aggregates: Any = {"n": "count", **{name: (name, "x") for name in ("sum", "mean", "min", "max")}}
        found = keyed(timed).window(hopping(0.1, 0.05)).aggregate(**aggregates).collect()
        assert flow.run().state == "finished"
        return sorted(([each.key, each.start, frozen(each.value)] for each in found.items), key=repr)

    in_columns = results(lambda stream: stream.key_by_batch(lambda batch: batch["user"]))
    one_by_one = results(lambda stream: stream.key_by(lambda record: int(record["user"])))
    assert in_columns == one_by_one
    assert len(in_columns) > 300


class Ticking(Source):
    """Reads one record every 100 ms of the clock."""

    def __init__(self, count: int) -> None:
        self._left = count

    def open(self, context: Context, positions: Any) -> None:
        self._clock = context.clock

    async def read(self) -> SourceBatch | None:
        if not self._left:
            return None
        await self._clock.sleep(0.1)
        self._left -= 1
        return SourceBatch([self._left], {})


async def test_windows_of_the_clock_are_given_when_it_passes_their_end_and_at_the_end_of_the_input() -> None:
    flow = Flow("clock")
    windows = flow.from_source(lambda: Ticking(25)).key_by(lambda n: n % 2).window(tumbling(1), time="processing")
    found = windows.aggregate("collect").collect()
    clock = VirtualClock()
    job = await flow.start(clock=clock)
    await clock.advance(5)
    await job.wait()
    values = [result.value for result in found.items]
    assert sorted(n for value in values for n in value) == list(range(25))
    assert max(map(len, values)) == 5
    assert len({result.end for result in found.items}) >= 3
    assert not any(result.revision or result.is_early for result in found.items)


@pytest.mark.parametrize("is_timed", [False, True])
async def test_a_join_by_the_clock_gives_records_without_a_partner_when_their_time_is_over(is_timed: bool) -> None:
    """A view without a click was given with the next view, or at the end of the job."""
    flow = Flow("clock")
    numbers = flow.from_source(lambda: Ticking(20))
    if is_timed:
        numbers = numbers.event_time(lambda n: n, unit="ms", check_unit=False)
    # 19, 18, … 0: the partner of n comes 300 ms after it as n − 3, but not that of 10 and more.
    left, right = numbers.key_by(lambda n: n), numbers.filter(lambda n: n < 7).key_by(lambda n: n + 3)
    pairs = left.interval_join(right, lower_s=0, upper_s=0.45, how="left", one_to_one=True, time="processing")
    seen: list[tuple[int, Any]] = []
    pairs.map(seen.append)
    clock = VirtualClock()
    job = await flow.start(clock=clock)
    await clock.advance(1.99)
    assert seen[:10] == [*[(n, None) for n in range(19, 13, -1)], *seen[6:10]]
    assert {pair for pair in seen if pair[0] < 10} == {(n, n - 3) for n in range(9, 3, -1)}
    assert (10, None) in seen
    await clock.advance(1)
    await job.wait()
    assert sorted(seen, key=str) == sorted([(n, n - 3 if 3 <= n < 10 else None) for n in range(20)], key=str)


async def test_a_join_by_the_clock_pairs_what_arrives_in_one_window() -> None:
    flow = Flow("clock")
    left, right = (flow.from_source(lambda: Ticking(25), name=name) for name in ("left", "right"))
    timed = right.event_time(lambda n: n, unit="ms", check_unit=False)
    pairs = left.key_by(lambda n: n % 2).window_join(
        timed.filter(lambda n: n > 5).key_by(lambda n: n % 2), tumbling(1), how="left", time="processing"
    )
    found = pairs.collect()
    clock = VirtualClock()
    job = await flow.start(clock=clock)
    await clock.advance(1.5)
    given = len(found)
    assert given > 10, "it is given when the clock passes the end of the window"
    await clock.advance(5)
    await job.wait()
    assert len(found) > given
    assert {one for one, _ in found.items} == set(range(25))
    assert {(n, n) for n in range(6, 25)} <= set(found.items)
    assert all(other is None or (abs(one - other) < 10 and (one - other) % 2 == 0) for one, other in found.items)
    assert (0, None) in found.items


@pytest.mark.parametrize("is_timed", [False, True])
async def test_duplicates_by_the_clock_are_those_that_arrive_soon_after(is_timed: bool) -> None:
    flow = Flow("once")
    numbers = flow.from_source(lambda: Ticking(25))
    if is_timed:
        numbers = numbers.event_time(lambda n: 7 * n, unit="ms", check_unit=False)
    once = numbers.key_by(lambda n: 0).deduplicate(lambda n: n % 3, within_s=0.35, time="processing", name="once")
    found = (once.process(Stamped) if is_timed else once.map(lambda n: (n, 7 * n, None))).collect()
    clock = VirtualClock()
    job = await flow.start(clock=clock)
    await clock.advance(5)
    await job.wait()
    # An id comes every 0.3 s, so each second one passes.
    assert [row[:2] for row in found.items] == [(n, 7 * n) for n in range(24, -1, -1) if (24 - n) // 3 % 2 == 0]
    assert job.statistics().step("once").records_in == 25


async def test_early_results_come_by_the_clock_for_windows_that_have_changed() -> None:
    flow = Flow("early")
    timed = flow.from_source(lambda: Ticking(10)).event_time(lambda n: 10 - n, unit="ms", check_unit=False)
    found = timed.key_by(lambda n: 0).window(tumbling(10), early_every_s=0.22).aggregate("count").collect()
    clock = VirtualClock()
    job = await flow.start(clock=clock)
    await clock.advance(5)
    await job.wait()
    *early, last = found.items
    assert [result.value for result in early] == [2, 4, 6, 8]
    assert len(early) >= 3
    assert all(result.is_early for result in early)
    assert (last.value, last.is_early, last.revision) == (10, False, len(early))


@pytest.mark.parametrize("how", ["left", "inner"])
@pytest.mark.parametrize("is_timed", [False, True])
def test_a_table_of_the_clock_is_complete_before_the_stream_is_read(how: Any, is_timed: bool) -> None:
    flow = Flow("table", parallelism=2)
    changes = [{"id": n % 4, "name": f"{n}" if n < 7 else None} for n in range(8)]
    table = flow.from_items(changes, parallelism=1).key_by(lambda change: change["id"])
    stream = flow.from_items([0, 3, 2, 9])
    if is_timed:
        stream = stream.event_time(lambda n: n, unit="ms", check_unit=False)
    joined = stream.key_by(lambda n: n).join_table(table, value="name", how=how, time="processing").collect()
    assert flow.run().state == "finished"
    expected = [(0, "4"), (2, "6")] + ([(3, None), (9, None)] if how == "left" else [])
    assert sorted(joined.items, key=str) == sorted(expected, key=str)


def test_each_round_has_windows_of_its_own() -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
        def in_round(streams: list[Stream]) -> list[Stream]:
            keyed = streams[0].key_by(lambda n: n % 2)
            pairs = keyed.interval_join(keyed, lower_s=0.002, upper_s=0.004, how="left")
            return [keyed.window(tumbling(0.005)).aggregate(("sum", lambda n: n)).map(lambda r: r.value), pairs]

        values, pairs = for_each_round([data[0]], in_round)
        again = variables[0].map(lambda n: n + 1).filter(lambda n: n < 2)
        return IterationBodyResult([again], [values, pairs])

    flow = Flow("rounds")
    numbers = flow.from_items([1, 3, 5, 7, 2]).event_time(
        lambda n: n, unit="ms", check_unit=False, out_of_orderness_s=0.01
    )
    values, pairs = iterate_bounded_streams_until_termination([flow.from_items([0])], [replayed(numbers)], body)
    sums, joined = values.collect(), pairs.collect()
    assert flow.run().state == "finished"
    assert sums.items == [4, 2, 12] * 2
    assert sorted(joined.items, key=repr) == sorted(
        [(1, 3), (1, 5), (3, 5), (3, 7), (5, 7), (7, None), (2, None)] * 2, key=repr
    )


def test_a_refused_record_follows_the_policy_and_has_no_part_in_any_aggregate() -> None:
    def halved(seen: list[int], value: int) -> list[int]:
        seen.append(value)
        if value % 2:
            raise ValueError("odd")
        return seen

    flow = Flow("refused")
    records = [Record("a", at, value) for at, value in enumerate([4, None, "x", 3, 8])]
    found = (
        by_key(flow, records)
        .window(tumbling(1), on_error="skip", name="sums")
        .aggregate(n="count", total=("sum", "value"), even=(fold(list, halved), "value"))
        .collect()
    )
    assert flow.run().step("sums").rejected == 3
    assert [result.value for result in found.items] == [{"n": 2, "total": 12, "even": [4, 8]}]


def test_a_value_that_is_no_number_ends_the_job_with_the_reason() -> None:
    flow = Flow("text")
    by_key(flow, [Record("a", 1, "x")]).window(tumbling(1)).aggregate(("sum", "value")).collect()
    with pytest.raises(JobFailed, match="sum: expected a number, given 'x'; filter such records"):
        flow.run()


def test_late_records_are_counted_and_the_first_one_is_told_where_they_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Windows of a topic in no order were half empty, and only the fields of statistics told why, not their table."""
    flow = Flow("statistics")
    found = by_key(flow, [Record("a", 1), Record("a", 25), Record("b", 2), Record("b", 31)])
    found.window(tumbling(0.01), name="windows").aggregate("count").collect()
    found.interval_join(found, lower_s=0, upper_s=0, name="pairs", late=LATE).collect()
    statistics = flow.run()
    [windows, pairs] = [step for task in statistics.tasks for step in task.steps if step.step in ("windows", "pairs")]
    head, *rows = [line.split() for line in str(statistics).splitlines()[1:]]
    assert head == ["step", "in", "out", "in/s", "late", "kept"]
    assert {row[0]: row[4:] for row in rows if row[4:]} == {"windows": ["1"], "pairs": ["2", "2"]}
    assert (windows.late, windows.kept) == (1, 0)
    assert (pairs.late, pairs.kept) == (2, 2)  # A job that reads on may bring their partners.
    [told] = caplog.messages
    assert told.startswith("step 'windows': a record of the time 1970-01-01T00:00:00.002Z is late and dropped")
