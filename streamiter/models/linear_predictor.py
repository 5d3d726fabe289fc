"""``LinearPredictor``: predicts with the parameters of a published linear model, with numpy alone.

A *plain* model has a weight for each feature. A *standardized* model, such as the default model of ``train_online``,
has fields and hashed places as its columns, each with a center and a limit (:class:`StandardizedModel`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.models.catalogue import ApproximateIndex, Catalogue
from streamiter.models.documents import Parameters, array_of_numbers, names_of
from streamiter.models.explanations import Effects, Explanation, explanation_of
from streamiter.models.ranking import Candidates, RankedCandidate, checked_candidates, divided, ranked
from streamiter.models.saved_objects import Savable
from streamiter.models.standardized_model import EXPONENT_MAX, StandardizedModel
from streamiter.values.numbers import Floats, sigmoid, standardized
from streamiter.values.sparse_rows import SparseRows, rows_to_predict

_LINKS: Final[Mapping[str, Callable[[Floats], Floats]]] = MappingProxyType(
    {"identity": lambda score: score, "logit": sigmoid, "log": lambda score: np.exp(np.minimum(score, EXPONENT_MAX))}
)


def probabilities_of_classes(subject: str, link: str, predict: Callable[[], Any]) -> Floats:
    """Return the probability of each class; for a model of truth values, the probability of False, then of True."""
    if link not in ("logit", "softmax"):
        raise ModelError(f"{subject}.predict_proba: expected a model of classes, given one of numbers; use predict")
    found = np.asarray(predict())
    return found if link == "softmax" else np.stack([1.0 - found, found], axis=-1)


class LinearPredictor(Savable):
    """Predicts one row, or each of several rows, with the parameters of a linear model.

    *Plain* parameters are ``{"weights": (d,), "intercept": number, "link": "identity" | "logit" | "log"}``, of which
    only the weights are needed, or the bare weights. A prediction is ``link(weights · x + intercept)``; ``"logit"``
    gives probabilities, and ``"log"`` exp(score), as for counts. An array of ``d`` features gives one float; an array
    of shape ``(n, d)``, or a table of ``d`` columns, gives an array of n numbers. A sparse row is the tuple ``(indices,
    values)``, and features that it does not name are 0. A list of such tuples gives an array, and so do ``SparseRows``,
    about ten times as fast. With ``mean`` and ``deviation``, of shape (d,), x is standardized first.

    *Standardized* parameters are those of an ``AdaptiveLinearModel``. Rows have named fields: a dict gives one float,
    and a list of dicts, ``Columns`` or a table an array of n numbers. Missing and unknown fields count as the mean. A
    model of classes gives an array of probabilities for a row, and an array of shape ``(n, probabilities)`` for n rows.
    A model that has learned from a matrix or from ``SparseRows`` takes these, and rows of them.

    Raises :class:`~streamiter.errors.ModelError` for parameters and rows that it cannot use.

    >>> predict = LinearPredictor({"weights": np.array([1.0, -1.0]), "intercept": 0.5})
    >>> predict([2.0, 1.0]), predict([[2.0, 1.0], [0.0, 0.5]]), predict(([1], [1.0]))
    (1.5, array([1.5, 0. ]), -0.5)
    """

    def __init__(self, parameters: Parameters, subject: str = "model") -> None:
        if hasattr(parameters, "parameters"):  # a version, or a model
            write = "model.parameters()" if callable(parameters.parameters) else "version.parameters"
            given = type(parameters).__name__
            raise ModelError(f"{subject}: expected the parameters of a model, given a {given}; write {write}")
        fields: dict[str, Any] = parameters if isinstance(parameters, dict) else {"weights": parameters}
        self.subject = subject
        """The beginning of messages."""
        self._standardized = StandardizedModel(fields, subject) if "center" in fields else None
        if self._standardized is None:
            self._weights = _weights(fields, subject)
            self._intercept = _intercept(fields, subject)
            self._link_name = _link(fields, subject)
            self._link = _LINKS[self._link_name]
            self._scaling: list[Floats] | None = None
            if "deviation" in fields:
                shape = (len(self._weights),)
                self._scaling = [array_of_numbers(fields, name, subject, shape) for name in ("mean", "deviation")]

    def __repr__(self) -> str:
        return f"LinearPredictor({names_of(self.get_params()['parameters'])})"

    @property
    def fields(self) -> frozenset[str]:
        """The fields of rows that have an effect; empty for rows of numbers."""
        return frozenset() if self._standardized is None else self._standardized.known

    @property
    def classes(self) -> list[Any] | None:
        """The labels of the probabilities, in order; None if a prediction is one number."""
        return None if self._standardized is None else self._standardized.classes

    @property
    def positive(self) -> Any:
        """The label whose probability a prediction is, of two labels; None for truth values and other models."""
        return None if self._standardized is None else self._standardized.positive

    def __call__(self, x: object) -> Any:
        if self._standardized is not None:
            return self._standardized.predict(x)
        rows, is_single = rows_to_predict(self.subject, x, len(self._weights))
        if self._scaling is not None:
            rows = standardized(rows.to_dense() if isinstance(rows, SparseRows) else rows, *self._scaling)
        scores = rows.dot(self._weights) if isinstance(rows, SparseRows) else rows @ self._weights
        values = self._link(scores + self._intercept)
        return float(values[0]) if is_single else values

    def predict_proba(self, x: object) -> Floats:
        """Return the probability of each class for each of several rows, or the probabilities for one row.

        The probabilities are in the order of ``classes``; a model of truth values has False, then True. If the model
        finds its classes as they come, the last probability is for a class that has not come yet.

        >>> LinearPredictor({"weights": np.array([1.0]), "link": "logit"}).predict_proba([2.0]).round(2).tolist()
        [0.12, 0.88]
        """
        link = self._link_name if self._standardized is None else self._standardized.link
        return probabilities_of_classes(self.subject, link, lambda: self(x))

    def top_k(self, row: Mapping[str, Any], candidates: Candidates, k: int = 10) -> list[RankedCandidate]:
        """Return the ``k`` candidates with the largest predictions for a row of named fields, the best first.

        ``candidates`` have the fields that differ, as columns by field, ``Columns``, or a list of dicts; a field that
        the row has, too, counts as the candidate has it. Each prediction is that of the whole row; what depends on the
        row alone is computed once. Of equal predictions the first candidate comes first. Raises ``ModelError`` for
        models of several classes, and for models without named fields.

        >>> parameters = {"fields": ["price"], "text_fields": [], "places": np.zeros(0), "bits": 18, "link": "logit"}
        >>> arrays = {"weights": np.array([-1.0]), "center": np.zeros(1), "limit": np.ones(1), "intercept": 0.0}
        >>> predict = LinearPredictor(parameters | arrays)
        >>> [each.candidate for each in predict.top_k({}, {"price": [0.5, 0.25, 0.75]}, k=2)]
        [{'price': 0.25}, {'price': 0.5}]
        """
        columns = checked_candidates(self.subject, candidates)
        return ranked(columns, self.predict_candidates(row, columns), k, self.subject)

    def predict_candidates(self, row: Mapping[str, Any], candidates: Candidates) -> Floats:
        """Return the prediction for a row together with each candidate, see :meth:`top_k`."""
        model = self.ranking_model()
        own, others = divided(row, checked_candidates(self.subject, candidates))
        return model.predict_beside(own, model.candidates(others))

    def catalogue(self, candidates: Candidates, *, approximate: ApproximateIndex | None = None) -> Catalogue:
        """Return candidates to rank for many rows, see ``ServedModel.catalogue``."""
        return Catalogue(self.subject, candidates, lambda: self, approximate)

    def ranking_model(self) -> StandardizedModel:
        """Return the model. Raises ``ModelError`` for one that cannot rank, see :meth:`top_k`."""
        model = self._standardized
        if model is None or model.classes is not None or model.width is not None:
            given = "weights without names" if model is None else "sparse rows" if model.width else "several classes"
            raise ModelError(f"{self.subject}.top_k: expected a model of named fields with one score, given {given}")
        return model

    @property
    def effects(self) -> Effects | None:
        """What the columns and pairs of a model with tables do to its scores; None for a model without tables."""
        return None if self._standardized is None else self._standardized.effects

    def explain(self, x: object) -> Explanation:
        """Return the score of one row, or of each of several rows, as the sum of the parts of its features.

        >>> predict = LinearPredictor({"weights": np.array([1.0, -1.0]), "intercept": 0.5})
        >>> predict.explain([2.0, 1.0]).contributions
        {'0': 2.0, '1': -1.0}
        >>> table = predict.explain([[2.0, 1.0], [0.0, 3.0]])
        >>> table.contributions["1"].tolist(), table.score.tolist()
        ([-1.0, -3.0], [1.5, -2.5])
        """
        if self._standardized is not None:
            return self._standardized.explain(x)
        rows, is_single = rows_to_predict(self.subject, x, len(self._weights))
        x = rows.to_dense() if isinstance(rows, SparseRows) else rows
        products = (x if self._scaling is None else standardized(x, *self._scaling)) * self._weights
        parts = {str(column): products[:, column] for column in np.flatnonzero(products.any(axis=0)).tolist()}
        return explanation_of(self._intercept, parts, is_single)


def _weights(fields: Mapping[str, object], subject: str) -> Floats:
    if "centroids" in fields:  # The weights are those of the clusters.
        raise ModelError(
            f"{subject}: expected the parameters of a linear model, given centroids; load=KMeans.predictor predicts "
            "the number of the nearest one"
        )
    weights = fields.get("weights")
    if not isinstance(weights, np.ndarray) or weights.ndim != 1 or weights.dtype.kind not in "iuf":
        shape = f"shape {weights.shape}" if isinstance(weights, np.ndarray) else f"{type(weights).__name__}"
        raise ModelError(
            f"{subject}: parameters {', '.join(map(repr, fields))}: expected 'weights' as numbers of shape (d,), given"
            f" {shape}; other parameters need a predictor of their own, predict=f(parameters, x)"
        )
    return weights.astype(np.float64)


def _intercept(fields: Mapping[str, object], subject: str) -> float:
    intercept = np.asarray(fields.get("intercept", 0.0))
    if intercept.size != 1 or intercept.dtype.kind not in "biuf":
        raise ModelError(f"{subject}: expected 'intercept' as one number, given {fields['intercept']!r}")
    return float(intercept.item())


def _link(fields: Mapping[str, object], subject: str) -> str:
    name = fields.get("link", "identity")
    if not isinstance(name, str) or name not in _LINKS:
        raise ModelError(f"{subject}: expected 'link' as one of {', '.join(_LINKS)}, given {name!r}")
    return name
