"""The windows of one subtask: what each key keeps, and the results that records and watermarks cause.

This is a pure data structure, without a clock and without a stream. ``add`` takes a record, ``advance`` an event-time
watermark, and ``early`` asks for early results; all append to ``results``. The state of a key is plain data.

>>> from streamiter.operators.timed.several_aggregates import Aggregates
>>> from streamiter.operators.timed.kinds import tumbling
>>> windows = make_windows(tumbling(0.010), Aggregates.of(["sum"], {}))
>>> for time, value in [(1, 5), (9, 2), (10, 1)]:
...     assert windows.add("ann", time, [value])
>>> windows.advance(10)
True
>>> windows.take_results()
[WindowResult(key='ann', start=0, end=10, value=7, is_early=False, is_retraction=False, revision=0)]
>>> windows.add("ann", 9, [2])   # It is late: its window has gone.
False
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from streamiter.operators.due import MakeDue
from streamiter.operators.timed.kinds import AlignedWindow, Hopping, Session, Sliding, WindowKind
from streamiter.operators.timed.ranges import RangeAggregates
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed_states import TimedStates
from streamiter.values.numbers import Array, Indices
from streamiter.values.times import MAX_TIME, Times


class WindowResult(msgspec.Struct, frozen=True):
    """A result of one window of one key. The last revision of a key, start and end is the valid result."""

    key: Any
    """The key of the window."""
    start: int
    """The first millisecond of the window."""
    end: int
    """The first millisecond behind the window; the timestamp of the result is ``end − 1``."""
    value: Any
    """The aggregate, or a dict with several aggregates by name."""
    is_early: bool = False
    """Whether the window was not complete yet."""
    is_retraction: bool = False
    """Whether this result, which was emitted before with the same revision, does not hold any more."""
    revision: int = 0
    """Counts the results of the window from 0."""


WINDOW_START, WINDOW_END, CREATION, VALUES, REVISION, STANDING, IS_COMPLETE, HAS_CHANGED, REPLACED = range(9)
"""An *open window* is a list with these items, since it is part of the state:

