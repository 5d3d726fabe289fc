"""Never a silent stall: says which step is stuck when there is input and nothing moves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from streamiter.clock import Clock
from streamiter.runtime.task import Task

__all__ = ["STALL_AFTER_S", "Watchdog", "blocked_tasks"]

_log = logging.getLogger("streamiter.job")

# Longer than any pause of a healthy broker (session and transaction timeouts are 10 to 45 s), short
# enough to be seen by whoever is on call.
STALL_AFTER_S: Final = 60.0


class Watchdog:
    """Looks at the tasks now and then; reports once for each stall, and when it is over."""

    def __init__(self, tasks: Sequence[Task], clock: Clock, stall_after_s: float = STALL_AFTER_S) -> None:
        self._tasks = tasks
        self._clock = clock
        self._stall_after_s = stall_after_s
        self.stalled: tuple[str, ...] = ()
        """What the last look found: a line for each blocked task; empty when all is well."""

    async def run(self) -> None:
        """Look four times in the time after which silence is called a stall."""
        moved_at_s, handled = self._clock.monotonic_s(), self._handled()
        while True:
            await self._clock.sleep(self._stall_after_s / 4)
            now_s, now_handled = self._clock.monotonic_s(), self._handled()
            waiting = blocked_tasks(self._tasks)
            if now_handled != handled or not waiting:
                moved_at_s, handled = now_s, now_handled
                self._recovered()
            elif now_s - moved_at_s >= self._stall_after_s and not self.stalled:
                self.stalled = tuple(waiting)
                _log.warning(
                    "no progress for %.0f s although there is input: %s",
                    now_s - moved_at_s,
                    "; ".join(waiting),
                )

    def _recovered(self) -> None:
        if self.stalled:
            _log.warning("progress again after a stall")
            self.stalled = ()

    def _handled(self) -> int:
        return sum(task.handled for task in self._tasks)


def blocked_tasks(tasks: Sequence[Task]) -> list[str]:
    """A line for each task that has input: what it waits for."""
    lines = []
    for task in tasks:
        if task.ended:
            continue
        if task.busy_with is not None:
            lines.append(f"{task.name} waits for room in {task.busy_with}")
        elif task.is_handling:
            lines.append(f"{task.name} is at work on a batch")
        elif awaited := task.gate.awaited_barriers():
            lines.append(f"{task.name} waits for the checkpoint barrier of {', '.join(awaited)}")
        elif task.gate.has_parked:
            lines.append(f"{task.name} is held: it has input that it does not want now")
        elif any(port.peek() is not None for port in task.gate.ports):
            lines.append(f"{task.name} has input that it does not take")
    return lines
