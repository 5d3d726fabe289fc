"""What an object holds, attribute by attribute, as text that can be compared across processes."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import PlainDataError
from streamiter.operators.context import Context
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened

__all__ = ["attributes_of"]

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
