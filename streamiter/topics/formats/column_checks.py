"""Whether a column fits the field of a schema, before it is written: as strict as reading it back will be."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import EncodeError

__all__ = ["fitting_array", "type_name"]

Array = npt.NDArray[Any]

# The kind of a field → kinds of arrays that it takes. Not numpy's own rules: those make text of any number.
_KINDS_TAKEN: Final[Mapping[str, str]] = MappingProxyType(
    {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "U": "U"}
)


def fitting_array(name: str, array: Array, dtype: np.dtype[Any], width: int | None) -> Array:
    """The column as an array of the field's type.

    Raises ``EncodeError``: naming all records where the column's type or width is wrong, else those whose
    numbers the type cannot hold or, being NaN or infinite, JSON cannot.

    >>> fitting_array("x", np.array([1, 2]), np.dtype("float32"), None)
    array([1., 2.], dtype=float32)
    >>> fitting_array("n", np.array([1, 300]), np.dtype("uint8"), None)
    Traceback (most recent call last):
    ...
    streamiter.errors.EncodeError: record 1 of the batch: field 'n': expected a number that uint8 holds, given 300
    """
    shape = () if width is None else (width,)
    if array.dtype.kind not in _KINDS_TAKEN[dtype.kind] or array.shape[1:] != shape:
        given = type_name(array.dtype, array.shape[1:])
        reason = f"field {name!r}: expected {type_name(dtype, shape)}, given {given}"
        raise EncodeError(dict.fromkeys(range(len(array)), reason))
    if dtype.kind == "U":
        return array
    return _same_numbers(name, array, dtype)


def type_name(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """A type as in a schema: ``float64[2]`` for two of them in each record, ``str`` for text of any width."""
    noun = "str" if dtype.kind == "U" else dtype.name
    return noun + "".join(f"[{size}]" for size in shape)


def _same_numbers(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):  # what becomes infinite is named below
        converted = array.astype(dtype, copy=False)
    if dtype.kind == "f":
        good = np.isfinite(converted)
    elif np.can_cast(array.dtype, dtype):
        return converted
    else:
        good = converted == array  # what did not fit has wrapped around to another number
    if good.all():
        return converted
    failures: dict[int, str] = {}
    for place in np.argwhere(~good):
        given = array[tuple(place)]
        failures.setdefault(
            int(place[0]), f"field {name!r}: expected a number that {dtype.name} holds, given {given}"
        )
    raise EncodeError(failures)
