"""How soon a prediction knows an event, and how long one row takes while its model changes.

python -m benchmarks.network_freshness produce BROKER TOPIC
python -m benchmarks.network_freshness publish BROKER TOPIC FEATURES VERSIONS FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from benchmarks import kafka
from benchmarks.embeddings import clicks
from benchmarks.measuring import Figure, Target
from benchmarks.session import Session, running
from streamiter import Columns, topic
from streamiter.learn import AdaptiveLinearModel, Embeddings
from streamiter.models import ModelUpdateEncoder, ServedModel
from streamiter.topics.topic import OutgoingBatch, Topic
from streamiter.values.helpers.clock import SystemClock

__all__ = ["networks_follower", "networks_freshness"]

_MODEL: Final = "clicks"
_LIMIT_S: Final = 900.0
_READY_S: Final = 180.0

_EVENTS_PER_S: Final = 5_000
# The producer writes a hundred batches a second, as one with a linger of 10 ms does.
_BATCHES_PER_S: Final = 100
# The service learns these before: then it is compiled, and knows most of the 76,288 texts that there are.
_LEARNED_FIRST: Final = 100_000
# By the clock, a model of many columns is published once a second at most; a number of records is kept exactly.
_RECORDS_OF_A_VERSION: Final = 2_000
_INTERVAL: Final = "250ms"
_FRESH_MS: Final = 1_000.0
_WARM_S: Final = 5

# With ``admit=3`` so many features of ten fields have three occurrences each; then each version has learned 5,000 rows.
_FIELDS: Final = 10
_ROWS_OF_A_VERSION: Final = 5_000
_ROWS_AT_ONCE: Final = 20_000
_ROWS_PER_S: Final = 500
_ROW_MS: Final = 2.0


def networks_freshness(session: Session) -> Iterator[Figure]:
    """A service learns 5,000 clicks a second with embeddings; a follower in another process takes each version."""
    events = kafka.new_topic(session, "clicks")
    seconds = session.size(40, 5)
    first = session.size(_LEARNED_FIRST, 2_000)
    kafka.fill(session, events, islice(_events(first, seconds + 1), first), partitions=1)
    updates = kafka.new_topic(session, "updates")
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "service": {"name": _MODEL},
            "input": {"topic": events.url},
            "learn": {"kind": "classification", "label": {"field": "click"}, "learner": "network"},
            "publish": {"topic": updates.url, "records": _RECORDS_OF_A_VERSION, "changes": True, "state": False},
            "checkpoints": {"store": folder, "interval": _INTERVAL},
            "http": {"address": "127.0.0.1:0"},
        }
        serve = [sys.executable, "-m", "benchmarks.service_http", "serve", json.dumps(settings)]
        with running(serve, limit_s=_LIMIT_S):
            ages_ms, versions, features = kafka.run(_ages(session, updates, events, first, seconds))
    note = f"publish.records = {_RECORDS_OF_A_VERSION}, {versions:,} versions, {features:,} features"
    for percent in (50, 99):
        target = Target("figure", below=_FRESH_MS) if percent == 99 else None
        name = "from an event to a prediction that knows it"
        yield Figure(name, f"ms p{percent}", (float(np.percentile(ages_ms, percent)),), target=target, note=note)
    yield Figure(name, "ms at most", (float(ages_ms.max()),))


async def _ages(session: Session, updates: Topic, events: Topic, first: int, seconds: int) -> tuple[Any, int, int]:
    """Return for each event the time until a follower predicted with it, the number of versions, and of features."""
    count = _EVENTS_PER_S * seconds  # Those of one more second follow, since the last rows are in no version.
    seen: list[tuple[int, float]] = []
    row = {name: value for name, value in clicks(1)[0].items() if name != "click"}
    predictions = set()
    async with ServedModel(updates, _MODEL) as served:
        await _until(lambda: _records_of(served) > first - _RECORDS_OF_A_VERSION)
        command = [sys.executable, "-m", "benchmarks.network_freshness", "produce", session.kafka, events.name]
        with running([*command, str(first), str(seconds + 1)], limit_s=_LIMIT_S, stdout=-1) as producer:
            assert producer.stdout is not None
            began_s = float(await asyncio.to_thread(producer.stdout.readline))
            while not seen or seen[-1][0] < count:
                records = _records_of(served) - first
                if records > 0 and (not seen or records > seen[-1][0]):
                    predictions.add(served.predict(row).value)
                    seen.append((records, time.time()))
                await asyncio.sleep(0.001)
                assert time.time() < began_s + seconds + _READY_S, f"{seen[-1:]} of {count:,} events"
        assert served.update is not None
        features = len(served.update.parameters["embeddings"]["keys"])
    assert len(predictions) > 0.9 * len(seen), "the prediction of a row is the same for several versions"
    known, at_s = np.array(seen).T
    numbers = np.arange(min(_WARM_S, seconds // 2) * _EVENTS_PER_S, count)
    applied_s = at_s[np.searchsorted(known, numbers + 1)]
    return 1000.0 * (applied_s - (began_s + numbers / _EVENTS_PER_S)), len(seen), features


def _records_of(served: ServedModel) -> int:
    return 0 if served.update is None else served.update.records or 0


async def _until(condition: Any) -> None:
    async with asyncio.timeout(_READY_S):
        while not condition():  # noqa: ASYNC110  # Nothing tells it.
            await asyncio.sleep(0.01)


def _events(first: int, seconds: int) -> Iterator[bytes]:
    return map(orjson.dumps, clicks(first + _EVENTS_PER_S * seconds))


def networks_follower(session: Session) -> Iterator[Figure]:
    """A follower of 1,000,000 features predicts 500 rows a second, one by one, while a version comes each second."""
    updates = kafka.new_topic(session, "updates")
    features, versions = session.size(1_000_000, 5_000), session.size(20, 3)
    command = [sys.executable, "-m", "benchmarks.network_freshness", "publish", session.kafka, updates.name]
    with tempfile.TemporaryDirectory() as folder:
        command += [str(features), str(versions), folder]
        with running(command, limit_s=_LIMIT_S):
            calm_ms, beside_ms = kafka.run(_delays(updates, Path(folder), features // _FIELDS, versions))
    for name, delays_ms in (("one row, no updates", calm_ms), ("one row, an update a second", beside_ms)):
        target = Target("figure", below=_ROW_MS) if delays_ms is beside_ms else None
        yield Figure(name, "ms p50", (float(np.percentile(delays_ms, 50)),))
        yield Figure(name, "ms p99", (float(np.percentile(delays_ms, 99)),), target=target)
        yield Figure(name, "ms at most", (float(delays_ms.max()),))


async def _delays(updates: Topic, folder: Path, texts: int, versions: int) -> tuple[Any, Any]:
    """Return the delays in milliseconds of predictions without updates, and with one each second."""
    rows = [{f"field{field}": f"t{each[field]}" for field in range(_FIELDS)} for each in _drawn(texts, 5_000).tolist()]
    async with ServedModel(updates, _MODEL) as served:
        await served.ready(timeout_s=_READY_S)
        gc.collect()
        gc.freeze()  # The modules and rows of the benchmark are no part of a follower.
        await _predicted(served, rows, seconds=1)  # It imports.
        calm_ms = await _predicted(served, rows, seconds=versions)
        beside_ms = await _predicted(served, rows, seconds=versions, folder=folder)
        await _until(lambda: served.statistics().updates == versions + 1)
    return calm_ms, beside_ms


async def _predicted(
    served: ServedModel, rows: list[dict[str, Any]], *, seconds: int, folder: Path | None = None
) -> Any:
    """Predict rows that are due at fixed times; return the time from then to the prediction.

    Each second a file in the folder asks for a version.
    """
    delays, began_s = [], time.monotonic()
    with _before_other_programs():
        for number in range(seconds * _ROWS_PER_S):
            if folder is not None and number % _ROWS_PER_S == 0:
                (folder / str(number // _ROWS_PER_S)).touch()
            due_s = began_s + number / _ROWS_PER_S
            while (left_s := due_s - time.monotonic()) > 0.0:  # noqa: ASYNC110
                # Timers of event loops are exact to a millisecond only.
                await asyncio.sleep(0.001 if left_s > 0.0013 else 0)
            served.predict(rows[number % len(rows)])
            delays.append(1000.0 * (time.monotonic() - due_s))
            await asyncio.sleep(0)
    return np.array(delays)


@contextlib.contextmanager
def _before_other_programs() -> Iterator[None]:
    """Give this process the processor before all other programs, if the system allows it: these are no part of it."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        print("not allowed to run before other programs: their load is in the figures", file=sys.stderr)
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _drawn(texts: int, count: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, texts, (count, _FIELDS))


