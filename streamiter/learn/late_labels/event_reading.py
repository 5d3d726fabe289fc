"""Labels that come later than their questions: how the workers of a training read the events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict, cast, final

import numpy as np

from streamiter.learn.labels import Label
from streamiter.learn.late_labels.delayed_labels import DelayedLabels, come_with_questions
from streamiter.learn.ready_made.label_fields import LabelFields
from streamiter.learn.ready_made.row_reading import (
    NumberedBatch,
    Position,
    ReadFeatures,
    ReadsLabels,
    record_of_features,
)
from streamiter.learn.rows import BadRows, blaming_rows, failed_function, of_numbered_rows, row_weights
from streamiter.operators.functions import field_column, field_read_by, field_values, values_at_once
from streamiter.operators.output import Output
from streamiter.operators.timed.in_order import BEFORE_FIELD, TIME_FIELD
from streamiter.values.named_rows import NamedRows, named_matrix
from streamiter.values.numbers import Array, Floats, Indices, Truths
from streamiter.values.records import Batch, Columns, take
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.times import Times

Keys = Sequence[Hashable] | Array
"""A key of each event; an array has texts or whole numbers."""


@final
class EventsToLearn(TypedDict):
    """Questions and answers, as a worker read them: plain data, from a worker to the owner."""

    position: Position
    count: int
    """The number of events of the mini-batch, those that were refused included."""
    numbers: Indices
    records: Batch
    times: Times | None
    """The timestamps of the events; None without event time."""
    before: Times | None
    """For each event the watermark behind the events before it; None without event time."""
    keys: Keys
    """For each event the key that an answer shares with its question."""
    is_answer: Truths
    labels: list[Label]
    """For each event the label; None for a question, and for an answer after which there will be no label. Rows that a
    join has labelled have the label in their question."""
    weights: Floats | None
    """For each event with a label its sample weight; None: all are 1."""
    features: dict[str, Any]
    """A row for each question."""
    label_fields: list[str]
    """The fields that the user's label function has read so far."""


def no_events() -> EventsToLearn:
    """Return the events of an empty mini-batch: only time has passed."""
    return {
        "position": (0, 0),
        "count": 0,
        "numbers": np.empty(0, np.intp),
        "records": [],
        "times": None,
        "before": None,
        "keys": [],
        "is_answer": np.empty(0, np.bool_),
        "labels": [],
        "weights": None,
        "features": record_of_features(named_matrix(np.empty((0, 0)))),
        "label_fields": [],
    }


