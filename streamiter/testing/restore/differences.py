"""The first difference of two plain values, by the path that leads to it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import ConfigurationError, PlainDataError, shortened
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.records import Columns

__all__ = [
    "RestoreMismatch",
    "attributes_of",
    "describe",
    "first_difference",
    "lost_attributes",
    "resolve",
    "state_difference",
    "stream_difference",
]


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


# Deep enough for the optimizer of a model of an operator, shallow enough to stay out of the engine.
_DEPTH_MAX: Final = 5
_NOT_STATE: Final = frozenset({"open", "snapshot", "restore"})
"""What a watched operator has in its instance."""


def attributes_of(value: Any, plain_data: PlainData) -> dict[str, str]:
    """Path → what is there, for all that can be shown.

    >>> class Model:
    ...     def __init__(self):
    ...         self.weights, self.steps = [0.5], 3
    >>> attributes_of(Model(), PlainData())
    {'weights': '[0.5]', 'steps': '3'}

    What an object holds, attribute by attribute, as text that can be compared across processes.
    """
    found: dict[str, str] = {}
    _collect(value, "", _DEPTH_MAX, plain_data, found)
    return found


def _collect(value: Any, path: str, depth: int, plain_data: PlainData, found: dict[str, str]) -> None:
    if isinstance(value, (Context, Output, type)) or callable(value) or depth == 0:
        return
    if isinstance(value, random.Random):
        found[path] = f"random state {hash(value.getstate()):x}"
    elif isinstance(value, np.random.Generator):
        found[path] = shortened(value.bit_generator.state)
    elif isinstance(value, (set, frozenset)):
        found[path] = shortened(sorted(map(repr, value)))
    elif path and _is_plain(value, plain_data):
        found[path] = shortened(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}[{key!r}]", depth - 1, plain_data, found)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _collect(item, f"{path}[{index}]", depth - 1, plain_data, found)
    else:
        for name, item in _held_by(value).items():
            if path or name not in _NOT_STATE:
                _collect(item, f"{path}.{name}" if path else name, depth - 1, plain_data, found)


def _is_plain(value: Any, plain_data: PlainData) -> bool:
    try:
        plain_data.encode(value)
    except PlainDataError:
        return False
    return True


def _held_by(value: Any) -> dict[str, Any]:
    held = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                held[name] = getattr(value, name)
    return held


# The program itself is loaded under another name there, so that its "if __name__ == '__main__'" stays off.
_PROGRAM: Final = "__main__"
_PROGRAM_THERE: Final = "streamiter_restored_main"


def describe(value: Any, what: str) -> tuple[Any, ...]:
    """``value`` as plain data, if it is: a function or class as a name, ``functools.partial`` piece by piece.

    ``what`` names it in errors. Raises ConfigurationError for what cannot be imported elsewhere.

    >>> import operator
    >>> described = describe(functools.partial(operator.add, 3), "add")
    >>> resolve(described)(4)
    7

    Functions and classes by name, as another process can import them; no pickle.
    """
    if isinstance(value, functools.partial):
        arguments = [describe(argument, what) for argument in value.args]
        named = {name: describe(argument, what) for name, argument in value.keywords.items()}
        return ("partial", describe(value.func, what), arguments, named)
    if not callable(value):
        return ("value", value)
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise _not_importable(what, f"an instance of {type(value).__name__}")
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if "<" in name:
        raise _not_importable(what, f"{name.rpartition('.')[2]} of {module}, made inside a function")
    if loaded is None or _attribute(loaded, name) is not value:
        raise _not_importable(what, f"{name}, which {module} does not have under that name")
    if module == _PROGRAM and (file is None or not os.path.exists(file)):
        raise _not_importable(what, f"{name} of a program without a file")
    return ("name", module, None if file is None else os.path.abspath(file), name)


def resolve(described: tuple[Any, ...]) -> Any:
    """The reverse of :func:`describe`: imports what it names."""
    match described:
        case ("value", value):
            return value
        case ("partial", function, arguments, named):
            given = {name: resolve(argument) for name, argument in named.items()}
            return functools.partial(resolve(function), *map(resolve, arguments), **given)
        case ("name", module, file, name):
            found = _attribute(_module(module, file), name)
            if found is None:
                raise ConfigurationError(
                    f"expected {name!r} in module {module!r} of a fresh process, given a module without it; "
                    "define it at the top level, whatever imports the module"
                )
            return found
    raise ConfigurationError(f"expected the description of a function or value, given {described!r:.100}")


def _attribute(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        # Not through descriptors' errors: what is not there is None.
        found = getattr(found, part, None)
    return found


def _module(name: str, file: str | None) -> ModuleType:
    name = _PROGRAM_THERE if name == _PROGRAM else name
    loaded = sys.modules.get(name)
    if loaded is None:
        try:
            loaded = importlib.import_module(name)
        except ImportError:
            if file is None:
                raise
    if loaded is not None and (file is None or _is_of(loaded, file)):
        return loaded
    assert file is not None
    # A test file is no part of a package, or another one of its name comes first on the path.
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"expected a Python file, given {file!r}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_of(module: ModuleType, file: str) -> bool:
    given = getattr(module, "__file__", None)
    return given is not None and os.path.realpath(given) == os.path.realpath(file)


def _not_importable(what: str, given: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}: expected what a fresh process can import (a class or function at the top level of a module, or "
        f"functools.partial of one), given {given}; define it there, or pass fresh_process=False"
    )


class RestoreMismatch(AssertionError):
    """A restored run is not the run that went on: the message says what differs, where it was cut, what to do.

    What to tell about a run that differs.
    """


def stream_difference(
    expected: Mapping[str, Sequence[bytes]],
    given: Mapping[str, Sequence[bytes]],
    plain_data: PlainData,
    *,
    ordered: bool = True,
) -> str | None:
    """The first record that differs, of all outputs."""
    for name, wanted in expected.items():
        came = given.get(name, ())
        if not ordered:
            wanted, came = sorted(wanted), sorted(came)
        for number, (one, other) in enumerate(zip(wanted, came, strict=False), 1):
            if one != other:
                difference = first_difference(plain_data.decode(one), plain_data.decode(other), "record")
                return f"output {name!r}, record {number} of {len(wanted)}: {difference}"
        if len(wanted) != len(came):
            more = wanted[len(came) :] or came[len(wanted) :]
            kind = "missing" if len(came) < len(wanted) else "too many"
            return (
                f"output {name!r}: expected {len(wanted)} records, given {len(came)}; {kind}: "
                f"{plain_data.decode(more[0])!r:.200}"
            )
    return None


def state_difference(expected: bytes | None, given: bytes | None, plain_data: PlainData) -> str | None:
    """The first place where two states differ."""
    if expected == given:
        return None
    if expected is None or given is None:
        return f"a state at the end: expected {expected is not None}, given {given is not None}"
    difference = first_difference(plain_data.decode(expected), plain_data.decode(given), "snapshot")
    return f"the state before the end: {difference}"


def lost_attributes(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Sentences about attributes that are not after a restore what they were at the cut."""
    lost: list[str] = []
    for who, attributes in before.items():
        restored = after.get(who, {})
        for path, value in attributes.items():
            there = restored.get(path, "nothing")
            if there != value:
                lost.append(
                    f"attribute {path!r} of {who} was {value} at the cut and is {there} after restore()"
                )
    return lost
