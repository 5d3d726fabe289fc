"""Labels: those of records, and those that come later, in an answer to a question."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from streamiter.errors import ModelError, shortened
from streamiter.learn import DelayedLabels
from streamiter.numbers import is_number, plain_float
from streamiter.operators import Context, Operator, Output
from streamiter.records import Batch
from streamiter.service.settings import FieldComparison, LabelSettings, LearnSettings

Record = Mapping[str, Any]
"""A decoded event; its values are the user's."""


def label_of(learn: LearnSettings) -> Callable[[Record], Any]:
    """Return the function that reads the label of a record; it raises an error for a record without one.

    >>> label_of(LearnSettings("classification", LabelSettings("late")))({"late": 1})
    True
    """
    value = learn.label.value
    if isinstance(value, FieldComparison):
        return value
    expected, is_label = _LABELS[learn.kind]

    def label(record: Record) -> Any:
        given = record[value]
        if not is_label(given):
            raise ValueError(f"expected {expected} in the field {value!r}, given {given!r}")
        return bool(given) if learn.kind == "classification" else given

    return label


_LABELS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "classification": ("true, false, 1 or 0", lambda given: is_number(given) and given in (0, 1)),
    "regression": ("a number", lambda given: is_number(given) and math.isfinite(given)),
    "multiclass": ("a text or a whole number", lambda given: isinstance(given, (str, int))),
}


def delayed_labels_of(learn: LearnSettings, features: Callable[[Batch], Any]) -> DelayedLabels:
    """Return how questions and answers behind :class:`MatchAnswers` are read."""
    settings, read = learn.label, label_of(learn)

    def target_of(answer: Record) -> Any:
        if _IS_LATE in answer:
            return settings.otherwise if answer[_IS_LATE] else None
        return None if answer[settings.field] is None else read(answer)

    return DelayedLabels(
        key_of=lambda event: event[settings.key],
        is_answer=lambda event: bool(event.get(settings.event_field) == settings.event),
        features=features,
        target_of=target_of,
        waiting_max=WAITING_MAX,
    )


WAITING_MAX: Final = 1_000_000
"""The largest number of questions that wait; each needs about a kilobyte."""

# One time in the future would end the wait of all questions, and of all that follow. Clocks differ by less, and times
# of a place that are taken for UTC by at most 14 hours.
_AHEAD_MS: Final = 24 * 3600 * 1000

# In an answer that the service makes: true if none came in time, false if too many questions wait.
_IS_LATE: Final = "streamiter: no answer in time"


class MatchAnswers(Operator):
    """Matches answers with questions in time. Parallelism 1.

    An answer without a question that waits is refused. A question that has waited for ``within_s`` gets an answer that
    says so. The time is that of the clock, or of the field ``time``: then it is the latest time of any event so far.
    ``is_strict``: other records that are refused end the job.
    """

    def __init__(self, label: LabelSettings, *, is_strict: bool = False, waiting_max: int = WAITING_MAX) -> None:
        self._label = label
        self._is_strict = is_strict
        self._waiting_max = waiting_max
        self._waiting: dict[Hashable, int] = {}
        """The time of each question, in milliseconds since 1970, by its key; the oldest first."""
        self._now_ms = 0
        """The latest time of an event."""
        self._has_timer = False

    def open(self, context: Context) -> None:
        self._context = context

    def process_batch(self, batch: Batch, out: Output) -> None:
        """Pass on the questions, and the answers that match."""
        passed: list[Record] = []
        for record in batch:
            try:
                is_known = self._match(record, passed)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                if self._is_strict:
                    out.fail(error, record)
                out.reject(record, error, origin=out.batch_origin)
            else:
                if not is_known:
                    unknown = ModelError("an answer without a question that waits for it")
                    out.reject(record, unknown, origin=out.batch_origin)
        out.emit_batch(passed)
        self._wait()

    def _match(self, record: Record, passed: list[Record]) -> bool:
        """Match a record; return False for an answer without a question."""
        label, kind = self._label, record.get(self._label.event_field)
        if label.question is not None and kind not in (label.event, label.question):
            return True
        assert label.key is not None
        key = record[label.key]
        hash(key)
        now_ms = self._time_of(record)
        self._expire(passed)
        if kind == label.event:
            if self._waiting.pop(key, None) is None:
                return False
        else:
            self._waiting.pop(key, None)  # A question that is asked again becomes the youngest.
            if len(self._waiting) >= self._waiting_max:
                self._answer(passed, is_late=False)
            self._waiting[key] = now_ms
        passed.append(record)
        return True

    def _time_of(self, record: Record) -> int:
        if self._label.time is None:
            return self._context.clock.now_ms()
        at_ms, now_ms = milliseconds_of(record[self._label.time]), self._context.clock.now_ms()
        if at_ms > now_ms + _AHEAD_MS:
            given = shortened(record[self._label.time])
            raise ValueError(f"expected a time of at most a day from now in {self._label.time!r}, given {given}")
        self._now_ms = max(self._now_ms, at_ms)
        return at_ms

    def _expire(self, passed: list[Record]) -> None:
        if self._label.within_s is None:
            return
        now_ms = self._context.clock.now_ms() if self._label.time is None else self._now_ms
        before_ms = now_ms - round(self._label.within_s * 1000)
        while self._waiting and next(iter(self._waiting.values())) <= before_ms:
            self._answer(passed, is_late=True)

    def _answer(self, passed: list[Record], *, is_late: bool) -> None:
        """Answer the oldest question."""
        key = next(iter(self._waiting))
        del self._waiting[key]
        label = self._label
        assert label.key is not None
        passed.append({label.event_field: label.event, label.key: key, _IS_LATE: is_late})

    def _wait(self) -> None:
        """Set a timer for the oldest question, unless the events tell the time."""
        label = self._label
        if label.within_s is None or label.time is not None or self._has_timer or not self._waiting:
            return
        waited_s = (self._context.clock.now_ms() - next(iter(self._waiting.values()))) / 1000
        self._context.set_timer(max(label.within_s - waited_s, 0.001))
        self._has_timer = True

    def on_timer(self, payload: object, out: Output) -> None:
        """Answer the questions that have waited for too long."""
        self._has_timer = False
        late: list[Record] = []
        self._expire(late)
        out.emit_batch(late)
        self._wait()

    def snapshot(self) -> dict[str, object]:
        return {"waiting": list(self._waiting.items()), "now": self._now_ms, "timer": self._has_timer}

    def restore(self, state: dict[str, Any]) -> None:
        self._waiting = dict(state["waiting"])
        self._now_ms, self._has_timer = state["now"], state["timer"]


def milliseconds_of(time: object) -> int:
    """Return milliseconds since 1970 for ISO 8601 (UTC unless it says another zone), or a number of seconds or ms.

    A number above 100,000,000,000 is milliseconds: as seconds it would be the year 5138.

    >>> milliseconds_of("2013-01-01T10:15Z"), milliseconds_of(1357035300), milliseconds_of(1357035300000)
    (1357035300000, 1357035300000, 1357035300000)
    """
    if isinstance(time, str):
        at = datetime.fromisoformat(time)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    number = math.nan if isinstance(time, bool) else plain_float(time)
    if not math.isfinite(number):
        raise ValueError(f"expected a time as ISO 8601, in seconds or in milliseconds, given {shortened(time)}")
    return round(number if abs(number) > _LATEST_S else number * 1000)


_LATEST_S: Final = 100_000_000_000
