"""A job whose inputs had all ended reads on if its topics have new records, or if its sources do not end any more.

The last checkpoint of such a job says that each task has ended. :func:`read_on` makes it the state of a job that has
handled all it was given so far: positions and the states of steps stay, and the ends are forgotten. What an operator
has noted of its end, it forgets itself (``Operator.without_end``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamiter.operators.event_timers import StepTimes
from streamiter.runtime.checkpointing.checkpoint_messages import Agreement
from streamiter.runtime.checkpointing.task_barriers import TaskState, TaskStates
from streamiter.runtime.task import Task
from streamiter.topics.source_and_sink import TopicSource


async def read_on(states: TaskStates, tasks: Sequence[Task], agreement: Agreement) -> bool:
    """Forget the ends in the states of all tasks, if any process has something to read; return whether that was so."""
    has_more = await agreement.any_has_more(any([await _has_more(states[task.name], task) for task in tasks]))
    if has_more:
        for task in tasks:
            _forget_ends(states[task.name], task)
    return has_more


def why_it_stays(tasks: Sequence[Task]) -> str | None:
    """Return why a job cannot read on, and what to do; None if it can. Process 0 has a task of each step."""
    remedy = "start without state with restore=None, which reads all records again"
    for task in tasks:
        step = task.first.step
        if step.loop is not None and step.loop.bounded:
            return f"step {step.name!r} is in a bounded iteration, whose rounds are over for all its data; {remedy}"
        if step.service is not None:
            return f"step {step.name!r} has left the parameter server {step.service.name!r}; {remedy}"
    return None


async def _has_more(state: TaskState, task: Task) -> bool:
    source = None if task.feeder is None else task.feeder.source
    if not isinstance(source, TopicSource):
        return False
    if source.stop is None:
        return True
    ends = (await source.topic.describe()).offsets
    if not isinstance(source.stop, str):
        ends = {number: (first, source.stop.get(number, first)) for number, (first, _) in ends.items()}
    context = task.first.context
    return any(
        end > max(first, state["positions"].get(number, first))
        for number, (first, end) in ends.items()
        if number % context.parallelism == context.subtask_index
    )


def _forget_ends(state: TaskState, task: Task) -> None:
    state.update({"ended": False, "interior input ended": False, "watermark": -1, "gate": None})
    for instance in task.instances:
        of_step: Any = state["operators"].get(instance.step.name)
        if of_step is None:
            continue
        times = of_step.get("event time")
        state["operators"][instance.step.name] = {
            **of_step,
            "operator": instance.operator.without_end(of_step["operator"]),
            "takes timers": True,
            "event time": times and StepTimes.without_end(times),
        }
