"""k-means offline gives the textbook's result, independently of timing and partitions, and refuses invalid input."""

import asyncio
import itertools
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from iteration.iteration_support import SMALL, Dawdle, cut_items, run

from streamiter import Columns, Flow, IterationConfig, Stream
from streamiter.errors import JobFailed, ModelError
from streamiter.learn import KMeans, k_means
from streamiter.learn.clusters.centroids import (
    as_columns,
    choose_centroids,
    moved,
    nearest,
    sample_of,
    scoring_of,
    sums_by_cluster,
)
from streamiter.learn.clusters.clustering import KMeansOptions, cluster
from streamiter.models import last_update
from streamiter.topics import MemoryBroker, OutgoingBatch, Topic

TWO_CLUSTERS = np.array([(0, 0), (0, 0.3), (0.3, 0), (9, 0), (9, 0.6), (9.6, 0)])
"""Points whose centroids are known."""
CENTROIDS = [(0.1, 0.1), (9.2, 0.2)]

Points = Callable[[Flow], Stream]


def fitted(points: Any, *, parallelism: int = 1, **options: Any) -> Any:
    flow = Flow("k-means", parallelism)
    stream = points(flow) if callable(points) else flow.from_items(points)
    models = k_means(stream, **options).collect()
    flow.run()
    [model] = models.items
    return model


