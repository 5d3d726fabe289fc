"""``EmbeddingScores``: computes the scores of published embeddings, see ``streamiter.models.published_embeddings``.

Several features of a field count as their mean. A row is here the pooled features of its fields, and the standardized
numbers of its numeric columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Final

import numpy as np

from streamiter.models.published_embeddings import HASH_BITS, PublishedEmbeddings
from streamiter.values.field_kinds import HUGE
from streamiter.values.named_rows import ABSENT, NamedRows, is_missing
from streamiter.values.numbers import NUMBERS, Floats, Indices, Integers

EMBEDDINGS_OF_FIELDS: Final = "(embeddings)"
"""The name of the part that a network has in a score: it is no sum over fields."""

MISSING_VALUES: Final = "(missing values)"
"""The name of the field that the missing values of all fields are features of."""

DEVIATIONS_OF_LIMIT: Final = 10.0
"""The limit of a numeric column is this many deviations."""

# The vectors of this many rows of ten fields take some megabytes.
_ROWS_AT_ONCE: Final = 4_096


def _places_in(known: Integers, keys: Integers) -> tuple[Indices | slice, Indices]:
    """Return which of the keys are among the known ones, which ascend, and where these are."""
    if not len(known):
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    at = known.searchsorted(keys)
    at[at == len(known)] = 0
    is_known = known[at] == keys
    if is_known.all():
        return slice(None), at
    there = np.flatnonzero(is_known)
    return there, at[there]


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Rows as H heads see them, F + 1 fields and C numeric columns."""

    fields: Floats
    """(H, rows, F + 1, 1 + k): the mean of the weights and vectors of each field's features, 0 without a feature."""
    numbers: Floats
    """(rows, C): the standardized numbers, 0 where the value is missing."""


@dataclass(frozen=True, slots=True)
class EmbeddedCandidates:
    """Candidates as H heads see them: with the fields that they have."""

    at: Indices
    """(rows,): their positions among all candidates."""
    own: list[int]
    """The numbers of their fields."""
    means: Floats
    """(H, rows, fields, 1 + k): the mean of the weights and vectors of the features of each of these fields."""
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
        self.products = np.array([0.5 * each.products for each in experts])
        """(H,): the factor of the products of all pairs, each of which counts twice."""
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
                vectors = self.vectors_of(keys, np.full(len(keys), field))
                if of_field.shape[1] == 1:
                    sums[:, there] = vectors
                    break
                sums[:, there] += vectors
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
        score += self.products[:, None] * (np.einsum("erk,erk->er", total, total) - squares)
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

    def scores_beside(
        self, row: NamedRows, candidates: NamedRows, found: Iterable[EmbeddedCandidates] | None = None
    ) -> Floats:
        """Return the scores (E, candidates, scores) of a row together with each candidate, which has other fields.

        All that depends on the row alone is computed once; ``found`` is what was :meth:`found` for all rows.
        """
        if found is None:
            texts, missing = len(row.text_fields), None
            if candidates.has_missing:
                row, missing = replace(row, places=row.places[:, :texts]), row.places[:, texts:]
            found = self.found(candidates, missing)
        beside, scores = self.beside(row), np.empty((self._heads, len(candidates)))
        for block in found:
            scores[:, block.at] = self._scores_beside(beside, block)
        return self._by_expert([scores])

    def found(self, candidates: NamedRows, missing: Indices | None = None) -> Iterator[EmbeddedCandidates]:
        """Yield the features of candidates in blocks.

        All missing values are of one field, so those of a row (1, columns), ``missing``, count with those of each
        candidate.
        """
        fields, hashes = self._fields_of(candidates), candidates.places
        if missing is not None:
            columns = np.broadcast_to(missing, (len(candidates), missing.shape[1]))
            hashes, fields = np.column_stack([hashes, columns]), [*fields, *[0] * missing.shape[1]]
        own = sorted({field for field in fields if field is not None})
        numbers = self._standardized(candidates)
        # Candidates of a text field are in the order of its keys: random reads of large arrays took most of the time.
        order = hashes[:, 0].argsort() if hashes.shape[1] else np.arange(len(candidates))
        for start in range(0, len(candidates), self._rows_at_once):
            at = order[start : start + self._rows_at_once]
            yield EmbeddedCandidates(at, own, self._means(hashes[at], fields), numbers[at])

    def beside(self, row: NamedRows) -> Beside:
        """Return what one row adds to the scores of its candidates."""
        [common] = self.embedded(row)
        return Beside.of(common, self._numbers, self._squares_of_numbers)

    def sums(self, block: EmbeddedCandidates) -> tuple[Floats, Floats, Floats]:
        """Return the sums of weights (H, rows), of vectors (H, rows, k), and of the squares of vectors (H, rows)."""
        columns = np.flatnonzero(block.numbers.any(axis=0))
        numbers, of_numbers, vectors = block.numbers[:, columns], self._numbers[:, columns], block.means[:, :, :, 1:]
        weights = block.means[:, :, :, 0].sum(axis=2) + np.einsum("rc,hc->hr", numbers, of_numbers[:, :, 0])
        totals = vectors.sum(axis=2) + np.einsum("rc,hck->hrk", numbers, of_numbers[:, :, 1:])
        squares = np.einsum("hrfk,hrfk->hr", vectors, vectors)
        squares += np.einsum("rc,hc->hr", numbers**2, self._squares_of_numbers[:, columns])
        return weights, totals, squares

    def _scores_beside(self, beside: Beside, block: EmbeddedCandidates) -> Floats:
        weights, totals, squares = self.sums(block)
        totals += beside.totals[:, None]
        products = np.einsum("hrk,hrk->hr", totals, totals) - (squares + beside.squares[:, None])
        score = weights + beside.weights[:, None] + self.products[:, None] * products
        columns = np.flatnonzero(block.numbers.any(axis=0))
        factors = block.means.shape[3] - 1
        inputs = [field * factors + factor for field in block.own for factor in range(factors)]
        inputs += (self._commons.shape[1] * factors + columns).tolist()
        for head, layers in enumerate(self._layers):
            if layers:
                (weights, bias), *others = layers
                vectors = block.means[head, :, :, 1:].reshape(len(block.at), -1)
                values = np.concatenate((vectors, block.numbers[:, columns]), axis=1)
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
class Beside:
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
    def of(row: EmbeddedRows, of_numbers: Floats, squares_of_numbers: Floats) -> Beside:
        fields, numbers = row.fields[:, 0], row.numbers[0]
        vectors = fields[:, :, 1:]
        every = np.broadcast_to(numbers, (len(fields), len(numbers)))
        return Beside(
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
