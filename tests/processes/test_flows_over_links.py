"""Flows whose channels all go through links, in simulated time: with faults, crashes and checkpoints."""

from __future__ import annotations

import pytest
from processes.looped import channels_through_links
from simulation.flows import FLOWS, MakeFlow
from simulation.simulation_runs import run, undisturbed

from streamiter.engine.plan.plan import Planner


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_a_flow_over_links_has_the_outputs_of_the_flow_in_one_process(
    flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A barrier waited behind a full link, or records that were on their way were in no checkpoint."""
    undisturbed(flow)
    for seed in range(2):
        monkeypatch.setattr(Planner, "_make_channel", channels_through_links(seed))
        run(flow, seed)
