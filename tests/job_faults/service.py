"""A flow that runs as in ``flow.run``, with restarts, while a test causes faults."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_S
from topics.topic_case import patiently

from streamiter import Checkpoints, Flow
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import Job, StopMode
from streamiter.engine.job.running import run_jobs
from streamiter.errors import StreamiterError

__all__ = ["INTERVAL_S", "Serve", "Service", "checkpoints_in", "nothing_unheard", "one_line", "serve"]

# Every fault meets checkpoints at this interval; on a busy machine a checkpoint takes longer.
INTERVAL_S = 0.1


def checkpoints_in(place: Path | str, **options: Any) -> Checkpoints:
    """Return checkpoints with a short interval."""
    return Checkpoints(place, **{"interval_s": INTERVAL_S, **options})


class Service:
    """One call of ``flow.run``, as a task in the test's event loop."""

    def __init__(self, flow: Flow, checkpoints: Checkpoints, **options: Any) -> None:
        self.jobs: list[Job] = []
        """The jobs that the service has started, one after the other."""
        self._running = asyncio.create_task(
            run_jobs(flow.start, {"checkpoints": checkpoints, **options}, while_running=self._watch)
        )

    @contextlib.asynccontextmanager
    async def _watch(self, job: Job, stops: Sequence[StopMode]) -> AsyncIterator[None]:
        self.jobs.append(job)
        yield

    @property
    def is_over(self) -> bool:
        """Return whether the service has ended, with or without an error."""
        return self._running.done()

    @property
    def taken(self) -> int:
        """Return the number of checkpoints that the job has committed."""
        return self._statistics("taken")

    @property
    def given_up(self) -> int:
        """Return the number of abandoned checkpoints."""
        return self._statistics("given_up")

    def _statistics(self, name: str) -> int:
        checkpoints = self.jobs[-1].statistics().checkpoints if self.jobs else None
        return 0 if checkpoints is None else getattr(checkpoints, name)

    def records_in(self, step: str) -> int:
        """Return the number of records that have arrived at a step of the job."""
        return self.jobs[-1].statistics().step(step).records_in

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the service runs; raise the error that ends the service."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                if self._running.done():
                    self._running.result()
                    raise AssertionError("the service has ended")
                await asyncio.sleep(0.005)

    async def works(self) -> None:
        """Wait for two more checkpoints, because the first one may have started before this call."""
        jobs, taken = len(self.jobs), self.taken
        await self.until(lambda: self.taken >= 2 if len(self.jobs) > jobs else self.taken >= taken + 2)

    async def suspended(self) -> JobStatistics:
        """Stop the service as SIGTERM does, as soon as its job has started."""
        await self.until(lambda: bool(self.jobs))
        await patiently(self.jobs[-1].stop("suspend"))
        return await patiently(self._running)

    async def failed(self, *, may_have_notes: bool = False) -> StreamiterError:
        """Return the error with which the service ends; it must be an error of streamiter.

        ``may_have_notes``: whether what cannot be closed after the failure may be told beside it.
        """
        with pytest.raises(StreamiterError) as caught:
            await patiently(self._running)
        assert may_have_notes or not getattr(caught.value, "__notes__", ()), "expected one error without notes"
        return caught.value

    async def close(self) -> None:
        """Abort the job if it still runs, which has the effect of a crash."""
        for job in self.jobs:
            with contextlib.suppress(StreamiterError):
                await job.stop("abort")
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


Serve = Callable[..., Service]
"""Starts a service; the arguments are those of `Service`."""


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return a function that starts services, which end with the test."""
    services: list[Service] = []

    def start(flow: Flow, checkpoints: Checkpoints, **options: Any) -> Service:
        services.append(Service(flow, checkpoints, **options))
        return services[-1]

    yield start
    for service in services:
        await service.close()


@contextlib.contextmanager
def nothing_unheard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that no task failed unnoticed, and that the log has no traceback."""
    with caplog.at_level(logging.INFO):
        yield
    gc.collect()  # Garbage collection makes asyncio log failed tasks.
    spam = [record for record in caplog.records if record.name == "asyncio" or record.exc_info]
    assert not spam, [record.getMessage() for record in spam]


def one_line(error: BaseException) -> str:
    """Return the message, which must be one readable line."""
    message = str(error)
    assert "\n" not in message
    assert "Traceback" not in message
    return message
