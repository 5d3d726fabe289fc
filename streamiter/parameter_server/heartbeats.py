"""Workers that have not been heard of for too long are taken for dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from streamiter.clock import Clock, TimerHandle
from streamiter.numbers import positive

__all__ = ["Heartbeats", "SilenceWatch"]

# The watch looks again when the next worker would be too late, but not before this part of the timeout has passed: a
# worker may be noticed that much later, and many workers cost no more than a few.
_LEAST_PART_OF_TIMEOUT: Final = 0.05


@final
class Heartbeats:
    """When each worker was last heard of. Every request is a heartbeat. A pure data structure.

    Only workers that take part are known: what is heard of others (a late message of one that has left) does not count.

    A worker that waits for a reply of the server sends nothing meanwhile. ``waits`` and ``goes_on`` keep it from being
    taken for dead, where the server is told if it stops waiting: in the same process a call is given up when its task
    is cancelled. A worker in another process may be gone without a word: leave them out there, and have it send
    heartbeats while it waits. The call of a subscription waits all the time, and says nothing about its worker.

    >>> from streamiter.testing import VirtualClock
    >>> clock = VirtualClock()
    >>> heartbeats = Heartbeats(clock, timeout_s=10.0)
    >>> heartbeats.joined(3)
    >>> heartbeats.silent(clock.monotonic_s() + 9.9), heartbeats.silent(clock.monotonic_s() + 10.0)
    ([], [3])
    """

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self.timeout_s = positive("heartbeat timeout, in seconds", timeout_s)
        self._last_s: dict[int, float] = {}
        self._waiting: dict[int, int] = {}

    def joined(self, worker: int) -> None:
        """A worker takes part from now on."""
        self._last_s[worker] = self._clock.monotonic_s()

    def left(self, worker: int) -> None:
        """It takes part no more."""
        self._last_s.pop(worker, None)
        self._waiting.pop(worker, None)

    def heard(self, worker: int) -> None:
        """Something has come from it."""
        if worker in self._last_s:
            self._last_s[worker] = self._clock.monotonic_s()

    def waits(self, worker: int) -> None:
        """A call of it has begun to wait at the server."""
        if worker in self._last_s:
            self._waiting[worker] = self._waiting.get(worker, 0) + 1

    def goes_on(self, worker: int) -> None:
        """Such a call has been answered, or given up."""
        waiting = self._waiting.get(worker, 0)
        if waiting > 1:
            self._waiting[worker] = waiting - 1
        else:
            self._waiting.pop(worker, None)
        self.heard(worker)

    def silent(self, now_s: float) -> list[int]:
        """The workers that have not been heard of for the timeout, and do not wait, in the order they joined."""
        return [
            worker
            for worker, last_s in self._last_s.items()
            if now_s >= last_s + self.timeout_s and worker not in self._waiting
        ]

    def next_check_s(self) -> float:
        """The first moment at which a worker might be silent: of those that there are, or of one that joins now."""
        joins_now_s = self._clock.monotonic_s() + self.timeout_s
        due_s = [
            last_s + self.timeout_s for worker, last_s in self._last_s.items() if worker not in self._waiting
        ]
        return min(due_s, default=joins_now_s)


@final
class SilenceWatch:
    """Has silent workers leave: one timer, whatever the number of workers. Its owner starts and stops it."""

    def __init__(self, clock: Clock, heartbeats: Heartbeats, leave: Callable[[int, str], None]) -> None:
        """``leave`` is called with the worker and the reason; it is to see that ``heartbeats.left`` is called, too."""
        self._clock = clock
        self._heartbeats = heartbeats
        self._leave = leave
        self._timer: TimerHandle | None = None
        self._is_running = False

    def start(self) -> None:
        """Watch from now on; nothing happens if it does already."""
        if not self._is_running:
            self._is_running = True
            self._set_timer()

    def stop(self) -> None:
        """Watch no more; also from within ``leave``."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        timeout_s = self._heartbeats.timeout_s
        delay_s = self._heartbeats.next_check_s() - self._clock.monotonic_s()
        self._timer = self._clock.call_later(max(delay_s, timeout_s * _LEAST_PART_OF_TIMEOUT), self._check)

    def _check(self) -> None:
        timeout_s = self._heartbeats.timeout_s
        self._timer = None
        try:
            for worker in self._heartbeats.silent(self._clock.monotonic_s()):
                if not self._is_running:
                    break
                self._leave(worker, f"nothing was heard of it for {timeout_s:g} s (its heartbeat timeout)")
        finally:
            if self._is_running:
                self._set_timer()
