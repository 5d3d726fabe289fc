"""Operators and sources for tests of jobs: they record their calls, and fail and wait on request."""

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest

from streamiter import Flow, Operator
from streamiter.engine.job.job import Job
from streamiter.errors import JobFailed
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch


class Life:
    """Records the calls of a flow's operators and sources, by name."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def note(self, what: str) -> None:
        """Record an event."""
        self.noted.append(what)

    def count(self, what: str) -> int:
        """Return how often the event was recorded."""
        return Counter(self.noted)[what]

    def opened_but_not_closed_once(self) -> list[str]:
        """Return the names of steps that were not closed as often as they were opened."""
        opened = Counter(what.removesuffix(" open") for what in self.noted if what.endswith(" open"))
        closed = Counter(what.removesuffix(" close") for what in self.noted if what.endswith(" close"))
        return sorted((opened - closed) + (closed - opened))


class Probe(Operator):
    """Passes records on; raises in the method ``fails_in``."""

    def __init__(self, life: Life, name: str, fails_in: str = "") -> None:
        self._life = life
        self._name = name
        self._fails_in = fails_in

    def _at(self, place: str) -> None:
        self._life.note(f"{self._name} {place}")
        if place == self._fails_in:
            raise ValueError(f"{self._name} cannot {place}")

    def open(self, context: Context) -> None:
        self._at("open")

    def process(self, record: Any, out: Output) -> None:
        self._at("process")
        out.emit(record)

    def finish(self, out: Output) -> None:
        self._at("finish")

    def snapshot(self) -> None:
        self._at("snapshot")

    def close(self) -> None:
        self._at("close")


class AwaitedProbe(Probe):
    """Passes records on with coroutine functions, in a separate task."""

    async def process(self, record: Any, out: Output) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().process(record, out)


class ThreadProbe(Probe):
    """Passes records on in a thread."""

    runs_in_thread = True


class ProbeSource(Source):
    """Emits numbers from 0, one in a batch, without end; raises in the method ``fails_in``."""

    bounded = False

    def __init__(self, life: Life, fails_in: str = "", after: int = 3) -> None:
        self._life = life
        self._fails_in = fails_in
        self._after = after
        self._next = 0

    def _at(self, place: str) -> None:
        self._life.note(f"source {place}")
        if place == self._fails_in and self._next >= self._after:
            raise ValueError(f"source cannot {place}")

    def open(self, context: Context, positions: Positions | None) -> None:
        self._after, after = 0, self._after
        self._at("open")
        self._after = after

    async def read(self) -> SourceBatch:
        await asyncio.sleep(0)
        self._at("read")
        self._next += 1
        return SourceBatch([self._next - 1], {"next": self._next})

    def close(self) -> None:
        self._at("close")


class Valve(Operator):
    """Passes records on while it is open; counts the records that it has received."""

    def __init__(self, opened: asyncio.Event) -> None:
        self._opened = opened
        self.taken: list[Any] = []

    async def process(self, record: Any, out: Output) -> None:
        await self._opened.wait()
        self.taken.append(record)
        out.emit(record)


async def turns(count: int = 50) -> None:
    """Let other tasks run for some turns."""
    for _ in range(count):
        await asyncio.sleep(0)


def tasks_left() -> list[str]:
    """Return the names of asyncio tasks except the test's own."""
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def failure_of(flow: Flow, **options: Any) -> JobFailed:
    """Return the error of a job that fails, after the checks for all such errors."""
    threads = threading.active_count()
    jobs: list[Job] = []

    async def run() -> None:
        jobs.append(await flow.start(**options))
        await jobs[0].wait()

    with pytest.raises(JobFailed) as caught:
        await run()
    await turns(3)
    assert tasks_left() == []
    # The event loop keeps a thread for ``to_thread``; no other thread stays.
    assert threading.active_count() <= threads + 1
    for job in jobs:
        assert job.statistics().state == "failed"
        with pytest.raises(JobFailed) as again:
            await job.stop("drain")
        assert str(again.value) == str(caught.value)
    return caught.value
