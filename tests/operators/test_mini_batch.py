"""MiniBatch makes one record of n records, for any cuts, epochs, timers and types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import KINDS, Driven, as_kind, cuts, frozen, pieces_of, thorough

from streamiter.operators import MiniBatch
from streamiter.values.records import Columns

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
