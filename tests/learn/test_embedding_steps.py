"""The arithmetic of embeddings: steps of AdaGrad along the slopes of the score, with a compiler or without."""

from typing import Any

import numpy as np
import pytest

from streamiter.learn import Embeddings
from streamiter.learn.ready_made.embedding_layers import (
    RATE_OF_LAYERS,
    RATE_OF_VECTORS,
    RATE_OF_VECTORS_2,
    RATE_OF_WEIGHTS,
)
from streamiter.learn.ready_made.embedding_steps import begin_vectors
from streamiter.learn.ready_made.embedding_weights import EmbeddingWeights, _drawn, fold_rows
from streamiter.learn.ready_made.model_rows import BEHIND_KEYS, ModelRows, RowSteps
from streamiter.models.published_embeddings import HASH_BITS

FACTORS, UNITS = 3, (4, 2)
ROWS = 15
"""Enough for two occurrences of each text; each row takes a score for each parameter twice."""

Row = dict[int, list[int]]
"""By field the numbers of its texts."""


def rows_of(rows: list[Row], numbers: Any) -> ModelRows:
    """Return rows of keys with their numeric columns, as the model reads them."""
    indptr, indices, values = [0], [], []
    for row, columns in zip(rows, numbers, strict=True):
        keys = sorted(field << HASH_BITS | (7 + text) for field, texts in row.items() for text in texts)
        indices += [BEHIND_KEYS + 1 + column for column in range(len(columns))] + keys
        values += [*columns, *np.ones(len(keys))]
        indptr.append(len(indices))
    return ModelRows(np.array(indptr), np.array(indices, np.intp), np.array(values, np.float64))


