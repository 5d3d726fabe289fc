"""The state of the learners is the same to the last bit after the encoding of checkpoints."""

import numpy as np
import pytest

from streamiter.learn import (
    FTRL,
    SGD,
    Gradient,
    LinearRegression,
    LogisticRegression,
    ProgressiveValidation,
    SparseRows,
)
from streamiter.values.plain_data import PlainData


def through_bytes(value):
    plain = PlainData()
    return plain.decode(plain.encode(value))


def rows(seed, count=40):
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, 12)) * (random.random((count, 12)) < 0.4)
    return SparseRows.from_dense(features), random.integers(0, 2, count), random.random(count) + 0.5


@pytest.mark.parametrize("model_type", [LinearRegression, LogisticRegression])
@pytest.mark.parametrize("optimizer", [SGD(0.1), FTRL(0.3, 0.1, l1=0.01, l2=0.1)], ids=str)
def test_a_model_resumes_from_stored_bytes(model_type, optimizer):
    """State that is not plain data would fail the first checkpoint of a running job."""
    through, before, after = (model_type(12, optimizer=optimizer) for _ in range(3))
    for model in (through, before):
        model.learn(*rows(1))
        model.learn_each(*rows(2))
    after.restore(through_bytes(before.state()))
    for model in (through, after):
        model.learn(*rows(3))
    assert through.weights.tobytes() == after.weights.tobytes()
    assert repr(through.state()) == repr(after.state())


def test_gradients_travel_as_records():
    """Workers and the owner of the parameters may be in different processes."""
    model = LogisticRegression(12)
    features, targets, weights = rows(4)
    for gradient in (model.gradient(features, targets, weights), model.gradient(features.to_dense(), targets, weights)):
        arrived = Gradient.from_record(through_bytes(gradient.to_record()))
        assert arrived.to_dense().tobytes() == gradient.to_dense().tobytes()
        assert (arrived.intercept, arrived.weight) == (gradient.intercept, gradient.weight)
        assert (arrived.records, arrived.width) == (40, 12)


def test_validation_resumes_from_stored_bytes():
    """The metrics of a restarted job must continue, and not start from zero."""
    random = np.random.default_rng(5)
    through, before, after = (ProgressiveValidation(window=30) for _ in range(3))
    columns = random.random(100), random.integers(0, 2, 100), random.random(100)
    through.update(*columns)
    before.update(*(column[:60] for column in columns))
    after.restore(through_bytes(before.state()))
    after.update(*(column[60:] for column in columns))
    assert after.metrics() == through.metrics()
