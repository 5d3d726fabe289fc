"""Under faults, crashes and restarts, in one to three processes, flows commit what an undisturbed run commits."""

import asyncio
import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from simulation.flows import (
    FLOWS,
    SETTLE_S,
    MakeFlow,
    asynchronous_server,
    bulk_synchronous_server,
    feedback_in_a_topic,
    floats_in_order,
    online_learner,
    running_totals,
    stale_synchronous_server,
    unbounded_asynchronous_loop,
)
from simulation.simulation_runs import first_failure, run, run_in_turn, undisturbed
from simulation.test_simulate import failure
from support.soak import ForEachSeed

from streamiter import Flow
from streamiter.engine.checkpointing.commit import TransactionalWriter
from streamiter.engine.checkpointing.services import JobServices
from streamiter.engine.inbox.alignment import BarrierReturned, FeedbackLog
from streamiter.engine.processes.link import LinkIdentity, ProcessLink
from streamiter.engine.processes.mesh import ProcessMesh
from streamiter.engine.processes.supervisor import Attempt, Loss
from streamiter.engine.tasks.task import Task
from streamiter.errors import ConfigurationError
from streamiter.learn.gradients.linear import LinearModel
from streamiter.parameter_server.requests import AddRequest
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.snapshots import Holding
from streamiter.testing import Faults, Simulation, SimulationFailed, Undisturbed, simulate
from streamiter.topics.memory_log import MemoryTransactions
from streamiter.values.deferred import PlainValue


def drop_logged_feedback(patch: pytest.MonkeyPatch) -> None:
    """Let a head forget the feedback between its snapshot and the return of the barrier."""
    complete = FeedbackLog.complete

    def without_log(self: FeedbackLog) -> BarrierReturned | None:
        returned = complete(self)
        return returned and BarrierReturned(returned.checkpoint, [])

    patch.setattr(FeedbackLog, "complete", without_log)


def commit_offsets_early(patch: pytest.MonkeyPatch) -> None:
    """Let the snapshot of a source contain the positions of read records instead of handled records."""
    snapshot = Task.snapshot

    async def ahead(self: Task) -> dict[str, Any]:
        state = await snapshot(self)
        if self.feeder is not None and not self.ended:
            state["positions"] = dict(self.feeder._source.positions())
        return state

    patch.setattr(Task, "snapshot", ahead)


def forget_an_optimizer_slot(patch: pytest.MonkeyPatch) -> None:
    """Let a learner restore its weights, but not the sums of its squared gradients."""
    state = LinearModel.state

    def without_n(self: LinearModel) -> dict[str, Any]:
        kept = state(self)
        kept["slots"]["n"][:] = 0.0
        return kept

    patch.setattr(LinearModel, "state", without_n)


def apply_adds_behind_a_barrier(patch: pytest.MonkeyPatch) -> None:
    """Let a parameter server apply adds immediately, even if the worker has sent them behind its barrier."""
    patch.setattr(Holding, "is_behind", lambda self, worker: False)


def pass_barriers_at_different_clocks(patch: pytest.MonkeyPatch) -> None:
    """Let barriers reach the workers of a parameter server at different clocks."""

    async def at_once(self: JobServices) -> None:
        pass

    patch.setattr(JobServices, "stop_reading", at_once)


def drop_held_adds(patch: pytest.MonkeyPatch) -> None:
    """Let a parameter server forget the adds that it holds back for a checkpoint."""
    apply = Shard.apply

    def without_adds(self: Shard, request: Any) -> Any:
        return 0 if isinstance(request, AddRequest) else apply(self, request)

    patch.setattr(Shard, "apply", without_adds)


def forget_the_parameters(patch: pytest.MonkeyPatch) -> None:
    """Let a restarted job use a parameter server without its state."""

    async def without_state(self: JobServices, states: Any) -> None:
        await opened(self, {})

    opened = JobServices.open
    patch.setattr(JobServices, "open", without_state)


def freeze_a_shard_at_the_first_worker(patch: pytest.MonkeyPatch) -> None:
    """Let a shard freeze its state when the first worker has passed its barrier, instead of the last."""

    def with_the_first(self: Holding) -> None:
        if self._checkpoint is not None and self._behind:
            if (taking := self._taking.pop(self._checkpoint, None)) is not None:
                taking.succeed(self._shard.freeze())
            if all(worker in self._behind for worker in self._shard.workers):
                self._release()

    patch.setattr(Holding, "_check", with_the_first)


def fence_no_owner(patch: pytest.MonkeyPatch) -> None:
    """Let the broker accept writes of the old owner of the transactions after another run has opened them."""
    patch.setattr(MemoryTransactions, "fence", lambda self, reason: None)


