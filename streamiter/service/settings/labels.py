"""Labels: those of records, and those that come later, in an answer to a question."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import repeat
from operator import eq, itemgetter
from typing import Any, Final, cast

import numpy as np

from streamiter.errors import shortened
from streamiter.flow.building import outlets_of
from streamiter.flow.event_time import is_behind_topic
from streamiter.flow.stream import Stream
from streamiter.learn import DelayedLabels
from streamiter.learn.labels import LearningTask, number_of_label
from streamiter.operators.functions import field_column, field_values, with_batches
from streamiter.service.settings.field_comparison import FieldComparison, value_in
from streamiter.service.settings.tables import (
    ANSWER,
    ANSWERS_FIELD,
    READY_MADE,
    LabelSettings,
    LearningKind,
    LearnSettings,
)
from streamiter.values.field_kinds import number_of_text
from streamiter.values.numbers import Array, is_number, plain_float, plain_scalar
from streamiter.values.object_columns import JSON_FIELD, is_exact, object_values
from streamiter.values.records import Batch, Columns

Record = Mapping[str, Any]
"""A decoded event; its values are the user's."""


def label_of(learn: LearnSettings, *, as_texts: bool = False) -> Callable[[Record], Any]:
    """Return the function that reads the label of a record; it raises an error for a record without one.

    ``as_texts``: a class that is a whole number is its text, as in a history that has only texts.

    >>> label_of(LearnSettings("classification", LabelSettings("late")))({"late": 1})
    True
    >>> label_of(LearnSettings("classification", LabelSettings("sent")))({"sent": "late"})
    'late'
    >>> label_of(LearnSettings("multiclass", LabelSettings("grade")), as_texts=True)({"grade": 3})
    '3'
    """
    value = learn.label.value
    if isinstance(value, FieldComparison):
        return value
    expected, is_label = _LABELS[learn.kind]
    takes_texts = learn.learner in READY_MADE

    def label(record: Record) -> Any:
        given = value_in(record, value)
        if isinstance(given, str) and learn.kind == "classification" and not takes_texts:
            raise ValueError(f"expected true, false, 1 or 0 in the field {value!r}, given {given!r}; {_COMPARE_IT}")
        found = number_of_label(given) if learn.kind == "regression" else given
        if not is_label(found):
            raise ValueError(f"expected {expected} in the field {value!r}, given {given!r}")
        if as_texts and learn.kind == "multiclass":
            return text_of_whole_number(found)
        return bool(found) if learn.kind == "classification" and not isinstance(given, str) else found

    return with_batches(label, lambda records: [label({value: given}) for given in _column_of(value, records)])


def _column_of(name: str, records: Batch) -> list[Any]:
    """Return the values of a column of JSON objects; raise any error for other records."""
    if not isinstance(records, Columns) or JSON_FIELD not in records or not is_exact(records.arrays, name):
        raise TypeError(f"expected a column {name!r}")
    values: list[Any] = records[name].tolist()
    return values


_COMPARE_IT: Final = "write value = \"field == 'text'\" in label, or leave learner out"

_LABELS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "classification": (
        "true, false, 1, 0 or a text",
        lambda given: isinstance(given, str) or (is_number(given) and given in (0, 1)),
    ),
    "regression": ("a number", lambda found: found is not None),
    "multiclass": ("a text or a whole number", lambda given: isinstance(given, (str, int))),
}


def text_of_whole_number(value: Any) -> Any:
    """Return the text of a whole number, as CSV has it; any other value as it is."""
    value = plain_scalar(value)
    return str(value) if type(value) is int else value


def reads_truth(learn: LearnSettings) -> bool:
    """Whether a label may be a truth value, and no text that the settings name."""
    return learn.kind == "classification" and isinstance(learn.label.value, str) and learn.label.positive is None


def with_truth(record: Any, field: str) -> Any:
    """Return a record of texts alone, in which a truth value of the label is one, as in the topic that follows.

    >>> with_truth({"late": "True", "km": "1"}, "late"), with_truth({"late": "cancelled"}, "late")
    ({'late': True, 'km': '1'}, {'late': 'cancelled'})
    """
    given = record.get(field) if isinstance(record, Mapping) else None
    truth = _TRUTHS.get(given.lower()) if isinstance(given, str) else None
    return record if truth is None else {**record, field: truth}


_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}


def task_of(kind: LearningKind) -> LearningTask:
    """Return what a model is told about its labels: a service that answers with one probability has two of them."""
    return "binary" if kind == "classification" else kind


