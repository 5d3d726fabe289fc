"""The stream whose records have keys: steps with a state for each key, and windows by time.

Its joins are those of :class:`~streamiter.flow.keyed_joins.KeyedJoins`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, Unpack, get_args, overload

import numpy as np

from streamiter.engine.graph.graph import SINGLE_INPUT
from streamiter.errors import GraphError, no_attribute, shortened
from streamiter.flow.building import add_next_step
from streamiter.flow.event_time import check_event_time, checked_duration
from streamiter.flow.graph_checks import (
    check_choice,
    check_field_or_function,
    check_nothing_is_late,
    check_seconds,
    check_tag,
    check_user_function,
)
from streamiter.flow.keyed_joins import (
    KeyedJoins,
    TimeOf,
    WindowedStream,
    add_keyed_operator,
    has_record_keys,
    record_key,
    tolerant,
)
from streamiter.flow.options import ProcessOptions, StepOptions, check_step_options, survives
from streamiter.flow.stream import Stream
from streamiter.operators.functions import field_or_function
from streamiter.operators.keyed import KeyedReduce, KeyedReduceBatch, StatefulMap
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.timed.join_steps import Deduplicate, DeduplicateByClock
from streamiter.operators.timed.kinds import Session, WindowKind
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.steps import ClockWindowStep, EventWindowStep
from streamiter.operators.timed.windowing import WindowResult
from streamiter.values.records import Key, OutputTag, Record
from streamiter.values.times import Seconds

T = TypeVar("T")
S = TypeVar("S")

Results = Literal["accumulating", "retracting"]
"""Whether a new result of a window replaces the old one by its revision alone, or the old one is taken back before."""


class KeyedStream(KeyedJoins[Key, Record]):
    """A stream whose records have keys: the next step can keep a state for each key."""

    def reduce(self, f: Callable[[Record, Record], Record], **options: Unpack[StepOptions]) -> Stream[Record]:
        """Emit the key's running result for each record: first the record itself, then ``f(result, record)``.

        ``f`` must return a new value and change neither argument: both have been emitted. A record that is refused
        leaves the result of its key as it is. With ``key_by_batch`` and a numpy ufunc (``np.add``) arrays are reduced
        without a Python loop. The state is one value for each key and is never dropped.

        >>> from streamiter import Flow
        >>> flow = Flow("highest by parity")
        >>> highest = flow.from_items([3, 2, 1, 8]).key_by(lambda x: x % 2).reduce(max).collect()
        >>> flow.run().state, highest.items
        ('finished', [3, 2, 3, 8])
        """
        check_user_function(f, "reduce", ["result", "record"], step=options.get("name"))
        is_ufunc = isinstance(f, np.ufunc) and (f.nin, f.nout) == (2, 1) and not f.signature
        if self._whole_batches and not is_ufunc:
            raise GraphError(
                "reduce: after key_by_batch expected a numpy ufunc of two arguments and one result such as np.add, "
                f"given {f!r}; use key_by(f) for other functions"
            )
        kind: Any = KeyedReduceBatch if self._whole_batches else KeyedReduce
        key_of, keyed = self._key_of, tolerant(self, options)
        return keyed._add("reduce", lambda: kind(key_of, f), options)

    @overload
    def stateful_map(
        self, f: Callable[[S, Record], tuple[S, T]], initial: Callable[[], S], **options: Unpack[StepOptions]
    ) -> Stream[T]: ...

    @overload
    def stateful_map(
        self, f: Callable[[S, Record], tuple[S, T]], initial: S, **options: Unpack[StepOptions]
    ) -> Stream[T]: ...

    def stateful_map(
        self, f: Callable[[Any, Record], tuple[Any, T]], initial: Any, **options: Unpack[StepOptions]
    ) -> Stream[T]:
        """Call ``f(state, record) -> (state, output)`` with a state for each key, which is ``initial`` at first.

        ``initial`` is plain data, and each key receives a copy of its own, or a callable that makes it (``list``).
        A state is never dropped; in ``process`` it can expire.

        >>> from streamiter import Flow
        >>> flow = Flow("count words")
        >>> words = flow.from_items(["to", "be", "to"]).key_by(lambda word: word)
        >>> counts = words.stateful_map(lambda count, word: (count + 1, (word, count + 1)), 0).collect()
        >>> flow.run().state, counts.items
        ('finished', [('to', 1), ('be', 1), ('to', 2)])
        """
        check_user_function(f, "stateful_map", ["state", "record"], step=options.get("name"))
        if callable(initial):
            check_user_function(initial, "stateful_map(initial=)", [], step=options.get("name"))
        key_of = record_key(self, "stateful_map")
        return tolerant(self, options)._add("stateful_map", lambda: StatefulMap(key_of, f, initial), options)

    def process(
        self, factory: OperatorFactory, *, time_to_live_s: Seconds | None = None, **options: Unpack[ProcessOptions]
    ) -> Stream:
        """Add your own operator with ``context.key``, ``context.state`` and timers.

        ``context.state`` is an empty dict for a new key; change it, or assign any plain data. A state that was not used
        for ``time_to_live_s`` seconds is dropped. ``context.set_timer(delay_s, payload)`` calls
        ``on_timer(payload, out)`` with the same key. When the input has ended, timers that are not due are dropped.

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
        return add_keyed_operator({SINGLE_INPUT: self}, factory, time_to_live_s, options)

    # -- by time -----------------------------------------------------------------------------------------

    def window(
        self,
        window: WindowKind,
        *,
        allowed_lateness_s: Seconds = 0.0,
        early_every_s: Seconds | None = None,
        late: OutputTag | None = None,
        results: Results = "accumulating",
        time: TimeOf = "event",
        **options: Unpack[StepOptions],
    ) -> WindowedStream[WindowResult]:
        """Put the records of each key into windows; then say what is computed: ``.aggregate("count")``.

        ``window`` is ``tumbling(size_s)``, ``hopping(size_s, step_s)``, ``calendar("day", "Europe/Berlin")``,
        ``sliding(size_s)`` or ``session(gap_s)``. A result is a ``WindowResult`` with ``key, start, end, value,
        is_early, is_retraction, revision``; ``start`` and ``end`` are milliseconds since 1970 UTC, and its timestamp
        is ``end − 1``.

        - A window is *complete* when the event-time watermark reaches its end: then it has its on-time result. For
          ``allowed_lateness_s`` more, each late record that belongs to it gives a new result at once, with the next
          ``revision``. The last revision of (key, start, end) is the valid result.
        - A record that comes when all its windows have gone is *late*. It is dropped, or goes to the side output
          ``late``: ``results.side_output(late)``.
        - ``early_every_s`` gives early results of incomplete windows that have changed, at this interval of the clock.
        - ``results="retracting"`` emits the old value once more, with ``is_retraction``, before each new one. A result
          of a session that has grown or merged since is always retracted, right before the next result.
        - ``time="processing"`` uses the clock instead of event time. Nothing is late, and windows that are open at
          the end of the input are given then.

        After ``key_by_batch``, records in ``Columns`` are counted and summed by numpy. The state of a key is its open
        windows.

        The guide: https://streamiter.github.io/streamiter/newest/windows.html
        """
        label = options.get("name") or "window"
        check_step_options("window", options)
        if not isinstance(window, WindowKind):
            raise GraphError(
                f"step {label!r}: expected a window such as tumbling(60), hopping, sliding, session or calendar, given "
                f"{shortened(window)}; write .window(tumbling(seconds))"
            )
        check_choice("results", results, get_args(Results), step=label)
        check_choice("time", time, get_args(TimeOf), step=label)
        early_s = check_seconds(early_every_s, "early_every_s", "have no early results", step=label)
        settings = {
            "lateness_ms": checked_duration("allowed_lateness_s", allowed_lateness_s, label),
            "early_every_s": early_s,
            "late": check_tag(late, step=label),
            "retracting": results == "retracting",
        }
        if time == "event":
            check_event_time(self, "window")
        else:
            check_nothing_is_late(late, allowed_lateness_s, step=label)
        operator: Any = EventWindowStep if time == "event" else ClockWindowStep
        keyed, key_of, whole = tolerant(self, options), self._key_of, not has_record_keys(self)

        def build(aggregates: Aggregates, options: StepOptions) -> Stream[WindowResult]:
            if isinstance(window, Session) and aggregates.merge_is_missing:
                raise GraphError(
                    f"step {label!r}: expected an aggregate that merges, as sessions do, given a fold without; "
                    "write fold(initial, add, merge)"
                )
            if survives(options):
                aggregates = aggregates.copy(is_atomic=True)
            self.flow.register(WindowResult)
            output = add_next_step(
                {SINGLE_INPUT: keyed},
                "window",
                lambda: operator(window, aggregates, key_of, whole_batches=whole, **settings),
                options,
                keeps_event_time=time == "event",
            )
            return Stream(self._flow, output)

        return WindowedStream(build, options)

    def deduplicate(
        self,
        by: str | Callable[[Any], Any],
        *,
        within_s: Seconds,
        late: OutputTag | None = None,
        time: TimeOf = "event",
        **options: Unpack[StepOptions],
    ) -> Stream[Record]:
        """Drop each record if one with the same key and id has passed whose timestamp is less than ``within_s`` away.

        ``by`` is the field with the id, or a function: an int, a text, bytes or a tuple of these. Records more than
        ``within_s`` behind the watermark are late, and dropped or sent to the side output ``late``. With
        ``time="processing"`` the clock at the arrival of a record counts, and nothing is late.

        >>> from streamiter import Flow
        >>> flow = Flow("once")
        >>> events = flow.from_items([{"id": 7, "at": 1}, {"id": 7, "at": 5}, {"id": 7, "at": 11}])
        >>> keyed = events.event_time("at", unit="s").key_by(lambda event: event["id"] % 2)
        >>> once = keyed.deduplicate("id", within_s=10).collect()
        >>> flow.run().state, [event["at"] for event in once.items]
        ('finished', [1, 11])
        """
        label = options.get("name") or "deduplicate"
        check_step_options("deduplicate", options)
        check_field_or_function(by, "deduplicate", step=options.get("name"))
        id_of = field_or_function("deduplicate(by)", by)
        within = checked_duration("within_s", within_s, label, 0.001)
        tag = check_tag(late, step=label)
        check_choice("time", time, get_args(TimeOf), step=label)
        if time == "event":
            check_event_time(self, "deduplicate")
        else:
            check_nothing_is_late(late, 0.0, step=label)
        operator = Deduplicate if time == "event" else DeduplicateByClock
        keyed, key_of = tolerant(self, options), record_key(self, "deduplicate")
        make = lambda: operator(key_of, id_of, within, late=tag)  # noqa: E731
        return Stream(self._flow, add_next_step({SINGLE_INPUT: keyed}, "deduplicate", make, options))


