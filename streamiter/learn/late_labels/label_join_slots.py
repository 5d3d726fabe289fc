"""The compiled parts of a join of questions and answers: heaps, slots, settled keys, and the steps that are told.

``streamiter.learn.late_labels.label_join_arrays`` describes the arrays. In compiled code they are pointers: an array
that is an argument would cost as much as the work itself. A slot, a key or an item is the place of its first number.
Compiled code checks no bounds, so ``LabelJoin`` makes room for all that a call may add.

This module needs Numba to be fast, see ``streamiter.values.helpers.compiled``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.learn.late_labels.label_join_arrays import (
    AT_EVENT,
    EARLIER,
    FIRST_SETTLED,
    FORGOTTEN,
    FREE_SLOTS,
    HAS_LABEL,
    HAS_OTHERWISE,
    IS_ASSUMED,
    IS_OPEN,
    IS_TOUCHED,
    IS_WEIGHTED,
    ITEM_COLUMNS,
    JOINED_STEP_COLUMNS,
    KEPT,
    KIND,
    LABEL_EVENT,
    LABEL_SLOT,
    LAST_SETTLED,
    LATE_ANSWERS,
    LATER,
    NOT_SETTLED,
    NUMBERED,
    OF,
    OF_EVENT,
    OF_SLOT,
    SCORES,
    SETTLED,
    SETTLED_AT,
    SLOT_EVENT,
    SLOT_FLAGS,
    SLOT_KEY,
    SLOT_NUMBER,
    SLOT_STEP,
    STEPS,
    TO_ASK,
    TO_ASSUME,
    TO_LEARN,
    TO_WITHDRAW,
    TOUCHED,
    WAS_LEARNED,
    WATERMARK,
    WITHIN,
    Arrays,
    KeyWords,
)
from streamiter.values.helpers.compiled import compiled
from streamiter.values.numbers import Integers
from streamiter.values.times import MAX_TIME

# A heap is cleared of closed items when they are more than three times the others and this number.
_CLOSED_MAX: Final = 1_000
# Of the questions that have been learned, each is in every checkpoint until its wait is over: this many take some 25
# ms. What is delivered twice comes again within seconds or minutes.
LEARNED_KEPT: Final = 100_000

Pointers = Arrays
"""The arrays, as pointers to their first numbers."""


# ---- heaps: the first item of each is due first; ``counts[name]`` is the number of items of the heap ``name``


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


# ---- what waits for the other


@compiled
def waits(heap: Integers, place: int, slots: Integers) -> bool:
    """Whether the item at a place is of a question or answer that still waits for the other."""
    slot, number = heap[place * ITEM_COLUMNS + OF], heap[place * ITEM_COLUMNS + NUMBERED]
    return bool(slots[slot + SLOT_NUMBER] == number and slots[slot + SLOT_FLAGS] & IS_OPEN)


@compiled
def drop_closed_items(heap: Integers, counts: Integers, name: int, slots: Integers) -> None:
    """Remove the first items whose events have left, until the first one waits."""
    while counts[name] > 0 and not waits(heap, 0, slots):
        pop(heap, counts, name)


@compiled
def clear_closed_items(heap: Integers, counts: Integers, name: int, slots: Integers) -> None:
    """Remove the items of events that have left once they are most of a heap: they would take memory without end."""
    count, kept = counts[name], 0
    if count <= 4 * counts[KEPT] + _CLOSED_MAX:
        return
    for place in range(count):
        if waits(heap, place, slots):
            swap(heap, kept, place)
            move_up(heap, kept)
            kept += 1
    counts[name] = kept


# ---- settled questions: a list from key to key, in the order in which they were settled


@compiled
def _unlink(state: Pointers, key: int) -> None:
    keys, counts = state.keys, state.counts
    before, after = keys[key + EARLIER], keys[key + LATER]
    if before >= 0:
        keys[before + LATER] = after
    else:
        counts[FIRST_SETTLED] = after
    if after >= 0:
        keys[after + EARLIER] = before
    else:
        counts[LAST_SETTLED] = before
    keys[key + EARLIER] = keys[key + LATER] = NOT_SETTLED
    counts[SETTLED] -= 1


@compiled
def settle_key(state: Pointers, key: int, time: int) -> None:
    """Note that the question of a key at this time has got its answer; it is now the last of these."""
    keys, counts = state.keys, state.counts
    if keys[key + LATER] != NOT_SETTLED:
        _unlink(state, key)
    last = counts[LAST_SETTLED]
    keys[key + SETTLED_AT], keys[key + EARLIER], keys[key + LATER] = time, last, -1
    if last >= 0:
        keys[last + LATER] = key
    else:
        counts[FIRST_SETTLED] = key
    counts[LAST_SETTLED] = key
    counts[SETTLED] += 1


@compiled
def forget_settled(state: Pointers) -> None:
    """Forget the settled questions whose wait would be over, and the oldest if there are too many."""
    keys, counts, within = state.keys, state.counts, state.settings[WITHIN]
    while counts[SETTLED] > 0:
        first = counts[FIRST_SETTLED]
        is_over = within >= 0 and keys[first + SETTLED_AT] + within <= counts[WATERMARK]
        if not is_over and counts[SETTLED] <= LEARNED_KEPT:
            return
        _unlink(state, first)
        touch(state, first)


# ---- slots and steps


@compiled
def touch(state: Pointers, key: int) -> None:
    """Note a key of which nothing may be known any more."""
    if not state.keys[key + IS_TOUCHED]:
        state.keys[key + IS_TOUCHED] = 1
        state.touched[state.counts[TOUCHED]] = key
        state.counts[TOUCHED] += 1


@compiled
def _free(state: Pointers, slot: int) -> None:
    touch(state, state.slots[slot + SLOT_KEY])
    state.slots[slot + SLOT_NUMBER] = state.slots[slot + SLOT_FLAGS] = 0
    state.slots[slot + SLOT_EVENT] = state.slots[slot + SLOT_STEP] = -1
    state.free[state.counts[FREE_SLOTS]] = slot
    state.counts[FREE_SLOTS] += 1


@compiled
def _add_step(state: Pointers, kind: int, slot: int, answer: int, event: int) -> int:
    """Add a step of the event in a slot, with the label in the slot ``answer``, or -1 for none; return its place."""
    place = state.counts[STEPS]
    state.counts[STEPS] = place + 1
    at, steps, slots = place * JOINED_STEP_COLUMNS, state.steps, state.slots
    steps[at + KIND], steps[at + OF_SLOT], steps[at + AT_EVENT] = kind, slot, event
    steps[at + OF_EVENT], steps[at + SCORES] = slots[slot + SLOT_EVENT], slots[slot + SLOT_STEP]
    steps[at + LABEL_SLOT] = steps[at + LABEL_EVENT] = -1
    if answer >= 0 and slots[answer + SLOT_EVENT] >= 0:
        steps[at + LABEL_EVENT] = slots[answer + SLOT_EVENT]
    elif answer >= 0:
        steps[at + LABEL_SLOT] = answer
    steps[at + WAS_LEARNED] = 1 if slots[slot + SLOT_FLAGS] & IS_ASSUMED else 0
    return int(place)


@compiled
def ask(state: Pointers, slot: int, event: int) -> None:
    """Predict a question; with weights, learn from it as if it had no answer."""
    step = _add_step(state, TO_ASK, slot, -1, event)
    state.slots[slot + SLOT_STEP] = state.steps[step * JOINED_STEP_COLUMNS + SCORES] = step
    if state.settings[IS_WEIGHTED]:
        state.slots[slot + SLOT_FLAGS] |= IS_ASSUMED


@compiled
def assume(state: Pointers, slot: int, event: int) -> None:
    """Learn from a question that waits as if it had no answer."""
    step = _add_step(state, TO_ASSUME, slot, -1, event)
    if state.slots[slot + SLOT_STEP] < 0:
        state.slots[slot + SLOT_STEP] = state.steps[step * JOINED_STEP_COLUMNS + SCORES] = step
    state.slots[slot + SLOT_FLAGS] |= IS_ASSUMED


@compiled
def leave_late(state: Pointers, slot: int) -> None:
    """An answer leaves without a question."""
    at = 2 * state.counts[LATE_ANSWERS]
    state.late[at], state.late[at + 1] = slot, state.slots[slot + SLOT_EVENT]
    state.counts[LATE_ANSWERS] += 1
    _free(state, slot)


@compiled
def leave(state: Pointers, slot: int, answer: int, event: int, is_forgotten: bool) -> None:
    """A question leaves, with the answer in a slot or without one (-1): learn its label, if it has one."""
    slots = state.slots
    label = slot if slots[slot + SLOT_FLAGS] & HAS_LABEL else answer
    if is_forgotten:
        state.counts[FORGOTTEN] += 1
    has_label = bool(slots[label + SLOT_FLAGS] & HAS_LABEL) if label >= 0 else bool(state.settings[HAS_OTHERWISE])
    if is_forgotten or not has_label:
        if slots[slot + SLOT_FLAGS] & IS_ASSUMED:
            _add_step(state, TO_WITHDRAW, slot, -1, event)
    else:
        _add_step(state, TO_LEARN, slot, label, event)
    _free(state, slot)
    if answer >= 0:
        _free(state, answer)


@compiled
def limit_of(state: Pointers, time: int) -> int:
    """Return the end of the wait of a question."""
    within = state.settings[WITHIN]
    return MAX_TIME if within < 0 else min(int(time) + int(within), MAX_TIME)


# ---- the table of keys: see ``KeyPlaces``

_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)


@compiled
def _hash_of_words(words: KeyWords, row: int) -> np.uint64:
    """Return a hash, on which zeros at the end have no influence."""
    length, value = words.shape[1], np.uint64(0)
    while length and words[row, length - 1] == 0:
        length -= 1
    for column in range(length):
        value = (value ^ words[row, column]) * _SPREAD
        value ^= value >> _HALF
    return value


@compiled
def _are_equal(one: KeyWords, row: int, other: KeyWords, place: int) -> bool:
    """Whether a row is equal to one that is as wide, or wider."""
    for column in range(other.shape[1]):
        if (one[row, column] if column < one.shape[1] else np.uint64(0)) != other[place, column]:
            return False
    return True


@compiled
def find_places(
    words: KeyWords,
    table: Integers,
    hashes: KeyWords,
    known: KeyWords,
    is_taken: npt.NDArray[np.bool_],
    free: Integers,
    free_count: int,
    found: Integers,
) -> int:
    """Fill in the place of each key; a new one takes the last free place. Return how many places are free then."""
    mask = len(table) - 1
    for row in range(len(words)):
        value = _hash_of_words(words, row)
        at = np.int64(value) & mask
        while table[at] >= 0 and not (hashes[table[at]] == value and _are_equal(words, row, known, table[at])):
            at = (at + 1) & mask
        if table[at] < 0:
            free_count -= 1
            place = free[free_count]
            table[at], hashes[place], is_taken[place] = place, value, True
            for column in range(known.shape[1]):
                known[place, column] = words[row, column] if column < words.shape[1] else np.uint64(0)
        found[row] = table[at]
    return free_count


@compiled
def forget_places(places: Integers, table: Integers, hashes: KeyWords) -> None:
    """Remove these places from the table, and move up what was behind them because they were there."""
    mask = len(table) - 1
    for place in places:
        gap = np.int64(hashes[place]) & mask
        while table[gap] != place:
            gap = (gap + 1) & mask
        at = (gap + 1) & mask
        while table[at] >= 0:
            if (at - np.int64(hashes[table[at]])) & mask >= (at - gap) & mask:
                table[gap] = table[at]
                gap = at
            at = (at + 1) & mask
        table[gap] = -1


@compiled
def hash_places(known: KeyWords, places: Integers, hashes: KeyWords) -> None:
    """Fill in the hashes of the keys at these places."""
    for place in places:
        hashes[place] = _hash_of_words(known, place)


@compiled
def insert_places(places: Integers, table: Integers, hashes: KeyWords) -> None:
    """Add places of different keys to a table with room."""
    mask = len(table) - 1
    for place in places:
        at = np.int64(hashes[place]) & mask
        while table[at] >= 0:
            at = (at + 1) & mask
        table[at] = place
