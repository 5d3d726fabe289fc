"""The update rules, compared with their formulas written out one number at a time."""

import inspect
import tracemalloc
from typing import ClassVar

import numpy as np
import pytest
from optimizers import written_out
from optimizers.rules import RULES

from streamiter.parameter_server.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    Constant,
    Correction,
    InverseSquareRoot,
    Momentum,
    Optimizer,
    RMSProp,
    WarmRestarts,
    view_of,
)

START = [1.0, -1.0, 0.5, 0.0, 2.0, -0.1]
RATE = InverseSquareRoot(0.4, decay=0.3)

CASES = [
    (SGD, written_out.sgd, {}, {}),
    (Momentum, written_out.momentum, {}, {}),
    (Momentum, written_out.momentum, {"momentum": 0.5}, {"mu": 0.5}),
    (AdaGrad, written_out.adagrad, {}, {}),
    (AdaGrad, written_out.adagrad, {"epsilon": 0.3}, {"epsilon": 0.3}),
    (RMSProp, written_out.rmsprop, {}, {}),
    (RMSProp, written_out.rmsprop, {"beta": 0.3, "epsilon": 0.3}, {"beta": 0.3, "epsilon": 0.3}),
    (AdaDelta, written_out.adadelta, {}, {}),
    (
        AdaDelta,
        written_out.adadelta,
        {"alpha": 0.5, "beta": 0.7, "epsilon": 0.1},
        {"alpha": 0.5, "beta": 0.7, "epsilon": 0.1},
    ),
    (Adam, written_out.adam, {}, {}),
    (Adam, written_out.adam, {"beta": 0.5, "gamma": 0.7, "epsilon": 0.3}, {"beta": 0.5, "gamma": 0.7, "epsilon": 0.3}),
]
REGULARIZED = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.3), (0.2, 0.3)]


def run(optimizer: Optimizer, start, gradients, dtype="float64"):
    weights = np.array(start, dtype)
    slots = optimizer.new_slots(weights)
    for step, gradient in enumerate(gradients, start=1):
        optimizer.update(weights, np.array(gradient, dtype), slots, step)
    return weights, slots


@pytest.fixture
def gradients():
    return np.random.default_rng(3).normal(size=(60, 6))


@pytest.mark.parametrize(("l1", "l2"), REGULARIZED)
@pytest.mark.parametrize(("rule", "formula", "given", "settings"), CASES)
def test_a_rule_equals_its_formula(gradients, rule, formula, given, settings, l1, l2):
    """A slot was wrong, which showed in the weights only many steps later."""
    optimizer = rule(RATE, l1=l1, l2=l2, **given)
    weights, slots = run(optimizer, START, gradients)
    expected, expected_slots = written_out.learn(
        formula, START, gradients.tolist(), slots=rule.slot_names, rate=RATE.at, l1=l1, l2=l2, **settings
    )
    assert weights == pytest.approx(expected, rel=1e-10, abs=1e-13)
    for name in rule.slot_names:
        assert slots[name] == pytest.approx(expected_slots[name], rel=1e-10)
    assert list(slots) == list(rule.slot_names)


