"""KeyedStream: the steps that keep a state for each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from streamiter.checkpoints.keys import check_keys
from streamiter.errors import GraphError
from streamiter.flow.graph_checks import check_factory, check_function, check_seconds
from streamiter.flow.next_step import StepOptions, StepOutput, add_next_step, label_of, may_emit_unasked
from streamiter.flow.stream import Stream
from streamiter.operators.keyed import KeyedReduce, KeyedReduceBatch, StatefulMap
from streamiter.operators.operator import OperatorFactory, Service
from streamiter.operators.rejection import RejectionPolicy
from streamiter.runtime.graph import SINGLE_INPUT, KeySelector
from streamiter.runtime.output import ByKey
from streamiter.topics.topic import Topic

if TYPE_CHECKING:
    from streamiter.flow.flow import Flow

__all__ = ["KeyedStream"]


class KeyedStream(Stream):
    """A stream whose records have keys: the next step can keep state for each of them."""

    def __init__(
        self,
        flow: Flow,
        key_of: Callable[[Any], Any],
        outlets: Iterable[StepOutput],
        *,
        whole_batches: bool = False,
    ) -> None:
        super().__init__(flow, *outlets)
        self._key_of = key_of
        self._whole_batches = whole_batches

    def reduce(
        self,
        f: Callable[[Any, Any], Any],
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """For each record the key's running result: the first record, then ``f(result, record)``.

        ``f`` must give a new value and change neither argument: both have been emitted. A record that is
        refused leaves its key's result as it was. With ``key_by_batch`` and a numpy ufunc (``np.add``) arrays
        are reduced without a Python loop. State: a value for each key, for ever.

        >>> from streamiter import Flow
        >>> flow = Flow("highest by parity")
        >>> highest = flow.from_items([3, 2, 1, 8]).key_by(lambda x: x % 2).reduce(max).collect()
        >>> flow.run().state, highest.items
        ('finished', [3, 2, 3, 8])
        """
        check_function(f, "reduce", ["result", "record"], step=name)
        key_of = self._key_of
        options = StepOptions(name, parallelism, on_error, dead_letter)
        if not self._whole_batches:
            return self._add_keyed("reduce", lambda: KeyedReduce(key_of, f, check_keys=check_keys), options)
        if not isinstance(f, np.ufunc) or (f.nin, f.nout) != (2, 1) or f.signature:
            raise GraphError(
                "reduce: after key_by_batch expected a numpy ufunc of two arguments and one result such as np.add, "
                f"given {f!r}; use key_by(f) for other functions"
            )
        return self._add_keyed("reduce", lambda: KeyedReduceBatch(key_of, f, check_keys=check_keys), options)

    def stateful_map(
        self,
        f: Callable[[Any, Any], tuple[Any, Any]],
        initial: Any,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """``f(state, record) -> (state, output)`` with a state for each key that begins as ``initial``.

        ``initial`` is plain data, of which each key has a copy of its own, or a callable that makes it
        (``list``). State: one for each key, for ever; ``process`` can let it expire.

        >>> from streamiter import Flow
        >>> flow = Flow("count words")
        >>> words = flow.from_items(["to", "be", "to"]).key_by(lambda word: word)
        >>> counts = words.stateful_map(lambda count, word: (count + 1, (word, count + 1)), 0).collect()
        >>> flow.run().state, counts.items
        ('finished', [('to', 1), ('be', 1), ('to', 2)])
        """
        check_function(f, "stateful_map", ["state", "record"], step=name)
        if callable(initial):
            check_function(initial, "stateful_map(initial=)", [], step=name)
        key_of = self._record_key("stateful_map")
        return self._add_keyed(
            "stateful_map",
            lambda: StatefulMap(key_of, f, initial, check_keys=check_keys),
            StepOptions(name, parallelism, on_error, dead_letter),
        )

    def process(
        self,
        factory: OperatorFactory,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
        parameter_server: Service | None = None,
        time_to_live_s: float | None = None,
    ) -> Stream:
        """Your own operator with ``context.key``, ``context.state`` and timers.

        ``context.state`` is an empty dict for a key never seen; change it, or assign any plain data. One that
        was not used for ``time_to_live_s`` seconds is forgotten. ``context.set_timer(delay_s, payload)``
        calls ``on_timer(payload, out)`` with the same key; timers that are still to come when the input has
        ended do not come any more.

        >>> from streamiter import Flow, Operator
        >>> class Visits(Operator):
        ...     def open(self, context):
        ...         self.context = context
        ...     def process(self, record, out):
        ...         state = self.context.state
        ...         state["visits"] = state.get("visits", 0) + 1
        ...         out.emit((self.context.key, state["visits"]))
        >>> flow = Flow("visits")
        >>> visits = flow.from_items(["ann", "bo", "ann"]).key_by(str.upper).process(Visits).collect()
        >>> flow.run().state, visits.items
        ('finished', [('ANN', 1), ('BO', 1), ('ANN', 2)])
        """
        label = name or label_of(factory)
        check_factory(factory, [SINGLE_INPUT], step=label, keyed=True)
        check_seconds(time_to_live_s, "time_to_live_s", "keep states for ever", step=label)
        keys = KeySelector(self._record_key("process"), time_to_live_s)
        options = StepOptions(name, parallelism, on_error, dead_letter, parameter_server)
        return self._add_keyed(label, factory, options, keys)

    def _add_keyed(
        self, label: str, factory: OperatorFactory, options: StepOptions, keys: KeySelector | None = None
    ) -> Stream:
        """A keyed step that goes on after a refused record is given those without a good key, too."""
        tolerant = (options.on_error, options.dead_letter) != ("fail", None) and not self._whole_batches
        by_key = ByKey(self._key_of, self._whole_batches, tolerant)
        stream = self._partitioned(by_key)
        unasked = keys is not None and may_emit_unasked(factory)  # Only process gives a selector of keys.
        inputs = {SINGLE_INPUT: stream}
        return add_next_step(inputs, label, factory, options, keys=keys, emits_unasked=unasked)

    def _record_key(self, method: str) -> Callable[[Any], Any]:
        if self._whole_batches:
            raise GraphError(
                f"{method}: expected a stream keyed record by record, given key_by_batch; use key_by(f)"
            )
        return self._key_of
