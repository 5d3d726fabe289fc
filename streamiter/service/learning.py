"""From the settings to a training: labels that come in time, the learner, and when versions are published.

``ServiceLearning`` adds the training to the flow of a service, and makes the predictors of its versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from streamiter.flow.stream import Stream
from streamiter.importing import imported
from streamiter.learn import (
    ADWIN,
    AdaptiveLinearModel,
    LinearModel,
    LinearRegression,
    LogisticRegression,
    OnlineTraining,
    PageHinkley,
    train_online,
)
from streamiter.models import ModelSnapshot, Parameters, Rollbacks
from streamiter.numbers import positive
from streamiter.operators import Context, Operator, Output
from streamiter.optimizers import Constant, Optimizer
from streamiter.service.features import FeatureRows, FieldPredictor
from streamiter.service.labels import MatchAnswers, delayed_labels_of, label_of
from streamiter.service.settings import InputSettings, LearnSettings, PublishSettings, ServiceSettings
from streamiter.service.settings_file import OPTIMIZERS
from streamiter.topics import Decoder, Json, topic

# Each report is a point of the page's charts.
_REPORT_EVERY_S: Final = 1.0


class ServiceLearning:
    """The training that the settings describe; :meth:`apply` changes its settings that may change while it runs."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self.features = FeatureRows(settings.learn)
        """Reads the rows of the training and of predictions."""
        self._schedule = PublishSchedule(settings.publish)
        rate = _learning_rate(settings.learn)
        self._rate = None if rate is None else ChangeableRate(rate)

    def train(self, events: Stream, rollbacks: Rollbacks | None = None) -> OnlineTraining:
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
            rollbacks=rollbacks,
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
        if self._rate is not None and (rate := _learning_rate(settings.learn)) is not None:
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


def _learning_rate(settings: LearnSettings) -> float | None:
    """Return the learning rate of the settings, or else of the optimizer; None for a learner without one."""
    default: float | None = getattr(OPTIMIZERS.get(settings.learner), "learning_rate", None)
    rate: float | None = settings.learner_settings.get("learning_rate", default)
    return rate


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


def decoder_of(name: str) -> Decoder | None:
    """Return the decoder ``json``, or that of ``module:name``: an object, or a class without arguments.

    None for ``default``: the topic chooses. Raises ConfigurationError for a module or a name that does not exist.
    """
    if name in ("default", "json"):
        return Json() if name == "json" else None
    found = imported(name, "input.decoder", "a decoder")
    decoder: Decoder = found() if isinstance(found, type) else found
    return decoder


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
        if records < self._records:  # The training resumed from an earlier version.
            self._records = self._published_records = records - 1
            self._loss = self._missing = 0.0
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
            "published ago": self._context.clock.monotonic_s() - self._published_at_s,
            "since published": (self._loss, self._missing),
            "timer": self._has_timer,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._held, self._records, self._published_records = state["held"], state["records"], state["published records"]
        self._loss, self._missing = state["since published"]
        self._published_at_s = self._context.clock.monotonic_s() - state["published ago"]
        self._has_timer = state["timer"]


# A timer counts as due when it is early by at most this: a rounding error of time plus delay must not delay it.
_ROUNDING_S: Final = 1e-6
