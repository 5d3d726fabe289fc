"""Jobs whose broker stops, dies or freezes, also in the middle of a commit: what is committed is right to the record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from job_faults.service import Service, checkpoints_in, nothing_unheard, one_line
from job_faults.sums import Topics, check_committed, feeding, sums_flow, until_committed
from support.kafka_server import KafkaServer
from topics.topic_case import PATIENCE_S

from streamiter import Checkpoints
from streamiter.errors import JobFailed, TopicUnavailable, TransactionExpired
from streamiter.topics import topic
from streamiter_kafka.transactions import KafkaTransactions

PATIENT = {"give_up_after_s": PATIENCE_S, "request_timeout_s": 1.0}
QUICK = {"give_up_after_s": 1.0, "request_timeout_s": 0.3}
# The broker looks for transactions that have lasted too long five times a second.
SHORT_TRANSACTION = {"transaction_timeout_s": 1.0, "alignment_timeout_s": 0.5}

MakeTopics = Callable[..., Topics]
Interrupt = Callable[[KafkaServer], Awaitable[None]]


@pytest.fixture
def make_topics(breakable_broker: KafkaServer, topic_prefix: str) -> MakeTopics:
    """Topics of the broker that is going to break, for a job with these options."""

    def make(**options: object) -> Topics:
        prefix = f"kafka://{breakable_broker.bootstrap}/{topic_prefix}"
        own = [topic(f"{prefix}{name}", **options) for name in ("numbers", "sums")]
        return Topics(*own, *(topic(f"{prefix}{name}", **PATIENT) for name in ("numbers", "sums")))

    return make


@pytest.fixture
def flow_name(topic_prefix: str) -> str:
    """Flows of all tests share the topic of the commit records."""
    return f"{topic_prefix}sums"


async def stop_and_start(broker: KafkaServer) -> None:
    await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(broker.start)


async def kill_and_start(broker: KafkaServer) -> None:
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.start)


async def freeze(broker: KafkaServer, *, for_s: float) -> None:
    broker.pause()
    await asyncio.sleep(for_s)  # frozen: no condition tells
    broker.resume()


async def check_goes_on(flow: str, topics: Topics, kept: Checkpoints, count: int) -> None:
    """A new run commits what is left to do, and then all is right."""
    service = Service(sums_flow(flow, topics), kept)
    try:
        await service.until(lambda: service.taken > 0)
        await until_committed(topics.watched_sums, count)
        await service.suspended()
    finally:
        await service.close()
    await check_committed(topics.watched_sums, count)


# -- gone for a while


@pytest.mark.parametrize("interrupt", [stop_and_start, kill_and_start])
async def test_a_job_comes_through_a_restart_of_its_broker(
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    interrupt: Interrupt,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rolling update of the cluster took all jobs with it, or their last seconds."""
    topics = make_topics(**PATIENT)
    await topics.create()
    with nothing_unheard(caplog):
        service = Service(sums_flow(flow_name, topics), checkpoints_in(tmp_path))
        async with feeding(topics.watched_numbers) as feed:
            await service.works()
            await interrupt(breakable_broker)
            await service.works()
        await until_committed(topics.watched_sums, feed.count)
        statistics = await service.suspended()
    await check_committed(topics.watched_sums, feed.count)
    assert len(service.jobs) == 1
    assert statistics.state == "suspended"


class Reached:
    """Stops jobs where they call a method of their transactions, until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str, *, skip: int) -> None:
        self.is_there = asyncio.Event()
        self.go_on = asyncio.Event()
        original: Any = getattr(KafkaTransactions, method)
        calls = iter(range(skip))

        async def reached(transactions: KafkaTransactions) -> Any:
            if next(calls, None) is None:
                self.is_there.set()
                await self.go_on.wait()
            return await original(transactions)

        patch.setattr(KafkaTransactions, method, reached)


@pytest.mark.parametrize("interrupt", [kill_and_start])
@pytest.mark.parametrize("method", ["commit", "begin"])
async def test_a_broker_that_dies_right_before_a_commit_or_after_it_changes_nothing(
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    interrupt: Interrupt,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer was lost, and the outputs of that checkpoint were written a second time."""
    topics = make_topics(**PATIENT)
    await topics.create()
    reached = Reached(monkeypatch, method, skip=4)
    with nothing_unheard(caplog):
        service = Service(sums_flow(flow_name, topics), checkpoints_in(tmp_path))
        async with feeding(topics.watched_numbers) as feed:
            await service.until(reached.is_there.is_set)
            interrupting = asyncio.create_task(interrupt(breakable_broker))
            reached.go_on.set()
            await interrupting
            await service.works()
        await until_committed(topics.watched_sums, feed.count)
        await service.suspended()
    await check_committed(topics.watched_sums, feed.count)
    assert len(service.jobs) == 1


@pytest.mark.parametrize("how", ["stop", "kill", "pause"])
async def test_a_broker_that_stays_away_ends_the_job_with_one_error_and_the_next_run_goes_on(
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Jobs hung for days, or told of a dozen errors that followed from the first."""
    topics = make_topics(**QUICK)
    await topics.create()
    with nothing_unheard(caplog):
        service = Service(sums_flow(flow_name, topics), checkpoints_in(tmp_path))
        async with feeding(topics.watched_numbers) as feed:
            await service.works()
            await asyncio.to_thread(getattr(breakable_broker, how))
            error = await service.failed()
            await asyncio.to_thread(breakable_broker.start)
            breakable_broker.resume()
        patient = make_topics(**PATIENT)
        await check_goes_on(flow_name, patient, checkpoints_in(tmp_path), feed.count)
    assert isinstance(error, JobFailed)
    assert isinstance(error.__cause__, TopicUnavailable)
    assert "Is the broker running, and is the address right?" in one_line(error)


# -- frozen


async def test_a_broker_that_freezes_past_all_timeouts_costs_no_record(
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it had been sent while it was frozen was carried out afterwards, in a transaction that was over."""
    topics = make_topics(**PATIENT)
    await topics.create()
    with nothing_unheard(caplog):
        service = Service(sums_flow(flow_name, topics), checkpoints_in(tmp_path, **SHORT_TRANSACTION))
        async with feeding(topics.watched_numbers) as feed:
            await service.works()
            await freeze(breakable_broker, for_s=4.0)
            await service.works()
        await until_committed(topics.watched_sums, feed.count)
        await service.suspended()
    await check_committed(topics.watched_sums, feed.count)
    assert len(service.jobs) == 1 + caplog.text.count("going on from the last checkpoint")
    print(len(service.jobs))
