"""The graph while it is built: the part of a flow that changes it, outputs of steps, and the next step.

``Flow`` derives from ``FlowUnderConstruction``, and ``Stream`` from ``Outlets``. ``add_next_step`` checks the options
and the input streams of a step, and puts the step into the graph. The ends of a flow follow: the steps that ``sink``,
``publish_model``, ``collect`` and dead letters add.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.engine.graph.graph import (
    SINGLE_INPUT,
    Edge,
    Graph,
    KeySelector,
    RunnableFlow,
    Step,
    StepLoop,
    has_timestamps,
    has_watermarks,
    upstream_of,
)
from streamiter.engine.graph.output import Forward, Partitioning, Rebalance
from streamiter.engine.states.backends import StateBackend
from streamiter.engine.tasks.making import check_in_step
from streamiter.errors import ConfigurationError, GraphError, shortened, user_line
from streamiter.flow.graph_checks import (
    check_codec,
    check_count,
    check_factory,
    check_field_or_function,
    check_holds_dead_letters,
    check_name,
    check_policy,
    check_service,
    check_state_backend,
    check_topic,
)
from streamiter.flow.options import GatheringOptions, ProcessOptions, StepOptions, check_step_options
from streamiter.operators.functions import field_or_function
from streamiter.operators.operator import IterationListener, OperatorFactory
from streamiter.operators.output import DEAD_LETTERS
from streamiter.operators.services import Service
from streamiter.operators.source import Collect, Collected
from streamiter.operators.steps import FlatMap, Map, MapBatch
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.topics.formats import Json
from streamiter.topics.record_functions import RecordFunctions
from streamiter.topics.source_and_sink import TopicSink
from streamiter.topics.topic import Encoder, Topic
from streamiter.values.numbers import one_of
from streamiter.values.plain_data import PlainData
from streamiter.values.records import OutputTag


class BuiltGraph(Graph):
    """The graph of a flow and what its streams and iterations change while they add steps."""

    def __init__(self, plain_data: PlainData) -> None:
        super().__init__()
        self.published_models: dict[tuple[str, str], str] = {}
        """The line that publishes a model, by topic and model."""
        self.loop: StepLoop | None = None
        """The iteration whose body is being built, or None."""
        self.round_scope: RoundScope | None = None
        """The part of the body that is being built and gives each epoch its own operators, or None."""
        self._plain_data = plain_data

    def add_step(self, step: Step, *, is_named: bool, label_lasts: bool = False) -> Step:
        """Add a step, and return it; its name gets a number if another step has that name.

        ``is_named``: the user chose the name, so GraphError is raised if it is taken. ``label_lasts``: the name says
        which step it is, whatever other steps the flow has.
        """
        name = self.unique_name(step.name, named=is_named)
        lasts = (is_named or label_lasts) and not self.is_numbered(name)
        return self.add(replace(step, name=name, has_lasting_name=lasts))

    @contextlib.contextmanager
    def body_of(self, loop: StepLoop, round_scope: RoundScope | None = None) -> Iterator[None]:
        """Let all steps that are added in this block belong to the body of ``loop``, and to this part."""
        around = self.loop, self.round_scope
        self.loop, self.round_scope = loop, round_scope
        try:
            yield
        finally:
            self.loop, self.round_scope = around

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the block raises, remove all that the block has added to the flow.

        Any exception counts, KeyboardInterrupt too: the session of a notebook continues after it. Blocks may be nested.
        """
        steps = self.savepoint()
        models, structs = len(self.published_models), self._plain_data.struct_count
        try:
            yield
        except BaseException:
            self.roll_back(steps)
            while len(self.published_models) > models:
                self.published_models.popitem()
            self._plain_data.forget_structs(structs)
            raise


class FlowUnderConstruction(RunnableFlow):
    """The part of a flow that its streams and iterations know."""

    def __init__(self, name: str, parallelism: int = 1, *, state: StateBackend | None = None) -> None:
        if not name or not isinstance(name, str):
            raise GraphError(f"Flow: expected a name, given {name!r}; it keys checkpoints and transactions")
        self.name = name
        self.parallelism = check_count(parallelism, "parallelism", step=name)
        self.state = check_state_backend(name, state)
        self.plain_data = PlainData()
        self.graph = BuiltGraph(self.plain_data)

    @property
    def steps(self) -> Sequence[Step]:
        return self.graph.steps

    def register(self, struct: type[msgspec.Struct]) -> None:
        """Let a ``msgspec.Struct`` count as plain data, under its class name, so that it can be stored."""
        self.plain_data.register(struct)


