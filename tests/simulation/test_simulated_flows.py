"""Under faults, crashes and restarts, in one to three processes, flows commit what an undisturbed run commits."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable

import pytest
from simulation.flows import (
    FLOWS,
    SETTLE_S,
    MakeFlow,
    asynchronous_server,
    bulk_synchronous_server,
    feedback_in_a_topic,
    floats_in_order,
    online_learner,
    running_totals,
    stale_synchronous_server,
    unbounded_asynchronous_loop,
)
from simulation.planted_bugs import (
    accept_any_attempt,
    apply_adds_behind_a_barrier,
    begin_beside_a_lost_attempt,
    commit_offsets_early,
    count_silence_from_the_start,
    drop_held_adds,
    drop_logged_feedback,
    end_no_process_of_a_lost_attempt,
    fence_no_owner,
    forget_an_optimizer_slot,
    forget_the_parameters,
    freeze_a_shard_at_the_first_worker,
    hear_no_silence,
    pass_barriers_at_different_clocks,
    write_behind_the_barrier,
)
from simulation.simulation_runs import first_failure, run, run_in_turn, undisturbed
from simulation.test_simulate import failure
from support.soak import ForEachSeed

from streamiter import Flow
from streamiter.engine.processes.mesh import ProcessMesh
from streamiter.errors import ConfigurationError
from streamiter.testing import Faults, Simulation, SimulationFailed, Undisturbed, simulate

SEEDS_OF_A_FLOW = 5
"""So many seeds find eight of the eleven planted bugs, as eight seeds do. `make soak` tries further seeds."""
SEEDS = SEEDS_OF_A_FLOW * len(FLOWS)
SEEDS_OF_A_TEST = 35
SEEDS_WITHOUT_STATE = 20


@pytest.fixture(autouse=True)
def without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Switch the log off: planned faults log warnings, which take a fifth of the time."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_OF_A_TEST))
def test_faults_do_not_change_the_committed_records(first: int) -> None:
    """Records could be lost in a restart or counted twice after a failed commit, or a loop could never end."""
    run_in_turn(range(first, first + SEEDS_OF_A_TEST))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_faults_do_not_change_the_committed_records_under_further_seeds() -> None:
    """The seeds are new in each run: STREAMITER_SOAK_RUNS seeds, starting with STREAMITER_SOAK_SEED."""
    first = int(os.environ.get("STREAMITER_SOAK_SEED", SEEDS)) * len(FLOWS)
    run_in_turn(range(first, first + int(os.environ.get("STREAMITER_SOAK_RUNS", SEEDS))))


def doubled(simulation: Simulation) -> Flow:
    """Return a flow without state, whose positions are committed."""
    flow = Flow("doubled", parallelism=2)
    for name in ("left", "right"):
        read = flow.source(simulation.input(name, range(20), partitions=2, over_s=5), start="committed")
        read.map(lambda number: 2 * number).sink(simulation.output(f"doubled {name}", order="any"))
    return flow


# A crash drops a coroutine that asks for positions: it would still close its reader.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_faults_do_not_change_what_a_job_without_state_commits() -> None:
    """Positions of a job without a folder were not committed together with its outputs."""
    undisturbed = None
    for seed in range(SEEDS_WITHOUT_STATE):
        undisturbed = simulate(doubled, seed, has_store=False, undisturbed=undisturbed).undisturbed


SEEDS_IN_PROCESSES = 3
"""They find five of the six planted bugs, as more do. `make soak` tries further seeds."""

# One seed in fifteen makes a process silent; the first forty are not among these.
SEEDS_THAT_FIND = {hear_no_silence: range(40, 120)}


def reduced(simulation: Simulation) -> Flow:
    """Return a flow of narrow and wide steps: some processes have no source, and others no subtask of a step."""
    flow = Flow("reduced", parallelism=3)
    numbers = simulation.input("numbers", range(40), partitions=2, key=lambda n: str(n % 6), over_s=1.0)
    read = flow.source(numbers, parallelism=1 + simulation.run % 2).map(lambda n: n + 1).rebalance()
    totals = read.key_by(lambda n: n % 6).reduce(lambda a, b: a + b, name="total").map(lambda n: [n % 6, n])
    totals.rebalance().map(lambda pair: pair, parallelism=2).sink(simulation.output("totals", order="any"))
    return flow


DIVIDED = (*(flow for flow in FLOWS if flow is not feedback_in_a_topic), reduced, doubled)


def run_in_processes(flow: MakeFlow, seed: int, undisturbed: Undisturbed | None = None) -> Undisturbed:
    """Run a flow under a seed; return its undisturbed run, for other seeds."""
    settle_s, has_store = SETTLE_S.get(flow.__name__, 0.0), flow is not doubled
    return simulate(
        flow, seed, processes=3, settle_s=settle_s, has_store=has_store, undisturbed=undisturbed
    ).undisturbed


# A crash drops a coroutine that asks for positions: it would still close its reader.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("flow", DIVIDED)
def test_faults_do_not_change_what_several_processes_commit(flow: MakeFlow) -> None:
    """After the loss of a process, or with another number of them, records were lost or a loop did not end."""
    undisturbed = None
    for seed in range(SEEDS_IN_PROCESSES):
        undisturbed = run_in_processes(flow, seed, undisturbed)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_faults_do_not_change_what_several_processes_commit_under_any_seed(for_each_soak_seed: ForEachSeed) -> None:
    """A barrier that came behind the abort of a job left a task behind, under one of a thousand seeds."""
    for_each_soak_seed(lambda seed: run_in_processes(DIVIDED[seed % len(DIVIDED)], seed))


def test_a_bug_between_processes_is_found_and_replayed_by_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation whose bytes arrive at once, or in other pieces each time, would not find a lost message again."""
    received = ProcessMesh.received
    monkeypatch.setattr(
        ProcessMesh, "received", lambda self, link, message: self._kept is not None or received(self, link, message)
    )
    found = [failure(reduced, range(20), processes=3, faults=Faults.none()) for _ in range(2)]
    assert "ended" in found[0].what
    assert (found[0].seed, found[0].trace_hash) == (found[1].seed, found[1].trace_hash)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (end_no_process_of_a_lost_attempt, "has not ended 600 s after the last fault"),
        (begin_beside_a_lost_attempt, r"attempt \d begins before run \d+, process \d of attempt \d has ended"),
        (count_silence_from_the_start, "no sign of life for 5 s.*, and no fault has led to that"),
        (hear_no_silence, "after a loss its attempt has not ended"),
        (accept_any_attempt, "accepts a connection of an old attempt"),
    ],
)
def test_a_bug_of_the_supervisor_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation decided about losses by itself, so no bug of the supervisor could show."""
    plant(monkeypatch)
    only_losses = Faults(crashes=0, stuck=False, failing=False, fenced=False, storage_full=False)
    found = failure(floats_in_order, SEEDS_THAT_FIND.get(plant, range(80)), processes=3, faults=only_losses)
    assert re.search(expected, found.what)


def test_a_number_of_processes_below_one_is_refused() -> None:
    """A flow ran in no process, and nothing was checked."""
    with pytest.raises(ConfigurationError, match=r"simulate: processes: expected .* given 0"):
        simulate(reduced, 0, processes=0)


SEEDS_OF_BUGS = range(40)
"""If a bug needs more seeds than these, the suite would not find it soon enough."""

# Barriers at different clocks stop a run for ever only if they are the last: one seed in fifty shows it.
OTHER_SEEDS = {pass_barriers_at_different_clocks: range(40, 80)}


@pytest.mark.parametrize(
    ("flow", "plant"),
    [
        (unbounded_asynchronous_loop, drop_logged_feedback),
        (running_totals, commit_offsets_early),
        (online_learner, forget_an_optimizer_slot),
        (running_totals, write_behind_the_barrier),
        (running_totals, fence_no_owner),
        (stale_synchronous_server, apply_adds_behind_a_barrier),
        (bulk_synchronous_server, pass_barriers_at_different_clocks),
        (asynchronous_server, drop_held_adds),
        (stale_synchronous_server, drop_held_adds),
        (bulk_synchronous_server, forget_the_parameters),
        (asynchronous_server, freeze_a_shard_at_the_first_worker),
    ],
)
def test_a_planted_bug_is_found_and_replayed_by_its_seed(
    flow: MakeFlow, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation without real crashes, or with too few comparisons, would not find these bugs."""
    undisturbed(flow)
    with monkeypatch.context() as patch:
        plant(patch)
        found = first_failure(flow, OTHER_SEEDS.get(plant, SEEDS_OF_BUGS))
        assert found is not None, f"{plant.__name__} is found by none of {len(SEEDS_OF_BUGS)} seeds"
        with pytest.raises(SimulationFailed) as again:
            run(flow, found.seed)
        assert (again.value.what, again.value.trace_hash) == (found.what, found.trace_hash)
    run(flow, found.seed)  # Without the bug the same seed finds nothing.
