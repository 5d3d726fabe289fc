"""The arrays of a join of questions with labels that come later, and the columns of each of them.

A *question* is an event that is predicted, an *answer* an event that brings the label of a question with its key. Both
wait in *slots*, rows of one array. Five heaps order what happens next:

=============  =========================  =============================================================================
heap           ordered by                 what happens at this time
=============  =========================  =============================================================================
``QUESTIONS``  end of the wait, number    the wait of a question without an answer is over
``ANSWERS``    time, number of arrival    no question of an answer can come any more
``ANSWERED``   end of the wait, number    a question that waits with its answer is learned
``LEARNED``    end of the wait, number    a question that has been learned already is counted
``ASSUMABLE``    age, number                a question that waits is learned as False
=============  =========================  =============================================================================

An item of a heap has four numbers: two to order by, a slot, and the number of what the slot had then: the slot may have
been given to another event since. ``label_join_steps`` works on the arrays, ``LabelJoin`` makes room in them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.values.numbers import Floats, Integers
from streamiter.values.times import MAX_TIME

KeyWords = npt.NDArray[np.uint64]
"""Keys of one kind: a row of 64-bit words for each, filled up with zeros."""

# ---- the columns of a slot
SLOT_KEY: Final = 0
SLOT_TIME: Final = 1
SLOT_NUMBER: Final = 2
"""The number of the question, or minus the number of arrival of the answer; 0 for a slot that is free."""
WHEN: Final = 3
"""When a question counts as unanswered: ``NOT_BEFORE_THE_END``, or ``WAS_ASSUMED`` once it has counted so."""
SLOT_FLAGS: Final = 4
PARTNER: Final = 5
"""The slot of the answer with which a question waits, or -1."""
SLOT_EVENT: Final = 6
"""The event of the mini-batch under way, or -1 for an event of an earlier one."""
SLOT_STEP: Final = 7
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
WAITING_QUESTION: Final = 0
"""The slot of the question that waits, or -1."""
WAITING_ANSWER: Final = 1
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
ASSUMABLE: Final = 4
HEAPS: Final = 5
OF: Final = 2
NUMBERED: Final = 3
"""In an item, the slot, and the number of what the slot had then."""
ITEM_COLUMNS: Final = 4

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
FREE_SLOTS: Final = 13
"""The number of free slots."""
STEPS: Final = 14
"""The number of steps of this call."""
TOUCHED: Final = 15
"""The number of keys that this call has touched."""
FORGOTTEN: Final = 16
TAKEN_SLOTS: Final = 17
"""The number of slots that this call has taken."""
LATE_ANSWERS: Final = 18
"""The number of answers without a question in this call."""
CROWDED_OUT: Final = 19
"""The number of questions and answers that had no room to wait."""
COUNTS: Final = 20

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
JOINED_STEP_COLUMNS: Final = 8

TO_ASK: Final = 0
TO_ASSUME: Final = 1
TO_LEARN: Final = 2
TO_WITHDRAW: Final = 3
"""The kinds of steps: predict a question; learn a question that waits as False; learn its label; take back that it was
learned as False, since it has no label."""


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


# ---- what an event does
ASKS: Final = 1
ANSWERS_IT: Final = 2
BRINGS_LABEL: Final = 4
"""What an event does: both of the first two are 0 for an event that was refused."""