def register_struct_of(flow: FlowUnderConstruction, codec: Any) -> None:
    """Register the ``msgspec.Struct`` s that a decoder or encoder of a user names.

    Of two classes of one name only the first is registered; the second is refused where it would be stored.
    """
    for struct in getattr(codec, "struct_types", ()):
        with contextlib.suppress(ConfigurationError):
            flow.register(struct)


class StepOutput(NamedTuple):
    """One output of one step, with the partitioning that was chosen for the next step."""

    step: Step
    tag: OutputTag | None = None
    """The side output; None for the main output."""
    partitioning: Partitioning | None = None
    """None: records of subtask i go to subtask i, or to all in turn if their number differs."""
    is_outside: bool = False
    """Whether the records leave the iteration of the step."""

    @property
    def loop(self) -> StepLoop | None:
        """The iteration whose body these records belong to, or None."""
        return None if self.is_outside else self.step.loop

    def outside(self) -> StepOutput:
        """Return the same output as it is read outside the iteration, where its records have no epochs."""
        return self._replace(is_outside=True)


class Outlets:
    """Outputs of one or more steps: the records of a stream, without the methods that add steps."""

    def __init__(self, flow: FlowUnderConstruction, *outlets: Step | StepOutput) -> None:
        self._building = flow
        self._outlets = tuple(outlet if isinstance(outlet, StepOutput) else StepOutput(outlet) for outlet in outlets)

    @property
    def flow(self) -> FlowUnderConstruction:
        """The flow that contains the stream."""
        return self._building

    @property
    def name(self) -> str:
        """The step (or steps) that emits the records."""
        return " ∪ ".join(outlet.step.name for outlet in self._outlets)

    @property
    def parallelism(self) -> int:
        """The number of subtasks of the step that emits the records (of the widest step, for a union)."""
        return max(outlet.step.parallelism for outlet in self._outlets)

    @property
    def is_bounded(self) -> bool:
        """Whether the stream ends by itself."""
        return all(outlet.step.bounded for outlet in self._outlets)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that emit the records."""
        return tuple(outlet.step for outlet in self._outlets)


def outlets_of(stream: Outlets) -> tuple[StepOutput, ...]:
    """Return the outputs that are a stream."""
    return stream._outlets


def loop_of(stream: Outlets) -> StepLoop | None:
    """Return the iteration whose body contains a stream, or None."""
    return stream._outlets[0].loop


def emits_at_end(stream: Outlets) -> bool:
    """Return whether records come only at the end, in an iteration at the end of the iteration."""
    return all(step.emits_at_end for step in stream.steps)


def edges_of(
    stream: Outlets,
    input_name: str = SINGLE_INPUT,
    *,
    feedback: FeedbackLimits | None = None,
    feedback_topic: Topic | None = None,
) -> list[Edge]:
    """Return new edges that bring the records of a stream to an input of a step.

    ``feedback`` and ``feedback_topic`` are those of the edges. Raises GraphError if a step was removed.
    """
    for step in stream.steps:
        if step not in stream.flow.graph:
            raise GraphError(
                f"stream {stream.name!r}: expected a step of flow {stream.flow.name!r}, given {step.name!r}, "
                "which was taken out again when the call that added it failed; make the stream again"
            )
    return [
        Edge(outlet.step, input_name, outlet.partitioning or Forward(), outlet.tag, feedback, feedback_topic)
        for outlet in outlets_of(stream)
    ]


class RoundScope:
    """A part of a body that gives each epoch its own operators; it knows which streams may enter and leave the part."""

    def __init__(self, given: Iterable[Outlets] = (), *, whole_body: bool = False) -> None:
        self.whole_body = whole_body
        self._given = _outputs_of(given)
        self._returned: set[tuple[Step, OutputTag | None]] = set()

    def give_back(self, streams: Iterable[Outlets]) -> None:
        """Allow that steps outside read these streams."""
        self._returned |= _outputs_of(streams)

    def check_use_inside(self, label: str, edge: Edge) -> None:
        """Raise GraphError for a stream that did not enter through the arguments."""
        if self.whole_body or edge.upstream.round_scope is self or (edge.upstream, edge.tag) in self._given:
            return
        raise GraphError(
            f"step {label!r}: for_each_round expected streams that come in through its sub-body's argument, given "
            f"{edge.upstream.name!r} from outside; add it to the list: for_each_round([…, stream], sub_body)"
        )

    def check_use_outside(self, label: str, edge: Edge) -> None:
        """Raise GraphError for a stream that the sub-body did not return."""
        if self.whole_body or (edge.upstream, edge.tag) in self._returned:
            return
        raise GraphError(
            f"step {label!r}: expected a stream from outside for_each_round, given {edge.upstream.name!r} of its "
            "sub-body; return it from the sub-body and use the streams that for_each_round returns"
        )


def functions_before(stream: Outlets) -> list[Callable[..., Any]]:
    """Return the functions of ``map``, ``flat_map`` and ``map_batch`` through which records of a stream have come."""
    made = [step.factory for step in upstream_of(edges_of(stream))]
    return [each.args[0] for each in made if isinstance(each, partial) and each.func in (Map, FlatMap, MapBatch)]


def _outputs_of(streams: Iterable[Outlets]) -> set[tuple[Step, OutputTag | None]]:
    return {(edge.upstream, edge.tag) for stream in streams for edge in edges_of(stream)}


def check_round_scope(label: str, stream: Outlets, scope: RoundScope | None) -> None:
    """Raise GraphError if a step in ``scope`` may not read a stream across the border of a ``for_each_round``."""
    for edge in edges_of(stream):
        if scope is not None:
            scope.check_use_inside(label, edge)
        elif isinstance(edge.upstream.round_scope, RoundScope):
            edge.upstream.round_scope.check_use_outside(label, edge)


def matched(edges: Iterable[Edge], parallelism: int) -> list[Edge]:
    """Return the edges to a step of this parallelism; if the numbers of subtasks differ, records go to all in turn."""
    return [
        replace(edge, partitioning=Rebalance())
        if isinstance(edge.partitioning, Forward) and edge.upstream.parallelism != parallelism
        else edge
        for edge in edges
    ]


# -- checks of streams -------------------------------------------------------------------------------------


def check_same_flow(stream: Outlets, other: Outlets, method: str) -> None:
    """Raise GraphError if two streams belong to different flows."""
    if other.flow is not stream.flow:
        raise GraphError(
            f"{method}: expected streams of one flow, given {stream.name!r} of flow {stream.flow.name!r} and "
            f"{other.name!r} of flow {other.flow.name!r}; make both with methods of one flow"
        )


def check_bounded(stream: Outlets, method: str) -> None:
    """Raise GraphError for a stream that never ends: ``method`` would never emit its result."""
    if not stream.is_bounded:
        otherwise = (
            'read the topic with stop="latest", or use key_by(…).reduce(…) for running results'
            if stream.flow.graph.loop is None
            else "in an IterationListener emit a result for each epoch of stamped data"
        )
        raise GraphError(f"{method}: expected a bounded stream, given {stream.name!r}, which never ends; {otherwise}")


def check_outside_loops(stream: Outlets, method: str, label: str) -> None:
    """Raise GraphError for a stream in the body of an iteration, or while any body is being built."""
    if stream.flow.graph.loop is not None or loop_of(stream) is not None:
        raise GraphError(
            f"step {label!r}: expected no {method} inside an iteration body, given one; return the stream "
            "in output_streams and put the sink behind the iteration"
        )


# -- the next step -----------------------------------------------------------------------------------------


def add_next_step(
    inputs: Mapping[str, Outlets],
    label: str,
    factory: OperatorFactory,
    options: StepOptions,
    *,
    service: Service | None = None,
    keys: KeySelector | None = None,
    topic: Topic | None = None,
    shape: str = "operator",
    label_lasts: bool = False,
    waits_for_end: bool = False,
    emits_unasked: bool = False,
    emits_at_end: bool | None = None,
    epochs_seen: str = "",
    outside_loops: bool = False,
    keeps_event_time: bool = True,
    begins_event_time: bool = False,
    begins_epochs: bool = False,
    order: Literal["begins", "spans", "needs"] | None = None,
    awaited_input: str | None = None,
    others_follow: bool = False,
) -> StepOutput:
    """Add a step that reads streams of one flow, each under the name of an input, and return the step's main output.

    ``label`` names the step if the options do not; ``BuiltGraph.add_step`` describes ``label_lasts``.
    ``waits_for_end``: the step emits when its inputs have ended; ``emits_unasked``: it may emit before it receives a
    record. ``emits_at_end`` states whether it emits at the end only, if these two cannot tell. ``shape`` and
    ``epochs_seen`` are for drawings. ``outside_loops``: the step is outside any iteration, even while a body is being
    built. ``keeps_event_time``: its records have the timestamps of the records that it reads; ``begins_event_time``: it
    gives its records timestamps; ``begins_epochs``: it gives them epochs. ``Step`` describes ``order`` and
    ``awaited_input`` and ``others_follow``.
    """
    streams = list(inputs.values())
    flow = streams[0].flow
    name = options.get("name")
    check_name(name)
    label = name or label
    edges = [edge for input_name, stream in inputs.items() for edge in edges_of(stream, input_name)]
    parallelism = options.get("parallelism")
    if parallelism is None:
        straight = (edge.upstream.parallelism for edge in edges if isinstance(edge.partitioning, Forward))
        parallelism = max(straight, default=flow.parallelism)
    parallelism = check_count(parallelism, "parallelism", step=label)
    dead_letter = options.get("dead_letter")
    policy = check_policy(options.get("on_error", "fail"), dead_letter, step=label)
    service = check_service(service, step=label)
    loop = None if outside_loops else flow.graph.loop
    round_scope = None if loop is None else flow.graph.round_scope
    for stream in streams:
        _check_loop(stream, loop, round_scope, label)
    if emits_at_end is None:
        emits_at_end = (waits_for_end and round_scope is None) or (
            not emits_unasked and all(edge.upstream.emits_at_end for edge in edges)
        )
    keeps_event_time = keeps_event_time and not waits_for_end
    with flow.graph.all_or_nothing():
        step = Step(
            name=label,
            parallelism=parallelism,
            where=user_line(),
            factory=factory,
            edges=matched(edges, parallelism),
            keys=keys,
            policy=policy,
            service=service,
            loop=loop,
            round_scope=round_scope,
            bounded=all(stream.is_bounded for stream in streams),
            stamped=begins_epochs or all(edge.upstream.stamped for edge in edges),
            emits_at_end=emits_at_end,
            timed=begins_event_time or (keeps_event_time and has_timestamps(edges)),
            watermarked=round_scope is None and (begins_event_time or (keeps_event_time and has_watermarks(edges))),
            order=order,
            awaited_input=awaited_input,
            others_follow=others_follow,
            topic=topic,
            shape=shape,
            epochs_seen=epochs_seen,
        )
        step = flow.graph.add_step(step, is_named=name is not None, label_lasts=label_lasts)
        if isinstance(factory, type):  # Its class may show that it cannot work in this step.
            check_in_step(step, factory)
        if dead_letter is not None:
            add_dead_letters(flow, step, dead_letter)
    return StepOutput(step)


def add_operator(
    inputs: Mapping[str, Outlets], factory: OperatorFactory, options: ProcessOptions, keys: KeySelector | None = None
) -> StepOutput:
    """Add a step with an operator of the user."""
    check_step_options("process", options, ProcessOptions)
    label = options.get("name") or factory_label(factory)
    if keys is None:
        check_factory(factory, list(inputs), step=label)
    service = options.pop("parameter_server", None)
    return add_next_step(
        inputs, label, factory, options, service=service, keys=keys, emits_unasked=_may_emit_unasked(factory)
    )


def add_gathering(
    inputs: Mapping[str, Outlets], method: str, factory: OperatorFactory, options: GatheringOptions
) -> StepOutput:
    """Add a step with one subtask that emits when its inputs have ended."""
    check_step_options(method, options, GatheringOptions)
    return add_next_step(inputs, method, factory, {**options, "parallelism": 1}, waits_for_end=True)


def _may_emit_unasked(factory: OperatorFactory) -> bool:
    """Return whether a user's operator may emit without a record: in a callback, at a timer or the end of an input."""
    if not isinstance(factory, type):
        return True  # Nothing is known of the operators that it makes.
    return issubclass(factory, IterationListener) or hasattr(factory, "input_ended") or hasattr(factory, "on_timer")


