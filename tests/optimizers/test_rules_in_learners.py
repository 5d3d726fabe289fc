"""Linear models with each update rule: dense and sparse, online and offline, across a restore."""

import numpy as np
import pytest

from streamiter import Columns, Flow
from streamiter.learn import (
    AdaDelta,
    AdaGrad,
    Adam,
    Correction,
    Examples,
    LinearRegression,
    LogisticRegression,
    Momentum,
    RMSProp,
    SparseRows,
    WarmRestarts,
    train_online,
)

RULES = [
    Momentum(Correction(0.5), l1=1e-4, l2=1e-3),
    AdaGrad(0.3, l1=1e-4, l2=1e-3),
    RMSProp(WarmRestarts(0.05), l1=1e-4, l2=1e-3),
    AdaDelta(epsilon=1e-4, l1=1e-5, l2=1e-3),
    Adam(0.03, l1=1e-4, l2=1e-3),
]
TRUTH = np.array([1.5, -2.0, 0.5, 0.0])


def data(count=400, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 4)) * (random.random((count, 4)) < 0.7)
    return x, x @ TRUTH + 0.7


def bits(model):
    state = model.state()
    arrays = [state["weights"], state["bias"]]
    arrays += [*state["slots"].values(), *state["bias slots"].values()]
    return [array.tobytes() for array in arrays], state["version"], state["step"]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("sparse", [False, True])
def test_fit_learns_with_every_rule(rule, sparse):
    """Learners accepted a rule with which they did not learn."""
    x, y = data()
    features = SparseRows.from_dense(x) if sparse else x
    model = LogisticRegression(4)
    model.fit(features, (y > 0).astype(float), rounds=200, mini_batch=100, optimizer=rule)
    assert np.mean((model.predict(features) > 0.5) == (y > 0)) > 0.95
    assert model.intercept_weight > 0.1


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_online_training_learns_with_every_rule(rule, mode):
    """Sparse gradients that the owner applies for workers reached a rule that did not learn from them."""
    x, y = data(2000)
    flow = Flow("online")
    rows = flow.from_items(Columns({"x": x, "y": (y > 0).astype(float)}))

    def extract(rows):
        return Examples(SparseRows.from_dense(rows["x"]), rows["y"])

    def model():
        return LogisticRegression(4, optimizer=rule)

    training = train_online(rows, model, extract=extract, mode=mode, mini_batch=20, window=500)
    metrics = training.validation.collect()
    flow.run()
    assert metrics.items[-1]["window_accuracy"] > 0.9


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 40])
def test_learning_resumes_after_a_restore_to_the_last_bit(rule, sparse, rows_at_once):
    """A slot of the intercept, or the number of the step, was missing in the state."""
    x, y = data(160)
    whole, first, second = (LinearRegression(4, optimizer=rule) for _ in range(3))
    for begin in range(0, 160, rows_at_once):
        chosen = slice(begin, begin + rows_at_once)
        features = SparseRows.from_dense(x[chosen]) if sparse else x[chosen]
        whole.learn(features, y[chosen])
        if begin == 80:
            second.restore(first.state())
        (first if begin < 80 else second).learn(features, y[chosen])
    assert bits(whole) == bits(second)
    assert bits(first) != bits(second)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_one_step_does_not_depend_on_the_form_of_the_features(rule):
    """Rows one at a time are computed with plain floats, batches with arrays, and their results differed."""
    x, y = data(60)
    x[x == 0.0] = 0.1  # a sparse step updates only named weights: here all of them
    one_by_one, each, arrays = (LinearRegression(4, optimizer=rule) for _ in range(3))
    for row, target in zip(x, y, strict=True):
        one_by_one.learn([row], [target])
        arrays.learn(SparseRows.from_dense(np.array([row])), [target])
    each.learn_each(x, y)
    assert bits(one_by_one) == bits(each) == bits(arrays)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_intercept_is_not_regularized(rule):
    """The intercept was shrunk with the weights, and every prediction moved towards 0."""
    strong = type(rule)(rule.learning_rate, l1=1e6, l2=0.0)
    model = LinearRegression(4, optimizer=strong)
    x, y = data(40)
    for _ in range(10):
        model.learn(x, y)
    assert model.weights.tolist() == [0.0] * 4
    assert model.intercept_weight != 0.0
