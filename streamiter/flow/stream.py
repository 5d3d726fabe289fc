"""The Stream: the output of a step, with the methods that add the next step.

:class:`~streamiter.flow.keyed_stream.KeyedStream` is a stream whose records have keys. The methods check their own
arguments; ``add_next_step`` of :mod:`streamiter.flow.building` does the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, overload

from streamiter.engine.graph.graph import SINGLE_INPUT, Step
from streamiter.engine.graph.output import Broadcast, ByFunction, Partitioning, Rebalance
from streamiter.errors import GraphError
from streamiter.flow.building import (
    Outlets,
    StepOutput,
    add_collect,
    add_gathering,
    add_next_step,
    add_operator,
    add_publisher,
    add_sink,
    check_bounded,
    check_same_flow,
    outlets_of,
)
from streamiter.flow.event_time import add_event_time
from streamiter.flow.graph_checks import (
    check_count,
    check_field_or_function,
    check_on,
    check_retries,
    check_seconds,
    check_user_function,
)
from streamiter.flow.history import add_then
from streamiter.flow.options import GatheringOptions, ProcessOptions, StepOptions, check_step_options
from streamiter.operators.calls import MapAsync
from streamiter.operators.functions import field_or_function
from streamiter.operators.holding import Join, MiniBatch, ReduceAll, Sort
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.source import Collected
from streamiter.operators.steps import Filter, FilterBatch, FlatMap, Map, MapBatch
from streamiter.topics.record_functions import HeadersFunction, KeyFunction, TimestampFunction
from streamiter.topics.topic import Encoder, Topic
from streamiter.values.records import Batch, OutputTag, Record
from streamiter.values.times import Seconds, TimeUnit

if TYPE_CHECKING:
    from streamiter.flow.flow import Flow
    from streamiter.flow.keyed_stream import KeyedStream


T = TypeVar("T")
S = TypeVar("S")
K = TypeVar("K")


class Stream(Outlets, Generic[Record]):
    """The records that a step emits. The methods of a stream add steps and return the stream of their output.

    A method that adds a step takes these options:

    - ``name=``: the name of the step, unique in the flow.
    - ``parallelism=``: the number of subtasks. The default is the parallelism of this stream; behind ``broadcast``,
      ``rebalance``, ``partition_by`` and ``key_by`` it is the parallelism of the flow. Steps that bring all records
      together (``reduce_all``, ``sort``, ``join``, ``publish_model``) have one subtask and no such option.
    - ``on_error=``: what happens to a record for which a function raises. ``"fail"`` ends the job, and the error names
      the step and the record; ``"skip"`` drops and counts the record.
    - ``dead_letter=topic(…)``: such records are written to this topic instead.

    Records keep their order within a subtask. Functions are plain functions: code that awaits belongs in ``map_async``
    or in an :class:`~streamiter.Operator`.

    Raises GraphError, with the user's line, for a step that cannot run, and TypeError for an option that the step does
    not have.

    >>> from streamiter import Flow
    >>> flow = Flow("even squares")
    >>> numbers = flow.from_items(range(5))
    >>> even = numbers.map(lambda x: x * x).filter(lambda x: x % 2 == 0, name="even").collect()
    >>> flow.run().step("even").records_in, even.items
    (5, [0, 4, 16])
    """

    def __init__(self, flow: Flow, *outlets: Step | StepOutput) -> None:
        super().__init__(flow, *outlets)
        self._flow = flow

    @property
    def flow(self) -> Flow:
        """The flow that contains the stream."""
        return self._flow

    def __repr__(self) -> str:
        return f"Stream({self.name!r}, parallelism {self.parallelism})"

    # -- record by record, batch by batch ----------------------------------------------------------------

    def map(self, f: Callable[[Record], T], **options: Unpack[StepOptions]) -> Stream[T]:
        """Emit ``f(record)`` for each record.

        >>> from streamiter import Flow
        >>> flow = Flow("squares")
        >>> squares = flow.from_items([1, 2, "3", 4]).map(lambda x: x * x, on_error="skip").collect()
        >>> flow.run().step("map").rejected, squares.items
        (1, [1, 4, 16])
        """
        check_user_function(f, "map", ["record"], step=options.get("name"))
        return self._add("map", partial(Map, f), options)

    def map_async(
        self,
        f: Callable[[Record], Awaitable[T]],
        concurrency: int = 100,
        *,
        ordered: bool = True,
        timeout_s: Seconds | None = None,
        retries: int = 0,
        backoff_s: Seconds = 0.1,
        backoff_max_s: Seconds = 30.0,
        seed: int = 0,
        **options: Unpack[StepOptions],
    ) -> Stream[T]:
        """Emit ``await f(record)`` for each record, such as the answer of a service to a request.

        Each subtask makes at most ``concurrency`` calls at a time. Results keep the order of the records; with
        ``ordered=False`` they leave as they come, within their epoch (then two runs of a synchronous loop may differ
        in the last bits). A call that takes longer than ``timeout_s`` is cancelled. A call that fails is made again, up
        to ``retries`` times: after ``backoff_s``, then twice that time and so on, up to ``backoff_max_s``, each
        shortened at random (from ``seed``) to at least half. If the last call fails, or any raises ``RejectRecords``,
        the record follows ``on_error``.

        A checkpoint waits for no call: the records in flight are part of it, and their calls are made again after a
        restore. So the service may receive a record twice, and each result is emitted once.

        >>> import asyncio
        >>> from streamiter import Flow
        >>> async def ask(word):
        ...     await asyncio.sleep(0.01 / len(word))
        ...     return word.upper()
        >>> flow = Flow("answers")
        >>> answers = flow.from_items(["a", "bcd"]).map_async(ask, timeout_s=5, retries=2).collect()
        >>> flow.run().state, answers.items
        ('finished', ['A', 'BCD'])
        """
        step = options.get("name") or "map_async"
        check_user_function(
            f, "map_async", ["record"], step=options.get("name"), expected="a coroutine function", is_awaited=True
        )
        check_count(concurrency, "concurrency", step=step)
        timeout_s = check_seconds(timeout_s, "timeout_s", "wait for ever", step=step)
        backoff_s, backoff_max_s = check_retries(retries, backoff_s, backoff_max_s, seed, step=step)
        make = partial(
            MapAsync,
            f,
            concurrency,
            ordered=ordered,
            timeout_s=timeout_s,
            retries=retries,
            backoff_s=backoff_s,
            backoff_max_s=backoff_max_s,
            seed=seed,
        )
        return self._add("map_async", make, options)

    def filter(self, predicate: Callable[[Record], Any], **options: Unpack[StepOptions]) -> Stream[Record]:
        """Emit the records for which ``predicate(record)`` is true.

        >>> from streamiter import Flow
        >>> flow = Flow("odd")
        >>> odd = flow.from_items(range(6)).filter(lambda x: x % 2).collect()
        >>> flow.run().state, odd.items
        ('finished', [1, 3, 5])
        """
        check_user_function(predicate, "filter", ["record"], step=options.get("name"))
        return self._add("filter", lambda: Filter(predicate), options)

    def flat_map(self, f: Callable[[Record], Iterable[T]], **options: Unpack[StepOptions]) -> Stream[T]:
        """Emit each item of the iterable ``f(record)``, for each record: any number of items, or none.

        The iterable may be a generator and of any length: the step reads it in pieces of 1024 items. (A text is an
        iterable of its characters.) If ``f`` or its iterable raises and the record is skipped or becomes a dead letter,
        none of its items is emitted, unless the iterable raises behind the first 1024.

        >>> from streamiter import Flow
        >>> flow = Flow("words")
        >>> words = flow.from_items(["to be", "", "or not"]).flat_map(str.split).collect()
        >>> flow.run().state, words.items
        ('finished', ['to', 'be', 'or', 'not'])
        """
        check_user_function(f, "flat_map", ["record"], step=options.get("name"))
        return self._add("flat_map", partial(FlatMap, f), options)

    def map_batch(self, f: Callable[[Any], Batch], **options: Unpack[StepOptions]) -> Stream:
        """Emit the records of ``f(batch)`` for each transport batch: a list, array or ``Columns`` of any length.

        The engine cuts transport batches as it likes; ``batch(n)`` cuts for a purpose. ``f`` never receives an empty
        batch and must not change its argument. ``f`` may raise ``RejectRecords(indices, reason)``: these records follow
        ``on_error``, and ``f`` is called again with the others. Any other exception ends the job.

        >>> import numpy as np
        >>> from streamiter import Flow
        >>> flow = Flow("roots")
        >>> roots = flow.from_items(np.array([1.0, 4.0, 9.0])).map_batch(np.sqrt).collect()
        >>> flow.run().state, [float(root) for root in roots.items]
        ('finished', [1.0, 2.0, 3.0])
        """
        check_user_function(f, "map_batch", ["batch"], step=options.get("name"))
        return self._add("map_batch", partial(MapBatch, f), options)

    def filter_batch(self, f: Callable[[Any], Any], **options: Unpack[StepOptions]) -> Stream[Record]:
        """Emit the records for which the boolean array (or list) ``f(batch)``, as long as the batch, is true.

        Batches and errors are handled as in :meth:`map_batch`.

        >>> from streamiter import Columns, Flow
        >>> flow = Flow("large orders")
        >>> orders = flow.from_items(Columns({"id": [1, 2, 3], "price": [5, 50, 500]}))
        >>> large = orders.filter_batch(lambda batch: batch["price"] > 10).collect()
        >>> flow.run().state, [int(order["id"]) for order in large.items]
        ('finished', [2, 3])
        """
        check_user_function(f, "filter_batch", ["batch"], step=options.get("name"))
        return self._add("filter_batch", lambda: FilterBatch(f), options)

    def batch(
        self, n: int, timeout_s: Seconds | None = None, *, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Emit one record (a list, array or ``Columns``) for n records of each subtask, in their order.

        Fewer than n records are kept as state. They are emitted at the end of the input, in an iteration also at the
        end of their epoch, and with ``timeout_s`` this many seconds after the first of these records has arrived.

        >>> from streamiter import Flow
        >>> flow = Flow("pairs")
        >>> pairs = flow.from_items([1, 2, 3, 4, 5]).batch(2).collect()
        >>> flow.run().state, pairs.items
        ('finished', [[1, 2], [3, 4], [5]])
        """
        check_count(n, "number of records", step=name or "batch")
        waits_s = check_seconds(timeout_s, "timeout_s", "wait for ever", step=name or "batch")
        return self._add("batch", lambda: MiniBatch(n, waits_s), {"name": name, "parallelism": parallelism})

    def process(self, factory: OperatorFactory, **options: Unpack[ProcessOptions]) -> Stream:
        """Add your own :class:`~streamiter.Operator`: its class, or a callable that makes one for each subtask.

        A record for which the operator's ``process`` raises ``RejectRecords([0], reason)`` follows ``on_error``. Any
        other exception ends the job, because the operator may have changed a part of its state.

        With ``parameter_server=`` each subtask is a worker of that server: ``context.parameter_server`` is the worker's
        client, and the server's state is part of the flow's checkpoints. The worker leaves when its input ends.

        >>> from streamiter import Flow, Operator
        >>> class Differences(Operator):
        ...     last = None
        ...     def process(self, record, out):
        ...         if self.last is not None:
        ...             out.emit(record - self.last)
        ...         self.last = record
        >>> flow = Flow("differences")
        >>> differences = flow.from_items([1, 4, 9, 16]).process(Differences).collect()
        >>> flow.run().state, differences.items
        ('finished', [3, 5, 7])
        """
        return Stream(self._flow, add_operator({SINGLE_INPUT: self}, factory, options))

    def side_output(self, tag: OutputTag) -> Stream:
        """Return the records that the step emits with ``out.emit(record, tag=tag)``; other readers do not receive them.

        >>> from streamiter import Flow, Operator, OutputTag
        >>> LATE = OutputTag("late")
        >>> class Sieve(Operator):
        ...     def process(self, record, out):
        ...         out.emit(record, tag=LATE if record < 0 else None)
        >>> flow = Flow("late ones")
        >>> sieved = flow.from_items([1, -2, 3]).process(Sieve)
        >>> in_time, late = sieved.collect(), sieved.side_output(LATE).collect()
        >>> flow.run().state, in_time.items, late.items
        ('finished', [1, 3], [-2])
        """
        if not isinstance(tag, OutputTag):
            raise GraphError(f'side_output: expected an OutputTag, given {tag!r}; write OutputTag("{tag}")')
        return Stream(self._flow, *(outlet._replace(tag=tag, partitioning=None) for outlet in self._outlets))

    # -- event time --------------------------------------------------------------------------------------

    def event_time(
        self,
        of: str | Callable[[Record], Any] | None = None,
        *,
        unit: TimeUnit | None = None,
        out_of_orderness_s: Seconds = 0.0,
        idle_after_s: Seconds | None = 60.0,
        time_zone: str | None = None,
        when_idle: Literal["wait", "advance"] = "wait",
        check_unit: bool = True,
        max_ahead_s: Seconds | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[Record]:
        """Give each record a timestamp, and let the stream have event time: timers, windows and joins work by it.

        - ``of`` is the name of a field or column, or a function of the record. Right behind ``flow.source(topic)`` it
          may be left out: the time is the topic's timestamp of the record.
        - The time is a ``datetime64`` (UTC), a ``datetime`` (one without a time zone needs ``time_zone="Asia/Tokyo"``),
          a number in ``unit="s"``, ``"ms"``, ``"us"`` or ``"ns"`` since 1970 (a float only in seconds), or a text with
          ``unit="iso"``. A record without a valid time follows ``on_error``. If the first number of a subtask is a
          time of this century only in another unit, the job fails, unless ``check_unit=False``.
        - Records may arrive ``out_of_orderness_s`` later than the latest record of their partition. Those that come
          even later are *late*, and the steps that need event time say what happens to them.
        - A partition that is read to its end and brings nothing for ``idle_after_s`` does not hold back the others.
          When all are silent, time stops, or advances with the clock (``when_idle="advance"``).
        - ``max_ahead_s`` refuses times so far ahead of the clock. One such record would make all others late.

        A second ``event_time`` replaces the first one.

        The guide: https://streamiter.github.io/streamiter/newest/event-time.html

        >>> from streamiter import Flow, Operator
        >>> class Reminders(Operator):
        ...     def open(self, context):
        ...         self.context = context
        ...     def process(self, record, out):
        ...         self.context.set_event_timer(self.context.timestamp + 1_000, record["user"])
        ...     def on_event_timer(self, payload, out):
        ...         out.emit((self.context.event_time, payload))
        >>> flow = Flow("reminders")
        >>> visits = flow.from_items([{"user": "ann", "at": 1.5}, {"user": "bo", "at": 0.7}])
        >>> reminders = visits.event_time("at", unit="s").process(Reminders).collect()
        >>> flow.run().state, reminders.items
        ('finished', [(1700, 'bo'), (2500, 'ann')])
        """
        output = add_event_time(
            self, of, unit, out_of_orderness_s, idle_after_s, time_zone, when_idle, check_unit, max_ahead_s, options
        )
        return Stream(self._flow, output)

    # -- partitioning ------------------------------------------------------------------------------------

    @overload
    def key_by(self, f: str) -> KeyedStream[Any, Record]: ...

    @overload
    def key_by(self, f: Callable[[Record], K]) -> KeyedStream[K, Record]: ...

    def key_by(self, f: str | Callable[[Record], Any]) -> KeyedStream[Any, Record]:
        """Send records of the same key to the same subtask: ``f(record)``, or the field of that name.

        A key is an int, str, bytes or a tuple of these. The stream that is returned has the steps that keep a state for
        each key: ``reduce``, ``stateful_map`` and ``process`` with ``context.key`` and ``context.state``. If ``f``
        raises or returns something that cannot be a key (a float, None), the record follows the ``on_error`` of these
        steps; before any other step with several subtasks it ends the job.

        >>> from streamiter import Flow
        >>> flow = Flow("clicks by user")
        >>> clicks = flow.from_items([("ann", 1), ("bo", 5), ("ann", 2)])
        >>> totals = clicks.key_by(lambda click: click[0]).reduce(lambda a, b: (a[0], a[1] + b[1])).collect()
        >>> flow.run().state, totals.items
        ('finished', [('ann', 1), ('bo', 5), ('ann', 3)])
        """
        from streamiter.flow.keyed_stream import KeyedStream  # It derives from Stream.

        check_field_or_function(f, "key_by")
        return KeyedStream(self, field_or_function("key_by", f))

    def key_by_batch(self, f: Callable[[Any], Any]) -> KeyedStream[Any, Record]:
        """Send records of the same key to the same subtask: ``f(batch)`` returns an array with a key for each record.

        The keys are ints, texts or bytes. Only ``reduce`` with a numpy ufunc keeps a state for such keys.

        >>> import numpy as np
        >>> from streamiter import Flow
        >>> flow = Flow("sums by parity")
        >>> numbers = flow.from_items(np.array([1, 2, 3, 4]))
        >>> sums = numbers.key_by_batch(lambda batch: batch % 2).reduce(np.add).collect()
        >>> flow.run().state, [int(total) for total in sums.items]
        ('finished', [1, 2, 4, 6])
        """
        from streamiter.flow.keyed_stream import KeyedStream

        check_user_function(f, "key_by_batch", ["batch"])
        return KeyedStream(self, f, whole_batches=True)

    def broadcast(self) -> Stream[Record]:
        """Send every record to every subtask of the next step.

        >>> from streamiter import Flow
        >>> flow = Flow("to all")
        >>> copies = flow.from_items([7]).broadcast().map(lambda x: x, parallelism=3).collect()
        >>> flow.run().state, copies.items
        ('finished', [7, 7, 7])
        """
        return self.partitioned(Broadcast())

    def rebalance(self) -> Stream[Record]:
        """Send records to the subtasks of the next step in turn, so that all subtasks have the same amount of work."""
        return self.partitioned(Rebalance())

    def partition_by(self, f: Callable[[Record], int]) -> Stream[Record]:
        """Send each record to the subtask ``f(record)`` (a whole number) modulo the number of subtasks.

        An exception of ``f`` ends the job, and the error names the record.
        """
        check_user_function(f, "partition_by", ["record"])
        return self.partitioned(ByFunction(f))

    def union(self, *others: Stream[T]) -> Stream[Record | T]:
        """Bring the records of several streams together. Records of one stream keep their order.

        Records of different streams come in any order. The union ends when all its streams have ended.

        >>> from streamiter import Flow
        >>> flow = Flow("both")
        >>> both = flow.from_items([1, 2]).union(flow.from_items([3])).collect()
        >>> flow.run().state, sorted(both.items)
        ('finished', [1, 2, 3])
        """
        for other in others:
            if not isinstance(other, Stream):
                raise GraphError(f"union: expected streams, given {other!r}; write a.union(b, c)")
            check_same_flow(self, other, "union")
        outlets = [outlet for stream in (self, *others) for outlet in outlets_of(stream)]
        return Stream(self._flow, *outlets)

    def then(self, following: Stream[T], **options: Unpack[StepOptions]) -> Stream[Record | T]:
        """Emit the records of this stream, which ends, then those of ``following``: a history, and then a topic.

        Before the end of this stream in all subtasks, the sources of ``following`` read nothing; where they begin
        (``start=`` of ``flow.source``) is found at the first start. The switch is part of a checkpoint, so no record is
        read twice or left out. Steps behind keep their state; event time continues if both streams have it.

        >>> from streamiter import Flow, topic
        >>> flow = Flow("history first")
        >>> history, now = flow.from_items([3, 1]), flow.from_items([2])
        >>> both = history.then(now).collect()
        >>> flow.run().state, both.items
        ('finished', [3, 1, 2])
        """
        return Stream(self._flow, add_then(self, following, options))

    def partitioned(self, partitioning: Partitioning) -> Stream[Record]:
        return Stream(self._flow, *(outlet._replace(partitioning=partitioning) for outlet in self._outlets))

    # -- bounded input -----------------------------------------------------------------------------------

    def reduce_all(self, f: Callable[[Record, Record], Record], **options: Unpack[GatheringOptions]) -> Stream[Record]:
        """At the end of the (bounded) input, emit all records reduced to one: ``f(f(f(a, b), c), d)``.

        Without records, nothing is emitted. ``f`` must not change its arguments. The step has one subtask; if several
        subtasks send records to it, the records arrive in any order, so the result should not depend on the order.

        >>> from streamiter import Flow
        >>> flow = Flow("largest")
        >>> largest = flow.from_items([3, 9, 4]).reduce_all(max).collect()
        >>> flow.run().state, largest.items
        ('finished', [9])
        """
        check_user_function(f, "reduce_all", ["result", "record"], step=options.get("name"))
        check_bounded(self, "reduce_all")
        return Stream(self._flow, add_gathering({SINGLE_INPUT: self}, "reduce_all", lambda: ReduceAll(f), options))

    def sort(
        self,
        key: str | Callable[[Record], Any] | None = None,
        *,
        reverse: bool = False,
        **options: Unpack[GatheringOptions],
    ) -> Stream[Record]:
        """At the end of the (bounded) input, emit all records in ascending order; equal records keep their order.

        ``key`` is a function, or the name of a field. The step has one subtask, which holds all records in memory.

        >>> from streamiter import Flow
        >>> flow = Flow("by age")
        >>> people = flow.from_items([{"name": "ann", "age": 41}, {"name": "bo", "age": 7}])
        >>> sorted_people = people.sort("age").collect()
        >>> flow.run().state, [person["name"] for person in sorted_people.items]
        ('finished', ['bo', 'ann'])
        """
        if key is not None:
            check_field_or_function(key, "sort", step=options.get("name"))
        check_bounded(self, "sort")
        return Stream(
            self._flow, add_gathering({SINGLE_INPUT: self}, "sort", lambda: Sort(key, reverse=reverse), options)
        )

    def join(
        self, other: Stream[T], on: str | Callable[[Any], Any] | tuple[Any, Any], **options: Unpack[GatheringOptions]
    ) -> Stream[tuple[Record, T]]:
        """At the end of both (bounded) inputs, emit the pairs ``(left, right)`` whose keys are equal.

        ``on`` is the name of a field, a key function, or a pair of these for left and right. The step has one subtask,
        which holds all records in memory.

        >>> from streamiter import Flow
        >>> flow = Flow("names of visitors")
        >>> visits = flow.from_items([{"user": 7, "page": "/"}, {"user": 8, "page": "/a"}])
        >>> users = flow.from_items([{"id": 7, "name": "ann"}])
        >>> pairs = visits.join(users, on=("user", "id")).collect()
        >>> flow.run().state, pairs.items
        ('finished', [({'user': 7, 'page': '/'}, {'id': 7, 'name': 'ann'})])
        """
        if not isinstance(other, Stream):
            raise GraphError(f"join: expected a stream, given {other!r}; write left.join(right, on=…)")
        check_on(on, step=options.get("name"))
        check_same_flow(self, other, "join")
        check_bounded(self, "join")
        check_bounded(other, "join")
        return Stream(self._flow, add_gathering({"left": self, "right": other}, "join", lambda: Join(on), options))

    # -- ends --------------------------------------------------------------------------------------------

    def sink(
        self,
        topic: Topic,
        *,
        encode: Encoder | None = None,
        key: str | KeyFunction[Record] | None = None,
        value: str | Callable[[Record], Any] | None = None,
        headers: str | HeadersFunction[Record] | None = None,
        timestamp: str | TimestampFunction[Record] | None = None,
        delivery: Literal["at_least_once"] | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        """Write the records to a topic, which must exist, encoded with ``encode`` (the default is ``Json()``).

        ``key(record)`` returns the key in the topic: bytes, str (written as UTF-8) or None. ``value(record)`` returns
        what is encoded in place of the record; None writes a tombstone, with which compaction deletes the key.
        ``headers(record)`` returns a dict, or pairs of names and values (bytes or str). ``timestamp(record)`` returns
        milliseconds since 1970 as an int, an aware datetime or a ``datetime64`` in UTC; without it, a record has the
        time when it is written. Each may be the name of a field instead. A record follows ``on_error`` if one of them
        raises or returns anything else, or if the record cannot be encoded.

        In a job with checkpoints, the next checkpoint makes the records readable, exactly once.
        ``delivery="at_least_once"`` makes them readable at once, as in a job without checkpoints; after a restart some
        records are in the topic twice.

        >>> from streamiter import Flow, topic
        >>> flow = Flow("write")
        >>> clicks = flow.from_items([{"user": "ann", "page": "/"}])
        >>> clicks.sink(topic("memory://clicks"), key="user", name="write")
        """
        functions = {"key": key, "value": value, "headers": headers, "timestamp": timestamp}
        add_sink(self, topic, encode, functions, delivery, options)

    def publish_model(
        self,
        topic: Topic,
        *,
        model: str,
        format: Literal["auto", "json", "safetensors"] = "auto",  # noqa: A002 (the word for it)
        changes: bool = False,
        delivery: Literal["at_least_once"] | None = None,
        name: str | None = None,
    ) -> None:
        """Publish every record as an update of ``model``: an array, a dict of parameters, a ``ModelSnapshot``.

        Each update has the next version; a run that restores nothing begins the topic's next generation. Large models
        are written as safetensors, unless ``format`` says otherwise. The step has one subtask, which counts the
        versions. A record that is no model, or not finite, ends the job. :meth:`sink` describes ``delivery``. See
        ``streamiter.models``.

        With ``changes=True`` a version has only the difference to the version before it where that is smaller: the rows
        of arrays that changed. It is for large models of which little changes, such as networks with many features; the
        step keeps a copy of the parameters. Consumers must read format 4 of the updates.

        >>> import numpy as np
        >>> from streamiter import Flow, topic
        >>> flow = Flow("publish")
        >>> flow.from_items([np.zeros(10)]).publish_model(topic("memory://model-updates"), model="ctr")
        """
        add_publisher(self, topic, model, format, changes, delivery, name)

    def collect(self, *, name: str | None = None, parallelism: int = 1) -> Collected[Record]:
        """Gather the records in memory; after the run, ``.items`` of the result holds them.

        With several subtasks (``parallelism``) the records of the first subtask come first, and so on.

        >>> from streamiter import Flow
        >>> flow = Flow("three")
        >>> three = flow.from_items([1, 2, 3]).collect()
        >>> flow.run().state, three.items
        ('finished', [1, 2, 3])
        """
        return add_collect(self, name, parallelism)

    # -- steps with keys ---------------------------------------------------------------------------------

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from streamiter.flow.keyed_stream import missing_attribute

            raise missing_attribute(self, name)

    def _add(self, method: str, factory: OperatorFactory, options: StepOptions) -> Stream:
        check_step_options(method, options)
        return Stream(self._flow, add_next_step({SINGLE_INPUT: self}, method, factory, options))