def factory_label(factory: OperatorFactory) -> str:
    """Return the name of a class or function; ``process`` for a lambda, whose name says nothing."""
    return getattr(factory, "__name__", "process").replace("<lambda>", "process")


def _check_loop(stream: Outlets, loop: StepLoop | None, round_scope: RoundScope | None, label: str) -> None:
    """Raise GraphError unless a step of ``loop`` and its inputs belong to the same iteration body, or all to none."""
    if loop is not None and loop_of(stream) is loop:
        check_round_scope(label, stream, round_scope)
    for outlet in outlets_of(stream):
        if outlet.loop is loop:
            continue
        if loop is None:
            raise GraphError(
                f"step {label!r}: expected a stream from outside the iteration, given {outlet.step.name!r} "
                "of its body; return it in output_streams and use the streams that the iteration returns"
            )
        raise GraphError(
            f"step {label!r}: expected streams that come in through the body's arguments, given "
            f"{outlet.step.name!r} from outside; pass it as a data stream"
        )


# -- the ends of a flow ------------------------------------------------------------------------------------


def add_sink(
    stream: Outlets,
    topic: Topic,
    encode: Encoder | None,
    functions: Mapping[str, str | Callable[[Any], Any] | None],
    delivery: Literal["at_least_once"] | None,
    options: StepOptions,
) -> None:
    """Add the step of ``Stream.sink``; ``functions`` are those of `RecordFunctions`, or fields, by name."""
    check_step_options("sink", options)
    name = options.get("name")
    check_topic("sink", topic, '.sink(topic("scheme://…"))')
    one_of("sink(delivery=)", delivery, "at_least_once", None, error=GraphError)
    check_outside_loops(stream, "sink", name or topic.name)
    at_least_once = delivery == "at_least_once"
    encoder = encode if encode is not None else (topic.default_encoder() or Json())
    check_codec(encoder, "encode", step=name or f"sink {topic.name}")
    for each, function in functions.items():
        if function is not None:
            check_field_or_function(function, f"sink {each}", step=name)
    if functions["headers"] is not None and not topic.has_headers:
        raise GraphError(
            f"step {name or f'sink {topic.name}'!r}: expected a topic with headers, given {topic.url}; "
            "leave headers= out"
        )
    given: dict[str, Any] = {
        each: None if f is None else field_or_function(f"sink {each}", f) for each, f in functions.items()
    }
    made = RecordFunctions(**given)
    with stream.flow.graph.all_or_nothing():
        register_struct_of(stream.flow, encoder)
        _add_end(
            stream,
            f"sink {topic.name}",
            lambda: TopicSink(topic, encoder, made, at_least_once=at_least_once),
            options,
            topic,
        )


