"""The best split of each node, from its histogram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamiter.learn.rows.checks import Floats
from streamiter.learn.trees.criteria import Criterion
from streamiter.learn.trees.tree import Nodes

__all__ = ["Splits", "best_splits"]


class Splits(NamedTuple):
    """An entry for each node; a gain of minus infinity where it cannot be split."""

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

    >>> from streamiter.learn.trees.criteria import Gini
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
