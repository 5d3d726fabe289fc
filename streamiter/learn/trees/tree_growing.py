"""How a decision tree grows: level by level, in a bounded iteration of workers and an owner of the tree.

Workers hold the rows. In epoch 0 they summarize the values of each feature, and the owner decides where to cut each
feature into *bins*. In each later epoch the owner asks for histograms of some leaves, which count the rows of each bin;
the owner finds the best split of each leaf in the sums of all workers' histograms
(:mod:`~streamiter.learn.trees.tree_splits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from streamiter.errors import CheckpointError
from streamiter.flow.flow import all_or_nothing, connect
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult
from streamiter.iteration.helpers import all_reduce, last_round
from streamiter.learn.rows import row_hashes, share_of
from streamiter.learn.trees.tree_splits import Criterion, Gini, Variance, best_splits, exact_grid
from streamiter.operators.declared_state import COPIED, DeclaredOperator, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context, IterationListener
from streamiter.operators.output import Output
from streamiter.values.numbers import Floats, Indices
from streamiter.values.records import Batch, Columns, OutputTag, concatenate


class TreeOptions(NamedTuple):
    """The settings of a tree that grows; ``DecisionTree`` describes them."""

    classes: int | None
    """The number of classes; None for regression."""
    maximum_depth: int
    minimum_rows: int
    minimum_gain: float
    maximum_bins: int

    def criterion(self) -> Criterion:
        """Return the criterion that splits are judged by."""
        return Variance() if self.classes is None else Gini(self.classes)


@all_or_nothing
def grow_tree(rows: Stream, options: TreeOptions) -> dict[str, Stream]:
    """Return two streams: ``"tree"``, the last state of the owner, and ``"leaves"``, their number after each round.

    ``rows`` is a stream of ``Columns``: features (a matrix), label, weight. There are as many workers as ``rows`` has
    subtasks, and the tree does not depend on their number. ``grown_tree`` makes a tree from the owner's last state.
    """
    no_tree: Stream = rows.flow.from_items([], name="no tree", parallelism=1)

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


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, object]:
    return FeatureSummary(**first).merged(FeatureSummary(**second))._asdict()


def _count_leaves(growing: Growing) -> int:
    return int(np.count_nonzero(growing["tree"]["feature"] < 0))


class Plan(TypedDict):
    """How rows become numbers that add up without rounding, decided from the summary of all rows."""

    cuts: list[Floats]
    """The thresholds between the bins of each feature."""
    grid: float
    """Weights are multiples of this number."""
    center: float
    """Targets are labels minus ``center``, divided by ``scale``."""
    scale: float


class GrowingArrays(TypedDict):
    """The arrays of a growing tree, with an entry for each node."""

    feature: Indices
    threshold: Floats
    child: Indices
    statistics: Floats


class Growing(TypedDict):
    """The state that the owner sends to the workers."""

    plan: Plan
    tree: GrowingArrays
    cut: Indices
    """The bin up to which rows go to the first child, for each node."""
    nodes: Indices
    """The nodes whose histograms the owner needs next; none if the tree is complete."""


SUMMARIES: Final = OutputTag("summaries")
"""The side output of a worker: a summary of its rows, in epoch 0."""


class HistogramWorker(DeclaredOperator, IterationListener):
    """Holds rows, and makes histograms of them for the nodes that the owner asks for.

    In epoch 0 a worker reads its rows and emits a summary of them. Then the owner sends the growing tree in each epoch,
    and the worker emits a histogram of each node that the tree asks for. The first tree contains the plan with the bins
    of each feature; then the worker keeps only the bins of its rows.
    """

    _batches: list[Columns] = declared(made=list, form=COPIED)
    _bins: npt.NDArray[np.unsignedinteger[Any]] = declared(np.zeros((0, 0), dtype=np.uint8))
    """An array (features, rows): histograms are made for one feature after the other."""
    _bins_of_feature: list[int] = declared(made=list)
    _targets: Floats = declared(np.zeros(0))
    _weights: Floats = declared(np.zeros(0))
    _node: npt.NDArray[np.intp] = declared(np.zeros(0, dtype=np.intp), form=COPIED)
    """The node that each row has reached."""

    def __init__(self, criterion: Criterion) -> None:
        self._criterion = criterion

    def process_rows_batch(self, rows: Batch, out: Output) -> None:
        assert isinstance(rows, Columns)
        self._batches.append(rows)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if epoch_watermark == 0 and self._batches:
            rows = concatenate(self._batches)
            assert isinstance(rows, Columns)
            self._batches = [rows]
            summary = FeatureSummary.of(rows["features"], rows["label"], rows["weight"])
            out.emit(summary._asdict(), tag=SUMMARIES)

    def process_tree(self, growing: Growing, out: Output) -> None:
        if self._batches:
            self._put_into_bins(growing["plan"])
        if len(self._node) == 0:
            return
        self._descend(growing["tree"], growing["cut"])
        if len(growing["nodes"]):
            out.emit(self._histograms(growing["nodes"], len(growing["cut"])))

    def _put_into_bins(self, plan: Plan) -> None:
        [rows], self._batches = self._batches, []
        self._bins_of_feature = [len(cuts) + 1 for cuts in plan["cuts"]]
        self._bins = _bins_of(rows["features"], plan["cuts"])
        self._targets = (rows["label"] - plan["center"]) / plan["scale"]
        self._weights = _on_grid(rows["weight"], plan["grid"])
        if isinstance(self._criterion, Variance):
            self._targets = _on_grid(self._targets * rows["weight"], plan["grid"])
        self._node = np.zeros(len(rows), dtype=np.intp)

    def _descend(self, tree: GrowingArrays, cut: Indices) -> None:
        """Move the rows of nodes that were split one step down."""
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
            if bins > 1 or start == 0:  # One bin divides nothing; the first feature gives the totals.
                histograms[:, start : start + bins] = self._criterion.histogram(
                    places * bins + bins_of_rows[rows], len(nodes) * bins, targets, weights
                ).reshape(len(nodes), bins, -1)
            start += bins
        return histograms

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give each worker a part of all rows, of equal length."""
        batches = [batch for state in states for batch in state["batches"]]
        binned = [state for state in states if len(state["node"])]
        if batches and binned:
            raise CheckpointError("only some of them have put their rows into bins")
        rows = [concatenate(batches)] if batches else []
        with_bins = binned or states[:1]
        arrays = {
            name: np.concatenate([state[name] for state in with_bins], axis=-1)
            for name in ("bins", "targets", "weights", "node")
        }
        shared = []
        for subtask in range(parallelism):
            binned_share = share_of(len(arrays["node"]), subtask, parallelism)
            own: dict[str, Any] = {name: array[..., binned_share] for name, array in arrays.items()}
            own["batches"] = [all_rows[share_of(len(all_rows), subtask, parallelism)] for all_rows in rows]
            shared.append(own | {"bins of feature": with_bins[0]["bins of feature"]})
        return shared


