"""The event time of one subtask of a step: its watermark, the timestamp at hand, and its event timers.

:class:`StepTimes` is a pure data structure. The engine tells it of records and watermarks, takes the timers that are
due, and calls the operator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, final

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.operators.due import DueItem, DueItems, MakeDue, Prefetch
from streamiter.operators.keyed_state import KeyedStates, StateFrame, after_restore
from streamiter.operators.timed_states import TimedStates
from streamiter.values.deferred import PlainValue
from streamiter.values.times import MAX_TIME, MIN_TIME, TIME_LIMIT, before_end


class EventTimer(NamedTuple):
    """A timer by event time: when it is due, its key, its payload."""

    at: int
    key: Any
    payload: Any


_NO_TIMER: Final = MAX_TIME + 1
"""Later than all timers, and than the last watermark."""

_IDENTITY: Final = 3
"""The length of the identity of a timer that has a key."""

_ATOMS: Final = (type(None), bool, int, str, bytes)


def checked_time(option: str, time: object) -> int:
    """Return a timestamp that a user gives as a plain int; raise ConfigurationError for anything else."""
    if isinstance(time, (int, np.integer)) and not isinstance(time, bool) and -TIME_LIMIT < time < TIME_LIMIT:
        return int(time)
    raise ConfigurationError(
        f"{option}: expected whole milliseconds since 1970, below 2**62, given {time!r}; write int(seconds * 1000)"
    )


@final
class EventTimers(TimedStates[EventTimer]):
    """The timers of one subtask. The state of a key: each timer's number by its identity; for one timer, the pair.

    An *identity* is a tuple: the time, the type and the value of the payload. If the payload is not an atom, the type
    is empty, the value is the result of ``identify``, and the entry is a list of the number and the payload. If the
    timer was set without a key, the tuple has one more item, None: a record may have the key that stands for "no key".
    """

    def __init__(self, prefetch: Prefetch | None = None) -> None:
        """``prefetch`` reads what the operator probably asks for when the timers of some keys fire."""
        self._prefetch = prefetch
        super().__init__()

    def set(self, key: Any, identity: tuple[Any, ...], payload: Any) -> None:
        """Set a timer that is not set."""
        number = self.numbered
        self.numbered = number + 1
        self.kept += 1
        entry = number if identity[1] else [number, payload]
        state = self.states.get(key)
        if state is None:
            self.states[key] = (identity, entry)  # A dict would take 160 bytes more.
        else:
            if type(state) is tuple:
                state = self.states[key] = dict((state,))
            state[identity] = entry
        self._due.push((identity[0], number), (key, identity))

    def delete(self, key: Any, identity: tuple[Any, ...]) -> None:
        """Delete a timer that is set. Its due item remains, and has no effect."""
        state = self.states[key]
        if len(_timers_of(state)) == 1:
            del self.states[key]
        else:
            del state[identity]
        self.kept -= 1

    def due(self) -> DueItems:
        """Return the timers by time and number, with the pairs of key and identity."""
        return self._due

    def is_set(self, key: Any, identity: tuple[Any, ...], number: int) -> bool:
        """Return whether a timer that is due has not been deleted."""
        entry = self.entry(key, identity)
        return entry is not None and _number(entry) == number

    def entry(self, key: Any, identity: tuple[Any, ...]) -> Any:
        """Return the number of a timer, or the list with it; None if it is not set."""
        state = self.states.get(key)
        if type(state) is tuple:
            return state[1] if state[0] == identity else None
        return None if state is None else state.get(identity)

    def take(self, key: Any, identity: tuple[Any, ...], number: int) -> Any:
        """Delete a timer that is due, and return its payload; ``_DELETED`` if it has been deleted."""
        entry = self.entry(key, identity)
        if entry is None or _number(entry) != number:
            return _DELETED
        self.delete(key, identity)
        return identity[2] if identity[1] else entry[1]

    def oldest_first(self) -> list[EventTimer]:
        """Return all timers in the order in which they were set."""
        timers = [
            (_number(entry), EventTimer(identity[0], key, identity[2] if identity[1] else entry[1]))
            for key, state in self.states.items()
            for identity, entry in _timers_of(state)
        ]
        return [timer for _, timer in sorted(timers, key=itemgetter(0))]

    def _make_due(self, make: MakeDue) -> None:
        self._due = make(0, 2, of_pairs=True, prefetch=self._prefetch)

    def _note(self, key: Any, state: Any) -> None:
        for identity, entry in _timers_of(state):
            number = _number(entry)
            self.numbered = max(self.numbered, number + 1)
            self.kept += 1
            self._due.push((identity[0], number), (key, identity))


def _timers_of(state: Any) -> Collection[tuple[Any, Any]]:
    """Return the identities and entries in the state of a key."""
    return (state,) if type(state) is tuple else state.items()


def _number(entry: int | list[Any]) -> int:
    return entry if isinstance(entry, int) else entry[0]


_DELETED: Final = object()


@final
class StepTimes:
    """The event time of one subtask of a step.

    Timers fire in the order (time, order of setting); equal timers (key, time, payload) are one. After the last
    watermark, timers that are later than the latest pending timer are dropped, so that the end is reached.

    >>> times = StepTimes()
    >>> for at in (20, 10, 20):
    ...     times.set_timer(at, "ann", None)
    >>> times.reach(15)
    >>> times.take_due(), times.take_due()
    (EventTimer(at=10, key='ann', payload=None), None)
    >>> times.reach(MAX_TIME)
    >>> times.set_timer(21, "bo", None)
    >>> times.take_due(), times.dropped
    (EventTimer(at=20, key='ann', payload=None), 1)
    """

    def __init__(self, identify: Callable[[Any], Hashable] = repr) -> None:
        """``identify`` returns equal values for equal payloads: bytes, or something else that may be a key."""
        self._identify = identify
        self._states: KeyedStates | None = None
        self._no_key: Any = None
        self._prefetch: Prefetch | None = None
        self.clear()

    def keep_timers_in(self, make: Callable[[], KeyedStates], no_key: Any, prefetch: Prefetch | None = None) -> None:
        """Keep the timers in states by key, which the first call makes.

        ``no_key`` stands for the key of a timer that was set without one: any key of this subtask. ``prefetch`` reads
        what the operator may ask for when the timers of some keys fire.
        """
        if self._states is None:
            self._states, self._no_key, self._prefetch = make(), no_key, prefetch
            self._timers = EventTimers(prefetch)
            self._timers.keep_in(self._states)

    def prefetch(self, keys: Sequence[Any]) -> None:
        """Read the timers of keys that probably get some now, until ``store``."""
        if self._states is not None:
            self._states.prefetch(keys)

    def store(self) -> None:
        """Keep the timers that were set: a call of the operator has returned."""
        if self._states is not None:
            self._states.store()

    def clear(self) -> None:
        """Reset it: no watermark, no timers."""
        self.watermark = MIN_TIME
        """The watermark that the step has reached."""
        self.is_idle = False
        """Whether its inputs bring nothing for now."""
        self.passed = MIN_TIME
        """The watermark that the step has passed on."""
        self.timestamp = MIN_TIME
        """The timestamp of the record or timer at hand."""
        self.row = -1
        """The row of the record at hand in its batch; -1 if there is none."""
        self.due: int | None = None
        """The time of the timer that fires now."""
        self.next_at = _NO_TIMER
        """No timer is due before this time. If it is not above the watermark, a timer may be due."""
        self.dropped = 0
        """The number of timers that were set after the end, and dropped."""
        self._last = MAX_TIME
        """Later timers are dropped."""
        self._timers = EventTimers(self._prefetch)
        self._firing: Iterator[DueItem] | None = None
        """The timers that are taken now."""
        if self._states is not None:
            self._states.clear()
            self._timers.keep_in(self._states)
        self._floors: Mapping[int, int] = {}
        """By group of keys: the watermark of the group before the parallelism of the step changed, if it was higher."""
        self._group_of: Callable[[Any], int] | None = None

    def reach(self, watermark: int) -> None:
        """Note a watermark that is above the one before."""
        self.watermark = watermark
        if watermark == MAX_TIME:
            self._last = self._latest()
        if self._floors and watermark >= max(self._floors.values()):
            self._floors = {}

    @property
    def has_floors(self) -> bool:
        """Whether some keys have a higher watermark than the step."""
        return bool(self._floors)

    def event_time(self, key: Any) -> int | None:
        """Return the event time as an operator sees it: the due time in a timer, else the watermark; None for none."""
        if self.due is not None:
            return self.due
        watermark = self.watermark
        if self._floors and key is not None and self._group_of is not None:
            watermark = max(watermark, self._floors.get(self._group_of(key), MIN_TIME))
        return None if watermark == MIN_TIME else watermark

    # -- timers --------------------------------------------------------------------------------------------

    def set_timer(self, at: int, key: Any, payload: Any) -> None:
        """Set a timer; no effect if an equal one is set."""
        key, identity, is_set = self._find(at, key, payload)
        if is_set:
            return
        if at > self._last:
            self.dropped += 1
            return
        self._timers.set(key, identity, payload)
        if at < self.next_at:
            self.next_at = at

    def delete_timer(self, at: int, key: Any, payload: Any) -> None:
        """Delete a timer; no effect if none is set."""
        key, identity, is_set = self._find(at, key, payload)
        if is_set:
            self._timers.delete(key, identity)

    def take_due(self) -> EventTimer | None:
        """Take the first timer that is due; None if none is."""
        timers, due = self._timers, self._timers.due()
        while self.next_at <= self.watermark:
            if self._firing is None:
                self.store()
                self._firing = due.until(self.watermark)
            for at, number, _, (key, identity) in self._firing:
                if self._states is not None:
                    self._states.load((key,))
                payload = timers.take(key, identity, number)
                if payload is not _DELETED:
                    return EventTimer(at, None if len(identity) > _IDENTITY else key, payload)
            self._firing = None
            if not due.is_more:
                self.next_at = self.watermark + 1
        return None

    def __len__(self) -> int:
        return self._timers.kept

    def _find(self, at: int, key: Any, payload: Any) -> tuple[Any, tuple[Any, ...], bool]:
        """Return the key and the identity of a timer, and whether it is set; the timers of the key are loaded."""
        kind = type(payload)
        identity: tuple[Any, ...] = (
            (at, kind.__name__, payload) if kind in _ATOMS else (at, "", self._identify(payload))
        )
        if self._states is not None:
            if key is None:
                key, identity = self._no_key, (*identity, None)
            self._states.load((key,))
        return key, identity, self._timers.entry(key, identity) is not None

    def _latest(self) -> int:
        """Return the time of the last timer."""
        for at, number, _, (key, identity) in self._timers.due().latest():
            if self._states is not None:
                self._states.load((key,))
            if self._timers.is_set(key, identity, number):
                return int(at)
        return MIN_TIME

    # -- state ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, PlainValue]:
        """Return the state as plain data; timers without states by key are in the order in which they were set."""
        keyed = None
        if self._states is not None:
            self._states.summary = self._timers.summary()
            keyed = self._states.snapshot()
        return {
            "watermark": self.watermark,
            "passed": self.passed,
            "last": self._last,
            "timers": [tuple(timer) for timer in self._timers.oldest_first()] if keyed is None else [],
            "keyed timers": keyed,
            "dropped": self.dropped,
            "floors": list(self._floors.items()),
        }

    @staticmethod
    def without_end(state: Mapping[str, PlainValue]) -> dict[str, PlainValue]:
        """Return a state of :meth:`snapshot` for a step whose event time continues after its end."""
        return {
            **state,
            "watermark": before_end(state["watermark"]),
            "passed": before_end(state["passed"]),
            "last": MAX_TIME,
            "floors": [(group, time) for group, time in state["floors"] if time != MAX_TIME],
        }

    def restore(self, state: Mapping[str, PlainValue], group_of: Callable[[Any], int]) -> Awaitable[None] | None:
        """Take over the result of ``snapshot``. ``group_of`` returns the group of a key, if there are floors."""
        self.clear()
        keyed: Iterable[StateFrame] | None = state.get("keyed timers")
        restoring = None
        if keyed is not None and self._states is not None:
            restoring = after_restore(self._states.restore(keyed), self._resume)
        elif keyed is not None:
            self._timers.restore({key: timers for frame in keyed for key, timers in zip(*frame, strict=True)})
            self._see_first()
        timers: Iterable[tuple[int, Any, Any]] = state["timers"]
        for at, key, payload in timers:
            self.set_timer(at, key, payload)
        self.watermark, self.passed = state["watermark"], state["passed"]
        self._last, self.dropped = state["last"], state["dropped"]
        self._floors, self._group_of = dict(state["floors"]), group_of
        return restoring

    def _resume(self) -> None:
        assert self._states is not None
        self._timers.keep_in(self._states)
        self._see_first()

    def _see_first(self) -> None:
        first = self._timers.due().first()
        self.next_at = _NO_TIMER if first is None else first