def blobs(count: int = 600, clusters: int = 5, coordinates: int = 3, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    middles = 10 * generator.normal(size=(clusters, coordinates))
    return middles[np.arange(count) % clusters] + generator.normal(size=(count, coordinates))


def nearest_by_differences(centroids: Any, points: Any) -> Any:
    """Compute the nearest centroids without rearranging the formula."""
    return np.array([np.argmin([np.sum((point - c) ** 2) for c in centroids]) for point in points])


def lloyd(points: Any, centroids: Any, rounds: int) -> tuple[Any, Any]:
    """Return the centroids of the textbook's algorithm."""
    counts = np.zeros(len(centroids), dtype=int)
    for _ in range(rounds):
        labels = nearest_by_differences(centroids, points)
        counts = np.bincount(labels, minlength=len(centroids))
        centroids = np.array([points[labels == k].mean(axis=0) if counts[k] else c for k, c in enumerate(centroids)])
    return centroids, counts


# -- results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallelism", [1, 7])
@pytest.mark.parametrize("initial", [None, TWO_CLUSTERS[[2, 5]]])
def test_the_known_case(parallelism: int, initial: Any) -> None:
    """Another implementation gives the same result, and a run with more subtasks than points must also give it."""
    model = fitted(TWO_CLUSTERS, parallelism=parallelism, clusters=2, rounds=2, initial=initial)
    order = np.argsort(model.parameters["centroids"][:, 0])
    assert model.parameters["centroids"][order] == pytest.approx(np.array(CENTROIDS), abs=1e-12)
    assert model.parameters["counts"].tolist() == [3, 3]
    assert model.records == 6


@pytest.mark.parametrize(("rounds", "parallelism"), [(1, 2), (2, 1), (5, 3)])
def test_rounds_are_those_of_the_textbook(rounds: int, parallelism: int) -> None:
    """The final clusters do not show a wrong number of rounds, or counts of another round's points."""
    points = blobs(200)
    expected, counts = lloyd(points, points[:5], rounds)
    model = fitted(points, parallelism=parallelism, clusters=5, rounds=rounds, initial=points[:5])
    assert model.parameters["centroids"] == pytest.approx(expected, rel=1e-12)
    assert model.parameters["counts"].tolist() == counts.tolist()


def test_many_more_points_than_are_handled_at_once() -> None:
    """The points fill blocks of thousands and smaller chunks, and leave a rest in both; no point may be lost."""
    points = blobs(40_001, clusters=3, coordinates=2)
    labels = nearest(scoring_of(points[:3]), as_columns(points))
    expected = np.array([points[labels == k].mean(axis=0) for k in range(3)])
    model = fitted(points, parallelism=2, clusters=3, rounds=1, initial=points[:3])
    assert model.parameters["centroids"] == pytest.approx(expected, rel=1e-10)
    assert model.records == 40_001


def test_a_centroid_without_points_stays_where_it_is() -> None:
    """A mean of no points is NaN, and NaN has no nearest points."""
    initial = [(0.0, 0.0), (9.0, 0.0), (500.0, 500.0)]
    model = fitted(TWO_CLUSTERS, clusters=3, rounds=3, initial=initial)
    assert model.parameters["centroids"] == pytest.approx(np.array([*CENTROIDS, (500.0, 500.0)]))
    assert model.parameters["counts"].tolist() == [3, 3, 0]


def test_with_a_tolerance_it_ends_when_nothing_moves_further() -> None:
    points = blobs()
    all_rounds = KMeans(clusters=5, rounds=50, initial=points[:5], tolerance=None).fit(points)
    until_still = KMeans(clusters=5, rounds=50, initial=points[:5], tolerance=0.0).fit(points)
    roughly = KMeans(clusters=5, rounds=50, initial=points[:5], tolerance=1.0).fit(points)
    assert all_rounds.rounds_made == 50
    assert roughly.rounds_made < until_still.rounds_made < 50
    assert until_still.centroids.tolist() == all_rounds.centroids.tolist()


def test_points_may_come_as_lists_or_rows_or_arrays() -> None:
    expected = fitted(TWO_CLUSTERS, clusters=2, rounds=2, initial=TWO_CLUSTERS[2:4])
    for points in (TWO_CLUSTERS.tolist(), list(TWO_CLUSTERS), [tuple(row) for row in TWO_CLUSTERS]):
        model = fitted(points, clusters=2, rounds=2, initial=TWO_CLUSTERS[2:4])
        assert model.parameters["centroids"].tolist() == expected.parameters["centroids"].tolist()


def separated(clusters: int, coordinates: int, seed: int) -> tuple[Any, Any]:
    """Return centres at least ten deviations apart, and points around them."""
    generator = np.random.default_rng(seed)
    middles = np.empty((0, coordinates))
    while len(middles) < clusters:
        middle = generator.uniform(-40, 40, size=coordinates)
        if not len(middles) or np.sqrt(np.square(middles - middle).sum(axis=1)).min() > 10:
            middles = np.vstack([middles, middle])
    return middles, np.vstack([middle + generator.normal(size=(100, coordinates)) for middle in middles])


@pytest.mark.parametrize(("clusters", "coordinates"), [(5, 3), (12, 2), (20, 4)])
def test_well_separated_clusters_are_all_found_whatever_the_seed(clusters: int, coordinates: int) -> None:
    """With three of six seeds, and with the default seed, two centroids were in one cluster, without a warning."""
    middles, points = separated(clusters, coordinates, seed=clusters)
    own = np.repeat(middles, 100, axis=0)
    at_most = np.square(points - own).sum()
    for seed in range(10):
        model = KMeans(clusters=clusters, seed=seed).fit(points)
        assert sorted(nearest_by_differences(middles, model.centroids)) == list(range(clusters)), seed
        assert model.counts.tolist() == [100] * clusters
        assert model.inertia < at_most


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("initial", [None, slice(0, 5)])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_the_inertia_is_the_sum_of_the_squared_distances(
    parallelism: int, initial: slice | None, offset: float
) -> None:
    """A user compares two results by their inertia."""
    points = blobs(6_000) + offset
    first = None if initial is None else points[initial]
    model = KMeans(clusters=5, initial=first).fit(points, parallelism=parallelism)
    expected = np.square(points - model.centroids[model.predict(points)]).sum()
    assert model.inertia == pytest.approx(expected, rel=1e-9)
    published = fitted(points, parallelism=parallelism, clusters=5, rounds=model.rounds_made, initial=first)
    assert published.metrics["inertia"] == model.inertia


def test_the_inertia_never_grows_from_round_to_round_and_is_never_below_0() -> None:
    flow = Flow("k-means")
    points = flow.from_items(blobs(2_000))
    clustering = cluster(points, KMeansOptions(clusters=5, rounds=10, initial=blobs()[:5]))
    models = clustering.models.collect()
    flow.run()
    inertias = [model.metrics["inertia"] for model in models.items]
    assert len(inertias) == 10
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(inertias))
    on_their_centroids = np.repeat(np.random.default_rng(0).normal(size=(3, 4)) + 1e3, 7, axis=0)
    assert 0.0 <= KMeans(clusters=3).fit(on_their_centroids).inertia < 1e-6


