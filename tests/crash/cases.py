"""The programs that the tests kill, and the events that the programs read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import orjson
from crash.places import KAFKA_COMMIT, KAFKA_TAKING_OVER, SQLITE_COMMIT, SQLITE_TAKING_OVER, Place
from crash.programs import Program
from crash.training import Options
from support.fork_server import FORKS_PROCESSES

from streamiter.engine.storage.flow_record import shortened_name
from streamiter.topics import OutgoingBatch, Topic, topic

__all__ = [
    "MINI_BATCH",
    "PIECE_EVENTS",
    "Case",
    "Pieces",
    "example_trainer",
    "flight_pieces",
    "kafka_case",
    "service_pieces",
    "sqlite_case",
    "trainer",
    "training_pieces",
]

Pieces = Sequence[OutgoingBatch]

_EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "online_service" / "trainer.py"
_INTERVAL_S: Final = 0.1
MINI_BATCH: Final = 20
PIECE_EVENTS: Final = 10
# The number of departures between a flight's departure and its arrival, or of questions before an answer.
_UNDER_WAY: Final = 30
# Fewer objects become no columns.
_IN_COLUMNS: Final = 100


@dataclass(frozen=True)
class Case:
    """The topics of a test, the places of commits on their connector, and the folder of checkpoints."""

    prefix: str
    """The beginning of the URL of each topic."""
    flow: str
    """The beginning of the flow's name, which differs from the flows of other tests on the same broker."""
    folder: Path
    commit: Sequence[Place]
    taking_over: Place

    def topic(self, name: str) -> Topic:
        """Return a topic of this test."""
        return topic(self.prefix + name)


def sqlite_case(folder: Path) -> Case:
    """Return a case with all topics in one file."""
    return Case(f"sqlite:///{folder}/log.db?topic=", "flow", folder / "checkpoints", SQLITE_COMMIT, SQLITE_TAKING_OVER)


def kafka_case(bootstrap: str, prefix: str, folder: Path) -> Case:
    """Return a case with topics of a broker that other tests use, too."""
    return Case(f"kafka://{bootstrap}/{prefix}", prefix, folder / "checkpoints", KAFKA_COMMIT, KAFKA_TAKING_OVER)


# ---- the training of `training.py`


def trainer(case: Case, run: str, **options: Any) -> Program:
    """Return `training.py` with the topics "events", "updates RUN" and "read RUN"."""
    given = Options(
        flow=f"{case.flow}{run}",
        events=f"{case.prefix}events",
        updates=f"{case.prefix}updates-{run}",
        read=f"{case.prefix}read-{run}",
        folder=str(case.folder),
        interval_s=_INTERVAL_S,
        mini_batch=MINI_BATCH,
        **options,
    )
    folder = case.folder / shortened_name(given.flow)
    script = Path(__file__).with_name("training.py")
    return Program(script, folder, (msgspec.json.encode(given).decode(),), FORKS_PROCESSES if given.processes else {})


def training_pieces(events: int, partitions: int) -> Pieces:
    """Return the events that `training.py` reads, divided among the partitions."""
    random = Random(1)
    rows = [{"n": n, "x": [random.random() for _ in range(3)], "y": random.randint(0, 1)} for n in range(events)]
    return [
        OutgoingBatch([orjson.dumps(row) for row in piece], partition=number % partitions)
        for number, piece in enumerate(_cut(rows))
    ]


def service_pieces(events: int) -> Pieces:
    """Return questions, each with its answer some events later; a few have a field that is no column."""
    random, rows = Random(1), list[dict[str, Any]]()
    for number in range(events // 2):
        km = None if number % 5000 == 1999 else random.randint(1, 3000)
        rows.append({"event": "question", "n": number, "at": number, "km": km, "town": random.choice("abcd")})
        if number >= _UNDER_WAY:
            asked = number - _UNDER_WAY
            rows.append({"event": "answer", "n": asked, "at": number, "late": random.random() < 0.3})
    return [
        OutgoingBatch([orjson.dumps(row) for row in rows[start : start + _IN_COLUMNS]])
        for start in range(0, len(rows), _IN_COLUMNS)
    ]


# ---- the example


def example_trainer(case: Case, run: str, **environment: str) -> Program:
    """Return the example's trainer with the same topics; they must be on Kafka."""
    bootstrap, _, prefix = case.prefix.removeprefix("kafka://").partition("/")
    flow = f"{case.flow}{run}"
    given = {
        "KAFKA": bootstrap,
        "EVENTS_TOPIC": f"{prefix}events",
        "UPDATES_TOPIC": f"{prefix}updates-{run}",
        "DEAD_LETTERS_TOPIC": f"{prefix}dead-letters",
        "FLOW": flow,
        "CHECKPOINTS": str(case.folder),
        "CHECKPOINT_INTERVAL": str(_INTERVAL_S),
        "MINI_BATCH": str(MINI_BATCH),
    }
    return Program(_EXAMPLE, case.folder / shortened_name(flow), environment=given | environment)


def flight_pieces(flights: int) -> Pieces:
    """Return the events that the example reads: a departure and an arrival for every flight, with its name as key."""
    random = Random(1)
    events: list[dict[str, Any]] = []
    for number in range(flights + _UNDER_WAY):
        if number < flights:
            events.append(_departure(number, random))
        if number >= _UNDER_WAY:
            name = f"UA{number - _UNDER_WAY}"
            events.append({"event": "arrival", "flight": name, "delay": random.randint(-30, 60)})
    return [
        OutgoingBatch([orjson.dumps(event) for event in piece], keys=[event["flight"].encode() for event in piece])
        for piece in _cut(events)
    ]


def _departure(number: int, random: Random) -> dict[str, object]:
    return {
        "event": "departure",
        "flight": f"UA{number}",
        "carrier": random.choice(["UA", "B6", "DL"]),
        "origin": random.choice(["EWR", "JFK", "LGA"]),
        "dest": random.choice(["IAH", "MIA", "BQN", "ATL"]),
        "hour": random.randint(5, 23),
        "weekday": random.randint(0, 6),
        "month": random.randint(1, 12),
        "distance": random.randint(100, 2500),
    }


def _cut(events: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    return (events[start : start + PIECE_EVENTS] for start in range(0, len(events), PIECE_EVENTS))
