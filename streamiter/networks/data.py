"""Rows with labels: reading them from topics and files, translating labels, and taking a part for validation.

``LabelledRows`` is what networks learn from: rows of features, dense or sparse, with one label each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import DecodeError, ModelError, shortened
from streamiter.learn.estimators import examples_in_topic
from streamiter.learn.rows import Examples
from streamiter.networks.configuration.settings import DataSettings, LabelTransformation
from streamiter.networks.parameters import Array
from streamiter.numbers import fraction
from streamiter.records import Batch, Columns
from streamiter.sparse_rows import SparseRows
from streamiter.tables import as_floats
from streamiter.topics.topic import Topic, TopicBatch
from streamiter.topics.urls import topic


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


def read_rows(
    source: Topic | str | Path, settings: DataSettings, *, owner: str = "read_rows"
) -> LabelledRows:
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
    data = _joined(parts, owner)
    if settings.index_range > 0:
        data = data.widened(settings.index_range, owner)
    return LabelledRows(data.rows, translated(data.labels, settings.trans_label))


def as_labelled_rows(owner: str, rows: Any, labels: Any, features: int | None = None) -> LabelledRows:
    """Return the arrays as rows with labels. Raises ModelError for shapes that do not fit."""
    given = rows if isinstance(rows, SparseRows) else as_floats(owner, "rows", rows)
    vector = as_floats(owner, "labels", labels)
    if not isinstance(given, SparseRows) and given.ndim != 2:
        raise ModelError(f"{owner}: expected rows as (rows, features), given shape {given.shape}")
    if vector.shape != (len(given),):
        raise ModelError(
            f"{owner}: expected {len(given)} labels, one for each row, given shape {vector.shape}"
        )
    data = LabelledRows(given, vector)
    return data if features is None else data.widened(features, owner)


def translated(labels: Array, way: LabelTransformation) -> Array:
    """Translate labels as the setting ``translabel`` says.

    ===============  ======================================
    ``NoTrans``      as they are
    ``PosNegTrans``  above 0: 1, otherwise −1
    ``ZeroOneTrans`` above 0: 1, otherwise 0
    ``AddOneTrans``  plus 1
    ``SubOneTrans``  minus 1
    ===============  ======================================

    >>> translated(np.array([0.0, 1.0]), "PosNegTrans").tolist()
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


def _are_numbers(given: Any, dimensions: int) -> bool:
    return isinstance(given, np.ndarray) and given.ndim == dimensions and given.dtype.kind in "biuf"


def _described(given: Any) -> str:
    if isinstance(given, np.ndarray):
        return f"one of {given.dtype} of shape {given.shape}"
    return f"the {type(given).__name__} {shortened(given)}"


def _topic_of(
    source: str | Path, settings: DataSettings, decode: DenseLines | None
) -> tuple[Topic, DenseLines | None]:
    text = str(source)
    url = text if ":" in text and not isinstance(source, Path) else f"file:{text}"
    if not url.startswith("file:"):
        return topic(url), decode
    suffix = text.removesuffix(".gz").rpartition(".")[2]
    if suffix in ("libsvm", "dummy"):
        return topic(url), None
    # Dense rows are lines of text.
    return topic(url, format="txt" if decode is not None else settings.format), decode


def _joined(parts: Sequence[Examples], owner: str) -> LabelledRows:
    """Join the rows; sparse rows become as wide as the widest."""
    labels = np.concatenate([np.asarray(part.targets, dtype=np.float64) for part in parts])
    features: list[Any] = [part.features for part in parts]
    if all(isinstance(rows, SparseRows) for rows in features):
        width = max(rows.width for rows in features)
        same = [LabelledRows(rows, labels[: len(rows)]).widened(width, owner).rows for rows in features]
        return LabelledRows(SparseRows.concatenate(same), labels)  # type: ignore[arg-type]
    widths = {rows.shape[1] for rows in features}
    if len(widths) > 1:
        raise ModelError(f"{owner}: expected dense rows of one width, given {sorted(widths)}")
    return LabelledRows(np.concatenate(features), labels)
