"""A decision tree as arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.learn.rows.examples import Floats

__all__ = [
    "Criterion",
    "FeatureSummary",
    "Gini",
    "Tree",
    "Variance",
    "best_splits",
    "cuts_between",
    "exact_grid",
    "tree_lines",
]


Nodes = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Tree:
    """Node 0 is the root. Rows up to the threshold go on at ``child``, the others at the node behind it.

    >>> tree = Tree(np.array([1, -1, -1]), np.array([2.5, 0, 0]), np.array([1, 0, 0]),
    ...             np.array([7, 4, 3]), np.array([[0.5], [0.0], [1.0]]))
    >>> tree.leaves_of(np.array([[9.0, 2.0], [9.0, 3.0]])).tolist(), tree.depth, tree.leaves
    ([1, 2], 1, 2)
    """

    feature: Nodes
    """Which feature each node is split by; -1 for a leaf."""
    threshold: Floats
    child: Nodes
    rows: Nodes
    """How many rows it has learned from that came to each node."""
    values: Floats
    """An array (nodes, values): the probability of each class, or the one value to predict."""

    def leaves_of(self, features: Floats) -> Nodes:
        """The leaf of each row of a matrix (rows, features)."""
        nodes = np.zeros(len(features), dtype=np.intp)
        rows = np.arange(len(features))
        while len(rows := rows[self.feature[nodes[rows]] >= 0]):
            at = nodes[rows]
            right = features[rows, self.feature[at]] > self.threshold[at]
            nodes[rows] = self.child[at] + right
        return nodes

    @property
    def depths(self) -> Nodes:
        """How far each node is from the root."""
        depths = np.zeros(len(self.feature), dtype=np.intp)
        for node in np.flatnonzero(self.feature >= 0):  # Children come behind their parents.
            child = self.child[node]
            depths[child : child + 2] = depths[node] + 1
        return depths

    @property
    def depth(self) -> int:
        """Splits between the root and the farthest leaf."""
        return int(self.depths.max())

    @property
    def leaves(self) -> int:
        """How many leaves there are."""
        return int(np.count_nonzero(self.feature < 0))

    def as_plain_data(self) -> dict[str, Any]:
        """Its arrays by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_plain_data(cls, arrays: Mapping[str, Any]) -> Tree:
        """What :meth:`as_plain_data` gave."""
        return cls(*(arrays[name] for name in cls.__slots__))


_INDENT: Final = "│   "


def tree_lines(
    tree: Tree, feature_names: Sequence[str] | None, describe_leaf: Callable[[int], str]
) -> Iterator[str]:
    """A line for each branch; behind it the leaf, or its branches below it.

    >>> import numpy as np
    >>> tree = Tree(np.array([1, -1, -1]), np.array([2.5, 0, 0]), np.array([1, 0, 0]),
    ...             np.array([7, 4, 3]), np.array([[0.5], [0.0], [1.0]]))
    >>> for line in tree_lines(tree, ["length", "width"], lambda leaf: f"leaf {leaf}"):
    ...     print(line)
    width ≤ 2.5: leaf 1
    width > 2.5: leaf 2

    A decision tree as text.
    """
    if tree.feature[0] < 0:
        yield describe_leaf(0)
        return
    waiting = list(reversed(_branches(tree, 0, 0)))
    while waiting:
        node, sign, parent, indent = waiting.pop()
        feature = tree.feature[parent]
        name = f"x[{feature}]" if feature_names is None else feature_names[feature]
        branch = f"{_INDENT * indent}{name} {sign} {tree.threshold[parent]:.6g}"
        if tree.feature[node] < 0:
            yield f"{branch}: {describe_leaf(node)}"
        else:
            yield branch
            waiting.extend(reversed(_branches(tree, node, indent + 1)))


def _branches(tree: Tree, node: int, indent: int) -> list[tuple[int, str, int, int]]:
    child = int(tree.child[node])
    return [(child, "≤", node, indent), (child + 1, ">", node, indent)]


class Criterion(ABC):
    """Statistics are lines of numbers that can be added: the number of rows, then what the criterion needs.

    What is counted of rows, and how good that makes a split.
    """

    columns: int
    """How many numbers."""

    @abstractmethod
    def histogram(self, at: Nodes, length: int, targets: Floats, weights: Floats) -> Floats:
        """Statistics of the rows at each of ``length`` places: an array (length, columns)."""

    @abstractmethod
    def weight(self, statistics: Floats) -> Floats:
        """The sum of the weights of the rows."""

    @abstractmethod
    def score(self, statistics: Floats) -> Floats:
        """How alike the rows are, between 0 and their weight; a split is as good as it raises the sum."""

    @abstractmethod
    def values(self, statistics: Floats) -> Floats:
        """What is predicted: the share of each class, or the mean of the targets."""

    def rows(self, statistics: Floats) -> Floats:
        """How many rows."""
        rows: Floats = statistics[..., 0]
        return rows


