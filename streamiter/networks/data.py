"""Rows with labels: reading them from topics and files, translating labels, and cutting them into mini-batches.

``LabelledRows`` is what networks learn from: rows of features, dense or sparse, with one label each. ``PlaceHolder``
holds the current mini-batch for the layers of a worker. ``TrainingSteps`` cuts bounded data into mini-batches; on a
stream, ``prepared`` makes a mini-batch of the rows that have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import DecodeError, ModelError, shortened
from streamiter.learn.estimators import examples_in_topic
from streamiter.learn.rows import joined_examples, row_vector, rows_from_record, rows_to_record, with_named_columns
from streamiter.networks.settings import DataSettings, LabelTransformation
from streamiter.topics.topic import Topic, TopicBatch
from streamiter.topics.urls import topic
from streamiter.values.numbers import Array, Indices, fraction
from streamiter.values.records import Batch, Columns
from streamiter.values.sparse_rows import SparseRows, sparse_if_scipy
from streamiter.values.tables import as_floats
from streamiter.values.times import Times


@final
class DenseLines:
    """Lines ``label number number …``, separated by white space or commas.

    Gives `Columns`: ``label`` (records,) and ``features`` (records, numbers of the first line).

    >>> DenseLines().decode(TopicBatch(values=[b"1 0.5 2", b"-1,3,4"]))["features"].tolist()
    [[0.5, 2.0], [3.0, 4.0]]
    >>> DenseLines().decode(TopicBatch(values=[b"1 0.5 2", b"-1 3"]))
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 1 of the batch: expected a label and 2 numbers, given 1 number
    """

    def decode(self, batch: TopicBatch) -> Batch:
        """Decode the lines of a batch. Raises ``DecodeError``, which names every wrong line."""
        failures: dict[int, str] = {}
        rows: list[npt.NDArray[np.float64]] = []
        for index, line in enumerate(batch.values):
            try:
                numbers = _numbers(line or b"")
            except ValueError as error:
                failures[index] = f"expected a label and numbers, given {error}"
                continue
            if len(numbers) < 2 or (rows and len(numbers) != len(rows[0])):
                wanted = f"{len(rows[0]) - 1} numbers" if rows else "numbers"
                count = max(len(numbers) - 1, 0)
                failures[index] = f"expected a label and {wanted}, given {count} number{'s' * (count != 1)}"
            elif not np.isfinite(numbers).all():
                failures[index] = "expected finite numbers"
            else:
                rows.append(numbers)
        if failures:
            raise DecodeError(failures)
        table = np.stack(rows)
        return Columns({"label": table[:, 0].copy(), "features": table[:, 1:].copy()})

    def __repr__(self) -> str:
        return "DenseLines()"


def _numbers(line: bytes) -> npt.NDArray[np.float64]:
    if b"_" in line or b"\0" in line:  # numpy takes 1_0 for 10, and leaves out NULs at an end
        raise ValueError(repr(line[:80]))
    return np.array(line.replace(b",", b" ").split()).astype(np.float64)


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Rows with a label each, for a network to learn from. Raises ModelError for other rows or labels.

    >>> len(LabelledRows(np.array([[0.0, 1.0], [1.0, 1.0]]), np.array([-1.0, 1.0])))
    2
    >>> rows = LabelledRows(np.eye(5), np.array([0.0, 1.0, 0.0, 1.0, 1.0]))
    >>> parted = part(rows, validate_ratio=0.4)
    >>> len(parted.training), parted.validation.labels.tolist()
    (3, [0.0, 1.0])
    """

    rows: SparseRows | Array
    labels: Array

    def __post_init__(self) -> None:
        if not isinstance(self.rows, SparseRows) and not _are_numbers(self.rows, 2):
            raise ModelError(
                "LabelledRows: expected rows as an array of numbers (rows, features), or as SparseRows, given "
                f"{_described(self.rows)}; make one: np.array(rows, dtype=float)"
            )
        if not _are_numbers(self.labels, 1) or len(self.labels) != len(self.rows):
            raise ModelError(
                f"LabelledRows: expected labels as an array of {len(self.rows)} numbers, one for each row, given "
                f"{_described(self.labels)}; make one: np.array(labels, dtype=float)"
            )

    @property
    def features(self) -> int:
        """Return the number of features, which is the width of the rows."""
        return self.rows.width if isinstance(self.rows, SparseRows) else int(self.rows.shape[1])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: slice | npt.NDArray[np.intp]) -> LabelledRows:
        """Return some of the rows; a slice gives views, not copies."""
        return LabelledRows(self.rows[which], self.labels[which])

    def widened(self, features: int, owner: str) -> LabelledRows:
        """Return the rows with this number of features. Raises ModelError if a row has a feature beyond it."""
        if self.features == features:
            return self
        if not isinstance(self.rows, SparseRows):
            raise ModelError(
                f"{owner}: expected rows of {features} features, given {self.features}; change indexrange, or the rows"
            )
        most = int(self.rows.indices.max(initial=-1))
        if most >= features:
            raise ModelError(
                f"{owner}: expected features from 0 to {features - 1}, given {most} in row "
                f"{int(np.searchsorted(self.rows.indptr, int(self.rows.indices.argmax()), side='right')) - 1}; raise "
                "indexrange of the configuration, or look at how the rows count them"
            )
        rows = SparseRows(self.rows.indptr, self.rows.indices, self.rows.values, features)
        return LabelledRows(rows, self.labels)


