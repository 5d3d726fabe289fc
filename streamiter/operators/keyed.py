"""The operators of keyed streams: each key has a state of its own.

`KeyedReduce` and `StatefulMap` call a function for each record. `KeyedReduceBatch` reduces the records of a whole batch
with numpy: it groups them by key first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import repeat
from typing import Any, Final, Literal

import numpy as np

from streamiter.errors import ConfigurationError, InternalError, shortened
from streamiter.operators.definitions import Definition, function_in_words
from streamiter.operators.functions import FunctionResultError, plain_function, records_with_keys, refuse
from streamiter.operators.keyed_state import KeyedState, KeyedStates, StateFrame, in_turns, independent_copy
from streamiter.operators.operator import Context, EngineOperator, states_by_own_keys
from streamiter.operators.output import Output, as_list
from streamiter.values.deferred import Deferred
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.numbers import Array, Indices
from streamiter.values.records import Batch

NO_STATE: Final = object()
"""Stands for the state of an unknown key, since None may be a state."""


class KeyedOperator(EngineOperator):
    """Base class of the operators with a state for each key, which never expires."""

    keeps = "the states of its keys"
    one_by_one: Literal["never", "if tolerant", "always"] = "if tolerant"

    def __init__(self, key_of: Callable[[Any], Any]) -> None:
        self._key_of = plain_function(f"{type(self).__name__}(key_of)", key_of)
        self._states: KeyedStates = KeyedState(SystemClock(), name=type(self).__name__, encode=_before_open)

    def definition(self) -> Definition:
        return {**super().definition(), "key": function_in_words(self._key_of)}

    def open(self, context: Context) -> None:
        self._states = states_by_own_keys(context)

    def snapshot(self) -> Deferred:
        """Return the states as they are now, to be encoded later."""
        return self._states.snapshot()

    def restore(self, state: Iterable[StateFrame]) -> Awaitable[None] | None:
        """Take over the decoded frames of a snapshot; the states are kept as they are given."""
        return self._states.restore(state)


def _before_open(value: object, /, *, name: str = "") -> bytes:
    raise InternalError(f"{name}: a snapshot was taken before the operator was opened")


class KeyedReduce(KeyedOperator):
    """Emits, for each record, the reduction of all records of its key so far.

    The first record of a key is emitted as it is, each later one as ``f(value, record)`` with the value that was
    emitted before. ``f`` must return a new value and must not change its arguments, since both were emitted. A record
    for which ``key_of`` or ``f`` raises follows the step's policy and does not change the state.

    State: a value for each key, for ever.

    >>> from streamiter.operators import KeyedReduce, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> parity_sums = KeyedReduce(lambda x: x % 2, lambda total, x: total + x)
    >>> parity_sums.process_batch([1, 2, 3, 4], out)
    >>> results
    [1, 2, 4, 6]
    """

    def __init__(self, key_of: Callable[[Any], Any], f: Callable[[Any, Any], Any]) -> None:
        super().__init__(key_of)
        self._f = plain_function("KeyedReduce(f)", f)

    def definition(self) -> Definition:
        return {**super().definition(), "kind": "reduce", "f": function_in_words(self._f)}

    def process_batch(self, batch: Batch, out: Output) -> None:
        records, keys = records_with_keys(self._key_of, as_list(out, batch), out)
        results: list[Any] = []
        for some, of_some in in_turns(self._states, keys, records):
            results += running_reduce(self._f, self._states.load(some), some, of_some, out)
        out.emit_batch(results)


def running_reduce(
    f: Callable[[Any, Any], Any], states: dict[Any, Any], keys: list[Any], records: Batch, out: Output
) -> list[Any]:
    """Return for each record the new value of its key, and store it in ``states``."""
    results: list[Any] = []
    for key, record in zip(keys, records, strict=True):
        try:
            # Faster than get for known keys; a key is new once, and the exception costs 0.1 µs then.
            try:
                state = states[key]
            except KeyError:
                value = record
            else:
                value = f(state, record)
        except Exception as error:
            refuse(out, record, error)
        else:
            states[key] = value
            results.append(value)
    return results


class StatefulMap(KeyedOperator):
    """Emits, for each record, the output of ``f(state, record) -> (state, output)``.

    ``state`` is the one that ``f`` returned for the last record with the same key. ``initial`` is the state of a new
    key: plain data, of which each key gets a copy, or a callable without arguments that makes it, such as ``list``.
    ``f`` may change the state in place; then it must not emit the state or keep it for later. A record for which
    ``key_of`` or ``f`` raises follows the step's policy and does not change the state, unless ``f`` has changed it in
    place.

    State: one for each key, for ever.

    >>> from streamiter.operators import Output, StatefulMap
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> numbered = StatefulMap(str.lower, lambda count, word: (count + 1, (word, count + 1)), 0)
    >>> numbered.process_batch(["to", "be", "To"], out)
    >>> results
    [('to', 1), ('be', 1), ('To', 2)]
    """

    def __init__(
        self, key_of: Callable[[Any], Any], f: Callable[[Any, Any], tuple[Any, Any]], initial: Any = None
    ) -> None:
        super().__init__(key_of)
        self._f = plain_function("StatefulMap(f)", f)
        self._initial = independent_copy(initial) if not callable(initial) else initial

    def definition(self) -> Definition:
        return {**super().definition(), "kind": "stateful_map"}

    def process_batch(self, batch: Batch, out: Output) -> None:
        records, keys = records_with_keys(self._key_of, as_list(out, batch), out)
        results: list[Any] = []
        for some, of_some in in_turns(self._states, keys, records):
            results += self._mapped(self._states.load(some), some, of_some, out)
        out.emit_batch(results)

    def _mapped(self, states: dict[Any, Any], keys: list[Any], records: Batch, out: Output) -> list[Any]:
        f, results = self._f, list[Any]()
        for key, record in zip(keys, records, strict=True):
            try:
                # Faster than get for known keys; a key is new once, and the exception costs 0.1 µs then.
                try:
                    state = states[key]
                except KeyError:
                    state = self._initial() if callable(self._initial) else independent_copy(self._initial)
                result = f(state, record)
                try:
                    states[key], output = result
                except (TypeError, ValueError):
                    raise _not_a_pair(result) from None
            except Exception as error:
                refuse(out, record, error)
            else:
                results.append(output)
        return results


def _not_a_pair(result: Any) -> FunctionResultError:
    return FunctionResultError(
        f"stateful_map(f): expected the function to return (state, output), given {shortened(result)}; return the new "
        "state of the key, a comma, and what to emit"
    )


# IEEE 754 defines the results of these exactly, so numpy's vector and scalar loops agree to the bit. The loops of
# power, hypot or fmax (on zeros of both signs) do not.
_EXACT_ON_FLOATS: Final = frozenset({np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum})

_EXACT_FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float64))


class KeyedReduceBatch(KeyedOperator):
    """Emits the same as :class:`KeyedReduce`, for a numpy ufunc and the keys of a whole batch at once.

    ``keys_of(batch)`` returns an array of integers, strings or bytes: a key for each record. ``ufunc`` takes two
    numbers and returns one, as ``np.add`` or ``np.maximum`` do.

    One-dimensional arrays of integers are reduced by numpy to arrays of the same type, which wrap around as numpy's
    integers do. So are arrays of float32 and float64 by add, subtract, multiply, divide, maximum and minimum. This is
    ten times faster than a loop where a key has many records in a batch. All other batches are reduced by a loop,
    such as integers by ``np.divide``, which returns floats. The results are the same to the bit: the records of a key
    are reduced one by one, in order, whatever the size of the batches.

    State: a value for each key, for ever.

    >>> from streamiter.operators import KeyedReduceBatch, Output
    >>> out, results = Output(), []
    >>> out.connect(results.append, None)
    >>> parity_sums = KeyedReduceBatch(lambda batch: batch % 2, np.add)
    >>> parity_sums.process_batch(np.array([1, 2, 3, 4]), out)
    >>> results
    [array([1, 2, 4, 6])]
    """

    def __init__(self, keys_of: Callable[[Batch], Array], ufunc: np.ufunc) -> None:
        super().__init__(keys_of)
        self._ufunc = _running_ufunc(ufunc)

    def definition(self) -> Definition:
        return {**super().definition(), "kind": "reduce", "f": function_in_words(self._ufunc)}

    def process_batch(self, batch: Batch, out: Output) -> None:
        if not len(batch):
            return
        groups = RecordsByKey(array_of_keys("KeyedReduceBatch(keys_of)", self._key_of(batch), len(batch)))
        keys = groups.keys.tolist()
        states = self._states.load(keys)
        carried = list(map(states.get, keys, repeat(NO_STATE)))
        if isinstance(batch, np.ndarray) and _reduces_arrays(self._ufunc, batch, carried):
            results: Batch = self._reduced(batch, groups, states, keys, carried)
        else:
            results = self._reduced_in_loop(batch, groups, states, keys, out)
        self._states.store()
        out.emit_batch(results)

    def _reduced_in_loop(
        self, batch: Batch, groups: RecordsByKey, states: dict[Any, Any], keys: list[Any], out: Output
    ) -> list[Any]:
        keys_of_records = np.empty(len(batch), dtype=object)
        keys_of_records[groups.order] = np.repeat(np.array(keys, dtype=object), groups.counts)
        records = batch if isinstance(batch, list) else list(batch)
        return running_reduce(self._ufunc, states, keys_of_records.tolist(), records, out)

    def _reduced(
        self, batch: Array, groups: RecordsByKey, states: dict[Any, Any], keys: list[Any], carried: list[Any]
    ) -> Array:
        values = batch[groups.order]
        known = [group for group, state in enumerate(carried) if state is not NO_STATE]
        if known:
            first = groups.starts[known]
            before = np.array([carried[group] for group in known], dtype=batch.dtype)
            values[first] = self._ufunc(before, values[first])
        accumulate_segments(self._ufunc, values, groups.starts, groups.counts)
        states.update(zip(keys, values[groups.starts + groups.counts - 1], strict=True))
        results = np.empty_like(values)
        results[groups.order] = values
        return results


def _reduces_arrays(ufunc: np.ufunc, batch: Array, carried: list[Any]) -> bool:
    """Return whether numpy's loops over ``batch`` and the states have the same results as a loop over the records."""
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
    """Return the type of the result for two values of ``dtype``; None where ``ufunc`` cannot take them."""
    try:
        return ufunc.resolve_dtypes((dtype, dtype, None))[2]
    except TypeError:
        return None


