"""The simulation finds bugs: these tests add some on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulation.flows import (
    MakeFlow,
    asynchronous_server,
    bulk_synchronous_server,
    online_learner,
    running_totals,
    stale_synchronous_server,
    unbounded_asynchronous_loop,
)
from simulation.planted_bugs import (
    commit_offsets_early,
    drop_held_adds,
    drop_logged_feedback,
    fence_nobody,
    forget_an_optimizer_slot,
    forget_the_parameters,
    hold_nothing_behind_a_barrier,
    keep_what_a_cut_off_worker_has_passed,
    let_nobody_stand_still,
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
        (asynchronous_server, hold_nothing_behind_a_barrier),
        (stale_synchronous_server, hold_nothing_behind_a_barrier),
        (bulk_synchronous_server, let_nobody_stand_still),
        (asynchronous_server, drop_held_adds),
        (stale_synchronous_server, drop_held_adds),
        (bulk_synchronous_server, forget_the_parameters),
        (asynchronous_server, keep_what_a_cut_off_worker_has_passed),
    ],
)
def test_a_planted_bug_is_found_and_replayed_by_its_seed(
    flow: MakeFlow, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation without real crashes, or with too few comparisons, finds nothing."""
    undisturbed(flow)
    with monkeypatch.context() as patch:
        plant(patch)
        found = first_failure(flow, SEEDS)
        assert found is not None, f"{plant.__name__} is found by none of {len(SEEDS)} seeds"
        with pytest.raises(SimulationFailed) as again:
            run(flow, found.seed)
        assert (again.value.what, again.value.trace_hash) == (found.what, found.trace_hash)
    run(flow, found.seed)  # And without it there is nothing to find.