class PlainHead:
    """A head of an expert as its formula says, with parameters by name; slopes are differences of scores."""

    def __init__(self, weights: EmbeddingWeights, head: int, kind: str, columns: int) -> None:
        self.head, self.heads = head, weights.heads
        expert = head // weights.scores
        self.has_products, self.has_layers = expert > 0 or kind != "wide and deep", expert == 0 and kind != "fm"
        self.rate = float((RATE_OF_VECTORS, RATE_OF_VECTORS_2)[expert])
        published = weights.published(["a", "b"], [], [], np.zeros(2))["experts"][head]
        self.numbers: dict[Any, float] = {"intercept": 0.0}
        for field, vector in enumerate(published["commons"]):
            self.numbers |= {("common", field, place): float(value) for place, value in enumerate(vector)}
        for column, numbers in enumerate(published["numbers"][:columns]):
            self.numbers |= {("number", column, place): float(value) for place, value in enumerate(numbers)}
        for layer, arrays in enumerate(published["layers"]):
            for name in ("weights", "bias"):
                is_output = name == "bias" and layer == len(UNITS)
                for place, value in np.ndenumerate(arrays[name]):
                    if not is_output:
                        self.numbers[name, layer, *place] = float(value)
        self.squares = dict.fromkeys(self.numbers, 1e-2)
        self.counts: dict[tuple[int, int], int] = {}
        self.early: dict[Any, float] = {}
        """The gradients of features with one occurrence."""

    def weight_of(self, feature: tuple[int, int]) -> Any:
        return ("weight", feature)

    def vector_of(self, feature: tuple[int, int], place: int) -> Any:
        count = self.counts.get(feature, 0)
        return ("vector" if count > 1 else "early", feature, place) if count else ("common", feature[0], place)

    def score(self, row: Row, z: Any) -> float:
        of = self.numbers
        score, vectors = of["intercept"], np.zeros((3, FACTORS))
        for field, texts in row.items():
            for text in texts:
                score += of.get(self.weight_of((field, text)), 0.0) / len(texts)
                vector = [of[self.vector_of((field, text), place)] for place in range(FACTORS)]
                vectors[field] += np.array(vector) / len(texts)
        score += sum(value * of["number", column, 0] for column, value in enumerate(z))
        terms = [*vectors]
        for column, value in enumerate(z):
            terms.append(value * np.array([of["number", column, 1 + place] for place in range(FACTORS)]))
        if self.has_products:
            for first in range(len(terms)):
                score += sum(float(terms[first] @ other) for other in terms[first + 1 :])
        if self.has_layers:
            outputs = np.concatenate([vectors.ravel(), z])
            for layer, units in enumerate((*UNITS, 1)):
                weights = np.array(
                    [[of["weights", layer, at, unit] for unit in range(units)] for at in range(len(outputs))]
                )
                outputs = outputs @ weights
                if layer < len(UNITS):
                    outputs = np.maximum(outputs + [of["bias", layer, unit] for unit in range(units)], 0.0)
            score += float(outputs[0])
        return float(score)

    def learn(self, row: Row, z: Any, slope: float) -> None:
        own: dict[Any, float] = {}
        for field, texts in row.items():
            for text in texts:
                feature = (field, text)
                self.counts[feature] = self.counts.get(feature, 0) + 1
                if self.counts[feature] == 1:
                    self.numbers[self.weight_of(feature)], self.squares[self.weight_of(feature)] = 0.0, 1e-2
                    for place in range(FACTORS):
                        self.numbers["early", feature, place] = self.numbers["common", field, place]
                if self.counts[feature] == 2:
                    drawn = np.zeros(self.heads * FACTORS, np.float32)
                    begin_vectors(drawn, 0, field << HASH_BITS | (7 + text), self.heads * FACTORS)
                    for place in range(FACTORS):
                        name = ("vector", feature, place)
                        self.numbers[name] = self.numbers["early", feature, place]
                        self.squares[name] = 1e-2 + self.early[feature, place] ** 2
                        own[name] = float(drawn[self.head * FACTORS + place]) - self.numbers["common", field, place]
        slopes = {}
        for name, value in list(self.numbers.items()):
            found = []
            for change in (1e-6, -1e-6):
                self.numbers[name] = value + change
                found.append(self.score(row, z))
            self.numbers[name], slopes[name] = value, slope * (found[0] - found[1]) / 2e-6
        for kind, feature, place in [name for name in slopes if name[0] in ("early", "common")]:
            change = slopes.pop((kind, feature, place))
            if kind == "early" and self.counts[feature] == 1 and feature[1] in row.get(feature[0], []):
                # Four bits have the sign and the root of the size.
                gradient = np.sign(change) * np.floor(7 * np.sqrt(min(abs(change), 1.0)) + 0.5) ** 2 / 49
                self.early[feature, place] = gradient
                self.numbers[kind, feature, place] -= self.rate * gradient / np.sqrt(1e-2 + gradient**2)
        for name, change in slopes.items():
            rate = float(RATE_OF_LAYERS) if name[0] in ("weights", "bias") else self.rate
            if name == "intercept" or name[0] == "weight" or (name[0] == "number" and name[2] == 0):
                rate = float(RATE_OF_WEIGHTS)
            self.squares[name] += change**2
            self.numbers[name] += own.get(name, 0.0) - rate * change / np.sqrt(self.squares[name])


@pytest.mark.parametrize(("kind", "scores"), [("fm", 1), ("deepfm", 1), ("wide and deep", 1), ("deepfm", 3)])
def test_each_step_is_one_of_adagrad_along_the_slope_of_the_score(kind: Any, scores: int) -> None:
    """Slopes are computed by hand, layer by layer; here they are differences of scores by the formula."""
    draw = np.random.default_rng(4)
    rows: list[Row] = [{1: [int(draw.integers(3))], 2: [int(draw.integers(4))]} for _ in range(ROWS)]
    for row in rows[::3]:
        row[0] = [5]
    numbers = draw.normal(size=(ROWS, 2))
    labels = draw.integers(max(scores, 2), size=ROWS).astype(np.float64)
    settings = Embeddings(kind=kind, factors=FACTORS, hidden=UNITS, admit=2, at_most="1 MB")
    weights = EmbeddingWeights(settings, "binary" if scores == 1 else "classes", scores)
    weights.add_fields(2)
    weights.add_numeric(2)
    plain = [PlainHead(weights, head, kind, 2) for head in range(2 * scores)]
    steps = RowSteps.one_each(ROWS, learns=True)
    found = weights.step(rows_of(rows, numbers), steps, labels, np.zeros((0, 2, scores)))
    for at, (row, label) in enumerate(zip(rows, labels, strict=True)):
        before = numbers[:at]
        scale = before.std(axis=0) if at else np.zeros(2)
        z = np.zeros(2) if at < 2 else np.clip((numbers[at] - before.mean(axis=0)) / scale, -10, 10)
        for expert in range(2):
            heads = plain[expert * scores : (expert + 1) * scores]
            raised = np.exp([own.score(row, z) for own in heads])
            chances = raised / (raised.sum() if scores > 1 else 1 + raised)
            assert found[at].reshape(2, scores)[expert] == pytest.approx(chances, rel=2e-4), (at, expert)
            targets = label == np.arange(scores) if scores > 1 else [label]
            for own, slope in zip(heads, chances - targets, strict=True):
                own.learn(row, z, float(slope))


