"""Pairs of records that have the same key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamiter.errors import ConfigurationError
from streamiter.operators.functions import field_or_function
from streamiter.operators.held_input import HeldInput
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import apply_to_each
from streamiter.operators.rejection import shortened
from streamiter.operators.sharing import Sharing
from streamiter.records import Batch

__all__ = ["Join"]

KeyOf = str | Callable[[Any], Any]


class Join(Operator):
    """Emits, at the end of the input, the pair (left, right) of every two records with equal keys.

    ``on`` is the name of a field, a function of the record, or a pair of these, for left and right. Pairs
    come in the order of the left records, then of the right ones. Keys are compared with ``==``: None
    equals None, NaN equals nothing. A record for which ``on`` raises, or gives what cannot be hashed,
    follows the step's policy.

    Inputs: ``left`` and ``right``. State: all records, in memory.

    >>> from streamiter.operators import Join, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> join = Join(on=("user", "id"))
    >>> join.process_left_batch([{"user": 7, "page": "/"}, {"user": 8, "page": "/"}], out)
    >>> join.process_right_batch([{"id": 7, "name": "ann"}], out)
    >>> join.finish(out)
    >>> out.flush()
    >>> results
    [({'user': 7, 'page': '/'}, {'id': 7, 'name': 'ann'})]
    """

    def __init__(self, on: KeyOf | tuple[KeyOf, KeyOf]) -> None:
        if isinstance(on, tuple) and len(on) != 2:
            raise ConfigurationError(
                "Join(on): expected a field's name, a function, or a pair of these for left and right, "
                f"given {shortened(on)}"
            )
        left_on, right_on = on if isinstance(on, tuple) else (on, on)
        self._left_key = _hashable(field_or_function("Join(on)", left_on))
        self._right_key = _hashable(field_or_function("Join(on)", right_on))
        self._left, self._right = HeldInput(), HeldInput()

    def process_left_batch(self, batch: Batch, out: Output) -> None:
        self._left.add(batch)

    def process_right_batch(self, batch: Batch, out: Output) -> None:
        self._right.add(batch)

    def finish(self, out: Output) -> None:
        right_by_key: dict[Any, list[Any]] = {}
        for key, right in _keyed(self._right, self._right_key, out):
            if key == key:  # NaN is not: a dict would find it again where it is the same object
                right_by_key.setdefault(key, []).append(right)
        for key, left in _keyed(self._left, self._left_key, out):
            for right in right_by_key.get(key, ()):
                out.emit((left, right))

    def snapshot(self) -> dict[str, list[Batch]]:
        return {"left": self._left.snapshot(), "right": self._right.snapshot()}

    def restore(self, state: dict[str, list[Batch]]) -> None:
        self._left.restore(state["left"])
        self._right.restore(state["right"])

    def share_out(
        self, states: Sequence[dict[str, list[Batch]]], sharing: Sharing
    ) -> list[dict[str, list[Batch]]]:
        """The records go to the new subtasks as its inputs would."""
        left, right = (sharing.records(name, [state[name] for state in states]) for name in ("left", "right"))
        return [{"left": of_left, "right": of_right} for of_left, of_right in zip(left, right, strict=True)]


def _hashable(key_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def hashable_key(record: Any) -> Any:
        key = key_of(record)
        hash(key)
        return key

    return hashable_key


def _keyed(held: HeldInput, key_of: Callable[[Any], Any], out: Output) -> zip[tuple[Any, Any]]:
    records, keys = apply_to_each(key_of, held.taken(), out)
    return zip(keys, records, strict=True)
