"""Measure the memory of a long-running job, the CPU time of an idle job, and the time of the import."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, repeat

from benchmarks import kafka
from benchmarks.events import make_events
from benchmarks.measuring import Figure, Target
from benchmarks.session import PROJECT, Session, running

__all__ = ["idle_cpu", "import_time", "memory", "slow_learner"]

_FINISH_TIMEOUT_S = 900.0
# The time to connect and to send the first fetches.
_SETTLE_S = 3.0


def memory(session: Session) -> Iterator[Figure]:
    """The resident memory of one learning job after one million and after five million events."""
    million, rounds = session.size(1_000_000, 20_000), 5
    events = kafka.new_topic(session, "events", partitions=2)
    once = list(make_events(million))
    kafka.fill(session, events, chain.from_iterable(repeat(once, rounds)), partitions=2)
    del once
    updates = kafka.new_topic(session, "updates")
    trials = [_resident_mb(session.kafka, events.name, updates.name, million) for _ in range(min(session.repeat, 3))]
    first = tuple(trial[0] for trial in trials)
    last = tuple(trial[rounds - 1] for trial in trials)
    after, later = f"after {million:,} events", f"after {rounds * million:,} events"
    yield Figure(after, "MB resident", first)
    ratios = tuple(late / early for early, late in zip(first, last, strict=True))
    yield Figure(later, "MB resident", last, compared_with=after, ratios=ratios, target=Target("ratio", below=1.05))


def _resident_mb(address: str, source: str, target: str, every: int) -> list[float]:
    arguments = ["learn and print memory", address, source, target, str(every)]
    done = subprocess.run(
        _pipeline(*arguments), cwd=PROJECT, capture_output=True, timeout=_FINISH_TIMEOUT_S, check=True
    )
    return [int(line) / 1024 for line in done.stdout.split()]


def slow_learner(session: Session) -> Iterator[Figure]:
    """The memory and the snapshots of a learner that is slower than its topic, with four checkpoints a second."""
    seconds = session.size(120, 6)
    command = [sys.executable, "-m", "benchmarks.slow_learner", str(seconds)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, timeout=seconds + _FINISH_TIMEOUT_S, check=True)
    lines = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    half = len(lines) // 2
    for unit, column in (("MB resident at most", 1), ("MB of the largest snapshot", 2)):
        early, late = (max(line[column] for line in part) for part in (lines[:half], lines[half:]))
        yield Figure("first half", unit, (early,))
        yield Figure(
            "second half",
            unit,
            (late,),
            compared_with="first half",
            ratios=(late / early,),
            target=Target("ratio", below=1.5),
        )


def idle_cpu(session: Session) -> Iterator[Figure]:
    """The CPU time of a learning job, a loop behind a Kafka source that has no records."""
    seconds = session.size(20, 2)
    events, updates = kafka.new_topic(session, "events", partitions=2), kafka.new_topic(session, "updates")
    job = _pipeline("learn in a flow", session.kafka, events.name, updates.name)
    with running(job, limit_s=_FINISH_TIMEOUT_S) as process:
        time.sleep(_SETTLE_S)
        before_s = _cpu_s(process.pid)
        time.sleep(seconds)
        share = 100 * (_cpu_s(process.pid) - before_s) / seconds
    yield Figure("an idle job", "% CPU", (share,), target=Target("figure", below=1.0))


def _cpu_s(pid: int) -> float:
    """Return the user and system time of a process until now."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pipeline(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.pipelines", *arguments]


def import_time(session: Session) -> Iterator[Figure]:
    """The time of ``import streamiter`` in a new interpreter, and from its start to the first row that is learned.

    Byte code and machine code are stored by the first run, which is not counted.
    """
    modules = ("numpy, asyncio", "streamiter")
    seconds: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(session.size(10, 2) + 1):
        for module in modules:
            seconds[module].append(_import_s(module))
    numpy, ours = (tuple(values[1:]) for values in seconds.values())
    yield Figure("import numpy, asyncio", "s", numpy)
    ratios = tuple(mine / theirs for mine, theirs in zip(ours, numpy, strict=True))
    yield Figure(
        "import streamiter",
        "s",
        ours,
        compared_with="numpy, asyncio",
        ratios=ratios,
        target=Target("figure", below=0.2),
    )
    yield from _first_row(session)


def _first_row(session: Session) -> Iterator[Figure]:
    for labels in ("at once", "later"):
        yield from _first_rows(f"first learned row, labels {labels}", labels, session.size(10, 2), below_s=0.8)
    with tempfile.TemporaryDirectory() as folder:
        name = "first learned row, labels later, code compiled for the first time"
        yield from _first_rows(name, "later", 0, below_s=6.0, NUMBA_CACHE_DIR=folder)


def _first_rows(name: str, labels: str, times: int, *, below_s: float, **environment: str) -> Iterator[Figure]:
    """Learn once, and then ``times`` times, which only count, unless it is 0."""
    trials = [_until_first_row(labels, environment) for _ in range(times + 1)][min(times, 1) :]
    passed, cpu = zip(*trials, strict=True)
    yield Figure(name, "s from the start", passed, target=Target("figure", below=below_s))
    yield Figure(name, "s of CPU time", cpu)


def _until_first_row(labels: str, environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds until the first row was learned, by the clock and of CPU time."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_row", labels],
        cwd=PROJECT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
        capture_output=True,
        check=True,
        timeout=_FINISH_TIMEOUT_S,
    )
    learned, cpu = map(float, done.stdout.split())
    return learned - began, cpu


def _import_s(module: str) -> float:
    code = f"import time; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=_FINISH_TIMEOUT_S)
    return float(done.stdout)
