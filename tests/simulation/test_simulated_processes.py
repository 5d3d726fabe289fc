"""Flows in one to three processes commit the same records as an undisturbed run in one process."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
from simulation.flows import FLOWS, SETTLE_S, MakeFlow, feedback_in_a_topic, floats_in_order
from simulation.planted_bugs import (
    accept_any_attempt,
    begin_beside_a_lost_attempt,
    count_silence_from_the_start,
    end_no_process_of_a_lost_attempt,
    hear_no_silence,
)
from simulation.test_simulate import failure
from simulation.test_simulated_flows import doubled
from support.soak import ForEachSeed

from streamiter import Flow
from streamiter.engine.processes.mesh import ProcessMesh
from streamiter.errors import ConfigurationError
from streamiter.testing import Faults, Simulation, Undisturbed, simulate

SEEDS_OF_A_FLOW = 3
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


@pytest.fixture(autouse=True)
def without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Switch the log off: planned faults log warnings."""
    caplog.set_level(logging.CRITICAL)


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
    for seed in range(SEEDS_OF_A_FLOW):
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
