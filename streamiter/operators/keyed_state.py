"""State by key: of an operator's subtask, and frozen for a snapshot."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, Final, final

import numpy as np

from streamiter.clock import Clock
from streamiter.deferred import Deferred, Encode
from streamiter.errors import InternalError, PlainDataError
from streamiter.operators.rejection import shortened

__all__ = [
    "FrozenStates",
    "KeyedState",
    "StateFrame",
    "independent_copy",
    "select_keys",
]


# Values of these types cannot change, so that they need no copy. numpy's structured scalars can.
_IMMUTABLE: Final[frozenset[type[Any]]] = frozenset(
    {type(None), bool, int, float, str, bytes, *np.sctypeDict.values()}
) - {np.void, np.object_}


def independent_copy(value: Any) -> Any:
    """A copy of plain data that shares nothing that can change.

    Several times faster than ``copy.deepcopy``, and one call deep for each level: plain data may have 500.

    >>> seen = {"users": [1, 2]}
    >>> copied = independent_copy(seen)
    >>> seen["users"].append(3)
    >>> copied
    {'users': [1, 2]}

    Copies of plain data.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        copied = value.copy()
        if not _IMMUTABLE.issuperset(map(type, value.values())):
            for key, item in value.items():
                copied[key] = independent_copy(item)
        return copied
    if kind is list or kind is tuple:
        items = list(value)
        if not _IMMUTABLE.issuperset(map(type, items)):
            for index, item in enumerate(items):
                items[index] = independent_copy(item)
        return items if kind is list else tuple(items)
    return copy.deepcopy(value)


class KeyedState:
    """State of the keys that one subtask owns.

    With a time to live, the state of a key that was not read or written for that long is gone: it is
    dropped when next asked for, or by :meth:`drop_expired`.

    A state that was handed out may be changed until the call that asked for it returns, not later: a snapshot
    is written while records flow on, and keeps a state as it was when it is next handed out.

    State by key, with an optional time to live.
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


StateFrame = list[list[Any]]
"""Some keys and their states: ``[keys, states]``, or ``[keys, states, idle seconds]``.

