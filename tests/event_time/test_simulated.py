"""Event time under random cuts, orders, sizes of channels, crashes and restarts, in one to three processes.

The flows fail if a watermark overtakes a record, and their committed results must equal those of an undisturbed run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import orjson
import pytest
from event_time.flows import FLOWS, loop_with_records_set_aside, timers_of_one_partition, windows_over_partitions
from event_time.operators import events, window_counts
from support.soak import ForEachSeed

from streamiter import Flow
from streamiter.engine.inbox.port_progress import PortProgress
from streamiter.operators.event_timers import StepTimes
from streamiter.operators.holding import MiniBatch
from streamiter.testing import Faults, Simulation, SimulationFailed, simulate
from streamiter.testing.simulation.simulate import Undisturbed
from streamiter.values.records import EventTimeWatermark

MakeFlow = Callable[[Simulation], Flow]


@functools.cache
def undisturbed(flow: MakeFlow) -> Undisturbed:
    return simulate(flow, 0, faults=Faults.none()).undisturbed


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
@pytest.mark.parametrize("processes", [1, 3])
def test_results_depend_on_no_cut_order_or_crash(flow: MakeFlow, processes: int) -> None:
    if processes > 1 and flow is FLOWS[1]:
        pytest.skip("all of its steps have one subtask")
    for seed in range(2):
        simulate(flow, seed, processes=processes, undisturbed=undisturbed(flow))


@pytest.mark.soak
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_soak_of_event_time(flow: MakeFlow, for_each_soak_seed: ForEachSeed) -> None:
    for_each_soak_seed(lambda seed: simulate(flow, seed, processes=1 + seed % 3, undisturbed=undisturbed(flow)))


def ignore_what_is_set_aside(patch: pytest.MonkeyPatch) -> None:
    bring = PortProgress.bring
    patch.setattr(
        PortProgress,
        "bring",
        lambda progress, port, mark: (
            progress._act(port, mark) if isinstance(mark, EventTimeWatermark) else bring(progress, port, mark)
        ),
    )


def hold_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MiniBatch, "on_event_time_watermark", lambda step, watermark, out: watermark)


def forget_timers(patch: pytest.MonkeyPatch) -> None:
    snapshot = StepTimes.snapshot
    patch.setattr(StepTimes, "snapshot", lambda times: {**snapshot(times), "keyed timers": None})


@pytest.mark.parametrize(
    ("flow", "plant"),
    [
        (loop_with_records_set_aside, ignore_what_is_set_aside),
        (windows_over_partitions, hold_nothing_back),
        (timers_of_one_partition, forget_timers),
    ],
)
def test_a_planted_bug_is_found(
    flow: MakeFlow, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flows in which a watermark has nothing to overtake, or no timer waits at a crash, would find nothing."""
    expected = undisturbed(flow)
    plant(monkeypatch)
    assert any(fails(flow, seed, expected) for seed in range(10))


def fails(flow: MakeFlow, seed: int, expected: Undisturbed) -> bool:
    try:
        simulate(flow, seed, undisturbed=expected)
    except SimulationFailed:
        return True
    return False


def test_the_undisturbed_results_are_those_of_a_plain_loop() -> None:
    found = [orjson.loads(record.value or b"") for record in undisturbed(windows_over_partitions).outputs["counts"]]
    assert sorted(found) == window_counts(events(90))
