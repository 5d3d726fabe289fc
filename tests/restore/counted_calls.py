"""How often a class is asked for its state."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

ASKED = ("snapshot", "state", "positions", "freeze")
"""The methods that give state."""


def asked_of(kind: type[Any]) -> str | None:
    """The method by which a class, itself, gives its state."""
    return next((name for name in ASKED if inspect.isfunction(vars(kind).get(name))), None)


def count_calls(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that its state is asked for."""
    name = asked_of(kind)
    assert name is not None, f"{kind.__name__} keeps nothing"
    original, calls = vars(kind)[name], []

    @functools.wraps(original)
    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return original(*arguments)

    monkeypatch.setattr(kind, name, counted)
    return calls
