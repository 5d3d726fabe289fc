"""Random bounded iterations under random schedules, with channels of one to three records."""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import pytest
from iteration.bounded_bodies import MadeBody, Maker, limits, restored, snapshot_of
from iteration.iteration_support import callbacks, run, run_shuffled
from support.soak import ForEachSeed
from support.waiting import PATIENCE_S

from streamiter.runtime.checkpointing.commit import JobSnapshot

SEEDS, SEEDS_OF_STOPS = 10, 5


def finished(seed: int, schedule: int, ahead: int | None = 0) -> MadeBody:
    made = Maker(seed, ahead=ahead, sources_seed=schedule).make()
    run(made.flow, seed=schedule, limits=limits(schedule))
    made.check_listeners()
    return made


@pytest.mark.parametrize("seed", range(SEEDS))
def test_results_of_a_synchronous_loop_do_not_depend_on_the_schedule(seed: int) -> None:
    """An untested arrangement had a deadlock, a lost or doubled record, or a callback too early."""
    check_schedules(seed)


@pytest.mark.soak
@pytest.mark.parametrize("check", ["schedules", "ahead", "any_moment", "stop"])
def test_any_loop_passes_the_same_checks(check: str, for_each_soak_seed: ForEachSeed) -> None:
    """An arrangement that no other run has tested failed one of these checks."""
    checks = {"schedules": check_schedules, "ahead": check_ahead, "any_moment": check_any_moment, "stop": check_stop}
    for_each_soak_seed(lambda seed: checks[check](seed + SEEDS))


def check_schedules(seed: int) -> None:
    first, second = finished(seed, seed), finished(seed, seed + 1_000)
    assert second.outputs() == first.outputs()
    assert second.heard() == first.heard()


def check_same(free: MadeBody, synchronous: MadeBody) -> None:
    """Check that feedback ahead of its epoch has the same records in each epoch, in any order."""
    assert free.heard() == synchronous.heard()
    if not free.has_criteria:
        assert free.outputs() == synchronous.outputs()
        return
    # The output contains records of epochs after the end; records left over at the end have the ending epoch.
    end = max((epoch for entries in synchronous.outputs() for epoch, _ in entries), default=0)
    for of_free, expected in zip(free.outputs(), synchronous.outputs(), strict=True):
        before_end = [entry for entry in expected if entry[0] < end]
        assert [entry for entry in of_free if entry[0] < end] == before_end


@pytest.mark.parametrize("seed", range(SEEDS))
def test_feedback_ahead_of_its_epoch_leads_to_the_same_rounds(seed: int) -> None:
    """A record that overtook its epoch was counted in another one, or its callback came before it."""
    check_ahead(seed)


def check_ahead(seed: int) -> None:
    check_same(finished(seed, seed + 2_000, [1, 2, None][seed % 3]), finished(seed, seed))


@pytest.mark.parametrize("seed", range(SEEDS_OF_STOPS))
def test_a_loop_resumes_from_a_snapshot_at_any_moment(seed: int) -> None:
    """A snapshot in the middle of an epoch, a replay, a round or the end lost or doubled a record or a callback."""
    check_any_moment(seed)


def check_any_moment(seed: int) -> None:
    expected, chosen = finished(seed, seed), random.Random(seed)
    ahead = chosen.choice([0, 0, 1, None])
    for _ in range(3):
        snapshot: JobSnapshot | None = None
        for _ in range(chosen.randint(1, 3)):
            turns, schedule = int(200 * chosen.random() ** 3), chosen.randrange(10**6)
            made = Maker(seed, ahead=ahead, sources_seed=seed).make()
            taken = run_shuffled(snapshot_of(made, turns, schedule, snapshot), schedule)
            snapshot = taken or snapshot
        made = Maker(seed, ahead=ahead, sources_seed=seed).make()
        run_shuffled(restored(made, snapshot, schedule + 1), schedule + 1)
        made.check_listeners()
        if ahead == 0:
            assert made.outputs() == expected.outputs()
        check_same(made, expected)


async def stopped(made: MadeBody, mode: Literal["suspend", "drain", "abort"], turns: int, schedule: int) -> str:
    """Stop a job this number of turns after its start, and return its state."""
    job = await made.flow.start(channel_limits=limits(schedule))
    for _ in range(turns):
        await asyncio.sleep(0)
    return (await asyncio.wait_for(job.stop(mode), PATIENCE_S)).state


@pytest.mark.parametrize("seed", range(SEEDS_OF_STOPS))
def test_a_loop_can_be_stopped_at_any_moment(seed: int) -> None:
    """A drained job did not reach its end, or a suspended job waited for records that did not come."""
    check_stop(seed)


def check_stop(seed: int) -> None:
    chosen = random.Random(seed)
    for ahead in (0, chosen.choice([1, None])):
        turns, schedule = chosen.randrange(200), chosen.randrange(10**6)
        made = Maker(seed, ahead=ahead).make()
        assert run_shuffled(stopped(made, "drain", turns, schedule), schedule) == "finished"
        made.check_listeners()
        made = Maker(seed, ahead=ahead).make()
        state = run_shuffled(stopped(made, "suspend", turns, schedule), schedule)
        assert state in ("suspended", "finished")
        for entries in made.log.values():
            assert callbacks(entries) == list(range(len(callbacks(entries))))
            assert entries.count(("close",)) == 1
