"""The joins of two streams in event time: by an interval between their times, and by windows.

Both are pure data structures: ``add`` takes a record of one side, ``advance`` the least event-time watermark of both
sides minus the allowed lateness. What they emit is appended to ``results`` with its timestamp.

>>> join = IntervalJoin(-5, 5)
>>> for side, time in [(LEFT, 10), (RIGHT, 5), (RIGHT, 15), (RIGHT, 16)]:
...     assert join.add(side, "ann", time, f"{side} at {time}")
>>> join.take_results()
[(10, ('left at 10', 'right at 5')), (15, ('left at 10', 'right at 15'))]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, Literal

from streamiter.operators.definitions import Definition, at_least, at_most
from streamiter.operators.due import DueItem, MakeDue
from streamiter.operators.keyed_state import KeyedStates, ListEntries
from streamiter.operators.timed.kinds import Calendar, Hopping, Session
from streamiter.operators.timed.windowing import WindowResult, make_windows
from streamiter.operators.timed_states import TimedStates
from streamiter.values.times import MAX_TIME

Side = Literal["left", "right"]
LEFT: Final = "left"
RIGHT: Final = "right"
SIDES: Final[tuple[Side, Side]] = (LEFT, RIGHT)

JoinHow = Literal["inner", "left", "right", "full"]
"""Which records without a partner are emitted, in a pair with None: no record, the records of one side, or all."""

TimedRecord = tuple[int, Any]
"""A record that is emitted, with its timestamp."""

Span = tuple[int, int]
"""Two times."""

RECORD_TIME, RECORD_ARRIVAL, RECORD, IS_PAIRED = range(4)
"""A record that waits for partners is a list with these items, since it is part of the state."""

_time: Final = itemgetter(RECORD_TIME)


def keeps_unpaired(how: JoinHow, side: Side) -> bool:
    """Return whether records of this side are emitted without a partner."""
    return how in (side, "full")


# More than the difference of two times.
_NO_LIMIT_MS: Final = 2**64

# The limit of a record that waits until the end: below it, so that the record leaves there.
_TO_THE_END: Final = MAX_TIME - 1


class IntervalJoin(TimedStates[TimedRecord]):
    """Pairs with ``left + lower ≤ right ≤ left + upper``. The state of a key: the waiting records of both sides.

    A pair is emitted when its second record arrives. A record without a partner is emitted when none can come.
    """

    def __init__(
        self,
        lower_ms: int,
        upper_ms: int | None,
        how: JoinHow = "inner",
        *,
        kept_max: int | None = None,
        in_order: bool = False,
    ) -> None:
        """``upper_ms`` None is no limit. ``kept_max``: if more records wait, the one with the earliest limit leaves.

        ``in_order``: a record that arrives later has a later time, even if it has the same millisecond.
        """
        self._entries: ListEntries | None = None
        """Is told of the records that wait, for a backend that has a row for each of them."""
        super().__init__()
        upper_ms = _NO_LIMIT_MS if upper_ms is None else upper_ms
        # From the time of a record to the times of its partners on the other side.
        self._to_partners = {LEFT: (lower_ms, upper_ms), RIGHT: (-upper_ms, -lower_ms)}
        self._how: JoinHow = how
        self.keeps_all_at_end = how == "inner"
        self._kept_max = kept_max
        self._in_order = in_order
        self.spans: list[Span] | None = None
        """For each result two times: the time of its earlier record, and the time at which its partner, or the lack of
        one, was known. To note them, put a list here, and take it with the results; None: they are not noted."""

    def keep_in(self, states: KeyedStates) -> None:
        self._entries = self._entries_in(states)
        super().keep_in(states)

    def _entries_in(self, states: KeyedStates) -> ListEntries | None:
        return states.list_entries()

    def _make_due(self, make: MakeDue) -> None:
        self._waiting = make(0, 3)
        """By the time until which a record waits, whether it is of the right side, and its arrival."""

    def _settings(self) -> list[Any]:
        lower, upper = self._to_partners[LEFT]
        return [*super()._settings(), lower, min(upper, _TO_THE_END)]

    def definition(self) -> Definition:
        lower, upper = self._to_partners[LEFT]
        return {
            "kind": "interval_join",
            "one_to_one": isinstance(self, OneToOneJoin),
            "lower_ms": at_least(lower),
            "upper_ms": at_most(None if upper == _NO_LIMIT_MS else upper),
            # Records without a partner are emitted late, and the watermark is held back for them.
            "how": self._how,
        }

    def next_due(self) -> int | None:
        limit = self._waiting.first()
        return None if limit is None else limit + 1

    def held_back_ms(self) -> int:
        """Return how much lower the event-time watermark behind the join is: unpaired records leave this late.

        The earlier records of pairs do so, too, if they are noted.
        """
        if self.spans is not None:
            return max(0, *(self._to_partners[side][1] for side in SIDES))
        return max((max(0, self._to_partners[side][1]) for side in SIDES if keeps_unpaired(self._how, side)), default=0)

    def add(self, side: Side, key: Any, time: int, record: Any) -> bool:
        """Add a record; return False, and change nothing, if it is late."""
        reached = self.reached(key)
        if time < reached:
            return False
        state = self.states.setdefault(key, [[], []])
        own, others = state if side == LEFT else reversed(state)
        lower, upper = self._to_partners[side]
        first, last = bisect_left(others, time + lower, key=_time), bisect_right(others, time + upper, key=_time)
        for other in others[first:last]:
            if not other[IS_PAIRED]:
                other[IS_PAIRED] = True
                if self._entries is not None and self._how != "inner":  # An inner join never asks for it.
                    self._entries.changed(key, int(side == LEFT), other)
            self._emit_pair(side, time, record, other)
        if reached + self._in_order <= time + upper:
            entry = [time, self._wait(key, side, time), record, first < last]
            insort_right(own, entry, key=_time)
            if self._entries is not None:
                self._entries.came(key, int(side == RIGHT), entry)
            self._keep_at_most()
        else:
            if first == last:
                self._emit_unpaired(side, time, record)
            self._drop_if_empty(key)
        return True

    def advance(self, watermark: int) -> bool:
        self.watermark = max(watermark, self.watermark)
        for item in self._waiting.until(self.watermark - 1):
            self._drop(item)
        return not self._waiting.is_more

    def waiting(self) -> Iterator[tuple[Side, Any, Sequence[Any]]]:
        """Yield side, key and state of each record that waits and is loaded, key by key."""
        for key, sides in self.states.items():
            for side, waiting in self._waiting_in(sides):
                yield side, key, waiting

    def _waiting_in(self, sides: Any) -> Iterator[tuple[Side, Sequence[Any]]]:
        for side, records in zip(SIDES, sides, strict=True):
            for record in records:
                yield side, record

    def _note(self, key: Any, state: Any) -> None:
        for side, waiting in self._waiting_in(state):
            self.kept += 1
            self._waiting.push(self._due(side, waiting[RECORD_TIME], waiting[RECORD_ARRIVAL]), key)
            self.numbered = max(self.numbered, waiting[RECORD_ARRIVAL] + 1)

    def _due(self, side: Side, time: int, arrival: int) -> tuple[int, int, int]:
        limit = time + self._to_partners[side][1]
        return (limit if limit < _TO_THE_END else _TO_THE_END, int(side == RIGHT), arrival)

    def _wait(self, key: Any, side: Side, time: int) -> int:
        """Let a record wait; return the number of its arrival."""
        arrival = self.numbered
        self.numbered += 1
        self.kept += 1
        self._waiting.push(self._due(side, time, arrival), key)
        return arrival

    def _keep_at_most(self) -> None:
        while self._kept_max is not None and self.kept > self._kept_max:
            self._drop(self._waiting.take_first())

    def _drop(self, item: DueItem) -> None:
        """Drop a record; emit it if it has no partner."""
        _, is_right, arrival, _, key = item
        self.kept -= 1
        records = self.states[key][is_right]
        # The records of one side leave in the order of (time, arrival), unless their limit is the end.
        place = 0
        while records[place][RECORD_ARRIVAL] != arrival:
            place += 1
        time, _, record, is_paired = entry = records.pop(place)
        if self._entries is not None:
            self._entries.left(key, is_right, entry)
        if not is_paired:
            self._emit_unpaired(RIGHT if is_right else LEFT, time, record)
        self._drop_if_empty(key)

    def _emit_pair(self, side: Side, time: int, record: Any, other: Sequence[Any]) -> None:
        pair = (record, other[RECORD]) if side == LEFT else (other[RECORD], record)
        earlier, later = (time, other[RECORD_TIME]) if time < other[RECORD_TIME] else (other[RECORD_TIME], time)
        self.results.append((later, pair))
        if self.spans is not None:
            self.spans.append((earlier, later))

    def _emit_unpaired(self, side: Side, time: int, record: Any) -> None:
        if keeps_unpaired(self._how, side):
            self.results.append((time, (record, None) if side == LEFT else (None, record)))
            if self.spans is not None:
                self.spans.append((time, max(time, min(time + self._to_partners[side][1], _TO_THE_END))))

    def _drop_if_empty(self, key: Any) -> None:
        if not any(self.states[key]):
            del self.states[key]


class OneToOneJoin(IntervalJoin):
    """An interval join in which a record leaves with its first partner.

    A key has at most one waiting record of each side: of two, the one with the later time waits, and the other is
    emitted without a partner. The state of a key: for each side time, arrival and record, or None.

    >>> join = OneToOneJoin(0, 10, "full")
    >>> for side, time in [(LEFT, 1), (LEFT, 2), (RIGHT, 3), (RIGHT, 4)]:
    ...     assert join.add(side, "ann", time, f"{side} at {time}")
    >>> join.advance(20), join.take_results()
    (True, [(1, ('left at 1', None)), (3, ('left at 2', 'right at 3')), (4, (None, 'right at 4'))])
    """

    def _entries_in(self, states: KeyedStates) -> None:
        """A key has two records at most, in one row."""

    def add(self, side: Side, key: Any, time: int, record: Any) -> bool:
        """Add a record; return False, and change nothing, if it is late."""
        reached = self.watermark if self.floor_of is None else self.reached(key)
        if time < reached:
            return False
        states = self.states
        lower, upper = self._to_partners[side]
        left, right = states.get(key, _NONE_WAITS)
        own, other = (left, right) if side == LEFT else (right, left)
        if other is not None and lower <= other[RECORD_TIME] - time <= upper:
            self._emit_pair(side, time, record, other)
            if own is None:
                del states[key]
            else:
                self._keep(key, side, own, None)
            self.kept -= 1
            if not self._waiting.may_keep_removed(self.kept):
                self._remove(key, RIGHT if side == LEFT else LEFT, other)
        elif reached + self._in_order > (limit := time + upper) or (own is not None and own[RECORD_TIME] > time):
            self._emit_unpaired(side, time, record)
        else:
            # As in `_wait` and `_due`, whose calls would take a seventh of the time.
            self.numbered = (arrival := self.numbered) + 1
            self.kept += 1
            self._waiting.push((limit if limit < _TO_THE_END else _TO_THE_END, side == RIGHT, arrival), key)
            waiting = (time, arrival, record)
            states[key] = (waiting, other) if side == LEFT else (other, waiting)
            if own is not None:
                self._emit_unpaired(side, own[RECORD_TIME], own[RECORD])
                self.kept -= 1
                if not self._waiting.may_keep_removed(self.kept):
                    self._remove(key, side, own)
            if self._kept_max is not None and self.kept > self._kept_max:
                self._keep_at_most()
        return True

    def _waiting_in(self, sides: Any) -> Iterator[tuple[Side, Sequence[Any]]]:
        for side, waiting in zip(SIDES, sides, strict=True):
            if waiting is not None:
                yield side, waiting

    def _keep(self, key: Any, side: Side, own: Any, other: Any) -> None:
        if own is None and other is None:
            self.states.pop(key, None)
        else:
            self.states[key] = (own, other) if side == LEFT else (other, own)

    def _remove(self, key: Any, side: Side, waiting: Sequence[Any]) -> None:
        """Remove a record that has left from the due items."""
        due = self._due(side, waiting[RECORD_TIME], waiting[RECORD_ARRIVAL])
        self._waiting.remove(due, key, self._is_kept)

    def _is_kept(self, item: DueItem) -> bool:
        waiting = self.states.get(item[-1], _NONE_WAITS)[item[1]]
        return waiting is not None and waiting[RECORD_ARRIVAL] == item[2]

    def _drop(self, item: DueItem) -> None:
        if not self._is_kept(item):
            return
        key, side = item[-1], SIDES[item[1]]
        time, _, record = self.states[key][item[1]]
        self.kept -= 1
        self._keep(key, side, None, self.states[key][1 - item[1]])
        self._emit_unpaired(side, time, record)


_NONE_WAITS: Final = (None, None)


class SidesOfWindow:
    """The content of a window of a join: the records of both sides with their times."""

    def initial(self) -> list[Any]:
        return [[], []]

    def add(self, windows: Sequence[list[Any]], time: int, values: list[Any]) -> list[list[Any]]:
        side, record = values
        for sides in windows:
            sides[side == RIGHT].append((time, record))
        return list(windows)

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        return [earlier[0] + later[0], earlier[1] + later[1]]

    def result(self, accumulators: list[Any]) -> Any:
        return [[record for _, record in sorted(side, key=_time)] for side in accumulators]


class WindowJoin(TimedStates[TimedRecord]):
    """All pairs of the records of a window, when it is complete. The state of a key is the state of its windows."""

    def __init__(self, kind: Hopping | Calendar | Session, how: JoinHow = "inner") -> None:
        self._windows = make_windows(kind, SidesOfWindow())
        self._kind = kind
        super().__init__()
        self._windows.floor_of = self.reached
        self._how: JoinHow = how
        self.states = self._windows.states

    def definition(self) -> Definition:
        return {"kind": "window_join", **self._kind.definition()}

    def next_due(self) -> int | None:
        return self._windows.next_due()

    def add(self, side: Side, key: Any, time: int, record: Any) -> bool:
        """Add a record; return False, and change nothing, if it is late: all of its windows have gone."""
        is_added = self._windows.add(key, time, [side, record])
        self.kept = self._windows.kept
        return is_added

    def advance(self, watermark: int) -> bool:
        is_done = self._windows.advance(watermark)
        self.watermark, self.kept = self._windows.watermark, self._windows.kept
        for window in self._windows.take_results():
            self._emit_pairs(window)
        return is_done

    def restore(self, states: Mapping[Any, Any]) -> None:
        self._windows.watermark = self.watermark
        self._windows.restore(states)
        self.kept = self._windows.kept

    def keep_in(self, states: KeyedStates) -> None:
        self._windows.watermark = self.watermark
        self._windows.keep_in(states)
        self.states, self.kept = self._windows.states, self._windows.kept

    def summary(self) -> list[Any]:
        return self._windows.summary()

    def _make_due(self, make: MakeDue) -> None:
        """Make none: the windows have the due items."""

    def _emit_pairs(self, window: WindowResult) -> None:
        left, right = window.value
        if not right and keeps_unpaired(self._how, LEFT):
            right = [None]
        if not left and keeps_unpaired(self._how, RIGHT):
            left = [None]
        self.results += [(window.end - 1, (one, other)) for one in left for other in right]
