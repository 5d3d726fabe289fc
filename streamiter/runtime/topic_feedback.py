"""Feedback of one variable stream through a topic, which several processes may share.

:class:`TopicFeedback` connects the two sides: the outlets of the subtasks that feed back
(:mod:`~streamiter.runtime.topic_outlets`) and the inlets of the heads (:mod:`~streamiter.runtime.topic_inlets`). It
opens the topic, and runs the pumps that write and read it. :class:`Worker` says which of the processes that run a flow
together this one is.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeGuard, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import Clock
from streamiter.closing import close_each
from streamiter.errors import ConfigurationError, GraphError, TopicNotFound
from streamiter.operators.holding import MiniBatch
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import RecordFailure
from streamiter.runtime.failures import FailuresOf, call_unless_cancelled
from streamiter.runtime.feedback import FeedbackChannel, FeedbackLimits, check_range_in_topic, spill_queue
from streamiter.runtime.graph import Edge, Step
from streamiter.runtime.output import Forward
from streamiter.runtime.topic_inlets import RECORDS_PER_READ, Inlet, ReturningPump, TopicReturnPath
from streamiter.runtime.topic_outlets import HEADER_BYTES_MAX, FeedbackOutlet, OutgoingPump
from streamiter.topics.topic import ReadRequest, Topic, TopicDescription, TopicReader, TopicWriter, record_limit

# A smaller limit of a topic leaves little room besides the headers.
_LEAST_LIMIT_BYTES: Final = 2 * HEADER_BYTES_MAX


@final
class TopicFeedback:
    """The feedback to the heads of one variable stream, in one process.

    With n workers of p subtasks each there are n·p heads; head h reads the partitions q with q mod n·p = h. Each
    subtask that feeds back has an outgoing queue for each head. Each head of this process has a channel for each such
    subtask of this process; the feedback of the same subtasks of other workers comes by it too.
    """

    def __init__(
        self, step: Step, *, worker: Worker, run_id: str, start: str, plain_data: PlainData, clock: Clock
    ) -> None:
        """``step`` is the head; ``start`` is the unique id of this start of the job."""
        self._step = step
        self._edges = [edge for edge in step.inputs if edge.feedback_topic is not None]
        [topic] = dict.fromkeys(edge.feedback_topic for edge in self._edges)
        assert topic is not None
        self._topic: Topic = topic
        self._worker = worker
        self._heads = step.parallelism * worker.count
        self._run_id = run_id
        self._plain_data = plain_data
        self._clock = clock
        self._limits = self._edges[0].feedback or FeedbackLimits()
        self.outgoing: dict[Edge, list[list[FeedbackChannel]]] = {}
        """For each upstream subtask its outgoing queues, one for each head of all workers."""
        self.returning: dict[Edge, list[list[FeedbackChannel | None]]] = {}
        """For each upstream subtask its channel to each head of this process; None if it does not feed back to it."""
        self._outlets: list[FeedbackOutlet] = []
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
        """Make the queues and channels of one edge; ``first`` is the number of its first producer."""
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
        """Return the heads that a subtask feeds back to."""
        if isinstance(edge.partitioning, Forward):
            return [self._worker.number(subtask, self._step.parallelism)]
        return range(self._heads)

    def _outlet(self, edge: Edge, subtask: int, number: int, head: int) -> FeedbackOutlet:
        step = f"{edge.upstream.name}[{subtask}]"
        name = f"{step} → head {head} in topic {self._topic.name}"
        queue = spill_queue(name, self._limits, self._plain_data)
        return FeedbackOutlet(number, step, head, FeedbackChannel(name, queue))

    def _inlet(
        self, edge: Edge, subtask: int, first: int, head: int, queues: dict[int, FeedbackChannel]
    ) -> FeedbackChannel | None:
        """Return the channel for the feedback of ``subtask`` to a head of this process; None if there is none."""
        number = self._worker.number(head, self._step.parallelism)
        if number not in queues:
            return None
        name = f"{edge.upstream.name}[{subtask}] → {self._step.name}[{head}]"
        # It never spills: above its limit, the feedback waits in the topic.
        limits = FeedbackLimits(memory_bytes=sys.maxsize, directory=self._limits.directory)
        return_path = TopicReturnPath(
            self._back[head],
            queues[number],
            self._plain_data,
            topic=self._topic.name,
            run=self._run_id,
            producer=first + subtask,
            is_shared=self._worker.shares,
        )
        channel = FeedbackChannel(name, spill_queue(name, limits, self._plain_data), return_path)
        parallelism = edge.upstream.parallelism
        for index in range(self._worker.count):
            producer = first + Worker(index, self._worker.count).number(subtask, parallelism)
            self._inlets[head][producer] = Inlet(
                channel, return_path, takes_barriers=index == self._worker.index, takes_epochs=not self._worker.shares
            )
        return channel

    # -- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the topic for reading at its end (with other workers, at its start) and for writing; write the start.

        The tracks must have the ranges of the restored checkpoint already: the topic is checked for them.
        """
        with FailuresOf(self._step.name):
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

    async def _open_reader(self, head: int) -> TopicReader:
        request = ReadRequest(
            subtask=self._worker.number(head, self._step.parallelism),
            subtasks=self._heads,
            # The topic may already have feedback of a worker that was started earlier.
            start="earliest" if self._worker.shares else "latest",
            max_records=RECORDS_PER_READ,
            clock=self._clock,
        )
        return await self._topic.open_reader(request)

    def _begin_tracks(self) -> None:
        for outlet in self._outlets:
            offset = self._readers[outlet.head].positions()[outlet.home]
            self._inlets[outlet.head][outlet.producer].return_path.begin(outlet.home, offset)

    async def _described(self) -> TopicDescription:
        """Return the description of the topic. Raises CheckpointError if a restored range is not in it."""
        restored = [
            each.range for inlets in self._inlets for inlet in inlets.values() for each in inlet.return_path.restored
        ]
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
        """All tasks have ended: stop the pumps. Feedback to other workers is written before."""
        assert self._writing is not None
        self._has_finished = True
        if self._worker.shares:
            self._out.finish()
            await asyncio.wait([self._writing])
        for running in (self._writing, *self._reading):
            running.cancel()

    async def close(self) -> list[Exception]:
        """Close the topic and the queues; return the errors."""
        closing = [reader.close() for reader in self._readers]
        if self._writer is not None:
            closing.append(self._close_writer(self._writer))
        results = await asyncio.gather(*closing, return_exceptions=True)
        results += await close_each(outlet.channel.close for outlet in self._outlets)
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


