"""Feedback that goes through a topic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, final

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import DecodeError, GraphError, PlainDataError
from streamiter.flow.stream import Stream
from streamiter.runtime.graph import Edge, Step
from streamiter.runtime.topic_outlets import DATA, Message
from streamiter.topics.topic import Headers, Topic, TopicBatch

if TYPE_CHECKING:
    from streamiter.iteration.loop import Loop

__all__ = [
    "FeedbackRecords",
    "FeedbackThrough",
    "check_can_be_shared",
    "check_topic_is_free",
    "feedback_stream",
    "feedback_through",
]


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


@final
class FeedbackRecords:
    """A decoder for the topic of ``feedback_through``: ``flow.source(topic, decode=FeedbackRecords())``.

    Each record is a dict: ``run`` (that of the job), ``producer`` (the number of the subtask that feeds back),
    ``kind``, ``epoch`` (None for barriers and starts), ``is_copy`` (whether this control record is there only for who
    watches this partition) and ``records``: the batch that is fed back, empty for control records. A ``kind`` is
    ``"data"``, ``"watermark"`` (nothing more of this epoch comes from this producer), ``"end of data"``,
    ``"barrier"``, ``"suspend"`` or ``"start"``; that of a start has ``step``, the subtask by its name.

    ``structs``: the classes of ``msgspec.Struct`` that may be among the records.

    >>> import asyncio
    >>> from streamiter import Flow, IterationBodyResult, feedback_through, iterate_unbounded_streams
    >>> from streamiter.topics import MemoryBroker
    >>> topic = MemoryBroker().topic("loop")
    >>> asyncio.run(topic.create())
    >>> loop, watch = Flow("loop"), Flow("watch")
    >>> def body(variables, data):
    ...     back = variables[0].map(lambda n: n + 1).filter(lambda n: n < 3)
    ...     return IterationBodyResult([feedback_through(back, topic)], [])
    >>> _ = iterate_unbounded_streams([loop.from_items([0])], [], body)
    >>> _ = loop.run()
    >>> fed_back = watch.source(topic, decode=FeedbackRecords(), stop="latest").collect()
    >>> _ = watch.run()
    >>> [(each["epoch"], each["records"]) for each in fed_back.items if each["kind"] == "data"]
    [(1, [1]), (2, [2])]

    Watching a loop from outside: what goes through its topic, as records.
    """

    def __init__(self, structs: Iterable[type[msgspec.Struct]] = ()) -> None:
        self._plain_data = PlainData(structs)

    def decode(self, batch: TopicBatch) -> list[dict[str, Any]]:
        """One dict for each record of the topic."""
        decoded: list[dict[str, Any]] = []
        failures: dict[int, str] = {}
        for index, (value, headers) in enumerate(zip(batch.values, batch.headers, strict=True)):
            try:
                decoded.append(self._record(batch.partition, value or b"", headers))
            except (ValueError, PlainDataError) as error:
                failures[index] = f"not what a loop feeds back: {error}"
        if failures:
            raise DecodeError(failures)
        return decoded

    def _record(self, partition: int, value: bytes, headers: Headers) -> dict[str, Any]:
        message = Message.of(headers)
        record = {
            "run": message.run,
            "producer": message.producer,
            "kind": message.kind,
            "epoch": message.epoch,
            "is_copy": message.kind != DATA and message.home != partition,
            "records": self._plain_data.decode_batch(value) if message.kind == DATA else [],
        }
        return {**record, "step": message.step} if message.step else record


def check_can_be_shared(loop: Loop, step: Step) -> None:
    """Raise GraphError for a loop in which something waits for complete epochs: no worker knows of any.

    ``step`` is one of its steps, whose line is told.

    What a loop must be for several processes to share it.
    """
    if loop.bounded:
        _refuse(step, "an unbounded iteration", "a bounded one", "use iterate_unbounded_streams")
    if loop.max_epochs_ahead is not None:
        given = f"max_epochs_ahead={loop.max_epochs_ahead}"
        _refuse(step, "max_epochs_ahead=None", given, "leave it out: a shared loop is asynchronous")
    if loop.has_stamped_data:
        _refuse(step, "data without epochs", "data of epochs_every", "leave epochs_every out")


def _refuse(step: Step, expected: str, given: str, instead: str) -> None:
    raise GraphError(
        f"step {step.name!r}: expected {expected} in a loop that workers share, given {given}; {instead}",
        where=step.where,
    )
