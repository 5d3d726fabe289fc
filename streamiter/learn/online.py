"""Online training of linear models: ``train_online`` learns while a stream flows.

Online training is an unbounded iteration. The variable stream carries the parameters of the model: first the initial
parameters, then the parameters that the owner feeds back. Workers predict each mini-batch with the parameters they
have, then send its gradient to the owner. *Synchronous* training makes one step for each epoch, with the gradients of
all workers; *asynchronous* training makes a step for each gradient as it arrives. Where labels come later than the
questions, a worker keeps the questions until their answers arrive (:class:`DelayedLabels`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, connect, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_unbounded_streams
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.stamping import epochs_every
from streamiter.learn.linear import LinearModel, LogLoss
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
from streamiter.learn.training import (
    MINI_BATCHES_WITH_ONE_MODEL,
    MODELS,
    BroadcastSteps,
    EpochSteps,
    GradientSum,
    GradientWorker,
    MakeModel,
    StartedOwner,
    check_makes_model,
)
from streamiter.learn.validation import Validate
from streamiter.numbers import Floats, whole_number
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.records import Batch, OutputTag
from streamiter.sparse_rows import SparseRows
from streamiter.topics.topic import Topic


@dataclass(frozen=True)
class OnlineTraining:
    """The streams that :func:`train_online` returns."""

    models: Stream
    """A ``ModelSnapshot`` for each published version: ``models.publish_model(topic, model=…)``."""
    validation: Stream
    """Metrics of progressive validation, one dict every ``report_every`` rows (see ``ProgressiveValidation``)."""


@dataclass(frozen=True, slots=True)
class DelayedLabels:
    """How to read a stream of questions and answers, in time order: predict now, learn when the answer arrives."""

    key_of: Callable[[Any], Hashable]
    """``key_of(event)`` returns the key that a question and its answer share: int, str, bytes or a tuple of these."""
    is_answer: Callable[[Any], bool]
    """Whether an event is an answer; all other events are questions."""
    features: Callable[[Sequence[Any]], SparseRows]
    """``features(questions)`` returns a row of features for each question."""
    target_of: Callable[[Any], float | None]
    """``target_of(answer)`` returns the target; None if the question has no target: then the question is forgotten."""
    waiting_max: int = 1_000_000
    """The largest number of questions that wait at each worker; beyond it the oldest question is forgotten."""


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
    """Train a linear model on a stream while the stream flows.

    ``model()`` makes the model; the owner and each worker call it, and must get equal models. ``extract(mini_batch)``
    returns the :class:`Examples` of ``mini_batch`` records of one worker. Where labels come later than the questions,
    give ``labels`` instead. ``initial`` is a stream of one record to start from: parameters, bare weights, or None.

    ``mode="asynchronous"``: the owner makes a step with each gradient as it arrives. Workers continue with the
    parameters they have, for eight mini-batches at most.
    ``mode="synchronous"``: the owner makes one step with the gradients of one mini-batch of each worker, and the
    workers wait for that step; the result does not depend on timing. An epoch is ``mini_batch`` records of each subtask
    of ``examples``. A subtask that has partitions but receives no records blocks the others, so read a topic with quiet
    partitions with ``parallelism=1``.

    A version is published after every ``publish_every`` steps. Validation counts each prediction before the model
    learns from its row, over the last ``window`` rows too, and reports every ``report_every`` rows. Rows that are not
    examples follow ``on_error`` or go to ``dead_letter``. ``name`` is put in front of the names of the steps, for a
    flow with more than one training.

    Raises GraphError for options that cannot be used.
    """
    _check_options(examples, model, mode, extract, labels)
    publish_every = whole_number("train_online(publish_every=)", publish_every, 1, error=GraphError)
    window = whole_number("train_online(window=)", window, 1, error=GraphError)
    report_every = whole_number("train_online(report_every=)", report_every, 1, error=GraphError)
    synchronous = mode == "synchronous"
    flow = examples.flow
    label = step_names(flow, name)
    options = OnlineWorkerOptions(model, extract or _never_extracts, synchronous)
    data = epochs_every(examples, records=mini_batch, name=label("epochs")) if synchronous else examples
    if config is None:
        config = IterationConfig(max_epochs_ahead=0 if synchronous else None, name=name)

    def make_worker() -> OnlineWorker:
        return OnlineWorker(options) if labels is None else DelayedLabelsWorker(options, labels)

    def make_owner() -> StartedOwner:
        rule = EpochSteps(requires_examples=False) if synchronous else BroadcastSteps()
        return StartedOwner(model, rule, publish_every)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0] if labels is None else data[0].key_by(labels.key_of)
        mini_batches = rows.batch(mini_batch, parallelism=workers, name=label("mini-batches"))
        gradients = connect(model=variables[0].broadcast(), examples=mini_batches).process(
            make_worker, name=label("train"), on_error=on_error, dead_letter=dead_letter
        )
        parameters = connect(start=variables[0], gradients=gradients.rebalance()).process(
            make_owner, name=label("parameters"), parallelism=1
        )
        return IterationBodyResult(
            feedback_variable_streams=[parameters],
            output_streams=[parameters.side_output(MODELS), gradients.side_output(PREDICTIONS)],
        )

    if initial is None:
        start = flow.from_items([None], name=label("start"), parallelism=1)
    else:
        start = initial.process(_OneStart, name=label("initial"), parallelism=1)
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


def _check_options(
    examples: object, model: object, mode: object, extract: Extract | None, labels: DelayedLabels | None
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


def _never_extracts(mini_batch: object) -> Examples:
    raise NotImplementedError  # A worker with delayed labels makes its examples itself.


class _OneStart(Operator):
    """Passes on the one record that training starts from, and refuses any other number of records."""

    def __init__(self) -> None:
        self._passed = 0

    def process(self, parameters: Any, out: Output) -> None:
        """Refuse a second record: the owner and the workers would start from different parameters."""
        self._passed += 1
        if self._passed > 1:
            raise ConfigurationError(
                "train_online(initial=): expected a stream of one record, given a second; choose the one to start from"
            )
        out.emit(parameters)

    def finish(self, out: Output) -> None:
        if not self._passed:
            raise ConfigurationError(
                "train_online(initial=): expected a stream of one record, given none; to start with the model's own "
                "parameters, give the record None"
            )

    def snapshot(self) -> int:
        return self._passed

    def restore(self, state: int) -> None:
        self._passed = state


# ---- workers


PREDICTIONS: Final = OutputTag("predictions")
"""The side output of a worker: predictions made before learning, with targets and weights (dicts of arrays)."""


class OnlineWorkerOptions(NamedTuple):
    """The options that all workers of one training share."""

    make_model: MakeModel
    extract: Extract
    synchronous: bool


class OnlineWorker(GradientWorker):
    """Predicts the rows of each mini-batch, then computes their gradient.

    A worker begins when the first parameters have arrived. Asynchronous, it continues with these parameters until newer
    parameters arrive, for eight mini-batches at most. Synchronous, it waits for the parameters of each epoch.
    """

    def __init__(self, options: OnlineWorkerOptions) -> None:
        super().__init__(options.make_model, in_epochs=options.synchronous)
        self._extract = options.extract
        self._reported_epoch = -1
        self._gradients_since_model = 0

    def wanted_inputs(self) -> tuple[str, ...] | None:
        if not self._in_epochs and self._gradients_since_model >= MINI_BATCHES_WITH_ONE_MODEL:
            return ("model",)
        return super().wanted_inputs()

    def process_model(self, parameters: Any, out: Output) -> None:
        """Continue with these parameters."""
        self.follow(parameters)
        self._gradients_since_model = 0

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        """Report an epoch without rows, too, while more examples may arrive.

        All workers wait for the parameters of the next epoch, and the owner sends them when a worker has reported. When
        no worker reports any more, the iteration ends.
        """
        super().on_epoch_watermark_incremented(epoch_watermark, context, out)
        if self._in_epochs and self._reported_epoch < epoch_watermark and not self._examples_ended:
            self.report(GradientSum(), out)

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict the rows of a mini-batch, then report their gradient."""

        def learn(rows: Batch) -> None:
            examples = blaming_rows(self._extracted, rows, self._check_alone)
            self.report_examples(examples, self._model.predict(examples.features), out)

        of_good_rows(learn, mini_batch, out)

    def _extracted(self, rows: Batch) -> Examples:
        return as_examples("train_online(extract=)", self._extract(rows))

    def _check_alone(self, row: Batch) -> None:
        checked_rows("train", self._extracted(row).features, self._model.width)

    def report_examples(self, examples: Examples, predictions: Floats, out: Output) -> None:
        """Report the gradient of these examples, and emit the earlier predictions for them."""
        gradient = self._model.gradient(examples.features, examples.targets, examples.weights)
        targets = self._model.checked_targets(examples.targets, len(predictions))
        given = np.ones(len(targets)) if examples.weights is None else examples.weights
        weights = row_weights("train", given, len(targets))
        loss = float((self._model.loss.values(predictions, targets) * weights).sum())
        self._reported_epoch = self._context.epoch or 0
        self._gradients_since_model += 1
        self.report(GradientSum(gradient, loss), out)
        out.emit({"predictions": predictions, "targets": targets, "weights": weights}, tag=PREDICTIONS)

    def snapshot(self) -> dict[str, object]:
        return super().snapshot() | {
            "reported epoch": self._reported_epoch,
            "gradients since model": self._gradients_since_model,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._reported_epoch = state["reported epoch"]
        self._gradients_since_model = state["gradients since model"]


# Indices and values, as lists: numpy arrays of about eight features each would take ten times as long.
_Row = tuple[list[int], list[float]]
_Answered = tuple[Any, _Row, float, float]
"""The answer, the features and prediction of its question, the target."""


class DelayedLabelsWorker(OnlineWorker):
    """Predicts each question when it arrives, and learns from it when its answer arrives.

    Validation counts that first prediction.
    """

    def __init__(self, options: OnlineWorkerOptions, labels: DelayedLabels) -> None:
        super().__init__(options)
        self._labels = labels
        self._waiting: dict[Hashable, tuple[_Row, float]] = {}
        """Features and prediction of the questions without an answer, the oldest first."""

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict all questions together, then match the events in order; learn from all answers together."""
        predicted = self._predict_questions(
            [event for event in mini_batch if not self._labels.is_answer(event)], out
        )
        answered: list[_Answered] = []
        for event in mini_batch:
            if not self._labels.is_answer(event):
                question = next(predicted)
                if question is not None:
                    self._wait(event, *question)
            elif (answer := self._answered(event, out)) is not None:
                answered.append(answer)
        self._learn_from(answered, out)

    def _predict_questions(self, questions: list[Any], out: Output) -> Iterator[tuple[_Row, float] | None]:
        """Yield features and prediction of each question, None for a question without features."""
        if not questions:
            return iter(())
        try:
            rows, predictions = blaming_rows(self._predicted, questions, self._labels.features)
        except BadRows as bad:
            good = iter(self._predict_questions(list(without(questions, bad, out)), out))
            return iter([None if row in bad.rows else next(good) for row in range(len(questions))])
        return zip(rows.rows(), predictions, strict=True)

    def _predicted(self, questions: Sequence[Any]) -> tuple[SparseRows, list[float]]:
        rows = self._labels.features(questions)
        return rows, self._model.predict(rows).tolist()

    def _wait(self, question: Any, row: _Row, prediction: float) -> None:
        key = self._labels.key_of(question)
        self._waiting.pop(key, None)  # A question that is asked again becomes the youngest.
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
                self.report_examples(examples, np.array(predictions), out)
            except BadRows as bad:
                without(list(events), bad, out)
                answered = [entry for row, entry in enumerate(answered) if row not in bad.rows]
            else:
                return

    def snapshot(self) -> dict[str, object]:
        waiting = [(key, *row, prediction) for key, (row, prediction) in self._waiting.items()]
        return super().snapshot() | {"waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._waiting = {
            key: ((indices, values), prediction) for key, indices, values, prediction in state["waiting"]
        }
