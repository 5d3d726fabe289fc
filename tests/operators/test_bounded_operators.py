"""ReduceAll, Sort and Join emit their results at the end of the input; Collect keeps results, each once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import KINDS, Driven, as_kind, cuts, frozen, number_in, pieces_of, thorough

from streamiter.errors import GraphError
from streamiter.operators import Collect, Collected, Join, Operator, ReduceAll, Sort
from streamiter.values.records import Columns

NUMBERS = st.lists(st.integers(-5, 5), max_size=40)


@thorough
@given(words=st.lists(st.text("ab", max_size=2)), places=cuts(20))
def test_reduce_all_gives_one_record_or_none_without_input(words: list[str], places: list[int]) -> None:
    """The records must be reduced in order, because the function need not be commutative."""
    driven = Driven(ReduceAll(lambda joined, word: joined + "," + word)).feed(*pieces_of(words, places))
    assert driven.records == []
    assert driven.finish().records == ([",".join(words)] if words else [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
@thorough
@given(numbers=NUMBERS, places=cuts(40))
def test_sort_is_stable_and_keeps_the_kind(kind: str, reverse: bool, numbers: list[int], places: list[int]) -> None:
    """Records with equal keys must keep their order, even in reverse sorting."""
    batch = as_kind(kind, numbers)
    driven = Driven(Sort(lambda record: abs(number_in(record)), reverse=reverse))
    driven.feed(*pieces_of(batch, places))
    assert driven.batches == []
    expected = sorted(batch, key=lambda record: abs(number_in(record)), reverse=reverse)
    assert frozen(driven.finish().records) == frozen(expected)
    assert {type(emitted) for emitted in driven.batches} <= {type(batch)}


def test_sort_without_a_key_compares_the_records() -> None:
    """If lists and arrays arrive in one sort, the result is a list."""
    driven = Driven(Sort()).feed([3, 1], np.array([2])).finish()
    assert frozen(driven.batches) == frozen([[1, np.int64(2), 3]])


def test_sort_takes_the_name_of_a_field() -> None:
    """The field may belong to columns, dicts, objects or structured arrays."""

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    columns = Columns({"x": [2, 1], "name": ["b", "a"]})
    assert Driven(Sort("x")).feed(columns).finish().records[0]["name"] == "a"
    assert [point.x for point in Driven(Sort("x")).feed([Point(2), Point(1)]).finish().records] == [1, 2]
    rows = np.array([(2, "b"), (1, "a")], dtype=[("x", int), ("name", "U1")])
    assert Driven(Sort("x")).feed(rows).finish().records[0]["name"] == "a"


def test_sort_emits_its_records_in_pieces() -> None:
    """One batch with all records would fill the channels after the step."""
    driven = Driven(Sort()).feed(np.arange(20_000)[::-1]).finish()
    assert [len(batch) for batch in driven.batches] == [8192, 8192, 3616]
    assert driven.operator.snapshot() == {"held": []}


ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers()), max_size=15)


@thorough
@given(left=ROWS, right=ROWS, places=cuts(15), order=st.randoms(use_true_random=False), restart_at=st.integers(0, 9))
def test_join_gives_every_pair_in_the_order_of_left_then_right(
    left: Any, right: Any, places: list[int], order: Any, restart_at: int
) -> None:
    """The order must not depend on the cuts of the inputs, on the first input to arrive, or on a restart."""
    pieces = [
        *(("left", piece) for piece in pieces_of(left, places)),
        *(("right", piece) for piece in pieces_of(right, places)),
    ]
    turns = [side for side, _ in pieces]
    order.shuffle(turns)
    queues = {side: [piece for of, piece in pieces if of == side] for side in ("left", "right")}
    driven = Driven(Join(lambda row: row[0]))
    for turn, side in enumerate(turns):
        if turn == restart_at:
            driven = driven.restarted(Join(lambda row: row[0]))
        driven.feed(queues[side].pop(0), to=side)
    assert driven.records == []
    assert driven.finish().records == [(a, b) for a in left for b in right if a[0] == b[0]]


def test_join_takes_a_field_or_a_pair_for_left_and_right() -> None:
    """One side may consist of columns, and the other of dicts."""
    users = Columns({"id": [7, 8], "name": ["ann", "bob"]})
    clicks = [{"user": 8, "page": "/"}, {"user": 9, "page": "/"}]
    driven = Driven(Join(on=("user", lambda row: row["id"])))
    driven.feed(clicks, to="left").feed(users, to="right").finish()
    assert [(click["page"], user["name"]) for click, user in driven.records] == [("/", "bob")]
    both = Driven(Join("id")).feed(users, to="left").feed(users, to="right").finish()
    assert [left["name"] for left, _ in both.records] == ["ann", "bob"]


def test_join_pairs_none_with_none_but_never_nan() -> None:
    """A dict finds NaN by identity, so NaN matched before a restart but not after it."""
    nan = math.nan
    driven = Driven(Join(lambda record: record)).feed([nan, None], to="left").feed([nan, None], to="right")
    assert driven.finish().records == [(None, None)]


@pytest.mark.parametrize("operator", [ReduceAll(max), Sort(), Join("x")])
def test_without_input_no_record_is_emitted(operator: Operator) -> None:
    """An empty table is valid input and gives no records."""
    assert Driven(operator).finish().records == []


def test_items_are_refused_before_the_run_and_then_hold_the_records() -> None:
    """Batches of every type must be collected record by record."""
    collected = Collected()
    assert repr(collected) == "Collected(0 items)"
    with pytest.raises(GraphError, match=r"expected .items after the flow has started"):
        _ = collected.items
    Driven(Collect(collected)).feed([1], np.array([2]), Columns({"x": [3]}))
    assert collected.items == list(collected) == [1, 2, {"x": 3}]
    assert repr(collected) == "Collected(3 items)"


def test_a_second_run_starts_again() -> None:
    """A second run of a flow returned every result twice."""
    collected = Collected()
    Driven(Collect(collected)).feed([1, 2])
    Driven(Collect(collected)).feed([3])
    assert collected.items == [3]


def test_a_restored_run_continues_with_the_items_of_its_checkpoint() -> None:
    """Items after the checkpoint are emitted again, so the items of the failed run must be removed."""
    collected = Collected()
    first = Driven(Collect(collected)).feed([1, 2])
    snapshot = first.operator.snapshot()
    first.feed([3])
    second = Driven(Collect(collected))
    second.operator.restore(snapshot)
    second.feed([3, 4])
    assert collected.items == [1, 2, 3, 4]


def test_subtasks_share_the_result_and_keep_states_of_their_own() -> None:
    """With one list for all subtasks, each of two subtasks would restore the items of both."""
    collected = Collected()
    subtasks = [Driven(Collect(collected), subtask=index, parallelism=2) for index in (0, 1)]
    subtasks[1].feed(["b"])
    subtasks[0].feed(["a"])
    assert collected.items == ["a", "b"]
    snapshots = [subtask.operator.snapshot() for subtask in subtasks]
    for index in (0, 1):
        Driven(Collect(collected), subtask=index, parallelism=2).operator.restore(snapshots[index])
    assert collected.items == ["a", "b"]
    Driven(Collect(collected), subtask=0, parallelism=1).feed(["c"])
    assert collected.items == ["c"]


def test_the_list_given_out_is_the_callers_own() -> None:
    """A caller who sorts the list in place must not change the next checkpoint."""
    collected = Collected()
    driven = Driven(Collect(collected)).feed([2, 1])
    collected.items.sort()
    assert driven.operator.snapshot() == {"items": [2, 1]}
