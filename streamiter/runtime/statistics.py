"""The statistics of a job, and the watchdog that warns of tasks without progress.

The statistics are frozen pictures of the job, its tasks, loops and checkpoints at one moment. The :class:`Watchdog`
logs a warning about each task that has work and makes no progress.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from streamiter.channels import Channel, ChannelStatistics
from streamiter.clock import Clock
from streamiter.operators.operator import OperatorStatistics
from streamiter.runtime.feedback import FeedbackChannel, FeedbackStatistics

if TYPE_CHECKING:
    from streamiter.runtime.task import Task

JobState = Literal["running", "finished", "suspended", "aborted", "failed"]
"""``finished``: the inputs have ended or were drained; ``suspended``: stopped between two batches; ``aborted``: stopped
at once; ``failed``: ended by an error."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One operator in one subtask."""

    step: str
    """The name of the step."""
    subtask: int
    """The number of the subtask, from 0."""
    counts: OperatorStatistics
    """The records and batches that it has handled."""


@dataclass(frozen=True, slots=True)
class TaskStatistics:
    """One task: a chain of operators in one subtask."""

    name: str
    """The name of the first step, with the number of the subtask."""
    steps: tuple[StepStatistics, ...]
    """The operators of the chain, in order."""
    epoch_watermark: int
    """The last complete epoch; below 0 before the first epoch is complete."""
    inputs: tuple[ChannelStatistics, ...]
    """The channels that the task reads."""
    outputs: tuple[ChannelStatistics, ...]
    """The channels that the task writes."""
    waiting_records: int
    """Emitted records that wait for room in these channels."""
    feedback: tuple[FeedbackStatistics, ...]
    """The channels of feedback edges that the task reads."""
    held_records: int
    """Records that were taken from channels and not handled: not wanted now, of later epochs, or rests of batches."""
    blocked_s: float
    """The time that the task has waited for room in channels."""
    lag: dict[str, int]
    """For a source: unread records by partition. The number of the partition is text, as JSON requires of keys."""
    is_paused: bool
    """For a source: whether it does not read now, because a step downstream holds more records than channels do."""
    ended: bool
    """Whether the task has ended."""


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """Consecutive rounds of a loop with the same number of records."""

    first_epoch: int
    """The epoch of the first of these rounds."""
    last_epoch: int
    """The epoch of the last of these rounds."""
    records: int
    """Records that were fed back in each of these rounds."""


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """One iteration, all subtasks together.

    An epoch is reached when its first record is fed back. It is received when its last record is back at every head,
    and complete when the data has passed it, too.
    """

    heads: tuple[str, ...]
    """The names of the steps where variable streams enter the loop."""
    epoch_reached: int
    """The last epoch that was reached; 0 before any feedback."""
    epoch_received: int
    """The last epoch that was received; below 0 before the first, whose feedback is the initial variables."""
    epoch_complete: int
    """The last complete epoch; below 0 before the first."""
    ended_in: int | None
    """The epoch in which the iteration has ended, or None."""
    end_reason: str | None
    """The reason why the iteration has ended in this epoch, or None."""
    fed_back_records: int
    """Records that were fed back since the start."""
    criteria_records: int
    """Records of the termination criteria since the start."""
    rounds: tuple[RoundStatistics, ...]
    """The complete epochs with feedback. If very many of them differ, the last thousand."""
    waiting_records: int
    """Records of the feedback that no head has taken."""
    held_records: int
    """Records that heads have taken, and hold until the records of earlier epochs are received."""
    bytes_in_memory: int
    """The estimated size of the waiting and held records that are in memory."""
    bytes_on_disk: int
    """The size of the files with the other waiting and held records."""
    replayed_records: int
    """Records that are kept to be sent again in each epoch."""
    replayed_bytes_in_memory: int
    """The estimated size of the replayed records that are in memory."""
    replayed_bytes_on_disk: int
    """The size of the files with the other replayed records."""

    @property
    def progress(self) -> str:
        """The progress of the iteration in words."""
        if self.ended_in is not None:
            return f"ended in epoch {self.ended_in:,}"
        return f"epoch {self.epoch_complete:,} complete" if self.epoch_complete >= 0 else "no epoch complete"


