"""The default learner with another loss of numbers: quantiles, the median, counts, and the mean despite outliers."""

from random import Random
from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen
from learn.online_support import delayed, trained

from streamiter import learn
from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel, PoissonLoss, QuantileLoss
from streamiter.models import LinearPredictor

ROWS = 6_000


def columns(draw: Any) -> tuple[Any, Any]:
    """Return columns of several scales, and a signal in them."""
    x = draw.normal(size=(ROWS, 6))
    signal = x @ draw.normal(size=6)
    return x * [1, 100, 0.01, 1, 1, 1] + [0, 500, 0, 0, 0, 0], signal


def numbers(name: str) -> tuple[Any, Any]:
    """Return a stream of numbers."""
    draw = np.random.default_rng(7)
    x, signal = columns(draw)
    noise = draw.normal(size=ROWS)
    half = np.where(np.arange(ROWS) < ROWS // 2, 1.0, -1.0)
    streams: dict[str, Any] = {
        "normal": lambda: signal + noise,
        "skewed": lambda: signal + draw.exponential(2.0, ROWS),
        "heavy tail": lambda: signal + draw.pareto(1.5, ROWS),
        "outliers": lambda: signal + np.where(draw.random(ROWS) < 0.03, 100.0, 1.0) * noise,
        "drift": lambda: half * signal + noise,
        "noise alone": lambda: noise,
        "far from zero": lambda: 1e6 + signal + noise,
        "tiny": lambda: 1e-9 * (signal + noise),
    }
    return x, streams[name]()


def counts(name: str) -> tuple[Any, Any]:
    """Return a stream of counts."""
    draw = np.random.default_rng(8)
    x, signal = columns(draw)
    half = np.where(np.arange(ROWS) < ROWS // 2, 1.0, -1.0)
    means: dict[str, Any] = {
        "some": 3.0 * np.exp(signal / 3),
        "rare": 0.05 * np.exp(signal / 3),
        "large": 300.0 * np.exp(signal / 3),
        "drift": 3.0 * np.exp(half * signal / 3),
        "noise alone": np.full(ROWS, 3.0),
        "varying more than Poisson": 3.0 * np.exp(signal / 3) * draw.gamma(1.0, 1.0, ROWS),
    }
    return x, draw.poisson(means[name]).astype(float)


def constants_so_far(labels: Any, quantile: float | None) -> Any:
    """Return for each row the best constant of the rows before it, from the tenth row on."""
    if quantile is None:
        return (np.cumsum(labels) / np.arange(1, ROWS + 1))[9:-1]
    starts = range(10, ROWS, 50)
    found = [np.quantile(labels[max(0, start - 2_000) : start], quantile) for start in starts]
    return np.repeat(found, 50)[: ROWS - 10]


# The loss as a part of that of the constant so far. River's LinearRegression with the same loss, standardized columns
# and the best of three learning rates is worse on each of them.
BARS_OF_NUMBERS = {
    "normal": 0.65,
    "skewed": 0.9,
    "heavy tail": 0.98,
    "outliers": 0.9,
    "drift": 0.6,
    "noise alone": 1.04,
    "far from zero": 0.65,
    "tiny": 0.65,
}


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", BARS_OF_NUMBERS)
def test_quantiles_are_better_than_the_quantile_so_far(name: str, quantile: float) -> None:
    """No learner of quantiles was without a learning rate, and SGD with a wrong one is worse than a constant."""
    x, y = numbers(name)
    model = AdaptiveLinearModel(loss="quantile", quantile=quantile)
    predictions = model.learn_each(x, y)[10:]
    loss = QuantileLoss(quantile)
    bar = loss.total(constants_so_far(y, quantile), y[10:])
    assert loss.total(predictions, y[10:]) < BARS_OF_NUMBERS[name] * bar
    assert np.mean(y[10:] <= predictions) == pytest.approx(quantile, abs=0.03)


def test_the_median_has_a_name() -> None:
    """The loss "absolute" is the quantile ½, to the last bit."""
    x, y = numbers("skewed")
    one, other = AdaptiveLinearModel(loss="absolute"), AdaptiveLinearModel(loss="quantile", quantile=0.5)
    assert one.learn_each(x, y).tobytes() == other.learn_each(x, y).tobytes()


@pytest.mark.parametrize("name", ["normal", "outliers", "heavy tail", "drift", "far from zero"])
def test_huber_is_like_the_mean_where_the_mean_is_good_and_hardly_moved_by_outliers(name: str) -> None:
    """Of 3 % of the labels that are 100 times as far away, the squared loss learned a third of its error."""
    x, y = numbers(name)
    robust = np.abs(AdaptiveLinearModel(loss="huber").learn_each(x, y) - y)[10:].mean()
    squared = np.abs(AdaptiveLinearModel().learn_each(x, y + 0.0) - y)[10:].mean()
    assert robust < squared * (0.95 if name in ("outliers", "heavy tail") else 1.02)


BARS_OF_COUNTS = {
    "some": 0.6,
    "rare": 0.97,
    "large": 0.05,
    "drift": 0.6,
    "noise alone": 1.02,
    "varying more than Poisson": 0.85,
}


@pytest.mark.parametrize("name", BARS_OF_COUNTS)
def test_counts_are_better_than_the_mean_so_far(name: str) -> None:
    """An exponential of a wrong score ended in infinity, from which no rate recovers."""
    x, y = counts(name)
    predictions = AdaptiveLinearModel(loss="poisson").learn_each(x, y)[10:]
    loss = PoissonLoss()
    bar = loss.total(np.maximum(constants_so_far(y, None), 0.01), y[10:])
    assert loss.total(predictions, y[10:]) < BARS_OF_COUNTS[name] * bar
    assert predictions.mean() == pytest.approx(y[10:].mean(), rel=0.15 if name == "rare" else 0.05)


LOSSES: list[dict[str, Any]] = [
    {"loss": "quantile", "quantile": 0.9},
    {"loss": "absolute"},
    {"loss": "huber"},
    {"loss": "poisson"},
]
losses = pytest.mark.parametrize("options", LOSSES, ids=lambda options: options["loss"])


def records(count: int) -> list[dict[str, Any]]:
    draw = Random(4)
    rows = [{"id": n, "km": draw.gauss(0, 3), "sky": draw.choice("abc")} for n in range(count)]
    return [row | {"late": float(max(0, int(row["km"] + 4 * (row["sky"] == "a") + draw.gauss(3, 1))))} for row in rows]


@losses
def test_a_flow_learns_as_a_plain_loop_and_is_validated_by_its_loss(options: dict[str, Any]) -> None:
    """Quantiles were reported with their squared error, by which the mean is better."""
    rows = records(500)
    model = AdaptiveLinearModel(**options)
    features = [{name: row[name] for name in ("km", "sky")} for row in rows]
    labels = np.array([row["late"] for row in rows])
    predictions, labels = model.learn_each(features, labels)[1:], labels[1:]  # Nothing is known of the first one.
    own = PoissonLoss() if options["loss"] == "poisson" else QuantileLoss(options.get("quantile", 0.5))
    for mini_batch in (1, 60, 500):
        result = trained(rows, label="late", features=["km", "sky"], mini_batch=mini_batch, **options)
        assert result.last == frozen(model.parameters(state=False))
        last = result.metrics
        assert last["loss"] == pytest.approx(own.values(predictions, labels).mean())
        assert last["window_loss"] == pytest.approx(last["loss"])
        assert last["window_baseline_loss"] == pytest.approx(
            own.total(np.full(499, own.best_constant(labels, np.ones(499))), labels) / 499
        )
        assert last["window_loss"] < last["window_baseline_loss"]


@losses
def test_late_labels_do_not_depend_on_mini_batches(options: dict[str, Any]) -> None:
    """The experts are judged by their scores of the question, which are kept with an offset that moves."""
    rows = records(300)
    events: list[dict[str, Any]] = []
    for n in range(340):
        events += [{name: row[name] for name in ("id", "km", "sky")} for row in rows[n : n + 1]]
        if n >= 40:
            events.append({"id": rows[n - 40]["id"], "late": rows[n - 40]["late"]})
    labels = delayed(["km", "sky"], "late")
    few, many = (trained(events, labels=labels, mini_batch=rows, mode="synchronous", **options) for rows in (7, 1_000))
    assert few.last == many.last


@losses
def test_a_published_model_is_a_start(options: dict[str, Any]) -> None:
    """Without its state a version says what it predicts; a model of another loss would read it as something else."""
    rows = records(600)
    features, labels = rows, [row["late"] for row in rows]
    model = AdaptiveLinearModel(**options)
    model.learn(features[:400], labels[:400])
    parameters = model.parameters()
    next_one = AdaptiveLinearModel(**options)
    next_one.start_from(parameters, records=400)
    predict = LinearPredictor(parameters)
    np.testing.assert_allclose(next_one.predict(features[400:]), predict(features[400:]), rtol=1e-9, atol=1e-12)
    later = next_one.learn_each(features[400:], labels[400:])
    assert np.isfinite(later).all()
    assert np.abs(later - labels[400:]).mean() < 1.5 * np.abs(model.predict(features[400:]) - labels[400:]).mean()
    for other in (AdaptiveLinearModel(), AdaptiveLinearModel(loss="quantile", quantile=0.3)):
        with pytest.raises(ModelError, match="expected parameters of a model with the same loss"):
            other.start_from(parameters)
        with pytest.raises(ModelError, match="restore: expected the state of a model with the same settings"):
            other.restore(model.state())
    with pytest.raises(ModelError, match="same loss"):
        AdaptiveLinearModel(**options).start_from(_of_squared(features, labels))


def _of_squared(features: Any, labels: Any) -> Any:
    model = AdaptiveLinearModel(task="regression")
    model.learn(features, labels)
    return model.parameters()


@losses
def test_extreme_rows_leave_a_model_that_predicts(options: dict[str, Any]) -> None:
    """Constant labels, weights, huge labels and labels that are all zero must give finite predictions."""
    x = np.random.default_rng(1).normal(size=(200, 2))
    for labels in (np.zeros(200), np.full(200, 7.0), np.where(np.arange(200) == 150, 1e90, 1.0), np.arange(200.0)):
        model = AdaptiveLinearModel(**options)
        predictions = model.learn_each(x, labels, np.where(np.arange(200) % 9 == 3, 1e6, 1.0))
        assert np.isfinite(predictions[1:]).all()
        assert np.isfinite(model.predict(x)).all()
        assert model.predict(x).min() >= 0.0


def test_the_estimator_of_scikit_learn_has_the_losses() -> None:
    """Nine of ten labels are below the quantile 0.9."""
    x, y = numbers("skewed")
    # Imported in the test: scikit-learn takes longer than to collect all tests of learners.
    model = learn.OnlineRegressor(loss="quantile", quantile=0.9).fit(x, y)
    assert np.mean(y <= model.predict(x)) == pytest.approx(0.9, abs=0.03)
