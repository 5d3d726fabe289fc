"""``simulate`` finds faults, explains them in its messages, and repeats a fault by its seed."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulation.flows import FLOWS, MakeFlow, running_totals
from simulation.simulation_runs import run, settle_s
from support.waiting import PATIENCE_S

from streamiter import Flow, Operator
from streamiter.errors import ConfigurationError
from streamiter.testing import Faults, Simulation, SimulationFailed, simulate
from streamiter.testing.simulated_time import Trace

SEEDS = range(40)


def failure(flow: MakeFlow, seeds: range = SEEDS, **options: Any) -> SimulationFailed:
    """Return the first failure of these seeds."""
    for seed in seeds:
        try:
            simulate(flow, seed, **options)
        except SimulationFailed as found:
            return found
    raise AssertionError("nothing was found")


def flow_of(make: Callable[[], Operator], **output: Any) -> MakeFlow:
    """Return a flow of twenty numbers through one step."""

    def numbers(simulation: Simulation) -> Flow:
        flow = Flow("numbers")
        source = flow.source(simulation.input("in", range(20), over_s=2.0))
        source.process(make, name="step").sink(simulation.output("out", **output))
        return flow

    return numbers


class Forgetful(Operator):
    """Counts records, and loses its count at a restart."""

    def __init__(self) -> None:
        self.count = 0

    def process(self, record: int, out: Any) -> None:
        self.count += 1
        out.emit(self.count)


class Remembering(Forgetful):
    def snapshot(self) -> int:
        return self.count

    def restore(self, state: int) -> None:
        self.count = state


class Hanging(Remembering):
    """Waits for ever with the first record after a restore."""

    restored = False

    def restore(self, state: int) -> None:
        super().restore(state)
        self.restored = state > 0

    async def process(self, record: int, out: Any) -> None:
        if self.restored:
            await asyncio.get_running_loop().create_future()
        super().process(record, out)


class Failing(Remembering):
    """Raises an error at every restore."""

    def restore(self, state: int) -> None:
        raise ValueError("a state I do not know")


class Leaking(Remembering):
    """Starts a task that outlives the job."""

    def open(self, context: Any) -> None:
        self.task = asyncio.create_task(asyncio.sleep(1e9))


def test_state_that_a_restart_forgets_is_found_with_a_message_to_repeat_it() -> None:
    """A failure without its seed cannot be repeated."""
    found = failure(flow_of(Forgetful))
    text = str(found)
    assert f"flow 'numbers', seed {found.seed}: output 'out', partition 0: expected record " in text
    assert f"run simulate(…, seed={found.seed}) again to see exactly the same (trace {found.trace_hash})" in text
    assert "run 2 begins" in text
    assert "committed" in text
    again = failure(flow_of(Forgetful), range(found.seed, found.seed + 1))
    assert str(again) == text
    remembering = flow_of(Remembering)
    undisturbed = simulate(remembering, 0).undisturbed
    for seed in range(10):
        simulate(remembering, seed, undisturbed=undisturbed)


def test_a_flow_that_hangs_after_a_restart_is_found_and_the_place_is_named() -> None:
    """A job that runs without an error and commits nothing looks healthy."""
    found = failure(flow_of(Hanging))
    assert "has not ended 600 s after the last fault" in found.what
    assert "Hanging.process (test_simulate.py:" in found.what


def test_a_failure_that_no_fault_caused_is_found() -> None:
    """Restarts could hide a flow that fails after every restart."""
    found = failure(flow_of(Failing))
    assert "fails, and no fault has led to that" in found.what
    assert "ValueError: a state I do not know" in found.what


def test_a_task_that_outlives_its_job_is_found() -> None:
    """Each restart left one more task."""
    found = failure(flow_of(Leaking))
    assert "flow 'numbers, undisturbed'" in str(found)
    assert "run 1 has ended and leaves tasks behind" in found.what


def test_a_users_check_is_called_after_every_commit() -> None:
    """A condition that must hold at any time has no expected output for a comparison."""
    lengths = []

    def check(outputs: Any) -> None:
        lengths.append(len(outputs["out"]))
        assert len(outputs["out"]) < 15, "fifteen of them"

    found = failure(flow_of(Remembering), check=check)
    assert "the check of committed outputs fails: fifteen of them" in found.what
    lengths.clear()
    for seed in range(10):
        simulate(flow_of(Remembering), seed, check=lambda outputs: lengths.append(len(outputs["out"])))
    assert max(lengths) == 20
    assert len(set(lengths)) > 5


def test_outputs_written_at_once_may_be_repeated_but_not_lost() -> None:
    """A missing record violates at-least-once delivery too."""

    def at_once(simulation: Simulation, **output: Any) -> Flow:
        flow = Flow("at once")
        numbers = flow.source(simulation.input("in", range(20), over_s=0.3))
        numbers.sink(simulation.output("out", **output), delivery="at_least_once")
        return flow

    def declared(simulation: Simulation) -> Flow:
        return at_once(simulation, delivery="at_least_once")

    undisturbed = simulate(declared, 0).undisturbed
    for seed in range(15):
        result = simulate(declared, seed, undisturbed=undisturbed)
        assert {record.value for record in result.outputs["out"]} == {b"%d" % n for n in range(20)}
    assert "output 'out', partition 0: expected" in failure(at_once).what


def test_equal_seeds_are_equal_runs_in_every_process() -> None:
    """The order of a set depends on hashes and addresses, which differ between processes."""
    seed = 6
    program = (
        "from simulation.flows import FLOWS\n"
        "from simulation.simulation_runs import run\n"
        f"print([run(flow, {seed}).trace_hash for flow in FLOWS[::9]])\n"
    )
    other_hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": other_hashes},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    here = [run(flow, seed).trace_hash for flow in FLOWS[::9]]
    assert other.stdout == f"{here}\n"
    assert len(set(here)) == len(here)


def test_all_kinds_of_faults_happen_over_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that never happens tests nothing, and no other test notices its absence."""
    missing = {
        "crashes",
        "is paused",
        "resumes after a pause",
        "is to stop: suspend",
        "is to stop: abort",
        "is to stop: drain",
        "is suspended",
        "is aborted",
        "is finished",
        "stuck for",
        "before it took effect",
        "after it took effect",
        "fails: commit, after it took effect",
        "another owner opens the transactions",
        "no room for snapshot",
        "took over",
        "no faults from now on",
    }
    event = Trace.event

    def noted(self: Trace, now_s: float, what: str) -> None:
        missing.difference_update([expected for expected in missing if expected in what])
        event(self, now_s, what)

    monkeypatch.setattr(Trace, "event", noted)
    # All kinds happen under the first four seeds; after a change of the simulation, perhaps under others.
    for seed in (201, 20, 0, 206, *range(240)):
        if missing:
            run(running_totals, seed)
    assert missing == set()


