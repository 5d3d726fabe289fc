"""Compute k-means on bounded data, compared with numpy and scikit-learn with the same rounds and initial centroids."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Flow
from streamiter.learn import k_means as k_means_of
from streamiter.learn.clusters.centroids import as_columns, moved, scoring_of, sums_by_cluster

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
"""streamiter may take 1.3 times as long."""

Floats = npt.NDArray[np.float64]
Work = Callable[[Floats, Floats], Floats]
"""A function from the points and the initial centroids to the final centroids."""


def k_means(session: Session) -> Iterator[Figure]:
    """Ten clusters of 500,000 × 10 float64 in 20 rounds, from the array in memory to the centroids.

    All contenders use one thread: streamiter computes in the thread of its event loop, and threadpoolctl, if it is
    installed, limits the threads of BLAS and of scikit-learn to one.
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
    for other in (SAME, BY_HAND, SCIKIT_LEARN):
        if other in works:
            yield series.figure("streamiter", UNIT, compared_with=other, target=Target("ratio", at_least=AT_LEAST))
    yield series.figure("streamiter, 2 subtasks", UNIT, compared_with="streamiter", note="they share the thread")


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
    run_to_end(flow)
    [model] = models.items
    centroids: Floats = model.parameters["centroids"]
    return centroids


def _same_arithmetic(points: Floats, initial: Floats) -> Floats:
    """Compute the centroids with streamiter's arithmetic, without a flow."""
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
    """Compute the centroids in simple numpy."""
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
        _say("scikit-learn is not installed, so this run has no line of it; to add the line: pip install --group bench")
        return None

    def fit(points: Floats, initial: Floats) -> Floats:
        model = KMeans(CLUSTERS, init=initial, n_init=1, max_iter=ROUNDS, tol=0, algorithm="lloyd")
        model.fit(points)
        assert model.n_iter_ == ROUNDS, f"expected {ROUNDS} rounds, but scikit-learn converged after {model.n_iter_}"
        centroids: Floats = model.cluster_centers_
        return centroids

    return fit


def _one_thread() -> contextlib.AbstractContextManager[Any]:
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        _say("threadpoolctl is not installed, so BLAS uses all cores for all contenders")
        return contextlib.nullcontext()
    limits: contextlib.AbstractContextManager[Any] = threadpool_limits(1)
    return limits


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
