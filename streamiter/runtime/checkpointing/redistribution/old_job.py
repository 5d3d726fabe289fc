"""A snapshot by the steps and tasks of the job that it was taken of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streamiter.checkpoints.snapshot import SnapshotHeader
from streamiter.errors import CheckpointError
from streamiter.runtime.checkpointing.redistribution.standing import Standing
from streamiter.runtime.checkpointing.task_parts import FEEDBACK, STEP, TASK, PartName

__all__ = ["OldJob", "OldTask"]


@dataclass(frozen=True, slots=True)
class OldTask:
    """One task of that job."""

    subtask: int
    state: Mapping[str, Any]
    logged: Iterable[tuple[int, Iterable[Any]]]
    """What came back to it between its barrier and the barrier's return, by port."""

    @property
    def standing(self) -> Standing:
        """How far all its steps had come."""
        state = self.state
        return Standing(state["watermark"], bool(state["interior input ended"]), bool(state["ended"]))


@dataclass(frozen=True, slots=True)
class OldJob:
    """What is deferred in the states can be gone through more than once."""

    where: str
    """Which checkpoint of which flow it is, for errors."""
    tasks: Mapping[str, list[OldTask]]
    """By the step at their head, in the order of subtasks."""
    instances: Mapping[str, list[Any]]
    """The states of the operators by step, in the order of subtasks."""
    heads: Mapping[str, str]
    """For each step the one at the head of its task."""

    @classmethod
    def of(cls, header: SnapshotHeader, states: Mapping[str, Any]) -> OldJob:
        """``states`` by the names of their parts."""
        kinds: dict[str, dict[str, dict[int, Any]]] = {STEP: {}, TASK: {}, FEEDBACK: {}}
        for name, state in states.items():
            part = PartName.of(name)
            kinds[part.kind].setdefault(part.step, {})[part.subtask] = state
        tasks: dict[str, list[OldTask]] = {}
        heads: dict[str, str] = {}
        for head, by_subtask in kinds[TASK].items():
            logs = kinds[FEEDBACK].get(head, {})
            tasks[head] = [
                OldTask(each, state, logs.get(each, ())) for each, state in sorted(by_subtask.items())
            ]
            heads.update(dict.fromkeys(tasks[head][0].state["steps"], head))
        instances = {
            step: [state for _, state in sorted(by_subtask.items())]
            for step, by_subtask in kinds[STEP].items()
        }
        return cls(f"flow {header.flow!r}, checkpoint {header.id.number}", tasks, instances, heads)

    def standings(self, step: str) -> list[Standing] | None:
        """How far each subtask of a step had come; None for a step that was not there."""
        head = self.heads.get(step)
        return None if head is None else [task.standing for task in self.tasks[head]]

    def refused(self, step: str, why: str) -> CheckpointError:
        """The error that says what cannot be shared out anew."""
        return CheckpointError(f"{self.where}, step {step!r}: {why}")

    def not_between(self, step: str, parallelism: int, what: str) -> CheckpointError:
        """The same where another checkpoint would do."""
        return self.refused(
            step,
            f"its {self.parallelism(step)} subtasks cannot become {parallelism} here: {what}; start it with "
            f'parallelism={self.parallelism(step)} as it was, and take another checkpoint, as stop("suspend") does',
        )

    def parallelism(self, step: str) -> int:
        """The number of its subtasks; 0 for a step that was not there."""
        head = self.heads.get(step)
        return len(self.instances.get(step, ())) if head is None else len(self.tasks[head])
