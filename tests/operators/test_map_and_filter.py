"""Map, Filter and FlatMap of records and of batches: calls of a function, its results, and records that it refuses."""

from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import KINDS, Driven, as_kind, frozen, number_in, quick

from streamiter import Flow, Stream
from streamiter.errors import JobFailed, RejectRecords
from streamiter.operators import (
    Filter,
    FilterBatch,
    FlatMap,
    FunctionResultError,
    Identity,
    Join,
    KeyedReduce,
    Map,
    MapBatch,
    Operator,
    Output,
    ReduceAll,
    Sort,
    StatefulMap,
)
from streamiter.operators.functions import field_or_function, values_at_once
from streamiter.operators.output import RecordFailure
from streamiter.values.records import Columns


def inverse(record: Any) -> float:
    number = int(number_in(record))
    if number == 3:
        raise RejectRecords([0], "three")
    return 6 / number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", [Map, Filter])
@pytest.mark.parametrize("numbers", [[2, 1, 0, 6], [0, 1], [1, 0], [0]])
def test_a_failure_names_the_record(kind: str, operator: Any, numbers: list[int]) -> None:
    """An error that names only the batch leaves thousands of suspects."""
    batch = as_kind(kind, numbers)
    with pytest.raises(RecordFailure) as failure:
        Driven(operator(inverse)).feed(batch)
    assert failure.value.step == "the step"
    assert frozen(failure.value.record) == frozen(batch[numbers.index(0)])
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("operator", "expected"), [(Map, [3.0, 6.0]), (Filter, [2, 1])])
def test_refused_records_become_dead_letters_and_the_others_continue(
    kind: str, operator: Any, expected: list[float]
) -> None:
    """One bad record must not remove the rest of its batch."""
    driven = Driven(operator(inverse), policy="dead_letter").feed(as_kind(kind, [0, 2, 3, 1]))
    assert [number_in(record) for record in driven.records] == expected
    assert [(number_in(letter.record), letter.error) for letter in driven.dead_letters] == [
        (0, "ZeroDivisionError: division by zero"),
        (3, "three"),
    ]
    assert driven.out.rejected == 2


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("operator", [Map, Filter])
def test_the_function_is_called_once_for_each_record(operator: Any, policy: str) -> None:
    """A second call after a failure would count a record twice in a function that counts."""
    calls: list[int] = []

    def counted(record: int) -> float:
        calls.append(record)
        return 1 / record if policy == "skip" else 1

    Driven(operator(counted), policy=policy).feed([2, 0, 1], [0, 5])
    assert calls == [2, 0, 1, 0, 5]


@pytest.mark.parametrize("operator", [Map, Filter])
def test_a_function_that_raises_stop_iteration_fails_the_step(operator: Any) -> None:
    """StopIteration ended a loop silently, and the later records were lost."""
    empty: Any = iter(())
    with pytest.raises(RecordFailure) as failure:
        Driven(operator(lambda record: next(empty))).feed([1, 2])
    assert failure.value.record == 1


def test_filter_keeps_arrays_and_columns() -> None:
    """A vectorised step after a filter would fall back to single records."""
    array = np.array([1, 2, 3], dtype=np.int16)
    columns = Columns({"x": array, "name": np.array(["a", "b", "c"])})
    driven = Driven(Filter(lambda record: number_in(record) != 2)).feed(array, columns)
    expected = [array[[0, 2]], Columns({"x": array[[0, 2]], "name": np.array(["a", "c"])})]
    assert frozen(driven.batches) == frozen(expected)


def test_filter_passes_on_the_same_array_when_all_records_are_kept() -> None:
    """A copy of an unchanged batch costs as much as the predicate."""
    array = np.arange(4)
    assert Driven(Filter(lambda record: True)).feed(array).batches[0] is array


def test_filter_names_the_record_whose_verdict_has_no_truth() -> None:
    """In numpy the truth of an array of two numbers is an error, raised after the predicate has returned."""
    with pytest.raises(RecordFailure) as failure:
        Driven(Filter(lambda record: np.array([True, record > 0]))).feed([7, 8])
    assert failure.value.record == 7
    skipping = Driven(Filter(lambda record: np.ones(record)), policy="skip").feed([1, 2])
    assert (skipping.records, skipping.out.rejected) == ([1], 1)


def test_sequences_whose_iterators_know_no_length_are_searched_as_well() -> None:
    """Such iterators have the length hint 0, which looked like the end of the batch."""

    class Countdown:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return (2, 0, 1)[index]

        def __iter__(self) -> Any:
            yield from (2, 0, 1)

    with pytest.raises(RecordFailure) as failure:
        Driven(Map(inverse)).feed(Countdown())  # type: ignore[arg-type]
    assert failure.value.record == 0