def write_behind_the_barrier(patch: pytest.MonkeyPatch) -> None:
    """Let a sink write records from behind its barrier into the transaction of that checkpoint."""
    patch.setattr(TransactionalWriter, "seal", lambda self: None)


def end_no_process_of_a_lost_attempt(patch: pytest.MonkeyPatch) -> None:
    """Let the supervisor forget the other processes after the loss of one."""

    async def without_end(self: Attempt) -> None:
        pass

    patch.setattr(Attempt, "_end", without_end)
    patch.setattr(Attempt, "kill", lambda self: self._is_over.set())


def begin_beside_a_lost_attempt(patch: pytest.MonkeyPatch) -> None:
    """Let the supervisor begin the next attempt before the processes of the lost one have ended."""
    run = Attempt.run

    async def without_waiting(self: Attempt) -> Loss | None:
        running = asyncio.create_task(run(self))
        await self._is_over.wait()
        return self.loss or await running

    patch.setattr(Attempt, "run", without_waiting)


def count_silence_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """Let a sign of life not count for the supervisor."""
    received = Attempt.received

    def unheard(self: Attempt, link: ProcessLink, message: PlainValue) -> None:
        before = dict(self._silent_at_s)
        received(self, link, message)
        if message[0] == "alive":
            self._silent_at_s.update(before)

    patch.setattr(Attempt, "received", unheard)


def hear_no_silence(patch: pytest.MonkeyPatch) -> None:
    """Let the supervisor not look for processes that are silent."""
    patch.setattr(Attempt, "_hear", lambda self, number: self._silent_at_s.update({number: math.inf}))


def accept_any_attempt(patch: pytest.MonkeyPatch) -> None:
    """Let a process accept the connection of an earlier attempt."""
    check = LinkIdentity.check
    patch.setattr(
        LinkIdentity, "check", lambda self, hello: check(dataclasses.replace(self, attempt=_attempt_of(hello)), hello)
    )


def _attempt_of(hello: bytes) -> int:
    _, _, attempt, *_ = msgspec.msgpack.decode(hello[hello.index(b"\n") + 3 :])
    return int(attempt)


SEEDS = range(2 * len(FLOWS), 4 * len(FLOWS))
"""These two of each flow find eight of the eleven planted bugs, as eight do. `make soak` tries further seeds."""
SEEDS_OF_A_TEST = 22
SEEDS_WITHOUT_STATE = 10


@pytest.fixture(autouse=True)
def without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Switch the log off: planned faults log warnings, which take a fifth of the time."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("first", SEEDS[::SEEDS_OF_A_TEST])
def test_faults_do_not_change_the_committed_records(first: int) -> None:
    """Records could be lost in a restart or counted twice after a failed commit, or a loop could never end."""
    run_in_turn(range(first, first + SEEDS_OF_A_TEST))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_faults_do_not_change_the_committed_records_under_further_seeds() -> None:
    """The seeds are new in each run: STREAMITER_SOAK_RUNS seeds, starting with STREAMITER_SOAK_SEED."""
    first = int(os.environ.get("STREAMITER_SOAK_SEED", SEEDS.stop)) * len(FLOWS)
    run_in_turn(range(first, first + int(os.environ.get("STREAMITER_SOAK_RUNS", SEEDS.stop))))


def doubled(simulation: Simulation) -> Flow:
    """Return a flow without state, whose positions are committed."""
    flow = Flow("doubled", parallelism=2)
    for name in ("left", "right"):
        read = flow.source(simulation.input(name, range(20), partitions=2, over_s=5), start="committed")
        read.map(lambda number: 2 * number).sink(simulation.output(f"doubled {name}", order="any"))
    return flow


# A crash drops a coroutine that asks for positions: it would still close its reader.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_faults_do_not_change_what_a_job_without_state_commits() -> None:
    """Positions of a job without a folder were not committed together with its outputs."""
    undisturbed = None
    for seed in range(SEEDS_WITHOUT_STATE):
        undisturbed = simulate(doubled, seed, has_store=False, undisturbed=undisturbed).undisturbed


SEEDS_IN_PROCESSES = 2
"""They find five of the six planted bugs, as more do. `make soak` tries further seeds."""

# One seed in fifteen makes a process silent. Each range begins with the first seed that finds its bug now.
SEEDS_THAT_FIND = {
    begin_beside_a_lost_attempt: range(3, 80),
    count_silence_from_the_start: range(3, 80),
    hear_no_silence: range(69, 120),
}


