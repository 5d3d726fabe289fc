"""``StandardizedModel``: the parameters of an ``AdaptiveLinearModel``, with which ``LinearPredictor`` predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.errors import ModelError, shortened
from streamiter.models.documents import EMBEDDINGS, SHAPES, are_names, array_of_numbers, is_count, parameter_of
from streamiter.models.embedding_scores import EmbeddedCandidates, EmbeddingScores
from streamiter.models.explanations import Effects, Explanation, ShapeEffects, Term, explanation_of, mixed_parts
from streamiter.models.model_crosses import CACHED_TEXTS, ModelCrosses, further
from streamiter.models.published_embeddings import HASH_BITS, PublishedEmbeddings
from streamiter.models.ranking import beside
from streamiter.models.shape_scores import BinnedRows, ShapeScores
from streamiter.models.shapes import Shapes
from streamiter.values.crossed_rows import Cross
from streamiter.values.field_kinds import HUGE, are_texts, is_no_time, prepared_value
from streamiter.values.hashes import place_of_text
from streamiter.values.known_fields import BadKind, of_reader, published_fields
from streamiter.values.named_rows import ABSENT, FieldReader, NamedRows, clipped, is_none, named_matrix
from streamiter.values.numbers import NUMBERS, Array, Floats, Indices, is_number, sigmoid
from streamiter.values.records import Columns, columns_of_table
from streamiter.values.sparse_rows import SparseRows, rows_to_predict, sparse_if_scipy, sums_by

# The exponential of 709.8 overflows.
EXPONENT_MAX: Final = 700.0

# The learner's scores of probabilities end here, too.
_SCORE_MAX: Final = 30.0

# Floats of numpy that are no float of Python: a comparison with HUGE overflows.
_NARROW: Final = frozenset({np.float16, np.float32, np.longdouble})

_TABLE_BITS_MAX: Final = 22  # A table of 16 MB, which is made for a batch of an eighth of its places.

_NO_PLACE: Final = np.iinfo(np.intp).max

_Weight = Any
"""The weight of a column, a float, or its weights for all classes, an array: both can be added and multiplied."""


class _TextFeature(NamedTuple):
    """What a model knows of a text, or of a missing value, in a field."""

    weight: _Weight
    """Its weight in the linear member."""
    positions: list[int]
    """Its positions in the model's places."""
    features: list[tuple[int, int]]
    """The numbers of its field, and its hashes, in the embeddings."""


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
            self.classes = parameter_of(given, "classes", subject, "a list of labels", _is_list)
        elif self.link in ("clipped", "log"):
            self._lowest, self._highest = (
                float(parameter_of(given, name, subject, "a number", is_number)) for name in ("lowest", "highest")
            )
        self._fields: list[str] = parameter_of(given, "fields", subject, "a list of names", are_names)
        self._texts = frozenset(parameter_of(given, "text_fields", subject, "a list of names", are_names))
        self._place_columns(given)
        self._columns = {name: column for column, name in enumerate(self._fields)}
        self.crosses = ModelCrosses(given, subject)
        plain = [name for name in self._fields if name not in self.crosses.products]
        self._matrix_width = len(plain) if not self._texts and plain == list(map(str, range(len(plain)))) else None
        self._bits: int = parameter_of(given, "bits", subject, "a number", is_count)
        self._hash_bits = HASH_BITS if EMBEDDINGS in given else self._bits
        """The bits of the hashes of rows, the low ones of which are a place."""
        self._known = published_fields(subject, self._hash_bits, given)
        self._kinds = self._known.kinds
        """The fields whose values are prepared otherwise than their types say."""
        self.reading = (self._fields, self._texts, dict(self._kinds), given.get("time_zone"), self._hash_bits)
        """What decides how rows are read: two models with the same one read them alike."""
        self._vectors = {name.rpartition("[")[0] for name in self._fields if name.endswith("]")}.difference(self._kinds)
        self._featured = self._texts.union(self._fields, self._vectors)
        self.known = self._featured.union(self._kinds)
        self.width: int | None = None
        """The number of columns of sparse rows; None for rows of named fields."""
        if "width" in given:
            self.width = parameter_of(given, "width", subject, "a number", is_count)
        kinds, zone = of_reader(self._kinds), self._known.zone
        self._reader = FieldReader(bits=self._hash_bits, kinds=kinds, time_zone=zone, owner=subject)
        self._text_features: dict[tuple[str, Any], _TextFeature] = {}
        """By field and text, or None for a missing value, NaN, too."""
        numbers, places = len(self._fields), len(self._places) - 1
        of_fields = self._fields, self._center[:numbers], self._limit[:numbers]
        self.shapes: ShapeScores | None = None
        if SHAPES in given:
            shapes = Shapes.of(given[SHAPES], subject, fields=numbers, places=places, scores=len(self.intercept))
            self.shapes = ShapeScores(shapes, *of_fields, self._places[:-1])
        self.embeddings: EmbeddingScores | None = None
        if EMBEDDINGS in given:
            if self.width is not None:
                raise ModelError(
                    f"{subject}: expected embeddings in a model of named fields, given sparse rows; it is damaged"
                )
            embeddings = PublishedEmbeddings.of(given[EMBEDDINGS], subject, fields=numbers, scores=len(self.intercept))
            self.embeddings = EmbeddingScores(embeddings, *of_fields, self._texts)

    def _place_columns(self, given: Mapping[str, Any]) -> None:
        """Take over the arrays: the weights as a matrix, with a column for each score."""
        subject, numeric = self._subject, len(self._fields)
        places = array_of_numbers(given, "places", subject, (None,)).astype(np.intp)
        if (places[1:] <= places[:-1]).any():
            raise ModelError(f"{subject}: expected 'places' in ascending order, given {shortened(places)}")
        columns = numeric + len(places)
        if self.classes is None:
            self._weights = array_of_numbers(given, "weights", subject, (columns,))[:, None]
            self.intercept = array_of_numbers(given, "intercept", subject, ())[None]
        else:
            self._weights = array_of_numbers(given, "weights", subject, (columns, None))
            self.intercept = array_of_numbers(given, "intercept", subject, self._weights.shape[1:])
            if len(self.intercept) - len(self.classes) not in (0, 1):
                raise ModelError(
                    f"{subject}: expected a score for each of {len(self.classes)} classes, and at most one more for a "
                    f"class that has not come yet, given {len(self.intercept)}"
                )
        self._center = array_of_numbers(given, "center", subject, (columns,))
        self._limit = array_of_numbers(given, "limit", subject, (columns,))
        self._places = np.append(places, _NO_PLACE)  # The last row is for all places that the model does not know.
        self._place_limits = np.append(self._limit[numeric:], 0.0)
        self._place_weights = np.vstack([self._weights[numeric:], np.zeros_like(self.intercept)])
        self._text_weights = self._place_weights * np.minimum(self._place_limits, 1.0)[:, None]

    def predict(self, x: object) -> Any:
        """Return the prediction for a row, or for each row."""
        is_dict = self.width is None and isinstance(x, Mapping)
        if is_dict:
            prepared = self._prepared(x)  # type: ignore[arg-type]
            if not self.crosses.has_lists(prepared):
                return self._predict_one(prepared)
        rows, is_single = self._rows([x] if is_dict else x)
        is_single |= is_dict
        values = self._predicted(rows)
        if not is_single:
            return values
        return float(values[0]) if values.ndim == 1 else values[0]

    def _predicted(self, rows: NamedRows | SparseRows) -> Floats:
        if isinstance(rows, SparseRows):
            products = self._values_times_weights(rows)
            scores = [sums_by(rows.row_of_value, of_score, len(rows)) for of_score in products.T]
            return self.linked(np.column_stack(scores) + self.intercept)
        whole = self._with_crosses(rows)
        values = self.linked(self.scores(whole) + self.intercept)
        if self.shapes is not None:
            binned = self._binned(self.shapes, whole)
            values = self.shapes.mixed(
                [values, *(self.linked(member.scores(binned)) for member in self.shapes.members)]
            )
        if (embeddings := self.embeddings) is not None:
            own = embeddings.scores_of(rows)
            values = embeddings.mixed(values, map(self.linked, own))
        return values

    def candidates(self, given: Columns | list[Any]) -> NamedRows:
        """Return candidates as read, for :meth:`predict_beside`."""
        rows, _ = self._rows(given)
        assert isinstance(rows, NamedRows)
        return rows

    def predict_beside(
        self, row: Mapping[str, Any], own: NamedRows, found: Sequence[EmbeddedCandidates] | None = None
    ) -> Floats:
        """Return the predictions for a row together with each candidate, which has other fields: as of whole rows.

        What the row adds is computed once. ``found`` are the candidates' features in the embeddings, if they are known.
        """
        common = self._rows_of_dicts([row])
        bins = None if self.shapes is None else (self._binned(self.shapes, common), self._binned(self.shapes, own))
        if self.crosses.names or (bins is not None and bins[1].shares_bins_with(bins[0])):
            return self._predicted(beside(common, own))
        values = self.linked(self.scores(common) + self.scores(own) + self.intercept)
        if self.shapes is not None and bins is not None:
            values = self.shapes.mixed([values, *map(self.linked, self.shapes.scores_beside(*bins))])
        if self.embeddings is not None:
            scores = self.embeddings.scores_beside(common, own, found)
            values = self.embeddings.mixed(values, map(self.linked, scores))
        return values

    def _binned(self, shapes: ShapeScores, rows: NamedRows) -> BinnedRows:
        """Return the bins of rows with their crosses, whose places may be those of texts, too."""
        return shapes.binned(rows, self._positions(rows.places[:, self._known_places(rows)]))

    def linked(self, scores: Floats) -> Floats:
        if self.link in ("clipped", "log"):
            numbers = np.exp(np.minimum(scores[:, 0], EXPONENT_MAX)) if self.link == "log" else scores[:, 0]
            return np.clip(numbers, self._lowest, self._highest)
        if self.link == "logit":
            return sigmoid(np.clip(scores[:, 0], -_SCORE_MAX, _SCORE_MAX))
        raised = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities: Floats = raised / raised.sum(axis=1, keepdims=True)
        return probabilities

    def _with_crosses(self, rows: NamedRows, crosses: Sequence[Cross] | None = None) -> NamedRows:
        """Return the rows with these crosses; None: all."""
        if not self.crosses.names:
            return rows
        rows = replace(rows, places=self._places_of(rows.places))
        return self.crosses.of_rows(rows, crosses or list(self.crosses.names), self._bits, self._featured)

    def explain(self, x: object) -> Explanation:
        """Return the parts of the scores: the part of a field is the score of rows that have only this field."""
        is_dict = self.width is None and isinstance(x, Mapping)
        if is_dict:
            given = self._with_vectors_as_fields(x)  # type: ignore[arg-type]
            prepared = self._prepared(given)
            is_linear = self.shapes is None and self.embeddings is None
            if is_linear and not self.crosses.has_lists(prepared):
                return self._explain_one(given, prepared)
        rows, is_single = self._rows([x] if is_dict else x)
        if isinstance(rows, SparseRows):
            parts = dict(self._parts_of_sparse(rows))
        else:
            parts = {name: self.scores(own) for name, own in self._alone([x] if is_dict else x, rows)}
            parts = {name: part for name, part in parts.items() if name in self.known or part.any()}
            for cross, name in self.crosses.names.items():
                parts[name] = self.scores(further(self._with_crosses(rows, [cross]), rows))
        intercept: _Weight = self._weight_of(self.intercept)
        if isinstance(rows, NamedRows) and (terms := self._terms(rows, parts)) is not None:
            intercept, parts = mixed_parts(*terms, len(rows), self.link, self.linked)
            intercept = intercept if self.classes is not None else intercept[:, 0]
            if is_single or is_dict:
                intercept = intercept[0] if self.classes is not None else float(intercept[0])
        if self.classes is None:
            parts = {name: part[:, 0] for name, part in parts.items()}
        return explanation_of(intercept, parts, is_single or is_dict)

    def _terms(self, rows: NamedRows, linear: Mapping[str, Floats]) -> tuple[Floats, list[Term]] | None:
        """Return the mixture, and the intercept and parts of each member; None if the linear member is alone."""
        terms, mixture = [Term(self.intercept, linear)], np.ones(1)
        if (effects := self._shape_effects) is not None:
            whole = self._with_crosses(rows)
            terms += effects.terms(self._binned(effects.scores, whole))
            mixture = effects.scores.shapes.mixture
        if (embeddings := self.embeddings) is not None:
            terms += [Term(*each) for each in zip(embeddings.intercepts, embeddings.parts(rows), strict=True)]
            mixture = np.append((1.0 - sum(embeddings.shares)) * mixture, embeddings.shares)
        return (mixture, terms) if len(terms) > 1 else None

    @cached_property
    def _shape_effects(self) -> ShapeEffects | None:
        if self.shapes is None:
            return None
        return ShapeEffects(self.shapes, self._weights, self.classes, self._bits)

    @property
    def effects(self) -> Effects | None:
        """The effects of columns and pairs; None for a model without tables."""
        return None if self._shape_effects is None else self._shape_effects.effects

    def _explain_one(self, row: Mapping[str, Any], prepared: Mapping[str, Any]) -> Explanation:
        """Return the parts of one row of fields; about as fast as a prediction."""
        intercept = self._weight_of(self.intercept)
        nothing = intercept * 0.0
        known = [name for name, value in row.items() if name in self.known or is_none(value) or is_no_time(value)]
        parts = {name: self._score_of_fields(self._prepared({name: row[name]}), nothing) for name in known}
        names = self.crosses.names
        crosses = {name: nothing + self._score_of_cross(cross, prepared, []) for cross, name in names.items()}
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
        weights, center, limit = (each[: len(self._fields)] for each in (self._weights, self._center, self._limit))
        of_fields = weights[:, 0].tolist() if self.classes is None else weights
        return dict(zip(self._fields, zip(center.tolist(), limit.tolist(), of_fields, strict=True), strict=True))

    def _prepared(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row with the values of its fields as numbers, texts and lists of texts, by the kinds of the fields.

        ``KnownFields.of`` does the same for many rows.
        """
        kinds, zone = self._kinds, self._known.zone
        if not _NARROW.isdisjoint(map(type, row.values())):
            row = {name: float(value) if type(value) in _NARROW else value for name, value in row.items()}
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
        value = self._linked_one(self._score(row, self._weight_of(self.intercept), crossed))
        if self.shapes is not None:
            texts = self._texts_of_row(row) if self.shapes.has_categories else []
            places = [*chain.from_iterable(each.positions for each in texts), *crossed]
            scores = self.shapes.scores_of_row(row, places)
            value = self.shapes.mixed([value, *map(self._linked_one, scores)])
        if self.embeddings is not None:
            own = self.embeddings.scores_of_row(*self._embedded_row(self.embeddings, row))
            value = self.embeddings.mixed(value, (self._linked_one(self._weight_of(each)) for each in own))
        return value

    def _embedded_row(self, embeddings: EmbeddingScores, row: Mapping[str, Any]) -> tuple[Floats, Floats]:
        """Return the pooled features and the standardized numbers of a row."""
        features = list(chain.from_iterable(each.features for each in self._texts_of_row(row)))
        return embeddings.of_features(features), embeddings.numbers_of(row)

    def _texts_of_row(self, row: Mapping[str, Any]) -> list[_TextFeature]:
        """Return the row's texts and missing values."""
        found: list[_TextFeature] = []
        for name, value in row.items():
            if isinstance(value, str):
                if name in self._texts:
                    found.append(self._text_feature(name, value))
            elif are_texts(value):
                if name in self._texts:
                    found += [self._text_feature(name, text) for text in dict.fromkeys(value)]
            elif is_none(value) or is_no_time(value):
                found.append(self._text_feature(name, None))
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
        for cross in self.crosses.names:
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
            elif is_none(value):
                score = score + self._text_weight(name, value)
            elif (column := self._numeric.get(name)) is not None:
                if not isinstance(value, NUMBERS):
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
        if (found := self.crosses.of_row(cross, row, self._texts, self._columns)) is None:
            return 0.0
        number, texts = found
        if texts:
            center, (limit, weight, at) = 0.0, self.crosses.of_texts(cross, texts, self._bits, self._at_place)
            positions.append(at)
        else:
            center, limit, weight = self._numeric.get(self.crosses.names[cross], (0.0, 0.0, 0.0))
        return weight * min(max(number - center, -limit), limit)

    def _at_place(self, place: int) -> tuple[float, _Weight, int]:
        """Return limit, weight and position of a place."""
        at = self._position(place)
        return float(self._place_limits[at]), self._weight_of(self._place_weights[at]), at

    def _text_weight(self, name: str, value: Any) -> _Weight:
        """Return the weight of a text, or of a missing value, in a field."""
        return self._text_feature(name, value).weight

    def _text_feature(self, name: str, value: Any) -> _TextFeature:
        """Return what the model knows of a text, or of a missing value, in a field."""
        key = (name, None if value != value else value)  # NaN equals no other NaN.
        if (found := self._text_features.get(key)) is None:
            if len(self._text_features) >= CACHED_TEXTS:
                self._text_features.clear()
            if isinstance(value, str):
                hashes = [place_of_text(name, value, self._hash_bits)]
            else:
                hashes = self._reader.rows([{name: value}]).places[0].tolist()
            at = list(map(self._position, hashes))
            weight = sum((self._weight_of(self._text_weights[each]) for each in at), start=0.0)
            field = None
            if self.embeddings is not None:
                field = self.embeddings.number_of.get(name) if isinstance(value, str) else 0
            features = [] if field is None else [(field, each) for each in hashes]
            found = self._text_features[key] = _TextFeature(weight, at, features)
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
        if self.width is not None:
            rows, is_single = rows_to_predict(self._subject, x, self.width)
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
                {name: value for name, value in row.items() if name in known or is_none(value) or is_no_time(value)}
                for row in rows
            ]
        return self._as_known(self._reader.rows(given), given)

    def _as_known(self, rows: NamedRows, records: Columns | list[Any]) -> NamedRows:
        """Return the rows of records with each value as the learner reads its field."""

        def refused(bad: BadKind) -> ModelError:
            return self._wrong_kind(bad.field, bad.expected, bad.given_in(records[int(np.argmax(bad.rows))]))

        return self._known.of(rows, refused)

    def scores(self, rows: NamedRows) -> Floats:
        """Return the scores (rows, scores) without the intercept."""
        known = [position for position, name in enumerate(rows.fields) if name in self._columns]
        columns = [self._columns[rows.fields[position]] for position in known]
        numbers = rows.numbers[:, known]
        x = clipped(numbers, numbers - self._center[columns], self._limit[columns])
        weights = self._weights[columns]
        if weights.shape[1] == 1:  # Of candidates not even the last bit may depend on the rows around, as in BLAS.
            scores: Floats = np.einsum("rc,c->r", np.ascontiguousarray(x), weights[:, 0])[:, None]
        else:
            scores = x @ weights
        for position in self._known_places(rows):
            at = self._positions(rows.places[:, position])
            if rows.place_values is None:
                scores += self._text_weights[at]
            else:
                values, limits = rows.place_values[:, position], self._place_limits[at]
                scores += clipped(values, values, limits)[:, None] * self._place_weights[at]
        return scores

    def _known_places(self, rows: NamedRows) -> list[int]:
        """Return which columns of places are of known fields, or of missing values."""
        fields = rows.text_fields
        return [at for at in range(rows.places.shape[1]) if at >= len(fields) or fields[at] in self._texts]

    def _values_times_weights(self, rows: SparseRows) -> Floats:
        """Return what each value of the rows adds to the scores of its row."""
        at = self._positions(rows.indices)
        x = clipped(rows.values, rows.values, self._place_limits[at])
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

    def _places_of(self, hashes: Indices) -> Indices:
        """Return the place of each hash: its low bits."""
        if self._hash_bits == self._bits:
            return hashes
        return np.where(hashes == ABSENT, ABSENT, hashes & ((1 << self._bits) - 1))

    def _position(self, hashed: int) -> int:
        """Return the row of weights of one hash: numpy takes longer for an array of one."""
        place = hashed & ((1 << self._bits) - 1)
        at = int(self._places.searchsorted(place))
        return at if self._places[at] == place else len(self._places) - 1

    def _positions(self, hashes: Indices) -> Indices:
        """Return the row of weights of each hash, or place."""
        places = self._places_of(hashes)
        if self._bits <= _TABLE_BITS_MAX and self.width is None and hashes.size << 3 >> self._bits:
            return self._table_of_places[places]
        at = np.searchsorted(self._places, places)
        return np.where(self._places[at] == places, at, len(self._places) - 1)

    @cached_property
    def _table_of_places(self) -> Array:
        """The row of weights of each place, and of :data:`ABSENT`, the last: many are found faster than by a search."""
        table = np.full((1 << self._bits) + 1, len(self._places) - 1, np.int32)
        known = np.flatnonzero(self._places >> self._bits == 0)  # All, but in a damaged model.
        table[self._places[known]] = known
        return table


def _is_link(value: object) -> bool:
    return isinstance(value, str) and value in ("logit", "softmax", "clipped", "log")


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _are_two(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2
