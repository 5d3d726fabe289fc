"""Bugs put into the engine on purpose, each of a kind that has been seen in systems like this one."""

from __future__ import annotations

from typing import Any

import pytest

from streamiter.learn.linear.weights import LinearWeights
from streamiter.runtime.checkpointing.transactional_writer import TransactionalWriter
from streamiter.runtime.feedback_log import FeedbackLog
from streamiter.runtime.gate_records import BarrierReturned
from streamiter.runtime.task import Task
from streamiter.topics.memory.transactions import MemoryTransactions


def drop_logged_feedback(patch: pytest.MonkeyPatch) -> None:
    """A head forgets what came back between its snapshot and the barrier's return."""
    complete = FeedbackLog.complete

    def without_log(self: FeedbackLog) -> list[BarrierReturned]:
        return [BarrierReturned(returned.checkpoint, []) for returned in complete(self)]

    patch.setattr(FeedbackLog, "complete", without_log)


def commit_offsets_early(patch: pytest.MonkeyPatch) -> None:
    """A source's snapshot says how far was read, not how far was handled."""
    snapshot = Task.snapshot

    async def ahead(self: Task) -> dict[str, Any]:
        state = await snapshot(self)
        if self.feeder is not None and not self.ended:
            state["positions"] = dict(self.feeder._source.positions())
        return state

    patch.setattr(Task, "snapshot", ahead)


def forget_an_optimizer_slot(patch: pytest.MonkeyPatch) -> None:
    """A learner restores its weights, but not how large the gradients were so far."""
    state = LinearWeights.state

    def without_n(self: LinearWeights) -> dict[str, Any]:
        kept = state(self)
        kept["slots"]["n"][:] = 0.0
        return kept

    patch.setattr(LinearWeights, "state", without_n)


def fence_nobody(patch: pytest.MonkeyPatch) -> None:
    """The server lets whoever has the transactions open go on, although another run has opened them."""
    patch.setattr(MemoryTransactions, "fence", lambda self, reason: None)


def write_behind_the_barrier(patch: pytest.MonkeyPatch) -> None:
    """A sink writes what comes after its barrier into the transaction of that checkpoint."""
    patch.setattr(TransactionalWriter, "seal", lambda self: None)
