"""Measure states on disk compared with states in memory; and, as a program, more states than fit into memory.

``python -m benchmarks.large_state KEYS UPDATES FOLDER`` makes KEYS states in a job with checkpoints, updates them at
random, and starts the job again from its last checkpoint. It prints updates/s, resident memory, the bytes of
checkpoints, and the seconds of the restart.

``python -m benchmarks.large_state windows KEYS FOLDER``, or ``timers``, opens a window or sets an event timer for each
of KEYS keys, all of which are due at one time; first on disk, then in memory.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import PROJECT, Session
from streamiter import Checkpoints, Flow, Operator, RocksState, Stream, tumbling
from streamiter.engine.job.job import Job
from streamiter.operators import Context, Output, Positions, Source, SourceBatch

__all__ = ["main", "state_backends"]

RECORDS = "records/s"
_BATCH = 8192
# A permutation of all keys in arithmetic: an odd number, coprime to the usual numbers of keys.
_STRIDE = 1_000_003


def state_backends(session: Session) -> Iterator[Figure]:
    """A keyed step counts a million keys in three million records, in memory and on disk."""
    keys, updates = session.size(1_000_000, 20_000), session.size(3_000_000, 100_000)
    contenders = {
        "in memory": _measured(keys, updates, on_disk=False),
        "on disk": _measured(keys, updates, on_disk=True),
    }
    series = alternate(contenders, repeat=session.repeat)
    yield series.figure("in memory", RECORDS)
    yield series.figure("on disk", RECORDS, compared_with="in memory", target=Target("figure", at_least=100_000))


def _measured(keys: int, updates: int, *, on_disk: bool) -> Contender:
    def run() -> Trial:
        records = np.random.default_rng(1).integers(0, keys, updates).tolist()
        with tempfile.TemporaryDirectory() as folder:
            flow = Flow("states", state=RocksState(folder) if on_disk else None)
            sums = _counted(flow.from_items(records, name="keys")).reduce_all(lambda a, b: a + b, name="sum").collect()
            with Stopwatch() as watch:
                run_to_end(flow)
        return Trial(watch.rates(updates, "records"), tuple(sums.items))

    return run


def _counted(keys: Stream) -> Stream:
    return keys.key_by(_itself).stateful_map(_count, 0, name="counts")


def _itself(key: int) -> int:
    return key


def _count(count: int, key: int) -> tuple[int, int]:
    return count + 1, count + 1


# ---- more states than fit into memory


class AllThenRandom(Source):
    """Each key once, then random keys for ever."""

    bounded = False

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._at = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        self._at = int((positions or {}).get("at", 0))

    async def read(self) -> SourceBatch:
        begin, end = self._at, self._at + _BATCH
        if begin < self._keys:
            end = min(end, self._keys)
            numbers = [number * _STRIDE % self._keys for number in range(begin, end)]
        else:
            numbers = np.random.default_rng(begin).integers(0, self._keys, end - begin).tolist()
        self._at = end
        return SourceBatch(numbers, {"at": end})


class EachOnce(AllThenRandom):
    """Each key once; then it waits for the end."""

    bounded = True

    def __init__(self, keys: int, may_end: asyncio.Event) -> None:
        super().__init__(keys)
        self._may_end = may_end

    async def read(self) -> SourceBatch | None:
        if self._at < self._keys:
            return await super().read()
        await self._may_end.wait()
        return None


class Alarm(Operator):
    """Sets an event timer for each key."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, key: int, out: Output) -> None:
        self._context.set_event_timer(1000)

    def on_event_timer(self, payload: None, out: Output) -> None:
        out.emit(self._context.key)


async def _due_at_once(what: str, keys: int, folder: Path, *, on_disk: bool) -> None:
    flow, may_end = Flow("due at once", state=RocksState(folder / "state") if on_disk else None), asyncio.Event()
    source = flow.from_source(lambda: EachOnce(keys, may_end), name="keys")
    keyed = source.event_time(lambda key: 5, unit="ms", check_unit=False, name="times").key_by(_itself)
    windows = keyed.window(tumbling(60), name="counts") if what == "windows" else None
    due = keyed.process(Alarm, name="counts") if windows is None else windows.aggregate("count")
    results = due.map(lambda result: 1, name="ones").reduce_all(lambda a, b: a + b, name="sum").collect(name="results")
    job = await flow.start(checkpoints=Checkpoints(folder / "checkpoints", interval_s=3600), restore=None)
    rate = await _rate(job, keys)
    _say(f"{what} {'on disk' if on_disk else 'in memory'}: {rate:,.0f} keys/s; resident {_resident_mb():,.0f} MB")
    await _checkpoint(job, "checkpoint")
    began_s = time.perf_counter()
    may_end.set()
    await job.wait()
    assert results.items == [keys], results.items
    seconds = time.perf_counter() - began_s
    _say(f"{keys / seconds:,.0f} results/s; resident at most {_resident_mb('VmHWM'):,.0f} MB")


