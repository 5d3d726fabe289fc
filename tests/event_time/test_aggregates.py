"""Aggregates of windows, and of ranges by blocks."""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from operators.operator_harness import frozen, stored
from support.examples import random_examples

from streamiter.errors import ConfigurationError
from streamiter.operators.timed import aggregates, ranges
from streamiter.operators.timed.aggregates import BY_NAME, fold, quantile
from streamiter.operators.timed.kinds import Hopping, Session
from streamiter.operators.timed.ranges import RangeAggregates
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.windowing import make_windows
from streamiter.values.records import Columns
from streamiter.values.times import MAX_TIME


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
    windows = make_windows(kind, Aggregates.of((), names).copy(is_atomic=True))
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

    for several in (aggregates := Aggregates.of([fold(list, add, joined)], {})), aggregates.copy(is_atomic=True):
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
    "aggregate: expected 'count', 'sum', 'mean', 'min', 'max', 'first', 'last', 'collect', 'profile', quantile(q) or "
    "fold(…), given 'summ'; did you mean 'sum'?": "summ",
    "aggregate: expected a name such as \"sum\", or a pair with the field of the value, given ('sum', 'x', 1); write "
    '("sum", "price"), or fold(initial, add) for functions': ("sum", "x", 1),
    'aggregate: expected a name such as "sum", or a pair with the field of the value, given 3; write': 3,
    "aggregate(value): expected a function, given 3": ("sum", 3),
}


def test_one_aggregate_has_no_name_and_several_have() -> None:
    for one, named in [((), {}), (("count", "sum"), {}), (("count",), {"n": "count"})]:
        with pytest.raises(ConfigurationError) as refused:
            Aggregates.of(one, named)  # type: ignore[arg-type]
        assert str(refused.value) == (
            f"aggregate: expected one aggregate, or several by name, given {len(one)} without a name and {len(named)} "
            'by name; write aggregate("count") or aggregate(clicks="count", spent=("sum", "price"))'
        )


MADE: dict[str, Callable[[], Any]] = {
    "quantile(q): expected a number from 0 to 1, given 1.01; 0.5 is the median": lambda: quantile(1.01),
    "quantile(q): expected a number from 0 to 1, given -0.01; 0.5": lambda: quantile(-0.01),
    "fold(initial): expected a function of [], given <lambda>(a): missing": lambda: fold(lambda a: a, operator.add),
    "fold(add): expected a function of ['accumulator', 'value'], given <lambda>(a): too": lambda: fold(0, lambda a: a),  # type: ignore[misc, arg-type]
    "fold(merge): expected a function of ['earlier', 'later'], given <lambda>(a)": lambda: fold(
        0,
        operator.add,
        lambda a: a,  # type: ignore[misc, arg-type]
    ),
    "fold(result): expected a function of ['accumulator'], given <lambda>(): too": lambda: fold(
        0,
        operator.add,
        result=lambda: 1,  # type: ignore[misc, arg-type]
    ),
}