def test_its_parameters_are_its_own() -> None:
    """A change of the returned parameters must not move the clusters."""
    model = KMeans(clusters=2, initial=TWO_CLUSTERS[[0, 3]]).fit(TWO_CLUSTERS)
    parameters = model.parameters()
    assert parameters["counts"].tolist() == [3, 3]
    parameters["centroids"] += 100.0
    assert model.centroids == pytest.approx(np.array(CENTROIDS))
    with pytest.raises(ModelError, match="expected a fitted model"):
        KMeans(clusters=2).parameters()


# -- schedule, order and restore -----------------------------------------------------------------------------


def test_the_result_does_not_depend_on_the_schedule_or_on_where_batches_are_cut() -> None:
    """Sums of floats depend on their order; the points of each subtask are added in order, so all bits are equal."""
    points = blobs(150)
    results = set()
    for seed in range(6):
        flow = Flow("k-means")
        stream = cut_items(flow, list(points), seed=seed, parallelism=3)
        stream = stream.process(lambda seed=seed: Dawdle(seed))
        models = k_means(stream, clusters=5, rounds=4).collect()
        run(flow, seed=seed, limits=SMALL)
        [model] = models.items
        results.add(model.parameters["centroids"].tobytes())
    assert len(results) == 1


def test_the_first_centroids_depend_neither_on_the_order_of_points_nor_on_the_parallelism() -> None:
    """A run with one partition more would otherwise find other clusters, for no visible reason."""
    points = blobs(5_000)
    shuffled = np.random.default_rng(1).permutation(points)
    models = [
        fitted(given, parallelism=parallelism, clusters=5, rounds=3, seed=7)
        for parallelism, given in [(1, points), (1, shuffled), (2, points), (5, shuffled)]
    ]
    for model in models[1:]:
        assert model.parameters["centroids"] == pytest.approx(models[0].parameters["centroids"], rel=1e-9)
    other = fitted(points, clusters=5, rounds=3, seed=8)
    assert not np.allclose(other.parameters["centroids"], models[0].parameters["centroids"])


def test_points_beyond_the_memory_limit_are_kept_on_disk_and_give_the_same() -> None:
    points = blobs(60_000)
    options: dict[str, Any] = {"clusters": 5, "rounds": 3, "initial": points[:5]}
    in_memory = fitted(points, **options)
    flow = Flow("k-means")
    config = IterationConfig(replay_memory_bytes=100_000)
    models = k_means(flow.from_items(points), **options, config=config).collect()
    [loop] = flow.run().loops
    assert loop.replayed_bytes_in_memory <= 100_000
    [model] = models.items
    assert model.parameters["centroids"].tolist() == in_memory.parameters["centroids"].tolist()


# -- the arithmetic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "offset"), [(1.0, 0.0), (1.0, 1e8), (1e-6, 1.0), (1e100, 0.0), (1e-100, 0.0), (1.0, -3e5)]
)
@pytest.mark.parametrize("clusters", [1, 2, 10])
def test_the_nearest_centroid_equals_the_one_by_plain_differences(scale: float, offset: float, clusters: int) -> None:
    """Far from zero, c·x − |c|²/2 is the difference of two large numbers and loses its digits."""
    points = scale * blobs(500, clusters=10) + offset
    centroids = scale * blobs(clusters, clusters=10, seed=1) + offset
    columns, scoring = as_columns(points), scoring_of(centroids)
    labels = nearest_by_differences(centroids, points)
    assert nearest(scoring, columns).tolist() == labels.tolist()
    sums = sums_by_cluster(scoring, columns)
    assert sums[:, -1].tolist() == np.bincount(labels, minlength=clusters).tolist()
    means = [points[labels == k].mean(axis=0) if (labels == k).any() else c for k, c in enumerate(centroids)]
    assert moved(centroids, sums) == pytest.approx(np.array(means), rel=1e-12)


