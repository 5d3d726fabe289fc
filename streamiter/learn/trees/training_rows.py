"""What a tree is fitted to: features, labels and weights, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import Floats, holds, refuse_rows, row_vector, row_weights
from streamiter.learn.rows.examples import Examples
from streamiter.learn.rows.feature_rows import Features, dense_features, refuse_not_finite
from streamiter.operators.rejection import shortened
from streamiter.records import Columns
from streamiter.sparse_rows import SparseRows
from streamiter.tables import array_of, as_floats

__all__ = ["Task", "TrainingRows", "joined", "training_rows"]

Task = Literal["classification", "regression"]

_OWNER: Final = "DecisionTree"


class TrainingRows(NamedTuple):
    """The rows that count: those of a weight above 0."""

    columns: Columns
    """``features``, a matrix; ``label``, a number or the number of a class; ``weight``."""
    classes: npt.NDArray[Any] | None
    """In ascending order; None for regression."""


def training_rows(examples: Examples, task: Task, feature_names: Sequence[str] | None) -> TrainingRows:
    """Examples as they were given, checked. Raises ModelError for what cannot be learned from."""
    matrix = _matrix(examples.features, feature_names)
    given = np.ones(len(matrix)) if examples.weights is None else examples.weights
    weights = row_weights(_OWNER, given, len(matrix))
    classes, labels = _classes_and_labels(task, examples.targets, len(matrix))
    if not holds(counting := weights > 0):
        if not counting.any():
            raise ModelError(f"{_OWNER}: expected at least one row with a sample weight above 0, given none")
        matrix, labels, weights = matrix[counting], labels[counting], weights[counting]
    return TrainingRows(Columns({"features": matrix, "label": labels, "weight": weights}), classes)


def joined(parts: Sequence[Examples]) -> Examples:
    """All of them as one, dense; rows that are sparse may be of different widths."""
    width = max((part.features.width for part in parts if isinstance(part.features, SparseRows)), default=0)
    weights = None
    if any(part.weights is not None for part in parts):
        weights = _stacked(
            [
                np.ones(len(np.asarray(part.targets))) if part.weights is None else part.weights
                for part in parts
            ]
        )
    return Examples(
        _stacked([_dense(part.features, width) for part in parts]),
        _stacked([part.targets for part in parts]),
        weights,
    )


def _stacked(parts: Sequence[npt.ArrayLike]) -> npt.NDArray[Any]:
    if not parts:
        return np.zeros(0)
    try:
        return np.concatenate([np.asarray(part) for part in parts])
    except ValueError as error:
        raise ModelError(
            f"{_OWNER}: expected examples of one shape in all batches of the topic, given others: {error}; look at "
            "what extract gives"
        ) from None


def _dense(features: Features, width: int) -> npt.ArrayLike:
    if isinstance(features, SparseRows):
        features = SparseRows(features.indptr, features.indices, features.values, width)
    return dense_features(features)


def _matrix(features: Features, feature_names: Sequence[str] | None) -> Floats:
    matrix = as_floats(_OWNER, "features", dense_features(features))
    if matrix.ndim != 2 or not matrix.size:
        raise ModelError(
            f"{_OWNER}: expected features as a matrix (rows, features) with at least one of each, given shape "
            f"{matrix.shape}; give a row for each label"
        )
    if feature_names is not None and len(feature_names) != matrix.shape[1]:
        raise ModelError(
            f"{_OWNER}: expected as many features as feature_names, {len(feature_names)}, given "
            f"{matrix.shape[1]}; name each of them"
        )
    refuse_not_finite(_OWNER, matrix)
    return matrix


def _classes_and_labels(
    task: Task, labels: npt.ArrayLike, length: int
) -> tuple[npt.NDArray[Any] | None, Floats]:
    """The classes and, for each row, the number of its class; or None and the labels."""
    if task == "classification":
        classes, of_rows = np.unique(_checked_classes(labels, length), return_inverse=True)
        return classes, of_rows.astype(np.float64)
    numbers = row_vector(_OWNER, "labels", labels, length)
    if not holds(finite := np.isfinite(numbers)):
        raise refuse_rows(finite, f"{_OWNER}: expected finite labels", numbers)
    return None, numbers


def _checked_classes(labels: npt.ArrayLike, length: int) -> npt.NDArray[Any]:
    given = array_of(f"{_OWNER}: labels", labels)
    if given.shape != (length,):
        raise ModelError(
            f"{_OWNER}: expected {length} labels, one for each row, given shape {given.shape}; give each row a class"
        )
    if given.dtype.kind == "f":
        if not holds(whole := np.isfinite(given) & (given == np.rint(given))):
            raise refuse_rows(
                whole,
                f'{_OWNER}: expected classes, whole numbers or texts (or task="regression" for any number)',
                given,
            )
    elif given.dtype.kind not in "biuU":
        raise ModelError(
            f"{_OWNER}: expected classes to be whole numbers or texts, given {shortened(given[0])}; give each class "
            "a number or a name"
        )
    return given
