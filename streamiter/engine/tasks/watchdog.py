"""The watch over running tasks: the statistics of each task, and a warning for a task without progress.

The :class:`Watchdog` logs a warning about each task that has work and makes no progress, with the reason why the task
waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from streamiter.engine.graph.channels import Channel
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.graph.statistics import StalledTask, StepStatistics, TaskStatistics
from streamiter.engine.tasks.task import Task
from streamiter.operators.event_time import AssignEventTime
from streamiter.operators.operator import KeepsRecords, Operator
from streamiter.operators.timed.steps import TimedOperator
from streamiter.topics.source_and_sink import TopicSink
from streamiter.values.helpers.clock import Clock
from streamiter.values.times import MAX_TIME, MIN_TIME, shown_time

_log = logging.getLogger("streamiter.job")

# Longer than any pause of a healthy broker (session and transaction timeouts are 10 to 45 s), and short enough for the
# warning to be of use to an engineer on call.
STALL_AFTER_S: Final = 60.0

# The number of looks in that time. This many looks in a row must find no progress. Time alone is not enough: after a
# step has blocked the event loop, or the machine has slept, time has passed for tasks that had no turn.
_LOOKS: Final = 4

# The number of looks for a task that has input it does not want, while other tasks make progress. A fast partition
# waits for a slow one until an epoch is complete, and an epoch may take minutes.
_LOOKS_WHILE_HELD: Final = 10 * _LOOKS


class Watchdog:
    """Warns once about each task that is stalled: it has work, but makes no progress. Reports its next progress.

    Each task is judged by its own progress, so the watchdog finds a task that hangs among busy ones. A task without
    input is idle. A task that waits for room in a channel is stalled only if the task that reads the channel is. A task
    that waits for other input than it has gets ten times as long while any task makes progress. A reader in another
    process is watched there.
    """

    def __init__(
        self, tasks: Sequence[Task], clock: Clock, stall_after_s: float = STALL_AFTER_S, process: int = 0
    ) -> None:
        self._watched = [_Watched(task) for task in tasks]
        self._clock = clock
        self._process = process
        self.stall_after_s = stall_after_s
        self._readers = {id(port.channel): watched for watched in self._watched for port in watched.task.inbox.ports}
        self._stalled: list[StalledTask] = []
        """The tasks without progress at the last look."""

    async def run(self) -> None:
        self._look()
        while True:
            await self._clock.sleep(self.stall_after_s / _LOOKS)
            self._look()
            self._report()

    def _look(self) -> None:
        now_s = self._clock.monotonic_s()
        for watched in self._watched:
            watched.look(now_s)

    def _report(self) -> None:
        still = self._stalled_now()
        before, names = [stalled.name for stalled in self._stalled], [watched.task.name for watched in still]
        self._stalled = self._described(still)
        new = [watched for watched in still if watched.task.name not in before]
        over = [name for name in before if name not in names]
        if over:
            _log.warning("progress again after a stall: %s", ", ".join(over))
        if new:
            _log.warning(
                "no progress for %.0f s although there is input: %s",
                self._clock.monotonic_s() - max(watched.moved_at_s for watched in new),
                "; ".join(watched.blocked_by or "" for watched in new),
            )

    def stalled(self) -> tuple[StalledTask, ...]:
        """Return the tasks without progress at the last look."""
        return tuple(self._stalled)

    def _described(self, still: Sequence[_Watched]) -> list[StalledTask]:
        # While one topic takes no records, tasks before it wait for room, and others for its checkpoint barrier.
        waits_for_topic = any(watched.task.is_handling and watched.writes_topic for watched in still)
        now_s = self._clock.monotonic_s()
        stalled = []
        for watched in still:
            is_at_work = watched.task.is_handling and watched.task.waits_for_room_in is None
            cause: Literal["held", "topic", "step"] = "step"
            if waits_for_topic and (watched.writes_topic or not is_at_work):
                cause = "topic"
            elif watched.task.is_held:
                cause = "held"
            stalled.append(
                StalledTask(
                    name=watched.task.name,
                    reason=watched.blocked_by or "",
                    stalled_s=now_s - watched.moved_at_s,
                    cause=cause,
                    process=self._process,
                    is_at_work=is_at_work,
                )
            )
        return stalled

    def _stalled_now(self) -> list[_Watched]:
        """Return the tasks without progress, except tasks that wait for room which a working task will make."""
        still: dict[str, _Watched] = {}
        something_moves = any(watched.has_moved for watched in self._watched)
        for watched in reversed(self._watched):  # Downstream tasks first, because they make the room.
            room = watched.task.waits_for_room_in
            # A reader in another process is watched there.
            reader = self._readers.get(id(room))
            waits_in_vain = room is None or (reader is not None and (reader.task.ended or reader.task.name in still))
            if watched.is_stalled(something_moves) and waits_in_vain:
                still[watched.task.name] = watched
        return list(reversed(still.values()))


class _Watched:
    """What the watchdog knows about one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.writes_topic = any(isinstance(instance.operator, TopicSink) for instance in task.instances)
        self.moved_at_s = 0.0
        self.blocked_by: str | None = None
        self._work = -1
        self._looks_unmoved = 0
        self._looks_blocked = 0
        """The number of the last looks that found work and no progress."""
        self._event_time: int | None = None
        self._looks_in_the_same_time = 0
        """The number of the last looks that found progress, but the same event time."""
        self._records_timed = 0
        """The number of records that had been given timestamps at the last look."""

    @property
    def has_moved(self) -> bool:
        return self._looks_unmoved < _LOOKS

    def is_stalled(self, something_moves: bool) -> bool:
        patient = something_moves and self.task.is_held
        return self._looks_blocked >= (_LOOKS_WHILE_HELD if patient else _LOOKS)

    def look(self, now_s: float) -> None:
        work, self.blocked_by = _work_of(self.task), blocked_by(self.task)
        moved, self._work = work != self._work, work
        self._looks_unmoved = 0 if moved else self._looks_unmoved + 1
        if moved or self.blocked_by is None:
            self._looks_blocked, self.moved_at_s = 0, now_s
        else:
            self._looks_blocked += 1
        records_timed = sum(operator.records_timed for operator in _assigning(self.task))
        if records_timed > self._records_timed:
            self._look_at_event_time()
        self._records_timed = records_timed

    def _look_at_event_time(self) -> None:
        """Warn once if records arrive, but the event time does not advance."""
        now = self.task.event_time
        self._looks_in_the_same_time = self._looks_in_the_same_time + 1 if now == self._event_time else 0
        self._event_time = now
        if self._looks_in_the_same_time == _LOOKS and (held_by := event_time_held_by(self.task)) is not None:
            _log.warning(
                "the event time of %s stays at %s although records arrive: held back by %s",
                self.task.name,
                shown_time(MIN_TIME if now is None else now),
                held_by,
            )


