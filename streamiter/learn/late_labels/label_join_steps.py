"""The compiled steps of a join of questions with labels that come later: what happens with each event, in order.

This module needs Numba to be fast, see ``streamiter.values.helpers.compiled``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamiter.learn.late_labels.answer_delay_steps import add_delay, age_of, are_known, count_end, learns_now
from streamiter.learn.late_labels.label_join_arrays import (
    ANSWERED,
    ANSWERS,
    ANSWERS_IT,
    ARRIVED,
    ASKED,
    ASKS,
    ASSUMABLE,
    BRINGS_LABEL,
    CROWDED_OUT,
    FREE_SLOTS,
    HAS_LABEL,
    IS_ANSWER,
    IS_IN_ORDER,
    IS_OPEN,
    IS_TOUCHED,
    JOINED_STEP_COLUMNS,
    KEPT,
    KEPT_MAX,
    KIND,
    LATER,
    LATEST,
    LEARNED,
    LEARNS_AT_ONCE,
    MAY_ASSUME,
    NOT_BEFORE_THE_END,
    NOT_SETTLED,
    OF,
    OF_SLOT,
    PARTNER,
    QUESTIONS,
    REMEMBERS_SETTLED,
    SETTLED_AT,
    SLOT_EVENT,
    SLOT_FLAGS,
    SLOT_KEY,
    SLOT_NUMBER,
    SLOT_STEP,
    SLOT_TIME,
    STEPS,
    TAKEN_SLOTS,
    TO_ASSUME,
    TOUCHED,
    WAITING_ANSWER,
    WAITING_QUESTION,
    WAS_ASSUMED,
    WATERMARK,
    WHEN,
    WITHIN,
    Arrays,
)
from streamiter.learn.late_labels.label_join_slots import (
    LEARNED_KEPT,
    Pointers,
    ask,
    assume,
    clear_closed_items,
    drop_closed_items,
    forget_settled,
    leave,
    leave_late,
    limit_of,
    pop,
    push,
    settle_key,
    touch,
    waits,
)
from streamiter.values.helpers.compiled import compiled, pointer_function
from streamiter.values.numbers import Integers
from streamiter.values.times import MAX_TIME, MIN_TIME

pointer_to = pointer_function()

# ---- what happens with an event


@compiled
def _close(state: Pointers, slot: int) -> None:
    """A question or an answer waits for the other no longer."""
    key, is_answer = state.slots[slot + SLOT_KEY], state.slots[slot + SLOT_FLAGS] & IS_ANSWER
    side = WAITING_ANSWER if is_answer else WAITING_QUESTION
    state.slots[slot + SLOT_FLAGS] &= ~IS_OPEN
    if state.keys[key + side] == slot:
        state.keys[key + side] = -1
    state.counts[KEPT] -= 1


@compiled
def _keep_at_most(state: Pointers, event: int) -> None:
    """If too many wait, the one whose wait ends first leaves."""
    counts, slots, questions, answers = state.counts, state.slots, state.questions, state.answers
    while counts[KEPT] > state.settings[KEPT_MAX]:
        drop_closed_items(questions, counts, QUESTIONS, slots)
        drop_closed_items(answers, counts, ANSWERS, slots)
        # A question waits up to a millisecond before the end of its wait.
        is_question = counts[ANSWERS] == 0 or (counts[QUESTIONS] > 0 and questions[0] - 1 <= answers[0])
        slot = questions[OF] if is_question else answers[OF]
        _close(state, slot)
        counts[CROWDED_OUT] += 1
        if is_question:
            leave(state, slot, -1, event, True)
        else:
            leave_late(state, slot)


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
    time, number = slots[question + SLOT_TIME], slots[question + SLOT_NUMBER]
    if settings[MAY_ASSUME]:
        add_delay(state.delays, state.ordered, state.delay_counts, slots[answer + SLOT_TIME] - time)
    if settings[REMEMBERS_SETTLED] and not is_again:
        settle_key(state, slots[question + SLOT_KEY], time)
    may_learn = settings[MAY_ASSUME] and slots[question + WHEN] != NOT_BEFORE_THE_END
    if settings[LEARNS_AT_ONCE] or (may_learn and learns_now(state.shares, True)):
        leave(state, question, answer, event, False)
        if settings[MAY_ASSUME]:
            _count_later(state, limit_of(state, time) if settings[WITHIN] >= 0 else time, number)
        return
    slots[question + PARTNER] = answer
    push(state.answered, counts, ANSWERED, limit_of(state, time), number, question, number)
    if counts[ANSWERED] > settings[KEPT_MAX]:
        first = state.answered[OF]
        pop(state.answered, counts, ANSWERED)
        leave(state, first, slots[first + PARTNER], event, False)


@compiled
def _join_question(state: Pointers, slot: int, event: int, is_again: bool) -> None:
    """Give a question its answer if that has come, or let it wait."""
    slots, keys, counts, within = state.slots, state.keys, state.counts, state.settings[WITHIN]
    key, time = slots[slot + SLOT_KEY], slots[slot + SLOT_TIME]
    counts[LATEST] = max(counts[LATEST], time)
    earlier, answer = keys[key + WAITING_QUESTION], keys[key + WAITING_ANSWER]
    if answer >= 0 and slots[answer + SLOT_TIME] >= time and (within < 0 or slots[answer + SLOT_TIME] - time < within):
        _close(state, answer)
        _pair(state, slot, answer, event, is_again)
        return
    has_no_time = state.settings[IS_IN_ORDER] and within >= 0 and counts[WATERMARK] + 1 > time + within - 1
    if has_no_time or (earlier >= 0 and slots[earlier + SLOT_TIME] > time):
        leave(state, slot, -1, event, True)
        return
    slots[slot + SLOT_FLAGS] |= IS_OPEN
    keys[key + WAITING_QUESTION] = slot
    counts[KEPT] += 1
    number = slots[slot + SLOT_NUMBER]
    push(state.questions, counts, QUESTIONS, limit_of(state, time), number, slot, number)
    if earlier >= 0:
        _close(state, earlier)
        leave(state, earlier, -1, event, True)
    _keep_at_most(state, event)


@compiled
def _join_answer(state: Pointers, slot: int, event: int, is_again: bool) -> None:
    """Give an answer to its question if that waits, or let it wait for it."""
    slots, keys, counts, within = state.slots, state.keys, state.counts, state.settings[WITHIN]
    key, time = slots[slot + SLOT_KEY], slots[slot + SLOT_TIME]
    counts[LATEST] = max(counts[LATEST], time)
    question, earlier = keys[key + WAITING_QUESTION], keys[key + WAITING_ANSWER]
    asked = slots[question + SLOT_TIME] if question >= 0 else MAX_TIME
    if asked <= time and (within < 0 or time - asked < within):
        _close(state, question)
        _pair(state, question, slot, event, is_again)
        return
    if counts[WATERMARK] + state.settings[IS_IN_ORDER] > time or (earlier >= 0 and slots[earlier + SLOT_TIME] > time):
        leave_late(state, slot)
        return
    slots[slot + SLOT_FLAGS] |= IS_OPEN
    keys[key + WAITING_ANSWER] = slot
    counts[KEPT] += 1
    push(state.answers, counts, ANSWERS, time, -slots[slot + SLOT_NUMBER], slot, slots[slot + SLOT_NUMBER])
    if earlier >= 0:
        _close(state, earlier)
        leave_late(state, earlier)
    _keep_at_most(state, event)


@compiled
def _first_of(state: Pointers, watermark: int) -> int:
    """Return the heap of the item that is due first by the watermark, of questions; -1: none is due."""
    counts, found = state.counts, -1
    time, order = MAX_TIME, 0
    for name in (ASSUMABLE, QUESTIONS, ANSWERED, LEARNED):
        heap = state.questions
        if name == ASSUMABLE:
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
        slot, is_open = state.answers[OF], waits(state.answers, 0, slots)
        pop(state.answers, counts, ANSWERS)
        if is_open:
            _close(state, slot)
            leave_late(state, slot)
    forget_settled(state)
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
        leave(state, slot, slots[slot + PARTNER], event, False)
    elif name == QUESTIONS:
        limit, slot, is_open = state.questions[0], state.questions[OF], waits(state.questions, 0, slots)
        pop(state.questions, counts, QUESTIONS)
        if is_open:
            _close(state, slot)
            if counts_ends and limit <= counted_to:
                count_end(state.delay_counts, state.shares, False)
            leave(state, slot, -1, event, False)
    else:
        when, slot, is_open = state.assumed[0], state.assumed[OF], waits(state.assumed, 0, slots)
        pop(state.assumed, counts, ASSUMABLE)
        if is_open and when < limit_of(state, slots[slot + SLOT_TIME]) and when <= counted_to:
            slots[slot + WHEN] = WAS_ASSUMED
            if learns_now(state.shares, False):  # Else it waits further.
                assume(state, slot, event)


@compiled
def _take_slot(state: Pointers, key: int, time: int, event: int) -> int:
    """Give an event a free slot; its time is not before the watermark."""
    counts = state.counts
    counts[FREE_SLOTS] -= 1
    slot = state.free[counts[FREE_SLOTS]]
    time = max(time, counts[WATERMARK])
    slots = state.slots
    slots[slot + SLOT_KEY], slots[slot + SLOT_TIME], slots[slot + SLOT_EVENT] = key, time, event
    slots[slot + WHEN], slots[slot + SLOT_FLAGS] = NOT_BEFORE_THE_END, 0
    slots[slot + PARTNER] = slots[slot + SLOT_STEP] = -1
    state.taken[counts[TAKEN_SLOTS]] = slot
    counts[TAKEN_SLOTS] += 1
    touch(state, key)
    return int(slot)


@compiled
def _assume_at(state: Pointers, slot: int, when: int) -> None:
    """Let a question count as unanswered at a time, if that is before the end of its wait."""
    state.slots[slot + WHEN] = when
    if when != NOT_BEFORE_THE_END and when < limit_of(state, state.slots[slot + SLOT_TIME]):
        number = state.slots[slot + SLOT_NUMBER]
        push(state.assumed, state.counts, ASSUMABLE, when, number, slot, number)


@compiled
def _ask_event(state: Pointers, key: int, time: int, has_time: bool, has_label: bool, event: int) -> None:
    """Predict a question. One with the key and time of a question that has got its answer is forgotten."""
    counts, keys = state.counts, state.keys
    is_again = has_time and keys[key + LATER] != NOT_SETTLED and keys[key + SETTLED_AT] == time
    slot = _take_slot(state, key, time, event)
    if has_label:
        state.slots[slot + SLOT_FLAGS] |= HAS_LABEL
    if is_again:
        ask(state, slot, event)
        leave(state, slot, -1, event, True)
        return
    counts[ASKED] += 1
    state.slots[slot + SLOT_NUMBER] = counts[ASKED]
    ask(state, slot, event)
    if state.settings[MAY_ASSUME] and are_known(state.delay_counts):
        age = age_of(state.ordered, state.delay_counts, state.shares, counts[ASKED])
        _assume_at(state, slot, WAS_ASSUMED if age < 0 else state.slots[slot + SLOT_TIME] + age)
    _join_question(state, slot, event, False)


@compiled
def join_again(arrays: Arrays, waiting: Integers) -> None:
    """Join the events in these slots, which waited in the checkpoint that a run resumes from, in their order."""
    state = pointer_to(arrays)
    watermark = state.counts[WATERMARK]
    state.counts[WATERMARK] = MIN_TIME  # They came before it.
    for slot in waiting:
        if state.slots[slot + SLOT_FLAGS] & IS_ANSWER:
            _join_answer(state, slot, -1, True)
        else:
            _assume_at(state, slot, state.slots[slot + WHEN])
            _join_question(state, slot, -1, True)
    state.counts[WATERMARK] = watermark


@compiled
def learned_before(arrays: Arrays, limits: Integers, numbers: Integers) -> None:
    """Count the ends of the waits of questions that were learned before the checkpoint that a run resumes from."""
    state = pointer_to(arrays)
    for place in range(len(limits)):
        _count_later(state, limits[place], numbers[place])


@compiled
def answered_before(arrays: Arrays, questions: Integers, answers: Integers) -> None:
    """Let the questions in these slots wait further, each with the answer that it got before the checkpoint."""
    state = pointer_to(arrays)
    for place in range(len(questions)):
        slot = questions[place]
        state.slots[slot + PARTNER] = answers[place]
        limit, number = limit_of(state, state.slots[slot + SLOT_TIME]), state.slots[slot + SLOT_NUMBER]
        push(state.answered, state.counts, ANSWERED, limit, number, slot, number)


@compiled
def settled_before(arrays: Arrays, keys: Integers, times: Integers) -> None:
    """Note the questions of these keys and times that got their answers before the checkpoint."""
    state = pointer_to(arrays)
    for place in range(len(keys)):
        settle_key(state, keys[place], times[place])


@compiled
def drop_closed(arrays: Arrays) -> None:
    """Remove the first items of all heaps whose events have left."""
    state = pointer_to(arrays)
    drop_closed_items(state.questions, state.counts, QUESTIONS, state.slots)
    drop_closed_items(state.answers, state.counts, ANSWERS, state.slots)
    drop_closed_items(state.assumed, state.counts, ASSUMABLE, state.slots)


@compiled
def handle(
    arrays: Arrays,
    kinds: npt.NDArray[np.uint8],
    keys: Integers,
    times: Integers,
    before: Integers,
    start: int,
    stop: int,
    watermark: int,
    following: int,
) -> None:
    """Handle the events from ``start`` up to ``stop``, one by one, each after the waits that are over before it.

    Then end all waits that are over by a watermark, before the event ``following``; -1: before the first one. ``kinds``
    says what each event does. ``times`` and ``before``, the watermark behind the events before it, are empty by the
    clock: then each event has the time of the watermark.
    """
    state = pointer_to(arrays)
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
            state.slots[slot + SLOT_NUMBER] = -counts[ARRIVED]
            state.slots[slot + SLOT_FLAGS] |= IS_ANSWER | (HAS_LABEL if has_label else 0)
            _join_answer(state, slot, event, False)
        else:
            touch(state, keys[event])
    _reach(state, watermark, following)
    clear_closed_items(state.questions, counts, QUESTIONS, state.slots)
    clear_closed_items(state.answers, counts, ANSWERS, state.slots)
    clear_closed_items(state.assumed, counts, ASSUMABLE, state.slots)


@compiled
def close_batch(arrays: Arrays, kept: Integers, idle: Integers) -> tuple[int, int]:
    """End the mini-batch: fill in which of its events wait, and for which keys nothing is known any more.

    A row of ``kept`` has a slot, and its event, or for a question with new scores -1; and the step of the scores, or
    -1. Returns how many rows, and how many keys there are.
    """
    state = pointer_to(arrays)
    slots, keys, counts, waiting, unused = state.slots, state.keys, state.counts, 0, 0
    for place in range(counts[TAKEN_SLOTS]):
        slot = state.taken[place]
        if slots[slot + SLOT_EVENT] >= 0:
            kept[waiting, 0], kept[waiting, 1] = slot, slots[slot + SLOT_EVENT]
            kept[waiting, 2] = slots[slot + SLOT_STEP]
            waiting += 1
            slots[slot + SLOT_EVENT] = slots[slot + SLOT_STEP] = -1
    for place in range(counts[STEPS]):
        slot = state.steps[place * JOINED_STEP_COLUMNS + OF_SLOT]
        if state.steps[place * JOINED_STEP_COLUMNS + KIND] == TO_ASSUME and slots[slot + SLOT_STEP] == place:
            kept[waiting, 0], kept[waiting, 1], kept[waiting, 2] = slot, -1, place
            waiting += 1
            slots[slot + SLOT_STEP] = -1
    for place in range(counts[TOUCHED]):
        key = state.touched[place]
        keys[key + IS_TOUCHED] = 0
        if keys[key + WAITING_QUESTION] < 0 and keys[key + WAITING_ANSWER] < 0 and keys[key + LATER] == NOT_SETTLED:
            idle[unused] = key
            unused += 1
    return waiting, unused
