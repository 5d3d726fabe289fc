"""Feedback of one variable stream through a topic.

:class:`TopicFeedback` connects the two sides: the outgoing paths of the subtasks that feed back
(:mod:`~streamiter.engine.tasks.topic_outgoing`) and the return paths of the heads
(:mod:`~streamiter.engine.tasks.topic_returning`). It opens the topic, and runs the pumps that write and read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, final

from streamiter.engine.graph.feedback import FeedbackChannel, FeedbackLimits, check_range_in_topic, spill_queue
from streamiter.engine.graph.graph import Edge, Step
from streamiter.engine.graph.output import Forward
from streamiter.engine.tasks.failures import FailuresOf, call_unless_cancelled
from streamiter.engine.tasks.topic_outgoing import HEADER_BYTES_MAX, OutgoingPath, OutgoingPump
from streamiter.engine.tasks.topic_returning import RECORDS_PER_READ, ReturningPump, TopicReturnPath
from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.operators.output import RecordFailure
from streamiter.topics.connecting import record_limit
from streamiter.topics.topic import ReadRequest, Topic, TopicDescription, TopicReader, TopicWriter
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import close_each
from streamiter.values.plain_data import PlainData

# A smaller limit of a topic leaves little room besides the headers.
_LEAST_LIMIT_BYTES: Final = 2 * HEADER_BYTES_MAX


@final
class TopicFeedback:
    """The feedback to the heads of one variable stream.

    Of p heads, head h reads the partitions q with q mod p = h. Each subtask that feeds back has an outgoing queue for
    each head, and each head has a channel for each such subtask.
    """

    def __init__(self, step: Step, *, run_id: str, start: str, plain_data: PlainData, clock: Clock) -> None:
        """``step`` is the head; ``start`` is the unique id of this start of the job."""
        self._step = step
        self._edges = [edge for edge in step.inputs if edge.feedback_topic is not None]
        [topic] = dict.fromkeys(edge.feedback_topic for edge in self._edges)
        assert topic is not None
        self._topic: Topic = topic
        self._run_id = run_id
        self._plain_data = plain_data
        self._clock = clock
        self._limits = self._edges[0].feedback or FeedbackLimits()
        self.outgoing: dict[Edge, list[list[FeedbackChannel]]] = {}
        """For each upstream subtask its outgoing queues, one for each head."""
        self.returning: dict[Edge, list[list[FeedbackChannel | None]]] = {}
        """For each upstream subtask its channel to each head; None if it does not feed back to it."""
        self._outgoing_paths: list[OutgoingPath] = []
        self._return_paths: list[dict[int, TopicReturnPath]] = [{} for _ in range(step.parallelism)]
        self._out = OutgoingPump(run_id, start, self._outgoing_paths, plain_data)
        self._back = [
            ReturningPump(run_id, topic, paths, self._limits.memory_bytes, plain_data, clock)
            for paths in self._return_paths
        ]
        first = 0
        for edge in self._edges:
            self._connect(edge, first)
            first += edge.upstream.parallelism
        self._writer: TopicWriter | None = None
        self._readers: list[TopicReader] = []
        self._writing: asyncio.Task[None] | None = None
        self._has_finished = False
        self._reading: list[asyncio.Task[None]] = []

    # -- queues ----------------------------------------------------------------------------------------

    def _connect(self, edge: Edge, first: int) -> None:
        """Make the queues and channels of one edge; ``first`` is the number of its first producer."""
        all_heads = range(self._step.parallelism)
        subtasks = range(edge.upstream.parallelism)
        self.outgoing[edge] = [[] for _ in subtasks]
        self.returning[edge] = [[None for _ in all_heads] for _ in subtasks]
        for subtask in subtasks:
            for head in [subtask] if isinstance(edge.partitioning, Forward) else all_heads:
                outgoing = self._outgoing_path(f"{edge.upstream.name}[{subtask}]", first + subtask, head)
                self.outgoing[edge][subtask].append(outgoing.channel)
                self.returning[edge][subtask][head] = self._return_path(outgoing).channel

    def _outgoing_path(self, step: str, producer: int, head: int) -> OutgoingPath:
        name = f"{step} → head {head} in topic {self._topic.name}"
        channel = FeedbackChannel(name, spill_queue(name, self._limits, self._plain_data))
        outgoing = OutgoingPath(producer, step, head, channel)
        self._outgoing_paths.append(outgoing)
        return outgoing

    def _return_path(self, outgoing: OutgoingPath) -> TopicReturnPath:
        """Make the way from the topic to the head for the feedback of an outgoing path."""
        name = f"{outgoing.step} → {self._step.name}[{outgoing.head}]"
        path = self._return_paths[outgoing.head][outgoing.producer] = TopicReturnPath(
            self._back[outgoing.head],
            outgoing.channel,
            name=name,
            queue=spill_queue(name, self._limits, self._plain_data),
            topic=self._topic.name,
            run=self._run_id,
            producer=outgoing.producer,
        )
        return path

    # -- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the topic for reading at its end and for writing; write the start.

        The tracks must have the ranges of the restored checkpoint already: the topic is checked for them.
        """
        with FailuresOf(self._step.name):
            description = await self._described()
            limit_bytes = self._checked(description)
            heads = self._step.parallelism
            for head in range(heads):
                request = ReadRequest(
                    subtask=head, subtasks=heads, start="latest", max_records=RECORDS_PER_READ, clock=self._clock
                )
                self._readers.append(await self._topic.open_reader(request))
            self._writer = await self._topic.open_writer()
            for outgoing in self._outgoing_paths:
                outgoing.assign(range(outgoing.head, description.partitions, heads))
                offset = self._readers[outgoing.head].positions()[outgoing.home]
                self._return_paths[outgoing.head][outgoing.producer].begin(outgoing.home, offset)
            await self._out.open(self._writer, limit_bytes - HEADER_BYTES_MAX)

    async def _described(self) -> TopicDescription:
        """Return the description of the topic. Raises CheckpointError if a restored range is not in it."""
        restored = [each.range for paths in self._return_paths for path in paths.values() for each in path.restored]
        description = None
        try:
            description = await self._topic.describe()
        except TopicNotFound:
            if not restored:
                raise
        for topic_range in restored:
            check_range_in_topic(topic_range, self._topic, description)
        assert description is not None
        return description

    def _checked(self, description: TopicDescription) -> int:
        """Return the size limit of a record. Raises ConfigurationError for too few partitions or a small limit."""
        heads = self._step.parallelism
        if description.partitions < heads:
            raise ConfigurationError(
                f"feedback through {self._topic.url}: expected at least a partition for each of {heads} heads, given "
                f"{description.partitions}; create it with more: await topic.create(partitions={heads})"
            )
        limit_bytes = record_limit(description)
        if limit_bytes < _LEAST_LIMIT_BYTES:
            raise ConfigurationError(
                f"feedback through {self._topic.url}: expected a topic that takes records of at least "
                f"{_LEAST_LIMIT_BYTES} bytes, given one that takes {limit_bytes}; raise its limit"
            )
        return limit_bytes

    def start(self, group: asyncio.TaskGroup) -> None:
        where = f"{self._step.name} through {self._topic.name}"
        self._writing = group.create_task(self._guarded(self._out.run), name=f"write {where}")
        self._reading = [
            group.create_task(self._guarded(partial(pump.run, reader)), name=f"read {where}[{head}]")
            for head, (pump, reader) in enumerate(zip(self._back, self._readers, strict=True))
        ]

    async def _guarded(self, run: Callable[[], Awaitable[None]]) -> None:
        with FailuresOf(self._step.name):
            await call_unless_cancelled(run, self._step.name)

    async def finish(self) -> None:
        """All tasks have ended: stop the pumps."""
        assert self._writing is not None
        self._has_finished = True
        for running in (self._writing, *self._reading):
            running.cancel()

    async def close(self) -> list[Exception]:
        """Close the topic and the queues; return the errors."""
        closing = [reader.close() for reader in self._readers]
        if self._writer is not None:
            closing.append(self._close_writer(self._writer))
        results = await asyncio.gather(*closing, return_exceptions=True)
        results += await close_each(outgoing.channel.close for outgoing in self._outgoing_paths)
        return [self._failure(result) for result in results if isinstance(result, Exception)]

    async def _close_writer(self, writer: TopicWriter) -> None:
        """Close the writer. After an abort or a failure, stop waiting for its records: they are not needed."""
        if self._has_finished:
            await writer.close()
            return
        closing = asyncio.create_task(writer.close(), name=f"close {self._topic.name}")
        await asyncio.sleep(0)  # The task must start, or it would close nothing.
        closing.cancel()
        await asyncio.wait([closing])
        if not closing.cancelled() and (error := closing.exception()) is not None:
            raise error

    def _failure(self, error: Exception) -> RecordFailure:
        failure = RecordFailure(self._step.name)
        failure.__cause__ = error
        return failure
