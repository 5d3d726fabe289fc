"""Random bodies under random schedules: loops through topics have the same results as in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from iteration.bounded_bodies import MadeBody, Maker, limits
from iteration.iteration_support import ended, run_shuffled
from support.soak import ForEachSeed
from support.waiting import PATIENCE_S

from streamiter import Checkpoints, Flow, IterationBodyResult, Stream, feedback_through
from streamiter.checkpoints.store import MemoryStore
from streamiter.errors import CheckpointError, ConfigurationError
from streamiter.runtime.checkpointing.commit import JobSnapshot
from streamiter.topics import MemoryBroker

RARELY_S = 100.0

VARIABLES_MAX = 3
"""No body has more variables."""


class ThroughTopics(Maker):
    """Makes the same bodies, with every feedback stream in a topic."""

    def __init__(self, seed: int, broker: MemoryBroker, **options: Any) -> None:
        super().__init__(seed, **options)
        self._broker = broker

    def _body(self, variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return self._through(super()._body(variables, data))

    def _body_per_round(self, variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return self._through(super()._body_per_round(variables, data))

    def _through(self, made: IterationBodyResult) -> IterationBodyResult:
        feedback = [
            feedback_through(stream, self._broker.topic(f"loop-{number}"))
            for number, stream in enumerate(cast("Sequence[Stream]", made.feedback_variable_streams))
        ]
        return IterationBodyResult(feedback, made.output_streams, made.termination_criteria)


async def topics(seed: int) -> MemoryBroker:
    """Create topics with enough partitions for three heads."""
    broker = MemoryBroker()
    for number in range(VARIABLES_MAX):
        await broker.topic(f"loop-{number}").create(partitions=3 + (seed + number) % 4)
    return broker


async def in_memory(seed: int) -> MadeBody:
    made = Maker(seed, ahead=0).make()
    await ended(await made.flow.start(channel_limits=limits(seed)))
    return made


async def through_topics(seed: int) -> MadeBody:
    made = ThroughTopics(seed, await topics(seed), ahead=0).make()
    await ended(await made.flow.start(channel_limits=limits(seed)))
    made.check_listeners()
    return made


@pytest.mark.parametrize("seed", range(5))
def test_a_synchronous_loop_has_the_same_results_through_topics(seed: int) -> None:
    """A watermark from one partition returned before the records of its epoch from another partition."""
    check_same_as_in_memory(seed)


def check_same_as_in_memory(seed: int) -> None:
    direct = run_shuffled(in_memory(seed), seed)
    through = run_shuffled(through_topics(seed), seed + 1_000)
    assert through.outputs() == direct.outputs()
    assert through.heard() == direct.heard()


async def restored(seed: int, turns: int) -> MadeBody | None:
    """Run a job from a snapshot taken after this number of turns; return None if the first job had ended."""
    broker = await topics(seed)
    made = ThroughTopics(seed, broker, ahead=0).make()
    job = await made.flow.start(channel_limits=limits(seed))
    for _ in range(turns):
        await asyncio.sleep(0)
    try:
        snapshot: JobSnapshot = await asyncio.wait_for(job.snapshot(), PATIENCE_S)
    except ConfigurationError:
        return None
    await job.stop("abort")
    made = ThroughTopics(seed, broker, ahead=0).make()
    await ended(await made.flow.start(channel_limits=limits(seed + 1), snapshot=snapshot))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_a_loop_through_topics_resumes_from_any_snapshot(seed: int) -> None:
    """Feedback that was in the topic at the barrier was missing in the log of a head, or in it twice."""
    check_any_snapshot(seed)


def check_any_snapshot(seed: int) -> None:
    direct = run_shuffled(in_memory(seed), seed)
    restored_runs = [run_shuffled(restored(seed, turns), seed + turns) for turns in (0, 30, 100, 250, 600, 1_500)]
    results = [made.outputs() for made in restored_runs if made is not None]
    assert results == [direct.outputs()] * len(results)
    assert results


def lasting(seed: int, broker: MemoryBroker) -> MadeBody:
    """Return the same body with lasting step names for checkpoints: all steps have the same order each time."""
    flow = Flow("loop")
    with flow.graph.adapting(lambda step: replace(step, has_lasting_name=True)):
        return ThroughTopics(seed, broker, ahead=0).make_in(flow)


async def crashed_again_and_again(seed: int, turns: int) -> MadeBody | None:
    """Run a job that crashes several times, each time within this number of turns; return None if it never crashed."""
    broker, store, chance = await topics(seed), MemoryStore(), random.Random(seed)
    for crashes in range(5):
        made = lasting(seed, broker)
        store = store.another()
        job = await made.flow.start(channel_limits=limits(seed), checkpoints=Checkpoints(store, interval_s=RARELY_S))
        for _ in range(chance.randrange(turns)):
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(job.checkpoint(), PATIENCE_S)
        except CheckpointError:
            await ended(job)
            return made if crashes else None
        for _ in range(chance.randrange(50)):
            await asyncio.sleep(0)
        await job.stop("abort")
    made = lasting(seed, broker)
    checkpoints = Checkpoints(store.another(), interval_s=RARELY_S)
    await ended(await made.flow.start(channel_limits=limits(seed + 1), checkpoints=checkpoints))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_a_loop_through_topics_resumes_after_any_crashes(seed: int) -> None:
    """Feedback that the dead run had written after its last barrier returned to the next run."""
    check_any_crashes(seed)


def check_any_crashes(seed: int) -> None:
    direct = run_shuffled(in_memory(seed), seed)
    crashed_runs = [run_shuffled(crashed_again_and_again(seed, turns), seed) for turns in (20, 100, 400)]
    results = [made.outputs() for made in crashed_runs if made is not None]
    assert results == [direct.outputs()] * len(results)
    assert results


@pytest.mark.soak
@pytest.mark.parametrize("check", [check_same_as_in_memory, check_any_snapshot, check_any_crashes])
def test_any_loop_through_topics_passes_the_same_checks(
    check: Callable[[int], None], for_each_soak_seed: ForEachSeed
) -> None:
    """An arrangement that no other run has tested failed one of these checks."""
    for_each_soak_seed(lambda seed: check(seed + 1_000))