# -- other processes ----------------------------------------------------------------------------------------


def _produce(broker: str, name: str, first: str, seconds: str) -> None:
    """Send events by the clock; print the time of the first."""
    events = list(_events(int(first), int(seconds)))[int(first) :]
    at_once = _EVENTS_PER_S // _BATCHES_PER_S

    async def produce() -> None:
        async with kafka.producer(broker) as client:
            sender = kafka.BatchSender(client, name)
            began_s = time.time()
            print(began_s, flush=True)
            for number, start in enumerate(range(0, len(events), at_once), 1):
                # A batch is sent when the last of its events is due.
                await asyncio.sleep(max(0.0, began_s + number / _BATCHES_PER_S - time.time()))
                await sender.send(events[start : start + at_once], partition=0)
            await sender.flush()

    kafka.run(produce())


def _publish(broker: str, name: str, features: str, versions: str, folder: str) -> None:
    """Publish a model, and then a change for each file that comes into the folder."""
    texts = int(features) // _FIELDS
    model = AdaptiveLinearModel(embeddings=Embeddings(kind="fm"), shapes=False)

    def learn(count: int, seed: int) -> None:
        columns = {
            f"field{field}": np.char.add("t", each.astype(str))
            for field, each in enumerate(_drawn(texts, count, seed).T)
        }
        model.learn(Columns(columns), np.random.default_rng(seed).random(count) < 0.3)

    for seed, start in enumerate(range(0, 3 * texts, _ROWS_AT_ONCE)):
        learn(min(_ROWS_AT_ONCE, 3 * texts - start), seed)
    encoder = ModelUpdateEncoder(_MODEL, 1, clock=SystemClock(), changes=True)
    batches = []
    for version in range(int(versions) + 1):
        batches.append(encoder.encode([model.parameters(state=False)]))
        learn(min(_ROWS_OF_A_VERSION, texts // 20), 1_000 + version)

    async def publish() -> None:
        writer = await topic(f"kafka://{broker}/{name}").open_writer()

        async def write(batch: OutgoingBatch) -> None:
            await writer.write(batch)
            await writer.flush()

        await write(batches[0])
        for number, batch in enumerate(batches[1:]):
            while not os.path.exists(f"{folder}/{number}"):  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.01)
            await write(batch)
        await asyncio.Event().wait()  # The benchmark ends it.

    kafka.run(publish())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        {"produce": _produce, "publish": _publish}[sys.argv[1]](*sys.argv[2:])
