"""``PublishedEmbeddings``: the embeddings of a published model, and ``EmbeddingScores``, which computes their scores.

A *feature* is a text of a field, or a missing value; its *key* has the number of the field (10 bits, 0 for missing
values), then the low 52 bits of the hash of field and text. Each known feature has a weight, and if it is admitted a
vector; all others have the common vector of their field. Several features of a field count as their mean. A row is here
the pooled features of its fields, and the standardized numbers of its numeric columns. Each *expert* has a *head* for
each score: one, or one for each class. All heads have the same features, with weights and vectors of their own; the
heads of the first expert come first. What a feature without a vector has learned is added to the common one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError, shortened
from streamiter.models.documents import EMBEDDINGS, are_names, checked_array, is_count, members_in, parameter_of
from streamiter.models.stored_rows import StoredRows
from streamiter.values.field_kinds import HUGE
from streamiter.values.named_rows import ABSENT, NamedRows, is_missing
from streamiter.values.numbers import NUMBERS, Array, Floats, Indices, Integers, is_number

EMBEDDINGS_OF_FIELDS: Final = "(embeddings)"
"""The name of the part that a network has in a score: it is no sum over fields."""

MISSING_VALUES: Final = "(missing values)"
"""The name of the field that the missing values of all fields are features of."""

HASH_BITS: Final = 52
"""The number of bits that a key has of the hash of its text."""

FIELDS_MAX: Final = 1022
"""The largest number of a field: a key has 10 bits for it, and 1023 is of no field."""

DEVIATIONS_OF_LIMIT: Final = 10.0
"""The limit of a numeric column is this many deviations."""

EmbeddingKind = Literal["fm", "deepfm", "wide and deep"]
"""``fm``: factorization machines; ``deepfm``: with a network; ``wide and deep``: a network in place of one of them."""

_KINDS: Final[tuple[EmbeddingKind, ...]] = get_args(EmbeddingKind)

_Float32 = npt.NDArray[np.float32]

# The vectors of this many rows of ten fields take some megabytes.
_ROWS_AT_ONCE: Final = 4_096


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingHead:
    """The numbers of one head; k is the number of factors."""

    weights: _Float32
    """(features,): the weight of each known feature; of all others it is 0."""
    vectors: _Float32 | StoredRows
    """(admitted features, k): their vectors, in memory or on disk."""
    commons: _Float32
    """(1 + text fields, k): the vectors of all other features, by the number of the field."""
    numbers: _Float32
    """(fields, 1 + k): weight and vector of each numeric field of the linear member."""
    products: bool
    """Whether the products of all pairs of vectors are added."""
    layers: Sequence[tuple[_Float32, _Float32]]
    """The weights (inputs, outputs) and the bias (outputs,) of each layer of the network; the last has one output."""
    early_steps: _Float32
    """(16,): what is added to a number of the common vector, by 4 bits of ``PublishedEmbeddings.early``."""
    intercept: float
    """The score of a row of which nothing is known."""
    share: float
    """The weight of the expert's prediction in the mixture; all its heads have the same."""


