"""Centroids follow a stream with the right numbers, start and restore, and skip records that are no points."""

from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import SMALL, cut_items, ended, run

from streamiter import Columns, Flow
from streamiter.errors import ConfigurationError, JobFailed, ModelError
from streamiter.learn import BadRows, KMeans, OnlineKMeans, online_k_means
from streamiter.models import LinearPredictor, ModelSnapshot, ServedModel, initial_model, last_update
from streamiter.topics import MemoryBroker

START = [(10.1, 0.1), (-10.2, 0.2)]
BATCH = [(10, 100), (10, 100.3), (10.3, 100), (-10, -100), (-10, -100.6), (-10.6, -100)]
"""Points whose centroids are known."""


def followed(points: Any, *, seed: int | None = None, **options: Any) -> list[ModelSnapshot]:
    flow = Flow("follow")
    stream = flow.from_items(points) if seed is None else cut_items(flow, points, seed=seed)
    models = online_k_means(stream, **{"mini_batch": 6, **options}).collect()
    if seed is None:
        flow.run()
    else:
        run(flow, seed=seed, limits=SMALL)
    return models.items


def centroids_of(models: list[ModelSnapshot]) -> list[Any]:
    return [model.parameters["centroids"].tolist() for model in models]


def drifting(count: int, seed: int = 0) -> Any:
    """Return points of two clusters that move with time."""
    generator = np.random.default_rng(seed)
    middles = np.array([[0.0, 0.0], [20.0, 0.0]])[np.arange(count) % 2]
    return middles + np.arange(count)[:, np.newaxis] * 0.01 + generator.normal(size=(count, 2))


def test_the_known_case() -> None:
    [model] = followed(BATCH, clusters=2, decay=0.5, initial=START, weights=[3, 3])
    expected = np.array([(10.1, 200.3 / 3), (-10.2, -200.2 / 3)])
    assert model.parameters["centroids"] == pytest.approx(expected, rel=1e-14)
    assert model.parameters["weights"].tolist() == [4.5, 4.5]
    assert model.records == 6


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_mini_batch_by_mini_batch_it_is_the_formula(decay: float) -> None:
    points = drifting(95)
    centroids, weights = np.array([[1.0, 1.0], [15.0, 0.0]]), np.array([2.0, 0.0])
    models = followed(points, clusters=2, decay=decay, initial=centroids, weights=weights, mini_batch=10)
    assert len(models) == 10
    for number, model in enumerate(models):
        batch = points[10 * number : 10 * number + 10]
        labels = np.array([np.argmin([np.sum((point - c) ** 2) for c in centroids]) for point in batch])
        distances = ((batch - centroids[labels]) ** 2).sum(axis=1)
        for k in range(2):
            weights[k] = weights[k] * decay + (labels == k).sum()
            if (labels == k).any():
                mean = batch[labels == k].mean(axis=0)
                centroids[k] += (mean - centroids[k]) * (labels == k).sum() / weights[k]
        assert model.parameters["centroids"] == pytest.approx(centroids, rel=1e-12)
        assert model.parameters["weights"] == pytest.approx(weights, rel=1e-12)
        assert model.metrics == {"distance": pytest.approx(distances.mean())}
    assert models[-1].records == 95


def test_without_decay_a_centroid_is_the_mean_of_all_its_points() -> None:
    points = np.random.default_rng(0).normal(size=(1_000, 3))
    model = followed(points, clusters=1, mini_batch=64, initial=[[5.0, 5.0, 5.0]])[-1]
    assert model.parameters["centroids"] == pytest.approx(points.mean(axis=0)[np.newaxis], rel=1e-10)


def test_a_centroid_without_points_stays_and_loses_weight() -> None:
    """A division by the weight 0 would give NaN, which cannot be published."""
    far = [[0.0], [1e6]]
    models = followed([[1.0]] * 30, clusters=2, decay=0.0, initial=far, weights=[1, 1], mini_batch=10)
    assert centroids_of(models) == [[[1.0], [1e6]]] * 3
    assert models[-1].parameters["weights"].tolist() == [10.0, 0.0]


