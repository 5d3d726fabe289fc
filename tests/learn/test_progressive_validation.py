"""Metrics of predictions that are made before learning are compared with their definitions."""

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import random_examples

from streamiter.errors import ConfigurationError
from streamiter.learn import BadRows, HuberLoss, PoissonLoss, ProgressiveValidation, QuantileLoss, SquaredLoss
from streamiter.learn.quality.score_metrics import area_under_curve
from streamiter.learn.quality.validation_step import Validate
from streamiter.operators import Output

rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), st.integers(0, 1), st.integers(0, 3)),
    min_size=1,
    max_size=30,
)


def auc_by_pairs(predictions, targets, weights):
    """Compute the area from all pairs of a row of target 1 and a row of target 0."""
    pairs = higher = 0.0
    for p, y, w in zip(predictions, targets, weights, strict=True):
        for q, z, v in zip(predictions, targets, weights, strict=True):
            if y == 1 and z == 0:
                pairs += w * v
                higher += w * v * (1.0 if p > q else 0.5 if p == q else 0.0)
    return higher / pairs if pairs else None


def defined(predictions, targets, weights):
    """Return the metrics of these rows by their definitions."""
    total = sum(weights)
    loss = squares = correct = hits = chosen = ones = 0.0
    for p, y, w in zip(predictions, targets, weights, strict=True):
        hits += w * (p >= 0.5 and y == 1)
        chosen += w * (p >= 0.5)
        ones += w * y
        clipped = min(max(p, 1e-15), 1.0 - 1e-15)
        loss -= w * (math.log(clipped) if y == 1 else math.log1p(-clipped))
        squares += w * (p - y) ** 2
        correct += w * ((p >= 0.5) == (y == 1))
    metrics = {
        "count": sum(w > 0 for w in weights),
        "weight": total,
        "loss": loss / total,
        "squared_error": squares / total,
        "rmse": math.sqrt(squares / total),
        "accuracy": correct / total,
        "ece": sum(w * abs(p - y) for _, w, p, y in reliability(predictions, targets, weights) if w) / total,
    }
    if chosen + ones:
        metrics["f1"] = 0.0
    if hits:
        precision, recall = hits / chosen, hits / ones
        metrics["f1"] = 2 * precision * recall / (precision + recall)
    area = auc_by_pairs(predictions, targets, weights)
    return metrics if area is None else metrics | {"auc": area}


def reliability(predictions, targets, weights):
    """Return lower bound, weight, mean prediction and share of target 1 of each of the ten bins."""
    bins = []
    for number in range(10):
        rows = [
            (p, y, w)
            for p, y, w in zip(predictions, targets, weights, strict=True)
            if w and (number / 10 <= p < (number + 1) / 10 or (number == 9 and p == 1.0))
        ]
        weight = sum(w for _, _, w in rows)
        mean = sum(w * p for p, _, w in rows) / weight if weight else None
        share = sum(w * y for _, y, w in rows) / weight if weight else None
        bins.append((number / 10, weight, mean, share))
    return bins


def stream(seed, count, *, spread=1.0):
    random = np.random.default_rng(seed)
    log_odds = random.normal(-1.0, spread, count)
    predictions = 1.0 / (1.0 + np.exp(-log_odds))
    targets = (random.random(count) < predictions).astype(float)
    return predictions, targets, random.integers(0, 4, count).astype(float)


@given(rows)
def test_metrics_equal_their_definitions(rows):
    """The rows have weights, ties and predictions of 0 and 1; the window contains all rows."""
    predictions, targets, weights = zip(*rows, strict=True)
    validation = ProgressiveValidation(window=100)
    validation.update(predictions, targets, weights)
    metrics = validation.metrics()
    if not sum(weights):
        assert metrics == {"count": 0, "weight": 0.0, "window_count": 0, "window_weight": 0.0}
        return
    expected = defined(predictions, targets, weights)
    mean = [sum(w * y for y, w in zip(targets, weights, strict=True)) / sum(weights)] * len(targets)
    of_window = {f"window_{name}": value for name, value in expected.items()}
    expected["baseline_loss"] = of_window["window_baseline_loss"] = defined(mean, targets, weights)["loss"]
    assert metrics == pytest.approx(expected | of_window, abs=1e-9)


