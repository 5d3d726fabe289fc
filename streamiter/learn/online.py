"""Online training of linear models: an unbounded iteration of workers and an owner."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.api import iterate_unbounded_streams
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.stamping import epochs_every
from streamiter.learn.linear import (
    MODELS,
    EpochGradients,
    LinearModel,
    LogLoss,
    ParameterOwner,
    check_makes_model,
)
from streamiter.learn.linear_weights import Gradient
from streamiter.learn.rows import (
    BadRows,
    Examples,
    Extract,
    as_examples,
    blaming_rows,
    checked_rows,
    of_good_rows,
    row_weights,
    without,
)
from streamiter.learn.validation import Validate
from streamiter.numbers import Floats, whole_number
from streamiter.operators.operator import Context, IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.records import Batch, OutputTag
from streamiter.sparse_rows import SparseRows
from streamiter.topics.topic import Topic

__all__ = [
    "AsynchronousOwner",
    "DelayedGradientWorker",
    "DelayedLabels",
    "GradientWorker",
    "OnlineTraining",
    "OnlineWorkerOptions",
    "SynchronousOwner",
    "train_online",
]


# Where all run in one process a model is one or two mini-batches old. While a job is suspended its model does not
# come at all, and a worker that went on through all that had been read would lead the model astray.
MINI_BATCHES_WITH_ONE_MODEL: Final = 8

PREDICTIONS: Final = OutputTag("predictions")
"""The side output of a worker: predictions made before learning, with targets and weights (dicts of arrays)."""


class OnlineWorkerOptions(NamedTuple):
    """What every worker of one training is given."""

    make_model: Callable[[], LinearModel]
    extract: Extract
    synchronous: bool


class GradientWorker(Operator, IterationListener):
    """Makes the gradient of each mini-batch with the parameters it has.

    It begins when the first parameters have come. Asynchronous, it goes on meanwhile with those it has, for
    eight mini-batches at most; synchronous, it takes epoch after epoch, and begins the examples of each when
    the parameters of that epoch are there.

    Workers: from parameters and mini-batches to gradients, predicting before they learn.
    """

    def __init__(self, options: OnlineWorkerOptions) -> None:
        self._extract = options.extract
        self._synchronous = options.synchronous
        self.epochs_in_order = self.needs_epochs = options.synchronous
        self._model = options.make_model()
        self._needed_epoch = 0
        self._model_epoch = -1
        self._reported_epoch = -1
        self._gradients_since_model = 0
        self._examples_ended = False

    def open(self, context: Context) -> None:
        self._context = context

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Parameters first; then both, or what is next in turn."""
        waits = self._model_epoch < self._needed_epoch or (
            not self._synchronous and self._gradients_since_model >= MINI_BATCHES_WITH_ONE_MODEL
        )
        return ("model",) if waits else None

    def process_model(self, parameters: Any, out: Output) -> None:
        """Go on with these parameters."""
        if parameters is not None:  # None: begin as the model was made.
            self._model.follow(parameters)
        self._model_epoch = self._context.epoch or 0
        self._gradients_since_model = 0

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        """Report also where there was nothing to learn, as long as there are examples to come.

        All workers wait for the parameters of the next epoch, and the owner sends them when it has heard
        of one; when nobody has anything to say any more the iteration ends.
        """
        if self._synchronous:
            self._needed_epoch = epoch_watermark + 1
            if self._reported_epoch < epoch_watermark and not self._examples_ended:
                out.emit({"worker": context.subtask_index, "gradient": None, "loss": 0.0})

    def input_ended(self, name: str, out: Output) -> None:
        """No report is owed any more when the examples have ended."""
        self._examples_ended = self._examples_ended or name == "examples"

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict, then make the gradient."""

        def learn(rows: Batch) -> None:
            self._learn(blaming_rows(self._extracted, rows, self._check_alone), out)

        of_good_rows(learn, mini_batch, out)

    def _extracted(self, rows: Batch) -> Examples:
        return as_examples("train_online(extract=)", self._extract(rows))

    def _check_alone(self, row: Batch) -> None:
        checked_rows("train", self._extracted(row).features, self._model.width)

    def _learn(self, examples: Examples, out: Output) -> None:
        predictions = self._model.predict(examples.features)
        self.emit_gradient(examples, predictions, out)

    def emit_gradient(self, examples: Examples, predictions: Floats, out: Output) -> None:
        """The gradient of these examples, and what was predicted for them before."""
        gradient = self._model.gradient(examples.features, examples.targets, examples.weights)
        targets = self._model.checked_targets(examples.targets, len(predictions))
        given = np.ones(len(targets)) if examples.weights is None else examples.weights
        weights = row_weights("train", given, len(targets))
        loss = float((self._model.loss.values(predictions, targets) * weights).sum())
        self._reported_epoch = self._context.epoch or 0
        self._gradients_since_model += 1
        out.emit({"worker": self._context.subtask_index, "gradient": gradient.to_record(), "loss": loss})
        out.emit({"predictions": predictions, "targets": targets, "weights": weights}, tag=PREDICTIONS)

    def snapshot(self) -> dict[str, Any]:
        return {
            "parameters": self._model.parameters(),
            "needed epoch": self._needed_epoch,
            "model epoch": self._model_epoch,
            "reported epoch": self._reported_epoch,
            "gradients since model": self._gradients_since_model,
            "examples ended": self._examples_ended,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._model.follow(state["parameters"])
        self._needed_epoch = state["needed epoch"]
        self._model_epoch = state["model epoch"]
        self._reported_epoch = state["reported epoch"]
        self._gradients_since_model = state["gradients since model"]
        self._examples_ended = state["examples ended"]


# Indices and values, as lists: some eight features in numpy arrays of their own would take ten times as long.
_Row = tuple[list[int], list[float]]
_Answered = tuple[Any, _Row, float, float]
"""The answer, the features and prediction of its question, the target."""


@dataclass(frozen=True, slots=True)
class DelayedLabels:
    """How questions and answers are told apart in one stream of events, in time order.

    ``key_of(event)`` is what an answer shares with its question (int, str, bytes or a tuple of these);
    ``is_answer(event)`` tells which it is;
    ``features(questions)`` gives the rows of a list of questions; ``target_of(answer)`` the target, None
    where there will never be one (the question is forgotten). At most ``waiting_max`` questions wait at each
    worker; the oldest is forgotten beyond that.

    Labels that come later than the question: predict now, learn when the answer is known.
    """

    key_of: Callable[[Any], Hashable]
    is_answer: Callable[[Any], bool]
    features: Callable[[Sequence[Any]], SparseRows]
    target_of: Callable[[Any], float | None]
    waiting_max: int = 1_000_000


class DelayedGradientWorker(GradientWorker):
    """Predicts each question with the parameters of its time, and learns from it when its answer comes.

    What is validated is that first prediction.
    """

    def __init__(self, options: OnlineWorkerOptions, labels: DelayedLabels) -> None:
        super().__init__(options)
        self._labels = labels
        self._waiting: dict[Hashable, tuple[_Row, float]] = {}

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict all questions, then go through the events in order; learn from the answers together."""
        asked = self._ask([event for event in mini_batch if not self._labels.is_answer(event)], out)
        answered: list[_Answered] = []
        for event in mini_batch:
            if not self._labels.is_answer(event):
                question = next(asked)
                if question is not None:
                    self._wait(event, *question)
            elif (answer := self._answered(event, out)) is not None:
                answered.append(answer)
        self._learn_from(answered, out)

    def _ask(self, questions: list[Any], out: Output) -> Iterator[tuple[_Row, float] | None]:
        """Features and prediction of each question, None for one that has no features."""
        if not questions:
            return iter(())
        try:
            rows, predictions = blaming_rows(self._predicted, questions, self._labels.features)
        except BadRows as bad:
            good = iter(self._ask(list(without(questions, bad, out)), out))
            return iter([None if row in bad.rows else next(good) for row in range(len(questions))])
        return zip(rows.rows(), predictions, strict=True)

    def _predicted(self, questions: Sequence[Any]) -> tuple[SparseRows, list[float]]:
        rows = self._labels.features(questions)
        return rows, self._model.predict(rows).tolist()

    def _wait(self, question: Any, row: _Row, prediction: float) -> None:
        key = self._labels.key_of(question)
        self._waiting.pop(key, None)  # Asked again it is the youngest.
        self._waiting[key] = (row, prediction)
        if len(self._waiting) > self._labels.waiting_max:
            del self._waiting[next(iter(self._waiting))]

    def _answered(self, answer: Any, out: Output) -> _Answered | None:
        waiting = self._waiting.pop(self._labels.key_of(answer), None)
        if waiting is None:
            out.reject(answer, ModelError("an answer without a question that waits for it"))
            return None
        try:
            target = self._labels.target_of(answer)
            return None if target is None else (answer, *waiting, float(target))
        except Exception as error:
            out.reject(answer, error)
            return None

    def _learn_from(self, answered: list[_Answered], out: Output) -> None:
        while answered:
            events, rows, predictions, targets = zip(*answered, strict=True)
            try:
                examples = Examples(SparseRows.from_rows(rows, self._model.width), np.array(targets))
                self.emit_gradient(examples, np.array(predictions), out)
            except BadRows as bad:
                without(list(events), bad, out)
                answered = [entry for row, entry in enumerate(answered) if row not in bad.rows]
            else:
                return

    def snapshot(self) -> dict[str, Any]:
        waiting = [(key, *row, prediction) for key, (row, prediction) in self._waiting.items()]
        return super().snapshot() | {"waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._waiting = {
            key: ((indices, values), prediction) for key, indices, values, prediction in state["waiting"]
        }