def array_of_keys(argument: str, keys: Any, length: int) -> Array:
    """Return what a function of a batch has returned as its keys; ``argument`` names the function in the error."""
    if isinstance(keys, np.ndarray) and keys.shape == (length,) and keys.dtype.kind in "iuUS":
        return keys
    given = f"{keys.dtype} of shape {keys.shape}" if isinstance(keys, np.ndarray) else type(keys).__name__
    raise FunctionResultError(
        f"{argument}: expected an array with an integer, string or bytes for each of the "
        f"{length} records, given {given}: {shortened(keys)}"
    )


# numpy sorts integers of one and two bytes stably by radix, ten times faster than wider ones.
_RADIX_TYPES: Final = ((1 << 8, np.uint8), (1 << 16, np.uint16))


class RecordsByKey:
    """The records of a batch that is not empty, grouped by key. In a group they keep their order.

    Group i has the records at the indices ``order[starts[i] : starts[i] + counts[i]]``, all with the key ``keys[i]``.

    >>> groups = RecordsByKey(np.array([7, 5, 7]))
    >>> groups.keys, groups.order, groups.starts, groups.counts
    (array([5, 7]), array([1, 0, 2]), array([0, 1]), array([1, 2]))
    """

    __slots__ = ("counts", "keys", "order", "starts")

    def __init__(self, keys: Array) -> None:
        codes = _codes(keys)
        self.order: Indices = np.argsort(codes, kind="stable")
        ordered = codes[self.order]
        borders = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        self.starts: Indices = np.concatenate([[0], borders])
        self.counts: Indices = np.diff(self.starts, append=len(keys))
        self.keys: Array = keys[self.order[self.starts]]

    def __getitem__(self, group: int) -> Indices:
        """Return the indices of the records of a group."""
        start = self.starts[group]
        return self.order[start : start + self.counts[group]]