class Gini(Criterion):
    """For classes: the weight of each. Targets are the numbers of the classes, from 0."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self.columns = 1 + classes

    def histogram(self, at: Nodes, length: int, targets: Floats, weights: Floats) -> Floats:
        by_class = np.bincount(
            at * self._classes + targets.astype(np.intp), weights, minlength=length * self._classes
        ).reshape(length, self._classes)
        rows = by_class.sum(axis=1) if (weights == 1.0).all() else np.bincount(at, minlength=length)
        return np.column_stack([rows, by_class])

    def weight(self, statistics: Floats) -> Floats:
        weight: Floats = statistics[..., 1:].sum(axis=-1)
        return weight

    def score(self, statistics: Floats) -> Floats:
        squares = np.einsum("...c,...c->...", statistics[..., 1:], statistics[..., 1:])
        return _ratio(squares, self.weight(statistics))

    def values(self, statistics: Floats) -> Floats:
        shares: Floats = statistics[..., 1:] / self.weight(statistics)[..., np.newaxis]
        return shares


class Variance(Criterion):
    """For numbers: the weight, and the weighted sum of the targets, which are between -1 and 1."""

    columns = 3

    def histogram(self, at: Nodes, length: int, targets: Floats, weights: Floats) -> Floats:
        return np.column_stack(
            [
                np.bincount(at, minlength=length),
                np.bincount(at, weights, minlength=length),
                np.bincount(at, targets, minlength=length),
            ]
        )

    def weight(self, statistics: Floats) -> Floats:
        weight: Floats = statistics[..., 1]
        return weight

    def score(self, statistics: Floats) -> Floats:
        return _ratio(np.square(statistics[..., 2]), self.weight(statistics))

    def values(self, statistics: Floats) -> Floats:
        means: Floats = statistics[..., 2:] / statistics[..., 1:2]
        return means


_MANTISSA_BITS: Final = 52


def exact_grid(numbers: int, largest: float) -> float:
    """A power of two: so many of its multiples up to ``largest`` add up without rounding, in any order.

    So sums do not depend on how the rows were divided among workers.

    >>> grid = exact_grid(1_000, 7.0)
    >>> thirds = np.rint(np.full(999, 1 / 3) / grid) * grid
    >>> float(thirds.sum()) == float(thirds[:500].sum() + thirds[500:].sum()), round(float(thirds.sum()), 6)
    (True, 333.0)
    """
    _, exponent = np.frexp(numbers * largest)
    return max(float(np.ldexp(1.0, int(exponent) - _MANTISSA_BITS)), np.finfo(np.float64).smallest_subnormal)


def _ratio(above: Floats, below: Floats) -> Floats:
    """0 where there is nothing."""
    ratio: npt.NDArray[np.float64] = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return ratio


class Splits(NamedTuple):
    """An entry for each node; a gain of minus infinity where it cannot be split.

    The best split of each node, from its histogram.
    """

    feature: Nodes
    cut: Nodes
    """Bins up to this one go left."""
    gain: Floats
    """By how much the score rises."""
    left: Floats
    """Statistics of the rows that go left."""


def best_splits(histograms: Floats, bins: Sequence[int], criterion: Criterion, minimum_rows: int) -> Splits:
    """Of all cuts that leave ``minimum_rows`` on both sides, the one with the largest gain.

    ``histograms`` is an array (nodes, bins of all features, columns). Of equal gains the first feature and the
    lowest cut; where bins are empty several cuts are one, and the middle one is taken.

    >>> from streamiter.learn.trees.tree import Gini
    >>> red, blue = [3.0, 3.0, 0.0], [2.0, 0.0, 2.0]
    >>> splits = best_splits(np.array([[red, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], blue]]), [4], Gini(2), 1)
    >>> splits.cut.tolist(), splits.gain.round(9).tolist(), splits.left.tolist()
    ([1], [2.4], [[3.0, 3.0, 0.0]])
    """
    nodes = np.arange(len(histograms))
    total = histograms[:, : bins[0]].sum(axis=1)
    best = Splits(
        feature=np.zeros(len(nodes), dtype=np.intp),
        cut=np.zeros(len(nodes), dtype=np.intp),
        gain=np.full(len(nodes), -np.inf),
        left=np.zeros_like(total),
    )
    start = 0
    for feature, count in enumerate(bins):
        part = histograms[:, start : start + count]
        start += count
        if count == 1:
            continue
        left = np.cumsum(part[:, :-1], axis=1)
        scores = _scores(left, total, criterion, minimum_rows)
        cuts = scores.argmax(axis=1)
        gains = scores[nodes, cuts] - criterion.score(total)
        for node in np.flatnonzero(gains > best.gain):
            best.feature[node], best.gain[node] = feature, gains[node]
            best.left[node] = left[node, cuts[node]]
            best.cut[node] = _middle(criterion.rows(part[node]), int(cuts[node]))
    return best


def _scores(left: Floats, total: Floats, criterion: Criterion, minimum_rows: int) -> Floats:
    right = total[:, np.newaxis] - left
    enough = (criterion.rows(left) >= minimum_rows) & (criterion.rows(right) >= minimum_rows)
    return np.where(enough, criterion.score(left) + criterion.score(right), -np.inf)


def _middle(rows: Floats, cut: int) -> int:
    """The middle of the cuts that divide these bins as ``cut`` does, which is the lowest of them."""
    empty = int(np.argmax(rows[cut + 1 :] > 0))
    return cut + empty // 2


_Counts = npt.NDArray[np.int64]

# A quantile of so many values is off by less than half a percent of the rows; 256 bins hold as much each. A
# summary of 1,000 such features takes 256 MB, and no more for more rows.
_VALUES_KEPT: Final = 16_384


@dataclass(frozen=True, slots=True)
class FeatureSummary:
    """The distinct values of each feature, ascending, with their counts; and what the labels are like.

    Of more than 16,384 distinct values those are kept whose hashes are smallest, with all their counts: a
    sample that does not depend on how the rows were divided among workers.

    What is known of the features before the first split, and where to cut them.
    """

    rows: int
    largest_weight: float
    lowest_label: float
    highest_label: float
    values: list[Floats]
    counts: list[_Counts]

    @classmethod
    def of(cls, features: Floats, labels: Floats, weights: Floats) -> FeatureSummary:
        """Of one worker's rows: at least one."""
        kept = [_kept(*_distinct(column)) for column in features.T]
        return cls(
            rows=len(labels),
            largest_weight=float(weights.max()),
            lowest_label=float(labels.min()),
            highest_label=float(labels.max()),
            values=[values for values, _ in kept],
            counts=[counts for _, counts in kept],
        )

    def merged(self, other: FeatureSummary) -> FeatureSummary:
        """Of the rows of both."""
        merged = [
            _kept(*_added(*mine, *theirs))
            for mine, theirs in zip(
                zip(self.values, self.counts, strict=True),
                zip(other.values, other.counts, strict=True),
                strict=True,
            )
        ]
        return FeatureSummary(
            rows=self.rows + other.rows,
            largest_weight=max(self.largest_weight, other.largest_weight),
            lowest_label=min(self.lowest_label, other.lowest_label),
            highest_label=max(self.highest_label, other.highest_label),
            values=[values for values, _ in merged],
            counts=[counts for _, counts in merged],
        )

    def as_plain_data(self) -> dict[str, Any]:
        """Its fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def cuts_between(values: Floats, counts: _Counts, maximum_bins: int) -> Floats:
    """Thresholds that cut the values into bins: between all neighbours, or at quantiles where that is too many.

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
    middle: Floats = low / 2 + high / 2  # The sum of two large values may be none.
    # Between neighbouring floats there is no middle, and the upper one itself would be on the wrong side.
    return np.where((low <= middle) & (middle < high), middle, low)


def _distinct(column: Floats) -> tuple[Floats, _Counts]:
    values, counts = np.unique(column, return_counts=True)
    return values, counts.astype(np.int64)


def _added(
    values: Floats, counts: _Counts, more_values: Floats, more_counts: _Counts
) -> tuple[Floats, _Counts]:
    all_values, at = np.unique(np.concatenate([values, more_values]), return_inverse=True)
    totals = np.zeros(len(all_values), dtype=np.int64)
    np.add.at(totals, at, np.concatenate([counts, more_counts]))
    return all_values, totals


def _kept(values: Floats, counts: _Counts) -> tuple[Floats, _Counts]:
    if len(values) <= _VALUES_KEPT:
        return values, counts
    kept = np.sort(np.argsort(_hashes(values), kind="stable")[:_VALUES_KEPT])
    return values[kept], counts[kept]


def _hashes(values: Floats) -> npt.NDArray[np.uint64]:
    """Of the bits of each value, by splitmix64; different ones for different values (0 and -0 are one)."""
    mixed = (values + 0.0).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