def test_without_faults_a_flow_is_run_once_or_as_often_as_it_has_finished() -> None:
    """A switched-off fault that still happens changes the meaning of a test."""
    for seed in range(4):
        result = run(running_totals, seed, Faults.none())
        assert result.runs <= 2
    result = simulate(running_totals, 1, faults=Faults.none(), settle_s=settle_s(running_totals))
    values, expected = (
        sorted(record.value or b"" for record in outputs["totals"])
        for outputs in (result.outputs, result.undisturbed.outputs)
    )
    assert values == expected


def test_a_name_is_taken_once() -> None:
    """Two inputs with one name became one input, with the records of the first."""

    def twice(simulation: Simulation) -> Flow:
        simulation.input("in", [1])
        simulation.output("in")
        return Flow("twice")

    with pytest.raises(SimulationFailed, match="expected a name of its own for each topic, given 'in' twice"):
        simulate(twice, 0)


async def test_a_simulation_does_not_change_the_current_event_loop() -> None:
    """A test that is a coroutine continues to use its event loop after the simulation."""
    around = asyncio.get_running_loop()
    run(running_totals, 1)
    assert asyncio.get_running_loop() is around
    await asyncio.sleep(0)


def test_options_are_checked() -> None:
    """A seed of None would be a new seed in each run."""
    with pytest.raises(ConfigurationError, match="simulate: seed"):
        simulate(running_totals, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Faults: crashes"):
        Faults(crashes=-1)
