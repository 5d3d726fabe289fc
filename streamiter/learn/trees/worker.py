"""The step that holds rows and makes histograms of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.learn.rows.checks import Floats
from streamiter.learn.trees.criteria import Criterion
from streamiter.learn.trees.summaries import Summary
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch, Columns, OutputTag, concatenate

__all__ = ["SUMMARIES", "HistogramWorker"]

SUMMARIES: Final = OutputTag("summaries")


class HistogramWorker(Operator, IterationListener):
    """Epoch 0: takes its rows and sums them up. Then, for each tree, a histogram of each node it asks for.

    Once the plan has come with the first tree, only the bins of the features are kept.
    """

    def __init__(self, criterion: Criterion) -> None:
        self._criterion = criterion
        self._batches: list[Columns] = []
        self._bins: npt.NDArray[np.unsignedinteger[Any]] = np.zeros((0, 0), dtype=np.uint8)
        """An array (features, rows): one feature after the other is what histograms go through."""
        self._bins_of_feature: list[int] = []
        self._targets = self._weights = np.zeros(0)
        self._node = np.zeros(0, dtype=np.intp)
        """Where each row has come to."""

    def process_rows_batch(self, rows: Batch, out: Output) -> None:
        assert isinstance(rows, Columns)
        self._batches.append(rows)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if epoch_watermark == 0 and self._batches:
            rows = self._rows()
            self._batches = [rows]
            summary = Summary.of(rows["features"], rows["label"], rows["weight"])
            out.emit(summary.as_plain_data(), tag=SUMMARIES)

    def process_tree(self, growing: dict[str, Any], out: Output) -> None:
        if self._batches:
            self._follow(growing["plan"])
        if len(self._node) == 0:
            return
        self._descend(growing["tree"], growing["cut"])
        if len(growing["nodes"]):
            out.emit(self._histograms(growing["nodes"], len(growing["cut"])))

    def _rows(self) -> Columns:
        rows = concatenate(self._batches)
        assert isinstance(rows, Columns)
        return rows

    def _follow(self, plan: dict[str, Any]) -> None:
        rows = self._rows()
        self._batches = []
        self._bins_of_feature = [len(cuts) + 1 for cuts in plan["cuts"]]
        self._bins = _bins_of(rows["features"], plan["cuts"])
        self._targets = (rows["label"] - plan["center"]) / plan["scale"]
        self._weights = _on_grid(rows["weight"], plan["grid"])
        if plan["weighs targets"]:
            self._targets = _on_grid(self._targets * rows["weight"], plan["grid"])
        self._node = np.zeros(len(rows), dtype=np.intp)

    def _descend(self, tree: dict[str, Any], cut: npt.NDArray[np.intp]) -> None:
        """One step down, where a node has been split."""
        feature = tree["feature"][self._node]
        rows = np.flatnonzero(feature >= 0)
        nodes = self._node[rows]
        right = self._bins[feature[rows], rows] > cut[nodes]
        self._node[rows] = tree["child"][nodes] + right

    def _histograms(self, nodes: npt.NDArray[np.intp], tree_size: int) -> Floats:
        place = np.full(tree_size, -1, dtype=np.intp)
        place[nodes] = np.arange(len(nodes))
        rows = np.flatnonzero(place[self._node] >= 0)
        places, targets, weights = place[self._node[rows]], self._targets[rows], self._weights[rows]
        histograms = np.zeros((len(nodes), sum(self._bins_of_feature), self._criterion.columns))
        start = 0
        for bins_of_rows, bins in zip(self._bins, self._bins_of_feature, strict=True):
            if bins > 1 or start == 0:  # One bin divides nothing; of the first feature come the totals.
                histograms[:, start : start + bins] = self._criterion.histogram(
                    places * bins + bins_of_rows[rows], len(nodes) * bins, targets, weights
                ).reshape(len(nodes), bins, -1)
            start += bins
        return histograms

    def snapshot(self) -> dict[str, Any]:
        return {
            "rows": list(self._batches),
            "bins": self._bins,
            "bins of feature": self._bins_of_feature,
            "targets": self._targets,
            "weights": self._weights,
            "node": self._node.copy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._batches, self._bins = list(state["rows"]), state["bins"]
        self._bins_of_feature = state["bins of feature"]
        self._targets, self._weights, self._node = state["targets"], state["weights"], state["node"].copy()


def _bins_of(features: Floats, cuts: Sequence[Floats]) -> npt.NDArray[np.unsignedinteger[Any]]:
    few = max(map(len, cuts)) <= np.iinfo(np.uint8).max
    bins = np.empty(features.shape[::-1], dtype=np.uint8 if few else np.uint16)
    for feature, feature_cuts in enumerate(cuts):
        bins[feature] = np.searchsorted(feature_cuts, features[:, feature])
    return bins


def _on_grid(numbers: Floats, grid: float) -> Floats:
    return np.rint(numbers / grid) * grid
