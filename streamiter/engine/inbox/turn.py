"""The turns of a task: how many records a slow step gets in one turn, and what the task awaits between two turns.

:class:`TurnSize` measures how long the records of a port take.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from functools import partial
from typing import Final, cast, final

from streamiter.values.records import BATCH_RECORDS

# The time that a turn of a slow step should take. It is short enough that timers, connections and other tasks do not
# wait long, and long enough that the cost of a turn (some ten microseconds) does not matter. Now and then a turn has
# twice as many records; it takes less than 50 ms, which no user notices.
TURN_S: Final = 0.025
_LONG_S: Final = 0.05
# The first turn must be short, too, if a record takes 5 ms (a call of a large model).
_FIRST_RECORDS: Final = 8
# Five turns lead from the first size to the largest batches.
_GROWTH: Final = 4
_TURNS_OF_A_PROBE: Final = 8
# The weight of a turn compared with the next turn. At the next probe, the last probe still has almost half its weight.
_KEPT: Final = 0.9
# The relative variance of the turns up to which they are too alike for a straight line.
_TOO_ALIKE: Final = 1e-3


def _turns_of_others(number: int) -> Awaitable[None]:
    """Return an object that lets other tasks run ``number`` times whenever it is awaited.

    It calls no function of Python, since each hop of a record, and each round of a loop, would call it.
    """
    methods = {"__await__": staticmethod(partial(iter, (None,) * number))}
    return cast(Awaitable[None], type("_TurnsOfOthers", (), methods)())


NO_WAIT: Final = _turns_of_others(0)
"""Takes no time when it is awaited."""
GIVE_WAY: Final = _turns_of_others(1)
"""Lets other tasks run once when it is awaited, as ``asyncio.sleep(0)`` does in three times the time."""


@final
class TurnSize:
    """The number of records of a port that a slow step gets in one turn, so that other tasks have their turns, too.

    The number is small initially, and grows in each turn up to the limit for joining. Time is ignored until a turn
    takes too long, or would take too long with more records. From then on the number follows the time. The time of a
    turn is estimated as a fixed part and a part for each record, from the last turns; each eighth turn has twice as
    many records, so that the two parts can be separated.

    A step with a large fixed part (one request for each batch) would become slower by cutting. It gets as many records
    as take the same time as the fixed part, so that it has at least half of its possible speed.

    >>> size = TurnSize()
    >>> for _ in range(3):
    ...     size.took(size.records, seconds=0.005 * size.records)
    >>> size.records
    5
    """

    def __init__(self) -> None:
        self.records = _FIRST_RECORDS
        """The largest number of records in the next turn."""
        self._is_slow = False
        self._forget()

    def _forget(self) -> None:
        self._turns = 0
        self._weight = self._weighted = self._weighted_s = self._squares = self._times = 0.0

    def took(self, records: int, seconds: float) -> None:
        """Note how long a turn has taken, which had at least one record."""
        grown = min(BATCH_RECORDS, _GROWTH * records) if records >= self.records else records
        if not self._is_slow:
            if seconds * grown <= _LONG_S * records:
                self.records = max(self.records, grown)
                return
            self._is_slow = True
            self._forget()
        self._note(records, seconds)
        if records == 1 < self.records:
            return  # The turn could not have been shorter.
        aim = self._aim()
        if aim > self.records:
            aim = min(aim, 2.0 * records) if records >= self.records else self.records
        if self._turns % _TURNS_OF_A_PROBE == 0:
            aim = 2 * max(1.0, aim)
        self.records = max(1, min(BATCH_RECORDS, int(aim)))
        self._is_slow = self.records < BATCH_RECORDS or seconds > TURN_S

    def _note(self, records: int, seconds: float) -> None:
        self._turns += 1
        self._weight = _KEPT * self._weight + 1.0
        self._weighted = _KEPT * self._weighted + records
        self._weighted_s = _KEPT * self._weighted_s + seconds
        self._squares = _KEPT * self._squares + records * records
        self._times = _KEPT * self._times + records * seconds

    def _aim(self) -> float:
        """Return how many records fit into a turn, by a line through the last turns; newer turns weigh more."""
        mean, mean_s = self._weighted / self._weight, self._weighted_s / self._weight
        variance = self._squares / self._weight - mean * mean
        each_s = mean_s / mean
        if variance > _TOO_ALIKE * mean * mean:
            slope_s = (self._times / self._weight - mean * mean_s) / variance
            each_s = min(max(slope_s, 0.0), each_s)
        fixed_s = mean_s - each_s * mean
        if each_s * BATCH_RECORDS <= max(TURN_S - fixed_s, fixed_s):
            return float(BATCH_RECORDS)
        return max((TURN_S - fixed_s) / each_s, math.ceil(fixed_s / each_s))