# Half of the mini-batches that a worker makes without an answer: none ever waits for one.
_GRADIENTS_WITHOUT_ANSWER: Final = MINI_BATCHES_WITH_ONE_MODEL // 2


class _StartedOwner(ParameterOwner):
    """One that is told where to begin.

    Input ``start``: the variable stream, of which only the initial record counts (None, bare weights or a
    model's parameters); the others are the owner's own, on their way round. Input ``gradients``: what the
    workers make.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._started = False

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Nothing can be learned before it is known what from."""
        return None if self._started else ("start",)

    def process_start(self, parameters: Any, out: Output) -> None:
        """Take over the initial parameters."""
        if not self._started:
            self._started = True
            if parameters is not None:
                self._model.start_from(parameters)

    def process_gradients(self, record: dict[str, Any], out: Output) -> None:
        """Take in a gradient of a worker, with the sum of its rows' losses."""
        raise NotImplementedError

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"started": self._started}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._started = state["started"]


class AsynchronousOwner(_StartedOwner):
    """A step for each gradient, as it comes.

    The parameters go to all workers, once for a gradient of each: an answer to every gradient would be as
    many for every worker as there are workers, more than it takes in while it makes one. A worker that is
    silent while another makes four is not waited for.

    Owners of the parameters in online training: told where to begin, they answer with parameters.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._active: dict[int, None] = {}
        self._heard: dict[int, int] = {}
        """Gradients of each worker since the last answer."""

    def process_gradients(self, record: dict[str, Any], out: Output) -> None:
        self.step(Gradient.from_record(record["gradient"]), record["loss"], out)
        worker = record["worker"]
        self._active[worker] = None
        self._heard[worker] = heard = self._heard.get(worker, 0) + 1
        if heard >= _GRADIENTS_WITHOUT_ANSWER:
            self._active = dict.fromkeys(self._heard)
        if len(self._heard) == len(self._active):
            self._heard.clear()
            out.emit(self._model.parameters())

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"active": list(self._active), "heard": self._heard.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._active, self._heard = dict.fromkeys(state["active"]), dict(state["heard"])


class SynchronousOwner(_StartedOwner, IterationListener):
    """A step for each epoch, with the gradients of all workers together.

    They are added in the workers' order, not in that of their arrival, so the sum is the same to the last
    bit. Parameters go out for every epoch that a worker has reported, if only that it had nothing to learn.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._epochs: dict[int, EpochGradients] = {}

    def process_gradients(self, record: dict[str, Any], out: Output) -> None:
        epoch = self._epochs.setdefault(self._context.epoch or 0, EpochGradients())
        if record["gradient"] is not None:
            epoch.add(record["worker"], Gradient.from_record(record["gradient"]), record["loss"])

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if epoch_watermark in self._epochs:
            self._step_for(epoch_watermark, out)
            out.emit(self._model.parameters())

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        for epoch in sorted(self._epochs):
            self._step_for(epoch, out)

    def _step_for(self, epoch: int, out: Output) -> None:
        gradients = self._epochs.pop(epoch)
        if gradients.gradients:
            self.step(*gradients.total(), out)

    def snapshot(self) -> dict[str, Any]:
        epochs = [(epoch, gradients.to_record()) for epoch, gradients in self._epochs.items()]
        return super().snapshot() | {"epochs": epochs}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._epochs = {epoch: EpochGradients.from_record(record) for epoch, record in state["epochs"]}


