"""Operators that hold records: MiniBatch, and ReduceAll, Sort, Join and Collect until the end of the input."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import KINDS, Driven, as_kind, cuts, frozen, number_in, pieces_of, thorough

from streamiter.errors import GraphError
from streamiter.operators import Collect, Collected, Join, MiniBatch, Operator, ReduceAll, Sort
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


STREAMS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(KINDS), st.integers(1, 20)), max_size=8)


def batches_of(stream: list[tuple[int, str, int]]) -> list[tuple[int, Any]]:
    """Return batches of consecutive numbers, with their epochs."""
    firsts = np.cumsum([0, *(length for _, _, length in stream)]).tolist()
    return [
        (epoch, as_kind(kind, list(range(first, first + length))))
        for first, (epoch, kind, length) in zip(firsts, stream, strict=False)
    ]


def expected(stream: list[tuple[int, str, int]], n: int) -> dict[int, list[Any]]:
    """Return the mini-batches of each epoch, cut from one long list; each has one type, or is a list of records."""
    by_epoch: dict[int, list[Any]] = {}
    for epoch, batch in batches_of(stream):
        by_epoch.setdefault(epoch, []).extend((batch, index) for index in range(len(batch)))
    return {
        epoch: [merged(places[start : start + n]) for start in range(0, len(places), n)]
        for epoch, places in by_epoch.items()
    }


def merged(places: list[tuple[Any, int]]) -> Any:
    kinds = {type(batch) for batch, _ in places}
    if kinds == {np.ndarray}:
        return np.array([batch[index] for batch, index in places])
    if kinds == {Columns}:
        rows = [batch[index] for batch, index in places]
        return Columns({name: [row[name] for row in rows] for name in rows[0]})
    return [batch[index] for batch, index in places]


@thorough
@given(stream=STREAMS, n=st.integers(1, 9), places=cuts(20), restart_at=st.integers(0, 20))
def test_every_n_records_of_an_epoch_make_one(
    stream: list[tuple[int, str, int]], n: int, places: list[int], restart_at: int
) -> None:
    """A mini-batch must have exactly n records of one epoch, in order and of their type, across cuts and a restart."""
    pieces = [(epoch, piece) for epoch, batch in batches_of(stream) for piece in pieces_of(batch, places)]
    driven = Driven(MiniBatch(n), in_iteration=True)
    for epoch, piece in pieces[:restart_at]:
        driven.feed(piece, epoch=epoch)
    restarted = driven.restarted(MiniBatch(n), in_iteration=True)
    for epoch, piece in pieces[restart_at:]:
        restarted.feed(piece, epoch=epoch)
    restarted.watermark(3)
    emitted: dict[int, list[Any]] = {}
    for epoch, record in zip(driven.epochs + restarted.epochs, driven.records + restarted.records, strict=True):
        emitted.setdefault(epoch, []).append(record)
    assert frozen(dict(sorted(emitted.items()))) == frozen(dict(sorted(expected(stream, n).items())))


def test_an_epochs_end_emits_the_remainder_of_that_epoch_only() -> None:
    """Records kept until the next epoch would count in it; records kept for ever would block the loop."""
    driven = Driven(MiniBatch(10), in_iteration=True)
    driven.feed([1], epoch=0).feed([3], epoch=2).feed([2], epoch=1)
    driven.watermark(1)
    assert driven.records == [[1], [2]]
    assert driven.epochs == [0, 1]
    assert driven.finish().records == [[1], [2], [3]]


def test_outside_an_iteration_epochs_are_ignored() -> None:
    """A watermark must not shorten a mini-batch."""
    driven = Driven(MiniBatch(2)).feed([1], epoch=0).watermark(0)
    assert driven.feed([2], epoch=1).records == [[1, 2]]


@pytest.mark.parametrize("kind", ["array", "columns"])
def test_whole_mini_batches_of_an_array_are_not_copied(kind: str) -> None:
    """Slices cost nothing, but copies would cost as much as the learning step after them."""
    batch = as_kind(kind, list(range(1000)))
    records = Driven(MiniBatch(100)).feed(batch).records

    def arrays(batch: Any) -> list[Any]:
        return list(batch.arrays.values()) if isinstance(batch, Columns) else [batch]

    assert len(records) == 10
    for record in records:
        assert all(np.shares_memory(*pair) for pair in zip(arrays(record), arrays(batch), strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1], np.array([2])),
        (np.array([1], dtype=np.int32), np.array([2], dtype=np.int64)),
        (np.zeros((1, 2)), np.zeros((1, 3))),
        (Columns({"x": [1]}), Columns({"y": [2]})),
        (Columns({"x": [1]}), np.array([2])),
    ],
)
def test_records_of_different_kinds_form_a_list_unchanged(first: Any, second: Any) -> None:
    """A concatenation would change the type of the records."""
    [record] = Driven(MiniBatch(2)).feed(first, second).records
    assert type(record) is list
    assert frozen(record) == frozen([first[0], second[0]])


def test_the_timeout_counts_from_the_first_record_left_over() -> None:
    """A slow stream must not hold its last records for ever."""
    driven = Driven(MiniBatch(3, timeout_s=10))
    driven.feed([1]).wait(6).feed([2]).wait(3.9)
    assert driven.records == []
    assert driven.wait(0.2).records == [[1, 2]]
    assert driven.timers == []


def test_a_timer_of_records_that_have_gone_out_does_not_cut_the_next_ones_short() -> None:
    """Each full mini-batch left its timer, which emitted a later mini-batch too early."""
    driven = Driven(MiniBatch(2, timeout_s=10)).feed([1]).wait(6).feed([2, 3]).wait(5)
    assert driven.records == [[1, 2]]
    assert driven.wait(4.9).records == [[1, 2]]
    assert driven.wait(0.2).records == [[1, 2], [3]]


def test_timers_do_not_accumulate_under_load() -> None:
    """A timer for each batch with a remainder would mean thousands of timers within a long timeout."""
    driven = Driven(MiniBatch(2, timeout_s=1000))
    for _ in range(50):
        driven.feed([1, 2, 3]).wait(0.1)
        assert len(driven.timers) <= 1


def test_a_timeout_does_not_send_records_of_a_later_epoch_out_in_an_earlier_one() -> None:
    """Records that a timer emits count in the first open epoch."""
    driven = Driven(MiniBatch(5, timeout_s=10), in_iteration=True).feed([7], epoch=2).wait(15)
    assert driven.records == []
    driven.watermark(1).wait(10)
    assert (driven.records, driven.epochs) == ([[7]], [2])


def test_a_timeout_resumes_after_a_restart() -> None:
    """Without its timer, a restored remainder would wait for ever on a stream without new records."""
    driven = Driven(MiniBatch(5, timeout_s=10)).feed([1]).wait(4)
    restarted = driven.restarted(MiniBatch(5, timeout_s=10)).wait(5.9)
    assert restarted.records == []
    assert restarted.wait(0.2).records == [[1]]


def test_a_step_given_a_timeout_later_takes_the_state_of_one_without() -> None:
    """The timeout may be added or removed between two runs."""
    without = Driven(MiniBatch(5)).feed([1])
    assert without.restarted(MiniBatch(5, timeout_s=1)).wait(2).records == [[1]]
    with_timer = Driven(MiniBatch(5, timeout_s=1)).feed([1])
    assert with_timer.restarted(MiniBatch(5)).wait(2).finish().records == [[1]]


def test_an_emitted_mini_batch_does_not_change_later() -> None:
    """The next records were added to the list that had just been emitted."""
    driven = Driven(MiniBatch(2)).feed([1], [2], [3], [4], [5])
    assert driven.finish().records == [[1, 2], [3, 4], [5]]