def reduced(simulation: Simulation) -> Flow:
    """Return a flow of narrow and wide steps: some processes have no source, and others no subtask of a step."""
    flow = Flow("reduced", parallelism=3)
    numbers = simulation.input("numbers", range(40), partitions=2, key=lambda n: str(n % 6), over_s=1.0)
    read = flow.source(numbers, parallelism=1 + simulation.run % 2).map(lambda n: n + 1).rebalance()
    totals = read.key_by(lambda n: n % 6).reduce(lambda a, b: a + b, name="total").map(lambda n: [n % 6, n])
    totals.rebalance().map(lambda pair: pair, parallelism=2).sink(simulation.output("totals", order="any"))
    return flow


DIVIDED = (*(flow for flow in FLOWS if flow is not feedback_in_a_topic), reduced, doubled)


def run_in_processes(flow: MakeFlow, seed: int, undisturbed: Undisturbed | None = None) -> Undisturbed:
    """Run a flow under a seed; return its undisturbed run, for other seeds."""
    settle_s, has_store = SETTLE_S.get(flow.__name__, 0.0), flow is not doubled
    return simulate(
        flow, seed, processes=3, settle_s=settle_s, has_store=has_store, undisturbed=undisturbed
    ).undisturbed


# A crash drops a coroutine that asks for positions: it would still close its reader.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("flow", DIVIDED)
def test_faults_do_not_change_what_several_processes_commit(flow: MakeFlow) -> None:
    """After the loss of a process, or with another number of them, records were lost or a loop did not end."""
    known = undisturbed(flow) if flow in FLOWS else None
    for seed in range(SEEDS_IN_PROCESSES):
        known = run_in_processes(flow, seed, known)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_faults_do_not_change_what_several_processes_commit_under_any_seed(for_each_soak_seed: ForEachSeed) -> None:
    """A barrier that came behind the abort of a job left a task behind, under one of a thousand seeds."""
    for_each_soak_seed(lambda seed: run_in_processes(DIVIDED[seed % len(DIVIDED)], seed))


def test_a_bug_between_processes_is_found_and_replayed_by_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation whose bytes arrive at once, or in other pieces each time, would not find a lost message again."""
    received = ProcessMesh.received
    monkeypatch.setattr(
        ProcessMesh, "received", lambda self, link, message: self._kept is not None or received(self, link, message)
    )
    found = failure(reduced, range(5, 20), processes=3, faults=Faults.none())  # The first five do not show it.
    assert "ended" in found.what
    again = failure(reduced, range(found.seed, found.seed + 1), processes=3, faults=Faults.none())
    assert (again.what, again.trace_hash) == (found.what, found.trace_hash)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (end_no_process_of_a_lost_attempt, "has not ended 600 s after the last fault"),
        (begin_beside_a_lost_attempt, r"attempt \d begins before run \d+, process \d of attempt \d has ended"),
        (count_silence_from_the_start, "no sign of life for 5 s.*, and no fault has led to that"),
        (hear_no_silence, "after a loss its attempt has not ended"),
        (accept_any_attempt, "accepts a connection of an old attempt"),
    ],
)
def test_a_bug_of_the_supervisor_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation decided about losses by itself, so no bug of the supervisor could show."""
    plant(monkeypatch)
    only_losses = Faults(crashes=0, stuck=False, failing=False, fenced=False, storage_full=False)
    found = failure(floats_in_order, SEEDS_THAT_FIND.get(plant, range(80)), processes=3, faults=only_losses)
    assert re.search(expected, found.what)


def test_a_number_of_processes_below_one_is_refused() -> None:
    """A flow ran in no process, and nothing was checked."""
    with pytest.raises(ConfigurationError, match=r"simulate: processes: expected .* given 0"):
        simulate(reduced, 0, processes=0)


SEEDS_OF_BUGS = range(40)
"""If a bug needs more seeds than these, the suite would not find it soon enough."""

# Barriers at different clocks stop a run for ever only if they are the last: one seed in fifty shows it.
OTHER_SEEDS = {pass_barriers_at_different_clocks: range(63, 100)}


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
        found = first_failure(flow, OTHER_SEEDS.get(plant, SEEDS_OF_BUGS))
        assert found is not None, f"{plant.__name__} is found by none of {len(SEEDS_OF_BUGS)} seeds"
        with pytest.raises(SimulationFailed) as again:
            run(flow, found.seed)
        assert (again.value.what, again.value.trace_hash) == (found.what, found.trace_hash)
    run(flow, found.seed)  # Without the bug the same seed finds nothing.
