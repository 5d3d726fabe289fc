"""``LinearPredictor``: predicts with the parameters of a published linear model, with numpy alone.

A *plain* model has a weight for each feature. A *standardized* model, such as the default model of ``train_online``,
has fields and hashed places as its columns, each with a center and a limit (:class:`_StandardizedModel`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from streamiter.crossed_rows import CROSS_LIMIT, Cross, crossed, crossed_fields, numbers_of, places_of_cross
from streamiter.errors import ModelError, shortened
from streamiter.models.documents import Parameters
from streamiter.named_rows import HUGE, FieldReader, NamedRows, are_texts, is_missing, named_matrix
from streamiter.numbers import Floats, Indices, is_number, standardized
from streamiter.records import Columns, columns_of_table
from streamiter.saved_objects import Savable
from streamiter.sparse_rows import SparseRows, sparse_if_scipy, sums_by
from streamiter.tables import as_floats


def _sigmoid(score: Floats) -> Floats:
    # exp overflows for numbers above 709; for negative numbers it only becomes 0.
    small = np.exp(-np.abs(score))
    return np.where(score >= 0, 1.0, small) / (1.0 + small)


_LINKS: Final[Mapping[str, Callable[[Floats], Floats]]] = MappingProxyType(
    {"identity": lambda score: score, "logit": _sigmoid, "log": lambda score: np.exp(np.minimum(score, 700.0))}
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The score of one row as a sum; a model of classes has arrays, with a number for each probability."""

    intercept: float | Floats
    """The score of a row of which nothing is known."""
    contributions: dict[str, Any]
    """The part of each feature, by its field or the number of its column; a cross is named ``"a × b"``."""

    @property
    def score(self) -> float | Floats:
        """The intercept and all contributions; the link makes the prediction of it."""
        return sum(self.contributions.values(), start=self.intercept)


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
        fields: dict[str, Any] = parameters if isinstance(parameters, dict) else {"weights": parameters}
        self._subject = subject
        self._standardized = _StandardizedModel(fields, subject) if "center" in fields else None
        if self._standardized is None:
            self._weights = _weights(fields, subject)
            self._intercept = _intercept(fields, subject)
            self._link = _link(fields, subject)
            self._scaling: list[Floats] | None = None
            if "deviation" in fields:
                shape = (len(self._weights),)
                self._scaling = [_array(fields, name, subject, shape) for name in ("mean", "deviation")]

    @property
    def fields(self) -> frozenset[str]:
        """The fields of rows that have an effect; empty for rows of numbers."""
        return frozenset() if self._standardized is None else self._standardized.known

    @property
    def classes(self) -> list[Any] | None:
        """The labels of the probabilities, in order; None if a prediction is one number."""
        return None if self._standardized is None else self._standardized.classes

    def __call__(self, x: object) -> Any:
        if self._standardized is not None:
            return self._standardized.predict(x)
        rows, is_single = rows_to_predict(self._subject, x, len(self._weights))
        if self._scaling is not None:
            rows = standardized(rows.to_dense() if isinstance(rows, SparseRows) else rows, *self._scaling)
        scores = rows.dot(self._weights) if isinstance(rows, SparseRows) else rows @ self._weights
        values = self._link(scores + self._intercept)
        return float(values[0]) if is_single else values

    def explain(self, x: object) -> Explanation:
        """Return the score of one row as the sum of the parts of its features.

        >>> LinearPredictor({"weights": np.array([1.0, -1.0]), "intercept": 0.5}).explain([2.0, 1.0]).contributions
        {'0': 2.0, '1': -1.0}
        """
        if self._standardized is not None:
            return self._standardized.explain(x)
        rows = _single_row(self._subject, x, len(self._weights))
        if self._scaling is not None:
            rows = standardized(rows, *self._scaling)
        products = rows[0] * self._weights
        columns = np.flatnonzero(products)
        return Explanation(self._intercept, dict(zip(map(str, columns), products[columns].tolist(), strict=True)))


