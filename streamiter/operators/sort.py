"""All records in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from streamiter.operators.functions import field_or_function
from streamiter.operators.held_input import HeldInput
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import apply_to_each
from streamiter.operators.sharing import Sharing
from streamiter.records import Batch, take

__all__ = ["Sort"]

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
