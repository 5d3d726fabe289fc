"""The predictor used unless another is given: a linear score, through a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.models.parameters import Parameters

__all__ = ["LinearPredictor"]

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
    features gives one float, one of ``(n, d)`` an array of n. A sparse row is the tuple
    ``(indices, values)``, where features that it does not name are 0; a list of such tuples gives an array.

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
        if isinstance(x, tuple):
            return float(self._link(self._sparse_score(x)))
        if isinstance(x, list) and x and isinstance(x[0], tuple):
            return self._link(np.array([self._sparse_score(row) for row in x], dtype=np.float64))
        rows = self._floats(x, "rows")
        if rows.ndim not in (1, 2) or rows.shape[-1] != len(self._weights):
            raise ModelError(
                f"{self._subject}: expected rows of {len(self._weights)} features, as ({len(self._weights)},) or"
                f" (n, {len(self._weights)}), given shape {rows.shape}"
            )
        values = self._link(np.asarray(rows @ self._weights + self._intercept))
        return float(values) if rows.ndim == 1 else values

    def _sparse_score(self, row: object) -> Floats:
        indices, values = self._sparse_row(row)
        size = len(self._weights)
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < size:
            raise ModelError(
                f"{self._subject}: expected indices of {size} features, 0 to {size - 1}, given"
                f" {int(indices.min())} to {int(indices.max())}"
            )
        return np.asarray(values @ self._weights[indices] + self._intercept)

    def _floats(self, given: object, what: str) -> Floats:
        try:
            return np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{self._subject}: expected {what} of numbers, given {given!r:.100}: {error}"
            ) from error

    def _sparse_row(self, row: object) -> tuple[npt.NDArray[np.intp], Floats]:
        if not isinstance(row, tuple) or len(row) != 2:
            raise ModelError(
                f"{self._subject}: expected a sparse row as the tuple (indices, values), given {row!r:.100}"
            )
        indices, values = np.asarray(row[0]), self._floats(row[1], "values")
        if (
            indices.ndim != 1
            or indices.shape != values.shape
            or (indices.size and indices.dtype.kind not in "iu")
        ):
            raise ModelError(
                f"{self._subject}: expected a sparse row as two arrays of one length, integer indices and their values,"
                f" given shapes {indices.shape} and {values.shape}, indices {indices.dtype}"
            )
        return indices.astype(np.intp), values


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
