"""Measure the longest time without records behind a step with a million states and a snapshot each second."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate
from benchmarks.session import Session
from streamiter import Checkpoints, Flow, Operator
from streamiter.operators import Output
from streamiter.values.records import Batch

__all__ = ["snapshot_pause"]

PAUSE = "ms longest pause"
WORK = "CPU-ms longest pause"
"""The CPU time of the event loop's thread in a pause; the better figure where others use part of the machine."""
RECORDS = "records/s"
SNAPSHOTS = "snapshots"

_ROUNDS = 4
"""The number of rounds. Each key comes once in a round; the first round creates the states, and is not timed."""


class NoSnapshotsError(Exception):
    """The flow ended before a snapshot was stored, so the pause says nothing about snapshots."""


def snapshot_pause(session: Session) -> Iterator[Figure]:
    """A keyed step with {"n": int, "s": float} for each of a million keys takes a snapshot each second."""
    keys = session.size(1_000_000, 50_000)
    interval_s = 1.0 if not session.quick else 0.05
    contenders = {"no checkpoints": _measured(keys, None), "with checkpoints": _measured(keys, interval_s)}
    series = alternate(contenders, repeat=session.repeat)
    yield series.figure("no checkpoints", PAUSE)
    yield series.figure("with checkpoints", PAUSE, compared_with="no checkpoints", target=Target("figure", below=250))
    yield series.figure("no checkpoints", WORK)
    yield series.figure("with checkpoints", WORK, compared_with="no checkpoints")
    yield series.figure("no checkpoints", RECORDS)
    yield series.figure("with checkpoints", RECORDS, compared_with="no checkpoints")
    yield series.figure("with checkpoints", SNAPSHOTS)


class _Pauses(Operator):
    """Measures the longest time between two batches, and sums the records."""

    def __init__(self, not_timed: int) -> None:
        self._not_timed = not_timed
        self._last_s = self._last_cpu_s = 0.0
        self.records = self.sum = 0
        self.longest_s = self.longest_cpu_s = 0.0

    def process_batch(self, batch: Batch, out: Output) -> None:
        now_s, now_cpu_s = time.perf_counter(), time.thread_time()
        if self.records > self._not_timed:
            self.longest_s = max(self.longest_s, now_s - self._last_s)
            self.longest_cpu_s = max(self.longest_cpu_s, now_cpu_s - self._last_cpu_s)
        self._last_s, self._last_cpu_s = now_s, now_cpu_s
        self.records += len(batch)
        self.sum += sum(batch)


def _measured(keys: int, interval_s: float | None) -> Contender:
    def run() -> Trial:
        random = np.random.default_rng(1)
        # Each round has another order, so that states are used at random and not in their order in memory.
        records = np.concatenate([random.permutation(keys) for _ in range(_ROUNDS)]).tolist()
        pauses = _Pauses(not_timed=keys)
        flow = Flow("snapshots")
        counted = flow.from_items(records, name="keys").key_by(_itself).stateful_map(_count, _NEW, name="counts")
        counted.process(lambda: pauses, name="pauses")
        watch = Stopwatch()
        with tempfile.TemporaryDirectory() as directory, watch:
            statistics = flow.run(checkpoints=_checkpoints(directory, interval_s))
        pause = {PAUSE: pauses.longest_s * 1e3, WORK: pauses.longest_cpu_s * 1e3}
        figures = {**pause, **watch.rates(len(records), "records")}
        if statistics.checkpoints is not None:
            # The last checkpoint is taken at the end.
            figures[SNAPSHOTS] = statistics.checkpoints.taken - 1
            if not figures[SNAPSHOTS]:
                raise NoSnapshotsError(
                    f"expected a snapshot during the flow, which ended after {watch.seconds:.2f} s without one"
                )
        return Trial(figures, (pauses.records, pauses.sum))

    return run


def _checkpoints(directory: str, interval_s: float | None) -> Checkpoints | None:
    return None if interval_s is None else Checkpoints(Path(directory), interval_s=interval_s)


_NEW: dict[str, Any] = {"n": 0, "s": 0.0}


def _itself(key: int) -> int:
    return key


def _count(state: dict[str, Any], key: int) -> tuple[dict[str, Any], int]:
    state["n"] += 1
    state["s"] += key / 2
    return state, state["n"]
