"""Where a value stops being plain data, why, and what to do: the slow look that writes the error."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import msgspec
import numpy as np

from streamiter.checkpoints.dtypes import dtype_refusal
from streamiter.checkpoints.extensions import DEPTH_MAX, SCALAR_TYPES
from streamiter.deferred import Deferred
from streamiter.records import Columns

__all__ = ["PLAIN_TYPES", "Refusal", "find_refusal", "hint_for", "shown", "type_name"]

PLAIN_TYPES: Final = (
    "None, bool, int, float, str, bytes, tuple, list, dict, numpy arrays and scalars, Columns, "
    "registered msgspec.Structs"
)

# A path is for reading: longer ones say no more.
_KEY_CHARACTERS: Final = 40
_PATH_CHARACTERS: Final = 200

_TWICE: Final = "expected each Deferred once, given the same object again; it can be read once: make another"

_ATOMS: Final = frozenset({NoneType, bool, int, float, str, bytes, np.str_, np.bytes_})

# By name, so that nothing has to be imported for them; the first that is the class or a base of it counts.
_HINTS: Final = {
    "datetime.datetime": "convert it, for example to a number of milliseconds",
    "datetime.date": "convert it, for example to text with .isoformat()",
    "datetime.time": "convert it, for example to text with .isoformat()",
    "datetime.timedelta": "convert it, for example to a number of milliseconds",
    "decimal.Decimal": "convert it, for example to str, or to an int of the smallest unit",
    "fractions.Fraction": "convert it, for example to a tuple of two ints",
    "uuid.UUID": "convert it, for example to str",
    "pathlib.PurePath": "convert it to str",
    "pathlib._local.PurePath": "convert it to str",  # its name in Python 3.13
    "enum.Enum": "give its .value",
    "set": "convert it, for example to a sorted list",
    "frozenset": "convert it, for example to a sorted tuple",
    "bytearray": "convert it with bytes(...)",
    "memoryview": "convert it with bytes(...)",
    "complex": "convert it to numpy.complex128 or a tuple of two floats",
    "range": "convert it with list(...)",
    "msgspec.Struct": "register the class: PlainData(structs=[...]) or register(...)",
    "streamiter.deferred.Deferred": "only what an operator's snapshot() gives may hold it",
    "numpy.ma.MaskedArray": "fill it (.filled(...)) or give the mask as an array of its own",
    "numpy.ndarray": "convert it with numpy.asarray(...)",
    "dict": "convert it with dict(...)",
    "tuple": "convert it with tuple(...), or to a dict",
    "list": "convert it with list(...)",
    "str": "convert it with str.__str__(...)",
    "bytes": "convert it with bytes(...)",
    "int": "convert it with int(...)",
    "float": "convert it with float(...)",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """``path`` leads from the value to the part that is at fault, as Python would write it."""

    path: str
    problem: str


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of the value and how it was reached; a path is written only for the part at fault."""

    part: Any
    step: str
    outer: _Place | None
    depth: int

    def inside(self, part: Any, step: str) -> _Place:
        return _Place(part, step, self, self.depth + 1)

    def path(self) -> str:
        steps = [self.step]
        place = self.outer
        while place is not None:
            steps.append(place.step)
            place = place.outer
        return _shortened("".join(reversed(steps)), _PATH_CHARACTERS)


def find_refusal(
    value: Any, structs: Container[type[Any]], *, may_be_deferred: bool = False
) -> Refusal | None:
    """The first part of ``value``, in its own order, that is not plain data, nor ``Deferred`` where that may be.

    >>> find_refusal([1, {"user": {2, 3}}], structs=()).path
    '[1]["user"]'
    """
    waiting = [_Place(value, "", None, 0)]
    deferred: set[int] | None = set() if may_be_deferred else None
    while waiting:
        place = waiting.pop()
        if deferred is not None and isinstance(place.part, Deferred):
            if id(place.part) in deferred:
                return Refusal(place.path(), _TWICE)
            deferred.add(id(place.part))
            continue
        problem = _problem(place, structs)
        if problem is not None:
            return Refusal(place.path(), problem)
        waiting += reversed(list(_parts(place, structs)))
    return None


def _problem(place: _Place, structs: Container[type[Any]]) -> str | None:
    if place.depth > DEPTH_MAX:
        return f"expected at most {DEPTH_MAX} levels of nesting, given more; does it contain itself?"
    return _part_problem(place.part, structs)


def _part_problem(part: Any, structs: Container[type[Any]]) -> str | None:
    kind = type(part)
    if kind in _ATOMS or kind in (list, tuple, dict):
        return None
    if kind in structs:
        return _field_problem(part)
    if kind is np.ndarray or kind in SCALAR_TYPES:
        return _dtype_problem(part)
    if kind is Columns:
        return _names_problem(part)
    return f"expected plain data ({PLAIN_TYPES}), given {type_name(kind)}; {hint_for(kind)}"


def _dtype_problem(value: Any) -> str | None:
    refusal = dtype_refusal(value.dtype)
    if refusal is None:
        return None
    given = f"{type_name(type(value))} of dtype {value.dtype}"
    return f"expected plain data ({PLAIN_TYPES}), given {given}, {refusal}"


def _field_problem(struct: msgspec.Struct) -> str | None:
    missing = [name for name in struct.__struct_fields__ if not hasattr(struct, name)]
    if not missing:
        return None
    return f"expected every field of {type_name(type(struct))} to be set, given none for {missing[0]}; set it"


def _names_problem(columns: Columns) -> str | None:
    strange = [name for name in columns.names if type(name) is not str]
    if not strange:
        return None
    return f"expected columns named by str, given the name {shown(strange[0])}; convert it with str(...)"


def _parts(place: _Place, structs: Container[type[Any]]) -> Iterator[_Place]:
    part = place.part
    kind = type(part)
    if kind is list or kind is tuple:
        yield from (place.inside(item, f"[{index}]") for index, item in enumerate(part))
    elif kind is dict:
        for key, item in part.items():
            yield place.inside(key, f".key({shown(key)})")
            yield place.inside(item, f"[{shown(key)}]")
    elif kind is Columns:
        yield from (place.inside(array, f"[{shown(name)}]") for name, array in part.arrays.items())
    elif kind in structs:
        fields = zip(part.__struct_fields__, msgspec.structs.astuple(part), strict=True)
        yield from (place.inside(item, f".{name}") for name, item in fields)


def shown(key: Any) -> str:
    """A dict key for a path: short, strings with double quotes; never raises."""
    try:
        text = repr(key)
    except Exception:  # a user's own __repr__, or an int of thousands of digits
        return f"<{type_name(type(key))}>"
    if type(key) is str and text.startswith("'") and '"' not in text:
        text = f'"{text[1:-1]}"'
    return _shortened(text, _KEY_CHARACTERS)


def _shortened(text: str, characters: int) -> str:
    """The beginning and the end, at most ``characters`` of each."""
    return text if len(text) <= 2 * characters else f"{text[:characters]}…{text[-characters:]}"


def type_name(kind: type[Any]) -> str:
    """The name of a class as a user would import it.

    >>> type_name(int), type_name(Columns)
    ('int', 'streamiter.records.Columns')
    """
    if kind is NoneType:
        return "None"
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def hint_for(kind: type[Any]) -> str:
    """What to do with a value of a class that is not plain data."""
    names = {type_name(base) for base in kind.__mro__}
    return next((hint for name, hint in _HINTS.items() if name in names), "convert it to one of these types")
