"""From the settings to a training: labels that come in time, the learner, and when versions are published.

``ServiceLearning`` adds the training to the flow of a service, and makes the predictors of its versions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from streamiter.errors import ConfigurationError, ModelError, shortened
from streamiter.flow.stream import Stream
from streamiter.learn import (
    ADWIN,
    AdaptiveLinearModel,
    DelayedLabels,
    LinearModel,
    LinearRegression,
    LogisticRegression,
    OnlineTraining,
    PageHinkley,
    train_online,
)
from streamiter.models import ModelSnapshot, Parameters
from streamiter.numbers import is_number, plain_float, positive
from streamiter.operators import Context, Operator, Output
from streamiter.optimizers import Constant, Optimizer
from streamiter.records import Batch
from streamiter.service.features import FeatureRows, FieldPredictor
from streamiter.service.settings import (
    FieldComparison,
    InputSettings,
    LabelSettings,
    LearnSettings,
    PublishSettings,
    ServiceSettings,
)
from streamiter.service.settings_file import OPTIMIZERS
from streamiter.topics import Decoder, Json, topic

Record = Mapping[str, Any]
"""A decoded event; its values are the user's."""

# Each report is a point of the page's charts.
_REPORT_EVERY_S: Final = 1.0


class ServiceLearning:
    """The training that the settings describe; :meth:`apply` changes its settings that may change while it runs."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self.features = FeatureRows(settings.learn)
        """Reads the rows of the training and of predictions."""
        self._schedule = PublishSchedule(settings.publish)
        given = {"learning_rate": 0.0} | dict(settings.learn.learner_settings)
        self._rate = ChangeableRate(given["learning_rate"]) if given["learning_rate"] else None

    def train(self, events: Stream) -> OnlineTraining:
        """Add the training to the flow; ``models`` has the versions that the schedule lets pass."""
        learn = self._settings.learn
        rejections = rejections_of(self._settings.input)
        detectors = {"adwin": ADWIN, "page-hinkley": PageHinkley}
        options: dict[str, Any] = {"label": label_of(learn), "features": self.features, "weight": learn.weight}
        if learn.label.event is not None:
            is_strict = rejections.get("on_error") == "fail"
            events = events.process(
                lambda: MatchAnswers(learn.label, is_strict=is_strict),
                name="match answers",
                parallelism=1,
                **rejections | ({"on_error": "skip"} if is_strict else {}),
            )
            options = {"labels": delayed_labels_of(learn, self.features)}
        training = train_online(
            events,
            self._make_model(),
            mini_batch=learn.learner_settings.get("mini_batch"),
            drift=detectors[learn.drift]() if learn.drift else None,
            report_every_s=_REPORT_EVERY_S,
            **options,
            **rejections,
        )
        models = training.models.process(lambda: PublishInTime(self._schedule), name="schedule", parallelism=1)
        return replace(training, models=models)

    def predictor(self, parameters: Parameters) -> FieldPredictor:
        """Return the predictor of a version, whose rows have the fields of the events: ``ServedModel(load=…)``."""
        return FieldPredictor(parameters, self.features, f"model {self._settings.name!r}")

    def apply(self, settings: ServiceSettings) -> None:
        """Take over when to publish, and the learning rate, from other settings of the same service."""
        self._schedule.settings = settings.publish
        if self._rate is not None and (rate := settings.learn.learner_settings.get("learning_rate")):
            self._rate.change(rate)

    def _make_model(self) -> Callable[[], AdaptiveLinearModel] | Callable[[], LinearModel]:
        learn = self._settings.learn
        given = {name: value for name, value in learn.learner_settings.items() if name not in _NOT_THE_OPTIMIZERS}
        if learn.learner == "default":
            task = "regression" if learn.kind == "regression" else None
            options = {name: value for name, value in learn.learner_settings.items() if name != "mini_batch"}
            # The classes of texts and of whole numbers are found as they come.
            options["task"] = "classification" if learn.kind == "multiclass" else task
            return lambda: AdaptiveLinearModel(**options)
        if self._rate is not None:
            given["learning_rate"] = self._rate
        kind = LinearRegression if learn.kind == "regression" else LogisticRegression
        optimizer: Optimizer = OPTIMIZERS[learn.learner](**given)
        width = self.features.width
        return lambda: kind(width, optimizer=optimizer)


_NOT_THE_OPTIMIZERS: Final = ("bits", "scales", "mini_batch")


@dataclass(frozen=True, slots=True)
class ChangeableRate(Constant):
    """A constant learning rate that its owner may change between two steps.

    >>> rate = ChangeableRate(0.5)
    >>> rate.change(0.1)
    >>> rate.at(7)
    0.1
    """

    def change(self, rate: float) -> None:
        """Learn with this rate from now on."""
        object.__setattr__(self, "initial", positive("learning_rate", rate))


def rejections_of(settings: InputSettings) -> dict[str, Any]:
    """Return the options of a step for records that it refuses."""
    if settings.dead_letter is None:
        return {"on_error": settings.on_error}
    return {"dead_letter": topic(settings.dead_letter)}


def decoder_of(name: str) -> Decoder:
    """Return the decoder ``json``, or that of ``module:name``: an object, or a class without arguments.

    Raises ConfigurationError for a module or a name that does not exist.
    """
    if name == "json":
        return Json()
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"input.decoder: expected a decoder as module:name, given {name!r}, which cannot be imported ({error}); "
            "add its folder to PYTHONPATH"
        ) from error
    decoder: Decoder = found() if isinstance(found, type) else found
    return decoder


# ---- labels


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
        at_ms = milliseconds_of(record[self._label.time])
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


# ---- publishing


class PublishSchedule:
    """When a version is published; the service may replace ``settings`` while the job runs."""

    def __init__(self, settings: PublishSettings) -> None:
        self.settings = settings


class PublishInTime(Operator):
    """Passes on the newest version when it is due. Parallelism 1.

    The first version is due at once. The ``loss`` of a version that is passed on is the mean over the records since the
    one before, and ``missing_values`` is their sum.
    """

    def __init__(self, schedule: PublishSchedule) -> None:
        self._schedule = schedule
        self._held: ModelSnapshot | None = None
        self._published_records: int | None = None
        """The records of the version that was passed on last; None before the first."""
        self._published_at_s = -math.inf
        self._records = 0
        """The records of the version that came last."""
        self._loss = 0.0
        """The sum of the losses since a version was passed on."""
        self._missing = 0.0
        self._has_timer = False

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, model: ModelSnapshot, out: Output) -> None:
        """Hold the version, or pass it on."""
        records = model.records or 0
        self._loss += model.metrics.get("loss", 0.0) * (records - self._records)
        self._missing += model.metrics.get("missing_values", 0.0)
        self._records, self._held = records, model
        self._publish_if_due(out)

    def on_timer(self, payload: object, out: Output) -> None:
        """Pass the version on that waited."""
        self._has_timer = False
        self._publish_if_due(out)

    def finish(self, out: Output) -> None:
        self._publish(out)

    def _publish_if_due(self, out: Output) -> None:
        settings = self._schedule.settings
        if settings.every_s is None:
            before = self._published_records
            if before is None or self._records - before >= (settings.records or 1):
                self._publish(out)
            return
        wait_s = self._published_at_s + settings.every_s - self._context.clock.monotonic_s()
        if wait_s <= _ROUNDING_S:
            self._publish(out)
        elif self._held is not None and not self._has_timer:
            self._context.set_timer(wait_s)
            self._has_timer = True

    def _publish(self, out: Output) -> None:
        if self._held is None:
            return
        held, since = self._held, self._records - (self._published_records or 0)
        metrics = dict(held.metrics)
        if "loss" in metrics and since:
            metrics["loss"] = self._loss / since
        if "missing_values" in metrics:
            metrics["missing_values"] = self._missing
        out.emit(msgspec.structs.replace(held, metrics=metrics))
        self._held, self._loss, self._missing = None, 0.0, 0.0
        self._published_records, self._published_at_s = self._records, self._context.clock.monotonic_s()

    def snapshot(self) -> dict[str, object]:
        return {
            "held": self._held,
            "records": self._records,
            "published records": self._published_records,
            "since published": (self._loss, self._missing),
            "timer": self._has_timer,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._held, self._records, self._published_records = state["held"], state["records"], state["published records"]
        self._loss, self._missing = state["since published"]
        self._has_timer = state["timer"]


# A timer counts as due when it is early by at most this: a rounding error of time plus delay must not delay it.
_ROUNDING_S: Final = 1e-6
