"""State by key, with an optional time to live."""

from __future__ import annotations

from typing import Any

from streamiter.clock import Clock
from streamiter.operators.keyed import independent_copy

__all__ = ["KeyedState"]


class KeyedState:
    """State of the keys that one subtask owns.

    With a time to live, the state of a key that was not read or written for that long is gone: it is
    dropped when next asked for, or by :meth:`drop_expired`.
    """

    __slots__ = ("_clock", "_states", "_time_to_live_s", "_used_at_s")

    def __init__(self, clock: Clock, time_to_live_s: float | None = None) -> None:
        self._clock = clock
        self._time_to_live_s = time_to_live_s
        self._states: dict[Any, Any] = {}
        self._used_at_s: dict[Any, float] = {}

    @property
    def time_to_live_s(self) -> float | None:
        """Seconds a state outlives its last use; None is for ever."""
        return self._time_to_live_s

    def get(self, key: Any) -> Any:
        """The state of ``key``; a new empty dict where there is none."""
        if self._time_to_live_s is not None:
            self._use(key)
        state = self._states.get(key)
        if state is None and key not in self._states:
            state = self._states[key] = {}
        return state

    def set(self, key: Any, value: Any) -> None:
        """Replace the state of ``key``."""
        if self._time_to_live_s is not None:
            self._use(key)
        self._states[key] = value

    def delete(self, key: Any) -> None:
        """Forget ``key``."""
        self._states.pop(key, None)
        self._used_at_s.pop(key, None)

    def clear(self) -> None:
        """Forget all keys."""
        self._states.clear()
        self._used_at_s.clear()

    def __len__(self) -> int:
        return len(self._states)

    def drop_expired(self) -> int:
        """Forget what has outlived its time; says how many keys."""
        if self._time_to_live_s is None:
            return 0
        oldest_s = self._clock.monotonic_s() - self._time_to_live_s
        expired = [key for key, used_at_s in self._used_at_s.items() if used_at_s < oldest_s]
        for key in expired:
            self.delete(key)
        return len(expired)

    def _use(self, key: Any) -> None:
        assert self._time_to_live_s is not None
        now_s = self._clock.monotonic_s()
        used_at_s = self._used_at_s.get(key)
        if used_at_s is not None and now_s - used_at_s > self._time_to_live_s:
            self._states.pop(key, None)
        self._used_at_s[key] = now_s

    def snapshot(self) -> list[tuple[Any, Any, float]]:
        """Key, state and idle seconds of every key."""
        now_s = self._clock.monotonic_s()
        used_at_s = self._used_at_s
        return [
            (key, independent_copy(state), now_s - used_at_s.get(key, now_s))
            for key, state in self._states.items()
        ]

    def restore(self, entries: list[tuple[Any, Any, float]]) -> None:
        """Take over what ``snapshot`` gave."""
        now_s = self._clock.monotonic_s()
        for key, state, idle_s in entries:
            self._states[key] = independent_copy(state)
            if self._time_to_live_s is not None:
                self._used_at_s[key] = now_s - idle_s
