"""What a job reports about itself: its statistics, and the tasks that stand still."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from streamiter.channels import ChannelStatistics
from streamiter.clock import Clock
from streamiter.operators.operator import OperatorStatistics
from streamiter.runtime.feedback import FeedbackStatistics
from streamiter.runtime.task import Task

__all__ = [
    "STALL_AFTER_S",
    "CheckpointStatistics",
    "JobState",
    "JobStatistics",
    "LoopStatistics",
    "RoundStatistics",
    "StepStatistics",
    "TaskStatistics",
    "Watchdog",
    "blocked_tasks",
]


JobState = Literal["running", "finished", "suspended", "aborted", "failed"]
"""``finished``: the inputs ended (or were drained); ``suspended``: stopped at a batch boundary."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One operator instance.

    What a job tells of itself.
    """

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


_log = logging.getLogger("streamiter.job")

# Longer than any pause of a healthy broker (session and transaction timeouts are 10 to 45 s), short
# enough to be seen by whoever is on call.
STALL_AFTER_S: Final = 60.0

# Looks in that time. A stall takes as many in a row that found no progress, not time alone: after a step that
# blocked the event loop, or a machine that slept, time has passed for tasks that had no turn.
_LOOKS: Final = 4

# Looks after which a task is reported that has input it does not want, while others move: a fast partition
# waits for a slow one until an epoch is complete, and an epoch may well take minutes.
_LOOKS_WHILE_HELD: Final = 10 * _LOOKS


class Watchdog:
    """Looks at the tasks now and then; reports each that stands still, once, and when it goes on.

    Each task is judged by its own progress, so one that hangs is found beside others that are busy. A task
    without input is idle, one that waits for room is as well as the task that is to make it, and one that
    is held by what it wants is given ten times as long while anything moves.

    Never a silent stall: says which tasks stand still although there is something for them to do.
    """

    def __init__(self, tasks: Sequence[Task], clock: Clock, stall_after_s: float = STALL_AFTER_S) -> None:
        self._watched = [_Watched(task) for task in tasks]
        self._clock = clock
        self._stall_after_s = stall_after_s
        self._readers = {
            id(port.channel): watched for watched in self._watched for port in watched.task.gate.ports
        }
        self._stalled: dict[str, str] = {}

    @property
    def stalled(self) -> tuple[str, ...]:
        """What the last look found: a line for each task that stands still; empty when all is well."""
        return tuple(self._stalled.values())

    async def run(self) -> None:
        """Look for ever."""
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
        still = self._standing_still()
        new = [watched for watched in still if watched.task.name not in self._stalled]
        over = [name for name in self._stalled if name not in {watched.task.name for watched in still}]
        self._stalled = {watched.task.name: watched.blocked_by or "" for watched in still}
        if over:
            _log.warning("progress again after a stall: %s", ", ".join(over))
        if new:
            _log.warning(
                "no progress for %.0f s although there is input: %s",
                self._clock.monotonic_s() - max(watched.moved_at_s for watched in new),
                "; ".join(watched.blocked_by or "" for watched in new),
            )

    def _standing_still(self) -> list[_Watched]:
        """Those that do not move, but for those that wait for room behind one that does."""
        still: dict[str, _Watched] = {}
        something_moves = any(watched.has_moved for watched in self._watched)
        for watched in reversed(self._watched):  # Downstream first: they make the room.
            room = watched.task.waits_for_room_in
            reader = None if room is None else self._readers[id(room)]
            waits_in_vain = reader is None or reader.task.ended or reader.task.name in still
            if watched.stands_still(something_moves) and waits_in_vain:
                still[watched.task.name] = watched
        return list(reversed(still.values()))


class _Watched:
    """What is known of one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.moved_at_s = 0.0
        self.blocked_by: str | None = None
        self._mark = -1
        self._looks_unmoved = 0
        self._looks_blocked = 0
        """As many of them, the last ones, have found that there is something to do."""

    @property
    def has_moved(self) -> bool:
        return self._looks_unmoved < _LOOKS

    def stands_still(self, something_moves: bool) -> bool:
        patient = something_moves and _is_held(self.task)
        return self._looks_blocked >= (_LOOKS_WHILE_HELD if patient else _LOOKS)

    def look(self, now_s: float) -> None:
        mark, self.blocked_by = _mark_of(self.task), _blocked_by(self.task)
        moved, self._mark = mark != self._mark, mark
        self._looks_unmoved = 0 if moved else self._looks_unmoved + 1
        if moved or self.blocked_by is None:
            self._looks_blocked, self.moved_at_s = 0, now_s
        else:
            self._looks_blocked += 1


def blocked_tasks(tasks: Iterable[Task]) -> list[str]:
    """A line for each task that has something to do now: what it waits for."""
    return [line for task in tasks if (line := _blocked_by(task)) is not None]


def _mark_of(task: Task) -> int:
    """Grows with whatever the task does. What is emitted tells of progress within a batch."""
    outputs = [instance.out for instance in task.instances]
    return task.progress.handled + sum(out.records_emitted + out.rejected for out in outputs)


def _blocked_by(task: Task) -> str | None:
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
