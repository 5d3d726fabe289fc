"""What the built-in keyed operators share: keys of the records, and a state for each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from streamiter.deferred import Deferred
from streamiter.operators.context import Context
from streamiter.operators.frozen_states import FrozenStates, StateFrame
from streamiter.operators.functions import plain_function
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import apply_to_each, refuse
from streamiter.records import Batch

__all__ = ["NO_STATE", "CheckKeys", "KeyedOperator", "any_keys"]

CheckKeys = Callable[[list[Any]], list[Any]]
"""Gives the keys as they are used (numpy scalars become Python's), or raises where one cannot be a key."""

NO_STATE: Final = object()
"""Stands for the state of a key never seen: None may be a state."""


def any_keys(keys: list[Any]) -> list[Any]:
    """Takes every key as it is."""
    return keys


class KeyedOperator(Operator):
    """Base of operators with a state for each key.

    Whoever is about to change states calls :meth:`about_to_change`: snapshots are encoded while records flow on.
    """

    def __init__(self, key_of: Callable[[Any], Any], check_keys: CheckKeys) -> None:
        self._key_of = plain_function(f"{type(self).__name__}(key_of)", key_of)
        self._check_keys = check_keys
        self._states: dict[Any, Any] = {}
        self._unfinished: list[FrozenStates] = []
        """Snapshots that are not encoded yet; they keep what is about to change."""
        self._context: Context | None = None

    def open(self, context: Context) -> None:
        self._context = context

    def keyed(self, batch: Batch, out: Output) -> tuple[list[Any], list[Any]]:
        """The records of a batch and their keys, whose states may change now; those without a good key are refused."""
        records = batch if isinstance(batch, list) else list(batch)
        accepted, keys = apply_to_each(self._key_of, records, out)
        records = accepted if isinstance(accepted, list) else list(accepted)
        try:
            keys = self._check_keys(keys)
        except Exception:
            records, keys = self._checked_one_by_one(records, keys, out)
        self.about_to_change(keys)
        return records, keys

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

    def about_to_change(self, keys: list[Any]) -> None:
        """The states of these keys are about to be replaced, or handed out to be changed."""
        if self._unfinished:
            # A copy: one that is done leaves the list, maybe while another thread is here.
            for frozen in tuple(self._unfinished):
                frozen.keep(keys)

    def snapshot(self) -> Deferred:
        """The states as they are now, in order, to be encoded later."""
        assert self._context is not None
        return FrozenStates(
            self._states,
            name=self._context.name,
            encode=self._context.encode,
            unfinished=self._unfinished,
            in_thread=self.runs_in_thread,
        )

    def restore(self, state: Iterable[StateFrame]) -> None:
        """Take over what ``snapshot`` gave, encoded and decoded; the states are kept as they are given."""
        self._states, self._unfinished = {}, []
        for keys, states in state:
            self._states.update(zip(keys, states, strict=True))
