"""The operators that train a model in a flow: an owner of the parameters, and workers that compute gradients.

The owner of a linear model, a :class:`ParameterOwner`, also keeps the optimizer's state. Each *worker* has a copy of
the model: it receives parameters from the owner, computes the gradient of a mini-batch with them, and reports that
gradient. The owner makes a *step*: it applies a gradient to the model, publishes the model, and answers with the new
parameters. A :class:`StepRule` decides when the owner makes a step and which workers get an answer. Online and offline
training are loops of such an owner and such workers.

Models that need no loop, such as a scaler, learn in a single subtask: :class:`LearnMiniBatches`.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypedDict

import numpy.typing as npt

from streamiter.errors import GraphError, ModelError, shortened
from streamiter.flow.graph_checks import check_user_function
from streamiter.learn.gradients.gradient import Gradient
from streamiter.learn.gradients.linear import LEARNER, LinearModel
from streamiter.learn.model_owner import ModelOwner, OwnerOptions
from streamiter.learn.rows import blaming_rows, of_good_rows
from streamiter.models.update import ModelSnapshot
from streamiter.operators.declared_state import (
    COPIED,
    EVERY,
    FIRST,
    NESTED,
    SAME,
    DeclaredOperator,
    DeclaredState,
    Form,
    SharedOperator,
    declared,
)
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context, IterationListener
from streamiter.operators.output import Output
from streamiter.values.records import Batch, OutputTag

EPOCH_LOSSES: Final = OutputTag("losses")
"""The side output of an owner: for each step the mean loss before it."""

MakeModel = Callable[[], LinearModel]
"""Makes the model of a training. The owner and each worker call it once; all of them get equal models."""


def check_makes_model(owner: str, make_model: object) -> None:
    """Raise GraphError unless ``make_model`` is a function that makes a model; a model itself is refused, too."""
    if isinstance(make_model, LinearModel) or not callable(make_model):
        raise GraphError(
            f"{owner}: expected a function that makes the model, given {shortened(make_model)}; each worker needs "
            "a model of its own: write lambda: LogisticRegression(…)"
        )
    check_user_function(make_model, f"{owner}(model)", [])


# ---- the reports of workers


class WorkerReport(TypedDict):
    """The report of a worker to the owner: the fields of a :class:`GradientSum`, and what they were computed with."""

    gradient: dict[str, Any] | None
    loss: float
    worker: int
    """The number of the worker's subtask."""
    starts: int
    """How often a rollback had replaced the parameters of the gradient."""
    steps: int
    """How many steps the parameters of the gradient contain."""


@dataclass(slots=True)
class GradientSum:
    """The sum of some gradients, and the sum of the losses of their rows."""

    gradient: Gradient | None = None
    """None before the first gradient is added."""
    loss: float = 0.0

    def add(self, gradient: Gradient, loss: float) -> None:
        """Add the gradient and the loss of more rows."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        self.loss += loss

    @property
    def mean_loss(self) -> float | None:
        """The mean loss of the rows; None where the sum of their weights is 0."""
        if self.gradient is None or not self.gradient.weight:
            return None
        return self.loss / self.gradient.weight

    def to_record(self) -> dict[str, Any]:
        """Return the sums as plain data."""
        return {"gradient": self.gradient and self.gradient.to_record(), "loss": self.loss}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> GradientSum:
        """Return the sums in a record that :meth:`to_record` returned, or in a worker's report."""
        return cls(record["gradient"] and Gradient.from_record(record["gradient"]), record["loss"])


# ---- the owner


class StepRule(DeclaredState, abc.ABC):
    """Decides when the owner makes a step, and which workers get the new parameters.

    A rule is a plain data structure: it keeps the reports of the workers, and never reads the model.
    """

    needs_epochs: bool
    """Whether steps are made at the end of epochs."""

    @abc.abstractmethod
    def add(self, report: WorkerReport, epoch: int) -> GradientSum | None:
        """Add a report. Return the gradient of the step to make at once, None for no step."""

    def end_epoch(self, epoch: int) -> GradientSum | None:
        """Return the sums of a finished epoch; None if no worker reported in it, or if steps are made at once."""
        return None

    def rest(self) -> Iterator[GradientSum]:
        """Yield the sums of the epochs that were not finished when the iteration ended."""
        return iter(())

    def mean_loss(self, step: GradientSum) -> float | None:
        """The loss to report for a step."""
        return step.mean_loss

    @abc.abstractmethod
    def answer(self, worker: int | None, parameters: Callable[[], dict[str, Any]]) -> object | None:
        """Return the record that the owner emits after a step, None for no record.

        ``worker`` has reported the gradient of the step (None: several workers). ``parameters()`` copies the weights.
        """

    def lacks_examples(self) -> bool:
        """Whether training ends without rows although rows are required."""
        return False


