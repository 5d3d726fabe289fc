"""``Catalogue``: candidates that are ranked for many rows, whose features are found once for each version of a model.

In a score without networks the features of a row count by their sum: it is a product of numbers of the row with numbers
of the candidate (:class:`_Products`). The products, as floats of 32 bits, say which candidates can be among the best;
the values of these are computed as those of whole rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from streamiter.errors import ModelError
from streamiter.models.embedding_scores import EmbeddedCandidates, EmbeddingScores
from streamiter.models.ranking import Candidates, RankedCandidate, checked_candidates, divided, ranked
from streamiter.models.standardized_model import StandardizedModel
from streamiter.values.helpers.importing import need_package
from streamiter.values.named_rows import NamedRows
from streamiter.values.numbers import Array, Float32s, Floats, Indices, one_of, whole_number

if TYPE_CHECKING:  # Few catalogues have an index.
    from streamiter.models.vector_index import VectorIndex

ApproximateIndex = Literal["faiss"]
"""The libraries that find candidates approximately."""

# The products of so many candidates with three members are in the cache of a processor.
_AT_ONCE: Final = 65_536

# Half the distance of two floats of 32 bits, relative to their size; and what a few operations with them are off.
_HALF: Final = 2.0**-24
_ROUNDING: Final = 1e-6

# The values of so many candidates of an index are computed, at least, and for each of the best that are wanted.
_FOUND_LEAST: Final = 200
_FOUND_FOR_EACH: Final = 20


class Ranker(Protocol):
    """What a catalogue needs of ``LinearPredictor``."""

    subject: str

    def top_k(self, row: Mapping[str, Any], candidates: Candidates, k: int = 10) -> list[RankedCandidate]:
        """Return the best candidates."""

    def ranking_model(self) -> StandardizedModel:
        """Return the model. Raises ``ModelError`` for one that cannot rank."""


class Catalogue:
    """Candidates whose features are found once for each version of a model, and ranked for many rows.

    Made by :meth:`ServedModel.catalogue` and :meth:`LinearPredictor.catalogue`.

    >>> from streamiter.models import LinearPredictor
    >>> parameters = {"fields": ["price"], "text_fields": [], "places": np.zeros(0), "bits": 18, "link": "logit"}
    >>> arrays = {"weights": np.array([-1.0]), "center": np.zeros(1), "limit": np.ones(1), "intercept": 0.0}
    >>> items = LinearPredictor(parameters | arrays).catalogue({"price": [0.5, 0.25, 0.75]})
    >>> [each.candidate for each in items.top_k({}, k=2)]
    [{'price': 0.25}, {'price': 0.5}]
    """

    def __init__(
        self,
        subject: str,
        candidates: Candidates,
        predictor: Callable[[], Ranker],
        approximate: ApproximateIndex | None,
    ) -> None:
        """``predictor`` returns the one that answers now."""
        one_of(f"{subject}.catalogue(approximate=)", approximate, "faiss", None)
        if approximate is not None:
            without = "; without approximate= the best are found by numpy"
            need_package(f"{subject}.catalogue(approximate='faiss')", "faiss", "faiss", without)
        checked = checked_candidates(subject, candidates)
        self._candidates = [*checked] if isinstance(checked, list) else checked
        self._predictor = predictor
        self._approximate = approximate
        self._index: VectorIndex | None = None
        # An answer and a newer version may be under way at the same time, each in its thread.
        self._found: WeakKeyDictionary[Ranker, _FoundItems] = WeakKeyDictionary()
        self._newest: _FoundItems | None = None
        with suppress(ModelError):  # The model may come later; all other errors are those of each answer.
            self.find(predictor())

    def __len__(self) -> int:
        return len(self._candidates)

    def top_k(self, row: Mapping[str, Any], k: int = 10) -> list[RankedCandidate]:
        """Return what ``LinearPredictor.top_k`` returns for the row and these candidates, all by one version.

        With ``approximate``, some of the best may be missing; the values of those that were found are exact. Raises
        ``NoModel`` before the first model, and the errors of ``LinearPredictor.top_k``; with ``approximate`` also
        ``ModelError`` for models whose scores are no products: with networks, tables or crosses.
        """
        predict = self._predictor()
        count = whole_number(f"{predict.subject}.top_k(k=)", k, 1, error=ModelError)
        own, candidates = divided(row, self._candidates)
        found = self._found.get(predict) or self.find(predict)
        if self._approximate is not None and found.products is None:
            raise ModelError(
                f"{predict.subject}.catalogue(approximate=): expected a model of numbers and embeddings without "
                "networks, tables and crosses, and candidates without missing values, given others; leave it out"
            )
        if candidates is not self._candidates:  # Some dicts do not name a field, and take it from the row.
            return predict.top_k(row, self._candidates, count)
        if found.products is None or not len(self):
            values, at = found.model.predict_beside(own, found.rows, found.embedded), None
        else:
            if self._index is None:
                at = found.products.best(own, count)
            else:
                most = max(_FOUND_LEAST, _FOUND_FOR_EACH * count)
                at = found.products.of_places(self._index.nearest(found.products.question(own), most))
            values = found.model.predict_beside(own, found.rows[at])
        return ranked(candidates, values, count, predict.subject, at)

    def find(self, predict: Ranker) -> _FoundItems:
        """Find the candidates' features for a version. Another thread may call it while a version before answers."""
        model, before = predict.ranking_model(), self._newest
        is_read_alike = before is not None and before.model.reading == model.reading
        rows = before.rows if before is not None and is_read_alike else model.candidates(self._candidates)
        found = _FoundItems(model, rows)
        if self._approximate is not None and found.products is not None and len(self):
            if self._index is None:
                from streamiter.models.vector_index import VectorIndex

                self._index = VectorIndex(found.products.numbers, found.products.weights())
            else:
                self._index.update(found.products.numbers)
        self._found[predict] = self._newest = found
        return found


