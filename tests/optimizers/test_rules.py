"""Update rules and learning rates, compared with their formulas, in all ways to apply a gradient."""

import inspect
import math
import tracemalloc
from typing import ClassVar

import numpy as np
import pytest
from optimizers import written_out

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    Constant,
    Correction,
    GradientDescent,
    Inverse,
    InverseSquareRoot,
    Momentum,
    Optimizer,
    RMSProp,
    WarmRestarts,
    checked_optimizer,
    view_of,
)

SOME_NUMPY = np.float32(0.1)
"""A numpy scalar, as settings may come from arrays."""

RULES = [
    SGD(),
    SGD(0.1, l2=0.3),
    SGD(0.1, l1=0.2),
    SGD(InverseSquareRoot(0.3, decay=0.5), l1=0.02, l2=0.1),
    SGD(SOME_NUMPY, l1=np.float32(0.02), l2=np.float32(0.3)),
    SGD(InverseSquareRoot(np.float32(0.3), decay=SOME_NUMPY), l2=np.int64(1)),
    GradientDescent(0.1, l1=0.02, l2=0.3),
    FTRL(),
    FTRL(0.3, 0.0),
    FTRL(0.1, 0.1, l1=0.1, l2=0.1),
    FTRL(0.5, 1.0, l1=2.0, keep_start=True),
    FTRL(np.float32(0.3), SOME_NUMPY, l1=SOME_NUMPY, l2=SOME_NUMPY),
    Momentum(),
    Momentum(Correction(0.3, decay=0.1, beta=0.5), momentum=0.5, l1=0.02, l2=0.3),
    Momentum(SOME_NUMPY, momentum=np.float32(0.7), l1=SOME_NUMPY, l2=SOME_NUMPY),
    AdaGrad(),
    AdaGrad(0.3, epsilon=0.1, l1=0.02, l2=0.3),
    RMSProp(),
    RMSProp(InverseSquareRoot(0.3), beta=0.5, epsilon=0.1, l1=0.02, l2=0.3),
    AdaDelta(),
    AdaDelta(0.5, alpha=0.7, beta=0.6, epsilon=1e-3, l1=0.01, l2=0.3),
    Adam(),
    Adam(WarmRestarts(0.3, interval=3), beta=0.8, gamma=0.95, epsilon=1e-3, l1=0.02, l2=0.3),
    Adam(np.float32(0.3), beta=np.float32(0.8), gamma=np.float32(0.95), l1=SOME_NUMPY),
]


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


@pytest.mark.parametrize(("dtype", "rel", "abs_"), [("float64", 1e-10, 1e-13), ("float32", 1e-4, 1e-5)])
@pytest.mark.parametrize(("l1", "l2"), REGULARIZED)
@pytest.mark.parametrize(("rule", "formula", "given", "settings"), CASES)
def test_a_rule_equals_its_formula(gradients, rule, formula, given, settings, l1, l2, dtype, rel, abs_):
    """A slot was wrong, which showed in the weights only many steps later. In float32, 1e-300 made 0/0."""
    optimizer = rule(RATE, l1=l1, l2=l2, **given)
    weights, slots = run(optimizer, START, gradients, dtype)
    expected, expected_slots = written_out.learn(
        formula, START, gradients.tolist(), slots=rule.slot_names, rate=RATE.at, l1=l1, l2=l2, **settings
    )
    assert weights == pytest.approx(expected, rel=rel, abs=abs_)
    for name in rule.slot_names:
        assert slots[name] == pytest.approx(expected_slots[name], rel=rel, abs=abs_)
    assert list(slots) == list(rule.slot_names)
    assert {array.dtype for array in (weights, *slots.values())} == {np.dtype(dtype)}


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
    assert SGD() == SGD(Constant(0.5), l1=0.0, l2=0.0)
    assert FTRL() == FTRL(alpha=0.1, beta=1.0, l1=0.0, l2=0.0, keep_start=False)
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


