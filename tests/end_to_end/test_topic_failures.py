"""A topic fails under a running job: the job ends with flow, step and reason, and leaves no task behind."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.kafka_fixtures import GivenKafka
from support.kafka_server import KafkaServer
from support.waiting import PATIENCE_S

from streamiter import Flow
from streamiter.errors import JobFailed
from streamiter.topics import MemoryBroker, OutgoingBatch, Raw, Topic, topic

# With these options a job gives up on its broker within seconds.
QUICK = {"give_up_after_s": 1.5, "request_timeout_s": 0.3}
MiB = 1 << 20


@dataclass
class Trouble:
    """A flow, the failure while it runs, and the expected error."""

    flow: Flow
    step: str
    reason: str
    strike: Callable[[], Awaitable[None]] | None = None


Preparation = Callable[[], Awaitable[Trouble]]


def record_too_large(clicks: Topic, limit: str) -> Preparation:
    """Return the writing of one large record among small ones to a topic whose setting ``limit`` is too low for it."""

    async def make() -> Trouble:
        await clicks.create(settings={limit: "10000"})
        flow = Flow("letters")
        flow.from_items([b"small", b"x" * 20_000, b"small"]).sink(clicks, encode=Raw(), name="out")
        return Trouble(flow, "out", rf"record 1 of the batch .*bytes.* 10000.*{limit}")

    return make


@pytest.fixture
def memory_record_too_large() -> Preparation:
    return record_too_large(MemoryBroker().topic("clicks"), "max_record_bytes")


@pytest.fixture
def sqlite_record_too_large(tmp_path: Path) -> Preparation:
    return record_too_large(topic(f"sqlite:///{tmp_path}/log.db?topic=clicks"), "max_record_bytes")


@pytest.fixture
def kafka_record_too_large(kafka_broker: KafkaServer | GivenKafka, topic_prefix: str) -> Preparation:
    return record_too_large(topic(f"kafka://{kafka_broker.bootstrap}/{topic_prefix}large"), "max.message.bytes")


@pytest.fixture
def sqlite_disk_full(small_disk: tuple[Path, Any]) -> Preparation:
    """Return a sink that writes more than the disk can store."""

    async def make() -> Trouble:
        clicks = topic(f"sqlite:///{small_disk[0]}/log.db?topic=clicks")
        await clicks.create()
        flow = Flow("letters")
        flow.from_items([b"x" * MiB] * 6).sink(clicks, encode=Raw(), name="out")
        return Trouble(flow, "out", r"log\.db: no room left .*Make room")

    return make


@pytest.fixture
def kafka_wrong_password(breakable_broker: KafkaServer) -> Preparation:
    """Return a source whose login the broker refuses."""

    async def make() -> Trouble:
        clicks = topic(
            f"kafka://{breakable_broker.address('PASSWORD')}/clicks",
            security_protocol="SASL_PLAINTEXT",
            sasl_username="alice",
            sasl_password="wrong-horse",
        )
        flow = Flow("letters")
        flow.source(clicks, name="in").collect()
        return Trouble(flow, "in", f"{breakable_broker.address('PASSWORD')}.*sasl_password")

    return make


@pytest.fixture
def kafka_gone_from_the_sink(breakable_broker: KafkaServer, topic_prefix: str) -> Preparation:
    """Return a sink whose broker freezes while more records are written."""

    async def make() -> Trouble:
        clicks = MemoryBroker().topic("clicks")
        written = topic(f"kafka://{breakable_broker.bootstrap}/{topic_prefix}sink", **QUICK)
        await clicks.create()
        await written.create()
        flow = Flow("letters")
        flow.source(clicks, decode=Raw(), name="in").sink(written, encode=Raw(), name="out")

        async def strike() -> None:
            breakable_broker.pause()
            await write(clicks, b"lost")

        return Trouble(flow, "out", breakable_broker.bootstrap, strike)

    return make


@pytest.fixture
def kafka_gone_from_the_source(breakable_broker: KafkaServer, topic_prefix: str) -> Preparation:
    """Return a source whose broker freezes while no records arrive."""

    async def make() -> Trouble:
        clicks = topic(f"kafka://{breakable_broker.bootstrap}/{topic_prefix}source", **QUICK)
        await clicks.create()
        flow = Flow("letters")
        flow.source(clicks, decode=Raw(), name="in").collect()

        async def strike() -> None:
            breakable_broker.pause()

        return Trouble(flow, "in", breakable_broker.bootstrap, strike)

    return make


async def write(clicks: Topic, value: bytes) -> None:
    writer = await clicks.open_writer()
    await writer.write(OutgoingBatch([value]))
    await writer.close()


async def run(case: Trouble) -> None:
    job = await case.flow.start()
    if case.strike is not None:
        await case.strike()
    await job.wait()


TROUBLES = [
    "memory_record_too_large",
    "sqlite_record_too_large",
    "kafka_record_too_large",
    "sqlite_disk_full",
    "kafka_wrong_password",
    "kafka_gone_from_the_sink",
    "kafka_gone_from_the_source",
]


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_failing_topic_ends_the_job_with_step_and_reason_and_leaves_no_task(
    trouble: str, request: pytest.FixtureRequest
) -> None:
    """A service that lost its broker or its disk hung, or ended with a traceback of the client library."""
    case: Trouble = await request.getfixturevalue(trouble)()
    before = asyncio.all_tasks()
    with pytest.raises(JobFailed, match=rf"flow 'letters', step '{case.step}'.*{case.reason}") as caught:
        await asyncio.wait_for(run(case), PATIENCE_S)
    assert caught.value.step == case.step
    assert asyncio.all_tasks() - before == set()
