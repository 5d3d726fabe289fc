"""A map with a state for each key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamiter.operators.copies import independent_copy
from streamiter.operators.functions import FunctionResultError, plain_function
from streamiter.operators.keyed import CheckKeys, KeyedOperator, any_keys
from streamiter.operators.output import Output
from streamiter.operators.record_loop import refuse
from streamiter.operators.rejection import shortened
from streamiter.records import Batch

__all__ = ["StatefulMap"]


class StatefulMap(KeyedOperator):
    """Emits, for each record, the output of ``f(state, record) -> (state, output)``.

    ``state`` is what ``f`` returned for the record before with the same key. ``initial`` is the state of
    a key never seen: plain data, of which each key has a copy of its own, or a callable without
    arguments that makes it (such as ``list``). ``f`` may change the state in place, but then must neither
    emit it nor keep it for later. A record for which ``key_of`` or ``f`` raises follows the step's policy
    and leaves the state as it was, unless ``f`` had changed it in place.

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
        self,
        key_of: Callable[[Any], Any],
        f: Callable[[Any, Any], tuple[Any, Any]],
        initial: Any = None,
        *,
        check_keys: CheckKeys = any_keys,
    ) -> None:
        super().__init__(key_of, check_keys)
        self._f = plain_function("StatefulMap(f)", f)
        self._initial = independent_copy(initial) if not callable(initial) else initial

    def process_batch(self, batch: Batch, out: Output) -> None:
        records, keys = self.keyed(batch, out)
        f, states = self._f, self._states
        results: list[Any] = []
        for key, record in zip(keys, records, strict=True):
            try:
                # Faster than get for known keys; a key is new once, and the exception costs 0.1 µs then.
                try:
                    state = states[key]
                except KeyError:
                    state = self._new_state()
                result = f(state, record)
                try:
                    states[key], output = result
                except (TypeError, ValueError):
                    raise _not_a_pair(result) from None
            except Exception as error:
                refuse(out, record, error)
            else:
                results.append(output)
        out.emit_batch(results)

    def _new_state(self) -> Any:
        return self._initial() if callable(self._initial) else independent_copy(self._initial)


def _not_a_pair(result: Any) -> FunctionResultError:
    return FunctionResultError(
        f"StatefulMap(f): expected the function to return (state, output), given {shortened(result)}"
    )
