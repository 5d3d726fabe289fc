"""All ways to apply a gradient give the same numbers, and change no other weights."""

import numpy as np
import pytest
from optimizers.rules import RULES

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.optimizers import Optimizer, view_of


@pytest.fixture
def gradients():
    return np.random.default_rng(3).normal(size=(20, 6))


@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_the_three_ways_to_update_agree_to_the_last_bit(optimizer, gradients):
    """The size of a mini-batch decides how a gradient is applied, and so changed the model."""
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


@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_the_inherited_update_of_few_weights_equals_the_quick_one(optimizer, gradients):
    """A new rule implements only ``update``, and an inherited method did not change the caller's arrays."""
    start = np.random.default_rng(2).normal(size=6)
    results = []
    for update_few in (optimizer.update_few, lambda *given: Optimizer.update_few(optimizer, *given)):
        weights, slots = start.copy(), optimizer.new_slots(start)
        views = [view_of(slots[name]) for name in optimizer.slot_names]
        for step, gradient in enumerate(gradients, start=1):
            update_few([0, 2, 5], view_of(weights), gradient[:3].tolist(), views, step)
        results.append(weights.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_the_gradient_is_not_changed(optimizer, gradients):
    """The gradient was shared with another consumer of the same batch, which read changed values."""
    before = gradients.copy()
    weights = np.ones(6)
    slots = optimizer.new_slots(weights)
    optimizer.update(weights, gradients[0], slots, 1)
    optimizer.update_at(np.arange(6), weights, gradients[1], slots, 2)
    assert np.array_equal(gradients, before)


@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_float32_is_updated_equally_as_a_whole_and_in_part(optimizer, gradients):
    """A shard that updated a row in pieces, or only columns with a gradient, got other weights."""
    start = np.random.default_rng(4).normal(size=6).astype(np.float32)
    whole, some = start.copy(), start.copy()
    whole_slots, some_slots = optimizer.new_slots(whole), optimizer.new_slots(some)
    for step, gradient in enumerate(gradients.astype(np.float32), start=1):
        optimizer.update(whole, gradient, whole_slots, step)
        for at in (np.array([4, 0, 1]), np.array([2, 5, 3])):
            optimizer.update_at(at, some, gradient[at], some_slots, step)
    assert whole.tobytes() == some.tobytes()
    assert all(whole_slots[name].tobytes() == some_slots[name].tobytes() for name in optimizer.slot_names)


def test_single_numbers_are_taken_from_float64_only():
    """Plain floats computed float32 weights in float64, with other bits than ``update_at``."""
    with pytest.raises(ConfigurationError, match="expected an array of float64, given float32; use update_at"):
        view_of(np.zeros(3, np.float32))
