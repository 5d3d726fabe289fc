"""How good a network is on rows with labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.validation.auc import area_under_curve
from streamiter.networks.data import LabelledRows
from streamiter.networks.parameters import Array
from streamiter.networks.prediction import set_values

if TYPE_CHECKING:
    from streamiter.networks.graph import Graph

__all__ = ["EpochResult", "Evaluation", "evaluate", "evaluation_of"]

# Rows at a time: some hundred numbers for each row are 4 MB then, whatever there is to judge by.
_ROWS_AT_ONCE: Final = 4096


@dataclass(frozen=True)
class Evaluation:
    """The mean loss; the share of rows that are predicted right (not of a regression); the area under the ROC curve
    (of two classes, where both are there).
    """

    rows: int
    loss: float
    accuracy: float | None
    auc: float | None

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Those that there are, by name."""
        named = {"loss": self.loss, "accuracy": self.accuracy, "auc": self.auc}
        return {prefix + name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class EpochResult:
    """How an epoch went: ``training_loss`` is the mean over its mini-batches, each before its step."""

    epoch: int
    """From 1 on."""
    training_loss: float | None
    validation: Evaluation | None

    def describe(self) -> str:
        """In a line.

        >>> EpochResult(2, 0.35, Evaluation(100, 0.341, 0.84, 0.9)).describe()
        'loss 0.3410, accuracy 0.8400, AUC 0.9000'
        """
        if self.validation is None:
            return "" if self.training_loss is None else f"training loss {self.training_loss:.4f}"
        named = {
            "loss": self.validation.loss,
            "accuracy": self.validation.accuracy,
            "AUC": self.validation.auc,
        }
        return ", ".join(f"{name} {value:.4f}" for name, value in named.items() if value is not None)


def evaluate(graph: Graph, arrays: Mapping[str, Array], data: LabelledRows) -> Evaluation:
    """Of these parameters on these rows, in a graph that is used for nothing else meanwhile."""
    if not len(data):
        raise ModelError("evaluation: expected rows to judge by, given none")
    loss_function = graph.loss_layer.loss
    loss, correct, scores = 0.0, 0, []
    is_classification = is_binary = False
    for first in range(0, len(data), _ROWS_AT_ONCE):
        some = data[first : first + _ROWS_AT_ONCE]
        graph.feed_data(some.rows, some.labels)
        set_values(graph, arrays)
        loss += graph.loss() * len(some)
        predictions = graph.predictions()
        hits = loss_function.correct(predictions, some.labels)
        if hits is not None:
            is_classification, is_binary = True, graph.loss_layer.output_dim == 1
            correct += int(np.count_nonzero(hits))
            scores.append(predictions.value)
    auc = None
    if is_binary:
        targets = (data.labels > 0.0).astype(np.float64)
        auc = area_under_curve(np.concatenate(scores).astype(np.float64), targets, np.ones(len(data)))
    accuracy = correct / len(data) if is_classification else None
    return Evaluation(len(data), loss / len(data), accuracy, auc)


def evaluation_of(metrics: Mapping[str, Any], prefix: str, rows: int) -> Evaluation | None:
    """The other way round of ``Evaluation.metrics``; None where there are none."""
    if f"{prefix}loss" not in metrics:
        return None
    loss, accuracy, auc = (metrics.get(prefix + name) for name in ("loss", "accuracy", "auc"))
    return Evaluation(rows, math.nan if loss is None else loss, accuracy, auc)
