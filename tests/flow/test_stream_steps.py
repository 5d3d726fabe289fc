"""Each step that a Stream offers runs in a flow."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flow.small_flows import Fed

from streamiter import Columns, Flow, Operator, OutputTag, Stream, connect
from streamiter.errors import JobFailed, RejectRecords
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.testing import VirtualClock

BOTH = pytest.mark.parametrize("parallelism", [1, 3])


def results(
    build: Callable[[Stream], Stream], items: Any, parallelism: int = 1, source_parallelism: int | None = None
) -> list[Any]:
    """Run a flow of these items, and return the results."""
    flow = Flow("f", parallelism=parallelism)
    collected = build(flow.from_items(items, parallelism=source_parallelism)).collect()
    assert flow.run().state == "finished"
    return collected.items


@BOTH
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda s: s.map(lambda x: x * 2), [0, 2, 4, 6, 8, 10]),
        (lambda s: s.filter(lambda x: x % 2), [1, 3, 5]),
        (lambda s: s.flat_map(lambda x: [x] * (x % 3)), [1, 2, 2, 4, 5, 5]),
        (lambda s: s.map_batch(lambda batch: [x + 1 for x in batch if x]), [2, 3, 4, 5, 6]),
        (lambda s: s.map_batch(np.array).filter_batch(lambda batch: batch > 3), [4, 5]),
        (lambda s: s.rebalance().map(lambda x: -x), [0, -1, -2, -3, -4, -5]),
        (lambda s: s.broadcast().map(lambda x: x, parallelism=2), [0, 1, 2, 3, 4, 5] * 2),
        (lambda s: s.partition_by(lambda x: x).map(lambda x: x, parallelism=2), [0, 1, 2, 3, 4, 5]),
        (lambda s: s.union(s.map(lambda x: 10 * x)), [0, 1, 2, 3, 4, 5, 0, 10, 20, 30, 40, 50]),
        (lambda s: s.key_by(lambda x: x % 2).reduce(lambda a, b: a + b), [0, 2, 6, 1, 4, 9]),
        (lambda s: s.map_batch(np.array).key_by_batch(lambda b: b % 2).reduce(np.add), [0, 2, 6, 1, 4, 9]),
        (lambda s: s.key_by(lambda x: x % 2).stateful_map(lambda n, x: (n + 1, n), 0), [0, 0, 1, 1, 2, 2]),
        (lambda s: s.rebalance().reduce_all(lambda a, b: a + b), [15]),
    ],
)
def test_a_step_gives_its_records(build: Callable[[Stream], Stream], expected: list[Any], parallelism: int) -> None:
    """A step gave other records with another parallelism."""
    got = results(build, list(range(6)), parallelism, source_parallelism=1)
    assert Counter(map(int, got)) == Counter(expected)


def test_order_is_kept_within_a_subtask() -> None:
    """Two changes of a price in one subtask changed places, and the last price was wrong."""
    items = list(range(20_000))
    assert results(lambda s: s.map(lambda x: x).filter(lambda x: True), items) == items


def test_results_of_a_key_come_in_the_order_of_its_records() -> None:
    """A running total decreased, because results of a key came in another order than its records."""
    got = results(lambda s: s.key_by(lambda x: x % 5).reduce(max).map(int), list(range(100)), 3, 1)
    for key in range(5):
        assert [value for value in got if value % 5 == key] == list(range(key, 100, 5))


@BOTH
def test_sort_gives_all_records_in_order_at_the_end(parallelism: int) -> None:
    """The records of several subtasks were sorted separately."""
    assert results(lambda s: s.sort(), [3, 1, 2], parallelism) == [1, 2, 3]
    assert results(lambda s: s.sort(lambda x: -x), [3, 1, 2], parallelism) == [3, 2, 1]


@BOTH
def test_join_pairs_equal_keys_of_two_streams(parallelism: int) -> None:
    """A join missed a pair, or did not accept a field for one side and a function for the other."""
    flow = Flow("f", parallelism=parallelism)
    users = flow.from_items([{"id": 1, "name": "ann"}, {"id": 2, "name": "bo"}])
    clicks = flow.from_items([{"user": 2, "page": "a"}, {"user": 3, "page": "b"}, {"user": 2, "page": "c"}])
    pairs = users.join(clicks, on=("id", lambda click: click["user"])).collect()
    flow.run()
    assert sorted((left["name"], right["page"]) for left, right in pairs.items) == [("bo", "a"), ("bo", "c")]


class TestFromItems:
    @pytest.mark.parametrize("kind", [list, tuple, iter, np.array])
    @BOTH
    def test_item_i_goes_to_subtask_i_mod_n(self, kind: Callable[[list[int]], Any], parallelism: int) -> None:
        """Items went to other subtasks, and checks outside of the engine that rely on the order failed."""

        class Where(Operator):
            def open(self, context: Context) -> None:
                self.subtask = context.subtask_index

            def process(self, record: Any, out: Output) -> None:
                out.emit((self.subtask, int(record)))

        got = results(lambda s: s.process(Where), kind(list(range(7))), parallelism)
        assert sorted(got) == sorted((item % parallelism, item) for item in range(7))

    def test_arrays_and_columns_keep_their_types(self) -> None:
        """A batch function written for numpy got a list."""
        kinds: list[type] = []

        def note(batch: Any) -> Any:
            kinds.append(type(batch))
            return batch

        results(lambda s: s.map_batch(note), np.arange(3), 2)
        results(lambda s: s.map_batch(note), Columns({"x": [1, 2, 3]}), 2)
        assert kinds == [np.ndarray, np.ndarray, Columns, Columns]

    def test_a_flow_without_items_ends_without_results(self) -> None:
        """A day without data made the flow hang."""
        assert results(lambda s: s.map(str), []) == []

    def test_a_flow_can_run_again_from_the_beginning(self) -> None:
        """A second run of a flow continued with the sources and operators of the first run."""
        flow = Flow("f")
        collected = flow.from_items([1, 2]).key_by(int).reduce(max).collect()
        first = flow.run()
        assert (collected.items, flow.run().step("reduce").records_in) == ([1, 2], first.step("reduce").records_in)


class Count(Operator):
    """Counts by key in ``context.state``."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None:
        state = self.context.state
        state["count"] = state.get("count", 0) + 1
        out.emit((self.context.key, state["count"]))


