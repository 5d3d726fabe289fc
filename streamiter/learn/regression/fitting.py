"""Training a linear model offline, from arrays or from a topic, with its progress on the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import check_parallelism
from streamiter.flow.stream import Stream
from streamiter.learn.estimators.running import rounds_done, run_offline, was_interrupted
from streamiter.learn.estimators.sources import (
    labelled,
    no_path,
    read_topic,
    refuse_arrays_with_topic,
    refuse_options_of_topics,
)
from streamiter.learn.linear.model import LinearModel
from streamiter.learn.offline.training import train_offline
from streamiter.learn.rows.examples import CheckedExamples, Examples, Extract, as_examples
from streamiter.learn.rows.feature_rows import Features
from streamiter.optimizers import GradientDescent, Optimizer, checked_optimizer
from streamiter.records import Batch
from streamiter.topics.topic import Decoder, Topic

__all__ = ["Fit", "OfflineModel"]


@dataclass(frozen=True, slots=True, repr=False)
class Fit:
    """How a training went.

    >>> Fit(rounds=2, losses=[0.69315, 0.31623], ended_by="rounds")
    Fit(rounds=2, loss=0.3162, ended_by='rounds')
    """

    rounds: int
    """How many were made."""
    losses: list[float]
    """The mean loss before each step; a step has been made in each round, or by each worker in each round."""
    ended_by: Literal["rounds", "tolerance", "interruption"]
    """All rounds were made, or the loss was small enough, or Ctrl-C."""

    @property
    def steps(self) -> int:
        """How many there were."""
        return len(self.losses)

    @property
    def loss(self) -> float:
        """The mean loss before the last step; NaN where there was none."""
        return self.losses[-1] if self.losses else math.nan

    def __repr__(self) -> str:
        return f"Fit(rounds={self.rounds}, loss={self.loss:.4g}, ended_by={self.ended_by!r})"


class OfflineModel(LinearModel):
    """A linear model that can also be trained offline: on all examples there are, round after round."""

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
        """Train on features (a matrix or ``SparseRows``) and targets, or on a topic, as it is now.

        It goes on from the weights there are. A round is a step
        ``w −= learning_rate · mean gradient``, then ``w ·= 1 − learning_rate·l2`` and
        ``w −= learning_rate·l1·sign(w)``, which spare the intercept; another ``optimizer`` may be given instead.
        The arguments from ``mini_batch`` to ``replay`` are those of
        :func:`~streamiter.learn.offline.training.train_offline`, which says what they do; ``parallelism`` is the
        number of workers.

        Of a topic, ``decode`` says how its values are read, and ``extract(batch)`` makes ``Examples``; the records of
        libsvm and dummy files are understood without.

        On a terminal a bar shows the rounds and the loss (``progress`` True or False: in any case, never). Ctrl-C
        ends the training with the round under way, and the model is what it has learned so far; a second one
        leaves it as it was and raises KeyboardInterrupt.

        Raises ModelError for examples that cannot be learned from (``BadRows`` where single rows of arrays are at
        fault), JobFailed for those of a topic.

        >>> from streamiter.learn import LinearRegression
        >>> model = LinearRegression(1)
        >>> fit = model.fit([[0.0], [1.0], [2.0], [3.0]], [1.0, 3.0, 5.0, 7.0], rounds=1000, tolerance=1e-9)
        >>> fit.ended_by, model.predict([[10.0]]).round(2).tolist()
        ('tolerance', [21.0])
        """
        title = f"{self._name}.fit"
        check_parallelism(parallelism, step=title)
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
            if extract is None:
                return self.checked_examples(labelled(f"{self._name}.fit", batch, self.width))
            return self.checked_examples(as_examples(f"{self._name}.fit(extract=)", extract(batch)))

        return checked

    def _of_arrays(
        self,
        flow: Flow,
        features: Features,
        targets: npt.ArrayLike | None,
        sample_weights: npt.ArrayLike | None,
        parallelism: int,
    ) -> Stream:
        """A record for each worker, with all its rows: every n-th of them."""
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
