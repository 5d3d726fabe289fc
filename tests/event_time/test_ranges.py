"""Aggregates of ranges by blocks against those of all their records, one by one."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from random import Random
from typing import Any

import pytest
from operators.operator_harness import frozen
from support.examples import random_examples

from streamiter.operators.timed import aggregates, ranges
from streamiter.operators.timed.aggregates import BY_NAME, fold, quantile
from streamiter.operators.timed.ranges import RangeAggregates
from streamiter.operators.timed.several_aggregates import Aggregates

VALUES: dict[str, list[Any]] = {
    "ints": [0, 1, -7, 2**40, True],
    "large ints": [2**70, -1, 2**32, 3],
    "floats": [0.1, -0.0, 1e300, -1e300, 0.3, float("inf")],
    "not a number": [0.1, 0.2, 0.3, float("nan")],
    "both": [1, 0.1, 3, -0.0, 1e16, True, 2**32 - 1, -(2**32) + 1],
    "floats and large ints": [0.1, 2**53 + 1, 2**32, 1],
    "zeros": [-0.0],
}
NUMBERS = Aggregates.of((), {name: (name, "x") for name in BY_NAME if name != "collect"})  # type: ignore[misc]
OTHERS = Aggregates.of(
    (), {"median": (quantile(0.5), "x"), "all": (fold(list, lambda seen, x: [*seen, x], operator.iadd), "x")}
)
Example = tuple[Aggregates, int, list[tuple[str, int, int, Any]]]


def some_ranges(random: Random) -> Example:
    """Return records that arrive in any order, ranges that are asked for, and how many of the earliest records go."""
    numbers = random.choice([*VALUES.values()])
    several = random.choice([NUMBERS, OTHERS]) if 1e300 not in numbers and 2**70 not in numbers else NUMBERS
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
