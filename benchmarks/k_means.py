"""k-means on bounded data, beside loops in numpy and scikit-learn with the same rounds and the same start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate
from benchmarks.session import Session
from streamiter import Flow
from streamiter.learn import k_means as k_means_of
from streamiter.learn.centroids import as_columns, moved, scoring_of, sums_by_cluster

__all__ = ["k_means"]

CLUSTERS = 10
COORDINATES = 10
ROUNDS = 20
CHUNK = 4096
BLOCK = 8192
UNIT = "rounds/s"
BY_HAND = "chunked numpy, argmax and one-hot"
SAME = "chunked numpy, arithmetic of streamiter"
SCIKIT_LEARN = "scikit-learn, Lloyd"
AT_LEAST = 0.77
"""At most 1.3 times as long."""

Floats = npt.NDArray[np.float64]
Work = Callable[[Floats, Floats], Floats]
"""Gives the centroids, of the points and the initial ones."""


def k_means(session: Session) -> Iterator[Figure]:
    """K = 10 on 500,000 × 10 float64, 20 rounds, from the array in memory to the centroids.

    All in one thread: streamiter does its arithmetic in that of its event loop, and where threadpoolctl is there the
    BLAS of numpy and scikit-learn's own threads are limited to one for everybody.
    """
    points = np.random.default_rng(seed=1).normal(size=(session.size(500_000, 20_000), COORDINATES))
    works: dict[str, Work] = {
        SAME: _same_arithmetic,
        BY_HAND: _by_hand,
        "streamiter": lambda *given: _flow(*given, subtasks=1),
        "streamiter, 2 subtasks": lambda *given: _flow(*given, subtasks=2),
    }
    if (scikit_learn := _scikit_learn()) is not None:
        works[SCIKIT_LEARN] = scikit_learn
    with _one_thread():
        series = alternate(
            {name: _measured(points, work) for name, work in works.items()},
            repeat=session.repeat,
            agree=lambda first, other: bool(np.allclose(first, other, rtol=0, atol=1e-9)),
        )
    for name in works:
        if not name.startswith("streamiter"):
            yield series.figure(name, UNIT)
    for beside in (SAME, BY_HAND, SCIKIT_LEARN):
        if beside in works:
            yield series.figure("streamiter", UNIT, beside=beside, target=Target("ratio", at_least=AT_LEAST))
    yield series.figure("streamiter, 2 subtasks", UNIT, beside="streamiter", note="they share the thread")


def _measured(points: Floats, work: Work) -> Contender:
    def run() -> Trial:
        with Stopwatch() as watch:
            centroids = work(points, points[:CLUSTERS])
        return Trial(watch.rates(ROUNDS, "rounds"), centroids)

    return run


def _flow(points: Floats, initial: Floats, *, subtasks: int) -> Floats:
    flow = Flow("k-means")
    stream = flow.from_items(points, parallelism=subtasks)
    models = k_means_of(stream, clusters=CLUSTERS, rounds=ROUNDS, initial=initial).collect()
    flow.run()
    [model] = models.items
    centroids: Floats = model.parameters["centroids"]
    return centroids


def _same_arithmetic(points: Floats, initial: Floats) -> Floats:
    """What is left of streamiter without the flow."""
    blocks = [as_columns(points[start : start + BLOCK]) for start in range(0, len(points), BLOCK)]
    centroids = initial
    for _ in range(ROUNDS):
        scoring = scoring_of(centroids)
        sums = sums_by_cluster(scoring, blocks[0])
        for block in blocks[1:]:
            sums += sums_by_cluster(scoring, block)
        centroids = moved(centroids, sums)
    return centroids


def _by_hand(points: Floats, initial: Floats) -> Floats:
    """What one would write without much ado."""
    centroids = initial
    for _ in range(ROUNDS):
        sums, counts = np.zeros_like(centroids), np.zeros(CLUSTERS)
        half_squares = 0.5 * (centroids**2).sum(axis=1)
        for start in range(0, len(points), CHUNK):
            chunk = points[start : start + CHUNK]
            labels = (chunk @ centroids.T - half_squares).argmax(axis=1)
            one_hot = np.zeros((len(chunk), CLUSTERS))
            one_hot[np.arange(len(chunk)), labels] = 1.0
            sums += one_hot.T @ chunk
            counts += one_hot.sum(axis=0)
        centroids = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1.0)[:, None], centroids)
    return centroids


def _scikit_learn() -> Work | None:
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        _say("scikit-learn is not installed, so it is left out: pip install --group bench")
        return None

    def fit(points: Floats, initial: Floats) -> Floats:
        model = KMeans(CLUSTERS, init=initial, n_init=1, max_iter=ROUNDS, tol=0, algorithm="lloyd")
        model.fit(points)
        assert model.n_iter_ == ROUNDS, "it has converged before: fewer rounds, another result"
        centroids: Floats = model.cluster_centers_
        return centroids

    return fit


def _one_thread() -> contextlib.AbstractContextManager[Any]:
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        _say("threadpoolctl is not installed, so BLAS takes all cores, of all contenders alike")
        return contextlib.nullcontext()
    limits: contextlib.AbstractContextManager[Any] = threadpool_limits(1)
    return limits


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
