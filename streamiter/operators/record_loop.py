"""Calling a user's function for each record of a batch, and telling which record it failed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from streamiter.errors import RejectRecords
from streamiter.operators.output import Output
from streamiter.operators.rejection import record_at_fault
from streamiter.records import Batch, Columns, take

__all__ = ["apply_to_each", "fail_at", "records_of", "refuse"]


def records_of(batch: Batch) -> tuple[Iterator[Any], Iterator[Any]]:
    """An iterator over the records, and the iterator whose length hint tells how far that one has come.

    The second is for :func:`fail_at`; mostly it is the same object.
    """
    if isinstance(batch, Columns):
        columns = [iter(array) for array in batch.arrays.values()]
        names = batch.names
        rows = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        return rows, columns[0]
    # Iterators of sequences other than these need not know their length.
    records = iter(batch if isinstance(batch, (list, np.ndarray)) else list(batch))
    return records, records


def fail_at(batch: Batch, progress: Iterator[Any], error: Exception, out: Output) -> NoReturn:
    """End the job with ``error``, naming the record that was handled when it was raised."""
    found, index = record_at_fault(range(len(batch)), progress)
    if not found:
        raise error
    out.fail(error, batch[index])


def refuse(out: Output, record: Any, error: Exception) -> None:
    """Refuse a record of the batch at hand because of ``error``: by the step's policy this returns or ends the job."""
    reason = error.reason if isinstance(error, RejectRecords) and out.tolerates_rejections else error
    out.reject(record, reason, origin=out.batch_origin)


def apply_to_each(f: Callable[[Any], Any], batch: Batch, out: Output) -> tuple[Batch, list[Any]]:
    """``f`` of each record: the records that were not refused (mostly the batch itself), and the results.

    ``f`` is called once for each record, in order. Where it raises, the record follows the step's policy.
    """
    if out.tolerates_rejections:
        return _apply_tolerantly(f, batch, out)
    records, progress = records_of(batch)
    try:
        return batch, [f(record) for record in records]
    except Exception as error:
        fail_at(batch, progress, error, out)


def _apply_tolerantly(f: Callable[[Any], Any], batch: Batch, out: Output) -> tuple[Batch, list[Any]]:
    accepted: list[int] = []
    results: list[Any] = []
    for index, record in enumerate(batch):
        try:
            result = f(record)
        except Exception as error:
            refuse(out, record, error)
        else:
            accepted.append(index)
            results.append(result)
    return (batch if len(accepted) == len(batch) else take(batch, accepted)), results
