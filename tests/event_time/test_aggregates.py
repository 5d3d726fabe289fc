"""Aggregates alone: what users write, which columns they take, what a refused record leaves, and quantiles."""

from __future__ import annotations

import operator
from random import Random
from typing import Any

import numpy as np
import pytest
from operators.operator_harness import frozen, stored
from support.examples import random_examples

from streamiter.errors import ConfigurationError
from streamiter.operators.timed.aggregates import BY_NAME, fold, quantile
from streamiter.operators.timed.kinds import Hopping, Session
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.windowing import make_windows
from streamiter.records import Columns
from streamiter.times import MAX_TIME


def some_numbers(random: Random) -> tuple[list[float], float]:
    count, scale = random.randint(1, 30), random.choice([1e-3, 1.0, 1e9])
    return [random.choice([0, random.gauss(0, scale), random.random()]) for _ in range(count)], random.random()


@random_examples(some_numbers)
def test_a_quantile_is_within_a_hundredth_of_a_value_of_that_rank(example: tuple[list[float], float]) -> None:
    numbers, q = example
    aggregate = quantile(q)
    halves = [aggregate.initial(), aggregate.initial()]
    for place, number in enumerate(numbers):
        halves[place % 2] = aggregate.add(halves[place % 2], 0, aggregate.checked(number))
    found = aggregate.result(stored(aggregate.merge(*halves))())
    exact = sorted(numbers)[int(q * (len(numbers) - 1))]
    assert abs(found - exact) <= 0.010001 * abs(exact)


def grown(seen: list[int], value: int) -> list[int]:
    """Change the accumulator, then raise for the value 7, or if there is a 5."""
    seen.append(value)
    if value == 7 or 5 in seen[:-1]:
        raise ValueError("refused")
    return seen


def joined(earlier: list[int], later: list[int]) -> list[int]:
    earlier += later
    return earlier


@pytest.mark.parametrize("kind", [Hopping(10, 5), Session(5)])
def test_a_refused_record_changes_no_aggregate_of_any_window(kind: Any) -> None:
    """The second of two windows refused a record, which was in the list of the first."""
    names: dict[str, Any] = {"all": "collect", "median": quantile(0.5), "grown": fold(list, grown, joined)}
    names["sum"] = fold(0, operator.add, operator.add)
    windows = make_windows(kind, Aggregates.of((), names).atomic())
    # Time 8 is in the windows from 0 and from 5, and between the sessions of 4 and of 12; only the last has the 5.
    for time, value in [(4, 1), (12, 5)]:
        windows.add("a", time, [value] * 4)
    for time, value in [(8, 7), (8, 8), (8, "text")]:
        with pytest.raises((ValueError, TypeError)):
            windows.add("a", time, [value] * 4)
    windows.advance(MAX_TIME)
    assert [result.value["all"] for result in windows.results] == (
        [[1], [1], [5], [5]] if kind == Hopping(10, 5) else [[1], [5]]
    )
    for value in (result.value for result in windows.results):
        assert value["grown"] == value["all"] == [value["sum"]]
        assert abs(value["median"] - value["sum"]) < 0.1


def test_functions_that_survive_get_copies_and_others_do_not() -> None:
    seen: list[Any] = []

    def add(accumulator: list[int], value: int) -> list[int]:
        seen.append(accumulator)
        accumulator.append(value)
        return accumulator

    for several in (aggregates := Aggregates.of([fold(list, add, joined)], {})), aggregates.atomic():
        windows = make_windows(Session(5), several)
        for time in (0, 1, 9, 5):
            windows.add("a", time, [time])
        windows.advance(MAX_TIME)
        assert [result.value for result in windows.results] == [[0, 1, 9, 5]]
    assert (seen[0] is seen[1], seen[4] is seen[5]) == (True, False)