def _work_of(task: Task) -> int:
    """Return a number that grows whenever the task handles or emits something."""
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
    if awaited := task.inbox.barriers.awaited():
        return f"{task.name} waits for the checkpoint barrier of {', '.join(awaited)}"
    if task.is_held:
        held = task.inbox.held_records
        return f"{task.name} is held: {task.held_for()}{f'; {held:,} records are set aside' if held else ''}"
    if any(port.peek() is not None for port in task.inbox.ports):
        return f"{task.name} has input that it does not take"
    return None


def task_statistics(task: Task, loops: Sequence[object], process: int) -> TaskStatistics:
    """Return the statistics of a task of a job with these loops."""
    channels = [port.channel for port in task.inbox.ports]
    blocked_s = sum(lane.blocked_s for writer in task.writers for lane in writer.lanes)
    return TaskStatistics(
        name=task.name,
        steps=tuple(
            StepStatistics(
                instance.step.name,
                instance.subtask,
                instance.step.policy,
                instance.statistics(),
                *_kept(instance.operator),
            )
            for instance in task.instances
        ),
        loop=None if task.first.step.loop is None else loops.index(task.first.step.loop),
        epoch_watermark=task.progress.watermark,
        inputs=tuple(channel.statistics() for channel in channels if isinstance(channel, Channel)),
        outputs=tuple(lane.channel.statistics() for writer in task.writers for lane in writer.lanes),
        waiting_records=sum(lane.waiting_records for writer in task.writers for lane in writer.lanes),
        feedback=tuple(channel.statistics() for channel in channels if isinstance(channel, FeedbackChannel)),
        held_records=task.inbox.held_records,
        blocked_s=blocked_s,
        busy_s=max(0.0, task.handled_s - blocked_s),
        held_s=task.held_s,
        source=None if task.feeder is None else task.feeder.statistics(),
        lag={} if task.feeder is None else {str(part): int(left) for part, left in task.feeder.lag().items()},
        is_paused=task.feeder is not None and not task.ended and task.feeder.intake.is_shut,
        ended=task.ended,
        process=process,
        waits_for=None if task.ended else task.inbox.unread_table(),
        **_event_time(task),
    )


def _kept(operator: Operator) -> tuple[int, int]:
    """Return the late records of windows and joins, and how much an operator keeps."""
    late = operator.late if isinstance(operator, TimedOperator) else 0
    return late, operator.kept if isinstance(operator, KeepsRecords) else 0


def _event_time(task: Task) -> dict[str, Any]:
    """Return the fields of a task's statistics about event time."""
    if (watermark := task.event_time) is None:
        return {"event_time_held_by": event_time_held_by(task)}
    is_over = watermark == MAX_TIME
    return {
        "event_time": watermark,
        "event_time_lag_s": None if is_over else task.lag_of(watermark),
        "event_time_held_by": None if is_over else event_time_held_by(task),
        "late_records": sum(step.late for step in _assigning(task)),
    }


def _assigning(task: Task) -> Iterator[AssignEventTime]:
    return (each.operator for each in task.instances if isinstance(each.operator, AssignEventTime))


def event_time_held_by(task: Task) -> str | None:
    """Return what holds back the event time of a task; None if nothing does, or the task has none."""
    for instance in task.instances:
        times = instance.times
        if times is not None and times.passed < times.watermark and instance.step.watermarked:
            return f"records that step {instance.step.name!r} keeps"
    for operator in _assigning(task):
        slowest = operator.slowest
        return None if slowest is None else f"partition {slowest}"
    slowest = None if task.inbox.times is None else task.inbox.times.slowest
    return None if slowest is None else task.inbox.ports[slowest].channel.name
