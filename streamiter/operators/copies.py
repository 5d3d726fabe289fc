"""Copies of plain data."""

from __future__ import annotations

import copy
from typing import Any, Final

import numpy as np

__all__ = ["independent_copy"]

# Values of these types cannot change, so that they need no copy. numpy's structured scalars can.
_IMMUTABLE: Final[frozenset[type[Any]]] = frozenset(
    {type(None), bool, int, float, str, bytes, *np.sctypeDict.values()}
) - {np.void, np.object_}


def independent_copy(value: Any) -> Any:
    """A copy of plain data that shares nothing that can change.

    Several times faster than ``copy.deepcopy``, and one call deep for each level: plain data may have 500.

    >>> seen = {"users": [1, 2]}
    >>> copied = independent_copy(seen)
    >>> seen["users"].append(3)
    >>> copied
    {'users': [1, 2]}
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        copied = value.copy()
        if not _IMMUTABLE.issuperset(map(type, value.values())):
            for key, item in value.items():
                copied[key] = independent_copy(item)
        return copied
    if kind is list or kind is tuple:
        items = list(value)
        if not _IMMUTABLE.issuperset(map(type, items)):
            for index, item in enumerate(items):
                items[index] = independent_copy(item)
        return items if kind is list else tuple(items)
    return copy.deepcopy(value)