def test_a_point_between_two_centroids_belongs_to_the_first() -> None:
    """A point that counted for both centroids would be two points."""
    centroids = np.array([[0.0], [2.0], [2.0], [4.0]])
    columns = as_columns([[1.0], [3.0], [2.0], [5.0]])
    assert nearest(scoring_of(centroids), columns).tolist() == [0, 1, 1, 3]
    assert sums_by_cluster(scoring_of(centroids), columns).tolist() == [[1, 1], [5, 2], [0, 0], [5, 1]]


def test_samples_of_parts_make_the_sample_of_the_whole() -> None:
    """Copies of one point may be in several parts and must still count as one point."""
    points = np.random.default_rng(0).integers(0, 12, size=(3_000, 2)).astype(float)
    points[::2] *= -1.0  # The points contain zeros of both signs, which are equal.
    whole = sample_of(points, 40, seed=3)
    for parts in (2, 7):
        samples = [sample_of(points[part::parts], 40, seed=3) for part in range(parts)]
        assert sample_of(np.concatenate(samples), 40, seed=3).tolist() == whole.tolist()
    assert len(np.unique(whole, axis=0)) == 40


def test_first_centroids_are_distinct_points_even_where_differences_vanish() -> None:
    """The squares of tiny distances are 0, so every weight for drawing the next centroid is 0."""
    points = np.arange(5.0)[:, np.newaxis] * 1e-200
    chosen = choose_centroids(points, 5, seed=0)
    assert sorted(chosen.ravel().tolist()) == points.ravel().tolist()


# -- as an estimator, and with topics ------------------------------------------------------------------------


def test_it_predicts_the_nearest_centroid() -> None:
    points = blobs()
    model = KMeans(clusters=5, rounds=10).fit(points, parallelism=2)
    assert model.predict(points).tolist() == nearest_by_differences(model.centroids, points).tolist()
    assert model.counts.sum() == len(points)
    assert model.predict(np.zeros((0, 3))).tolist() == []


def test_a_second_fit_starts_again_and_one_that_fails_changes_nothing() -> None:
    model = KMeans(clusters=2, rounds=5, tolerance=None)
    with pytest.raises(ModelError, match="expected a fitted model"):
        model.predict([[1.0, 1.0]])
    before = model.fit(blobs()).centroids
    with pytest.raises(JobFailed, match="at least 2 distinct points"):
        model.fit(np.ones((10, 3)))
    assert model.centroids.tolist() == before.tolist()
    after = model.fit(TWO_CLUSTERS).centroids
    assert np.sort(after, axis=0) == pytest.approx(np.array(CENTROIDS))
    assert model.rounds_made == 5


def topic_of(points: Any) -> Topic:
    """Return a topic of records with a field ``at``."""

    async def written() -> Topic:
        topic = MemoryBroker().topic("points")
        await topic.create()
        writer = await topic.open_writer()
        await writer.write(OutgoingBatch([orjson.dumps({"at": row.tolist()}) for row in points]))
        await writer.close()
        return topic

    return asyncio.run(written())


def test_it_learns_from_a_topic_and_the_model_can_be_published() -> None:
    points, updates = topic_of(TWO_CLUSTERS), MemoryBroker().topic("updates")
    asyncio.run(updates.create())
    model = KMeans(clusters=2, rounds=3).fit(points, extract=lambda batch: [row["at"] for row in batch])
    assert np.sort(model.centroids, axis=0) == pytest.approx(np.array(CENTROIDS))

    flow = Flow("publish")
    read = flow.source(points, stop="latest").map(lambda row: row["at"])
    k_means(read, clusters=2, rounds=3).publish_model(updates, model="places")
    flow.run()
    update = asyncio.run(last_update(updates, "places"))
    assert update is not None
    assert update.parameters["centroids"].tolist() == model.centroids.tolist()
    assert (update.records, update.metrics) == (6, {"move": 0.0, "inertia": pytest.approx(0.6)})