@dataclass(frozen=True, slots=True, eq=False)
class PublishedEmbeddings:
    """The members of the mixture that have a vector for each admitted feature."""

    kind: EmbeddingKind
    """What the scores are made of."""
    factors: int
    """The length of a vector."""
    text_fields: list[str]
    """The fields with the numbers 1, 2, …."""
    keys: Integers
    """(features,): the keys of the known features, ascending."""
    admitted: Integers
    """(admitted features,): the keys of the features with a vector, ascending."""
    early: npt.NDArray[np.uint8]
    """(features, scores · k): what features without a vector have learned, 4 bits for each expert, the low ones for the
    first; (0, scores · k): nothing."""
    scale: float
    """By which all but intercepts is multiplied: 1, or the deviation of the numbers to predict."""
    scores: int
    """The number of scores of an expert."""
    experts: Sequence[EmbeddingHead]
    """The heads. The shares of the experts add up to the share of the embeddings; all other members have the rest."""

    @staticmethod
    def of(given: Mapping[str, Any], subject: str, *, fields: int, scores: int) -> PublishedEmbeddings:
        """Return the embeddings of a published model, whose linear member has ``fields`` numeric fields and ``scores``.

        The arrays are taken as they are, without a copy. Raises ``ModelError`` for embeddings that do not fit.
        """
        subject = f"{subject}: embeddings"
        kind = parameter_of(given, "kind", subject, "a text", lambda value: isinstance(value, str))
        if kind not in _KINDS:
            raise ModelError(
                f"{subject}: expected 'kind' as one of {', '.join(_KINDS)}, given {kind!r}; the model is of a newer "
                "version of streamiter, or damaged"
            )
        factors: int = parameter_of(given, "factors", subject, "a whole number above 0", is_count)
        names: list[str] = parameter_of(given, "text_fields", subject, f"at most {FIELDS_MAX} names", _are_few_names)
        keys, admitted = (_keys(given, name, subject, len(names)) for name in ("keys", "admitted"))
        has_early = np.size(given.get("early", ())) > 0
        early = _array(given, "early", subject, (len(keys) if has_early else 0, scores * factors), np.uint8)
        experts = parameter_of(given, "experts", subject, "a list of experts", _are_objects)
        if given.get("scores", 1) != scores or len(experts) % scores:
            raise ModelError(
                f"{subject}: expected experts for {scores} scores, as many as the model has, given {len(experts)} for "
                f"{given.get('scores', 1)}; the model is damaged"
            )
        sizes = {
            "features": len(keys),
            "rows": len(admitted),
            "fields": 1 + len(names),
            "numbers": fields,
            "factors": factors,
        }
        found = [_expert(each, f"{subject}: expert {number}", **sizes) for number, each in enumerate(experts)]
        if (total := sum(each.share for each in found[::scores])) > 1.0 + _ROUNDING_OF_SHARES:
            raise ModelError(f"{subject}: expected shares of at most 1 in all, given {total}; the model is damaged")
        scale = float(parameter_of(given, "scale", subject, "a number", is_number))
        return PublishedEmbeddings(kind, factors, names, keys, admitted, early, scale, scores, found)


@dataclass(frozen=True, slots=True)
class EmbeddingFigures:
    """How much a published model has learned of features, and how much its embeddings count."""

    kind: EmbeddingKind
    """What the scores are made of."""
    factors: int
    """The length of a vector."""
    fields: int
    """The number of fields of texts."""
    features: int
    """The number of features that are known."""
    admitted: int
    """The number of these that have a vector."""
    expired: int
    """The number of features that have left so far because they had not occurred for too long."""
    evicted: int
    """The number of features that have left so far because there was no room."""
    share: float
    """The share of the embeddings in the prediction."""

    @staticmethod
    def of(parameters: object) -> EmbeddingFigures | None:
        """Return the figures of published parameters; None without embeddings."""
        if (given := members_in(parameters, EMBEDDINGS)) is None:
            return None
        experts = given["experts"]
        return EmbeddingFigures(
            given["kind"],
            given["factors"],
            len(given["text_fields"]),
            len(given["keys"]),
            len(experts[0]["vectors"]),
            given.get("expired", 0),
            given.get("evicted", 0),
            float(sum(each["share"] for each in experts[:: given.get("scores", 1)])),
        )


# Shares are sums of rounded numbers.
_ROUNDING_OF_SHARES: Final = 1e-9


def _expert(
    given: Mapping[str, Any], subject: str, *, features: int, rows: int, fields: int, numbers: int, factors: int
) -> EmbeddingHead:
    return EmbeddingHead(
        weights=_array(given, "weights", subject, (features,), np.float32),
        vectors=_vectors(given, subject, (rows, factors)),
        commons=_array(given, "commons", subject, (fields, factors), np.float32),
        numbers=_array(given, "numbers", subject, (numbers, 1 + factors), np.float32),
        products=parameter_of(given, "products", subject, "true or false", lambda value: isinstance(value, bool)),
        layers=_layers(given, subject, fields * factors + numbers),
        early_steps=_array(given, "early_steps", subject, (16,), np.float32),
        intercept=float(parameter_of(given, "intercept", subject, "a number", is_number)),
        share=float(parameter_of(given, "share", subject, "a number from 0 to 1", _is_share)),
    )


def _vectors(given: Mapping[str, Any], subject: str, shape: tuple[int, int]) -> _Float32 | StoredRows:
    stored = given.get("vectors")
    if not isinstance(stored, StoredRows):
        return _array(given, "vectors", subject, shape, np.float32)
    if stored.shape != shape:
        raise ModelError(f"{subject}: expected 'vectors' of shape {shape}, given {stored.shape}; the model is damaged")
    return stored


