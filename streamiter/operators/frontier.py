"""The frontier of several parts: the least that any of them may still bring. A pure data structure, no I/O.

Wherever the engine waits for the slowest of several inputs, it asks a :class:`Frontier`: for the epochs and the event
time of a task, for a barrier, for a table that is read to its end, and for the partitions of a source.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar, final

Part = TypeVar("Part", bound=Hashable)


@final
class Frontier(Generic[Part]):
    """The least value that the active parts have reached. It never goes back.

    A part is active, idle or ended. Idle and ended parts do not count. If no part is active, the frontier is the
    greatest value of an idle part, so that the order in which parts fall idle makes no difference. When all parts have
    ended, it is the greatest value of all.

    Changes are noted by ``add``, ``reach``, ``idle`` and ``end``, and count from the next call of ``settle`` on.

    >>> frontier = Frontier(["left", "right"], 0)
    >>> frontier.reach("left", 18), frontier.settle(), frontier.slowest
    (None, False, 'right')
    >>> frontier.reach("right", 7), frontier.settle(), frontier.value
    (None, True, 7)
    >>> frontier.idle("right"), frontier.settle(), frontier.value
    (None, True, 18)
    >>> frontier.end("left"), frontier.end("right", at=20), frontier.settle(), frontier.value
    (None, None, True, 20)
    """

    def __init__(self, parts: Iterable[Part], start: int) -> None:
        """All ``parts`` have reached ``start``."""
        self._start = self.value = start
        """The frontier, as it was settled last."""
        self._reached: dict[Part, int] = dict.fromkeys(parts, start)
        """The value of each part that has not ended."""
        self._idle: set[Part] = set()
        self._ended: dict[Part, int] = {}
        """By part that has ended: the last value."""
        self.slowest: Part | None = None
        """The active part that holds back the frontier, the first of several; None if no part is active."""
        self.settle()

    def __contains__(self, part: Part) -> bool:
        return part in self._reached or part in self._ended

    def add(self, part: Part, value: int) -> None:
        """Note a part that is new, or begins again after its end: it is active, and has reached a value."""
        self._ended.pop(part, None)
        self._reached.setdefault(part, self._start)
        self.reach(part, value)

    def reach(self, part: Part, value: int) -> None:
        """Note that a part has reached a value, or a value below one that it has reached already; it is active now.

        A part that has ended stays ended.
        """
        before = self._reached.get(part)
        if before is None:
            self._ended[part] = max(value, self._ended[part])
            return
        if value > before:
            self._reached[part] = value
        if self._idle:
            self._idle.discard(part)

    def idle(self, part: Part) -> None:
        """Note that a part brings nothing for now."""
        if part in self._reached:
            self._idle.add(part)

    def end(self, part: Part, at: int | None = None) -> None:
        """Note that a part brings nothing more; ``at`` is a value that it has reached with its end."""
        reached = self._reached.pop(part, self._start)
        self._idle.discard(part)
        self._ended[part] = max(reached if at is None else at, reached, self._ended.get(part, reached))

    def advance_to(self, value: int) -> None:
        """Let the frontier be at least this value."""
        self.value = max(self.value, value)

    def reached(self, part: Part) -> int:
        """Return the value that a part has reached."""
        return self._ended[part] if part in self._ended else self._reached[part]

    def has_ended(self, part: Part) -> bool:
        return part in self._ended

    def is_active(self, part: Part) -> bool:
        return part in self._reached and part not in self._idle

    @property
    def all_ended(self) -> bool:
        return not self._reached

    @property
    def is_idle(self) -> bool:
        """Whether no part is active, and not all have ended."""
        return len(self._idle) == len(self._reached) and bool(self._reached or not self._ended)

    @property
    def are_several(self) -> bool:
        """Whether there are several parts that have not ended."""
        return len(self._reached) > 1

    def least_of_others(self, part: Part, otherwise: int) -> int:
        """Return the least that the other active parts have reached; ``otherwise`` if there is none."""
        others = (value for other, value in self._reached.items() if other != part and other not in self._idle)
        return min(others, default=otherwise)

    def settle(self, part: Part | None = None, value: int = 0) -> bool:
        """Count the changes, and first that ``part`` has reached a value; return whether the frontier has grown."""
        reached, idle = self._reached, self._idle
        if part is not None:
            if idle or part not in reached:
                self.reach(part, value)
            elif value > reached[part]:
                reached[part] = value
        if len(idle) < len(reached):
            active = {part: value for part, value in reached.items() if part not in idle} if idle else reached
            least = min(active.values())
            for slowest, reached_by in active.items():
                if reached_by == least:
                    self.slowest = slowest
                    break
        else:
            self.slowest = None
            least = max((reached or self._ended).values(), default=self._start)
        if least <= self.value:
            return False
        self.value = least
        return True
