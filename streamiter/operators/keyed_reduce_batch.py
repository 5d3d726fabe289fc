"""A running reduce for each key, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, RejectRecords
from streamiter.operators.functions import FunctionResultError
from streamiter.operators.grouping import Groups, segmented_accumulate
from streamiter.operators.keyed import CheckKeys, KeyedOperator, any_keys
from streamiter.operators.keyed_reduce import running_reduce
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.records import Batch

__all__ = ["KeyedReduceBatch"]

Array = npt.NDArray[Any]


class KeyedReduceBatch(KeyedOperator):
    """As :class:`KeyedReduce`, of a numpy ufunc, with the keys of a whole batch at once.

    ``keys_of(batch)`` gives an array of integers, strings or bytes: a key for each record. ``ufunc`` takes
    two numbers and gives one, as ``np.add`` or ``np.maximum`` do.

    One-dimensional arrays of numbers are reduced to arrays of the same type, several times faster than by
    a loop where a key has many records in a batch; integers wrap around as numpy's do. Records of a key
    are taken in one by one, in order, so floats are rounded as a loop rounds them, bit for bit, and the
    results do not depend on where batches are cut. Other batches, and types that ``ufunc`` changes (such
    as integers under ``np.divide``), are reduced by such a loop.

    State: a value for each key, for ever.

    >>> from streamiter.operators import KeyedReduceBatch, Output
    >>> out, results = Output(), []
    >>> out.connect(results.append, None)
    >>> parity_sums = KeyedReduceBatch(lambda batch: batch % 2, np.add)
    >>> parity_sums.process_batch(np.array([1, 2, 3, 4]), out)
    >>> results
    [array([1, 2, 4, 6])]
    """

    def __init__(
        self, keys_of: Callable[[Batch], Array], ufunc: np.ufunc, *, check_keys: CheckKeys = any_keys
    ) -> None:
        super().__init__(keys_of, check_keys)
        self._ufunc = _running_ufunc(ufunc)

    def process_batch(self, batch: Batch, out: Output) -> None:
        if not len(batch):
            return
        groups = Groups(_checked_keys(self._key_of(batch), len(batch)))
        keys = self._checked_group_keys(groups)
        if isinstance(batch, np.ndarray) and self._keeps_type(batch, keys):
            out.emit_batch(self._reduced(batch, groups, keys))
            return
        keys_of_records = np.empty(len(batch), dtype=object)
        keys_of_records[groups.order] = np.repeat(np.array(keys, dtype=object), groups.counts)
        records = batch if isinstance(batch, list) else list(batch)
        out.emit_batch(running_reduce(self._ufunc, self._states, keys_of_records.tolist(), records, out))

    def _checked_group_keys(self, groups: Groups) -> list[Any]:
        keys = groups.keys.tolist()
        try:
            return self._check_keys(keys)
        except Exception:
            for group, key in enumerate(keys):
                self._check_group_key(groups, group, key)
            raise

    def _check_group_key(self, groups: Groups, group: int, key: Any) -> None:
        try:
            self._check_keys([key])
        except Exception as error:
            raise RejectRecords(groups[group].tolist(), str(error)) from error

    def _keeps_type(self, batch: Array, keys: list[Any]) -> bool:
        """Whether batch and state have one type of number, and ``ufunc`` gives that type again."""
        dtype, states = batch.dtype, self._states
        return (
            batch.ndim == 1
            and dtype.kind in "biufc"
            and _result_type(self._ufunc, dtype) == dtype
            and all(type(states[key]) is dtype.type for key in keys if key in states)
        )

    def _reduced(self, batch: Array, groups: Groups, keys: list[Any]) -> Array:
        states, starts = self._states, groups.starts
        values = batch[groups.order]
        known = [group for group, key in enumerate(keys) if key in states]
        if known:
            carried = np.array([states[keys[group]] for group in known], dtype=batch.dtype)
            first = starts[known]
            values[first] = self._ufunc(carried, values[first])
        values = segmented_accumulate(self._ufunc, values, starts, groups.counts)
        states.update(zip(keys, values[starts + groups.counts - 1], strict=True))
        results = np.empty_like(values)
        results[groups.order] = values
        return results


def _running_ufunc(ufunc: Any) -> np.ufunc:
    if not isinstance(ufunc, np.ufunc) or (ufunc.nin, ufunc.nout) != (2, 1) or ufunc.signature:
        raise ConfigurationError(
            "KeyedReduceBatch(ufunc): expected a numpy ufunc of two arguments with one result, "
            f"such as np.add, given {shortened(ufunc)}; for any other function use KeyedReduce"
        )
    return ufunc


def _result_type(ufunc: np.ufunc, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Type of the result of two values of ``dtype``; None where ``ufunc`` cannot take them."""
    try:
        return ufunc.resolve_dtypes((dtype, dtype, None))[2]
    except TypeError:
        return None


def _checked_keys(keys: Any, length: int) -> Array:
    if isinstance(keys, np.ndarray) and keys.shape == (length,) and keys.dtype.kind in "iuUS":
        return keys
    given = f"{keys.dtype} of shape {keys.shape}" if isinstance(keys, np.ndarray) else type(keys).__name__
    raise FunctionResultError(
        f"KeyedReduceBatch(keys_of): expected an array with an integer, string or bytes for each of the "
        f"{length} records, given {given}: {shortened(keys)}"
    )
