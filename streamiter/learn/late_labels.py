"""Labels that come later than their questions: how events are read, and the join of questions with answers.

Predictions are made where the model is, so the join is there, too: :class:`LabelJoin` is the state of a one-to-one
interval join (``operators.timed.joining``) whose left side are predicted questions, and whose right side are answers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Literal, TypedDict, final

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.adaptive import Label
from streamiter.learn.row_reading import (
    NamedRecord,
    NumberedBatch,
    Position,
    ReadFeatures,
    UnnamedFields,
    record_of_features,
)
from streamiter.learn.rows import BadRows, SparseRecord, blaming_rows, of_numbered_rows
from streamiter.named_rows import NamedRows, named_matrix
from streamiter.numbers import Indices
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output
from streamiter.operators.timed.joining import ARRIVAL, LEFT, RECORD, TIME, OneToOneJoin
from streamiter.records import Batch, TimedBatch, take, untimed
from streamiter.sparse_rows import SparseRows
from streamiter.times import MAX_TIME


@dataclass(frozen=True, slots=True)
class DelayedLabels:
    """How to read a stream of questions and answers: predict a question now, learn from it when its answer arrives.

    Questions and answers are joined one to one by their key and their time: ``question ≤ answer < question +
    within_s``. In a stream with event time the times are the timestamps, and answers wait for questions that arrive
    later. In other streams an event has the time at which it arrives, and an answer follows its question.
    """

    key_of: Callable[[Any], Hashable]
    """``key_of(event)`` returns the key that a question and its answer share: int, str, bytes or a tuple of these."""
    is_answer: Callable[[Any], bool]
    """Whether an event is an answer; all other events are questions."""
    features: Callable[[Sequence[Any]], Any] | Sequence[str] | None
    """``features(questions)`` returns a row of features for each question. A list of fields, or None for all fields of
    the question, only with the model that ``train_online`` makes itself."""
    target_of: Callable[[Any], Label | None]
    """``target_of(answer)`` returns the label; None if the question has no label: then the question is forgotten."""
    waiting_max: int = 1_000_000
    """The largest number of events that wait, with ``model=`` at each worker; beyond it the oldest is forgotten."""
    within_s: float | None = None
    """How long a question waits. In event time a wait that is over ends with the next mini-batch. None: without end."""
    otherwise: Label = None
    """The label of a question whose wait is over, also by the end of the stream; None: the question is forgotten."""
    unknown: Literal["refuse", "skip"] = "refuse"
    """Whether an answer without a question that waits follows the policy of the training, or is skipped and counted."""


@final
class EventsToLearn(TypedDict):
    """Questions and answers, as a worker read them: plain data, from a worker to the owner."""

    position: Position
    numbers: Indices
    records: Batch
    times: list[int] | None
    """The timestamps of the events; None without event time."""
    keys: list[Hashable]
    """For each event the key that an answer shares with its question."""
    is_answer: list[bool]
    labels: list[Label]
    """For each event the label; None for a question, and for an answer after which there will be no label."""
    features: NamedRecord | SparseRecord
    """A row for each question."""


NO_EVENTS: Final[EventsToLearn] = {
    "position": (0, 0),
    "numbers": np.empty(0, np.intp),
    "records": [],
    "times": None,
    "keys": [],
    "is_answer": [],
    "labels": [],
    "features": record_of_features(named_matrix(np.empty((0, 0)))),
}

WAIT_IS_OVER: Final = "wait is over"
"""The payload of the timer of :meth:`LabelJoin.wait`."""

Pair = tuple[Any, Any]
"""A question and its answer; None in the place of one of them."""


class LabelJoin:
    """Joins the questions that an operator has predicted with their answers."""

    def __init__(self, labels: DelayedLabels, *, is_timed: bool) -> None:
        self.is_timed = is_timed
        self.otherwise = labels.otherwise
        self._refuses_unknown = labels.unknown == "refuse"
        within_ms = None if labels.within_s is None else round(labels.within_s * 1000) - 1
        self.join = OneToOneJoin(0, within_ms, "full", kept_max=labels.waiting_max, in_order=not is_timed)
        """Add questions and answers here, by ``times``. What leaves are pairs, and events with None."""
        self._timer_at = MAX_TIME

    def open(self, context: Context) -> None:
        """Take the time from the step, and set its timers."""
        self._context = context

    def wait(self) -> None:
        """By the clock, set a timer for the end of the first wait that gives a label: its payload is ``WAIT_IS_OVER``.

        Call :meth:`heard` and this when it fires.
        """
        due = self.join.next_due()
        if not self.is_timed and self.otherwise is not None and due is not None and due < self._timer_at:
            self._timer_at = due
            self._context.set_timer(max(0, due - self._context.clock.now_ms()) / 1000, WAIT_IS_OVER)

    def heard(self) -> None:
        """Forget the timer, which has fired."""
        self._timer_at = MAX_TIME

    def now(self) -> int | None:
        """Return how far time is: the event-time watermark, or the clock. None: not known."""
        return self._context.event_time if self.is_timed else self._context.clock.now_ms()

    def advance(self, now: int | None) -> list[tuple[int, Pair]]:
        """Return the events whose wait is over, as pairs with None, and their times. ``now`` is that of events to add.

        So an event that has waited to be added is not late.
        """
        if now is not None:
            self.join.advance(now)
        return self.join.take_results()

    def end(self) -> list[tuple[int, Pair]]:
        """Return the events that wait, since no others come; none if all would be forgotten questions."""
        return self.advance(MAX_TIME) if self.is_timed or self.otherwise is not None else []

    def times(self, timestamps: Sequence[int] | None) -> Iterable[int]:
        """Return the times of events to add. A late one counts as at the watermark: its partner may still wait."""
        reached = self.join.watermark
        return repeat(reached) if timestamps is None else [max(time, reached) for time in timestamps]

    def refuse(self, answer: Any, out: Output) -> None:
        """Refuse an answer without a question, or skip it."""
        refuse = out.reject if self._refuses_unknown else out.skip
        refuse(answer, ModelError("an answer without a question that waits for it"))

    def questions(self) -> list[Any]:
        """Return the questions that wait."""
        return [record[RECORD] for side, _, record in self.join.waiting() if side == LEFT]

    def snapshot(self, question_to_record: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
        """Return side, key, time and event of all that wait, as plain data, in the order of arrival."""
        waiting = sorted(self.join.waiting(), key=lambda each: each[2][ARRIVAL])
        return [
            (side, key, record[TIME], question_to_record(record[RECORD]) if side == LEFT else record[RECORD])
            for side, key, record in waiting
        ]

    def restore(self, state: Sequence[tuple[Any, ...]], question_from_record: Callable[[Any], Any]) -> None:
        """Resume from what :meth:`snapshot` returned."""
        for side, key, time, event in state:
            self.join.add(side, key, time, question_from_record(event) if side == LEFT else event)
        if not self.is_timed:
            # The clock of another machine may be behind, and an answer is not earlier than its question.
            self.join.watermark = max((time for _, _, time, _ in state), default=self.join.watermark)
        self.join.take_results()  # If fewer may wait than before, the oldest are forgotten: their waits are not over.
        self.wait()


class StampEvents(Operator):
    """Emits each event of a stream with event time with its timestamp, as a pair, so that mini-batches keep it."""

    takes_timed_batches = True

    def process_batch(self, batch: TimedBatch, out: Output) -> None:
        out.emit_batch(list(zip(batch.times.tolist(), untimed(batch), strict=True)), event_time=batch.times)


def answers_and_keys(labels: DelayedLabels, events: Batch) -> tuple[list[bool], list[Hashable]]:
    """Return for each event whether it is an answer, and its key. Raises BadRows for events that have none."""

    def read(some: Batch) -> tuple[list[bool], list[Hashable]]:
        are_answers, keys = list(map(bool, map(labels.is_answer, some))), list(map(labels.key_of, some))
        frozenset(keys)  # TypeError for a key without a hash.
        return are_answers, keys

    return blaming_rows(read, events, read)


def unstamped(mini_batch: Batch) -> tuple[list[int], list[Any]]:
    """Return the timestamps and the events of what :class:`StampEvents` emits."""
    return [int(time) for time, _ in mini_batch], [event for _, event in mini_batch]


class EventReader(Operator):
    """Reads questions and answers, for the owner."""

    def __init__(self, events: DelayedLabels, read: ReadFeatures, *, is_timed: bool = False) -> None:
        self._events = events
        self._read = read
        self._is_timed = is_timed

    def open(self, context: Context) -> None:
        self._unnamed = UnnamedFields(context.name, self._events.features)

    def process(self, given: NumberedBatch, out: Output) -> None:
        """Emit the events of a mini-batch; questions without features and answers without a label are refused."""
        (at, first), events = given["position"], given["records"]
        times: list[int] = []
        if self._is_timed:
            times, events = unstamped(events)

        def emit(records: Batch, numbers: Indices) -> None:
            read = self._read_events(records)
            of_records = [times[number - first] for number in numbers.tolist()] if times else None
            out.emit({"position": (at, first), "numbers": numbers, "records": records, "times": of_records, **read})

        of_numbered_rows(emit, events, first, out)

    def _read_events(self, records: Batch) -> dict[str, Any]:
        are_answers, keys = answers_and_keys(self._events, records)
        target_of = self._events.target_of

        def labels_of(rows: Sequence[tuple[Any, bool]]) -> list[Label]:
            return [target_of(event) if is_answer else None for event, is_answer in rows]

        labels = blaming_rows(labels_of, list(zip(records, are_answers, strict=True)), labels_of)
        asked = [row for row, is_answer in enumerate(are_answers) if not is_answer]
        features = record_of_features(self._read_questions(records, asked))
        return {"keys": keys, "is_answer": are_answers, "labels": labels, "features": features}

    def _read_questions(self, records: Batch, asked: list[int]) -> NamedRows | SparseRows:
        if not asked:
            return named_matrix(np.empty((0, 0)))
        questions = take(records, asked)
        self._unnamed.look_at(questions)
        try:
            return blaming_rows(self._read, questions, self._read)
        except BadRows as bad:
            reasons = {asked[row]: reason for row, reason in bad.reasons.items()}
            raise BadRows([asked[row] for row in bad.rows], bad.reason, reasons) from bad
