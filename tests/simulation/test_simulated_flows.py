"""Flows of every kind under faults, crashes and restarts commit the same as undisturbed."""

from __future__ import annotations

import logging
import os

import pytest
from simulation.flows import FLOWS
from simulation.simulation_runs import run_in_turn

SEEDS_OF_A_FLOW = 32
"""The planted bug that is hardest to find is found by seed 30."""
SEEDS = SEEDS_OF_A_FLOW * len(FLOWS)
SEEDS_OF_A_TEST = 32


@pytest.fixture(autouse=True)
def without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Switch the log off: the warnings of planned faults take a fifth of the time; a run of one seed by hand
    shows them.
    """
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_OF_A_TEST))
def test_faults_do_not_change_the_committed_records(first: int) -> None:
    """Records lost in a restart, counted twice after a failed commit, or a loop that never ends again."""
    run_in_turn(range(first, first + SEEDS_OF_A_TEST))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_faults_do_not_change_the_committed_records_under_further_seeds() -> None:
    """The same with seeds that no run of the tests has had: STREAMITER_SOAK_RUNS from STREAMITER_SOAK_SEED on."""
    first = int(os.environ.get("STREAMITER_SOAK_SEED", SEEDS)) * len(FLOWS)
    run_in_turn(range(first, first + int(os.environ.get("STREAMITER_SOAK_RUNS", SEEDS))))