def test_without_initial_centroids_it_begins_with_the_first_mini_batch() -> None:
    models = followed(drifting(400), clusters=2, decay=0.2, mini_batch=50)
    assert sorted(round(x / 20) for x, _ in centroids_of(models)[0]) == [0, 1]
    # The clusters have moved by 4 after all points.
    assert np.sort(models[-1].parameters["centroids"][:, 0]) == pytest.approx([4.0, 24.0], abs=1.0)


def test_neither_cuts_nor_the_schedule_change_the_result() -> None:
    points = drifting(100).tolist()
    expected = centroids_of(followed(points, clusters=2, mini_batch=7))
    for seed in range(5):
        assert centroids_of(followed(points, seed=seed, clusters=2, mini_batch=7)) == expected


@pytest.mark.parametrize("workers", [None, 3])
async def test_versions_are_published_and_the_next_run_starts_from_the_last(workers: int | None) -> None:
    updates = MemoryBroker().topic("updates")
    await updates.create()
    for generation, points in [(1, drifting(40)), (2, drifting(40, seed=1))]:
        flow = Flow("follow")
        first = None if workers is None else points[:2]
        initial = flow.from_source(initial_model(updates, model="places", default=first), parallelism=1)
        models = online_k_means(flow.from_items(points), clusters=2, mini_batch=10, initial=initial, workers=workers)
        models.publish_model(updates, model="places")
        before = await last_update(updates, "places")
        await ended(await flow.start())
        update = await last_update(updates, "places")
        assert update is not None
        assert (update.generation, update.version) == (generation, 4)
        assert update.parameters["weights"].sum() == 40 * generation
        assert (before is None) == (generation == 1)


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_any_number_of_workers_has_the_centroids_of_one_subtask(decay: float) -> None:
    """Each worker had centroids of its own, and the mean of their centroids was that of no cluster."""
    points: list[Any] = drifting(95).tolist()
    points[40:40] = ["x", [float("nan"), 1.0]]
    options = {"clusters": 2, "decay": decay, "initial": [[1.0, 1.0], [15.0, 0.0]], "weights": [2, 0], "mini_batch": 10}
    expected = followed(points, on_error="skip", **options)
    for workers in (1, 2, 4):
        models = followed(points, seed=workers, on_error="skip", workers=workers, **options)
        assert len(models) == len(expected) == 10
        for model, given in zip(models, expected, strict=True):
            assert model.parameters["centroids"] == pytest.approx(given.parameters["centroids"], rel=1e-12)
            assert model.parameters["weights"] == pytest.approx(given.parameters["weights"], rel=1e-12)
            assert (model.records, model.metrics) == (given.records, pytest.approx(given.metrics))


def test_the_order_of_workers_changes_no_bit() -> None:
    """The sums were added as they came, and two runs published different models."""
    points = drifting(200).tolist()
    options: dict[str, Any] = {"clusters": 2, "initial": [[1.0, 1.0], [15.0, 0.0]], "mini_batch": 20, "workers": 3}
    expected = centroids_of(followed(points, seed=0, **options))
    for seed in range(1, 5):
        assert centroids_of(followed(points, seed=seed, **options)) == expected


def test_one_pass_of_workers_comes_near_the_inertia_of_all_rounds() -> None:
    """Workers that lose sums would still cluster, and only the quality would tell."""
    generator = np.random.default_rng(0)
    middles = generator.normal(size=(8, 4)) * 6
    points = middles[generator.integers(0, 8, 8_000)] + generator.normal(size=(8_000, 4))

    def inertia(centroids: Any) -> float:
        distances = ((points[:, np.newaxis] - centroids) ** 2).sum(axis=2)
        return float(distances.min(axis=1).sum())

    initial = KMeans(clusters=8, seed=1).fit(points[:40]).centroids
    models = followed(points, clusters=8, mini_batch=200, workers=2, initial=initial)
    best = KMeans(clusters=8, seed=1).fit(points).inertia
    assert inertia(models[-1].parameters["centroids"]) < 1.01 * best < inertia(initial) / 1.1


