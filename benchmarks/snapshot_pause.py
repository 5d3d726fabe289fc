"""The longest time without records, of a step with a million states whose snapshots are stored every second."""

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
from streamiter.records import Batch

__all__ = ["snapshot_pause"]

PAUSE = "ms longest pause"
WORK = "CPU-ms longest pause"
"""What the event loop's thread did itself in the longest pause: to look at where others take part of the machine."""
RECORDS = "records/s"
SNAPSHOTS = "snapshots"

_ROUNDS = 4
"""How often each key comes, once in each round; the first makes its state, and is not timed."""


class NoSnapshotsError(Exception):
    """The flow was over before a snapshot was stored: the pause says nothing about them."""


def snapshot_pause(session: Session) -> Iterator[Figure]:
    """A million keys, each with {"n": int, "s": float}, in a keyed step that is snapshot every second."""
    keys = session.size(1_000_000, 50_000)
    interval_s = 1.0 if not session.quick else 0.05
    contenders = {
        "no checkpoints": _measured(keys, None),
        "with checkpoints": _measured(keys, interval_s),
    }
    series = alternate(contenders, repeat=session.repeat)
    yield series.figure("no checkpoints", PAUSE)
    yield series.figure(
        "with checkpoints", PAUSE, beside="no checkpoints", target=Target("figure", below=250)
    )
    yield series.figure("no checkpoints", WORK)
    yield series.figure("with checkpoints", WORK, beside="no checkpoints")
    yield series.figure("no checkpoints", RECORDS)
    yield series.figure("with checkpoints", RECORDS, beside="no checkpoints")
    yield series.figure("with checkpoints", SNAPSHOTS)


class _Pauses(Operator):
    """Notes the longest time between two batches, and adds up what is in them."""

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
        # In another order each time, so that states are met at random, as in life, and not as they lie in memory.
        records = np.concatenate([random.permutation(keys) for _ in range(_ROUNDS)]).tolist()
        pauses = _Pauses(not_timed=keys)
        flow = Flow("snapshots")
        counted = (
            flow.from_items(records, name="keys").key_by(_itself).stateful_map(_count, _NEW, name="counts")
        )
        counted.process(lambda: pauses, name="pauses")
        watch = Stopwatch()
        with tempfile.TemporaryDirectory() as directory, watch:
            statistics = flow.run(checkpoints=_checkpoints(directory, interval_s))
        pause = {PAUSE: pauses.longest_s * 1e3, WORK: pauses.longest_cpu_s * 1e3}
        figures = {**pause, **watch.rates(len(records), "records")}
        if statistics.checkpoints is not None:
            # The last one is that of the end.
            figures[SNAPSHOTS] = statistics.checkpoints.taken - 1
            if not figures[SNAPSHOTS]:
                raise NoSnapshotsError(f"the flow was over after {watch.seconds:.2f} s")
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