def test_the_window_holds_exactly_the_last_rows():
    """The window was wrong by one row at the seam of its ring, or for a batch larger than the window."""
    predictions, targets, weights = stream(1, 600)
    kept = np.flatnonzero(weights > 0)[-128:]
    expected, whole = defined(predictions[kept], targets[kept], weights[kept]), defined(predictions, targets, weights)
    del whole["auc"]
    for cut in (1, 7, 100, 400, 600):
        validation = ProgressiveValidation(window=128)
        for start in range(0, 600, cut):
            validation.update(*(column[start : start + cut] for column in (predictions, targets, weights)))
        metrics = validation.metrics()
        assert {name: metrics[f"window_{name}"] for name in expected} == pytest.approx(expected, rel=1e-12), cut
        assert {name: metrics[name] for name in whole} == pytest.approx(whole, rel=1e-12), cut


@pytest.mark.parametrize("kind", ["classification", "classes", "regression"])
@pytest.mark.parametrize("first_fraction", [0, 300, 1000])
def test_metrics_do_not_depend_on_the_cut_not_even_in_the_last_bit(kind, first_fraction):
    """The same stream in other transport batches must give the same record.

    Rows of weight 1 are summed another way, as long as all sums before are whole.
    """
    predictions, targets, weights = stream(2, 1000)
    weights[first_fraction : first_fraction + 200] *= 0.3
    weights[600:] = 1.0
    results = set()
    for cut in (1, 3, 64, 1000):
        validation = ProgressiveValidation(window=300, kind=kind)
        for start in range(0, 1000, cut):
            validation.update(*(column[start : start + cut] for column in (predictions, targets, weights)))
        calibration = validation.calibration() if kind == "classification" else None
        results.add(json.dumps([validation.metrics(), validation._sums.tolist(), calibration]))
    assert len(results) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0, 3.0, 10.0])
def test_auc_of_everything_is_close_to_the_exact_one(seed, spread):
    """A young model gives scores close together, and an overconfident model gives extreme scores."""
    predictions, targets, weights = stream(seed, 20_000, spread=spread)
    validation = ProgressiveValidation(window=1)
    validation.update(predictions, targets, weights)
    exact = area_under_curve(predictions, targets, weights)
    assert validation.metrics()["auc"] == pytest.approx(exact, abs=2e-4 if spread in (1.0, 3.0) else 1e-3)


@given(rows)
def test_exact_auc_counts_pairs(rows):
    """Ties count half, and the order of the rows does not matter."""
    columns = [np.array(column, dtype=float) for column in zip(*rows, strict=True)]
    expected = auc_by_pairs(*columns)
    found = area_under_curve(*columns)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))


@random_examples(
    lambda random: [
        [(random.randrange(0, 101) / 100, random.randrange(2), random.randrange(3)) for _ in range(1 + size)]
        for size in (random.randrange(12), random.randrange(12))
    ],
    examples=1_000,
)
def test_the_reliability_table_and_f1_equal_their_definitions(parts):
    """A prediction of 1 had no bin, and weights counted in the loss but not in F1."""
    validation = ProgressiveValidation(window=5)
    for part in parts:
        validation.update(*zip(*part, strict=True))
    seen = [row for part in parts for row in part if row[2]]
    for rows, window in ((seen, False), (seen[-5:], True)):
        columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
        found = [tuple(each) for each in validation.calibration(window=window)]
        for mine, defined_bin in zip(found, reliability(*columns), strict=True):
            assert mine == pytest.approx(defined_bin, abs=1e-12)
        if rows:
            metrics, expected = validation.metrics(), defined(*columns)
            for name in ("f1", "ece"):
                assert metrics.get("window_" * window + name) == (
                    pytest.approx(expected[name], abs=1e-12) if name in expected else None
                )


