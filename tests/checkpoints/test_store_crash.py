"""The stores in a folder and in an object store, with processes that are killed, race, or have little memory."""

import asyncio
import contextlib
import os
import random
import re
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from checkpoints.store_child import MIB, parts
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.engine.storage.store import blobs_at, store_at

CHILD = Path(__file__).with_name("store_child.py")


@pytest.fixture(params=["folder", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a folder, or the URL of an object store."""
    url: str = request.getfixturevalue("s3_url") if request.param == "object store" else str(tmp_path)
    return url


def child(what: str, place: str, run: str, *more: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    tests, root = CHILD.parents[1], CHILD.parents[2]
    # Of a fork, the memory is that of the process that has imported everything, and no test writes to it.
    is_forked = what == "take_checkpoints"
    return async_process(
        [sys.executable, CHILD, what, place, run, *more],
        stdin=asyncio.subprocess.DEVNULL if is_forked else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{root}"},
        is_forked=is_forked,
    )


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return (await process.stdout.readline()).decode().strip()


async def killed(place: str, run: str, commits: int, more_turns: int) -> int:
    """Kill the run some time after this number of commits; return the last number that it reported as committed."""
    async with child("take_checkpoints", place, run) as process:
        number = 0
        for _ in range(1 + commits):
            number = int(await line_of(process))
        for _ in range(more_turns):  # The kill may then come at any later point.
            await asyncio.sleep(0)
        process.kill()
        assert process.stdout is not None
        for line in (await process.stdout.read()).split():
            number = int(line)
        assert await process.wait() == -9
    return number


async def test_after_a_kill_the_committed_snapshot_is_complete(place: str) -> None:
    """A process died while it saved, committed or pruned, and the next run could not resume from the last commit."""
    chance = random.Random(14)
    for attempt in range(3 if place.startswith("s3://") else 6):
        run = f"run{attempt}"
        said = await killed(place, run, chance.randrange(3), chance.randrange(3000))
        store = store_at(place)
        pointer = await store.pointer("clicks")
        assert pointer is not None
        assert pointer.run == run
        if pointer.committed is None:
            assert said == 0
            continue
        # The commit may be one higher than the report, if the kill came between them.
        assert pointer.committed.number in (said, said + 1)
        snapshot = await store.open("clicks", pointer.committed)
        snapshot.verify()
        [first, *_] = parts(pointer.committed.number)
        assert await snapshot.content("p") == first.content
        assert list(snapshot.frames("p", 0)) == list(first.deferred[0].frames())
        snapshot.close()
    # The last store removes the remains of all runs; no lock of a dead process blocks it.
    store = store_at(place)
    await store.claim("clicks", "last")
    await store.prune("clicks", keep=1)
    assert len(await store.list("clicks")) == 1
    names = blobs_at(place).names("clicks")
    assert [Path(name).suffix for name in names if name not in ("lock", "in-use")] == [".checkpoint", ".json"]
    await store.close()


async def test_of_two_processes_that_claim_at_the_same_time_the_last_one_wins(place: str) -> None:
    """An orchestrator started the new process before the old one had ended, and both wrote the state."""
    async with contextlib.AsyncExitStack() as started:
        processes = {run: await started.enter_async_context(child("compete", place, run)) for run in ("a", "b", "c")}
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            await process.stdin.drain()
        for process in processes.values():
            assert await line_of(process) == "claimed"
        pointer = await store_at(place).pointer("clicks")
        assert pointer is not None
        winner = pointer.run
        losers = [run for run in processes if run != winner]
        for run in losers:
            said = await line_of(processes[run])
            assert re.match(
                rf"fenced \d+ flow 'clicks': run {run} cannot \w+.*: run \w has claimed the flow since", said
            )
            assert await processes[run].wait() == 0
        # The winner still runs: only this test fences it, and all its commits stay.
        ours = store_at(place)
        before = await ours.claim("clicks", "ours")
        said = await line_of(processes[winner])
        committed = int(said.split()[1])
        assert before is not None
        assert before.run == winner
        if committed:
            assert before.committed == CheckpointId(committed, winner)
        else:
            assert before.committed is None or before.committed.run in losers
        assert await processes[winner].wait() == 0
    await ours.close()


async def test_large_state_is_saved_and_read_in_little_memory(place: str) -> None:
    """A job whose state fills half of its memory was killed by its first checkpoint."""
    # The server of the tests is slow. Three parts of 8 MiB are on their way to it, and one is being read.
    frames, limit = (64, 48 * MIB) if place.startswith("s3://") else (300, 20 * MIB)
    async with child("save_large", place, "a", str(frames)) as process:
        assert int(await line_of(process)) < limit
        assert int(await line_of(process)) < limit
        assert await process.wait() == 0