Lists side by side take half the time of pairs to encode and to decode."""

# 1 to 5 ms of work for small states: below what a batch of records may take, and enough to make what a
# frame costs by itself small.
_KEYS_MAX: Final = 2048
# Of structures within structures some 20 MB are encoded in a second.
_BYTES_AIMED_AT: Final = 128 << 10
# So few that they may be large: how large the states are is seen from the frame before.
_KEYS_FIRST: Final = 16

# Some milliseconds to free.
_COPIES_AT_ONCE: Final = 20_000

# To remember that a key is encoded takes some 40 bytes and 0.1 µs, to copy its state once more than
# needed not much more than that, unless states are as large as this.
_BYTES_WORTH_REMEMBERING: Final = 1024

_NOT_NEEDED: Final = object()
"""Stands for the state of a key that is in a frame already, or that was not there at the barrier."""


@final
class FrozenStates(Deferred):
    """The states of all keys in the order of their dict, without those of keys that come later.

    Two of them may be unfinished at a time: each keeps what it needs, so a second one neither waits for the
    first nor cuts it off.

    The states of all keys as they were at a barrier, encoded while records flow on.

    Copy on write: whoever owns the states calls :meth:`FrozenStates.keep` before the state of a key is handed
    out or replaced; what nobody touches is encoded as it lies there. So a barrier costs a list of the
    keys, and afterwards each key that a record comes for a copy of its state, once.
    """

    def __init__(
        self,
        states: dict[Any, Any],
        *,
        name: str,
        encode: Encode,
        unfinished: list[FrozenStates],
        used_at_s: Mapping[Any, float] | None = None,
        now_s: float = 0.0,
        in_thread: bool = False,
    ) -> None:
        """``unfinished``, the list of the owner of ``states``, has this one from now on until it is done.

        ``used_at_s`` are times of last use, which become idle seconds at ``now_s``. ``in_thread``: ``keep`` is called
        in another thread than ``frames``.
        """
        self.name = name
        self._encode = encode
        self._states = states
        self._used_at_s = used_at_s
        self._now_s = now_s
        self._keys = list(reversed(states))
        """Those that no frame has yet, the next one last: so they are given back bit by bit."""
        self._kept: dict[Any, Any] = {}
        """States of keys that have changed since, as they were; ``_NOT_NEEDED`` for those that no frame needs."""
        self._kept_used_at_s: dict[Any, float] = {}
        self._is_over = False
        self._lock: AbstractContextManager[Any] = threading.Lock() if in_thread else nullcontext()
        self._unfinished = unfinished
        unfinished.append(self)

    def keep(self, keys: Iterable[Any], *, may_change: bool = True) -> None:
        """The states of these keys are about to be handed out or (``may_change`` is False) replaced as a whole."""
        with self._lock:
            kept, states, used_at_s = self._kept, self._states, self._used_at_s
            for key in keys:
                try:
                    if key in kept:
                        continue
                    state = states.get(key, _NOT_NEEDED)
                except TypeError:
                    continue  # It cannot be hashed: there is no state under it.
                kept[key] = self._copied(key, state) if may_change and state is not _NOT_NEEDED else state
                if used_at_s is not None and key in used_at_s:
                    self._kept_used_at_s[key] = used_at_s[key]

    def _copied(self, key: Any, state: Any) -> Any:
        """A copy, or what tells why there is none once it is to be encoded: the record at hand is not at fault."""
        try:
            return independent_copy(state)
        except Exception as error:
            try:
                self._encode(state, name=self._name_of(key))
            except PlainDataError as refusal:
                return _NotCopied(refusal)
            return _NotCopied(
                PlainDataError(
                    f"{self._name_of(key)}: expected plain data that can be copied, given {shortened(state)} "
                    f"({type(error).__name__}: {error}); make it flatter"
                )
            )

    def frames(self) -> Iterator[bytes]:
        left, count = len(self._keys), _KEYS_FIRST
        while left > 0:
            with self._lock:
                if self._is_over:
                    raise InternalError(
                        f"the state of step {self.name!r} was released before all of it was read"
                    )
                keys = self._keys[: -count - 1 : -1]
                del self._keys[-count:]
                frame = self._frame(keys)
            yield frame
            left -= len(keys)
            count = max(1, min(_KEYS_MAX, 8 * count, count * _BYTES_AIMED_AT // len(frame)))
        yield from self._give_back()
        self.release()

    def _give_back(self) -> Iterator[bytes]:
        """Frees copies that were made for nothing, in slices of their own: frames without keys."""
        with self._lock:
            self._leave()
        while len(self._kept) > _COPIES_AT_ONCE:
            for _ in range(_COPIES_AT_ONCE):
                self._kept.popitem()
            yield self._encode([[], []])

    def _frame(self, keys: list[Any]) -> bytes:
        states, kept = self._states, self._kept
        changed = [key for key in keys if key in kept] if kept else []
        if changed:
            values = [kept[key] if key in kept else states[key] for key in keys]
        else:
            values = [states[key] for key in keys]
        content: StateFrame = [keys, values]
        if self._used_at_s is not None:
            content.append(self._idle_s(keys, self._used_at_s))
        try:
            frame = self._encode(content)
        except PlainDataError:
            self._raise_refusal(keys, values)
            raise
        is_worth_it = len(frame) > _BYTES_WORTH_REMEMBERING * len(keys)
        kept.update(dict.fromkeys(keys if is_worth_it else changed, _NOT_NEEDED))
        return frame

    def _idle_s(self, keys: list[Any], used_at_s: Mapping[Any, float]) -> list[float]:
        kept, now_s = self._kept_used_at_s, self._now_s
        return [now_s - (kept[key] if key in kept else used_at_s.get(key, now_s)) for key in keys]

    def _raise_refusal(self, keys: list[Any], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            if isinstance(value, _NotCopied):
                raise value.refusal
            self._encode(key, name=f"state of step {self.name!r}: key")
            self._encode(value, name=self._name_of(key))

    def _name_of(self, key: Any) -> str:
        return f"state of step {self.name!r}, key {shortened(key)}: state"

    def release(self) -> None:
        with self._lock:
            self._is_over = True
            self._keys, self._states, self._kept, self._kept_used_at_s = [], {}, {}, {}
            self._leave()

    def _leave(self) -> None:
        if self in self._unfinished:
            self._unfinished.remove(self)


class _NotCopied:
    """Stands for a state that could not be kept."""

    __slots__ = ("refusal",)

    def __init__(self, refusal: PlainDataError) -> None:
        self.refusal = refusal


def select_keys(
    frames: Iterable[StateFrame], wanted: Callable[[list[Any]], Iterable[bool]]
) -> Iterator[StateFrame]:
    """The same with only the keys for which ``wanted(keys)`` gives True: for state that is dealt out anew.

    >>> list(select_keys([[[1, 2, 3], ["a", "b", "c"]]], lambda keys: [key != 2 for key in keys]))
    [[[1, 3], ['a', 'c']]]
    """
    for frame in frames:
        is_wanted = list(wanted(frame[0]))
        yield [list(compress(column, is_wanted)) for column in frame]
