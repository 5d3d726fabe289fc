"""State by key, with an optional time to live."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamiter.clock import Clock
from streamiter.deferred import Deferred, Encode
from streamiter.operators.frozen_states import FrozenStates, StateFrame

__all__ = ["KeyedState"]


class KeyedState:
    """State of the keys that one subtask owns.

    With a time to live, the state of a key that was not read or written for that long is gone: it is
    dropped when next asked for, or by :meth:`drop_expired`.

    A state that was handed out may be changed until the call that asked for it returns, not later: a snapshot
    is written while records flow on, and keeps a state as it was when it is next handed out.
    """

    __slots__ = (
        "_clock",
        "_encode",
        "_in_thread",
        "_name",
        "_states",
        "_time_to_live_s",
        "_unfinished",
        "_used_at_s",
    )

    def __init__(
        self,
        clock: Clock,
        time_to_live_s: float | None = None,
        *,
        name: str,
        encode: Encode,
        in_thread: bool = False,
    ) -> None:
        """``name`` is the step's; ``in_thread``: used in another thread than the event loop's."""
        self._clock = clock
        self._time_to_live_s = time_to_live_s
        self._name = name
        self._encode = encode
        self._in_thread = in_thread
        self._states: dict[Any, Any] = {}
        self._used_at_s: dict[Any, float] = {}
        self._unfinished: list[FrozenStates] = []
        """Snapshots that are not encoded yet; they keep what is about to change."""

    @property
    def time_to_live_s(self) -> float | None:
        """Seconds a state outlives its last use; None is for ever."""
        return self._time_to_live_s

    def get(self, key: Any) -> Any:
        """The state of ``key``; a new empty dict where there is none."""
        if self._unfinished:
            self._keep(key, may_change=True)
        if self._time_to_live_s is not None:
            self._use(key)
        state = self._states.get(key)
        if state is None and key not in self._states:
            state = self._states[key] = {}
        return state

    def set(self, key: Any, value: Any) -> None:
        """Replace the state of ``key``."""
        if self._unfinished:
            self._keep(key, may_change=False)
        if self._time_to_live_s is not None:
            self._use(key)
        self._states[key] = value

    def delete(self, key: Any) -> None:
        """Forget ``key``."""
        if self._unfinished:
            self._keep(key, may_change=False)
        self._states.pop(key, None)
        self._used_at_s.pop(key, None)

    def clear(self) -> None:
        """Forget all keys. Snapshots go on with what was there."""
        self._states, self._used_at_s, self._unfinished = {}, {}, []

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

    def _keep(self, key: Any, *, may_change: bool) -> None:
        # Of a copy: one that is done leaves the list, maybe while another thread is here.
        for frozen in tuple(self._unfinished):
            frozen.keep((key,), may_change=may_change)

    def snapshot(self) -> Deferred:
        """The states as they are now, in order, to be encoded later; with a time to live the idle seconds, too."""
        return FrozenStates(
            self._states,
            name=self._name,
            encode=self._encode,
            unfinished=self._unfinished,
            used_at_s=None if self._time_to_live_s is None else self._used_at_s,
            now_s=self._clock.monotonic_s(),
            in_thread=self._in_thread,
        )

    def restore(self, frames: Iterable[StateFrame]) -> None:
        """Take over what ``snapshot`` gave, encoded and decoded; the states are kept as they are given."""
        self.clear()
        now_s = self._clock.monotonic_s()
        for keys, states, *idle_s in frames:
            self._states.update(zip(keys, states, strict=True))
            if self._time_to_live_s is not None:
                # Without idle seconds there was no time to live yet: it begins now.
                idle = idle_s[0] if idle_s else [0.0] * len(keys)
                self._used_at_s.update((key, now_s - one_s) for key, one_s in zip(keys, idle, strict=True))
