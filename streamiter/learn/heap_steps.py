"""Compiled heaps of items in the order of their times.

A heap is a flat array of integers. An item has four of them: two to order by, of which the first is a time, and two
that say what it is of. ``counts[name]`` is the number of items of the heap ``name``. The first item is due first.

This module needs Numba to be fast, see ``streamiter.values.helpers.compiled``.
"""

from __future__ import annotations

from streamiter.learn.label_join_arrays import ITEM_COLUMNS
from streamiter.values.helpers.compiled import compiled
from streamiter.values.numbers import Integers


@compiled
def _comes_before(heap: Integers, one: int, other: int) -> bool:
    """Whether the item at one place is before the item at the other place."""
    one, other = one * ITEM_COLUMNS, other * ITEM_COLUMNS
    return bool(heap[one] < heap[other] or (heap[one] == heap[other] and heap[one + 1] < heap[other + 1]))


@compiled
def swap(heap: Integers, one: int, other: int) -> None:
    for column in range(ITEM_COLUMNS):
        at, to = one * ITEM_COLUMNS + column, other * ITEM_COLUMNS + column
        heap[at], heap[to] = heap[to], heap[at]


@compiled
def move_up(heap: Integers, place: int) -> None:
    while place > 0 and _comes_before(heap, place, (place - 1) // 2):
        swap(heap, place, (place - 1) // 2)
        place = (place - 1) // 2


@compiled
def push(heap: Integers, counts: Integers, name: int, time: int, order: int, of: int, number: int) -> None:
    """Add an item to the heap ``name``."""
    place = counts[name]
    counts[name] = place + 1
    at = place * ITEM_COLUMNS
    heap[at], heap[at + 1], heap[at + 2], heap[at + 3] = time, order, of, number
    move_up(heap, place)


@compiled
def pop(heap: Integers, counts: Integers, name: int) -> None:
    """Remove the first item of the heap ``name``."""
    last = counts[name] - 1
    counts[name] = last
    swap(heap, 0, last)
    place = 0
    while True:
        child = 2 * place + 1
        if child + 1 < last and _comes_before(heap, child + 1, child):
            child += 1
        if child >= last or not _comes_before(heap, child, place):
            return
        swap(heap, child, place)
        place = child
