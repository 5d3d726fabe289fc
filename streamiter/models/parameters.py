"""The parameters of a model: what may be published, checked once on the way out and once on the way in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError

__all__ = ["Array", "Parameters", "checked_parameters", "freeze_arrays"]

Array = npt.NDArray[Any]

Parameters = Array | dict[str, Any]
"""One array, or a dict of names to arrays, numbers, strings (and lists, tuples and dicts of these)."""

# bool, signed and unsigned integers, floats, text: what JSON and safetensors can both carry exactly.
_KINDS: Final = "biufU"
# JSON has no limit, but its readers do: 64 bits is what all of them can be told to take.
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1
# Wider floats (80 and 128 bits) have neither a JSON number nor a safetensors type.
_FLOAT_BYTES_MAX: Final = 8


def checked_parameters(given: object, subject: str) -> Parameters:
    """The parameters as they are stored; a bare number becomes an array without axes.

    numpy scalars of 64 bits become Python numbers, arrays get the machine's byte order; nothing else
    changes. Raises :class:`~streamiter.errors.ModelError`, which begins with ``subject``, for a value
    that is NaN or infinite or cannot be stored exactly.

    >>> checked_parameters({"weights": np.zeros(2), "intercept": np.float64(0.5)}, "model 'ctr'")
    {'weights': array([0., 0.]), 'intercept': 0.5}
    """
    if isinstance(given, Mapping):
        return _checked_dict(given, "", subject)
    if isinstance(given, (np.ndarray, np.generic, int, float)):
        return _checked_array(np.asarray(given), "", subject)
    raise ModelError(
        f"{subject}: expected a numpy array, a dict of them or a ModelSnapshot, given {type(given).__name__}"
    )


def freeze_arrays(value: Any) -> None:
    """Make every array in ``value`` read-only: an update is shared by all who follow the model."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, dict):
        for part in value.values():
            freeze_arrays(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            freeze_arrays(part)


def _checked(value: object, path: str, subject: str) -> Any:
    if isinstance(value, np.ndarray):
        return _checked_array(value, path, subject)
    if isinstance(value, np.generic):
        return _checked_scalar(value, path, subject)
    if value is None or isinstance(value, (bool, str, bytes)):
        return value
    if isinstance(value, (int, float)):
        return _checked_number(value, path, subject)
    if isinstance(value, (list, tuple)):
        parts = [_checked(part, f"{path}[{index}]", subject) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Mapping):
        return _checked_dict(value, path, subject)
    raise ModelError(
        f"{subject}: {_named(path)}: expected an array, a number, a string or a list, tuple or dict of these,"
        f" given {type(value).__name__}"
    )


def _checked_dict(given: Mapping[Any, object], path: str, subject: str) -> dict[str, Any]:
    for name in given:
        if not isinstance(name, str):
            raise ModelError(f"{subject}: {_named(path)}: expected names that are str, given {name!r}")
    return {
        name: _checked(value, f"{path}.{name}" if path else name, subject) for name, value in given.items()
    }


def _checked_number(value: float, path: str, subject: str) -> float:
    if isinstance(value, float) and not math.isfinite(value):
        raise _not_finite(path, subject, f"is {value}")
    if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
        raise ModelError(f"{subject}: {_named(path)}: expected an integer of 64 bits, given {value}")
    return value


def _checked_scalar(value: np.generic, path: str, subject: str) -> Any:
    _checked_array(np.asarray(value), path, subject)
    is_plain = value.dtype.kind in "bU" or value.dtype in (np.dtype(np.int64), np.dtype(np.float64))
    return value.item() if is_plain else value


def _checked_array(array: Array, path: str, subject: str) -> Array:
    if array.dtype.kind not in _KINDS or (array.dtype.kind == "f" and array.itemsize > _FLOAT_BYTES_MAX):
        raise ModelError(
            f"{subject}: {_named(path)}: expected an array of bool, integers, floats of up to 64 bits or text"
            f", given dtype {array.dtype}"
        )
    if array.dtype.kind == "f":
        _refuse_not_finite(array, path, subject)
    return np.asarray(array, dtype=array.dtype.newbyteorder("="))


def _refuse_not_finite(array: Array, path: str, subject: str) -> None:
    bad = ~np.isfinite(array)
    if not bad.any():
        return
    first = tuple(int(index) for index in np.argwhere(bad)[0])
    where = f" (the first at {list(first)})" if first else ""
    raise _not_finite(
        path, subject, f"holds {int(bad.sum())} of {array.size} values as NaN or infinity{where}"
    )


def _not_finite(path: str, subject: str, what: str) -> ModelError:
    return ModelError(
        f"{subject}: {_named(path)} {what}; expected finite numbers, for a broken model must not be served:"
        " look at the learning rate and at the examples before this update"
    )


def _named(path: str) -> str:
    return f"parameter {path!r}" if path else "the parameters"