def test_f1_and_calibration_agree_with_scikit_learn():
    """The definitions in this file could be wrong in the same way as the product's."""
    sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is in the group bench")
    calibration = pytest.importorskip("sklearn.calibration", reason="scikit-learn is in the group bench")
    predictions, targets, weights = stream(5, 5_000)
    validation = ProgressiveValidation()
    validation.update(predictions, targets, weights)
    metrics = validation.metrics()
    assert metrics["f1"] == pytest.approx(sklearn_metrics.f1_score(targets, predictions >= 0.5, sample_weight=weights))
    unweighted = ProgressiveValidation()
    unweighted.update(predictions, targets)
    shares, means = calibration.calibration_curve(targets, predictions, n_bins=10)
    table = [each for each in unweighted.calibration() if each.weight]
    assert [each.share for each in table] == pytest.approx(shares.tolist())
    assert [each.mean_prediction for each in table] == pytest.approx(means.tolist())


def test_auc_is_left_out_until_both_targets_came():
    """NaN is not JSON, and 0 or ½ would be a false statement."""
    validation = ProgressiveValidation()
    assert validation.metrics() == {"count": 0, "weight": 0.0, "window_count": 0, "window_weight": 0.0}
    validation.update([0.3, 0.4], [0, 0])
    assert "auc" not in validation.metrics()
    validation.update([0.9], [1])
    assert validation.metrics()["auc"] == validation.metrics()["window_auc"] == 1.0


def test_regression_has_its_own_metrics():
    """The loss is the minimized one: half the squared error."""
    validation = ProgressiveValidation(window=2, kind="regression")
    validation.update([-1.0, -5.0, 3.0], [-2.0, -2.0, 3.0], [1.0, 2.0, 1.0])
    assert validation.metrics() == pytest.approx(
        {
            "count": 3,
            "weight": 4.0,
            "loss": 19 / 8,
            "squared_error": 19 / 4,
            "rmse": math.sqrt(19 / 4),
            "mae": 7 / 4,
            # The mean of the targets is -3/4.
            "baseline_loss": (3 * (5 / 4) ** 2 + (15 / 4) ** 2) / 2 / 4,
            "window_count": 2,
            "window_weight": 3.0,
            "window_loss": 3.0,
            "window_squared_error": 6.0,
            "window_rmse": math.sqrt(6.0),
            "window_mae": 2.0,
            # The mean of the targets -2, of weight 2, and 3 is -1/3.
            "window_baseline_loss": (2 * (5 / 3) ** 2 + (10 / 3) ** 2) / 2 / 3,
        }
    )


def restored(window, kind, state):
    validation = ProgressiveValidation(window=window, kind=kind)
    validation.restore(state)
    return validation


def test_a_restored_window_may_be_smaller():
    """The window's size may change between two runs; the last rows are kept."""
    columns = stream(4, 1500)
    large, small = ProgressiveValidation(window=400), ProgressiveValidation(window=100)
    large.update(*columns)
    small.update(*columns)
    assert restored(100, "classification", large.state()).metrics() == small.metrics()


def test_state_holds_only_bins_in_use():
    """A checkpoint of a validation with few rows must be small."""
    validation = ProgressiveValidation()
    validation.update([0.2, 0.2, 0.7], [0, 1, 1])
    assert {side: len(bins) for side, (bins, _) in validation.state()["scores"].items()} == {
        "positive": 2,
        "negative": 1,
    }


@pytest.mark.parametrize("cut", [1, 7, 300])
def test_the_baseline_of_classes_is_that_of_their_shares(cut):
    """A model of classes had no baseline, so a loss of 0.6 told nothing."""
    random = np.random.default_rng(3)
    classes, weights = random.integers(0, 5, 300), random.random(300)
    validation = ProgressiveValidation(window=100, kind="classes")
    for start in range(0, 300, cut):
        part = slice(start, start + cut)
        count = len(classes[part])
        validation.update(np.full(count, 0.5), np.zeros(count), weights[part], classes=classes[part])
    metrics = validation.metrics()
    for name, part in {"": slice(None), "window_": slice(200, None)}.items():
        shares = np.bincount(classes[part], weights[part]) / weights[part].sum()
        assert metrics[f"{name}baseline_loss"] == pytest.approx(-shares @ np.log(shares))
    alone = ProgressiveValidation(kind="classes")
    alone.update([0.5], [1.0])
    assert "baseline_loss" not in alone.metrics()


