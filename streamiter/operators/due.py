"""Items in the order of their times: what is due by which event-time watermark.

Windows, joins by time and event timers ask :class:`DueItems`. Here they are in memory; ``engine/states/`` has them on
disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final, Protocol

Prefetch = Callable[[Sequence[Any]], object]
"""Reads the states of some keys ahead, because the step will ask for them soon."""

DueItem = tuple[Any, ...]
"""The numbers by which the item is ordered, of which the first is its time; something to ignore; and its key."""


class DueItems(Protocol):
    """Items of keys, ordered by some whole numbers. Equal items (numbers, key) may be one item or not."""

    is_more: bool
    """Whether the last `until` has left due items: call it again when their results have been taken."""

    def push(self, order: tuple[int, ...], key: Any) -> None:
        """Add an item. The first number of ``order`` is its time."""

    def until(self, time: int) -> Iterator[DueItem]:
        """Take items up to a time, in order, also items that are pushed meanwhile. The states of their keys are loaded.

        The items of equal ``order`` may come in any order.
        """

    def first(self) -> int | None:
        """Return the least time; None if there is no item."""

    def take_first(self) -> DueItem:
        """Take the first item; the state of its key is loaded. There must be one. It may have been removed."""

    def remove(self, order: tuple[int, ...], key: Any, is_kept: Callable[[DueItem], bool]) -> None:
        """Remove an item that is not due any more, or all items that ``is_kept`` is false for."""

    def may_keep_removed(self, kept: int) -> bool:
        """Whether it costs less not to remove an item yet; `until` then gives it. ``kept`` others are still due."""

    def latest(self) -> Iterator[DueItem]:
        """Give the items from the last one to the first one, without taking them."""


class MakeDue(Protocol):
    """Makes an empty collection of due items. ``number`` tells the collections of a step apart.

    ``numbers`` is the length of the order of an item. With ``of_pairs`` the key of an item is a pair, and the state of
    its first element is loaded. ``prefetch`` is called with the keys of many items at once, where that is faster.
    """

    def __call__(
        self, number: int, numbers: int, *, of_pairs: bool = False, prefetch: Prefetch | None = None
    ) -> DueItems: ...


# A heap is cleared of removed items when they are more than three times the others and this number.
_REMOVED_MAX: Final = 1_000


class DueHeap:
    """Items in memory.

    >>> due = DueHeap(0, 1)
    >>> for time, key in [(20, "ann"), (10, "bo"), (30, "ann")]:
    ...     due.push((time,), key)
    >>> [(time, key) for time, _, key in due.until(20)], due.first()
    ([(10, 'bo'), (20, 'ann')], 30)
    """

    is_more = False

    def __init__(
        self,
        number: int,
        numbers: int,
        *,
        of_pairs: bool = False,
        load: Callable[[Sequence[Any]], object] | None = None,
        prefetch: Prefetch | None = None,
    ) -> None:
        """``load`` is called with the key of an item before the item is given. The others have no effect."""
        self._of_pairs = of_pairs
        self._load = load
        self._heap: list[DueItem] = []
        # Items have a number of their own, so that they are never compared by key.
        self._pushed = 0

    def push(self, order: tuple[int, ...], key: Any) -> None:
        self._pushed += 1
        heappush(self._heap, (*order, self._pushed, key))

    def until(self, time: int) -> Iterator[DueItem]:
        # Mostly nothing is due, and a generator costs more than the look.
        return self._take_until(time) if self._heap and self._heap[0][0] <= time else iter(())

    def _take_until(self, time: int) -> Iterator[DueItem]:
        heap, load = self._heap, self._load
        while heap and heap[0][0] <= time:
            item = heappop(heap)
            if load is not None:
                load((item[-1][0] if self._of_pairs else item[-1],))
            yield item

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[DueItem]:
        """Give the items in any order."""
        return iter(self._heap)

    def first(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def peek(self) -> DueItem:
        """Return the first item without taking it. There must be one."""
        return self._heap[0]

    def take_first(self) -> DueItem:
        return next(self.until(self._heap[0][0]))

    def remove(self, order: tuple[int, ...], key: Any, is_kept: Callable[[DueItem], bool]) -> None:
        self._heap = list(filter(is_kept, self._heap))
        heapify(self._heap)

    def may_keep_removed(self, kept: int) -> bool:
        return len(self._heap) <= 4 * kept + _REMOVED_MAX

    def latest(self) -> Iterator[DueItem]:
        return iter(sorted(self._heap, reverse=True))
