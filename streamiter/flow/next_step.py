"""The outlet: where a stream comes from, and how its records find the subtasks of the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import (
    check_codec,
    check_factory,
    check_function,
    check_holds_dead_letters,
    check_name,
    check_outside_loops,
    check_parallelism,
    check_policy,
    check_service,
)
from streamiter.operators.operator import IterationListener, Operator, OperatorFactory, Service
from streamiter.operators.rejection import DEAD_LETTERS, RejectionPolicy, shortened
from streamiter.operators.source import Collect, Collected
from streamiter.records import OutputTag
from streamiter.runtime.entries import check_can_listen
from streamiter.runtime.graph import SINGLE_INPUT, Edge, KeySelector, Step
from streamiter.runtime.output import Forward, Partitioning, Rebalance
from streamiter.topics.formats import Json
from streamiter.topics.secrets import shown_given
from streamiter.topics.topic import Encoder, Topic
from streamiter.topics.topic_sink import DeadLetterEncoder, TopicSink
from streamiter.user_code import user_line

if TYPE_CHECKING:
    from streamiter.flow.flow import Flow
    from streamiter.flow.stream import Stream

__all__ = [
    "ConnectedStreams",
    "StepOptions",
    "StepOutput",
    "add_collect",
    "add_dead_letters",
    "add_next_step",
    "add_publisher",
    "add_sink",
    "label_of",
    "may_emit_unasked",
    "rebalance_unequal",
]


class StepOutput(NamedTuple):
    """One output of one step, with the partitioning chosen for the next."""

    step: Step
    tag: OutputTag | None = None
    partitioning: Partitioning | None = None


class StepOptions(NamedTuple):
    """What every method that adds a step takes.

    The options that steps have in common.
    """

    name: str | None
    parallelism: int | None
    on_error: RejectionPolicy = "fail"
    dead_letter: Topic | None = None
    service: Service | None = None


def add_next_step(
    streams: Mapping[str, Stream],
    label: str,
    factory: OperatorFactory,
    options: StepOptions,
    *,
    keys: KeySelector | None = None,
    shape: str = "operator",
    label_lasts: bool = False,
    waits_for_end: bool = False,
    emits_unasked: bool = False,
) -> Stream:
    """Add a step behind streams of one flow, each under the name of an input; gives the stream of its output.

    ``label`` names it where the options do not; ``label_lasts`` if it says which step it is, whatever others there are.
    ``waits_for_end``: it emits when its inputs have ended; ``emits_unasked``: it may emit before it is given a record.

    The next step: what all methods that add one have in common.
    """
    flow = next(iter(streams.values())).flow
    check_name(options.name)
    named = options.name is not None
    label = options.name or label
    edges = [edge for name, stream in streams.items() for edge in stream.edges(name)]
    parallelism = check_parallelism(
        _default_parallelism(edges, flow) if options.parallelism is None else options.parallelism, step=label
    )
    policy = check_policy(options.on_error, options.dead_letter, step=label)
    service = check_service(options.service, step=label)
    for stream in streams.values():
        _check_loop(stream, label)
    rebalance_unequal(edges, parallelism)
    round_scope = getattr(flow.loop, "round_scope", None)
    with flow.all_or_nothing():
        name = flow.graph.unique_name(label, named=named)
        step = Step(
            name=name,
            parallelism=parallelism,
            where=user_line(),
            factory=factory,
            inputs=edges,
            keys=keys,
            policy=policy,
            service=service,
            has_lasting_name=(named or label_lasts) and not flow.graph.is_numbered(name),
            loop=flow.loop,
            round_scope=round_scope,
            bounded=all(stream.is_bounded for stream in streams.values()),
            stamped=all(edge.upstream.stamped for edge in edges),
            emits_at_end=(waits_for_end and round_scope is None)
            or (not emits_unasked and all(edge.upstream.emits_at_end for edge in edges)),
            shape=shape,
        )
        if isinstance(factory, type):
            _check_class(factory, step)
        output = flow.add_step(step)
        if options.dead_letter is not None:
            output.side_output(DEAD_LETTERS).to_dead_letters(options.dead_letter)
    return output


def may_emit_unasked(factory: OperatorFactory) -> bool:
    """Whether an operator of the user may emit without a record: in a callback, at a timer or the end of an input."""
    if not isinstance(factory, type):
        return True  # Nothing is known of what it makes.
    return (
        issubclass(factory, IterationListener)
        or hasattr(factory, "input_ended")
        or hasattr(factory, "on_timer")
    )


def _check_class(operator: type[Operator], step: Step) -> None:
    """What can be told of an operator before there is one."""
    check_can_listen(operator, step.hears_of_epochs, step=step.name)
    if step.loop is not None:
        step.loop.check_operator(step, operator)


def label_of(factory: OperatorFactory) -> str:
    """The name of a class or function; a lambda has none that says anything."""
    return getattr(factory, "__name__", "process").replace("<lambda>", "process")


def _default_parallelism(edges: list[Edge], flow: Flow) -> int:
    straight = [edge.upstream.parallelism for edge in edges if isinstance(edge.partitioning, Forward)]
    return max(straight, default=flow.parallelism)


def rebalance_unequal(edges: list[Edge], parallelism: int) -> None:
    """Deal records out in turn where subtask cannot go to subtask."""
    for edge in edges:
        if isinstance(edge.partitioning, Forward) and edge.upstream.parallelism != parallelism:
            edge.partitioning = Rebalance()


def _check_loop(stream: Stream, label: str) -> None:
    """A step and its inputs are of the same iteration body, or all outside."""
    loop = stream.flow.loop
    if loop is not None and stream.loop is loop:
        loop.check_streams(label, stream.edges())
    for step in stream.steps:
        if step.loop is loop:
            continue
        if loop is None:
            raise GraphError(
                f"step {label!r}: expected a stream from outside the iteration, given {step.name!r} "
                "of its body; return it in output_streams and use what the iteration gives"
            )
        raise GraphError(
            f"step {label!r}: expected streams that come in through the body's arguments, given "
            f"{step.name!r} from outside; pass it as a data stream"
        )


class ConnectedStreams:
    """Several streams on their way to one step, each to an input of its own name.

    ConnectedStreams: what ``connect`` gives.
    """

    def __init__(self, streams: dict[str, Stream]) -> None:
        self._streams = streams

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
        """An operator with ``process_<input>(record, out)`` or ``process_<input>_batch(batch, out)`` each.

        Between inputs there is no order unless ``wanted_inputs()`` makes one; see :class:`~streamiter.Operator`,
        and :func:`connect` for an example.
        """
        label = name or label_of(factory)
        check_factory(factory, list(self._streams), step=label)
        options = StepOptions(name, parallelism, on_error, dead_letter, parameter_server)
        return add_next_step(self._streams, label, factory, options, emits_unasked=may_emit_unasked(factory))


def add_sink(
    stream: Stream,
    topic: Topic,
    encode: Encoder | None,
    key: Callable[[Any], bytes | str | None] | None,
    delivery: Literal["at_least_once"] | None,
    options: StepOptions,
) -> None:
    """See ``Stream.sink``.

    The ends of a flow: what ``sink``, ``publish_model``, ``collect`` and dead letters add behind a stream.
    """
    if not isinstance(topic, Topic):
        raise GraphError(
            f'sink: expected a topic, given {shown_given(topic)}; write .sink(topic("scheme://…"))'
        )
    check_delivery(delivery, "sink")
    check_outside_loops(stream, "sink", options.name or topic.name)
    at_least_once = delivery == "at_least_once"
    encoder = encode if encode is not None else Json()
    check_codec(encoder, "encode", step=options.name or f"sink {topic.name}")
    if key is not None:
        check_function(key, "sink key", ["record"], step=options.name)
    with stream.flow.all_or_nothing():
        stream.flow.register_struct_of(encoder)
        _add_end(
            stream,
            f"sink {topic.name}",
            lambda: TopicSink(topic, encoder, key, at_least_once=at_least_once),
            options,
        )


def add_publisher(
    stream: Stream,
    topic: Topic,
    model: str,
    format: Literal["auto", "json", "safetensors"],  # noqa: A002 (the word for it)
    delivery: Literal["at_least_once"] | None,
    options: StepOptions,
) -> None:
    """See ``Stream.publish_model``."""
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
    check_delivery(delivery, "publish_model")
    check_outside_loops(stream, "publish_model", options.name or model)
    published = stream.flow.published_models
    if (topic.url, model) in published:
        raise GraphError(
            f"publish_model: expected one publisher of the model {model!r} to {topic.name!r}, given a second "
            f"beside the one at {published[topic.url, model]}; give each model a name of its own"
        )
    at_least_once = delivery == "at_least_once"
    # With all of its room, which most flows do without.
    from streamiter.models.publisher import ModelPublisher

    _add_end(
        stream,
        f"publish {model}",
        lambda: ModelPublisher(topic, model, format, at_least_once=at_least_once),
        options,
    )
    published[topic.url, model] = user_line()


def check_delivery(delivery: object, method: str) -> None:
    """Raise GraphError for what is none."""
    if delivery not in (None, "at_least_once"):
        raise GraphError(
            f'{method}: expected delivery "at_least_once", given {delivery!r}; write that, or leave delivery out'
        )


def add_dead_letters(stream: Stream, topic: Topic) -> None:
    """See ``Stream.to_dead_letters``."""
    check_holds_dead_letters(topic, step=stream.name)
    if stream.loop is not None:
        stream.loop.leave(stream, lambda outside: outside.to_dead_letters(topic))
        return
    label = f"dead letters of {stream.name}"
    options = StepOptions(name=None, parallelism=1)
    _add_end(stream, label, lambda: TopicSink(topic, DeadLetterEncoder()), options)


def add_collect(stream: Stream, options: StepOptions) -> Collected:
    """See ``Stream.collect``."""
    check_outside_loops(stream, "collect", options.name or "collect")
    collected = Collected()
    _add_end(stream, "collect", lambda: Collect(collected), options, label_lasts=False)
    return collected


def _add_end(
    stream: Stream, label: str, factory: OperatorFactory, options: StepOptions, *, label_lasts: bool = True
) -> None:
    add_next_step({SINGLE_INPUT: stream}, label, factory, options, shape="sink", label_lasts=label_lasts)
