"""Checks that the comparison with the brute force finds planted bugs."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from parameter_server.consistency.client_run import ClientRun, play, random_client_steps
from parameter_server.consistency.comparison import difference, random_steps
from parameter_server.consistency.planted_bugs import PLANTED, PLANTED_IN_THE_SHARD, Bug

from streamiter.parameter_server.consistency import Consistency


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: f"{bug.name}, {bug.consistency}")
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison passed a broken model, so its result for the real models proved nothing."""
    bug.plant(monkeypatch)
    assert any(_differs(bug.consistency, seed) for seed in range(100))


@pytest.mark.parametrize("bug", PLANTED_IN_THE_SHARD, ids=lambda bug: f"{bug.name}, {bug.consistency}")
def test_a_bug_planted_in_the_shard_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison passed a broken shard, so its result for the real shards proved nothing."""
    bug.plant(monkeypatch)
    assert any(_fails(bug.consistency, seed) for seed in range(20))


def _differs(consistency: Consistency, seed: int) -> bool:
    return difference(consistency, 3, random_steps(Random(seed), 3)) is not None


def _fails(consistency: Consistency, seed: int) -> bool:
    run = ClientRun(consistency, 3, 1 + seed % 2, None, read_my_writes=False)
    try:
        asyncio.run(play(run, random_client_steps(Random(seed), 3)))
    except (AssertionError, asyncio.InvalidStateError):  # a call that should have ended has not
        return True
    return False
