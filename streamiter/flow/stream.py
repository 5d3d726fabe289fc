"""The Stream: what a step gives to the next, and the methods that add steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from streamiter.checkpoints.keys import check_keys
from streamiter.errors import GraphError
from streamiter.flow.graph_checks import check_factory, check_parallelism, check_policy, user_line
from streamiter.models.formats import UpdateFormat
from streamiter.models.publisher import ModelPublisher
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
from streamiter.operators.rejection import DEAD_LETTERS, RejectionPolicy
from streamiter.operators.sort import Sort
from streamiter.operators.stateful_map import StatefulMap
from streamiter.records import Batch, OutputTag
from streamiter.runtime.graph import SINGLE_INPUT, Edge, KeySelector, Step
from streamiter.runtime.partitioning import Broadcast, ByFunction, ByKey, Forward, Partitioning, Rebalance
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.topics.formats import Json
from streamiter.topics.topic import Encoder, Topic
from streamiter.topics.topic_sink import TopicSink

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

    Every method that adds a step takes ``name=`` (unique in the flow) and ``parallelism=``: by default
    that of this stream, and the flow's after ``broadcast``, ``rebalance``, ``partition_by`` and ``key_by``.
    ``on_error="skip"`` or ``dead_letter=topic(…)`` say what becomes of records that the step refuses.
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
        """``f(record)`` for each record."""
        _check_callable(f, "map")
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
        """The records for which ``predicate(record)`` is true."""
        _check_callable(predicate, "filter")
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
        """All that ``f(record)`` gives, for each record."""
        _check_callable(f, "flat_map")
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

        Where transport batches are cut carries no meaning; ``batch(n)`` cuts for a purpose. ``f`` may
        raise ``RejectRecords(indices, reason)``.
        """
        _check_callable(f, "map_batch")
        return self._add("map_batch", lambda: MapBatch(f), _Options(name, parallelism, on_error, dead_letter))

    def filter_batch(
        self, f: Callable[[Any], Any], *, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """The records for which the boolean array ``f(batch)`` is true."""
        _check_callable(f, "filter_batch")
        return self._add("filter_batch", lambda: FilterBatch(f), _Options(name, parallelism))

    def batch(
        self,
        n: int,
        timeout_s: float | None = None,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """One record (a list, array or ``Columns``) for n records of each subtask.

        What is left goes out at the epoch's end, at the end of input, or ``timeout_s`` seconds after its
        first record.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise GraphError(
                f"step {name or 'batch'!r}: expected a number of records of at least 1, given {n!r}; "
                "use a whole number"
            )
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
        """Your own :class:`~streamiter.Operator`: its class, or a callable that makes one for each subtask."""
        label = name or getattr(factory, "__name__", "process").replace("<lambda>", "process")
        check_factory(factory, [SINGLE_INPUT], step=label)
        return self._add(label, factory, _Options(name, parallelism, on_error, dead_letter))

    def side_output(self, tag: OutputTag) -> Stream:
        """What the step before emits with ``out.emit(record, tag=tag)``."""
        if not isinstance(tag, OutputTag):
            raise GraphError(f'side_output: expected an OutputTag, given {tag!r}; write OutputTag("{tag}")')
        return Stream(self._flow, *(replace(outlet, tag=tag, partitioning=None) for outlet in self._outlets))

    # -- partitioning ------------------------------------------------------------------------------------

    def key_by(self, f: Callable[[Any], Any]) -> KeyedStream:
        """Records of the same key ``f(record)`` (int, str, bytes or a tuple of these) to the same subtask."""
        _check_callable(f, "key_by")
        return KeyedStream(self._flow, f, self._partitioned(ByKey(f))._outlets)

    def key_by_batch(self, f: Callable[[Any], Any]) -> KeyedStream:
        """The same with ``f(batch)`` giving an array of keys, one for each record."""
        _check_callable(f, "key_by_batch")
        keyed = self._partitioned(ByKey(f, whole_batches=True))._outlets
        return KeyedStream(self._flow, f, keyed, whole_batches=True)

    def broadcast(self) -> Stream:
        """Every record to every subtask of the next step."""
        return self._partitioned(Broadcast())

    def rebalance(self) -> Stream:
        """Records to the subtasks of the next step in turn."""
        return self._partitioned(Rebalance())

    def partition_by(self, f: Callable[[Any], int]) -> Stream:
        """Each record to the subtask ``f(record)`` modulo their number."""
        _check_callable(f, "partition_by")
        return self._partitioned(ByFunction(f))

    def union(self, *others: Stream) -> Stream:
        """Records of this stream and the others, in any order between them."""
        for other in others:
            if not isinstance(other, Stream):
                raise GraphError(f"union: expected streams, given {other!r}; write a.union(b, c)")
            self._check_same_flow(other, "union")
        outlets = [outlet for stream in (self, *others) for outlet in stream._outlets]
        return Stream(self._flow, *outlets)

    def _partitioned(self, partitioning: Partitioning) -> Stream:
        return Stream(self._flow, *(replace(outlet, partitioning=partitioning) for outlet in self._outlets))

    # -- bounded input -----------------------------------------------------------------------------------

    def reduce_all(self, f: Callable[[Any, Any], Any], *, name: str | None = None) -> Stream:
        """At the end of the (bounded) input, all records reduced to one with ``f(a, b)``."""
        _check_callable(f, "reduce_all")
        self._check_bounded("reduce_all")
        return self._add("reduce_all", lambda: ReduceAll(f), _Options(name, 1))

    def sort(self, key: Callable[[Any], Any] | None = None, *, name: str | None = None) -> Stream:
        """At the end of the (bounded) input, all records in order; equal ones as they came."""
        self._check_bounded("sort")
        return self._add("sort", lambda: Sort(key), _Options(name, 1))

    def join(self, other: Stream, on: Any, *, name: str | None = None) -> Stream:
        """At the end of both (bounded) inputs, pairs ``(left, right)`` whose keys are equal.

        ``on`` is a field's name, a key function, or a pair of these for left and right.
        """
        if not isinstance(other, Stream):
            raise GraphError(f"join: expected a stream, given {other!r}; write left.join(right, on=…)")
        self._check_bounded("join")
        other._check_bounded("join")
        return connect(left=self, right=other)._add("join", lambda: Join(on), _Options(name, 1))

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

        ``key(record)`` gives the topic's key. Records are readable as soon as they are written, at least
        once across restarts.
        """
        if not isinstance(topic, Topic):
            raise GraphError(f'sink: expected a topic, given {topic!r}; write .sink(topic("scheme://…"))')
        if delivery not in (None, "at_least_once"):
            raise GraphError(f'sink: expected delivery "at_least_once", given {delivery!r}')
        self._check_outside_loops("sink", name or topic.name)
        encoder = encode or Json()
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
        format: UpdateFormat = "auto",  # noqa: A002 (the word for it)
        name: str | None = None,
    ) -> None:
        """Publish every record as an update of ``model``: an array, a dict of parameters, a ``ModelSnapshot``.

        Versions count up by one; a run that restores nothing begins the topic's next generation. Large
        models are written as safetensors (``format`` decides otherwise). See ``streamiter.models``.
        """
        if not isinstance(topic, Topic):
            raise GraphError(
                f'publish_model: expected a topic, given {topic!r}; write publish_model(topic("scheme://…"), model=…)'
            )
        self._check_outside_loops("publish_model", name or model)
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

    def collect(self, *, name: str | None = None) -> Collected:
        """Gather the records in memory; ``.items`` of what this gives holds them after the run."""
        self._check_outside_loops("collect", name or "collect")
        collected = Collected()
        self._add("collect", lambda: Collect(collected), _Options(name, 1, shape="sink"))
        return collected

    # -- inside ------------------------------------------------------------------------------------------

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
        self, f: Callable[[Any, Any], Any], *, name: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """For each record the key's running result: the first record, then ``f(result, record)``.

        With ``key_by_batch`` and a numpy ufunc (``np.add``) arrays are reduced without a Python loop.
        """
        _check_callable(f, "reduce")
        key_of = self._key_of
        options = _Options(name, parallelism)
        if not self._whole_batches:
            return self._add("reduce", lambda: KeyedReduce(key_of, f, check_keys=check_keys), options)
        if not isinstance(f, np.ufunc):
            raise GraphError(
                f"reduce: after key_by_batch expected a numpy ufunc such as np.add, given {f!r}; "
                "use key_by(f) for other functions"
            )
        return self._add("reduce", lambda: KeyedReduceBatch(key_of, f, check_keys=check_keys), options)

    def stateful_map(
        self,
        f: Callable[[Any, Any], tuple[Any, Any]],
        initial: Any,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """``f(state, record) -> (state, output)`` with a state for each key that begins as ``initial``."""
        _check_callable(f, "stateful_map")
        key_of = self._record_key("stateful_map")
        return self._add(
            "stateful_map",
            lambda: StatefulMap(key_of, f, initial, check_keys=check_keys),
            _Options(name, parallelism),
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

        A state that was not used for ``time_to_live_s`` seconds is forgotten.
        """
        label = name or getattr(factory, "__name__", "process").replace("<lambda>", "process")
        check_factory(factory, [SINGLE_INPUT], step=label, keyed=True)
        keys = KeySelector(self._record_key("process"), time_to_live_s)
        connected = ConnectedStreams({SINGLE_INPUT: self})
        return connected._add(label, factory, _Options(name, parallelism, on_error, dead_letter), keys)

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
        """An operator with ``process_<input>(record, out)`` or ``process_<input>_batch(batch, out)`` each."""
        label = name or getattr(factory, "__name__", "process").replace("<lambda>", "process")
        check_factory(factory, list(self._streams), step=label)
        return self._add(label, factory, _Options(name, parallelism, on_error, dead_letter))

    def _add(
        self, label: str, factory: OperatorFactory, options: _Options, keys: KeySelector | None = None
    ) -> Stream:
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
    return ConnectedStreams(dict(streams))


def _check_callable(f: Any, method: str) -> None:
    if not callable(f):
        raise GraphError(f"{method}: expected a function, given {f!r}; write a function or a lambda")
