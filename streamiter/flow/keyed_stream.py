"""The stream whose records have keys: steps with a state for each key, and windows and joins by time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, get_args, overload

import numpy as np

from streamiter.checkpoints.keys import check_keys
from streamiter.errors import ConfigurationError, GraphError, shortened
from streamiter.flow.building import Outlets, StepOutput, add_next_step, add_operator, check_same_flow, label_of
from streamiter.flow.event_time import check_event_time, checked_duration
from streamiter.flow.graph_checks import (
    check_can_wait,
    check_choice,
    check_end_is_told,
    check_factory,
    check_field_or_function,
    check_function,
    check_seconds,
    check_tag,
)
from streamiter.flow.options import ProcessOptions, StepOptions, check_options
from streamiter.flow.stream import Stream
from streamiter.operators.functions import field_or_function
from streamiter.operators.keyed import KeyedReduce, KeyedReduceBatch, StatefulMap
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.timed.as_of import AsOfJoin, TableHow
from streamiter.operators.timed.join_steps import Deduplicate, JoinSides, JoinTableAsOf, JoinTableNow, JoinWindowBefore
from streamiter.operators.timed.joining import IntervalJoin, JoinHow, WindowJoin
from streamiter.operators.timed.kinds import Session, Sliding, WindowKind
from streamiter.operators.timed.several_aggregates import Aggregates, AggregateSpec
from streamiter.operators.timed.steps import ClockWindowStep, EventWindowStep
from streamiter.operators.timed.windowing import WindowResult
from streamiter.records import Key, OutputTag, Record
from streamiter.runtime.graph import SINGLE_INPUT, KeySelector
from streamiter.runtime.output import ByKey

T = TypeVar("T")
S = TypeVar("S")

TimeOf = Literal["event", "processing"]
"""Event time, or the time of the clock when a record arrives."""

Results = Literal["accumulating", "retracting"]
"""Whether a new result of a window replaces the old one by its revision alone, or the old one is taken back before."""

# An interval may begin before the record or after it.
_ANY_S = -1e12


Result = TypeVar("Result")
"""The type of the results of windows."""


class WindowedStream(Generic[Result]):
    """A keyed stream in windows: :meth:`aggregate` says what is computed of each window."""

    def __init__(self, build: Callable[[Aggregates], Stream[Result]]) -> None:
        self._build = build

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise GraphError(
                f'{name}: expected a stream, given windows without an aggregate; write .aggregate("count") before '
                f".{name}(…), or another aggregate"
            )

    def aggregate(self, *one: AggregateSpec, **named: AggregateSpec) -> Stream[Result]:
        """Emit the aggregate of each window: one, or several by name, whose values are in a dict then.

        An aggregate is ``"count"``, ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"first"``, ``"last"``,
        ``"collect"``, :func:`~streamiter.quantile`, or :func:`~streamiter.fold` with functions. It takes the record
        itself, or a value of the record: write a pair with the name of a field, or a function.

        - Sums fold from left to right; sums of ints are exact. NaN makes sum, mean, min, max and quantiles NaN. None,
          and in number aggregates all that is no number, is refused: the record follows ``on_error``, and is in none
          of the aggregates.
        - ``first``, ``last`` and ``collect`` go by the time of the records, simultaneous ones by arrival.

        >>> from streamiter import Flow, tumbling
        >>> flow = Flow("per minute")
        >>> orders = [{"user": "ann", "at": 1.0, "price": 5}, {"user": "ann", "at": 59.0, "price": 7}]
        >>> timed = flow.from_items(orders).event_time("at", unit="s")
        >>> minutes = timed.key_by(lambda order: order["user"]).window(tumbling(60))
        >>> results = minutes.aggregate(orders="count", spent=("sum", "price")).collect()
        >>> flow.run().state, [(each.key, each.start, each.end, each.value) for each in results.items]
        ('finished', [('ann', 0, 60000, {'orders': 2, 'spent': 12})])
        """
        try:
            aggregates = Aggregates.of(one, named)
        except ConfigurationError as error:
            raise GraphError(str(error)) from None
        return self._build(aggregates)


class KeyedStream(Stream[Record], Generic[Key, Record]):
    """A stream whose records have keys: the next step can keep a state for each key."""

    def __init__(self, stream: Stream[Record], key_of: Callable[[Any], Key], *, whole_batches: bool = False) -> None:
        super().__init__(stream.flow, *stream.partitioned(ByKey(key_of, whole_batches)).outlets)
        self._key_of = key_of
        self._whole_batches = whole_batches

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
        check_function(f, "reduce", ["result", "record"], step=options.get("name"))
        is_ufunc = isinstance(f, np.ufunc) and (f.nin, f.nout) == (2, 1) and not f.signature
        if self._whole_batches and not is_ufunc:
            raise GraphError(
                "reduce: after key_by_batch expected a numpy ufunc of two arguments and one result such as np.add, "
                f"given {f!r}; use key_by(f) for other functions"
            )
        kind: Any = KeyedReduceBatch if self._whole_batches else KeyedReduce
        key_of, keyed = self._key_of, self.tolerant(options)
        return keyed._add("reduce", lambda: kind(key_of, f, check_keys=check_keys), options)

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
        check_function(f, "stateful_map", ["state", "record"], step=options.get("name"))
        if callable(initial):
            check_function(initial, "stateful_map(initial=)", [], step=options.get("name"))
        key_of = self.record_key("stateful_map")
        return self.tolerant(options)._add(
            "stateful_map", lambda: StatefulMap(key_of, f, initial, check_keys=check_keys), options
        )

    def process(
        self, factory: OperatorFactory, *, time_to_live_s: float | None = None, **options: Unpack[ProcessOptions]
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
        label = options.get("name") or label_of(factory)
        check_factory(factory, [SINGLE_INPUT], step=label, keyed=True)
        check_seconds(time_to_live_s, "time_to_live_s", "keep states for ever", step=label)
        keys = KeySelector({SINGLE_INPUT: self.record_key("process")}, time_to_live_s)
        inputs = {SINGLE_INPUT: self.tolerant(options)}
        return Stream(self._flow, add_operator(inputs, factory, options, keys))

    # -- by time -----------------------------------------------------------------------------------------

    def window(
        self,
        window: WindowKind,
        *,
        allowed_lateness_s: float = 0.0,
        early_every_s: float | None = None,
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
          ``revision``. The last revision of (key, start, end) is the one that stands.
        - A record that comes when all its windows have gone is *late*. It is dropped, or goes to the side output
          ``late``: ``results.side_output(late)``.
        - ``early_every_s`` gives early results of incomplete windows that have changed, so often by the clock.
        - ``results="retracting"`` emits the old value once more, with ``is_retraction``, before each new one. A result
          of a session that has grown or merged since is always retracted, right before the next result.
        - ``time="processing"`` uses the clock instead of event time. Nothing is late, and windows that are open at
          the end of the input are given then.

        After ``key_by_batch``, records in ``Columns`` are counted and summed by numpy. The state of a key is its open
        windows. See docs/windows.md.
        """
        label = options.get("name") or "window"
        check_options("window", options)
        if not isinstance(window, WindowKind):
            raise GraphError(
                f"step {label!r}: expected a window such as tumbling(60), hopping, sliding, session or calendar, given "
                f"{shortened(window)}; write .window(tumbling(seconds))"
            )
        check_choice("results", results, get_args(Results), step=label)
        check_choice("time", time, get_args(TimeOf), step=label)
        check_seconds(early_every_s, "early_every_s", "have no early results", step=label)
        settings = {
            "lateness_ms": checked_duration("allowed_lateness_s", allowed_lateness_s, label),
            "early_every_s": early_every_s,
            "late": check_tag(late, step=label),
            "retracting": results == "retracting",
            "check_keys": check_keys,
        }
        if time == "event":
            check_event_time(self, "window")
        elif late is not None or settings["lateness_ms"]:
            raise GraphError(
                f"step {label!r}: expected no allowed_lateness_s= and no late= in processing time, where nothing is "
                "late, given one; leave it out"
            )
        operator: Any = EventWindowStep if time == "event" else ClockWindowStep
        keyed, key_of, whole = self.tolerant(options), self._key_of, not self.has_record_keys

        def build(aggregates: Aggregates) -> Stream[WindowResult]:
            if isinstance(window, Session) and aggregates.merge_is_missing:
                raise GraphError(
                    f"step {label!r}: expected an aggregate that merges, as sessions do, given a fold without; "
                    "write fold(initial, add, merge)"
                )
            self.flow.register(WindowResult)
            return self._made(
                add_next_step(
                    {SINGLE_INPUT: keyed},
                    "window",
                    lambda: operator(window, aggregates, key_of, whole_batches=whole, **settings),
                    options,
                    keeps_event_time=time == "event",
                )
            )

        return WindowedStream(build)

    def interval_join(
        self,
        other: Stream[Any],
        *,
        lower_s: float,
        upper_s: float,
        how: JoinHow = "inner",
        allowed_lateness_s: float = 0.0,
        late: OutputTag | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[tuple[Any, Any]]:
        """Emit the pairs ``(left, right)`` of one key with ``left + lower_s ≤ right ≤ left + upper_s``, by timestamps.

        Both streams have keys and event time; the bounds are inclusive and have any sign. A pair leaves when its
        second record arrives, with the greater timestamp. With ``how="left"`` (``"right"``, ``"full"``) a record that
        can have no partner any more is emitted with None. Records that come later than ``allowed_lateness_s`` behind
        the watermark are dropped, or go to the side output ``late``. See docs/joins.md.

        >>> from streamiter import Flow
        >>> flow = Flow("labels")
        >>> shown = flow.from_items([{"ad": 1, "at": 10}, {"ad": 2, "at": 11}]).event_time("at", unit="s")
        >>> clicked = flow.from_items([{"ad": 1, "at": 15}]).event_time("at", unit="s")
        >>> pairs = shown.key_by(lambda view: view["ad"]).interval_join(
        ...     clicked.key_by(lambda click: click["ad"]), lower_s=0, upper_s=60, how="left"
        ... ).collect()
        >>> flow.run().state, [(view["ad"], click is not None) for view, click in pairs.items]
        ('finished', [(1, True), (2, False)])
        """
        label = options.get("name") or "interval_join"
        lower = checked_duration("lower_s", lower_s, label, _ANY_S)
        upper = checked_duration("upper_s", upper_s, label, _ANY_S)
        if lower > upper:
            raise GraphError(
                f"step {label!r}: expected lower_s of at most upper_s, given {lower_s} and {upper_s}; exchange them"
            )
        check_choice("how", how, get_args(JoinHow), step=label)
        return self._joined(
            "interval_join",
            {"left": self, "right": other},
            lambda *keys, **settings: JoinSides(IntervalJoin(lower, upper, how), *keys, **settings),
            options,
            allowed_lateness_s=allowed_lateness_s,
            late=late,
        )

    def window_join(
        self,
        other: Stream[Any],
        window: WindowKind,
        *,
        how: JoinHow = "inner",
        allowed_lateness_s: float = 0.0,
        late: OutputTag | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[tuple[Any, Any]]:
        """Emit all pairs ``(left, right)`` of a key whose records are in one window, when the window is complete.

        A session spans the records of both streams. With ``how="left"`` (``"right"``, ``"full"``) the records of a
        window without any record of the other stream are emitted with None. The timestamp is the last millisecond of
        the window.

        >>> from streamiter import Flow, tumbling
        >>> flow = Flow("same minute")
        >>> left = flow.from_items([{"room": 1, "at": 10, "x": "a"}]).event_time("at", unit="s")
        >>> right = flow.from_items([{"room": 1, "at": 50, "x": "b"}]).event_time("at", unit="s")
        >>> pairs = left.key_by(lambda one: one["room"]).window_join(
        ...     right.key_by(lambda one: one["room"]), tumbling(60)
        ... ).collect()
        >>> flow.run().state, [(one["x"], other["x"]) for one, other in pairs.items]
        ('finished', [('a', 'b')])
        """
        label = options.get("name") or "window_join"
        if not isinstance(window, WindowKind) or isinstance(window, Sliding):
            raise GraphError(
                f"step {label!r}: expected a window of both streams: tumbling, hopping, session or calendar, given "
                f"{shortened(window)}; for records near each other use interval_join"
            )
        check_choice("how", how, get_args(JoinHow), step=label)
        return self._joined(
            "window_join",
            {"left": self, "right": other},
            lambda *keys, **settings: JoinSides(WindowJoin(window, how), *keys, **settings),
            options,
            allowed_lateness_s=allowed_lateness_s,
            late=late,
        )

    def join_table(
        self,
        table: Stream[Any],
        *,
        how: TableHow = "left",
        value: str | Callable[[Any], Any] | None = None,
        time: TimeOf = "event",
        strict: bool = False,
        wait_for_table: bool = True,
        allowed_lateness_s: float = 0.0,
        late: OutputTag | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[tuple[Any, Any]]:
        """Emit the pair ``(record, value)`` of each record with what the table has for its key.

        The records of ``table`` are changes of the table: the last one of a key counts. ``value`` is a field of them,
        or a function; without it the value is the record. A value None deletes. A record without a value is paired with
        None, or dropped with ``how="inner"``. The key of the stream is any function: a foreign key, too.

        - ``time="event"``, *as of*: the last change at or before the record's timestamp (``strict=True``: before it).
          The record waits until no such change is expected any more.
        - ``time="processing"``: the value when the record arrives. With ``wait_for_table`` the stream is read when the
          table has been read to the end that its topics have at the start of the job, and at each restart.

        >>> from streamiter import Flow
        >>> flow = Flow("prices of the day")
        >>> prices = [{"fruit": "fig", "at": 1, "price": 3}, {"fruit": "fig", "at": 9, "price": 4}]
        >>> table = flow.from_items(prices).event_time("at", unit="s").key_by(lambda change: change["fruit"])
        >>> sales = flow.from_items([{"fruit": "fig", "at": 5}, {"fruit": "fig", "at": 9}])
        >>> sales = sales.event_time("at", unit="s").key_by(lambda sale: sale["fruit"])
        >>> priced = sales.join_table(table, value="price").collect()
        >>> flow.run().state, [(sale["at"], price) for sale, price in priced.items]
        ('finished', [(5, 3), (9, 4)])
        """
        label = options.get("name") or "join_table"
        check_choice("how", how, get_args(TableHow), step=label)
        check_choice("time", time, get_args(TimeOf), step=label)
        if value is not None:
            check_field_or_function(value, "join_table(value)", step=options.get("name"))
        value_of = _whole_record if value is None else field_or_function("join_table(value)", value)
        inputs = {"stream": self, "table": table}
        if time == "event":
            return self._joined(
                "join_table",
                inputs,
                lambda *keys, **settings: JoinTableAsOf(value_of, AsOfJoin(how, strict=strict), *keys, **settings),
                options,
                allowed_lateness_s=allowed_lateness_s,
                late=late,
            )
        if strict or late is not None or allowed_lateness_s:
            raise GraphError(
                f"step {label!r}: expected strict=, late= and allowed_lateness_s= only in event time, given one of "
                'them with time="processing"; leave it out'
            )
        return self._joined(
            "join_table",
            inputs,
            lambda *keys, **settings: JoinTableNow(value_of, how, *keys, waits=wait_for_table, **settings),
            options,
            awaited_input="table" if wait_for_table else None,
        )

    def as_of_window(
        self,
        events: Stream[Any],
        size_s: float,
        *,
        allowed_lateness_s: float = 0.0,
        late: OutputTag | None = None,
        **options: Unpack[StepOptions],
    ) -> WindowedStream[tuple[Record, Any]]:
        """Aggregate, for each record, the events of its key in the ``size_s`` seconds strictly before it.

        So a feature of an example contains nothing from the time of the example on: no leakage. ``.aggregate(…)`` emits
        the pair ``(record, value)`` when no event before the record is expected any more. Without events a count and a
        sum are 0, a list is empty, and other aggregates are None.

        >>> from streamiter import Flow
        >>> flow = Flow("clicks of the last hour")
        >>> clicks = flow.from_items([{"user": 1, "at": 10}, {"user": 1, "at": 20}]).event_time("at", unit="s")
        >>> examples = flow.from_items([{"user": 1, "at": 20}, {"user": 1, "at": 21}]).event_time("at", unit="s")
        >>> features = examples.key_by(lambda one: one["user"]).as_of_window(
        ...     clicks.key_by(lambda click: click["user"]), 3600
        ... ).aggregate("count").collect()
        >>> flow.run().state, [(example["at"], clicks) for example, clicks in features.items]
        ('finished', [(20, 1), (21, 2)])
        """
        label = options.get("name") or "as_of_window"
        size = checked_duration("size_s", size_s, label, 0.001)

        def build(aggregates: Aggregates) -> Stream[tuple[Record, Any]]:
            return self._joined(
                "as_of_window",
                {"stream": self, "events": events},
                lambda *keys, **settings: JoinWindowBefore(size, aggregates, *keys, **settings),
                options,
                allowed_lateness_s=allowed_lateness_s,
                late=late,
            )

        return WindowedStream(build)

    def deduplicate(
        self,
        by: str | Callable[[Any], Any],
        *,
        within_s: float,
        late: OutputTag | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[Record]:
        """Drop each record if one with the same key and id has passed whose timestamp is less than ``within_s`` away.

        ``by`` is the field with the id, or a function: an int, a text, bytes or a tuple of these. Records more than
        ``within_s`` behind the watermark are late, and dropped or sent to the side output ``late``.

        >>> from streamiter import Flow
        >>> flow = Flow("once")
        >>> events = flow.from_items([{"id": 7, "at": 1}, {"id": 7, "at": 5}, {"id": 7, "at": 11}])
        >>> keyed = events.event_time("at", unit="s").key_by(lambda event: event["id"] % 2)
        >>> once = keyed.deduplicate("id", within_s=10).collect()
        >>> flow.run().state, [event["at"] for event in once.items]
        ('finished', [1, 11])
        """
        label = options.get("name") or "deduplicate"
        check_options("deduplicate", options)
        check_field_or_function(by, "deduplicate", step=options.get("name"))
        id_of = field_or_function("deduplicate(by)", by)
        within = checked_duration("within_s", within_s, label, 0.001)
        tag = check_tag(late, step=label)
        check_event_time(self, "deduplicate")
        keyed, key_of = self.tolerant(options), self.record_key("deduplicate")
        return self._made(
            add_next_step(
                {SINGLE_INPUT: keyed},
                "deduplicate",
                lambda: Deduplicate(key_of, id_of, within, late=tag, check_keys=check_keys),
                options,
            )
        )

    # -- for the engine ----------------------------------------------------------------------------------

    def _made(self, output: StepOutput) -> Stream[Any]:
        """Return the stream of a step."""
        return Stream(self._flow, output)

    @property
    def has_record_keys(self) -> bool:
        """For the engine: whether the keys are those of single records."""
        return not self._whole_batches

    def tolerant(self, options: StepOptions) -> Stream[Record]:
        """For the engine: return the stream to a keyed step.

        A step that survives refused records also receives those without a key.
        """
        survives = options.get("on_error", "fail") != "fail" or options.get("dead_letter") is not None
        return self.partitioned(ByKey(self._key_of, self._whole_batches, survives and not self._whole_batches))

    def record_key(self, method: str) -> Callable[[Any], Key]:
        """For the engine: return the function that gives the key of a record."""
        if self._whole_batches:
            raise GraphError(f"{method}: expected a stream keyed record by record, given key_by_batch; use key_by(f)")
        return self._key_of

    def _joined(
        self,
        method: str,
        inputs: Mapping[str, Outlets],
        make: Callable[..., Any],
        options: StepOptions,
        *,
        allowed_lateness_s: float | None = None,
        late: OutputTag | None = None,
        awaited_input: str | None = None,
    ) -> Stream[Any]:
        """Add a step that joins two keyed streams; in event time, if it has an allowed lateness."""
        check_options(method, options)
        label = options.get("name") or method
        keyed: dict[str, Outlets] = {}
        keys: list[Callable[[Any], Any]] = []
        settings: dict[str, Any] = {"check_keys": check_keys}
        for name, stream in inputs.items():
            if not isinstance(stream, KeyedStream):
                raise GraphError(
                    f"step {label!r}: expected a stream with keys as its input {name!r}, given {shortened(stream)}; "
                    "write other.key_by(f)"
                )
            check_same_flow(self, stream, method)
            if allowed_lateness_s is not None:
                check_event_time(stream, method)
            keys.append(stream.record_key(method))
            keyed[name] = stream.tolerant(options)
        if allowed_lateness_s is not None:
            lateness_ms = checked_duration("allowed_lateness_s", allowed_lateness_s, label)
            settings |= {"lateness_ms": lateness_ms, "late": check_tag(late, step=label)}
        if awaited_input is not None:
            table = keyed[awaited_input].edges()
            check_end_is_told(table, step=label)
            if self._flow.loop is None:  # A gate in a loop reads ahead of what it wants.
                check_can_wait(self.edges(), table, self._flow.steps, step=label)
        factory: OperatorFactory = lambda: make(*keys, **settings)  # noqa: E731
        return self._made(add_next_step(keyed, method, factory, options, awaited_input=awaited_input))


def _whole_record(record: Any) -> Any:
    return record
