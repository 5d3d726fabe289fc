"""Running the flows of the simulation tests under many seeds."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from simulation.flows import FLOWS, SETTLE_S, MakeFlow

from streamiter.testing import Faults, SimulationFailed, SimulationResult, Undisturbed, simulate


@functools.cache
def undisturbed(flow: MakeFlow) -> Undisturbed:
    """What a flow does when nothing goes wrong; the same under every seed."""
    return simulate(flow, 0, faults=Faults.none(), settle_s=settle_s(flow)).undisturbed


def settle_s(flow: MakeFlow) -> float:
    """How long a flow is waited for once it has read everything."""
    return SETTLE_S.get(flow.__name__, 0.0)


def run(flow: MakeFlow, seed: int, faults: Faults | None = None) -> SimulationResult:
    """One seed of one flow."""
    return simulate(flow, seed, faults=faults, settle_s=settle_s(flow), undisturbed=undisturbed(flow))


def run_in_turn(seeds: Iterable[int]) -> None:
    """Each seed with one of the flows, all of which get their turns."""
    for seed in seeds:
        run(FLOWS[seed % len(FLOWS)], seed)


def first_failure(flow: MakeFlow, seeds: Iterable[int]) -> SimulationFailed | None:
    """What the first seed finds that finds something."""
    for seed in seeds:
        try:
            run(flow, seed)
        except SimulationFailed as failure:
            return failure
    return None
