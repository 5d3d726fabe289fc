"""Which steps keep state, and whether their names will find it again."""

from __future__ import annotations

from collections.abc import Sequence

from streamiter.checkpoints.snapshot import StepState
from streamiter.errors import GraphError
from streamiter.operators.operator import Operator
from streamiter.runtime.instance import OperatorInstance
from streamiter.runtime.task import Task
from streamiter.topics.topic_sink import TopicSink

__all__ = ["stateful_steps"]


def stateful_steps(tasks: Sequence[Task]) -> dict[str, StepState]:
    """The steps that keep state. Raises GraphError for one whose name an edit of the flow could give to another."""
    steps: dict[str, StepState] = {}
    for task in tasks:
        for instance in task.instances:
            step = instance.step
            if step.name in steps or not _keeps_state(instance):
                continue
            if not step.has_lasting_name:
                raise GraphError(
                    f"step {step.name!r}: expected a name= for a step that keeps state, given none; checkpoints find "
                    "its state by its name, and this one may go to another step when the flow is edited",
                    where=step.where,
                )
            steps[step.name] = StepState(
                step.parallelism, type(instance.operator).__name__, is_source=step.source is not None
            )
    return steps


def _keeps_state(instance: OperatorInstance) -> bool:
    step, operator = instance.step, instance.operator
    if step.source is not None or step.keys is not None:
        return True
    if operator.is_stateless or type(operator) is TopicSink:
        return False
    return type(operator).snapshot is not Operator.snapshot
