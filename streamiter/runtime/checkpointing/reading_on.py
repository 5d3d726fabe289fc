"""A job whose inputs had all ended reads on if its topics have new records, or if its sources do not end any more.

The last checkpoint of such a job says that each task has ended. :func:`read_on` makes it the state of a job that has
handled all it was given so far: positions and the states of steps stay, and the ends are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamiter.operators.calls import MapAsync
from streamiter.operators.event_time import AssignEventTime
from streamiter.operators.operator import Boundary
from streamiter.runtime.checkpointing.task_barriers import TaskState, TaskStates
from streamiter.runtime.task import Task
from streamiter.times import MAX_TIME, MIN_TIME
from streamiter.topics.source_and_sink import TopicSource


async def read_on(states: TaskStates, tasks: Sequence[Task]) -> bool:
    """Forget the ends in the states of all tasks, if there is something to read; return whether that was so.

    Not in a flow with a loop, or with a step that has an operator for each epoch: their ends are part of their results.
    """
    if not all(map(_can_go_on, tasks)) or not any([await _has_more(states[task.name], task) for task in tasks]):
        return False
    for task in tasks:
        _forget_ends(states[task.name], task)
    return True


def _can_go_on(task: Task) -> bool:
    return task.first.step.loop is None and all(
        isinstance(instance.operator, MapAsync) or not isinstance(instance.operator, Boundary)
        for instance in task.instances
    )


async def _has_more(state: TaskState, task: Task) -> bool:
    source = None if task.feeder is None else task.feeder.source
    if not isinstance(source, TopicSource):
        return False
    if source.stop is None:
        return True
    ends = (await source.topic.describe()).offsets
    if not isinstance(source.stop, str):
        ends = {number: (first, source.stop.get(number, first)) for number, (first, _) in ends.items()}
    share = {
        number: end for number, end in ends.items() if number % task.first.context.parallelism == task.first.subtask
    }
    return any(end > max(first, state["positions"].get(number, first)) for number, (first, end) in share.items())


def _forget_ends(state: TaskState, task: Task) -> None:
    state.update({"ended": False, "interior input ended": False, "watermark": -1, "inbox": None})
    for instance in task.instances:
        of_step: Any = state["operators"].get(instance.step.name)
        if of_step is None:
            continue
        if (times := of_step.get("event time")) is not None:
            of_step["event time"] = {
                **times,
                "watermark": _before_end(times["watermark"]),
                "passed": _before_end(times["passed"]),
            }
        if isinstance(instance.operator, MapAsync):
            of_step["operator"] = {**of_step["operator"], "ends": [], "watermark": -1}
        elif isinstance(instance.operator, AssignEventTime):
            kept = of_step["operator"]
            of_step["operator"] = {**kept, "watermark": _before_end(kept["watermark"])}


def _before_end(watermark: int) -> int:
    """Return a watermark, or none for that of the end; the next one is computed from the greatest timestamps."""
    return MIN_TIME if watermark == MAX_TIME else watermark
