"""The predictor used unless another is given: a linear score, through a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.models.parameters import Parameters
from streamiter.sparse_rows import SparseRows
from streamiter.tables import as_floats

__all__ = ["LinearPredictor", "rows_to_predict"]

Floats = npt.NDArray[np.float64]


def _sigmoid(score: Floats) -> Floats:
    # exp of a positive number overflows beyond 709; of a negative one it only becomes 0.
    small = np.exp(-np.abs(score))
    probability: Floats = np.where(score >= 0, 1.0, small) / (1.0 + small)
    return probability


_LINKS: Final[Mapping[str, Callable[[Floats], Floats]]] = MappingProxyType(
    {"identity": lambda score: score, "logit": _sigmoid}
)


class LinearPredictor:
    """``link(weights · x + intercept)`` for one row, or for each of many.

    Parameters: ``{"weights": (d,), "intercept": number, "link": "identity" | "logit"}``, of which only the
    weights are needed, or the bare weights. ``"logit"`` gives probabilities. Rows: an array of ``d``
    features gives one float, one of ``(n, d)``, or a table of ``d`` columns, an array of n. A sparse row is the tuple
    ``(indices, values)``, where features that it does not name are 0; a list of such tuples gives an array, and so do
    ``SparseRows``, some ten times as fast.

    Raises :class:`~streamiter.errors.ModelError` for parameters it cannot use and rows that do not fit.

    >>> predict = LinearPredictor({"weights": np.array([1.0, -1.0]), "intercept": 0.5})
    >>> predict([2.0, 1.0]), predict([[2.0, 1.0], [0.0, 0.5]]), predict(([1], [1.0]))
    (1.5, array([1.5, 0. ]), -0.5)
    """

    def __init__(self, parameters: Parameters, subject: str = "model") -> None:
        fields = parameters if isinstance(parameters, dict) else {"weights": parameters}
        self._subject = subject
        self._weights = _weights(fields, subject)
        self._intercept = _intercept(fields, subject)
        self._link = _link(fields, subject)

    def __call__(self, x: object) -> Any:
        rows, is_single = rows_to_predict(self._subject, x, len(self._weights))
        scores = rows.dot(self._weights) if isinstance(rows, SparseRows) else rows @ self._weights
        values = self._link(scores + self._intercept)
        return float(values[0]) if is_single else values


def rows_to_predict(subject: str, x: object, features: int) -> tuple[SparseRows | Floats, bool]:
    """What predictors take, as rows, and whether it is a single one.

    One row is an array of ``features`` numbers or the tuple ``(indices, values)``. Several are a matrix, a table of as
    many columns, a list of such tuples or ``SparseRows``. Raises ModelError for what does not fit.

    >>> rows_to_predict("model", ([1], [2.0]), 3)
    (SparseRows(1 rows of width 3, 1 values), True)
    """
    if isinstance(x, SparseRows):
        if x.width != features:
            raise ModelError(
                f"{subject}: expected sparse rows of width {features}, given width {x.width}; make them with the "
                "hasher that the model was trained with"
            )
        return x, False
    if isinstance(x, tuple):
        return _sparse_rows(subject, [x], features), True
    if isinstance(x, list) and x and isinstance(x[0], tuple):
        return _sparse_rows(subject, x, features), False
    rows = as_floats(subject, "rows", x)
    if rows.ndim not in (1, 2) or rows.shape[-1] != features:
        raise ModelError(
            f"{subject}: expected rows of {features} features, as ({features},) or (n, {features}), given shape "
            f"{rows.shape}"
        )
    return np.atleast_2d(rows), rows.ndim == 1


def _sparse_rows(subject: str, pairs: list[Any], features: int) -> SparseRows:
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ModelError(
                f"{subject}: expected sparse rows as tuples (indices, values), given {pair!r:.100}; a dense row is a "
                "list or an array"
            )
    try:
        return SparseRows.from_rows(pairs, features)
    except (TypeError, ValueError, ModelError) as error:
        raise ModelError(f"{subject}: expected sparse rows as tuples (indices, values): {error}") from error


def _weights(fields: dict[str, Any], subject: str) -> Floats:
    weights = fields.get("weights")
    if not isinstance(weights, np.ndarray) or weights.ndim != 1 or weights.dtype.kind not in "iuf":
        shape = f"shape {weights.shape}" if isinstance(weights, np.ndarray) else f"{type(weights).__name__}"
        raise ModelError(
            f"{subject}: parameters {', '.join(map(repr, fields))}: expected 'weights' as numbers of shape (d,), given"
            f" {shape}; other parameters need a predictor of their own, predict=f(parameters, x)"
        )
    return weights.astype(np.float64)


def _intercept(fields: dict[str, Any], subject: str) -> float:
    intercept = np.asarray(fields.get("intercept", 0.0))
    if intercept.size != 1 or intercept.dtype.kind not in "biuf":
        raise ModelError(f"{subject}: expected 'intercept' as one number, given {fields['intercept']!r}")
    return float(intercept.item())


def _link(fields: dict[str, Any], subject: str) -> Callable[[Floats], Floats]:
    name = fields.get("link", "identity")
    if not isinstance(name, str) or name not in _LINKS:
        raise ModelError(f"{subject}: expected 'link' as one of {', '.join(_LINKS)}, given {name!r}")
    return _LINKS[name]
