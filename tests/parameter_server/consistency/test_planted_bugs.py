"""Checks that the comparison with the brute force finds planted bugs."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from parameter_server.consistency.client_run import ClientRun, play, random_client_steps
from parameter_server.consistency.comparison import difference, random_steps
from parameter_server.consistency.planted_bugs import PLANTED, PLANTED_IN_THE_SHARD, Plant

from streamiter.parameter_server.consistency import Consistency


@pytest.mark.parametrize(
    ("plant", "consistency"), PLANTED, ids=[f"{plant.__name__}-{kind!r}" for plant, kind in PLANTED]
)
def test_a_planted_bug_is_found(plant: Plant, consistency: Consistency, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison passed a broken model, so its result for the real models proved nothing."""
    plant(monkeypatch)
    assert any(_differs(consistency, seed) for seed in range(100))


@pytest.mark.parametrize(
    ("plant", "consistency"),
    PLANTED_IN_THE_SHARD,
    ids=[f"{plant.__name__}-{kind!r}" for plant, kind in PLANTED_IN_THE_SHARD],
)
def test_a_bug_planted_in_the_shard_is_found(
    plant: Plant, consistency: Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison passed a broken shard, so its result for the real shards proved nothing."""
    plant(monkeypatch)
    assert any(_fails(consistency, seed) for seed in range(20))


def _differs(consistency: Consistency, seed: int) -> bool:
    return difference(consistency, 3, random_steps(Random(seed), 3)) is not None


def _fails(consistency: Consistency, seed: int) -> bool:
    run = ClientRun(consistency, 3, 1 + seed % 2, None, read_my_writes=False)
    try:
        asyncio.run(play(run, random_client_steps(Random(seed), 3)))
    except (AssertionError, asyncio.InvalidStateError):  # a call that should have ended has not
        return True
    return False
