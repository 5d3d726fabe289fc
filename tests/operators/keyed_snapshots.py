"""Tests of keyed snapshots share this code: small slices, and a reference that copies all states at the barrier."""

import asyncio
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from operators.operator_harness import ManualClock, frozen

from streamiter.operators import KeyedState
from streamiter.operators import keyed_state as frozen_states
from streamiter.operators.keyed_state import KeyedStates
from streamiter.values.deferred import Deferred
from streamiter.values.plain_data import PlainData

__all__ = [
    "PLAIN",
    "CopiedState",
    "MakeStates",
    "by_key",
    "items_of",
    "keyed_state",
    "restore",
    "restored",
    "small_slices",
]

PLAIN = PlainData()

MakeStates = Callable[..., KeyedStates]
"""Makes the states of one subtask: ``make(clock, time_to_live_s=None)``."""


def small_slices(monkeypatch: pytest.MonkeyPatch, *, remember: bool = False) -> None:
    """Use frames of 3 keys, and free copies one by one; with ``remember``, note the encoded keys."""
    monkeypatch.setattr(frozen_states, "_KEYS_FIRST", 3)
    monkeypatch.setattr(frozen_states, "_KEYS_MAX", 3)
    monkeypatch.setattr(frozen_states, "_COPIES_AT_ONCE", 1)
    if remember:
        monkeypatch.setattr(frozen_states, "_BYTES_WORTH_REMEMBERING", 0)


def keyed_state(clock: ManualClock, time_to_live_s: float | None = None, *, in_thread: bool = False) -> KeyedState:
    return KeyedState(clock, time_to_live_s, name="count", encode=PLAIN.encode, in_thread=in_thread)


def by_key(items: Iterable[tuple[Any, ...]]) -> Any:
    """Return the items in an order that does not depend on the backend, frozen."""
    return frozen(sorted(items, key=lambda item: repr(item[0])))


def restore(states: KeyedStates, state: Any) -> None:
    """Restore, also where the backend does it in a coroutine."""
    restoring: Any = states.restore(state)
    if restoring is not None:
        asyncio.run(restoring)


def items_of(frames: Iterable[bytes]) -> list[tuple[Any, ...]]:
    """Return key, state and, if stored, idle seconds of all keys in order."""
    return [entry for frame in frames for entry in zip(*PLAIN.decode(frame), strict=True)]


def restored(snapshot: Deferred) -> Iterator[Any]:
    """Return the state that a restore receives for a snapshot."""
    return map(PLAIN.decode, snapshot.frames())


class CopiedState:
    """A keyed state that copies all its content for a snapshot: slow, but certainly correct."""

    def __init__(self, clock: ManualClock, time_to_live_s: float | None) -> None:
        self._clock = clock
        self._time_to_live_s = time_to_live_s
        self.states: dict[Any, Any] = {}
        self.used_at_s: dict[Any, float] = {}

    def get(self, key: Any) -> Any:
        self._use(key)
        return self.states.setdefault(key, {})

    def set(self, key: Any, value: Any) -> None:
        self._use(key)
        self.states[key] = value

    def delete(self, key: Any) -> None:
        self.states.pop(key, None)
        self.used_at_s.pop(key, None)

    def clear(self) -> None:
        self.states.clear()
        self.used_at_s.clear()

    def drop_expired(self) -> None:
        for key in [key for key in self.states if self._is_expired(key)]:
            self.delete(key)

    def snapshot(self) -> list[tuple[Any, ...]]:
        now_s = self._clock.now_s
        idle = {key: (now_s - used_at_s,) for key, used_at_s in self.used_at_s.items()}
        return [
            (key, copy.deepcopy(state), *(idle[key] if self._time_to_live_s else ()))
            for key, state in self.states.items()
        ]

    def _is_expired(self, key: Any) -> bool:
        if self._time_to_live_s is None or key not in self.used_at_s:
            return False
        return self._clock.now_s - self.used_at_s[key] > self._time_to_live_s

    def _use(self, key: Any) -> None:
        if self._is_expired(key):
            self.delete(key)
        self.used_at_s[key] = self._clock.now_s