@dataclass(frozen=True)
class OnlineTraining:
    """What :func:`train_online` gives.

    Online training as part of a flow: an unbounded iteration around a parameter owner and its workers.

    The variable stream carries the parameters: the start, then what the owner feeds back. Workers bring them
    together with their examples and send gradients to the owner, which makes a step of each as it comes
    (asynchronous), or in the callback of each epoch one of all of them (synchronous).
    """

    models: Stream
    """A ``ModelSnapshot`` for each published version: ``models.publish_model(topic, model=…)``."""
    validation: Stream
    """Metrics of progressive validation, a dict now and then (see ``ProgressiveValidation``)."""


@all_or_nothing
def train_online(
    examples: Stream,
    model: Callable[[], LinearModel],
    *,
    extract: Extract | None = None,
    labels: DelayedLabels | None = None,
    mini_batch: int = 100,
    mode: Literal["asynchronous", "synchronous"] = "asynchronous",
    initial: Stream | None = None,
    publish_every: int = 1,
    window: int = 10_000,
    report_every: int = 10_000,
    workers: int | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    config: IterationConfig | None = None,
    name: str | None = None,
) -> OnlineTraining:
    """Train a linear model on a stream, for as long as it flows.

    ``model()`` makes the (same) model for the owner and each worker. ``extract(mini_batch)`` gives the
    :class:`Examples` of a mini-batch of ``mini_batch`` records of one worker; or, where labels come later
    than questions, ``labels`` tells the two apart. ``initial`` is a stream of one record to start from:
    parameters, bare weights, or None.

    ``"asynchronous"``: every mini-batch's gradient goes to the owner at once, and workers go on with the
    parameters they have, for eight mini-batches at most.
    ``"synchronous"``: the owner makes one step of the gradients of one mini-batch of each worker, and the
    workers wait for it; the result does not depend on timing. An epoch is ``mini_batch`` records of each
    subtask of ``examples``: one that has partitions but no records holds the others up, so read a topic with
    quiet partitions with ``parallelism=1``.

    Rows that are no examples follow ``on_error`` or go to ``dead_letter``. ``name`` stands before the names
    of the steps, for a flow with more than one training.
    """
    _check_options(examples, model, mode, extract, labels)
    publish_every = whole_number("train_online(publish_every=)", publish_every, 1, error=GraphError)
    window = whole_number("train_online(window=)", window, 1, error=GraphError)
    report_every = whole_number("train_online(report_every=)", report_every, 1, error=GraphError)
    synchronous = mode == "synchronous"
    flow = examples.flow
    label = step_names(flow, name)
    options = OnlineWorkerOptions(model, extract or _no_examples, synchronous)
    owner = SynchronousOwner if synchronous else AsynchronousOwner
    data = epochs_every(examples, records=mini_batch, name=label("epochs")) if synchronous else examples
    if config is None:
        config = IterationConfig(max_epochs_ahead=0 if synchronous else None, name=name)

    def make_worker() -> GradientWorker:
        return GradientWorker(options) if labels is None else DelayedGradientWorker(options, labels)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0] if labels is None else data[0].key_by(labels.key_of)
        mini_batches = rows.batch(mini_batch, parallelism=workers, name=label("mini-batches"))
        gradients = connect(model=variables[0].broadcast(), examples=mini_batches).process(
            make_worker, name=label("train"), on_error=on_error, dead_letter=dead_letter
        )
        parameters = connect(start=variables[0], gradients=gradients.rebalance()).process(
            lambda: owner(model, publish_every), name=label("parameters"), parallelism=1
        )
        return IterationBodyResult(
            feedback_variable_streams=[parameters],
            output_streams=[parameters.side_output(MODELS), gradients.side_output(PREDICTIONS)],
        )

    if initial is None:
        start = flow.from_items([None], name=label("start"), parallelism=1)
    else:
        start = initial.process(OneStart, name=label("initial"), parallelism=1)
    models, predictions = iterate_unbounded_streams([start], [data], body, config)
    kind: Literal["classification", "regression"] = (
        "classification" if isinstance(model().loss, LogLoss) else "regression"
    )
    validation = predictions.process(
        lambda: Validate(kind, window=window, report_every=report_every),
        name=label("validate"),
        parallelism=1,
    )
    return OnlineTraining(models, validation)