TAKEN: dict[str, tuple[Any, Any, Any]] = {
    "records": (("sum",), [1, 2, 3], [1, 2, 3]),
    "an array": (("sum",), np.array([1.5, 2.5]), [1.5, 2.5]),
    "a field of columns": ((("sum", "x"),), Columns({"x": np.array([1, 2], "i4")}), [1, 2]),
    "a function of records": ((("mean", lambda record: record["x"] / 2),), [{"x": 1}, {"x": 2}], [0.5, 1.0]),
    "count of records": (("count",), ["a", "b"], None),
    "count of values": ((("count", "x"),), [{"x": 1}, {"x": 2}], [1, 2]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_arrays_are_taken_where_numpy_computes_as_python_does(name: str) -> None:
    specs, batch, expected = TAKEN[name]
    [column] = Aggregates.of(specs, {}).columns_of(batch) or ()
    assert (None if column is None else column.tolist()) == expected


NOT_TAKEN: dict[str, tuple[Any, Any]] = {
    "texts": (("max",), ["a", "b"]),
    "ints and floats": (("sum",), [1, 2.5]),
    "large ints": (("sum",), [2**63, 1]),
    "rows": (("sum",), np.ones((2, 2))),
    "long floats": (("sum",), np.ones(2, "f2")),
    "a function of an array": ((("sum", abs),), np.ones(2)),
    "a function of columns": ((("sum", lambda record: record["x"]),), Columns({"x": [1]})),
    "a missing column": ((("sum", "y"),), Columns({"x": [1]})),
    "whole columns": (("sum",), Columns({"x": [1]})),
    "values in order": (("last",), [1, 2]),
    "texts that are counted": ((("count", "x"),), [{"x": "a"}]),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_other_arrays_are_added_record_by_record(name: str) -> None:
    specs, batch = NOT_TAKEN[name]
    assert Aggregates.of(specs, {}).columns_of(batch) is None


WRITTEN: dict[str, Any] = {
    "aggregate: expected 'count', 'sum', 'mean', 'min', 'max', 'first', 'last', 'collect', quantile(q) or fold(…), "
    "given 'summ'; did you mean 'sum'?": "summ",
    "aggregate: expected a name such as \"sum\", or a pair with the field of the value, given ('sum', 'x', 1); write "
    '("sum", "price"), or fold(initial, add) for functions': ("sum", "x", 1),
    'aggregate: expected a name such as "sum", or a pair with the field of the value, given 3; write': 3,
    "aggregate(value): expected a function, given 3": ("sum", 3),
}


@pytest.mark.parametrize("message", WRITTEN, ids=range(len(WRITTEN)))
def test_a_wrong_aggregate_is_refused_with_what_could_be_written(message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Aggregates.of([WRITTEN[message]], {})
    assert str(refused.value).startswith(message)


VALUES: dict[str, list[tuple[int, Any]]] = {"none": [], "simultaneous": [(3, "a"), (3, "b"), (1, "c"), (1, "d")]}
EXPECTED: dict[str, tuple[Any, Any]] = {
    "count": (0, 4),
    "first": (None, "c"),
    "last": (None, "b"),
    "min": (None, "a"),
    "max": (None, "d"),
    "collect": ([], ["c", "d", "a", "b"]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_windows_without_records_and_simultaneous_records(name: str) -> None:
    aggregate = BY_NAME[name]()
    for expected, values in zip(EXPECTED[name], VALUES.values(), strict=True):
        accumulator = aggregate.initial()
        for time, value in values:
            accumulator = aggregate.add(accumulator, time, value)
        assert aggregate.result(accumulator) == expected
        assert aggregate.result(aggregate.merge(aggregate.initial(), accumulator)) == expected
        assert aggregate.result(aggregate.merge(accumulator, aggregate.initial())) == expected


REFUSED: dict[str, tuple[Any, Any]] = {
    "sum: expected a number, given 'x'; filter such records, or use fold(…)": ("sum", "x"),
    "mean: expected a number, given None; filter such records, or use fold(…)": ("mean", None),
    "min: expected a value, given None; filter such records, or give them a value before": ("min", None),
    "quantile(0.5): expected a finite number, given inf; filter such records before": (quantile(0.5), float("inf")),
    "aggregate(value): expected a record with the field 'x', given one with 'y'; write": (("sum", "x"), {"y": 1}),
}


@pytest.mark.parametrize("message", REFUSED, ids=range(len(REFUSED)))
def test_a_value_that_cannot_be_aggregated_is_refused(message: str) -> None:
    spec, value = REFUSED[message]
    with pytest.raises((ValueError, TypeError)) as refused:
        Aggregates.of([spec], {}).values_of(value)
    assert str(refused.value).startswith(message)


def test_a_quantile_knows_zeros_signs_and_not_a_number() -> None:
    median = quantile(0.5)
    for values, expected in {(0.0, 0, -0.0): 0.0, (-3, 0, 5): 0.0, (): None, (1.0, float("nan")): float("nan")}.items():
        accumulator = median.initial()
        for value in values:
            accumulator = median.add(accumulator, 0, median.checked(value))
        assert frozen(median.result(accumulator)) == frozen(expected)