LOSSES = [SquaredLoss(), PoissonLoss(), HuberLoss(0.7), QuantileLoss(0.9), QuantileLoss(0.2)]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_loss_of_the_task_is_compared_with_its_best_constant(loss):
    """A model of quantiles was reported with its squared error, by which the mean is always better."""
    random = np.random.default_rng(4)
    predictions, targets, weights = random.gamma(2.0, size=300), random.poisson(3.0, 300), random.random(300)
    validation = ProgressiveValidation(window=1_000, kind="regression", loss=loss)
    for part in (slice(0, 100), slice(100, 300)):
        validation.update(predictions[part], targets[part], weights[part])
    metrics = validation.metrics()
    own = loss.values(predictions, targets.astype(float)) @ weights / weights.sum()
    assert metrics["loss"] == pytest.approx(own)
    assert metrics["window_loss"] == pytest.approx(own)
    constants = np.linspace(0.5, 8.0, 7_501)
    best = min(loss.total(np.full(300, constant), targets.astype(float), weights) for constant in constants)
    assert metrics["window_baseline_loss"] == pytest.approx(best / weights.sum(), rel=1e-5)
    if loss.generated(np.ones(1)) is not None:
        assert metrics["baseline_loss"] == pytest.approx(metrics["window_baseline_loss"])
    else:
        assert "baseline_loss" not in metrics
    twin = copy.copy(validation)
    assert twin.metrics() == metrics
    with pytest.raises(ConfigurationError, match="expected a loss of numbers"):
        ProgressiveValidation(loss=loss)


def test_the_baseline_of_large_numbers_keeps_its_digits():
    """Sums of squares of times in seconds have no digits left for their variance."""
    times = 1_700_000_000 + np.arange(1_000) / 1_000
    validation = ProgressiveValidation(kind="regression")
    validation.update(times, times)
    assert validation.metrics()["baseline_loss"] == pytest.approx(times.var() / 2, rel=1e-6)


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("every", [1, 4])
def test_the_step_counts_mini_batches_together_with_the_same_result(kind, every):
    """Counting each mini-batch alone took a quarter of the time of a job that learned from Kafka.

    Snapshots and rows of weight 0 decide which mini-batches are counted together, and change no bit.
    """
    generator, out, reports = np.random.default_rng(3), Output(), []
    out.connect(reports.extend, None)
    step, alone = Validate(window=50, report_every=90), ProgressiveValidation(window=50, kind=kind)
    for number in range(27):
        targets, weights = generator.integers(0, 2, 7).astype(float), np.round(generator.uniform(size=7), 1)
        rows = {"task": kind, "predictions": generator.uniform(size=7), "targets": targets, "weights": weights}
        alone.update(rows["predictions"], targets, weights)
        step.process(rows, out)
        if number % every == 0:
            state = step.snapshot()
            step = Validate(window=50, report_every=90)
            step.restore(state)
            assert repr(state["validation"]) == repr(alone.state())
    step.finish(out)
    out.flush()
    assert reports[-1] == alone.metrics()


def test_a_refused_prediction_ends_the_job_with_its_own_mini_batch():
    """The error of a model that had run away would have named a later mini-batch, counted together with it."""
    step = Validate(window=50, report_every=1_000)
    ones = np.ones(2)
    good = {"task": "regression", "predictions": ones, "targets": ones, "weights": ones}
    step.process(good, Output())
    with pytest.raises(BadRows, match="finite predictions"):
        step.process({**good, "predictions": np.array([1.0, np.nan])}, Output())
    assert step.snapshot()["validation"]["count"] == 2