def _flow(keys: int, folder: Path) -> Flow:
    flow = Flow("large state", state=RocksState(folder / "state"))
    flow_keys = flow.from_source(lambda: AllThenRandom(keys), name="keys")
    _counted(flow_keys).filter(lambda count: False, name="nothing").collect(name="results")
    return flow


def _resident_mb(name: str = "VmRSS") -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise LookupError(name)


async def _rate(job: Job, records: int) -> float:
    """Wait until the job has counted this many more records; return how many it counts in a second."""
    began_s, before = time.perf_counter(), _counted_by(job)
    while _counted_by(job) < before + records:  # noqa: ASYNC110 (no event signals it)
        await asyncio.sleep(0.02)
    return (_counted_by(job) - before) / (time.perf_counter() - began_s)


def _counted_by(job: Job) -> int:
    return job.statistics().step("counts").records_in


def _say(text: str) -> None:
    print(text, flush=True)


async def _fill(keys: int, updates: int, folder: Path) -> None:
    job = await _flow(keys, folder).start(checkpoints=Checkpoints(folder / "checkpoints", interval_s=3600))
    _say(f"{await _rate(job, keys):,.0f} new keys/s; resident {_resident_mb():,.0f} MB")
    await _checkpoint(job, "first checkpoint")
    for _ in range(3):
        _say(f"{await _rate(job, updates):,.0f} updates/s; resident {_resident_mb():,.0f} MB")
        await _checkpoint(job, f"checkpoint after {updates:,} updates and more")
    _say(f"resident at most {_resident_mb('VmHWM'):,.0f} MB")
    await job.stop("abort")


async def _checkpoint(job: Job, what: str) -> None:
    began_s, records = time.perf_counter(), _counted_by(job)
    await job.checkpoint()
    seconds, meanwhile = time.perf_counter() - began_s, _counted_by(job) - records
    taken = job.statistics().checkpoints
    assert taken is not None
    _say(f"{what}: {taken.last_size_bytes / 1e6:,.1f} MB stored in {seconds:.1f} s, {meanwhile:,} records meanwhile")


async def _restart(keys: int, updates: int, folder: Path) -> None:
    began_s = time.perf_counter()
    job = await _flow(keys, folder).start(checkpoints=Checkpoints(folder / "checkpoints", interval_s=3600))
    started_s = time.perf_counter() - began_s
    await _rate(job, 1)
    _say(f"restart: open after {started_s:.2f} s, first batch after {time.perf_counter() - began_s:.2f} s")
    _say(f"{await _rate(job, updates):,.0f} updates/s; resident {_resident_mb('VmHWM'):,.0f} MB at most")
    await job.stop("abort")


def main() -> None:
    """Fill in one process and restart in another, as the command line says."""
    if sys.argv[1] in ("windows", "timers"):
        what, keys, folder, *backend = sys.argv[1:]
        for each in () if backend else ("disk", "memory"):
            subprocess.run(
                [sys.executable, "-m", "benchmarks.large_state", *sys.argv[1:], each], cwd=PROJECT, check=True
            )
        if backend:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                uvloop.run(_due_at_once(what, int(keys), Path(name), on_disk=backend == ["disk"]))
        return
    keys, updates, folder, *phase = sys.argv[1:]
    if phase:
        run = _fill if phase == ["fill"] else _restart
        uvloop.run(run(int(keys), int(updates), Path(folder)))
        return
    for each in ("fill", "restart"):
        command = [sys.executable, "-m", "benchmarks.large_state", keys, updates, folder, each]
        subprocess.run(command, cwd=PROJECT, check=True)


if __name__ == "__main__":
    main()
