"""Joins questions with labels that come later, where the model is: predictions are made there, too.

:class:`LabelJoin` is a one-to-one interval join whose left side are predicted questions, and whose right side are
answers. Compiled code handles the events of a mini-batch one by one, see
``streamiter.learn.late_labels.label_join_steps``.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from itertools import repeat
from operator import is_not
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import CheckpointError, ModelError
from streamiter.learn.asked_questions import JoinedSteps, JoinEvents, StillWaiting
from streamiter.learn.labels import Label, counts_as_false, is_label
from streamiter.learn.late_labels import label_join_arrays as layout
from streamiter.learn.late_labels.answer_delays import AnswerDelays
from streamiter.learn.late_labels.delayed_labels import DelayedLabels, come_with_questions, labels_of_rows
from streamiter.learn.late_labels.kept_questions import KeptQuestions
from streamiter.learn.late_labels.key_places import KeyPlaces
from streamiter.operators.declared_state import EVERY, FIRST_KNOWN, NESTED, DeclaredState, Form, declared, for_all
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.values.helpers.compiled import saying_that_it_compiles
from streamiter.values.numbers import Array, Floats, Indices, plain_scalar
from streamiter.values.records import Batch, take
from streamiter.values.times import MAX_TIME, MIN_TIME, before_end, in_seconds

_log = logging.getLogger("streamiter.learn")

WAIT_IS_OVER: Final = "wait is over"
"""The payload of the timer of :meth:`LabelJoin.wait`."""


def objects(values: Batch) -> npt.NDArray[np.object_]:
    """Return values as an array of objects, whatever they are."""
    return np.fromiter(values, object, len(values))


def _settled_of_all(many: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the keys and times of all subtasks by time: the first ones are forgotten first."""
    settled = sorted((pair for each in many for pair in zip(*each, strict=True)), key=lambda pair: pair[1])
    return [[key for key, _ in settled], [time for _, time in settled]]


_NOTHING: Final = np.zeros(0, np.int64)
_NO_EVENTS: Final = np.zeros(0, np.uint8), _NOTHING, _NOTHING, _NOTHING

# The rows of the waiting events in a state.
_OPEN_QUESTION, _OPEN_ANSWER, _ANSWERED_QUESTION, _ITS_ANSWER = range(4)


