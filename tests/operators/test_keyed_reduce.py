"""KeyedReduce and StatefulMap keep a state for each key, record by record and batch by batch."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import Driven, frozen, pieces_of, stored, thorough
from support.examples import EXAMPLES, random_examples

from streamiter.operators import KeyedReduce, KeyedReduceBatch, StatefulMap

WORDS = st.lists(st.text("abc", min_size=1, max_size=3))


@thorough
@given(words=WORDS)
def test_each_record_gives_the_reduction_of_its_key_so_far(words: list[str]) -> None:
    """Each result must equal a reduction of all earlier records of the key."""
    driven = Driven(KeyedReduce(lambda word: word[0], lambda joined, word: joined + word)).feed(words)
    assert driven.records == [
        "".join(other for other in words[: index + 1] if other[0] == word[0]) for index, word in enumerate(words)
    ]


def test_none_is_a_valid_value() -> None:
    """None was treated as a missing value, and the reduction started again."""
    driven = Driven(KeyedReduce(lambda record: 0, lambda value, record: (value, record)))
    assert driven.feed([None, None, 1]).records == [None, (None, None), ((None, None), 1)]
    flips = Driven(StatefulMap(lambda record: 0, lambda state, record: (None, state), initial="first"))
    assert flips.feed([1, 2]).records == ["first", None]


def test_an_initial_value_that_can_change_is_not_shared_between_keys() -> None:
    """One list for all keys mixed the records of different keys, as a mutable default argument does."""

    def remember(seen: list[str], word: str) -> tuple[list[str], tuple[str, ...]]:
        seen.append(word)
        return seen, tuple(seen)

    given_list: list[str] = []
    for initial in (given_list, list, lambda: []):
        driven = Driven(StatefulMap(len, remember, initial)).feed(["a", "bb", "c"])
        assert driven.records == [("a",), ("bb",), ("a", "c")]
    assert given_list == []


def test_the_initial_state_is_the_one_given_when_the_step_was_made() -> None:
    """A later change of the list gave later keys another initial state."""
    initial = [1]
    driven = Driven(StatefulMap(len, lambda state, word: (state, tuple(state)), initial))
    initial.append(2)
    assert driven.feed(["a"]).records == [(1,)]


REDUCE: Any = (KeyedReduce, lambda total, record: total + 6 // record)
STATEFUL: Any = (StatefulMap, lambda total, record: ((total or 0) + 6 // record,) * 2)
both = pytest.mark.parametrize(("operator", "f"), [REDUCE, STATEFUL])


@both
def test_keys_of_numpy_and_of_python_are_one(operator: Any, f: Any) -> None:
    """The state of a key must be found in any kind of batch that contains the records."""
    driven = Driven(operator(lambda record: record % 2, f))
    driven.feed(np.array([1, 3]), [1, 3])
    [[keys, _]] = stored(driven.operator.snapshot())()
    assert keys == [1]
    assert type(keys[0]) is int


INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
UFUNCS = [np.add, np.subtract, np.multiply, np.maximum, np.minimum]


class Cyclic:
    """Returns the keys of a batch or of single records by their positions in the stream."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys
        self.at = 0

    def of_batch(self, batch: Any) -> Any:
        self.at += len(batch)
        return self.keys[self.at - len(batch) : self.at]

    def of_record(self, record: Any) -> Any:
        return self.of_batch([record])[0].item()


def by_loop(values: Any, keys: Any, ufunc: Any) -> list[Any]:
    """Return the results of a plain loop."""
    states: dict[Any, Any] = {}
    results = []
    for key, value in zip(keys.tolist(), values, strict=True):
        states[key] = ufunc(states[key], value) if key in states else value
        results.append(states[key])
    return results


def check_against_loop(values: Any, keys: Any, ufunc: Any, places: list[int]) -> Driven:
    driven = Driven(KeyedReduceBatch(Cyclic(keys).of_batch, ufunc))
    with np.errstate(all="ignore"):
        driven.feed(*pieces_of(values, places))
        assert frozen(driven.records) == frozen(by_loop(values, keys, ufunc))
    return driven


Case = tuple[Any, Any, Any, list[int]]
"""A case has values, keys, a ufunc, and the places where the values are cut."""

# Each example drives an operator, which takes three times as long as most tests of pure data.
FEWER = EXAMPLES // 3


def some_places(random: Random, longest: int = 60) -> list[int]:
    return [random.randint(1, longest) for _ in range(random.randrange(13))]


def bits(random: Random, dtype: Any, length: int) -> Any:
    """Return an array of random bits."""
    return np.frombuffer(random.randbytes(length * np.dtype(dtype).itemsize), dtype)


def few(random: Random, dtype: Any, length: int, distinct: int) -> Any:
    return np.array([random.randrange(distinct) for _ in range(length)], dtype)


def some_integers(random: Random) -> Case:
    length = random.randint(0, 60)
    values = bits(random, random.choice(INTEGERS), length)
    return values, few(random, random.choice(INTEGERS), length, 8), random.choice(UFUNCS), some_places(random)


