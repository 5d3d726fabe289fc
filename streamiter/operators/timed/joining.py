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
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final, Literal

from streamiter.operators.due import MakeDue
from streamiter.operators.keyed_state import KeyedStates
from streamiter.operators.timed.kinds import Calendar, Hopping, Session
from streamiter.operators.timed.timed_states import TimedStates
from streamiter.operators.timed.windowing import WindowResult, make_windows

Side = Literal["left", "right"]
LEFT: Final = "left"
RIGHT: Final = "right"
SIDES: Final[tuple[Side, Side]] = (LEFT, RIGHT)

JoinHow = Literal["inner", "left", "right", "full"]
"""Which records without a partner are emitted, in a pair with None: none, or those of one side, or all."""

TimedRecord = tuple[int, Any]
"""A record that is emitted, with its timestamp."""

TIME, ARRIVAL, RECORD, IS_PAIRED = range(4)
"""A record that waits for partners is a list with these items, since it is part of the state."""

_time: Final = itemgetter(TIME)


def keeps_unpaired(how: JoinHow, side: Side) -> bool:
    """Return whether records of this side are emitted without a partner."""
    return how in (side, "full")


class IntervalJoin(TimedStates[TimedRecord]):
    """Pairs with ``left + lower ≤ right ≤ left + upper``. The state of a key: the waiting records of both sides.

    A pair is emitted when its second record arrives. A record without a partner is emitted when none can come.
    """

    def __init__(self, lower_ms: int, upper_ms: int, how: JoinHow = "inner") -> None:
        super().__init__()
        # From the time of a record to those of its partners on the other side.
        self._to_partners = {LEFT: (lower_ms, upper_ms), RIGHT: (-upper_ms, -lower_ms)}
        self._how: JoinHow = how

    def _make_due(self, make: MakeDue) -> None:
        self._waiting = make(0, 3)
        """By the time until which a record waits, whether it is of the right side, and its arrival."""

    def _settings(self) -> list[Any]:
        return [*super()._settings(), *self._to_partners[LEFT]]

    def held_back_ms(self) -> int:
        """Return by how much the event-time watermark behind the join is lower: its unpaired records are so late."""
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
            other[IS_PAIRED] = True
            pair = (record, other[RECORD]) if side == LEFT else (other[RECORD], record)
            self.results.append((max(time, other[TIME]), pair))
        arrival, self.numbered = self.numbered, self.numbered + 1
        if reached <= time + upper:
            insort_right(own, [time, arrival, record, first < last], key=_time)
            self._wait(key, side, time, arrival)
        else:
            if first == last:
                self._emit_unpaired(side, time, record)
            self._drop_if_empty(key)
        return True

    def advance(self, watermark: int) -> bool:
        self.watermark = max(watermark, self.watermark)
        for _, is_right, _, _, key in self._waiting.until(self.watermark - 1):
            self.kept -= 1
            # The records of one side leave in the order of (time, arrival).
            time, _, record, is_paired = self.states[key][is_right].pop(0)
            if not is_paired:
                self._emit_unpaired(RIGHT if is_right else LEFT, time, record)
            self._drop_if_empty(key)
        return not self._waiting.is_more

    def _note(self, key: Any, state: Any) -> None:
        for side, records in zip(SIDES, state, strict=True):
            for record in records:
                self._wait(key, side, record[TIME], record[ARRIVAL])
                self.numbered = max(self.numbered, record[ARRIVAL] + 1)

    def _wait(self, key: Any, side: Side, time: int, arrival: int) -> None:
        self.kept += 1
        self._waiting.push((time + self._to_partners[side][1], int(side == RIGHT), arrival), key)

    def _emit_unpaired(self, side: Side, time: int, record: Any) -> None:
        if keeps_unpaired(self._how, side):
            self.results.append((time, (record, None) if side == LEFT else (None, record)))

    def _drop_if_empty(self, key: Any) -> None:
        if not any(self.states[key]):
            del self.states[key]


class SidesOfWindow:
    """The content of a window of a join: the records of both sides with their times."""

    def initial(self) -> list[Any]:
        return [[], []]

    def add(self, accumulators: list[Any], time: int, values: list[Any]) -> list[Any]:
        side, record = values
        accumulators[side == RIGHT].append((time, record))
        return accumulators

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        return [earlier[0] + later[0], earlier[1] + later[1]]

    def result(self, accumulators: list[Any]) -> Any:
        return [[record for _, record in sorted(side, key=_time)] for side in accumulators]


class WindowJoin(TimedStates[TimedRecord]):
    """All pairs of the records of a window, when it is complete. The state of a key is that of its windows."""

    def __init__(self, kind: Hopping | Calendar | Session, how: JoinHow = "inner") -> None:
        self._windows = make_windows(kind, SidesOfWindow())
        super().__init__()
        self._how: JoinHow = how
        self.states = self._windows.states

    def add(self, side: Side, key: Any, time: int, record: Any) -> bool:
        """Add a record; return False, and change nothing, if it is late."""
        if time < self.reached(key):
            return False
        self._windows.add(key, time, [side, record])
        self.kept = self._windows.kept
        return True

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
        """Its windows have them."""

    def _emit_pairs(self, window: WindowResult) -> None:
        left, right = window.value
        if not right and keeps_unpaired(self._how, LEFT):
            right = [None]
        if not left and keeps_unpaired(self._how, RIGHT):
            left = [None]
        self.results += [(window.end - 1, (one, other)) for one in left for other in right]
