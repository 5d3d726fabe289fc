"""Offline training gives the same numbers with any workers, any schedule, and any source of examples."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from iteration.iteration_support import SMALL, cut_items, run

from streamiter import Columns, Flow, IterationConfig, Stream
from streamiter.errors import JobFailed
from streamiter.learn import (
    SGD,
    Examples,
    GradientDescent,
    LinearModel,
    LinearRegression,
    LogisticRegression,
    OfflineTraining,
    SparseRows,
    train_offline,
)
from streamiter.learn.losses import LinearLoss, LogLoss, SquaredLoss

PLANE = Columns(
    {
        "x": np.array([(2, 1), (3, 2), (4, 3), (2, 4), (2, 2), (4, 3), (1, 2), (5, 3)], dtype=float),
        "y": np.array([4, 7, 10, 10, 6, 10, 5, 11], dtype=float),
        "w": np.ones(8),
    }
)
PLANE_WEIGHTS = [1.1411187788452217, 1.829567426643912]

TWO_KINDS = Columns(
    {
        "x": np.array([(k, 2, 3, 4) for k in (1, 2, 3, 4, 5, 11, 12, 13, 14, 15)], dtype=float),
        "y": np.repeat([0.0, 1.0], 5),
        "w": np.tile(np.arange(1.0, 6.0), 2),
    }
)
TWO_KINDS_WEIGHTS = [0.5258302130286436, -0.28395244862451813, -0.42592867293677716, -0.5679048972490363]

MODELS: dict[str, type[LinearRegression] | type[LogisticRegression]] = {
    "linear": LinearRegression,
    "logistic": LogisticRegression,
}
CASES = pytest.mark.parametrize(
    ("kind", "rows", "expected"),
    [("linear", PLANE, PLANE_WEIGHTS), ("logistic", TWO_KINDS, TWO_KINDS_WEIGHTS)],
    ids=["linear", "logistic"],
)


def examples_of(rows: Any) -> Examples:
    if isinstance(rows, list):
        return Examples(*(np.array([row[name] for row in rows]) for name in ("x", "y", "w")))
    return Examples(rows["x"], rows["y"], rows["w"])


def made_up(count: int, seed: int = 0) -> Columns:
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(count, 3))
    targets = (features @ [1.0, -2.0, 0.5] + generator.normal(size=count) > 0).astype(float)
    return Columns({"x": features, "y": targets, "w": generator.integers(1, 4, count).astype(float)})


def as_records(rows: Columns) -> list[dict[str, Any]]:
    return [{"x": row["x"], "y": float(row["y"]), "w": float(row["w"])} for row in rows]


def trained(
    examples: Stream, kind: str = "logistic", *, optimizer: Any = None, width: int = 3, **options: Any
) -> OfflineTraining:
    def model() -> LinearModel:
        return MODELS[kind](width, intercept=False, optimizer=optimizer or GradientDescent(0.1))

    return train_offline(examples, model, **({"extract": examples_of, "rounds": 20} | options))


def weights_of(rows: Columns, kind: str = "logistic", *, workers: int = 1, **options: Any) -> Any:
    """Return the weights after a training with these rows."""
    flow = Flow("training")
    width = rows["x"].shape[1]
    training = trained(flow.from_items(rows, parallelism=workers), kind, width=width, **options)
    models = training.models.collect()
    run(flow)
    [model] = models.items
    return model.parameters["weights"]


def by_hand(
    rows: Columns, *, mini_batch: int, rounds: int, l1: float = 0.0, l2: float = 0.0
) -> npt.NDArray[np.float64]:
    """Train logistic regression as the reference does: one worker, mini-batches in order."""
    weights, start = np.zeros(rows["x"].shape[1]), 0
    for _ in range(rounds):
        part = rows[start : start + mini_batch]
        start = 0 if start + mini_batch >= len(rows) else start + mini_batch
        slopes = part["w"] * (1.0 / (1.0 + np.exp(-part["x"] @ weights)) - part["y"])
        weights = weights - 0.1 / part["w"].sum() * (slopes @ part["x"])
        weights = weights * (1.0 - 0.1 * l2)
        weights = weights - 0.1 * l1 * np.sign(weights)
    return weights


# -- the numbers -------------------------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("replay", [False, True], ids=["kept", "replayed"])
@pytest.mark.parametrize("workers", [1, 4])
def test_twenty_rounds_give_the_known_weights(
    kind: str, rows: Columns, expected: list[float], workers: int, replay: bool
) -> None:
    """The weights are known from Flink ML; they depend on sample weights, but not on the worker of a gradient."""
    weights = weights_of(rows, kind, workers=workers, replay=replay, mini_batch=32, tolerance=1e-6)
    assert weights == pytest.approx(expected, rel=1e-12)


@CASES
@pytest.mark.parametrize("parallelism", [1, 4])
def test_fit_gives_the_known_weights(kind: str, rows: Columns, expected: list[float], parallelism: int) -> None:
    """``fit`` must give the same weights as the flow."""
    model = MODELS[kind](len(expected), intercept=False)
    fit = model.fit(rows["x"], rows["y"], rows["w"], rounds=20, mini_batch=32, tolerance=1e-6, parallelism=parallelism)
    assert model.weights == pytest.approx(expected, rel=1e-12)
    assert (fit.steps, fit.ended_by, model.version, model.records) == (20, "rounds", 20, 20 * len(rows))


@pytest.mark.parametrize("replay", [False, True], ids=["kept", "replayed"])
@pytest.mark.parametrize(
    ("mini_batch", "l1", "l2"), [(1, 0.05, 0.5), (7, 0.0, 0.0), (20, 0.05, 0.0), (40, 0.0, 0.5), (50, 0.0, 0.0)]
)
def test_mini_batches_come_in_turn_and_penalties_follow_the_step(
    mini_batch: int, replay: bool, l1: float, l2: float
) -> None:
    """Before the data is repeated, the last mini-batch has only the remaining rows, and no row twice."""
    rows = made_up(40)
    optimizer = GradientDescent(0.1, l1=l1, l2=l2)
    weights = weights_of(rows, optimizer=optimizer, mini_batch=mini_batch, replay=replay)
    expected = by_hand(rows, mini_batch=mini_batch, rounds=20, l1=l1, l2=l2)
    assert weights == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("replay", [False, True], ids=["kept", "replayed"])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("mini_batch", [8, None])
def test_the_workers_share_one_mini_batch(workers: int, mini_batch: int | None, replay: bool) -> None:
    """If the model depended on the parallelism, a result from a laptop would not hold on a server."""
    rows = made_up(40)
    weights = weights_of(rows, mini_batch=mini_batch, workers=workers, replay=replay)
    assert weights == pytest.approx(by_hand(rows, mini_batch=mini_batch or 40, rounds=20), rel=1e-12)


def test_sparse_rows_give_the_same_model_as_dense_rows() -> None:
    """Penalties must act on every weight in each round, whichever features the rows have."""
    generator = np.random.default_rng(5)
    features = generator.normal(size=(60, 8)) * (generator.random((60, 8)) < 0.2)
    targets = (features.sum(axis=1) > 0).astype(float)
    options: dict[str, Any] = {"rounds": 30, "mini_batch": 9, "l1": 0.01, "l2": 0.1, "parallelism": 2}
    dense, sparse = LogisticRegression(8), LogisticRegression(8)
    dense.fit(features, targets, **options)
    sparse.fit(SparseRows.from_dense(features), targets, **options)
    assert sparse.weights == pytest.approx(dense.weights, rel=1e-12)
    assert sparse.intercept_weight == pytest.approx(dense.intercept_weight, rel=1e-12)


def test_long_trainings_go_through_several_blocks() -> None:
    """The data has more rows than one block keeps, and is learned in small batches and in one large batch."""
    rows = made_up(150_000)
    model = LogisticRegression(3, intercept=False)
    model.fit(rows["x"], rows["y"], rows["w"], rounds=3)
    expected = by_hand(rows, mini_batch=len(rows), rounds=3)
    assert model.weights == pytest.approx(expected, rel=1e-10)
    assert weights_of(rows, rounds=3) == pytest.approx(expected, rel=1e-10)
    mini_batches = by_hand(rows, mini_batch=100_000, rounds=3)
    assert weights_of(rows, rounds=3, mini_batch=100_000) == pytest.approx(mini_batches, rel=1e-10)


def test_any_optimizer_works() -> None:
    """The optimizer computes the step; the loop must not assume a rule."""
    rows = made_up(40)
    twin = LogisticRegression(3, intercept=False, optimizer=SGD(0.3, l2=0.1))
    for _ in range(20):
        twin.learn(rows["x"], rows["y"], rows["w"])
    assert weights_of(rows, optimizer=SGD(0.3, l2=0.1)) == pytest.approx(twin.weights, rel=1e-12)


# -- the end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_it_ends_after_the_first_round_whose_loss_is_small_enough(mode: Any) -> None:
    """One worker makes the same steps in both modes."""
    rows = made_up(40)
    full = LogisticRegression(3)
    all_losses = full.fit(rows["x"], rows["y"], rounds=20).losses
    assert all_losses == sorted(all_losses, reverse=True)
    model = LogisticRegression(3)
    tolerance = all_losses[7]
    fit = model.fit(rows["x"], rows["y"], rounds=20, tolerance=tolerance, mode=mode)
    assert (fit.losses, fit.ended_by, model.version) == (all_losses[:8], "tolerance", 8)


@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_the_loss_is_the_mean_before_the_step(kind: str) -> None:
    """The loss of a row is half the squared error or the log loss, times the sample weight."""
    rows = made_up(40)
    model = MODELS[kind](3)
    predictions = model.predict(rows["x"])
    expected = float(model.loss.values(predictions, rows["y"]) @ rows["w"] / rows["w"].sum())
    assert model.fit(rows["x"], rows["y"], rows["w"], rounds=1).losses == [pytest.approx(expected, rel=1e-12)]


@pytest.mark.parametrize("loss", [LogLoss(), SquaredLoss()], ids=lambda loss: loss.link)
def test_the_total_loss_equals_the_sum_of_the_losses(loss: LinearLoss) -> None:
    """The sum is computed by a faster formula, which must also be right for a completely wrong prediction."""
    predictions = np.array([0.0, 0.0, 1e-20, 1e-9, 0.25, 0.5, 1.0 - 1e-12, 1.0, 1.0])
    targets = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    weights = np.arange(9.0)
    values = loss.values(predictions, targets)
    # The last prediction is certain and wrong: no float is exactly 1 − 1e-15, so its loss has four correct digits.
    assert loss.total(predictions[:8], targets[:8]) == pytest.approx(values[:8].sum(), rel=1e-12)
    assert loss.total(predictions[:8], targets[:8], weights[:8]) == pytest.approx(values[:8] @ weights[:8], rel=1e-12)
    assert loss.total(predictions, targets) == pytest.approx(values.sum(), rel=1e-4)


def test_training_resumes_from_the_present_model() -> None:
    """Ten rounds and ten more rounds must equal twenty rounds."""
    rows = made_up(40)
    once, twice = LogisticRegression(3), LogisticRegression(3)
    once.fit(rows["x"], rows["y"], rounds=20)
    for _ in range(2):
        twice.fit(rows["x"], rows["y"], rounds=10)
    assert twice.weights.tolist() == once.weights.tolist()
    assert (twice.version, twice.records) == (once.version, once.records) == (20, 800)


def test_models_on_the_way_are_published_when_asked_for() -> None:
    """The training publishes every n-th model, and always the last model."""
    flow = Flow("training")
    models = trained(flow.from_items(made_up(40)), rounds=7, publish_every=3).models.collect()
    run(flow)
    assert [model.records for model in models.items] == [3 * 40, 6 * 40, 7 * 40]


# -- the schedule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [False, True], ids=["kept", "replayed"])
def test_in_step_the_result_does_not_depend_on_the_schedule(replay: bool) -> None:
    """Runs must be repeatable to the last bit. (With replayed data the sums depend on the cuts of the batches.)"""
    records = as_records(made_up(61))
    results = []
    for seed in range(4):
        flow = Flow("training")
        examples = cut_items(flow, records, seed=seed)
        models = trained(examples, workers=3, mini_batch=20, replay=replay).models.collect()
        run(flow, seed=seed, limits=SMALL)
        results.append(models.items[0].parameters["weights"])
    for other in results[1:]:
        if replay:
            assert other == pytest.approx(results[0], rel=1e-12)
        else:
            assert other.tolist() == results[0].tolist()


@pytest.mark.parametrize("ahead", [None, 0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_asynchronous_every_worker_makes_its_rounds(seed: int, ahead: int | None) -> None:
    """No worker waits, no example is lost or repeated, and the staleness stays within the configured limit."""
    rows = made_up(60)
    flow = Flow("training")
    examples = cut_items(flow, as_records(rows), seed=seed)
    config = IterationConfig(max_epochs_ahead=ahead)
    training = trained(examples, workers=3, mini_batch=15, rounds=40, mode="asynchronous", config=config)
    models, losses = training.models.collect(), training.losses.collect()
    run(flow, seed=seed, limits=SMALL)
    [model] = models.items
    assert len(losses.items) == 3 * 40
    assert model.records == 3 * 40 * 5
    assert losses.items[-1] < 0.8 * losses.items[0]


@pytest.mark.parametrize("seed", range(2))
def test_asynchronous_with_idle_workers(seed: int) -> None:
    """A worker without examples delayed the others, and the tolerance waited for its loss."""
    flow = Flow("training")
    examples = cut_items(flow, as_records(made_up(2)), seed=seed)
    training = trained(examples, workers=4, rounds=50, mode="asynchronous", tolerance=0.5)
    losses = training.losses.collect()
    training.models.collect()
    run(flow, seed=seed, limits=SMALL)
    assert losses.items[-1] <= 0.5 < losses.items[0]


# -- refused input --------------------------------------------------------------------------------------------


def test_features_whose_sum_is_too_large_are_still_finite() -> None:
    """The quick check of a row's sum must not refuse an extreme but finite number."""
    model = LinearRegression(2)
    model.checked_examples(Examples([[1.7e308, 1.7e308]], [1.0]))


