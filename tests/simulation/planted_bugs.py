"""These tests put bugs into the engine on purpose; similar systems have had bugs of each kind."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import msgspec
import pytest

from streamiter.engine.checkpointing.commit import TransactionalWriter
from streamiter.engine.checkpointing.services import JobServices
from streamiter.engine.inbox.alignment import BarrierReturned, FeedbackLog
from streamiter.engine.processes.link import LinkIdentity, ProcessLink
from streamiter.engine.processes.supervisor import Attempt, Loss
from streamiter.engine.tasks.task import Task
from streamiter.learn.linear import LinearModel
from streamiter.parameter_server.requests import AddRequest
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.snapshots import Holding
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