def _of_each_worker(f: Callable[[Any], Any], epochs: dict[int, dict[int, Any]]) -> dict[int, dict[int, Any]]:
    return {epoch: {worker: f(sums) for worker, sums in workers.items()} for epoch, workers in epochs.items()}


class EpochSteps(StepRule):
    """One step for each epoch, with the gradients of all workers: synchronous training.

    The gradients are added in the order of the workers' numbers, not in the order of arrival. So the sum is the same
    to the last bit. All workers get parameters after each epoch in which a worker has reported, even if no worker had
    rows.
    """

    needs_epochs = True

    _epochs: dict[int, dict[int, GradientSum]] = declared(
        made=dict,
        form=Form(
            functools.partial(_of_each_worker, GradientSum.to_record),
            functools.partial(_of_each_worker, GradientSum.from_record),
        ),
    )
    """The sums of each worker, by epoch."""

    def add(self, report: WorkerReport, epoch: int) -> None:
        workers = self._epochs.setdefault(epoch, {})
        if report["gradient"] is not None:
            sums = workers.setdefault(report["worker"], GradientSum())
            sums.add(Gradient.from_record(report["gradient"]), report["loss"])

    def end_epoch(self, epoch: int) -> GradientSum | None:
        workers = self._epochs.pop(epoch, None)
        return None if workers is None else _total(workers)

    def rest(self) -> Iterator[GradientSum]:
        for epoch in sorted(self._epochs):
            if workers := self._epochs.pop(epoch):
                yield _total(workers)

    def answer(self, worker: int | None, parameters: Callable[[], dict[str, Any]]) -> object:
        return parameters()


class ReplySteps(StepRule):
    """A step for each gradient as it arrives; the answer goes to the worker that sent the gradient.

    The loss of a step is the mean over the last mini-batch of each worker. When the loss reaches the tolerance, the
    owner answers no worker any more, and the iteration ends.
    """

    needs_epochs = False

    _last: dict[int, tuple[float, float] | None] = declared(made=dict, form=COPIED)
    """The sums of losses and weights of each worker's last mini-batch; None for a worker without examples."""

    def __init__(self, workers: int, tolerance: float | None) -> None:
        self._workers = workers
        self._tolerance = tolerance

    def add(self, report: WorkerReport, epoch: int) -> GradientSum | None:
        sums = GradientSum.from_record(report)
        if sums.gradient is None:
            self._last[report["worker"]] = None
            return None
        self._last[report["worker"]] = (sums.loss, sums.gradient.weight)
        return sums

    def mean_loss(self, step: GradientSum) -> float | None:
        last = [sums for sums in self._last.values() if sums is not None]
        weight = sum(weight for _, weight in last)
        return sum(loss for loss, _ in last) / weight if weight else None

    def answer(self, worker: int | None, parameters: Callable[[], dict[str, Any]]) -> object | None:
        return None if self._is_good_enough() else {"worker": worker, "parameters": parameters()}

    def _is_good_enough(self) -> bool:
        if self._tolerance is None or len(self._last) < self._workers:
            return False
        mean_loss = self.mean_loss(GradientSum())
        return mean_loss is not None and mean_loss <= self._tolerance

    def lacks_examples(self) -> bool:
        return not any(self._last.values())


# While one gradient of a worker is under way, it computes the next. n workers with k gradients under way make steps
# about n k - 1 late. With twelve gradients in all, two workers in processes of their own wait less for answers than
# with six: a process answers between two batches that it reads from Kafka. A worker that is alone is in the process of
# the owner.
_GRADIENTS_OF_ALL: Final = 12
_GRADIENTS_OF_ONE_WORKER_ALONE: Final = 6
_LEAST_GRADIENTS_OF_A_WORKER: Final = 2

# Gradient descent converges for rates below 2 (over the curvature) if no step is late, below 0.29 if each is five steps
# late, and below 0.1 if each is fifteen. So the model oscillates if late gradients move it as far as punctual ones.
_STEPS_LATE_IN_FULL: Final = 5


