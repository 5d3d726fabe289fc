"""Training a linear model offline, from arrays or from a topic, with its progress on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import check_parallelism
from streamiter.flow.stream import Stream
from streamiter.learn.examples import CheckedExamples, Examples, Extract
from streamiter.learn.feature_rows import Features
from streamiter.learn.linear import LinearModel
from streamiter.learn.offline import run_offline
from streamiter.learn.offline_training import train_offline
from streamiter.learn.optimizers import GradientDescent, Optimizer
from streamiter.learn.sparse import SparseRows
from streamiter.records import Batch, Columns
from streamiter.topics.topic import Topic

__all__ = ["Fit", "OfflineModel"]


@dataclass(frozen=True, slots=True)
class Fit:
    """How a training went."""

    losses: list[float]
    """The mean loss before each step."""
    ended_by: Literal["rounds", "tolerance", "interruption"]
    """All rounds were made, or the loss was small enough, or Ctrl-C."""

    @property
    def steps(self) -> int:
        """How many there were."""
        return len(self.losses)


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
        parallelism: int = 1,
        extract: Extract | None = None,
        replay: bool = False,
        progress: bool | None = None,
    ) -> Fit:
        """Train on features (a matrix or ``SparseRows``) and targets, or on a topic, as it is now.

        It goes on from the weights there are. A round is a step
        ``w −= learning_rate · mean gradient``, then ``w ·= 1 − learning_rate·l2`` and
        ``w −= learning_rate·l1·sign(w)``, which spare the intercept; another ``optimizer`` may be given instead.
        The arguments from ``mini_batch`` to ``mode`` and ``replay`` are those of
        :func:`~streamiter.learn.offline_training.train_offline`, which says what they do; ``parallelism`` is the
        number of workers.

        Of a topic, ``extract(batch)`` makes ``Examples``; the records of libsvm and dummy files are understood
        without.

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
        if isinstance(examples, Topic):
            stream, checked = self._of_topic(flow, examples, targets, sample_weights, extract)
        else:
            stream, checked = self._of_arrays(flow, examples, targets, sample_weights, parallelism)
        rule = optimizer or GradientDescent(learning_rate, l1=l1, l2=l2)
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

        run_offline(flow, title=title, rounds=rounds, progress=progress, describe=describe)
        if models.items:
            [model] = models.items
            self.take_over(model.parameters, steps=len(losses.items), records=model.records)
        expected = rounds if mode == "synchronous" else rounds * parallelism
        return Fit(losses.items, _ended_by(losses.items, expected, tolerance))

    def _of_arrays(
        self,
        flow: Flow,
        features: Features,
        targets: npt.ArrayLike | None,
        sample_weights: npt.ArrayLike | None,
        parallelism: int,
    ) -> tuple[Stream, Callable[[Any], CheckedExamples]]:
        """A record for each worker, with all its rows: every n-th of them."""
        if targets is None:
            raise ModelError(
                f"{self._name}.fit: expected targets, one for each row, given none; pass them second"
            )
        examples = self.checked_examples(Examples(features, targets, sample_weights))
        if not len(examples):
            raise ModelError(f"{self._name}.fit: expected rows to learn from, given none")
        shares = [examples[worker::parallelism] for worker in range(parallelism)]
        stream = flow.from_items(shares, name="examples", parallelism=parallelism)
        return stream, CheckedExamples.concatenate

    def _of_topic(
        self,
        flow: Flow,
        topic: Topic,
        targets: npt.ArrayLike | None,
        sample_weights: npt.ArrayLike | None,
        extract: Extract | None,
    ) -> tuple[Stream, Callable[[Any], CheckedExamples]]:
        if targets is not None or sample_weights is not None:
            raise ModelError(
                f"{self._name}.fit: expected the topic {topic.name!r} to bring targets and weights, given them as "
                "arrays; write extract= to take them from the records"
            )
        records = flow.source(
            topic, stop=None if getattr(topic, "bounded", False) else "latest", parallelism=1
        )
        extracted = extract or self._labelled
        return records, lambda batch: self.checked_examples(extracted(batch))

    def _labelled(self, batch: Batch) -> Examples:
        """Of records as libsvm and dummy files give them."""
        if isinstance(batch, Columns) and {"label", "features"} <= set(batch.names):
            return Examples(batch["features"], batch["label"])
        for record in batch:
            if not (isinstance(record, dict) and {"label", "indices", "values"} <= record.keys()):
                raise ConfigurationError(
                    f"{self._name}.fit: expected records with label, indices and values, given {str(record)[:80]}; "
                    "write extract= to make Examples of them"
                )
        starts = np.cumsum([0, *(len(record["indices"]) for record in batch)])
        indices = np.concatenate([record["indices"] for record in batch])
        values = np.concatenate([record["values"] for record in batch])
        return Examples(
            SparseRows(starts, indices, values, self.width), np.array([record["label"] for record in batch])
        )


def _ended_by(
    losses: list[float], steps: int, tolerance: float | None
) -> Literal["rounds", "tolerance", "interruption"]:
    if tolerance is not None and losses and losses[-1] <= tolerance:
        return "tolerance"
    return "rounds" if len(losses) >= steps else "interruption"