COLUMNS = Columns({"x": np.arange(4), "y": np.array(["a", "b", "c", "d"])})


@pytest.mark.parametrize("result", [[1, 2], np.zeros((3, 2)), COLUMNS, []])
def test_map_batch_emits_the_result_of_the_function(result: Any) -> None:
    """The result may have any length and type, and must not be copied."""
    driven = Driven(MapBatch(lambda batch: result)).feed([1])
    assert all(batch is result for batch in driven.batches)
    assert len(driven.batches) == (1 if len(result) else 0)


@pytest.mark.parametrize("operator", [MapBatch, FilterBatch])
def test_the_function_may_refuse_records(operator: Any) -> None:
    """The engine reads the indices and calls again with the other records, so no record may be emitted before."""

    def refuse(batch: Any) -> Any:
        raise RejectRecords([1], "bad")

    driven = Driven(operator(refuse))
    with pytest.raises(RejectRecords):
        driven.feed([1, 2])
    assert driven.batches == []


@pytest.mark.parametrize("operator", [MapBatch, FilterBatch])
def test_the_function_is_never_given_an_empty_batch(operator: Any) -> None:
    """A batch whose records were all refused is empty, and np.stack([]) is an error."""

    def unprepared(batch: Any) -> Any:
        raise AssertionError

    assert Driven(operator(unprepared)).feed([], np.zeros(0), COLUMNS[0:0]).batches == []


@pytest.mark.parametrize("batch", [[5, 6, 7, 8], np.arange(4), COLUMNS])
@pytest.mark.parametrize("as_mask", [list, np.array])
def test_filter_batch_keeps_the_kind(batch: Any, as_mask: Any) -> None:
    """The batch must stay a list, an array or columns."""
    driven = Driven(FilterBatch(lambda batch: as_mask([True, False, False, True])))
    expected = [batch[0], batch[3]] if isinstance(batch, list) else batch[np.array([0, 3])]
    assert frozen(driven.feed(batch).batches) == frozen([expected])


def test_filter_batch_passes_on_the_same_batch_when_all_is_kept() -> None:
    """A copy of an unchanged batch costs more than the mask."""
    assert Driven(FilterBatch(lambda batch: batch["x"] >= 0)).feed(COLUMNS).batches[0] is COLUMNS


def test_identity_passes_on_the_same_batches() -> None:
    """A step that only names or repartitions a stream uses the identity, so it must not copy."""
    array = np.arange(3)
    driven = Driven(Identity()).feed(array, [1])
    assert driven.batches[0] is array
    assert driven.batches[1] == [1]


LENGTHS = st.lists(st.sampled_from([0, 1, 2, 1023, 1024, 1025, 3000]), max_size=6)


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("iterable", [list, tuple, iter])
@quick
@given(lengths=LENGTHS)
def test_all_items_come_in_order(policy: str, iterable: Any, lengths: list[int]) -> None:
    """At lengths close to the size of a piece, an item could be lost or repeated."""
    driven = Driven(FlatMap(lambda length: iterable(range(length))), policy=policy).feed(lengths)
    assert driven.records == [item for length in lengths for item in range(length)]
    assert max(map(len, driven.batches), default=0) <= 1024 + 3000


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_huge_iterable_flows_out_in_pieces(policy: Any) -> None:
    """All items of one record were collected first, and filled the memory."""
    made = 0
    ahead = []

    def endless(record: int) -> Iterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    class EnoughError(Exception):
        pass

    def receive(batch: Any) -> None:
        ahead.append(made - batch[0] + 1)
        if made > 100_000:
            raise EnoughError

    out = Output("the step", policy)
    out.connect(receive, None)
    with pytest.raises(EnoughError):
        FlatMap(endless).process_batch([1, 2], out)
    assert max(ahead) <= 1024


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_failure_further_down_is_not_blamed_on_the_record(policy: Any) -> None:
    """Pieces are emitted while the function's iterable is open; its error handling must not catch their errors."""

    def broken(batch: Any) -> None:
        raise ConnectionError("the sink")

    out = Output("the step", policy)
    out.connect(broken, None)
    with pytest.raises(ConnectionError, match="the sink"):
        FlatMap(lambda record: range(5000)).process_batch([1], out)
    assert out.rejected == 0


