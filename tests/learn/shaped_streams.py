"""Streams for tests of the models that see shapes, and these models without the steps around them."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streamiter.learn.ready_made.cell_columns import Categories
from streamiter.learn.ready_made.mixed_weights import MixedWeights
from streamiter.learn.ready_made.model_rows import ModelRows, RowSteps
from streamiter.values.numbers import Floats

ROWS = 6_000
CATEGORIES = 7
KINDS: dict[str, tuple[Any, int]] = {
    "binary": ("binary", 1),
    "regression": ("number", 1),
    "three classes": ("classes", 3),
}


class Rows:
    """Rows of numbers, whose last column may be a category."""

    def __init__(self, values: Floats) -> None:
        self.values = values


def shaped_rows(name: str) -> tuple[Rows, Floats]:
    """Return the rows of a published stream, whose fourth column is a category, and their labels."""
    draw = np.random.default_rng(17)
    v = draw.normal(size=(ROWS, 4))
    v[:, 3] = draw.integers(0, CATEGORIES, size=ROWS)
    v[draw.random(ROWS) < 0.1, 1] = np.nan
    score = np.sin(2 * v[:, 0]) + np.where(np.nan_to_num(v[:, 1]) > 0.5, 1.0, -0.5) * v[:, 2] + 0.3 * (v[:, 3] == 2)
    noise = draw.normal(size=ROWS)
    labels = {
        "binary": score + noise > 0,
        "regression": score + 0.1 * noise,
        "three classes": np.digitize(score + 0.3 * noise, [-0.7, 0.7]),
    }[name]
    return Rows(v), np.asarray(labels, np.float64)


def categories_of_stream() -> Categories:
    """Return the bins of the published streams' category: its places are 0 to 6."""
    categories = Categories()
    texts = np.arange(CATEGORIES)
    bins = (65 + 4 * texts).tolist()
    categories.restore(
        {"fields": ["c"], "counts": [CATEGORIES], "closed": [], "hashed": CATEGORIES, "places": texts, "bins": bins}
    )
    return categories


class Shaped(MixedWeights):
    """Weights that learn from a matrix; of four columns, the last one is a category."""

    name: str
    width: int

    @classmethod
    def new(cls, name: str, width: int) -> Self:
        """Return new weights for rows of this width."""
        kind, scores = KINDS[name]
        has_category = width == 4
        weights = cls(kind, scores, CATEGORIES, None, categories_of_stream() if has_category else None)
        weights.add_numeric(width - has_category)
        weights.name, weights.width = name, width
        return weights

    def learn(self, values: Floats, labels: Floats) -> Floats:
        """Predict and learn each row."""
        indices = np.tile(np.arange(self.width) + CATEGORIES + 1, (len(values), 1))
        if self.width == 4:
            indices[:, 3] = values[:, 3]
            values = np.column_stack([values[:, :3], np.ones(len(values))])
        rows = ModelRows(np.arange(len(values) + 1) * self.width, indices.ravel(), values.ravel())
        return self.step(rows, RowSteps.one_each(len(values), learns=True), labels)

    def restored(self) -> Shaped:
        """Return new weights with the state of these."""
        weights = Shaped.new(self.name, self.width)
        kind, scores = KINDS[self.name]
        weights = Shaped(kind, scores, CATEGORIES, None, self.cell_columns.categories)
        weights.name, weights.width = self.name, self.width
        weights.restore(self.state())
        return weights


class Recording(Shaped):
    """Weights that keep the predictions of their members."""

    made: npt.NDArray[np.float64]
    mixed: Floats

    @classmethod
    def of(cls, name: str, values: Floats, labels: Floats) -> Recording:
        """Return weights that have learned these rows at once."""
        weights = cls.new(name, values.shape[1])
        weights.made = np.zeros((weights.member_shares.shape[1], 0, weights.scores))
        weights.mixed = weights.learn(values, labels)
        return weights

    def _mix(self, steps: RowSteps, evidence: Floats, targets: Floats, made: Floats, asked: Floats) -> Floats:
        # New weights mix a row, so that all is compiled.
        self.made = np.concatenate([getattr(self, "made", made[:, :0]), made], axis=1)
        return super()._mix(steps, evidence, targets, made, asked)


def uncompiled_results() -> dict[str, list[Any]]:
    """Return the predictions of some rows of each stream, as they are made with a compiler or without."""
    found = {}
    for name in KINDS:
        rows, labels = shaped_rows(name)
        found[name] = Shaped.new(name, 4).learn(rows.values[:600], labels[:600]).tolist()
    return found
