"""A running reduce for each key, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, RejectRecords
from streamiter.operators.functions import FunctionResultError
from streamiter.operators.grouping import Groups, accumulate_segments
from streamiter.operators.keyed import NO_STATE, CheckKeys, KeyedOperator, any_keys
from streamiter.operators.keyed_reduce import running_reduce
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.records import Batch

__all__ = ["KeyedReduceBatch"]

Array = npt.NDArray[Any]

# IEEE 754 leaves these no choice, so numpy's vector and scalar loops agree to the bit; those of power,
# hypot or fmax (on zeros of both signs) do not.
_EXACT_ON_FLOATS: Final = frozenset({np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum})
_EXACT_FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float64))


class KeyedReduceBatch(KeyedOperator):
    """As :class:`KeyedReduce`, of a numpy ufunc, with the keys of a whole batch at once.

    ``keys_of(batch)`` gives an array of integers, strings or bytes: a key for each record. ``ufunc`` takes
    two numbers and gives one, as ``np.add`` or ``np.maximum`` do.

    One-dimensional arrays of integers are reduced to arrays of the same type (wrapping around as numpy's
    integers do), and so are those of float32 and float64 by add, subtract, multiply, divide, maximum and
    minimum: ten times faster than by a loop where a key has many records in a batch. All else, such as
    integers under ``np.divide``, which makes floats of them, is reduced by such a loop. Results are the
    same to the bit: a key's records are taken in one by one, in order, wherever batches are cut.

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
        self.about_to_change(keys)
        carried = list(map(self._states.get, keys, repeat(NO_STATE)))
        if isinstance(batch, np.ndarray) and _reduces_arrays(self._ufunc, batch, carried):
            out.emit_batch(self._reduced(batch, groups, keys, carried))
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

    def _reduced(self, batch: Array, groups: Groups, keys: list[Any], carried: list[Any]) -> Array:
        values = batch[groups.order]
        known = [group for group, state in enumerate(carried) if state is not NO_STATE]
        if known:
            first = groups.starts[known]
            states = np.array([carried[group] for group in known], dtype=batch.dtype)
            values[first] = self._ufunc(states, values[first])
        accumulate_segments(self._ufunc, values, groups.starts, groups.counts)
        self._states.update(zip(keys, values[groups.starts + groups.counts - 1], strict=True))
        results = np.empty_like(values)
        results[groups.order] = values
        return results


def _reduces_arrays(ufunc: np.ufunc, batch: Array, carried: list[Any]) -> bool:
    """Whether numpy's loops over ``batch`` and the states give what a loop over the records gives."""
    dtype = batch.dtype
    exact = dtype.kind in "biu" or (dtype in _EXACT_FLOATS and ufunc in _EXACT_ON_FLOATS)
    return (
        batch.ndim == 1
        and exact
        and _result_type(ufunc, dtype) == dtype
        and {dtype.type, type(NO_STATE)}.issuperset(map(type, carried))
    )


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
