"""A running reduce for each key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamiter.operators.functions import plain_function
from streamiter.operators.keyed import CheckKeys, KeyedOperator, any_keys
from streamiter.operators.output import Output
from streamiter.operators.record_loop import refuse
from streamiter.records import Batch

__all__ = ["KeyedReduce", "running_reduce"]


class KeyedReduce(KeyedOperator):
    """Emits, for each record, the reduction of all records of its key so far.

    A key's first record is emitted as it is, later ones as ``f(value, record)`` with the value emitted
    before. ``f`` must return a new value and change neither argument: both have been emitted. A record
    for which ``key_of`` or ``f`` raises follows the step's policy and leaves the state as it was.

    State: a value for each key, for ever.

    >>> from streamiter.operators import KeyedReduce, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> parity_sums = KeyedReduce(lambda x: x % 2, lambda total, x: total + x)
    >>> parity_sums.process_batch([1, 2, 3, 4], out)
    >>> results
    [1, 2, 4, 6]
    """

    def __init__(
        self,
        key_of: Callable[[Any], Any],
        f: Callable[[Any, Any], Any],
        *,
        check_keys: CheckKeys = any_keys,
    ) -> None:
        super().__init__(key_of, check_keys)
        self._f = plain_function("KeyedReduce(f)", f)

    def process_batch(self, batch: Batch, out: Output) -> None:
        records, keys = self.keyed(batch, out)
        out.emit_batch(running_reduce(self._f, self._states, keys, records, out))


def running_reduce(
    f: Callable[[Any, Any], Any],
    states: dict[Any, Any],
    keys: list[Any],
    records: list[Any],
    out: Output,
) -> list[Any]:
    """The new value of its key for each record; ``states`` changes accordingly."""
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
