"""The joins of a keyed stream with another one, by time or with a table; and a stream in windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, get_args, overload

from streamiter.engine.graph.graph import KeySelector
from streamiter.engine.graph.output import ByKey
from streamiter.errors import ConfigurationError, GraphError, shortened
from streamiter.flow.building import (
    Outlets,
    add_next_step,
    add_operator,
    check_same_flow,
    edges_of,
    factory_label,
    outlets_of,
)
from streamiter.flow.event_time import check_event_time, checked_duration
from streamiter.flow.graph_checks import (
    check_can_wait,
    check_choice,
    check_end_is_told,
    check_factory,
    check_field_or_function,
    check_nothing_is_late,
    check_seconds,
    check_tag,
)
from streamiter.flow.options import (
    ClockedJoinOptions,
    IntervalOptions,
    ProcessOptions,
    StepOptions,
    TableOptions,
    check_step_options,
    survives,
)
from streamiter.flow.stream import Stream
from streamiter.operators.functions import field_or_function
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.timed.aggregates import BY_NAME
from streamiter.operators.timed.as_of import AsOfJoin, TableHow
from streamiter.operators.timed.join_steps import JoinByClock, JoinSides, JoinTableAsOf, JoinTableNow, JoinWindowBefore
from streamiter.operators.timed.joining import IntervalJoin, JoinHow, OneToOneJoin, WindowJoin
from streamiter.operators.timed.kinds import Sliding, WindowKind
from streamiter.operators.timed.several_aggregates import Aggregates, AggregateSpec
from streamiter.values.numbers import whole_number
from streamiter.values.records import Key, OutputTag, Record
from streamiter.values.times import Seconds

T = TypeVar("T")
S = TypeVar("S")

Result = TypeVar("Result")
"""The type of the results of windows."""

TimeOf = Literal["event", "processing"]
"""Event time, or the time of the clock when a record arrives."""

# An interval may begin before the record or after it.
_ANY_S = -1e12


class WindowedStream(Generic[Result]):
    """A keyed stream in windows: :meth:`aggregate` says what is computed of each window."""

    def __init__(self, build: Callable[[Aggregates, StepOptions], Stream[Result]], options: StepOptions) -> None:
        """``build`` adds the step of an aggregate; ``options`` are those of the step, which may have no name yet."""
        self._build = build
        self._options = options

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise GraphError(
                f'{name}: expected a stream, given windows without an aggregate; write .aggregate("count") before '
                f".{name}(…), or another aggregate"
            )

    def aggregate(
        self, *one: AggregateSpec, name: AggregateSpec | None = None, **named: AggregateSpec
    ) -> Stream[Result]:
        """Emit the aggregate of each window: one, or several by name, whose values are in a dict then.

        An aggregate is ``"count"``, ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"first"``, ``"last"``,
        ``"collect"``, ``"profile"``, :func:`~streamiter.quantile`, or :func:`~streamiter.fold` with functions. It takes
        the record itself, or a value of the record: write a pair with the name of a field, or a function. ``name`` is
        the name of the step, if it is a text that is no aggregate.

        - Sums fold from left to right; sums of ints are exact. NaN makes sum, mean, min, max and quantiles NaN. None is
          refused, and aggregates of numbers refuse all other values: the record follows ``on_error``, and is in none of
          the aggregates.
        - ``first``, ``last`` and ``collect`` go by the time of the records, simultaneous ones by arrival.
        - ``profile`` is what numbers or texts were, None included, for :func:`~streamiter.learn.compare_profiles`.

        >>> from streamiter import Flow, tumbling
        >>> flow = Flow("per minute")
        >>> orders = [{"user": "ann", "at": 1.0, "price": 5}, {"user": "ann", "at": 59.0, "price": 7}]
        >>> timed = flow.from_items(orders).event_time("at", unit="s")
        >>> minutes = timed.key_by(lambda order: order["user"]).window(tumbling(60))
        >>> results = minutes.aggregate(orders="count", spent=("sum", "price")).collect()
        >>> flow.run().state, [(each.key, each.start, each.end, each.value) for each in results.items]
        ('finished', [('ann', 0, 60000, {'orders': 2, 'spent': 12})])
        """
        options = self._options
        if isinstance(name, str) and name not in BY_NAME:
            if (other := options.get("name")) is not None:
                raise GraphError(
                    f"step {other!r}: expected one name, in .window(…) or in .aggregate(…), given {name!r} in the "
                    "other; leave one of them out"
                )
            options = {**options, "name": name}
        elif name is not None:
            named = {"name": name, **named}
        try:
            aggregates = Aggregates.of(one, named)
        except ConfigurationError as error:
            raise GraphError(str(error)) from None
        return self._build(aggregates, options)


class KeyedJoins(Stream[Record], Generic[Key, Record]):
    """The part of a keyed stream that joins it with other streams."""

    def __init__(self, stream: Stream[Record], key_of: Callable[[Any], Key], *, whole_batches: bool = False) -> None:
        super().__init__(stream.flow, *outlets_of(stream.partitioned(ByKey(key_of, whole_batches))))
        self._key_of = key_of
        self._whole_batches = whole_batches

    @overload
    def interval_join(
        self, other: Stream[T], *, how: Literal["inner"] = "inner", **options: Unpack[IntervalOptions]
    ) -> Stream[tuple[Record, T]]: ...

    @overload
    def interval_join(
        self, other: Stream[T], *, how: Literal["left"], **options: Unpack[IntervalOptions]
    ) -> Stream[tuple[Record, T | None]]: ...

    @overload
    def interval_join(
        self, other: Stream[T], *, how: Literal["right"], **options: Unpack[IntervalOptions]
    ) -> Stream[tuple[Record | None, T]]: ...

    @overload
    def interval_join(
        self, other: Stream[T], *, how: JoinHow, **options: Unpack[IntervalOptions]
    ) -> Stream[tuple[Record | None, T | None]]: ...

    def interval_join(
        self,
        other: Stream[Any],
        *,
        lower_s: Seconds,
        upper_s: Seconds | None,
        how: JoinHow = "inner",
        one_to_one: bool = False,
        kept_max: int | None = None,
        time: TimeOf = "event",
        allowed_lateness_s: Seconds = 0.0,
        late: OutputTag | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[tuple[Any, Any]]:
        """Emit the pairs ``(left, right)`` of one key with ``left + lower_s ≤ right ≤ left + upper_s``, by timestamps.

        Both streams have keys; the bounds are inclusive and have any sign, and ``upper_s=None`` is no limit. A pair
        leaves when its second record arrives, with the greater timestamp. With ``how="left"`` (``"right"``, ``"full"``)
        a record that can have no partner any more is emitted with None.

        - ``one_to_one``: a record leaves with its first partner. A key has at most one waiting record of each side; a
          new one takes its place, and the earlier one leaves without a partner.
        - ``kept_max``: if more records wait in a subtask, the one whose wait would end first leaves without a partner.
        - ``time="event"``: both streams have event time. Records that come later than ``allowed_lateness_s`` behind the
          watermark are dropped, or go to the side output ``late``.
        - ``time="processing"``: a record has the time of the clock when it arrives, and of two records the one that
          arrives first is earlier. At the end of the input no partner can come any more.

        The guide: https://streamiter.github.io/streamiter/newest/joins.html

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
        upper = None if upper_s is None else checked_duration("upper_s", upper_s, label, _ANY_S)
        if upper is not None and lower > upper:
            raise GraphError(
                f"step {label!r}: expected lower_s of at most upper_s, given {lower_s} and {upper_s}; exchange them"
            )
        if kept_max is not None:
            kept_max = whole_number(f"step {label!r}: kept_max", kept_max, 1, error=GraphError)
        join, by_clock = OneToOneJoin if one_to_one else IntervalJoin, time == "processing"
        return self._joined_by_time(
            "interval_join",
            other,
            lambda: join(lower, upper, how, kept_max=kept_max, in_order=by_clock),
            options,
            how=how,
            time=time,
            allowed_lateness_s=allowed_lateness_s,
            late=late,
            order=None if by_clock or upper is None else "spans",
        )

    @overload
    def window_join(
        self,
        other: Stream[T],
        window: WindowKind,
        *,
        how: Literal["inner"] = "inner",
        **options: Unpack[ClockedJoinOptions],
    ) -> Stream[tuple[Record, T]]: ...

    @overload
    def window_join(
        self, other: Stream[T], window: WindowKind, *, how: Literal["left"], **options: Unpack[ClockedJoinOptions]
    ) -> Stream[tuple[Record, T | None]]: ...

    @overload
    def window_join(
        self, other: Stream[T], window: WindowKind, *, how: Literal["right"], **options: Unpack[ClockedJoinOptions]
    ) -> Stream[tuple[Record | None, T]]: ...

    @overload
    def window_join(
        self, other: Stream[T], window: WindowKind, *, how: JoinHow, **options: Unpack[ClockedJoinOptions]
    ) -> Stream[tuple[Record | None, T | None]]: ...

    def window_join(
        self,
        other: Stream[Any],
        window: WindowKind,
        *,
        how: JoinHow = "inner",
        time: TimeOf = "event",
        allowed_lateness_s: Seconds = 0.0,
        late: OutputTag | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[tuple[Any, Any]]:
        """Emit all pairs ``(left, right)`` of a key whose records are in one window, when the window is complete.

        A session spans the records of both streams. With ``how="left"`` (``"right"``, ``"full"``) the records of a
        window without any record of the other stream are emitted with None. The timestamp is the last millisecond of
        the window. With ``time="processing"`` the clock at the arrival of a record is its timestamp: nothing is late,
        and windows that are open at the end of the input are joined then.

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
        return self._joined_by_time(
            "window_join",
            other,
            lambda: WindowJoin(window, how),
            options,
            how=how,
            time=time,
            allowed_lateness_s=allowed_lateness_s,
            late=late,
        )

    @overload
    def join_table(
        self, table: Stream[T], *, how: Literal["inner"], value: None = None, **options: Unpack[TableOptions]
    ) -> Stream[tuple[Record, T]]: ...

    @overload
    def join_table(
        self, table: Stream[T], *, how: TableHow = "left", value: None = None, **options: Unpack[TableOptions]
    ) -> Stream[tuple[Record, T | None]]: ...

    @overload
    def join_table(
        self,
        table: Stream[T],
        *,
        how: Literal["inner"],
        value: Callable[[T], S | None],
        **options: Unpack[TableOptions],
    ) -> Stream[tuple[Record, S]]: ...

    @overload
    def join_table(
        self,
        table: Stream[T],
        *,
        how: TableHow = "left",
        value: Callable[[T], S | None],
        **options: Unpack[TableOptions],
    ) -> Stream[tuple[Record, S | None]]: ...

    @overload
    def join_table(
        self, table: Stream[T], *, how: TableHow = "left", value: str, **options: Unpack[TableOptions]
    ) -> Stream[tuple[Record, Any]]: ...

    def join_table(
        self,
        table: Stream[Any],
        *,
        how: TableHow = "left",
        value: str | Callable[[Any], Any] | None = None,
        time: TimeOf = "event",
        strict: bool = False,
        wait_for_table: bool = True,
        allowed_lateness_s: Seconds = 0.0,
        late: OutputTag | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[tuple[Any, Any]]:
        """Emit, for each record, the pair ``(record, value)`` with the value that the table has for the record's key.

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
        value_of = (lambda record: record) if value is None else field_or_function("join_table(value)", value)
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
        size_s: Seconds,
        *,
        allowed_lateness_s: Seconds = 0.0,
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

        def build(aggregates: Aggregates, options: StepOptions) -> Stream[tuple[Record, Any]]:
            return self._joined(
                "as_of_window",
                {"stream": self, "events": events},
                lambda *keys, **settings: JoinWindowBefore(size, aggregates, *keys, **settings),
                options,
                allowed_lateness_s=allowed_lateness_s,
                late=late,
            )

        return WindowedStream(build, options)

    # -- the steps ---------------------------------------------------------------------------------------

    def _joined_by_time(
        self,
        method: str,
        other: Stream[Any],
        make_join: Callable[[], IntervalJoin | WindowJoin],
        options: StepOptions,
        *,
        how: JoinHow,
        time: TimeOf,
        allowed_lateness_s: Seconds,
        late: OutputTag | None,
        order: Literal["spans"] | None = None,
    ) -> Stream[Any]:
        """Add a step that joins two sides: in event time, or by the clock, where nothing is late."""
        label = options.get("name") or method
        check_choice("how", how, get_args(JoinHow), step=label)
        check_choice("time", time, get_args(TimeOf), step=label)
        by_clock = time == "processing"
        if by_clock:
            check_nothing_is_late(late, allowed_lateness_s, step=label)
        step = JoinByClock if by_clock else JoinSides
        return self._joined(
            method,
            {"left": self, "right": other},
            lambda *keys, **settings: step(make_join(), *keys, **settings),
            options,
            allowed_lateness_s=None if by_clock else allowed_lateness_s,
            late=late,
            keeps_event_time=not by_clock,
            order=order,
        )

    def _joined(
        self,
        method: str,
        inputs: Mapping[str, Outlets],
        make: Callable[..., Any],
        options: StepOptions,
        *,
        allowed_lateness_s: Seconds | None = None,
        late: OutputTag | None = None,
        awaited_input: str | None = None,
        keeps_event_time: bool = True,
        order: Literal["spans"] | None = None,
    ) -> Stream[Any]:
        """Add a step that joins two keyed streams; in event time, if it has an allowed lateness."""
        check_step_options(method, options)
        label = options.get("name") or method
        keyed: dict[str, Outlets] = {}
        keys: list[Callable[[Any], Any]] = []
        settings: dict[str, Any] = {}
        for name, stream in inputs.items():
            if not isinstance(stream, KeyedJoins):
                raise GraphError(
                    f"step {label!r}: expected a stream with keys as its input {name!r}, given {shortened(stream)}; "
                    "write other.key_by(f)"
                )
            check_same_flow(self, stream, method)
            if allowed_lateness_s is not None:
                check_event_time(stream, method)
            keys.append(record_key(stream, method))
            keyed[name] = tolerant(stream, options)
        if allowed_lateness_s is not None:
            lateness_ms = checked_duration("allowed_lateness_s", allowed_lateness_s, label)
            settings |= {"lateness_ms": lateness_ms, "late": check_tag(late, step=label)}
        if awaited_input is not None:
            table = edges_of(keyed[awaited_input])
            check_end_is_told(table, step=label)
            if self._flow.graph.loop is None:  # In a loop the inboxes may set aside what is not wanted.
                check_can_wait(edges_of(self), table, self._flow.steps, step=label)
        factory: OperatorFactory = lambda: make(*keys, **settings)  # noqa: E731
        output = add_next_step(
            keyed, method, factory, options, awaited_input=awaited_input, keeps_event_time=keeps_event_time, order=order
        )
        return Stream(self._flow, output)


def has_record_keys(stream: KeyedJoins[Any, Any]) -> bool:
    """Return whether the keys are keys of single records."""
    return not stream._whole_batches


def tolerant(stream: KeyedJoins[Any, Record], options: StepOptions) -> Stream[Record]:
    """Return the stream to a keyed step.

    A step that survives refused records also receives records without a key.
    """
    receives_all = survives(options) and has_record_keys(stream)
    return stream.partitioned(ByKey(stream._key_of, stream._whole_batches, receives_all))


def record_key(stream: KeyedJoins[Key, Any], method: str) -> Callable[[Any], Key]:
    """Return the function that gives the key of a record."""
    if not has_record_keys(stream):
        raise GraphError(f"{method}: expected a stream keyed record by record, given key_by_batch; use key_by(f)")
    return stream._key_of


def add_keyed_operator(
    streams: Mapping[str, KeyedJoins[Any, Any]],
    factory: OperatorFactory,
    time_to_live_s: Seconds | None,
    options: ProcessOptions,
) -> Stream[Any]:
    """Add an operator of the user that has a state for each key of its inputs."""
    label = options.get("name") or factory_label(factory)
    check_factory(factory, list(streams), step=label, keyed=True)
    ttl_s = check_seconds(time_to_live_s, "time_to_live_s", "keep states for ever", step=label)
    keys = KeySelector({name: record_key(stream, "process") for name, stream in streams.items()}, ttl_s)
    inputs = {name: tolerant(stream, options) for name, stream in streams.items()}
    return Stream(next(iter(streams.values())).flow, add_operator(inputs, factory, options, keys))
