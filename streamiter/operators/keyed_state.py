"""State by key: the interface of the states of one subtask, states in memory, and their snapshots.

`KeyedStates` is the interface that a step uses. `KeyedState` has them in memory; `engine/states/` has them on disk. A
snapshot of states in memory is encoded while further records are handled. `FrozenStates` keeps the states as they were
at the barrier: the owner of the states calls `FrozenStates.keep` before it changes one, and only then the state is
copied (copy on write). So a barrier costs a list of the keys, and later one copy of the state of each key that gets a
record.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, Protocol, final

import numpy as np

from streamiter.errors import InternalError, PlainDataError, shortened
from streamiter.operators.due import DueHeap, DueItems, Prefetch
from streamiter.values.deferred import Deferred, Encode, PlainValue
from streamiter.values.numbers import Array
from streamiter.values.records import Batch, slice_batch
from streamiter.values.times import Seconds, in_seconds

# Values of these types cannot change, so they need no copy. numpy's structured scalars can change.
_IMMUTABLE: Final[frozenset[type[Any]]] = frozenset(
    {type(None), bool, int, float, str, bytes, *np.sctypeDict.values()}
) - {np.void, np.object_}


def independent_copy(value: Any) -> Any:
    """Return a copy of plain data that shares no mutable value with it.

    It is several times faster than ``copy.deepcopy`` and uses one call for each level; plain data may have 500 levels.

    >>> seen = {"users": [1, 2]}
    >>> copied = independent_copy(seen)
    >>> seen["users"].append(3)
    >>> copied
    {'users': [1, 2]}
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


ListEntry = Sequence[Any]
"""An entry of a list of a key: its time, its number among all entries of the step, and more."""


class ListEntries(Protocol):
    """Is told what happens to the entries in the two lists of a key (``place`` 0 or 1), which is loaded."""

    def came(self, key: Any, place: int, entry: ListEntry) -> None: ...
    def changed(self, key: Any, place: int, entry: ListEntry) -> None: ...
    def left(self, key: Any, place: int, entry: ListEntry) -> None: ...


class KeyedStates(Protocol):
    """The states of the keys that one step has in one subtask, wherever they are kept.

    The states that `load` or `get` has returned may be changed in place, until `store`: it keeps what has changed. The
    engine calls it when a call of the operator has returned. A state is plain data, and each key has a state of its
    own: a value that it shares with another key or a record may be copied or not.

    With a time to live, the state of a key that was neither read nor written for that time expires: it is dropped
    when it is requested next, or by `drop_expired`. `load` is for states without a time to live.
    """

    keys_at_once: int | None
    """The number of keys whose states should be loaded at once; None for any number."""
    summary: PlainValue
    """For a step with due items: further data that follow from its states, as plain data, or None if they have to be
    computed from the states again. Set it before `snapshot`."""

    @property
    def time_to_live_s(self) -> float | None:
        """The time in seconds after its last use at which a state expires; None for never."""

    def prefetch(self, keys: Sequence[Any]) -> None:
        """Read the states of keys that `get` is about to ask for; has no other effect."""

    def load(self, keys: Sequence[Any] | Array) -> dict[Any, Any]:
        """Return a dict with the states of these keys and perhaps of others; changes of it are kept by `store`.

        It is the same dict for all calls until `clear` or `restore`.
        """

    def list_entries(self) -> ListEntries | None:
        """Return who is told of the changes of entries; None if nobody needs to be told. Call it first.

        For a step whose states are two lists of entries, in the order of time and number.
        """

    def due(self, number: int, numbers: int, *, of_pairs: bool = False, prefetch: Prefetch | None = None) -> DueItems:
        """Return due items, which are kept with the states; the arguments are those of `MakeDue`."""

    def all_without_due(self) -> Iterable[Mapping[Any, Any]]:
        """Delete all due items, and give all states in pieces, so that the items are pushed again."""

    def store(self) -> None:
        """Keep all changes of the states. Raises ``PlainDataError`` for one that cannot be stored."""

    def get(self, key: Any) -> Any:
        """Return the state of ``key``; a new empty dict where there is none."""

    def set(self, key: Any, value: Any) -> None:
        """Replace the state of ``key``."""

    def delete(self, key: Any) -> None:
        """Delete the state of ``key``."""

    def clear(self) -> None:
        """Delete all states. Unfinished snapshots keep the states that they need."""

    def drop_expired(self) -> float:
        """Delete expired states for some milliseconds; return the seconds until the next call."""

    def snapshot(self) -> Deferred:
        """Return the current states, to be encoded later; with a time to live also their idle times."""

    def restore(self, state: Iterable[StateFrame]) -> Awaitable[None] | None:
        """Replace the states by the states of a snapshot, which are kept as they are given."""


