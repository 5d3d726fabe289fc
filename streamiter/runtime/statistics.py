"""What a job tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from streamiter.channels import ChannelStatistics
from streamiter.operators.statistics import OperatorStatistics

__all__ = ["FeedbackStatistics", "JobState", "JobStatistics", "StepStatistics", "TaskStatistics"]

JobState = Literal["running", "finished", "suspended", "aborted", "failed"]
"""``finished``: the inputs ended (or were drained); ``suspended``: stopped at a batch boundary."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One operator instance."""

    step: str
    subtask: int
    counts: OperatorStatistics


@dataclass(frozen=True, slots=True)
class FeedbackStatistics:
    """One channel of a feedback edge."""

    name: str
    records: int
    """Records waiting."""
    total_records: int
    """Records fed back since the start."""
    bytes_in_memory: int
    bytes_on_disk: int


@dataclass(frozen=True, slots=True)
class TaskStatistics:
    """One task: a chain of operators in one subtask."""

    name: str
    steps: tuple[StepStatistics, ...]
    epoch_watermark: int
    """Below 0 before the first epoch is complete."""
    inputs: tuple[ChannelStatistics, ...]
    """The channels it reads, with depth and peak."""
    outputs: tuple[ChannelStatistics, ...]
    """The channels it writes."""
    waiting_records: int
    """Records emitted that found no room in these channels yet."""
    feedback: tuple[FeedbackStatistics, ...]
    blocked_s: float
    """Time spent waiting for room downstream."""
    lag: Mapping[int, int]
    """For a source: records not yet read, by partition."""
    ended: bool


@dataclass(frozen=True, slots=True)
class JobStatistics:
    """A job at one moment."""

    flow: str
    state: JobState
    elapsed_s: float
    tasks: tuple[TaskStatistics, ...]

    def step(self, name: str) -> OperatorStatistics:
        """The counts of a step, all subtasks together. KeyError if there is no such step."""
        counts = [step.counts for task in self.tasks for step in task.steps if step.step == name]
        if not counts:
            known = ", ".join(dict.fromkeys(step.step for task in self.tasks for step in task.steps))
            raise KeyError(f"no step {name!r}; there are {known}")
        return OperatorStatistics(
            records_in=sum(count.records_in for count in counts),
            batches_in=sum(count.batches_in for count in counts),
            records_out=sum(count.records_out for count in counts),
            rejected=sum(count.rejected for count in counts),
        )
