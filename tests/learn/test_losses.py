"""The losses of linear models: values, slopes, targets, and what a model learns with each of them."""

import json

import numpy as np
import pytest
from learn.online_support import trained

from streamiter import Columns
from streamiter.learn import (
    SGD,
    AdaGrad,
    Examples,
    HingeLoss,
    HuberLoss,
    InverseSquareRoot,
    LinearModel,
    LogLoss,
    PoissonLoss,
    QuantileLoss,
    SquaredLoss,
)
from streamiter.models import LinearPredictor

NUMBERS = [SquaredLoss(), HuberLoss(delta=0.5), QuantileLoss(0.8), QuantileLoss(), PoissonLoss()]
CLASSES = [LogLoss(), HingeLoss()]
every_loss = pytest.mark.parametrize("loss", [*NUMBERS, *CLASSES], ids=lambda loss: type(loss).__name__)


def rows(loss, count=60, width=3):
    """Return features, targets that suit the loss, and weights."""
    random = np.random.default_rng(7)
    x = random.normal(size=(count, width))
    y = random.poisson(1.5, count) if loss in NUMBERS else random.integers(0, 2, count)
    return x, y.astype(float), random.random(count) + 0.5


def model(loss, width=3, **options):
    return LinearModel(width, loss=loss, optimizer=AdaGrad(0.3), **options)


@every_loss
def test_gradients_are_the_slopes_of_the_loss(loss):
    """A slope of prediction − target is right for the canonical links only."""
    x, y, w = rows(loss)
    start, bias, step = np.array([0.4, -0.3, 0.7]), 0.2, 1e-6

    def total(weights, intercept):
        shifted = model(loss, initial_weights=weights, initial_intercept=intercept)
        return float(loss.values(shifted.predict(x), y) @ w)

    gradient = model(loss, initial_weights=start, initial_intercept=bias).gradient(x, y, w)
    for feature in range(3):
        shift = np.eye(3)[feature] * step
        slope = (total(start + shift, bias) - total(start - shift, bias)) / (2 * step)
        assert gradient.to_dense()[feature] == pytest.approx(slope, rel=1e-5, abs=1e-5)
    slope = (total(start, bias + step) - total(start, bias - step)) / (2 * step)
    assert gradient.intercept == pytest.approx(slope, rel=1e-5, abs=1e-5)
    assert gradient.weight == w.sum()


@every_loss
def test_one_row_is_the_same_as_one_of_many_to_the_last_bit(loss):
    """Single rows have a path of their own, whose slope was that of the squared loss."""
    margins = np.random.default_rng(13).normal(size=2_000) * 3.0
    targets = rows(loss, 2_000)[1]
    targets[:50] = loss.predict(margins)[:50].round() if loss in NUMBERS else targets[:50]
    before = margins.copy()
    loss.predict(margins)[:] = 9.0  # A new array, which the caller may change.
    assert np.array_equal(margins, before)
    predictions = loss.predict(margins)
    assert predictions.tobytes() == np.array([loss.predict_one(m) for m in margins.tolist()]).tobytes()
    singly = [loss.slope(p, t) for p, t in zip(predictions.tolist(), targets.tolist(), strict=True)]
    assert np.array_equal(loss.slopes(predictions.copy(), targets), singly)
    x, y, w = rows(loss)
    wide = np.pad(x, ((0, 0), (0, 37)))
    few, many = model(loss), model(loss, 40)
    assert few.learn_each(x, y, w) == pytest.approx(many.learn_each(wide, y, w), rel=1e-12)
    assert few.weights == pytest.approx(many.weights[:3], rel=1e-12)


@every_loss
def test_the_loss_before_a_step_is_the_sum_of_the_values(loss):
    """``fit`` and published updates tell this sum."""
    x, y, w = rows(loss)
    mine = model(loss, initial_weights=[0.1, 0.2, 0.3])
    gradient, total = mine.gradient_and_loss(mine.checked_examples(Examples(x, y, w)))
    assert total == pytest.approx(float(loss.values(mine.predict(x), y) @ w), rel=1e-12)
    assert gradient.to_dense() == pytest.approx(mine.gradient(x, y, w).to_dense(), rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "prediction", "target", "value", "slope"),
    [
        (HuberLoss(2.0), 5.0, 4.0, 0.5, 1.0),
        (HuberLoss(2.0), -5.0, 4.0, 16.0, -2.0),
        (QuantileLoss(0.9), 4.0, 6.0, 1.8, -0.9),
        (QuantileLoss(0.9), 6.0, 4.0, 0.2, 0.1),
        (QuantileLoss(0.9), 4.0, 4.0, 0.0, 0.0),
        (PoissonLoss(), 2.0, 2.0, 0.0, 0.0),
        (PoissonLoss(), 0.5, 0.0, 0.5, 0.5),
        (PoissonLoss(), 0.0, 1.0, 689.7755, -1.0),
        (HingeLoss(), 0.25, 1.0, 0.75, -1.0),
        (HingeLoss(), 0.25, 0.0, 1.25, 1.0),
        (HingeLoss(), 1.0, 1.0, 0.0, 0.0),
    ],
)
def test_values_and_slopes_are_those_of_the_definition(loss, prediction, target, value, slope):
    """At the bend of a loss, and at a mean of 0, a value was NaN or that of the other side."""
    assert loss.values(np.array([prediction]), np.array([target]))[0] == pytest.approx(value, abs=1e-3)
    assert loss.slope(prediction, target) == pytest.approx(slope, abs=1e-12)


