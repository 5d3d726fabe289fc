"""When the subtasks of a stamping step end an epoch: by a clock, or at the pace of the slowest one that has input.

The subtasks of one step report to one object, a ``StampingPace`` or ``StampingClock``, so that subtasks without input
complete the same epochs. Reports, and ``catch_up`` as the answer, are plain data and may be late; both are in order for
each subtask. ``Silence`` decides when a subtask has no input.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, final

from streamiter.engine.inbox.order import BEFORE_ALL_EPOCHS
from streamiter.operators.operator import BoundaryOutput, Context
from streamiter.values.helpers.clock import Clock, TimerHandle, is_due


class StampingSubtask(Protocol):
    """A subtask, as far as the object that it reports to knows it."""

    def catch_up(self, epoch: int, due_in_s: float = 0.0, /) -> None:
        """Others have completed ``epoch``; ``due_in_s`` seconds later, the clock ends the next one."""


@final
class StampingClock:
    """The clock of a step that ends epochs by time; the subtasks of the step report to it.

    Every ``seconds`` seconds, counted from the first subtask that joins, the current epoch ends if any subtask has
    records of it, and all subtasks are told. A subtask that is blocked meanwhile completes several epochs at once. So
    records that arrive at the same time belong to the same epoch at all subtasks.

    >>> import asyncio
    >>> from types import SimpleNamespace
    >>> from streamiter.testing import VirtualClock
    >>> async def main():
    ...     clock, told = VirtualClock(), []
    ...     epochs = StampingClock(clock, seconds=5.0)
    ...     epochs.join(0, SimpleNamespace(catch_up=lambda epoch, due_in_s: told.append(epoch)))
    ...     await clock.advance(5.0)
    ...     epochs.add_records(0, epoch=0)
    ...     await clock.advance(5.0)
    ...     return told
    >>> asyncio.run(main())
    [-1, -1, 0]
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._due_s = clock.monotonic_s() + seconds
        self._timer: TimerHandle | None = None
        self._subtasks: dict[int, StampingSubtask] = {}
        self._last_with_records = self._last_ended = BEFORE_ALL_EPOCHS

    def join(self, number: int, subtask: StampingSubtask) -> None:
        """Add a subtask; with the first one the clock starts."""
        self._subtasks[number] = subtask
        if self._timer is None:
            self._wait()
        subtask.catch_up(self._last_ended, self._due_in_s)

    def leave(self, subtask: int) -> None:
        """Remove a subtask that has no more records; when all have left, the clock stops."""
        self._subtasks.pop(subtask, None)
        if not self._subtasks:
            self._stop()

    def add_records(self, subtask: int, epoch: int) -> None:
        """Note that a subtask has passed on records of ``epoch``."""
        self._last_with_records = max(self._last_with_records, epoch)

    def resume_after(self, subtask: int, epoch: int, remaining_s: float) -> None:
        """Resume after a restore of a joined subtask that had completed ``epoch``: the others must complete it, too.

        The next epoch ends when as many seconds have passed as were left at the snapshot.
        """
        self._last_ended = max(self._last_ended, epoch)
        self._due_s = self._clock.monotonic_s() + min(max(0.0, remaining_s), self._seconds)
        self._stop()
        self._wait()
        self._tell_all()

    def _wait(self) -> None:
        self._timer = self._clock.call_later(max(0.0, self._due_in_s), self._end_epoch)

    @property
    def _due_in_s(self) -> float:
        return self._due_s - self._clock.monotonic_s()

    def _tell_all(self) -> None:
        for subtask in self._subtasks.values():
            subtask.catch_up(self._last_ended, self._due_in_s)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_epoch(self) -> None:
        # The next due time follows the last one, not the current time: otherwise delays would add up. After a pause of
        # the whole machine, only one epoch ends.
        late_s = max(0.0, -self._due_in_s)
        self._due_s += self._seconds * (1 + late_s // self._seconds)
        self._wait()
        self._last_ended = max(self._last_ended, self._last_with_records)
        self._tell_all()


@final
class StampingPace:
    """The epochs that the subtasks of a stamping step have completed; the subtasks report them.

    So subtasks without input delay no other. An idle subtask is told to catch up when the slowest of the subtasks
    with input has completed an epoch. Subtasks that have ended are not waited for. If no subtask has input, all catch
    up with the last epoch that any subtask has completed: records that were passed on must not wait for input that may
    never arrive.

    >>> from types import SimpleNamespace
    >>> pace, told = StampingPace(subtasks=3), []
    >>> pace.join(2, SimpleNamespace(catch_up=told.append))
    >>> pace.set_idle(2)
    >>> pace.complete_epoch(0, 4), told
    (None, [])
    >>> pace.complete_epoch(1, 3), told
    (None, [3])
    """

    def __init__(self, subtasks: int) -> None:
        self._completed = dict.fromkeys(range(subtasks), BEFORE_ALL_EPOCHS)
        """For each subtask with input the last epoch that it has completed."""
        self._idle: dict[int, int] = {}
        """For each subtask without input the epoch that it was told last."""
        self._subtasks: dict[int, StampingSubtask] = {}
        self._furthest = BEFORE_ALL_EPOCHS

    def join(self, number: int, subtask: StampingSubtask) -> None:
        """Connect a subtask, which is told the epochs that it must catch up with."""
        self._subtasks[number] = subtask

    def complete_epoch(self, subtask: int, epoch: int) -> None:
        """Note that a subtask with input has completed an epoch."""
        self._completed[subtask] = epoch
        self._furthest = max(self._furthest, epoch)
        if self._idle:
            self._send_catch_up()

    def end(self, subtask: int, epoch: int) -> None:
        """Note that a subtask has ended, with ``epoch`` as the last one that it completed."""
        self._completed.pop(subtask, None)
        self._idle.pop(subtask, None)
        self._furthest = max(self._furthest, epoch)
        self._send_catch_up()

    def set_idle(self, subtask: int) -> None:
        """Note that a subtask has no input now."""
        self._completed.pop(subtask, None)
        self._idle[subtask] = BEFORE_ALL_EPOCHS
        self._send_catch_up()

    def set_active(self, subtask: int, epoch: int) -> None:
        """Note that an idle subtask has input again; it has completed ``epoch``."""
        self._idle.pop(subtask, None)
        self._completed[subtask] = epoch

    def _send_catch_up(self) -> None:
        reached = min(self._completed.values(), default=self._furthest)
        for subtask, told in self._idle.items():
            if reached > told:
                self._idle[subtask] = reached
                self._subtasks[subtask].catch_up(reached)


@final
class Silence:
    """The time for which no record has arrived at a subtask; with ``timeout_s`` None it never lasts long enough.

    A blocked task handles no records, although some wait for it. When it continues, it first handles the control
    records that were posted, and then the records. So a silence has lasted only if it was checked before, half the
    timeout earlier, and no record has arrived between. In a restored job the silence starts again, because sources may
    need some time.
    """

    def __init__(
        self, context: Context, timeout_s: float | None, when_lasting: Callable[[BoundaryOutput], Awaitable[None]]
    ) -> None:
        """``when_lasting`` is called in the task when the silence has lasted."""
        self._when_lasting = when_lasting
        self._clock = context.clock
        self._post = context.post
        self._timeout_s = timeout_s
        self._since_s = 0.0
        self._was_checked = False
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """Start to measure."""
        if self._timeout_s is not None:
            self.interrupt()
            self._check_in(self._timeout_s / 2)

    def interrupt(self) -> None:
        """Note that records have arrived."""
        if self._timeout_s is not None:
            self._since_s = self._clock.monotonic_s()
            self._was_checked = False

    async def _check(self, out: BoundaryOutput) -> None:
        """Check whether the silence has lasted; if not, it is checked again later."""
        assert self._timeout_s is not None
        missing_s = self._since_s + self._timeout_s - self._clock.monotonic_s()
        if not self._was_checked:
            self._was_checked = True
            missing_s = self._timeout_s / 2
        elif is_due(missing_s):
            await self._when_lasting(out)
            return
        self._check_in(missing_s)

    def stop(self) -> None:
        """Stop to measure."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_in(self, delay_s: float) -> None:
        self.stop()
        self._timer = self._clock.call_later(delay_s, lambda: self._post(self._check))
