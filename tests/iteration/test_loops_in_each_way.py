"""Each case of a loop has the same results in each way to run it, and through each kind of topic."""

from __future__ import annotations

from itertools import cycle

import pytest
from iteration.iteration_support import SMALL, ended
from iteration.loop_cases import CASES, SUM, TOTAL, nothing, reducing, sequence
from iteration.loop_ways import WAYS, Loop, Way
from iteration.topic_loops_support import MakeTopic
from support.soak import ForEachSeed
from support.waiting import until

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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
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
