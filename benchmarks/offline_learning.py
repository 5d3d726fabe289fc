"""Train on arrays offline, compared with a bare numpy loop of the same steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Figure, Stopwatch, Target, Trial, alternate
from benchmarks.session import Session
from streamiter.learn import LogisticRegression

__all__ = ["offline_logistic_regression"]

Floats = npt.NDArray[np.float64]

EPOCHS = "epochs/s"
_FEATURES = 100
_EPOCHS = 100
_LEARNING_RATE = 0.5

# LogisticRegression may take 1.3 times as long as the bare loop.
_RATIO_AT_LEAST = 0.77


def offline_logistic_regression(session: Session) -> Iterator[Figure]:
    """Logistic regression learns 100,000 × 100 dense values in full batches, for 100 epochs."""
    rows = session.size(100_000, 2_000)
    generator = np.random.default_rng(seed=1)
    features = generator.normal(size=(rows, _FEATURES))
    chances = 1.0 / (1.0 + np.exp(-(features @ generator.normal(size=_FEATURES))))
    targets = (generator.random(rows) < chances).astype(np.float64)
    bare = "numpy loop"
    series = alternate(
        {bare: lambda: _bare(features, targets), "LogisticRegression.fit": lambda: _fit(features, targets)},
        repeat=session.repeat,
        agree=lambda first, other: np.allclose(first, other, rtol=1e-10, atol=0.0),
    )
    yield series.figure(bare, EPOCHS)
    yield series.figure(
        "LogisticRegression.fit",
        EPOCHS,
        compared_with=bare,
        target=Target("ratio", at_least=_RATIO_AT_LEAST),
        note="with its losses",
    )


def _bare(features: Floats, targets: Floats) -> Trial:
    with Stopwatch() as watch:
        weights = np.zeros(_FEATURES)
        for _ in range(_EPOCHS):
            predictions = 1.0 / (1.0 + np.exp(-(features @ weights)))
            weights -= _LEARNING_RATE / len(targets) * (features.T @ (predictions - targets))
    return Trial(watch.rates(_EPOCHS, "epochs"), weights)


def _fit(features: Floats, targets: Floats) -> Trial:
    """Measure a call of ``fit``, including the start of the flow and the checks of all rows."""
    model = LogisticRegression(_FEATURES, intercept=False)
    with Stopwatch() as watch:
        model.fit(features, targets, rounds=_EPOCHS, learning_rate=_LEARNING_RATE, progress=False)
    return Trial(watch.rates(_EPOCHS, "epochs"), model.weights.copy())