def _bins_of(features: Floats, cuts: Sequence[Floats]) -> npt.NDArray[np.unsignedinteger[Any]]:
    few = max(map(len, cuts)) <= np.iinfo(np.uint8).max
    bins = np.empty(features.shape[::-1], dtype=np.uint8 if few else np.uint16)
    for feature, feature_cuts in enumerate(cuts):
        bins[feature] = np.searchsorted(feature_cuts, features[:, feature])
    return bins


def _on_grid(numbers: Floats, grid: float) -> Floats:
    return np.rint(numbers / grid) * grid


# In a round each worker makes histograms of at most this many bytes; the owner keeps the sum of all histograms and
# their running totals. For data sets that are large enough to reach this limit, the rows themselves take more.
_HISTOGRAM_BYTES: Final = 64 << 20

# Scores are sums of a few quotients, each exact to 1e-16 of the node's weight: a smaller gain is a rounding error.
_NO_GAIN: Final = 1e-14


class TreeOwner(DeclaredOperator):
    """Holds the growing tree and splits its nodes, level by level. Parallelism 1.

    The owner makes the plan from the summary of all rows, then splits nodes by their histograms. Each time it emits the
    tree so far, with the ``nodes`` whose histograms it needs next: the nodes of one level, or as many of them as fit
    into memory. When it needs none, the tree is complete.
    """

    # Of each node:
    _feature = declared(made=lambda: [-1], form=COPIED)
    _threshold = declared(made=lambda: [0.0], form=COPIED)
    _cut = declared(made=lambda: [0], form=COPIED)
    _child = declared(made=lambda: [0], form=COPIED)
    _depth = declared(made=lambda: [0], form=COPIED)
    _statistics: list[Floats] = declared(form=COPIED)

    _waiting = declared(made=lambda: [0], form=COPIED)
    """The nodes that may be split, in the order in which they were added."""
    _plan: Plan = declared()

    def __init__(self, options: TreeOptions) -> None:
        self._options = options
        self._criterion = options.criterion()
        self._plan = {"cuts": [], "grid": 1.0, "center": 0.0, "scale": 1.0}
        self._statistics = [np.zeros(self._criterion.columns)]

    def definition(self) -> Definition:
        return {**super().definition(), **self._options._asdict()}

    def process_summary(self, summary: dict[str, Any], out: Output) -> None:
        self._plan = self._planned(FeatureSummary(**summary))
        self._emit(out)

    def _planned(self, summary: FeatureSummary) -> Plan:
        cuts = [
            cuts_between(values, counts, self._options.maximum_bins)
            for values, counts in zip(summary.values, summary.counts, strict=True)
        ]
        center, scale = 0.0, 1.0
        if self._options.classes is None:
            low, high = summary.lowest_label, summary.highest_label
            center, scale = low / 2 + high / 2, _power_of_two_above(high / 2 - low / 2)
        grid = exact_grid(summary.rows, summary.largest_weight)
        return {"cuts": cuts, "grid": grid, "center": center, "scale": scale}

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
        """Return the nodes to be split next, as many as fit into memory."""
        bins = sum(len(cuts) + 1 for cuts in self._plan["cuts"])
        node_bytes = bins * self._criterion.columns * np.float64().nbytes
        return self._waiting[: max(1, _HISTOGRAM_BYTES // node_bytes)]

    def _is_worth_it(self, gain: float, node: int) -> bool:
        weight = float(self._criterion.weight(self._statistics[node]))
        whole = float(self._criterion.weight(self._statistics[0]))
        return gain > _NO_GAIN * weight and gain * self._plan["scale"] ** 2 >= self._options.minimum_gain * whole

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
        tree: GrowingArrays = {
            "feature": np.array(self._feature, dtype=np.intp),
            "threshold": np.array(self._threshold),
            "child": np.array(self._child, dtype=np.intp),
            "statistics": np.array(self._statistics),
        }
        nodes = np.array(self._asked() if self._waiting else [], dtype=np.intp)
        out.emit({"plan": self._plan, "tree": tree, "cut": np.array(self._cut, dtype=np.intp), "nodes": nodes})


def _power_of_two_above(number: float) -> float:
    """Return a power of two, by which division is exact; 1 for 0."""
    if number == 0.0:
        return 1.0
    _, exponent = np.frexp(number)
    return float(np.ldexp(1.0, min(int(exponent), np.finfo(np.float64).maxexp - 1)))


_Counts = npt.NDArray[np.intp]

# The error of a quantile of this many values is below half a percent of the rows; a bin of 256 has about as many rows.
# A summary of 1,000 such features takes 256 MB, for any number of rows.
_VALUES_KEPT: Final = 16_384


class FeatureSummary(NamedTuple):
    """A summary of rows: the distinct values of each feature with their counts, and the range of the labels.

    Of more than 16,384 distinct values, the values with the smallest hashes are kept, with their counts. So the sample
    does not depend on the division of the rows among workers.
    """

    rows: int
    largest_weight: float
    lowest_label: float
    highest_label: float
    values: list[Floats]
    counts: list[_Counts]

    @classmethod
    def of(cls, features: Floats, labels: Floats, weights: Floats) -> FeatureSummary:
        """Return the summary of one worker's rows, at least one."""
        kept = [_kept(*np.unique(column, return_counts=True)) for column in features.T]
        return cls(
            rows=len(labels),
            largest_weight=float(weights.max()),
            lowest_label=float(labels.min()),
            highest_label=float(labels.max()),
            values=[values for values, _ in kept],
            counts=[counts for _, counts in kept],
        )

    def merged(self, other: FeatureSummary) -> FeatureSummary:
        """Return the summary of the rows of both summaries."""
        pairs = zip(self.values, self.counts, other.values, other.counts, strict=True)
        merged = [_kept(*_added(*pair)) for pair in pairs]
        return FeatureSummary(
            rows=self.rows + other.rows,
            largest_weight=max(self.largest_weight, other.largest_weight),
            lowest_label=min(self.lowest_label, other.lowest_label),
            highest_label=max(self.highest_label, other.highest_label),
            values=[values for values, _ in merged],
            counts=[counts for _, counts in merged],
        )


def cuts_between(values: Floats, counts: _Counts, maximum_bins: int) -> Floats:
    """Return thresholds that cut the values into bins: between all neighbours, or between quantiles of many values.

    >>> cuts_between(np.array([1.0, 2.0, 4.0]), np.array([5, 1, 1]), 256).tolist()
    [1.5, 3.0]
    >>> cuts_between(np.arange(100.0), np.ones(100, dtype=np.int64), 4).tolist()
    [24.5, 49.5, 74.5]
    """
    if len(values) <= maximum_bins:
        below = np.arange(len(values) - 1)
    else:
        so_far = np.cumsum(counts)
        # Whole numbers, so that rounding does not move a cut.
        wanted = np.arange(1, maximum_bins) * so_far[-1] // maximum_bins
        below = np.unique(np.searchsorted(so_far, wanted))
        below = below[below < len(values) - 1]
    low, high = values[below], values[below + 1]
    middle: Floats = low / 2 + high / 2  # The sum of two large values may be infinite.
    # Neighbouring floats have no middle. The upper float as threshold would put its own rows on the wrong side.
    return np.where((low <= middle) & (middle < high), middle, low)


def _added(values: Floats, counts: _Counts, more_values: Floats, more_counts: _Counts) -> tuple[Floats, _Counts]:
    all_values, at = np.unique(np.concatenate([values, more_values]), return_inverse=True)
    totals = np.zeros(len(all_values), dtype=np.intp)
    np.add.at(totals, at, np.concatenate([counts, more_counts]))
    return all_values, totals


def _kept(values: Floats, counts: _Counts) -> tuple[Floats, _Counts]:
    if len(values) <= _VALUES_KEPT:
        return values, counts
    kept = np.sort(np.argsort(row_hashes(values[:, np.newaxis]), kind="stable")[:_VALUES_KEPT])
    return values[kept], counts[kept]