def _without_order(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without its order; a challenger reads the same event."""
    return {name: value for name, value in event.items() if name not in (BEFORE_FIELD, TIME_FIELD)}


def answers_and_keys(labels: DelayedLabels, events: Batch) -> tuple[Truths, Keys]:
    """Return for each event whether it is an answer, and its key. Raises BadRows for events without a key."""

    def answers_of(some: Batch) -> Truths:
        are_answers = field_column(labels.is_answer, some, "biuf")
        if are_answers is None:
            are_answers = np.fromiter(map(bool, field_values(labels.is_answer, some)), np.bool_, len(some))
        return are_answers.astype(np.bool_)

    def keys_of(some: Batch) -> Array | list[Any]:
        keys = field_column(labels.key_of, some, "iU")
        return field_values(labels.key_of, some) if keys is None else keys

    are_answers = blaming_rows(answers_of, events, answers_of, "DelayedLabels(is_answer=)")
    keys = blaming_rows(keys_of, events, keys_of, "DelayedLabels(key_of=)")
    return are_answers, blaming_rows(_checked_keys, keys, _checked_keys) if isinstance(keys, list) else keys


def _checked_keys(keys: list[Any]) -> list[Hashable]:
    if not _SOUND_KEYS.issuperset(map(type, keys)):
        for key in frozenset(keys):  # TypeError for a key without a hash.
            if key is None or key != key:  # NaN, the None of tables, equals no other.
                raise ValueError(f"expected a key that a question and its answer share, given {key!r}")
    return keys


_SOUND_KEYS: Final = frozenset({str, int, bytes})
"""Types whose values all have a hash, and equal themselves."""


class TimedEvents(NamedTuple):
    """The events of a mini-batch that come in the order of event time; an item for each event."""

    before: Times
    """The watermark behind the events before it."""
    times: Times
    records: Batch
    keys: list[Hashable] | None = None
    """The number of the row, for rows that a join has labelled."""
    is_answer: Truths | None = None
    """For such rows, whether their label, which they bring with their question, is known now."""

    @classmethod
    def of(cls, mini_batch: Batch) -> TimedEvents:
        """Return the events of the records that ``InOrder``, or ``SpansInOrder``, emits."""
        if isinstance(mini_batch, Columns):
            arrays = mini_batch.arrays
            return cls(arrays.pop(BEFORE_FIELD), arrays.pop(TIME_FIELD), Columns(arrays))
        rows: Any = mini_batch
        # Of a mini-batch of several kinds of batches, the rows of columns are dicts.
        if dict in frozenset(map(type, rows)):
            rows = [
                (each[BEFORE_FIELD], each[TIME_FIELD], _without_order(each)) if isinstance(each, dict) else each
                for each in rows
            ]
        before, times, records, *more = zip(*rows, strict=True) if len(rows) else ((), (), ())
        watermarks, timestamps = (np.fromiter(each, np.int64, len(rows)) for each in (before, times))
        if not more:
            return cls(watermarks, timestamps, list(records))
        keys, is_answer = more
        return cls(watermarks, timestamps, list(records), list(keys), np.array(is_answer, np.bool_))

    def taken(self, rows: Indices) -> TimedEvents:
        """Return some of the events."""
        if len(rows) == len(self.times):
            return self
        keys = None if self.keys is None else [self.keys[row] for row in rows.tolist()]
        is_answer = None if self.is_answer is None else self.is_answer[rows]
        return TimedEvents(self.before[rows], self.times[rows], take(self.records, rows), keys, is_answer)


class EventReader(ReadsLabels):
    """Reads questions and answers, for the owner; of each mini-batch it emits one record."""

    def __init__(
        self,
        events: DelayedLabels,
        read: ReadFeatures,
        options: Mapping[str, object],
        *,
        is_timed: bool = False,
        made_of: LabelFields | None = None,
    ) -> None:
        super().__init__(options, made_of)
        self._events = events
        self._read = read
        self._is_timed = is_timed

    def process(self, given: NumberedBatch, out: Output) -> None:
        """Emit the events of a mini-batch; questions without features and answers without a label are refused."""
        (at, first), records = given["position"], given["records"]
        count = len(records)
        timed = TimedEvents.of(records) if self._is_timed else None

        def read(records: Batch, numbers: Indices) -> dict[str, Any]:
            events = None if timed is None else timed.taken(numbers - first)
            return {
                "numbers": numbers,
                "records": records,
                "times": None if events is None else events.times,
                "before": None if events is None else events.before,
                **self._read_events(records, events, out),
            }

        found = of_numbered_rows(read, records if timed is None else timed.records, first, out) or no_events()
        out.emit({**found, "position": (at, first), "count": count, "label_fields": self.fields_of_label()})

    def _labels_of(self, answers: Batch, out: Output) -> list[Label]:
        """Return the labels of answers. If one is refused, its question has no label, and waits no longer."""
        labels: list[Label] = values_at_once(self._events.target_of, answers) or []
        rest = iter(answers)
        while len(labels) < len(answers):
            error: Exception = StopIteration()  # It ends the call without an error, if the function raises it.
            try:
                labels.extend(map(self._events.target_of, rest))
            except Exception as raised:
                error = raised
            if len(labels) < len(answers):
                out.reject(answers[len(labels)], failed_function("DelayedLabels(target_of=)", error))
                labels.append(None)
        return labels

    def _read_events(self, records: Batch, events: TimedEvents | None, out: Output) -> dict[str, Any]:
        if events is None or events.keys is None or events.is_answer is None:
            are_answers, keys = answers_and_keys(self._events, records)
            labelled = None
        else:
            are_answers, keys = events.is_answer, events.keys
            labelled = ~are_answers
        target_of, weight_of = self._events.target_of, self._events.weight_of
        option = "DelayedLabels({}_of=)" if labelled is None else "train_online({}=)"  # As the user has written it.
        has_label, weights = are_answers if labelled is None else labelled, None
        if weight_of is not None:
            given = self._values(weight_of, records, has_label, option.format("weight"), default=1.0)
            weights = row_weights("train_online", given, len(records))
        # The label of a row says which of its fields are features. A refused answer is not read again with its batch.
        labels = [] if labelled is None else self._values(target_of, records, labelled, option.format("label"))
        features = record_of_features(self._read_questions(records, np.flatnonzero(~are_answers)))
        if labelled is None:
            labels = self._labels_of_answers(records, are_answers, out)
        return {"keys": keys, "is_answer": are_answers, "labels": labels, "weights": weights, "features": features}

    def _labels_of_answers(self, records: Batch, are_answers: Truths, out: Output) -> list[Label]:
        """Return the label of each event, None for questions."""
        target_of = self._events.target_of
        if isinstance(records, Columns) and field_read_by(target_of) in records:
            labels = np.fromiter(field_values(target_of, records), object, len(records))
            labels[~are_answers] = None
        else:
            found = self._labels_of(take(records, np.flatnonzero(are_answers)), out)
            labels = np.full(len(records), None)
            labels[are_answers] = np.fromiter(found, object, len(found))
        return cast(list[Label], labels.tolist())

    @staticmethod
    def _values(
        value_of: Callable[[Any], Any], records: Batch, labelled: Truths, option: str, default: Any = None
    ) -> list[Any]:
        """Return a value of each event that has a label."""

        def values_of(rows: Sequence[tuple[Any, bool]]) -> list[Any]:
            return [value_of(event) if has_label else default for event, has_label in rows]

        return blaming_rows(values_of, list(zip(records, labelled.tolist(), strict=True)), values_of, option)

    def _read_questions(self, records: Batch, asked: Indices) -> NamedRows | SparseRows:
        if not len(asked):
            return named_matrix(np.empty((0, 0)))
        questions = take(records, asked)
        self._unnamed.look_at(questions)
        try:
            owner = "train_online" if come_with_questions(self._events) else "DelayedLabels"
            option = f"{owner}(features=)" if callable(self._events.features) else ""
            return blaming_rows(self._read, questions, self._read, option)
        except BadRows as bad:
            reasons = {int(asked[row]): reason for row, reason in bad.reasons.items()}
            raise BadRows([asked[row] for row in bad.rows], bad.reason, reasons) from bad
