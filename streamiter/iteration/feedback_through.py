"""Feedback that goes through a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from streamiter.errors import GraphError
from streamiter.flow.stream import Stream
from streamiter.runtime.graph import Edge, Step
from streamiter.topics.topic import Topic

__all__ = ["FeedbackThrough", "check_topic_is_free", "feedback_stream", "feedback_through"]


class FeedbackThrough:
    """What :func:`feedback_through` gives: one of the ``feedback_variable_streams``, and nothing else."""

    __slots__ = ("stream", "topic")

    def __init__(self, stream: Stream, topic: Topic) -> None:
        self.stream = stream
        self.topic = topic

    if not TYPE_CHECKING:  # Type checkers know that there is nothing else.

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            raise GraphError(
                f"feedback_through: expected {self!r} to be one of the feedback_variable_streams that a body gives "
                f"back, given .{name} of it; take that of the stream first, then feedback_through(…)"
            )

    def __repr__(self) -> str:
        return f"feedback_through({self.stream.name!r}, {self.topic.url})"


def feedback_through(stream: Stream, topic: Topic) -> FeedbackThrough:
    """Have a feedback stream go through a topic: a loop that can be watched, and that processes can share.

    The topic must exist, with at least one partition for each subtask of the variable stream, and belong to
    this feedback stream alone. What earlier runs have left in it is skipped, so it need not keep records for longer
    than they wait to be handled; where it has dropped one before, the job fails. Records are plain data.
    :class:`streamiter.iteration.FeedbackRecords` reads it from outside.

    Order, epochs, ends and ``max_epochs_ahead`` are as in memory, and so are snapshots of the job: each holds
    the feedback that was under way. Nothing waits for room in the topic: what is not written yet waits in
    memory and then on disk, within the ``feedback_limits`` of the iteration; what the head has no memory for
    stays in the topic.

    **Several processes** share a loop when each starts the same flow with ``worker=(index, count)`` and one
    ``run_id`` (see :meth:`Flow.start <streamiter.Flow.start>`): a feedback stream that is repartitioned
    (``key_by``, ``rebalance``, ``broadcast``, ``partition_by``) goes to the heads of all of them, so the topic
    needs a partition for each head of each.

    Raises GraphError for what is no stream or no topic.

    >>> from streamiter import Flow, IterationBodyResult, iterate_unbounded_streams
    >>> from streamiter.topics import MemoryBroker
    >>> import asyncio
    >>> topic = MemoryBroker().topic("loop")
    >>> asyncio.run(topic.create())
    >>> flow = Flow("count")
    >>> def body(variables, data):
    ...     counted = variables[0].map(lambda n: n + 1)
    ...     return IterationBodyResult([feedback_through(counted.filter(lambda n: n < 3), topic)], [counted])
    >>> [counted] = iterate_unbounded_streams([flow.from_items([0])], [], body)
    >>> collected = counted.collect()
    >>> flow.run().state, collected.items
    ('finished', [1, 2, 3])
    """
    if not isinstance(stream, Stream):
        raise GraphError(
            f"feedback_through: expected a stream, given {stream!r}; write feedback_through(stream, topic(…))"
        )
    if not isinstance(topic, Topic):
        raise GraphError(
            f'feedback_through: expected a topic, given {topic!r}; write feedback_through(stream, topic("kafka://…"))'
        )
    if getattr(topic, "bounded", False):
        raise GraphError(
            f"feedback_through: expected a topic with partitions and headers, given {topic.url}; use one of Kafka, "
            "of an SQLite file or in memory"
        )
    return FeedbackThrough(stream, topic)


def feedback_stream(given: Any) -> Any:
    """The stream that is fed back, whatever it goes through."""
    return given.stream if isinstance(given, FeedbackThrough) else given


def check_topic_is_free(head: Step, edges: list[Edge], topic: Topic, steps: list[Step]) -> None:
    """Raise GraphError where another feedback stream goes through the same topic."""
    for step in steps:
        for edge in step.inputs:
            other = edge.feedback_topic
            if other is not None and (other.commit_domain, other.name) == (topic.commit_domain, topic.name):
                raise GraphError(
                    f"feedback_through: expected a topic of its own for the feedback to {head.name!r} "
                    f"({edges[0].upstream.name!r}), given {topic.url}, through which {edge.upstream.name!r} goes; "
                    "create one for each feedback stream"
                )
