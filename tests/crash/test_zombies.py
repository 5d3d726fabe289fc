"""A run that was thought dead and is not: another one has taken over, and it must end without having been seen."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, Final

import pytest
from crash.cases import MINI_BATCH, Case, kafka_case, sqlite_case, trainer, training_pieces
from crash.outcome import committed, updates_in
from crash.places import CHECKPOINT, KAFKA_COMMIT, SQLITE_COMMIT, Place
from crash.programs import Process, Program, running

EVENTS: Final = 400
OPTIONS: Final = {"mode": "synchronous", "parallelism": 1}
# The program takes a checkpoint every tenth of a second; on a busy machine it takes a multiple.
SOON_S: Final = 10.0


@pytest.fixture(params=["sqlite", "kafka"])
async def case(request: pytest.FixtureRequest, topic_prefix: str, tmp_path: Path) -> Case:
    """Topics in a file or on a broker, with half of the events."""
    if request.param == "sqlite":
        made = sqlite_case(tmp_path)
    else:
        made = kafka_case(request.getfixturevalue("kafka_broker").bootstrap, topic_prefix, tmp_path)
    for name in ("events", "updates-killed", "read-killed", "updates-whole", "read-whole"):
        await made.topic(name).create()
    await write(made, 0, EVENTS // 2)
    return made


async def write(case: Case, start: int, stop: int) -> None:
    writer = await case.topic("events").open_writer()
    for piece in training_pieces(EVENTS, partitions=1)[start // 5 : stop // 5]:
        await writer.write(piece)
    await writer.close()


async def ends_fenced(zombie: Process) -> None:
    """With an error that says who is to blame, and that once."""
    code, printed = await zombie.ends()
    print(printed)
    assert code == 1, printed
    last = printed.rstrip().splitlines()[-1]
    assert "JobFailed" in last


async def check_as_if_there_had_been_none(case: Case) -> None:
    for run in ("killed", "whole"):
        async with running(trainer(case, run, **OPTIONS, stop="latest")) as process:
            code, printed = await process.ends()
        assert code == 0, printed
    expected = await updates_in(case.topic("updates-whole"))
    assert len(expected) == EVENTS // MINI_BATCH
    assert await updates_in(case.topic("updates-killed")) == expected
    read = [record.value for record in await committed(case.topic("read-killed"))]
    assert read == [str(number).encode() for number in range(EVENTS)]


def frozen_at(case: Case) -> list[Place]:
    return [case.commit[0]]


@pytest.mark.parametrize("moment", ["before save", "before commit", "after commit", "before pointer"])
async def test_a_frozen_run_that_wakes_up_ends_without_a_trace(case: Case, moment: str) -> None:
    """A machine stood still for a minute; then two services published, and consumers saw versions go back."""
    program = trainer(case, "killed", **OPTIONS)
    places = {
        "before commit": case.commit[0],
        "after commit": case.commit[1],
        "before save": Place("before", "streamiter.runtime.checkpointing.checkpointer:Checkpointer._save"),
        "before pointer": Place("before", "streamiter.checkpoints.flow_folder:FlowFolder.commit"),
    }
    async with running(program, places[moment], 2, strike=signal.SIGSTOP) as zombie:
        assert await zombie.until(zombie.is_stopped)
        async with running(program) as twin:
            assert await twin.until(twin.has_committed)
            zombie.send(signal.SIGCONT)
            await ends_fenced(zombie)
            await write(case, EVENTS // 2, EVENTS)
            twin.send(signal.SIGTERM)
            code, printed = await twin.ends()
            assert code == 0, printed
    await check_as_if_there_had_been_none(case)


@pytest.mark.parametrize("delivery", [None, "at_least_once"])
async def test_a_run_without_input_hears_that_it_was_replaced(case: Case, delivery: str | None) -> None:
    """An old pod waited for events for weeks, with connections and memory, and nobody knew which was which."""
    program = trainer(case, "killed", **OPTIONS, delivery=delivery)
    async with running(program) as zombie:
        assert await zombie.until(zombie.has_committed)
        async with running(program) as twin:
            assert await twin.until(twin.has_taken_over)
            async with asyncio.timeout(SOON_S):
                await ends_fenced(zombie)
            assert await twin.until(twin.has_committed)
