"""The watchdog of a job: it logs a warning about each task that has work and makes no progress."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from streamiter.clock import Clock
from streamiter.runtime.task import Task

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
        self._stalled: dict[str, str] = {}

    @property
    def stalled(self) -> tuple[str, ...]:
        """The findings of the last look: a line for each stalled task."""
        return tuple(self._stalled.values())

    async def run(self) -> None:
        """Look at the tasks until cancelled."""
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
        mark, self.blocked_by = _mark_of(self.task), _blocked_by(self.task)
        moved, self._mark = mark != self._mark, mark
        self._looks_unmoved = 0 if moved else self._looks_unmoved + 1
        if moved or self.blocked_by is None:
            self._looks_blocked, self.moved_at_s = 0, now_s
        else:
            self._looks_blocked += 1


def blocked_tasks(tasks: Iterable[Task]) -> list[str]:
    """Return a line for each task that has work now: what it waits for."""
    return [line for task in tasks if (line := _blocked_by(task)) is not None]


def _mark_of(task: Task) -> int:
    """Return a number that grows with the progress of a task. Emitted records show progress within a batch."""
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
