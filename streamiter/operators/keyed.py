"""What the built-in keyed operators share: keys of the records, and a state for each key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

from streamiter.operators.functions import plain_function
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import apply_to_each, refuse
from streamiter.records import Batch

__all__ = ["NO_STATE", "CheckKeys", "KeyedOperator", "any_keys", "independent_copy"]

CheckKeys = Callable[[list[Any]], list[Any]]
"""Gives the keys as they are used (numpy scalars become Python's), or raises where one cannot be a key."""

NO_STATE: Final = object()
"""Stands for the state of a key never seen: None may be a state."""

# Values of these types cannot change, so that they need no copy.
_IMMUTABLE: Final = frozenset({type(None), bool, int, float, str, bytes})


def any_keys(keys: list[Any]) -> list[Any]:
    """Takes every key as it is."""
    return keys


def independent_copy(value: Any) -> Any:
    """A copy of plain data that shares nothing that can change."""
    return value if type(value) in _IMMUTABLE else copy.deepcopy(value)


class KeyedOperator(Operator):
    """Base of operators with a state for each key.

    A snapshot is a list of pairs (key, state), so that key groups can be re-assigned by sorting pairs.
    """

    def __init__(self, key_of: Callable[[Any], Any], check_keys: CheckKeys) -> None:
        self._key_of = plain_function(f"{type(self).__name__}(key_of)", key_of)
        self._check_keys = check_keys
        self._states: dict[Any, Any] = {}

    def keyed(self, batch: Batch, out: Output) -> tuple[list[Any], list[Any]]:
        """The records of a batch and their keys; records without a good key are refused."""
        records = batch if isinstance(batch, list) else list(batch)
        accepted, keys = apply_to_each(self._key_of, records, out)
        records = accepted if isinstance(accepted, list) else list(accepted)
        try:
            return records, self._check_keys(keys)
        except Exception:
            return self._checked_one_by_one(records, keys, out)

    def _checked_one_by_one(
        self, records: list[Any], keys: list[Any], out: Output
    ) -> tuple[list[Any], list[Any]]:
        accepted: list[Any] = []
        checked: list[Any] = []
        for record, key in zip(records, keys, strict=True):
            try:
                checked += self._check_keys([key])
            except Exception as error:
                refuse(out, record, error)
            else:
                accepted.append(record)
        return accepted, checked

    def snapshot(self) -> list[tuple[Any, Any]]:
        return [(key, independent_copy(state)) for key, state in self._states.items()]

    def restore(self, state: list[tuple[Any, Any]]) -> None:
        self._states = {key: independent_copy(value) for key, value in state}