@dataclass(frozen=True, eq=False)
class Parted:
    """Rows for training, and rows for validation."""

    training: LabelledRows
    validation: LabelledRows


def read_rows(source: Topic | str | Path, settings: DataSettings, *, owner: str = "read_rows") -> LabelledRows:
    """Read all rows that a topic or a file has now, and translate their labels as ``translabel`` says.

    A path, or a text without ``:``, names a file. A file whose name ends in ``.libsvm`` or ``.dummy`` (or with ``.gz``
    after it) is read in that format, any other file in the format ``data.format``. Raises ModelError if there is no
    row, JobFailed for a line that is no row, and the errors of topics.
    """
    decode = DenseLines() if settings.format == "dense" else None
    if not isinstance(source, Topic):
        source, decode = _topic_of(source, settings, decode)
    parts = examples_in_topic(source, decode, None, owner=owner)
    if not parts:
        raise ModelError(f"{owner}: expected rows in {source.name!r}, given none; look at the file")
    joined = joined_examples(owner, parts)
    data = LabelledRows(joined.features, np.asarray(joined.targets, dtype=np.float64))  # type: ignore[arg-type]
    if settings.index_range > 0:
        data = data.widened(settings.index_range, owner)
    return LabelledRows(data.rows, translated_labels(data.labels, settings.trans_label))


def as_labelled_rows(owner: str, rows: object, labels: npt.ArrayLike, features: int | None = None) -> LabelledRows:
    """Return the arrays as rows with labels. Raises ModelError for shapes that do not fit."""
    rows = sparse_if_scipy(rows)
    given = rows if isinstance(rows, SparseRows) else as_floats(owner, "rows", rows)
    if not isinstance(given, SparseRows) and given.ndim != 2:
        raise ModelError(f"{owner}: expected rows as (rows, features), given shape {given.shape}")
    data = LabelledRows(given, row_vector(owner, "labels", labels, len(given)))
    return data if features is None else data.widened(features, owner)


def translated_labels(labels: Array, way: LabelTransformation) -> Array:
    """Translate labels as the setting ``translabel`` says.

    ===============  ======================================
    ``NoTrans``      as they are
    ``PosNegTrans``  above 0: 1, otherwise −1
    ``ZeroOneTrans`` above 0: 1, otherwise 0
    ``AddOneTrans``  plus 1
    ``SubOneTrans``  minus 1
    ===============  ======================================

    >>> translated_labels(np.array([0.0, 1.0]), "PosNegTrans").tolist()
    [-1.0, 1.0]
    """
    return _TRANSFORMATIONS[way](labels)


