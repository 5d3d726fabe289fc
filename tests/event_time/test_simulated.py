"""Event time under random cuts, orders, sizes of channels, crashes and restarts, in one to three processes.

The flows fail if a watermark overtakes a record, and their committed results must equal those of an undisturbed run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import orjson
import pytest
from event_time.flows import FLOWS, windows_over_partitions
from event_time.operators import events, window_counts

from streamiter import Flow
from streamiter.testing import Faults, Simulation, simulate
from streamiter.testing.simulation.simulate import Undisturbed

MakeFlow = Callable[[Simulation], Flow]


@functools.cache
def undisturbed(flow: MakeFlow) -> Undisturbed:
    return simulate(flow, 0, faults=Faults.none()).undisturbed


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
@pytest.mark.parametrize("processes", [1, 3])
def test_results_depend_on_no_cut_order_or_crash(flow: MakeFlow, processes: int) -> None:
    if processes > 1 and flow is FLOWS[1]:
        pytest.skip("all of its steps have one subtask")
    for seed in range(6):
        simulate(flow, seed, processes=processes, undisturbed=undisturbed(flow))


def test_the_undisturbed_results_are_those_of_a_plain_loop() -> None:
    found = [orjson.loads(record.value or b"") for record in undisturbed(windows_over_partitions).outputs["counts"]]
    assert sorted(found) == window_counts(events(90))
