"""Every transfer function is checked: its formula, its slope, its limits, and the scale of dropout."""

import math

import numpy as np
import pytest
from networks.finite_differences import assert_agree, differences
from networks.functions_by_name import TRANSFER_FUNCTIONS

from streamiter.networks.functions import Dropout, TransferFunction


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _softmax(row: list[float]) -> list[float]:
    powers = [math.exp(x) for x in row]
    return [power / sum(powers) for power in powers]


FORMULAS = {
    "identity": lambda row: row,
    "sigmoid": lambda row: [_sigmoid(x) for x in row],
    "relu": lambda row: [max(0.0, x) for x in row],
    "tanh": lambda row: [math.tanh(x) for x in row],
    "softmax": _softmax,
    "dropout": lambda row: row,
    "sigmoidwithdropout": lambda row: [_sigmoid(x) for x in row],
    "tanhwithdropout": lambda row: [math.tanh(x) for x in row],
}
"""Each formula is the prediction for a row."""

NAMES = list(TRANSFER_FUNCTIONS)
WITH_DROPOUT = [name for name in NAMES if "dropout" in name]


def _values(rows: int = 4, columns: int = 5) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, columns))


def test_every_transfer_function_has_a_formula_here():
    """A transfer function was added without a test of its formula."""
    assert set(FORMULAS) == set(TRANSFER_FUNCTIONS)


@pytest.mark.parametrize("name", NAMES)
def test_in_prediction_it_is_its_formula(name):
    """Dropout was active in prediction too, so predictions differed from call to call."""
    values = _values()
    output = TRANSFER_FUNCTIONS[name]().forward(values.copy(), None).output
    np.testing.assert_allclose(output, [FORMULAS[name](row) for row in values.tolist()], rtol=1e-13)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_its_slope_agrees_with_finite_differences(name, rows, training):
    """The output of dropout was scaled once, but its gradient was scaled twice."""
    function, values = TRANSFER_FUNCTIONS[name](), _values(rows)
    shares = np.random.default_rng(1).normal(size=values.shape)

    def applied():
        return function.forward(values.copy(), np.random.default_rng(2) if training else None)

    expected = differences(lambda: float((applied().output * shares).sum()), values)
    before = shares.copy()
    assert_agree(applied().backward(shares), expected, name)
    np.testing.assert_array_equal(shares, before, err_msg="the gradient that was given has changed")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_it_stays_in_the_dtype_of_its_input(name, dtype):
    """A float64 scale made a float32 network compute in float64."""
    values = _values().astype(dtype)
    function = TRANSFER_FUNCTIONS[name]()
    for generator in (None, np.random.default_rng(0)):
        applied = function.forward(values.copy(), generator)
        assert applied.output.dtype == dtype
        assert applied.backward(values).dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_large_numbers_overflow_nowhere(name, dtype):
    """The softmax of scores of 1000 was NaN, because the scores were not shifted; the sigmoid warned for each batch."""
    values = np.array([[1000.0, -1000.0, 0.0]], dtype=dtype)
    function = TRANSFER_FUNCTIONS[name]()
    applied = function.forward(values, None)
    assert np.isfinite(applied.output).all()
    assert np.isfinite(applied.backward(np.ones_like(values))).all()


def test_a_softmax_ignores_a_common_shift_of_all_scores():
    """A row of large scores must give the same result as the same row shifted to 0."""
    values, function = _values(), TRANSFER_FUNCTIONS["softmax"]()
    shifted = function.forward(values + 500.0, None).output
    np.testing.assert_allclose(shifted, function.forward(values, None).output, rtol=1e-10)
    np.testing.assert_allclose(shifted.sum(axis=1), 1.0)


@pytest.mark.parametrize("proba", [0.2, 0.5, 0.9])
def test_dropout_leaves_out_its_share_and_keeps_the_mean(proba):
    """Dropout scaled in training and in prediction, so outputs were too small by the factor 1 − proba."""
    ones = np.ones((1000, 100))
    output = Dropout(proba).forward(ones.copy(), np.random.default_rng(0)).output
    assert (output == 0).mean() == pytest.approx(proba, abs=0.01)
    assert set(np.unique(output)) == {0.0, 1 / (1 - proba)}
    assert output.mean() == pytest.approx(1.0, abs=0.03)


def test_dropout_of_nothing_changes_nothing():
    """Some files switch dropout off with proba 0."""
    values = _values()
    np.testing.assert_array_equal(Dropout(0.0).forward(values.copy(), np.random.default_rng(0)).output, values)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_the_same_seed_leaves_out_the_same(name):
    """Without this, a run could not be repeated."""
    function: TransferFunction = TRANSFER_FUNCTIONS[name](proba=0.5)
    first, again, other = (function.forward(_values(), np.random.default_rng(seed)).output for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("name", NAMES)
def test_only_functions_with_dropout_draw_random_numbers(name):
    """A graph makes a generator for each mini-batch and each layer that draws, but not for other layers."""
    assert TRANSFER_FUNCTIONS[name].draws == ("dropout" in name)