class OneStart(Operator):
    """Passes on the one record that training starts from."""

    def __init__(self) -> None:
        self._passed = 0

    def process(self, parameters: Any, out: Output) -> None:
        """Refuse a second one: the owner and the workers would go on from different ones."""
        self._passed += 1
        if self._passed > 1:
            raise ConfigurationError(
                "train_online(initial=): expected a stream of one record, given a second; choose the one to start from"
            )
        out.emit(parameters)

    def finish(self, out: Output) -> None:
        if not self._passed:
            raise ConfigurationError(
                "train_online(initial=): expected a stream of one record, given none; give None as the record to start "
                "as the model was made"
            )

    def snapshot(self) -> int:
        return self._passed

    def restore(self, state: int) -> None:
        self._passed = state


def _check_options(
    examples: Any, model: Any, mode: Any, extract: Extract | None, labels: DelayedLabels | None
) -> None:
    check_stream("train_online", examples, "examples")
    check_makes_model("train_online", model)
    if (extract is None) == (labels is None):
        raise GraphError(
            f"train_online: expected one of extract= and labels=, given {'neither' if extract is None else 'both'}; "
            "give extract= where an event has its label, labels= where labels come later"
        )
    if extract is not None:
        check_function(extract, "train_online(extract=)", ["mini_batch"])
    if labels is not None:
        for option, takes in (
            ("key_of", "event"),
            ("is_answer", "event"),
            ("features", "events"),
            ("target_of", "event"),
        ):
            check_function(getattr(labels, option), f"DelayedLabels({option}=)", [takes])
    if mode not in ("asynchronous", "synchronous"):
        raise GraphError(
            f'train_online: expected mode "asynchronous" or "synchronous", given {mode!r}; choose one of them'
        )


def _no_examples(mini_batch: object) -> Examples:
    raise NotImplementedError
