"""Measure predictions over HTTP while the same service learns: what each of both costs the other.

The service, the producer of the events and the broker are processes of their own; the client is this one. On two cores
they share these: client, producer and broker take most of one.

    python -m benchmarks.service_http serve SETTINGS_AS_JSON
    python -m benchmarks.service_http produce BROKER TOPIC EVENTS_PER_S
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import orjson

from benchmarks import kafka
from benchmarks.http_load import Load, send
from benchmarks.measuring import Figure, Target, Trial, alternate
from benchmarks.session import Session, running
from streamiter.topics.topic import Topic

__all__ = ["service_http"]

PREDICTIONS_PER_S = 3_000
EVENTS_PER_S = 20_000
PROBES_PER_S = 20
RATE, P50, P99, EVENTS = "predictions/s", "ms p50", "ms p99", "events/s"
LIVEZ = "ms p99 of /livez"
CPU = "% of a core for the service"
# The time for imports, compilation, and the first version.
_PATIENCE_S = 120.0
_LIMIT_S = 900.0
# The producer writes a hundred batches a second, as one with a linger of 10 ms does.
_BATCHES_PER_S = 100
# Different events; they come again and again.
_DIFFERENT = 100_000
_LEARNED_FIRST = 20_000


def service_http(session: Session) -> Iterator[Figure]:
    """3,000 predictions a second over HTTP, while the service learns 20,000 events a second, or as many as it can."""
    seconds = session.size(20, 2)
    waiting = kafka.new_topic(session, "events")
    kafka.fill(session, waiting, islice(cycle(_events()), session.size(8_000_000, 2_000_000)), partitions=1)
    paced = "predictions while it learns 20,000 events/s"
    only = "predictions while it learns nothing"
    both = "learning while it predicts 3,000/s"
    alone = "learning while it predicts nothing"
    # In its first minute the broker compiles its own code, on the processors that the service needs.
    _at_fixed_rates(session, seconds, EVENTS_PER_S)
    series = alternate(
        {
            paced: lambda: _at_fixed_rates(session, seconds, EVENTS_PER_S),
            only: lambda: _at_fixed_rates(session, seconds, 0),
            both: lambda: _at_full_speed(session, waiting, seconds / 2, PREDICTIONS_PER_S),
            alone: lambda: _at_full_speed(session, waiting, seconds / 2, 0),
        },
        repeat=min(session.repeat, 3),
    )
    yield series.figure(paced, RATE, target=Target("figure", at_least=0.99 * PREDICTIONS_PER_S))
    yield series.figure(paced, EVENTS, target=Target("figure", at_least=0.99 * EVENTS_PER_S))
    for name in (paced, only, both, alone):
        yield series.figure(name, CPU)
    p99_ms = {paced: 10.0, both: 25.0}
    for name in (paced, only, both):
        yield series.figure(name, P50)
        yield series.figure(name, P99, target=Target("figure", below=p99_ms[name]) if name in p99_ms else None)
        yield series.figure(name, LIVEZ, target=Target("figure", below=50.0))
    yield series.figure(alone, EVENTS)
    yield series.figure(both, EVENTS, compared_with=alone, target=Target("ratio", at_least=0.75))


def _at_fixed_rates(session: Session, seconds: float, events_per_s: int) -> Trial:
    """Predict at a fixed rate while events come at a fixed rate."""
    events = kafka.new_topic(session, "events")
    kafka.fill(session, events, islice(_events(), _LEARNED_FIRST), partitions=1)
    with _service(session, events) as service, contextlib.ExitStack() as stack:
        if events_per_s:
            command = [sys.executable, "-m", "benchmarks.service_http", "produce", session.kafka, events.name]
            stack.enter_context(running([*command, str(events_per_s)], limit_s=_LIMIT_S))
            service.wait_for_events(_LEARNED_FIRST + events_per_s)
        service.load(session.size(3, 1), PREDICTIONS_PER_S)
        return _measured(service, seconds, PREDICTIONS_PER_S)


def _at_full_speed(session: Session, events: Topic, seconds: float, predictions_per_s: int) -> Trial:
    """Learn events that are there already, as fast as it goes."""
    with _service(session, events) as service:
        service.load(session.size(3, 1), predictions_per_s)
        trial = _measured(service, seconds, predictions_per_s)
        assert service.is_behind(), "the topic has too few events for this speed"
    return trial


def _measured(service: _Service, seconds: float, predictions_per_s: int) -> Trial:
    began, began_cpu_s, began_s = service.learned(), service.cpu_s(), time.perf_counter()
    load, probes = service.load(seconds, predictions_per_s)
    elapsed_s = time.perf_counter() - began_s
    figures = {
        EVENTS: (service.learned() - began) / elapsed_s,
        CPU: 100.0 * (service.cpu_s() - began_cpu_s) / elapsed_s,
    }
    assert not load.refused + probes.refused, f"{load.refused + probes.refused} requests were refused"
    if load.seconds:
        figures |= {RATE: load.rate, P50: load.milliseconds(50), P99: load.milliseconds(99)}
        figures[LIVEZ] = probes.milliseconds(99)
    return Trial(figures)


@dataclass
class _Service:
    """A running service."""

    port: int
    process: int

    def cpu_s(self) -> float:
        """Return the processor time that it has taken."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def learned(self) -> int:
        """Return the number of events that it has read so far."""
        return int(self._task()["steps"][0]["counts"]["records_out"])

    def is_behind(self) -> bool:
        """Whether the topic has more events."""
        return sum(self._task()["lag"].values()) > 0

    def load(self, seconds: float, per_s: float) -> tuple[Load, Load]:
        """Send predictions and probes for some seconds; only wait if ``per_s`` is 0."""
        if not per_s:
            time.sleep(seconds)
            return Load(), Load()
        body = orjson.dumps({name: value for name, value in json.loads(next(_events())).items() if name != "late"})
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

        async def send_both() -> tuple[Load, Load]:
            probe = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
            return await asyncio.gather(
                send("127.0.0.1", self.port, head.encode() + body, per_s=per_s, seconds=seconds),
                send("127.0.0.1", self.port, probe, per_s=PROBES_PER_S, seconds=seconds, connections=1),
            )

        loads: tuple[Load, Load] = kafka.run(send_both())
        return loads

    def wait_for_model(self) -> None:
        """Wait until it predicts."""
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/predict", b"{}", timeout=10):
                    return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > until_s:
                    raise
            time.sleep(0.1)

    def wait_for_events(self, count: int) -> None:
        """Wait until it has read this many events."""
        until_s = time.monotonic() + _PATIENCE_S
        while self.learned() < count:
            assert time.monotonic() < until_s, f"{self.learned():,} events in {_PATIENCE_S:g} s"
            time.sleep(0.1)

    def _task(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/flow", timeout=60) as answer:
            tasks = json.load(answer)["statistics"]["tasks"]
        return next(task for task in tasks if task["steps"][0]["step"] == "events")


@contextlib.contextmanager
def _service(session: Session, events: Topic) -> Iterator[_Service]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "service": {"name": f"late-flights-{port}"},
            "input": {"topic": f"kafka://{session.kafka}/{events.name}"},
            "learn": {"kind": "classification", "label": {"field": "late"}},
            "publish": {"topic": kafka.new_topic(session, "updates").url},
            "checkpoints": {"store": folder},
            "http": {"address": f"127.0.0.1:{port}"},
        }
        command = [sys.executable, "-m", "benchmarks.service_http", "serve", json.dumps(settings)]
        with running(command, limit_s=_LIMIT_S) as process:
            service = _Service(port, process.pid)
            service.wait_for_model()
            yield service


