"""The simulation finds bugs: it is tried on some that are put in here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulation.flows import (
    MakeFlow,
    online_learner,
    running_totals,
    unbounded_asynchronous_loop,
)
from simulation.planted_bugs import (
    commit_offsets_early,
    drop_logged_feedback,
    fence_nobody,
    forget_an_optimizer_slot,
    write_behind_the_barrier,
)
from simulation.simulation_runs import first_failure, run, undisturbed

from streamiter.testing import SimulationFailed

SEEDS = range(40)
"""A bug that takes more seeds than these to be found would not be found by the suite soon enough."""


@pytest.mark.parametrize(
    ("flow", "plant"),
    [
        (unbounded_asynchronous_loop, drop_logged_feedback),
        (running_totals, commit_offsets_early),
        (online_learner, forget_an_optimizer_slot),
        (running_totals, write_behind_the_barrier),
        (running_totals, fence_nobody),
    ],
)
def test_a_planted_bug_is_found_and_replayed_by_its_seed(
    flow: MakeFlow, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness that injects no real crash, or compares too little, lets everything pass."""
    undisturbed(flow)
    with monkeypatch.context() as patch:
        plant(patch)
        found = first_failure(flow, SEEDS)
        assert found is not None, f"{plant.__name__} is found by none of {len(SEEDS)} seeds"
        with pytest.raises(SimulationFailed) as again:
            run(flow, found.seed)
        assert (again.value.what, again.value.trace_hash) == (found.what, found.trace_hash)
    run(flow, found.seed)  # And without it there is nothing to find.