def in_turns(states: KeyedStates, keys: list[Any], records: Batch) -> Iterator[tuple[list[Any], Batch]]:
    """Give the keys and records of a batch in pieces, whose states are loaded; after each piece they are stored."""
    size = states.keys_at_once or max(1, len(keys))
    for start in range(0, len(keys), size):
        some, of_some = keys, records
        if size < len(keys):
            some, of_some = keys[start : start + size], slice_batch(records, start, start + size)
        states.prefetch(some)
        yield some, of_some
        states.store()


class HasMonotonic(Protocol):
    """The part of a clock that the times of last use need."""

    def monotonic_s(self) -> float:
        """Return seconds that only grow."""


def after_restore(restoring: Awaitable[None] | None, resume: Callable[[], None]) -> Awaitable[None] | None:
    """Call ``resume`` when the states are restored: at once, or when the result of this function is awaited."""
    if restoring is None:
        resume()
        return None

    async def awaited() -> None:
        await restoring
        resume()

    return awaited()


class KeyedState:
    """States in memory, in a dict: they are the objects themselves, and need no `store`.

    A snapshot is encoded while further records are handled, and copies a state when `get` returns it the next time.
    """

    keys_at_once: int | None = None
    summary: PlainValue = None

    def __init__(
        self,
        clock: HasMonotonic,
        time_to_live_s: Seconds | None = None,
        *,
        name: str,
        encode: Encode,
        in_thread: bool = False,
    ) -> None:
        """``name`` is the name of the step. ``in_thread``: another thread than the event loop's uses the states."""
        self._clock = clock
        self._time_to_live_s = in_seconds(time_to_live_s)
        self._name = name
        self._encode = encode
        self._in_thread = in_thread
        self.states: dict[Any, Any] = {}
        """For backends that load states into this one."""
        self.used_at_s: dict[Any, float] = {}
        """The times of last use, by key, with a time to live."""
        self._unfinished: list[FrozenStates] = []
        """The snapshots that are not encoded yet; each keeps the states that are about to change."""

    @property
    def time_to_live_s(self) -> float | None:
        return self._time_to_live_s

    def prefetch(self, keys: Sequence[Any]) -> None:
        pass

    def load(self, keys: Sequence[Any] | Array) -> dict[Any, Any]:
        if self._unfinished:
            self._keep(keys, may_change=True)
        return self.states

    def store(self) -> None:
        pass

    def list_entries(self) -> ListEntries | None:
        return None

    def due(self, number: int, numbers: int, *, of_pairs: bool = False, prefetch: Prefetch | None = None) -> DueItems:
        return DueHeap(number, numbers, of_pairs=of_pairs, load=self.load)

    def all_without_due(self) -> Iterable[Mapping[Any, Any]]:
        return (self.states,)

    def get(self, key: Any) -> Any:
        if self._unfinished:
            self._keep((key,), may_change=True)
        if self._time_to_live_s is not None:
            self._use(key)
        state = self.states.get(key)
        if state is None and key not in self.states:
            state = self.states[key] = {}
        return state

    def set(self, key: Any, value: Any) -> None:
        if self._unfinished:
            self._keep((key,), may_change=False)
        if self._time_to_live_s is not None:
            self._use(key)
        self.states[key] = value

    def delete(self, key: Any) -> None:
        if self._unfinished:
            self._keep((key,), may_change=False)
        self.states.pop(key, None)
        self.used_at_s.pop(key, None)

    def clear(self) -> None:
        self.states, self.used_at_s, self._unfinished, self.summary = {}, {}, [], None

    def drop_expired(self) -> float:
        if self._time_to_live_s is None:
            return math.inf
        oldest_s = self._clock.monotonic_s() - self._time_to_live_s
        for key in [key for key, used_at_s in self.used_at_s.items() if used_at_s < oldest_s]:
            self.delete(key)
        return self._time_to_live_s

    def _use(self, key: Any) -> None:
        assert self._time_to_live_s is not None
        now_s = self._clock.monotonic_s()
        used_at_s = self.used_at_s.get(key)
        if used_at_s is not None and now_s - used_at_s > self._time_to_live_s:
            self.states.pop(key, None)
        self.used_at_s[key] = now_s

    def _keep(self, keys: Iterable[Any], *, may_change: bool) -> None:
        # A copy of the list: a snapshot that is done leaves it, maybe from another thread.
        for frozen in tuple(self._unfinished):
            frozen.keep(keys, may_change=may_change)

    def snapshot(self) -> Deferred:
        return FrozenStates(
            self.states,
            name=self._name,
            encode=self._encode,
            unfinished=self._unfinished,
            used_at_s=None if self._time_to_live_s is None else self.used_at_s,
            now_s=self._clock.monotonic_s(),
            in_thread=self._in_thread,
        )

    def restore(self, state: Iterable[StateFrame]) -> None:
        self.clear()
        now_s = self._clock.monotonic_s()
        for keys, states, *idle_s in state:
            self.states.update(zip(keys, states, strict=True))
            if self._time_to_live_s is not None:
                # Frames without idle times are of a step without a time to live, which begins now.
                idle = idle_s[0] if idle_s else [0.0] * len(keys)
                self.used_at_s.update((key, now_s - one_s) for key, one_s in zip(keys, idle, strict=True))


