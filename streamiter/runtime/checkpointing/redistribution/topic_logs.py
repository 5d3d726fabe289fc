"""What lies in a topic for heads that are others now: taken out of it, it is shared out like all that waited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, final

from streamiter.checkpoints.deferred_entries import entries_of
from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.spill import SpillQueue
from streamiter.clock import Clock
from streamiter.runtime.checkpointing.redistribution.old_job import OldJob, OldTask
from streamiter.runtime.graph import Edge, FeedbackLimits, Step, edge_number
from streamiter.runtime.port import PortOrigin
from streamiter.runtime.topic_feedback.gathering import gather
from streamiter.runtime.topic_feedback.ranges import TopicRange
from streamiter.topics.topic import Topic

__all__ = ["with_batches"]


async def with_batches(
    old: OldJob, steps: Iterable[Step], plain_data: PlainData, clock: Clock, queues: ExitStack
) -> OldJob:
    """The same job, with batches in the place of ranges where steps have another parallelism now.

    ``steps`` are those at the heads of the new tasks. The batches wait on disk until ``queues`` is closed.
    """
    gathering = _Gathering(old, plain_data, clock, queues)
    tasks = dict(old.tasks)
    for step in steps:
        edges = [edge for edge in step.inputs if edge.feedback_topic is not None]
        before = old.tasks.get(step.name, [])
        if edges and not _keeps(old, [step, *(edge.upstream for edge in edges)]):
            tasks[step.name] = [await gathering.with_batches(task, step, edges) for task in before]
    return replace(old, tasks=tasks)


def _keeps(old: OldJob, steps: Iterable[Step]) -> bool:
    return all(old.parallelism(step.name) == step.parallelism for step in steps)


@final
class _Gathering:
    def __init__(self, old: OldJob, plain_data: PlainData, clock: Clock, queues: ExitStack) -> None:
        self._old = old
        self._plain_data = plain_data
        self._clock = clock
        self._queues = queues

    async def with_batches(self, task: OldTask, step: Step, edges: Iterable[Edge]) -> OldTask:
        by_origin = {_key(step, edge): edge for edge in edges}
        logged: list[tuple[int, Iterable[Any]]] = []
        for port, frames in task.logged:
            edge = by_origin.get(PortOrigin(*task.state["gate"]["ports"][port])[:4])
            ranges = [lying for entry in entries_of(frames) if (lying := TopicRange.of(entry)) is not None]
            # What lies in another topic is refused where it is shared out.
            if edge is not None and ranges and {lying.topic for lying in ranges} == {_topic_of(edge).name}:
                logged.append((port, await self._gathered(step, edge, frames, ranges)))
            else:
                logged.append((port, frames))
        return replace(task, logged=logged)

    async def _gathered(
        self, step: Step, edge: Edge, frames: Iterable[Any], ranges: list[TopicRange]
    ) -> _Frames:
        import tempfile  # 4 ms with what it imports

        limits: FeedbackLimits = FeedbackLimits() if step.loop is None else step.loop.limits
        queue = SpillQueue(
            name=f"{step.name}, feedback of a checkpoint",
            plain_data=self._plain_data,
            memory_limit_bytes=limits.memory_bytes,
            disk_limit_bytes=limits.disk_bytes,
            directory=limits.directory or tempfile.gettempdir(),
        )
        self._queues.callback(queue.close)
        queue.refill([entry] for entry in entries_of(frames) if TopicRange.of(entry) is None)
        await gather(queue, _topic_of(edge), ranges, plain_data=self._plain_data, clock=self._clock)
        return _Frames(queue, self._plain_data)


@final
class _Frames:
    """The decoded frames of what is in a queue, made anew whenever one goes through them."""

    def __init__(self, queue: SpillQueue, plain_data: PlainData) -> None:
        self._queue = queue
        self._plain_data = plain_data

    def __iter__(self) -> Iterator[Any]:
        return map(self._plain_data.decode, self._queue.snapshot().frames())


def _key(step: Step, edge: Edge) -> tuple[Any, ...]:
    tag = None if edge.tag is None else edge.tag.name
    return edge.input_name, edge.upstream.name, tag, edge_number(step, edge)


def _topic_of(edge: Edge) -> Topic:
    assert edge.feedback_topic is not None
    return edge.feedback_topic
