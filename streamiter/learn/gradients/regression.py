"""Linear and logistic regression: ``LinearRegression``, ``LogisticRegression``, and their offline training.

Online, ``learn`` makes one step on a mini-batch. Offline, ``fit`` trains on arrays or a topic, round after round, and
returns a :class:`Fit`, the course of the training.

Offline training, ``train_offline``, is a bounded iteration of workers, which hold the examples, and an owner of the
parameters. In each round every worker computes the gradient of its share of a mini-batch. *Synchronous* training makes
one step a round, with the gradients of all workers; *asynchronous* training makes a step for each gradient as it
arrives, and answers the worker that sent it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, Unpack

import numpy.typing as npt

from streamiter.errors import GraphError, ModelError
from streamiter.flow.flow import Flow, all_or_nothing, check_stream, connect, step_names
from streamiter.flow.graph_checks import check_user_function
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.helpers import terminate_after
from streamiter.iteration.marked_streams import replayed
from streamiter.learn.estimators import check_fit, examples_of, read_topic, rounds_done, run_offline, was_interrupted
from streamiter.learn.gradients.linear import LinearModel, LinearOptions, targets_from_signs
from streamiter.learn.gradients.offline_workers import OfflineExtract, OfflineWorker, OfflineWorkerOptions
from streamiter.learn.gradients.training import EPOCH_LOSSES, EpochSteps, ParameterOwner, ReplySteps, check_makes_model
from streamiter.learn.losses import LogLoss, SquaredLoss
from streamiter.learn.model_owner import MODELS, OwnerOptions, PublishSchedule
from streamiter.learn.rows import CheckedExamples, Examples, Extract, Features, row_vector
from streamiter.operators.output import RejectionPolicy
from streamiter.parameter_server.optimizers import FTRL, SGD, GradientDescent, Optimizer, checked_optimizer
from streamiter.topics.topic import Decoder, Topic
from streamiter.values.numbers import Floats, is_number, one_of, whole_number
from streamiter.values.records import Batch


@dataclass(frozen=True, slots=True, repr=False)
class Fit:
    """The course of a training: its rounds, its losses and why it ended.

    >>> Fit(rounds=2, losses=[0.69315, 0.31623], ended_by="rounds")
    Fit(rounds=2, loss=0.3162, ended_by='rounds')
    """

    rounds: int
    """The number of finished rounds."""
    losses: list[float]
    """The mean loss before each step. There is one step a round; asynchronous, one for each worker and round."""
    ended_by: Literal["rounds", "tolerance", "interruption"]
    """Why training ended: all rounds were made, the loss was small enough, or Ctrl-C."""

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.losses)

    @property
    def loss(self) -> float:
        """The mean loss before the last step; NaN without any step."""
        return self.losses[-1] if self.losses else math.nan

    def __repr__(self) -> str:
        return f"Fit(rounds={self.rounds}, loss={self.loss:.4g}, ended_by={self.ended_by!r})"


class OfflineModel(LinearModel):
    """A linear model that can also be trained offline: on all examples, round after round."""

    def fit(
        self,
        examples: Features | Topic,
        targets: npt.ArrayLike | None = None,
        sample_weights: npt.ArrayLike | None = None,
        *,
        rounds: int = 100,
        learning_rate: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        optimizer: Optimizer | None = None,
        mini_batch: int | None = None,
        tolerance: float | None = None,
        mode: Literal["synchronous", "asynchronous"] = "synchronous",
        replay: bool = False,
        decode: Decoder | None = None,
        extract: Extract | None = None,
        parallelism: int = 1,
        progress: bool | None = None,
    ) -> Fit:
        """Train on features (a matrix or ``SparseRows``) and targets, or on the records that are in a topic now.

        Training continues from the current weights. A round is a step ``w −= learning_rate · mean gradient``, then
        ``w ·= 1 − learning_rate·l2`` and ``w −= learning_rate·l1·sign(w)``; l1 and l2 do not act on the intercept.
        Another ``optimizer`` may be given instead.
        :func:`~streamiter.learn.gradients.regression.train_offline` describes the arguments from ``mini_batch`` to
        ``replay``; ``parallelism`` is the number of workers.

        For a topic, ``decode`` decodes its values, and ``extract(batch)`` returns the ``Examples`` of a batch of
        records; the records of libsvm and dummy files need no ``extract``.

        On a terminal a bar shows the rounds and the loss (``progress`` True: everywhere, False: never). The first
        Ctrl-C ends the training after the current round, and the model keeps the weights of that round. A second Ctrl-C
        leaves the model unchanged and raises KeyboardInterrupt.

        Raises ModelError for examples that the model cannot learn from (``BadRows`` if single rows of arrays are at
        fault), JobFailed for such examples of a topic.

        >>> from streamiter.learn import LinearRegression
        >>> model = LinearRegression(1)
        >>> fit = model.fit([[0.0], [1.0], [2.0], [3.0]], [1.0, 3.0, 5.0, 7.0], rounds=1000, tolerance=1e-9)
        >>> fit.ended_by, model.predict([[10.0]]).round(2).tolist()
        ('tolerance', [21.0])
        """
        title = f"{self._name}.fit"
        arrays = {"targets": targets, "sample_weights": sample_weights}
        check_fit(title, examples, parallelism, decode=decode, extract=extract, **arrays)
        flow = Flow(title)
        checked: Callable[[Any], CheckedExamples]
        if isinstance(examples, Topic):
            stream, checked = read_topic(flow, examples, decode), self._checking(extract)
        else:
            stream = self._of_arrays(flow, examples, targets, sample_weights, parallelism)
            checked = CheckedExamples.concatenate
        if optimizer is None:
            rule: Optimizer = GradientDescent(learning_rate, l1=l1, l2=l2)
        else:
            rule = checked_optimizer(title, optimizer)
        training = train_offline(
            stream,
            lambda: self.twin(rule),
            extract=checked,
            rounds=rounds,
            mini_batch=mini_batch,
            tolerance=tolerance,
            mode=mode,
            replay=replay,
            workers=parallelism,
        )
        models, losses = training.models.collect(), training.losses.collect()

        def describe() -> str:
            return f"loss {losses.items[-1]:.6g}" if losses.items else ""

        statistics = run_offline(flow, title=title, rounds=rounds, progress=progress, describe=describe)
        interrupted = was_interrupted(statistics)
        if not (losses.items or interrupted):
            raise _no_weight(title)
        if models.items:
            [model] = models.items
            self.take_over(model.parameters, steps=len(losses.items), records=model.records)
        ended_by = _ended_by(losses.items, tolerance, interrupted=interrupted)
        return Fit(rounds_done(statistics, most=rounds), losses.items, ended_by)

    def _checking(self, extract: Extract | None) -> Callable[[Batch], CheckedExamples]:
        def checked(batch: Batch) -> CheckedExamples:
            return self.checked_examples(examples_of(f"{self._name}.fit", batch, extract, self.width))

        return checked

    def _of_arrays(
        self,
        flow: Flow,
        features: Features,
        targets: npt.ArrayLike | None,
        sample_weights: npt.ArrayLike | None,
        parallelism: int,
    ) -> Stream:
        """Return a stream of one record for each of n workers, which holds every n-th row."""
        if targets is None:
            raise ModelError(f"{self._name}.fit: expected targets, one for each row, given none; pass them second")
        examples = self.checked_examples(Examples(features, targets, sample_weights))
        if not len(examples):
            raise ModelError(f"{self._name}.fit: expected rows to learn from, given none; give rows")
        if examples.weights is not None and not examples.weights.any():
            raise _no_weight(f"{self._name}.fit")
        shares = [examples[worker::parallelism] for worker in range(parallelism)]
        return flow.from_items(shares, name="examples", parallelism=parallelism)


def _ended_by(
    losses: list[float], tolerance: float | None, *, interrupted: bool
) -> Literal["rounds", "tolerance", "interruption"]:
    if tolerance is not None and losses and losses[-1] <= tolerance:
        return "tolerance"
    return "interruption" if interrupted else "rounds"


def _no_weight(title: str) -> ModelError:
    return ModelError(
        f"{title}: expected rows to learn from, given sample weights that are all 0; give some of them a weight above 0"
    )


class LinearRegression(OfflineModel):
    """Online linear regression: squared loss ½(prediction − target)²; SGD of rate 0.01 by default.

    All other arguments are those of :class:`~streamiter.learn.gradients.linear.LinearModel`.

    >>> model = LinearRegression(1, optimizer=SGD(0.5))
    >>> for _ in range(100):
    ...     model.learn([[0.0], [1.0]], [1.0, 3.0])
    >>> model.predict([[2.0]]).round(2).tolist()
    [5.0]
    """

    def __init__(self, width: int, *, optimizer: Optimizer | None = None, **options: Unpack[LinearOptions]) -> None:
        super().__init__(width, loss=SquaredLoss(), optimizer=optimizer or SGD(0.01), **options)


class LogisticRegression(OfflineModel):
    """Online logistic regression: log loss; predicts the probability of target 1.

    The default optimizer is ``FTRL(alpha=0.3, beta=0.1)``, whose steps become shorter with time. For a stream that
    changes, take ``SGD`` with a constant rate (0.05 for rows with about ten features of 0 or 1, more for mini-batches)
    or a larger alpha.

    ``labels`` says which targets are given: ``"0/1"`` or ``"-1/1"``. All other arguments are those of
    :class:`~streamiter.learn.gradients.linear.LinearModel`.

    >>> import numpy as np
    >>> model = LogisticRegression(2, optimizer=SGD(0.5))
    >>> features = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
    >>> for _ in range(100):
    ...     model.learn(features, [0, 1, 0])
    >>> model.version, model.records, model.predict(features).round().tolist()
    (100, 300, [0.0, 1.0, 0.0])
    """

    def __init__(
        self,
        width: int,
        *,
        optimizer: Optimizer | None = None,
        labels: Literal["0/1", "-1/1"] = "0/1",
        **options: Unpack[LinearOptions],
    ) -> None:
        one_of("LogisticRegression(labels=)", labels, "0/1", "-1/1")
        self.labels = labels
        super().__init__(width, loss=LogLoss(), optimizer=optimizer or FTRL(alpha=0.3, beta=0.1), **options)

    def predict_probability(self, features: Features) -> Floats:
        """Return the probability of target 1 for each row, as ``predict`` does."""
        return self.predict(features)

    def checked_targets(self, targets: npt.ArrayLike, length: int) -> Floats:
        if self.labels == "0/1":
            return super().checked_targets(targets, length)
        return targets_from_signs(self._name, row_vector(self._name, "targets", targets, length))


@dataclass(frozen=True)
class OfflineTraining:
    """The streams that :func:`train_offline` returns."""

    models: Stream
    """A ``ModelSnapshot``: the last one, and with ``publish_every=n`` each n-th before it."""
    losses: Stream
    """For each step the mean loss before it."""


@all_or_nothing
def train_offline(
    examples: Stream,
    model: Callable[[], LinearModel],
    *,
    extract: OfflineExtract,
    rounds: int,
    mini_batch: int | None = None,
    tolerance: float | None = None,
    mode: Literal["synchronous", "asynchronous"] = "synchronous",
    replay: bool = False,
    publish_every: int | None = None,
    workers: int | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    config: IterationConfig | None = None,
    name: str | None = None,
) -> OfflineTraining:
    """Train a linear model on a bounded stream, in ``rounds`` rounds.

    ``model()`` makes the model; the owner and each worker call it, and must get equal models. Any optimizer can be
    used, the usual one is ``GradientDescent``. ``extract(batch)`` returns the :class:`Examples` of a batch of records.

    In each round all workers together take the next ``mini_batch`` rows. Each worker takes its share of them from the
    rows it has: the next ones, fewer at the end, then again from the first one. None takes all rows. Training ends
    after ``rounds`` rounds, or after the first round in which the mean loss, before its step, is ``tolerance`` or less.

    ``mode="synchronous"``: one step a round, with the mean of the gradients of all rows. The result does not depend on
    timing. If each round takes all rows, the number of workers changes only its last digits, too.
    ``mode="asynchronous"``: a step for each worker's share as soon as it arrives.

    Workers keep their examples in memory. With ``replay`` the examples are read again in every round, from memory
    and beyond a limit from disk (``IterationConfig(replay_memory_bytes=…)``): synchronous only.

    A version is published after every ``publish_every`` steps and at the end. Rows that are not examples follow
    ``on_error`` or go to ``dead_letter``. ``name`` is put in front of the names of the steps.

    Raises GraphError for options that cannot be used. A job without examples fails.
    """
    check_stream("train_offline", examples, "examples", bounded=True)
    check_makes_model("train_offline", model)
    check_user_function(
        extract, "train_offline(extract=)", ["batch"], expected="a function that makes Examples of a batch"
    )
    rounds = _count("rounds", rounds)
    workers = examples.parallelism if workers is None else _count("workers", workers)
    every = sys.maxsize if publish_every is None else _count("publish_every", publish_every)
    of_owner = OwnerOptions(PublishSchedule(mini_batches=every))
    if mini_batch is not None:
        mini_batch = _checked_mini_batch(mini_batch, workers)
    _check_tolerance(tolerance)
    _check_mode(mode, replay)
    synchronous = mode == "synchronous"
    flow = examples.flow
    label = step_names(flow, name)
    options = OfflineWorkerOptions(model, extract, mini_batch, rounds, synchronous, replay)

    def make_worker() -> OfflineWorker:
        return OfflineWorker(options)

    def make_owner() -> ParameterOwner:
        rule = EpochSteps() if synchronous else ReplySteps(workers, tolerance)
        return ParameterOwner(model, rule, of_owner, is_offline=True)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [answers] = variables
        to_workers = answers.broadcast() if synchronous else answers.partition_by(itemgetter("worker"))
        gradients = connect(model=to_workers, examples=data[0]).process(
            make_worker, name=label("train"), parallelism=workers, on_error=on_error, dead_letter=dead_letter
        )
        # A single worker and the owner run in one task.
        owner = gradients.process(make_owner, name=label("parameters"), parallelism=1)
        losses = owner.side_output(EPOCH_LOSSES)
        criteria = None
        if synchronous:
            criteria = terminate_after(losses, rounds=rounds, tolerance=tolerance, name=label("rounds"))
        return IterationBodyResult([owner], [owner.side_output(MODELS), losses], criteria)

    starts = [None] if synchronous else [{"worker": worker, "parameters": None} for worker in range(workers)]
    start = flow.from_items(starts, name=label("start"), parallelism=1)
    given = replayed(examples) if replay else examples
    if config is None:
        config = IterationConfig(name=name) if synchronous else IterationConfig(max_epochs_ahead=None, name=name)
    models, losses = iterate_bounded_streams_until_termination([start], [given], body, config)
    return OfflineTraining(models, losses)


def _count(option: str, count: object) -> int:
    return whole_number(f"train_offline({option}=)", count, 1, error=GraphError)


def _checked_mini_batch(mini_batch: object, workers: int) -> int:
    rows = _count("mini_batch", mini_batch)
    if rows < workers:
        raise GraphError(
            f"train_offline(mini_batch=): expected at least a row for each of {workers} workers, given {rows}; "
            "make the mini-batch larger, or use fewer workers"
        )
    return rows


def _check_tolerance(tolerance: object) -> None:
    if tolerance is not None and not (is_number(tolerance) and not math.isnan(tolerance)):
        raise GraphError(
            f"train_offline(tolerance=): expected a number, given {tolerance!r}; leave it out to make all rounds"
        )


def _check_mode(mode: object, replay: bool) -> None:
    one_of("train_offline(mode=)", mode, "synchronous", "asynchronous", error=GraphError)
    if replay and mode == "asynchronous":
        raise GraphError(
            "train_offline(replay=): expected the mode synchronous, given asynchronous, whose workers go through their "
            "examples each at its own pace; leave replay out, or take the mode synchronous"
        )