@pytest.mark.parametrize(
    "rate", [Constant(0.2), Inverse(0.5, decay=2.0), Correction(0.2), WarmRestarts(0.2, interval=5)]
)
@pytest.mark.parametrize("rule", [SGD, Momentum, AdaGrad, RMSProp, AdaDelta, Adam])
def test_every_rule_follows_its_learning_rate(gradients, rule, rate):
    """A rate was computed once and kept, so it did not decay; l1 must use the rate of the step too."""
    formula = getattr(written_out, rule.__name__.lower())
    weights, _ = run(rule(rate, l1=0.1), START, gradients[:12])
    expected, _ = written_out.learn(
        formula, START, gradients[:12].tolist(), slots=rule.slot_names, rate=rate.at, l1=0.1
    )
    assert weights == pytest.approx(expected, rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("rule", [SGD, FTRL, Momentum, AdaGrad, RMSProp, AdaDelta, Adam])
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


@pytest.mark.parametrize(("dtype", "rel", "abs_"), [("float64", 1e-12, 0.0), ("float32", 1e-3, 1e-3)])
@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.3), (6.0, 0.3)])
def test_ftrl_equals_its_formula(gradients, l1, l2, dtype, rel, abs_):
    """An accumulator was wrong, which showed many steps later; z and n were made for float64."""
    weights, slots = run(FTRL(0.1, 0.7, l1=l1, l2=l2), START, gradients, dtype)
    expected, expected_slots = written_out.learn_ftrl(START, gradients.tolist(), alpha=0.1, beta=0.7, l1=l1, l2=l2)
    assert weights == pytest.approx(expected, rel=rel, abs=abs_)
    for name in ("z", "n"):
        assert slots[name] == pytest.approx(expected_slots[name], rel=rel, abs=abs_)
    assert l1 < 6.0 or 0.0 in weights.tolist()


def test_without_regularization_keeps_the_rest():
    """The intercept learned at another rate than the model's own."""
    assert SGD(0.2, l1=1.0, l2=1.0).without_regularization() == SGD(0.2)
    assert GradientDescent(0.2, l1=1.0, l2=1.0).without_regularization() == GradientDescent(0.2)
    assert FTRL(0.2, 0.3, 1.0, 1.0, True).without_regularization() == FTRL(0.2, 0.3, keep_start=True)
    for rule, other in ((Momentum, {"momentum": 0.5}), (AdaGrad, {"epsilon": 0.1}), (RMSProp, {"beta": 0.3})):
        assert rule(0.2, l1=1.0, l2=1.0, **other).without_regularization() == rule(0.2, **other)
    for rule, other in ((AdaDelta, {"alpha": 0.5, "beta": 0.3}), (Adam, {"beta": 0.5, "gamma": 0.3})):
        assert rule(0.2, l1=1.0, l2=1.0, **other).without_regularization() == rule(0.2, **other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Adam, r"fit\(optimizer=\): expected an Optimizer, given the class Adam; make one of it: Adam\(\)"),
        ("adam", r"given 'adam'; take one of streamiter.learn: SGD\(…\), Adam\(…\), FTRL\(…\), …"),
    ],
)
def test_an_object_that_is_no_optimizer_is_refused_with_a_remedy(given, message):
    """A class instead of an object failed at the first step, with Python's error about a missing self."""
    with pytest.raises(ConfigurationError, match=message):
        checked_optimizer("fit", given)
    assert checked_optimizer("fit", rule := Adam()) is rule


@pytest.fixture
def gradients_of_ways():
    return np.random.default_rng(3).normal(size=(20, 6))


@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_the_three_ways_to_update_agree_to_the_last_bit(optimizer, gradients_of_ways):
    """The size of a mini-batch decides how a gradient is applied, and so changed the model."""
    named = np.array([1, 4, 5, 7, 8, 10])
    start = np.random.default_rng(1).normal(size=12)
    ways = {}
    for way in ("dense", "at", "few"):
        weights = start.copy()
        slots = optimizer.new_slots(weights)
        for step, gradient in enumerate(gradients_of_ways, start=1):
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


