"""The step that holds the tree and splits its nodes."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.learn.rows.checks import Floats
from streamiter.learn.trees.criteria import Criterion, Gini, Variance, exact_grid
from streamiter.learn.trees.splits import best_splits
from streamiter.learn.trees.summaries import Summary, cuts_between
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output

__all__ = ["TreeOptions", "TreeOwner"]

# Each worker makes a histogram of so many bytes in a round, and the owner has the sum of all and their running
# totals: still less than the rows of a data set for which it matters.
_HISTOGRAM_BYTES: Final = 64 << 20

# Scores are sums of a few quotients, each right to 1e-16 of the node's weight: below this a gain is rounding.
_NO_GAIN: Final = 1e-14


class TreeOptions(NamedTuple):
    """How a tree is to grow."""

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
        self._plan = self._planned(Summary(**summary))
        self._emit(out)

    def _planned(self, summary: Summary) -> dict[str, Any]:
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
