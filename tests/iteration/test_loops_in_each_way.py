"""Each case of a loop, and each random body, has the same results in each way to run it."""

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import cycle, product
from typing import Any, Literal

import pytest
from iteration.iteration_support import SMALL, callbacks, ended, run_shuffled
from iteration.loop_cases import CASES, SUM, TOTAL
from iteration.loop_streams import nothing, reducing, sequence
from iteration.loop_ways import WAYS, Build, Loop, Way, channel_limits
from iteration.random_bodies import MadeBody, Maker
from iteration.topic_loops_support import MakeTopic
from support.soak import ForEachSeed
from support.waiting import PATIENCE_S, until

from streamiter import Flow
from streamiter.iteration.border import ReceivedEpochs


def check(name: str, way: str, seed: int) -> None:
    """Check a case with one of its limits of epochs ahead, which the ways share out among themselves."""
    case = CASES[name]
    seed += list(WAYS).index(way)
    ahead = case.aheads[seed % len(case.aheads)]
    try:
        WAYS[way].run(case.build, seed, ahead, case.turns)()
    except BaseException as error:
        error.add_note(f"with {ahead} epochs ahead and seed {seed}")
        raise


def shared_out(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return a third of all combinations of values, with each value of an axis; soak tests make all combinations."""
    combinations = product(*map(enumerate, axes))
    return [tuple(value for _, value in each) for each in combinations if sum(place for place, _ in each) % 3 == 0]


@pytest.mark.parametrize(("name", "way"), shared_out(CASES, WAYS))
def test_a_loop_has_its_results_in_each_way(name: str, way: str) -> None:
    """The docstring of each case tells the incident that it prevents."""
    check(name, way, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_has_its_results_with_each_seed(way: str, for_each_soak_seed: ForEachSeed) -> None:
    """The moment of a stop, and the order of tasks, is rarely the wrong one."""
    for_each_soak_seed(lambda seed: check(list(CASES)[seed % len(CASES)], way, seed + 1_000))


@pytest.mark.parametrize(
    ("make_topic", "name"), list(zip(cycle(["sqlite", "kafka"]), CASES, strict=False)), indirect=["make_topic"]
)
async def test_a_loop_has_its_results_through_stored_topics(name: str, make_topic: MakeTopic) -> None:
    """Epochs, callbacks or the end of the iteration were lost on the way through the topic."""
    case, seed = CASES[name], list(CASES).index(name)
    ahead = case.aheads[seed % len(case.aheads)]
    (await Way(through_topics=True).run_on(case.build, seed, ahead, make_topic=make_topic))()


@pytest.mark.parametrize("way", ["restored", "restored in processes", "restored through topics"])
def test_the_cases_find_a_head_that_forgets_how_many_records_returned(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way that never stopped in the middle of an epoch would find no error of a restore."""
    restore = ReceivedEpochs.restore
    monkeypatch.setattr(ReceivedEpochs, "restore", lambda self, state: restore(self, {**state, "counts": {"runs": []}}))
    name = "criteria_of_rounds_lead_to_as_many_callbacks_and_replays_and_one_pass_more"
    with pytest.raises(AssertionError):
        [check(name, way, seed) for seed in range(20)]


async def test_endless_data_has_the_same_sums_and_the_job_keeps_running() -> None:
    """An unbounded iteration ended before its input."""
    loop = Loop(Flow("loop"), 1, "unbounded")
    [outputs] = loop.collect([nothing(loop)], [sequence(loop, ends=False)], reducing(1))
    job = await loop.flow.start(channel_limits=SMALL)
    await until(lambda: len(outputs.items) == 2 * TOTAL)
    assert dict(outputs.items) == {0: SUM, 1: SUM}
    assert job.statistics().state == "running"
    await job.stop("drain")
    assert outputs.items[2 * TOTAL :] == ["terminated"]
    assert (await ended(job)).state == "finished"


SEEDS = 3  # one for each limit of epochs ahead
OF_OPERATORS = ("with coroutines", "in threads")
WAYS_HERE = [name for name in WAYS if name not in OF_OPERATORS]


def bounded(seed: int) -> Build[MadeBody]:
    return lambda loop: Maker(seed, loop).bounded()


@cache
def reference(seed: int) -> MadeBody:
    made = Way().run(bounded(seed), seed)
    made.check_listeners()
    return made


def check_synchronous(way: str, seed: int) -> None:
    """Check that each step has the same sequence of calls: records, callbacks, and ends of inputs."""
    made = WAYS[way].run(bounded(seed), seed + 1_000)
    made.check_listeners()
    assert made.outputs() == reference(seed).outputs()
    assert made.log == reference(seed).log


def check_ahead(way: str, seed: int) -> None:
    """Check that feedback ahead of its epoch has the same records in each epoch, in any order."""
    made, synchronous = WAYS[way].run(bounded(seed), seed + 2_000, [1, 2, None][seed % 3]), reference(seed)
    made.check_listeners()
    assert made.heard() == synchronous.heard()
    if not made.has_criteria:
        assert made.outputs() == synchronous.outputs()
        return
    # The output contains records of epochs after the end; records left over at the end have the ending epoch.
    end = max((epoch for entries in synchronous.outputs() for epoch, _ in entries), default=0)
    for of_made, expected in zip(made.outputs(), synchronous.outputs(), strict=True):
        assert [entry for entry in of_made if entry[0] < end] == [entry for entry in expected if entry[0] < end]


def check_unbounded(way: str, seed: int) -> None:
    """Check that each record counts down, and is emitted in its epoch."""
    WAYS[way].run(lambda loop: Maker(seed, loop).unbounded(), seed)()


CHECKS: list[Callable[[str, int], None]] = [check_synchronous, check_ahead, check_unbounded]


@pytest.mark.parametrize(("check", "way", "seed"), shared_out(CHECKS, WAYS_HERE, range(SEEDS)))
def test_a_random_loop_has_its_results_in_each_way(check: Callable[[str, int], None], way: str, seed: int) -> None:
    """An untested arrangement had a deadlock, a lost or doubled record, a callback too early, or another order.

    In several processes, a decision overtook the feedback of its epoch, or feedback that waited on disk stayed there.
    Through topics, a watermark from one partition returned before the records of its epoch from another partition; the
    feedback that was in the topic at the barrier was missing in the log of a head, or in it twice; the feedback that a
    dead run had written after its last barrier returned to the next run.
    A snapshot in the middle of an epoch, a replay, a round or the end lost or doubled a record or a callback.
    """
    check(way, seed)


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.parametrize("check", CHECKS)
def test_any_loop_has_its_results_in_each_way(
    check: Callable[[str, int], None], way: str, for_each_soak_seed: ForEachSeed
) -> None:
    """Only one arrangement in ten thousand had a deadlock."""
    for_each_soak_seed(lambda seed: check(way, seed + SEEDS))


async def stopped(loop: Loop, mode: Literal["suspend", "drain", "abort"], turns: int) -> str:
    """Stop a job this number of turns after its start, and return its state."""
    job = await loop.flow.start(channel_limits=channel_limits(loop.seed))
    for _ in range(turns):
        await asyncio.sleep(0)
    return (await asyncio.wait_for(job.stop(mode), PATIENCE_S)).state


def check_stop(seed: int) -> None:
    chosen = random.Random(seed)
    for ahead in (0, chosen.choice([1, None])):
        turns, schedule = chosen.randrange(200), chosen.randrange(10**6)
        made = bounded(seed)(loop := Loop(Flow("loop"), schedule, ahead))
        assert run_shuffled(stopped(loop, "drain", turns), schedule) == "finished"
        made.check_listeners()
        bounded(seed)(loop := Loop(Flow("loop"), schedule, ahead))
        assert run_shuffled(stopped(loop, "suspend", turns), schedule) in ("suspended", "finished")
        for entries in loop.log.values():
            assert callbacks(entries) == list(range(len(callbacks(entries))))
            assert entries.count(("close",)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_loop_can_be_stopped_at_any_moment(seed: int) -> None:
    """A drained job did not reach its end, or a suspended job waited for records that did not come."""
    check_stop(seed)


@pytest.mark.soak
def test_any_loop_can_be_stopped_at_any_moment(for_each_soak_seed: ForEachSeed) -> None:
    """An arrangement that no other run has tested did not stop."""
    for_each_soak_seed(lambda seed: check_stop(seed + 5))
