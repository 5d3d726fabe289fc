"""Coroutines that get, add and clock on a server of one to three shards, compared with the brute force."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_server.consistency.brute_force import KINDS
from parameter_server.consistency.client_run import CLIENT_STEPS, ClientRun, ClientStep, Stir, play, random_client_steps

from streamiter.parameter_server.consistency import BSP, Consistency
from streamiter.parameter_server.server import ParameterServer

BLOCKS = [None, (1, 3), (2, 2), (2, 7)]

steps = st.lists(st.builds(ClientStep, st.sampled_from(CLIENT_STEPS), st.integers(0, 3)), max_size=40)


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(BLOCKS), st.booleans(), steps)
def test_any_sequence_of_calls_by_clients_follows_the_table(
    consistency: Consistency,
    workers: int,
    shards: int,
    block: tuple[int, int] | None,
    read_my_writes: bool,
    steps: list[ClientStep],
) -> None:
    """With some ways to cut the matrix into blocks, a call waited too long, returned too early or read wrong values."""
    asyncio.run(play(ClientRun(consistency, workers, shards, block, read_my_writes=read_my_writes), steps))


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
def test_long_runs_of_clients_follow_the_table(consistency: Consistency) -> None:
    """Bugs that need workers far apart, or restores while calls wait, did not occur in short random sequences."""
    for seed in range(6):
        run = ClientRun(consistency, 3, 1 + seed % 3, BLOCKS[seed // 2], read_my_writes=seed % 2 == 1)
        asyncio.run(play(run, random_client_steps(Random(seed), 3)))


@pytest.mark.parametrize("restores", [False, True], ids=["leaves", "is left out of a restore"])
def test_all_shards_agree_when_the_last_worker_leaves_with_adds_on_one_of_them(restores: bool) -> None:
    """The shard with the adds ended an iteration, and ran its on_clock; the others did not: minimum clocks [1, 0]."""

    async def main() -> None:
        async with ParameterServer(shards=2) as server, ParameterServer(shards=2) as other:
            for each in (server, other):
                await each.create_matrix("w", rows=1, columns=2, consistency=BSP(), block=(1, 1), on_clock=Stir("w"))
            client = server.client(worker=0)
            await client.add("w", row=0, columns=[0], values=5.0)
            if restores:
                await other.restore(await server.snapshot())
            else:
                await client.leave()
            left = other if restores else server
            assert [shard.matrices[0].minimum_clock for shard in left.statistics().shards] == [0, 0]
            later = left.client(worker=1)
            assert (await later.get("w", row=0)).tolist() == [5.0, 0.0]
            assert await later.clock("w") == 1
            assert (await later.get("w", row=0)).tolist() == [5 * 37 + 1, 1]

    asyncio.run(main())