def _events() -> Iterator[bytes]:
    """Make different flights."""
    draw = random.Random(1)
    for _ in range(_DIFFERENT):
        event = {
            "km": round(draw.gauss(1_500, 400)),
            "hour": draw.randrange(24),
            "wind": round(draw.expovariate(0.2), 1),
            "carrier": draw.choice(("AA", "B6", "DL", "EV", "UA", "WN")),
            "to": f"{draw.choice('ABCDE')}{draw.choice('LMNOP')}{draw.choice('QRSTU')}",
        }
        event["late"] = draw.random() < (0.4 if event["hour"] > 16 else 0.15)
        yield orjson.dumps(event)


# -- other processes ----------------------------------------------------------------------------------------


def _serve(settings: str) -> None:
    from streamiter.service import read_settings
    from streamiter.service.service import OnlineLearningService

    sys.exit(OnlineLearningService(read_settings(json.loads(settings))).run())


def _produce(broker: str, topic: str, per_s: str) -> None:
    """Send events by the clock until terminated."""

    async def produce() -> None:
        events, count = cycle(list(_events())), int(per_s) // _BATCHES_PER_S
        async with kafka.producer(broker) as client:
            sender = kafka.BatchSender(client, topic)
            loop, number = asyncio.get_running_loop(), 0
            began_s = loop.time()
            while True:
                await sender.send(list(islice(events, count)), partition=0)
                number += 1
                await asyncio.sleep(max(0.0, began_s + number / _BATCHES_PER_S - loop.time()))

    kafka.run(produce())


if __name__ == "__main__":
    {"serve": _serve, "produce": _produce}[sys.argv[1]](*sys.argv[2:])
