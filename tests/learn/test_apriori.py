"""Apriori is compared with plain enumeration and with textbook answers, and runs under any schedule."""

import itertools
import runpy
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from iteration.iteration_support import SMALL, cut_items, run

from streamiter import Flow
from streamiter.errors import JobFailed
from streamiter.learn import apriori

association_rules = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "frequent_item_sets.py"))[
    "association_rules"
]

ELECTRONICS = [
    ["I1", "I2", "I5"],
    ["I2", "I4"],
    ["I2", "I3"],
    ["I1", "I2", "I4"],
    ["I1", "I3"],
    ["I2", "I3"],
    ["I1", "I3"],
    ["I1", "I2", "I3", "I5"],
    ["I1", "I2", "I3"],
]
"""Table 6.1 of Han, Kamber and Pei, Data Mining (third edition)."""

GROCERIES = [
    ["bread", "milk"],
    ["bread", "diapers", "beer", "eggs"],
    ["milk", "diapers", "beer", "cola"],
    ["bread", "milk", "diapers", "beer"],
    ["bread", "milk", "diapers", "cola"],
]
"""Table 5.1 of Tan, Steinbach and Kumar, Introduction to Data Mining."""

ITEMS = st.one_of(st.integers(-2, 3), st.sampled_from("ab"))
TRANSACTIONS = st.lists(st.lists(ITEMS, max_size=6), max_size=12)


def found_in(transactions: Any, minimum_support: float, *, parallelism: int = 1, **options: Any) -> list[Any]:
    flow = Flow("baskets", parallelism)
    found = apriori(flow.from_items(transactions), minimum_support=minimum_support, **options).collect()
    flow.run()
    return found.items


def enumerated(
    transactions: Sequence[Sequence[Any]], minimum_count: Fraction, maximum_size: int | None = None
) -> list[Any]:
    """Return every set of items with its count; each transaction is searched for each set."""
    items = sorted({item for each in transactions for item in each}, key=lambda i: (isinstance(i, str), i))
    held = [set(each) for each in transactions]
    largest = len(items) if maximum_size is None else min(maximum_size, len(items))
    counts = (
        (chosen, sum(set(chosen) <= each for each in held))
        for size in range(1, largest + 1)
        for chosen in itertools.combinations(items, size)
    )
    return [(chosen, count) for chosen, count in counts if count and count >= minimum_count]


