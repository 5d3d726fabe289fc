"""Health as a pure function of facts, and from which facts of a job it comes."""

import asyncio
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from flow.small_flows import Fed
from runtime.probe import Valve
from support.examples import random_examples

from streamiter import Flow
from streamiter.engine.graph.statistics import StalledTask
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.models import ServedModel
from streamiter.service.observing.health import HealthFacts, SourceFacts, facts_of, liveness, readiness
from streamiter.service.observing.observations import LoopBlock, Observations
from streamiter.service.observing.quality import QualityNow
from streamiter.service.settings.tables import HealthSettings
from streamiter.testing import VirtualClock
from streamiter.topics import TopicWriter
from streamiter.topics.memory import MemoryTopic
from streamiter.topics.memory_log import MemoryTopics
from streamiter.values.helpers.clock import SystemClock

LIMITS = HealthSettings(loop_limit_s=10.0, stall_limit_s=60.0, source_limit_s=30.0)
WELL = HealthFacts(LIMITS, "running", None, 60.0, loop_blocked_s=0.0, at_work=None)


def any_facts(random: Random) -> HealthFacts:
    """Return facts of which about half of the conditions fail."""
    phases = ["running", "running", "running", "starting", "restoring", "waiting", "stopping", "failed", "aborted"]
    causes = random.choices(["held", "topic", "step"], k=random.randrange(3))
    return replace(
        WELL,
        phase=random.choice(phases),
        seconds_in_phase=random.choice([0.0, 4.2, 9000.0]),
        loop_blocked_s=random.choice([0.0, 9.9, 10.0, 10.1]),
        since_block_s=random.choice([None, None, 0.0, 10.0, 10.1]),
        stalled=tuple(StalledTask("map[0]", "map[0] is at work on a batch", 61.0, cause) for cause in causes),
        sources=tuple(
            SourceFacts("in[0]", "clicks", random.choice([0.0, 29.0, 31.0])) for _ in range(random.randrange(3))
        ),
        checkpoint_age_s=random.choice([None, 0.0, 5.0, 5.1]),
        checkpoint_interval_s=random.choice([None, 1.0]),
        worse_s=random.choice([0.0, 900.0, 901.0]),
        quality=QualityNow("log loss", 0.7, 0.6, None, 10_000, 0),
        model_trouble=random.choice([None, "none was published"]),
    )


@random_examples(any_facts)
def test_no_topic_makes_the_process_not_alive(facts: HealthFacts) -> None:
    """A liveness probe restarted healthy processes again and again, because a broker was away."""
    of_topics = {
        "sources": (SourceFacts("in[0]", "clicks", 9000.0),),
        "checkpoint_age_s": 9000.0,
        "model_trouble": "the topic does not answer",
        "stalled": (*facts.stalled, StalledTask("publish[0]", "it is at work on a batch", 9000.0, "topic")),
    }
    assert liveness(replace(facts, **of_topics)) == liveness(facts)


@random_examples(any_facts)
def test_a_step_that_is_held_is_neither_dead_nor_unready(facts: HealthFacts) -> None:
    """A worker that waited for a slower one, as its staleness asks, was restarted."""
    held = StalledTask("train[0]", "train[0] is held", 9000.0, "held")
    also = replace(facts, stalled=(*facts.stalled, held))
    assert (liveness(also), readiness(also)) == (liveness(facts), readiness(facts))


@random_examples(any_facts)
def test_a_process_that_is_not_alive_is_not_ready(facts: HealthFacts) -> None:
    """Requests went to a process that was about to be killed."""
    assert readiness(facts) or not liveness(facts)


@random_examples(any_facts)
def test_the_conditions_are_those_of_the_documents(facts: HealthFacts) -> None:
    """A probe was green for a condition that was in the documents, and not in the code."""
    loop = facts.loop_blocked_s > 10 and facts.since_block_s != 10.1
    stalls = [stalled.cause for stalled in facts.stalled]
    assert [problem.condition for problem in liveness(facts)] == (
        ["event loop"] * loop + ["job"] * (facts.phase in ("failed", "aborted")) + ["step"] * stalls.count("step")
    )
    expected = ["event loop"] * loop
    if facts.phase == "running":
        is_old = facts.checkpoint_age_s == 5.1 and facts.checkpoint_interval_s is not None
        expected += ["step"] * (stalls.count("step") + stalls.count("topic"))
        expected += ["source"] * sum(source.unanswered_s > 30 for source in facts.sources) + ["checkpoint"] * is_old
        expected += ["quality"] * (facts.worse_s == 901.0)
    else:
        expected += ["job"]
    expected += ["model"] * (facts.model_trouble is not None)
    assert [problem.condition for problem in readiness(facts)] == expected


