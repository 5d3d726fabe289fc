"""Feedback of one variable stream through a topic: the queues, and the tasks between them and the topic."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.spill import SpillQueue
from streamiter.clock import Clock
from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.operators.rejection import RecordFailure
from streamiter.runtime.failure import call_unless_cancelled
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.graph import Edge, FeedbackLimits, Step
from streamiter.runtime.partitioning import Forward
from streamiter.runtime.topic_feedback.inlet import Inlet, Supply
from streamiter.runtime.topic_feedback.message import HEADER_BYTES_MAX
from streamiter.runtime.topic_feedback.outgoing import OutgoingPump, Outlet
from streamiter.runtime.topic_feedback.ranges import check_is_there
from streamiter.runtime.topic_feedback.returning import RECORDS_PER_READ, ReturningPump
from streamiter.runtime.topic_feedback.track import Track
from streamiter.runtime.topic_feedback.worker import Worker
from streamiter.topics.record_limit import record_limit
from streamiter.topics.topic import ReadRequest, Topic, TopicDescription, TopicReader, TopicWriter

__all__ = ["MakeQueue", "TopicFeedback"]

MakeQueue = Callable[[str, FeedbackLimits], SpillQueue]

# A topic that takes less could hold hardly more than the headers.
_LEAST_LIMIT_BYTES: Final = 2 * HEADER_BYTES_MAX


@final
class TopicFeedback:
    """All that is fed back to the heads of one variable stream, in one process.

    With n workers of p subtasks each there are n·p heads; head h reads the partitions q with q mod n·p = h.
    Each subtask that feeds back has an outgoing queue for each head, and each head of this process a channel
    for each such subtask of this process, in which what those of other workers feed back comes too.
    """

    def __init__(
        self,
        step: Step,
        *,
        worker: Worker,
        run_id: str,
        start: str,
        make_queue: MakeQueue,
        plain_data: PlainData,
        clock: Clock,
    ) -> None:
        """``step`` is the head; ``start`` tells this start of the job from any other one."""
        self._step = step
        self._edges = [edge for edge in step.inputs if edge.feedback_topic is not None]
        [topic] = dict.fromkeys(edge.feedback_topic for edge in self._edges)
        assert topic is not None
        self._topic: Topic = topic
        self._worker = worker
        self._heads = step.parallelism * worker.count
        self._run_id = run_id
        self._make_queue = make_queue
        self._plain_data = plain_data
        self._clock = clock
        self._limits = self._edges[0].feedback or FeedbackLimits()
        self.outgoing: dict[Edge, list[list[FeedbackChannel]]] = {}
        """For each upstream subtask, what it feeds back into: a queue for each head of all workers."""
        self.returning: dict[Edge, list[list[FeedbackChannel | None]]] = {}
        """For each upstream subtask a channel for each head of this process; None where nothing can flow."""
        self._outlets: list[Outlet] = []
        self._inlets: list[dict[int, Inlet]] = [{} for _ in range(step.parallelism)]
        self._out = OutgoingPump(run_id, start, self._outlets, plain_data)
        self._back = [
            ReturningPump(run_id, topic, inlets, self._limits.memory_bytes, plain_data, clock)
            for inlets in self._inlets
        ]
        first = 0
        for edge in self._edges:
            self._connect(edge, first)
            first += edge.upstream.parallelism * worker.count
        self._writer: TopicWriter | None = None
        self._readers: list[TopicReader] = []
        self._writing: asyncio.Task[None] | None = None
        self._has_finished = False
        self._reading: list[asyncio.Task[None]] = []

    # -- queues ----------------------------------------------------------------------------------------

    def _connect(self, edge: Edge, first: int) -> None:
        """Queues and channels of one edge; ``first`` is the number of its first producer."""
        parallelism = edge.upstream.parallelism
        self.outgoing[edge] = []
        self.returning[edge] = []
        for subtask in range(parallelism):
            number = first + self._worker.number(subtask, parallelism)
            outlets = [self._outlet(edge, subtask, number, head) for head in self._heads_of(edge, subtask)]
            self._outlets += outlets
            self.outgoing[edge].append([outlet.channel for outlet in outlets])
            queues = {outlet.head: outlet.channel for outlet in outlets}
            self.returning[edge].append(
                [self._inlet(edge, subtask, first, head, queues) for head in range(self._step.parallelism)]
            )

    def _heads_of(self, edge: Edge, subtask: int) -> Sequence[int]:
        """The heads that a subtask feeds back to."""
        if isinstance(edge.partitioning, Forward):
            return [self._worker.number(subtask, self._step.parallelism)]
        return range(self._heads)

    def _outlet(self, edge: Edge, subtask: int, number: int, head: int) -> Outlet:
        step = f"{edge.upstream.name}[{subtask}]"
        name = f"{step} → head {head} in topic {self._topic.name}"
        return Outlet(number, step, head, FeedbackChannel(name, self._make_queue(name, self._limits)))

    def _inlet(
        self, edge: Edge, subtask: int, first: int, head: int, queues: dict[int, FeedbackChannel]
    ) -> FeedbackChannel | None:
        """The channel by which what ``subtask`` feeds back reaches a head of this process."""
        number = self._worker.number(head, self._step.parallelism)
        if number not in queues:
            return None
        name = f"{edge.upstream.name}[{subtask}] → {self._step.name}[{head}]"
        # It never spills: when it holds as much as its limit, the topic keeps the rest.
        limits = FeedbackLimits(memory_bytes=sys.maxsize, directory=self._limits.directory)
        channel = FeedbackChannel(name, self._make_queue(name, limits))
        supply = Supply(
            self._back[head],
            queues[number],
            Track(self._topic.name, self._run_id, first + subtask),
            self._plain_data,
            is_shared=self._worker.shares,
        )
        channel.supply = supply
        parallelism = edge.upstream.parallelism
        for index in range(self._worker.count):
            producer = first + Worker(index, self._worker.count).number(subtask, parallelism)
            self._inlets[head][producer] = Inlet(
                channel,
                supply,
                takes_barriers=index == self._worker.index,
                takes_epochs=not self._worker.shares,
            )
        return channel

    # -- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin to read at the end of the topic, or, with other workers, where it begins; then say who writes.

        What belongs to the checkpoint from which the job goes on must be known: it is looked whether it is there.
        """
        try:
            description = await self._described()
            limit_bytes = self._checked(description)
            for head in range(self._step.parallelism):
                self._readers.append(await self._open_reader(head))
            self._writer = await self._topic.open_writer()
            for outlet in self._outlets:
                outlet.assign(range(outlet.head, description.partitions, self._heads))
            if not self._worker.shares:
                self._begin_tracks()
            await self._out.open(self._writer, limit_bytes - HEADER_BYTES_MAX)
        except Exception as error:
            raise RecordFailure(self._step.name) from error

    async def _open_reader(self, head: int) -> TopicReader:
        request = ReadRequest(
            subtask=self._worker.number(head, self._step.parallelism),
            subtasks=self._heads,
            # What another worker has fed back before this one was started lies there already.
            start="earliest" if self._worker.shares else "latest",
            max_records=RECORDS_PER_READ,
            clock=self._clock,
        )
        return await self._topic.open_reader(request)

    def _begin_tracks(self) -> None:
        for outlet in self._outlets:
            offset = self._readers[outlet.head].positions()[outlet.home]
            self._inlets[outlet.head][outlet.producer].track.begin(outlet.home, offset)

    async def _described(self) -> TopicDescription:
        """The topic as it is; raises CheckpointError if it has not what is to be gone on with."""
        restored = [
            each.range
            for inlets in self._inlets
            for inlet in inlets.values()
            for each in inlet.track.restored
        ]
        description = None
        try:
            description = await self._topic.describe()
        except TopicNotFound:
            if not restored:
                raise
        for lying in restored:
            check_is_there(lying, self._topic, description)
        assert description is not None
        return description

    def _checked(self, description: TopicDescription) -> int:
        """The largest record to write; raises ConfigurationError for a topic that does not fit."""
        if description.partitions < self._heads:
            heads = f"{self._heads} heads"
            if self._worker.shares:
                heads += f" ({self._step.parallelism} in each of {self._worker.count} workers)"
            raise ConfigurationError(
                f"feedback through {self._topic.url}: expected at least a partition for each of {heads}, given "
                f"{description.partitions}; create it with more: await topic.create(partitions={self._heads})"
            )
        limit_bytes = record_limit(description)
        if limit_bytes < _LEAST_LIMIT_BYTES:
            raise ConfigurationError(
                f"feedback through {self._topic.url}: expected a topic that takes records of at least "
                f"{_LEAST_LIMIT_BYTES} bytes, given one that takes {limit_bytes}; raise its limit"
            )
        return limit_bytes

    def start(self, group: asyncio.TaskGroup) -> None:
        """Begin to write and read, as tasks of ``group``."""
        where = f"{self._step.name} through {self._topic.name}"
        self._writing = group.create_task(self._guarded(self._out.run), name=f"write {where}")
        self._reading = [
            group.create_task(self._guarded(partial(pump.run, reader)), name=f"read {where}[{head}]")
            for head, (pump, reader) in enumerate(zip(self._back, self._readers, strict=True))
        ]

    async def _guarded(self, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await call_unless_cancelled(run, self._step.name)
        except RecordFailure:
            raise
        except Exception as error:
            raise RecordFailure(self._step.name) from error

    async def finish(self) -> None:
        """All tasks have ended: stop. What goes to other workers is written before."""
        assert self._writing is not None
        self._has_finished = True
        if self._worker.shares:
            self._out.finish()
            await asyncio.wait([self._writing])
        for running in (self._writing, *self._reading):
            running.cancel()

    async def close(self) -> list[Exception]:
        """Let go of the topic, whatever went wrong; gives what did."""
        closing = [reader.close() for reader in self._readers]
        if self._writer is not None:
            closing.append(self._close_writer(self._writer))
        results = await asyncio.gather(*closing, return_exceptions=True)
        for outlet in self._outlets:
            outlet.channel.close()
        return [self._failure(result) for result in results if isinstance(result, Exception)]

    async def _close_writer(self, writer: TopicWriter) -> None:
        """Store what was written; not where the job was aborted or has failed, since nobody will read it."""
        if self._has_finished:
            await writer.close()
            return
        closing = asyncio.create_task(writer.close(), name=f"close {self._topic.name}")
        await asyncio.sleep(0)  # It has to begin, or it would close nothing.
        closing.cancel()
        await asyncio.wait([closing])
        if not closing.cancelled() and (error := closing.exception()) is not None:
            raise error

    def _failure(self, error: Exception) -> RecordFailure:
        failure = RecordFailure(self._step.name)
        failure.__cause__ = error
        return failure