@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_the_inherited_update_of_few_weights_equals_the_quick_one(optimizer, gradients_of_ways):
    """A new rule implements only ``update``, and an inherited method did not change the caller's arrays."""
    start = np.random.default_rng(2).normal(size=6)
    results = []
    for update_few in (optimizer.update_few, lambda *given: Optimizer.update_few(optimizer, *given)):
        weights, slots = start.copy(), optimizer.new_slots(start)
        views = [view_of(slots[name]) for name in optimizer.slot_names]
        for step, gradient in enumerate(gradients_of_ways, start=1):
            update_few([0, 2, 5], view_of(weights), gradient[:3].tolist(), views, step)
        results.append(weights.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_the_gradient_is_not_changed(optimizer, gradients_of_ways):
    """The gradient was shared with another consumer of the same batch, which read changed values."""
    before = gradients_of_ways.copy()
    weights = np.ones(6)
    slots = optimizer.new_slots(weights)
    optimizer.update(weights, gradients_of_ways[0], slots, 1)
    optimizer.update_at(np.arange(6), weights, gradients_of_ways[1], slots, 2)
    assert np.array_equal(gradients_of_ways, before)


@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_float32_is_updated_equally_as_a_whole_and_in_part(optimizer, gradients_of_ways):
    """A shard that updated a row in pieces, or only columns with a gradient, got other weights."""
    start = np.random.default_rng(4).normal(size=6).astype(np.float32)
    whole, some = start.copy(), start.copy()
    whole_slots, some_slots = optimizer.new_slots(whole), optimizer.new_slots(some)
    for step, gradient in enumerate(gradients_of_ways.astype(np.float32), start=1):
        optimizer.update(whole, gradient, whole_slots, step)
        for at in (np.array([4, 0, 1]), np.array([2, 5, 3])):
            optimizer.update_at(at, some, gradient[at], some_slots, step)
    assert whole.tobytes() == some.tobytes()
    assert all(whole_slots[name].tobytes() == some_slots[name].tobytes() for name in optimizer.slot_names)


def test_single_numbers_are_taken_from_float64_only():
    """Plain floats computed float32 weights in float64, with other bits than ``update_at``."""
    with pytest.raises(ConfigurationError, match="expected an array of float64, given float32; use update_at"):
        view_of(np.zeros(3, np.float32))


def test_rates_count_updates_from_1():
    """A rate that started at step 0 made a first step that was too large."""
    assert Constant(0.5).at(1) == Constant(0.5).at(1000) == 0.5
    assert InverseSquareRoot(0.5, decay=3.0).at(1) == 0.25
    assert InverseSquareRoot(0.5, decay=3.0).at(5) == 0.125
    assert Inverse(0.5, decay=3.0).at(1) == 0.125
    assert Inverse(0.5, decay=3.0).at(5) == 0.03125


@pytest.mark.parametrize(("lr", "alpha", "beta"), [(0.5, 0.001, 0.9), (1.0, 2.0, 0.0), (0.1, 0.0, 0.99)])
def test_the_correction_equals_its_formula(lr, alpha, beta):
    """With t from 0 the first rate divided by 0; with t from 2 the first steps were half as large as they should be."""
    rate = Correction(lr, decay=alpha, beta=beta)
    for t in [1, 2, 3, 10, 1000, 100_000]:
        assert rate.at(t) == pytest.approx(lr / math.sqrt(1 + alpha * t) * (1 - beta) / (1 - beta**t), rel=1e-12)


def test_a_corrected_rate_makes_equal_steps_of_equal_gradients():
    """With a wrong correction, lr·v did not stay lr·g while the velocity grew tenfold."""
    rate, velocity = Correction(0.5, decay=0.0, beta=0.9), 0.0
    for t in range(1, 50):
        velocity = 0.9 * velocity + 1.0
        assert rate.at(t) * velocity == pytest.approx(0.5)


@pytest.mark.parametrize(("lr", "alpha", "interval"), [(0.5, 0.001, 100), (1.0, 0.0, 1), (0.2, 3.0, 7), (1.0, 20.0, 2)])
def test_warm_restarts_equal_a_scheduler_that_counts(lr, alpha, interval):
    """The pure function found a wrong interval, or did not divide again at each restart."""
    rate = WarmRestarts(lr, decay=alpha, interval=interval)
    expected = list(written_out.warm_restarts(lr, alpha, interval, steps=3000))
    assert [rate.at(t) for t in range(1, 3001)] == pytest.approx(expected, rel=1e-12)


def test_warm_restarts_go_from_the_initial_rate_to_a_tenth_and_start_again():
    """The last step of an interval did not have the lowest rate, or the next step did not restart near the highest."""
    rate = WarmRestarts(0.5, decay=0.5)
    assert rate.at(50) == pytest.approx(0.05 + 0.45 / 2)
    assert rate.at(100) == pytest.approx(0.05)
    once, twice = 0.5 / math.sqrt(1.5), 0.5 / math.sqrt(1.5) / math.sqrt(2.0)
    assert rate.at(200) == pytest.approx((once + 0.05) / 2)
    assert rate.at(300) == pytest.approx(0.05)
    assert rate.at(500) == pytest.approx((twice + 0.05) / 2)
    assert rate.at(700) == pytest.approx(0.05)
    assert WarmRestarts(0.5).at(1) == pytest.approx(0.5, rel=1e-3)


def test_rates_do_not_depend_on_earlier_calls():
    """A rate depended on earlier calls, and a restored model, whose first call is for step 250, got a wrong rate."""
    for rate in (Correction(0.5), WarmRestarts(0.5, interval=10), InverseSquareRoot(0.5)):
        late = rate.at(250)
        assert [rate.at(t) for t in range(1, 251)][-1] == rate.at(250) == late
        assert rate == type(rate)(0.5, **({"interval": 10} if isinstance(rate, WarmRestarts) else {}))


def test_defaults_are_the_values_of_angel():
    """A default was changed by accident and changed every model that relied on it."""
    assert Correction(0.5) == Correction(0.5, decay=0.001, beta=0.9)
    assert WarmRestarts(0.5) == WarmRestarts(0.5, decay=0.001, interval=100)