StateFrame = list[list[Any]]
"""Some keys and their states: ``[keys, states]``, or ``[keys, states, idle seconds]``.

Encoding and decoding such lists takes half the time of pairs."""

# 1 to 5 ms of work for small states: less than a batch of records may take, and enough to make the fixed cost of a
# frame small.
_KEYS_MAX: Final = 2048
# Nested structures are encoded at about 20 MB/s.
_BYTES_AIMED_AT: Final = 128 << 10
# So few that they may be large: the size of a frame tells how many keys the next one may have.
_KEYS_FIRST: Final = 16

# Freeing this many takes some milliseconds.
_COPIES_AT_ONCE: Final = 20_000

# Remembering that a key was encoded takes about 40 bytes and 0.1 µs. A needless copy of a state takes little more,
# unless states are at least this large.
_BYTES_WORTH_REMEMBERING: Final = 1024

_NOT_NEEDED: Final = object()
"""Stands for the state of a key that a frame already has, or that did not exist at the barrier."""


@final
class FrozenStates(Deferred):
    """The states of all keys as they were at a barrier, in the order of their dict, encoded while records are handled.

    Two of them may be unfinished at a time. Each keeps the states that it needs, so the second neither waits for the
    first nor ends it.
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
        """``unfinished`` is the list of the owner of ``states``; this object is in it until all states are encoded.

        ``used_at_s`` are the times of last use, from which the idle seconds at ``now_s`` follow. ``in_thread``: another
        thread calls ``keep`` than calls ``frames``.
        """
        self.name = name
        self._encode = encode
        self._states = states
        self._used_at_s = used_at_s
        self._now_s = now_s
        self._keys = list(reversed(states))
        """The keys that no frame has yet, the next one last: so the list shrinks frame by frame."""
        self._kept: dict[Any, Any] = {}
        """The states of changed keys as they were at the barrier; ``_NOT_NEEDED`` for keys that no frame needs."""
        self._kept_used_at_s: dict[Any, float] = {}
        self._is_over = False
        self._lock: AbstractContextManager[Any] = threading.Lock() if in_thread else nullcontext()
        self._unfinished = unfinished
        unfinished.append(self)

    def keep(self, keys: Iterable[Any], *, may_change: bool = True) -> None:
        """Keep the states of these keys, which are about to be changed in place or (``may_change=False``) replaced."""
        with self._lock:
            kept, states, used_at_s = self._kept, self._states, self._used_at_s
            for key in keys:
                try:
                    if key in kept:
                        continue
                    state = states.get(key, _NOT_NEEDED)
                except TypeError:
                    continue  # the key cannot be hashed, so it has no state
                kept[key] = self._copied(key, state) if may_change and state is not _NOT_NEEDED else state
                if used_at_s is not None and key in used_at_s:
                    self._kept_used_at_s[key] = used_at_s[key]

    def _copied(self, key: Any, state: Any) -> Any:
        """Return a copy, or the error to raise when the state is encoded: the current record is not at fault."""
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
                    raise InternalError(f"the state of step {self.name!r} was released before all of it was read")
                keys = self._keys[: -count - 1 : -1]
                del self._keys[-count:]
                frame = self._frame(keys)
            yield frame
            left -= len(keys)
            count = max(1, min(_KEYS_MAX, 8 * count, count * _BYTES_AIMED_AT // len(frame)))
        yield from self._give_back()
        self.release()

    def _give_back(self) -> Iterator[bytes]:
        """Free the copies that were not needed, in slices of their own: frames without keys."""
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


@dataclass(frozen=True, slots=True)
class _NotCopied:
    """Stands for a state that could not be copied."""

    refusal: PlainDataError


def select_keys(frames: Iterable[StateFrame], wanted: Callable[[list[Any]], Iterable[bool]]) -> Iterator[StateFrame]:
    """Yield the frames with only the keys for which ``wanted(keys)`` is True; for the redistribution of state.

    >>> list(select_keys([[[1, 2, 3], ["a", "b", "c"]]], lambda keys: [key != 2 for key in keys]))
    [[[1, 3], ['a', 'c']]]
    """
    for frame in frames:
        is_wanted = list(wanted(frame[0]))
        yield [list(compress(column, is_wanted)) for column in frame]