def _keys(given: Mapping[str, Any], name: str, subject: str, fields: int) -> Integers:
    """Return the keys of features, whose fields have the numbers up to ``fields``."""
    keys = _array(given, name, subject, (None,), np.int64)
    if len(keys) and (keys[0] < 0 or keys[-1] >> HASH_BITS > fields or (keys[1:] <= keys[:-1]).any()):
        raise ModelError(
            f"{subject}: expected {name!r} in ascending order, of the fields 0 to {fields}, given {shortened(keys)}; "
            "the model is damaged"
        )
    return keys


def _places_in(known: Integers, keys: Integers) -> tuple[Indices, Indices]:
    """Return which of the keys are among the known ones, which ascend, and where these are."""
    if not len(known):
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    at = known.searchsorted(keys)
    at[at == len(known)] = 0
    is_known = np.flatnonzero(known[at] == keys)
    return is_known, at[is_known]


def _layers(given: Mapping[str, Any], subject: str, inputs: int) -> list[tuple[_Float32, _Float32]]:
    """Return the layers; the first one has this number of inputs."""
    layers = parameter_of(given, "layers", subject, "a list of layers", lambda value: isinstance(value, list))
    found = []
    for number, layer in enumerate(layers):
        is_last, of_layer = number == len(layers) - 1, f"{subject}: layer {number}"
        if not isinstance(layer, Mapping):
            raise ModelError(f"{of_layer}: expected weights and a bias, given {shortened(layer)}; the model is damaged")
        weights = _array(layer, "weights", of_layer, (inputs, 1 if is_last else None), np.float32)
        inputs = weights.shape[1]
        found.append((weights, _array(layer, "bias", of_layer, (inputs,), np.float32)))
    return found


def _array(given: Mapping[str, Any], name: str, subject: str, shape: tuple[int | None, ...], dtype: type[Any]) -> Array:
    """Return an array as it is, or in this type if it has another one that can be cast to it."""
    whole = np.issubdtype(dtype, np.integer)
    return np.ascontiguousarray(checked_array(given, name, subject, shape, whole=whole), dtype)


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and 0.0 <= value <= 1.0


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _are_few_names(value: object) -> bool:
    return are_names(value) and len(value) <= FIELDS_MAX  # type: ignore[arg-type]


# ---- scores


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Rows as H heads see them, F + 1 fields and C numeric columns."""

    fields: Floats
    """(H, rows, F + 1, 1 + k): the mean of the weights and vectors of each field's features, 0 without a feature."""
    numbers: Floats
    """(rows, C): the standardized numbers, 0 where the value is missing."""


