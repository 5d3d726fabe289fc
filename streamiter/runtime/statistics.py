"""What a job tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from streamiter.channels import ChannelStatistics
from streamiter.operators.operator import OperatorStatistics
from streamiter.runtime.feedback import FeedbackStatistics

__all__ = [
    "CheckpointStatistics",
    "JobState",
    "JobStatistics",
    "LoopStatistics",
    "RoundStatistics",
    "StepStatistics",
    "TaskStatistics",
]


JobState = Literal["running", "finished", "suspended", "aborted", "failed"]
"""``finished``: the inputs ended (or were drained); ``suspended``: stopped at a batch boundary."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One operator instance."""

    step: str
    subtask: int
    counts: OperatorStatistics


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
    """The channels of feedback edges it reads."""
    held_records: int
    """Records taken from these and not handled: not wanted now, of an epoch still to come, or left of a batch."""
    blocked_s: float
    """Time spent waiting for room downstream."""
    lag: dict[str, int]
    """For a source: records not yet read, by the number of the partition, as text, which JSON wants of keys."""
    is_paused: bool
    """For a source: reads no more for now, since a step behind it has more records set aside than channels hold."""
    ended: bool


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """Rounds of a loop, one after the other, that were fed as many records each."""

    first_epoch: int
    last_epoch: int
    records: int
    """Fed back in each of them."""


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """One iteration, all its subtasks together.

    Feedback reaches an epoch when its first record is fed back; the epoch is received when the last one is
    back at every head, and complete when the data has passed it too.
    """

    heads: tuple[str, ...]
    """Names of the steps where its variable streams enter it."""
    epoch_reached: int
    """0 before anything is fed back."""
    epoch_received: int
    """Below 0 before the first, whose feedback is the initial variables."""
    epoch_complete: int
    """Below 0 before the first."""
    ended_in: int | None
    """The epoch the iteration has ended in."""
    end_reason: str | None
    """Why it has ended there."""
    fed_back_records: int
    """Records fed back since the start."""
    criteria_records: int
    """Records of the termination criteria since the start."""
    rounds: tuple[RoundStatistics, ...]
    """The complete epochs to which something was fed back; of very many that differ, the last thousand."""
    waiting_records: int
    """Records fed back that no head has taken yet."""
    held_records: int
    """Records that heads have taken and keep until those of earlier epochs are received."""
    bytes_in_memory: int
    """Estimated size of both, as far as they are in memory."""
    bytes_on_disk: int
    """Size of the files in which the rest of both lies."""
    replayed_records: int
    """Records kept to be sent again in each epoch."""
    replayed_bytes_in_memory: int
    """Estimated size of those in memory."""
    replayed_bytes_on_disk: int
    """Size of the files in which the others lie."""

    @property
    def progress(self) -> str:
        """How far it has come, in words."""
        if self.ended_in is not None:
            return f"ended in epoch {self.ended_in:,}"
        return f"epoch {self.epoch_complete:,} complete" if self.epoch_complete >= 0 else "no epoch complete"


@dataclass(frozen=True, slots=True)
class JobStatistics:
    """A job at one moment.

    ``dataclasses.asdict`` makes plain dicts, texts and finite numbers of it, which are a JSON document.

    >>> import dataclasses, json
    >>> from streamiter import Flow
    >>> flow = Flow("squares")
    >>> squares = flow.from_items([1, 2, 3]).map(lambda x: x * x).collect()
    >>> document = json.loads(json.dumps(dataclasses.asdict(flow.run())))
    >>> document["state"], document["tasks"][0]["steps"][1]["counts"]["records_out"]
    ('finished', 3)
    """

    flow: str
    state: JobState
    elapsed_s: float
    tasks: tuple[TaskStatistics, ...]
    loops: tuple[LoopStatistics, ...]
    """The iterations, in the order they were built."""
    checkpoints: CheckpointStatistics | None = None
    """Where checkpoints stand, if the job has any."""
    parameter_servers: dict[str, Any] = field(default_factory=dict)
    """Where the parameter servers of its steps stand, by name: each a ``ParameterServerStatistics``."""

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


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """The checkpoints of a job at one moment.

    What checkpoints have cost and where they stand.
    """

    run: str
    """The run that takes them."""
    restored: int | None
    """The checkpoint that this run went on from."""
    committed: int | None
    """The last one that is committed."""
    taken: int
    """Committed by this run."""
    given_up: int
    """Not committed: too slow, or no room in the store."""
    last_duration_s: float
    """From the barrier to the commit."""
    last_alignment_s: float
    """Of that, until all steps had given their state."""
    last_size_bytes: int
    """Of the snapshot in the store."""
