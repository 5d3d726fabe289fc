"""The snapshot of a running job in memory: what ``job.snapshot()`` gives and ``flow.start(snapshot=…)`` takes."""

from __future__ import annotations

from typing import Any

from streamiter.checkpoints.plain_data import PlainData
from streamiter.runtime.checkpointing.barriers import TakenParts
from streamiter.runtime.checkpointing.task_parts import SERVICE, STEP, PartName, held_in_memory, task_state

__all__ = ["JobSnapshot", "in_memory"]

JobSnapshot = dict[str, Any]
"""States of the tasks, and of parameter servers, by name: plain data."""


def in_memory(taken: TakenParts, plain_data: PlainData) -> JobSnapshot:
    """The states of all tasks, independent of those that gave them. Releases what is deferred."""
    snapshot: JobSnapshot = {}
    for task, parts in taken.items():
        states: dict[str, Any] = {}
        for part in parts:
            # As lists, since one snapshot may be gone on from more than once.
            pieces = [list(map(plain_data.decode, held_in_memory(deferred))) for deferred in part.deferred]
            states[part.name] = plain_data.decode_state(part.content, pieces.__getitem__)
        if (name := PartName.of(next(iter(states)))).kind == SERVICE:
            snapshot[task] = states[str(name)]
            continue
        steps = [name.step for name in map(PartName.of, states) if name.kind == STEP]
        head, _, subtask = task.removesuffix("]").rpartition("[")
        snapshot[task] = task_state(head, int(subtask), steps, states)
    return snapshot
