"""The definition of a step: the settings on which the meaning of its state depends, as plain data of a snapshot.

An operator returns it from ``definition``. When a job resumes, :func:`changes` compares the definition of the snapshot
with that of the flow. All other settings may change between two runs, since any state fits them.

>>> before = {"kind": "deduplicate", "by": "field 'id'", "within_ms": at_most(60_000)}
>>> changes(before, {**before, "within_ms": at_most(10_000)})
[]
>>> changes(before, {**before, "by": "field 'user'", "within_ms": at_most(90_000)})
["by was field 'id', now field 'user'", 'within_ms was 60000, now 90000']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Final, TypeAlias

import numpy as np

Definition: TypeAlias = Mapping[str, Any]
"""Settings by name, as JSON has them: texts, numbers, None, lists and dicts. ``kind`` is the kind of the step."""

_MOST, _LEAST, _NAMED, _ANY = "at most", "at least", "by name", "or another"


def at_most(value: float | None) -> Definition:
    """Return an entry that may become less: the state then holds more than enough. None is without limit."""
    return {_MOST: value}


def at_least(value: float) -> Definition:
    """Return an entry that may become greater."""
    return {_LEAST: value}


def by_name(parts: Mapping[str, str]) -> Definition:
    """Return an entry with parts in the order of the state: they may get another order, and more may be added."""
    return {_NAMED: dict(parts)}


def or_another(value: Any) -> Definition:
    """Return an entry of an operator that adapts a state of any other value. Here the reader of the state decides."""
    return {_ANY: value}


def names_in(entry: Definition) -> list[str]:
    """Return the names of an entry that :func:`by_name` has made, in the order of the state."""
    return list(entry[_NAMED])


USERS_FUNCTION: Final = "a function"


def function_in_words(f: Callable[..., Any]) -> str:
    """Return the text for a function in a definition.

    The name says what is computed by functions of Python, numpy and this package, such as those that read a field.
    Functions of the user cannot be compared, and all have one text.

    >>> function_in_words(max), function_in_words(np.add), function_in_words(str.lower)
    ('max', 'numpy.add', 'str.lower')
    """
    if isinstance(f, np.ufunc):
        return f"numpy.{f.__name__}"
    package = str(getattr(f, "__module__", "")).partition(".")[0]
    if is_dataclass(owner := getattr(f, "__self__", None)) and package == "streamiter":
        return f"{owner}.{f.__name__}"
    if isinstance(f, (BuiltinFunctionType, MethodDescriptorType)) or package in ("builtins", "streamiter"):
        return str(getattr(f, "__qualname__", type(f).__name__))
    return USERS_FUNCTION


def settings_in_words(given: object) -> str:
    """Return the entry for an object with settings: the class and fields of a dataclass, else the class."""
    return repr(given) if is_dataclass(given) else type(given).__qualname__


def changes(before: Definition, now: Definition) -> list[str]:
    """Return in words why the state of the first definition does not fit the second; nothing if it does."""
    if before.get("kind") != now.get("kind"):
        return [f"it was {before.get('kind')}, now {now.get('kind')}"]
    found = [change for name, entry in before.items() if name in now for change in _changes_of(name, entry, now[name])]
    # With another kind of window, its settings have other names: that they differ needs no words.
    return found or [f"{name} is {_where(name in now)}" for name in before.keys() ^ now.keys()]


def _where(is_now: bool) -> str:
    return "new" if is_now else "gone"


def _changes_of(name: str, before: Any, now: Any) -> list[str]:
    if _mark(before) == _ANY:
        before = before[_ANY]
    if before == now or _mark(now) == _ANY:
        return []
    mark = _mark(before)
    if mark is None and isinstance(before, Mapping) and isinstance(now, Mapping):
        return [each for part in {**before, **now} for each in _changes_of_part(f"{name}: {part!r}", part, before, now)]
    if mark is None or mark != _mark(now):
        return [f"{name} was {before}, now {now}"]
    before, now = before[mark], now[mark]
    if mark == _NAMED:
        return [
            f"{name}: {part!r} was {text}, now {now[part]}" if part in now else f"{name}: {part!r} ({text}) is gone"
            for part, text in before.items()
            if now.get(part) != text
        ]
    most, given = (math.inf if value is None else value for value in (before, now))
    return [] if (given <= most if mark == _MOST else given >= most) else [f"{name} was {before}, now {now}"]


def _changes_of_part(name: str, part: str, before: Definition, now: Definition) -> list[str]:
    if part in before and part in now:
        return _changes_of(name, before[part], now[part])
    return [f"{name} ({(now if part in now else before)[part]}) is {_where(part in now)}"]


def _mark(entry: Any) -> str | None:
    if not isinstance(entry, Mapping) or len(entry) != 1:
        return None
    [mark] = entry
    return mark if mark in (_MOST, _LEAST, _NAMED, _ANY) else None