@dataclass(frozen=True, slots=True)
class JobStatistics:
    """A job at one moment.

    ``dataclasses.asdict`` turns it into plain dicts, texts and finite numbers, which are a JSON document.

    >>> import dataclasses, json
    >>> from streamiter import Flow
    >>> flow = Flow("squares")
    >>> squares = flow.from_items([1, 2, 3]).map(lambda x: x * x).collect()
    >>> document = json.loads(json.dumps(dataclasses.asdict(flow.run())))
    >>> document["state"], document["tasks"][0]["steps"][1]["counts"]["records_out"]
    ('finished', 3)
    """

    flow: str
    """The name of the flow."""
    state: JobState
    """Whether the job is running, or how it has ended."""
    elapsed_s: float
    """The seconds since the job was started."""
    tasks: tuple[TaskStatistics, ...]
    """The tasks of the job, sources first."""
    loops: tuple[LoopStatistics, ...]
    """The iterations, in the order in which they were built."""
    checkpoints: CheckpointStatistics | None = None
    """The checkpoints of the job, if it takes any."""
    parameter_servers: dict[str, Any] = field(default_factory=dict)
    """The parameter servers of the steps, by name: a ``ParameterServerStatistics`` for each."""

    def step(self, name: str) -> OperatorStatistics:
        """Return the counts of a step, all subtasks together. Raises KeyError if no step has this name."""
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
    """The checkpoints of a job at one moment."""

    run: str
    """The run of the job, which takes the checkpoints."""
    restored: int | None
    """The checkpoint from which this run was restored, or None."""
    committed: int | None
    """The last committed checkpoint, or None."""
    taken: int
    """The number of checkpoints that this run has committed."""
    given_up: int
    """The number of checkpoints that this run has abandoned: too slow, or no room in the store."""
    last_duration_s: float
    """The seconds from the barrier to the commit of the last checkpoint."""
    last_alignment_s: float
    """The part of these seconds until all steps had given their state."""
    last_size_bytes: int
    """The size of the last snapshot in the store."""


def task_statistics(task: Task) -> TaskStatistics:
    channels = [port.channel for port in task.gate.ports]
    return TaskStatistics(
        name=task.name,
        steps=tuple(
            StepStatistics(instance.step.name, instance.subtask, instance.statistics())
            for instance in task.instances
        ),
        epoch_watermark=task.progress.watermark,
        inputs=tuple(channel.statistics() for channel in channels if isinstance(channel, Channel)),
        outputs=tuple(lane.channel.statistics() for writer in task.writers for lane in writer.lanes),
        waiting_records=sum(lane.waiting_records for writer in task.writers for lane in writer.lanes),
        feedback=tuple(channel.statistics() for channel in channels if isinstance(channel, FeedbackChannel)),
        held_records=task.gate.held_records,
        blocked_s=sum(lane.blocked_s for writer in task.writers for lane in writer.lanes),
        lag={} if task.feeder is None else {str(part): int(left) for part, left in task.feeder.lag().items()},
        is_paused=task.feeder is not None and not task.ended and task.feeder.intake.is_shut,
        ended=task.ended,
    )


_log = logging.getLogger("streamiter.job")

# Longer than any pause of a healthy broker (session and transaction timeouts are 10 to 45 s), and short enough for the
# warning to be of use to an engineer on call.
STALL_AFTER_S: Final = 60.0

# The number of looks in that time. So many looks in a row must find no progress. Time alone is not enough: after a step
# has blocked the event loop, or the machine has slept, time has passed for tasks that had no turn.
_LOOKS: Final = 4

# The number of looks for a task that has input it does not want, while other tasks make progress. A fast partition
# waits for a slow one until an epoch is complete, and an epoch may take minutes.
_LOOKS_WHILE_HELD: Final = 10 * _LOOKS


