"""k-means on a parameter server equals Lloyd's rounds under BSP, and is about as good under SSP and ASP."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from files.files_support import data_file
from iteration.iteration_support import cut_items, run
from learn.parameter_server_support import ALL, WORKERS

from streamiter import Flow, topic
from streamiter.errors import JobFailed
from streamiter.learn import KMeans, OnlineKMeans, SparseRows, k_means_on_parameter_server
from streamiter.parameter_server import ASP, BSP, ParameterServer

POINTS = np.random.default_rng(5).normal(size=(203, 3)) + np.repeat([[0, 0, 0], [4, 0, 0], [0, 5, 1]], 68, axis=0)[:203]
INITIAL = POINTS[[0, 70, 150]]


def clustered(points: Any, consistency: Any, *, shards: int = 2, seed: int | None = None, **options: Any) -> Any:
    """Return versions and losses; with a ``seed``, the job runs under a random schedule."""
    flow = Flow("k-means")
    given = flow.from_items(points) if seed is None else cut_items(flow, points, seed=seed)
    settings = {"initial": INITIAL, "workers": WORKERS} | options
    clustering = k_means_on_parameter_server(given, ParameterServer(shards=shards), consistency=consistency, **settings)
    models, losses = clustering.models.collect(), clustering.losses.collect()
    run(flow, seed=seed or 0, processes=1)
    return models.items, losses.items


@pytest.mark.parametrize("shards", [1, 3])
def test_in_step_with_all_points_it_is_lloyds_rounds(shards: int) -> None:
    """Each shard has other clusters; with the count of another cluster, a cluster would move to a wrong place."""
    lloyd = KMeans(clusters=3, rounds=6, initial=INITIAL, tolerance=None).fit(POINTS)
    [model], losses = clustered(POINTS, BSP(), shards=shards, epochs=6)
    assert model.parameters["centroids"] == pytest.approx(lloyd.centroids, rel=1e-12, abs=1e-12)
    assert model.parameters["weights"].tolist() == lloyd.counts.tolist()
    assert model.records == 6 * len(POINTS)
    means = [np.mean([each["loss"] for each in losses if each["clock"] == clock]) for clock in range(1, 7)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(means))


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_mini_batches_move_centroids_as_online_k_means_does(decay: float) -> None:
    """The weights of older points were forgotten, or were counted again with every mini-batch."""
    online = OnlineKMeans(3, decay=decay, initial=INITIAL)
    for start in range(0, len(POINTS), 20):
        online.learn(POINTS[start : start + 20])
    [model], _ = clustered(POINTS, BSP(), workers=1, batch=20, decay=decay, epochs=1)
    expected = online.parameters()
    assert model.parameters["centroids"] == pytest.approx(expected["centroids"], rel=1e-12, abs=1e-12)
    assert model.parameters["weights"] == pytest.approx(expected["weights"], rel=1e-12)


@pytest.mark.parametrize("how", ALL)
def test_a_centroid_without_points_stays_where_it_is(how: str) -> None:
    """0/0 made the centroid NaN, and no point was ever nearest to NaN."""
    far_off = np.array([[0.0, 0.0, 0.0], [500.0, 0.0, 0.0]])
    [model], _ = clustered(POINTS, ALL[how], initial=far_off, epochs=3)
    assert model.parameters["centroids"][1].tolist() == [500.0, 0.0, 0.0]
    assert model.parameters["weights"][1] == 0.0
    assert np.isfinite(model.parameters["centroids"]).all()


@pytest.fixture(scope="module")
def a9a() -> tuple[Any, Any, float]:
    """Return the rows, the first centroids, and the inertia after ten rounds of Lloyd's algorithm."""
    flow = Flow("read")
    records = flow.source(topic(f"file:{data_file('a9a/a9a_123d_train.libsvm')}")).collect()
    flow.run()
    pairs = ((record["indices"], record["values"]) for record in records.items)
    rows = SparseRows.from_rows(pairs, width=123).to_dense()[::3]
    initial = rows[np.random.default_rng(1).choice(len(rows), 8, replace=False)]
    lloyd = KMeans(clusters=8, rounds=10, initial=initial, tolerance=None).fit(rows)
    return rows, initial, lloyd.inertia


@pytest.mark.parametrize("how", ALL)
def test_on_a9a_it_comes_as_close_to_the_rows_as_lloyds_rounds(how: str, a9a: tuple[Any, Any, float]) -> None:
    """The sum of squared distances must be within two percent of Lloyd's, after three passes instead of ten."""
    rows, initial, inertia = a9a
    flow = Flow("a9a")
    clustering = k_means_on_parameter_server(
        flow.from_items(rows),
        ParameterServer(shards=2),
        initial=initial,
        consistency=ALL[how],
        workers=WORKERS,
        batch=300,
        decay=0.9,
        epochs=3,
    )
    models = clustering.models.collect()
    flow.run()
    centroids = models.items[-1].parameters["centroids"]
    products = np.square(rows).sum(axis=1)[:, None] - 2 * rows @ centroids.T + np.square(centroids).sum(axis=1)
    assert float(products.min(axis=1).sum()) <= 1.02 * inertia


# -- refused input ---------------------------------------------------------------------------------------------


def test_rows_that_are_no_points_are_left_out() -> None:
    """One row that was too short ended the job for all other rows."""
    points = [*POINTS.tolist()[:10], [1.0, np.nan, 0.0], [1.0], *POINTS.tolist()[10:]]
    [model], _ = clustered(points, BSP(), epochs=1, on_error="skip")
    assert model.records == len(POINTS)


def test_without_points_the_job_fails_with_a_clear_error() -> None:
    """The initial centroids were published as if they had been learned."""
    with pytest.raises(JobFailed, match="k_means_on_parameter_server: expected examples to learn from, given none"):
        clustered([], ASP())


def test_points_of_another_length_fail_the_job_and_name_it() -> None:
    """The error was numpy's and said only that shapes could not be broadcast."""
    with pytest.raises(JobFailed, match="expected points as arrays of 3 numbers, given some of 2"):
        clustered(POINTS[:, :2], BSP())
