"""The next step: everything that the methods of streams which add a step have in common.

``add_next_step`` checks the options and the input streams, and puts the step into the graph. Behind it are the ends of
a flow: the steps that ``sink``, ``publish_model``, ``collect`` and dead letters add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from streamiter.errors import GraphError, shortened, user_line
from streamiter.flow.building import (
    BodyLoop,
    FlowUnderConstruction,
    Outlets,
    StepOutput,
    check_outside_loops,
    matched,
)
from streamiter.flow.graph_checks import (
    check_codec,
    check_function,
    check_holds_dead_letters,
    check_name,
    check_parallelism,
    check_policy,
    check_service,
)
from streamiter.operators.operator import IterationListener, Operator, OperatorFactory, Service
from streamiter.operators.output import DEAD_LETTERS, RejectionPolicy
from streamiter.operators.source import Collect, Collected
from streamiter.runtime.entries import check_can_listen
from streamiter.runtime.graph import SINGLE_INPUT, Edge, KeySelector, Step
from streamiter.runtime.output import Forward
from streamiter.topics.formats import Json
from streamiter.topics.source_and_sink import DeadLetterEncoder, TopicSink
from streamiter.topics.topic import Encoder, Topic
from streamiter.topics.urls import shown_given


class GatheringOptions(TypedDict, total=False):
    """Options of a step that brings all records together in one subtask."""

    name: str | None
    """The name of the step, unique in the flow; None: the engine chooses one."""
    on_error: RejectionPolicy
    """What happens to a record for which a function raises: ``"fail"`` (the default) ends the job, ``"skip"`` drops
    and counts the record."""
    dead_letter: Topic | None
    """The topic that such records are written to instead."""


class StepOptions(GatheringOptions, total=False):
    """Options that steps have in common."""

    parallelism: int | None
    """The number of subtasks; None: the parallelism of the stream, or of the flow behind a repartitioned stream."""


class ProcessOptions(StepOptions, total=False):
    """Options of a step with an operator of the user."""

    parameter_server: Service | None
    """The parameter server whose workers the subtasks are."""


def check_options(method: str, options: Mapping[str, object], allowed: type = StepOptions) -> None:
    """Raise TypeError for an option that ``allowed``, a TypedDict, does not have."""
    names = allowed.__annotations__
    for name in options:
        if name not in names:
            known = ", ".join(f"{known}=" for known in names)
            raise TypeError(
                f"{method}() got an unexpected keyword argument {name!r}; its options are {known}"
            )


def add_next_step(
    inputs: Mapping[str, Outlets],
    label: str,
    factory: OperatorFactory,
    options: StepOptions,
    *,
    service: Service | None = None,
    keys: KeySelector | None = None,
    shape: str = "operator",
    label_lasts: bool = False,
    waits_for_end: bool = False,
    emits_unasked: bool = False,
    emits_at_end: bool | None = None,
    epochs_seen: str = "",
    outside_loops: bool = False,
) -> StepOutput:
    """Add a step that reads streams of one flow, each under the name of an input, and return the step's main output.

    ``label`` names the step if the options do not; ``label_lasts``: the label says which step it is, whatever other
    steps the flow has. ``waits_for_end``: the step emits when its inputs have ended; ``emits_unasked``: it may emit
    before it receives a record. ``emits_at_end`` states whether it emits at the end only, if these two cannot tell.
    ``shape`` and ``epochs_seen`` are for drawings. ``outside_loops``: the step is outside any iteration, even while a
    body is being built.
    """
    streams = list(inputs.values())
    flow = streams[0].flow
    name = options.get("name")
    check_name(name)
    is_named = name is not None
    label = name or label
    edges = [edge for input_name, stream in inputs.items() for edge in stream.edges(input_name)]
    parallelism = options.get("parallelism")
    parallelism = check_parallelism(
        _default_parallelism(edges, flow) if parallelism is None else parallelism, step=label
    )
    dead_letter = options.get("dead_letter")
    policy = check_policy(options.get("on_error", "fail"), dead_letter, step=label)
    service = check_service(service, step=label)
    loop = None if outside_loops else flow.loop
    for stream in streams:
        _check_loop(stream, loop, label)
    round_scope = None if loop is None else loop.round_scope
    if emits_at_end is None:
        emits_at_end = (waits_for_end and round_scope is None) or (
            not emits_unasked and all(edge.upstream.emits_at_end for edge in edges)
        )
    with flow.all_or_nothing():
        unique_name = flow.graph.unique_name(label, named=is_named)
        step = Step(
            name=unique_name,
            parallelism=parallelism,
            where=user_line(),
            factory=factory,
            edges=matched(edges, parallelism),
            keys=keys,
            policy=policy,
            service=service,
            has_lasting_name=(is_named or label_lasts) and not flow.graph.is_numbered(unique_name),
            loop=loop,
            round_scope=round_scope,
            bounded=all(stream.is_bounded for stream in streams),
            stamped=all(edge.upstream.stamped for edge in edges),
            emits_at_end=emits_at_end,
            shape=shape,
            epochs_seen=epochs_seen,
        )
        if isinstance(factory, type):
            _check_class(factory, step)
        step = flow.graph.add(step)
        if dead_letter is not None:
            add_dead_letters(flow, step, dead_letter)
    return StepOutput(step)


def may_emit_unasked(factory: OperatorFactory) -> bool:
    """Return whether a user's operator may emit without a record: in a callback, at a timer or the end of an input."""
    if not isinstance(factory, type):
        return True  # Nothing is known of the operators that it makes.
    return (
        issubclass(factory, IterationListener)
        or hasattr(factory, "input_ended")
        or hasattr(factory, "on_timer")
    )


