"""Refused settings of update rules, and their effect on an intercept."""

import pytest

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.optimizers import (
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
