"""Tests count the calls of the method by which a class returns its state."""

import functools
import inspect
from typing import Any

import pytest

ASKED = ("snapshot", "state", "positions", "freeze", "end_log")
"""The names of the methods that return state."""


def asked_of(kind: type[Any]) -> str | None:
    """Return the name of the method by which the class itself returns its state, or None.

    A class that declares fields has the method from its base class.
    """
    get = functools.partial(getattr, kind) if _declares(kind) else vars(kind).get
    return next((name for name in ASKED if inspect.isfunction(get(name, None))), None)


def _declares(kind: type[Any]) -> bool:
    """Whether the class declares fields of a state itself."""
    inherited = {entry for base in kind.__mro__[1:] for entry in vars(base).get("_declared_fields", {})}
    return bool(vars(kind).get("_declared_fields", {}).keys() - inherited)


def count_calls(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Count the calls of that method: return a list that gets one entry for each call."""
    name = next(filter(None, map(asked_of, kind.__mro__)), None)  # It may have no field of its own.
    assert name is not None, f"{kind.__name__} keeps nothing"
    original, calls = getattr(kind, name), []

    @functools.wraps(original)
    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        return original(*arguments, **named)

    monkeypatch.setattr(kind, name, counted)
    return calls
