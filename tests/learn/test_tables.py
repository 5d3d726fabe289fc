"""The members with tables equal the published test vectors and the reference; restores and cuts change no bit."""

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from learn.shaped_streams import Recording, Shaped, shaped_rows
from support.tables_reference import tables_reference

from streamiter.learn.ready_made import table_weights

TESTS = Path(__file__).resolve().parents[1]

# The predictions of the tables in these rows of the published streams. They are those of the reference before row 256,
# at which trees are grown by errors (docs/decisions/077). The test with the reference is without such trees.
PUBLISHED_ROWS = [0, 1, 63, 64, 256, 1_024, 4_095, 4_096, 5_999]
PUBLISHED: dict[str, list[Any]] = json.loads((TESTS / "learn" / "published_tables.json").read_text())

Floats = npt.NDArray[np.float64]


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_predict_as_the_published_test_vectors(name: str) -> None:
    """A changed constant, or a table that is replaced at another row, makes a learner that was never measured."""
    rows, labels = shaped_rows(name)
    found = Recording.of(name, rows.values, labels).made[2][PUBLISHED_ROWS]
    assert found == pytest.approx(np.array(PUBLISHED[name]), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("columns", [2, 14])
@pytest.mark.parametrize("name", PUBLISHED)
def test_each_row_equals_the_reference(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of nine rows hide an edge that moves too late; 14 columns have more pairs than there is room for."""
    monkeypatch.setattr(table_weights, "ROWS_TO_GROW", 1 << 30)
    reference = tables_reference()
    values, labels = _random_rows(name, columns)
    kind = {"binary": reference.BINARY, "regression": reference.REGRESSION, "three classes": reference.SOFTMAX}[name]
    found = Recording.of(name, values, labels)
    numbers = np.zeros(columns, np.bool_)
    tables = reference.Tables(kind, numbers, 3).rows(values, labels)
    alone = reference.Tables(kind, numbers, 3, pairs=0, trees=0).rows(values, labels)
    for own, expected in ((found.made[1], alone), (found.made[2], tables)):
        # The reference adds up squared gradients in float32.
        assert own == pytest.approx(expected, rel=1e-5, abs=2e-6)
    assert found.mixed == pytest.approx(_mixed(name, found.made, labels), rel=1e-9)


def _mixed(name: str, made: Floats, labels: Floats) -> Floats:
    """Return the mixture of members by definition: of three mixtures with fixed share, by their likelihoods."""
    spreads = np.array([[0.0001], [0.001], [0.01]])
    shares, of_spreads, mean_square = np.tile([0.6, 0.2, 0.2], (3, 1)), np.full(3, 1 / 3), 0.0
    mixed = np.empty(made.shape[1:])
    for row, label in enumerate(labels):
        mixed[row] = (of_spreads @ shares) @ made[:, row]
        if name == "regression":
            if not row:
                continue  # Before the first label nothing is known, see docs/decisions/078.
            errors = (made[:, row, 0] - label) ** 2
            mean_square += ((mixed[row, 0] - label) ** 2 - mean_square) / row
            likelihoods = np.exp(-np.minimum((errors - errors.min()) / (mean_square or 1.0), 16.0) / 4)
        else:
            likelihoods = made[:, row, int(label)] if name == "three classes" else made[:, row, 0]
            likelihoods = likelihoods if name == "three classes" or label else 1 - likelihoods
            likelihoods = np.maximum(likelihoods, 1e-6)
        of_mixtures = shares @ likelihoods
        shares = (1 - spreads) * shares * likelihoods / of_mixtures[:, None] + spreads / 3
        of_spreads = (1 - 0.0001) * of_spreads * of_mixtures / (of_spreads @ of_mixtures) + 0.0001 / 3
    return mixed


def _random_rows(name: str, columns: int) -> tuple[Floats, Floats]:
    draw = np.random.default_rng(columns)
    values = draw.normal(size=(9_000, columns)) * 10.0 ** draw.integers(-3, 4, columns)
    values[:, 0] = np.round(values[:, 0] / values[:, 0].std())  # Few distinct values.
    values[4_500:, 1] += 3 * values[:, 1].std()  # Its edges move.
    values[draw.random(values.shape) < 0.02] = np.nan
    values[0] = 1.0  # Columns get tables with their first value.
    score = np.nan_to_num(values[:, 0] * np.sign(values[:, 1])) + draw.normal(size=len(values))
    labels = {"binary": score > 0, "regression": 1e3 + 20 * score, "three classes": np.digitize(score, [-1, 1])}[name]
    return values, np.asarray(labels, np.float64)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_cut_of_rows_and_no_restore_changes_a_bit(name: str) -> None:
    """Edges were placed at the end of a mini-batch, so the predictions depended on its size."""
    rows, labels = shaped_rows(name)
    expected = Recording.of(name, rows.values, labels).mixed
    random, weights, at = Random(5), Shaped.new(name, rows.values.shape[1]), 0
    parts = []
    while at < len(labels):
        stop = min(len(labels), at + random.choice([1, 2, 63, 700, 1_500]))
        parts.append(weights.learn(rows.values[at:stop], labels[at:stop]))
        weights, at = weights.restored(), stop
    assert np.array_equal(np.concatenate(parts), expected)