def test_features_begin_with_different_vectors() -> None:
    """All features of a field began with one vector, and a vector that is learned in one direction stays there."""
    draw = np.random.default_rng(2)
    rows = np.zeros((500, 16), np.float32)
    for row, key in zip(rows, draw.integers(0, 1 << 52, 500).tolist(), strict=True):
        begin_vectors(row, 0, 3 << HASH_BITS | key, 16)
    assert rows.mean() == pytest.approx(0.0, abs=1e-3)
    assert rows.std() == pytest.approx(0.02, rel=0.03)
    alike = np.corrcoef(rows, rowvar=False) - np.eye(16)
    assert np.abs(alike).max() < 0.2


def test_texts_of_one_field_count_as_their_mean() -> None:
    """A title of twenty words had twenty times the influence of a title of one."""
    weights = EmbeddingWeights(Embeddings(kind="fm", factors=FACTORS, admit=1, at_most="1 MB"), "binary")
    weights.add_fields(2)
    rows: list[Row] = [{1: [1], 2: [1]}, {1: [2], 2: [1]}, {1: [1, 2], 2: [1]}]
    given, nothing = rows_of(rows, np.zeros((3, 0))), np.zeros((0, 2))
    for _ in range(30):
        weights.step(given, RowSteps.one_each(3, learns=True), np.array([1.0, 0.0, 1.0]), nothing)
    one, other, both = weights.step(given, RowSteps.one_each(3, learns=False), np.zeros(3), nothing)
    scores = [np.log(each / (1 - each)) for each in (one, other, both)]
    assert scores[2] == pytest.approx((scores[0] + scores[1]) / 2, rel=1e-4)


def _folded_by_hand(rows: ModelRows, places: int) -> list[list[tuple[int, float]]]:
    found = []
    for first, stop in zip(rows.indptr, rows.indptr[1:], strict=False):
        given = list(zip(rows.indices[first:stop].tolist(), rows.values[first:stop].tolist(), strict=True))
        numbers = [(index - BEHIND_KEYS + places, value) for index, value in given if index > BEHIND_KEYS]
        found.append(numbers + sorted((index % places, value) for index, value in given if index < BEHIND_KEYS))
    return found


def test_rows_of_keys_fold_to_the_places_of_the_linear_member() -> None:
    """Sums in another order differ in their last bits, so places must be in the order that they have without keys."""
    draw = np.random.default_rng(1)
    keys = [np.sort(draw.integers(0, BEHIND_KEYS, draw.integers(0, 30))) for _ in range(200)]
    indices = [np.append([BEHIND_KEYS + 1, BEHIND_KEYS], each) for each in keys]
    lengths = np.array([len(each) for each in indices])
    values = draw.choice([-1.0, 1.0, 2.0], lengths.sum())
    rows = ModelRows(np.append(0, np.cumsum(lengths)), np.concatenate(indices).astype(np.intp), values)
    folded = fold_rows(rows, 8)
    expected = _folded_by_hand(rows, 8)
    assert np.diff(folded.indptr).tolist() == [len(row) for row in expected]
    assert list(zip(folded.indices.tolist(), folded.values.tolist(), strict=True)) == [
        each for row in expected for each in row
    ]


def test_the_first_numbers_of_factors_are_not_alike() -> None:
    """All factors of a field began with nearly the same number, and moved alike: eight learned what one does."""
    drawn = _drawn(0, np.arange(300), 300)
    assert drawn.mean() == pytest.approx(0.0, abs=0.02)
    assert drawn.std() == pytest.approx(1.0, abs=0.02)
    for apart in (1, 2, 7, 8):
        for one, other in ((drawn[:, :-apart], drawn[:, apart:]), (drawn[:-apart], drawn[apart:])):
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02
