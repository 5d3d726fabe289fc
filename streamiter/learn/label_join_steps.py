"""The compiled steps of a join of questions with labels that come later: what happens with each event, in order.

A *question* is an event that is predicted, an *answer* an event that brings the label of a question with its key. Both
wait in *slots*, rows of one array. Five heaps order what happens next:

=============  =========================  =============================================================================
heap           ordered by                 what happens at this time
=============  =========================  =============================================================================
``QUESTIONS``  end of the wait, number    the wait of a question without an answer is over
``ANSWERS``    time, number of arrival    no question of an answer can come any more
``ANSWERED``   end of the wait, number    a question that waits with its answer is learned
``LEARNED``    end of the wait, number    a question that has been learned already is counted
``ASSUMED``    age, number                a question that waits is learned as False
=============  =========================  =============================================================================

An item of a heap has four numbers: two to order by, a slot, and the number of what the slot had then: the slot may have
been given to another event since. All functions read and write the arrays of :class:`Arrays`; ``LabelJoin`` makes room
in them before a call, since compiled code checks no bounds.

This module needs Numba to be fast, see ``streamiter.values.helpers.compiled``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.learn.answer_delay_steps import add_delay, age_of, are_known, count_end, learns_now
from streamiter.learn.heap_steps import ITEM_COLUMNS, Integers, move_up, pop, push, swap
from streamiter.values.helpers.compiled import compiled, pointer_function
from streamiter.values.numbers import Floats
from streamiter.values.times import MAX_TIME, MIN_TIME

pointer_to = pointer_function()

# ---- the columns of a slot
KEY: Final = 0
TIME: Final = 1
NUMBER: Final = 2
"""The number of the question, or minus the number of arrival of the answer; 0 for a slot that is free."""
WHEN: Final = 3
"""When a question counts as unanswered: ``NOT_BEFORE_THE_END``, or ``WAS_ASSUMED`` once it has counted so."""
FLAGS: Final = 4
PARTNER: Final = 5
"""The slot of the answer with which a question waits, or -1."""
EVENT: Final = 6
"""The event of the mini-batch under way, or -1 for an event of an earlier one."""
STEP: Final = 7
"""The step of the mini-batch under way that makes the scores of the question, or -1."""
SLOT_COLUMNS: Final = 8

IS_ANSWER: Final = 1
IS_OPEN: Final = 2
"""The question waits for its answer."""
IS_ASSUMED: Final = 4
"""The question was learned as False."""
HAS_LABEL: Final = 8
"""The answer has a label; or the question has brought its own label, which will be known later."""

NOT_BEFORE_THE_END: Final = -MAX_TIME
WAS_ASSUMED: Final = MAX_TIME

# ---- the columns of a key
QUESTION: Final = 0
"""The slot of the question that waits, or -1."""
ANSWER: Final = 1
"""The slot of the answer that waits, or -1."""
SETTLED_AT: Final = 2
"""The time of the question that has got its answer."""
EARLIER: Final = 3
LATER: Final = 4
"""The keys of the settled questions before and after this one, or -1; ``NOT_SETTLED`` if it is none of them."""
IS_TOUCHED: Final = 5
KEY_COLUMNS: Final = 6

NOT_SETTLED: Final = -2

# ---- the heaps
QUESTIONS: Final = 0
ANSWERS: Final = 1
ANSWERED: Final = 2
LEARNED: Final = 3
ASSUMED: Final = 4
HEAPS: Final = 5
OF: Final = 2
NUMBERED: Final = 3
"""In an item, the slot, and the number of what the slot had then."""
# A heap is cleared of closed items when they are more than three times the others and this number.
_CLOSED_MAX: Final = 1_000

# ---- the counts: first the lengths of the heaps
ASKED: Final = 5
"""The number of the last question."""
ARRIVED: Final = 6
"""The number of the last answer that waited."""
LATEST: Final = 7
"""The latest time of an event."""
WATERMARK: Final = 8
KEPT: Final = 9
"""The number of questions and answers that wait for each other."""
FIRST_SETTLED: Final = 10
LAST_SETTLED: Final = 11
SETTLED: Final = 12
"""The number of settled questions that are known."""
FREE: Final = 13
"""The number of free slots."""
STEPS: Final = 14
"""The number of steps of this call."""
TOUCHED: Final = 15
"""The number of keys that this call has touched."""
FORGOTTEN: Final = 16
TAKEN: Final = 17
"""The number of slots that this call has taken."""
LATE_ANSWERS: Final = 18
"""The number of answers without a question in this call."""
COUNTS: Final = 19

# ---- the settings
WITHIN: Final = 0
"""How long a question waits, in milliseconds; -1: without end."""
KEPT_MAX: Final = 1
IS_IN_ORDER: Final = 2
"""Whether an answer that arrives before its question has none."""
LEARNS_AT_ONCE: Final = 3
IS_WEIGHTED: Final = 4
MAY_ASSUME: Final = 5
HAS_OTHERWISE: Final = 6
REMEMBERS_SETTLED: Final = 7
SETTINGS: Final = 8

# ---- the columns of a step
KIND: Final = 0
OF_SLOT: Final = 1
"""The slot of the question. It may have been given to another event since."""
OF_EVENT: Final = 2
"""The event of the question, if it is one of this mini-batch; else -1."""
LABEL_SLOT: Final = 3
LABEL_EVENT: Final = 4
"""Where the label is: in a slot, or in an event of this mini-batch; both -1: the label of an unanswered question."""
SCORES: Final = 5
"""The step that makes the scores of the question; -1: they are those of its slot."""
AT_EVENT: Final = 6
"""The event with which it happens; -1: before the first one."""
WAS_LEARNED: Final = 7
"""Whether the question was learned as False before."""
STEP_COLUMNS: Final = 8

ASK: Final = 0
ASSUME: Final = 1
LEARN: Final = 2
WITHDRAW: Final = 3
"""The kinds of steps: predict a question; learn a question that waits as False; learn its label; take back that it was
learned as False, since it has no label."""

# Of the questions that have been learned, each is in every checkpoint until its wait is over: this many take some 25
# ms. What is delivered twice comes again within seconds or minutes.
LEARNED_KEPT: Final = 100_000


class Arrays(NamedTuple):
    """The state of a join, and the output of a call."""

    slots: Integers
    free: Integers
    """The free slots; the last one is taken first."""
    keys: Integers
    questions: Integers
    answers: Integers
    answered: Integers
    learned: Integers
    assumed: Integers
    counts: Integers
    settings: Integers
    delays: Integers
    ordered: Integers
    delay_counts: Integers
    shares: Floats
    """The statistics of answers, see ``answer_delays``."""
    steps: Integers
    late: Integers
    """The slots and events of answers that have no question."""
    taken: Integers
    touched: Integers
    """The keys whose events may all have left."""


Pointers = Arrays
"""In compiled code, pointers to the first number of each array: an array that is an argument would cost as much as the
work itself. A slot, a key or an item is the place of its first number."""


@compiled
def _pointers(arrays: Arrays) -> Pointers:
    return Pointers(
        pointer_to(arrays.slots),
        pointer_to(arrays.free),
        pointer_to(arrays.keys),
        pointer_to(arrays.questions),
        pointer_to(arrays.answers),
        pointer_to(arrays.answered),
        pointer_to(arrays.learned),
        pointer_to(arrays.assumed),
        pointer_to(arrays.counts),
        pointer_to(arrays.settings),
        pointer_to(arrays.delays),
        pointer_to(arrays.ordered),
        pointer_to(arrays.delay_counts),
        pointer_to(arrays.shares),
        pointer_to(arrays.steps),
        pointer_to(arrays.late),
        pointer_to(arrays.taken),
        pointer_to(arrays.touched),
    )


# ---- what waits for the other


@compiled
def _is_open(heap: Integers, place: int, slots: Integers) -> bool:
    """Whether the item at a place is of a question or answer that still waits for the other."""
    slot = heap[place * ITEM_COLUMNS + OF]
    return bool(slots[slot + NUMBER] == heap[place * ITEM_COLUMNS + NUMBERED] and slots[slot + FLAGS] & IS_OPEN)


@compiled
def _drop_closed(heap: Integers, counts: Integers, name: int, slots: Integers) -> None:
    """Remove the first items whose events have left, until the first one waits."""
    while counts[name] > 0 and not _is_open(heap, 0, slots):
        pop(heap, counts, name)


@compiled
def _clear_closed(heap: Integers, counts: Integers, name: int, slots: Integers) -> None:
    """Remove the items of events that have left once they are most of a heap: they would take memory without end."""
    count, kept = counts[name], 0
    if count <= 4 * counts[KEPT] + _CLOSED_MAX:
        return
    for place in range(count):
        if _is_open(heap, place, slots):
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
def _settle_key(state: Pointers, key: int, time: int) -> None:
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
def _forget_settled(state: Pointers) -> None:
    """Forget the settled questions whose wait would be over, and the oldest if there are too many."""
    keys, counts, within = state.keys, state.counts, state.settings[WITHIN]
    while counts[SETTLED] > 0:
        first = counts[FIRST_SETTLED]
        is_over = within >= 0 and keys[first + SETTLED_AT] + within <= counts[WATERMARK]
        if not is_over and counts[SETTLED] <= LEARNED_KEPT:
            return
        _unlink(state, first)
        _touch(state, first)


# ---- slots and steps


@compiled
def _touch(state: Pointers, key: int) -> None:
    if not state.keys[key + IS_TOUCHED]:
        state.keys[key + IS_TOUCHED] = 1
        state.touched[state.counts[TOUCHED]] = key
        state.counts[TOUCHED] += 1


@compiled
def _free(state: Pointers, slot: int) -> None:
    _touch(state, state.slots[slot + KEY])
    state.slots[slot + NUMBER] = state.slots[slot + FLAGS] = 0
    state.slots[slot + EVENT] = state.slots[slot + STEP] = -1
    state.free[state.counts[FREE]] = slot
    state.counts[FREE] += 1


@compiled
def _add_step(state: Pointers, kind: int, slot: int, answer: int, event: int) -> int:
    """Add a step of the event in a slot, with the label in the slot ``answer``, or -1 for none; return its place."""
    place = state.counts[STEPS]
    state.counts[STEPS] = place + 1
    at, steps, slots = place * STEP_COLUMNS, state.steps, state.slots
    steps[at + KIND], steps[at + OF_SLOT], steps[at + AT_EVENT] = kind, slot, event
    steps[at + OF_EVENT], steps[at + SCORES] = slots[slot + EVENT], slots[slot + STEP]
    steps[at + LABEL_SLOT] = steps[at + LABEL_EVENT] = -1
    if answer >= 0 and slots[answer + EVENT] >= 0:
        steps[at + LABEL_EVENT] = slots[answer + EVENT]
    elif answer >= 0:
        steps[at + LABEL_SLOT] = answer
    steps[at + WAS_LEARNED] = 1 if slots[slot + FLAGS] & IS_ASSUMED else 0
    return int(place)


@compiled
def _ask(state: Pointers, slot: int, event: int) -> None:
    """Predict a question; with weights, learn from it as if it had no answer."""
    step = _add_step(state, ASK, slot, -1, event)
    state.slots[slot + STEP] = state.steps[step * STEP_COLUMNS + SCORES] = step
    if state.settings[IS_WEIGHTED]:
        state.slots[slot + FLAGS] |= IS_ASSUMED


@compiled
def _assume(state: Pointers, slot: int, event: int) -> None:
    """Learn from a question that waits as if it had no answer."""
    step = _add_step(state, ASSUME, slot, -1, event)
    if state.slots[slot + STEP] < 0:
        state.slots[slot + STEP] = state.steps[step * STEP_COLUMNS + SCORES] = step
    state.slots[slot + FLAGS] |= IS_ASSUMED


@compiled
def _leave_late(state: Pointers, slot: int) -> None:
    """An answer leaves without a question."""
    at = 2 * state.counts[LATE_ANSWERS]
    state.late[at], state.late[at + 1] = slot, state.slots[slot + EVENT]
    state.counts[LATE_ANSWERS] += 1
    _free(state, slot)


@compiled
def _leave(state: Pointers, slot: int, answer: int, event: int, is_forgotten: bool) -> None:
    """A question leaves, with the answer in a slot or without one (-1): learn its label, if it has one."""
    slots = state.slots
    label = slot if slots[slot + FLAGS] & HAS_LABEL else answer
    if is_forgotten:
        state.counts[FORGOTTEN] += 1
    has_label = bool(slots[label + FLAGS] & HAS_LABEL) if label >= 0 else bool(state.settings[HAS_OTHERWISE])
    if is_forgotten or not has_label:
        if slots[slot + FLAGS] & IS_ASSUMED:
            _add_step(state, WITHDRAW, slot, -1, event)
    else:
        _add_step(state, LEARN, slot, label, event)
    _free(state, slot)
    if answer >= 0:
        _free(state, answer)


@compiled
def _limit_of(state: Pointers, time: int) -> int:
    """Return the end of the wait of a question."""
    within = state.settings[WITHIN]
    return MAX_TIME if within < 0 else min(int(time) + int(within), MAX_TIME)


# ---- what happens with an event


@compiled
def _close(state: Pointers, slot: int) -> None:
    """A question or an answer waits for the other no longer."""
    key, side = state.slots[slot + KEY], ANSWER if state.slots[slot + FLAGS] & IS_ANSWER else QUESTION
    state.slots[slot + FLAGS] &= ~IS_OPEN
    if state.keys[key + side] == slot:
        state.keys[key + side] = -1
    state.counts[KEPT] -= 1


@compiled
def _keep_at_most(state: Pointers, event: int) -> None:
    """If too many wait, the one whose wait ends first leaves."""
    counts, slots, questions, answers = state.counts, state.slots, state.questions, state.answers
    while counts[KEPT] > state.settings[KEPT_MAX]:
        _drop_closed(questions, counts, QUESTIONS, slots)
        _drop_closed(answers, counts, ANSWERS, slots)
        # A question waits up to a millisecond before the end of its wait.
        is_question = counts[ANSWERS] == 0 or (counts[QUESTIONS] > 0 and questions[0] - 1 <= answers[0])
        slot = questions[OF] if is_question else answers[OF]
        _close(state, slot)
        if is_question:
            _leave(state, slot, -1, event, True)
        else:
            _leave_late(state, slot)


@compiled
def _count_later(state: Pointers, limit: int, number: int) -> None:
    """Count the end of the wait of a question that has been learned; of too many, count the oldest now."""
    counts = state.counts
    push(state.learned, counts, LEARNED, limit, number, -1, number)
    if counts[LEARNED] > min(state.settings[KEPT_MAX], LEARNED_KEPT):
        pop(state.learned, counts, LEARNED)
        count_end(state.delay_counts, state.shares, True)


@compiled
def _pair(state: Pointers, question: int, answer: int, event: int, is_again: bool) -> None:
    """A question has got its answer. ``is_again``: both waited in the checkpoint that a run resumes from."""
    slots, counts, settings = state.slots, state.counts, state.settings
    time, number = slots[question + TIME], slots[question + NUMBER]
    if settings[MAY_ASSUME]:
        add_delay(state.delays, state.ordered, state.delay_counts, slots[answer + TIME] - time)
    if settings[REMEMBERS_SETTLED] and not is_again:
        _settle_key(state, slots[question + KEY], time)
    may_learn = settings[MAY_ASSUME] and slots[question + WHEN] != NOT_BEFORE_THE_END
    if settings[LEARNS_AT_ONCE] or (may_learn and learns_now(state.shares, True)):
        _leave(state, question, answer, event, False)
        if settings[MAY_ASSUME]:
            _count_later(state, _limit_of(state, time) if settings[WITHIN] >= 0 else time, number)
        return
    slots[question + PARTNER] = answer
    push(state.answered, counts, ANSWERED, _limit_of(state, time), number, question, number)
    if counts[ANSWERED] > settings[KEPT_MAX]:
        first = state.answered[OF]
        pop(state.answered, counts, ANSWERED)
        _leave(state, first, slots[first + PARTNER], event, False)


@compiled
def _join_question(state: Pointers, slot: int, event: int, is_again: bool) -> None:
    """Give a question its answer if that has come, or let it wait."""
    slots, keys, counts, within = state.slots, state.keys, state.counts, state.settings[WITHIN]
    key, time = slots[slot + KEY], slots[slot + TIME]
    earlier, answer = keys[key + QUESTION], keys[key + ANSWER]
    if answer >= 0 and slots[answer + TIME] >= time and (within < 0 or slots[answer + TIME] - time < within):
        _close(state, answer)
        _pair(state, slot, answer, event, is_again)
        return
    has_no_time = state.settings[IS_IN_ORDER] and within >= 0 and counts[WATERMARK] + 1 > time + within - 1
    if has_no_time or (earlier >= 0 and slots[earlier + TIME] > time):
        _leave(state, slot, -1, event, True)
        return
    slots[slot + FLAGS] |= IS_OPEN
    keys[key + QUESTION] = slot
    counts[KEPT] += 1
    push(state.questions, counts, QUESTIONS, _limit_of(state, time), slots[slot + NUMBER], slot, slots[slot + NUMBER])
    if earlier >= 0:
        _close(state, earlier)
        _leave(state, earlier, -1, event, True)
    _keep_at_most(state, event)


@compiled
def _join_answer(state: Pointers, slot: int, event: int, is_again: bool) -> None:
    """Give an answer to its question if that waits, or let it wait for it."""
    slots, keys, counts, within = state.slots, state.keys, state.counts, state.settings[WITHIN]
    key, time = slots[slot + KEY], slots[slot + TIME]
    question, earlier = keys[key + QUESTION], keys[key + ANSWER]
    if question >= 0 and slots[question + TIME] <= time and (within < 0 or time - slots[question + TIME] < within):
        _close(state, question)
        _pair(state, question, slot, event, is_again)
        return
    if counts[WATERMARK] + state.settings[IS_IN_ORDER] > time or (earlier >= 0 and slots[earlier + TIME] > time):
        _leave_late(state, slot)
        return
    slots[slot + FLAGS] |= IS_OPEN
    keys[key + ANSWER] = slot
    counts[KEPT] += 1
    push(state.answers, counts, ANSWERS, time, -slots[slot + NUMBER], slot, slots[slot + NUMBER])
    if earlier >= 0:
        _close(state, earlier)
        _leave_late(state, earlier)
    _keep_at_most(state, event)


@compiled
def _first_of(state: Pointers, watermark: int) -> int:
    """Return the heap of the item that is due first by the watermark, of questions; -1: none is due."""
    counts, found = state.counts, -1
    time, order = MAX_TIME, 0
    for name in (ASSUMED, QUESTIONS, ANSWERED, LEARNED):
        heap = state.questions
        if name == ASSUMED:
            heap = state.assumed
        elif name == ANSWERED:
            heap = state.answered
        elif name == LEARNED:
            heap = state.learned
        if counts[name] > 0 and heap[0] <= watermark:
            is_before = heap[0] < time or (heap[0] == time and heap[1] < order)
            if found < 0 or is_before:
                found, time, order = name, heap[0], heap[1]
    return found


@compiled
def _reach(state: Pointers, watermark: int, event: int) -> None:
    """End all waits that are over by a watermark, in the order of (end of the wait, number).

    Answers without a question come first. A watermark that is not higher than an earlier one has no effect.
    """
    slots, counts = state.slots, state.counts
    if watermark <= counts[WATERMARK]:
        return
    counts[WATERMARK] = watermark
    while counts[ANSWERS] > 0 and state.answers[0] < watermark:
        slot, is_open = state.answers[OF], _is_open(state.answers, 0, slots)
        pop(state.answers, counts, ANSWERS)
        if is_open:
            _close(state, slot)
            _leave_late(state, slot)
    _forget_settled(state)
    # At the end of the stream a question that still waits has no answer so far, which says nothing.
    counted_to = watermark if watermark < MAX_TIME else counts[LATEST]
    while True:
        name = _first_of(state, watermark)
        if name < 0:
            return
        _end_first(state, name, counted_to, event)


@compiled
def _end_first(state: Pointers, name: int, counted_to: int, event: int) -> None:
    """Handle the first item of a heap, which is due."""
    slots, counts = state.slots, state.counts
    counts_ends = state.settings[MAY_ASSUME]
    if name == LEARNED:
        limit = state.learned[0]
        pop(state.learned, counts, LEARNED)
        if counts_ends and limit <= counted_to:
            count_end(state.delay_counts, state.shares, True)
    elif name == ANSWERED:
        limit, slot = state.answered[0], state.answered[OF]
        pop(state.answered, counts, ANSWERED)
        if counts_ends and limit <= counted_to:
            count_end(state.delay_counts, state.shares, True)
        _leave(state, slot, slots[slot + PARTNER], event, False)
    elif name == QUESTIONS:
        limit, slot, is_open = state.questions[0], state.questions[OF], _is_open(state.questions, 0, slots)
        pop(state.questions, counts, QUESTIONS)
        if is_open:
            _close(state, slot)
            if counts_ends and limit <= counted_to:
                count_end(state.delay_counts, state.shares, False)
            _leave(state, slot, -1, event, False)
    else:
        when, slot, is_open = state.assumed[0], state.assumed[OF], _is_open(state.assumed, 0, slots)
        pop(state.assumed, counts, ASSUMED)
        if is_open and when < _limit_of(state, slots[slot + TIME]) and when <= counted_to:
            slots[slot + WHEN] = WAS_ASSUMED
            if learns_now(state.shares, False):  # Else it waits further.
                _assume(state, slot, event)


@compiled
def _take_slot(state: Pointers, key: int, time: int, event: int) -> int:
    """Give an event a free slot; its time is not before the watermark."""
    counts = state.counts
    counts[FREE] -= 1
    slot = state.free[counts[FREE]]
    time = max(time, counts[WATERMARK])
    counts[LATEST] = max(counts[LATEST], time)
    slots = state.slots
    slots[slot + KEY], slots[slot + TIME], slots[slot + EVENT] = key, time, event
    slots[slot + WHEN], slots[slot + FLAGS] = NOT_BEFORE_THE_END, 0
    slots[slot + PARTNER] = slots[slot + STEP] = -1
    state.taken[counts[TAKEN]] = slot
    counts[TAKEN] += 1
    _touch(state, key)
    return int(slot)


@compiled
def _assume_at(state: Pointers, slot: int, when: int) -> None:
    """Let a question count as unanswered at a time, if that is before the end of its wait."""
    state.slots[slot + WHEN] = when
    if when != NOT_BEFORE_THE_END and when < _limit_of(state, state.slots[slot + TIME]):
        number = state.slots[slot + NUMBER]
        push(state.assumed, state.counts, ASSUMED, when, number, slot, number)


@compiled
def _ask_event(state: Pointers, key: int, time: int, has_time: bool, has_label: bool, event: int) -> None:
    """Predict a question. One with the key and time of a question that has got its answer is forgotten."""
    counts, keys = state.counts, state.keys
    is_again = has_time and keys[key + LATER] != NOT_SETTLED and keys[key + SETTLED_AT] == time
    slot = _take_slot(state, key, time, event)
    if has_label:
        state.slots[slot + FLAGS] |= HAS_LABEL
    if is_again:
        _ask(state, slot, event)
        _leave(state, slot, -1, event, True)
        return
    counts[ASKED] += 1
    state.slots[slot + NUMBER] = counts[ASKED]
    _ask(state, slot, event)
    if state.settings[MAY_ASSUME] and are_known(state.delay_counts):
        age = age_of(state.ordered, state.delay_counts, state.shares, counts[ASKED])
        _assume_at(state, slot, WAS_ASSUMED if age < 0 else state.slots[slot + TIME] + age)
    _join_question(state, slot, event, False)


@compiled
def join_again(arrays: Arrays, waiting: Integers) -> None:
    """Join the events in these slots, which waited in the checkpoint that a run resumes from, in their order."""
    state = _pointers(arrays)
    watermark = state.counts[WATERMARK]
    state.counts[WATERMARK] = MIN_TIME  # They came before it.
    for slot in waiting:
        if state.slots[slot + FLAGS] & IS_ANSWER:
            _join_answer(state, slot, -1, True)
        else:
            _assume_at(state, slot, state.slots[slot + WHEN])
            _join_question(state, slot, -1, True)
    state.counts[WATERMARK] = watermark


@compiled
def learned_before(arrays: Arrays, limit: int, number: int) -> None:
    """Count the end of the wait of a question that was learned before the checkpoint that a run resumes from."""
    _count_later(_pointers(arrays), limit, number)


@compiled
def answered_before(arrays: Arrays, questions: Integers, answers: Integers) -> None:
    """Let the questions in these slots wait further, each with the answer that it got before the checkpoint."""
    state = _pointers(arrays)
    for place in range(len(questions)):
        slot = questions[place]
        state.slots[slot + PARTNER] = answers[place]
        limit, number = _limit_of(state, state.slots[slot + TIME]), state.slots[slot + NUMBER]
        push(state.answered, state.counts, ANSWERED, limit, number, slot, number)


@compiled
def settled_before(arrays: Arrays, keys: Integers, times: Integers) -> None:
    """Note the questions of these keys and times that got their answers before the checkpoint."""
    for place in range(len(keys)):
        _settle_key(_pointers(arrays), keys[place], times[place])


@compiled
def drop_closed(arrays: Arrays) -> None:
    """Remove the first items of all heaps whose events have left."""
    state = _pointers(arrays)
    _drop_closed(state.questions, state.counts, QUESTIONS, state.slots)
    _drop_closed(state.answers, state.counts, ANSWERS, state.slots)
    _drop_closed(state.assumed, state.counts, ASSUMED, state.slots)


@compiled
def end_waits(arrays: Arrays, watermark: int) -> None:
    """End all waits that are over by a watermark, before the first event."""
    _reach(_pointers(arrays), watermark, -1)


ASKS: Final = 1
ANSWERS_IT: Final = 2
BRINGS_LABEL: Final = 4
"""What an event does: both of the first two are 0 for an event that was refused."""


@compiled
def handle(
    arrays: Arrays,
    kinds: npt.NDArray[np.uint8],
    keys: Integers,
    times: Integers,
    before: Integers,
    start: int,
    stop: int,
) -> None:
    """Handle the events from ``start`` up to ``stop``, one by one, each after the waits that are over before it.

    ``kinds`` says what each event does. ``times`` and ``before``, the watermark behind the events before it, are empty
    by the clock: then each event has the time of the watermark.
    """
    state = _pointers(arrays)
    counts, has_time = state.counts, len(times) > 0
    for event in range(start, stop):
        if has_time:
            _reach(state, before[event], event)
        time = times[event] if has_time else counts[WATERMARK]
        has_label = bool(kinds[event] & BRINGS_LABEL)
        if kinds[event] & ASKS:
            _ask_event(state, keys[event], time, has_time, has_label, event)
        elif kinds[event] & ANSWERS_IT:
            slot = _take_slot(state, keys[event], time, event)
            counts[ARRIVED] += 1
            state.slots[slot + NUMBER] = -counts[ARRIVED]
            state.slots[slot + FLAGS] |= IS_ANSWER | (HAS_LABEL if has_label else 0)
            _join_answer(state, slot, event, False)
    _clear_closed(state.questions, counts, QUESTIONS, state.slots)
    _clear_closed(state.answers, counts, ANSWERS, state.slots)
    _clear_closed(state.assumed, counts, ASSUMED, state.slots)


@compiled
def close_batch(arrays: Arrays, kept: Integers, idle: Integers) -> tuple[int, int]:
    """End the mini-batch: fill in which of its events wait, and for which keys nothing is known any more.

    A row of ``kept`` has a slot, and its event, or for a question with new scores -1; and the step of the scores, or
    -1. Returns how many rows, and how many keys there are.
    """
    state = _pointers(arrays)
    slots, keys, counts, waiting, unused = state.slots, state.keys, state.counts, 0, 0
    for place in range(counts[TAKEN]):
        slot = state.taken[place]
        if slots[slot + EVENT] >= 0:
            kept[waiting, 0], kept[waiting, 1], kept[waiting, 2] = slot, slots[slot + EVENT], slots[slot + STEP]
            waiting += 1
            slots[slot + EVENT] = slots[slot + STEP] = -1
    for place in range(counts[STEPS]):
        slot = state.steps[place * STEP_COLUMNS + OF_SLOT]
        if state.steps[place * STEP_COLUMNS + KIND] == ASSUME and slots[slot + STEP] == place:
            kept[waiting, 0], kept[waiting, 1], kept[waiting, 2] = slot, -1, place
            waiting += 1
            slots[slot + STEP] = -1
    for place in range(counts[TOUCHED]):
        key = state.touched[place]
        keys[key + IS_TOUCHED] = 0
        if keys[key + QUESTION] < 0 and keys[key + ANSWER] < 0 and keys[key + LATER] == NOT_SETTLED:
            idle[unused] = key
            unused += 1
    return waiting, unused