@pytest.mark.parametrize("message", MADE, ids=range(len(MADE)))
def test_an_aggregate_with_wrong_arguments_is_refused(message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        MADE[message]()
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("message", WRITTEN, ids=range(len(WRITTEN)))
def test_a_wrong_aggregate_is_refused_with_what_could_be_written(message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Aggregates.of([WRITTEN[message]], {})
    assert str(refused.value).startswith(message)


# -- arrays ------------------------------------------------------------------------------------------------

LARGEST = 2**63 - 1

GROUPS: dict[str, tuple[str, list[Any], Any, bool]] = {
    "counts": ("count", [0, 3], np.ones(3), True),
    "floats": ("sum", [0, 1.5], np.array([0.1, 0.2, 0.7]), True),
    "short floats": ("sum", [0, 1.5], np.array([0.1, 0.2, 0.7], "f4"), True),
    "floats to an int": ("sum", [2**53 - 1, 0.5], np.array([0.1, 0.2, 0.7]), True),
    "floats to a large int": ("sum", [2**53, 0.5], np.array([0.1, 0.2, 0.7]), False),
    "floats beyond": ("sum", [1e308, -1e308], np.array([1e308, 0.2, 1e308]), True),
    "ints": ("sum", [0, -5], np.array([1, 2, 3], "i2"), True),
    "truths": ("sum", [0, 1], np.array([True, True, False]), True),
    "ints to floats": ("sum", [0.5, 1], np.array([1, 2, 3]), False),
    "ints up to the largest": ("sum", [LARGEST - 15, 15 - LARGEST], np.array([5, 5, -5]), True),
    "ints beyond": ("sum", [LARGEST - 14, 0], np.array([5, 5, 5]), False),
    "sums beyond": ("sum", [LARGEST + 1, 0], np.array([0, 0, 0]), False),
    "large values": ("sum", [0, 0], np.array([2**62, 2**62, 0]), False),
    "means": ("mean", [[0, 0], [1.5, 2]], np.array([0.1, 0.2, 0.7]), True),
    "means of large ints": ("mean", [[LARGEST, 1], [0, 0]], np.array([1, 1, 1]), False),
    "least floats": ("min", [None, 0.5], np.array([-0.0, 0.2, 0.7]), True),
    "least floats, not a number": ("min", [None, float("nan")], np.array([1.0, float("nan"), 0.7]), True),
    "least ints": ("min", [None, -5], np.array([1, LARGEST, 3]), True),
    "least large ints": ("min", [None, -5], np.array([LARGEST - 1, 1, LARGEST - 2]), True),
    "least small ints": ("min", [LARGEST, 7], np.array([1, 2, 127], "i1"), True),
    "least unsigned ints": ("min", [None, 7], np.array([1, 2, 2**64 - 1], "u8"), False),
    "greatest floats": ("max", [None, 0.5], np.array([-3.0, -2.0, 0.7]), True),
    "greatest ints": ("max", [None, -LARGEST], np.array([-LARGEST, -9, -3]), True),
    "greatest of a large int": ("max", [LARGEST + 1, 0], np.array([1, 2, 3]), False),
    "greatest of ints and floats": ("max", [None, 2], np.array([1.0, 2.0, 3.0]), False),
    "greatest of floats and ints": ("max", [None, 2.0], np.array([1, 2, 3]), False),
    "greatest truths": ("max", [None, True], np.array([True, False, False]), False),
    "values in order": ("last", [[], []], np.ones(3), False),
}


@pytest.mark.parametrize("name", GROUPS)
def test_arrays_are_added_where_the_result_is_that_of_single_values(name: str) -> None:
    kind, accumulators, values, is_possible = GROUPS[name]
    aggregate = BY_NAME[kind]()
    groups = np.array([0, 1, 0])
    expected = list(accumulators)
    for group, value in zip(groups.tolist(), values.tolist(), strict=True):
        expected[group] = aggregate.add(expected[group], 0, aggregate.checked(value))
    found = aggregate.add_groups(accumulators, groups, np.array([2, 1]), values)
    assert (found is not None) == is_possible
    if found is not None:
        assert frozen(found) == frozen(expected)


PARTS: dict[str, tuple[str, list[list[Any]], bool]] = {
    "ints of any size": ("sum", [[2**70, True], [-1]], True),
    "floats": ("sum", [[0.1], [0.2, -0.0], [0.3]], True),
    "floats beyond": ("sum", [[1e308, 1e308], [-1e308]], True),
    "ints and floats": ("mean", [[1, 2], [0.1, 2**32 - 1], [3]], True),
    "floats and large ints": ("mean", [[1, 2], [0.1, 2**32]], False),
    "large ints, then floats": ("sum", [[2**32], [0.1]], False),
    "the least": ("min", [[3, 1], [2]], True),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_combined_where_the_result_is_that_of_all_values(name: str) -> None:
    kind, parts, is_possible = PARTS[name]
    aggregate = BY_NAME[kind]()
    combined = aggregate.combined([aggregate.digest([0] * len(part), part) for part in parts])
    assert (combined is not None) == is_possible
    if combined is not None:
        values = [value for part in parts for value in part]
        assert frozen(combined) == frozen(aggregate.added([0] * len(values), values))


# -- single values -----------------------------------------------------------------------------------------

TEXTS = [(3, "a"), (3, "b"), (1, "c"), (1, "d")]
NUMBERS = [(3, 5), (3, 2), (1, 9), (1, 4)]
EXPECTED: dict[str, tuple[Any, Any, Any]] = {
    "count": (0, 4, TEXTS),
    "sum": (0, 20, NUMBERS),
    "mean": (None, 5.0, NUMBERS),
    "first": (None, "c", TEXTS),
    "last": (None, "b", TEXTS),
    "min": (None, "a", TEXTS),
    "max": (None, "d", TEXTS),
    "collect": ([], ["c", "d", "a", "b"], TEXTS),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_windows_without_records_and_merged_ones(name: str) -> None:
    aggregate = BY_NAME[name]()
    empty, expected, values = EXPECTED[name]
    assert aggregate.result(aggregate.initial()) == empty
    # In merged windows all records of one are before those of the other.
    later, earlier, whole = (
        aggregate.added([time for time, _ in part], [value for _, value in part])
        for part in (values[:2], values[2:], values)
    )
    for merged in [(earlier, later), (aggregate.initial(), whole), (whole, aggregate.initial())]:
        assert aggregate.result(aggregate.merge(*merged)) == expected


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


def test_the_error_of_a_missing_field_names_the_aggregate() -> None:
    """Of five aggregates with names, the error told of "aggregate(value)"."""
    with pytest.raises(
        ValueError, match=r"aggregate\(spent\): expected a record with the field 'price', given one with"
    ):
        Aggregates.of([], {"orders": "count", "spent": ("sum", "price")}).values_of({"cost": 1})


def test_a_quantile_knows_zeros_signs_and_not_a_number() -> None:
    median = quantile(0.5)
    not_a_number = float("nan")
    examples: dict[tuple[float, ...], float | None] = {
        (0.0, 0, -0.0): 0.0,
        (-3, 0, 5): 0.0,
        (-3, -3, 5): -3.0,
        (): None,
        (1.0, not_a_number): not_a_number,
    }
    for values, expected in examples.items():
        accumulator = median.initial()
        for value in values:
            accumulator = median.add(accumulator, 0, median.checked(value))
        for merged in (accumulator, median.merge(accumulator, median.initial())):
            found = median.result(merged)
            assert found is None if expected is None else found == pytest.approx(expected, rel=0.01, nan_ok=True)
            assert type(found) is type(expected)
    ends = [quantile(q) for q in (0, 1)]
    assert [each.result(each.added([0, 0], [1, 100])) for each in ends] == pytest.approx([1, 100], rel=0.01)


VALUES: dict[str, list[Any]] = {
    "ints": [0, 1, -7, 2**40, True],
    "large ints": [2**70, -1, 2**32, 3],
    "floats": [0.1, -0.0, 1e300, -1e300, 0.3, float("inf")],
    "not a number": [0.1, 0.2, 0.3, float("nan")],
    "both": [1, 0.1, 3, -0.0, 1e16, True, 2**32 - 1, -(2**32) + 1],
    "floats and large ints": [0.1, 2**53 + 1, 2**32, 1],
    "zeros": [-0.0],
}
GIVEN_NUMBERS = Aggregates.of((), {name: (name, "x") for name in BY_NAME if name != "collect"})  # type: ignore[misc]
OTHERS = Aggregates.of(
    (), {"median": (quantile(0.5), "x"), "all": (fold(list, lambda seen, x: [*seen, x], operator.iadd), "x")}
)
Example = tuple[Aggregates, int, list[tuple[str, int, int, Any]]]


def some_ranges(random: Random) -> Example:
    """Return records that arrive in any order, ranges that are asked for, and how many of the earliest records go."""
    numbers = random.choice([*VALUES.values()])
    several = random.choice([GIVEN_NUMBERS, OTHERS]) if 1e300 not in numbers and 2**70 not in numbers else GIVEN_NUMBERS
    longest, spread, actions = random.randint(1, 300), random.randint(1, 500), []
    for _ in range(random.randrange(20)):
        for _ in range(random.randrange(6)):
            actions.append(("add", random.randint(-spread, spread), 0, random.choice(numbers)))
        start = random.randint(-spread, spread)
        actions.append(("ask", start, start + random.randint(0, longest), None))
        actions.append(("remove", random.randrange(4), 0, None))
    return several, longest, actions


@pytest.mark.parametrize("summed_exactly", [aggregates._SUMMED_EXACTLY, 10])
@random_examples(some_ranges)
def test_a_range_by_blocks_has_the_aggregates_of_its_records_to_the_bit(
    example: Example, summed_exactly: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    several, longest, actions = example
    monkeypatch.setattr(ranges, "_FEWEST", 2)
    monkeypatch.setattr(aggregates, "_SUMMED_EXACTLY", summed_exactly)
    state, times, values = RangeAggregates(several, longest), list[int](), list[list[Any]]()
    for what, start, end, value in actions:
        if what == "add":
            at = bisect_right(times, start)
            times.insert(at, start)
            values.insert(at, several.values_of({"x": value}))
            state.changed("a", start)
        elif what == "remove":
            state.removed("a", times[:start], len(times) > start)
            del times[:start], values[:start]
            assert times or not state.blocks
        else:
            first, last = bisect_left(times, start), bisect_left(times, end)
            found = several.result(state.accumulators("a", times, values, start, end))
            one_by_one = several.initial()
            for time, of_record in zip(times[first:last], values[first:last], strict=True):
                [one_by_one] = several.add([one_by_one], time, of_record)
            assert frozen(found) == frozen(several.result(one_by_one))


def test_a_long_range_is_aggregated_by_its_blocks_and_two_ends() -> None:
    """A sliding window of n records took n steps for each of its results."""
    steps = 0

    def add(total: int, value: int) -> int:
        nonlocal steps
        steps += 1
        return total + value

    state = RangeAggregates(Aggregates.of([fold(0, add, operator.add)], {}), 6_400)
    times, values = list(range(20_000)), [[1]] * 20_000
    for start in range(50, 1_050):
        assert state.accumulators("a", times, values, start, start + 6_400) == [6_400]
    assert steps < 1_000 * 170 + 7_500
    assert state.blocks <= 170
    state.removed("a", times[:1_000], True)
    assert 0 < state.blocks <= 66
    state.clear()
    assert not state.blocks


def test_the_blocks_of_many_keys_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states were on disk, but their blocks filled the memory."""
    monkeypatch.setattr(ranges, "_MOST_COMPUTED", 100)
    state = RangeAggregates(Aggregates.of(["count"], {}), 6_400)
    most = 0
    for key in range(50):
        assert state.accumulators(key, list(range(6_400)), [[1]] * 6_400, 0, 6_400) == [6_400]
        most = max(most, state.blocks)
    assert most == 64
