"""Streams for tests of the adaptive linear model: the published test vectors, and random rows of extreme numbers."""

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np

from streamiter.learn import AdaptiveLinearModel, SparseRows

ROWS = 20
_I = np.arange(ROWS)

DENSE = np.column_stack([50.0 + 10.0 * np.sin(_I + 1.0), (7 * _I % 11) / 10, (_I % 3 == 0).astype(float)])
SPARSE = SparseRows.from_rows([([i % 5, 5 + 3 * i % 7], [1.0, 1 + (i % 4) / 4]) for i in range(ROWS)], 12)

LABELS: dict[str, list[Any]] = {
    "binary dense": (DENSE[:, 0] - 50 + 5 * DENSE[:, 1] > 2).tolist(),
    "regression dense": (2 * DENSE[:, 0] - 3 * DENSE[:, 1] + DENSE[:, 2]).tolist(),
    "softmax dense": (_I % 3).tolist(),
    "binary sparse": (_I % 5 % 2).tolist(),
    "regression sparse": ((_I % 5) + 0.5 * (3 * _I % 7)).tolist(),
}


linear_learner = partial(AdaptiveLinearModel, shapes=False)
"""Makes the linear model alone, which has other bits than the default, and a published form without float32."""


def new_model(name: str, **options: Any) -> AdaptiveLinearModel:
    """Return a new linear model for one of the streams of test vectors."""
    options = {"shapes": False} | options
    if name.startswith("softmax"):
        return AdaptiveLinearModel(classes=[0, 1, 2], **options)
    return AdaptiveLinearModel(task="regression" if name.startswith("regression") else None, **options)


def features(name: str) -> Any:
    """Return the features of one of the streams of test vectors."""
    return DENSE if name.endswith("dense") else SPARSE


def vector_predictions() -> dict[str, list[Any]]:
    """Return the predictions of all streams of test vectors, each row before it is learned from."""
    return {name: new_model(name).learn_each(features(name), labels).tolist() for name, labels in LABELS.items()}


# The smallest and largest numbers, numbers that are nearly equal, and numbers that are no numbers.
_EXTREMES = [0.0, -0.0, 1.0, -1.0, 1 / 3, 5e-324, -1e-170, 1e-162, 1e-12, 1.7e9, 1.7e9 + 1e-7, 1e16, 1e100, -1e100]
_MISSING = [math.nan, math.inf, -math.inf, 1.01e100, -1.7e308]
_WEIGHTS = [1.0, 0.1, 3.0, 0.0, 5e-324, 1e-30, 99.5, 20_000.0, 1e30]


def extreme_rows(random: Random) -> tuple[str, list[list[float]], list[float], list[float]]:
    """Return a kind of task, a few rows of three extreme numbers, their labels and weights."""
    kind = random.choice(["binary", "softmax", "regression"])
    pick: Callable[[], float] = lambda: random.choice([*_EXTREMES, *_MISSING, random.gauss(0, 1)])  # noqa: E731
    count = random.randint(1, 12)
    rows = [[pick(), pick(), pick()] for _ in range(count)]
    labels = [
        float(random.choice(_EXTREMES)) if kind == "regression" else float(random.randrange(2)) for _ in range(count)
    ]
    return kind, rows, labels, [random.choice(_WEIGHTS) for _ in range(count)]


def check_extreme_rows(example: tuple[str, list[list[float]], list[float], list[float]], **options: Any) -> None:
    """Learn from extreme rows, dense or sparse; every prediction, weight and published number must be finite."""
    kind, rows, labels, weights = example
    for given in (np.array(rows), SparseRows.from_dense(rows, keep_zeros=True)):
        model = new_model(kind, **options)
        with np.errstate(all="ignore"):
            predictions = model.learn_each(given, labels, weights)
            parameters = model.parameters()
            later = model.predict(given)
        state: Any = model.state()["weights"]
        for numbers in (predictions, later, state["columns"], state["mixture"], state["totals"]):
            assert np.isfinite(numbers).all()
        for name in ("weights", "intercept", "center", "limit"):
            assert np.isfinite(parameters[name]).all(), name


def hyperplane(count: int, seed: int = 1) -> tuple[Any, Any]:
    """Return ten columns and labels of which a tenth is wrong."""
    random = np.random.default_rng(seed)
    x = random.random((count, 10))
    weights = random.random(10)
    labels = x @ weights > weights.sum() / 2
    return x, labels ^ (random.random(count) < 0.05)
