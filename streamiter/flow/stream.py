"""The Stream: what a step gives to the next, and the methods that add steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from streamiter.checkpoints.keys import check_keys
from streamiter.errors import GraphError
from streamiter.flow.graph_checks import (
    check_codec,
    check_factory,
    check_field_or_function,
    check_function,
    check_input_names,
    check_name,
    check_parallelism,
    check_policy,
    check_seconds,
)
from streamiter.operators.collect import Collect, Collected
from streamiter.operators.filter import Filter
from streamiter.operators.filter_batch import FilterBatch
from streamiter.operators.flat_map import FlatMap
from streamiter.operators.join import Join
from streamiter.operators.keyed_reduce import KeyedReduce
from streamiter.operators.keyed_reduce_batch import KeyedReduceBatch
from streamiter.operators.map import Map
from streamiter.operators.map_batch import MapBatch
from streamiter.operators.mini_batch import MiniBatch
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.reduce_all import ReduceAll
from streamiter.operators.rejection import DEAD_LETTERS, RejectionPolicy, shortened
from streamiter.operators.sort import Sort
from streamiter.operators.stateful_map import StatefulMap
from streamiter.records import Batch, OutputTag
from streamiter.runtime.graph import SINGLE_INPUT, Edge, KeySelector, Step
from streamiter.runtime.partitioning import Broadcast, ByFunction, ByKey, Forward, Partitioning, Rebalance
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.topics.formats import Json
from streamiter.topics.topic import Encoder, Topic
from streamiter.topics.topic_sink import TopicSink
from streamiter.user_code import user_line

if TYPE_CHECKING:
    from streamiter.flow.flow import Flow

__all__ = ["ConnectedStreams", "KeyedStream", "Stream", "connect"]


@dataclass(frozen=True)
class _Outlet:
    """One output of one step, with the partitioning chosen for the next."""

    step: Step
    tag: OutputTag | None = None
    partitioning: Partitioning | None = None


@dataclass(frozen=True)
class _Options:
    """What every method that adds a step takes."""

    name: str | None
    parallelism: int | None
    on_error: RejectionPolicy = "fail"
    dead_letter: Topic | None = None
    shape: str = "operator"


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

    def __init__(self, flow: Flow, *outlets: Step | _Outlet) -> None:
        self._flow = flow
        self._outlets = tuple(
            outlet if isinstance(outlet, _Outlet) else _Outlet(outlet) for outlet in outlets
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
    def loop(self) -> Any:
        """For the engine: the iteration body it belongs to, or None."""
        return self._outlets[0].step.loop

    @property
    def steps(self) -> tuple[Step, ...]:
        """For the engine: the steps it comes from."""
        return tuple(outlet.step for outlet in self._outlets)

    def edges(self, input_name: str = SINGLE_INPUT) -> list[Edge]:
        """For the engine: the edges that bring it to a step."""
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
        check_function(f, "map")
        return self._add("map", lambda: Map(f), _Options(name, parallelism, on_error, dead_letter))

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
        check_function(predicate, "filter")
        return self._add(
            "filter", lambda: Filter(predicate), _Options(name, parallelism, on_error, dead_letter)
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
        check_function(f, "flat_map")
        return self._add("flat_map", lambda: FlatMap(f), _Options(name, parallelism, on_error, dead_letter))

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
        check_function(f, "map_batch")
        return self._add("map_batch", lambda: MapBatch(f), _Options(name, parallelism, on_error, dead_letter))

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
        check_function(f, "filter_batch")
        return self._add(
            "filter_batch", lambda: FilterBatch(f), _Options(name, parallelism, on_error, dead_letter)
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
        return self._add("batch", lambda: MiniBatch(n, timeout_s), _Options(name, parallelism))

    def process(
        self,
        factory: OperatorFactory,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """Your own :class:`~streamiter.Operator`: its class, or a callable that makes one for each subtask.

        A record for which its ``process`` raises ``RejectRecords([0], reason)`` follows ``on_error``; anything
        else that it raises ends the job, since the operator may have been in the middle of something.

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
        label = name or getattr(factory, "__name__", "process").replace("<lambda>", "process")
        check_factory(factory, [SINGLE_INPUT], step=label)
        return self._add(label, factory, _Options(name, parallelism, on_error, dead_letter))

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
        return Stream(self._flow, *(replace(outlet, tag=tag, partitioning=None) for outlet in self._outlets))

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
        check_function(f, "key_by")
        return KeyedStream(self._flow, f, self._partitioned(ByKey(f))._outlets)

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
        check_function(f, "key_by_batch")
        keyed = self._partitioned(ByKey(f, whole_batches=True))._outlets
        return KeyedStream(self._flow, f, keyed, whole_batches=True)

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
        check_function(f, "partition_by")
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
            self._check_same_flow(other, "union")
        outlets = [outlet for stream in (self, *others) for outlet in stream._outlets]
        return Stream(self._flow, *outlets)

    def _partitioned(self, partitioning: Partitioning) -> Stream:
        return Stream(self._flow, *(replace(outlet, partitioning=partitioning) for outlet in self._outlets))

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
        check_function(f, "reduce_all")
        self._check_bounded("reduce_all")
        return self._add("reduce_all", lambda: ReduceAll(f), _Options(name, 1, on_error, dead_letter))

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
            check_field_or_function(key, "sort")
        self._check_bounded("sort")
        options = _Options(name, 1, on_error, dead_letter)
        return self._add("sort", lambda: Sort(key, reverse=reverse), options)

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
            check_field_or_function(key, "join")
        self._check_bounded("join")
        other._check_bounded("join")
        options = _Options(name, 1, on_error, dead_letter)
        return connect(left=self, right=other)._add("join", lambda: Join(on), options)

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
        gives anything else, and those that cannot be encoded follow ``on_error``. Records are readable as
        soon as they are written, at least once across restarts. The topic must exist.

        >>> from streamiter import Flow, topic
        >>> flow = Flow("write")
        >>> clicks = flow.from_items([{"user": "ann", "page": "/"}])
        >>> clicks.sink(topic("memory://clicks"), key=lambda click: click["user"], name="write")
        """
        if not isinstance(topic, Topic):
            raise GraphError(f'sink: expected a topic, given {topic!r}; write .sink(topic("scheme://…"))')
        if delivery not in (None, "at_least_once"):
            raise GraphError(
                f'sink: expected delivery "at_least_once", given {delivery!r}; write that, or leave delivery out'
            )
        self._check_outside_loops("sink", name or topic.name)
        encoder = encode if encode is not None else Json()
        check_codec(encoder, "encode", step=name or f"sink {topic.name}")
        if key is not None:
            check_function(key, "sink key")
        self._flow.register_struct_of(encoder)
        self._add(
            f"sink {topic.name}",
            lambda: TopicSink(topic, encoder, key),
            _Options(name, parallelism, on_error, dead_letter, shape="sink"),
        )

    def publish_model(
        self,
        topic: Topic,
        *,
        model: str,
        format: Literal["auto", "json", "safetensors"] = "auto",  # noqa: A002 (the word for it)
        name: str | None = None,
    ) -> None:
        """Publish every record as an update of ``model``: an array, a dict of parameters, a ``ModelSnapshot``.

        Versions count up by one; a run that restores nothing begins the topic's next generation. Large
        models are written as safetensors (``format``: ``"auto"``, ``"json"`` or ``"safetensors"``). In one
        subtask, which counts. What is no model, or not finite, ends the job. See ``streamiter.models``.

        >>> import numpy as np
        >>> from streamiter import Flow, topic
        >>> flow = Flow("publish")
        >>> flow.from_items([np.zeros(10)]).publish_model(topic("memory://model-updates"), model="ctr")
        """
        if not isinstance(topic, Topic):
            raise GraphError(
                f'publish_model: expected a topic, given {topic!r}; write publish_model(topic("scheme://…"), model=…)'
            )
        if not isinstance(model, str) or not model:
            raise GraphError(
                f"publish_model: expected model= to be the name of the model, given {shortened(model)}; it is the key "
                "of the updates, under which readers ask for them"
            )
        if format not in ("auto", "json", "safetensors"):
            raise GraphError(
                f'publish_model: expected format "auto", "json" or "safetensors", given {format!r}; '
                "choose one of these"
            )
        self._check_outside_loops("publish_model", name or model)
        published = self._flow.published_models
        if (topic.url, model) in published:
            raise GraphError(
                f"publish_model: expected one publisher of the model {model!r} to {topic.name!r}, given a second "
                f"beside the one at {published[topic.url, model]}; give each model a name of its own"
            )
        published[topic.url, model] = user_line()
        # With all of its room, which most flows do without.
        from streamiter.models.publisher import ModelPublisher

        self._add(
            f"publish {model}",
            lambda: ModelPublisher(topic, model, format),
            _Options(name, 1, shape="sink"),
        )

    def to_dead_letters(self, topic: Topic) -> None:
        """For the engine: write :class:`DeadLetter` s to a topic."""
        if self.loop is not None:
            self.loop.leave(self, lambda outside: outside.to_dead_letters(topic))
            return
        self._add(
            f"dead letters of {self.name}",
            lambda: TopicSink(topic, DeadLetterEncoder()),
            _Options(None, 1, shape="sink"),
        )

    def collect(self, *, name: str | None = None, parallelism: int = 1) -> Collected:
        """Gather the records in memory; ``.items`` of what this gives holds them after the run.

        With several subtasks (``parallelism``) those of the first come first, and so on.

        >>> from streamiter import Flow
        >>> flow = Flow("three")
        >>> three = flow.from_items([1, 2, 3]).collect()
        >>> flow.run().state, three.items
        ('finished', [1, 2, 3])
        """
        self._check_outside_loops("collect", name or "collect")
        collected = Collected()
        self._add("collect", lambda: Collect(collected), _Options(name, parallelism, shape="sink"))
        return collected

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

    def _add(self, label: str, factory: OperatorFactory, options: _Options) -> Stream:
        return ConnectedStreams({SINGLE_INPUT: self})._add(label, factory, options)

    def _check_bounded(self, method: str) -> None:
        if not self.is_bounded and self._flow.loop is None:
            raise GraphError(
                f"{method}: expected a bounded stream, given {self.name!r}, which never ends; "
                'read the topic with stop="latest", or use key_by(…).reduce(…) for running results'
            )

    def _check_outside_loops(self, method: str, label: str) -> None:
        if self._flow.loop is not None or self.loop is not None:
            raise GraphError(
                f"step {label!r}: expected no {method} inside an iteration body, given one; return the stream "
                "in output_streams and put the sink behind the iteration"
            )

    def _check_same_flow(self, other: Stream, method: str) -> None:
        if other._flow is not self._flow:
            raise GraphError(
                f"{method}: expected streams of one flow, given {self.name!r} of flow {self._flow.name!r} and "
                f"{other.name!r} of flow {other._flow.name!r}"
            )


class KeyedStream(Stream):
    """A stream whose records have keys: the next step can keep state for each of them."""

    def __init__(
        self,
        flow: Flow,
        key_of: Callable[[Any], Any],
        outlets: Iterable[_Outlet],
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
        check_function(f, "reduce")
        key_of = self._key_of
        options = _Options(name, parallelism, on_error, dead_letter)
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
        check_function(f, "stateful_map")
        key_of = self._record_key("stateful_map")
        return self._add_keyed(
            "stateful_map",
            lambda: StatefulMap(key_of, f, initial, check_keys=check_keys),
            _Options(name, parallelism, on_error, dead_letter),
        )

    def process(
        self,
        factory: OperatorFactory,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
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
        label = name or getattr(factory, "__name__", "process").replace("<lambda>", "process")
        check_factory(factory, [SINGLE_INPUT], step=label, keyed=True)
        check_seconds(time_to_live_s, "time_to_live_s", "keep states for ever", step=label)
        keys = KeySelector(self._record_key("process"), time_to_live_s)
        options = _Options(name, parallelism, on_error, dead_letter)
        return self._add_keyed(label, factory, options, keys)

    def _add_keyed(
        self, label: str, factory: OperatorFactory, options: _Options, keys: KeySelector | None = None
    ) -> Stream:
        """A keyed step that goes on after a refused record is given those without a good key, too."""
        tolerant = (options.on_error, options.dead_letter) != ("fail", None) and not self._whole_batches
        by_key = ByKey(self._key_of, self._whole_batches, tolerant)
        return ConnectedStreams({SINGLE_INPUT: self._partitioned(by_key)})._add(label, factory, options, keys)

    def _record_key(self, method: str) -> Callable[[Any], Any]:
        if self._whole_batches:
            raise GraphError(
                f"{method}: expected a stream keyed record by record, given key_by_batch; use key_by(f)"
            )
        return self._key_of


class ConnectedStreams:
    """Several streams on their way to one step, each to an input of its own name."""

    def __init__(self, streams: dict[str, Stream]) -> None:
        self._streams = streams
        self._flow = next(iter(streams.values())).flow

    def process(
        self,
        factory: OperatorFactory,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
    ) -> Stream:
        """An operator with ``process_<input>(record, out)`` or ``process_<input>_batch(batch, out)`` each.

        Between inputs there is no order unless ``wanted_inputs()`` makes one; see :class:`~streamiter.Operator`,
        and :func:`connect` for an example.
        """
        label = name or getattr(factory, "__name__", "process").replace("<lambda>", "process")
        check_factory(factory, list(self._streams), step=label)
        return self._add(label, factory, _Options(name, parallelism, on_error, dead_letter))

    def _add(
        self, label: str, factory: OperatorFactory, options: _Options, keys: KeySelector | None = None
    ) -> Stream:
        check_name(options.name)
        named = options.name is not None
        label = options.name or label
        parallelism = check_parallelism(
            self._default_parallelism() if options.parallelism is None else options.parallelism, step=label
        )
        policy = check_policy(options.on_error, options.dead_letter, step=label)
        self._check_loops(label)
        step = Step(
            name=self._flow.unique_name(label, named=named),
            parallelism=parallelism,
            where=user_line(),
            factory=factory,
            inputs=self._edges(parallelism),
            keys=keys,
            policy=policy,
            named=named,
            loop=self._flow.loop,
            round_scope=getattr(self._flow.loop, "round_scope", None),
            bounded=all(stream.is_bounded for stream in self._streams.values()),
            stamped=all(step.stamped for stream in self._streams.values() for step in stream.steps),
            shape=options.shape,
        )
        stream = self._flow.add_step(step)
        if options.dead_letter is not None:
            stream.side_output(DEAD_LETTERS).to_dead_letters(options.dead_letter)
        return stream

    def _default_parallelism(self) -> int:
        straight = [
            outlet.step.parallelism
            for stream in self._streams.values()
            for outlet in stream._outlets
            if outlet.partitioning is None
        ]
        return max(straight, default=self._flow.parallelism)

    def _edges(self, parallelism: int) -> list[Edge]:
        edges = [edge for name, stream in self._streams.items() for edge in stream.edges(name)]
        for edge in edges:
            if isinstance(edge.partitioning, Forward) and edge.upstream.parallelism != parallelism:
                edge.partitioning = Rebalance()
        return edges

    def _check_loops(self, label: str) -> None:
        for stream in self._streams.values():
            if self._flow.loop is not None and stream.loop is self._flow.loop:
                self._flow.loop.check_streams(label, stream.edges())
            for step in stream.steps:
                if step.loop is self._flow.loop:
                    continue
                if self._flow.loop is None:
                    raise GraphError(
                        f"step {label!r}: expected a stream from outside the iteration, given {stream.name!r} "
                        "of its body; return it in output_streams and use what the iteration gives"
                    )
                raise GraphError(
                    f"step {label!r}: expected streams that come in through the body's arguments, given "
                    f"{stream.name!r} from outside; pass it as a data stream"
                )


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
        first._check_same_flow(stream, "connect")
    check_input_names(streams)
    return ConnectedStreams(dict(streams))
