"""How sinks get their writers: at once and at least once, unless the job writes in transactions."""

from __future__ import annotations

from streamiter.topics.topic import Topic, TopicWriter

__all__ = ["Outputs"]


class Outputs:
    """What all sinks of a job share; a job that commits its outputs puts another one into its scope."""

    async def open_writer(self, topic: Topic, *, at_least_once: bool, step: str) -> TopicWriter:
        """A writer for one subtask of the sink ``step``; ``at_least_once`` asks for one that writes at once."""
        return await topic.open_writer()

    async def barrier_passed(self, writer: TopicWriter) -> None:
        """A sink takes its snapshot: all that was written before must count with that checkpoint."""
        await writer.flush()
