"""Copies of plain data are equal and independent."""

from __future__ import annotations

from itertools import chain
from random import Random
from typing import Any

import numpy as np
import pytest
from checkpoints.plain_values import Click, Point, same, some_plain_value
from support.examples import random_examples

from streamiter.operators.keyed_state import independent_copy
from streamiter.values.plain_data import PlainData

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