@random_examples(some_integers, examples=FEWER)
def test_integers_come_out_exactly_in_their_own_type(case: Case) -> None:
    """By default numpy sums small integers in wider types, but an overflow must wrap as in the loop."""
    values, keys, ufunc, places = case
    driven = check_against_loop(values, keys, ufunc, places)
    assert all(isinstance(batch, np.ndarray) and batch.dtype == values.dtype for batch in driven.batches)


def some_floats(random: Random) -> Case:
    """Return floats of any size, or of similar size as in most sums; no float is NaN."""
    length, dtype = random.randint(0, 60), random.choice((np.float32, np.float64))
    values = bits(random, dtype, length).copy()
    values[np.isnan(values)] = -0.0
    if random.random() < 0.5:
        values = np.array([random.choice((0.1, -0.0, 1e8, random.gauss(0, 9))) for _ in range(length)], dtype)
    return values, few(random, np.int64, length, 5), random.choice([*UFUNCS, np.divide]), some_places(random)


@random_examples(some_floats, examples=FEWER)
def test_floats_round_as_in_the_loop(case: Case) -> None:
    """A sum in another order differs in its last bits, so a restored run would differ from an uninterrupted one."""
    values, keys, ufunc, places = case
    driven = check_against_loop(values, keys, ufunc, places)
    assert all(isinstance(batch, np.ndarray) and batch.dtype == values.dtype for batch in driven.batches)


def some_keys(random: Random) -> tuple[Any, list[int]]:
    """Return keys, some of which are repeated."""
    length, kind = random.randint(0, 40), random.choice([*INTEGERS, "U2", "S2"])
    if kind in ("U2", "S2"):
        distinct = np.array(["", "a", "b", "ab", "ba", "z"], kind)
    else:
        distinct = np.concatenate([bits(random, kind, random.randint(1, 20)), np.array([0, 1], kind)])
    return distinct[few(random, np.int64, length, len(distinct))], some_places(random, 40)


@random_examples(some_keys, examples=FEWER)
def test_keys_of_every_type_and_range_are_distinguished(example: tuple[Any, list[int]]) -> None:
    """Keys are numbered in one or two bytes if their range allows; the ends of the range must stay different."""
    keys, places = example
    check_against_loop(np.arange(len(keys)), keys, np.add, places)


@pytest.mark.parametrize("spread", [1, 255, 256, 65_535, 65_536, 2**40])
@pytest.mark.parametrize("lowest", [-(2**62), -3, 0, 250, 2**50])
def test_keys_at_the_ends_of_a_byte_are_distinguished(spread: int, lowest: int) -> None:
    """These are the ranges at which the width of the numbers changes."""
    keys = np.array([lowest, lowest + spread, lowest, lowest + spread // 2, lowest + spread])
    check_against_loop(np.arange(5), keys, np.add, [2])


@pytest.mark.parametrize("distinct", [200, 300, 70_000])
def test_keys_far_apart_are_numbered_without_meeting(distinct: int) -> None:
    """The number of distinct keys fits one byte, two bytes, or neither."""
    keys = np.random.default_rng(1).permutation(np.arange(distinct) * 1_000_003)
    check_against_loop(np.arange(2 * distinct), np.concatenate([keys, keys[::-1]]), np.add, [distinct + 1])


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("distinct", [3, 129, 400, 3000])
def test_few_large_groups_and_many_small_ones_give_the_same(dtype: Any, distinct: int) -> None:
    """Large groups are reduced one by one and small groups together; a skewed batch has both."""
    random = np.random.default_rng(distinct)
    keys = (random.zipf(1.2, 6000) % distinct).astype(np.int64)
    values = (random.standard_normal(6000) * 1000).astype(dtype)
    check_against_loop(values, keys, np.add, [1000, 1001, 4000])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ufunc", [np.fmax, np.fmin, np.maximum, np.minimum])
@pytest.mark.parametrize("length", [2, 3, 9, 40])
def test_zeros_of_both_signs_come_out_as_from_the_loop(dtype: Any, ufunc: Any, length: int) -> None:
    """Both zeros are right results of fmax, and numpy's vector loops choose another zero than its scalar loops."""
    values = np.where(np.arange(length) % 2, 0.0, -0.0).astype(dtype)
    for keys in (np.zeros(length, int), np.arange(length) // 2):
        for places in ([], [1], [2], [length // 2]):
            check_against_loop(values, keys, ufunc, places)
            check_against_loop(-values, keys, ufunc, places)


def numbers_and_pieces(random: Random) -> tuple[list[int], list[Any]]:
    kinds: list[Any] = [list, np.int64, np.int32, np.float64]
    numbers = [random.randint(-9, 9) for _ in range(random.randint(0, 40))]
    pieces = [
        piece if (kind := random.choice(kinds)) is list else np.array(piece, dtype=kind)
        for piece in pieces_of(numbers, some_places(random, 40))
    ]
    return numbers, pieces


@random_examples(numbers_and_pieces, examples=FEWER)
def test_state_continues_across_kinds_of_batches(example: tuple[list[int], list[Any]]) -> None:
    """A list between two arrays, or another numeric type, must find the same state."""
    numbers, pieces = example
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
def test_values_that_numpy_reduces_differently_are_reduced_by_the_loop(values: Any, ufunc: Any) -> None:
    """Numpy would change the type here, or its loops need not agree to the bit."""
    check_against_loop(values, np.array([0, 1, 0, 0]), ufunc, [3])