class _FoundItems:
    """Candidates as one version of a model knows them."""

    def __init__(self, model: StandardizedModel, rows: NamedRows) -> None:
        self.model = model
        self.rows = rows
        self.embedded: list[EmbeddedCandidates] | None = None
        """The features of the embeddings; None if they are in ``products``, or count with missing values of the row."""
        self.products: _Products | None = None
        """None if the scores are no products."""
        if (embeddings := model.embeddings) is None or rows.has_missing:
            return
        has_layers = any(head.layers for head in embeddings.given.experts)
        if has_layers or model.shapes is not None or model.crosses.names:
            self.embedded = list(embeddings.found(rows))
        else:
            self.products = _Products(model, embeddings, rows)


class _Products:
    """The numbers of candidates whose scores are products, and their estimated predictions."""

    def __init__(self, model: StandardizedModel, embeddings: EmbeddingScores, rows: NamedRows) -> None:
        self._model = model
        self._embeddings = embeddings
        heads, self._width = len(embeddings.shares), 1 + embeddings.given.factors
        self.numbers: Float32s = np.empty((1 + heads * self._width, len(rows)), np.float32)
        """(1 + E · (1 + k), candidates): the score of the linear member, then of each expert what is added to the
        score, and the vector that a row's is multiplied with. The candidates are in an order of their own."""
        self._order = np.empty(len(rows), np.intp)
        of_experts, start = self.numbers[1:].reshape(heads, self._width, -1), 0
        for block in embeddings.found(rows):
            weights, totals, squares = embeddings.sums(block)
            some = slice(start, start := start + len(block.at))
            if len(block.own) > 1 or block.numbers.any():  # Else a candidate has no pairs of its own.
                weights += embeddings.products[:, None] * (np.einsum("hrk,hrk->hr", totals, totals) - squares)
            of_experts[:, 0, some] = weights
            of_experts[:, 1:, some] = totals.transpose(0, 2, 1)
            self._order[some] = block.at
        self.numbers[0] = model.scores(rows)[self._order, 0]
        self._largest = np.abs(self.numbers).max(axis=1, initial=0.0).astype(np.float64)

    def question(self, row: Mapping[str, Any]) -> Float32s:
        """Return what the numbers of the candidates are multiplied with, so that sums rank nearly as predictions do."""
        factors = np.concatenate([factors for factors, _, _ in self._members(row)])
        return factors.astype(np.float32) * self.weights()

    def weights(self) -> Float32s:
        """Return the share that the member of each number has in predictions."""
        shares = self._embeddings.shares
        return np.repeat([1.0 - sum(shares), *shares], [1, *[self._width] * len(shares)]).astype(np.float32)

    def best(self, row: Mapping[str, Any], count: int) -> Indices:
        """Return positions, in ascending order, among which are those of the best candidates."""
        members = self._members(row)
        estimated = np.empty(self.numbers.shape[1], np.float32 if self._model.link == "logit" else np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(estimated), _AT_ONCE):
                block = slice(start, start + _AT_ONCE)
                estimated[block] = self._estimated(members, self.numbers[:, block])
            place = max(len(estimated) - count, 0)
            least = np.partition(estimated, place)[place]
            # The best have at least this estimate: two estimates are each so far off.
            off = 2.0 * (max(error for _, _, error in members) + _ROUNDING)
            if self._model.link == "clipped":
                least -= off * max(1.0, float(np.abs(estimated).max()))
            else:  # A score that is larger by a little has a probability, or an exponential, larger by that part.
                least -= off * least + _LEAST_PROBABILITY
            # All, if numbers are too large for floats of 32 bits.
            return self.of_places(np.flatnonzero(~(estimated < least)))

    def of_places(self, places: Indices) -> Indices:
        """Return the positions of candidates by their places here, in ascending order."""
        return np.sort(self._order[places])

    def _members(self, row: Mapping[str, Any]) -> list[tuple[Floats, float, float]]:
        """Return for each member the factors of its numbers, what is added, and by how much a score can be wrong."""
        model, embeddings = self._model, self._embeddings
        common = model.candidates([row])
        beside, scale = embeddings.beside(common), embeddings.given.scale
        constant = float(model.scores(common)[0, 0] + model.intercept[0])
        members = [(np.ones(1), constant, (abs(constant) + self._largest[0]) * 3 * _HALF)]
        largest = self._largest[1:].reshape(-1, self._width)
        for head, half in enumerate(embeddings.products):
            total, squares, weight = beside.totals[head], beside.squares[head], beside.weights[head]
            factors = scale * np.concatenate(([1.0], 2.0 * half * total))
            constant = embeddings.intercepts[head, 0] + scale * (weight + half * (total @ total - squares))
            size = scale * (abs(weight) + half * (total @ total + squares + (largest[head, 1:] ** 2).sum()))
            size += abs(embeddings.intercepts[head, 0]) + np.abs(factors) @ largest[head]
            members.append((factors, float(constant), float(size) * (self._width + 8) * _HALF))
        return members

    def _estimated(self, members: list[tuple[Floats, float, float]], numbers: Float32s) -> Array:
        """Return the estimated predictions of candidates with these numbers."""
        found, start = [], 0
        for factors, constant, _ in members:
            score = factors.astype(np.float32) @ numbers[start : start + len(factors)]
            score += np.float32(constant)
            start += len(factors)
            if self._model.link == "logit":  # As ``sigmoid``, without a copy for each step.
                np.exp(np.negative(score, out=score), out=score)
                score += 1.0
                np.divide(1.0, score, out=score)
            else:
                score = self._model.linked(score[:, None].astype(np.float64))
            found.append(score)
        values: Array = self._embeddings.mixed(found[0], found[1:])
        return values


# Scores below -30 have the probability of -30.
_LEAST_PROBABILITY: Final = 1e-12
