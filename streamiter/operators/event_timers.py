"""The event time of one subtask of a step: its watermark, the timestamp at hand, and its event timers.

:class:`StepTimes` is a pure data structure. The engine tells it of records and watermarks, takes the timers that are
due, and calls the operator.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, NamedTuple, final

import numpy as np

from streamiter.deferred import PlainValue
from streamiter.errors import ConfigurationError
from streamiter.times import MAX_TIME, MIN_TIME, TIME_LIMIT


class EventTimer(NamedTuple):
    """A timer by event time: when it is due, its key, its payload."""

    at: int
    key: Any
    payload: Any


_NO_TIMER: Final = MAX_TIME + 1
"""Later than all timers, and than the last watermark."""

_ATOMS: Final = (type(None), bool, int, str, bytes)


def checked_time(option: str, time: object) -> int:
    """Return a timestamp that a user gives as a plain int; raise ConfigurationError for anything else."""
    if isinstance(time, (int, np.integer)) and not isinstance(time, bool) and -TIME_LIMIT < time < TIME_LIMIT:
        return int(time)
    raise ConfigurationError(
        f"{option}: expected whole milliseconds since 1970, below 2**62, given {time!r}; write int(seconds * 1000)"
    )


@final
class StepTimes:
    """The event time of one subtask of a step.

    Timers fire in the order (time, order of setting); equal timers (key, time, payload) are one. From the last
    watermark on, timers beyond the latest of those that were pending are dropped, so that the end is reached.

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
        """``identify`` returns equal values for equal payloads."""
        self._identify = identify
        self.clear()

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
        self.due: int | None = None
        """The time of the timer that fires now."""
        self.next_at = _NO_TIMER
        """When the first timer is due. It fires if this is not above the watermark."""
        self.dropped = 0
        """The number of timers that were set after the end, and dropped."""
        self._last = MAX_TIME
        """Later timers are dropped."""
        self._heap: list[tuple[int, int]] = []
        """The time of each timer, and its number; deleted timers are in it, too, but not the first one."""
        self._timers: dict[int, EventTimer] = {}
        """The timers by number, in the order in which they were set."""
        self._numbers: dict[Hashable, int] = {}
        self._set = 0
        self._floors: Mapping[int, int] = {}
        """By group of keys: the watermark that it had before the step had another parallelism, if it was further."""
        self._group_of: Callable[[Any], int] | None = None

    def reach(self, watermark: int) -> None:
        """Note a watermark that is above the one before."""
        self.watermark = watermark
        if watermark == MAX_TIME:
            self._last = max((timer.at for timer in self._timers.values()), default=MIN_TIME)
        if self._floors and watermark >= max(self._floors.values()):
            self._floors = {}

    @property
    def has_floors(self) -> bool:
        """Whether some keys have a watermark that is further than that of the step."""
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
        identity = self._identity(at, key, payload)
        if identity in self._numbers:
            return
        if at > self._last:
            self.dropped += 1
            return
        self._set += 1
        self._numbers[identity] = self._set
        self._timers[self._set] = EventTimer(at, key, payload)
        heapq.heappush(self._heap, (at, self._set))
        self.next_at = self._heap[0][0]

    def delete_timer(self, at: int, key: Any, payload: Any) -> None:
        """Delete a timer; no effect if none is set."""
        number = self._numbers.pop(self._identity(at, key, payload), None)
        if number is not None:
            del self._timers[number]
            self._skip_deleted()

    def take_due(self) -> EventTimer | None:
        """Take the first timer that is due; None if none is."""
        if self.next_at > self.watermark:
            return None
        timer = self._timers.pop(heapq.heappop(self._heap)[1])
        del self._numbers[self._identity(*timer)]
        self._skip_deleted()
        return timer

    def __len__(self) -> int:
        return len(self._timers)

    def _skip_deleted(self) -> None:
        while self._heap and self._heap[0][1] not in self._timers:
            heapq.heappop(self._heap)
        self.next_at = self._heap[0][0] if self._heap else _NO_TIMER

    def _identity(self, at: int, key: Any, payload: Any) -> Hashable:
        kind = type(payload)
        return at, key, kind, payload if kind in _ATOMS else self._identify(payload)

    # -- state ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, PlainValue]:
        """Return the state as plain data; the timers are in the order in which they were set."""
        return {
            "watermark": self.watermark,
            "passed": self.passed,
            "last": self._last,
            "timers": [tuple(timer) for timer in self._timers.values()],
            "dropped": self.dropped,
            "floors": list(self._floors.items()),
        }

    def restore(self, state: Mapping[str, PlainValue], group_of: Callable[[Any], int]) -> None:
        """Take over the result of ``snapshot``. ``group_of`` returns the group of a key, if there are floors."""
        self.clear()
        timers: Iterable[tuple[int, Any, Any]] = state["timers"]
        for at, key, payload in timers:
            self.set_timer(at, key, payload)
        self.watermark, self.passed = state["watermark"], state["passed"]
        self._last, self.dropped = state["last"], state["dropped"]
        self._floors, self._group_of = dict(state["floors"]), group_of
