"""The page of ``streamiter demo``, and ``streamiter demo --serve``: the flights as if they happened now, and a service.

The service is that of any file: the demo writes ``service.toml``, and ``streamiter serve`` runs it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
import typer

from streamiter.cli.figures import say
from streamiter.engine.job.running import run_in_own_loop, running_meanwhile
from streamiter.errors import ConfigurationError
from streamiter.learn.flights import FlightEvents, flights_file
from streamiter.models import ServedModel
from streamiter.service.observing.observations import SAMPLE_S, Observations
from streamiter.service.settings.tables import HttpSettings
from streamiter.topics import OutgoingBatch, Topic, topic
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.helpers.closing import closed_after

MODEL: Final = "late-flights"

# The size of the kept updates: about 14,000, of twenty runs of the demo. Mini-batches of one event make 327,346 updates
# in a run, over a gigabyte.
UPDATES_BYTES: Final = 64 << 20

# A question to the model, with the fields of a departure event.
DEMO_QUESTION: Final = {
    "carrier": "UA",
    "origin": "EWR",
    "dest": "ORD",
    "hour": 18,
    "weekday": 4,
    "month": 12,
    "distance": 719,
}

# The usual port; a demo must not fail if another program has it.
_PORT: Final = 8080


def _free_address() -> str:
    """Return an address of this machine for a server: with the usual port, or any free one."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As the server does.
        try:
            one.bind(("127.0.0.1", _PORT))
        except OSError:
            one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


@contextlib.asynccontextmanager
async def observed(updates: Topic, tell: Callable[[str], None]) -> AsyncIterator[Observations]:
    """Serve what is observed in this block, with the newest model; without the extra ``service`` say how to get it."""
    observations = Observations(MODEL)
    try:
        from streamiter.service.http.server import serving
    except ConfigurationError as missing:
        tell(f"No page shows the demo: {missing}")
        yield observations
        return
    async with (
        ServedModel(updates, MODEL) as observations.served,
        serving(observations, HttpSettings(address=_free_address())) as address,
        running_meanwhile(lag=observations.loop_lag.run(lambda _: None), samples=_sample(observations)),
    ):
        tell(f"While it learns, its page is {address}/ (--serve leaves a service running)")
        yield observations


async def _sample(observations: Observations) -> None:
    while True:
        observations.sample()
        await observations.clock.sleep(SAMPLE_S)


# ---- a service

_FILE: Final = "service.toml"
_DATABASE: Final = "service.db"
_SETTINGS: Final = """\
# The service of `streamiter demo --serve`. Without the demo, `streamiter serve {file}` runs it, from this folder.
[service]
name = {model}

[input]
topic = {events}

# A departure is a question; the arrival is its answer, hours later by the field "time".
[learn]
kind = "classification"
label = {{ event = "arrival", key = "flight", value = "delay > 15", time = "time", within = "36h" }}

[learn.features]
carrier = "category"
origin = "category"
dest = "category"
hour = "number"
weekday = "number"
month = "number"
distance = "number"

[publish]
topic = {updates}
every = "1s"

[checkpoints]
store = {checkpoints}
interval = "1s"

[http]
address = {address}
"""

# Events of an hour at the usual speed, and versions of a day.
_EVENTS_BYTES: Final = 1 << 30
_PIECES_PER_S: Final = 10


def serve_demo(directory: Path, flights: int | None, rate: int) -> int:
    """Replay the flights and run a service that learns from them, until Ctrl-C; return the exit code."""
    from streamiter.service import OnlineLearningService, read_settings
    from streamiter.service.observing.logs import logging_to

    def url(name: str) -> str:
        return f"sqlite:///{quote(str(directory / _DATABASE))}?topic={name}"

    file, address = directory / _FILE, _free_address()
    events, updates = url("flights"), url("model-updates")
    flights_file()  # Raises an error if the flights are not installed.
    texts = {"model": MODEL, "events": events, "updates": updates, "address": address}
    texts["checkpoints"] = str(directory / "checkpoints")
    directory.mkdir(parents=True, exist_ok=True)
    # A text of JSON is a text of TOML, too.
    shown = {name: msgspec.json.encode(text).decode() for name, text in texts.items()}
    file.write_text(_SETTINGS.format(file=file, **shown), "utf-8")
    settings = read_settings(file)
    say(f"This replays the flights of 2013, {rate:,} events a second. The settings of the service are in {file}.")
    say(f"Its page is http://{address}/; ask its model, in another terminal:")
    typer.echo(f"  curl http://{address}/predict -d '{msgspec.json.encode(DEMO_QUESTION).decode()}'")
    say("Ctrl-C stops it in order; the next run resumes.")

    async def run() -> int:
        await topic(events).create(settings={"retention_bytes": str(_EVENTS_BYTES)})
        await topic(updates).create(settings={"retention_bytes": str(UPDATES_BYTES)})
        async with running_meanwhile(replay_of_the_flights=_replay(topic(events), flights, rate)):
            return await OnlineLearningService(settings).serve()

    with logging_to(sys.stderr, settings):
        code = run_in_own_loop(run())
    if code == 0:
        say("Stopped in order.")
    return code


async def _replay(flights: Topic, count: int | None, rate: int) -> None:
    """Write the events at this rate, from the one after the last that is in the topic; after the last the first."""
    clock, size = SystemClock(), max(1, rate // _PIECES_PER_S)
    [(_, written)] = (await flights.describe()).offsets.values()
    # They are read, and made, in a thread: the loop has a service to run.
    pieces = await asyncio.to_thread(lambda: _pieces(FlightEvents("delayed", count), written, size))
    writer = await flights.open_writer()
    async with closed_after(writer.close):
        due_s = clock.monotonic_s()
        while True:
            await writer.write(OutgoingBatch(await asyncio.to_thread(next, pieces)))
            due_s = max(due_s + size / rate, clock.monotonic_s() - 1.0)
            await clock.sleep(max(0.0, due_s - clock.monotonic_s()))


def _pieces(events: FlightEvents, first: int, size: int) -> Iterator[list[bytes | None]]:
    """Return the values of ``size`` events at a time, endlessly, from event ``first`` on."""
    values = (value for _ in cycle([None]) for batch in events.batches() for value in batch.values)
    rest = islice(values, first % len(events), None)
    return iter(lambda: list(islice(rest, size)), [])
