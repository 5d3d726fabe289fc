"""Refused settings of update rules, and their effect on an intercept."""

import math

import numpy as np
import pytest

from streamiter.errors import ConfigurationError
from streamiter.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    GradientDescent,
    Momentum,
    RMSProp,
    checked_optimizer,
)


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
    ("make", "message"),
    [
        (lambda: SGD(0.0), "learning_rate: expected a number above 0, given 0.0"),
        (lambda: SGD(math.nan), "learning_rate: expected a number above 0, given nan"),
        (lambda: SGD(l2=-1.0), r"SGD\(l2=\): expected a number of 0 or more, given -1.0"),
        (lambda: GradientDescent(l1=-1.0), r"GradientDescent\(l1=\): expected a number of 0 or more, given -1.0"),
        (lambda: GradientDescent(l2="abc"), r"GradientDescent\(l2=\): expected a number of 0 or more, given 'abc'"),
        (lambda: SGD("fast"), "learning_rate: expected a number above 0, given 'fast'"),
        (lambda: SGD(l1=[0.1]), r"SGD\(l1=\): expected a number of 0 or more, given \[0.1\]"),
        (lambda: SGD(l1=10**400), r"SGD\(l1=\): expected a number of 0 or more, given 1000"),
        (lambda: SGD(l2=[0.1, 0.2]), r"SGD\(l2=\): expected a number of 0 or more, given \[0.1, 0.2\]"),
        (lambda: SGD(l2=None), r"SGD\(l2=\): expected a number of 0 or more, given None"),
        (lambda: SGD(l2=np.float32(-1.0)), r"SGD\(l2=\): expected a number of 0 or more, given .*-1.0"),
        (lambda: FTRL(alpha=0.0), r"FTRL\(alpha=\): expected a number above 0, given 0.0"),
        (lambda: FTRL(beta=-1.0), r"FTRL\(beta=\): expected a number of 0 or more, given -1.0"),
        (lambda: FTRL(l2=-1.0), r"FTRL\(l2=\): expected a number of 0 or more, given -1.0"),
        (lambda: FTRL(l1=math.inf), r"FTRL\(l1=\): expected a number of 0 or more, given inf"),
        (lambda: Momentum(0.0), "learning_rate: expected a number above 0, given 0.0"),
        (lambda: Momentum(momentum=1.0), r"Momentum\(momentum=\): expected a number from 0 to below 1, given 1.0"),
        (lambda: Momentum(l2=-1), r"Momentum\(l2=\): expected a number of 0 or more, given -1"),
        (lambda: AdaGrad(epsilon=0), r"AdaGrad\(epsilon=\): expected a number above 0, given 0"),
        (lambda: AdaGrad(l1="a"), r"AdaGrad\(l1=\): expected a number of 0 or more, given 'a'"),
        (lambda: RMSProp(beta=-0.1), r"RMSProp\(beta=\): expected a number from 0 to below 1, given -0.1"),
        (lambda: RMSProp(epsilon=None), r"RMSProp\(epsilon=\): expected a number above 0, given None"),
        (lambda: AdaDelta(alpha=1), r"AdaDelta\(alpha=\): expected a number from 0 to below 1, given 1"),
        (lambda: AdaDelta(beta=math.nan), r"AdaDelta\(beta=\): expected a number from 0 to below 1, given nan"),
        (lambda: AdaDelta(epsilon=-1.0), r"AdaDelta\(epsilon=\): expected a number above 0, given -1.0"),
        (lambda: Adam(beta=2), r"Adam\(beta=\): expected a number from 0 to below 1, given 2"),
        (lambda: Adam(gamma=1.0), r"Adam\(gamma=\): expected a number from 0 to below 1, given 1.0"),
        (lambda: Adam(epsilon=0.0), r"Adam\(epsilon=\): expected a number above 0, given 0.0"),
    ],
)
def test_impossible_settings_are_refused_by_name(make, message):
    """A rate of 0 silently learned nothing for weeks."""
    with pytest.raises(ConfigurationError, match=message):
        make()


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
