"""The update rules, against their formulas written out one number at a time."""

import math

import numpy as np
import pytest

from streamiter.errors import ConfigurationError
from streamiter.learn.optimizers import FTRL, SGD, GradientDescent, Optimizer, view_of
from streamiter.learn.optimizers.learning_rates import Constant, Inverse, InverseSquareRoot

OPTIMIZERS = [
    SGD(),
    SGD(0.1, l2=0.3),
    SGD(0.1, l1=0.2),
    SGD(InverseSquareRoot(0.3, decay=0.5), l1=0.02, l2=0.1),
    GradientDescent(0.1, l1=0.02, l2=0.3),
    FTRL(),
    FTRL(0.3, 0.0),
    FTRL(0.1, 0.1, l1=0.1, l2=0.1),
    FTRL(0.5, 1.0, l1=2.0, keep_start=True),
    SGD(np.float32(0.1), l1=np.float32(0.02), l2=np.float32(0.3)),
    SGD(InverseSquareRoot(np.float32(0.3), decay=np.float32(0.1)), l2=np.int64(1)),
    FTRL(np.float32(0.3), np.float32(0.1), l1=np.float32(0.1), l2=np.float32(0.1)),
]


def soft(x, threshold):
    return math.copysign(max(abs(x) - threshold, 0.0), x)


def sgd_written_out(weights, gradients, rate_at, l1, l2):
    weights = list(weights)
    for step, gradient in enumerate(gradients, start=1):
        rate = rate_at(step)
        for i, g in enumerate(gradient):
            weights[i] = soft(weights[i] - rate * (g + l2 * weights[i]), rate * l1)
    return weights


def ftrl_written_out(weights, gradients, alpha, beta, l1, l2):
    weights = list(weights)
    z, n = [0.0] * len(weights), [0.0] * len(weights)
    for gradient in gradients:
        for i, g in enumerate(gradient):
            delta = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / alpha
            n[i] += g * g
            z[i] += g - delta * weights[i]
            if abs(z[i]) <= l1:
                weights[i] = 0.0
            else:
                sign = math.copysign(1.0, z[i])
                weights[i] = -(z[i] - sign * l1) / (l2 + (beta + math.sqrt(n[i])) / alpha)
    return weights, z, n


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
def test_sgd_does_what_its_formula_says(gradients, rate, l1, l2):
    """The order matters: l2 inside the step, the soft threshold after it."""
    start = [1.0, -1.0, 0.5, 0.0, 2.0, -0.1]
    weights, _ = run(SGD(rate, l1=l1, l2=l2), start, gradients)
    assert weights == pytest.approx(sgd_written_out(start, gradients, rate.at, l1, l2), rel=1e-12)


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.3), (3.0, 0.3)])
def test_ftrl_does_what_its_formula_says(gradients, l1, l2):
    """The accumulators must agree too: a wrong one shows only many steps later."""
    start = [0.4, -0.2, 0.0, 0.0, 0.0, 0.0]
    weights, slots = run(FTRL(0.1, 0.7, l1=l1, l2=l2), start, gradients)
    expected, z, n = ftrl_written_out(start, gradients, 0.1, 0.7, l1, l2)
    assert weights == pytest.approx(expected, rel=1e-12)
    assert slots["z"] == pytest.approx(z, rel=1e-12)
    assert slots["n"] == pytest.approx(n, rel=1e-12)
    assert l1 < 3.0 or 0.0 in weights.tolist()


def test_defaults_are_those_of_the_literature():
    """Changed by accident they would change every model that relies on them."""
    assert SGD() == SGD(Constant(0.5), l1=0.0, l2=0.0)
    assert FTRL() == FTRL(alpha=0.1, beta=1.0, l1=0.0, l2=0.0, keep_start=False)