def test_values_agree_with_scikit_learn():
    """The values above were worked out by the same hands as the losses."""
    theirs = pytest.importorskip("sklearn.metrics", reason="scikit-learn is in the group bench")
    random = np.random.default_rng(8)
    predictions, counts = random.random(500) * 4 + 0.1, random.poisson(2.0, 500).astype(float)
    pinball = theirs.mean_pinball_loss(counts, predictions, alpha=0.7)
    assert QuantileLoss(0.7).values(predictions, counts).mean() == pytest.approx(pinball)
    deviance = theirs.mean_poisson_deviance(counts, predictions)
    assert PoissonLoss().values(predictions, counts).mean() == pytest.approx(deviance / 2)
    hinge = theirs.hinge_loss(counts > 1, predictions - 2)
    assert HingeLoss().values(predictions - 2, (counts > 1) * 1.0).mean() == pytest.approx(hinge)


def learned(loss, x, y, optimizer=None):
    mine = LinearModel(x.shape[1], loss=loss, optimizer=optimizer or AdaGrad(0.5))
    mine.learn_each(x, y)
    return mine


def test_each_loss_learns_its_own_answer():
    """With the slope of the squared loss, each of them learned the mean."""
    random = np.random.default_rng(9)
    x = random.normal(size=(20_000, 2))
    truth = x @ [2.0, -1.0] + 3.0
    spoiled = truth + np.where(random.random(20_000) < 0.1, 100.0, random.normal(size=20_000))
    weights = learned(HuberLoss(), x, spoiled)
    assert [*weights.weights, weights.intercept_weight] == pytest.approx([2.0, -1.0, 3.0], abs=0.3)
    assert abs(learned(SquaredLoss(), x, spoiled, SGD(0.01)).intercept_weight - 3.0) > 5.0
    late = truth + random.exponential(1.0, 20_000)
    mine = learned(QuantileLoss(0.9), x, late, SGD(InverseSquareRoot(0.5, 0.01)))
    assert np.mean(late < mine.predict(x)) == pytest.approx(0.9, abs=0.02)
    assert mine.intercept_weight == pytest.approx(3.0 - np.log(0.1), abs=0.2)
    counts = random.poisson(np.exp(x @ [0.5, -0.3] + 1.0)).astype(float)
    mine = learned(PoissonLoss(), x, counts, AdaGrad(0.1))
    assert [*mine.weights, mine.intercept_weight] == pytest.approx([0.5, -0.3, 1.0], abs=0.06)
    mine = learned(HingeLoss(), x, (truth > 3.0) * 1.0)
    assert np.mean((mine.predict(x) > 0.0) == (truth > 3.0)) > 0.99


@every_loss
def test_a_published_model_predicts_the_same(loss):
    """A model of counts was served with the identity, as logarithms."""
    x, y, _ = rows(loss)
    mine = model(loss)
    mine.learn_each(x, y)
    assert LinearPredictor(mine.parameters())(x) == pytest.approx(mine.predict(x), rel=1e-12)
    twin = model(loss)
    twin.start_from(mine.parameters())
    assert np.array_equal(twin.predict(x), mine.predict(x))


def test_counts_of_a_huge_score_are_served_without_a_warning():
    """The exponential of 710 overflows, and warnings are errors in many services."""
    predict = LinearPredictor({"weights": np.array([1.0]), "link": "log"})
    assert 0.0 < predict([1_000.0]) < np.inf
    assert predict([[-1_000.0], [0.0]]).tolist() == [0.0, 1.0]


def examples(batch):
    return Examples(batch["x"], batch["y"])


@every_loss
def test_a_model_with_each_loss_learns_in_a_flow(loss):
    """The validation took every loss but LogLoss for numbers, so a hinge model had no accuracy."""
    x, y, _ = rows(loss, 2_000)
    result = trained(Columns({"x": x, "y": y}), model=lambda: model(loss), extract=examples, mode="synchronous")
    assert result.metrics["count"] == 2_000
    assert ("accuracy" in result.metrics) == (loss in CLASSES)
    assert result.models[-1].parameters["link"] == loss.link
    assert json.dumps(result.metrics)


def test_a_quantile_is_no_bad_mean(caplog):
    """A model of the quantile 0.95 was reported as much worse than the mean, with wrong labels as the usual reason."""
    random = np.random.default_rng(10)
    x = random.random((5_000, 1))
    y = random.exponential(1.0, 5_000)
    trained(
        Columns({"x": x, "y": y}),
        model=lambda: LinearModel(1, loss=QuantileLoss(0.95), optimizer=SGD(InverseSquareRoot(0.5, 0.01))),
        extract=examples,
        mode="synchronous",
        mini_batch=10,
    )
    assert [record.message for record in caplog.records if record.name == "streamiter.learn"] == []