def shares_of_labels(learn: LearnSettings, labels: Sequence[Any]) -> str:
    """Return the shares of the labels, as a model reads them, or their range; and what is wrong if all are equal.

    >>> shares_of_labels(LearnSettings("classification", LabelSettings("late")), [True, False, False, False])
    '25.0% are true'
    >>> shares_of_labels(LearnSettings("regression", LabelSettings("delay")), [7.0, 7.0])
    'all are 7.0: nothing can be learned from such labels, so check the key label'
    """
    counts = Counter(labels)
    if len(counts) == 1:
        shown = str(labels[0]).lower() if isinstance(labels[0], bool) else repr(labels[0])
        if learn.label.otherwise not in (None, labels[0]):
            return f"all are {shown}, and questions without an answer {learn.label.otherwise!r}"
        return f"all are {shown}: nothing can be learned from such labels, so check the key label"
    if learn.kind == "regression":
        return f"from {min(labels):g} to {max(labels):g}"
    if set(counts) <= {True, False}:
        return f"{counts[True] / len(labels):.1%} are true"
    shares = [f"{count / len(labels):.1%} are {label!r}" for label, count in counts.most_common(_SHARES_SHOWN)]
    if more := len(counts) - len(shares):
        shares.append(f"and {more} other labels")
    return ", ".join(shares)


_SHARES_SHOWN: Final = 5


def delayed_labels_of(
    learn: LearnSettings, features: Callable[[Batch], Any], *, as_texts: bool = False
) -> DelayedLabels:
    """Return how questions and answers are read and joined; ``as_texts``: by the texts of their keys."""
    settings, read = learn.label, label_of(learn, as_texts=as_texts)
    key_of: Callable[[Any], Any] = itemgetter(settings.key)
    if as_texts:
        key_of = with_batches(
            lambda event: text_of_whole_number(event[settings.key]),
            lambda events: list(map(text_of_whole_number, field_values(itemgetter(settings.key), events))),
        )
    field, answer_is = settings.event_field, settings.event
    compared = settings.value if isinstance(settings.value, FieldComparison) else None

    def target_of(answer: Record) -> Any:
        return None if value_in(answer, settings.field) in (None, "") else read(answer)

    def targets_of(answers: Batch) -> list[Any]:
        return [target_of({settings.field: value}) for value in _column_of(settings.field, answers)]

    return DelayedLabels(
        key_of=key_of,
        is_answer=with_batches(
            lambda event: bool(event.get(field) == answer_is), lambda events: _are_equal(field, events, answer_is)
        ),
        features=features,
        target_of=with_batches(target_of, targets_of if compared is None else compared.of_batch),
        within_s=settings.within_s,
        otherwise=settings.otherwise,
        schedule=settings.schedule,
    )


def _are_equal(name: Any, events: Batch, value: object) -> list[bool]:
    """Return whether a field of each event has this value."""
    texts = field_column(itemgetter(name), events, "U")
    # For numpy, NULs at the end of a text make no difference.
    if texts is None or not isinstance(value, str) or value.endswith("\0"):
        return list(map(eq, _fields_of(name, events), repeat(value)))
    return cast(list[bool], (texts == value).tolist())


def _fields_of(name: Any, events: Batch) -> list[Any]:
    """Return a field of each event, None where it is missing."""
    is_column = isinstance(events, Columns) and name in events
    if isinstance(events, Columns) and is_column and JSON_FIELD in events and events[name].dtype.kind != "f":
        return object_values(events.arrays, name, None)
    return field_values(itemgetter(name), events) if is_column else [event.get(name) for event in events]


# One time in the future would end the wait of all questions, and of all that follow. Clocks differ by less, and times
# of a place that are taken for UTC by at most 14 hours.
_AHEAD_S: Final = 24 * 3600


# After this many seconds without an event, a partition holds nothing back, and time advances with the clock.
_QUIET_S: Final = 5.0


def as_answer(record: Any) -> Record:
    """Return a record of ``input.answers`` as an answer among questions."""
    if not isinstance(record, Mapping):
        raise TypeError(f"expected an answer with fields, given {shortened(record)}")
    return {**record, ANSWERS_FIELD: ANSWER}


def questions_and_answers(
    events: Stream, answers: Stream | None, label: LabelSettings, rejections: Mapping[str, Any], *, of: str = ""
) -> Stream:
    """Return the events that are questions or answers, in event time: that of their field, or else of the topic.

    ``answers`` are in a topic of their own. The training merges both by time, however far each has been read. ``of`` is
    the end of the names of the steps.
    """
    if answers is not None:
        answers = _timed(answers, label, f"times of answers{of}", rejections)
        answers = answers.map(as_answer, name=f"mark answers{of}", **rejections)
        return _timed(events, label, f"times{of}", rejections).union(answers)
    if label.question is None:
        return _timed(events, label, f"times{of}", rejections)
    # The times of a topic are known right behind it; events of other kinds need no field of time.
    events = events if label.time is not None else _timed(events, label, f"times{of}", rejections)
    kinds = (label.event, label.question)
    events = events.filter(
        lambda event: event.get(label.event_field) in kinds, name=f"questions and answers{of}", **rejections
    )
    return events if label.time is None else _timed(events, label, f"times{of}", rejections)