def _codes(keys: Array) -> Array:
    """Return a number for each key: equal numbers for equal keys, in as few bytes as possible."""
    if keys.dtype.kind in "iu":
        lowest, highest = int(keys.min()), int(keys.max())
        for bound, small in _RADIX_TYPES:
            if lowest >= 0 and highest < bound:
                return keys.astype(small, copy=False)
            if highest - lowest < bound:
                # The difference wraps around where it does not fit the keys' own type; the conversion undoes that.
                differences: Array = keys - keys.dtype.type(lowest)
                return differences.astype(small)
    codes: Array
    distinct, codes = np.unique(keys, return_inverse=True)
    for bound, small in _RADIX_TYPES:
        if len(distinct) <= bound:
            return codes.astype(small)
    return codes


# One call of accumulate for a segment costs about 1.5 µs, one step over all of them about 10 µs and 5 ns
# for each value: up to this length, and with more segments than that, steps are faster.
_SHORT_SEGMENT: Final = 128


def accumulate_segments(ufunc: np.ufunc, values: Array, starts: Indices, counts: Indices) -> None:
    """Apply ``ufunc.accumulate`` in place to each segment ``values[start : start + count]``.

    Each segment is accumulated from its first value to its last, so floats round as in a plain loop.

    >>> values = np.array([1, 2, 3, 4])
    >>> accumulate_segments(np.add, values, np.array([0, 2]), np.array([2, 2]))
    >>> values
    array([1, 3, 3, 7])
    """
    if len(counts) <= _SHORT_SEGMENT:
        _accumulate_each(ufunc, values, starts, counts)
        return
    short = counts <= _SHORT_SEGMENT
    _accumulate_each(ufunc, values, starts[~short], counts[~short])
    _accumulate_in_steps(ufunc, values, starts[short], counts[short])


def _accumulate_each(ufunc: np.ufunc, values: Array, starts: Indices, counts: Indices) -> None:
    accumulate, dtype = ufunc.accumulate, values.dtype
    for start, stop in zip(starts.tolist(), (starts + counts).tolist(), strict=True):
        segment = values[start:stop]
        accumulate(segment, 0, dtype, segment)


def _accumulate_in_steps(ufunc: np.ufunc, values: Array, starts: Indices, counts: Indices) -> None:
    """Accumulate the r-th value of all segments that have one in step r."""
    longest_first = np.argsort(-counts, kind="stable")
    at, ascending_counts = starts[longest_first], counts[longest_first][::-1]
    for rank in range(1, int(counts.max(initial=0))):
        longer = len(counts) - np.searchsorted(ascending_counts, rank, side="right")
        at = at[:longer] + 1
        values[at] = ufunc(values[at - 1], values[at])
