"""What is known about a service is of the job that runs now, and of no job before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.waiting import until

from streamiter import Flow
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import Job
from streamiter.service.logs import figures_of
from streamiter.service.metrics import MetricsNow
from streamiter.service.observations import Observations
from streamiter.service.page_documents import page_state
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch


async def test_a_job_that_is_started_again_has_no_figures_of_the_one_before() -> None:
    """After an outage the first rate was counted from the job before, and the log had an old lag."""
    clock, events = VirtualClock(), MemoryBroker().topic("events")
    await events.create()
    writer = await events.open_writer()
    observations = Observations("again", clock=clock)

    async def sampled(phase: str) -> tuple[float | None, int | None]:
        await clock.advance(1)
        observations.enter(phase)  # type: ignore[arg-type]
        observations.sample()
        state, figures = page_state(observations), figures_of(observations, 30)
        assert (figures["events_per_s"], figures["lag_records"]) == (state.events_per_s, state.lag_records)
        assert bool(observations.rates) is (state.events_per_s is not None)
        return state.events_per_s, state.lag_records

    for records in (10, 20):
        await writer.write(OutgoingBatch([b"1"] * 10))
        flow = Flow("again")
        flow.source(events, name="events").collect()
        job = observations.job = await flow.start(clock=clock)
        await until(lambda job=job, records=records: job.statistics().step("collect").records_in == records)
        assert await sampled("running") == (None, 0)
        assert await sampled("running") == (0.0, 0)
        await job.stop("abort")
        assert await sampled("waiting") == (None, None)


async def test_a_source_without_a_topic_has_no_lag() -> None:
    """A lag of 0 was shown where none is known, and read as a consumer that keeps up."""
    flow, observations = Flow("items"), Observations("items", clock=VirtualClock())
    flow.from_items([1]).collect()
    observations.job = await flow.start()
    observations.enter("running")
    observations.sample()
    assert observations.samples[-1].lag_records is None
    await observations.job.stop("abort")


@pytest.mark.parametrize("answer", [page_state, MetricsNow, Observations.sample])
async def test_the_statistics_of_the_job_are_made_once_for_an_answer(
    answer: Callable[[Observations], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of the page took 9 ms of a flow with 97 tasks, half of it for statistics that were there already."""
    flow, observations, made = Flow("items"), Observations("items"), 0
    flow.from_items([1]).collect()
    observations.job = await flow.start()
    observations.enter("running")
    statistics = Job.statistics

    def counted(job: Job) -> JobStatistics:
        nonlocal made
        made += 1
        return statistics(job)

    monkeypatch.setattr(Job, "statistics", counted)
    answer(observations)
    assert made == 1
    await observations.job.stop("abort")
