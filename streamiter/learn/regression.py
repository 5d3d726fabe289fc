"""Linear and logistic regression: ``LinearRegression`` and ``LogisticRegression``, which learn online and offline.

Online, ``learn`` makes one step on a mini-batch. Offline, ``fit`` trains on arrays or a topic, round after round, and
returns a :class:`Fit`, the course of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import check_count
from streamiter.flow.stream import Stream
from streamiter.learn.estimators import (
    examples_of,
    no_path,
    read_topic,
    refuse_arrays_with_topic,
    refuse_options_of_topics,
    rounds_done,
    run_offline,
    was_interrupted,
)
from streamiter.learn.linear import LinearModel, LogLoss, SquaredLoss, targets_from_signs
from streamiter.learn.offline import train_offline
from streamiter.learn.rows import (
    CheckedExamples,
    Examples,
    Extract,
    Features,
    row_vector,
)
from streamiter.numbers import Floats
from streamiter.optimizers import FTRL, SGD, GradientDescent, Optimizer, checked_optimizer
from streamiter.records import Batch
from streamiter.topics.topic import Decoder, Topic


@dataclass(frozen=True, slots=True, repr=False)
class Fit:
    """The course of a training: its rounds, its losses and why it ended.

    >>> Fit(rounds=2, losses=[0.69315, 0.31623], ended_by="rounds")
    Fit(rounds=2, loss=0.3162, ended_by='rounds')
    """

    rounds: int
    """The number of rounds that were made."""
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
    """A linear model that can also be trained offline: on all examples at once, round after round."""

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

        Training continues from the present weights. A round is a step ``w −= learning_rate · mean gradient``, then
        ``w ·= 1 − learning_rate·l2`` and ``w −= learning_rate·l1·sign(w)``; l1 and l2 do not act on the intercept.
        Another ``optimizer`` may be given instead. :func:`~streamiter.learn.offline.train_offline` describes the
        arguments from ``mini_batch`` to ``replay``; ``parallelism`` is the number of workers.

        For a topic, ``decode`` decodes its values, and ``extract(batch)`` returns the ``Examples`` of a batch of
        records; the records of libsvm and dummy files need no ``extract``.

        On a terminal a bar shows the rounds and the loss (``progress`` True: everywhere, False: never). The first
        Ctrl-C ends the training after the present round, and the model keeps what it has learned. A second Ctrl-C
        leaves the model as it was and raises KeyboardInterrupt.

        Raises ModelError for examples that cannot be learned from (``BadRows`` if single rows of arrays are at
        fault), JobFailed for such examples of a topic.

        >>> from streamiter.learn import LinearRegression
        >>> model = LinearRegression(1)
        >>> fit = model.fit([[0.0], [1.0], [2.0], [3.0]], [1.0, 3.0, 5.0, 7.0], rounds=1000, tolerance=1e-9)
        >>> fit.ended_by, model.predict([[10.0]]).round(2).tolist()
        ('tolerance', [21.0])
        """
        title = f"{self._name}.fit"
        check_count(parallelism, "a parallelism", step=title)
        flow = Flow(title)
        checked: Callable[[Any], CheckedExamples]
        if isinstance(examples, Topic):
            refuse_arrays_with_topic(title, examples, targets=targets, sample_weights=sample_weights)
            stream, checked = read_topic(flow, examples, decode), self._checking(extract)
        else:
            refuse_options_of_topics(title, decode=decode, extract=extract)
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

    def _checking(self, extract: Extract | None) -> Callable[[Any], CheckedExamples]:
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
        if isinstance(features, str):
            raise no_path(f"{self._name}.fit", features)
        if targets is None:
            raise ModelError(
                f"{self._name}.fit: expected targets, one for each row, given none; pass them second"
            )
        examples = self.checked_examples(Examples(features, targets, sample_weights))
        if not len(examples):
            raise ModelError(f"{self._name}.fit: expected rows to learn from, given none")
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

    All other arguments are those of :class:`~streamiter.learn.linear.LinearModel`.

    >>> model = LinearRegression(1, optimizer=SGD(0.5))
    >>> for _ in range(100):
    ...     model.learn([[0.0], [1.0]], [1.0, 3.0])
    >>> model.predict([[2.0]]).round(2).tolist()
    [5.0]
    """

    def __init__(
        self,
        width: int,
        *,
        optimizer: Optimizer | None = None,
        intercept: bool = True,
        initial_weights: npt.ArrayLike | None = None,
        initial_intercept: float = 0.0,
    ) -> None:
        super().__init__(
            width,
            loss=SquaredLoss(),
            optimizer=optimizer or SGD(0.01),
            intercept=intercept,
            initial_weights=initial_weights,
            initial_intercept=initial_intercept,
        )


class LogisticRegression(OfflineModel):
    """Online logistic regression: log loss; predicts the probability of target 1.

    The default optimizer is ``FTRL(alpha=0.3, beta=0.1)``: it finds the scale of each feature by itself, and learns
    row by row about as well as in mini-batches of 100. Its steps become shorter with time. For a stream that changes,
    take ``SGD`` with a constant rate (0.05 for rows with some ten features of 0 or 1, more for mini-batches) or a
    larger alpha.

    ``labels`` says which targets are given: ``"0/1"`` or ``"-1/1"``. All other arguments are those of
    :class:`~streamiter.learn.linear.LinearModel`.

    >>> import numpy as np
    >>> model = LogisticRegression(2, optimizer=SGD(0.5))
    >>> features = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
    >>> for _ in range(100):
    ...     model.learn(features, [0, 1, 0])
    >>> model.version, model.records, model.predict(features).round().tolist()
    (100, 300, [0.0, 1.0, 0.0])
    >>> model = LogisticRegression(2)
    >>> model.fit(features, [0, 1, 0], rounds=100, learning_rate=2.0).steps, model.predict(features).round().tolist()
    (100, [0.0, 1.0, 0.0])
    """

    def __init__(
        self,
        width: int,
        *,
        optimizer: Optimizer | None = None,
        intercept: bool = True,
        labels: Literal["0/1", "-1/1"] = "0/1",
        initial_weights: npt.ArrayLike | None = None,
        initial_intercept: float = 0.0,
    ) -> None:
        if labels not in ("0/1", "-1/1"):
            raise ConfigurationError(
                f'LogisticRegression(labels=): expected "0/1" or "-1/1", given {labels!r}'
            )
        self.labels = labels
        super().__init__(
            width,
            loss=LogLoss(),
            optimizer=optimizer or FTRL(alpha=0.3, beta=0.1),
            intercept=intercept,
            initial_weights=initial_weights,
            initial_intercept=initial_intercept,
        )

    def predict_probability(self, features: Features) -> Floats:
        """Return the probability of target 1 for each row, as ``predict`` does."""
        return self.predict(features)

    def checked_targets(self, targets: npt.ArrayLike, length: int) -> Floats:
        if self.labels == "0/1":
            return super().checked_targets(targets, length)
        return targets_from_signs(self._name, row_vector(self._name, "targets", targets, length))
