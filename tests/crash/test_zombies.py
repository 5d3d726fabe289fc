"""A run that was replaced while it was frozen ends with an error, and writes no record."""

import asyncio
import re
import signal
from pathlib import Path
from typing import Final

import pytest
from crash.cases import MINI_BATCH, PIECE_EVENTS, Case, kafka_case, sqlite_case, trainer, training_pieces
from crash.places import KAFKA_COMMIT, Place
from crash.programs import Process, running
from crash.training import MODEL
from support.waiting import PATIENCE_S
from topics.topic_case import content

from streamiter.models import model_updates

EVENTS: Final = 600
POLL_S: Final = 0.05


@pytest.fixture(params=["sqlite", "kafka"])
async def case(request: pytest.FixtureRequest, topic_prefix: str, tmp_path: Path) -> Case:
    """Return a case in a file or on a broker; a third of the events is written."""
    if request.param == "sqlite":
        made = sqlite_case(tmp_path)
    else:
        made = kafka_case(request.getfixturevalue("kafka_broker").bootstrap, topic_prefix, tmp_path)
    for name in ("events", "updates-killed", "read-killed"):
        await made.topic(name).create()
    await write(made, 0, EVENTS // 3)
    return made


async def write(case: Case, start: int, stop: int) -> None:
    writer = await case.topic("events").open_writer()
    for piece in training_pieces(EVENTS, partitions=1)[start // PIECE_EVENTS : stop // PIECE_EVENTS]:
        await writer.write(piece)
    await writer.close()


async def seen(case: Case) -> list[int]:
    """Return the events that are counted in committed outputs."""
    return [int(record.value or b"") for record in await content(case.topic("read-killed"))]


async def until_seen(case: Case, event_count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while event_count - 1 not in await seen(case):
            await asyncio.sleep(POLL_S)


async def check_each_is_seen_once(case: Case) -> None:
    assert await seen(case) == list(range(EVENTS))
    updates = [update async for update in model_updates(case.topic("updates-killed"), MODEL, follow=False)]
    assert [(update.generation, update.version, update.records) for update in updates] == [
        (1, version, version * MINI_BATCH) for version in range(1, len(updates) + 1)
    ]


async def ends_fenced(zombie: Process) -> None:
    """Check that the process ends with an error that gives the reason."""
    code, printed = await zombie.ends()
    assert code == 1, printed
    assert "streamiter.errors.ProducerFenced: " in printed
    last_line = printed.rstrip().splitlines()[-1]
    assert last_line.startswith("streamiter.errors.JobFailed: flow "), printed
    assert re.search("newer writer|has claimed the flow since", last_line), printed


@pytest.mark.parametrize("moment", ["before its commit", "before its pointer"])
async def test_a_frozen_run_that_wakes_up_writes_no_record(case: Case, moment: str) -> None:
    """A machine was frozen for a minute; then two services published, and consumers saw versions decrease."""
    place = {
        "before its commit": case.commit[0],
        "before its pointer": Place("before", "streamiter.engine.storage.store:CheckpointStore.commit"),
    }[moment]
    program = trainer(case, "killed", mode="synchronous", parallelism=1)
    async with running(program, place, 2, strike=signal.SIGSTOP) as zombie:
        await zombie.reaches(zombie.is_stopped)
        async with running(program) as twin:
            await twin.reaches(twin.has_committed)
            zombie.send(signal.SIGCONT)
            await ends_fenced(zombie)
            await write(case, EVENTS // 3, EVENTS)
            await until_seen(case, EVENTS)
            await twin.suspends()
    await check_each_is_seen_once(case)


async def test_a_fenced_run_does_not_end_the_transaction_of_the_newer_run(case: Case) -> None:
    """The fenced run asked the broker for the reason, which aborted the newer run's transaction and restarted that
    run.
    """
    program = trainer(case, "killed", mode="synchronous", parallelism=1)
    # A transaction with a commit record is certainly open. Kafka's begin() also ends a transaction, so every second
    # call comes from a commit, and the fourth call from the second commit.
    open_here = (KAFKA_COMMIT[2], 4) if case.commit is KAFKA_COMMIT else (case.commit[0], 2)
    async with running(program, case.commit[0], 2, strike=signal.SIGSTOP) as zombie:
        await zombie.reaches(zombie.is_stopped)
        async with running(program, *open_here, strike=signal.SIGSTOP) as twin:
            await write(case, EVENTS // 3, 2 * EVENTS // 3)
            await twin.reaches(twin.is_stopped)
            zombie.send(signal.SIGCONT)
            await ends_fenced(zombie)
            twin.send(signal.SIGCONT)
            await until_seen(case, 2 * EVENTS // 3)
            await write(case, 2 * EVENTS // 3, EVENTS)
            await until_seen(case, EVENTS)
            assert "resuming from the last checkpoint" not in await twin.suspends()
    await check_each_is_seen_once(case)


async def test_a_run_that_takes_over_resumes_from_the_last_commit_of_the_run_before(case: Case) -> None:
    """A new run read the last commit, the old run committed once more, and only then the old run was fenced."""
    program = trainer(case, "killed", mode="synchronous", parallelism=1)
    async with running(program) as zombie:
        await zombie.reaches(zombie.has_committed)
        async with running(program, case.taking_over, 1, strike=signal.SIGSTOP) as twin:
            await twin.reaches(twin.is_stopped)
            await write(case, EVENTS // 3, 2 * EVENTS // 3)
            await until_seen(case, 2 * EVENTS // 3)
            twin.send(signal.SIGCONT)
            await ends_fenced(zombie)
            await write(case, 2 * EVENTS // 3, EVENTS)
            await until_seen(case, EVENTS)
            await twin.suspends()
    await check_each_is_seen_once(case)


@pytest.mark.parametrize("delivery", [None, "at_least_once"])
async def test_a_run_without_input_notices_that_it_was_replaced(case: Case, delivery: str | None) -> None:
    """An old pod waited for events for weeks, and operators did not know which of the two pods was active."""
    program = trainer(case, "killed", mode="synchronous", parallelism=1, delivery=delivery)
    async with running(program) as zombie:
        await zombie.reaches(zombie.has_committed)
        async with running(program) as twin:
            await twin.reaches(twin.has_taken_over)
            await ends_fenced(zombie)
            await twin.reaches(twin.has_committed)
            await twin.suspends()
