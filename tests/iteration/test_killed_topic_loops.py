"""Loops through topics are killed while feedback is in transit: no record is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from iteration.topic_loop_program import Options
from iteration.topic_loops_support import KINDS, Kind, MakeTopic, check_undisturbed, end_of, logged_in_last, values_in
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter.engine.graph.feedback import TopicRange
from streamiter.engine.storage.store import store_at
from streamiter.errors import CheckpointError
from streamiter.topics import Topic

PROGRAM = Path(__file__).with_name("topic_loop_program.py")
KILLS = 2
TOKENS, MOST = 40, 100
# Without a pause, this process would take a core from the one that it watches.
_LOOK_AGAIN_S = 0.005


@asynccontextmanager
async def running(options: Options) -> AsyncIterator[asyncio.subprocess.Process]:
    tests, root = PROGRAM.parents[1], PROGRAM.parents[2]
    async with async_process(
        [sys.executable, PROGRAM, msgspec.json.encode(options).decode()],
        limit_s=PATIENCE_S,
        is_forked=True,
        env=os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{root}"},
    ) as process:
        yield process


async def caught_circling(options: Options, process: asyncio.subprocess.Process) -> None:
    """Wait until the last checkpoint contains feedback in transit, or the process has ended."""
    store = store_at(options.folder)
    async with asyncio.timeout(PATIENCE_S):
        while process.returncode is None:
            # A newer checkpoint may have replaced the one to be read.
            with contextlib.suppress(CheckpointError):
                if await logged_in_last(store, options.flow):
                    return
            await asyncio.sleep(_LOOK_AGAIN_S)


async def grown_by(loop: Topic, records: int, process: asyncio.subprocess.Process) -> None:
    """Wait until the topic has ``records`` more records, or the process has ended."""
    until = await end_of(loop) + records
    async with asyncio.timeout(PATIENCE_S):
        while process.returncode is None and await end_of(loop) < until:
            await asyncio.sleep(_LOOK_AGAIN_S)


@pytest.mark.parametrize(
    ("make_topic", "kind"),
    # Each kind runs once: tests without a kill, which are much faster, cover both topics for each kind.
    [("sqlite", "synchronous"), ("sqlite", "asynchronous"), ("kafka", "one ahead"), ("kafka", "unbounded")],
    indirect=["make_topic"],
)
async def test_a_killed_loop_has_the_results_of_an_undisturbed_one(
    make_topic: MakeTopic, kind: Kind, tmp_path: Path
) -> None:
    """Feedback that was in the topic when the process died was lost or came twice."""
    chance = random.Random(KINDS.index(kind))
    loop, out = await make_topic(partitions=3), await make_topic(name="out")
    options = Options(
        flow=f"tokens {uuid.uuid4().hex}",
        loop=loop.url,
        out=out.url,
        folder=str(tmp_path / "checkpoints"),
        interval_s=0.05,
        tokens=TOKENS,
        most=MOST,
        kind=kind,
    )
    resumed_with: list[object] = []
    for _ in range(KILLS):
        async with running(options) as process:
            await grown_by(loop, chance.randrange(20, 300), process)
            if not resumed_with:
                await caught_circling(options, process)
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)
            assert await process.wait() in (0, -signal.SIGKILL)
        resumed_with += await logged_in_last(store_at(options.folder), options.flow)
    async with running(options) as process:
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    check_undisturbed(await values_in(out), tokens=TOKENS, most=MOST)
    assert resumed_with
    assert all(isinstance(each, TopicRange) for each in resumed_with)