def test_an_interrupted_fit_keeps_the_learned_model() -> None:
    """An hour of rounds was lost when a user stopped the training before the next round."""
    interrupted: list[int] = []

    def interrupt(rows: Any) -> Any:
        interrupted.append(len(rows))
        signal.raise_signal(signal.SIGINT)
        return [row["at"] for row in rows]

    points = topic_of(TWO_CLUSTERS)
    model = KMeans(clusters=2, rounds=1_000_000, tolerance=None).fit(points, extract=interrupt)
    assert interrupted == [6]
    assert model.rounds_made < 1_000_000
    assert model.predict(TWO_CLUSTERS).tolist() in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


def test_two_of_them_in_one_flow_with_names() -> None:
    flow = Flow("twice")
    points = flow.from_items(TWO_CLUSTERS)
    first = k_means(points, clusters=2, rounds=2, name="first").collect()
    second = k_means(points, clusters=1, rounds=2).collect()
    third = k_means(points, clusters=1, rounds=2).collect()
    flow.run()
    assert [len(models.items) for models in (first, second, third)] == [1, 1, 1]
    assert second.items[0].parameters["centroids"] == pytest.approx(TWO_CLUSTERS.mean(axis=0)[np.newaxis])
    assert "first: assign" in {step.name for step in flow.steps}


# -- refused input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initial", [None, [[0.0, 0.0], [1.0, 1.0]]])
@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[0.0, np.nan], [1.0, 1.0]], "given nan .row 0 of the batch."),
        ([[0.0, 1.0], [1.0, -np.inf]], "given -inf .row 1 of the batch."),
        ([[0.0, 1.0], [1e200, 0.0]], "at most 1e.150, given 1e.200"),
        ([[0.0, 1.0], [1.0]], "expected points as numbers"),
        ([["a", "b"]], "expected points as numbers"),
        ([1.0, 2.0], "expected points as arrays of (2 )?numbers, given .1.0, 2.0."),
        (Columns({"x": [1.0, 2.0]}), "expected points as arrays of numbers, given Columns.*np.column_stack"),
    ],
)
def test_invalid_points_end_the_job_and_are_named(points: Any, message: str, initial: Any) -> None:
    with pytest.raises(JobFailed, match=message):
        fitted(points, clusters=2, rounds=2, initial=initial)


def test_points_of_two_lengths_end_the_job() -> None:
    """The points of each block have one length, so only a comparison of blocks finds the second length."""

    def both(flow: Flow) -> Stream:
        return flow.from_items(np.ones((3, 2))).union(flow.from_items(np.ones((3, 4))))

    def apart(flow: Flow) -> Stream:
        return both(flow).partition_by(lambda point: len(point) // 2).map_batch(np.array, parallelism=2)

    with pytest.raises(JobFailed, match="expected points as numbers"):
        fitted(both, clusters=1, rounds=1)
    with pytest.raises(JobFailed, match=r"points of (2|4) and of (2|4) coordinates"):
        fitted(apart, clusters=1, rounds=1)
    with pytest.raises(JobFailed, match="arrays of 2 numbers"):
        fitted(apart, clusters=1, rounds=1, initial=[[0.0, 0.0]])


@pytest.mark.parametrize("parallelism", [1, 2])
def test_without_points_the_choice_of_centroids_fails_clearly(
    parallelism: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The error showed a record that was never written, after a warning about another mistake."""
    with pytest.raises(JobFailed, match="expected points to choose centroids among, given none") as caught:
        fitted([], parallelism=parallelism, clusters=2, rounds=2)
    assert "record" not in str(caught.value)
    assert caplog.records == []


def test_without_points_there_are_only_the_initial_centroids() -> None:
    model = fitted([], clusters=2, rounds=2, initial=TWO_CLUSTERS[:2])
    assert model.parameters["centroids"].tolist() == TWO_CLUSTERS[:2].tolist()
    assert (model.records, model.metrics) == (0, {})
