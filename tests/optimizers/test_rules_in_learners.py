"""Linear models with each update rule, and the features that only SGD and FTRL have."""

import math

import numpy as np
import pytest
from optimizers import written_out

from streamiter import Columns, Flow
from streamiter.errors import ConfigurationError
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
from streamiter.parameter_server.optimizers import FTRL, Constant, GradientDescent, InverseSquareRoot, view_of

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


@pytest.mark.parametrize("optimizer", [FTRL(0.1, 0.0, l1=0.1), FTRL(keep_start=True), FTRL(l2=1.0)], ids=str)
def test_ftrl_changes_nothing_where_the_gradient_is_0(optimizer):
    """Dense and sparse updates differed, and a feature that had not occurred lost its start weight."""
    weights = np.array([0.5, -2.0, 0.0])
    slots = optimizer.new_slots(weights)
    before = {name: slot.copy() for name, slot in slots.items()}
    optimizer.update(weights, np.zeros(3), slots, 1)
    views = [view_of(slots[name]) for name in optimizer.slot_names]
    optimizer.update_few([0, 1, 2], view_of(weights), [0.0, 0.0, 0.0], views, 2)
    assert weights.tolist() == [0.5, -2.0, 0.0]
    assert all(np.array_equal(slots[name], before[name]) for name in before)


def test_ftrl_discards_its_start_at_the_first_gradient_by_default():
    """A warm start from a published model was forgotten with the first small gradient of each feature.

    In another bug, l1 moved each weight towards 0 at its first gradient.
    """
    start, small = np.array([1.5, -0.7]), np.array([1e-6, 1e-6])
    for keep_start, expected in ((False, [0.0, 0.0]), (True, [1.5, -0.7])):
        optimizer = FTRL(0.1, 1.0, l1=0.5, l2=0.1, keep_start=keep_start)
        weights = start.copy()
        optimizer.update(weights, small, optimizer.new_slots(weights), 1)
        assert weights == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.02, 0.0), (0.0, 0.3), (0.02, 0.3)])
def test_gradient_descent_equals_its_formula(l1, l2):
    """The weights were shrunk before the step, and so differed from the weights in the papers."""
    optimizer = GradientDescent(InverseSquareRoot(0.5, decay=1.0), l1=l1, l2=l2)
    weights, expected = np.array([1.0, -1.0, 0.0, 0.5]), [1.0, -1.0, 0.0, 0.5]
    for step, gradient in enumerate([[0.3, -0.2, 0.0, 2.0], [-1.0, 0.5, 0.7, 0.1]], start=1):
        optimizer.update(weights, np.array(gradient), {}, step)
        expected = written_out.gradient_descent(expected, gradient, lr=0.5 / math.sqrt(1 + step), l1=l1, l2=l2)
    assert weights == pytest.approx(expected, rel=1e-12)


def test_gradient_descent_takes_its_rate_as_a_number_or_a_rule():
    """Equal settings were different when a rate was given as a number and as a rule."""
    assert GradientDescent(0.5) == GradientDescent(Constant(0.5))
    assert GradientDescent(0.5).learning_rate == Constant(0.5)


def test_gradient_descent_that_would_invert_weights_is_refused():
    """A decaying rate was not checked at its first and largest step."""
    rate = InverseSquareRoot(1.0, decay=1.0)
    assert GradientDescent(0.5, l2=2.0).l2 == 2.0
    assert GradientDescent(rate, l2=math.sqrt(2) * 0.999).l2 > 1.4
    with pytest.raises(ConfigurationError) as raised:
        GradientDescent(rate, l2=1.5)
    assert str(raised.value) == (
        "GradientDescent(l2=): expected learning_rate·l2 of at most 1, given 0.707107·1.5 = 1.06066, which changes "
        "the signs of weights instead of shrinking them; lower one of them"
    )
