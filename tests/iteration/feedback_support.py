"""Loops through a topic in tests: how they are built, run and waited for."""

from collections.abc import Callable
from typing import Any

from iteration import iteration_support
from support.waiting import PATIENCE_S, until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Stream,
    feedback_through,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
)
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import Job
from streamiter.topics import Topic

Body = Callable[[list[Stream], list[Stream]], IterationBodyResult]


async def ended(job: Job) -> JobStatistics:
    return await iteration_support.ended(job, patience_s=PATIENCE_S)


async def run(flow: Flow, **options: Any) -> JobStatistics:
    return await ended(await flow.start(**options))


def iterate(initial: Stream, data: list[Any], body: Body, ahead: int | str | None) -> Any:
    """Add a bounded iteration with this limit of epochs ahead, or an unbounded one."""
    if ahead == "unbounded":
        return iterate_unbounded_streams([initial], data, body)
    config = IterationConfig(max_epochs_ahead=ahead)  # type: ignore[arg-type]
    return iterate_bounded_streams_until_termination([initial], data, body, config)


async def endless_loop(through: Topic) -> Job:
    """Start a job with a loop that never ends, and wait until it has made some rounds."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([feedback_through(variables[0], through)], variables)

    flow = Flow("loop")
    [passed] = iterate(flow.from_items([0]), [], body, None)
    collected = passed.collect()
    job = await flow.start()
    await until(lambda: len(collected.items) > 2)
    return job
