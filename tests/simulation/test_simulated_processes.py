"""Flows in two or three processes commit the same records as an undisturbed run in one process."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
from runtime.joined_jobs import joined_jobs
from simulation.flows import SETTLE_S
from simulation.flows_without_loops import another_parallelism, keyed_state_and_timers, running_totals
from simulation.test_simulated_flows import doubled

from streamiter import Checkpoints, Flow
from streamiter.errors import StorageFull
from streamiter.runtime.job import Job, StopMode
from streamiter.runtime.plan import ChannelLimits, JobOptions
from streamiter.runtime.statistics import JobState
from streamiter.testing import Simulation, simulate
from streamiter.testing.simulated_time import TaskClock
from streamiter.testing.simulation.network import SimulatedStore
from streamiter.testing.simulation.simulate import Life

SEEDS_OF_A_FLOW = 12


def reduced(simulation: Simulation) -> Flow:
    """Return a flow of narrow and wide steps: some processes have no source, and others no subtask of a step."""
    flow = Flow("reduced", parallelism=3)
    numbers = simulation.input("numbers", range(40), partitions=2, key=lambda n: str(n % 6), over_s=1.0)
    read = flow.source(numbers, parallelism=1 + simulation.run % 2).map(lambda n: n + 1).rebalance()
    totals = read.key_by(lambda n: n % 6).reduce(lambda a, b: a + b, name="total").map(lambda n: [n % 6, n])
    totals.rebalance().map(lambda pair: pair, parallelism=2).sink(simulation.output("totals", order="any"))
    return flow


class JoinedLife(Life):
    """A life of several jobs in one event loop, one for each process; all of them end with the first failure."""

    jobs: list[Job]
    stores = True

    async def _live(self) -> JobState:
        flows = [self._make_flow(Simulation(self.world, self.cluster, self.number))]
        processes = min(2 + (self.world.seed + self.number) % 2, max(step.parallelism for step in flows[0].steps))
        flows += [self._make_flow(Simulation(self.world, self.cluster, self.number)) for _ in range(1, processes)]
        self._has_unbounded_source = any(not step.bounded for step in flows[0].steps if step.source is not None)
        joined = joined_jobs(flows, self._options)
        await joined.start()
        self.jobs = joined.jobs
        self.job = self.jobs[0]
        await joined.wait()
        return self.job.statistics().state

    def _options(self, process: int) -> JobOptions:
        settings = self._settings
        store = SimulatedStore(self.world.store.another(), self.connection) if self.stores else None
        return JobOptions(
            clock=TaskClock(self.world.time),
            new_id=self.world.new_id,
            channel_limits=ChannelLimits(records=settings.channel_records),
            checkpoints=Checkpoints(
                store,
                interval_s=settings.interval_s,
                keep=settings.keep,
                alignment_timeout_s=settings.alignment_timeout_s,
                transaction_timeout_s=settings.transaction_timeout_s,
            ),
        )

    async def _stop(self, job: Job, mode: StopMode) -> None:
        asked = [job] if mode == "suspend" else self.jobs
        await asyncio.gather(*(super(JoinedLife, self)._stop(each, mode) for each in asked))


@pytest.fixture(autouse=True)
def without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Switch the log off: planned faults log warnings."""
    caplog.set_level(logging.CRITICAL)


# A crash drops a coroutine that asks for positions: it would still close its reader.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("flow", [keyed_state_and_timers, running_totals, another_parallelism, reduced, doubled])
def test_faults_do_not_change_what_several_processes_commit(
    flow: Callable[[Simulation], Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of all processes, or with another number of them, records were lost or counted twice."""
    module = importlib.import_module("streamiter.testing.simulation.simulate")
    run: Callable[..., Any] = functools.partial(simulate, flow, settle_s=SETTLE_S.get(flow.__name__, 0.0))
    if flow is doubled:
        monkeypatch.setattr(module, "Checkpoints", lambda store, **options: Checkpoints(**options))
        monkeypatch.setattr(JoinedLife, "stores", False)
    undisturbed = run(0).undisturbed
    monkeypatch.setattr(module, "Life", JoinedLife)
    for faults in ("_FAULTS", "_FAULTS_OF_THE_PAUSED"):  # Process 0 gets the error of another process as data.
        monkeypatch.setattr(module, faults, (*getattr(module, faults), StorageFull))
    for seed in range(int(os.environ.get("STREAMITER_SOAK_RUNS", SEEDS_OF_A_FLOW))):
        run(seed, undisturbed=undisturbed)
