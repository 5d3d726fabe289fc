"""What linear models ask of the features of a mini-batch, dense or sparse alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import BadRows, Floats, holds
from streamiter.sparse_rows import Indices, SparseRows
from streamiter.tables import as_floats

__all__ = [
    "FEW",
    "Features",
    "Rows",
    "all_are_few",
    "checked_rows",
    "concatenated_rows",
    "dense_features",
    "dense_weighted_sum",
    "dots",
    "independent_dots",
    "refuse_not_finite",
    "rows_as_lists",
    "weighted_sum",
]

Features = SparseRows | npt.ArrayLike
"""Sparse rows, or what numpy makes a matrix (rows, features) of."""

Rows = SparseRows | Floats

# Up to so many features a row is quicker in plain Python: an update is some twenty numpy calls, each of
# which costs as much as plain arithmetic for two or three features.
FEW: Final = 32


def checked_rows(owner: str, features: Features, width: int) -> Rows:
    """The features as rows of ``width``, or an error that says what was given."""
    if isinstance(features, SparseRows):
        if features.width == width:
            return features
        given = f"sparse rows of width {features.width}"
    else:
        matrix = as_floats(owner, "features", features)
        if matrix.ndim == 2 and matrix.shape[1] == width:
            return np.ascontiguousarray(matrix)
        given = f"an array of shape {matrix.shape}"
    raise ModelError(
        f"{owner}: expected rows of {width} features (a matrix of shape (rows, {width}) or sparse rows of "
        f"that width), given {given}; change the features or the model's width"
    )


def dense_features(features: Features) -> npt.ArrayLike:
    """The same without sparse rows; what is none is not changed."""
    return features.to_dense() if isinstance(features, SparseRows) else features


def concatenated_rows(parts: Sequence[Rows]) -> Rows:
    """All rows in this order, dense or sparse as the first part is."""
    if isinstance(parts[0], SparseRows):
        return SparseRows.concatenate(
            [part if isinstance(part, SparseRows) else SparseRows.from_dense(part) for part in parts]
        )
    dense: Floats = np.concatenate(
        [part.to_dense() if isinstance(part, SparseRows) else part for part in parts]
    )
    return dense


def independent_dots(rows: Rows, weights: Floats) -> Floats:
    """Σ features·weights of each row; for one row the same whatever rows are beside it, to the last bit."""
    if isinstance(rows, SparseRows):
        return rows.dot(weights)
    sums: Floats = np.einsum("ij,j->i", rows, weights)
    return sums


def dots(rows: Rows, weights: Floats) -> Floats:
    """The same, quicker, but the last bit of a row may depend on its place in the batch."""
    return rows.dot(weights) if isinstance(rows, SparseRows) else rows @ weights


def weighted_sum(rows: Rows, by_row: Floats) -> tuple[Indices | None, Floats]:
    """Σ over rows of ``by_row``·features, and the features it is about (None: all)."""
    if isinstance(rows, SparseRows):
        return rows.transposed_dot(by_row)
    return None, by_row @ rows


def dense_weighted_sum(rows: Rows, by_row: Floats) -> Floats:
    """Σ over rows of ``by_row``·features, for all features."""
    return rows.transposed_dot_dense(by_row) if isinstance(rows, SparseRows) else by_row @ rows


def all_are_few(rows: Rows) -> bool:
    """Whether each row has few enough features for plain Python."""
    if isinstance(rows, SparseRows):
        return len(rows.values) <= FEW or int(np.diff(rows.indptr).max()) <= FEW
    return bool(rows.shape[1] <= FEW)


def rows_as_lists(rows: Rows) -> Iterable[tuple[Sequence[int], list[float]]]:
    """Indices and values of each row."""
    if isinstance(rows, SparseRows):
        return rows.rows()
    columns = range(rows.shape[1])
    return [(columns, values) for values in rows.tolist()]


def _all_finite(rows: Rows) -> bool:
    if isinstance(rows, SparseRows):
        return holds(np.isfinite(rows.values))
    # The sum of a row tells at a third of the cost, unless it is too large itself.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = rows @ np.ones(rows.shape[1])
    return holds(np.isfinite(sums)) or holds(np.isfinite(rows))


def refuse_not_finite(owner: str, rows: Rows) -> None:
    """Raise :class:`BadRows` if a feature is NaN or infinite."""
    if _all_finite(rows):
        return
    if isinstance(rows, SparseRows):
        at = np.flatnonzero(~np.isfinite(rows.values))
        bad_rows, columns, given = rows.row_of_value[at], rows.indices[at], rows.values[at]
    else:
        bad_rows, columns = np.nonzero(~np.isfinite(rows))
        given = rows[bad_rows, columns]
    raise BadRows(
        np.unique(bad_rows), f"{owner}: expected finite features, given {given[0]} for feature {columns[0]}"
    )
