"""Event time, windows and joins under random cuts, orders, sizes of channels and crashes, in one to three processes.

The flows fail if a watermark overtakes a record, and their committed results must equal those of an undisturbed run.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from event_time.flows import (
    CLICKS,
    EVENTS,
    FLOWS,
    TIMED_FLOWS,
    WINDOWS,
    endless_tables,
    joins,
    late_windows,
    loop_with_records_set_aside,
    timers_of_one_partition,
    windows,
    windows_over_partitions,
)
from event_time.operators import events, window_counts
from event_time.test_against_models import windows_of
from support.soak import ForEachSeed

from streamiter import Flow, RocksState
from streamiter.engine.inbox.port_progress import PortProgress
from streamiter.operators.event_timers import StepTimes
from streamiter.operators.holding import MiniBatch
from streamiter.testing import Faults, Simulation, SimulationFailed, simulate
from streamiter.testing.simulation.simulate import Undisturbed
from streamiter.values.records import EventTimeWatermark

MakeFlow = Callable[[Simulation], Flow]

ALL_FLOWS = [*TIMED_FLOWS, *FLOWS]
OF_ONE_SUBTASK = (timers_of_one_partition, late_windows)


@functools.cache
def undisturbed(flow: MakeFlow) -> Undisturbed:
    return simulate(flow, 0, faults=Faults.none()).undisturbed


@pytest.mark.parametrize("flow", ALL_FLOWS, ids=lambda flow: flow.__name__)
@pytest.mark.parametrize("processes", [1, 3])
def test_results_depend_on_no_cut_order_or_crash(flow: MakeFlow, processes: int) -> None:
    if processes > 1 and flow in OF_ONE_SUBTASK:
        pytest.skip("all of its steps have one subtask")
    for seed in range(4 if processes == 1 and flow in TIMED_FLOWS else 2):
        simulate(flow, seed, processes=processes, undisturbed=undisturbed(flow))


@pytest.mark.soak
@pytest.mark.parametrize("flow", ALL_FLOWS, ids=lambda flow: flow.__name__)
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


@pytest.mark.filterwarnings("ignore:unclosed file")  # A simulated crash leaves the lock of its folder open.
@pytest.mark.parametrize("flow", ALL_FLOWS, ids=lambda flow: flow.__name__)
def test_results_with_states_on_disk_are_those_in_memory(flow: MakeFlow, tmp_path: Path) -> None:
    def on_disk(simulation: Simulation) -> Flow:
        made = flow(simulation)
        made.state = RocksState(tmp_path, memory_bytes=16 << 20)
        return made

    simulate(on_disk, 1, undisturbed=undisturbed(flow))
    gc.collect()


@pytest.mark.parametrize("name", WINDOWS)
def test_the_undisturbed_windows_are_those_of_a_model(name: str) -> None:
    found = [orjson.loads(record.value or b"") for record in undisturbed(windows).outputs[name]]
    records = [("x", event["user"], event["at"], event["id"]) for event in EVENTS]
    expected = {
        interval: [record[3] for record in sorted(records, key=lambda record: (record[2], record[3]))]
        for interval, records in windows_of(WINDOWS[name], records).items()  # type: ignore[arg-type]
    }
    assert {(key, start, end): sorted(value["ids"]) for key, start, end, value, *_ in found} == {
        interval: sorted(ids) for interval, ids in expected.items()
    }
    assert len(found) == len(expected)


def test_the_undisturbed_joins_are_those_of_a_model() -> None:
    found = {
        name: sorted(map(orjson.loads, (record.value or b"" for record in records)), key=repr)
        for name, records in undisturbed(joins).outputs.items()
    }
    near = [
        (view, click)
        for view in EVENTS
        for click in CLICKS
        if view["user"] == click["user"] and view["at"] - 30 <= click["at"] <= view["at"] + 50
    ]
    paired = {view["id"] for view, _ in near}, {click["id"] for _, click in near}
    interval = [[view["id"], click["id"]] for view, click in near]
    interval += [[view["id"], None] for view in EVENTS if view["id"] not in paired[0]]
    interval += [[None, click["id"]] for click in CLICKS if click["id"] not in paired[1]]
    assert found["interval"] == sorted(interval, key=repr)
    before = {
        view["id"]: [click for click in CLICKS if click["user"] == view["user"] and click["at"] <= view["at"]]
        for view in EVENTS
    }
    as_of = [[view, clicks[-1]["id"] if clicks else None] for view, clicks in before.items()]
    assert found["as of"] == sorted(as_of, key=repr)
    features = [
        [view["id"], sum(view["at"] - 200 <= click["at"] < view["at"] for click in before[view["id"]])]
        for view in EVENTS
    ]
    assert found["features"] == sorted(features, key=repr)
    passed: list[Any] = []
    for click in CLICKS:
        same = [one for one in passed if (one["user"], one["id"] % 2) == (click["user"], click["id"] % 2)]
        passed += [] if any(abs(one["at"] - click["at"]) < 300 for one in same) else [click]
    assert found["once"] == sorted((click["id"] for click in passed), key=repr)


def test_the_undisturbed_records_have_the_last_values_of_the_table() -> None:
    found = [orjson.loads(record.value or b"") for record in undisturbed(endless_tables).outputs["joined"]]
    assert sorted(found) == [[n, [48 + n % 12, f"fruit {n % 3}"]] for n in range(80)]
