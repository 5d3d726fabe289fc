"""Every loss is checked: its formula, its slope, its predictions and its limits."""

import math

import numpy as np
import pytest
from networks.finite_differences import assert_agree, differences
from networks.functions_by_name import LOSSES

from streamiter.networks.functions import NetworkHuberLoss

CLASSES = 4


def _huber(f: float, y: float) -> float:
    distance = abs(f - y)
    return 0.5 * distance**2 if distance <= 1 else distance - 0.5


FORMULAS = {
    "l2loss": lambda f, y: 0.5 * (f[0] - y) ** 2,
    "logloss": lambda f, y: math.log(1 + math.exp(-y * f[0])),
    "hingeloss": lambda f, y: max(0.0, 1 - y * f[0]),
    "crossentropyloss": lambda f, y: -math.log(f[0] if y > 0 else 1 - f[0]),
    "softmaxloss": lambda f, y: -math.log(math.exp(f[int(y)]) / sum(math.exp(score) for score in f)),
    "huberloss": lambda f, y: _huber(f[0], y),
    "kmeansloss": lambda f, y: min(f),
}
"""Each formula gets the scores of a row and its label."""

NAMES = list(LOSSES)
CLASSIFIERS = ["logloss", "hingeloss", "crossentropyloss", "softmaxloss"]


