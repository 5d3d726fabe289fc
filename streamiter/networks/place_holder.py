"""Where the layers find the mini-batch at hand.

>>> place_holder = PlaceHolder(features=1_000_000, dtype="float32")
>>> rows = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([7, 9], [2.0, 1.0])], width=1_000_000)
>>> place_holder.feed_data(rows, [1, -1])
>>> place_holder.batch_size, place_holder.indices.tolist(), place_holder.rows.indices.tolist()
(2, [2, 7, 9], [0, 1, 1, 2])
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.networks.parameters import Array
from streamiter.sparse_rows import Indices, SparseRows

__all__ = ["PlaceHolder"]


class PlaceHolder:
    """Holds one mini-batch: features, labels, and which features are there at all, so that only theirs are pulled.

    ``features`` is how many there are in all, ``dtype`` float32 or float64, in which the layers compute.
    """

    def __init__(self, features: int, dtype: npt.DTypeLike) -> None:
        self.feature_dimension = features
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.training = False
        """Whether it is learned from: only then does dropout drop anything."""
        self.labels: Array | None = None
        self._rows: SparseRows | Array | None = None
        self._indices: npt.NDArray[np.int64] | None = None

    def feed_data(
        self,
        rows: SparseRows | npt.ArrayLike,
        labels: npt.ArrayLike | None = None,
        *,
        indices: npt.NDArray[np.int64] | None = None,
        training: bool = False,
    ) -> None:
        """Take the place of the mini-batch before.

        ``rows`` are (rows, features), dense or sparse. Sparse rows may come prepared: then their columns count
        ``indices`` (features, ascending, none twice), and nothing is searched for. ``labels``: one number for each row.
        Raises ModelError for shapes that do not fit.
        """
        fed, present = self._as_rows(rows, indices)
        if not len(fed):
            raise ModelError(
                "PlaceHolder: expected at least one row, given none; leave empty mini-batches out"
            )
        self.labels = self._as_labels(labels, len(fed))
        self._rows, self._indices, self.training = fed, present, training
        for known in ("values", "features_per_row"):
            self.__dict__.pop(known, None)

    @property
    def rows(self) -> SparseRows | Array:
        """Sparse: their columns count ``indices``, not features. Dense: (rows, features)."""
        if self._rows is None:
            raise ModelError("PlaceHolder: expected a mini-batch, given none yet; call feed_data first")
        return self._rows

    @property
    def batch_size(self) -> int:
        """Rows of the mini-batch."""
        return len(self.rows)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The features that are in the mini-batch, ascending; of dense rows all."""
        if self._indices is None:
            self._indices = np.arange(self.feature_dimension, dtype=np.int64)
        return self._indices

    @cached_property
    def values(self) -> Array | None:
        """Of sparse rows: their values in the network's dtype; None where all are 1, as in one-hot rows."""
        given = self.sparse_rows.values
        if np.count_nonzero(given == 1.0) == len(given):
            return None
        return given.astype(self.dtype)

    @cached_property
    def features_per_row(self) -> int | None:
        """Of sparse rows: how many features each of them has, where that is the same for all."""
        indptr = self.sparse_rows.indptr
        first = int(indptr[1]) if len(indptr) > 1 else 0
        same = np.count_nonzero(np.diff(indptr) == first) == len(indptr) - 1
        return first if same else None

    @property
    def is_sparse(self) -> bool:
        return isinstance(self._rows, SparseRows)

    @property
    def sparse_rows(self) -> SparseRows:
        """The rows, which must be sparse."""
        rows = self.rows
        assert isinstance(rows, SparseRows)
        return rows

    @property
    def dense_rows(self) -> Array:
        """The rows, which must be dense."""
        rows = self.rows
        assert not isinstance(rows, SparseRows)
        return rows

    def _as_rows(
        self, rows: SparseRows | npt.ArrayLike, indices: npt.NDArray[np.int64] | None
    ) -> tuple[SparseRows | Array, npt.NDArray[np.int64] | None]:
        if isinstance(rows, SparseRows):
            expected = self.feature_dimension if indices is None else len(indices)
            if rows.width != expected:
                raise ModelError(
                    f"PlaceHolder: expected sparse rows of width {expected}, given width {rows.width}; "
                    "change indexrange, or the width of the rows"
                )
            return (rows, indices) if indices is not None else _compact(rows)
        try:
            dense = np.asarray(rows, dtype=self.dtype)
        except (TypeError, ValueError) as error:
            raise ModelError(f"PlaceHolder: expected rows of numbers, given {error}") from None
        if dense.ndim != 2 or dense.shape[1] != self.feature_dimension:
            raise ModelError(
                f"PlaceHolder: expected rows of {self.feature_dimension} features (an array of shape (rows, "
                f"{self.feature_dimension}) or SparseRows), given shape {dense.shape}; change indexrange, or the rows"
            )
        return dense, None

    def _as_labels(self, labels: npt.ArrayLike | None, rows: int) -> Array | None:
        if labels is None:
            return None
        try:
            vector: Array = np.asarray(labels, dtype=self.dtype)
        except (TypeError, ValueError) as error:
            raise ModelError(f"PlaceHolder: expected labels as numbers, given {error}") from None
        if vector.shape != (rows,):
            raise ModelError(
                f"PlaceHolder: expected {rows} labels, one for each row, given shape {vector.shape}; "
                "give one number for each row of the mini-batch"
            )
        return vector


# Of up to so many features for each value in the rows, a table over all features is quicker than sorting.
_FEATURES_PER_VALUE = 4


def _compact(rows: SparseRows) -> tuple[SparseRows, npt.NDArray[np.int64]]:
    """The same rows over the features that are there, and which these are."""
    indices: npt.NDArray[np.int64]
    places: Indices
    if rows.width <= _FEATURES_PER_VALUE * len(rows.indices):
        there = np.zeros(rows.width, dtype=np.bool_)
        there[rows.indices] = True
        indices = np.flatnonzero(there).astype(np.int64, copy=False)
        if len(indices) == rows.width:
            return rows, indices
        place_of = np.cumsum(there) - 1
        places = place_of[rows.indices]
    else:
        found, places = np.unique(rows.indices, return_inverse=True)
        indices = found.astype(np.int64, copy=False)
    return SparseRows(rows.indptr, places, rows.values, len(indices)), indices