@pytest.mark.parametrize(("l1", "l2"), REGULARIZED)
@pytest.mark.parametrize(("rule", "formula", "given", "settings"), CASES)
def test_float32_differs_from_the_formula_by_rounding_only(gradients, rule, formula, given, settings, l1, l2):
    """A constant that vanishes in float32, such as 1e-300, made 0/0 only in float32."""
    weights, slots = run(rule(RATE, l1=l1, l2=l2, **given), START, gradients, "float32")
    expected, expected_slots = written_out.learn(
        formula, START, gradients.tolist(), slots=rule.slot_names, rate=RATE.at, l1=l1, l2=l2, **settings
    )
    assert weights.dtype == np.float32
    assert weights == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name in rule.slot_names:
        assert slots[name].dtype == np.float32
        assert slots[name] == pytest.approx(expected_slots[name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("rule", "formula", "given", "settings"), CASES)
@pytest.mark.parametrize("few", [False, True])
def test_a_sparse_gradient_changes_only_the_weights_that_it_names(gradients, rule, formula, given, settings, few):
    """Momentum, decay of slots and l2 changed weights whose features did not occur."""
    random = np.random.default_rng(5)
    optimizer = rule(RATE, l1=0.05, l2=0.3, **given)
    weights = np.array(START)
    slots = optimizer.new_slots(weights)
    with_gaps = []
    for step, gradient in enumerate(gradients, start=1):
        at = np.flatnonzero(random.random(6) < 0.4)
        with_gaps.append([float(g) if i in at else None for i, g in enumerate(gradient)])
        untouched = np.setdiff1d(np.arange(6), at)
        before = [array[untouched].tobytes() for array in (weights, *slots.values())]
        if few:
            views = [view_of(slots[name]) for name in rule.slot_names]
            optimizer.update_few(at.tolist(), view_of(weights), gradient[at].tolist(), views, step)
        else:
            optimizer.update_at(at, weights, gradient[at], slots, step)
        assert before == [array[untouched].tobytes() for array in (weights, *slots.values())]
    expected, expected_slots = written_out.learn(
        formula, START, with_gaps, slots=rule.slot_names, rate=RATE.at, l1=0.05, l2=0.3, **settings
    )
    assert weights == pytest.approx(expected, rel=1e-10, abs=1e-13)
    for name in rule.slot_names:
        assert slots[name] == pytest.approx(expected_slots[name], rel=1e-10)


def test_defaults_are_the_values_of_the_literature():
    """A default was changed by accident and changed every model that relied on it."""
    assert Momentum() == Momentum(Constant(0.01), momentum=0.9, l1=0.0, l2=0.0)
    assert AdaGrad() == AdaGrad(Constant(0.01), epsilon=1e-8, l1=0.0, l2=0.0)
    assert RMSProp() == RMSProp(Constant(0.01), beta=0.9, epsilon=1e-8, l1=0.0, l2=0.0)
    assert AdaDelta() == AdaDelta(Constant(1.0), alpha=0.9, beta=0.9, epsilon=1e-7, l1=0.0, l2=0.0)
    assert Adam() == Adam(Constant(0.001), beta=0.9, gamma=0.99, epsilon=1e-8, l1=0.0, l2=0.0)


def test_each_rule_has_a_name_of_its_own():
    """The state of one rule was taken for the state of another rule at a restore."""
    assert len({type(rule).name for rule in RULES}) == len({type(rule) for rule in RULES}) == 8
    assert (AdaGrad.name, RMSProp.name) == ("adagrad", "rmsprop")


def test_all_public_rules_are_among_those_tested():
    """A rule was added to the package and was in none of the lists of tests."""
    import streamiter.parameter_server.optimizers as package

    concrete = {
        each
        for each in vars(package).values()
        if inspect.isclass(each) and issubclass(each, Optimizer) and not inspect.isabstract(each)
    }
    assert concrete == {type(rule) for rule in RULES}


@pytest.mark.parametrize("rate", [Constant(0.2), Correction(0.2), WarmRestarts(0.2, interval=5)])
@pytest.mark.parametrize("rule", [Momentum, AdaGrad, RMSProp, AdaDelta, Adam])
def test_every_rule_follows_its_learning_rate(gradients, rule, rate):
    """A rate was computed once and kept, so it did not decay; l1 must use the rate of the step too."""
    formula = getattr(written_out, rule.__name__.lower())
    weights, _ = run(rule(rate, l1=0.1), START, gradients[:12])
    expected, _ = written_out.learn(
        formula, START, gradients[:12].tolist(), slots=rule.slot_names, rate=rate.at, l1=0.1
    )
    assert weights == pytest.approx(expected, rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("rule", [Momentum, AdaGrad, RMSProp, AdaDelta, Adam])
def test_shrunk_weights_are_a_plain_0(rule):
    """A published weight of −0.0 looked like a mistake and differed from 0.0 byte by byte."""
    weights, _ = run(rule(0.1, l1=50.0), [0.01, -0.01], [[0.1, -0.1]])
    few = np.array([0.01, -0.01])
    optimizer = rule(0.1, l1=50.0)
    slots = optimizer.new_slots(few)
    views = [view_of(slots[name]) for name in rule.slot_names]
    optimizer.update_few([0, 1], view_of(few), [0.1, -0.1], views, 1)
    assert weights.tobytes() == few.tobytes() == np.zeros(2).tobytes()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_gradient_may_name_no_weights(rule):
    """An update without weights failed when all rows of a worker's step were on other shards."""
    weights = np.array([1.0, -2.0])
    slots = rule.new_slots(weights)
    before = {name: slot.copy() for name, slot in slots.items()}
    rule.update_few([], view_of(weights), [], [view_of(slots[name]) for name in rule.slot_names], 1)
    assert weights.tolist() == [1.0, -2.0]
    assert all(np.array_equal(slots[name], before[name]) for name in slots)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, FTRL)], ids=repr)