@given(
    transactions=TRANSACTIONS,
    percent=st.integers(1, 100),
    maximum_size=st.none() | st.integers(1, 3),
    parallelism=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_apriori_equals_plain_enumeration(
    transactions: list[list[Any]], percent: int, maximum_size: int | None, parallelism: int, seed: int
) -> None:
    """Joining and pruning must lose no item set, under any schedule and with workers without a transaction."""
    flow = Flow("baskets")
    baskets = cut_items(flow, transactions, seed=seed, parallelism=parallelism)
    found = apriori(baskets, minimum_support=percent / 100, maximum_size=maximum_size).collect()
    run(flow, seed=seed, limits=SMALL)
    assert found.items == enumerated(transactions, Fraction(percent, 100) * len(transactions), maximum_size)


def test_the_textbook_answer_with_texts_of_one_store() -> None:
    """The item sets must be those of example 6.3 of the book, over all rounds of the loop."""
    assert found_in(ELECTRONICS, 2 / 9, parallelism=2) == [
        (("I1",), 6),
        (("I2",), 7),
        (("I3",), 6),
        (("I4",), 2),
        (("I5",), 2),
        (("I1", "I2"), 4),
        (("I1", "I3"), 4),
        (("I1", "I5"), 2),
        (("I2", "I3"), 4),
        (("I2", "I4"), 2),
        (("I2", "I5"), 2),
        (("I1", "I2", "I3"), 2),
        (("I1", "I2", "I5"), 2),
    ]


def test_candidates_with_a_part_that_is_rare_are_not_counted() -> None:
    """{I1, I2, I3, I5} is the only candidate of size 4, and has a rare part, so the loop must end without it."""
    flow = Flow("baskets")
    found = apriori(flow.from_items(ELECTRONICS), minimum_support=2 / 9).collect()
    statistics = flow.run()
    assert statistics.loops[0].ended_in == max(len(items) for items, _ in found.items) == 3
    # The loop feeds back the candidates of sizes 2 and 3.
    assert statistics.loops[0].fed_back_records == 2


@pytest.mark.parametrize("count", [1, 7, 14, 24, 25])
def test_a_share_of_exactly_one_count_includes_that_count(count: int) -> None:
    """In floating point (7 / 25) · 25 is more than 7, so an item of exactly 7 transactions was not frequent."""
    transactions = [["always", "some"] if row < count else ["always"] for row in range(25)]
    assert (("some",), count) in found_in(transactions, count / 25)


@pytest.mark.parametrize(
    "transactions",
    [
        [{1, 2}, {2}],
        [(2, 1, 1), (2,)],
        [np.array([1, 2]), np.array([2, 2])],
        np.array([[1, 2], [2, 2]]),
        [frozenset({1, 2}), iter([2])],
    ],
    ids=["sets", "tuples", "arrays", "matrix", "others"],
)
def test_a_transaction_may_be_any_collection(transactions: Any) -> None:
    """Items of arrays are numpy's numbers: they would be neither plain data nor the same keys as ints."""
    found = found_in(transactions, 0.5)
    assert found == [((1,), 1), ((2,), 2), ((1, 2), 1)]
    assert all(type(item) is int for items, _ in found for item in items)


@pytest.mark.parametrize(
    ("transaction", "given"),
    [
        ("bread", "'bread'"),
        (7, "7"),
        ({"bread": 1}, "{'bread': 1}"),
        ([1.5], "1.5"),
        ([None], "None"),
        ([True], "True"),
    ],
)
def test_an_invalid_transaction_ends_the_job_or_is_skipped(transaction: Any, given: str) -> None:
    """Python iterates over a text letter by letter, so the letters would be counted as items."""
    with pytest.raises(JobFailed) as failed:
        found_in([["a"], transaction], 0.5)
    assert f"given {given}" in str(failed.value.__cause__)
    assert found_in([["a"], transaction], 0.5, on_error="skip") == [(("a",), 1)]


def test_two_in_one_flow_have_steps_of_their_own() -> None:
    """Step names are unique in a flow, so two calls of ``apriori`` must not use the same names."""
    flow = Flow("baskets")
    baskets = flow.from_items(GROCERIES)
    often = apriori(baskets, minimum_support=0.8, name="often").collect()
    pairs, again = (apriori(baskets, minimum_support=0.6, maximum_size=2).collect() for _ in range(2))
    flow.run()
    assert len(often) == 3
    assert pairs.items == again.items
    assert len(pairs) == 8


# -- the rules of the example --------------------------------------------------------------------------------


def test_lift_is_against_chance() -> None:
    """Beer and diapers are together in 3 of 5 transactions; for independent items the share would be 4/5 · 3/5."""
    [rule] = [
        rule
        for rule in association_rules(found_in(GROCERIES, 0.6), transactions=5, minimum_confidence=1.0)
        if rule.antecedent == ("beer",)
    ]
    assert (rule.consequent, rule.count, rule.confidence) == (("diapers",), 3, 1.0)
    assert rule.lift == pytest.approx((3 / 5) / (4 / 5 * 3 / 5))
    assert str(rule) == "beer → diapers (confidence 1.00, lift 1.25)"


@settings(max_examples=40)
@given(transactions=TRANSACTIONS, percent=st.integers(0, 100))
def test_rules_equal_counted_shares(transactions: list[list[Any]], percent: int) -> None:
    """The counts of parts are looked up by item set; a wrong lookup gives a wrong confidence or lift."""
    held = [set(each) for each in transactions]

    def share(items: Sequence[Any]) -> Fraction:
        return Fraction(sum(set(items) <= each for each in held), len(held))

    item_sets = enumerated(transactions, Fraction(2))
    rules = association_rules(item_sets, transactions=len(held), minimum_confidence=percent / 100)
    for rule in rules:
        both, antecedent = share([*rule.antecedent, *rule.consequent]), share(rule.antecedent)
        assert rule.confidence == pytest.approx(float(both / antecedent))
        assert rule.lift == pytest.approx(float(both / antecedent / share(rule.consequent)))
        assert rule.count == both * len(held)
    possible = [
        (items, part)
        for items, _ in item_sets
        for size in range(1, len(items))
        for part in itertools.combinations(items, size)
    ]
    assert len(rules) == sum(share(items) / share(part) >= Fraction(percent, 100) for items, part in possible)
