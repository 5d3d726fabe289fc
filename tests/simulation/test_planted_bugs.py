"""The simulation finds bugs that these tests add on purpose."""

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
    apply_adds_behind_a_barrier,
    commit_offsets_early,
    drop_held_adds,
    drop_logged_feedback,
    fence_no_owner,
    forget_an_optimizer_slot,
    forget_the_parameters,
    freeze_a_shard_at_the_first_worker,
    pass_barriers_at_different_clocks,
    write_behind_the_barrier,
)
from simulation.simulation_runs import first_failure, run, undisturbed

from streamiter.testing import SimulationFailed

SEEDS = range(40)
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
        found = first_failure(flow, OTHER_SEEDS.get(plant, SEEDS))
        assert found is not None, f"{plant.__name__} is found by none of {len(SEEDS)} seeds"
        with pytest.raises(SimulationFailed) as again:
            run(flow, found.seed)
        assert (again.value.what, again.value.trace_hash) == (found.what, found.trace_hash)
    run(flow, found.seed)  # Without the bug the same seed finds nothing.
