"""The states of the new tasks, step by step."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from streamiter.checkpoints.plain_data import PlainData
from streamiter.operators.operator import Boundary, Operator
from streamiter.runtime.checkpointing.redistribution.edge_sharing import EdgeSharing
from streamiter.runtime.checkpointing.redistribution.gates import GateShares
from streamiter.runtime.checkpointing.redistribution.instances import shared_out
from streamiter.runtime.checkpointing.redistribution.old_job import OldJob
from streamiter.runtime.checkpointing.redistribution.old_ports import origins
from streamiter.runtime.checkpointing.redistribution.positions import positions_for
from streamiter.runtime.checkpointing.redistribution.rounds import rounds_for
from streamiter.runtime.checkpointing.redistribution.standing import Standing, behind_all, joined
from streamiter.runtime.graph import Step
from streamiter.runtime.instance import OperatorInstance
from streamiter.runtime.task import Task

__all__ = ["fits", "redistributed"]


def fits(old: OldJob, tasks: Sequence[Task]) -> bool:
    """Whether the tasks are those of the snapshot, with the same channels between them."""
    before = {(head, task.subtask): task for head, of_head in old.tasks.items() for task in of_head}
    if len(before) != len(tasks):
        return False
    for task in tasks:
        known = before.get((task.head.step.name, task.head.subtask))
        if known is None or known.state["steps"] != [instance.step.name for instance in task.instances]:
            return False
        if origins(known) != [port.origin for port in task.gate.ports]:
            return False
    return True


async def redistributed(
    old: OldJob, tasks: Sequence[Task], plain_data: PlainData
) -> dict[str, dict[str, Any]]:
    """The state of each task by its name. Raises CheckpointError for what cannot be shared out anew."""
    shares = _Shares(old, tasks, plain_data)
    states: dict[str, dict[str, Any]] = {}
    for head in shares.heads:
        states.update(shares.of(head))
        await asyncio.sleep(0)
    return states


class _Shares:
    def __init__(self, old: OldJob, tasks: Sequence[Task], plain_data: PlainData) -> None:
        self._old = old
        self._plain_data = plain_data
        self.heads: dict[str, list[Task]] = {}
        self._steps: dict[str, OperatorInstance] = {}
        """An instance of each step, upstream first."""
        for task in tasks:
            self.heads.setdefault(task.head.step.name, []).append(task)
            for instance in task.instances:
                self._steps.setdefault(instance.step.name, instance)
        self._check_held()
        self._standings: dict[str, list[Standing]] = {}
        for instance in self._steps.values():
            self._standings[instance.step.name] = self._standing(instance.step, instance.operator)

    def _check_held(self) -> None:
        """Nothing that was on its way between two steps may be lost because other steps head the tasks now."""
        for head, of_head in self._old.tasks.items():
            if head not in self.heads and any(
                task.state["gate"]["held"] or task.state["gate"]["aside"] or list(task.logged)
                for task in of_head
            ):
                raise self._old.refused(
                    head,
                    "records wait before it, which is now chained to another or gone; restore the flow as it was, and "
                    "stop it where less waits",
                )

    def _standing(self, step: Step, operator: Operator) -> list[Standing]:
        before = self._old.standings(step.name)
        if before is None:
            upstream = [
                standing
                for edge in step.inputs
                if edge.feedback is None
                for standing in self._standings[edge.upstream.name]
            ]
            return [behind_all(upstream)] * step.parallelism
        if len(before) == step.parallelism:
            return before
        if isinstance(operator, Boundary) and operator.gives_epochs:
            furthest = max(standing.watermark for standing in before)
            return [joined(before)._replace(watermark=furthest)] * step.parallelism
        hears_epochs = not isinstance(operator, Boundary) and (
            self._steps[step.name].is_listener or _is_per_round(step, operator)
        )
        if hears_epochs and len({standing.watermark for standing in before}) > 1:
            epochs = ", ".join(str(standing.watermark) for standing in before)
            raise self._old.not_between(
                step.name, step.parallelism, f"they have heard of different epochs as the last ({epochs})"
            )
        if step.loop is not None and len({standing.ended for standing in before}) > 1:
            raise self._old.not_between(
                step.name,
                step.parallelism,
                "some of them have ended with their iteration and others have not",
            )
        hears_ends = not isinstance(operator, Boundary) and hasattr(operator, "input_ended")
        if hears_ends and step.name not in self.heads and len({each.data_ended for each in before}) > 1:
            raise self._old.not_between(
                step.name,
                step.parallelism,
                "some of them have heard that their input has ended and others have not",
            )
        if step.name not in self.heads:  # All operators of a task stand where it does.
            return self._standings[step.inputs[0].upstream.name]
        return [joined(before)] * step.parallelism

    # -- the tasks of one step -----------------------------------------------------------------------------

    def of(self, head: str) -> dict[str, dict[str, Any]]:
        """The states of the tasks that a step stands at the head of, by their names."""
        tasks = self.heads[head]
        first = tasks[0].head
        step, before = first.step, self._old.tasks.get(head, [])
        per_round = _is_per_round(step, first.operator)
        chain = tasks[0].instances[1:] if per_round else tasks[0].instances
        operators = {
            instance.step.name: shared
            for instance in chain
            if (shared := self._of_instances(instance.step, instance.operator)) is not None
        }
        is_new_source = step.source is not None and not before
        if is_new_source and not operators:
            return {}
        rounds = self._rounds(step, first.operator) if per_round else [None] * len(tasks)
        # Those of a new source are where it begins, whatever the steps behind it in its tasks go on from.
        positions: Sequence[Any] = [None if is_new_source else {}] * len(tasks)
        if not is_new_source and (feeder := tasks[0].feeder) is not None:
            positions = positions_for(self._old, step, feeder, [task.state["positions"] for task in before])
        gates = GateShares(
            self._old,
            step,
            first.operator,
            self._standings,
            self._plain_data,
            in_order=per_round or first.operator.epochs_in_order,
        )
        states: dict[str, dict[str, Any]] = {}
        for subtask, task in enumerate(tasks):
            standing = self._standings[head][subtask]
            gate, logged = self._gate(gates, task)
            states[task.name] = {
                "operators": {name: of_step[subtask] for name, of_step in operators.items()},
                "round": rounds[subtask],
                "watermark": standing.watermark,
                "ended": standing.ended,
                "interior input ended": standing.data_ended,
                "positions": None if positions[subtask] is None else dict(positions[subtask]),
                "turns": [None] * len(task.writers),
                "gate": gate,
                "logged": logged,
            }
        return states

    def _gate(self, gates: GateShares, task: Task) -> tuple[Any, Any]:
        """As it was, where nothing has changed before it."""
        step, subtask = task.head.step, task.head.subtask
        before = self._old.tasks.get(step.name, [])
        upstream = [edge.upstream.name for edge in step.inputs]
        if (
            len(before) == step.parallelism
            and origins(before[subtask]) == [port.origin for port in task.gate.ports]
            and all(self._old.standings(name) == self._standings[name] for name in upstream)
        ):
            return before[subtask].state["gate"], before[subtask].logged
        return gates.of(subtask, task.gate.ports)

    def _of_instances(self, step: Step, operator: Operator) -> list[Any] | None:
        states = self._old.instances.get(step.name)
        if states is None or len(states) == step.parallelism:
            return states
        return self._shared_out(step, operator, states)

    def _shared_out(self, step: Step, operator: Operator, states: Sequence[Any]) -> list[Any]:
        return shared_out(self._old, step, operator, states, EdgeSharing(step, self._plain_data))

    def _rounds(self, step: Step, operator: Operator) -> Sequence[Any]:
        rounds = [task.state["round"] for task in self._old.tasks.get(step.name, [])]
        if len(rounds) == step.parallelism:
            return rounds
        share_out = functools.partial(self._shared_out, step, operator)
        return rounds_for(self._old, step, rounds, share_out, hears_ends=hasattr(operator, "input_ended"))


def _is_per_round(step: Step, operator: Operator) -> bool:
    return step.per_round and not operator.is_stateless
