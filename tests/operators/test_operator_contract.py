"""Every built-in operator ignores cuts, has a complete state, and does not change its inputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import KINDS, Driven, as_kind, cuts, frozen, number_in, pieces_of, quick

from streamiter.operators import (
    Collect,
    Collected,
    Filter,
    FilterBatch,
    FlatMap,
    Identity,
    KeyedReduce,
    KeyedReduceBatch,
    Map,
    MapBatch,
    MiniBatch,
    Operator,
    ReduceAll,
    Sort,
    StatefulMap,
)
from streamiter.values.records import Batch, Columns


def key(record: Any) -> int:
    return int(number_in(record)) % 5


def larger(first: Any, second: Any) -> Any:
    return first if number_in(first) >= number_in(second) else second


def remember(seen: list[int], record: Any) -> tuple[list[int], tuple[int, ...]]:
    seen.append(int(number_in(record)))
    return seen, tuple(seen)


def batch_numbers(batch: Batch) -> Any:
    return batch["x"] if isinstance(batch, Columns) else np.asarray(batch, dtype=np.int64)


def doubled(batch: Batch) -> Batch:
    if isinstance(batch, Columns):
        return Columns({"x": batch["x"] * 2})
    return batch * 2 if isinstance(batch, np.ndarray) else [2 * number for number in batch]


OPERATORS: dict[str, Callable[[], Operator]] = {
    "Identity": Identity,
    "Map": lambda: Map(lambda record: (number_in(record), "seen")),
    "Filter": lambda: Filter(lambda record: number_in(record) % 3),
    "FlatMap": lambda: FlatMap(lambda record: range(abs(number_in(record)) % 4)),
    "MapBatch": lambda: MapBatch(doubled),
    "FilterBatch": lambda: FilterBatch(lambda batch: batch_numbers(batch) > 0),
    "MiniBatch": lambda: MiniBatch(7),
    "KeyedReduce": lambda: KeyedReduce(key, larger),
    "KeyedReduceBatch": lambda: KeyedReduceBatch(lambda batch: batch_numbers(batch) % 5, np.add),
    "StatefulMap": lambda: StatefulMap(key, remember, list),
    "ReduceAll": lambda: ReduceAll(larger),
    "Sort": lambda: Sort(number_in),
    "Collect": lambda: Collect(Collected()),
}
WITHOUT_COLUMNS = {"KeyedReduceBatch"}  # a ufunc does not process rows
OPERATOR_ON_KIND = [
    pytest.param(make, kind, id=f"{name}-{kind}")
    for name, make in OPERATORS.items()
    for kind in KINDS
    if kind != "columns" or name not in WITHOUT_COLUMNS
]
NUMBERS = st.lists(st.integers(-1000, 1000), max_size=60)

every_operator = pytest.mark.parametrize(("make", "kind"), OPERATOR_ON_KIND)


def results(driven: Driven) -> Any:
    """Return all results, with the items of a collector."""
    collected = driven.operator.into.items if isinstance(driven.operator, Collect) else []
    return frozen(driven.records), frozen(collected)


@every_operator
@quick
@given(numbers=NUMBERS, places=cuts())
def test_results_do_not_depend_on_where_batches_are_cut(
    make: Callable[[], Operator], kind: str, numbers: list[int], places: list[int]
) -> None:
    """Batches grow under load, so results that depend on cuts would differ from run to run."""
    batch = as_kind(kind, numbers)
    whole = Driven(make()).feed(batch).finish()
    in_pieces = Driven(make()).feed(*pieces_of(batch, places)).finish()
    assert results(in_pieces) == results(whole)


@every_operator
@quick
@given(numbers=NUMBERS, places=cuts(), restart_at=st.integers(0, 12), twice=st.booleans())
def test_a_restored_instance_resumes_as_if_nothing_had_happened(
    make: Callable[[], Operator], kind: str, numbers: list[int], places: list[int], restart_at: int, twice: bool
) -> None:
    """A crash between two batches must neither lose nor repeat the effect of a record on the state."""
    pieces = pieces_of(as_kind(kind, numbers), places)
    uninterrupted = Driven(make()).feed(*pieces).finish()
    first = Driven(make()).feed(*pieces[:restart_at])
    second = first.restarted(make())
    if twice:
        second = second.restarted(make())
    second.feed(*pieces[restart_at:]).finish()
    before = [] if isinstance(first.operator, Collect) else first.records
    assert frozen(before + second.records) == frozen(uninterrupted.records)
    assert results(second)[1] == results(uninterrupted)[1]


@every_operator
@quick
@given(numbers=NUMBERS)
def test_input_batches_are_not_changed(make: Callable[[], Operator], kind: str, numbers: list[int]) -> None:
    """All readers of a stream share one batch."""
    batches = [as_kind(kind, numbers), as_kind(kind, numbers)]
    before = frozen(batches)
    Driven(make()).feed(*batches).finish()
    assert frozen(batches) == before


@every_operator
def test_an_empty_batch_gives_nothing(make: Callable[[], Operator], kind: str) -> None:
    """A batch whose records were all refused is empty."""
    driven = Driven(make()).feed(as_kind(kind, []))
    assert driven.records == []


@every_operator
def test_results_at_the_end_are_emitted_once(make: Callable[[], Operator], kind: str) -> None:
    """A checkpoint that was taken after the end must not emit the results again."""
    driven = Driven(make()).feed(as_kind(kind, [1, 2, 3])).finish()
    emitted = len(driven.records)
    assert len(driven.finish().records) == emitted
    assert driven.restarted(make()).finish().records == []


@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)
def test_any_sequence_is_taken_as_a_batch(make: Callable[[], Operator]) -> None:
    """Sources may produce tuples and ranges."""
    assert results(Driven(make()).feed(range(1, 20)).finish()) == results(
        Driven(make()).feed(list(range(1, 20))).finish()
    )