def add_publisher(
    stream: Outlets,
    topic: Topic,
    model: str,
    format: Literal["auto", "json", "safetensors"],  # noqa: A002 (the word for it)
    changes: bool,
    delivery: Literal["at_least_once"] | None,
    name: str | None,
) -> None:
    """Add the step of ``Stream.publish_model``."""
    check_topic("publish_model", topic, 'publish_model(topic("scheme://…"), model=…)')
    if not isinstance(model, str) or not model:
        raise GraphError(
            f"publish_model: expected model= to be the name of the model, given {shortened(model)}; it is the key "
            "of the updates, under which readers ask for them"
        )
    one_of("publish_model(format=)", format, "auto", "json", "safetensors", error=GraphError)
    remedy = "with True a version has the difference to the version before it"
    one_of("publish_model(changes=)", changes, True, False, error=GraphError, remedy=remedy)
    one_of("publish_model(delivery=)", delivery, "at_least_once", None, error=GraphError)
    check_outside_loops(stream, "publish_model", name or model)
    published = stream.flow.graph.published_models
    if (topic.url, model) in published:
        raise GraphError(
            f"publish_model: expected one publisher of the model {model!r} to {topic.name!r}, given a second "
            f"one; the first is at {published[topic.url, model]}; give each model a name of its own"
        )
    at_least_once = delivery == "at_least_once"
    # Imported here: it needs all of its room, and most flows publish no model.
    from streamiter.models.publisher import ModelPublisher

    _add_end(
        stream,
        f"publish {model}",
        lambda: ModelPublisher(topic, model, format, changes=changes, at_least_once=at_least_once),
        {"name": name, "parallelism": 1},
        topic,
    )
    published[topic.url, model] = user_line()


