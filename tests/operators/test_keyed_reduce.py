"""KeyedReduce and StatefulMap keep a state for each key, and process record by record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import Driven, stored, thorough

from streamiter.operators import KeyedReduce, StatefulMap
from streamiter.values.subtasks import check_keys

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
    driven = Driven(operator(lambda record: record % 2, f, check_keys=check_keys))
    driven.feed(np.array([1, 3]), [1, 3])
    [[keys, _]] = stored(driven.operator.snapshot())()
    assert keys == [1]
    assert type(keys[0]) is int
