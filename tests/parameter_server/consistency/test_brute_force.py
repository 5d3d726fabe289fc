"""Random calls of workers and clients, compared with a model that computes each answer from the complete history."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_server.consistency.brute_force import KINDS
from parameter_server.consistency.client_run import CLIENT_STEPS, ClientRun, ClientStep, Stir, play, random_client_steps
from parameter_server.consistency.comparison import RARE, STEPS, Step, difference, random_steps
from parameter_server.consistency.planted_bugs import PLANTED, PLANTED_IN_THE_SHARD, Bug
from support.examples import random_examples

from streamiter.parameter_server.consistency import BSP, Consistency
from streamiter.parameter_server.server import ParameterServer

Calls = tuple[Consistency, int, list[Step]]


def calls(random: Random) -> Calls:
    """Return a short sequence of calls; the brute force takes time with the square of its length."""
    steps = [
        Step(
            random.choice(RARE) if random.random() < 0.05 else random.choice(STEPS),
            random.choice((0, 1, 0, 1, 2, 3, 4)),
            random.choice((-1, 0, 1, 2)),
        )
        for _ in range(random.randrange(11))
    ]
    return random.choice(KINDS), random.randint(1, 4), steps


@random_examples(calls)
def test_any_sequence_of_calls_follows_the_table(example: Calls) -> None:
    """A model gave a wrong verdict, released calls in a wrong order or read wrong values for a rare sequence.

    A worker that joined late was out of turn, or the others did not wait for it. The sum of an iteration lacked the
    adds of a worker that had left before its end; the last gradients of a training were lost when its last worker left;
    the shard with these adds ended the iteration, and the other shards did not. A get for a clock that the minimum
    skipped waited forever. A shard that received a clock late refused a call in turn, or put its add into the iteration
    before. Adds of two iterations were summed up together. A restored shard lost the adds that waited. A cancelled get
    was answered.
    """
    assert difference(*example) is None


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
def test_long_runs_follow_the_table(consistency: Consistency) -> None:
    """Bugs that need workers far apart, or many joins and leaves, did not occur in short random sequences."""
    for seed in range(8):
        workers = 1 + seed % 4
        assert difference(consistency, workers, random_steps(Random(seed), workers)) is None, f"seed {seed}"


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