def test_rates_count_updates_from_1():
    """A rate that begins at step 0 makes a first step that is too large."""
    assert Constant(0.5).at(1) == Constant(0.5).at(1000) == 0.5
    assert InverseSquareRoot(0.5, decay=3.0).at(1) == 0.25
    assert InverseSquareRoot(0.5, decay=3.0).at(5) == 0.125
    assert Inverse(0.5, decay=3.0).at(1) == 0.125


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_the_three_ways_to_update_agree_to_the_last_bit(optimizer, gradients):
    """Which one is taken depends on the size of a mini-batch; a model must not depend on that."""
    named = np.array([1, 4, 5, 7, 8, 10])
    start = np.random.default_rng(1).normal(size=12)
    ways = {}
    for way in ("dense", "at", "few"):
        weights = start.copy()
        slots = optimizer.new_slots(weights)
        for step, gradient in enumerate(gradients, start=1):
            if way == "dense":
                part = weights[named]
                part_slots = {name: slot[named] for name, slot in slots.items()}
                optimizer.update(part, gradient, part_slots, step)
                weights[named] = part
                for name, slot in part_slots.items():
                    slots[name][named] = slot
            elif way == "at":
                optimizer.update_at(named, weights, gradient, slots, step)
            else:
                views = [view_of(slots[name]) for name in optimizer.slot_names]
                optimizer.update_few(named.tolist(), view_of(weights), gradient.tolist(), views, step)
        ways[way] = [weights.tobytes(), *(slots[name].tobytes() for name in optimizer.slot_names)]
        others = np.setdiff1d(np.arange(12), named)
        assert weights[others].tolist() == start[others].tolist()
    assert ways["dense"] == ways["at"] == ways["few"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_rule_without_a_quick_form_gets_the_same_from_the_general_one(optimizer, gradients):
    """New rules implement ``update`` only; what they inherit must work on the caller's own arrays."""
    start = np.random.default_rng(2).normal(size=6)
    results = []
    for update_few in (optimizer.update_few, lambda *given: Optimizer.update_few(optimizer, *given)):
        weights, slots = start.copy(), optimizer.new_slots(start)
        views = [view_of(slots[name]) for name in optimizer.slot_names]
        for step, gradient in enumerate(gradients, start=1):
            update_few([0, 2, 5], view_of(weights), gradient[:3].tolist(), views, step)
        results.append(weights.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_the_gradient_is_not_changed(optimizer, gradients):
    """It may be shared with another consumer of the same batch."""
    before = gradients.copy()
    weights = np.ones(6)
    slots = optimizer.new_slots(weights)
    optimizer.update(weights, gradients[0], slots, 1)
    optimizer.update_at(np.arange(6), weights, gradients[1], slots, 2)
    assert np.array_equal(gradients, before)


@pytest.mark.parametrize("optimizer", [FTRL(0.1, 0.0, l1=0.1), FTRL(keep_start=True), FTRL(l2=1.0)], ids=str)
def test_ftrl_changes_nothing_where_the_gradient_is_0(optimizer):
    """That makes dense and sparse the same, and keeps the start weight of a feature not yet seen."""
    weights = np.array([0.5, -2.0, 0.0])
    slots = optimizer.new_slots(weights)
    before = {name: slot.copy() for name, slot in slots.items()}
    optimizer.update(weights, np.zeros(3), slots, 1)
    views = [view_of(slots[name]) for name in optimizer.slot_names]
    optimizer.update_few([0, 1, 2], view_of(weights), [0.0, 0.0, 0.0], views, 2)
    assert weights.tolist() == [0.5, -2.0, 0.0]
    assert all(np.array_equal(slots[name], before[name]) for name in before)


@pytest.mark.parametrize("l1", [0.0, 0.05])
def test_each_weight_may_have_an_l2_of_its_own(l1):
    """The paths for all weights, for some and for few must take the same numbers from the array."""
    start, l2 = [1.0, -2.0, 3.0, -4.0], [0.0, 0.1, 0.5, 2.0]
    gradient = [0.3, -0.2, 0.1, 0.7]
    optimizer = SGD(0.1, l1=l1, l2=l2)
    alone = [
        sgd_written_out([weight], [[slope]], lambda step: 0.1, l1, shrink)[0]
        for weight, slope, shrink in zip(start, gradient, l2, strict=True)
    ]
    whole, some, few = (np.array(start) for _ in range(3))
    slots = optimizer.new_slots(whole)
    optimizer.update(whole, np.array(gradient), slots, 1)
    optimizer.update_at(np.array([1, 3]), some, np.array(gradient)[[1, 3]], slots, 1)
    optimizer.update_few([1, 3], view_of(few), [gradient[1], gradient[3]], [], 1)
    assert whole == pytest.approx(alone)
    assert some.tolist() == few.tolist() == [1.0, whole[1], 3.0, whole[3]]
    with pytest.raises(ConfigurationError, match=r"one number for each of the 3 weights, given 4"):
        optimizer.new_slots(np.zeros(3))


def test_the_l2_of_each_weight_is_the_optimizer_s_own():
    """An array that its maker used again changed how a running model learned."""
    l2 = np.array([0.0, 1.0])
    optimizer = SGD(0.5, l2=l2)
    l2[:] = 5.0
    weights, _ = run(optimizer, [1.0, 1.0], [[0.0, 0.0]])
    assert weights.tolist() == [1.0, 0.5]


def test_optimizers_are_equal_by_value_also_with_an_l2_for_each_weight():
    """Comparing two of them, or using one as a key, raised what numpy says of the truth of an array."""
    optimizer = SGD(0.1, l1=0.2, l2=[0.0, 1.0])
    same = SGD(0.1, l1=0.2, l2=np.array([0.0, 1.0]))
    assert optimizer == same
    assert hash(optimizer) == hash(same)
    others = [SGD(0.1, l1=0.2, l2=l2) for l2 in (0.0, 1.0, [0.0], [0.0, 2.0], [0.0, 1.0, 1.0])]
    others += [SGD(0.2, l1=0.2, l2=[0.0, 1.0]), SGD(0.1, l2=[0.0, 1.0])]
    assert optimizer not in [*others, FTRL()]
    assert SGD(0.1, l2=np.float32(0.5)) == SGD(0.1, l2=0.5)


def test_ftrl_gives_up_its_start_at_the_first_gradient_unless_told_to_keep_it():
    """A warm start from a published model was forgotten with the first small gradient of each feature."""
    start, small = np.array([1.5, -0.7]), np.array([1e-6, 1e-6])
    for keep_start, expected in ((False, [0.0, 0.0]), (True, [1.5, -0.7])):
        optimizer = FTRL(0.1, 1.0, l1=1e-3, l2=0.1, keep_start=keep_start)
        weights, _ = run(optimizer, start, [small])
        assert weights == pytest.approx(expected, abs=1e-4)


def test_shrunk_weights_are_a_plain_0():
    """A published weight of −0.0 looks like a mistake, and differs from 0.0 byte by byte."""
    for optimizer in (SGD(0.1, l1=5.0), FTRL(l1=5.0)):
        weights, _ = run(optimizer, [0.01, -0.01], [[0.1, -0.1]])
        assert [math.copysign(1.0, weight) for weight in weights] == [1.0, 1.0]
        assert weights.tolist() == [0.0, 0.0]


def test_without_regularization_keeps_the_rest():
    """The intercept learns at the model's own rate."""
    assert SGD(0.2, l1=1.0, l2=1.0).without_regularization() == SGD(0.2)
    assert GradientDescent(0.2, l1=1.0, l2=1.0).without_regularization() == GradientDescent(0.2)
    assert FTRL(0.2, 0.3, 1.0, 1.0, True).without_regularization() == FTRL(0.2, 0.3, keep_start=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(0.0), "learning_rate: expected a number above 0, given 0.0"),
        (lambda: SGD(math.nan), "learning_rate: expected a number above 0, given nan"),
        (lambda: SGD(l2=-1.0), r"SGD\(l2=\): expected a number of 0 or more, given -1.0"),
        (
            lambda: GradientDescent(l1=-1.0),
            r"GradientDescent\(l1=\): expected a number of 0 or more, given -1.0",
        ),
        (
            lambda: GradientDescent(l2="abc"),
            r"GradientDescent\(l2=\): expected a number of 0 or more, given 'abc'",
        ),
        (lambda: SGD("fast"), "learning_rate: expected a number above 0, given 'fast'"),
        (lambda: SGD(l1=[0.1]), r"SGD\(l1=\): expected a number of 0 or more, given \[0.1\]"),
        (lambda: SGD(l1=10**400), r"SGD\(l1=\): expected a number of 0 or more, given 1000"),
        (lambda: SGD(l2=[10**400]), r"SGD\(l2=\): .* one for each weight, given \[1000"),
        (lambda: SGD(l2="abc"), r"SGD\(l2=\): .* one for each weight, given 'abc'"),
        (lambda: SGD(l2=["abc"]), r"SGD\(l2=\): .* one for each weight, given \['abc'\]"),
        (lambda: SGD(l2=[[0.1], [0.1, 0.2]]), r"SGD\(l2=\): .* one for each weight, given \[\[0.1\], "),
        (lambda: SGD(l2=[]), r"SGD\(l2=\): .* one for each weight, given an array of shape \(0,\)"),
        (lambda: SGD(l2=None), r"SGD\(l2=\): .* one for each weight, given "),
        (lambda: SGD(l2=np.float32(-1.0)), r"SGD\(l2=\): expected a number of 0 or more, given .*-1.0"),
        (lambda: SGD(l2=[0.1, -1.0]), r"SGD\(l2=\): .* one for each weight, given .* from -1.0 to 0.1"),
        (lambda: SGD(l2=[[0.1]]), r"SGD\(l2=\): .* one for each weight, given an array of shape \(1, 1\)"),
        (lambda: FTRL(alpha=0.0), r"FTRL\(alpha=\): expected a number above 0, given 0.0"),
        (lambda: FTRL(l1=math.inf), r"FTRL\(l1=\): expected a number of 0 or more, given inf"),
        (lambda: Inverse(0.5, decay=-0.1), "decay: expected a number of 0 or more, given -0.1"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make, message):
    """A rate of 0 would learn nothing, silently, for weeks."""
    with pytest.raises(ConfigurationError, match=message):
        make()
