"""Whether rows can be learned from, said of all of them before the first mini-batch."""

from __future__ import annotations

from typing import final

import numpy as np

from streamiter.learn.rows.checks import BadRows
from streamiter.learn.rows.feature_rows import refuse_not_finite
from streamiter.networks.data import LabelledRows
from streamiter.networks.network import Network
from streamiter.sparse_rows import Indices, SparseRows

__all__ = ["RowChecks"]


@final
class RowChecks:
    """What a network asks of rows: finite features, labels that its loss knows, as many fields as embeddings have."""

    def __init__(self, network: Network) -> None:
        graph = network.graph()
        self.features = graph.place_holder.feature_dimension
        self._loss_layer = graph.loss_layer
        self._fields = {
            layer.name: layer.output_dim // layer.num_factors
            for layer in network.configuration.layers
            if layer.num_factors
        }

    def check(self, owner: str, data: LabelledRows) -> None:
        """``BadRows`` names the rows that cannot be learned from."""
        refuse_not_finite(owner, data.rows)
        if self._loss_layer.loss.needs_labels:
            self._loss_layer.loss.check_labels(owner, data.labels, self._loss_layer.output_dim)
        for name, fields in self._fields.items():
            counts = _features_in_rows(data, fields)
            bad = np.flatnonzero(counts != fields)
            if len(bad):
                raise BadRows(
                    bad,
                    f"{owner}: expected {fields} features in each row, as layer {name!r} has fields, given "
                    f"{counts[bad[0]]} in row {bad[0]}; change its outputdim (fields × numfactors), or the rows",
                )


def _features_in_rows(data: LabelledRows, fields: int) -> Indices:
    """As an embedding of so many fields counts them."""
    rows = data.rows
    if isinstance(rows, SparseRows):
        return np.diff(rows.indptr)
    if rows.shape[1] == fields:
        return np.full(len(rows), fields)
    counts: Indices = np.count_nonzero(rows, axis=1)
    return counts