def _single_row(subject: str, x: object, features: int) -> Floats:
    """Return one row as a matrix (1, features)."""
    rows, is_single = rows_to_predict(subject, x, features)
    if not is_single:
        raise ModelError(f"{subject}: expected one row to explain, given {len(rows)}; explain them one by one")
    return rows.to_dense() if isinstance(rows, SparseRows) else rows


def rows_to_predict(subject: str, x: object, features: int) -> tuple[SparseRows | Floats, bool]:
    """Return the rows to predict, and whether a single row was given.

    One row is an array of ``features`` numbers or the tuple ``(indices, values)``. Several rows are a matrix, a table
    of as many columns, a list of such tuples or ``SparseRows``. Raises ModelError for rows of any other form.

    >>> rows_to_predict("model", ([1], [2.0]), 3)
    (SparseRows(1 rows of width 3, 1 values), True)
    """
    x = sparse_if_scipy(x)
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


def _weights(fields: Mapping[str, object], subject: str) -> Floats:
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


def _link(fields: Mapping[str, object], subject: str) -> Callable[[Floats], Floats]:
    name = fields.get("link", "identity")
    if not isinstance(name, str) or name not in _LINKS:
        raise ModelError(f"{subject}: expected 'link' as one of {', '.join(_LINKS)}, given {name!r}")
    return _LINKS[name]


# ---- standardized models

# As the learner: its scores of probabilities end here.
_SCORE_MAX: Final = 30.0

_NUMBERS: Final[tuple[type[Any], ...]] = (int, float, np.integer, np.floating, np.bool_)

# Weights of recent texts: a text that comes again is not hashed again.
_CACHED_TEXTS: Final = 65_536

_NO_PLACE: Final = np.iinfo(np.intp).max

_Weight = Any
"""The weight of a column, a float, or its weights for all classes, an array: both can be added and multiplied."""