class Watchdog:
    """Warns once about each task that is stalled: it has work, but makes no progress. Reports its next progress.

    Each task is judged by its own progress, so the watchdog finds a task that hangs among busy ones. A task without
    input is idle. A task that waits for room in a channel is stalled only if the task that reads the channel is. A task
    that waits for other input than it has gets ten times as long while any task makes progress.
    """

    def __init__(self, tasks: Sequence[Task], clock: Clock, stall_after_s: float = STALL_AFTER_S) -> None:
        self._watched = [_Watched(task) for task in tasks]
        self._clock = clock
        self._stall_after_s = stall_after_s
        self._readers = {
            id(port.channel): watched for watched in self._watched for port in watched.task.gate.ports
        }
        self._stalled: list[str] = []
        """The tasks without progress at the last look."""

    async def run(self) -> None:
        self._look()
        while True:
            await self._clock.sleep(self._stall_after_s / _LOOKS)
            self._look()
            self._report()

    def _look(self) -> None:
        now_s = self._clock.monotonic_s()
        for watched in self._watched:
            watched.look(now_s)

    def _report(self) -> None:
        still = self._stalled_now()
        before, self._stalled = self._stalled, [watched.task.name for watched in still]
        new = [watched for watched in still if watched.task.name not in before]
        over = [name for name in before if name not in self._stalled]
        if over:
            _log.warning("progress again after a stall: %s", ", ".join(over))
        if new:
            _log.warning(
                "no progress for %.0f s although there is input: %s",
                self._clock.monotonic_s() - max(watched.moved_at_s for watched in new),
                "; ".join(watched.blocked_by or "" for watched in new),
            )

    def _stalled_now(self) -> list[_Watched]:
        """Return the tasks without progress, except for those that wait for room which a working task will make."""
        still: dict[str, _Watched] = {}
        something_moves = any(watched.has_moved for watched in self._watched)
        for watched in reversed(self._watched):  # Downstream tasks first, because they make the room.
            room = watched.task.waits_for_room_in
            reader = None if room is None else self._readers[id(room)]
            waits_in_vain = reader is None or reader.task.ended or reader.task.name in still
            if watched.is_stalled(something_moves) and waits_in_vain:
                still[watched.task.name] = watched
        return list(reversed(still.values()))


class _Watched:
    """What the watchdog knows about one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.moved_at_s = 0.0
        self.blocked_by: str | None = None
        self._mark = -1
        self._looks_unmoved = 0
        self._looks_blocked = 0
        """The number of the last looks that found work and no progress."""

    @property
    def has_moved(self) -> bool:
        return self._looks_unmoved < _LOOKS

    def is_stalled(self, something_moves: bool) -> bool:
        patient = something_moves and _is_held(self.task)
        return self._looks_blocked >= (_LOOKS_WHILE_HELD if patient else _LOOKS)

    def look(self, now_s: float) -> None:
        mark, self.blocked_by = _mark_of(self.task), blocked_by(self.task)
        moved, self._mark = mark != self._mark, mark
        self._looks_unmoved = 0 if moved else self._looks_unmoved + 1
        if moved or self.blocked_by is None:
            self._looks_blocked, self.moved_at_s = 0, now_s
        else:
            self._looks_blocked += 1


def _mark_of(task: Task) -> int:
    outputs = [instance.out for instance in task.instances]
    return task.progress.handled + sum(out.records_emitted + out.rejected for out in outputs)


def blocked_by(task: Task) -> str | None:
    """Return the reason why a task that has work now waits; None for a task without work."""
    if task.ended:
        return None
    if task.waits_for_room_in is not None:
        return f"{task.name} waits for room in {task.waits_for_room_in.name}"
    if task.is_handling:
        return f"{task.name} is at work on a batch"
    if awaited := task.gate.awaited_barriers():
        return f"{task.name} waits for the checkpoint barrier of {', '.join(awaited)}"
    if _is_held(task):
        held = task.gate.held_records
        return f"{task.name} is held: {task.held_for()}{f'; {held:,} records are set aside' if held else ''}"
    if any(port.peek() is not None for port in task.gate.ports):
        return f"{task.name} has input that it does not take"
    return None


def _is_held(task: Task) -> bool:
    return not task.is_handling and task.gate.has_parked and not task.gate.awaited_barriers()
