"""Silence: when nothing has come to a subtask for so long that nothing is to be expected."""

from __future__ import annotations

from typing import Final, final

from streamiter.clock import TimerHandle
from streamiter.operators.context import Context
from streamiter.records import Control

__all__ = ["Silence", "SilenceDue"]

# Silence counts as over this much early: rounding in the sum of a time and a delay must not put it off.
_ROUNDING_S: Final = 1e-6


@final
class SilenceDue(Control):
    """Posted to a subtask: it is time to ask whether the silence has lasted."""

    __slots__ = ()


@final
class Silence:
    """Follows how long nothing has come; with ``timeout_s`` None it never lasts long enough.

    A task that is blocked handles nothing, although there is something for it: what it is posted comes first
    when it goes on, and only then what has come meanwhile. So silence has lasted only if it was asked for
    before, half the time earlier, and nothing has come in between. It begins anew in a restored job, whose
    sources may need a while.
    """

    def __init__(self, context: Context, timeout_s: float | None) -> None:
        self._clock = context.clock
        self._post = context.post
        self._timeout_s = timeout_s
        self._since_s = 0.0
        self._was_asked_for = False
        self._timer: TimerHandle | None = None

    def begin(self) -> None:
        """From now on listen: ``SilenceDue`` is posted until it has lasted."""
        if self._timeout_s is not None:
            self.broken()
            self._ask_in(self._timeout_s / 2)

    def broken(self) -> None:
        """Something has come."""
        if self._timeout_s is not None:
            self._since_s = self._clock.monotonic_s()
            self._was_asked_for = False

    def has_lasted(self) -> bool:
        """``SilenceDue`` has come: whether the silence has lasted. If not, it will be asked for again."""
        assert self._timeout_s is not None
        missing_s = self._since_s + self._timeout_s - self._clock.monotonic_s()
        if not self._was_asked_for:
            self._was_asked_for = True
            missing_s = self._timeout_s / 2
        elif missing_s <= _ROUNDING_S:
            return True
        self._ask_in(missing_s)
        return False

    def stop(self) -> None:
        """Listen no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask_in(self, delay_s: float) -> None:
        self.stop()
        self._timer = self._clock.call_later(delay_s, lambda: self._post(SilenceDue()))