def _by_sign(labels: Array, otherwise: float) -> Array:
    """Return 1 for a label above 0. NaN stays NaN, which the loss refuses: a row without a label has no class."""
    return np.where(np.isnan(labels), labels, np.where(labels > 0, 1.0, otherwise))


_TRANSFORMATIONS: Final[Mapping[str, Callable[[Array], Array]]] = MappingProxyType(
    {
        "NoTrans": lambda labels: labels,
        "PosNegTrans": lambda labels: _by_sign(labels, -1.0),
        "ZeroOneTrans": lambda labels: _by_sign(labels, 0.0),
        "AddOneTrans": lambda labels: labels + 1.0,
        "SubOneTrans": lambda labels: labels - 1.0,
    }
)


def part(data: LabelledRows, *, validate_ratio: float) -> Parted:
    """Take every ⌈1/ratio⌉-th row for validation and the others for training; with a ratio of 0 all for training.

    Raises ConfigurationError for a ratio that is not from 0 to below 1.
    """
    ratio = fraction("part(validate_ratio=)", validate_ratio)
    if not ratio or not len(data):
        return Parted(data, data[:0])
    is_held_out = np.zeros(len(data), dtype=np.bool_)
    # For a ratio near 0, 1/ratio is infinite.
    every = math.ceil(min(1.0 / ratio, len(data)))
    is_held_out[::every] = True
    return Parted(data[np.flatnonzero(~is_held_out)], data[np.flatnonzero(is_held_out)])


def _are_numbers(given: object, dimensions: int) -> bool:
    return isinstance(given, np.ndarray) and given.ndim == dimensions and given.dtype.kind in "biuf"


def _described(given: object) -> str:
    if isinstance(given, np.ndarray):
        return f"one of {given.dtype} of shape {given.shape}"
    return f"the {type(given).__name__} {shortened(given)}"


def _topic_of(source: str | Path, settings: DataSettings, decode: DenseLines | None) -> tuple[Topic, DenseLines | None]:
    text = str(source)
    url = text if ":" in text and not isinstance(source, Path) else f"file:{text}"
    if not url.startswith("file:"):
        return topic(url), decode
    suffix = text.removesuffix(".gz").rpartition(".")[2]
    if suffix in ("libsvm", "dummy"):
        return topic(url), None
    # Dense rows are lines of text.
    return topic(url, format="txt" if decode is not None else settings.format), decode


