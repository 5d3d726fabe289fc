"""The ends of a flow: what ``sink``, ``publish_model``, ``collect`` and dead letters add behind a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import (
    check_codec,
    check_function,
    check_holds_dead_letters,
    check_outside_loops,
)
from streamiter.flow.next_step import add_next_step
from streamiter.flow.step_options import StepOptions
from streamiter.operators.collect import Collect, Collected
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.rejection import shortened
from streamiter.runtime.graph import SINGLE_INPUT
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.topics.formats import Json
from streamiter.topics.secrets import shown_given
from streamiter.topics.topic import Encoder, Topic
from streamiter.topics.topic_sink import TopicSink
from streamiter.user_code import user_line

if TYPE_CHECKING:
    from streamiter.flow.stream import Stream

__all__ = ["add_collect", "add_dead_letters", "add_publisher", "add_sink"]


def add_sink(
    stream: Stream,
    topic: Topic,
    encode: Encoder | None,
    key: Callable[[Any], bytes | str | None] | None,
    delivery: Literal["at_least_once"] | None,
    options: StepOptions,
) -> None:
    """See ``Stream.sink``."""
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
