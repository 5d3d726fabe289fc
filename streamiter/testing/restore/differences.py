"""The first difference of two plain values, by the path that leads to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from streamiter.operators.rejection import shortened
from streamiter.records import Columns

__all__ = ["Difference", "first_difference"]


class Difference(NamedTuple):
    """Where two values differ, as Python would write it, and what stands there."""

    path: str
    expected: str
    given: str

    def __str__(self) -> str:
        return f"{self.path or 'the value'}: expected {self.expected}, given {self.given}"


def first_difference(expected: Any, given: Any, path: str = "") -> Difference | None:
    """The first place where they differ in type, dtype, order or bits; None where they are the same.

    >>> str(first_difference({"n": 1, "w": [1.0, 0.0]}, {"n": 1, "w": [1.0, -0.0]}))
    "['w'][1]: expected 0.0, given -0.0"
    """
    if type(expected) is not type(given):
        return Difference(path, _typed(expected), _typed(given))
    if isinstance(expected, dict):
        return _of_dicts(expected, given, path)
    if isinstance(expected, (list, tuple)):
        return _of_sequences(expected, given, path)
    if isinstance(expected, np.ndarray):
        return _of_arrays(expected, given, path)
    if isinstance(expected, Columns):
        return _of_dicts(dict(expected.arrays), dict(given.arrays), path)
    if isinstance(expected, msgspec.Struct):
        return _of_dicts(_fields(expected), _fields(given), path, "{path}.{key}")
    if isinstance(expected, (float, np.generic)):
        same = np.asarray(expected).tobytes() == np.asarray(given).tobytes()
        if same and np.asarray(expected).dtype == np.asarray(given).dtype:
            return None
        return Difference(path, *_told_apart(repr(expected), repr(given), expected, given))
    return None if expected == given else Difference(path, shortened(expected), shortened(given))


def _of_dicts(
    expected: dict[Any, Any], given: dict[Any, Any], path: str, step: str = "{path}[{key!r}]"
) -> Difference | None:
    for key, value in expected.items():
        if key not in given:
            return Difference(step.format(path=path, key=key), shortened(value), "nothing")
        if difference := first_difference(value, given[key], step.format(path=path, key=key)):
            return difference
    for key, value in given.items():
        if key not in expected:
            return Difference(step.format(path=path, key=key), "nothing", shortened(value))
    if list(expected) != list(given):
        return Difference(path, f"keys in the order {list(expected)!r:.200}", f"{list(given)!r:.200}")
    # Equal keys may be of different types (1 and 1.0).
    return _of_sequences(list(expected), list(given), f"{path}'s keys")


def _of_sequences(expected: Any, given: Any, path: str) -> Difference | None:
    for index, (one, other) in enumerate(zip(expected, given, strict=False)):
        if difference := first_difference(one, other, f"{path}[{index}]"):
            return difference
    if len(expected) == len(given):
        return None
    at = min(len(expected), len(given))
    what = [shortened(values[at]) if len(values) > at else "nothing" for values in (expected, given)]
    return Difference(f"{path}[{at}]", *what)


def _of_arrays(expected: Any, given: Any, path: str) -> Difference | None:
    if (expected.dtype, expected.shape) != (given.dtype, given.shape):
        return Difference(path, *(f"{array.dtype} of shape {array.shape}" for array in (expected, given)))
    if expected.tobytes() == given.tobytes():
        return None
    for index in np.ndindex(expected.shape):
        one, other = expected[index], given[index]
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            place = ", ".join(map(str, index))
            return Difference(f"{path}[{place}]", *_told_apart(repr(one), repr(other), one, other))
    return Difference(path, shortened(expected), shortened(given))


def _told_apart(one: str, other: str, expected: Any, given: Any) -> tuple[str, str]:
    """NaNs of different payloads look the same."""
    if one != other:
        return one, other
    return (
        f"{one} (bytes {np.asarray(expected).tobytes().hex()})",
        f"bytes {np.asarray(given).tobytes().hex()}",
    )


def _typed(value: Any) -> str:
    return f"{type(value).__name__} {shortened(value)}"


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