def label_of(factory: OperatorFactory) -> str:
    """Return the name of a class or function; ``process`` for a lambda, whose name says nothing."""
    return getattr(factory, "__name__", "process").replace("<lambda>", "process")


def _check_class(operator: type[Operator], step: Step) -> None:
    """Raise GraphError for an operator that cannot work, as far as its class tells."""
    check_can_listen(operator, step.hears_of_epochs, step=step.name)
    if step.loop is not None:
        step.loop.check_operator(step, operator)


def _default_parallelism(edges: list[Edge], flow: FlowUnderConstruction) -> int:
    straight = [edge.upstream.parallelism for edge in edges if isinstance(edge.partitioning, Forward)]
    return max(straight, default=flow.parallelism)


def _check_loop(stream: Outlets, loop: BodyLoop | None, label: str) -> None:
    """Raise GraphError unless a step of ``loop`` and its inputs belong to the same iteration body, or all to none."""
    if loop is not None and stream.loop is loop:
        loop.check_streams(label, stream.edges())
    for outlet in stream.outlets:
        if outlet.loop is loop:
            continue
        if loop is None:
            raise GraphError(
                f"step {label!r}: expected a stream from outside the iteration, given {outlet.step.name!r} "
                "of its body; return it in output_streams and use what the iteration gives"
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
    key: Callable[[Any], bytes | str | None] | None,
    delivery: Literal["at_least_once"] | None,
    options: StepOptions,
) -> None:
    """Add the step of ``Stream.sink``."""
    check_options("sink", options)
    name = options.get("name")
    if not isinstance(topic, Topic):
        raise GraphError(
            f'sink: expected a topic, given {shown_given(topic)}; write .sink(topic("scheme://…"))'
        )
    _check_delivery(delivery, "sink")
    check_outside_loops(stream, "sink", name or topic.name)
    at_least_once = delivery == "at_least_once"
    encoder = encode if encode is not None else Json()
    check_codec(encoder, "encode", step=name or f"sink {topic.name}")
    if key is not None:
        check_function(key, "sink key", ["record"], step=name)
    with stream.flow.all_or_nothing():
        stream.flow.register_struct_of(encoder)
        _add_end(
            stream,
            f"sink {topic.name}",
            lambda: TopicSink(topic, encoder, key, at_least_once=at_least_once),
            options,
        )


def add_publisher(
    stream: Outlets,
    topic: Topic,
    model: str,
    format: Literal["auto", "json", "safetensors"],  # noqa: A002 (the word for it)
    delivery: Literal["at_least_once"] | None,
    name: str | None,
) -> None:
    """Add the step of ``Stream.publish_model``."""
    if not isinstance(topic, Topic):
        raise GraphError(
            f"publish_model: expected a topic, given {shown_given(topic)}; "
            'write publish_model(topic("scheme://…"), model=…)'
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
    _check_delivery(delivery, "publish_model")
    check_outside_loops(stream, "publish_model", name or model)
    published = stream.flow.published_models
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
        lambda: ModelPublisher(topic, model, format, at_least_once=at_least_once),
        {"name": name, "parallelism": 1},
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
        shape="sink",
        label_lasts=True,
        outside_loops=True,
    )


def add_collect(stream: Outlets, name: str | None, parallelism: int) -> Collected:
    """Add the step of ``Stream.collect``."""
    check_outside_loops(stream, "collect", name or "collect")
    collected = Collected()
    options: StepOptions = {"name": name, "parallelism": parallelism}
    _add_end(stream, "collect", lambda: Collect(collected), options, label_lasts=False)
    return collected


def _check_delivery(delivery: object, method: str) -> None:
    """Raise GraphError for a way of delivery that does not exist."""
    if delivery not in (None, "at_least_once"):
        raise GraphError(
            f'{method}: expected delivery "at_least_once", given {delivery!r}; write that, or leave delivery out'
        )


def _add_end(
    stream: Outlets, label: str, factory: OperatorFactory, options: StepOptions, *, label_lasts: bool = True
) -> None:
    add_next_step({SINGLE_INPUT: stream}, label, factory, options, shape="sink", label_lasts=label_lasts)
