"""KeyedReduceBatch: the same as the loop, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from operators.operator_harness import Driven, cuts, frozen, pieces_of, stored, thorough

from streamiter.checkpoints.keys import check_keys
from streamiter.errors import ConfigurationError, RejectRecords
from streamiter.operators import FunctionResultError, KeyedReduce, KeyedReduceBatch

INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
UFUNCS = [np.add, np.subtract, np.multiply, np.maximum, np.minimum]


class Cyclic:
    """Keys for a batch by the records' positions in the stream, and the same one record at a time."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys
        self.at = 0

    def of_batch(self, batch: Any) -> Any:
        self.at += len(batch)
        return self.keys[self.at - len(batch) : self.at]

    def of_record(self, record: Any) -> Any:
        return self.of_batch([record])[0].item()


def by_loop(values: Any, keys: Any, ufunc: Any) -> list[Any]:
    """What a plain loop gives."""
    states: dict[Any, Any] = {}
    results = []
    for key, value in zip(keys.tolist(), values, strict=True):
        states[key] = ufunc(states[key], value) if key in states else value
        results.append(states[key])
    return results


def check_against_loop(values: Any, keys: Any, ufunc: Any, places: list[int]) -> Driven:
    driven = Driven(KeyedReduceBatch(Cyclic(keys).of_batch, ufunc, check_keys=check_keys))
    with np.errstate(all="ignore"):
        driven.feed(*pieces_of(values, places))
        assert frozen(driven.records) == frozen(by_loop(values, keys, ufunc))
    return driven


@pytest.mark.parametrize("ufunc", UFUNCS)
@thorough
@given(data=st.data(), places=cuts())
def test_integers_come_out_exactly_in_their_own_type(
    ufunc: Any, data: st.DataObject, places: list[int]
) -> None:
    """Small integers are summed in wide ones unless numpy is told not to: overflow must wrap as in the loop."""
    length = data.draw(st.integers(0, 60))
    values = data.draw(hnp.arrays(st.sampled_from(INTEGERS), length))
    keys = data.draw(hnp.arrays(st.sampled_from(INTEGERS), length, elements=st.integers(0, 7)))
    driven = check_against_loop(values, keys, ufunc, places)
    assert all(isinstance(batch, np.ndarray) and batch.dtype == values.dtype for batch in driven.batches)


@pytest.mark.parametrize("ufunc", [*UFUNCS, np.divide])
@thorough
@given(data=st.data(), places=cuts())
def test_floats_round_as_in_the_loop(ufunc: Any, data: st.DataObject, places: list[int]) -> None:
    """A sum in another order differs in the last bits, and a restored run from one never stopped."""
    length = data.draw(st.integers(0, 60))
    numbers = st.floats(width=32, allow_nan=False)
    values = data.draw(hnp.arrays(st.sampled_from([np.float32, np.float64]), length, elements=numbers))
    keys = data.draw(hnp.arrays(np.int64, length, elements=st.integers(0, 4)))
    driven = check_against_loop(values, keys, ufunc, places)
    assert all(isinstance(batch, np.ndarray) and batch.dtype == values.dtype for batch in driven.batches)


@thorough
@given(keys=hnp.arrays(st.sampled_from([*INTEGERS, "U2", "S2"]), st.integers(0, 40)), places=cuts(40))
def test_keys_of_every_type_and_range_are_told_apart(keys: Any, places: list[int]) -> None:
    """Keys are numbered in one or two bytes where their range allows: the ends of it must not meet."""
    check_against_loop(np.arange(len(keys)), keys, np.add, places)


