"""Any number of records out for each record in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

from streamiter.operators.functions import plain_function, rows_if_table
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import fail_at, records_of, refuse
from streamiter.records import Batch

__all__ = ["FlatMap"]

# Results that are gathered before they flow on: as many as Output gathers of single records.
_PIECE_RECORDS: Final = 1024


class FlatMap(Operator):
    """Emits each item of the iterable ``f(record)``, record after record, as lists.

    The iterable is consumed piece by piece, so it may be of any length. Where ``f`` or its iterable
    raises, the record follows the step's policy. A record that is skipped, or becomes a dead letter, has
    none of its items emitted, unless it fails after more than 1024 of them. Of a table of pandas, polars or Arrow
    the items are its rows.

    >>> from streamiter.operators import FlatMap, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> FlatMap(str.split).process_batch(["to be", "or not"], out)
    >>> results
    ['to', 'be', 'or', 'not']
    """

    is_stateless = True

    def __init__(self, f: Callable[[Any], Iterable[Any]]) -> None:
        self._f = plain_function("FlatMap(f)", f)
        self._iterated: set[type[Any]] = {list, tuple}
        """Types of results that are no tables: a look into a set costs less than one for a table."""

    def process_batch(self, batch: Batch, out: Output) -> None:
        if out.tolerates_rejections:
            self._emit_tolerantly(batch, out)
        else:
            self._emit(batch, out)

    def _emit(self, batch: Batch, out: Output) -> None:
        records, progress = records_of(batch)
        end = _End()
        items = chain.from_iterable(self._checked(map(self._f, chain(records, end))))
        while True:
            try:
                piece = list(islice(items, _PIECE_RECORDS))
            except Exception as error:
                fail_at(batch, progress, error, out)
            if not piece:
                break
            out.emit_batch(piece)
        if not end.was_reached:
            fail_at(batch, progress, RuntimeError("the function raised StopIteration"), out)

    def _checked(self, results: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """The results, with the rows of those that are tables."""
        iterated = self._iterated
        for result in results:
            if type(result) in iterated:
                yield result
            elif (rows := rows_if_table("FlatMap(f)", result)) is result:
                iterated.add(type(result))
                yield result
            else:
                yield rows

    def _emit_tolerantly(self, batch: Batch, out: Output) -> None:
        gathered: list[Any] = []
        for record in batch:
            kept = len(gathered)
            try:
                items = iter(rows_if_table("FlatMap(f)", self._f(record)))
                gathered += islice(items, _PIECE_RECORDS)
            except Exception as error:
                del gathered[kept:]
                refuse(out, record, error)
                continue
            if len(gathered) >= _PIECE_RECORDS:
                out.emit_batch(gathered)
                gathered = []
                _emit_rest(record, items, out)
        out.emit_batch(gathered)


def _emit_rest(record: Any, items: Iterator[Any], out: Output) -> None:
    while True:
        try:
            piece = list(islice(items, _PIECE_RECORDS))
        except Exception as error:
            refuse(out, record, error)
            return
        if not piece:
            return
        out.emit_batch(piece)


class _End:
    """An empty iterator that tells whether it was asked: a function that raises StopIteration under ``map``
    looks like the end of the records otherwise, and those after it would be lost.
    """

    __slots__ = ("was_reached",)

    def __init__(self) -> None:
        self.was_reached = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.was_reached = True
        raise StopIteration