def add_dead_letters(flow: FlowUnderConstruction, step: Step, topic: Topic) -> None:
    """Add a step that writes the dead letters of ``step`` to a topic, outside the iteration of ``step``."""
    check_holds_dead_letters(topic, step=step.name)
    letters = Outlets(flow, StepOutput(step, DEAD_LETTERS, is_outside=step.loop is not None))
    add_next_step(
        {SINGLE_INPUT: letters},
        f"dead letters of {step.name}",
        lambda: TopicSink(topic, DeadLetterEncoder()),
        {"parallelism": 1},
        topic=topic,
        shape="sink",
        label_lasts=True,
        outside_loops=True,
    )


def add_collect(stream: Outlets, name: str | None, parallelism: int) -> Collected:
    """Add the step of ``Stream.collect``."""
    check_outside_loops(stream, "collect", name or "collect")
    collected = Collected()
    options: StepOptions = {"name": name, "parallelism": parallelism}
    _add_end(stream, "collect", lambda: Collect(collected), options, None)
    return collected


def _add_end(stream: Outlets, label: str, factory: OperatorFactory, options: StepOptions, topic: Topic | None) -> None:
    label_lasts = topic is not None
    add_next_step({SINGLE_INPUT: stream}, label, factory, options, topic=topic, shape="sink", label_lasts=label_lasts)