def _given(name: str, rows: int = 7, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """Return valid scores and labels for the loss."""
    generator = np.random.default_rng(5)
    scores = 1.5 * generator.normal(size=(rows, CLASSES if name in ("softmaxloss", "kmeansloss") else 1))
    labels = generator.normal(size=rows)
    if name in ("logloss", "hingeloss", "crossentropyloss"):
        labels = np.where(labels > 0, 1.0, -1.0)
    if name == "crossentropyloss":
        scores = 1 / (1 + np.exp(-scores))
    if name == "softmaxloss":
        labels = generator.integers(0, CLASSES, rows).astype(float)
    return scores.astype(dtype), labels.astype(dtype)


def test_every_loss_has_a_formula_here():
    """A loss was added without a test of its formula."""
    assert set(FORMULAS) == set(LOSSES)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_mean_of_its_formula(name, rows):
    """A sum instead of the mean would make the learning rate depend on the batch size."""
    scores, labels = _given(name, rows)
    expected = [FORMULAS[name](f, y) for f, y in zip(scores.tolist(), labels.tolist(), strict=True)]
    loss = LOSSES[name]()
    loss.check_labels("layer 'end'", labels, CLASSES)
    np.testing.assert_allclose(loss.losses(scores, labels), expected, rtol=1e-12)
    assert loss.mean(scores, labels) == pytest.approx(sum(expected) / rows, rel=1e-12)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_its_gradient_agrees_with_finite_differences(name, rows):
    """A gradient of the sum, or of the wrong sign, still trains for some steps."""
    scores, labels = _given(name, rows)
    loss = LOSSES[name]()
    expected = differences(lambda: loss.mean(scores, labels), scores)
    before = scores.copy(), labels.copy()
    assert_agree(loss.gradient(scores, labels), expected, name)
    np.testing.assert_array_equal(scores, before[0])
    np.testing.assert_array_equal(labels, before[1])


@pytest.mark.parametrize("delta", [0.3, 2.0])
def test_the_huber_loss_turns_at_its_delta(delta):
    """The formula δ|d| − ½δ² used a δ of 1 in one of its two places."""
    scores, labels = np.array([[delta * 0.5], [delta * 4], [-delta * 4]]), np.zeros(3)
    loss = NetworkHuberLoss(delta=delta)
    straight = delta * delta * 4 - 0.5 * delta**2
    np.testing.assert_allclose(loss.losses(scores, labels), [0.125 * delta**2, straight, straight])
    assert_agree(loss.gradient(scores, labels), differences(lambda: loss.mean(scores, labels), scores), "huberloss")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_it_stays_in_the_dtype_of_its_scores(name, dtype):
    """A float64 gradient made the whole backward pass float64."""
    scores, labels = _given(name, dtype=dtype)
    loss = LOSSES[name]()
    assert loss.losses(scores, labels).dtype == dtype
    assert loss.gradient(scores, labels).dtype == dtype
    predictions = loss.predictions(scores)
    for array in (predictions.value, predictions.probability, predictions.label):
        assert array is None or (array.dtype == dtype and array.shape == (len(scores),))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_that_are_surely_wrong_have_a_finite_loss(name, dtype):
    """e^1000 is infinite, and 1 − 1e-9 is 1 in float32, so the loss of a clipped probability was infinite too."""
    large = [[1000.0, -1000.0]] if name == "softmaxloss" else [[1.0 if name == "crossentropyloss" else 1000.0]]
    wrong = 1.0 if name == "softmaxloss" else -1.0
    scores, labels = np.array(large, dtype=dtype), np.array([wrong], dtype=dtype)
    loss = LOSSES[name]()
    expected = {"logloss": 1000, "hingeloss": 1001, "softmaxloss": 2000, "crossentropyloss": -math.log(1e-9)}
    assert loss.mean(scores, labels) == pytest.approx(expected[name], rel=1e-5)
    assert np.isfinite(loss.gradient(scores, labels)).all()
    assert (loss.gradient(scores, labels) != 0).any(), "a row that is surely wrong must be learned from"


E = math.e
PREDICTIONS = {
    "logloss": ([[0.0], [2.0], [-1.0]], [0.0, 2.0, -1.0], [0.5, 1 / (1 + E**-2), 1 / (1 + E)], [-1.0, 1.0, -1.0]),
    "hingeloss": ([[0.5], [-2.0]], [0.5, -2.0], None, [1.0, -1.0]),
    "crossentropyloss": ([[0.2], [0.9]], [0.2, 0.9], [0.2, 0.9], [-1.0, 1.0]),
    "softmaxloss": ([[0, 1.0, 0], [3.0, 1, 2]], [1.0, 3.0], [E / (2 + E), E**3 / (E**3 + E + E**2)], [1.0, 0.0]),
    "l2loss": ([[0.5], [-2.0]], [0.5, -2.0], None, None),
    "huberloss": ([[0.5], [-2.0]], [0.5, -2.0], None, None),
    "kmeansloss": ([[3.0, 1.0], [0.5, 2.0]], [1.0, 0.5], None, [1.0, 0.0]),
}
"""Scores, and value, probability and label of their predictions."""


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_predicts_value_probability_and_label(name):
    """The loss returned the probability of class 0. Neither a regression nor clusters have an accuracy."""
    scores, *expected = PREDICTIONS[name]
    loss = LOSSES[name]()
    predictions = loss.predictions(np.array(scores))
    for found, wanted in zip((predictions.value, predictions.probability, predictions.label), expected, strict=True):
        assert found is None if wanted is None else found == pytest.approx(wanted, rel=1e-12)
    assert (loss.correct(predictions, np.zeros(len(scores))) is None) == (name not in CLASSIFIERS)


def test_labels_of_a_cross_entropy_may_be_0_and_1():
    """Labels of 0 and 1 were compared with predictions of −1 and 1, and were counted as wrong."""
    loss = LOSSES["crossentropyloss"]()
    for labels in ([0.0, 1.0], [-1.0, 1.0]):
        assert loss.correct(loss.predictions(np.array([[0.2], [0.9]])), np.array(labels)).tolist() == [True, True]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_right_predictions_are_counted(name):
    """A prediction is right if the score has the label's sign, or if the class equals the label."""
    scores, labels = _given(name, rows=50)
    loss = LOSSES[name]()
    right = loss.correct(loss.predictions(scores), labels)
    above = {"crossentropyloss": 0.5}.get(name, 0.0)
    expected = scores.argmax(axis=1) == labels if name == "softmaxloss" else (scores[:, 0] > above) == (labels > 0)
    assert 0 < expected.sum() < 50
    np.testing.assert_array_equal(right, expected)
