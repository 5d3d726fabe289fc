"""Data, settings and weights that linear models refuse."""

import math

import numpy as np
import pytest
from learn.linear_cases import LABELS, ROWS, START, bits

from streamiter.errors import ModelError
from streamiter.learn import FTRL, SGD, BadRows, LinearRegression, LogisticRegression, SparseRows

BAD_ROWS = [
    (lambda m, f: m.learn(f(ROWS), [*LABELS[:9], 2]), (9,), "expected targets 0 or 1, given 2.0"),
    (lambda m, f: m.learn(f(ROWS), [math.nan, *LABELS[1:9], -1]), (0, 9), "expected targets 0 or 1, given nan"),
    (lambda m, f: m.learn(f(ROWS), LABELS, [-1.0] + [1.0] * 9), (0,), "sample weights of 0 or more, given -1.0"),
    (lambda m, f: m.learn(f(ROWS), LABELS, [1.0] * 9 + [math.inf]), (9,), "sample weights of 0 or more, given inf"),
    (lambda m, f: m.learn(f([*ROWS[:9], (1.0, math.nan)]), LABELS), (9,), "finite features, given nan for feature 1"),
    (lambda m, f: m.learn(f([(math.inf, 1.0), *ROWS[1:]]), LABELS), (0,), "finite features, given inf for feature 0"),
    (lambda m, f: m.learn(f([(math.inf, 1.0)]), [1]), (0,), "finite features, given inf for feature 0"),
    (lambda m, f: m.learn(f([(math.nan, 1.0)] * 2), [1, 1], [0, 1]), (0, 1), "given nan for feature 0"),
    (lambda m, f: m.predict(f([ROWS[0], (math.nan, 1.0)])), (1,), "finite features, given nan for feature 0"),
    (lambda m, f: m.predict(f([(math.inf, -math.inf)])), (0,), "finite features, given inf for feature 0"),
    (lambda m, f: m.learn_each(f([*ROWS[:3], (1.0, math.inf)]), [0] * 4), (3,), "given inf for feature 1"),
    (lambda m, f: m.learn_each(f(ROWS), [*LABELS[:9], 0.5]), (9,), "expected targets 0 or 1, given 0.5"),
    (lambda m, f: m.gradient(f([(1.0, -math.inf)] * 2), [0, 1]), (0, 1), "given -inf for feature 1"),
]


@pytest.mark.parametrize(("call", "rows", "message"), BAD_ROWS)
@pytest.mark.parametrize("form", [np.array, SparseRows.from_dense], ids=["dense", "sparse"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), FTRL()], ids=str)
def test_bad_rows_are_named_and_the_model_stays_as_it_was(call, rows, message, form, optimizer):
    """One NaN in one row of a thousand made all weights NaN, and this was unnoticed for days."""
    model = LogisticRegression(2, optimizer=optimizer, initial_weights=START)
    model.learn(ROWS, LABELS)
    before = bits(model)
    with pytest.raises(BadRows, match=message) as caught:
        call(model, form)
    assert caught.value.rows == rows
    assert str(caught.value).startswith("LogisticRegression: ")
    assert bits(model) == before


def test_a_bad_feature_of_a_sparse_row_is_named_by_its_place_in_the_model():
    """A user looks the feature up in the hasher, where the position in the row does not help."""
    model = LogisticRegression(1000)
    rows = SparseRows.from_rows([([700, 900], [1.0, math.nan])], 1000)
    for call in (model.learn, model.learn_each, model.gradient):
        with pytest.raises(BadRows, match=r"given nan for feature 900 \(row 0 of the batch\)"):
            call(rows, [1])


@pytest.mark.parametrize("rows", [1, 5])
def test_diverging_weights_are_an_error_before_they_are_infinite(rows):
    """With a learning rate that is too high, the model keeps its last finite weights, and the error names the cause."""
    model = LinearRegression(1, optimizer=SGD(10.0))
    features, targets = np.full((rows, 1), 100.0), np.ones(rows)
    message = None
    for _ in range(1000):
        before = bits(model)
        try:
            model.learn(features, targets)
        except ModelError as error:
            message = str(error)
            break
    assert message is not None
    assert "too large to compute with" in message
    assert "scale the features or lower the learning rate" in message
    assert bits(model) == before
    assert np.isfinite(model.weights).all()