class AwayWriter(TopicWriter):
    """A writer whose broker does not answer."""

    async def write(self, batch: Any) -> None:
        await asyncio.Event().wait()

    async def flush(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return


class AwayTopic(MemoryTopic):
    """A topic whose broker goes away after it was opened."""

    async def open_writer(self, *_: Any, **__: Any) -> TopicWriter:
        return AwayWriter()


async def stalled_causes(flow: Flow, fed: Fed) -> dict[str, str]:
    """Return the causes of all stalled tasks, after two minutes."""
    clock = VirtualClock()
    job = await flow.start(clock=clock, channel_limits=ChannelLimits(records=1))
    for number in range(5):
        fed.give(number)
    await clock.advance(120)
    statistics = job.statistics()
    await job.stop("abort")
    return {stalled.name: stalled.cause for stalled in statistics.stalled}


async def test_a_step_that_waits_for_a_topic_is_told_from_one_that_hangs() -> None:
    """A sink waited for its broker, and the process was restarted as if a step hung."""
    away = AwayTopic(MemoryTopics(SystemClock()), "away")
    await away.create()
    fed, flow = Fed(), Flow("sinks")
    flow.from_source(lambda: fed, name="in").sink(away, name="write")
    assert await stalled_causes(flow, fed) == {"in[0]": "topic", "write[0]": "topic"}

    fed, flow = Fed(), Flow("hangs")
    flow.from_source(lambda: fed, name="in").process(lambda: Valve(asyncio.Event()), name="hang")
    assert await stalled_causes(flow, fed) == {"in[0]": "step", "hang[0]": "step"}


async def test_a_model_that_is_worse_than_the_share_for_long_is_not_ready() -> None:
    """A field got another unit, and a model that was worse than none answered for a week."""
    clock = VirtualClock()
    observations = Observations("clicks", clock=clock)
    observations.enter("running")

    async def problems(loss: float, *, seconds: int, rows: float = 2_000.0) -> list[str]:
        """Report a loss again and again; return what readiness says then."""
        for _ in range(seconds // 60):
            observations.validated({"window_loss": loss, "window_baseline_loss": 0.5, "window_count": rows})
            await clock.advance(60)
        return told()

    def told() -> list[str]:
        return [each.detail for each in readiness(facts_of(observations, None)) if each.condition == "quality"]

    assert await problems(0.9, seconds=7200, rows=999) == []  # The first rows say little.
    assert await problems(0.509, seconds=7200) == []
    assert await problems(0.6, seconds=900) == []
    assert await problems(0.5, seconds=60) == []
    assert await problems(0.6, seconds=960) == []
    await clock.advance(86_400)  # A night without labels tells nothing new.
    assert told() == []
    [detail] = await problems(0.6, seconds=60)
    assert re.fullmatch(r"predictions have been worse .* for \d+ s: a log loss of 0.6, where it has 0.5", detail)
    assert await problems(0.4, seconds=60) == []


async def test_facts_of_a_service_without_a_job() -> None:
    """A probe failed with an error while the service started."""
    observations = Observations("clicks", clock=VirtualClock())
    assert liveness(facts_of(observations, observations.statistics())) == ()
    assert [problem.detail for problem in readiness(facts_of(observations, observations.statistics()))] == [
        "starting, 0.0 s"
    ]


def test_a_missing_model_has_a_time() -> None:
    """The probe said that no model answered, and not whether for a second or since yesterday."""
    observations = Observations("clicks", clock=(clock := VirtualClock()))
    observations.served = ServedModel(AwayTopic(MemoryTopics(clock), "updates"), "clicks")
    observations.enter("running")
    clock.now_s += 90.0
    [problem] = [each for each in readiness(facts_of(observations, None)) if each.condition == "model"]
    assert problem.detail == "no model to predict with: none was published, 90.0 s after the start"
    assert problem.for_s == 90.0


async def test_a_blocked_event_loop_is_seen_and_the_step_is_named() -> None:
    """A step computed for a minute, and no line of the log said which one."""
    clock, fed, flow = VirtualClock(), Fed(), Flow("blocked")

    class Slow:
        def __call__(self, record: int) -> int:
            clock.now_s += 20.0
            return record

    flow.from_source(lambda: fed, name="in").map(Slow(), name="slow").rebalance().map(abs, name="quick").collect()
    observations = Observations("blocked", limits=LIMITS, clock=clock)
    observations.job = await flow.start(clock=clock)
    observations.enter("running")
    observations.sample()
    blocks: list[LoopBlock] = []
    lag = asyncio.create_task(observations.loop_lag.run(blocks.append))
    await clock.advance(1)
    fed.give(1)
    await asyncio.sleep(0)
    await clock.advance(1)
    assert len(blocks) == 1
    assert blocks[0].task == "in[0]"
    assert blocks[0].seconds == pytest.approx(20, abs=1)
    lag.cancel()
    await observations.job.stop("abort")


async def test_after_a_block_the_probe_names_the_step_and_its_seconds() -> None:
    """The probe had no answer while the loop was blocked, and was green after that: no one learned why."""
    clock, fed, flow = VirtualClock(), Fed(), Flow("blocked")

    def slow(record: int) -> int:
        clock.now_s += 0.3
        return record

    flow.from_source(lambda: fed, name="in").map(slow, name="slow").collect()
    observations = Observations("blocked", limits=HealthSettings(loop_limit_s=0.15), clock=clock)
    observations.job = await flow.start(clock=clock)
    observations.enter("running")
    observations.sample()
    lag = asyncio.create_task(observations.loop_lag.run(lambda _: None))
    await clock.advance(1)
    assert liveness(facts_of(observations, observations.statistics())) == ()
    fed.give(1)
    await asyncio.sleep(0)
    await clock.advance(0.1)
    [problem] = liveness(facts_of(observations, observations.statistics()))
    assert re.fullmatch(
        r"the event loop was blocked for 0\.[23] s, until 0\.\d s ago; at work was in\[0\]", problem.detail
    ), problem.detail
    await clock.advance(60)
    assert liveness(facts_of(observations, observations.statistics())) == ()
    lag.cancel()
    await observations.job.stop("abort")
