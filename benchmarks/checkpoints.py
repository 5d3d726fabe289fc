"""Measure the cost of checkpoints for a learning job, and the time of its restart after a kill."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from benchmarks import kafka
from benchmarks.events import FEATURES, make_events
from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate
from benchmarks.online_learning import EVENTS, PARTITIONS, Learned, learn_online, rows_of_columns
from benchmarks.session import Session, running
from streamiter import Checkpoints, Flow
from streamiter.models import last_update
from streamiter.topics import JsonColumns
from streamiter.topics.topic import Topic

__all__ = ["checkpoint_cost", "recovery"]

WITHOUT, WITH = "train_online, no checkpoints", "train_online, a checkpoint every second"
_NEW_EVENTS = 2_000
_MILLION = 1_000_000
# The time limit of a run, far above the time to read the history.
_LIMIT_S = 900.0


class ChildFailedError(Exception):
    """A job ended by itself, so its restart cannot be measured."""


def checkpoint_cost(session: Session) -> Iterator[Figure]:
    """A model learns 4 M events of 100 bytes from two partitions, 1,000 at a time, and writes each update to Kafka."""
    count, times = session.size(_MILLION, 20_000), 4
    events = kafka.new_topic(session, "events", partitions=PARTITIONS)
    once = list(make_events(count))
    kafka.fill(session, events, chain.from_iterable(repeat(once, times)), partitions=PARTITIONS)
    del once
    contenders = {
        WITHOUT: _learning(session, events, count * times, checkpoints=False),
        WITH: _learning(session, events, count * times, checkpoints=True),
    }
    series = alternate(contenders, repeat=session.repeat, agree=Learned.agrees_with)
    yield series.figure(WITHOUT, EVENTS)
    yield series.figure(WITH, EVENTS, compared_with=WITHOUT, target=Target("ratio", at_least=0.95))
    yield series.figure(WITH, "checkpoints")


def _learning(session: Session, events: Topic, count: int, *, checkpoints: bool) -> Contender:
    def run() -> Trial:
        updates = kafka.new_topic(session, "updates")
        flow = Flow(f"learning {updates.name}")
        columns = JsonColumns({"id": "int64", "x": ("float64", FEATURES), "y": "float64"})
        models = learn_online(flow.source(events, decode=columns, stop="latest", name="events"), rows_of_columns)
        models.publish_model(updates, model="regression")
        watch = Stopwatch()
        with tempfile.TemporaryDirectory() as folder, watch:
            statistics = flow.run(checkpoints=Checkpoints(Path(folder), interval_s=1.0) if checkpoints else None)
        assert statistics.step("events").records_in == count
        taken = {} if statistics.checkpoints is None else {"checkpoints": float(statistics.checkpoints.taken)}
        return Trial({**watch.rates(count, "events"), **taken}, _learned(updates))

    return run


def _learned(updates: Topic) -> Learned:
    update = kafka.run(last_update(updates, "regression"))
    return Learned(update.version, np.asarray(update.parameters["weights"]))


def recovery(session: Session) -> Iterator[Figure]:
    """The time from the restart of a killed job to its first new event, after 10,000 and after 10 M events."""
    few, many = session.size(10_000, 10_000), session.size(10 * _MILLION, 40_000)
    once = list(make_events(min(few, many)))
    after = {f"after {count:,} events": _restarts(session, once, count, session.repeat) for count in (few, many)}
    (first, early), (last, late) = after.items()
    yield Figure(first, "s to the first event", early, target=Target("figure", below=3.0))
    ratios = tuple(b / a for a, b in zip(early, late, strict=True))
    yield Figure(
        last, "s to the first event", late, compared_with=first, ratios=ratios, target=Target("ratio", below=1.2)
    )


def _restarts(session: Session, once: list[bytes], count: int, times: int) -> tuple[float, ...]:
    """Return the seconds of each of ``times`` restarts after ``count`` events; each restart reads a few new events."""
    events = kafka.new_topic(session, "events")
    updates = kafka.new_topic(session, "updates")
    kafka.fill(session, events, chain.from_iterable(repeat(once, count // len(once))), partitions=1)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        life = [sys.executable, "-m", "benchmarks.recovering", session.kafka, events.name, updates.name, folder]
        _run([*life, str(count)])
        for _ in range(times):
            kafka.fill(session, events, once[:_NEW_EVENTS], partitions=1)
            began_s = time.monotonic()
            seconds.append(_run([*life, str(_NEW_EVENTS)]) - began_s)
    return tuple(seconds)


def _run(command: list[str]) -> float:
    """Run the job until its events are committed, kill it, and return the time of its first event."""
    with running(command, limit_s=_LIMIT_S, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first, committed = process.stdout.readline(), process.stdout.readline()
        process.kill()
    if not committed:
        raise ChildFailedError(f"expected two times from {command}, given {first!r}; see its error above")
    return float(first)
