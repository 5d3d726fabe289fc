"""Measure the memory of features on a stream whose ids come and go.

``python -m benchmarks.feature_churn ROWS WAY`` learns ROWS rows in this process, and prints samples as lines of JSON;
WAY is one of the names in ``WAYS``, for a table alone, or in ``TRAININGS``, or ``LINEAR``. 50,000,000 rows have ten
million ids, of which a million are alive at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Figure, Target, run_to_end
from benchmarks.session import PROJECT, Session
from streamiter import Columns, Flow
from streamiter.learn import Embeddings, PublishSchedule, train_online
from streamiter.operators import Source, SourceBatch
from streamiter.parameter_server.storage.feature_table import FeatureCounts, FeatureTable

__all__ = ["TRAININGS", "WAYS", "main", "networks_churn"]

WAYS: Final = ("with expiry", "without expiry", "without expiry and cap")
TRAININGS: Final = ("train_online, with expiry", "train_online, without expiry and cap")
LINEAR: Final = "train_online, without embeddings"

# An id has five rows on average, and is alive for a tenth of the stream.
_ROWS_OF_AN_ID: Final = 5
_IDS_OF_ALIVE: Final = 10
# Bytes of the cap for each id that is alive: 512 MB for a million. Beside them the table has the ids whose last
# occurrence is not long ago, nearly as many; and with ``admit=3`` it has three entries for each row.
_CAP_BYTES_OF_ALIVE: Final = 512
# Two experts with eight factors each. Two fields with few values are beside the id.
_WIDTH, _WEIGHTS, _ADMIT, _EARLY = 16, 2, 3, 8
_HOURS, _COUNTRIES = 24, 200
_CHUNK_ROWS: Final = 20_000
_SAMPLES: Final = 20
# With its text fields, and all else that a flow does, a row of a training takes some ten times as long.
_ROWS_OF_TRAINING: Final = 10_000_000
_QUICK_ROWS: Final = _SAMPLES * _CHUNK_ROWS
_LIMIT_S: Final = 7200.0


def networks_churn(session: Session) -> Iterator[Figure]:
    """The memory of features, where ids come and go; CHURN_ROWS in the environment is the number of rows of a table."""
    rows = int(os.environ.get("CHURN_ROWS", session.size(10_000_000, _QUICK_ROWS)))
    yield from _figures(rows, WAYS)
    rows = min(rows, _ROWS_OF_TRAINING)
    linear_mb = max(sample["resident_mb"] for sample in _measured(rows, LINEAR))
    yield Figure(f"{LINEAR}, at most", "MB", (linear_mb,))
    yield from _figures(rows, TRAININGS, linear_mb)


def _figures(rows: int, ways: Sequence[str], beside_mb: float = 0.0) -> Iterator[Figure]:
    """Give the memory and speed of each way; the last one is the control, which must be above the bar.

    ``beside_mb`` is the memory that all else takes.
    """
    bar_mb = beside_mb + 1.1 * _CAP_BYTES_OF_ALIVE * _alive(rows) / 1e6
    for way in ways:
        samples = _measured(rows, way)
        resident = [sample["resident_mb"] for sample in samples]
        last = samples[-1]
        counts = ("features", "expired", "evicted")
        note = ", ".join(f"{last[name]:,} {name}" for name in counts if name in last)
        target = Target("figure", at_least=bar_mb) if way == ways[-1] else Target("figure", below=bar_mb)
        yield Figure(f"{way}, at most", "MB", (max(resident),), target=target, note=note)
        first, second = max(resident[: _SAMPLES // 2]), max(resident[_SAMPLES // 2 :])
        if way != ways[-1]:
            flat = Target("ratio", below=1.05)
            half = "the first half"
            yield Figure(
                f"{way}, second half", "MB", (second,), compared_with=half, ratios=(second / first,), target=flat
            )
        yield Figure(way, "rows/s", (rows / last["seconds"],))


def _alive(rows: int) -> int:
    return rows // _ROWS_OF_AN_ID // _IDS_OF_ALIVE


def _measured(rows: int, way: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.feature_churn", str(rows), way]
    done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _table(rows: int, way: str) -> FeatureTable:
    """Return the table; a row a millisecond, an id expires when it was not seen for the time that ids are alive."""
    alive, numbers = _alive(rows), {"weights": _WEIGHTS, "admit": _ADMIT, "early": _EARLY}
    expire_ms = _ROWS_OF_AN_ID * alive if way == "with expiry" else 0
    if way == "without expiry and cap":
        ids = rows // _ROWS_OF_AN_ID + _HOURS + _COUNTRIES
        return FeatureTable(_WIDTH, **numbers, capacity=ids, rows=ids)
    size_bytes = _CAP_BYTES_OF_ALIVE * alive
    return FeatureTable.of_bytes(_WIDTH, **numbers, size_bytes=size_bytes, expire_ms=expire_ms)


def _values(rows: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Give the times of some rows, and an id, an hour and a country of each."""
    random, ids, alive = np.random.default_rng(1), rows // _ROWS_OF_AN_ID, _alive(rows)
    for begin in range(0, rows, _CHUNK_ROWS):
        times = np.arange(begin, min(begin + _CHUNK_ROWS, rows))
        youngest, numbers = times * (ids - alive) // rows, (alive, _HOURS, _COUNTRIES)
        values = np.stack([random.integers(0, number, len(times)) for number in numbers], axis=1)
        values[:, 0] += youngest
        yield times, values