class PlaceHolder:
    """The current mini-batch, as the layers see it: rows, labels, and the features that occur in the rows.

    Only the parameters of these features are pulled from the server. ``features`` is the number of all features; layers
    compute in ``dtype``, float32 or float64.

    >>> place_holder = PlaceHolder(features=1_000_000, dtype="float32")
    >>> rows = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([7, 9], [2.0, 1.0])], width=1_000_000)
    >>> place_holder.feed_data(rows, [1, -1])
    >>> place_holder.batch_size, place_holder.indices.tolist(), place_holder.rows.indices.tolist()
    (2, [2, 7, 9], [0, 1, 1, 2])
    """

    def __init__(self, features: int, dtype: npt.DTypeLike) -> None:
        self.feature_dimension = features
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.training = False
        """Whether the network learns from the mini-batch; dropout drops nothing otherwise."""
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
        """Replace the mini-batch.

        ``rows`` have the shape (rows, features), dense or sparse. Prepared sparse rows come with ``indices``, the
        features that occur in them in ascending order; their columns count these. ``labels`` has one number a row.
        Raises ModelError for shapes that do not fit.
        """
        fed, present = self._as_rows(rows, indices)
        if not len(fed):
            raise ModelError("PlaceHolder: expected at least one row, given none; leave empty mini-batches out")
        vector = None if labels is None else row_vector("PlaceHolder", "labels", labels, len(fed))
        self.labels = None if vector is None else vector.astype(self.dtype, copy=False)
        self._rows, self._indices, self.training = fed, present, training
        for known in ("values", "features_per_row"):
            self.__dict__.pop(known, None)

    @property
    def rows(self) -> SparseRows | Array:
        """Return the rows: sparse ones, whose columns count ``indices``, or dense ones of shape (rows, features)."""
        if self._rows is None:
            raise ModelError("PlaceHolder: expected a mini-batch, given none yet; call feed_data first")
        return self._rows

    @property
    def batch_size(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Return the features that occur in the mini-batch, in ascending order; all features for dense rows."""
        if self._indices is None:
            self._indices = np.arange(self.feature_dimension, dtype=np.int64)
        return self._indices

    @cached_property
    def values(self) -> Array | None:
        """Return the values of sparse rows in the dtype of the network; None if all are 1, as in one-hot rows."""
        given = self.sparse_rows.values
        if np.count_nonzero(given == 1.0) == len(given):
            return None
        return given.astype(self.dtype)

    @cached_property
    def features_per_row(self) -> int | None:
        """Return the number of features in each sparse row if it is the same in all rows, else None."""
        indptr = self.sparse_rows.indptr
        first = int(indptr[1]) if len(indptr) > 1 else 0
        same = np.count_nonzero(np.diff(indptr) == first) == len(indptr) - 1
        return first if same else None

    @property
    def is_sparse(self) -> bool:
        return isinstance(self._rows, SparseRows)

    @property
    def sparse_rows(self) -> SparseRows:
        """Return the rows, which must be sparse."""
        rows = self.rows
        assert isinstance(rows, SparseRows)
        return rows

    @property
    def dense_rows(self) -> Array:
        """Return the rows, which must be dense."""
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
            return (rows, indices) if indices is not None else with_named_columns(rows)
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


class FeatureMiniBatch(NamedTuple):
    """Rows with labels, and the features whose parameters they need.

    >>> data = LabelledRows(np.arange(14.0).reshape(7, 2), np.ones(7))
    >>> steps = TrainingSteps(data, updates=3, workers=2)
    >>> steps.per_epoch, [len(steps.mini_batch(step, worker=0)) for step in range(3)], steps.mini_batch(2, worker=1)
    (3, [2, 2, 1], None)
    >>> steps.mini_batch(0, worker=1).rows.tolist(), steps.mini_batch(0, worker=1).rows_in_step
    ([[2.0, 3.0]], 3)
    """

    rows: SparseRows | Array
    """The rows; the columns of sparse rows count ``indices``."""
    indices: npt.NDArray[np.int64] | None
    """The features in ascending order; None for dense rows, which need all features."""
    labels: Array
    rows_in_step: int
    """The number of rows that all workers have in this step; under BSP the gradient is the mean over them."""
    times: Times | None = None
    """The times of the rows in milliseconds, if features expire."""

    def __len__(self) -> int:
        return len(self.labels)


def prepared(data: LabelledRows, rows_in_step: int, times: Times | None = None) -> FeatureMiniBatch:
    """Return the rows, which are as wide as the network, as a mini-batch."""
    rows, indices = with_named_columns(data.rows) if isinstance(data.rows, SparseRows) else (data.rows, None)
    return FeatureMiniBatch(rows, indices, data.labels, rows_in_step, times)


def to_record(mini_batch: FeatureMiniBatch) -> dict[str, object]:
    """Return the mini-batch as plain data."""
    return {**mini_batch._asdict(), "rows": rows_to_record(mini_batch.rows)}


def from_record(record: Mapping[str, Any]) -> FeatureMiniBatch:
    """Return the mini-batch that :func:`to_record` turned into plain data."""
    return FeatureMiniBatch(**{**record, "rows": rows_from_record(record["rows"])})


# The mini-batches of one epoch are kept for the next ones up to this size; they are as large as the rows.
_KEPT_BYTES_MAX: Final = 256 << 20


class TrainingSteps:
    """The steps of all epochs over bounded data: ⌈rows/updates⌉ rows a step, the last step of an epoch shorter.

    A step is made by all workers together: with n workers, each has every n-th row of it. So under BSP the number of
    workers changes only the last digits of the result. The order of the rows depends on ``seed`` and the epoch alone:

    - ``useshuffle``: the rows have another order in each epoch.
    - ``posnegratio``: an epoch has all rows of one kind, and a sample of the other kind; the ratio is the number of
      positive rows (label above 0) divided by the number of the others.
    - ``sampleratio`` below 1: a step is a random sample of this share of the rows, instead of the next rows. (This is
      how Spark on Angel makes mini-batches.)
    """

    def __init__(
        self,
        data: LabelledRows,
        *,
        updates: int,
        epochs: int = 1,
        workers: int = 1,
        settings: DataSettings | None = None,
        seed: int = 0,
    ) -> None:
        if not len(data):
            raise ModelError("training: expected rows to learn from, given none; lower validateratio, or add rows")
        self._data = data
        self._workers = workers
        self._settings = settings or DataSettings()
        self._seed = seed
        self._kinds = self._rows_by_kind()
        self._rows = sum(count for _, count in self._kinds)
        ratio = self._settings.sample_ratio
        self._is_sampled = ratio < 1.0
        self._batch = math.ceil(self._rows * ratio if self._is_sampled else self._rows / updates)
        self.per_epoch = updates if self._is_sampled else math.ceil(self._rows / self._batch)
        """The number of steps in an epoch."""
        self.in_all = epochs * self.per_epoch
        """The number of steps in all epochs."""
        self._order: tuple[int, Indices | None] = (-1, None)
        """The epoch that was last asked for, with its order of rows."""
        epochs_differ = self._is_sampled or self._settings.use_shuffle or self._settings.pos_neg_ratio > 0.0
        self._keeps = not epochs_differ and _size_bytes(data) <= _KEPT_BYTES_MAX
        self._kept: dict[tuple[int, int], FeatureMiniBatch] = {}
        """Prepared mini-batches by the number of the step in its epoch, and the worker."""
        self._drawn: tuple[int, Indices | None] = (-1, None)
        """The step that was last asked for, with its sample."""

    def mini_batch(self, step: int, worker: int) -> FeatureMiniBatch | None:
        """Return the rows of a worker in a step, both counted from 0; None if it has none."""
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
        return prepared(share, count)

    def _rows_of(self, step: int) -> slice | Indices:
        """Return the rows of all workers in a step."""
        epoch, update = divmod(step, self.per_epoch)
        order = self._order_of(epoch)
        if self._is_sampled:
            return self._sample(step, order)
        first = update * self._batch
        rows = slice(first, min(first + self._batch, self._rows))
        return rows if order is None else order[rows]

    def _sample(self, step: int, order: Indices | None) -> Indices:
        drawn_for, drawn = self._drawn
        if drawn is None or drawn_for != step:
            generator = np.random.default_rng([self._seed, 1, step])
            drawn = np.sort(generator.choice(self._rows, self._batch, replace=False))
            self._drawn = step, drawn
        return drawn if order is None else order[drawn]

    def _order_of(self, epoch: int) -> Indices | None:
        """Return the order of the rows in an epoch; None: all rows in their own order."""
        if not self._settings.use_shuffle and self._settings.pos_neg_ratio <= 0.0:
            return None
        if self._order[0] != epoch:
            self._order = epoch, self._ordered(np.random.default_rng([self._seed, 0, epoch]))
        return self._order[1]

    def _ordered(self, generator: np.random.Generator) -> Indices:
        parts = [
            rows if count == len(rows) else generator.choice(rows, count, replace=False) for rows, count in self._kinds
        ]
        rows: Indices = np.sort(np.concatenate(parts))
        return generator.permutation(rows) if self._settings.use_shuffle else rows

    def _rows_by_kind(self) -> list[tuple[Indices, int]]:
        """Return groups of rows, each with the number of its rows in an epoch: one group, or one for each kind."""
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
        # The minimum is taken before rounding: for a ratio near 0 the other number is infinite.
        positives = max(1, round(min(len(positive), len(negative) * ratio)))
        negatives = max(1, round(min(len(negative), len(positive) / ratio)))
        return [(positive, positives), (negative, negatives)]


def _size_bytes(data: LabelledRows) -> int:
    return data.rows.values.nbytes * 2 if isinstance(data.rows, SparseRows) else data.rows.nbytes