# Enough for a UUID or a name with a date; every record of the topic contains it.
RUN_ID_CHARACTERS: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Worker:
    """One of the processes that run the whole flow and share its loops through topics; without others, the only one."""

    index: int = 0
    """The number of this process."""
    count: int = 1
    """The number of processes."""
    run_id: str | None = None
    """The id of the run, the same in all processes; None if loops are not shared."""

    @property
    def shares(self) -> bool:
        """Whether its loops are shared with other processes."""
        return self.run_id is not None

    def number(self, subtask: int, parallelism: int) -> int:
        """Return the number of a subtask among the subtasks of all workers."""
        return self.index * parallelism + subtask


def worker_of(worker: object, run_id: object, snapshot: object) -> Worker | None:
    """Return the worker of the options ``flow.start(worker=…, run_id=…)``; None without them."""
    if worker is None and run_id is None:
        return None
    if worker is None or run_id is None:
        raise ConfigurationError(
            f"flow.start: expected worker and run_id together, given worker={worker!r} and run_id={run_id!r}; "
            'write worker=(0, 2), run_id="…", with the same run_id for all workers and a new one for each run'
        )
    if snapshot is not None:
        raise ConfigurationError(
            "flow.start: expected no snapshot for a worker, given one; it would not contain the feedback on its way to "
            "the others: start all workers without one"
        )
    if not _is_place(worker):
        raise ConfigurationError(
            f"flow.start: expected worker=(index, count) with an index below the count, given {worker!r}; the "
            "first of two workers is (0, 2)"
        )
    if not isinstance(run_id, str) or not 0 < len(run_id.encode()) <= RUN_ID_CHARACTERS:
        raise ConfigurationError(
            f"flow.start: expected run_id to be a text of 1 to {RUN_ID_CHARACTERS} bytes, given {run_id!r}; any "
            "will do that no run of this flow has had"
        )
    return Worker(worker[0], worker[1], run_id)


def _is_place(worker: object) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(worker, (tuple, list))
        and len(worker) == 2
        and all(isinstance(number, int) and not isinstance(number, bool) for number in worker)
        and 0 <= worker[0] < worker[1]
    )


def check_shared(flow: str, steps: Sequence[Step], processes: int) -> None:
    """Raise GraphError unless workers, each a single process, can share all loops of the flow."""
    if processes > 1:
        raise GraphError(
            f"flow {flow!r}: expected either worker= or a flow in several processes, given a worker of {processes} "
            "processes; start it without worker, and its processes share the loops in memory"
        )
    if not any(step.loop is not None for step in steps):
        raise GraphError(
            f"flow {flow!r}: expected an iteration that its workers share, given none; start it without worker"
        )
    for step in steps:
        if step.loop is not None:
            step.loop.check_shared(step)
        for edge in step.inputs:
            if edge.feedback is not None and edge.feedback_topic is None:
                raise GraphError(
                    f"step {step.name!r}: expected feedback through a topic that the workers share, given "
                    f"{edge.upstream.name!r} fed back in memory; write feedback_through(stream, topic(…))",
                    where=step.where,
                )


def check_shared_operator(step: Step, operator: Operator) -> None:
    """Raise GraphError for an operator that waits for epochs: the epochs of a shared loop are never complete."""
    # A MiniBatch emits full mini-batches; the rest waits, as in any loop whose data does not end.
    listens = isinstance(operator, IterationListener) and not isinstance(operator, MiniBatch)
    if step.loop is not None and (listens or operator.epochs_in_order):
        kind = "an IterationListener" if listens else "one with epochs_in_order"
        raise GraphError(
            f"step {step.name!r}: expected no operator that waits for epochs in a loop that workers share, given "
            f"{kind}; epochs are complete in the loop of a single process only",
            where=step.where,
        )