class EmbeddingScores:
    """Computes the scores of all heads, for one row and for many.

    ``fields`` are the numeric fields of the linear member, with their ``centers`` and ``limits``; ``texts`` are its
    fields of texts. Vectors are float32, and all sums float64.
    """

    def __init__(
        self, given: PublishedEmbeddings, fields: list[str], centers: Floats, limits: Floats, texts: frozenset[str]
    ) -> None:
        self.given = given
        self.numeric = fields
        self.number_of = {name: 1 + at for at, name in enumerate(given.text_fields) if name in texts}
        """The number of each field of texts."""
        self._centers = centers
        self._limits = limits
        self._deviations = np.divide(DEVIATIONS_OF_LIMIT, limits, out=np.zeros(len(limits)), where=limits > 0.0)
        experts = given.experts
        self._heads = len(experts)
        self._rows_at_once = max(_ROWS_AT_ONCE // given.scores, 1)
        self.shares = [each.share for each in experts[:: given.scores]]
        """The share of each expert in the mixture."""
        self._intercepts = np.array([each.intercept for each in experts])
        self.intercepts = self._intercepts.reshape(-1, given.scores)
        """(E, scores): the intercepts of each expert."""
        self._commons = np.stack([np.pad(each.commons.astype(np.float64), ((0, 0), (1, 0))) for each in experts])
        """(H, F + 1, 1 + k): the weight 0, and the common vector."""
        self._numbers = np.stack([each.numbers.astype(np.float64) for each in experts])
        self._squares_of_numbers = (self._numbers[:, :, 1:] ** 2).sum(axis=2)
        self._products = np.array([0.5 * each.products for each in experts])
        self._layers = [
            [(weights.astype(np.float64), bias.astype(np.float64)) for weights, bias in each.layers] for each in experts
        ]

    def mixed(self, others: Any, own: Iterable[Any]) -> Any:
        """Return the mixture of the prediction of the other members and of those of the experts."""
        total = (1.0 - sum(self.shares)) * others
        for share, prediction in zip(self.shares, own, strict=True):
            total = total + share * prediction
        return total

    # ---- features

    def vectors_of(self, keys: Integers, fields: Indices) -> Floats:
        """Return weight and vector (H, keys, 1 + k) of each key, and of all heads; the fields are those of the keys.

        A key that is not known has the weight 0.
        """
        found = self._commons[:, fields]
        is_known, at = _places_in(self.given.keys, keys)
        has_vector, rows = _places_in(self.given.admitted, keys)
        for place, (numbers, head) in enumerate(zip(found, self.given.experts, strict=True)):
            numbers[is_known, 0] = head.weights[at]
            if len(self.given.early):
                of_expert, first = place // self.given.scores, place % self.given.scores * self.given.factors
                early = self.given.early[at, first : first + self.given.factors]
                numbers[is_known, 1:] += head.early_steps[early >> 4 * of_expert & 15]
            numbers[has_vector, 1:] = head.vectors[rows]
        return found

    def numbers_of(self, row: Mapping[str, Any]) -> Floats:
        """Return the standardized numbers (C,) of a row, whose values are of the types of their fields."""
        found = []
        for name, center, limit, deviation in self._scales:
            value: Any = row.get(name)
            if isinstance(value, NUMBERS) and abs(value) <= HUGE:
                found.append(min(max(float(value) - center, -limit), limit) * deviation)
            else:
                found.append(0.0)
        return np.array(found)

    @cached_property
    def _scales(self) -> list[tuple[str, float, float, float]]:
        """For each numeric field its name, center, limit, and the factor that makes deviations of distances."""
        of_fields = (self._centers.tolist(), self._limits.tolist(), self._deviations.tolist())
        return list(zip(self.numeric, *of_fields, strict=True))

    def embedded(self, rows: NamedRows) -> Iterator[EmbeddedRows]:
        """Yield the rows, whose values are prepared by the kinds of their fields, in blocks.

        Their ``places`` are the hashes of texts, of 52 bits, without crosses.
        """
        numbers, fields = self._standardized(rows), self._fields_of(rows)
        own = [field for field in fields if field is not None]
        for start in range(0, len(rows), self._rows_at_once):
            block = slice(start, start + self._rows_at_once)
            found = np.zeros((self._heads, len(numbers[block]), *self._commons.shape[1:]))
            found[:, :, sorted(set(own))] = self._means(rows.places[block], fields)
            yield EmbeddedRows(found, numbers[block])

    def _standardized(self, rows: NamedRows) -> Floats:
        """Return the standardized numbers (rows, C)."""
        values = np.full((len(rows), len(self.numeric)), np.nan)
        for column, name in enumerate(self.numeric):
            if name in rows.fields:
                values[:, column] = rows.numbers[:, rows.fields.index(name)]
        away = np.minimum(np.maximum(values - self._centers, -self._limits), self._limits)
        return np.where(is_missing(values), 0.0, away * self._deviations)

    def _fields_of(self, rows: NamedRows) -> list[int | None]:
        """Return the number of the field of each column of places; None for a field without embeddings."""
        missing = [0] * (rows.places.shape[1] - len(rows.text_fields))
        return [*map(self.number_of.get, rows.text_fields), *missing]

    def _means(self, hashes: Indices, fields: Sequence[int | None]) -> Floats:
        """Return the means (H, rows, fields, 1 + k) of the features of these fields, each once, in ascending order."""
        own = sorted({field for field in fields if field is not None})
        found = np.zeros((self._heads, len(hashes), len(own), self._commons.shape[2]))
        for at, field in enumerate(own):
            of_field = hashes[:, [column for column, each in enumerate(fields) if each == field]]
            sums, counts = found[:, :, at], np.zeros(len(hashes))
            for column in of_field.T:
                is_there = column != ABSENT
                there: Any = slice(None) if is_there.all() else np.flatnonzero(is_there)
                keys = column[there] | (field << HASH_BITS)
                sums[:, there] += self.vectors_of(keys, np.full(len(keys), field))
                counts[there] += 1.0
            if of_field.shape[1] > 1:
                sums /= np.maximum(counts, 1.0)[:, None]
        return found

    def of_features(self, features: Sequence[tuple[int, int]]) -> Floats:
        """Return the means (H, F + 1, 1 + k) of the features of one row: numbers of fields, with hashes."""
        found = np.zeros_like(self._commons)
        if not features:
            return found
        fields = [field for field, _ in features]
        at = np.array(fields)
        vectors = self.vectors_of(np.array([field << HASH_BITS | hashed for field, hashed in features]), at)
        if len(set(fields)) == len(fields):
            found[:, at] = vectors
            return found
        for feature, field in enumerate(fields):
            found[:, field] += vectors[:, feature]
        counts = np.bincount(at, minlength=found.shape[1])
        means: Floats = found / np.maximum(counts, 1)[:, None]
        return means

    # ---- scores

    def scores_of_row(self, fields: Floats, numbers: Floats) -> Floats:
        """Return the scores (E, scores) of one row: its pooled features (H, F + 1, 1 + k), and its numbers (C,)."""
        return self._by_expert([self.scores(EmbeddedRows(fields[:, None], numbers[None]))])[:, 0]

    def scores_of(self, rows: NamedRows) -> Floats:
        """Return the scores (E, rows, scores) of rows as for :meth:`embedded`."""
        return self._by_expert(list(map(self.scores, self.embedded(rows))))

    def _by_expert(self, blocks: list[Floats]) -> Floats:
        """Return the scores (H, rows) of blocks of rows by expert: (E, rows, scores)."""
        found = np.concatenate([np.zeros((self._heads, 0)), *blocks], axis=1)
        return found.reshape(len(self.shares), self.given.scores, -1).transpose(0, 2, 1)

    def scores(self, rows: EmbeddedRows) -> Floats:
        """Return the scores (H, rows)."""
        vectors, numbers = rows.fields[:, :, :, 1:], rows.numbers
        score = rows.fields[:, :, :, 0].sum(axis=2)
        total = vectors.sum(axis=2)
        squares = np.einsum("erfk,erfk->er", vectors, vectors)
        if self.numeric:
            score += np.einsum("rc,ec->er", numbers, self._numbers[:, :, 0])
            total += numbers @ self._numbers[:, :, 1:]
            squares += np.einsum("rc,ec->er", numbers**2, self._squares_of_numbers)
        score += self._products[:, None] * (np.einsum("erk,erk->er", total, total) - squares)
        for head, layers in enumerate(self._layers):
            if layers:
                score[head] += self._of_network(layers, vectors[head], numbers)
        found: Floats = self._intercepts[:, None] + self.given.scale * score
        return found

    @staticmethod
    def _of_network(layers: Sequence[tuple[Floats, Floats]], vectors: Floats, numbers: Floats) -> Floats:
        """Return the output of a network for vectors (rows, F + 1, k) and numbers (rows, C)."""
        (weights, bias), *others = layers
        values = np.concatenate((vectors.reshape(len(vectors), -1), numbers), axis=1)
        return _through_layers(values @ weights + bias, others)

    # ---- candidates

    def scores_beside(self, row: NamedRows, candidates: NamedRows) -> Floats:
        """Return the scores (E, candidates, scores) of a row together with each candidate, which has other fields.

        All that depends on the row alone is computed once.
        """
        fields = self._fields_of(candidates)
        texts, hashes = len(row.text_fields), candidates.places
        if 0 in fields:  # All missing values are of one field: those of the row count with those of each candidate.
            missing = np.broadcast_to(row.places[:, texts:], (len(candidates), row.places.shape[1] - texts))
            hashes, fields = np.column_stack([hashes, missing]), [*fields, *[0] * missing.shape[1]]
            row = replace(row, places=row.places[:, :texts])
        [common] = self.embedded(row)
        own = sorted({field for field in fields if field is not None})
        numbers = self._standardized(candidates)
        beside = _Beside.of(common, self._numbers, self._squares_of_numbers)
        # Candidates of a text field are in the order of its keys: random reads of large arrays took most of the time.
        order = hashes[:, 0].argsort() if hashes.shape[1] else np.arange(len(candidates))
        blocks = []
        for start in range(0, len(candidates), self._rows_at_once):
            block = order[start : start + self._rows_at_once]
            blocks.append(self._scores_beside(beside, own, self._means(hashes[block], fields), numbers[block]))
        in_order = self._by_expert(blocks)
        found = np.empty_like(in_order)
        found[:, order] = in_order
        return found

    def _scores_beside(self, beside: _Beside, own: list[int], means: Floats, numbers: Floats) -> Floats:
        columns = np.flatnonzero(numbers.any(axis=0))
        numbers, of_numbers = numbers[:, columns], self._numbers[:, columns]
        vectors = means[:, :, :, 1:]
        score = beside.weights[:, None] + means[:, :, :, 0].sum(axis=2) + (of_numbers[:, :, 0] @ numbers.T)
        total = beside.totals[:, None] + vectors.sum(axis=2) + numbers @ of_numbers[:, :, 1:]
        squares = beside.squares[:, None] + np.einsum("erfk,erfk->er", vectors, vectors)
        squares += self._squares_of_numbers[:, columns] @ (numbers**2).T
        score += self._products[:, None] * (np.einsum("erk,erk->er", total, total) - squares)
        factors = vectors.shape[3]
        inputs = [field * factors + factor for field in own for factor in range(factors)]
        inputs += (self._commons.shape[1] * factors + columns).tolist()
        for head, layers in enumerate(self._layers):
            if layers:
                (weights, bias), *others = layers
                values = np.concatenate((vectors[head].reshape(len(numbers), -1), numbers), axis=1)
                values = values @ weights[inputs] + (beside.inputs[head] @ weights + bias)
                score[head] += _through_layers(values, others)
        found: Floats = self._intercepts[:, None] + self.given.scale * score
        return found

    # ---- parts

    def parts(self, rows: NamedRows) -> list[dict[str, Floats]]:
        """Return for each expert the parts (rows, scores) of scores by name: of fields, of pairs, and of the network.

        They add up to the scores without the intercept. Parts that are 0 for all rows are left out.
        """
        scores = self.given.scores
        found: list[dict[str, Floats]] = [{} for _ in self.shares]
        start = 0
        for block in self.embedded(rows):
            stop = start + len(block.numbers)
            for head in range(self._heads):
                of_expert = found[head // scores]
                for name, part in self._parts_of(head, block).items():
                    of_expert.setdefault(name, np.zeros((len(rows), scores)))[start:stop, head % scores] = part
            start = stop
        return found

    def _parts_of(self, head: int, rows: EmbeddedRows) -> dict[str, Floats]:
        scale = self.given.scale
        names = [MISSING_VALUES, *self.given.text_fields, *self.numeric]
        fields = rows.fields[head]
        terms = np.concatenate((fields, rows.numbers[:, :, None] * self._numbers[head]), axis=1)
        found: dict[str, Floats] = {}
        for name, term in zip(names, terms.transpose(1, 0, 2), strict=True):
            found[name] = found.get(name, 0.0) + scale * term[:, 0]
        if self.given.experts[head].products:
            used = [at for at in range(len(names)) if terms[:, at].any()]
            for first, second in combinations(used, 2):
                name = f"{names[first]} × {names[second]}"
                product = np.einsum("rk,rk->r", terms[:, first, 1:], terms[:, second, 1:])
                found[name] = found.get(name, 0.0) + scale * product
        if layers := self._layers[head]:
            found[EMBEDDINGS_OF_FIELDS] = scale * self._of_network(layers, fields[:, :, 1:], rows.numbers)
        return {name: part for name, part in found.items() if part.any()}


@dataclass(frozen=True, slots=True)
class _Beside:
    """What a row adds to the scores of its candidates, for H heads."""

    weights: Floats
    """(H,): the sum of its weights."""
    totals: Floats
    """(H, k): the sum of its vectors."""
    squares: Floats
    """(H,): the sum of the squares of its vectors."""
    inputs: Floats
    """(H, inputs): the inputs of a network."""

    @staticmethod
    def of(row: EmbeddedRows, of_numbers: Floats, squares_of_numbers: Floats) -> _Beside:
        fields, numbers = row.fields[:, 0], row.numbers[0]
        vectors = fields[:, :, 1:]
        every = np.broadcast_to(numbers, (len(fields), len(numbers)))
        return _Beside(
            fields[:, :, 0].sum(axis=1) + of_numbers[:, :, 0] @ numbers,
            vectors.sum(axis=1) + numbers @ of_numbers[:, :, 1:],
            np.einsum("efk,efk->e", vectors, vectors) + squares_of_numbers @ numbers**2,
            np.concatenate((vectors.reshape(len(fields), -1), every), axis=1),
        )


def _through_layers(values: Floats, layers: Sequence[tuple[Floats, Floats]]) -> Floats:
    """Return the output (rows,) of layers, from the sums (rows, units) of the layer before them."""
    for weights, bias in layers:
        values = np.maximum(values, 0.0) @ weights + bias
    out: Floats = values[:, 0]
    return out
