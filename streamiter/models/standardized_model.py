"""``StandardizedModel``: the parameters of an ``AdaptiveLinearModel``, with which ``LinearPredictor`` predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np

from streamiter.errors import ModelError, shortened
from streamiter.models.documents import SHAPES, are_names, array_of_numbers, parameter_of
from streamiter.models.explanations import Effects, Explanation, ShapeEffects, explanation_of
from streamiter.models.shape_scores import BinnedRows, ShapeScores
from streamiter.models.shapes import Shapes
from streamiter.values.crossed_rows import (
    CROSS_LIMIT,
    Cross,
    crossed,
    crossed_fields,
    matrix_of_fields,
    places_of_cross,
)
from streamiter.values.field_kinds import HUGE, are_texts, is_no_time, prepared_value
from streamiter.values.known_fields import BadKind, of_reader, published_fields
from streamiter.values.named_rows import FieldReader, NamedRows, is_missing, named_matrix, place_of_text
from streamiter.values.numbers import Floats, Indices, is_number, standardized
from streamiter.values.records import Columns, columns_of_table
from streamiter.values.sparse_rows import SparseRows, rows_to_predict, sparse_if_scipy, sums_by

# The exponential of 709.8 overflows.
EXPONENT_MAX: Final = 700.0

# The learner's scores of probabilities end here, too.
_SCORE_MAX: Final = 30.0

_NUMBERS: Final[tuple[type[Any], ...]] = (int, float, np.integer, np.floating, np.bool_)

# Weights of recent texts: a text that comes again is not hashed again.
_CACHED_TEXTS: Final = 65_536

_NO_PLACE: Final = np.iinfo(np.intp).max

_Weight = Any
"""The weight of a column, a float, or its weights for all classes, an array: both can be added and multiplied."""


def sigmoid(score: Floats) -> Floats:
    """Return the probability of each score."""
    # exp overflows for numbers above 709; for negative numbers it only becomes 0.
    small = np.exp(-np.abs(score))
    return np.where(score >= 0, 1.0, small) / (1.0 + small)


class StandardizedModel:
    """Predicts with the parameters of an ``AdaptiveLinearModel``.

    Its columns are the numeric ``fields``, then the hashed ``places``. The score of a row is ``intercept + sum of
    weights · clip(value − center, −limit, limit)``, where missing and unknown values are left out; a text has the value
    1 at its place.
    """

    def __init__(self, given: Mapping[str, Any], subject: str) -> None:
        self._subject = subject
        self.link: str = parameter_of(given, "link", subject, "one of logit, softmax, clipped, log", _is_link)
        self.classes: list[Any] | None = None
        self.positive: Any = None
        if self.link == "logit" and "classes" in given:
            _, self.positive = parameter_of(given, "classes", subject, "a list of two labels", _are_two)
        elif self.link == "softmax":
            self.classes = parameter_of(
                given, "classes", subject, "a list of labels", lambda value: isinstance(value, list)
            )
        elif self.link in ("clipped", "log"):
            self._lowest, self._highest = (
                float(parameter_of(given, name, subject, "a number", is_number)) for name in ("lowest", "highest")
            )
        self._fields: list[str] = parameter_of(given, "fields", subject, "a list of names", are_names)
        self._texts = frozenset(parameter_of(given, "text_fields", subject, "a list of names", are_names))
        self._place_columns(given)
        self._columns = {name: column for column, name in enumerate(self._fields)}
        pairs = parameter_of({"crosses": [], **given}, "crosses", subject, "pairs of names", _are_pairs)
        self._crosses: list[Cross] = [(first, second) for first, second in pairs]
        if self._crosses:
            fields = crossed_fields(self._crosses)
            self._moments = [
                array_of_numbers(given, name, subject, (len(fields),)) for name in ("cross_mean", "cross_deviation")
            ]
            self._moments_of = dict(
                zip(fields, zip(*(each.tolist() for each in self._moments), strict=True), strict=True)
            )
        self._product_of = {cross: " × ".join(cross) for cross in self._crosses}
        self._products = frozenset(self._product_of.values())
        plain = [name for name in self._fields if name not in self._products]
        self._matrix_width = len(plain) if not self._texts and plain == list(map(str, range(len(plain)))) else None
        self._bits: int = parameter_of(given, "bits", subject, "a number", _is_count)
        self._known = published_fields(subject, self._bits, given)
        self._kinds = self._known.kinds
        """The fields whose values are prepared otherwise than their types say."""
        self._vectors = {name.rpartition("[")[0] for name in self._fields if name.endswith("]")}.difference(self._kinds)
        self._featured = self._texts.union(self._fields, self._vectors)
        self.known = self._featured.union(self._kinds)
        self._width = None if "width" not in given else parameter_of(given, "width", subject, "a number", _is_count)
        kinds, zone = of_reader(self._kinds), self._known.zone
        self._reader = FieldReader(bits=self._bits, kinds=kinds, time_zone=zone, owner=subject)
        self._text_features: dict[tuple[str, Any], tuple[_Weight, list[int]]] = {}
        """The weight and the positions of a text in a field, or of a missing value: None for NaN, too."""
        self._limit_of_cross: dict[tuple[Any, ...], tuple[float, _Weight, int]] = {}
        """Limit, weight and position of a cross with one or two texts."""
        self._shapes: ShapeScores | None = None
        if SHAPES in given:
            numbers, places = len(self._fields), len(self._places) - 1
            shapes = Shapes.of(given[SHAPES], subject, fields=numbers, places=places, scores=len(self._intercept))
            of_fields = self._fields, self._center[:numbers], self._limit[:numbers]
            self._shapes = ShapeScores(shapes, *of_fields, self._places[:-1])

    def _place_columns(self, given: Mapping[str, Any]) -> None:
        """Take over the arrays: the weights as a matrix, with a column for each score."""
        subject, numeric = self._subject, len(self._fields)
        places = array_of_numbers(given, "places", subject, (None,)).astype(np.intp)
        if (places[1:] <= places[:-1]).any():
            raise ModelError(f"{subject}: expected 'places' in ascending order, given {shortened(places)}")
        columns = numeric + len(places)
        if self.classes is None:
            self._weights = array_of_numbers(given, "weights", subject, (columns,))[:, None]
            self._intercept = array_of_numbers(given, "intercept", subject, ())[None]
        else:
            self._weights = array_of_numbers(given, "weights", subject, (columns, None))
            self._intercept = array_of_numbers(given, "intercept", subject, self._weights.shape[1:])
            if len(self._intercept) - len(self.classes) not in (0, 1):
                raise ModelError(
                    f"{subject}: expected a score for each of {len(self.classes)} classes, and at most one more for a "
                    f"class that has not come yet, given {len(self._intercept)}"
                )
        self._center = array_of_numbers(given, "center", subject, (columns,))
        self._limit = array_of_numbers(given, "limit", subject, (columns,))
        # The last row is for all places that the model does not know.
        self._places = np.append(places, _NO_PLACE)
        self._place_limits = np.append(self._limit[numeric:], 0.0)
        self._place_weights = np.vstack([self._weights[numeric:], np.zeros_like(self._intercept)])
        self._text_weights = self._place_weights * np.minimum(self._place_limits, 1.0)[:, None]

    def predict(self, x: object) -> Any:
        """Return the prediction for a row, or for each row."""
        is_dict = self._width is None and isinstance(x, Mapping)
        if is_dict:
            prepared = self._prepared(x)  # type: ignore[arg-type]
            if not self._has_crosses_of_lists(prepared):
                return self._predict_one(prepared)
        rows, is_single = self._rows([x] if is_dict else x)
        is_single |= is_dict
        if self._crosses and isinstance(rows, NamedRows):
            rows = self._with_crosses(rows, self._crosses)
        scores = self._scores_of_sparse(rows) if isinstance(rows, SparseRows) else self._scores(rows)
        values = self._linked(scores + self._intercept)
        if self._shapes is not None and isinstance(rows, NamedRows):
            binned = self._binned(self._shapes, rows)
            values = self._shapes.mixed(
                [values, *(self._linked(member.scores(binned)) for member in self._shapes.members)]
            )
        if not is_single:
            return values
        return float(values[0]) if values.ndim == 1 else values[0]

    def _binned(self, shapes: ShapeScores, rows: NamedRows) -> BinnedRows:
        """Return the bins of rows with their crosses, whose places may be those of texts, too."""
        return shapes.binned(rows, self._positions(rows.places[:, self._known_places(rows)]))

    def _has_crosses_of_lists(self, row: Mapping[str, Any]) -> bool:
        """Whether a crossed field has a list of texts, or a field is named like a cross: `crossed` handles both."""
        return bool(self._crosses) and (
            not self._products.isdisjoint(row)
            or any(isinstance(row.get(field), list) for cross in self._crosses for field in cross)
        )

    def _linked(self, scores: Floats) -> Floats:
        if self.link in ("clipped", "log"):
            numbers = np.exp(np.minimum(scores[:, 0], EXPONENT_MAX)) if self.link == "log" else scores[:, 0]
            return np.clip(numbers, self._lowest, self._highest)
        if self.link == "logit":
            return sigmoid(np.clip(scores[:, 0], -_SCORE_MAX, _SCORE_MAX))
        raised = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities: Floats = raised / raised.sum(axis=1, keepdims=True)
        return probabilities

    def _with_crosses(self, rows: NamedRows, crosses: list[Any]) -> NamedRows:
        fields = crossed_fields(self._crosses)
        numbers = standardized(matrix_of_fields(rows, fields), *self._moments)
        used = numbers[:, [fields.index(field) for field in crossed_fields(crosses)]]
        return crossed(rows, crosses, used, bits=self._bits, known=self._featured)

    def explain(self, x: object) -> Explanation:
        """Return the parts of the scores: the part of a field is the score of rows that have only this field."""
        is_dict = self._width is None and isinstance(x, Mapping)
        if is_dict:
            given = self._with_vectors_as_fields(x)  # type: ignore[arg-type]
            prepared = self._prepared(given)
            if self._shapes is None and not self._has_crosses_of_lists(prepared):
                return self._explain_one(given, prepared)
        rows, is_single = self._rows([x] if is_dict else x)
        if isinstance(rows, SparseRows):
            parts = dict(self._parts_of_sparse(rows))
        else:
            parts = {name: self._scores(own) for name, own in self._alone([x] if is_dict else x, rows)}
            parts = {name: part for name, part in parts.items() if name in self.known or part.any()}
            for cross, name in self._product_of.items():
                parts[name] = self._scores(_further(self._with_crosses(rows, [cross]), rows))
        intercept: _Weight = self._weight_of(self._intercept)
        if self._shape_effects is not None and isinstance(rows, NamedRows):
            whole = self._with_crosses(rows, self._crosses) if self._crosses else rows
            binned = self._binned(self._shape_effects.scores, whole)
            intercept, parts = self._shape_effects.explained(self._intercept, parts, binned, self._linked)
            intercept = intercept if self.classes is not None else intercept[:, 0]
            if is_single or is_dict:
                intercept = intercept[0] if self.classes is not None else float(intercept[0])
        if self.classes is None:
            parts = {name: part[:, 0] for name, part in parts.items()}
        return explanation_of(intercept, parts, is_single or is_dict)

    @cached_property
    def _shape_effects(self) -> ShapeEffects | None:
        if self._shapes is None:
            return None
        return ShapeEffects(self._shapes, self.link, self._weights, self.classes)

    @property
    def effects(self) -> Effects | None:
        """The effects of columns and pairs; None for a model without tables."""
        return None if self._shape_effects is None else self._shape_effects.effects

    def _explain_one(self, row: Mapping[str, Any], prepared: Mapping[str, Any]) -> Explanation:
        """Return the parts of one row of fields; about as fast as a prediction."""
        intercept = self._weight_of(self._intercept)
        nothing = intercept * 0.0
        known = [name for name, value in row.items() if name in self.known or _is_none(value) or is_no_time(value)]
        parts = {name: self._score_of_fields(self._prepared({name: row[name]}), nothing) for name in known}
        crosses = {
            name: nothing + self._score_of_cross(cross, prepared, []) for cross, name in self._product_of.items()
        }
        return Explanation(intercept, parts | crosses)

    def _alone(self, x: Any, rows: NamedRows) -> Iterator[tuple[str, NamedRows]]:
        """Yield for each field the rows with this field alone."""
        if isinstance(x, list) and x and isinstance(x[0], Mapping):
            given = [self._with_vectors_as_fields(row) for row in x]
            for name in dict.fromkeys(chain.from_iterable(given)):
                yield name, self._rows_of_dicts([{name: row[name]} if name in row else {} for row in given])
            return
        table = None
        if self._matrix_width is None:
            table = x if isinstance(x, Columns) else columns_of_table(self._subject, x, ModelError)
        if table is None:
            for position, name in enumerate(rows.fields):
                yield name, replace(rows, fields=(name,), numbers=rows.numbers[:, [position]])
            return
        for name, array in table.arrays.items():
            is_vector = array.ndim == 2 and array.dtype.kind in "biuf"
            columns = {f"{name}[{at}]": column for at, column in enumerate(array.T)} if is_vector else {name: array}
            for each, column in columns.items():
                yield each, self._rows(Columns({each: column}))[0]  # type: ignore[misc]

    def _weight_of(self, scores: Floats) -> _Weight:
        """Return the numbers for all scores: an array for a model of classes, a float for a model with one score."""
        return scores if self.classes is not None else float(scores[0])

    # ---- one row

    @cached_property
    def _numeric(self) -> dict[str, tuple[float, float, _Weight]]:
        """Center, limit and weight of each numeric field."""
        weights = self._weights[: len(self._fields)]
        of_fields = weights[:, 0].tolist() if self.classes is None else weights
        by_column = zip(self._center.tolist(), self._limit.tolist(), of_fields, strict=False)
        return dict(zip(self._fields, by_column, strict=False))

    def _prepared(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row with the values of its fields as numbers, texts and lists of texts, by the kinds of the fields.

        ``KnownFields.of`` does the same for many rows.
        """
        kinds, zone = self._kinds, self._known.zone
        if kinds.keys().isdisjoint(row):
            return row
        prepared: dict[str, Any] = {}
        for name, value in row.items():
            if (kind := kinds.get(name)) is None:
                prepared[name] = value
                continue
            in_texts = name in self._texts
            found = prepared_value(name, kind, value, zone, in_texts=in_texts)
            if found is None:
                self._reader.rows([{name: value}])  # Refuses values of other types.
                expected = "a text" if in_texts or kind not in ("number", "time") else f"a {kind}"
                raise self._wrong_kind(name, expected, shortened(value))
            prepared |= found
        return prepared

    def _predict_one(self, given: Mapping[str, Any]) -> Any:
        row = given if self._vectors.isdisjoint(given) else self._with_vectors_as_fields(given)
        crossed: list[int] = []
        value = self._linked_one(self._score(row, self._weight_of(self._intercept), crossed))
        if self._shapes is None:
            return value
        places = self._positions_of_row(row) + crossed if self._shapes.has_categories else []
        scores = self._shapes.scores_of_row(row, places)
        return self._shapes.mixed([value, *map(self._linked_one, scores)])

    def _positions_of_row(self, row: Mapping[str, Any]) -> list[int]:
        """Return the positions of the row's texts and missing values in the model's places."""
        found: list[int] = []
        for name, value in row.items():
            if isinstance(value, str) or are_texts(value):
                if name in self._texts:
                    texts = [value] if isinstance(value, str) else value
                    found += chain.from_iterable(self._text_feature(name, text)[1] for text in texts)
            elif _is_none(value) or is_no_time(value):
                found += self._text_feature(name, None)[1]
        return found

    def _linked_one(self, score: _Weight) -> Any:
        if self.classes is not None:
            raised = np.exp(score - score.max())
            return raised / raised.sum()
        if self.link in ("clipped", "log"):
            # numpy's exp, not math's, as for many rows.
            number = float(np.exp(min(score, EXPONENT_MAX))) if self.link == "log" else score
            return min(max(number, self._lowest), self._highest)
        return 1.0 / (1.0 + math.exp(-min(max(score, -_SCORE_MAX), _SCORE_MAX)))

    def _score(self, row: Mapping[str, Any], score: _Weight, positions: list[int]) -> _Weight:
        """Return the score of a row; add the positions of crosses with texts in the model's places."""
        score = self._score_of_fields(row, score)
        for cross in self._crosses:
            score = score + self._score_of_cross(cross, row, positions)
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
                    if is_no_time(value):
                        score = score + self._text_weight(name, None)
                        continue
                    self._reader.rows([{name: value}])  # Refuses all but times.
                    raise self._wrong_kind(name, "a number", shortened(value))
                if abs(value) > HUGE:
                    score = score + self._text_weight(name, value)
                else:
                    center, limit, weight = column
                    score = score + weight * min(max(float(value) - center, -limit), limit)
            elif is_no_time(value):
                score = score + self._text_weight(name, None)
            elif name in self._texts:
                raise self._wrong_kind(name, "a text", shortened(value))
        return score

    def _score_of_cross(self, cross: Cross, row: Mapping[str, Any], positions: list[int]) -> _Weight:
        """Return what a cross adds to the score of a row; ``crossed`` does the same for many rows."""
        number, texts = 1.0, []
        for field in cross:
            value: Any = row.get(field)
            if isinstance(value, str) and field in self._texts:
                texts.append((field, value))
            elif _is_none(value) or field not in self._columns or is_no_time(value) or abs(value) > HUGE:
                return 0.0
            else:
                mean, deviation = self._moments_of[field]
                distance = (float(value) - mean) / deviation if deviation else 0.0
                number *= min(max(distance, -CROSS_LIMIT), CROSS_LIMIT)
        if texts:
            center, (limit, weight, at) = 0.0, self._text_cross(cross, texts)
            positions.append(at)
        else:
            center, limit, weight = self._numeric.get(self._product_of[cross], (0.0, 0.0, 0.0))
        return weight * min(max(number - center, -limit), limit)

    def _text_cross(self, cross: Cross, texts: list[tuple[str, str]]) -> tuple[float, _Weight, int]:
        """Return limit, weight and position of a cross with these texts."""
        key = (cross, *texts)
        if (found := self._limit_of_cross.get(key)) is None:
            if len(self._limit_of_cross) >= _CACHED_TEXTS:
                self._limit_of_cross.clear()
            of_texts = [np.array([place_of_text(field, text, self._bits)]) for field, text in texts]
            at = self._positions(places_of_cross(cross, of_texts, self._bits))[0]
            weights = self._place_weights[at]
            found = self._limit_of_cross[key] = float(self._place_limits[at]), self._weight_of(weights), int(at)
        return found

    def _text_weight(self, name: str, value: Any) -> _Weight:
        """Return the weight of a text, or of a missing value, in a field."""
        return self._text_feature(name, value)[0]

    def _text_feature(self, name: str, value: Any) -> tuple[_Weight, list[int]]:
        """Return the weight of a text, or of a missing value, in a field, and its positions in the model's places."""
        key = (name, None if value != value else value)  # NaN equals no other NaN.
        found = self._text_features.get(key)
        if found is None:
            if len(self._text_features) >= _CACHED_TEXTS:
                self._text_features.clear()
            if isinstance(value, str):
                places = np.array([place_of_text(name, value, self._bits)])
            else:
                places = self._reader.rows([{name: value}]).places[0]
            at = self._positions(places)
            weight = self._weight_of(self._text_weights[at].sum(axis=0))
            found = self._text_features[key] = weight, at.tolist()
        return found

    def _with_vectors_as_fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as ``Columns`` with a matrix are learned: each number of a vector is a field."""
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
        columns = Columns(known)
        return self._as_known(self._reader.rows(columns), columns), False

    def _rows_of_dicts(self, given: list[Any]) -> NamedRows:
        """Return the rows without fields that the model cannot know, whose values may be of any type."""
        if all(isinstance(row, Mapping) for row in given) and not all(
            row.keys() <= self.known and self._vectors.isdisjoint(row) for row in given
        ):
            rows = [self._with_vectors_as_fields(row) for row in given]
            known = self.known
            given = [
                {name: value for name, value in row.items() if name in known or _is_none(value) or is_no_time(value)}
                for row in rows
            ]
        return self._as_known(self._reader.rows(given), given)

    def _as_known(self, rows: NamedRows, records: Columns | list[Any]) -> NamedRows:
        """Return the rows of records with each value as the learner reads its field."""

        def refused(bad: BadKind) -> ModelError:
            return self._wrong_kind(bad.field, bad.expected, bad.given_in(records[int(np.argmax(bad.rows))]))

        return self._known.of(rows, refused)

    def _scores(self, rows: NamedRows) -> Floats:
        """Return the scores (rows, scores) without the intercept."""
        known = [position for position, name in enumerate(rows.fields) if name in self._columns]
        columns = [self._columns[rows.fields[position]] for position in known]
        numbers = rows.numbers[:, known]
        x = _clipped(numbers, numbers - self._center[columns], self._limit[columns])
        scores: Floats = x @ self._weights[columns]
        for position in self._known_places(rows):
            at = self._positions(rows.places[:, position])
            if rows.place_values is None:
                scores += self._text_weights[at]
            else:
                values, limits = rows.place_values[:, position], self._place_limits[at]
                scores += _clipped(values, values, limits)[:, None] * self._place_weights[at]
        return scores

    def _known_places(self, rows: NamedRows) -> list[int]:
        """Return which columns of places are of known fields, or of missing values."""
        fields = rows.text_fields
        return [at for at in range(rows.places.shape[1]) if at >= len(fields) or fields[at] in self._texts]

    def _values_times_weights(self, rows: SparseRows) -> Floats:
        """Return what each value of the rows adds to the scores of its row."""
        at = self._positions(rows.indices)
        x = _clipped(rows.values, rows.values, self._place_limits[at])
        products: Floats = x[:, None] * self._place_weights[at]
        return products

    def _parts_of_sparse(self, rows: SparseRows) -> Iterator[tuple[str, Floats]]:
        """Yield, for each column of the rows, what the column adds to the scores (rows, scores)."""
        products, order = self._values_times_weights(rows), np.argsort(rows.indices, kind="stable")
        columns, starts = np.unique(rows.indices[order], return_index=True)
        for column, own in zip(columns.tolist(), np.split(order, starts[1:]), strict=True):
            part = np.zeros((len(rows), products.shape[1]))
            np.add.at(part, rows.row_of_value[own], products[own])
            yield str(column), part

    def _scores_of_sparse(self, rows: SparseRows) -> Floats:
        products = self._values_times_weights(rows)
        return np.column_stack([sums_by(rows.row_of_value, of_score, len(rows)) for of_score in products.T])

    def _positions(self, places: Indices) -> Indices:
        """Return the row of weights of each place."""
        at = np.searchsorted(self._places, places)
        return np.where(self._places[at] == places, at, len(self._places) - 1)


def _further(rows: NamedRows, base: NamedRows) -> NamedRows:
    """Return rows with only the columns that follow the columns of ``base``."""
    fields, places = len(base.fields), base.places.shape[1]
    values = None if rows.place_values is None else rows.place_values[:, places:]
    return NamedRows(rows.fields[fields:], rows.numbers[:, fields:], (), rows.places[:, places:], rows.missing, values)


def _is_none(value: object) -> bool:
    """Whether the value is missing: None, or a number that counts as missing."""
    return value is None or (isinstance(value, (int, float)) and not abs(value) <= HUGE)


def _clipped(values: Floats, differences: Floats, limits: Floats) -> Floats:
    """Return the differences within their limits, 0 where a value is missing."""
    x: Floats = np.minimum(np.maximum(differences, -limits), limits)
    x[is_missing(values)] = 0.0
    return x


def _is_link(value: object) -> bool:
    return isinstance(value, str) and value in ("logit", "softmax", "clipped", "log")


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _are_two(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


def _are_pairs(value: object) -> bool:
    return isinstance(value, list) and all(are_names(pair) and len(pair) == 2 for pair in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0
