"""Measure the memory of features on a stream whose ids come and go.

``python -m benchmarks.feature_churn ROWS WAY`` learns ROWS rows in this process, and prints samples as lines of JSON;
WAY is one of the names in ``WAYS``. 50,000,000 rows have ten million ids, of which a million are alive at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.measuring import Figure, Target
from benchmarks.session import PROJECT, Session
from streamiter.learn.feature_table import FeatureTable

__all__ = ["WAYS", "main", "networks_churn"]

WAYS: Final = ("with expiry", "without expiry", "without expiry and cap")

# An id has five rows on average, and is alive for a tenth of the stream.
_ROWS_OF_AN_ID: Final = 5
_IDS_OF_ALIVE: Final = 10
# Bytes of the cap for each id that is alive: 512 MB for a million. Beside them the table has the ids whose last
# occurrence is not long ago, nearly as many; and with ``admit=3`` it has three entries for each row.
_CAP_BYTES_OF_ALIVE: Final = 512
# Two experts with eight factors each. Two fields with few values are beside the id.
_WIDTH, _WEIGHTS, _ADMIT = 16, 2, 3
_HOURS, _COUNTRIES = 24, 200
_CHUNK_ROWS: Final = 20_000
_SAMPLES: Final = 20
_QUICK_ROWS: Final = _SAMPLES * _CHUNK_ROWS
_LIMIT_S: Final = 7200.0


def networks_churn(session: Session) -> Iterator[Figure]:
    """The memory of a table of features, where ids come and go; CHURN_ROWS in the environment is the number of rows."""
    rows = int(os.environ.get("CHURN_ROWS", session.size(5_000_000, _QUICK_ROWS)))
    for way in WAYS:
        samples = _measured(rows, way)
        resident = [sample["resident_mb"] for sample in samples]
        last = samples[-1]
        note = f"{last['features']:,} features, {last['expired']:,} expired, {last['evicted']:,} evicted"
        yield _at_most(way, resident, 1.1 * _CAP_BYTES_OF_ALIVE * _alive(rows) / 1e6, note)
        if way != WAYS[-1]:
            ratios = (max(resident[_SAMPLES // 2 :]) / max(resident[: _SAMPLES // 2]),)
            flat, half = Target("ratio", below=1.05), "the first half"
            latter = (max(resident[_SAMPLES // 2 :]),)
            yield Figure(f"{way}, second half", "MB", latter, compared_with=half, ratios=ratios, target=flat)
        yield Figure(way, "rows/s", (rows / last["seconds"],))


def _at_most(way: str, resident: list[float], bar_mb: float, note: str) -> Figure:
    """Return the largest memory; the last way is the control, which is above the bar."""
    target = Target("figure", at_least=bar_mb) if way == WAYS[-1] else Target("figure", below=bar_mb)
    return Figure(f"{way}, at most", "MB", (max(resident),), target=target, note=note)


def _alive(rows: int) -> int:
    return rows // _ROWS_OF_AN_ID // _IDS_OF_ALIVE


def _measured(rows: int, way: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.feature_churn", str(rows), way]
    done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _table(rows: int, way: str) -> FeatureTable:
    """Return the table; a row a millisecond, an id expires when it was not seen for the time that ids are alive."""
    alive = _alive(rows)
    expire_ms = _ROWS_OF_AN_ID * alive if way == "with expiry" else 0
    if way == "without expiry and cap":
        ids = rows // _ROWS_OF_AN_ID + _HOURS + _COUNTRIES
        return FeatureTable(_WIDTH, weights=_WEIGHTS, admit=_ADMIT, capacity=ids, rows=ids)
    size_bytes = _CAP_BYTES_OF_ALIVE * alive
    return FeatureTable.of_bytes(_WIDTH, weights=_WEIGHTS, admit=_ADMIT, size_bytes=size_bytes, expire_ms=expire_ms)


def chunks(rows: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Give the keys and times of the features of some rows: an id, an hour and a country of each."""
    random, ids, alive = np.random.default_rng(1), rows // _ROWS_OF_AN_ID, _alive(rows)
    fields = np.array([1, 2, 3]) << 52
    for begin in range(0, rows, _CHUNK_ROWS):
        times = np.arange(begin, min(begin + _CHUNK_ROWS, rows))
        youngest = times * (ids - alive) // rows
        values = np.stack(
            [
                youngest + random.integers(0, alive, len(times)),
                random.integers(0, _HOURS, len(times)),
                random.integers(0, _COUNTRIES, len(times)),
            ],
            axis=1,
        )
        # An odd number, so that different ids have different hashes of 52 bits.
        keys = fields + (values * 0x9E3779B97F4A7 & (2**52 - 1))
        yield keys.reshape(-1), np.repeat(times, 3)


def main() -> None:
    """Learn in one way, and print 20 samples."""
    rows, way = int(sys.argv[1]), sys.argv[2]
    commons = np.zeros(_WIDTH)
    next(chunks(rows))
    _table(1000 * _ROWS_OF_AN_ID * _IDS_OF_ALIVE, WAYS[0]).touch([1], [1], commons, 0.01)  # It compiles.
    before_mb = _resident_mb()
    table, began_s = _table(rows, way), time.perf_counter()
    count = -(-rows // _CHUNK_ROWS)
    for number, (keys, times) in enumerate(chunks(rows), 1):
        table.touch(keys, times, commons, 0.01)
        if number * _SAMPLES // count > (number - 1) * _SAMPLES // count:
            sample = {"resident_mb": _resident_mb() - before_mb, "seconds": time.perf_counter() - began_s}
            print(json.dumps(sample | table.counts()._asdict()), flush=True)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
