"""KeyedReduce and StatefulMap keep a state for each key, and process record by record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operators.operator_harness import Driven, stored, thorough

from streamiter.errors import PlainDataError
from streamiter.operators import FunctionResultError, KeyedReduce, StatefulMap
from streamiter.operators.output import RecordFailure
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


@pytest.mark.parametrize("result", [5, None, (1, 2, 3), (1,)])
def test_a_result_that_is_not_state_and_output_is_named(result: Any) -> None:
    """Python's "cannot unpack" is raised in a line that the user never wrote."""
    driven = Driven(StatefulMap(lambda record: 0, lambda state, record: result))
    with pytest.raises(RecordFailure) as failure:
        driven.feed(["first"])
    assert failure.value.record == "first"
    assert isinstance(failure.value.__cause__, FunctionResultError)
    assert repr(result) in str(failure.value.__cause__)


def test_an_error_of_the_users_function_is_kept() -> None:
    """A TypeError inside the function was reported as a wrong result of the function."""
    driven = Driven(StatefulMap(lambda record: 0, lambda state, record: len(record)))
    with pytest.raises(RecordFailure) as failure:
        driven.feed([3])
    assert "has no len()" in str(failure.value.__cause__)


REDUCE: Any = (KeyedReduce, lambda total, record: total + 6 // record)
STATEFUL: Any = (StatefulMap, lambda total, record: ((total or 0) + 6 // record,) * 2)
both = pytest.mark.parametrize(("operator", "f"), [REDUCE, STATEFUL])


@both
def test_a_failure_names_the_record_and_leaves_the_state(operator: Any, f: Any) -> None:
    """After a dead letter, the key's sum must continue as if the record did not exist."""
    with pytest.raises(RecordFailure) as failure:
        Driven(operator(lambda record: "all", f)).feed([6, 3, 0, 2])
    assert failure.value.record == 0
    skipping = Driven(operator(lambda record: "all", f), policy="dead_letter").feed([6, 3, 0, 2])
    without = Driven(operator(lambda record: "all", f)).feed([6, 3, 2])
    assert skipping.records == without.records
    assert [letter.record for letter in skipping.dead_letters] == [0]


@both
@pytest.mark.parametrize("key_of", [lambda record: 1 // record, lambda record: record or 0.5])
def test_a_record_without_a_good_key_is_refused_by_name(operator: Any, f: Any, key_of: Any) -> None:
    """A float key may be rounded differently later, and then no longer finds its state."""
    with pytest.raises(RecordFailure) as failure:
        Driven(operator(key_of, f, check_keys=check_keys)).feed([1, 0, 1])
    assert failure.value.record == 0
    assert isinstance(failure.value.__cause__, (PlainDataError, ZeroDivisionError))
    skipping = Driven(operator(key_of, f, check_keys=check_keys), policy="skip").feed([1, 0, 1])
    assert len(skipping.records) == 2
    assert skipping.out.rejected == 1


@both
def test_a_key_that_cannot_be_hashed_is_refused_by_name(operator: Any, f: Any) -> None:
    """Without a checker of keys, the dictionary raises the error."""
    driven = Driven(operator(lambda record: [] if record == 2 else 0, f), policy="dead_letter").feed([1, 2, 3])
    assert [letter.record for letter in driven.dead_letters] == [2]
    assert "unhashable" in driven.dead_letters[0].error


@both
def test_keys_of_numpy_and_of_python_are_one(operator: Any, f: Any) -> None:
    """The state of a key must be found in any kind of batch that contains the records."""
    driven = Driven(operator(lambda record: record % 2, f, check_keys=check_keys))
    driven.feed(np.array([1, 3]), [1, 3])
    [[keys, _]] = stored(driven.operator.snapshot())()
    assert keys == [1]
    assert type(keys[0]) is int
