"""Predictions of a network with parameters at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from streamiter.models.linear import rows_to_predict
from streamiter.networks.losses.loss import Predictions
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array
from streamiter.sparse_rows import SparseRows

if TYPE_CHECKING:
    from streamiter.networks.graph import Graph

__all__ = ["NetworkPredictor", "set_values"]


def set_values(graph: Graph, arrays: Mapping[str, Array]) -> None:
    """Give the graph the parameters that its mini-batch needs."""
    holder = graph.place_holder
    needs_all = not holder.is_sparse or len(holder.indices) == holder.feature_dimension
    for parameter in graph.parameters:
        whole = arrays[parameter.name]
        parameter.values = whole[holder.indices] if parameter.by_feature and not needs_all else whole


@final
class NetworkPredictor:
    """Predicts with one set of parameters. Rows: an array of features, (rows, features) or a table with a column for
    each feature; a sparse row is the tuple ``(indices, values)``, many are a list of such tuples or ``SparseRows``.

    Called, it gives for each row the probability of the positive class; of several classes the one that is predicted;
    otherwise the score, which of a regression is the value itself.
    """

    def __init__(self, network: Network, arrays: Mapping[str, Array], subject: str = "network") -> None:
        self._subject = subject
        self._graph = network.graph()
        self._arrays = arrays
        self._features = self._graph.place_holder.feature_dimension
        self._rows_at_once = network.configuration.train.batch_size

    def __call__(self, x: object) -> Any:
        rows, is_single = rows_to_predict(self._subject, x, self._features)
        parts = [_answer(part, self._graph) for part in self._parts(rows)]
        answers = np.concatenate(parts) if parts else np.zeros(0)
        return answers[0].item() if is_single else answers

    def predictions(self, x: object) -> Predictions:
        """All that the loss function makes of the scores."""
        parts = list(self._parts(rows_to_predict(self._subject, x, self._features)[0]))
        if not parts:
            return Predictions(np.zeros(0))
        return Predictions(
            np.concatenate([part.value for part in parts]),
            _concatenated([part.probability for part in parts]),
            _concatenated([part.label for part in parts]),
        )

    def _parts(self, rows: SparseRows | Array) -> Iterator[Predictions]:
        for first in range(0, len(rows), self._rows_at_once):
            self._graph.feed_data(rows[first : first + self._rows_at_once])
            set_values(self._graph, self._arrays)
            yield self._graph.predictions()


def _answer(predictions: Predictions, graph: Graph) -> Array:
    has_several_classes = graph.loss_layer.output_dim > 1
    if has_several_classes and predictions.label is not None:
        return predictions.label
    return predictions.value if predictions.probability is None else predictions.probability


def _concatenated(parts: list[Array | None]) -> Array | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None
