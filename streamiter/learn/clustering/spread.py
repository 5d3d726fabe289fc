"""How far points spread: what the squared distances to their centroids sum up to (the inertia) follows from it.

The sum of the squared distances of all points to their mean, less that of the centroids, each counted for its points,
to the same mean, is what is left between points and centroids. The first is the same in every round, so it is made
once; that the second costs nothing is why nobody adds up distances.

>>> from streamiter.learn.clustering.clusters import as_columns
>>> points = as_columns([[0.0], [2.0], [9.0]])
>>> spread = joined(spread_of(points[:, :1]), spread_of(points[:, 1:]))
>>> round(inertia_of(spread, np.array([[1.0], [9.0]]), np.array([2, 1])), 12)
2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.learn.rows.checks import Floats

__all__ = ["Spread", "inertia_of", "joined", "spread_of"]

Spread = dict[str, Any]
"""``count`` and ``mean`` of some points, and ``squares``: the sum of their squared distances to it."""


def spread_of(columns: Floats) -> Spread:
    """That of a block of points, as :func:`as_columns` gives it."""
    coordinates = columns[:-1]
    mean = coordinates.mean(axis=1) if columns.shape[1] else np.zeros(len(coordinates))
    differences = coordinates - mean[:, np.newaxis]
    squares = float(np.einsum("ij,ij->", differences, differences))
    return {"count": columns.shape[1], "mean": mean, "squares": squares}


def joined(first: Spread, second: Spread) -> Spread:
    """That of the points of both."""
    count = first["count"] + second["count"]
    if not count:
        return first
    between = second["mean"] - first["mean"]
    share = second["count"] / count
    squares = first["squares"] + second["squares"] + first["count"] * share * float(between @ between)
    return {"count": count, "mean": first["mean"] + share * between, "squares": squares}


def inertia_of(spread: Spread, means: Floats, counts: npt.NDArray[Any]) -> float:
    """The sum of the squared distances of points to the mean of their cluster; ``counts`` is how many have which."""
    offsets = means - spread["mean"]
    between = float(counts @ np.einsum("ij,ij->i", offsets, offsets))
    return max(0.0, float(spread["squares"]) - between)
