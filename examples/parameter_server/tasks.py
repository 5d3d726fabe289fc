"""The tasks that are trained on the parameter server, their rows, and their losses on held-out rows."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamiter import Flow, topic
from streamiter.learn import (
    FTRL,
    Examples,
    ParameterServerTraining,
    SparseRows,
    k_means_on_parameter_server,
    train_on_parameter_server,
)
from streamiter.learn.quality.score_metrics import area_under_curve

CLUSTERS = 10


@dataclass
class Task(abc.ABC):
    """Rows for training, and rows for evaluation; targets are 0 or 1."""

    train: Examples
    held_out: Examples

    loss_name: ClassVar[str]
    judged_by: ClassVar[tuple[str, ...]] = ()
    """The names of the measures of the last version, in addition to its loss."""

    @abc.abstractmethod
    def training(self, flow: Flow, server: Any, **options: Any) -> ParameterServerTraining:
        """Add the training to the flow."""

    @abc.abstractmethod
    def loss(self, parameters: Any) -> float:
        """Return the loss on the held-out rows."""

    def judge(self, parameters: Any) -> tuple[float, ...]:
        """Return the measures that ``judged_by`` names."""
        return ()


class LogisticRegression(Task):
    """The weights of features, for the chance that a target is 1."""

    loss_name = "log loss"
    judged_by = ("accuracy", "AUC")

    def training(self, flow: Flow, server: Any, **options: Any) -> ParameterServerTraining:
        rows, targets = self.train.features, np.asarray(self.train.targets)
        assert isinstance(rows, SparseRows)

        def examples_of(numbers: Sequence[int]) -> Examples:
            return Examples(rows[numbers], targets[numbers])

        return train_on_parameter_server(
            flow.from_items(np.arange(len(rows)), name="rows"),
            server,
            features=rows.width,
            optimizer=FTRL(alpha=0.2, beta=0.1),
            extract=examples_of,
            **options,
        )

    def loss(self, parameters: Any) -> float:
        probabilities, targets = self._predicted(parameters), np.asarray(self.held_out.targets)
        return float(-np.mean(np.log(np.where(targets > 0, probabilities, 1 - probabilities))))

    def judge(self, parameters: Any) -> tuple[float, ...]:
        probabilities, targets = self._predicted(parameters), np.asarray(self.held_out.targets)
        area = area_under_curve(probabilities, targets, np.ones(len(targets)))
        assert area is not None
        return float(np.mean((probabilities >= 0.5) == targets)), area

    def _predicted(self, parameters: Any) -> Any:
        """Return the probability of target 1 for each row."""
        rows: Any = self.held_out.features
        return 1.0 / (1.0 + np.exp(-rows.dot(parameters["weights"]) - parameters["intercept"]))


class Clustering(Task):
    """k-means of the same rows, without their targets."""

    loss_name = "mean squared distance"

    def training(self, flow: Flow, server: Any, **options: Any) -> ParameterServerTraining:
        points = as_points(self.train)
        first = np.random.default_rng(0).choice(len(points), CLUSTERS, replace=False)
        return k_means_on_parameter_server(
            flow.from_items(points, name="rows"),
            server,
            initial=points[first],
            decay=0.99,  # Rows of some hundred mini-batches ago were nearest to other centroids.
            **options,
        )

    def loss(self, parameters: Any) -> float:
        points, lengths = self._points_held_out
        centroids = parameters["centroids"]
        nearest = ((centroids**2).sum(axis=1) - 2 * points @ centroids.T).min(axis=1)
        return float((lengths + nearest).mean())

    @functools.cached_property
    def _points_held_out(self) -> tuple[Any, Any]:
        """Return the held-out points, and the squared length of each point."""
        points = as_points(self.held_out)
        return points, (points**2).sum(axis=1)


def as_points(examples: Examples) -> Any:
    """Return the examples as an array of (rows, features)."""
    rows = examples.features
    assert isinstance(rows, SparseRows)
    return rows.to_dense()


# -- rows ----------------------------------------------------------------------------------------------------


def made_up_examples(rows: int, seed: int) -> Examples:
    """Make examples with 15 of 200 features each, some of them rare; all seeds share the weights behind the targets."""
    weights = np.random.default_rng(0).normal(size=200)
    generator = np.random.default_rng(seed)
    there = np.argsort(generator.random((rows, 200)) ** (1 / np.linspace(0.2, 3, 200)), axis=1)[:, -15:]
    chances = 1 / (1 + np.exp(-weights[there].sum(axis=1)))
    features = SparseRows.from_rows(((row, np.ones(15)) for row in there), width=200)
    return Examples(features, (generator.random(rows) < chances).astype(float))


def examples_in(urls: Sequence[str]) -> list[Examples]:
    """Return the examples of each topic, with the features of all topics."""
    parts = []
    for url in urls:
        flow = Flow("read")
        records = flow.source(topic(url), stop="latest").collect()
        flow.run()
        parts.append(records.items)
    width = 1 + max(int(max(record["indices"], default=0)) for records in parts for record in records)
    return [
        Examples(
            SparseRows.from_rows(((record["indices"], record["values"]) for record in records), width),
            np.array([float(record["label"] > 0) for record in records]),
        )
        for records in parts
    ]
