"""The simulation tests run their flows under many seeds."""

import functools
from collections.abc import Iterable

from simulation.flows import FLOWS, SETTLE_S, MakeFlow

from streamiter.testing import Faults, SimulationFailed, SimulationResult, Undisturbed, simulate


@functools.cache
def undisturbed(flow: MakeFlow) -> Undisturbed:
    """Return the results of a flow without faults, which are the same under every seed."""
    return simulate(flow, 0, faults=Faults.none(), settle_s=settle_s(flow)).undisturbed


def settle_s(flow: MakeFlow) -> float:
    """Return the seconds for which a flow waits after it has read all records."""
    return SETTLE_S.get(flow.__name__, 0.0)


def run(flow: MakeFlow, seed: int, faults: Faults | None = None) -> SimulationResult:
    """Run one flow under one seed."""
    return simulate(flow, seed, faults=faults, settle_s=settle_s(flow), undisturbed=undisturbed(flow))


def run_in_turn(seeds: Iterable[int]) -> None:
    """Run each seed with one flow, alternating the flows."""
    for seed in seeds:
        run(FLOWS[seed % len(FLOWS)], seed)


def first_failure(flow: MakeFlow, seeds: Iterable[int]) -> SimulationFailed | None:
    """Return the first failure of these seeds, or None."""
    for seed in seeds:
        try:
            run(flow, seed)
        except SimulationFailed as failure:
            return failure
    return None