def test_existing_weights_have_the_slots_of_new_ones(rule):
    """A warm start changed the slots of a rule other than FTRL, whose state depends on the given weights."""
    slots, new = rule.slots_for_warm_start(np.array([1.0, -2.0])), rule.new_slots(np.array([1.0, -2.0]))
    assert slots.keys() == new.keys()
    assert all(np.array_equal(slots[name], new[name]) for name in new)


class Watched(np.ndarray):
    """Records the types of all computations with an array."""

    computed: ClassVar[set[str]] = set()

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        def plain(array):
            return array.view(np.ndarray) if isinstance(array, Watched) else array

        given = {"out": tuple(plain(array) for array in out)} if out else {}
        where = {"where": plain(kwargs.pop("where"))} if "where" in kwargs else {}
        result = getattr(ufunc, method)(*(plain(each) for each in inputs), **given, **where, **kwargs)
        Watched.computed.add(str(result.dtype))
        return out[0] if out else result.view(Watched)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_everything_is_computed_in_the_type_of_the_weights(rule, dtype, gradients):
    """A copy of a row in float64 took twice its memory, and time to convert it twice."""
    weights = np.array(START, dtype).view(Watched)
    slots = rule.new_slots(weights)
    Watched.computed = set()
    for step, gradient in enumerate(gradients[:3].astype(dtype).view(Watched), start=1):
        rule.update(weights, gradient, slots, step)
        rule.update_at(np.arange(6), weights, gradient, slots, step)
    assert Watched.computed - {"bool"} == {dtype}
    assert {array.dtype for array in (weights, *slots.values())} == {np.dtype(dtype)}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_whole_row_is_updated_with_few_temporary_arrays(rule):
    """A step on a row of 10 million numbers took the memory of ten more rows, and the kernel killed the process."""
    weights = np.ones(100_000, np.float32)
    gradient, slots = weights * 0.5, rule.new_slots(weights)
    tracemalloc.start()
    try:
        rule.update(weights, gradient, slots, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3.2 * weights.nbytes


def test_ftrl_of_float32_differs_from_the_formula_by_rounding_only(gradients):
    """The state z and n was made for float64, and only float64 was tested."""
    weights, slots = run(FTRL(0.1, 0.7, l1=0.5, l2=0.3), START, gradients, "float32")
    expected, expected_slots = written_out.learn_ftrl(START, gradients.tolist(), alpha=0.1, beta=0.7, l1=0.5, l2=0.3)
    assert weights == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert slots["z"] == pytest.approx(expected_slots["z"], rel=1e-3, abs=1e-3)
    assert slots["n"] == pytest.approx(expected_slots["n"], rel=1e-4)
