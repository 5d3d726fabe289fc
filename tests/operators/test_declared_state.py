"""A declared state has each field once, and copies of plain data are equal and independent."""

from itertools import chain
from random import Random
from typing import Any

import numpy as np
import pytest
from checkpoints.plain_values import Click, Point, same, some_plain_value
from support.examples import random_examples

from streamiter.errors import CheckpointError, InternalError
from streamiter.operators.declared_state import (
    COPIED,
    EVERY,
    FIRST,
    FIRST_KNOWN,
    GREATEST,
    JOINED,
    LEAST,
    LISTS_BY_KEY,
    NESTED,
    OF_SAME_NUMBER,
    SAME,
    SUM,
    DeclaredOperator,
    DeclaredState,
    Share,
    SharedOperator,
    again,
    by_partition,
    declared,
)
from streamiter.operators.keyed_state import independent_copy
from streamiter.values.plain_data import PlainData


class Inner(DeclaredState):
    seen: list[int] = declared(made=list, form=COPIED)


class Outer(DeclaredOperator):
    """Its fields are those of a base class and its own."""

    _inner = declared(made=Inner, form=NESTED)
    _gone: Inner | None = declared(None, form=NESTED)
    _rows: dict[str, list[int]] = declared(made=dict, form=LISTS_BY_KEY)


class Further(Outer):
    last: int | None = declared(None)


def test_a_state_has_the_fields_of_all_classes_and_shares_nothing_with_the_object() -> None:
    """A list of the snapshot that grew further would store records twice."""
    first, restored = Further(), Further()
    first._inner.seen.append(1)
    first._rows["a"] = [2]
    first.last = 3
    state = first.snapshot()
    first._inner.seen.append(9)
    first._rows["a"].append(9)
    assert state == {"inner": {"seen": [1]}, "gone": None, "rows": {"a": [2]}, "last": 3}
    restored.restore({**state, "gone": {"seen": [4]}})
    restored._inner.seen.append(5)
    restored._rows["a"].append(5)
    assert state == {"inner": {"seen": [1]}, "gone": None, "rows": {"a": [2]}, "last": 3}
    assert (restored._inner.seen, restored._gone, restored._rows, restored.last) == ([1, 5], None, {"a": [2, 5]}, 3)
    assert Further().snapshot() == {"inner": {"seen": []}, "gone": None, "rows": {}, "last": None}


def test_the_state_at_the_start_has_first_values_of_its_own() -> None:
    """A job that read on after its end began with the lists that it had filled before."""
    started = Further()
    started._inner.seen.append(1)
    started.last = 3
    assert started.at_start() == Further().snapshot() == Further.at_start()
    assert Further.at_start()["rows"] is not Further.at_start()["rows"]


@pytest.mark.parametrize(
    ("share", "values", "expected"),
    [
        (LEAST, [4, 2, 3], [2, 2]),
        (GREATEST, [4, 2, 3], [4, 4]),
        (SUM, [4, 2, 3], [7, 2]),
        (JOINED, [[4], [2], [3]], [[4, 3], [2]]),
        (EVERY, [True, False, True], [False, False]),
        (FIRST, [4, 2, 3], [4, 4]),
        (FIRST_KNOWN, [None, 2, 3], [2, 2]),
        (FIRST_KNOWN, [None, None], [None, None]),
        (SAME, [4, 4, 4], [4, 4]),
        (OF_SAME_NUMBER, [4, 2, 3], [4, 2]),
        (again(0), [4, 2, 3], [0, 0]),
        (by_partition(max), [{0: 1, 1: 2, None: 5}, {0: 3, 2: 1}], [{0: 3, 2: 1, None: 5}, {1: 2, None: 5}]),
    ],
)
def test_a_field_is_shared_out_as_its_declaration_says(share: Share, values: list[Any], expected: list[Any]) -> None:
    """Subtasks that are fewer now must lose no count, and those that are more must repeat none."""

    class Counting(SharedOperator):
        _field: Any = declared(share=share)

    shared = Counting().redistribute([{"field": value} for value in values], 2)
    assert shared == [{"field": value} for value in expected]
    assert OF_SAME_NUMBER("", [4, 2], 3) == [4, 2, 0]


def test_subtasks_that_differ_in_a_field_that_must_be_the_same_keep_their_number() -> None:
    with pytest.raises(CheckpointError, match=r"some of them are further than others \(last epoch\)"):
        SAME("last epoch", [1, 2], 2)


def test_a_field_without_a_share_is_a_fault_of_the_engine() -> None:
    class Undecided(SharedOperator):
        _field = declared(0)

    with pytest.raises(InternalError, match=r"Undecided\._field: expected a share= of its declaration, given none"):
        Undecided().redistribute([{"field": 0}], 2)


PLAIN = PlainData([Click, Point])


def without_gaps(random: Random) -> Any:
    """Return a value without padding bytes between record fields, because numpy does not copy padding."""
    while _has_gaps(value := some_plain_value(random)):
        pass
    return value


def _has_gaps(value: Any) -> bool:
    match value:
        case list() | tuple():
            return any(map(_has_gaps, value))
        case dict():
            return any(map(_has_gaps, chain.from_iterable(value.items())))
        case Click():
            return _has_gaps(value.more)
        case np.ndarray() | np.generic():
            return _gaps_in(value.dtype)
    return False


def _gaps_in(dtype: np.dtype[Any]) -> bool:
    if dtype.names is None:
        return dtype.subdtype is not None and _gaps_in(dtype.base)
    fields = [dtype[name] for name in dtype.names]
    return dtype.itemsize != sum(field.itemsize for field in fields) or any(map(_gaps_in, fields))


@random_examples(without_gaps)
def test_a_copy_is_the_same_with_its_exact_types(value: Any) -> None:
    """If a state changes after the barrier, the copy is stored instead."""
    copied = independent_copy(value)
    assert same(copied, value)
    assert PLAIN.encode(copied) == PLAIN.encode(value)


@pytest.mark.parametrize(
    "make_inner",
    [lambda: {"a": 1}, lambda: [1], lambda: np.zeros(2), lambda: Click("u"), lambda: np.array([(1,)], "i4,")[0]],
    ids=["dict", "list", "array", "struct", "record"],
)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"k": x}, lambda x: [0, x], lambda x: (0, (x,))])
def test_nothing_that_can_change_is_shared(wrap: Any, make_inner: Any) -> None:
    """A tuple that contained a list was treated as an immutable value, so state and copy shared the list."""
    inner = make_inner()
    value = wrap(inner)
    before = PLAIN.encode(value)
    copied = independent_copy(value)
    if isinstance(inner, Click):
        inner.user = "other"
    else:
        inner[0 if not isinstance(inner, dict) else "a"] = 9
    assert PLAIN.encode(value) != before
    assert PLAIN.encode(copied) == before


def test_a_state_as_deep_as_plain_data_may_be_can_be_copied() -> None:
    """A deep state that can be stored must not fail if a record arrives before it is stored."""
    value: Any = 1
    for level in range(490):
        value = {"next": value} if level % 2 else [value]
    assert PLAIN.encode(independent_copy(value)) == PLAIN.encode(value)
