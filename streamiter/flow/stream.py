"""The Stream: what a step gives to the next, and the methods that add steps.

What its methods have in common is in ``next_step``; what ``sink``, ``publish_model`` and ``collect`` do, in ``ends``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import (
    check_bounded,
    check_factory,
    check_field_or_function,
    check_function,
    check_input_names,
    check_same_flow,
    check_seconds,
)
from streamiter.flow.next_step import (
    ConnectedStreams,
    StepOptions,
    StepOutput,
    add_collect,
    add_dead_letters,
    add_next_step,
    add_publisher,
    add_sink,
    label_of,
    may_emit_unasked,
)
from streamiter.operators.bounded import Join, ReduceAll, Sort
from streamiter.operators.mini_batch import MiniBatch
from streamiter.operators.operator import OperatorFactory, Service
from streamiter.operators.rejection import RejectionPolicy
from streamiter.operators.source import Collected
from streamiter.operators.steps import Filter, FilterBatch, FlatMap, Map, MapBatch
from streamiter.records import Batch, OutputTag
from streamiter.runtime.graph import SINGLE_INPUT, Edge, Step
from streamiter.runtime.output import Broadcast, ByFunction, ByKey, Forward, Partitioning, Rebalance
from streamiter.topics.topic import Encoder, Topic

if TYPE_CHECKING:
    from streamiter.flow.flow import Flow
    from streamiter.flow.keyed_stream import KeyedStream

__all__ = ["Stream", "connect"]


class Stream:
    """Records on their way. Its methods add steps and give the stream of their output.

    Every method that adds a step takes ``name=`` (unique in the flow) and, but for those that bring all
    records together (``reduce_all``, ``sort``, ``join``, ``publish_model``), ``parallelism=``: by default
    that of this stream, and the flow's after ``broadcast``, ``rebalance``, ``partition_by`` and ``key_by``.
    Records keep their order within a subtask.

    ``on_error`` says what becomes of a record for which a function raises: ``"fail"`` ends the job, naming
    step and record; ``"skip"`` drops and counts it; with ``dead_letter=topic(…)`` it is written there.
    Functions are plain functions: what must be awaited belongs into an :class:`~streamiter.Operator`.

    Raises GraphError, with the line, for what cannot run.

    >>> from streamiter import Flow
    >>> flow = Flow("even squares")
    >>> numbers = flow.from_items(range(5))
    >>> even = numbers.map(lambda x: x * x).filter(lambda x: x % 2 == 0, name="even").collect()
    >>> flow.run().step("even").records_in, even.items
    (5, [0, 4, 16])
    """

    def __init__(self, flow: Flow, *outlets: Step | StepOutput) -> None:
        self._flow = flow
        self._outlets = tuple(
            outlet if isinstance(outlet, StepOutput) else StepOutput(outlet) for outlet in outlets
        )

    # -- properties --------------------------------------------------------------------------------------

    @property
    def flow(self) -> Flow:
        """The flow it belongs to."""
        return self._flow

    @property
    def name(self) -> str:
        """The step (or steps) it comes from."""
        return " ∪ ".join(outlet.step.name for outlet in self._outlets)

    @property
    def parallelism(self) -> int:
        """Subtasks of the step it comes from (of the widest one, for a union)."""
        return max(outlet.step.parallelism for outlet in self._outlets)

    @property
    def is_bounded(self) -> bool:
        """Whether it ends by itself."""
        return all(outlet.step.bounded for outlet in self._outlets)

    @property
    def emits_at_end(self) -> bool:
        """For the engine: whether its records come only at the end, in an iteration at that of the iteration."""
        return all(outlet.step.emits_at_end for outlet in self._outlets)

    @property
    def loop(self) -> Any:
        """For the engine: the iteration body it belongs to, or None."""
        return self._outlets[0].step.loop

    @property
    def steps(self) -> tuple[Step, ...]:
        """For the engine: the steps it comes from."""
        return tuple(outlet.step for outlet in self._outlets)

    def edges(self, input_name: str = SINGLE_INPUT) -> list[Edge]:
        """For the engine: the edges that bring it to a step. Raises GraphError where one of its steps is gone."""
        for step in self.steps:
            if step not in self._flow.graph:
                raise GraphError(
                    f"stream {self.name!r}: expected a step of flow {self._flow.name!r}, given {step.name!r}, which "
                    "was taken out again when the call that added it failed; make the stream again"
                )
        return [
            Edge(outlet.step, input_name, outlet.partitioning or Forward(), outlet.tag)
            for outlet in self._outlets
        ]

    def __repr__(self) -> str:
        return f"Stream({self.name!r}, parallelism {self.parallelism})"

    # -- record by record, batch by batch ----------------------------------------------------------------

    def map(
        self,
        f: Callable[[Any], Any],
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """``f(record)`` for each record.

        >>> from streamiter import Flow
        >>> flow = Flow("squares")
        >>> squares = flow.from_items([1, 2, "3", 4]).map(lambda x: x * x, on_error="skip").collect()
        >>> flow.run().step("map").rejected, squares.items
        (1, [1, 4, 16])
        """
        check_function(f, "map", ["record"], step=name)
        return self._add("map", lambda: Map(f), StepOptions(name, parallelism, on_error, dead_letter))

    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """The records for which ``predicate(record)`` is true.

        >>> from streamiter import Flow
        >>> flow = Flow("odd")
        >>> odd = flow.from_items(range(6)).filter(lambda x: x % 2).collect()
        >>> flow.run().state, odd.items
        ('finished', [1, 3, 5])
        """
        check_function(predicate, "filter", ["record"], step=name)
        return self._add(
            "filter", lambda: Filter(predicate), StepOptions(name, parallelism, on_error, dead_letter)
        )

    def flat_map(
        self,
        f: Callable[[Any], Iterable[Any]],
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """Each item of the iterable ``f(record)``, for each record: none, one or any number of them.

        The iterable may be a generator and of any length: it is consumed in pieces of 1024 items. (A text
        is an iterable of its characters.) A record that is skipped, or becomes a dead letter, because
        ``f`` or its iterable raises has none of its items emitted, unless it raises behind the first 1024.

        >>> from streamiter import Flow
        >>> flow = Flow("words")
        >>> words = flow.from_items(["to be", "", "or not"]).flat_map(str.split).collect()
        >>> flow.run().state, words.items
        ('finished', ['to', 'be', 'or', 'not'])
        """
        check_function(f, "flat_map", ["record"], step=name)
        return self._add(
            "flat_map", lambda: FlatMap(f), StepOptions(name, parallelism, on_error, dead_letter)
        )

    def map_batch(
        self,
        f: Callable[[Any], Batch],
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """``f(batch)`` for each transport batch (a list, array or ``Columns``), giving a batch of any length.

        Where transport batches are cut carries no meaning; ``batch(n)`` cuts for a purpose. ``f`` is never
        given an empty batch and must not change the one it is given. It may raise
        ``RejectRecords(indices, reason)`` for records that then follow ``on_error``, and is called again
        with the others; anything else it raises ends the job.

        >>> import numpy as np
        >>> from streamiter import Flow
        >>> flow = Flow("roots")
        >>> roots = flow.from_items(np.array([1.0, 4.0, 9.0])).map_batch(np.sqrt).collect()
        >>> flow.run().state, [float(root) for root in roots.items]
        ('finished', [1.0, 2.0, 3.0])
        """
        check_function(f, "map_batch", ["batch"], step=name)
        return self._add(
            "map_batch", lambda: MapBatch(f), StepOptions(name, parallelism, on_error, dead_letter)
        )

    def filter_batch(
        self,
        f: Callable[[Any], Any],
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """The records for which the boolean array (or list) ``f(batch)``, as long as the batch, is true.

        Records and errors as for :meth:`map_batch`.

        >>> from streamiter import Columns, Flow
        >>> flow = Flow("large orders")
        >>> orders = flow.from_items(Columns({"id": [1, 2, 3], "price": [5, 50, 500]}))
        >>> large = orders.filter_batch(lambda batch: batch["price"] > 10).collect()
        >>> flow.run().state, [int(order["id"]) for order in large.items]
        ('finished', [2, 3])
        """
        check_function(f, "filter_batch", ["batch"], step=name)
        return self._add(
            "filter_batch", lambda: FilterBatch(f), StepOptions(name, parallelism, on_error, dead_letter)
        )

    def batch(
        self,
        n: int,
        timeout_s: float | None = None,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """One record (a list, array or ``Columns``) for n records of each subtask, in order.

        Fewer than n are state; they go out at the end of the input, in an iteration also at the end of their
        epoch, and with a timeout ``timeout_s`` seconds after the first of them came.

        >>> from streamiter import Flow
        >>> flow = Flow("pairs")
        >>> pairs = flow.from_items([1, 2, 3, 4, 5]).batch(2).collect()
        >>> flow.run().state, pairs.items
        ('finished', [[1, 2], [3, 4], [5]])
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise GraphError(
                f"step {name or 'batch'!r}: expected a number of records of at least 1, given {n!r}; "
                "use a whole number"
            )
        check_seconds(timeout_s, "timeout_s", "wait for ever", step=name or "batch")
        return self._add("batch", lambda: MiniBatch(n, timeout_s), StepOptions(name, parallelism))

    def process(
        self,
        factory: OperatorFactory,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
        parameter_server: Service | None = None,
    ) -> Stream:
        """Your own :class:`~streamiter.Operator`: its class, or a callable that makes one for each subtask.

        A record for which its ``process`` raises ``RejectRecords([0], reason)`` follows ``on_error``; anything
        else that it raises ends the job, since the operator may have been in the middle of something.

        With ``parameter_server=`` each subtask is a worker of that server: ``context.parameter_server`` is its client,
        and the server's state is part of the flow's checkpoints. The worker leaves when its input ends.

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
        label = name or label_of(factory)
        check_factory(factory, [SINGLE_INPUT], step=label)
        options = StepOptions(name, parallelism, on_error, dead_letter, parameter_server)
        inputs = {SINGLE_INPUT: self}
        return add_next_step(inputs, label, factory, options, emits_unasked=may_emit_unasked(factory))

    def side_output(self, tag: OutputTag) -> Stream:
        """What the step before emits with ``out.emit(record, tag=tag)``; nothing else reads it.

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

    # -- partitioning ------------------------------------------------------------------------------------

    def key_by(self, f: Callable[[Any], Any]) -> KeyedStream:
        """Records of the same key ``f(record)`` to the same subtask: an int, str, bytes or a tuple of these.

        The stream it gives has the steps that keep a state for each key: ``reduce``, ``stateful_map`` and
        ``process`` with ``context.key`` and ``context.state``. A record for which ``f`` raises, or gives
        what cannot be a key (a float, None), follows the ``on_error`` of these; before any other step it
        ends the job where there are several subtasks.

        >>> from streamiter import Flow
        >>> flow = Flow("clicks by user")
        >>> clicks = flow.from_items([("ann", 1), ("bo", 5), ("ann", 2)])
        >>> totals = clicks.key_by(lambda click: click[0]).reduce(lambda a, b: (a[0], a[1] + b[1])).collect()
        >>> flow.run().state, totals.items
        ('finished', [('ann', 1), ('bo', 5), ('ann', 3)])
        """
        check_function(f, "key_by", ["record"])
        return self._flow.keyed_stream(f, self._partitioned(ByKey(f))._outlets)

    def key_by_batch(self, f: Callable[[Any], Any]) -> KeyedStream:
        """The same with ``f(batch)`` giving an array of ints, texts or bytes: a key for each record.

        Only ``reduce`` with a numpy ufunc keeps a state for such keys.

        >>> import numpy as np
        >>> from streamiter import Flow
        >>> flow = Flow("sums by parity")
        >>> numbers = flow.from_items(np.array([1, 2, 3, 4]))
        >>> sums = numbers.key_by_batch(lambda batch: batch % 2).reduce(np.add).collect()
        >>> flow.run().state, [int(total) for total in sums.items]
        ('finished', [1, 2, 4, 6])
        """
        check_function(f, "key_by_batch", ["batch"])
        keyed = self._partitioned(ByKey(f, whole_batches=True))._outlets
        return self._flow.keyed_stream(f, keyed, whole_batches=True)

    def broadcast(self) -> Stream:
        """Every record to every subtask of the next step.

        >>> from streamiter import Flow
        >>> flow = Flow("to all")
        >>> copies = flow.from_items([7]).broadcast().map(lambda x: x, parallelism=3).collect()
        >>> flow.run().state, copies.items
        ('finished', [7, 7, 7])
        """
        return self._partitioned(Broadcast())

    def rebalance(self) -> Stream:
        """Records to the subtasks of the next step in turn, so that all have as many to do."""
        return self._partitioned(Rebalance())

    def partition_by(self, f: Callable[[Any], int]) -> Stream:
        """Each record to the subtask ``f(record)`` (a whole number) modulo their number.

        What ``f`` raises ends the job, naming the record.
        """
        check_function(f, "partition_by", ["record"])
        return self._partitioned(ByFunction(f))

    def union(self, *others: Stream) -> Stream:
        """Records of this stream and the others, each in its own order and in any order between them.

        It ends when all of them have.

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
        outlets = [outlet for stream in (self, *others) for outlet in stream._outlets]
        return Stream(self._flow, *outlets)

    def _partitioned(self, partitioning: Partitioning) -> Stream:
        return Stream(self._flow, *(outlet._replace(partitioning=partitioning) for outlet in self._outlets))

    # -- bounded input -----------------------------------------------------------------------------------

    def reduce_all(
        self,
        f: Callable[[Any, Any], Any],
        *,
        name: str | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """At the end of the (bounded) input, all records reduced to one: ``f(f(f(a, b), c), d)``.

        Of no records, nothing. ``f`` must change neither argument. In one subtask; where several bring the
        records their order is any, so ``f`` should not depend on it.

        >>> from streamiter import Flow
        >>> flow = Flow("largest")
        >>> largest = flow.from_items([3, 9, 4]).reduce_all(max).collect()
        >>> flow.run().state, largest.items
        ('finished', [9])
        """
        check_function(f, "reduce_all", ["result", "record"], step=name)
        check_bounded(self, "reduce_all")
        options = StepOptions(name, 1, on_error, dead_letter)
        return self._add("reduce_all", lambda: ReduceAll(f), options, waits_for_end=True)

    def sort(
        self,
        key: str | Callable[[Any], Any] | None = None,
        *,
        reverse: bool = False,
        name: str | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """At the end of the (bounded) input, all records in ascending order; equal ones as they came.

        ``key`` is a function, or the name of a field. In one subtask, which holds all records in memory.

        >>> from streamiter import Flow
        >>> flow = Flow("by age")
        >>> people = flow.from_items([{"name": "ann", "age": 41}, {"name": "bo", "age": 7}])
        >>> sorted_people = people.sort("age").collect()
        >>> flow.run().state, [person["name"] for person in sorted_people.items]
        ('finished', ['bo', 'ann'])
        """
        if key is not None:
            check_field_or_function(key, "sort", step=name)
        check_bounded(self, "sort")
        options = StepOptions(name, 1, on_error, dead_letter)
        return self._add("sort", lambda: Sort(key, reverse=reverse), options, waits_for_end=True)

    def join(
        self,
        other: Stream,
        on: str | Callable[[Any], Any] | tuple[Any, Any],
        *,
        name: str | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """At the end of both (bounded) inputs, pairs ``(left, right)`` whose keys are equal.

        ``on`` is a field's name, a key function, or a pair of these for left and right. In one subtask, which
        holds all records in memory.

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
        if isinstance(on, tuple) and len(on) != 2:
            raise GraphError(
                f"join: expected a field's name, a function or a pair of these, given {on!r}; "
                'write on="id", or on=("user_id", "id") for left and right'
            )
        for key in on if isinstance(on, tuple) else (on,):
            check_field_or_function(key, "join", step=name)
        check_same_flow(self, other, "join")
        check_bounded(self, "join")
        check_bounded(other, "join")
        options = StepOptions(name, 1, on_error, dead_letter)
        sides = {"left": self, "right": other}
        return add_next_step(sides, "join", lambda: Join(on), options, waits_for_end=True)

    # -- ends --------------------------------------------------------------------------------------------

    def sink(
        self,
        topic: Topic,
        *,
        encode: Encoder | None = None,
        key: Callable[[Any], bytes | str | None] | None = None,
        delivery: Literal["at_least_once"] | None = None,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> None:
        """Write the records to a topic, encoded with ``encode`` (``Json()`` unless said otherwise).

        ``key(record)`` gives the topic's key: bytes, str (as UTF-8) or None. Records for which it raises, or
        gives anything else, and those that cannot be encoded follow ``on_error``. In a job with checkpoints,
        records become readable with the checkpoint after them, exactly once; ``delivery="at_least_once"`` makes
        them readable as soon as they are written, as without checkpoints, and some come twice after a restart.
        The topic must exist.

        >>> from streamiter import Flow, topic
        >>> flow = Flow("write")
        >>> clicks = flow.from_items([{"user": "ann", "page": "/"}])
        >>> clicks.sink(topic("memory://clicks"), key=lambda click: click["user"], name="write")
        """
        options = StepOptions(name, parallelism, on_error, dead_letter)
        add_sink(self, topic, encode, key, delivery, options)

    def publish_model(
        self,
        topic: Topic,
        *,
        model: str,
        format: Literal["auto", "json", "safetensors"] = "auto",  # noqa: A002 (the word for it)
        delivery: Literal["at_least_once"] | None = None,
        name: str | None = None,
    ) -> None:
        """Publish every record as an update of ``model``: an array, a dict of parameters, a ``ModelSnapshot``.

        Versions count up by one; a run that restores nothing begins the topic's next generation. Large
        models are written as safetensors (``format``: ``"auto"``, ``"json"`` or ``"safetensors"``). In one
        subtask, which counts. What is no model, or not finite, ends the job. ``delivery`` as in :meth:`sink`.
        See ``streamiter.models``.

        >>> import numpy as np
        >>> from streamiter import Flow, topic
        >>> flow = Flow("publish")
        >>> flow.from_items([np.zeros(10)]).publish_model(topic("memory://model-updates"), model="ctr")
        """
        add_publisher(self, topic, model, format, delivery, StepOptions(name, parallelism=1))

    def to_dead_letters(self, topic: Topic) -> None:
        """For the engine: write :class:`DeadLetter` s to a topic."""
        add_dead_letters(self, topic)

    def collect(self, *, name: str | None = None, parallelism: int = 1) -> Collected:
        """Gather the records in memory; ``.items`` of what this gives holds them after the run.

        With several subtasks (``parallelism``) those of the first come first, and so on.

        >>> from streamiter import Flow
        >>> flow = Flow("three")
        >>> three = flow.from_items([1, 2, 3]).collect()
        >>> flow.run().state, three.items
        ('finished', [1, 2, 3])
        """
        return add_collect(self, StepOptions(name, parallelism))

    # -- inside ------------------------------------------------------------------------------------------

    def reduce(self, *_: Any, **__: Any) -> Stream:
        """Of a stream with keys only: raises GraphError."""
        raise self._without_keys("reduce")

    def stateful_map(self, *_: Any, **__: Any) -> Stream:
        """Of a stream with keys only: raises GraphError."""
        raise self._without_keys("stateful_map")

    def _without_keys(self, method: str) -> GraphError:
        return GraphError(
            f"{method}: expected a stream with keys, given {self.name!r} without; put .key_by(f) right before "
            f".{method}(…), or use reduce_all(f) for one result of all records"
        )

    def _add(
        self, label: str, factory: OperatorFactory, options: StepOptions, *, waits_for_end: bool = False
    ) -> Stream:
        return add_next_step({SINGLE_INPUT: self}, label, factory, options, waits_for_end=waits_for_end)


def connect(**streams: Stream) -> ConnectedStreams:
    """Bring several streams to one step, each under the name of an input.

    A name is part of that of a method, so ``input``, ``batch`` and what ends in ``_batch`` are none.

    >>> from streamiter import Flow, Operator
    >>> class Tagged(Operator):
    ...     def process_left(self, record, out):
    ...         out.emit(("left", record))
    ...     def process_right(self, record, out):
    ...         out.emit(("right", record))
    >>> flow = Flow("two inputs")
    >>> both = connect(left=flow.from_items([1]), right=flow.from_items([2])).process(Tagged).collect()
    >>> statistics = flow.run()
    >>> sorted(both.items)
    [('left', 1), ('right', 2)]
    """
    if not streams:
        raise GraphError("connect: expected at least one stream, given none; write connect(name=stream)")
    first = next(iter(streams.values()))
    for name, stream in streams.items():
        if not isinstance(stream, Stream):
            raise GraphError(
                f"connect: expected streams, given {stream!r} for {name!r}; write connect({name}=stream)"
            )
        check_same_flow(first, stream, "connect")
    check_input_names(streams)
    return ConnectedStreams(dict(streams))