class TestKeyedProcess:
    @BOTH
    def test_state_is_kept_for_each_key(self, parallelism: int) -> None:
        """The records of two users were counted in one state."""
        got = results(lambda s: s.key_by(lambda x: x % 2).process(Count), list(range(6)), parallelism)
        assert sorted(got) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]

    def test_state_can_be_assigned_and_deleted(self) -> None:
        """A state could not be a list, or a deleted state had its old value at the next record."""

        class Assign(Operator):
            def open(self, context: Context) -> None:
                self.context = context

            def process(self, record: Any, out: Output) -> None:
                if record == "forget":
                    del self.context.state
                else:
                    self.context.state = [*(self.context.state or []), record]
                    out.emit(list(self.context.state))

        got = results(lambda s: s.key_by(lambda _: 1).process(Assign), ["a", "b", "forget", "c"])
        assert got == [["a"], ["a", "b"], ["c"]]

    def test_numpy_keys_are_normalized(self) -> None:
        """A key from an array and the same key from JSON had two states."""
        got = results(lambda s: s.key_by(lambda x: x).process(Count), [1, np.int64(1), np.int8(1)])
        assert got == [(1, 1), (1, 2), (1, 3)]

    async def test_a_timer_does_not_fire_after_the_end_of_its_input(self) -> None:
        """The timer of a session fired after the end of its input."""

        class Sessions(Operator):
            def open(self, context: Context) -> None:
                self.context = context

            def process(self, record: Any, out: Output) -> None:
                self.context.set_timer(record, ("after", record))

            def on_timer(self, payload: Any, out: Output) -> None:
                out.emit((self.context.key, payload))

        clock = VirtualClock()
        flow = Flow("f")
        ended = flow.from_items([3, 1, 2]).key_by(lambda x: -x).process(Sessions).union(endless(flow)).collect()
        job = await flow.start(clock=clock)
        await clock.advance(0.5)
        assert ended.items == []
        await clock.advance(2)
        assert ended.items == []  # the input has ended, so no timer fires
        await job.stop("drain")

    async def test_timers_fire_in_time_while_the_input_lasts(self) -> None:
        """A timer fired too early, too late, or before an earlier one."""

        class Echo(Operator):
            def open(self, context: Context) -> None:
                self.context = context

            def process(self, record: Any, out: Output) -> None:
                self.context.set_timer(record, record)

            def on_timer(self, payload: Any, out: Output) -> None:
                out.emit((self.context.key, payload))

        clock = VirtualClock()
        flow = Flow("f")
        fed = flow.from_items([3, 1, 2]).union(endless(flow))
        heard = fed.key_by(lambda x: -x).process(Echo).collect()
        job = await flow.start(clock=clock)
        await clock.advance(0.9)
        assert heard.items == []
        await clock.advance(0.1)
        assert heard.items == [(-1, 1)]
        await clock.advance(2)
        assert heard.items == [(-1, 1), (-2, 2), (-3, 3)]
        await job.stop("abort")

    async def test_a_state_that_was_not_used_for_its_time_to_live_is_forgotten(self) -> None:
        """The states of users who never returned filled the memory."""
        clock = VirtualClock()
        flow = Flow("f")
        given = Fed()
        counts = flow.from_source(lambda: given).key_by(lambda x: x).process(Count, time_to_live_s=10).collect()
        job = await flow.start(clock=clock)
        given.give("a", "b")
        await clock.advance(6)
        given.give("a")
        await clock.advance(6)
        given.give("a", "b")
        await clock.advance(0)
        assert counts.items == [("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 1)]
        await clock.advance(30)
        snapshot = await job.snapshot()
        [state] = [task["operators"]["Count"] for task in snapshot.values() if "Count" in task["operators"]]
        assert state["keyed"] == []
        await job.stop("abort")


class TestBatch:
    @BOTH
    def test_gives_lists_of_n_and_the_rest_at_the_end(self, parallelism: int) -> None:
        """The size of mini-batches depended on the batches in which the records arrived."""
        got = results(lambda s: s.batch(4), list(range(22)), parallelism)
        assert sorted(record for batch in got for record in batch) == list(range(22))
        # One subtask has 22 records, or three subtasks have 8, 7 and 7.
        assert Counter(len(batch) for batch in got) == ({4: 5, 2: 1} if parallelism == 1 else {4: 4, 3: 2})

    async def test_an_incomplete_batch_is_emitted_after_its_timeout(self) -> None:
        """At night, nine records waited until morning for the tenth of their batch."""
        clock = VirtualClock()
        flow = Flow("f")
        given = Fed()
        batches = flow.from_source(lambda: given).batch(3, timeout_s=5).collect()
        job = await flow.start(clock=clock)
        given.give(1, 2, 3, 4)
        await clock.advance(4.9)
        assert batches.items == [[1, 2, 3]]
        given.give(5)
        await clock.advance(0.2)
        assert batches.items == [[1, 2, 3], [4, 5]]
        given.give(6)
        await clock.advance(4.9)
        assert len(batches.items) == 2
        await clock.advance(0.2)
        assert batches.items[2:] == [[6]]
        await job.stop("abort")


class TestConnect:
    def test_records_are_passed_to_the_method_of_their_input(self) -> None:
        """An operator could not have a method for records and a method for batches, or could not await one of them."""

        class Mixed(Operator):
            async def process_left(self, record: Any, out: Output) -> None:
                out.emit(("left", record))

            def process_right_batch(self, batch: Any, out: Output) -> None:
                out.emit_batch([("right", record) for record in batch])

        flow = Flow("f")
        got = connect(left=flow.from_items([1, 2]), right=flow.from_items([3])).process(Mixed).collect()
        flow.run()
        assert sorted(got.items) == [("left", 1), ("left", 2), ("right", 3)]

    def test_an_operator_is_called_at_the_end_of_each_input(self) -> None:
        """An operator was not called at the end of an input, or could not emit at its own end."""

        class Ends(Operator):
            def process_left(self, record: Any, out: Output) -> None:
                out.emit(record)

            process_right = process_left

            def input_ended(self, name: str, out: Output) -> None:
                out.emit(f"{name} ended")

            def finish(self, out: Output) -> None:
                out.emit("finished")

        flow = Flow("f")
        got = connect(left=flow.from_items([1]), right=flow.from_items([])).process(Ends).collect()
        flow.run()
        assert sorted(map(str, got.items[:-1])) == ["1", "left ended", "right ended"]
        assert got.items[-1] == "finished"

    @BOTH
    def test_a_broadcast_input_reaches_every_subtask(self, parallelism: int) -> None:
        """Only one of the workers got the model."""

        class Scored(Operator):
            def open(self, context: Context) -> None:
                self.model: int | None = None

            def wanted_inputs(self) -> tuple[str, ...] | None:
                return ("model",) if self.model is None else None

            def process_model(self, record: Any, out: Output) -> None:
                self.model = record

            def process_data(self, record: Any, out: Output) -> None:
                assert self.model is not None
                out.emit(self.model * record)

        flow = Flow("f", parallelism=parallelism)
        model = flow.from_items([10], parallelism=1).broadcast()
        scores = connect(model=model, data=flow.from_items(list(range(8)))).process(Scored).collect()
        flow.run()
        assert sorted(scores.items) == [10 * x for x in range(8)]


class TestSideOutputs:
    def test_a_tag_sends_records_to_the_side_output(self) -> None:
        """Records of a side output were also in the main output."""
        late = OutputTag("late")

        class Split(Operator):
            def process(self, record: Any, out: Output) -> None:
                out.emit(record, tag=late if record < 0 else None)

            def finish(self, out: Output) -> None:
                out.emit_batch([-100], tag=OutputTag("late"))

        flow = Flow("f", parallelism=2)
        split = flow.from_items([1, -2, 3]).process(Split)
        main, side = split.collect(), split.side_output(late).map(abs).collect()
        flow.run()
        assert (sorted(main.items), sorted(side.items)) == ([1, 3], [2, 100, 100])

    def test_records_of_an_unread_output_are_dropped(self) -> None:
        """Records of an output that no step reads were kept, and stopped the flow."""

        class Talkative(Operator):
            def process(self, record: Any, out: Output) -> None:
                out.emit(record, tag=OutputTag("unread"))
                out.emit(record)

        assert results(lambda s: s.process(Talkative), list(range(5000))) == list(range(5000))


class TestLife:
    def test_each_subtask_opens_finishes_and_closes_its_own_operator_once(self) -> None:
        """Two subtasks shared an operator, or a method of its life was called twice or in another order."""
        life: list[tuple[int, str]] = []

        class Living(Operator):
            def open(self, context: Context) -> None:
                self.subtask = context.subtask_index
                self.note("open")

            def process(self, record: Any, out: Output) -> None:
                self.note("process")

            def input_ended(self, name: str, out: Output) -> None:
                self.note(f"{name} ended")

            def finish(self, out: Output) -> None:
                self.note("finish")

            async def close(self) -> None:
                self.note("close")

            def note(self, what: str) -> None:
                life.append((self.subtask, what))

        results(lambda s: s.rebalance().process(Living), [1, 2, 3], 2, 1)
        for subtask, count in ((0, 2), (1, 1)):
            own = [what for number, what in life if number == subtask]
            assert own == ["open", *["process"] * count, "input ended", "finish", "close"]

    def test_a_chained_operator_gets_the_records_of_finish_before_the_end(self) -> None:
        """An operator was called at the end of its input, and then got the records of the last mini-batch."""
        heard: list[Any] = []

        class Last(Operator):
            def process(self, record: Any, out: Output) -> None:
                heard.append(record)

            def input_ended(self, name: str, out: Output) -> None:
                heard.append("ended")

            def finish(self, out: Output) -> None:
                heard.append("finish")

        results(lambda s: s.batch(10).map(len).process(Last), [1, 2, 3])
        assert heard == [3, "ended", "finish"]


class TestRejection:
    def test_other_records_of_the_batch_are_handled_once_and_unaffected(self) -> None:
        """One negative price among 8192 orders stopped the other orders, or doubled them."""
        handled: list[int] = []

        def check(batch: Any) -> Any:
            bad = [index for index, value in enumerate(batch) if value < 0]
            if bad:
                raise RejectRecords(bad, "negative price")
            handled.extend(batch)
            return batch

        flow = Flow("f")
        kept = flow.from_items([1, -2, 3, -4, 5]).map_batch(check, on_error="skip", name="check").collect()
        statistics = flow.run()
        assert kept.items == handled == [1, 3, 5]
        assert statistics.step("check").rejected == 2

    def test_records_may_be_rejected_one_at_a_time(self) -> None:
        """An operator rejected one record in each call, and two thousand of them exceeded the depth of the stack."""

        def check(batch: Any) -> Any:
            for index, value in enumerate(batch):
                if value < 0:
                    raise RejectRecords([index], "negative")
            return batch

        flow = Flow("f")
        kept = flow.from_items([1, *[-1] * 2000, 2]).map_batch(check, on_error="skip", name="check").collect()
        statistics = flow.run()
        assert kept.items == [1, 2]
        assert statistics.step("check").rejected == 2000

    def test_a_batch_of_rejected_records_is_not_handled_again_as_an_empty_one(self) -> None:
        """All records of a batch were rejected, and ``numpy.mean`` of the empty rest gave NaN and a warning."""
        sizes: list[int] = []

        class Strict(Operator):
            def process_batch(self, batch: Any, out: Output) -> None:
                sizes.append(len(batch))
                raise RejectRecords(range(len(batch)), "no")

        flow = Flow("f")
        flow.from_items([1, 2]).process(Strict, on_error="skip")
        flow.run()
        assert sizes == [2]

    @BOTH
    @pytest.mark.parametrize(
        ("build", "expected", "refused"),
        [
            (lambda s, **on: s.map_batch(np.array).filter_batch(no_minus, **on), [1, 2, 3], 2),
            (lambda s, **on: s.reduce_all(lambda total, x: total + 6 // x, **on), [1 + 2 + 3 - 6], 1),
            (lambda s, **on: s.sort(lambda x: 6 // x, **on), [-1, 1, 2, 3], 1),
            (lambda s, **on: s.join(s, lambda x: 6 // x, **on).map(lambda pair: pair[0]), [-1, 1, 2, 3], 2),
            (lambda s, **on: s.key_by(one_key).reduce(lambda total, x: total + 6 // x, **on), [0, 1, 3, 6], 1),
            (lambda s, **on: s.key_by(lambda x: 6 // x).reduce(max, **on), [-1, 1, 2, 3], 1),
            (lambda s, **on: s.key_by(lambda x: x or 0.5).stateful_map(numbered, 0, **on), [0, 0, 0, 0], 1),
            (lambda s, **on: s.key_by(lambda x: x or 0.5).process(Passing, **on), [-1, 1, 2, 3], 1),
            (lambda s, **on: s.key_by(lambda x: 6 // x).process(PassingLater, **on), [-1, 1, 2, 3], 1),
        ],
    )
    def test_every_step_with_a_function_continues_without_bad_records(
        self, build: Any, expected: list[int], refused: int, parallelism: int
    ) -> None:
        """One step had the option and the next one had not, and keyed steps failed with two subtasks."""
        flow = Flow("f", parallelism=parallelism)
        kept = build(flow.from_items([1, 3, 0, 2, -1], parallelism=1), on_error="skip").collect()
        statistics = flow.run()
        assert sorted(map(int, kept.items)) == expected
        assert sum(step.counts.rejected for task in statistics.tasks for step in task.steps) == refused

    def test_the_error_about_a_bad_key_has_its_record_and_no_invented_place(self) -> None:
        """The error named record 0 of the batch for each bad key."""
        flow = Flow("f")
        flow.from_items([1, 2, 0.5]).key_by(lambda x: x).reduce(max, name="largest")
        with pytest.raises(JobFailed, match=r"step 'largest' \(.*\) on record 0.5: key 0.5: expected an int"):
            flow.run()

    @pytest.mark.parametrize("keyed", [False, True])
    def test_an_operator_of_single_records_rejects_its_current_record(self, keyed: bool) -> None:
        """A step rejected another record than the current one when its stream had keys."""

        class Strict(Operator):
            def process(self, record: Any, out: Output) -> None:
                if record < 0:
                    raise RejectRecords([0], "negative")
                out.emit(record)

        flow = Flow("f")
        stream = flow.from_items([1, -2, 3])
        kept = (stream.key_by(lambda x: x) if keyed else stream).process(Strict, on_error="skip").collect()
        assert flow.run().step("Strict").rejected == 1
        assert kept.items == [1, 3]


def no_minus(batch: Any) -> Any:
    """Refuse values that are not above 0, and keep all others."""
    bad = np.flatnonzero(batch <= 0)
    if len(bad):
        raise RejectRecords(bad.tolist(), "not above 0")
    return batch > 0


def one_key(record: Any) -> str:
    return "all"


def numbered(count: int, record: Any) -> tuple[int, int]:
    return count + 1, count


class Passing(Operator):
    def process(self, record: Any, out: Output) -> None:
        out.emit(record)


class PassingLater(Operator):
    async def process(self, record: Any, out: Output) -> None:
        out.emit(record)


def endless(flow: Flow) -> Stream:
    """Return a stream that gives no records and does not end."""
    return flow.from_source(Fed)