def test_weights_that_diverge_are_reported() -> None:
    """With a learning rate that is too high, the training returned a model of NaNs."""
    rows = made_up(40)
    model = LinearRegression(3)
    with pytest.raises(JobFailed, match=r"LinearRegression: .* too large to compute with.* lower the learning rate"):
        model.fit(rows["x"], rows["y"], rounds=2_000, learning_rate=10.0)
    assert model.version == 0


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_stream_without_examples_fails_the_job(mode: Any) -> None:
    """A wrong path or an empty topic gave a model of zeros."""
    flow = Flow("training")
    trained(flow.from_items(made_up(0)), workers=2, mode=mode).models.collect()
    with pytest.raises(JobFailed, match="train_offline: expected examples to learn from, given none"):
        run(flow)


@pytest.mark.parametrize("replay", [False, True], ids=["kept", "replayed"])
def test_rows_that_are_no_examples_are_left_out_and_counted_once(replay: bool) -> None:
    """The same bad rows may return in every round, but each counts once."""
    rows = made_up(40)
    records: list[Any] = as_records(rows)
    for place, bad in ((40, {"x": [1.0, np.nan, 2.0], "y": 1.0, "w": 1.0}), (20, "no record"), (0, {"x": 1})):
        records.insert(place, bad)
    flow = Flow("training")
    training = trained(cut_items(flow, records, seed=3), replay=replay, on_error="skip")
    models = training.models.collect()
    statistics = run(flow)
    assert statistics.step("train").rejected == 3
    assert models.items[0].parameters["weights"] == pytest.approx(by_hand(rows, mini_batch=40, rounds=20), rel=1e-12)


def test_a_bad_row_of_a_stream_fails_the_job_with_its_reason() -> None:
    """By default no row is left out silently."""
    flow = Flow("training")
    records = [*as_records(made_up(4)), {"x": np.ones(3), "y": 7.0, "w": 1.0}]
    trained(flow.from_items(records)).models.collect()
    with pytest.raises(JobFailed, match=r"step 'train' .*expected targets 0 or 1, given 7.0"):
        run(flow)