class LabelJoin(DeclaredState):
    """Joins the questions that an operator has predicted with their answers, and ends their waits. No I/O.

    With ``schedule="end"`` a question that has its answer waits further, to the end of its wait. With ``"expected"``,
    too, until enough delays of answers are known.
    """

    delays = declared(made=AnswerDelays, form=NESTED, share=for_all(AnswerDelays.merged))
    _other_label: Label = declared(None, share=FIRST_KNOWN)
    """The first label that differs from the label of questions without an answer."""
    false_label: Label = declared(form=Form(plain_scalar, plain_scalar), share=FIRST_KNOWN)
    """The label with which questions are learned, or were in an earlier run, before their own is known."""
    is_false_otherwise: bool = declared(share=EVERY)
    """Whether a question without an answer counts as False beside the labels so far."""

    def __init__(self, labels: DelayedLabels, *, is_timed: bool) -> None:
        # Imported here: it imports Numba, which takes most of a second.
        from streamiter.learn.late_labels import label_join_steps

        self._compiled = label_join_steps
        self.is_timed = is_timed
        self.schedule = labels.chosen_schedule()
        self.otherwise = labels.otherwise
        self.false_label = labels.otherwise if self.schedule in ("expected", "weighted") else None
        self.is_false_otherwise = counts_as_false(self.otherwise)
        self._unknown = labels.unknown
        self._ignores_unknown = come_with_questions(labels)
        self._within_ms = None if labels.within_s is None else round(in_seconds(labels.within_s) * 1000)
        self._settings = np.zeros(layout.SETTINGS, np.int64)
        self._settings[layout.WITHIN] = -1 if self._within_ms is None else self._within_ms
        self._settings[layout.KEPT_MAX] = labels.waiting_max
        self._settings[layout.IS_IN_ORDER] = not is_timed
        self._settings[layout.LEARNS_AT_ONCE] = self.schedule in ("weighted", "at once")
        self._settings[layout.IS_WEIGHTED] = self.schedule == "weighted"
        self._settings[layout.HAS_OTHERWISE] = self.otherwise is not None
        self._settings[layout.REMEMBERS_SETTLED] = is_timed and not self._ignores_unknown
        self._counts = np.zeros(layout.COUNTS, np.int64)
        self._counts[[layout.LATEST, layout.WATERMARK]] = MIN_TIME
        self._counts[[layout.FIRST_SETTLED, layout.LAST_SETTLED]] = -1
        self._slots = np.zeros((0, layout.SLOT_COLUMNS), np.int64)
        self._free = np.zeros(0, np.int64)
        self._keys = np.zeros((0, layout.KEY_COLUMNS), np.int64)
        self._heaps = [np.zeros(0, np.int64) for _ in range(layout.HEAPS)]
        self._outputs = [_NOTHING] * 4
        self._places = KeyPlaces()
        """The place of each key in the array of keys."""
        self.questions = KeptQuestions()
        self._labels, self._records = np.empty(0, object), np.empty(0, object)
        self._weights: Floats = np.zeros(0)
        """The label of each slot, its record and its weight."""
        self._join_again: Indices = np.zeros(0, np.intp)
        """The slots of a restore whose events are joined first: waits are longer now, or fewer may wait."""
        self._timer_at = MAX_TIME
        self._step = "DelayedLabels"
        self._has_warned = False
        self._events = JoinEvents.none()
        # The first place is touched in place of the keys that a restored answer no longer has.
        self._places.add_room(1)
        self._have_columns()

    @property
    def _may_assume(self) -> bool:
        """Whether questions count as ones without an answer, once enough delays of answers are known."""
        return self.schedule == "expected" and self.is_false_otherwise

    @property
    def _has_share(self) -> bool:
        """Whether the share of True is the share of answers other than ``otherwise``: not always so for two texts."""
        return self.is_false_otherwise or not isinstance(self.otherwise, str)

    @property
    def waiting(self) -> int:
        """The number of events that wait."""
        return int(self._counts[layout.KEPT] + self._counts[layout.ANSWERED]) + len(self._join_again)

    @property
    def forgotten(self) -> int:
        """The number of questions that were asked again, or that too many others have replaced, in this run."""
        return int(self._counts[layout.FORGOTTEN])

    def open(self, context: Context) -> None:
        """Take the time from the step, and set its timers."""
        self._context, self._step = context, f"step {context.name!r}"

    @staticmethod
    def compile(*, also_to_resume: bool = False) -> None:
        """Compile the functions of joins, where that is needed; it takes some seconds. Another thread may call this.

        Those of a restart take a quarter of the time, and the first row of a new machine need not wait for them.
        """
        join = LabelJoin(labels_of_rows("label", None, None), is_timed=True)
        steps, arrays = join._compiled, join._arrays(0)
        with saying_that_it_compiles("the join of labels that come later"):
            join._places.compile()
            join.delays.are_known()
            steps.handle(arrays, *_NO_EVENTS, 0, 0, MIN_TIME, -1)
            steps.close_batch(arrays, np.empty((0, 3), np.int64), _NOTHING)
            steps.drop_closed(arrays)
            if also_to_resume:
                steps.settled_before(arrays, _NOTHING, _NOTHING)
                steps.learned_before(arrays, _NOTHING, _NOTHING)
                steps.answered_before(arrays, _NOTHING, _NOTHING)
                steps.join_again(arrays, _NOTHING)

    # ---- by the clock

    def wait(self) -> None:
        """By the clock, set a timer for the end of the first wait that gives a label: its payload is ``WAIT_IS_OVER``.

        Call :meth:`heard` and handle the waits that are over when it fires.
        """
        if self.is_timed or not (self.otherwise is not None or self._counts[layout.ANSWERED]):
            return
        if (due := self._next_due()) < self._timer_at:
            self._timer_at = due
            self._context.set_timer(max(0, due - self._context.clock.now_ms()) / 1000, WAIT_IS_OVER)

    def heard(self) -> None:
        """Forget the timer, which has fired."""
        self._timer_at = MAX_TIME

    def now(self) -> int:
        """Return the time before the next events, where the events do not tell it: the time of the clock."""
        return MIN_TIME if self.is_timed else self._context.clock.now_ms()

    def _next_due(self) -> int:
        """Return when something happens next, if no event comes."""
        if len(self._join_again):
            return self.watermark
        self._compiled.drop_closed(self._arrays(0))
        first = [int(heap[0]) if self._counts[name] else MAX_TIME for name, heap in enumerate(self._heaps)]
        # An answer waits for questions of its own millisecond, too.
        first[layout.ANSWERS] += 1
        del first[layout.LEARNED]
        return min(first)

    def is_due(self, watermark: int) -> bool:
        """Whether something happens by a watermark."""
        heads = (heap[0] for name, heap in enumerate(self._heaps) if self._counts[name])
        return len(self._join_again) > 0 or any(head <= watermark for head in heads)

    def pass_time(self, watermark: int) -> None:
        """Reach a watermark by which nothing is due: later events count as events of this time at the earliest."""
        self._last = self._arrays(0)
        self._compiled.handle(self._last, *_NO_EVENTS, 0, 0, watermark, -1)
        if self._counts[layout.TOUCHED]:
            self.close()  # Settled questions were forgotten, and their keys.

    @property
    def watermark(self) -> int:
        """The watermark, or the time of the clock, up to which waits have ended."""
        return int(self._counts[layout.WATERMARK])

    def at_end(self) -> int:
        """Return the watermark for the end of the stream; ``MIN_TIME`` if all that wait would be forgotten."""
        has_labels = self.otherwise is not None or self._counts[layout.ANSWERED] or len(self._join_again)
        return MAX_TIME if self.is_timed or has_labels else MIN_TIME

    # ---- events

    def handle(self, events: JoinEvents, watermark: int, positive: Label = None) -> JoinedSteps:
        """End all waits that are over by a watermark, then handle the events; then call :meth:`close`.

        Each event is handled after all waits that are over by the watermark behind the events before it. A late
        question or answer counts as one at the watermark. A watermark that is not higher than an earlier one has no
        effect. A question with the key and the time of a question that has got its answer is forgotten.
        """
        self._events = events
        kinds = events.asks * np.uint8(layout.ASKS) + events.answers * np.uint8(layout.ANSWERS_IT)
        has_label = np.fromiter(map(is_not, events.labels.tolist(), repeat(None)), np.bool_, len(kinds))
        kinds += has_label * np.uint8(layout.BRINGS_LABEL)
        keys = self._places_of(events.keys)
        times, before = (
            _NOTHING if given is None else np.asarray(given, np.int64) for given in (events.times, events.before)
        )
        arrays = self._last = self._arrays(len(kinds))
        if len(self._join_again):
            again, self._join_again = self._join_again, np.zeros(0, np.intp)
            self._compiled.join_again(arrays, again)
        self._compiled.handle(arrays, *_NO_EVENTS, 0, 0, watermark, -1)
        shares: list[tuple[int, bool]] = []
        start = 0
        for stop in self._changes_of_labels(events, positive):
            shares.append((int(self._counts[layout.STEPS]), self._has_share))
            self._settings[layout.MAY_ASSUME] = self._may_assume
            # Waits that are over end before the label of the next event counts.
            behind = int(before[stop]) if stop < len(before) else MIN_TIME
            self._compiled.handle(arrays, kinds, keys, times, before, start, stop, behind, stop)
            start = stop
        return self._steps_of(arrays, shares)

    def _steps_of(self, arrays: Any, shares: list[tuple[int, bool]]) -> JoinedSteps:
        count = int(self._counts[layout.STEPS])
        columns = arrays.steps[: count * layout.JOINED_STEP_COLUMNS].reshape(count, layout.JOINED_STEP_COLUMNS).T.copy()
        for column in (layout.OF_SLOT, layout.LABEL_SLOT):
            columns[column] //= layout.SLOT_COLUMNS  # -1 stays -1.
        # The waits that ended before the first event did so with what was known then.
        has_share = np.full(count, shares[0][1])
        for (first, value), (after, _) in zip(shares, [*shares[1:], (count, True)], strict=True):
            has_share[first:after] = value
        return JoinedSteps(*columns[:-1], columns[-1] > 0, has_share)  # type: ignore[call-arg]

    def _changes_of_labels(self, events: JoinEvents, positive: Label) -> Any:
        """Yield up to which event the kind of the labels is as it is now; last the number of the events.

        Of the labels until then, the label of a question without an answer may be one of several classes. No effect
        once there were enough labels that the model refuses such a label.
        """
        if self.is_false_otherwise and not self.delays.are_known():
            known = (None, self.otherwise, self._other_label)
            for event in np.flatnonzero(events.answers).tolist():
                label = events.labels[event]
                is_known = label is self.otherwise or label is self._other_label
                if not is_known and is_label(label) and label not in known:
                    yield event
                    if self.delays.are_known():
                        break
                    has_two = self._other_label is None or not isinstance(label, str)
                    self.is_false_otherwise = has_two and counts_as_false(self.otherwise, label, positive)
                    self._other_label = plain_scalar(label)
                    known = (None, self.otherwise, self._other_label)
                    if not self.is_false_otherwise:
                        break
        yield len(events.keys)

    def late_answers(self) -> list[Any]:
        """Return the records of the answers of the last :meth:`handle` that have no question."""
        slots, events = self._last.late[: 2 * int(self._counts[layout.LATE_ANSWERS])].reshape(-1, 2).T.tolist()
        return [
            self._events.records[event] if event >= 0 else self._records[slot // layout.SLOT_COLUMNS]
            for slot, event in zip(slots, events, strict=True)
        ]

    def labels_of(self, steps: JoinedSteps) -> npt.NDArray[np.object_]:
        """Return the label of each step that has one, and that of a question without an answer for all others."""
        labels = np.full(len(steps.kind), self.otherwise, object)
        is_new, is_old = steps.label_event >= 0, steps.label_slot >= 0
        labels[is_new] = self._events.labels[steps.label_event[is_new]]
        labels[is_old] = self._labels[steps.label_slot[is_old]]
        return labels

    def weights_of(self, steps: JoinedSteps) -> Floats:
        """Return the sample weight of each step: that of its label, or 1."""
        weights = np.ones(len(steps.kind))
        if self._events.weights is not None:
            is_new = steps.label_event >= 0
            weights[is_new] = self._events.weights[steps.label_event[is_new]]
        is_old = steps.label_slot >= 0
        weights[is_old] = self._weights[steps.label_slot[is_old]]
        weights[steps.was_learned] = 1.0  # As it was learned before the answer told a weight.
        return weights

    def record_of(self, steps: JoinedSteps, step: int) -> Any:
        """Return the record of the label of a step."""
        if (event := int(steps.label_event[step])) >= 0:
            return self._events.records[event]
        slot = int(steps.label_slot[step])
        return self._records[slot] if slot >= 0 else {"otherwise": self.otherwise}

    def close(self) -> StillWaiting:
        """End a mini-batch, whose steps have been made; return what waits behind it."""
        self._warn_of_no_room()
        events = self._events
        most = int(self._counts[layout.TAKEN_SLOTS] + self._counts[layout.STEPS])
        kept, idle = np.empty((most, 3), np.int64), np.empty(int(self._counts[layout.TOUCHED]), np.int64)
        waiting, unused = self._compiled.close_batch(self._last, kept, idle)
        self._counts[[layout.STEPS, layout.TAKEN_SLOTS, layout.TOUCHED, layout.LATE_ANSWERS]] = 0
        self._places.forget(idle[:unused] // layout.KEY_COLUMNS)
        slots, of_events, scores = kept[:waiting].T
        slots = slots // layout.SLOT_COLUMNS
        is_new = np.flatnonzero(of_events >= 0)
        is_new = is_new[self._slots[slots[is_new], layout.SLOT_FLAGS] & (layout.HAS_LABEL | layout.IS_ANSWER) > 0]
        self._keep_labels(slots[is_new], of_events[is_new], events)
        return StillWaiting(slots, of_events, scores)

    def _warn_of_no_room(self) -> None:
        if self._counts[layout.CROWDED_OUT] and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: more than %d questions and answers wait for each other, so from now on those whose wait ends "
                "first are forgotten; let the labels have a shorter wait (within_s=, or within of learn.label in the "
                "file of a service), or DelayedLabels a larger waiting_max",
                self._step,
                self._settings[layout.KEPT_MAX],
            )

    def _keep_labels(self, slots: Indices, of_events: Indices, events: JoinEvents) -> None:
        self._labels[slots] = events.labels[of_events]
        self._records[slots] = objects(take(events.records, of_events))
        self._weights[slots] = 1.0 if events.weights is None else events.weights[of_events]

    def refuse(self, answer: Any, out: Output) -> None:
        """Refuse an answer without a question, or skip it; if its question was refused, that has been said."""
        if self._ignores_unknown:
            return
        is_refused = self._unknown == "refuse" or (self._unknown == "report" and out.tolerates_rejections)
        refuse = out.reject if is_refused else out.skip
        refuse(answer, ModelError("an answer without a question that waits for it"))

    # ---- room

    def _places_of(self, keys: Sequence[Hashable] | Array) -> npt.NDArray[np.int64]:
        """Return where the columns of each key begin; a new key gets a place."""
        places = self._places.of(keys)
        self._have_columns()
        return places * layout.KEY_COLUMNS

    def _have_columns(self) -> None:
        """Have the columns of a key at each place."""
        count = len(self._keys)
        if count < self._places.room:
            keys = np.full((self._places.room, layout.KEY_COLUMNS), -1, np.int64)
            keys[:, [layout.EARLIER, layout.LATER]] = layout.NOT_SETTLED
            keys[:, layout.IS_TOUCHED] = 0
            keys[:count] = self._keys
            self._keys = keys

    def _arrays(self, events: int) -> Any:
        """Return the arrays, with room for this many events."""
        counts = self._counts
        if (missing := events - int(counts[layout.FREE_SLOTS])) > 0:
            self._add_slots(max(missing, len(self._slots)))
        items = counts[: layout.HEAPS]
        for name in range(layout.HEAPS):
            # A question is in each heap once at most.
            if (needed := (int(items[name]) + events + len(self._join_again) + 1) * layout.ITEM_COLUMNS) > len(
                self._heaps[name]
            ):
                self._heaps[name] = np.pad(self._heaps[name], (0, 2 * needed - len(self._heaps[name])))
        # Each event makes a step, and each event and each item ends at most one wait.
        most = 3 * events + int(items.sum()) + 2 * len(self._join_again)
        late = events + int(items[layout.ANSWERS]) + len(self._join_again)
        touched = self._places.room
        return layout.Arrays(
            self._slots.reshape(-1),
            self._free,
            self._keys.reshape(-1),
            self._heaps[layout.QUESTIONS],
            self._heaps[layout.ANSWERS],
            self._heaps[layout.ANSWERED],
            self._heaps[layout.LEARNED],
            self._heaps[layout.ASSUMABLE],
            counts,
            self._settings,
            self.delays.last,
            self.delays.ordered,
            self.delays.counts,
            self.delays.shares,
            *map(self._output, range(4), (most * layout.JOINED_STEP_COLUMNS, 2 * late, events, touched)),
        )

    def _output(self, which: int, size: int) -> npt.NDArray[np.int64]:
        """Return an array for the output of a call, mostly that of the last call: new memory takes longer than it."""
        if len(self._outputs[which]) < size:
            self._outputs[which] = np.empty(size + size // 2, np.int64)
        return self._outputs[which]

    def _add_slots(self, more: int) -> None:
        count = len(self._slots)
        slots = np.zeros((count + more, layout.SLOT_COLUMNS), np.int64)
        slots[:count] = self._slots
        slots[count:, [layout.PARTNER, layout.SLOT_EVENT, layout.SLOT_STEP]] = -1
        free = int(self._counts[layout.FREE_SLOTS])
        added = np.arange(count, count + more)[::-1] * layout.SLOT_COLUMNS
        self._free = np.concatenate([self._free[:free], added, np.zeros(count, np.int64)])
        self._counts[layout.FREE_SLOTS] += more
        self._slots = slots
        self.questions.make_room(len(slots))
        self._labels, self._records = (np.append(each, np.full(more, None)) for each in (self._labels, self._records))
        self._weights = np.pad(self._weights, (0, more))

    # ---- state

    def definition(self) -> Definition:
        """Return the settings on which the meaning of the state depends.

        How long questions wait, and their schedule, may change: each of them says whether it has been learned as False.
        """
        return {"labels": "later, in event time" if self.is_timed else "later, by the clock"}

    def _waiting_slots(self) -> tuple[Indices, Indices]:
        """Return the slots of all that wait, questions by number and answers by arrival, and what each of them is."""
        slots = self._slots
        columns = (layout.SLOT_NUMBER, layout.SLOT_FLAGS, layout.PARTNER)
        number, flags, partner = (slots[:, column] for column in columns)
        again = np.zeros(len(slots), np.bool_)
        again[self._join_again // layout.SLOT_COLUMNS] = True
        is_open = (number != 0) & ((flags & layout.IS_OPEN > 0) | again)
        is_answer = flags & layout.IS_ANSWER > 0
        questions, answers = np.flatnonzero(is_open & ~is_answer), np.flatnonzero(is_open & is_answer)
        answered = np.flatnonzero((number != 0) & ~is_answer & (partner >= 0))
        questions, answered = questions[np.argsort(number[questions])], answered[np.argsort(number[answered])]
        answers = answers[np.argsort(-number[answers])]
        parts = [questions, answers, answered, partner[answered] // layout.SLOT_COLUMNS]
        kinds = np.repeat(np.arange(4), [len(part) for part in parts])
        return np.concatenate(parts), kinds

    def question_slots(self) -> Indices:
        """Return the slots of the questions that wait."""
        slots, kinds = self._waiting_slots()
        questions: Indices = slots[(kinds == _OPEN_QUESTION) | (kinds == _ANSWERED_QUESTION)]
        return questions

    def forget_assumptions(self) -> None:
        """Another model has never learned a question that waits."""
        self._slots[self.question_slots(), layout.SLOT_FLAGS] &= ~layout.IS_ASSUMED

    def state(self) -> dict[str, Any]:
        """Return all that waits as plain data: times, not limits, which may change."""
        counts = self._counts
        slots, kinds = self._waiting_slots()
        is_open = kinds <= _OPEN_ANSWER
        places = self._slots[slots[is_open], layout.SLOT_KEY] // layout.KEY_COLUMNS
        columns = [layout.SLOT_TIME, layout.SLOT_NUMBER, layout.WHEN, layout.SLOT_FLAGS]
        waiting = self._slots[slots][:, columns]
        has_label = waiting[:, 3] & (layout.IS_ANSWER | layout.HAS_LABEL) > 0
        labels, records = self._labels[slots], self._records[slots]
        labels[~has_label] = records[~has_label] = None  # Those of an event that had the slot before.
        waiting[:, 3] &= ~layout.IS_OPEN  # A restore joins them again.
        waiting[(kinds == _OPEN_ANSWER) | (kinds == _ITS_ANSWER), 1] = 0  # They are in the order of their arrival.
        learned = self._heaps[layout.LEARNED][: int(counts[layout.LEARNED]) * layout.ITEM_COLUMNS].reshape(-1, 4)
        return super().state() | {
            "watermark": self.watermark if self.is_timed else MIN_TIME,
            "asked": int(counts[layout.ASKED]),
            "latest": int(counts[layout.LATEST]),
            "settled": self._settled(),
            "kinds": kinds,
            "waiting": waiting,
            "keys": self._places.keys(places),
            "labels": list(map(plain_scalar, labels.tolist())),
            "records": records.tolist(),
            "weights": np.where(has_label, self._weights[slots], 1.0),
            "questions": self.questions.state(slots[(kinds == _OPEN_QUESTION) | (kinds == _ANSWERED_QUESTION)]),
            "learned": learned[np.argsort(learned[:, 1]), :2] - [self._within_ms or 0, 0],
        }

    def _settled(self) -> list[list[Any]]:
        """Return keys and times of the settled questions, in their order."""
        later, order = self._keys[:, layout.LATER].tolist(), []
        place = int(self._counts[layout.FIRST_SETTLED])
        while place >= 0:
            order.append(place // layout.KEY_COLUMNS)
            place = later[order[-1]]
        return [self._places.keys(np.array(order, np.int64)), self._keys[order, layout.SETTLED_AT].tolist()]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state`. Questions wait for as long as ``within_s`` says now."""
        own_label = self.false_label
        super().restore(state)
        self.is_false_otherwise = self.is_false_otherwise and counts_as_false(self.otherwise)
        self.false_label = own_label if self.false_label is None else self.false_label
        self._settings[layout.MAY_ASSUME] = self._may_assume
        waiting, kinds = np.asarray(state["waiting"], np.int64).reshape(-1, 4), np.asarray(state["kinds"])
        is_open = kinds <= _OPEN_ANSWER
        settled, keys = self._places_of(state["settled"][0]), self._places_of(state["keys"])
        arrays = self._arrays(len(kinds) + len(state["learned"]))
        slots = self._restore_slots(state, waiting, kinds)
        self._slots[slots[is_open], layout.SLOT_KEY] = keys
        self._counts[[layout.ASKED, layout.LATEST]] = state["asked"], state["latest"]
        self._counts[layout.WATERMARK] = self._restored_watermark(state, waiting[is_open], kinds[is_open])
        self._compiled.settled_before(arrays, settled, np.array(state["settled"][1], np.int64))
        if self.schedule == "expected":
            times, numbers = np.asarray(state["learned"], np.int64).reshape(-1, 2).T.copy()
            self._compiled.learned_before(arrays, times + (self._within_ms or 0), numbers)
        answered, answers = (slots[kinds == kind] * layout.SLOT_COLUMNS for kind in (_ANSWERED_QUESTION, _ITS_ANSWER))
        self._compiled.answered_before(arrays, answered, answers)
        # With longer waits questions meet answers. If fewer may wait than before, the oldest are forgotten.
        questions = slots[kinds == _OPEN_QUESTION]
        questions = questions[np.argsort(self._slots[questions, layout.SLOT_NUMBER], kind="stable")]
        self._join_again = np.concatenate([questions, slots[kinds == _OPEN_ANSWER]]) * layout.SLOT_COLUMNS
        self.wait()

    def _restore_slots(
        self, state: Mapping[str, Any], waiting: npt.NDArray[np.int64], kinds: npt.NDArray[np.int64]
    ) -> Indices:
        """Give the events of a state slots, and return these."""
        own = self._slots
        self._counts[layout.FREE_SLOTS] -= len(kinds)
        free = int(self._counts[layout.FREE_SLOTS])
        slots: Indices = self._free[free : free + len(kinds)] // layout.SLOT_COLUMNS
        for place, column in enumerate((layout.SLOT_TIME, layout.SLOT_NUMBER, layout.WHEN, layout.SLOT_FLAGS)):
            own[slots, column] = waiting[:, place]
        if self.schedule != "expected":
            own[slots, layout.WHEN] = layout.NOT_BEFORE_THE_END
        answers = slots[(kinds == _OPEN_ANSWER) | (kinds == _ITS_ANSWER)]
        own[answers, layout.SLOT_NUMBER] = -1 - np.arange(len(answers))
        self._counts[layout.ARRIVED] = len(answers)
        self._labels[slots], self._records[slots] = objects(state["labels"]), objects(state["records"])
        self._weights[slots] = state["weights"]
        is_question = (kinds == _OPEN_QUESTION) | (kinds == _ANSWERED_QUESTION)
        self.questions.restore(state["questions"], slots[is_question])
        return slots

    def _restored_watermark(
        self, state: Mapping[str, Any], waiting: npt.NDArray[np.int64], kinds: npt.NDArray[np.int64]
    ) -> int:
        times = waiting[:, 0]
        if not self.is_timed:
            # The clock of another machine may be behind, and an answer is not earlier than its question.
            return int(times.max(initial=MIN_TIME))
        if not len(times):
            return int(state["watermark"])
        # A wait that has become shorter, and is over, ends with the next event.
        within = MAX_TIME if self._within_ms is None else self._within_ms
        ends = np.where(kinds == _OPEN_QUESTION, np.minimum(times, MAX_TIME - within) + within, times + 1)
        return min(int(state["watermark"]), int(ends.min()) - 1)

    @staticmethod
    def without_end(state: dict[str, Any]) -> dict[str, Any]:
        """Return a :meth:`state` for a stream that goes on after it had ended."""
        return {**state, "watermark": before_end(state["watermark"])}

    @classmethod
    def redistribute(cls, states: Sequence[Mapping[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give a single join what waited in several; each question gets a number of its own."""
        if parallelism > 1:
            # A mini-batch on its way has events of many keys, and cannot be divided among the owners of the keys.
            raise CheckpointError("only one worker can take over questions that wait for labels")
        many = len(states)
        [shared] = super().redistribute(states, 1)
        waiting, learned = [], []
        for place, state in enumerate(states):
            rows, ended = np.array(state["waiting"], np.int64), np.array(state["learned"], np.int64)
            rows[:, 1] = rows[:, 1] * many + place
            ended[:, 1] = ended[:, 1] * many + place
            waiting.append(rows)
            learned.append(ended)
        return [
            shared
            | {
                "watermark": min(state["watermark"] for state in states),
                "asked": many * (1 + max(state["asked"] for state in states)),
                "latest": max(state["latest"] for state in states),
                "settled": _settled_of_all([state["settled"] for state in states]),
                "kinds": np.concatenate([state["kinds"] for state in states]),
                "waiting": np.concatenate(waiting),
                "learned": np.concatenate(learned),
                **{name: [each for state in states for each in state[name]] for name in ("keys", "labels", "records")},
                "weights": np.concatenate([state["weights"] for state in states]),
                "questions": KeptQuestions.joined([state["questions"] for state in states]),
            }
        ]