def gradients_under_way(workers: int) -> int:
    """Return how many gradients of each worker may be under way.

    >>> [gradients_under_way(workers) for workers in (1, 2, 3, 8)]
    [6, 6, 4, 2]
    """
    if workers == 1:
        return _GRADIENTS_OF_ONE_WORKER_ALONE
    return max(_LEAST_GRADIENTS_OF_A_WORKER, _GRADIENTS_OF_ALL // workers)


class BroadcastSteps(StepRule):
    """A step for each gradient as it arrives; the answer goes to all workers.

    The owner answers once for each round of gradients: one gradient of every worker. If it answered each gradient,
    every worker would receive as many answers as there are workers, more than it reads while it computes one gradient.
    The owner does not wait for a worker that is silent while another worker sends two.
    An answer says how many gradients of each worker it contains that no earlier answer contained, and how many steps.
    A gradient that is more than five steps late is divided by its lateness over five, as the learning rate is in
    staleness-aware SGD (Zhang, Gupta, Lian and Liu, 2016).
    """

    needs_epochs = False

    _steps = declared(0)
    _active: dict[int, None] = declared(made=dict, form=COPIED)
    """The workers to wait for before the next answer."""
    _received: dict[int, int] = declared(made=dict, form=COPIED)
    """How many gradients each worker has sent since the last answer."""

    def add(self, report: WorkerReport, epoch: int) -> GradientSum:
        sums = GradientSum.from_record(report)
        steps_late = self._steps - report["steps"]
        self._steps += 1
        if sums.gradient is not None and steps_late > _STEPS_LATE_IN_FULL:
            sums.gradient = sums.gradient.scaled(_STEPS_LATE_IN_FULL / steps_late)
        return sums

    def answer(self, worker: int | None, parameters: Callable[[], dict[str, Any]]) -> object | None:
        assert worker is not None
        self._active[worker] = None
        self._received[worker] = received = self._received.get(worker, 0) + 1
        if received >= _LEAST_GRADIENTS_OF_A_WORKER:
            self._active = dict.fromkeys(self._received)
        if len(self._received) < len(self._active):
            return None
        contained, self._received = self._received, {}
        return parameters() | {"contained": contained, "steps": self._steps}


def _total(workers: dict[int, GradientSum]) -> GradientSum:
    in_order = [workers[worker] for worker in sorted(workers)]
    gradients = [sums.gradient for sums in in_order if sums.gradient is not None]
    total = functools.reduce(operator.add, gradients) if gradients else None
    return GradientSum(total, sum(sums.loss for sums in in_order))


def _no_examples() -> ModelError:
    """Return the error for an offline training without rows."""
    return ModelError("train_offline: expected examples to learn from, given none; check the input")


class ParameterOwner(ModelOwner):
    """Keeps the model with the optimizer's state: makes steps, answers the workers.

    Input ``gradients`` carries the workers' reports. Later records of the input ``start`` are the owner's own answers.
    The ``loss`` of a version is the mean loss of all rows since the last version.

    ``is_offline``: the reports are the only input, and the ``loss`` is the mean loss before the last step.
    """

    learner = LEARNER

    _model: LinearModel = declared(form=NESTED)
    _rule: StepRule = declared(form=NESTED)
    _starts = declared(0)
    """How often a rollback has replaced the parameters."""

    def __init__(
        self, make_model: MakeModel, rule: StepRule, options: OwnerOptions, *, is_offline: bool = False
    ) -> None:
        super().__init__(options)
        self._is_started = self._is_offline = is_offline
        self._model = make_model()
        self._rule = rule
        self.needs_epochs = self.any_order = rule.needs_epochs  # Such a rule adds by worker, at the end of the epoch.

    def definition(self) -> Definition:
        return {**super().definition(), **self._model.definition()}

    def start_from(self, parameters: Any, records: int) -> None:
        self._model.start_from(parameters)
        if not self._model.records:
            self._model.count(records)

    def state(self) -> dict[str, object]:
        return {"model": self._model.learned()}

    def process(self, report: WorkerReport, out: Output) -> None:
        """Add a worker's report to the rule, and make the step that the rule returns.

        A gradient is left out if a rollback has replaced its parameters since.
        """
        if report["starts"] != self._starts:
            report = {**report, "gradient": None, "loss": 0.0}
        step = self._rule.add(report, self._context.epoch or 0)
        if step is not None:
            self._step_and_answer(step, report["worker"], out)

    # With late labels, the reports are one of several inputs.
    process_gradients = process

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        step = self._rule.end_epoch(epoch_watermark)
        if step is not None:
            if self._is_offline and step.gradient is None:
                raise _no_examples()
            self._step_and_answer(step, None, out)

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        for step in self._rule.rest():
            self._step(step, out)

    def _step_and_answer(self, step: GradientSum, worker: int | None, out: Output) -> None:
        self._step(step, out)
        if (loss := self._rule.mean_loss(step)) is not None:
            out.emit(loss, tag=EPOCH_LOSSES)
        if (answer := self._rule.answer(worker, lambda: self.parameters() | {"starts": self._starts})) is not None:
            out.emit(answer)

    def _step(self, step: GradientSum, out: Output) -> None:
        if self.take_over_rollback():
            self._starts += 1
            return  # The gradient belongs to the earlier parameters; the answer brings the new ones.
        if step.gradient is None:
            return
        self._model.apply(step.gradient)
        if step.gradient.weight:
            if self._is_offline:
                self._loss = self._weight = 0.0
            self._loss += step.loss
            self._weight += step.gradient.weight
            self.count_step(out)

    def finish(self, out: Output) -> None:
        if self._rule.lacks_examples():
            raise _no_examples()
        super().finish(out)


# ---- the workers


_FOLLOWING: Final = Form(
    lambda model: model.parameters(state=False), take_on=lambda model, parameters: model.follow(parameters)
)
"""The form of a model without the optimizer's state."""


class GradientWorker(SharedOperator, IterationListener):
    """The base of all workers: a copy of the model, which follows the model of the owner.

    Input ``model`` carries parameters, input ``examples`` carries the rows to learn from. With ``in_epochs`` the worker
    handles one epoch after the other, and reads the examples of an epoch when the parameters of that epoch have
    arrived.
    """

    _model: LinearModel = declared(form=_FOLLOWING, share=FIRST)
    _epoch = declared(0, share=SAME)
    """The epoch whose examples are read now; 0 if the worker does not count epochs."""
    _model_epoch = declared(-1, share=SAME)
    """The epoch of the newest parameters; -1 before the first."""
    _examples_ended = declared(False, share=EVERY)
    _starts = declared(0, share=FIRST)
    """How often a rollback had replaced the parameters that the worker has."""
    _steps = declared(0, share=FIRST)
    """How many steps these parameters contain, as the owner has said."""

    def __init__(self, make_model: MakeModel, *, in_epochs: bool) -> None:
        self._model = make_model()
        self._in_epochs = self.epochs_in_order = self.needs_epochs = in_epochs

    def definition(self) -> Definition:
        return {**super().definition(), **self._model.definition()}

    def open(self, context: Context) -> None:
        self._context = context

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Read the parameters of the epoch first, then both inputs."""
        return ("model",) if self._model_epoch < self._epoch else None

    def follow(self, given: ModelSnapshot | Mapping[str, Any] | npt.ArrayLike | None) -> None:
        """Continue with these parameters; None keeps the initial model."""
        parameters = given.parameters if isinstance(given, ModelSnapshot) else given
        if parameters is not None:
            self._model.follow(parameters)
            known = parameters if isinstance(parameters, Mapping) else {}
            self._starts, self._steps = known.get("starts", 0), known.get("steps", 0)
        self._model_epoch = self._context.epoch or 0

    def input_ended(self, name: str, out: Output) -> None:
        """Note that there are no more examples."""
        self._examples_ended = self._examples_ended or name == "examples"

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if self._in_epochs:
            self._epoch = epoch_watermark + 1

    def report(self, sums: GradientSum, out: Output) -> None:
        """Send the sums to the owner, also if they are empty: the owner waits for a report."""
        known = {"worker": self._context.subtask_index, "starts": self._starts, "steps": self._steps}
        out.emit(known | sums.to_record())

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        """Keep the parameters, which are from the last step: no others come before the first examples."""
        return {**state, "epoch": 0, "model epoch": min(state["model epoch"], 0), "examples ended": False}

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give all new workers the parameters of an old worker that knows the last rollback."""
        chosen = max(states, key=lambda state: state["starts"])
        parameters = {entry: chosen[entry] for entry in ("model", "starts", "steps")}
        return [share | parameters for share in super().redistribute(states, parallelism)]


# ---- models that learn in one subtask


class _MiniBatchModel(Protocol):
    """A model that learns from mini-batches of rows, such as ``OnlineKMeans`` or ``StandardScaler``."""

    def check(self, rows: Any, /) -> object:
        """Raise ModelError for rows that the model cannot learn from."""

    def learn(self, rows: Any, /) -> None:
        """Learn from the rows."""

    def to_update(self) -> ModelSnapshot:
        """Return the model to publish."""

    def definition(self) -> Definition:
        """Return the settings on which the meaning of the state depends."""

    def state(self) -> dict[str, object]:
        """Return the state of learning, as plain data."""

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Restore a state that :meth:`state` returned."""


class LearnMiniBatches(DeclaredOperator):
    """Learns from each mini-batch and emits the model. Rows that the model refuses follow the step's policy."""

    _model: _MiniBatchModel = declared(form=NESTED)

    def __init__(self, model: _MiniBatchModel) -> None:
        self._model = model

    def process(self, mini_batch: Batch, out: Output) -> None:
        """Learn from the good rows of a mini-batch; emit nothing if no row is left."""
        update = of_good_rows(lambda rows: blaming_rows(self._learned, rows, self._model.check), mini_batch, out)
        if update is not None:
            out.emit(update)

    def definition(self) -> Definition:
        return {"kind": "training", **self._model.definition()}

    def _learned(self, mini_batch: Batch) -> ModelSnapshot:
        self._model.learn(mini_batch)
        return self._model.to_update()
