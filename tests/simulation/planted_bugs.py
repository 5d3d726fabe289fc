"""Bugs that are put into the engine on purpose; similar systems have had bugs of each of these kinds."""

from __future__ import annotations

from typing import Any

import pytest

from streamiter.learn.linear import LinearModel
from streamiter.parameter_server.requests import AddRequest
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.snapshots import Holding
from streamiter.runtime.checkpointing.barriers import JobServices
from streamiter.runtime.checkpointing.commit import TransactionalWriter
from streamiter.runtime.feedback import BarrierReturned, FeedbackLog
from streamiter.runtime.task import Task
from streamiter.topics.memory_log import MemoryTransactions


def drop_logged_feedback(patch: pytest.MonkeyPatch) -> None:
    """A head forgets the feedback between its snapshot and the return of the barrier."""
    complete = FeedbackLog.complete

    def without_log(self: FeedbackLog) -> list[BarrierReturned]:
        return [BarrierReturned(returned.checkpoint, []) for returned in complete(self)]

    patch.setattr(FeedbackLog, "complete", without_log)


def commit_offsets_early(patch: pytest.MonkeyPatch) -> None:
    """The snapshot of a source has the positions of read records, instead of those of handled records."""
    snapshot = Task.snapshot

    async def ahead(self: Task) -> dict[str, Any]:
        state = await snapshot(self)
        if self.feeder is not None and not self.ended:
            state["positions"] = dict(self.feeder._source.positions())
        return state

    patch.setattr(Task, "snapshot", ahead)


def forget_an_optimizer_slot(patch: pytest.MonkeyPatch) -> None:
    """A learner restores its weights, but not the sums of its squared gradients."""
    state = LinearModel.state

    def without_n(self: LinearModel) -> dict[str, Any]:
        kept = state(self)
        kept["slots"]["n"][:] = 0.0
        return kept

    patch.setattr(LinearModel, "state", without_n)


def hold_nothing_behind_a_barrier(patch: pytest.MonkeyPatch) -> None:
    """A parameter server applies adds at once that a worker sends behind its barrier."""
    patch.setattr(Holding, "is_behind", lambda self, worker: False)


def let_nobody_stand_still(patch: pytest.MonkeyPatch) -> None:
    """Barriers reach the workers of a parameter server at different clocks."""

    async def at_once(self: JobServices) -> None:
        pass

    patch.setattr(JobServices, "stop_reading", at_once)


def drop_held_adds(patch: pytest.MonkeyPatch) -> None:
    """A parameter server forgets the adds that it holds back for a checkpoint."""
    apply = Shard.apply

    def without_adds(self: Shard, request: Any) -> Any:
        return 0 if isinstance(request, AddRequest) else apply(self, request)

    patch.setattr(Shard, "apply", without_adds)


def forget_the_parameters(patch: pytest.MonkeyPatch) -> None:
    """A restarted job uses a parameter server without its state."""

    async def without_state(self: JobServices, states: Any) -> None:
        await opened(self, None)

    opened = JobServices.open
    patch.setattr(JobServices, "open", without_state)


def keep_what_a_cut_off_worker_has_passed(patch: pytest.MonkeyPatch) -> None:
    """The state of a shard is taken when the first worker has passed its barrier, not the last."""

    def with_the_first(self: Holding) -> None:
        if self._checkpoint is not None and self._behind:
            if (taking := self._taking.pop(self._checkpoint, None)) is not None:
                taking.succeed(self._shard.freeze())
            if all(worker in self._behind for worker in self._shard.workers):
                self._release()

    patch.setattr(Holding, "_check", with_the_first)


def fence_nobody(patch: pytest.MonkeyPatch) -> None:
    """The broker lets the old owner of the transactions write, although another run has opened them."""
    patch.setattr(MemoryTransactions, "fence", lambda self, reason: None)


def write_behind_the_barrier(patch: pytest.MonkeyPatch) -> None:
    """A sink writes records behind its barrier into the transaction of that checkpoint."""
    patch.setattr(TransactionalWriter, "seal", lambda self: None)
