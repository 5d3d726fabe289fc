"""Predict hashed records with a served linear model: all rows at once, or a list of single rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Figure, Stopwatch, Target, Trial, alternate
from benchmarks.session import Session
from streamiter.learn import FeatureHasher, SparseRows
from streamiter.models import LinearPredictor

__all__ = ["predicting"]

Floats = npt.NDArray[np.float64]

ROWS = "rows/s"
_BITS = 18
_INTERCEPT = 0.1

# A call takes a third of a millisecond, so a trial has this many calls.
_TIMES = 100

# SparseRows must be this much faster than a list of single rows, which the documentation promises.
_TIMES_SINGLE_ROWS = 10.0


def predicting(session: Session) -> Iterator[Figure]:
    """A logistic model of 2**18 weights predicts 10,000 hashed records of 6 features, as `ServedModel.predict` does."""
    generator = np.random.default_rng(seed=1)
    rows = _hashed(session.size(10_000, 500), generator)
    weights = generator.normal(size=rows.width)
    predict = LinearPredictor({"weights": weights, "intercept": _INTERCEPT, "link": "logit"})
    pairs = [(indices.copy(), values.copy()) for indices, values in rows]
    by_hand, single = "by hand: numpy", "a list of tuples (indices, values)"
    series = alternate(
        {
            by_hand: lambda: _measured(len(rows), lambda: _by_hand(rows, weights), times=_TIMES),
            "one tuple after the other": lambda: _measured(len(rows), lambda: np.array([*map(predict, pairs)])),
            single: lambda: _measured(len(rows), lambda: predict(pairs)),
            "SparseRows": lambda: _measured(len(rows), lambda: predict(rows), times=_TIMES),
        },
        repeat=session.repeat,
        agree=lambda first, other: np.allclose(first, other, rtol=1e-12, atol=0.0),
    )
    yield series.figure(by_hand, ROWS)
    yield series.figure("one tuple after the other", ROWS, compared_with=by_hand)
    yield series.figure(single, ROWS, compared_with=by_hand)
    yield series.figure("SparseRows", ROWS, compared_with=by_hand, target=Target("ratio", at_least=0.5))
    yield series.figure("SparseRows", ROWS, compared_with=single, target=Target("ratio", at_least=_TIMES_SINGLE_ROWS))


def _hashed(count: int, generator: np.random.Generator) -> SparseRows:
    fields = {"user": 1000, "page": 50, "hour": 24}
    drawn = {name: generator.integers(0, most, count).tolist() for name, most in fields.items()}
    drawn["price"] = generator.normal(size=count).tolist()
    crosses = [("user", "page"), ("page", "hour")]
    hasher = FeatureHasher([*fields], numeric=["price"], crosses=crosses, bits=_BITS)
    return hasher.rows([dict(zip(drawn, values, strict=True)) for values in zip(*drawn.values(), strict=True)])


def _by_hand(rows: SparseRows, weights: Floats) -> Floats:
    products = rows.values * weights[rows.indices]
    scores = np.bincount(rows.row_of_value, weights=products, minlength=len(rows)) + _INTERCEPT
    probabilities: Floats = 1.0 / (1.0 + np.exp(-scores))
    return probabilities


def _measured(count: int, work: Callable[[], Floats], *, times: int = 1) -> Trial:
    with Stopwatch() as watch:
        for _ in range(times):
            answers = work()
    return Trial(watch.rates(count * times, "rows"), answers)
