"""A job whose inputs had all ended reads on if its topics have new records, or if its sources do not end any more.

The last checkpoint of such a job says that each task has ended. :func:`read_on` makes it the state of a job that has
handled all records so far: positions and the states of steps stay, and the ends are forgotten. An operator forgets its
own notes of the end (``Operator.without_end``). While no record has come after such an end, the job takes no
checkpoints, and has no second end: its last checkpoint still says how far it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from streamiter.engine.plan.messages import Meeting
from streamiter.engine.storage.snapshot import SnapshotHeader
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.engine.tasks.task import Task
from streamiter.engine.tasks.task_barriers import TaskState, TaskStates
from streamiter.errors import CheckpointError
from streamiter.operators.event_timers import StepTimes
from streamiter.topics.source_and_sink import TopicSource
from streamiter.values.subtasks import subtask_of_partition

NOTHING, ENDLESS, RECORDS = range(3)
"""What a finished job has to read: nothing, nothing yet of a source that does not end any more, or records. A job that
had not finished has records."""


async def read_on(header: SnapshotHeader, states: TaskStates, tasks: Sequence[Task], meeting: Meeting) -> int:
    """Forget the ends in the states of all tasks, if any process has something to read; return what there is.

    Raises CheckpointError if a step cannot go on.
    """
    found = max([await _to_read(states[task.name], task) for task in tasks], default=NOTHING)
    to_read: int = max(await meeting.reach("what there is to read", found))
    for task in tasks if to_read else ():
        state = states[task.name]
        state.update({"ended": False, "interior input ended": False, "watermark": -1, "inbox": None})
        for instance in task.instances:
            name = instance.step.name
            try:
                if (of_step := state["operators"].get(name)) is not None:
                    state["operators"][name] = _without_end(of_step, instance)
            except CheckpointError as reason:
                raise CheckpointError(
                    f"flow {header.flow!r}: checkpoint {header.id.number} is the last of a job whose inputs had ended. "
                    f"{_WHY[to_read]}, but step {name!r} cannot read on: {reason}; start without state with "
                    "restore=None, which reads all records again"
                ) from None
    return to_read


_WHY: Final = {RECORDS: "There are new records", ENDLESS: "A source does not end any more"}


def _without_end(of_step: Any, instance: OperatorInstance) -> dict[str, Any]:
    loop, times = instance.step.loop, of_step.get("event time")
    if loop is not None and loop.bounded:
        raise CheckpointError("the rounds of its bounded iteration, which were about all data, are over")
    return {
        **of_step,
        "operator": instance.operator.without_end(of_step["operator"]),
        "takes timers": True,
        "event time": times and StepTimes.without_end(times),
    }


async def _to_read(state: TaskState, task: Task) -> int:
    source = None if task.feeder is None else task.feeder.source
    if not isinstance(source, TopicSource):
        return NOTHING
    ends = (await source.topic.describe()).offsets
    if isinstance(source.stop, Mapping):
        ends = {number: (first, source.stop.get(number, first)) for number, (first, _) in ends.items()}
    context = task.first.context
    has_records = any(
        end > max(first, state["positions"].get(number, first))
        for number, (first, end) in ends.items()
        if subtask_of_partition(number, context.parallelism) == context.subtask_index
    )
    return RECORDS if has_records else ENDLESS if source.stop is None else NOTHING
