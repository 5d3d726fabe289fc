"""Which steps keep state, and whether their names will find it again."""

from __future__ import annotations

from collections.abc import Sequence

from streamiter.checkpoints.snapshot import StepState
from streamiter.errors import GraphError
from streamiter.operators.operator import Operator
from streamiter.runtime.graph import Step
from streamiter.runtime.instance import OperatorInstance
from streamiter.runtime.task import Task
from streamiter.topics.topic_sink import TopicSink

__all__ = ["stateful_steps"]


def stateful_steps(tasks: Sequence[Task]) -> dict[str, StepState]:
    """The steps that keep state. Raises GraphError where an edit of the flow could give the name of one to another."""
    steps: dict[str, StepState] = {}
    unnamed: dict[str, Step] = {}
    for task in tasks:
        for instance in task.instances:
            step = instance.step
            if not _keeps_state(instance):
                continue
            steps[step.name] = StepState(
                step.parallelism, type(instance.operator).__name__, is_source=step.source is not None
            )
            if not step.has_lasting_name:
                unnamed[step.name] = step
    _check_names(list(unnamed.values()))
    return steps


def _check_names(unnamed: Sequence[Step]) -> None:
    if not unnamed:
        return
    first, *others = unnamed
    also = f" (nor have {', '.join(f'{step.name!r} at {step.where}' for step in others)})" if others else ""
    raise GraphError(
        f"step {first.name!r}: expected a name= for a step that keeps state, given none{also}; checkpoints find state "
        "by the name of its step, and this one may go to another step when the flow is edited",
        where=first.where,
    )


def _keeps_state(instance: OperatorInstance) -> bool:
    step, operator = instance.step, instance.operator
    if step.source is not None or step.keys is not None:
        return True
    if operator.is_stateless or type(operator) is TopicSink:
        return False
    return type(operator).snapshot is not Operator.snapshot