@pytest.mark.parametrize("spread", [1, 255, 256, 65_535, 65_536, 2**40])
@pytest.mark.parametrize("lowest", [-(2**62), -3, 0, 250, 2**50])
def test_keys_at_the_ends_of_a_byte_are_told_apart(spread: int, lowest: int) -> None:
    """The ranges at which the width changes."""
    keys = np.array([lowest, lowest + spread, lowest, lowest + spread // 2, lowest + spread])
    check_against_loop(np.arange(5), keys, np.add, [2])


@pytest.mark.parametrize("distinct", [200, 300, 70_000])
def test_keys_far_apart_are_numbered_without_meeting(distinct: int) -> None:
    """As many distinct keys as one byte has numbers, as two bytes have, and more."""
    keys = np.random.default_rng(1).permutation(np.arange(distinct) * 1_000_003)
    check_against_loop(np.arange(2 * distinct), np.concatenate([keys, keys[::-1]]), np.add, [distinct + 1])


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("distinct", [3, 129, 400, 3000])
def test_few_large_groups_and_many_small_ones_give_the_same(dtype: Any, distinct: int) -> None:
    """Large groups are reduced one by one, small ones side by side; a skewed batch has both."""
    random = np.random.default_rng(distinct)
    keys = (random.zipf(1.2, 6000) % distinct).astype(np.int64)
    values = (random.standard_normal(6000) * 1000).astype(dtype)
    check_against_loop(values, keys, np.add, [1000, 1001, 4000])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ufunc", [np.fmax, np.fmin, np.maximum, np.minimum])
@pytest.mark.parametrize("length", [2, 3, 9, 40])
def test_zeros_of_both_signs_come_out_as_from_the_loop(dtype: Any, ufunc: Any, length: int) -> None:
    """Either zero is a right result of fmax, and numpy's vector loops choose otherwise than its scalar ones."""
    values = np.where(np.arange(length) % 2, 0.0, -0.0).astype(dtype)
    for keys in (np.zeros(length, int), np.arange(length) // 2):
        for places in ([], [1], [2], [length // 2]):
            check_against_loop(values, keys, ufunc, places)
            check_against_loop(-values, keys, ufunc, places)


@thorough
@given(numbers=st.lists(st.integers(-9, 9), max_size=40), places=cuts(40), data=st.data())
def test_state_goes_on_across_kinds_of_batches(
    numbers: list[int], places: list[int], data: st.DataObject
) -> None:
    """A list between two arrays, or another type of number, must find the same state."""
    kinds: list[Any] = [list, np.int64, np.int32, np.float64]
    pieces = [
        piece if (kind := data.draw(st.sampled_from(kinds))) is list else np.array(piece, dtype=kind)
        for piece in pieces_of(numbers, places)
    ]
    keys = np.array(numbers) % 3
    driven = Driven(KeyedReduceBatch(Cyclic(keys).of_batch, np.add)).feed(*pieces)
    scalar = Driven(KeyedReduce(Cyclic(keys).of_record, np.add)).feed(*pieces)
    assert frozen(driven.records) == frozen(scalar.records)


@pytest.mark.parametrize(
    ("values", "ufunc"),
    [
        (np.array([7, 2, 4, 3]), np.divide),
        (np.array([0.0, -0.0, 1.0, -1.0]), np.fmax),
        (np.array([1.5, 2.0, 1.5, 0.5]), np.power),
        (np.array([3, 1, 2, 5], dtype=">i4"), np.add),
        (np.array([1 + 2j, 3j, 1, 2]), np.multiply),
        (np.array([[1, 2], [3, 4], [5, 6], [7, 8]]), np.add),
        (np.array([True, False, True, True]), np.logical_xor),
        (np.array([5, 9, 1, 3], dtype="m8[s]"), np.maximum),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_numpy_would_reduce_otherwise_is_reduced_by_the_loop(values: Any, ufunc: Any) -> None:
    """Types that change, or loops that need not agree to the bit."""
    check_against_loop(values, np.array([0, 1, 0, 0]), ufunc, [3])


def test_a_key_that_the_checker_refuses_is_refused_with_all_its_records() -> None:
    """Before any state has changed: the engine calls again with the other records."""

    def check(keys: list[Any]) -> list[Any]:
        if 13 in keys:
            raise ValueError("unlucky")
        return keys

    driven = Driven(KeyedReduceBatch(lambda batch: batch, np.add, check_keys=check))
    with pytest.raises(RejectRecords, match="unlucky") as refusal:
        driven.feed(np.array([13, 1, 13]))
    assert refusal.value.indices == (0, 2)
    assert stored(driven.operator.snapshot())() == []


@pytest.mark.parametrize(
    "keys", [[1, 2], np.array([1.0, 2.0]), np.array([True, False]), np.array([1]), np.array([[1], [2]]), None]
)
def test_keys_that_are_none_are_refused(keys: Any) -> None:
    """Floats and booleans equal integers and would share their state."""
    with pytest.raises(FunctionResultError, match="keys_of"):
        Driven(KeyedReduceBatch(lambda batch: keys, np.add)).feed(np.array([1, 2]))


@pytest.mark.parametrize("ufunc", [max, np.sin, np.divmod, np.sum, np.matmul])
def test_only_ufuncs_of_two_numbers_are_taken(ufunc: Any) -> None:
    """np.sum is a function over an array, easily taken for np.add."""
    with pytest.raises(ConfigurationError, match=r"KeyedReduceBatch\(ufunc\)"):
        KeyedReduceBatch(lambda batch: batch, ufunc)