def _timed(events: Stream, label: LabelSettings, name: str, rejections: Mapping[str, Any]) -> Stream:
    options: dict[str, Any] = {"max_ahead_s": _AHEAD_S, "name": name, **rejections}
    if (time := label.time) is not None:
        time_of = with_batches(
            lambda event: milliseconds_of(event[time]), lambda events: milliseconds_of_texts(_texts_of(time, events))
        )
        return events.event_time(time_of, unit="ms", check_unit=False, **options)
    if all(map(is_behind_topic, outlets_of(events))):
        return events.event_time(idle_after_s=_QUIET_S, when_idle="advance", **options)
    return events


def milliseconds_of(time: object) -> int:
    """Return milliseconds since 1970 for ISO 8601 (UTC unless it says another zone), or a number of seconds or ms.

    A number above 100,000,000,000 is milliseconds: as seconds it would be the year 5138.

    >>> milliseconds_of("2013-01-01T10:15Z"), milliseconds_of(1357035300), milliseconds_of(1357035300000)
    (1357035300000, 1357035300000, 1357035300000)
    >>> milliseconds_of("1357035300.5"), milliseconds_of("20130101")
    (1357035300500, 1356998400000)
    """
    if isinstance(time, np.datetime64) and not np.isnat(time):
        return int(time.astype("datetime64[ms]").astype(np.int64))
    if isinstance(time, str) and (read := number_of_text(time)) is not None and abs(read) > _YEAR_MONTH_DAY:
        time = read
    if isinstance(time, (str, datetime)):
        at = datetime.fromisoformat(time) if isinstance(time, str) else time
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    number = math.nan if isinstance(time, bool) else plain_float(time)
    if not math.isfinite(number):
        raise ValueError(f"expected a time as ISO 8601, in seconds or in milliseconds, given {shortened(time)}")
    return round(number if abs(number) > _LATEST_S else number * 1000)


def _texts_of(name: str, events: Batch) -> Sequence[str] | Array:
    """Return texts of a field, or any other values."""
    texts = field_column(itemgetter(name), events, "U")
    return field_values(itemgetter(name), events) if texts is None else texts


def milliseconds_of_texts(times: Sequence[str] | Array) -> list[int]:
    """Return what :func:`milliseconds_of` returns for each of these texts; raise any error if one must be read alone.

    >>> milliseconds_of_texts(["2013-01-01T10:15Z", "2013-01-01T10:15"])
    [1357035300000, 1357035300000]
    """
    if (found := _milliseconds_in_utc(times)) is not None:
        return found
    times = list(map(str, times)) if isinstance(times, np.ndarray) else times
    at = [each if each.tzinfo else each.replace(tzinfo=UTC) for each in map(datetime.fromisoformat, times)]
    # Both this and Python round halves to the even number.
    milliseconds: list[int] = np.rint(np.array(list(map(datetime.timestamp, at))) * 1000).astype(np.int64).tolist()
    return milliseconds


_PARTS: Final = "YMDhms"
_FORMS_IN_UTC: Final[Mapping[int, str]] = {len(form): form for form in ("YYYY-MM-DDThh:mmZ", "YYYY-MM-DDThh:mm:ssZ")}


def _milliseconds_in_utc(texts: Sequence[str] | Array) -> list[int] | None:
    """Return the milliseconds of texts that are read at once, all of one of these forms; None for others."""
    # A text of an array that is shorter than the others ends with NULs, which are in no form.
    lengths = {texts.dtype.itemsize // 4} if isinstance(texts, np.ndarray) else set(map(len, texts))
    form = _FORMS_IN_UTC.get(lengths.pop()) if len(lengths) == 1 else None
    if form is None or (array := np.ascontiguousarray(texts)).dtype.kind != "U":
        return None
    powers = [[10.0 ** form.count(part, at + 1) * (part == each) for each in _PARTS] for at, part in enumerate(form)]
    zeros = np.array([ord("0" if part in _PARTS else part) for part in form], np.uint32)
    # What is less than its zero is huge.
    digits = array.view(np.uint32).reshape(len(array), -1) - zeros
    if (digits > np.array([9 * (part in _PARTS) for part in form], np.uint32)).any():
        return None
    year, month, day, hour, minute, second = (digits.astype(np.float64) @ np.array(powers)).astype(np.int64).T.copy()
    months = 12 * (year - 1970) + month - 1
    first, following = (each.astype("M8[M]").astype("M8[D]").astype(np.int64) for each in (months, months + 1))
    is_date = (year > 0) & (month > 0) & (month <= 12) & (day > 0) & (day <= following - first)
    if not (is_date & (hour < 24) & (minute < 60) & (second < 60)).all():
        return None
    seconds = (((first + day - 1) * 24 + hour) * 60 + minute) * 60 + second
    return cast(list[int], (seconds * 1000).tolist())


_LATEST_S: Final = 100_000_000_000
# A text of eight digits, such as 20131231, is a day of ISO 8601, and a longer one seconds or milliseconds.
_YEAR_MONTH_DAY: Final = 99_999_999