def _learn_in_table(rows: int, way: str) -> Iterator[FeatureCounts]:
    """Count the occurrences in a table; give its numbers after each chunk."""
    table, fields = _table(rows, way), np.array([1, 2, 3]) << 52
    for times, values in _values(rows):
        # An odd number, so that different ids have different hashes of 52 bits.
        keys = fields + (values * 0x9E3779B97F4A7 & (2**52 - 1))
        table.touch(keys.reshape(-1), np.repeat(times, 3), 0.01)
        yield table.counts()


class Rows(Source):
    """The rows with their times and labels; it prints 20 samples while they are read."""

    def __init__(self, rows: int) -> None:
        self._values, self._chunks = _values(rows), -(-rows // _CHUNK_ROWS)
        self._chunk = 0
        self._began_s, self._before_mb = time.perf_counter(), _resident_mb()

    async def read(self) -> SourceBatch | None:
        self._chunk += 1
        if (self._chunk - 1) * _SAMPLES // self._chunks > (self._chunk - 2) * _SAMPLES // self._chunks:
            _print_sample(self._before_mb, self._began_s)
        if (found := next(self._values, None)) is None:
            return None
        times, values = found
        # With a letter: a text of digits is a number.
        columns = zip(("id", "hour", "country"), values.T, strict=True)
        texts = {name: np.char.add("t", column.astype(str)) for name, column in columns}
        return SourceBatch(Columns({"at": times / 1000, "even": values.sum(axis=1) % 2 == 0, **texts}), {})


def _training(rows: int, way: str) -> Flow:
    """Return a flow that learns from the rows, with factorization machines or without, and publishes one version."""
    flow, expires = Flow("churn"), way == TRAININGS[0]
    size_bytes = _CAP_BYTES_OF_ALIVE * _alive(rows) if expires else 4 << 30
    expire = {"expire": _ROWS_OF_AN_ID * _alive(rows) / 1000, "time": "at"} if expires else {}
    embeddings = None if way == LINEAR else Embeddings(kind="fm", at_most=size_bytes, **expire)
    stream, publish = flow.from_source(lambda: Rows(rows), name="rows"), PublishSchedule(records=rows)
    training = train_online(stream, label="even", embeddings=embeddings, shapes=False, publish_every=publish)
    training.models.filter(lambda _: False, name="nothing").collect(name="none")
    return flow


def main() -> None:
    """Learn in one way, and print 20 samples."""
    rows, way = int(sys.argv[1]), sys.argv[2]
    if way in (LINEAR, *TRAININGS):
        with redirect_stdout(StringIO()):
            run_to_end(_training(_QUICK_ROWS, way))  # It compiles.
        run_to_end(_training(rows, way))
        return
    next(_learn_in_table(rows, way))
    before_mb, began_s, chunks = _resident_mb(), time.perf_counter(), -(-rows // _CHUNK_ROWS)
    for chunk, counts in enumerate(_learn_in_table(rows, way), 1):
        if chunk * _SAMPLES // chunks > (chunk - 1) * _SAMPLES // chunks:
            _print_sample(before_mb, began_s, **counts._asdict())


def _print_sample(before_mb: float, began_s: float, **counts: int) -> None:
    sample = {"resident_mb": _resident_mb() - before_mb, "seconds": time.perf_counter() - began_s}
    print(json.dumps(sample | counts), flush=True)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