def test_what_a_refused_record_emits_does_not_depend_on_the_records_before_it() -> None:
    """Pieces must start again with each record, so that cuts have no meaning."""

    def fails_late(record: int) -> Iterator[int]:
        yield from range(1500)
        raise ValueError

    emitted = [
        Driven(FlatMap(lambda r: range(r) if r else fails_late(r)), policy="skip").feed(*batches).records
        for batches in ([[1000, 0]], [[1000], [0]], [[0]])
    ]
    assert emitted[0] == emitted[1]
    assert emitted[0][1000:] == emitted[2] == list(range(1024))


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_function_that_raises_stop_iteration_loses_no_records(bad: int, policy: str) -> None:
    """In map() a StopIteration looks like the end of the batch, so all later records were lost without an error."""

    def first_two(record: int) -> Any:
        return next(iter(())) if record == bad else islice([record, record, record], 2)

    driven = Driven(FlatMap(first_two), policy=policy)
    if policy == "fail":
        with pytest.raises(RecordFailure) as failure:
            driven.feed([1, 2, 3])
        assert failure.value.record == bad
    else:
        driven.feed([1, 2, 3])
        assert driven.records == [record for record in (1, 1, 2, 2, 3, 3) if record != bad]


def halting(record: int) -> Iterator[int]:
    yield record
    if record == 0:
        raise ValueError("zero")
    yield record


def keyed(key_of: Callable[[int], Any]) -> list[Callable[[], Operator]]:
    return [
        lambda: KeyedReduce(key_of, lambda total, record: total + 6 // record),
        lambda: StatefulMap(key_of, lambda total, record: ((total or 0) + 6 // record,) * 2),
    ]


NUMBERS = [
    # The function, its iterable or its result may be the cause of the failure.
    lambda: FlatMap(halting),
    lambda: FlatMap(lambda record: [6 // record]),
    lambda: FlatMap(lambda record: (record,) if record else None),  # type: ignore[arg-type,return-value]
    lambda: ReduceAll(lambda total, record: total + 6 // record),
    *keyed(lambda record: "all"),
    *keyed(lambda record: 1 // record),
    # A float key may be rounded differently later, and then no longer finds its state.
    *keyed(lambda record: record or 0.5)[:2],
    *keyed(lambda record: [] if record == 0 else 0),
]
FIELDS: list[tuple[Callable[[], Operator], dict[str, Any], str]] = [
    (lambda: Sort("x"), {"y": 2}, "input"),
    *((lambda: Join("x"), bad, side) for bad in ({"y": 1}, {"x": [1]}) for side in ("left", "right")),
]
CASES: list[tuple[Callable[[], Operator], list[Any], int, str]] = [
    *((make, [6, 3, 0, 2], 2, "input") for make in NUMBERS),
    *((make, [{"x": 2}, bad, {"x": 1}], 1, side) for make, bad, side in FIELDS),
]


@pytest.mark.parametrize(("make", "records", "place", "side"), CASES)
def test_a_record_that_is_refused_is_named_and_leaves_nothing(
    make: Callable[[], Operator], records: list[Any], place: int, side: str
) -> None:
    """After a dead letter, half of the record's items were emitted, or the sum of its key had changed."""

    def fed(given: list[Any], policy: str = "fail") -> Driven:
        driven = Driven(make(), policy=policy)
        if side == "input":
            return driven.feed(given).finish()
        other = "right" if side == "left" else "left"
        return driven.feed(given, to=side).feed([{"x": 1}, {"x": 2}], to=other).finish()

    with pytest.raises(RecordFailure) as failure:
        fed(records)
    assert failure.value.record == records[place]
    driven = fed(records, "dead_letter")
    assert driven.records == fed(records[:place] + records[place + 1 :]).records
    assert [letter.record for letter in driven.dead_letters] == [records[place]]
    assert fed(records, "skip").out.rejected == 1


@pytest.mark.parametrize(
    "step",
    [
        lambda stream: stream.map_batch(lambda batch: 3),
        lambda stream: stream.filter_batch(lambda batch: "no mask"),
        lambda stream: stream.key_by(str).stateful_map(lambda state, record: state, 0),
    ],
    ids=["map_batch", "filter_batch", "stateful_map"],
)
def test_a_result_that_a_step_cannot_take_is_a_type_error(step: Callable[[Stream], Stream]) -> None:
    """The docstrings promise a ``TypeError``; programs that caught one would have missed an error of another class."""
    flow = Flow("f")
    step(flow.from_items([1, 2])).collect()
    with pytest.raises(JobFailed) as failed:
        flow.run()
    causes = [failed.value.__cause__, failed.value.__cause__.__cause__] if failed.value.__cause__ else []
    assert any(isinstance(cause, FunctionResultError) and isinstance(cause, TypeError) for cause in causes)


def test_a_field_of_dicts_is_read_for_all_records_at_once() -> None:
    """A call for each record was a thirtieth of the time of a training. Other records, and errors, need that call."""
    number_of = field_or_function("event_time(time_of)", "number")
    assert values_at_once(number_of, [{"number": 3}, {"number": None}]) == [3, None]
    others: list[Any] = [[{"number": 3}, {}], [{"number": 3}, SimpleNamespace(number=4)], Columns({"number": [3]}), []]
    assert [values_at_once(number_of, each) for each in others] == [None] * 4
