"""Under faults, crashes and restarts, flows of every kind commit the same records as an undisturbed run."""

from __future__ import annotations

import logging
import os

import pytest
from simulation.flows import FLOWS
from simulation.simulation_runs import run_in_turn

from streamiter import Flow
from streamiter.testing import Simulation, simulate

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
