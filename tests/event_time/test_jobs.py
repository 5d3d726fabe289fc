"""Event time in running flows: which timestamp a record has, when timers fire, and what users are told."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from event_time.operators import Countdown, NeverLate, Singles, Stamped, WindowCounts, events, window_counts
from flow.small_flows import Fed
from support.waiting import until

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    OutputTag,
    Stream,
    WindowResult,
    connect,
    epochs_every,
    feedback_through,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
    topic,
)
from streamiter.errors import GraphError, JobFailed, RejectRecords
from streamiter.iteration import FeedbackRecords
from streamiter.operators import Context, Output
from streamiter.topics import MemoryBroker
from streamiter.values.times import MAX_TIME

SIDE = OutputTag("side")


def timed(flow: Flow, values: Any = (5, 1, 7), **options: Any) -> Stream:
    """Return a stream of numbers, each of which is its own timestamp."""
    given = values if isinstance(values, (np.ndarray, Columns)) else list(values)
    options = {"out_of_orderness_s": 0.01, **options}
    return flow.from_items(given).event_time(lambda record: record, unit="ms", check_unit=False, **options)


def results(build: Callable[[Flow], Stream], parallelism: int = 1) -> list[Any]:
    flow = Flow("test", parallelism=parallelism)
    collected = build(flow).collect()
    assert flow.run().state == "finished"
    return collected.items


class Batches(Operator):
    """Emits something for whole batches."""

    def __init__(self, emit: Callable[[Any, Output], None]) -> None:
        self.emit = emit

    def process_batch(self, batch: Any, out: Output) -> None:
        assert isinstance(batch, (list, np.ndarray, Columns))
        self.emit(batch, out)


def batches(emit: Callable[[Any, Output], None]) -> Callable[[], Operator]:
    return lambda: Batches(emit)


KEEPS: dict[str, tuple[Callable[[Stream], Stream], list[tuple[Any, int]]]] = {
    "map": (lambda s: s.map(str), [("5", 5), ("1", 1), ("7", 7)]),
    "filter": (lambda s: s.filter(lambda x: x > 1), [(5, 5), (7, 7)]),
    "flat_map": (lambda s: s.flat_map(lambda x: [x] * (x % 4)), [(5, 5), (1, 1), (7, 7), (7, 7), (7, 7)]),
    "map_batch": (lambda s: s.map_batch(lambda b: [-x for x in b]), [(-5, 5), (-1, 1), (-7, 7)]),
    "filter_batch": (lambda s: s.filter_batch(lambda b: np.array(b) < 7), [(5, 5), (1, 1)]),
    "skip": (lambda s: s.map(lambda x: 5 // (x - 1), on_error="skip"), [(1, 5), (0, 7)]),
    "filter, skip": (lambda s: s.filter(lambda x: 5 // (x - 1), on_error="skip"), [(5, 5)]),
    "rejected": (lambda s: s.map_batch(lambda b: reject_first(b, 5), on_error="skip"), [(1, 1), (7, 7)]),
    "reduce": (lambda s: s.key_by(lambda x: 0).reduce(lambda a, b: a + b), [(5, 5), (6, 1), (13, 7)]),
    "stateful_map": (
        lambda s: s.key_by(lambda x: 0).stateful_map(lambda n, x: (n + 1, n), 0),
        [(0, 5), (1, 1), (2, 7)],
    ),
    "reduce, skip": (
        lambda s: s.key_by(lambda x: 0).reduce(lambda a, b: a // (b - 1), on_error="skip"),
        [(5, 5), (0, 7)],
    ),
    "union": (lambda s: s.map(lambda x: x).union(s.filter(lambda x: False)), [(5, 5), (1, 1), (7, 7)]),
    "batch of the same length": (
        lambda s: s.process(batches(lambda b, out: out.emit_batch([x * 2 for x in b]))),
        [(10, 5), (2, 1), (14, 7)],
    ),
    "batch of another length": (lambda s: s.process(batches(lambda b, out: out.emit_batch([0, 1]))), [(0, 7), (1, 7)]),
    "single records of a batch": (lambda s: s.process(batches(lambda b, out: out.emit(len(b)))), [(3, 7)]),
    "given times": (
        lambda s: s.process(batches(lambda b, out: out.emit_batch(["a", "b"], event_time=np.array([3, 4])))),
        [("a", 3), ("b", 4)],
    ),
    "one given time": (
        lambda s: s.process(batches(lambda b, out: out.emit_batch(["a", "b"], event_time=9))),
        [("a", 9), ("b", 9)],
    ),
    "mini-batches": (lambda s: s.batch(2), [([5, 1], 5), ([7], 7)]),
    "side output": (
        lambda s: s.process(batches(lambda b, out: out.emit_batch(b, tag=SIDE))).side_output(SIDE),
        [(5, 5), (1, 1), (7, 7)],
    ),
}


def reject_first(batch: Any, bad: int) -> Any:
    if bad in batch:
        raise RejectRecords([list(batch).index(bad)], "no")
    return list(batch)


@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("is_chained", [True, False], ids=["chained", "channels"])
def test_records_keep_their_timestamps(name: str, is_chained: bool) -> None:
    step, expected = KEEPS[name]

    def build(flow: Flow) -> Stream:
        stream = timed(flow) if is_chained else timed(flow).broadcast().map(lambda x: x, name="behind a channel")
        return step(stream).process(Stamped)

    assert [(record, time) for record, time, _ in results(build)] == expected


@pytest.mark.parametrize("ordered", [True, False])
def test_a_watermark_waits_for_calls_in_flight(ordered: bool) -> None:
    """A record whose call is slow would be late behind it."""

    async def call(number: int) -> int:
        for _ in range(number * 7 % 5):
            await asyncio.sleep(0)
        return -number

    def build(flow: Flow) -> Stream:
        source = flow.from_source(lambda: Singles(list(range(50))))
        stream = source.event_time(lambda n: n, unit="ms", check_unit=False)
        return stream.map_async(call, concurrency=10, ordered=ordered).process(NeverLate).process(Stamped)

    assert sorted((-record, time) for record, time, _ in results(build)) == [(n, n) for n in range(50)]


@pytest.mark.parametrize("is_async", [False, True])
def test_operators_see_timestamps_and_may_give_others(is_async: bool) -> None:
    class Shifting(Operator):
        def open(self, context: Context) -> None:
            self.context = context

        def process(self, record: int, out: Output) -> None:
            assert self.context.timestamp == record
            out.emit(record, event_time=record + 100)
            out.emit(-record, tag=SIDE)

    class ShiftingLater(Shifting):
        async def process(self, record: int, out: Output) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            super().process(record, out)

    def build(flow: Flow) -> Stream:
        shifted = timed(flow).process(ShiftingLater if is_async else Shifting)
        return shifted.process(Stamped).union(shifted.side_output(SIDE).process(Stamped, name="side"))

    assert sorted(row[:2] for row in results(build)) == [(-7, 7), (-5, 5), (-1, 1), (1, 101), (5, 105), (7, 107)]


@pytest.mark.parametrize("kind", ["columns", "array"])
def test_a_column_is_the_time(kind: str) -> None:
    times = np.array([10, 30, 20])
    records: Any = Columns({"at": times, "x": times * 2})
    if kind == "array":
        records = np.array([(10, 20), (30, 60), (20, 40)], [("at", "i8"), ("x", "i8")])
    flow = Flow("test")
    stream = flow.from_items(records).event_time("at", unit="ms", check_unit=False)
    seen = stream.filter_batch(lambda batch: batch["x"] > 20).process(Stamped).collect()
    flow.run()
    assert [(int(record["x"]), time) for record, time, _ in seen.items] == [(60, 30), (40, 20)]


def test_records_without_a_valid_time_follow_the_policy() -> None:
    async def letters() -> list[Any]:
        await topic("memory://event-time-letters").create()
        flow = Flow("test")
        stream = flow.from_items([{"at": 1}, {"at": None}, {}, {"at": 2}, {"at": 10**12 * 4}])
        stamped = stream.event_time(
            "at", unit="ms", check_unit=False, max_ahead_s=10, dead_letter=topic("memory://event-time-letters")
        )
        seen = stamped.process(Stamped).collect()
        job = await flow.start()
        statistics = await job.wait()
        assert statistics.step("event_time").rejected == 3
        return seen.items

    assert [row[1] for row in asyncio.run(letters())] == [1, 2]
    with pytest.raises(JobFailed, match=r"(?s)event_time.*expected a time, given None"):
        results(lambda flow: flow.from_items([{"at": None}]).event_time("at", unit="ms"))
    with pytest.raises(JobFailed, match=r"(?s)expected a date and time of ISO 8601, such as 2.*, given '1\.3\.2026'"):
        results(lambda flow: flow.from_items([{"at": "1.3.2026"}]).event_time("at", unit="iso"))


class Visit:
    def __init__(self) -> None:
        self.at = 1


@pytest.mark.parametrize(
    ("record", "given"),
    [
        ({"at": 1, "user": 2}, "given one with 'at', 'user'; write a field that each record has, or a function"),
        (Visit(), "given one with 'at'; write"),
        (WindowResult("a", 0, 1, 2), "given one with 'key', 'start', 'end', 'value', "),
        (np.array([(1, 2)], [("at", "i8"), ("x", "i8")])[0], "given one with 'at', 'x'; write"),
        ({str(number): 0 for number in range(30)}, "'18', '19', …; write"),
        ((1, 2), "given (1, 2), which has no fields; write"),
    ],
    ids=["dict", "object", "struct", "row", "many", "tuple"],
)
def test_a_missing_field_is_named_with_those_of_the_record(record: Any, given: str) -> None:
    """The error was only KeyError: 'time'."""
    with pytest.raises(JobFailed) as failed:
        results(lambda flow: flow.from_items([record]).event_time("time", unit="ms", name="times"))
    assert "step 'times'" in str(failed.value)
    assert "event_time(of): expected a record with the field 'time', given " in str(failed.value)
    assert given in str(failed.value)


def test_the_first_number_shows_a_wrong_unit() -> None:
    def build(flow: Flow) -> Stream:
        return flow.from_items([None, 1_700_000_000_000]).event_time(lambda x: x, unit="s", on_error="skip")

    with pytest.raises(JobFailed, match=r'(?s)expected times in seconds, because of unit="s".*write unit="ms"'):
        results(build)


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("has_keys", [True, False])
def test_timers_fire_by_time_and_order_of_setting(parallelism: int, has_keys: bool) -> None:
    """Case 25 of the reference, with the records of one subtask."""
    rows = [("a", 1, 20), ("b", 2, 10), ("a", 3, 20), ("c", 25, None), ("c", 26, 5)]
    records = [{"key": key, "at": at, "timer": timer} for key, at, timer in rows]

    def build(flow: Flow) -> Stream:
        source = flow.from_source(lambda: Singles(records), parallelism=1)
        stream = source.event_time("at", unit="ms", check_unit=False)
        if has_keys:
            return stream.key_by(lambda record: record["key"]).process(Countdown)
        return stream.process(Countdown)

    fired = results(build, parallelism)
    expected = [("b", 10), ("a", 20), ("c", 5)] if has_keys else [(None, 10), (None, 20), (None, 5)]
    assert fired == expected if parallelism == 1 else sorted(fired) == sorted(expected)


def test_at_the_end_all_timers_fire_and_the_flow_ends() -> None:
    """Case 25: a timer that sets itself again would otherwise never let the flow end."""
    records = [{"at": 1, "timer": 20, "again": 10}, {"at": 2, "timer": 45}]
    fired = results(lambda f: f.from_items(records).event_time("at", unit="ms", check_unit=False).process(Countdown))
    assert [at for _, at in fired] == [20, 30, 40, 45]


class Crowd(Countdown):
    """Sets many timers at one time, more than a turn of a task fires."""

    def process(self, record: dict[str, Any], out: Output) -> None:
        for timer in range(record.get("timers", 0)):
            self.context.set_event_timer(10, timer)

    def on_event_timer(self, payload: int, out: Output) -> None:
        out.emit(payload)


@pytest.mark.parametrize("has_epochs", [False, True])
async def test_all_timers_that_are_due_fire_on_a_quiet_stream(has_epochs: bool) -> None:
    """Behind a step that cuts epochs, all but the first 8,192 timers waited for the next record."""
    given, flow = Fed(), Flow("f")
    stream = flow.from_source(lambda: given).event_time("at", unit="ms", check_unit=False)
    fired = (epochs_every(stream, records=1) if has_epochs else stream).process(Crowd).collect()
    job = await flow.start()
    given.give({"at": 1, "timers": 20_000})
    given.give({"at": 20})
    await until(lambda: len(fired.items) == 20_000)
    assert fired.items == list(range(20_000))
    await job.stop("abort")


@pytest.mark.parametrize("runs_in_thread", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_timers_of_awaited_steps_and_steps_in_threads(runs_in_thread: bool, is_async: bool) -> None:
    if runs_in_thread and is_async:
        pytest.skip("a step in a thread has plain methods")

    class Waiting(Countdown):
        async def on_event_timer(self, payload: Any, out: Output) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            super().on_event_timer(payload, out)

    kind = Waiting if is_async else type("Threaded", (Countdown,), {"runs_in_thread": runs_in_thread})
    records = [{"at": 1, "timer": 3}, {"at": 5, "timer": 9}, {"at": 6, "timer": 2}]

    def build(flow: Flow) -> Stream:
        source = flow.from_source(lambda: Singles(records))
        stream = source.event_time("at", unit="ms", check_unit=False)
        return stream.process(kind).map(lambda row: row).process(Stamped)

    assert [(row[0][1], row[1]) for row in results(build)] == [(3, 3), (2, 2), (9, 9)]


def test_a_deleted_timer_does_not_fire() -> None:
    class Changing(Countdown):
        def process(self, record: dict[str, Any], out: Output) -> None:
            self.context.set_event_timer(50, {"a": [1]})
            self.context.set_event_timer(50, {"a": [1]})
            self.context.set_event_timer(60)
            self.context.delete_event_timer(50, {"a": [1]})
            self.context.delete_event_timer(70)

    assert results(lambda flow: timed(flow).process(Changing)) == [(None, 60)]


def test_a_window_of_timers_counts_everything_once() -> None:
    given = events(200)

    def build(flow: Flow) -> Stream:
        stream = flow.from_items(given).event_time("at", unit="ms", check_unit=False, out_of_orderness_s=0.05)
        spread = stream.rebalance().process(NeverLate, parallelism=2)
        return spread.key_by(lambda event: event["user"]).process(WindowCounts)

    assert sorted(results(build, parallelism=3)) == window_counts(given)


def test_mini_batches_hold_the_watermark_back() -> None:
    """A watermark before the records of a mini-batch would make them late."""

    def build(flow: Flow) -> Stream:
        mini = timed(flow, np.arange(100), out_of_orderness_s=0.005).batch(7)
        return mini.process(NeverLate).flat_map(lambda batch: batch.tolist()).process(Stamped)

    seen = results(build)
    assert [row[0] for row in seen] == list(range(100))
    assert all(event_time is None or event_time <= record for record, _, event_time in seen)


class Inputs(Operator):
    """Emits what its inputs bring, and the last event time."""

    def open(self, context: Context) -> None:
        self.context = context

    def process_left(self, record: Any, out: Output) -> None:
        out.emit((record, self.context.timestamp))
        self.context.set_event_timer(record + 1, "left")

    def process_right(self, record: Any, out: Output) -> None:
        out.emit((record, self.context.timestamp))

    def on_event_timer(self, payload: Any, out: Output) -> None:
        out.emit((payload, self.context.event_time))


def test_an_input_without_event_time_does_not_hold_back_the_others() -> None:
    def build(flow: Flow) -> Stream:
        return connect(left=timed(flow), right=flow.from_items([100])).process(Inputs)

    assert sorted(map(str, results(build))) == sorted(
        map(str, [(5, 5), (1, 1), (7, 7), (100, None), ("left", 2), ("left", 6), ("left", 8)])
    )


class Matched(Operator):
    """Emits each left record with the number of right records of its key, when their time has come."""

    def open(self, context: Context) -> None:
        self.context = context

    def process_left(self, record: dict[str, int], out: Output) -> None:
        self.context.set_event_timer(record["at"], "left")

    def process_right(self, record: dict[str, int], out: Output) -> None:
        state = self.context.state
        state["right"] = state.get("right", 0) + 1
        self.context.set_timer(1e6, "never")

    def on_event_timer(self, payload: str, out: Output) -> None:
        out.emit((self.context.key, self.context.event_time, self.context.state.get("right", 0)))

    def on_timer(self, payload: str, out: Output) -> None:
        raise AssertionError


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_step_with_several_inputs_has_state_and_timers_by_key(parallelism: int) -> None:
    def build(flow: Flow) -> Stream:
        left = flow.from_items([{"user": n % 3, "at": 1000 + n} for n in range(6)])
        right = flow.from_items([{"id": n % 3, "at": n} for n in range(7)])
        both = {
            "left": left.event_time("at", unit="ms", check_unit=False).key_by(lambda record: record["user"]),
            "right": right.event_time("at", unit="ms", check_unit=False).key_by(lambda record: record["id"]),
        }
        return connect(**both).process(Matched, time_to_live_s=3600)

    expected = [(n % 3, 1000 + n, 3 if n % 3 == 0 else 2) for n in range(6)]
    assert sorted(results(build, parallelism)) == sorted(expected)


def test_a_step_of_which_one_input_has_no_keys_has_none() -> None:
    def build(flow: Flow) -> object:
        keyed = flow.from_items([1]).key_by(lambda n: n)
        return connect(left=keyed, right=flow.from_items([2])).process(Inputs, time_to_live_s=1)

    with pytest.raises(GraphError, match=r"expected time_to_live_s= only if all inputs have keys"):
        build(Flow("test"))


def test_finish_comes_behind_the_last_watermark() -> None:
    class Last(Countdown):
        def process(self, record: int, out: Output) -> None:  # type: ignore[override]
            self.context.set_event_timer(record + 50)

        def finish(self, out: Output) -> None:
            out.emit(("finish", self.context.event_time))

    expected = [(None, 51), (None, 55), (None, 57), ("finish", MAX_TIME)]
    assert results(lambda flow: timed(flow).process(Last)) == expected


# -- loops ---------------------------------------------------------------------------------------------------


def test_in_a_loop_data_and_initial_values_have_event_time_and_feedback_keeps_timestamps() -> None:
    def build(flow: Flow) -> Stream:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
            counted = variables[0].union(data[0]).map(lambda n: n + 100)
            return IterationBodyResult([counted.filter(lambda n: n < 300)], [counted.process(Stamped)])

        [seen] = iterate_unbounded_streams([timed(flow, [1])], [timed(flow, [2, 3])], body)
        return seen.process(Stamped, name="outside")

    seen = [(inner[0], inner[1], time) for inner, time, _ in results(build)]
    assert sorted(seen) == [(n + k * 100, n, n) for k in (1, 2, 3) for n in (1, 2, 3)]


async def test_feedback_through_a_topic_keeps_timestamps() -> None:
    broker = MemoryBroker()
    await broker.topic("loop").create()
    flow = Flow("test")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
        counted = variables[0].map(lambda n: n + 100)
        back = feedback_through(counted.filter(lambda n: n < 300), broker.topic("loop"))
        return IterationBodyResult([back], [counted.process(Stamped)])

    [seen] = iterate_unbounded_streams([timed(flow, [1, 2])], [], body)
    collected = seen.collect()
    job = await flow.start()
    await job.wait()
    assert sorted(row[:2] for row in collected.items) == [(n + k * 100, n) for k in (1, 2, 3) for n in (1, 2)]
    watching = Flow("watch")
    told = watching.source(broker.topic("loop"), decode=FeedbackRecords(), stop="latest").collect()
    job = await watching.start()
    await job.wait()
    assert [n for each in told.items for n in each["records"]] == [101, 102, 201, 202]


def test_feedback_loses_its_timestamp_if_the_initial_stream_has_none() -> None:
    def build(flow: Flow) -> Stream:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
            merged = variables[0].union(data[0])
            counted = merged.map(lambda n: n + 100)
            return IterationBodyResult([counted.filter(lambda n: n < 200)], [merged.process(Stamped)])

        [seen] = iterate_unbounded_streams([flow.from_items([1])], [timed(flow, [2])], body)
        return seen

    assert sorted((record, time) for record, time, _ in results(build)) == [(1, None), (2, 2), (101, None), (102, None)]


def test_event_timers_work_in_the_body_of_a_loop() -> None:
    def build(flow: Flow) -> Stream:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
            counts = data[0].key_by(lambda event: event["user"]).process(WindowCounts)
            return IterationBodyResult([counts.filter(lambda row: False)], [counts])

        given = flow.from_items(events(100)).event_time("at", unit="ms", check_unit=False, out_of_orderness_s=0.04)
        [counts] = iterate_unbounded_streams([flow.from_items([0]).filter(bool)], [given], body)
        return counts

    assert sorted(results(build, parallelism=2)) == window_counts(events(100))


@pytest.mark.parametrize("ahead", [0, 1, None])
def test_a_watermark_does_not_overtake_records_of_a_later_epoch(ahead: int | None) -> None:
    class InOrder(NeverLate):
        epochs_in_order = ahead is not None

    def build(flow: Flow) -> Stream:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
            both = connect(model=variables[0].broadcast(), data=data[0]).process(TwoNeverLate)
            seen = data[0].rebalance().process(InOrder, parallelism=2)
            return IterationBodyResult([both.filter(lambda row: False)], [seen, both])

        numbers = timed(flow, range(200), parallelism=2)
        stamped = epochs_every(numbers, records=7)
        initial = flow.from_items([0]).filter(lambda n: False)
        config = IterationConfig(max_epochs_ahead=ahead)
        streams = iterate_unbounded_streams([initial], [stamped], body, config)
        return streams[0].union(streams[1])

    assert sorted(results(build, parallelism=2)) == sorted([*range(200), *range(200)])


class TwoNeverLate(NeverLate):
    """Has two inputs, and is late at none."""

    process_data = NeverLate.process
    process_model = NeverLate.process


def test_each_round_goes_from_nothing_to_the_end() -> None:
    class Rounds(Countdown):
        def process(self, record: int, out: Output) -> None:  # type: ignore[override]
            assert self.context.event_time is None
            self.context.set_event_timer(record + 50)

    def build(flow: Flow) -> Stream:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
            [fired] = for_each_round([data[0]], lambda streams: [streams[0].process(Rounds)])
            return IterationBodyResult([variables[0].map(lambda n: n + 1).filter(lambda n: n < 2)], [fired])

        [fired] = iterate_bounded_streams_until_termination([flow.from_items([0])], [replayed(timed(flow))], body)
        return fired

    assert results(build) == [(None, 51), (None, 55), (None, 57)] * 2


def test_the_operator_of_a_function_is_checked_when_the_flow_starts() -> None:
    flow = Flow("test")
    flow.from_items([1]).process(lambda: Countdown()).collect()
    with pytest.raises(GraphError, match=r"since Countdown defines on_event_timer.*test_jobs.py"):
        flow.run()


def test_event_time_without_records_reaches_the_end() -> None:
    assert results(lambda flow: timed(flow, []).process(Countdown), parallelism=2) == []
