"""What holds at the time of a record: versions of a table, events in a window before it, and copies of itself.

These are pure data structures. ``add…`` takes a record, ``advance`` an event-time watermark; what they emit is appended
to ``results`` with its timestamp.

>>> prices = AsOfJoin()
>>> for time, price in [(1, 10), (10, 12)]:
...     prices.add_version("apple", time, price)
>>> [prices.add("apple", time, f"sold at {time}") for time in (5, 10)]
[True, True]
>>> prices.advance(11)
True
>>> prices.take_results()
[(5, ('sold at 5', 10)), (10, ('sold at 10', 12))]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
from operator import itemgetter
from typing import Any, Final, Literal

from streamiter.operators.definitions import Definition, at_most
from streamiter.operators.due import MakeDue
from streamiter.operators.timed.joining import TimedRecord
from streamiter.operators.timed.ranges import RangeAggregates
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed_states import TimedStates
from streamiter.values.times import MAX_TIME

_first: Final = itemgetter(0)

TableHow = Literal["left", "inner"]
"""Whether records without a version of the table are emitted, in a pair with None."""


class WaitingRecords(TimedStates[TimedRecord]):
    """Base class: records of one stream wait until all is known of the other stream at their time.

    The state of a key has three lists: the times of the entries of the other stream, in order; these entries; and the
    waiting records, as [time, arrival, record], by time.
    """

    def __init__(self, *, strict: bool) -> None:
        """``strict``: versions and events with the time of a record do not count for it, so the record waits less."""
        super().__init__()
        self._strict = strict

    def _make_due(self, make: MakeDue) -> None:
        self._due = make(0, 2)
        """By time and arrival: the waiting records."""
        self._stale = make(1, 1)
        """By the time when a part of the state of a key is not needed any more."""

    def add(self, key: Any, time: int, record: Any) -> bool:
        """Add a record that asks; return False, and change nothing, if it is late."""
        if time < self.reached(key):
            return False
        state = self._state_of(key)
        if self._is_known(time):
            self._answer(key, state, time, record)
            self._prune(key)
            return True
        arrival, self.numbered = self.numbered, self.numbered + 1
        insort_right(state[-1], [time, arrival, record], key=_first)
        self._wait(key, time, arrival)
        return True

    def advance(self, watermark: int) -> bool:
        self.watermark = max(watermark, self.watermark)
        for *_, key in self._due.until(self.watermark if self._strict else self.watermark - 1):
            self.kept -= 1
            state = self.states[key]
            time, _, record = state[-1].pop(0)
            self._answer(key, state, time, record)
            if watermark != MAX_TIME:  # At the end no more records are known to come, but the job may read on.
                self._prune(key)
        if self._due.is_more or watermark == MAX_TIME:
            return not self._due.is_more
        for *_, key in self._stale.until(self.watermark - 1):
            if key in self.states:
                self._prune(key)
        return not self._stale.is_more

    def _note(self, key: Any, state: Any) -> None:
        for time, arrival, _ in state[-1]:
            self.numbered = max(self.numbered, arrival + 1)
            self._wait(key, time, arrival)
        for time in self._stale_times(state):
            self._stale.push((time,), key)

    # -- what a subclass defines -------------------------------------------------------------------------

    def _answer(self, key: Any, state: list[Any], time: int, record: Any) -> None:
        """Emit a record with what holds at its time."""
        raise NotImplementedError

    def _prune(self, key: Any) -> None:
        """Remove the parts of the state that no future record needs."""
        raise NotImplementedError

    def _stale_times(self, state: list[Any]) -> list[int]:
        """Return the times after which a part of a state is not needed."""
        raise NotImplementedError

    def _state_of(self, key: Any) -> list[Any]:
        """Return the state of a key, which may be new."""
        state: list[Any] = self.states.setdefault(key, [[], [], []])
        return state

    def _insert(self, key: Any, time: int, entry: Any) -> None:
        """Insert an entry of the other stream."""
        times, entries, _ = self._state_of(key)
        at = bisect_right(times, time)
        times.insert(at, time)
        entries.insert(at, entry)

    def _remove_before(self, key: Any, place: int) -> None:
        """Remove the entries before a place, and the state of the key if nothing is left in it."""
        times, entries, waiting = self.states[key]
        del times[:place], entries[:place]
        if not (times or waiting):
            del self.states[key]

    def _wait(self, key: Any, time: int, arrival: int) -> None:
        self.kept += 1
        self._due.push((time, arrival), key)

    def _is_known(self, time: int) -> bool:
        """Return whether all that counts for a record with this time has come."""
        return self.watermark >= time if self._strict else self.watermark > time

    def _least_time(self, waiting: list[Any]) -> int:
        """Return the least time of the records of a key that wait or may still come."""
        return min(self.watermark, waiting[0][0]) if waiting else self.watermark


class AsOfJoin(WaitingRecords):
    """Pairs of a record and the last version of the table at its time, or before it (``strict``).

    An entry of the other stream is a version of the table; None says that the table has no version from then on.
    """

    def __init__(self, how: TableHow = "left", *, strict: bool = False) -> None:
        super().__init__(strict=strict)
        self._how: TableHow = how

    def definition(self) -> Definition:
        return {"kind": "join_table"}

    def add_version(self, key: Any, time: int, version: Any) -> None:
        """Add a version of the table; one that is late counts for the records that are still to come."""
        self._insert(key, time, version)
        state = self.states[key]
        self._prune(key)
        for stale in self._stale_times(state)[-1:]:
            self._stale.push((stale,), key)

    def _answer(self, key: Any, state: list[Any], time: int, record: Any) -> None:
        times, versions, _ = state
        at = (bisect_left if self._strict else bisect_right)(times, time)
        version = versions[at - 1] if at else None
        if version is not None or self._how == "left":
            self.results.append((time, (record, version)))

    def _prune(self, key: Any) -> None:
        times, _, waiting = self.states[key]
        self._remove_before(key, max(0, bisect_left(times, self._least_time(waiting)) - 1))

    def _stale_times(self, state: list[Any]) -> list[int]:
        # When the watermark passes a version, the one before it is not needed.
        times: list[int] = state[0][1:]
        return times


class AsOfWindow(WaitingRecords):
    """Pairs of a record and the aggregate of the events in ``[time − size, time)``: strictly before it.

    An entry of the other stream has the values of an event; entries are in the order of (time, arrival).
    """

    def __init__(self, size_ms: int, aggregates: Aggregates) -> None:
        self._size_ms = size_ms
        self._aggregates = aggregates
        self._ranges = RangeAggregates(aggregates, size_ms)
        super().__init__(strict=True)

    def _make_due(self, make: MakeDue) -> None:
        super()._make_due(make)
        self._ranges.clear()  # The states may be others now.

    def _settings(self) -> list[Any]:
        return [*super()._settings(), self._size_ms]

    def definition(self) -> Definition:
        return {"kind": "as_of_window", "size_ms": at_most(self._size_ms), "aggregates": self._aggregates.definition()}

    def add_event(self, key: Any, time: int, values: list[Any]) -> bool:
        """Add an event with its values; return False, and change nothing, if it is too late for all windows to come."""
        if time + self._size_ms < self.reached(key):
            return False
        # Aggregates that refuse an event refuse it now.
        self._aggregates.add([self._aggregates.initial()], time, values)
        self._insert(key, time, values)
        self._ranges.changed(key, time)
        self._stale.push((time + self._size_ms,), key)
        return True

    def _answer(self, key: Any, state: list[Any], time: int, record: Any) -> None:
        times, events, _ = state
        accumulators = self._ranges.accumulators(key, times, events, time - self._size_ms, time)
        self.results.append((time, (record, self._aggregates.result(accumulators))))

    def _prune(self, key: Any) -> None:
        times, _, waiting = self.states[key]
        gone = bisect_left(times, self._least_time(waiting) - self._size_ms)
        self._ranges.removed(key, times[:gone], len(times) > gone)
        self._remove_before(key, gone)

    def _stale_times(self, state: list[Any]) -> list[int]:
        return [time + self._size_ms for time in state[0]]


class Deduplication(TimedStates[Any]):
    """Lets a record pass unless a record with the same key and id, less than ``within`` away, has passed.

    The state of a key: for each id the times of the records that have passed, in order.
    """

    def __init__(self, within_ms: int) -> None:
        super().__init__()
        self._within_ms = within_ms

    def _make_due(self, make: MakeDue) -> None:
        self._stale = make(0, 1, of_pairs=True)
        """By the time when a time is not needed any more: its key and id."""

    def _settings(self) -> list[Any]:
        return [*super()._settings(), self._within_ms]

    def next_due(self) -> int | None:
        return None  # A record passes at once, or never.

    def add(self, key: Any, time: int, identity: Any) -> bool | None:
        """Return whether a record passes; None if it is late."""
        if time < self.reached(key) - self._within_ms:
            return None
        times: list[int] = self.states.get(key, {}).get(identity, [])
        if bisect_right(times, time - self._within_ms) < bisect_left(times, time + self._within_ms):
            return False
        insort_right(times, time)
        self.states.setdefault(key, {})[identity] = times
        self._stale_at(time, key, identity)
        return True

    def advance(self, watermark: int) -> bool:
        self.watermark = max(watermark, self.watermark)
        for *_, (key, identity) in self._stale.until(self.watermark):
            self.kept -= 1
            identities = self.states[key]
            identities[identity].pop(0)
            if not identities[identity]:
                del identities[identity]
            if not identities:
                del self.states[key]
        return not self._stale.is_more

    def _note(self, key: Any, state: Any) -> None:
        for identity, times in state.items():
            for time in times:
                self._stale_at(time, key, identity)

    def _stale_at(self, time: int, key: Any, identity: Any) -> None:
        self.kept += 1
        # The earliest record that is not late is ``within`` behind the watermark, and looks as far back.
        self._stale.push((time + 2 * self._within_ms,), (key, identity))
