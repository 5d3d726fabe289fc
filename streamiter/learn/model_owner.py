"""The owner of a model: it has the model of a training, in one subtask, and publishes versions of it.

:class:`ModelOwner` is the base of all owners; a :class:`PublishSchedule` says when a version is published.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from streamiter.errors import ConfigurationError
from streamiter.learn.quality.drift import DriftDetector, DriftWatch
from streamiter.learn.quality.field_watch import FieldWatch
from streamiter.learn.quality.validation import PREDICTIONS, PredictedRows
from streamiter.models.documents import state_in, with_state
from streamiter.models.rollbacks import Rollbacks, RollbackWatch, since_rollback
from streamiter.models.update import ModelSnapshot, ModelUpdate
from streamiter.operators.declared_state import NESTED, DeclaredOperator, Form, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context, IterationListener
from streamiter.operators.output import Output
from streamiter.values.helpers.clock import is_due
from streamiter.values.numbers import positive, whole_number
from streamiter.values.records import OutputTag
from streamiter.values.times import Seconds, in_seconds

MODELS: Final = OutputTag("models")
"""The side output of an owner: a ``ModelSnapshot`` for each version (or each n-th)."""


class PublishSchedule:
    """When a training publishes a version, for ``train_online(publish_every=)``.

    Give one of these: after this many ``mini_batches`` (or epochs), or with the first mini-batch and then after this
    many ``records`` or seconds (``every_s``), at least. The job that reads the schedule may run while it is changed, in
    the same process. The last version is published in every case.

    >>> schedule = PublishSchedule(every_s=10.0)
    >>> schedule.change(records=1_000)
    >>> schedule.every_s, schedule.records
    (None, 1000)
    """

    def __init__(
        self, *, mini_batches: int | None = None, records: int | None = None, every_s: Seconds | None = None
    ) -> None:
        self.change(mini_batches=mini_batches, records=records, every_s=every_s)

    def change(
        self, *, mini_batches: int | None = None, records: int | None = None, every_s: Seconds | None = None
    ) -> None:
        """Publish in this way from the next mini-batch on. Raises ConfigurationError for two ways, and for 0."""
        options = {"mini_batches=": mini_batches, "records=": records, "every_s=": every_s}
        given = [option for option, value in options.items() if value is not None]
        if len(given) > 1:
            raise ConfigurationError(f"PublishSchedule: expected one option, given {' and '.join(given)}; choose one")
        self.mini_batches = (
            None if mini_batches is None else whole_number("PublishSchedule(mini_batches=)", mini_batches, 1)
        )
        self.records = None if records is None else whole_number("PublishSchedule(records=)", records, 1)
        self.every_s = None if every_s is None else positive("PublishSchedule(every_s=)", in_seconds(every_s))


@dataclass(frozen=True, slots=True)
class OwnerOptions:
    """The options that all owners share."""

    schedule: PublishSchedule = field(default_factory=PublishSchedule)
    in_epochs: bool = False
    drift: DriftDetector | None = None
    watch: FieldWatch | None = None
    raises_rates: bool = False
    """Whether a drift raises the rates of the model."""
    rollbacks: Rollbacks | None = None
    publishes_state: bool = False
    """Whether versions carry the state of the learner."""
    label: str = ""
    """A text that says what is learned."""


class ModelOwner(DeclaredOperator, IterationListener, abc.ABC):
    """The base of all owners: has the model, resumes from rollbacks, publishes versions. Parallelism 1.

    Input ``start`` brings the one record to start from: None, the parameters of a model, or a ``ModelSnapshot``; later
    records of it do not count. A subclass learns from its other input, and calls :meth:`count_step` when it has.
    """

    learner: ClassVar[str]
    """The name of the learner whose state versions carry."""

    _model: Any
    """The model, which a subclass makes."""
    _is_started = declared(False)
    _has_published = declared(False)
    """Whether a version was published, or a rollback taken over; the first one does not wait."""
    _steps = declared(0)
    """The number of steps, mini-batches or epochs since a version was published."""
    _records_published = declared(0)
    """The records that this version, or the start, had learned from."""
    _has_timer = declared(False)
    _loss = declared(0.0)
    """The sum of the losses of the rows since a version was published."""
    _weight = declared(0.0)
    """The sum of their weights."""
    _drift: DriftWatch | None = declared(form=NESTED)
    _rollbacks: RollbackWatch = declared(form=Form(lambda watch: watch.taken))

    def __init__(self, options: OwnerOptions) -> None:
        self._schedule = options.schedule
        self._rollbacks = RollbackWatch(options.rollbacks)
        self._drift = None if options.drift is None else DriftWatch(options.drift)
        self._publishes_state = options.publishes_state
        self._published_at_s = -math.inf
        self._published_in_s = 0.0
        self._learns = {"mode": "synchronous" if options.in_epochs else "asynchronous", "label": options.label}

    async def open(self, context: Context) -> None:
        self._context = context
        self._published_at_s = context.clock.monotonic_s()
        await self._rollbacks.open(context.clock)

    async def close(self) -> None:
        await self._rollbacks.close()

    @abc.abstractmethod
    def start_from(self, parameters: Any, records: int) -> None:
        """Start from a published model: from the state that its parameters carry, or else with new learning rates.

        ``records`` is how many records it has learned from, where no state says it.
        """

    def records(self) -> int:
        """Return the number of records that the model has learned from."""
        records: int = self._model.records
        return records

    def parameters(self) -> Any:
        """Return the parameters to publish, without a state."""
        return self._model.parameters(state=False)

    @abc.abstractmethod
    def state(self) -> dict[str, object]:
        """Return the state of the learner, as plain data, from which :meth:`start_from` continues exactly."""

    def metrics(self, parameters: Any) -> dict[str, float]:
        """Return the metrics of a version with these parameters, which is published now."""
        metrics = {} if self._drift is None else self._drift.metrics()
        return metrics | ({"loss": self._loss / self._weight} if self._weight else {})

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Read the start before any rows."""
        return None if self._is_started else ("start",)

    def process_start(self, parameters: Any, out: Output) -> None:
        """Start from these parameters, or as the model was made."""
        if not self._is_started:
            self._is_started = True
            if parameters is not None:
                self._resume(parameters if isinstance(parameters, ModelSnapshot) else ModelSnapshot(parameters))
                self._records_published = self.records()

    def take_over_rollback(self) -> bool:
        """Start from a rollback that was not taken over yet; return whether there is one."""
        return self._rollbacks.take_over(self._start_again)

    def _start_again(self, update: ModelUpdate) -> None:
        self._resume(ModelSnapshot(update.parameters, update.records))
        self.begin_version()

    def _resume(self, given: ModelSnapshot) -> None:
        self.start_from(given.parameters, given.records or 0)
        state = state_in(given.parameters, self.learner, f"{self.learner}.start_from")
        if self._drift is not None and state is not None:
            self._drift.restore(state["drift"])

    def emit_predictions(self, rows: PredictedRows, out: Output) -> bool:
        """Emit predictions that were made before learning, and their drifts; return whether there are drifts."""
        out.emit(rows, tag=PREDICTIONS)
        return self._drift is not None and self._drift.tell(rows, out)

    def count_step(self, out: Output) -> None:
        """Count a step, a mini-batch or an epoch, and publish a version if it is due."""
        self._steps += 1
        self._publish_if_due(out)

    def on_timer(self, payload: object, out: Output) -> None:
        """Publish the version that waited."""
        self._has_timer = False
        self._publish_if_due(out)

    def _publish_if_due(self, out: Output) -> None:
        if is_due(wait_s := self.due_in_s()):
            self._publish(out)
        elif math.isfinite(wait_s) and not self._has_timer and self.is_new():
            self._context.set_timer(wait_s)
            self._has_timer = True

    def due_in_s(self) -> float:
        """Return in how many seconds a version is due; infinity: not before there are more rows."""
        schedule = self._schedule
        if schedule.every_s is not None:
            return self.seconds_left(schedule.every_s) if self._has_published else 0.0
        if schedule.records is None:
            is_due = self._steps >= (schedule.mini_batches or 1)
        else:
            is_due = not self._has_published or self.records() - self._records_published >= schedule.records
        return 0.0 if is_due else math.inf

    def seconds_left(self, every_s: float) -> float:
        """Return in how many seconds ``every_s`` have passed since a version was published, or the job began."""
        return self._published_at_s + every_s - self._context.clock.monotonic_s()

    def is_new(self) -> bool:
        """Whether the model has learned since a version was published."""
        return self.records() > self._records_published

    def _publish(self, out: Output) -> None:
        if not self.is_new():
            return
        began_s = self._context.clock.monotonic_s()
        parameters = self.parameters()
        metrics = self.metrics(parameters)
        if self._publishes_state:
            drift = None if self._drift is None else self._drift.state()
            parameters = with_state(parameters, self.learner, self.state() | {"drift": drift})
        version = ModelSnapshot(parameters, self.records(), metrics, self._context.epoch, self._rollbacks.taken)
        out.emit(version, tag=MODELS)
        self.begin_version()
        self._published_at_s = self._context.clock.monotonic_s()
        self._published_in_s = self._published_at_s - began_s

    def begin_version(self) -> None:
        """Count the steps, records and losses from here on for the next version."""
        self._steps, self._records_published, self._has_published = 0, self.records(), True
        self._loss = self._weight = 0.0

    def finish(self, out: Output) -> None:
        self._publish(out)

    def definition(self) -> Definition:
        return {"kind": "training", "learner": self.learner, **self._learns}

    def snapshot(self) -> dict[str, Any]:
        # Whole microseconds: the clock begins anew after a restart, and the same difference would have other last bits.
        ago_s = round(-self.seconds_left(0.0), 6) if self._published_at_s > -math.inf else None
        return super().snapshot() | {"published ago": ago_s}

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "has timer": False}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if (ago_s := state["published ago"]) is not None:
            self._published_at_s = self._context.clock.monotonic_s() - ago_s


class OneStart(DeclaredOperator):
    """Passes on the one record that training starts from, and refuses any other number of records.

    A rollback of the model replaces it: the newest version since then.
    """

    _passed = declared(0)

    def __init__(self, rollbacks: Rollbacks | None = None, owner: str = "train_online") -> None:
        self._rollbacks = rollbacks
        self._owner = owner

    def open(self, context: Context) -> None:
        self._context = context

    async def process(self, parameters: Any, out: Output) -> None:
        """Refuse a second record: the owner and the workers would start from different parameters."""
        self._passed += 1
        if self._passed > 1:
            raise ConfigurationError(
                f"{self._owner}(initial=): expected a stream of one record, given a second; choose the one to start "
                "from"
            )
        found = None if self._rollbacks is None else await since_rollback(self._rollbacks, self._context)
        out.emit(parameters if found is None else found)

    def finish(self, out: Output) -> None:
        if not self._passed:
            raise ConfigurationError(
                f"{self._owner}(initial=): expected a stream of one record, given none; to start with the model's own "
                "parameters, give the record None"
            )
