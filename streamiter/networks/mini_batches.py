"""Where the layers find the mini-batch at hand.

>>> place_holder = PlaceHolder(features=1_000_000, dtype="float32")
>>> rows = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([7, 9], [2.0, 1.0])], width=1_000_000)
>>> place_holder.feed_data(rows, [1, -1])
>>> place_holder.batch_size, place_holder.indices.tolist(), place_holder.rows.indices.tolist()
(2, [2, 7, 9], [0, 1, 1, 2])
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.networks.configuration.settings import DataSettings
from streamiter.networks.data import LabelledRows
from streamiter.networks.parameters import Array
from streamiter.numbers import Indices
from streamiter.sparse_rows import SparseRows

__all__ = [
    "FeatureMiniBatch",
    "PlaceHolder",
    "TrainingSteps",
    "from_record",
    "prepared",
    "to_record",
]


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


Positions = npt.NDArray[np.intp]


class FeatureMiniBatch(NamedTuple):
    """Rows with labels, and the features whose parameters they need.

    Mini-batches: the steps that epochs over bounded data are made of, and rows of a stream that never ends.

    The steps are those of all workers together: of each one every worker has a share. So under BSP the result does not
    depend on how many workers there are, but for the last digits.

    >>> data = LabelledRows(np.arange(14.0).reshape(7, 2), np.ones(7))
    >>> steps = TrainingSteps(data, updates=3, workers=2, features=2)
    >>> steps.per_epoch, [len(steps.mini_batch(step, worker=0)) for step in range(3)], steps.mini_batch(2, worker=1)
    (3, [2, 2, 1], None)
    >>> steps.mini_batch(0, worker=1).rows.tolist(), steps.mini_batch(0, worker=1).rows_in_step
    ([[2.0, 3.0]], 3)
    """

    rows: SparseRows | Array
    """Sparse: their columns count ``indices``."""
    indices: npt.NDArray[np.int64] | None
    """Features, ascending; None for dense rows, which need all."""
    labels: Array
    rows_in_step: int
    """Rows of the step in all workers together, which the gradient under BSP is the mean of."""

    def __len__(self) -> int:
        return len(self.labels)


def prepared(data: LabelledRows, features: int, rows_in_step: int) -> FeatureMiniBatch:
    """Rows as a mini-batch."""
    holder = PlaceHolder(features, np.float64)
    if not isinstance(data.rows, SparseRows):
        return FeatureMiniBatch(data.rows, None, data.labels, rows_in_step)
    holder.feed_data(data.rows)
    return FeatureMiniBatch(holder.rows, holder.indices, data.labels, rows_in_step)


def to_record(mini_batch: FeatureMiniBatch) -> dict[str, Any]:
    """The same as plain data."""
    rows: Any = mini_batch.rows
    if isinstance(rows, SparseRows):
        rows = {name: getattr(rows, name) for name in ("indptr", "indices", "values", "width")}
    return {**mini_batch._asdict(), "rows": rows}


def from_record(record: dict[str, Any]) -> FeatureMiniBatch:
    """What :func:`to_record` gave."""
    rows = record["rows"]
    return FeatureMiniBatch(**{**record, "rows": SparseRows(**rows) if isinstance(rows, dict) else rows})


# What is prepared for one epoch serves all of them; it takes as much room again as the rows.
_KEPT_BYTES_MAX: Final = 256 << 20


class TrainingSteps:
    """Epoch after epoch in mini-batches of ⌈rows/updates⌉ rows, the last one of an epoch shorter.

    Each worker has every n-th row of a step. ``seed`` decides what is shuffled and drawn, anew for each epoch and the
    same whoever asks:

    - ``useshuffle``: the rows are in another order in each epoch.
    - ``posnegratio``: an epoch has all rows of one kind, and of the other so many that positive rows (label above 0)
      are so many times the negative ones.
    - ``sampleratio`` below 1: a mini-batch is this share of all rows of the epoch, drawn anew for each step, instead of
      the next rows. (So Spark on Angel makes mini-batches.)
    """

    def __init__(
        self,
        data: LabelledRows,
        *,
        updates: int,
        features: int,
        workers: int = 1,
        settings: DataSettings | None = None,
        seed: int = 0,
    ) -> None:
        if not len(data):
            raise ModelError(
                "training: expected rows to learn from, given none; lower validateratio, or add rows"
            )
        self._data = data
        self._features = features
        self._workers = workers
        self._settings = settings or DataSettings()
        self._seed = seed
        self._kinds = self._rows_by_kind()
        self._rows = sum(count for _, count in self._kinds)
        ratio = self._settings.sample_ratio
        self._is_sampled = ratio < 1.0
        self._batch = math.ceil(self._rows * ratio if self._is_sampled else self._rows / updates)
        self.per_epoch = updates if self._is_sampled else math.ceil(self._rows / self._batch)
        """How many steps an epoch has."""
        self._order: tuple[int, Positions | None] = (-1, None)
        """Of the epoch asked for last."""
        self._keeps = self._all_epochs_are_alike() and _size_bytes(data) <= _KEPT_BYTES_MAX
        self._kept: dict[tuple[int, int], FeatureMiniBatch] = {}
        """By the number of the step in its epoch, and worker."""
        self._drawn: tuple[int, Positions | None] = (-1, None)
        """The sample of the step asked for last."""

    def mini_batch(self, step: int, worker: int) -> FeatureMiniBatch | None:
        """What a worker learns from in a step, both from 0; None: nothing."""
        place = step % self.per_epoch, worker
        kept = self._kept.get(place)
        if kept is not None:
            return kept
        made = self._made(step, worker)
        if made is not None and self._keeps and isinstance(made.rows, SparseRows):
            self._kept[place] = made
        return made

    def _made(self, step: int, worker: int) -> FeatureMiniBatch | None:
        rows = self._rows_of(step)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if worker >= count:
            return None
        if not isinstance(rows, slice):
            share = self._data[rows[worker :: self._workers]]
        elif self._workers == 1:
            share = self._data[rows]
        else:
            share = self._data[np.arange(rows.start + worker, rows.stop, self._workers)]
        return prepared(share, self._features, count)

    def _rows_of(self, step: int) -> slice | Positions:
        """Of all workers together."""
        epoch, update = divmod(step, self.per_epoch)
        order = self._order_of(epoch)
        if self._is_sampled:
            return self._sample(step, order)
        first = update * self._batch
        rows = slice(first, min(first + self._batch, self._rows))
        return rows if order is None else order[rows]

    def _sample(self, step: int, order: Positions | None) -> Positions:
        drawn_for, drawn = self._drawn
        if drawn is None or drawn_for != step:
            generator = np.random.default_rng([self._seed, 1, step])
            drawn = np.sort(generator.choice(self._rows, self._batch, replace=False))
            self._drawn = step, drawn
        return drawn if order is None else order[drawn]

    def _all_epochs_are_alike(self) -> bool:
        settings = self._settings
        return not (self._is_sampled or settings.use_shuffle or settings.pos_neg_ratio > 0.0)

    def _order_of(self, epoch: int) -> Positions | None:
        """The rows of an epoch; None: all as they are."""
        if not self._settings.use_shuffle and self._settings.pos_neg_ratio <= 0.0:
            return None
        if self._order[0] != epoch:
            self._order = epoch, self._ordered(np.random.default_rng([self._seed, 0, epoch]))
        return self._order[1]

    def _ordered(self, generator: np.random.Generator) -> Positions:
        parts = [
            rows if count == len(rows) else generator.choice(rows, count, replace=False)
            for rows, count in self._kinds
        ]
        rows: Positions = np.sort(np.concatenate(parts))
        return generator.permutation(rows) if self._settings.use_shuffle else rows

    def _rows_by_kind(self) -> list[tuple[Positions, int]]:
        """Which rows there are, and how many of them an epoch has: those of all kinds, or by label."""
        ratio = self._settings.pos_neg_ratio
        if ratio <= 0.0:
            return [(np.arange(len(self._data)), len(self._data))]
        is_positive = self._data.labels > 0.0
        positive, negative = np.flatnonzero(is_positive), np.flatnonzero(~is_positive)
        if not (len(positive) and len(negative)):
            raise ModelError(
                f"training: expected rows of both kinds for posnegratio {ratio:g}, given {len(positive)} with a label "
                f"above 0 and {len(negative)} others; leave posnegratio out"
            )
        # The lesser of the two before it is rounded: of a ratio next to 0 the other one is infinite.
        positives = max(1, round(min(len(positive), len(negative) * ratio)))
        negatives = max(1, round(min(len(negative), len(positive) / ratio)))
        return [(positive, positives), (negative, negatives)]


def _size_bytes(data: LabelledRows) -> int:
    return data.rows.values.nbytes * 2 if isinstance(data.rows, SparseRows) else data.rows.nbytes
