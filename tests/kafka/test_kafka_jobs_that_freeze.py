"""A process of a job is stopped for longer than its transactions may last."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import msgspec
import pytest
from crash.places import KAFKA_COMMIT
from crash.programs import Process, Program, running
from job_faults.service import INTERVAL_S
from job_faults.summing import Options
from job_faults.sums import Topics, check_committed, feeding, until_committed
from topics.topic_case import ManualClock, patiently

from streamiter.engine.storage.flow_record import shortened_name
from streamiter.errors import TopicUnavailable
from streamiter.topics import Topic
from streamiter_kafka.trouble import BrokerTrouble, RetryLimit

_TESTS: Final = Path(__file__).parents[1]
_TIMEOUT_S: Final = 1.0
# The broker looks five times a second for transactions that are open for too long.
_LONGER_S: Final = 2.0
# The process is stopped for longer than the broker may be away: the error must not blame the broker.
_PATIENCE: Final = {"give_up_after_s": 1.5, "request_timeout_s": 0.5}
# The number of the commit at which the process stops; the transactions of the first commits may have no records yet.
_COMMIT: Final = 6
_RESTARTED: Final = "resuming from the last checkpoint"


@pytest.fixture
async def topics(kafka_topic: Callable[..., Topic]) -> Topics:
    """Return topics on the broker of all tests."""
    own = (kafka_topic(name, **_PATIENCE) for name in ("numbers", "sums"))
    made = Topics(*own, kafka_topic("numbers"), kafka_topic("sums"))
    await made.create()
    return made


@pytest.fixture
def program(topics: Topics, topic_prefix: str, tmp_path: Path) -> Program:
    """Return the program of sums, whose transactions may last one second."""
    options = Options(
        flow=f"{topic_prefix}sums",
        numbers=topics.numbers.url,
        sums=topics.sums.url,
        folder=str(tmp_path),
        interval_s=INTERVAL_S,
        alignment_timeout_s=_TIMEOUT_S / 2,
        transaction_timeout_s=_TIMEOUT_S,
    )
    return Program(
        _TESTS / "job_faults" / "summing.py",
        tmp_path / shortened_name(options.flow),
        (msgspec.json.encode(options).decode(),),
        {"PYTHONPATH": str(_TESTS)},
    )


def frozen_at_commit(program: Program) -> AbstractAsyncContextManager[Process]:
    """Run the program until it stops itself right before a commit."""
    return running(program, KAFKA_COMMIT[0], _COMMIT, signal.SIGSTOP)


async def frozen_too_long(process: Process) -> None:
    await process.reaches(process.is_stopped)
    await asyncio.sleep(_LONGER_S)  # the broker measures real time, which no condition signals


async def suspended(process: Process) -> str:
    process.send(signal.SIGTERM)
    code, printed = await process.ends()
    assert code == 0, printed
    assert printed.splitlines()[-1] == "suspended"
    return printed


async def test_a_job_that_was_frozen_for_too_long_resumes_from_its_checkpoint_automatically(
    topics: Topics, program: Program
) -> None:
    """A frozen machine resumed, and the service stayed down until an operator noticed, or it continued with a gap."""
    async with feeding(topics.watched_numbers) as feed, frozen_at_commit(program) as process:
        await frozen_too_long(process)
        process.send(signal.SIGCONT)
        await feed.ended()
        await until_committed(topics.watched_sums, feed.count)
        printed = await suspended(process)
    await check_committed(topics.watched_sums, feed.count)
    [warning] = [line for line in printed.splitlines() if _RESTARTED in line]
    assert warning.startswith("WARNING streamiter.job flow ")
    assert f"which was open for over {_TIMEOUT_S:g} s" in warning
    assert "transaction_timeout_s" in warning
    assert "Traceback" not in printed


async def test_a_job_that_was_frozen_and_replaced_does_not_continue(topics: Topics, program: Program) -> None:
    """A frozen job took the end of its transaction for a timeout, and ended the run that had replaced it."""
    async with feeding(topics.watched_numbers) as feed, frozen_at_commit(program) as zombie:
        await frozen_too_long(zombie)
        async with running(program) as twin:
            await twin.reaches(twin.has_committed)
            zombie.send(signal.SIGCONT)
            code, printed = await zombie.ends()
            await feed.ended()
            await until_committed(topics.watched_sums, feed.count)
            await suspended(twin)
    await check_committed(topics.watched_sums, feed.count)
    assert code == 1, printed
    assert _RESTARTED not in printed
    last = printed.splitlines()[-1]
    assert last.startswith("streamiter.errors.JobFailed: flow ")
    assert "another run of the flow has taken over, so this one must end" in last


async def test_one_late_answer_never_uses_up_the_retry_limit() -> None:
    """A machine slept for a night, the first answer was late, and the error said that the broker was down."""
    clock = ManualClock()
    patience = RetryLimit("topic 'clicks'", 60.0, clock)
    begun_s = clock.monotonic_s()
    clock.advance(8 * 3600.0)
    waiting = asyncio.ensure_future(patience.failed(BrokerTrouble("no answer"), begun_s=begun_s))
    await asyncio.sleep(0)
    clock.advance(1.0)
    await patiently(waiting)
    clock.advance(30.0)
    with pytest.raises(TopicUnavailable, match="no answer"):
        await patience.failed(BrokerTrouble("no answer"))
