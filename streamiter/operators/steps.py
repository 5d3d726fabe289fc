"""The operators without state: map, filter and flat_map, for records and for batches."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, islice
from types import CoroutineType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import shortened
from streamiter.operators.functions import (
    FunctionResultError,
    apply_to_each,
    checked_batch,
    fail_at,
    plain_function,
    records_of,
    refuse,
    refuse_coroutines,
    rows_if_table,
)
from streamiter.operators.operator import Context, EngineOperator
from streamiter.operators.output import Output, emit_made, passes_originals
from streamiter.values.records import Batch, Columns, TimedBatch, take, untimed

_log = logging.getLogger("streamiter.operators")


class Map(EngineOperator):
    """Emits ``f(record)`` for each record, in order, as lists.

    A record for which ``f`` raises follows the step's policy.

    >>> from streamiter.operators import Map, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> Map(lambda x: 10 * x).process_batch([1, 2, 3], out)
    >>> results
    [10, 20, 30]
    """

    is_stateless = True
    one_by_one = "if tolerant"

    def __init__(self, f: Callable[[Any], Any]) -> None:
        self._function = plain_function("Map(f)", f)

    def process_batch(self, batch: Batch, out: Output) -> None:
        made = apply_to_each(self._function, batch, out)[1]
        # One look for each batch: a function that makes coroutines makes them of all records.
        if made and type(made[-1]) is CoroutineType:
            refuse_coroutines(made)
        emit_made(out, made)


class MapBatch(EngineOperator):
    """Emits the batch ``f(batch)``, of any length, for each transport batch.

    The size of a transport batch has no meaning, so the results of ``f`` must not depend on it: change, drop or add
    records, but do not sum over a batch. ``f`` must not change its batch; it may raise ``RejectRecords`` to refuse
    single records. It never receives an empty batch.

    If ``f`` returns a table of pandas, polars or Arrow, the records are the rows of the table. Raises
    ``FunctionResultError`` (a ``TypeError``) where it returns anything but a table, a list, a numpy array or
    ``Columns``.

    >>> import numpy as np
    >>> from streamiter.operators import MapBatch, Output
    >>> out, results = Output(), []
    >>> out.connect(results.append, None)
    >>> MapBatch(np.square).process_batch(np.array([1, 2, 3]), out)
    >>> results
    [array([1, 4, 9])]
    """

    is_stateless = True
    takes_timed_batches = True

    def __init__(self, f: Callable[[Batch], Batch]) -> None:
        self._f = plain_function("MapBatch(f)", f)

    def process_batch(self, batch: Batch, out: Output) -> None:
        if not len(batch):
            return
        result = checked_batch("MapBatch(f)", self._f(untimed(batch)))
        if isinstance(batch, TimedBatch):
            if len(result) != len(batch):
                raise FunctionResultError(
                    f"MapBatch(f): expected as many records as the {len(batch)} that the function was given, since "
                    f"each keeps a timestamp, given {len(result)}; use filter_batch or flat_map, or put event_time "
                    "behind"
                )
            result = TimedBatch(untimed(result), batch.times, batch.order)
        out.emit_batch(result)


class Filter(EngineOperator):
    """Emits the records for which ``predicate(record)`` is true, in order, in the kind of batch in which they arrived.

    A record for which the predicate raises follows the step's policy.

    >>> import numpy as np
    >>> from streamiter.operators import Filter, Output
    >>> out, results = Output(), []
    >>> out.connect(results.append, None)
    >>> Filter(lambda x: x > 1).process_batch(np.array([1, 2, 3]), out)
    >>> results
    [array([2, 3])]
    """

    is_stateless = True
    takes_timed_batches = True
    one_by_one = "if tolerant"

    def __init__(self, predicate: Callable[[Any], Any]) -> None:
        self._function = plain_function("Filter(predicate)", predicate)

    def process_batch(self, batch: Batch, out: Output) -> None:
        emit_made(out, *(self._kept_tolerantly(batch, out) if out.tolerates_rejections else self._kept(batch, out)))

    def _kept(self, batch: Batch, out: Output) -> tuple[Batch, list[int] | None]:
        """Return the records that are kept, and their places; None if all are kept, or if no place is asked for."""
        predicate = self._function
        records, progress = records_of(batch)
        try:
            if isinstance(batch, list) and not passes_originals(out):
                return [record for record in records if predicate(record)], None
            indices = [index for index, record in enumerate(records) if predicate(record)]
        except Exception as error:
            fail_at(batch, progress, error, out)
        return (batch, None) if len(indices) == len(batch) else (take(batch, indices), indices)

    def _kept_tolerantly(self, batch: Batch, out: Output) -> tuple[Batch, list[int]]:
        predicate = self._function
        accepted, verdicts = apply_to_each(lambda record: operator.truth(predicate(record)), batch, out)
        indices = [index for index, verdict in enumerate(verdicts) if verdict]
        return take(accepted, indices), indices


Mask = npt.NDArray[np.bool_]


class FilterBatch(EngineOperator):
    """Emits the records where the mask ``f(batch)`` is true, in order, in the kind of batch in which they arrived.

    ``f`` returns one boolean for each record, as an array or a list. It may raise ``RejectRecords`` to refuse single
    records. Raises ``FunctionResultError`` (a ``TypeError``) for any other mask.

    >>> import numpy as np
    >>> from streamiter.operators import FilterBatch, Output
    >>> from streamiter.values.records import Columns
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> clicks = Columns({"user": ["ann", "bob"], "price": [3, 0]})
    >>> FilterBatch(lambda batch: batch["price"] > 0).process_batch(clicks, out)
    >>> results
    [{'user': np.str_('ann'), 'price': np.int64(3)}]
    """

    is_stateless = True
    takes_timed_batches = True

    def __init__(self, f: Callable[[Batch], Mask | Sequence[bool]]) -> None:
        self._f = plain_function("FilterBatch(f)", f)

    def process_batch(self, batch: Batch, out: Output) -> None:
        if not len(batch):
            return
        mask = _checked_mask(self._f(untimed(batch)), len(batch))
        if mask.all():
            emit_made(out, batch)
        elif isinstance(batch, (np.ndarray, Columns, TimedBatch)):
            emit_made(out, take(batch, indices := np.flatnonzero(mask)), indices)
        else:
            emit_made(out, list(compress(batch, mask)), np.flatnonzero(mask))


def _checked_mask(result: Any, length: int) -> Mask:
    mask = np.asarray(result) if isinstance(result, (list, np.ndarray)) else None
    if mask is None or mask.dtype != np.bool_ or mask.shape != (length,):
        given = type(result).__name__ if mask is None else f"{mask.dtype} of shape {mask.shape}"
        raise FunctionResultError(
            f"FilterBatch(f): expected one boolean for each of the {length} records, given {given}: "
            f"{shortened(result)}; compare, as in batch['price'] > 0"
        )
    return mask


# Results are gathered to pieces of this many, as Output gathers single records.
_PIECE_RECORDS: Final = 1024


class FlatMap(EngineOperator):
    """Emits each item of the iterable ``f(record)``, record after record, as lists.

    The iterable is consumed piece by piece, so it may have any length. If ``f`` or its iterable raises, the record
    follows the step's policy. No item of a record that is skipped or becomes a dead letter is emitted, unless the
    record fails after more than 1024 items. The items of a table of pandas, polars or Arrow are its rows.

    >>> from streamiter.operators import FlatMap, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> FlatMap(str.split).process_batch(["to be", "or not"], out)
    >>> results
    ['to', 'be', 'or', 'not']
    """

    is_stateless = True
    one_by_one = "always"

    def __init__(self, f: Callable[[Any], Iterable[Any]]) -> None:
        self._f = plain_function("FlatMap(f)", f)
        self._iterated: set[type[Any]] = {list, tuple}
        """The types of results that are no tables: a lookup in a set is faster than a check for a table."""

    def process_batch(self, batch: Batch, out: Output) -> None:
        if out.tolerates_rejections or passes_originals(out):
            self._emit_tolerantly(batch, out)
        else:
            self._emit(batch, out)

    def _emit(self, batch: Batch, out: Output) -> None:
        records, progress = records_of(batch)
        items = chain.from_iterable(self._results(records))
        while True:
            try:
                piece = list(islice(items, _PIECE_RECORDS))
            except Exception as error:
                fail_at(batch, progress, error, out)
            if not piece:
                break
            out.emit_batch(piece)

    def _results(self, records: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """Yield the result for each record, and for a table its rows.

        A function that raises ``StopIteration`` fails here; in ``map`` that would look like the end of the records.
        """
        f, iterated = self._f, self._iterated
        for record in records:
            result = f(record)
            if type(result) in iterated:
                yield result
            elif (rows := _iterable(result)) is result:
                iterated.add(type(result))
                yield result
            else:
                yield rows

    def _emit_tolerantly(self, batch: Batch, out: Output) -> None:
        gathered: list[Any] = []
        rows: list[int] = []
        for row, record in enumerate(untimed(batch)):
            kept = len(gathered)
            try:
                items = iter(_iterable(self._f(record)))
                gathered += islice(items, _PIECE_RECORDS)
            except Exception as error:
                del gathered[kept:]
                refuse(out, record, error, row)
                continue
            rows += [row] * (len(gathered) - kept)
            if len(gathered) >= _PIECE_RECORDS:
                emit_made(out, gathered, rows)
                gathered, rows = [], []
                _emit_rest(row, record, items, out)
        emit_made(out, gathered, rows)


def _iterable(result: Any) -> Iterable[Any]:
    """Return what a function of :class:`FlatMap` has returned, and of a table the rows."""
    rows = rows_if_table("FlatMap(f)", result)
    if not isinstance(rows, Iterable) and not hasattr(rows, "__getitem__"):
        raise FunctionResultError(
            f"FlatMap(f): expected the function to return an iterable, given {shortened(result)}; return [] where a "
            "record has no items"
        )
    items: Iterable[Any] = rows
    return items


def _emit_rest(row: int, record: Any, items: Iterator[Any], out: Output) -> None:
    while True:
        try:
            piece = list(islice(items, _PIECE_RECORDS))
        except Exception as error:
            refuse(out, record, error, row)
            return
        if not piece:
            return
        emit_made(out, piece, [row] * len(piece))


class Identity(EngineOperator):
    """Emits each batch as it is, for steps that only re-partition, union or name a stream."""

    is_stateless = True
    takes_timed_batches = True

    def process_batch(self, batch: Batch, out: Output) -> None:
        emit_made(out, batch)


class Then(Identity):
    """Emits the records of its input ``first``, and behind the end of that input those of ``following``."""

    def open(self, context: Context) -> None:
        self._context = context

    def wanted_inputs(self) -> Sequence[str]:
        return ("first",)

    def process_first_batch(self, batch: Batch, out: Output) -> None:
        emit_made(out, batch)

    def process_following_batch(self, batch: Batch, out: Output) -> None:
        emit_made(out, batch)

    def input_ended(self, name: str, out: Output) -> None:
        if name == "first" and self._context.subtask_index == 0:
            _log.info("step %r: its first input has been read to its end; the other one follows", self._context.name)