its interval; a number that is higher for windows that were created later; its accumulators (None if they are computed
when they are needed); the revision of its next result; the value of its last result, in a list, if it may have to be
retracted; whether it has had its on-time result; whether a record came since its last result; and the results, as
(start, end, value, revision), that its next result replaces."""

OpenWindow = list[Any]


class WindowContent(Protocol):
    """What windows keep of their records: accumulators, and the value that follows from them."""

    def initial(self) -> list[Any]:
        """Return the accumulators of a window without records."""

    def add(self, windows: Sequence[list[Any]], time: int, values: list[Any]) -> list[list[Any]]:
        """Return the accumulators of windows with a record; change nothing if the record is refused."""

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        """Return the accumulators of the records of two windows; all records of the first are before the others."""

    def result(self, accumulators: list[Any]) -> Any:
        """Return the value of a window."""


class OpenWindows(TimedStates[WindowResult]):
    """Base class: the windows of the keys of one subtask, when they are due, and their results."""

    def __init__(
        self, content: WindowContent, *, lateness_ms: int = 0, retracting: bool = False, gives_early: bool = False
    ) -> None:
        super().__init__()
        self._content = content
        self._lateness_ms = lateness_ms
        self._retracting = retracting
        self._gives_early = gives_early

    def _make_due(self, make: MakeDue) -> None:
        self._due = make(0, 3)
        """By end, start and creation: windows that are to become complete."""
        self._expiring = make(1, 3)
        """By the time when a complete window goes, its start and creation."""
        self._changed = make(2, 3)
        """By end, start and creation: incomplete windows with records that no result has, if there are early results.

        A session that has grown is there again with its new end."""

    def _settings(self) -> list[Any]:
        return [*super()._settings(), self._lateness_ms, self._gives_early]

    def add(self, key: Any, time: int, values: list[Any]) -> bool:
        """Add a record with its values for the aggregates; return False, and change nothing, if it is late."""
        raise NotImplementedError

    def next_due(self) -> int | None:
        """Return the least watermark at which a window may become complete or go; None if there is no window."""
        firsts = (self._due.first(), self._expiring.first())
        return min((time for time in firsts if time is not None), default=None)

    def advance(self, watermark: int) -> bool:
        """No record below ``watermark`` is expected any more: complete the windows that are due, by end and start."""
        if watermark <= self.watermark and not (self._due.is_more or self._expiring.is_more):
            return True
        self.watermark = watermark
        for end, start, creation, _, key in self._due.until(watermark):
            window = self._found(key, start, creation)
            if window is None or window[IS_COMPLETE]:
                continue
            if window[WINDOW_END] > end:  # A session has grown.
                self._schedule(key, window)
                continue
            self._give(key, window)
            window[IS_COMPLETE] = True
            if self._is_over(key, window[WINDOW_END]):
                self._expire(key, start, creation)
            else:
                self._keep(key, window)
        if self._due.is_more:
            return False
        for _, start, creation, _, key in self._expiring.until(watermark):
            if key in self.states:
                self._expire(key, start, creation)
        return not self._expiring.is_more

    def early(self) -> bool:
        """Give a result of each incomplete window that has changed since its last result.

        Returns whether all is done, as ``advance`` does.
        """
        for end, start, creation, _, key in self._changed.until(MAX_TIME):
            window = self._found(key, start, creation)
            if window is not None and window[HAS_CHANGED] and window[WINDOW_END] == end:
                self._give(key, window, is_early=True)
        return not self._changed.is_more

    def _note(self, key: Any, state: Any) -> None:
        for window in self._windows_of(state):
            self.kept += 1
            self.numbered = max(self.numbered, window[CREATION] + 1)
            if window[IS_COMPLETE]:
                self._keep(key, window)
            else:
                self._schedule(key, window)
            if window[HAS_CHANGED] and self._gives_early:
                self._has_changed(key, window)

    # -- what a kind of windows defines ------------------------------------------------------------------

    def _windows_of(self, state: Any) -> Iterable[OpenWindow]:
        """Return the open windows in the state of a key."""
        windows: Iterable[OpenWindow] = state.values()
        return windows

    def _find(self, state: Any, start: int, creation: int) -> OpenWindow | None:
        """Return the open window of this creation; ``start`` is where it began when it was created."""
        window: OpenWindow | None = state.get(start)
        return window if window is not None and window[CREATION] == creation else None

    def _value(self, key: Any, window: OpenWindow) -> Any:
        """Return the value of a window."""
        return self._content.result(window[VALUES])

    def _expire(self, key: Any, start: int, creation: int) -> None:
        """Remove a complete window, if it is still there."""
        state = self.states[key]
        if self._find(state, start, creation) is not None:
            del state[start]
            self.kept -= 1
        if not state:
            del self.states[key]

    # -- for the kinds of windows ------------------------------------------------------------------------

    def _new_window(self, key: Any, start: int, end: int, values: list[Any]) -> OpenWindow:
        """Return a new window, which will be due."""
        window = [start, end, self.numbered, values, 0, [], False, False, []]
        self.numbered += 1
        self.kept += 1
        if end > self.reached(key):  # Otherwise it is complete with its first record.
            self._schedule(key, window)
        return window

    def _has_record(self, key: Any, window: OpenWindow) -> None:
        """A record was added to a window: give a new result at once if it is complete already."""
        if window[WINDOW_END] <= self.reached(key):
            self._give(key, window)
            if not window[IS_COMPLETE]:
                window[IS_COMPLETE] = True
                self._keep(key, window)
        elif self._gives_early and not window[HAS_CHANGED]:
            window[HAS_CHANGED] = True
            self._has_changed(key, window)

    def _keeps_results(self) -> bool:
        """Whether the last value of a window may have to be retracted."""
        return self._retracting

    def _is_over(self, key: Any, end: int) -> bool:
        """Return whether the state of windows of a key with this end has gone."""
        return end + self._lateness_ms <= self.reached(key)

    def _give(self, key: Any, window: OpenWindow, *, is_early: bool = False) -> None:
        for start, end, value, revision in window[REPLACED]:
            self.results.append(WindowResult(key, start, end, value, is_retraction=True, revision=revision))
        start, end, revision = window[WINDOW_START], window[WINDOW_END], window[REVISION]
        if self._retracting and window[STANDING]:
            [before] = window[STANDING]
            self.results.append(WindowResult(key, start, end, before, is_retraction=True, revision=revision - 1))
        value = self._value(key, window)
        self.results.append(WindowResult(key, start, end, value, is_early=is_early, revision=revision))
        window[REPLACED] = []
        window[STANDING] = [value] if self._keeps_results() else []
        window[REVISION] = revision + 1
        window[HAS_CHANGED] = False

    def _found(self, key: Any, start: int, creation: int) -> OpenWindow | None:
        state = self.states.get(key)
        return None if state is None else self._find(state, start, creation)

    def _schedule(self, key: Any, window: OpenWindow) -> None:
        self._due.push((window[WINDOW_END], window[WINDOW_START], window[CREATION]), key)

    def _has_changed(self, key: Any, window: OpenWindow) -> None:
        self._changed.push((window[WINDOW_END], window[WINDOW_START], window[CREATION]), key)

    def _keep(self, key: Any, window: OpenWindow) -> None:
        self._expire_at(key, window[WINDOW_END] + self._lateness_ms, window[WINDOW_START], window[CREATION])

    def _expire_at(self, key: Any, time: int, start: int, creation: int) -> None:
        self._expiring.push((time, start, creation), key)


class AlignedWindows(OpenWindows):
    """Tumbling and hopping windows, and windows of the calendar. The state of a key: its windows by their start."""

    def __init__(self, kind: AlignedWindow, content: WindowContent, **options: Any) -> None:
        super().__init__(content, **options)
        self._kind = kind

    def add(self, key: Any, time: int, values: list[Any]) -> bool:
        intervals = self._kind.windows_of(time)
        wanted = [interval for interval in intervals if not self._is_over(key, interval[1])]
        if not wanted:
            return not intervals  # Between two windows a record is not late.
        state: dict[int, OpenWindow] = self.states.get(key) or {}
        content = self._content
        before = [state[start][VALUES] if start in state else content.initial() for start, _ in wanted]
        added = content.add(before, time, values)
        for (start, end), accumulators in zip(wanted, added, strict=True):
            if start not in state:
                state[start] = self._new_window(key, start, end, accumulators)
            else:
                state[start][VALUES] = accumulators
        self.states[key] = state
        for start, _ in wanted:
            self._has_record(key, state[start])
        return True

    def add_batch(self, keys: Sequence[Any] | Array, times: Times, columns: list[Array | None]) -> bool:
        """Add arrays of records, to the same results as ``add``; return False, and change nothing, if it cannot.

        ``columns`` are values for the aggregates, as ``Aggregates.columns_of`` returns them.
        """
        kind = self._kind
        # A complete window gives a new result for each record.
        has_complete = self.floor_of is not None or (len(times) and int(times.min()) < self.watermark)
        if has_complete or not isinstance(kind, Hopping):
            return False
        indices, starts = kind.windows_of_each(times)
        if not len(indices):
            return True
        groups = GroupsInOrder(codes_of(keys), indices, starts // kind.step_ms)
        columns = [None if column is None else column[indices] for column in columns]
        firsts = indices[groups.first]
        group_keys = keys[firsts].tolist() if isinstance(keys, np.ndarray) else [keys[i] for i in firsts.tolist()]
        return self._add_groups(group_keys, starts[groups.first].tolist(), kind.size_ms, groups, columns)

    def _add_groups(
        self, keys: list[Any], starts: list[int], size_ms: int, groups: GroupsInOrder, columns: list[Array | None]
    ) -> bool:
        aggregates, states = self._content, self.states
        assert isinstance(aggregates, Aggregates)
        windows = [states[key].get(start) if key in states else None for key, start in zip(keys, starts, strict=True)]
        initial = aggregates.initial
        before = [initial() if window is None else window[VALUES] for window in windows]
        added = aggregates.add_groups(before, groups.of_record, groups.counts, columns)
        if added is None:
            return False
        for key, start, window, accumulators in zip(keys, starts, windows, added, strict=True):
            if window is None:
                window = self._new_window(key, start, start + size_ms, accumulators)
                states.setdefault(key, {})[start] = window
            else:
                window[VALUES] = accumulators
            if self._gives_early:
                self._has_record(key, window)
        return True


class SessionWindows(OpenWindows):
    """Sessions. The state of a key: its sessions in a list, by time."""

    def __init__(self, gap_ms: int, content: WindowContent, **options: Any) -> None:
        super().__init__(content, **options)
        self._gap_ms = gap_ms

    def _windows_of(self, state: list[OpenWindow]) -> Iterable[OpenWindow]:
        return state

    def _find(self, state: list[OpenWindow], start: int, creation: int) -> OpenWindow | None:
        return next((window for window in state if window[CREATION] == creation), None)

    def _keeps_results(self) -> bool:
        return self._retracting or self._gives_early or self._lateness_ms > 0

    def _expire(self, key: Any, start: int, creation: int) -> None:
        state: list[OpenWindow] = self.states[key]
        window = self._find(state, start, creation)
        if window is not None and window[IS_COMPLETE]:
            if self._is_over(key, window[WINDOW_END]):
                state[:] = [other for other in state if other is not window]
                self.kept -= 1
            else:  # It has grown since.
                self._keep(key, window)
        if not state:
            del self.states[key]

    def add(self, key: Any, time: int, values: list[Any]) -> bool:
        end = time + self._gap_ms
        state: list[OpenWindow] = self.states.get(key) or []
        parts = [window for window in state if window[WINDOW_START] < end and time < window[WINDOW_END]]
        if not parts:
            if self._is_over(key, end):
                return False
            [accumulators] = self._content.add([self._content.initial()], time, values)
            state.append(self._new_window(key, time, end, accumulators))
            state.sort(key=_start)
            self.states[key] = state
            self._has_record(key, next(window for window in state if window[WINDOW_START] == time))
            return True
        merged = parts[0][VALUES]
        for part in parts[1:]:
            merged = self._content.merge(merged, part[VALUES])
        [accumulators] = self._content.add([merged], time, values)
        # A session is due at its first end, so that a record of it costs nothing; but it has the right start.
        is_due_elsewhere = len(parts) > 1 or time < parts[0][WINDOW_START] or parts[0][IS_COMPLETE]
        gone = [part[CREATION] for part in parts[1:]]
        state[:] = [window for window in state if window[CREATION] not in gone]
        self.kept -= len(gone)
        session = self._joined(parts, time, end, self.reached(key))
        session[VALUES] = accumulators
        if is_due_elsewhere and not session[IS_COMPLETE]:
            self._schedule(key, session)
        self._has_record(key, session)
        return True

    def _joined(self, parts: list[OpenWindow], time: int, end: int, reached: int) -> OpenWindow:
        """Return one session of these parts and a record."""
        session = parts[0]
        start, end = min(time, session[WINDOW_START]), max(end, parts[-1][WINDOW_END])
        has_grown = len(parts) > 1 or (start, end) != (session[WINDOW_START], session[WINDOW_END])
        if not has_grown:
            return session
        session[REPLACED] = [
            replaced
            for part in parts
            for replaced in (
                *part[REPLACED],
                *((part[WINDOW_START], part[WINDOW_END], value, part[REVISION] - 1) for value in part[STANDING]),
            )
        ]
        session[STANDING] = []
        session[REVISION] = max(part[REVISION] for part in parts)
        session[CREATION] = min(part[CREATION] for part in parts)
        session[WINDOW_START], session[WINDOW_END] = start, end
        session[IS_COMPLETE] = end <= reached
        session[HAS_CHANGED] = False
        return session


def _start(window: OpenWindow) -> int:
    start: int = window[WINDOW_START]
    return start


class SlidingWindows(OpenWindows):
    """For each timestamp of a key a window that ends with it.

    The state of a key: the times of its records, in order; their values in the order of (time, arrival); and its open
    windows by their start. A window's accumulators are computed for its result.
    """

    def __init__(self, size_ms: int, content: Aggregates, **options: Any) -> None:
        self._size_ms = size_ms
        self._ranges = RangeAggregates(content, size_ms)
        super().__init__(content, **options)

    def _windows_of(self, state: list[Any]) -> Iterable[OpenWindow]:
        windows: dict[int, OpenWindow] = state[2]
        return windows.values()

    def _find(self, state: list[Any], start: int, creation: int) -> OpenWindow | None:
        return super()._find(state[2], start, creation)

    def _make_due(self, make: MakeDue) -> None:
        super()._make_due(make)
        self._ranges.clear()  # The states may be others now.

    def _settings(self) -> list[Any]:
        return [*super()._settings(), self._size_ms]

    def _note(self, key: Any, state: Any) -> None:
        super()._note(key, state)
        for time in dict.fromkeys(state[0]):
            self._expire_at(key, time + self._size_ms + self._lateness_ms, time, -1)

    def add(self, key: Any, time: int, values: list[Any]) -> bool:
        if self._is_over(key, time + self._size_ms):  # The end of the last window that can have the record.
            return False
        # Aggregates that refuse a record refuse it now.
        self._content.add([self._content.initial()], time, values)
        times, values_by_time, windows = state = self.states.get(key) or [[], [], {}]
        at = bisect_right(times, time)
        if not at or times[at - 1] != time:
            self._expire_at(key, time + self._size_ms + self._lateness_ms, time, -1)
        times.insert(at, time)
        values_by_time.insert(at, values)
        self._ranges.changed(key, time)
        own = time + 1 - self._size_ms
        if own not in windows and not self._is_over(key, time + 1):
            windows[own] = self._new_window(key, own, time + 1, [])
        self.states[key] = state
        last = bisect_left(times, time + self._size_ms)
        for later in dict.fromkeys(times[at:last]):
            if (window := windows.get(later + 1 - self._size_ms)) is not None:  # Otherwise it has gone.
                self._has_record(key, window)
        return True

    def _value(self, key: Any, window: OpenWindow) -> Any:
        times, values_by_time, _ = self.states[key]
        accumulators = self._ranges.accumulators(key, times, values_by_time, window[WINDOW_START], window[WINDOW_END])
        return self._content.result(accumulators)

    def _expire(self, key: Any, start: int, creation: int) -> None:
        times, values_by_time, windows = state = self.states[key]
        if creation >= 0:
            if self._find(state, start, creation) is not None:
                del windows[start]
                self.kept -= 1
        else:
            # No window that is open, or may still be created, has these records.
            gone = bisect_right(times, start)
            self._ranges.removed(key, times[:gone], len(times) > gone)
            del times[:gone], values_by_time[:gone]
        if not (times or windows):
            del self.states[key]


def make_windows(kind: WindowKind, content: WindowContent, **options: Any) -> OpenWindows:
    """Return the windows of a kind; the options are those of :class:`OpenWindows`."""
    if isinstance(kind, Session):
        return SessionWindows(kind.gap_ms, content, **options)
    if isinstance(kind, Sliding):
        assert isinstance(content, Aggregates)
        return SlidingWindows(kind.size_ms, content, **options)
    return AlignedWindows(kind, content, **options)


# The table of all possible groups has at most this many places for each record. Such a table is several times faster
# than sorting.
_SPARSE: Final = 8

# A pair is one number of 64 bits if the starts are within this distance and there are fewer than 2³¹ keys.
_LONGEST_SPREAD: Final = 2**31


class GroupsInOrder:
    """Records with equal pairs of numbers are a group; groups are numbered by their first record.

    >>> groups = GroupsInOrder(np.array([7, 5, 7]), np.array([0, 1, 2]), np.array([1, 1, 1]))
    >>> groups.of_record, groups.counts, groups.first
    (array([0, 1, 0]), array([2, 1]), array([0, 1]))
    """

    __slots__ = ("counts", "first", "of_record")

    def __init__(self, codes: Array, indices: Indices, starts: Times) -> None:
        """Pair ``codes[indices[i]]`` with ``starts[i]``; codes are ints from 0."""
        lowest = int(starts.min())
        spread = int(starts.max()) - lowest + 1
        if spread > _LONGEST_SPREAD:
            starts, lowest = np.unique(starts, return_inverse=True)[1], 0
            spread = int(starts.max()) + 1
        pairs = codes[indices] * spread + (starts - lowest)
        room = (int(codes.max()) + 1) * spread
        if room > _SPARSE * len(pairs) + 1024:
            _, first, of_record = np.unique(pairs, return_index=True, return_inverse=True)
        else:
            # The last assignment to a place counts, here the first record.
            first_of_place = np.full(room, -1)
            first_of_place[pairs[::-1]] = np.arange(len(pairs) - 1, -1, -1)
            places = np.flatnonzero(first_of_place >= 0)
            first = first_of_place[places]
            number = np.empty(room, np.intp)
            number[places] = np.arange(len(places))
            of_record = number[pairs]
        order = np.argsort(first)
        rank = np.empty(len(order), np.intp)
        rank[order] = np.arange(len(order))
        self.first: Indices = first[order]
        self.of_record: Indices = rank[of_record]
        self.counts: Indices = np.bincount(self.of_record)


def codes_of(keys: Sequence[Any] | Array) -> Array:
    """Return a small int from 0 for each key: equal ones for equal keys."""
    if isinstance(keys, np.ndarray):
        if keys.dtype.kind in "iu":
            lowest = int(keys.min())
            if int(keys.max()) - lowest < _SPARSE * len(keys) + 1024:
                # The difference of two small ints need not fit their type; the difference of two unsigned ints does.
                wide = keys if keys.dtype.kind == "u" else keys.astype(np.int64)
                differences: Array = wide - wide.dtype.type(lowest)
                return differences.astype(np.int64)
        codes: Array = np.unique(keys, return_inverse=True)[1]
        return codes
    numbers: dict[Any, int] = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(keys))
