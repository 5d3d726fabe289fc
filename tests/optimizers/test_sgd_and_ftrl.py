"""SGD and FTRL: their formulas, and features that only they have."""

import math

import numpy as np
import pytest
from optimizers import written_out

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.optimizers import (
    FTRL,
    SGD,
    Constant,
    GradientDescent,
    Inverse,
    InverseSquareRoot,
    Optimizer,
    view_of,
)


def run(optimizer: Optimizer, start, gradients):
    weights = np.array(start)
    slots = optimizer.new_slots(weights)
    for step, gradient in enumerate(gradients, start=1):
        optimizer.update(weights, np.array(gradient), slots, step)
    return weights, slots


@pytest.fixture
def gradients():
    return np.random.default_rng(3).normal(size=(20, 6))


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.3), (0.2, 0.3)])
@pytest.mark.parametrize("rate", [Constant(0.5), InverseSquareRoot(0.5, decay=2.0), Inverse(0.5, decay=2.0)])
def test_sgd_equals_its_formula(gradients, rate, l1, l2):
    """l2 was applied after the step, or the soft threshold inside it."""
    start = [1.0, -1.0, 0.5, 0.0, 2.0, -0.1]
    weights, _ = run(SGD(rate, l1=l1, l2=l2), start, gradients)
    expected, _ = written_out.learn(written_out.sgd, start, gradients.tolist(), rate=rate.at, l1=l1, l2=l2)
    assert weights == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.3), (3.0, 0.3)])
def test_ftrl_equals_its_formula(gradients, l1, l2):
    """An accumulator was wrong, which showed in the weights only many steps later."""
    start = [0.4, -0.2, 0.0, 0.0, 0.0, 0.0]
    weights, slots = run(FTRL(0.1, 0.7, l1=l1, l2=l2), start, gradients)
    expected, expected_slots = written_out.learn_ftrl(start, gradients.tolist(), beta=0.7, l1=l1, l2=l2)
    assert weights == pytest.approx(expected, rel=1e-12)
    assert slots["z"] == pytest.approx(expected_slots["z"], rel=1e-12)
    assert slots["n"] == pytest.approx(expected_slots["n"], rel=1e-12)
    assert l1 < 3.0 or 0.0 in weights.tolist()


def test_defaults_are_the_values_of_the_literature():
    """A default was changed by accident and changed every model that relied on it."""
    assert SGD() == SGD(Constant(0.5), l1=0.0, l2=0.0)
    assert FTRL() == FTRL(alpha=0.1, beta=1.0, l1=0.0, l2=0.0, keep_start=False)


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
        weights, _ = run(optimizer, start, [small])
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


def test_shrunk_weights_are_a_plain_0():
    """A published weight of −0.0 looked like a mistake and differed from 0.0 byte by byte."""
    for optimizer in (SGD(0.1, l1=5.0), FTRL(l1=5.0)):
        weights, _ = run(optimizer, [0.01, -0.01], [[0.1, -0.1]])
        assert [math.copysign(1.0, weight) for weight in weights] == [1.0, 1.0]
        assert weights.tolist() == [0.0, 0.0]
        few = np.array([0.01, -0.01])
        slots = optimizer.new_slots(few)
        optimizer.update_few([0, 1], view_of(few), [0.1, -0.1], [view_of(slots[n]) for n in optimizer.slot_names], 1)
        assert few.tobytes() == np.zeros(2).tobytes()
