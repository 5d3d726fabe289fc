"""Logistic regression learns LIBSVM's a9a from its files and is as good as other linear models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files.files_support import data_file

from streamiter import Flow, topic
from streamiter.learn import LogisticRegression, SparseRows
from streamiter.learn.quality.score_metrics import area_under_curve

FEATURES = 123

HOW: dict[str, dict[str, Any]] = {
    "all rows in each round": {"rounds": 150, "learning_rate": 2.0},
    "mini-batches": {"rounds": 400, "learning_rate": 1.0, "mini_batch": 1_000, "parallelism": 2},
    "asynchronous": {
        "rounds": 400,
        "learning_rate": 0.5,
        "mini_batch": 1_000,
        "parallelism": 2,
        "mode": "asynchronous",
    },
}


def held_out(path: Path) -> tuple[SparseRows, Any]:
    """Return features, and targets of 0 or 1."""
    flow = Flow("read")
    records = flow.source(topic(f"file:{path}")).collect()
    flow.run()
    rows = SparseRows.from_rows(((record["indices"], record["values"]) for record in records.items), width=FEATURES)
    return rows, np.array([float(record["label"] > 0) for record in records.items])


@pytest.fixture(scope="module")
def unseen() -> tuple[SparseRows, Any]:
    """Return the rows of the test file, with their targets."""
    return held_out(data_file("a9a/a9a_123d_test.dummy"))


@pytest.mark.parametrize("how", HOW)
def test_it_is_as_good_on_rows_it_has_not_seen_as_others_are(how: str, unseen: tuple[SparseRows, Any]) -> None:
    """On this data, linear models are known to reach an accuracy of .848 and an area of .900."""
    train = data_file("a9a/a9a_123d_train.libsvm")
    features, targets = unseen
    model = LogisticRegression(FEATURES, labels="-1/1")
    fit = model.fit(topic(f"file:{train}"), **HOW[how])
    assert fit.ended_by == "rounds"
    probabilities = model.predict_probability(features)
    accuracy = float(np.mean((probabilities >= 0.5) == targets))
    area = area_under_curve(probabilities, targets, np.ones(len(targets)))
    assert accuracy >= 0.848
    assert area is not None
    assert area >= 0.900
