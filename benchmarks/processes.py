"""Run flows in two processes, compared with one process and, where it applies, with two independent programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec

from benchmarks import divided_flows, kafka
from benchmarks.divided_flows import Settings
from benchmarks.events import make_events
from benchmarks.measuring import Contender, Figure, Target, Trial, alternate
from benchmarks.online_learning import LINGER_S
from benchmarks.session import PROJECT, Session
from streamiter import Flow, JobStatistics, LocalProcesses

__all__ = ["processes_map", "processes_regression", "processes_shuffle"]

RECORDS: Final = "records/s"
ONE: Final = "one process"
TWO: Final = "two processes"
APART: Final = "two programs, half of the events each"
_LIMIT_S: Final = 300.0


def processes_map(session: Session) -> Iterator[Figure]:
    """A pure-Python function of 20 µs is called for each record, in two subtasks."""
    yield from _compared(session, divided_flows.mapped, "slow", session.size(200_000, 2_000), at_least=1.8)


def processes_shuffle(session: Session) -> Iterator[Figure]:
    """Records of 100 bytes of JSON are decoded, and summed up by user; then the same without decoding."""
    records = session.size(1_000_000, 10_000)
    yield from _compared(session, divided_flows.by_user, "sums", records, at_least=1.4, label=", decoding JSON")
    yield from _compared(session, divided_flows.by_user_decoded, "sums", records, at_least=0.9, label=", decoded")


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
    with _environment(settings.variables()):
        statistics = run()
    return Trial({RECORDS: settings.records / statistics.elapsed_s}, statistics.step(step).records_in)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def processes_regression(session: Session) -> Iterator[Figure]:
    """A linear regression learns from two partitions of Kafka, with a worker for each of them."""
    count = session.size(1_000_000, 20_000)
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
        ran = _programs([settings(half.name, count // 2, 1) for half in halves])
        return Trial({RECORDS: count / max(elapsed_s for elapsed_s, _ in ran)}, sum(records for _, records in ran))

    series = alternate({ONE: one, APART: apart, TWO: two}, repeat=session.repeat)
    yield series.figure(ONE, RECORDS)
    yield series.figure(APART, RECORDS, compared_with=ONE)
    yield series.figure(TWO, RECORDS, compared_with=ONE, target=Target("ratio", at_least=1.5))
    yield series.figure(TWO, RECORDS, compared_with=APART, target=Target("ratio", at_least=0.9))


def _programs(given: list[Settings]) -> list[tuple[float, int]]:
    """Run a program for each of the settings at the same time; return the seconds and the records of each."""
    command = [sys.executable, "-m", "benchmarks.processes"]
    started = [
        subprocess.Popen(command, cwd=PROJECT, env={**os.environ, **each.variables()}, stdout=subprocess.PIPE)
        for each in given
    ]
    return [msgspec.json.decode(each.communicate(timeout=_LIMIT_S)[0], type=tuple[float, int]) for each in started]


def _program() -> None:
    statistics = divided_flows.regression().run()
    print(msgspec.json.encode((statistics.elapsed_s, statistics.step("events").records_in)).decode())


if __name__ == "__main__":
    _program()
