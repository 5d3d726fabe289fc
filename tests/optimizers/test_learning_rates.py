"""Learning rates, compared with their formulas."""

import math

import pytest
from optimizers import written_out

from streamiter.parameter_server.optimizers import Constant, Correction, Inverse, InverseSquareRoot, WarmRestarts


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
