"""Run flows in two processes, compared with one process and, where it applies, with two independent programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import divided_flows, kafka
from benchmarks.divided_flows import Settings
from benchmarks.events import make_events
from benchmarks.measuring import Contender, Figure, Target, Trial, alternate
from benchmarks.online_learning import LINGER_S
from benchmarks.session import PROJECT, Session, running
from streamiter import Flow, LocalProcesses
from streamiter.engine.graph.statistics import JobStatistics

__all__ = [
    "ONE",
    "TWO",
    "environment",
    "processes_map",
    "processes_recovery",
    "processes_regression",
    "processes_shuffle",
]

RECORDS: Final = "records/s"
ONE: Final = "one process"
TWO: Final = "two processes"
APART: Final = "two programs, half of the records each"
_LIMIT_S: Final = 300.0
# Short compared with the second that a recovery takes.
_LOOK_S: Final = 0.01


def processes_map(session: Session) -> Iterator[Figure]:
    """A pure-Python function of 20 µs is called for each record, in two subtasks."""
    make, step, records = divided_flows.mapped, "slow", session.size(600_000, 2_000)
    settings = Settings(records=records)

    def apart() -> Trial:
        ran = _programs(make, [Settings(records=records // 2, parallelism=1)] * 2)
        return Trial({RECORDS: records / max(elapsed_s for elapsed_s, _ in ran)}, sum(number for _, number in ran))

    contenders = {ONE: _in_one(make, settings, step), APART: apart, TWO: _in_two(make, settings, step)}
    series = alternate(contenders, repeat=session.repeat)
    yield series.figure(ONE, RECORDS)
    yield series.figure(APART, RECORDS, compared_with=ONE)
    yield series.figure(TWO, RECORDS, compared_with=ONE, target=Target("ratio", at_least=1.8))
    yield series.figure(TWO, RECORDS, compared_with=APART)


def processes_shuffle(session: Session) -> Iterator[Figure]:
    """Records of 100 bytes of JSON are decoded, and summed up by user; the same without decoding; windows by key."""
    records = session.size(4_000_000, 10_000)
    yield from _compared(session, divided_flows.by_user, "sums", records, at_least=1.4, label=", decoding JSON")
    yield from _compared(session, divided_flows.by_user_decoded, "sums", records, at_least=0.9, label=", decoded")
    yield from _compared(session, divided_flows.by_user_in_tuples, "sums", records, at_least=0.9, label=", tuples")
    yield from _compared(session, divided_flows.windows, "counts", records, at_least=1.3, label=", windows")


def _compared(
    session: Session, make: Callable[[], Flow], step: str, records: int, *, at_least: float, label: str = ""
) -> Iterator[Figure]:
    settings = Settings(records=records)
    one, two = ONE + label, TWO + label
    contenders = {one: _in_one(make, settings, step), two: _in_two(make, settings, step)}
    series = alternate(contenders, repeat=session.repeat)
    yield series.figure(one, RECORDS)
    yield series.figure(two, RECORDS, compared_with=one, target=Target("ratio", at_least=at_least))


def _in_one(make: Callable[[], Flow], settings: Settings, step: str) -> Contender:
    return lambda: _trial(settings, step, lambda: make().run())


def _in_two(make: Callable[[], Flow], settings: Settings, step: str) -> Contender:
    on = LocalProcesses(2, flow=f"{make.__module__}:{make.__name__}")
    return lambda: _trial(settings, step, lambda: make().run(on=on))


def _trial(settings: Settings, step: str, run: Callable[[], JobStatistics]) -> Trial:
    """Run a flow; its time begins when all its processes have connected, so the start of Python does not count."""
    with environment(settings.variables()):
        statistics = run()
    return Trial({RECORDS: settings.records / statistics.elapsed_s}, statistics.step(step).records_in)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def processes_regression(session: Session) -> Iterator[Figure]:
    """A linear regression learns from two partitions of Kafka, with a worker for each of them."""
    count = session.size(4_000_000, 20_000)
    whole = kafka.new_topic(session, "events", partitions=2)
    halves = [kafka.new_topic(session, f"events-{half}") for half in range(2)]
    kafka.fill(session, whole, make_events(count), partitions=2)
    for half in halves:
        kafka.fill(session, half, make_events(count // 2), partitions=1)

    def settings(events: str, records: int, parallelism: int) -> Settings:
        updates = kafka.new_topic(session, "updates", linger_s=LINGER_S)
        return Settings(records, session.kafka, events, updates.name, parallelism)

    def one() -> Trial:
        return _in_one(divided_flows.regression, settings(whole.name, count, 2), "events")()

    def two() -> Trial:
        return _in_two(divided_flows.regression, settings(whole.name, count, 2), "events")()

    def apart() -> Trial:
        ran = _programs(divided_flows.regression, [settings(half.name, count // 2, 1) for half in halves])
        return Trial({RECORDS: count / max(elapsed_s for elapsed_s, _ in ran)}, sum(records for _, records in ran))

    series = alternate({ONE: one, APART: apart, TWO: two}, repeat=session.repeat)
    yield series.figure(ONE, RECORDS)
    yield series.figure(APART, RECORDS, compared_with=ONE)
    yield series.figure(TWO, RECORDS, compared_with=ONE, target=Target("ratio", at_least=1.5))
    yield series.figure(TWO, RECORDS, compared_with=APART, target=Target("ratio", at_least=0.9))


def processes_recovery(session: Session) -> Iterator[Figure]:
    """One of two processes is killed; the time until the first record of the next attempt."""
    killed = {"kill -9 of the first process": 0, "kill -9 of the second process": 1}
    series = alternate({name: _killed(number) for name, number in killed.items()}, repeat=session.repeat)
    for name in killed:
        yield series.figure(name, "s", target=Target("figure", below=10.0))


def _killed(number: int) -> Contender:
    def run() -> Trial:
        with tempfile.TemporaryDirectory() as folder:
            times = Path(folder, "times")
            settings = Settings(updates=str(times))
            command = [
                *(sys.executable, "-m", "streamiter", "run", "benchmarks.divided_flows:ticking"),
                *("--processes", "2", "--checkpoints", f"{folder}/checkpoints"),
            ]
            with environment(settings.variables()), running(command, limit_s=_LIMIT_S, stdout=subprocess.DEVNULL):
                before = _wait_for(times, lambda seen: len({process for process, _ in seen}) == 2)
                process = sorted({process for process, _ in before})[number]
                os.kill(process, signal.SIGKILL)
                killed_s = time.monotonic()
                old = {process for process, _ in before}
                after = _wait_for(times, lambda seen: any(process not in old for process, _ in seen))
        return Trial({"s": next(at_s for process, at_s in after if process not in old) - killed_s})

    return run


def _wait_for(file: Path, condition: Callable[[list[tuple[int, float]]], bool]) -> list[tuple[int, float]]:
    """Wait until the processes and times in a file meet a condition; return them."""
    until_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < until_s:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        seen = [(int(process), float(at_s)) for process, at_s in map(str.split, lines[:-1])]
        if condition(seen):
            return seen
        time.sleep(_LOOK_S)
    raise TimeoutError(f"expected other records in {file} within {_LIMIT_S:g} s")


def _programs(make: Callable[[], Flow], given: list[Settings]) -> list[tuple[float, int]]:
    """Run a program for each of the settings at the same time; return the seconds and the records of each."""
    command = [sys.executable, "-m", "benchmarks.processes", make.__name__]
    started = [
        subprocess.Popen(command, cwd=PROJECT, env={**os.environ, **each.variables()}, stdout=subprocess.PIPE)
        for each in given
    ]
    return [msgspec.json.decode(each.communicate(timeout=_LIMIT_S)[0], type=tuple[float, int]) for each in started]


def _program(flow: str) -> None:
    statistics = getattr(divided_flows, flow)().run()
    print(msgspec.json.encode((statistics.elapsed_s, statistics.step("events").records_out)).decode())


if __name__ == "__main__":
    _program(sys.argv[1])
