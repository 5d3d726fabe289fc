"""Coroutines that get, add and clock on a server of one to three shards, against the brute force."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_server.consistency.brute_force import KINDS
from parameter_server.consistency.client_run import (
    CLIENT_STEPS,
    ClientRun,
    ClientStep,
    play,
    random_client_steps,
)

from streamiter.parameter_server.consistency import Consistency

BLOCKS = [None, (1, 3), (2, 2), (2, 7)]

steps = st.lists(st.builds(ClientStep, st.sampled_from(CLIENT_STEPS), st.integers(0, 3)), max_size=40)


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(BLOCKS), st.booleans(), steps)
def test_any_sequence_of_calls_by_clients_does_what_the_table_says(
    consistency: Consistency,
    workers: int,
    shards: int,
    block: tuple[int, int] | None,
    read_my_writes: bool,
    steps: list[ClientStep],
) -> None:
    """Who waits, who is answered, and every number that is read, however the matrix lies on the shards."""
    asyncio.run(play(ClientRun(consistency, workers, shards, block, read_my_writes=read_my_writes), steps))


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_long_runs_of_clients_do_what_the_table_says(consistency: Consistency, shards: int) -> None:
    """Workers that are far apart, and restores while some wait, take more calls than a search makes by itself."""
    for seed in range(3):
        run = ClientRun(consistency, 3, shards, BLOCKS[seed], read_my_writes=seed == 1)
        asyncio.run(play(run, random_client_steps(Random(seed), 3)))
