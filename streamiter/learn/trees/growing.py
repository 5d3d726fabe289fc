"""The step that holds rows and makes histograms of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.flow.flow import all_or_nothing
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.api import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult
from streamiter.iteration.helpers import all_reduce, last_round
from streamiter.learn.rows.examples import Floats
from streamiter.learn.trees.tree import (
    Criterion,
    FeatureSummary,
    Gini,
    Tree,
    Variance,
    best_splits,
    cuts_between,
    exact_grid,
)
from streamiter.operators.operator import Context, IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch, Columns, OutputTag, concatenate

__all__ = [
    "HistogramWorker",
    "TreeOptions",
    "TreeOwner",
    "grow_tree",
    "grown_tree",
]


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
            summary = FeatureSummary.of(rows["features"], rows["label"], rows["weight"])
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


# Each worker makes a histogram of so many bytes in a round, and the owner has the sum of all and their running
# totals: still less than the rows of a data set for which it matters.
_HISTOGRAM_BYTES: Final = 64 << 20

# Scores are sums of a few quotients, each right to 1e-16 of the node's weight: below this a gain is rounding.
_NO_GAIN: Final = 1e-14


class TreeOptions(NamedTuple):
    """How a tree is to grow.

    The step that holds the tree and splits its nodes.
    """

    classes: int | None
    """How many classes there are; None for regression."""
    maximum_depth: int
    minimum_rows: int
    minimum_gain: float
    maximum_bins: int

    def criterion(self) -> Criterion:
        """What its splits are judged by."""
        return Variance() if self.classes is None else Gini(self.classes)


class TreeOwner(Operator):
    """From the summary of all rows the plan; then from each histogram the next splits, level by level.

    What it emits each time is the tree so far, with the ``nodes`` whose histograms it wants next: those of one
    level, or as many of them as fit into memory. When it wants none the tree has grown.
    """

    def __init__(self, options: TreeOptions) -> None:
        self._options = options
        self._criterion = options.criterion()
        self._plan: dict[str, Any] = {}
        self._feature = [-1]
        self._threshold = [0.0]
        self._cut = [0]
        self._child = [0]
        self._depth = [0]
        self._statistics: list[Floats] = [np.zeros(self._criterion.columns)]
        self._waiting = [0]
        """Nodes that may be split, in the order of the tree."""

    def process_summary(self, summary: dict[str, Any], out: Output) -> None:
        self._plan = self._planned(FeatureSummary(**summary))
        self._emit(out)

    def _planned(self, summary: FeatureSummary) -> dict[str, Any]:
        cuts = [
            cuts_between(values, counts, self._options.maximum_bins)
            for values, counts in zip(summary.values, summary.counts, strict=True)
        ]
        plan: dict[str, Any] = {
            "cuts": cuts,
            "grid": exact_grid(summary.rows, summary.largest_weight),
            "center": 0.0,
            "scale": 1.0,
            "weighs targets": self._options.classes is None,
        }
        if self._options.classes is None:
            low, high = summary.lowest_label, summary.highest_label
            plan["center"] = low / 2 + high / 2
            plan["scale"] = _power_of_two_above(high / 2 - low / 2)
        return plan

    def process_histograms(self, histograms: Floats, out: Output) -> None:
        asked, bins = self._asked(), [len(cuts) + 1 for cuts in self._plan["cuts"]]
        if asked[0] == 0:
            self._statistics[0] = histograms[0, : bins[0]].sum(axis=0)
        splits = best_splits(histograms, bins, self._criterion, self._options.minimum_rows)
        self._waiting = self._waiting[len(asked) :]
        for place, node in enumerate(asked):
            if self._is_worth_it(float(splits.gain[place]), node):
                self._split(node, int(splits.feature[place]), int(splits.cut[place]), splits.left[place])
        self._emit(out)

    def _asked(self) -> list[int]:
        """Those to be split next, as many as fit."""
        bins = sum(len(cuts) + 1 for cuts in self._plan["cuts"])
        node_bytes = bins * self._criterion.columns * np.float64().nbytes
        return self._waiting[: max(1, _HISTOGRAM_BYTES // node_bytes)]

    def _is_worth_it(self, gain: float, node: int) -> bool:
        weight = float(self._criterion.weight(self._statistics[node]))
        whole = float(self._criterion.weight(self._statistics[0]))
        return (
            gain > _NO_GAIN * weight and gain * self._plan["scale"] ** 2 >= self._options.minimum_gain * whole
        )

    def _split(self, node: int, feature: int, cut: int, left: Floats) -> None:
        self._feature[node], self._cut[node] = feature, cut
        self._threshold[node] = float(self._plan["cuts"][feature][cut])
        self._child[node] = len(self._feature)
        for statistics in (left, self._statistics[node] - left):
            self._add_leaf(statistics, self._depth[node] + 1)

    def _add_leaf(self, statistics: Floats, depth: int) -> None:
        node = len(self._feature)
        self._feature.append(-1)
        self._threshold.append(0.0)
        self._cut.append(0)
        self._child.append(0)
        self._depth.append(depth)
        self._statistics.append(statistics)
        weight = self._criterion.weight(statistics)
        could_gain = float(weight - self._criterion.score(statistics)) > _NO_GAIN * float(weight)
        enough_rows = self._criterion.rows(statistics) >= 2 * self._options.minimum_rows
        if depth < self._options.maximum_depth and enough_rows and could_gain:
            self._waiting.append(node)

    def _emit(self, out: Output) -> None:
        tree = {
            "feature": np.array(self._feature, dtype=np.intp),
            "threshold": np.array(self._threshold),
            "child": np.array(self._child, dtype=np.intp),
            "statistics": np.array(self._statistics),
        }
        nodes = np.array(self._asked() if self._waiting else [], dtype=np.intp)
        out.emit(
            {"plan": self._plan, "tree": tree, "cut": np.array(self._cut, dtype=np.intp), "nodes": nodes}
        )

    def snapshot(self) -> dict[str, Any]:
        return {
            "plan": self._plan,
            "feature": list(self._feature),
            "threshold": list(self._threshold),
            "cut": list(self._cut),
            "child": list(self._child),
            "depth": list(self._depth),
            "statistics": list(self._statistics),
            "waiting": list(self._waiting),
        }

    def restore(self, state: dict[str, Any]) -> None:
        # The lists go on growing: they are not those of the snapshot.
        self._plan, self._feature, self._threshold = state["plan"], [*state["feature"]], [*state["threshold"]]
        self._cut, self._child, self._depth = [*state["cut"]], [*state["child"]], [*state["depth"]]
        self._statistics, self._waiting = [*state["statistics"]], [*state["waiting"]]


def _power_of_two_above(number: float) -> float:
    """So that dividing by it rounds nothing; 1 for 0."""
    if number == 0.0:
        return 1.0
    _, exponent = np.frexp(number)
    return float(np.ldexp(1.0, min(int(exponent), np.finfo(np.float64).maxexp - 1)))


@all_or_nothing
def grow_tree(rows: Stream, options: TreeOptions) -> dict[str, Stream]:
    """``"tree"``: how the owner left it, for ``grown_tree``; ``"leaves"``: their number by round.

    ``rows`` is a stream of ``Columns``: features (a matrix), label, weight. The workers are as many as it has
    subtasks, and the tree is the same however many.

    The loop in which a tree grows: an owner and its workers in a bounded iteration.
    """
    no_tree = rows.flow.from_items([], name="no tree", parallelism=1)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        [trees], [rows] = variables, data
        histograms = connect(tree=trees.broadcast(), rows=rows).process(
            lambda: HistogramWorker(options.criterion()), name="histograms", parallelism=rows.parallelism
        )
        everything = connect(
            summary=all_reduce(histograms.side_output(SUMMARIES), _merged, name="merge summaries"),
            histograms=all_reduce(histograms, np.add, name="add histograms"),
        )
        grown = everything.process(lambda: TreeOwner(options), name="split", parallelism=1)
        return IterationBodyResult(
            feedback_variable_streams=[grown],
            output_streams={"tree": last_round(grown, name="last"), "leaves": grown.map(_count_leaves)},
            termination_criteria=grown.filter(lambda growing: len(growing["nodes"]), name="still growing"),
        )

    return iterate_bounded_streams_until_termination([no_tree], [rows], body)


def grown_tree(grown: dict[str, Any], options: TreeOptions) -> Tree:
    """The tree itself, with what its nodes predict."""
    arrays, plan, criterion = grown["tree"], grown["plan"], options.criterion()
    statistics = arrays["statistics"]
    return Tree(
        feature=arrays["feature"],
        threshold=arrays["threshold"],
        child=arrays["child"],
        rows=criterion.rows(statistics).astype(np.intp),
        values=criterion.values(statistics) * plan["scale"] + plan["center"],
    )


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return FeatureSummary(**first).merged(FeatureSummary(**second)).as_plain_data()


def _count_leaves(growing: dict[str, Any]) -> int:
    return int(np.count_nonzero(growing["tree"]["feature"] < 0))
