"""The operators of bounded streams: they give their results at the end of input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.operators.keyed import NO_STATE
from streamiter.operators.keyed_state import independent_copy
from streamiter.operators.operator import Operator, Sharing
from streamiter.operators.output import Output, field_or_function, plain_function
from streamiter.operators.rejection import shortened
from streamiter.operators.steps import apply_to_each, fail_at, records_of, refuse
from streamiter.records import Batch, Columns, can_concatenate, concatenate, take

__all__ = [
    "HeldInput",
    "Join",
    "ReduceAll",
    "Sort",
]


class HeldInput:
    """Records set aside, in order. Arrays and ``Columns`` are kept as they came, without copies.

    >>> held = HeldInput()
    >>> held.add([1, 2]), held.add([3])
    (None, None)
    >>> len(held), held.merged()
    (3, [1, 2, 3])

    Records that wait in an operator.
    """

    __slots__ = ("_length", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[Batch] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, batch: Batch) -> None:
        """Set the records of a batch aside, behind the others."""
        self._length += len(batch)
        if isinstance(batch, (np.ndarray, Columns)):
            self._pieces.append(batch)
        elif self._pieces and isinstance(self._pieces[-1], list):
            self._pieces[-1].extend(batch)
        else:
            self._pieces.append(list(batch))

    def merged(self) -> Batch:
        """All records as one batch; a list, unless all came as arrays, or ``Columns``, of one type."""
        if not self._pieces:
            return []
        first, *others = self._pieces
        if all(can_concatenate(first, piece) for piece in others):
            return concatenate(self._pieces)
        return [record for piece in self._pieces for record in piece]

    def taken(self) -> Batch:
        """As :meth:`merged`; nothing is held any more."""
        merged = self.merged()
        self._pieces, self._length = [], 0
        return merged

    def snapshot(self) -> list[Batch]:
        """The records as plain data."""
        return [list(piece) if isinstance(piece, list) else piece for piece in self._pieces]

    def restore(self, state: list[Any]) -> None:
        """Take over what ``snapshot`` gave."""
        for batch in state:
            self.add(batch)


class ReduceAll(Operator):
    """Emits, at the end of the input, ``f(…f(f(first, second), third)…, last)``; of no records, nothing.

    ``f`` must change neither argument. A record for which it raises follows the step's policy.

    State: the value so far.

    >>> from streamiter.operators import Output, ReduceAll
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> largest = ReduceAll(max)
    >>> largest.process_batch([3, 9, 4], out)
    >>> largest.finish(out)
    >>> out.flush()
    >>> results
    [9]

    All records to one.
    """

    def __init__(self, f: Callable[[Any, Any], Any]) -> None:
        self._f = plain_function("ReduceAll(f)", f)
        self._value: Any = NO_STATE

    def process_batch(self, batch: Batch, out: Output) -> None:
        records, progress = records_of(batch)
        if self._value is NO_STATE:
            self._value = next(records, NO_STATE)
        if out.tolerates_rejections:
            for record in records:
                self._take_in(record, out)
            return
        try:
            self._value = reduce(self._f, records, self._value)
        except Exception as error:
            fail_at(batch, progress, error, out)

    def _take_in(self, record: Any, out: Output) -> None:
        try:
            self._value = self._f(self._value, record)
        except Exception as error:
            refuse(out, record, error)

    def finish(self, out: Output) -> None:
        if self._value is not NO_STATE:
            out.emit(self._value)
        self._value = NO_STATE

    def snapshot(self) -> list[Any]:
        return [] if self._value is NO_STATE else [independent_copy(self._value)]

    def restore(self, state: list[Any]) -> None:
        for value in state:
            self._value = independent_copy(value)

    def redistribute(self, states: Sequence[list[Any]], parallelism: int) -> list[list[Any]]:
        """The value of old subtask i becomes that of i modulo ``parallelism``, or part of it."""
        values = [
            [value for state in states[subtask::parallelism] for value in state]
            for subtask in range(parallelism)
        ]
        return [[reduce(self._f, of_subtask)] if of_subtask else [] for of_subtask in values]


# Results go out in pieces of as many records as a topic reader gives at most by default.
_PIECE_RECORDS: Final = 8192


class Sort(Operator):
    """Emits, at the end of the input, all records in ascending order of ``key(record)``.

    ``key`` is a function or the name of a field; without it the records themselves are compared. Records
    of equal keys keep their order, also with ``reverse``. Arrays and ``Columns`` of one type stay what
    they are. A record for which ``key`` raises follows the step's policy.

    State: all records, in memory.

    >>> from streamiter.operators import Output, Sort
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> by_length = Sort(len)
    >>> by_length.process_batch(["not", "to", "or", "be"], out)
    >>> by_length.finish(out)
    >>> results
    ['to', 'or', 'be', 'not']

    All records in order.
    """

    def __init__(self, key: str | Callable[[Any], Any] | None = None, *, reverse: bool = False) -> None:
        self._key = None if key is None else field_or_function("Sort(key)", key)
        self._reverse = reverse
        self._held = HeldInput()

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._held.add(batch)

    def finish(self, out: Output) -> None:
        records = self._held.taken()
        if self._key is None:
            keys = list(records)
        else:
            records, keys = apply_to_each(self._key, records, out)
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=self._reverse)
        for start in range(0, len(order), _PIECE_RECORDS):
            out.emit_batch(take(records, order[start : start + _PIECE_RECORDS]))

    def snapshot(self) -> list[Batch]:
        return self._held.snapshot()

    def restore(self, state: list[Batch]) -> None:
        self._held.restore(state)

    def share_out(self, states: Sequence[list[Batch]], sharing: Sharing) -> list[list[Batch]]:
        """The records go to the new subtasks as its input would."""
        return sharing.records("input", states)


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

    Pairs of records that have the same key.
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
