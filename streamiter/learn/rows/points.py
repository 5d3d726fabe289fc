"""Points: rows that are dense and finite, as k-means and scalers want them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import BadRows, Floats
from streamiter.operators.rejection import shortened
from streamiter.records import Columns
from streamiter.tables import as_floats

__all__ = ["as_points"]

# Squares of coordinates are added up: of 1e150 they are still finite.
_COORDINATE_LIMIT: Final = 1e150


def as_points(owner: str, given: Any, width: int | None = None, *, what: str = "points") -> Floats:
    """The points as a matrix, a row for each; refuses what is no row of finite numbers."""
    if isinstance(given, Columns):
        raise ModelError(
            f"{owner}: expected {what} as arrays of numbers, given {given}; choose and join its columns first: "
            f"{what}.map_batch(lambda batch: np.column_stack([batch[…], batch[…]]))"
        )
    points = as_floats(owner, what, given)
    if points.ndim != 2 or points.shape[1] == 0 or width not in (None, points.shape[1]):
        wanted = "numbers" if width is None else f"{width} numbers"
        if points.ndim == 2 and points.shape[1]:
            raise ModelError(
                f"{owner}: expected {what} as arrays of {wanted}, given some of {points.shape[1]}; give all of "
                "them the same columns"
            )
        raise ModelError(
            f"{owner}: expected {what} as arrays of {wanted}, given {shortened(given)} (shape {points.shape}); "
            "give each of them as an array or list"
        )
    good = np.abs(points) <= _COORDINATE_LIMIT
    if not good.all():
        bad = np.flatnonzero(~good.all(axis=1))
        given_value = points[bad[0]][~good[bad[0]]][0]
        raise BadRows(
            bad, f"{owner}: expected {what} of numbers of at most {_COORDINATE_LIMIT:g}, given {given_value}"
        )
    return points