# What Flink, Spark, Kafka Streams, Quix Streams and pandas call the methods of a stream, without underscores.
_NAMES_ELSEWHERE: Final = MappingProxyType(
    {
        **dict.fromkeys(("apply", "foreach", "select", "withcolumn", "mapvalues"), "map"),
        **dict.fromkeys(("groupby", "keyby", "groupbykey"), "key_by"),
        **dict.fromkeys(("where", "query"), "filter"),
        **dict.fromkeys(("explode", "flatmapvalues"), "flat_map"),
        **dict.fromkeys(("merge", "concat"), "union"),
        **dict.fromkeys(("fold", "scan"), "stateful_map"),
        **dict.fromkeys(("to", "write", "sinkto", "addsink", "totopic"), "sink"),
        **dict.fromkeys(("distinct", "dropduplicates"), "deduplicate"),
        **dict.fromkeys(("assigntimestamps", "withwatermark"), "event_time"),
    }
)


def missing_attribute(stream: Stream[Any], name: str) -> Exception:
    """Return the error of a stream that has no attribute of this name."""
    if name in vars(KeyedStream) and not name.startswith("_"):
        return GraphError(
            f"{name}: expected a stream with keys, given {stream.name!r} without; put .key_by(f) right before "
            f".{name}(…), or use reduce_all(f) for one result of all records"
        )
    return no_attribute(f"{type(stream).__name__!r} object", name, dir(KeyedStream), _NAMES_ELSEWHERE)