class _StandardizedModel:
    """Predicts with the parameters of an ``AdaptiveLinearModel``.

    Its columns are the numeric ``fields``, then the hashed ``places``. The score of a row is ``intercept + sum of
    weights · clip(value − center, −limit, limit)``, where missing and unknown values are left out; a text has the value
    1 at its place.
    """

    def __init__(self, given: Mapping[str, Any], subject: str) -> None:
        self._subject = subject
        self._link: str = _value(given, "link", subject, "one of logit, softmax, clipped", _is_link)
        self.classes: list[Any] | None = None
        if self._link == "softmax":
            self.classes = _value(given, "classes", subject, "a list of labels", lambda value: isinstance(value, list))
        elif self._link == "clipped":
            self._lowest, self._highest = (
                float(_value(given, name, subject, "a number", is_number)) for name in ("lowest", "highest")
            )
        self._fields: list[str] = _value(given, "fields", subject, "a list of names", _are_names)
        self._texts = frozenset(_value(given, "text_fields", subject, "a list of names", _are_names))
        self._place_columns(given)
        self._columns = {name: column for column, name in enumerate(self._fields)}
        pairs = _value({"crosses": [], **given}, "crosses", subject, "pairs of names", _are_pairs)
        self._crosses: list[Cross] = [(first, second) for first, second in pairs]
        if self._crosses:
            fields = crossed_fields(self._crosses)
            self._moments = [_array(given, name, subject, (len(fields),)) for name in ("cross_mean", "cross_deviation")]
            self._moments_of = dict(
                zip(fields, zip(*(each.tolist() for each in self._moments), strict=True), strict=True)
            )
        self._product_of = {cross: " × ".join(cross) for cross in self._crosses}
        self._products = frozenset(self._product_of.values())
        plain = [name for name in self._fields if name not in self._products]
        self._matrix_width = len(plain) if not self._texts and plain == list(map(str, range(len(plain)))) else None
        self._vectors = {name.rpartition("[")[0] for name in self._fields if name.endswith("]")}
        self.known = self._texts.union(self._fields, self._vectors)
        self._width = None if "width" not in given else _value(given, "width", subject, "a number", _is_count)
        self._bits: int = _value(given, "bits", subject, "a number", _is_count)
        self._reader = FieldReader(bits=self._bits, owner=subject)
        self._weight_of_text: dict[tuple[str, Any], _Weight] = {}
        """The weight of a text in a field, or of a missing value: None for NaN, too."""
        self._limit_of_cross: dict[tuple[Any, ...], tuple[float, _Weight]] = {}
        """Limit and weight of a cross with one or two texts."""

    def _place_columns(self, given: Mapping[str, Any]) -> None:
        """Take over the arrays: the weights as a matrix, with a column for each score."""
        subject, numeric = self._subject, len(self._fields)
        places = _array(given, "places", subject, (None,)).astype(np.intp)
        if (places[1:] <= places[:-1]).any():
            raise ModelError(f"{subject}: expected 'places' in ascending order, given {shortened(places)}")
        columns = numeric + len(places)
        if self.classes is None:
            self._weights = _array(given, "weights", subject, (columns,))[:, None]
            self._intercept = _array(given, "intercept", subject, ())[None]
        else:
            self._weights = _array(given, "weights", subject, (columns, None))
            self._intercept = _array(given, "intercept", subject, self._weights.shape[1:])
            if len(self._intercept) - len(self.classes) not in (0, 1):
                raise ModelError(
                    f"{subject}: expected a score for each of {len(self.classes)} classes, and at most one more for a "
                    f"class that has not come yet, given {len(self._intercept)}"
                )
        self._center = _array(given, "center", subject, (columns,))
        self._limit = _array(given, "limit", subject, (columns,))
        # The last row is that of all places that the model does not know.
        self._places = np.append(places, _NO_PLACE)
        self._place_limits = np.append(self._limit[numeric:], 0.0)
        self._place_weights = np.vstack([self._weights[numeric:], np.zeros_like(self._intercept)])
        self._text_weights = self._place_weights * np.minimum(self._place_limits, 1.0)[:, None]

    def predict(self, x: object) -> Any:
        """Return the prediction for a row, or for each row."""
        is_dict = self._width is None and isinstance(x, Mapping)
        if is_dict and not self._has_crosses_of_lists(x):  # type: ignore[arg-type]
            return self._predict_one(x)  # type: ignore[arg-type]
        rows, is_single = self._rows([x] if is_dict else x)
        is_single |= is_dict
        if self._crosses and isinstance(rows, NamedRows):
            rows = self._with_crosses(rows, self._crosses)
        scores = self._scores_of_sparse(rows) if isinstance(rows, SparseRows) else self._scores(rows)
        values = self._linked(scores + self._intercept)
        if not is_single:
            return values
        return float(values[0]) if values.ndim == 1 else values[0]

    def _has_crosses_of_lists(self, row: Mapping[str, Any]) -> bool:
        """Whether a crossed field has a list of texts, or a field is named like a cross: `crossed` handles both."""
        return bool(self._crosses) and (
            not self._products.isdisjoint(row)
            or any(isinstance(row.get(field), list) for cross in self._crosses for field in cross)
        )

    def _linked(self, scores: Floats) -> Floats:
        if self._link == "clipped":
            return np.clip(scores[:, 0], self._lowest, self._highest)
        if self._link == "logit":
            return _sigmoid(np.clip(scores[:, 0], -_SCORE_MAX, _SCORE_MAX))
        raised = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities: Floats = raised / raised.sum(axis=1, keepdims=True)
        return probabilities

    def _with_crosses(self, rows: NamedRows, crosses: list[Any]) -> NamedRows:
        fields = crossed_fields(self._crosses)
        numbers = standardized(numbers_of(rows, fields), *self._moments)
        used = numbers[:, [fields.index(field) for field in crossed_fields(crosses)]]
        return crossed(rows, crosses, used, bits=self._bits, known=self.known)

    def explain(self, x: object) -> Explanation:
        """Return the parts of the score of one row."""
        intercept = self._weight_of(self._intercept)
        if self._width is not None:
            [row] = _single_row(self._subject, x, self._width)
            places = np.flatnonzero(row)
            alone = [([place], [value]) for place, value in zip(places.tolist(), row[places].tolist(), strict=True)]
            scores = self._scores_of_sparse(SparseRows.from_rows(alone, self._width))
            return Explanation(intercept, dict(zip(map(str, places), map(self._weight_of, scores), strict=True)))
        if not isinstance(x, Mapping):
            [row] = _single_row(self._subject, x, self._matrix_width or 0)
            x = {str(column): value for column, value in enumerate(row.tolist())}
        fields = self._with_vectors_as_fields(x)
        nothing = intercept * 0.0
        parts = {
            name: self._score_of_fields({name: value}, nothing)
            for name, value in fields.items()
            if name in self.known or _is_none(value)
        }
        if not self._has_crosses_of_lists(x):
            crosses = {name: nothing + self._score_of_cross(cross, fields) for cross, name in self._product_of.items()}
            return Explanation(intercept, parts | crosses)
        rows = self._rows_of_dicts([x])
        uncrossed = self._scores(rows)
        for cross, name in self._product_of.items():
            parts[name] = self._weight_of((self._scores(self._with_crosses(rows, [cross])) - uncrossed)[0])
        return Explanation(intercept, parts)

    def _weight_of(self, scores: Floats) -> _Weight:
        """Return the numbers for all scores as a model with one score, or with several, adds them."""
        return scores if self.classes is not None else float(scores[0])

    # ---- one row

    @cached_property
    def _numeric(self) -> dict[str, tuple[float, float, _Weight]]:
        """Center, limit and weight of each numeric field."""
        weights = self._weights[: len(self._fields)]
        of_fields = weights[:, 0].tolist() if self.classes is None else weights
        by_column = zip(self._center.tolist(), self._limit.tolist(), of_fields, strict=False)
        return dict(zip(self._fields, by_column, strict=False))

    def _predict_one(self, given: Mapping[str, Any]) -> Any:
        row = given if self._vectors.isdisjoint(given) else self._with_vectors_as_fields(given)
        if self.classes is not None:
            scores = self._score(row, self._intercept)
            raised = np.exp(scores - scores.max())
            return raised / raised.sum()
        score = self._score(row, float(self._intercept[0]))
        if self._link == "clipped":
            return min(max(score, self._lowest), self._highest)
        return 1.0 / (1.0 + math.exp(-min(max(score, -_SCORE_MAX), _SCORE_MAX)))

    def _score(self, row: Mapping[str, Any], score: _Weight) -> _Weight:
        score = self._score_of_fields(row, score)
        for cross in self._crosses:
            score = score + self._score_of_cross(cross, row)
        return score

    def _score_of_fields(self, row: Mapping[str, Any], score: _Weight) -> _Weight:
        for name, value in row.items():
            if isinstance(value, str):
                if name in self._texts:
                    score = score + self._text_weight(name, value)
                elif name in self._columns:
                    raise self._wrong_kind(name, "a number", shortened(value))
            elif are_texts(value):
                for text in dict.fromkeys(value):
                    score = self._score_of_fields({name: text}, score)
            elif _is_none(value):
                score = score + self._text_weight(name, value)
            elif (column := self._numeric.get(name)) is not None:
                if not isinstance(value, _NUMBERS):
                    self._reader.rows([{name: value}])  # Refuses it.
                elif abs(value) > HUGE:
                    score = score + self._text_weight(name, value)
                else:
                    center, limit, weight = column
                    score = score + weight * min(max(float(value) - center, -limit), limit)
            elif name in self._texts:
                raise self._wrong_kind(name, "a text", shortened(value))
        return score

    def _score_of_cross(self, cross: Cross, row: Mapping[str, Any]) -> _Weight:
        """Return what a cross adds to the score of a row; ``crossed`` does the same for many rows."""
        number, texts = 1.0, []
        for field in cross:
            value: Any = row.get(field)
            if isinstance(value, str) and field in self._texts:
                texts.append((field, value))
            elif _is_none(value) or field not in self._columns or abs(value) > HUGE:
                return 0.0
            else:
                mean, deviation = self._moments_of[field]
                distance = (float(value) - mean) / deviation if deviation else 0.0
                number *= min(max(distance, -CROSS_LIMIT), CROSS_LIMIT)
        if texts:
            center, (limit, weight) = 0.0, self._text_cross(cross, texts)
        else:
            center, limit, weight = self._numeric.get(self._product_of[cross], (0.0, 0.0, 0.0))
        return weight * min(max(number - center, -limit), limit)

    def _text_cross(self, cross: Cross, texts: list[tuple[str, str]]) -> tuple[float, _Weight]:
        """Return limit and weight of a cross with these texts."""
        key = (cross, *texts)
        if (found := self._limit_of_cross.get(key)) is None:
            if len(self._limit_of_cross) >= _CACHED_TEXTS:
                self._limit_of_cross.clear()
            of_texts = [self._reader.rows([{field: text}]).places[:, 0] for field, text in texts]
            at = self._positions(places_of_cross(cross, of_texts, self._bits))[0]
            weights = self._place_weights[at]
            found = self._limit_of_cross[key] = float(self._place_limits[at]), self._weight_of(weights)
        return found

    def _text_weight(self, name: str, value: Any) -> _Weight:
        """Return the weight of a text, or of a missing value, in a field."""
        key = (name, None if value != value else value)  # NaN equals no other NaN.
        weight = self._weight_of_text.get(key)
        if weight is None:
            if len(self._weight_of_text) >= _CACHED_TEXTS:
                self._weight_of_text.clear()
            places = self._reader.rows([{name: value}]).places[0]
            weights = self._text_weights[self._positions(places)].sum(axis=0)
            weight = self._weight_of_text[key] = self._weight_of(weights)
        return weight

    def _with_vectors_as_fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as ``Columns`` with a matrix are learned from: each number of a vector is a field."""
        fields: dict[str, Any] = {}
        for name, value in row.items():
            if name in self._vectors and isinstance(value, (list, tuple, np.ndarray)):
                fields |= {f"{name}[{position}]": number for position, number in enumerate(value)}
            else:
                fields[name] = value
        return fields

    def _wrong_kind(self, name: str, expected: str, given: str) -> ModelError:
        return ModelError(
            f"{self._subject}: expected {expected} in the field {name!r}, as in the rows that were learned from, given "
            f"{given}; give the field the type that it had in training"
        )

    # ---- many rows

    def _rows(self, x: Any) -> tuple[NamedRows | SparseRows, bool]:
        """Return the rows, and whether a single row was given."""
        x = sparse_if_scipy(x)
        if self._width is not None:
            rows, is_single = rows_to_predict(self._subject, x, self._width)
            return (rows if isinstance(rows, SparseRows) else SparseRows.from_dense(rows)), is_single
        if isinstance(x, list) and (not x or isinstance(x[0], Mapping)):
            return self._rows_of_dicts(x), False
        if isinstance(x, (np.ndarray, list, tuple, SparseRows)):
            table = None
        else:
            table = x if isinstance(x, Columns) else columns_of_table(self._subject, x, ModelError)
        width = self._matrix_width
        if width is not None and (table is None or self._columns.keys().isdisjoint(table.names)):
            rows, is_single = rows_to_predict(self._subject, x, width)
            return named_matrix(rows.to_dense() if isinstance(rows, SparseRows) else rows), is_single
        if table is None:
            raise ModelError(
                f"{self._subject}: expected rows with the fields of the model (dicts, Columns or a table), which are "
                f"{shortened(sorted(self.known))}, given {shortened(x)}"
            )
        arrays = table.arrays
        # Of other columns only missing values have a weight.
        known = {name: array for name, array in arrays.items() if name in self.known or array.dtype.kind in "fO"}
        if not known:
            return named_matrix(np.empty((len(table), 0))), False
        return self._reader.rows(Columns(known)), False

    def _rows_of_dicts(self, given: list[Any]) -> NamedRows:
        """Return the rows without fields that the model cannot know, whose values may be of any type."""
        if all(isinstance(row, Mapping) for row in given) and not all(
            row.keys() <= self.known and self._vectors.isdisjoint(row) for row in given
        ):
            rows = [self._with_vectors_as_fields(row) for row in given]
            known = self.known
            given = [{name: value for name, value in row.items() if name in known or _is_none(value)} for row in rows]
        return self._reader.rows(given)

    def _scores(self, rows: NamedRows) -> Floats:
        """Return the scores (rows, scores) without the intercept."""
        self._check_kinds(rows)
        known = [position for position, name in enumerate(rows.fields) if name in self._columns]
        columns = [self._columns[rows.fields[position]] for position in known]
        numbers = rows.numbers[:, known]
        x = _clipped(numbers, numbers - self._center[columns], self._limit[columns])
        scores: Floats = x @ self._weights[columns]
        for position, places in enumerate(rows.places.T):
            if position >= len(rows.text_fields) or rows.text_fields[position] in self._texts:
                at = self._positions(places)
                if rows.place_values is None:
                    scores += self._text_weights[at]
                else:
                    values, limits = rows.place_values[:, position], self._place_limits[at]
                    scores += _clipped(values, values, limits)[:, None] * self._place_weights[at]
        return scores

    def _check_kinds(self, rows: NamedRows) -> None:
        for name in rows.text_fields:
            if name in self._columns:
                raise self._wrong_kind(name, "a number", "a text")
        for position, name in enumerate(rows.fields):
            if name in self._texts and not is_missing(rows.numbers[:, position]).all():
                raise self._wrong_kind(name, "a text", "a number")

    def _scores_of_sparse(self, rows: SparseRows) -> Floats:
        at = self._positions(rows.indices)
        x = _clipped(rows.values, rows.values, self._place_limits[at])
        products = x[:, None] * self._place_weights[at]
        return np.column_stack([sums_by(rows.row_of_value, of_score, len(rows)) for of_score in products.T])

    def _positions(self, places: Indices) -> Indices:
        """Return the row of weights of each place."""
        at = np.searchsorted(self._places, places)
        return np.where(self._places[at] == places, at, len(self._places) - 1)


def _is_none(value: object) -> bool:
    """Whether the value is missing: None, or a float that is."""
    return value is None or (isinstance(value, float) and not abs(value) <= HUGE)


def _clipped(values: Floats, differences: Floats, limits: Floats) -> Floats:
    """Return the differences within their limits, 0 where a value is missing."""
    x: Floats = np.minimum(np.maximum(differences, -limits), limits)
    x[is_missing(values)] = 0.0
    return x


def _is_link(value: object) -> bool:
    return isinstance(value, str) and value in ("logit", "softmax", "clipped")


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_pairs(value: object) -> bool:
    return isinstance(value, list) and all(_are_names(pair) and len(pair) == 2 for pair in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _value(given: Mapping[str, Any], name: str, subject: str, expected: str, fits: Callable[[object], bool]) -> Any:
    value = given.get(name)
    if not fits(value):
        raise ModelError(
            f"{subject}: expected {name!r} as {expected}, given {shortened(value)}; publish the parameters of an "
            "AdaptiveLinearModel as they are"
        )
    return value


def _array(given: Mapping[str, Any], name: str, subject: str, shape: tuple[int | None, ...]) -> Floats:
    """Return an array of numbers of this shape, of which None is any length."""
    array = np.asarray(given.get(name))
    fits = array.ndim == len(shape) and all(
        length in (None, is_length) for length, is_length in zip(shape, array.shape, strict=True)
    )
    if array.dtype.kind not in "iuf" or not fits:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise ModelError(
            f"{subject}: expected {name!r} as numbers of shape ({wanted}), given shape {array.shape} of {array.dtype}; "
            "publish the parameters of an AdaptiveLinearModel as they are"
        )
    return array.astype(np.float64)