def test_records_that_are_no_points_are_skipped_and_the_others_count() -> None:
    """One bad sensor must not end a service that many sensors use."""
    points: list[Any] = [[1.0], "x", [2.0], [float("nan")], [3.0], [4.0, 5.0], None, [6.0]]
    flow = Flow("follow")
    stream = flow.from_items(points)
    models = online_k_means(stream, clusters=1, initial=[[0.0]], mini_batch=4, on_error="skip", name="k").collect()
    statistics = flow.run()
    assert centroids_of(models.items) == [[[1.5]], [[3.0]]]
    assert statistics.step("k: centroids").rejected == 4
    with pytest.raises(JobFailed, match=r"k: centroids.*expected points"):
        followed(points, clusters=1, initial=[[0.0]], mini_batch=4, name="k")


def test_an_invalid_start_ends_the_job() -> None:
    for start, message in [
        ([{"weights": np.ones(2)}], "expected parameters with centroids, given weights"),
        ([np.ones((3, 2))], "expected 2 initial centroids, given 3"),
        ([np.ones((2, 2)), np.ones((2, 2))], "expected a stream of one record, given a second"),
    ]:
        flow = Flow("follow")
        online_k_means(flow.from_items(BATCH), clusters=2, initial=flow.from_items(start))
        with pytest.raises(JobFailed, match=message):
            flow.run()
    flow = Flow("follow")
    online_k_means(flow.from_items(BATCH), clusters=2, initial=flow.from_items([None]), workers=2)
    with pytest.raises(JobFailed, match="expected initial centroids, given None in the stream initial="):
        flow.run()
    flow = Flow("follow")
    online_k_means(flow.from_items([[1.0], [1.0], [1.0]]), clusters=2)
    with pytest.raises(JobFailed, match="expected at least 2 distinct points for 2 clusters, given 1"):
        flow.run()


def test_a_model_that_is_refused_something_is_as_it_was() -> None:
    model = OnlineKMeans(1, initial=[[1.0, 1.0]])
    model.learn([[2.0, 2.0]])
    before = model.state()
    for bad, error in [([[1.0, np.inf]], BadRows), ([[1.0]], ModelError), (Columns({"x": [1.0]}), ModelError)]:
        with pytest.raises(error):
            model.learn(bad)  # type: ignore[arg-type]
    model.learn(np.zeros((0, 2)))
    assert (str(model.state()), model.version) == (str(before), 1)
    with pytest.raises(ModelError, match="given one that has learned from no points"):
        OnlineKMeans(2).parameters()
    with pytest.raises(ConfigurationError, match="decay"):
        OnlineKMeans(2, decay=-1.0)


async def test_published_clusters_are_served_as_such() -> None:
    """A follower took the weights of two clusters for those of a linear model of two features, and predicted that."""
    models = MemoryBroker().topic("models")
    await models.create()
    flow = Flow("clusters")
    online_k_means(flow.from_items(BATCH), clusters=2, initial=START).publish_model(models, model="clusters")
    await (await flow.start()).wait()
    async with ServedModel(models, "clusters", load=KMeans.predictor) as served:
        await served.ready()
        assert served.predict([9, 100]).value == 0
        assert served.predict(BATCH).value.tolist() == [0, 0, 0, 1, 1, 1]
        with pytest.raises(ModelError, match=r"KMeans\.predict: expected points as arrays of 2 numbers"):
            served.predict([1.0])
    update = await last_update(models, "clusters")
    assert update is not None
    with pytest.raises(ModelError, match=r"expected the parameters of a linear model, given centroids; load=KMeans\."):
        LinearPredictor(update.parameters)
