"""Feedback that goes through a topic instead of memory, so that processes can share a loop and others can watch it.

``feedback_through(stream, topic)`` marks a feedback stream, and ``FeedbackRecords`` decodes the topic for a flow that
watches the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import DecodeError, GraphError, PlainDataError
from streamiter.flow.stream import Stream
from streamiter.runtime.graph import Edge, Step
from streamiter.runtime.topic_outlets import DATA, Message
from streamiter.topics.topic import Headers, Topic, TopicBatch


class FeedbackThrough:
    """The result of :func:`feedback_through`: it can only be one of the ``feedback_variable_streams``."""

    __slots__ = ("stream", "topic")

    def __init__(self, stream: Stream, topic: Topic) -> None:
        self.stream = stream
        self.topic = topic

    if not TYPE_CHECKING:  # Type checkers know that it has no other attributes.

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
    """Send a feedback stream through a topic: other programs can watch the loop, and processes can share it.

    The topic must exist, have at least one partition for each subtask of the variable stream, and be used by this
    feedback stream only. Records of earlier runs are skipped, so the topic need not keep records longer than they wait
    to be handled; if the topic drops a record earlier, the job fails. Records are plain data.
    :class:`streamiter.iteration.FeedbackRecords` reads the topic from outside.

    Order, epochs, ends and ``max_epochs_ahead`` are as in memory, and so are snapshots of the job: each contains the
    pending feedback. No step waits for the topic: feedback that is not written waits in memory and then on disk, within
    the ``feedback_limits`` of the iteration. Feedback for which the head has no memory stays in the topic.

    **Several processes** share a loop when each starts the same flow with ``worker=(index, count)`` and one
    ``run_id`` (see :meth:`Flow.start <streamiter.Flow.start>`): a feedback stream that is repartitioned
    (``key_by``, ``rebalance``, ``broadcast``, ``partition_by``) goes to the heads of all of them, so the topic
    needs a partition for each head of each.

    Raises GraphError for an argument that is no stream or no topic.

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


def feedback_stream(given: Stream | FeedbackThrough) -> Stream:
    """Return the stream that is fed back, in memory or through a topic."""
    return given.stream if isinstance(given, FeedbackThrough) else given


def check_topic_is_free(head: Step, edges: Sequence[Edge], topic: Topic, steps: Sequence[Step]) -> None:
    """Raise GraphError if another feedback stream goes through the same topic."""
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

    Each record is a dict with these keys:

    - ``run``: the run of the job.
    - ``producer``: the number of the subtask that feeds back.
    - ``kind``: ``"data"``, ``"watermark"`` (the producer sends no more records of this epoch), ``"end of data"``,
      ``"barrier"``, ``"suspend"`` or ``"start"``. A start also has the key ``step``, the name of the subtask.
    - ``epoch``: None for barriers and starts.
    - ``is_copy``: whether this control record exists only for programs that watch this partition.
    - ``records``: the batch that is fed back, empty for control records.

    ``structs`` are the classes of ``msgspec.Struct`` that may be among the records.

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
    """

    def __init__(self, structs: Iterable[type[msgspec.Struct]] = ()) -> None:
        self._plain_data = PlainData(structs)

    def decode(self, batch: TopicBatch) -> list[dict[str, Any]]:
        """Return one dict for each record of the topic."""
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
        message = Message.from_headers(headers)
        record = {
            "run": message.run,
            "producer": message.producer,
            "kind": message.kind,
            "epoch": message.epoch,
            "is_copy": message.kind != DATA and message.home != partition,
            "records": self._plain_data.decode_batch(value) if message.kind == DATA else [],
        }
        return {**record, "step": message.step} if message.step else record
