"""FlatMap consumes iterables of any length in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import Driven, quick

from streamiter.operators import FlatMap, Output
from streamiter.operators.output import RecordFailure

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
