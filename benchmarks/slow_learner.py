"""Run a learner that is slower than its topic, with four checkpoints a second.

The program ``python -m benchmarks.slow_learner SECONDS`` prints a line each second: seconds since the start,
MB resident, MB of the last snapshot, and the number of learned mini-batches.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from streamiter import Checkpoints, Flow
from streamiter.learn import SGD, Examples, LinearRegression, train_online
from streamiter.operators import Positions, Source, SourceBatch
from streamiter.operators.operator import Context

__all__ = ["main"]

_FEATURES = 10
_MINI_BATCH = 100
# The learner handles 20,000 rows a second; the source could give ten times as many.
_MINI_BATCH_S = 0.005
_INTERVAL_S = 0.25


class _Rows(Source):
    """A source that gives the same rows without end, as fast as they are taken."""

    bounded = False

    def open(self, context: Context, positions: Positions | None) -> None:
        features = np.random.default_rng(1).normal(size=(8192, _FEATURES)).tolist()
        self._rows = [{"x": row, "y": sum(row)} for row in features]
        self._brought = 0

    def read(self) -> SourceBatch:
        self._brought += len(self._rows)
        return SourceBatch(list(self._rows), {"brought": self._brought})


def _examples(rows: list[dict[str, Any]]) -> Examples:
    time.sleep(_MINI_BATCH_S)  # stands in for the computation of a larger model
    return Examples(np.array([row["x"] for row in rows]), np.array([row["y"] for row in rows]))


def _model() -> LinearRegression:
    return LinearRegression(_FEATURES, optimizer=SGD(0.01))


async def main(seconds: float) -> None:
    """Run the job for this many seconds."""
    flow = Flow("slow learner")
    rows = flow.from_source(_Rows, name="rows")
    training = train_online(rows, _model, extract=_examples, mini_batch=_MINI_BATCH)
    training.models.map(lambda model: None)
    with tempfile.TemporaryDirectory() as folder:
        job = await flow.start(checkpoints=Checkpoints(Path(folder), interval_s=_INTERVAL_S))
        began_s = time.monotonic()
        while (now_s := time.monotonic() - began_s) < seconds:
            statistics = job.statistics()
            assert statistics.checkpoints is not None
            snapshot_mb = statistics.checkpoints.last_size_bytes / 1e6
            learned = statistics.step("train").records_in
            print(f"{now_s:.1f} {_resident_mb():.1f} {snapshot_mb:.2f} {learned}", flush=True)
            await asyncio.sleep(1.0)
        await job.stop("abort")


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
