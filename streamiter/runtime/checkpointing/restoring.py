"""From a stored snapshot to the states that the tasks of this job take over."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotHeader, StepState
from streamiter.checkpoints.store import StoredSnapshot
from streamiter.clock import Clock
from streamiter.errors import CheckpointError
from streamiter.runtime.checkpointing.redistribution import (
    OldJob,
    fits,
    redistributed,
    with_batches,
)
from streamiter.runtime.checkpointing.task_parts import SERVICE, PartName, task_state
from streamiter.runtime.task import Task

__all__ = ["check_steps", "left_behind", "states_of_tasks"]


def check_steps(
    header: SnapshotHeader, steps: Mapping[str, StepState], changed_steps: Collection[str]
) -> None:
    """Raise CheckpointError unless the snapshot is one of the flow that has these steps.

    Of ``changed_steps`` the state may be left behind, or begin anew.
    """
    where = f"flow {header.flow!r}, checkpoint {header.id.number}"
    for name in header.steps:
        if name not in steps and name not in changed_steps:
            raise CheckpointError(
                f"{where}: it has state of step {name!r}, which the flow does not have ({_names(steps)}); give the "
                f"step that name again, or leave its state behind: changed_steps=[{name!r}]"
            )
    for name in steps:
        if name not in header.steps and name not in changed_steps:
            raise CheckpointError(
                f"{where}: it has no state of step {name!r} (it has {_names(header.steps)}); give the step the name "
                f"it had, or let it begin without state: changed_steps=[{name!r}]"
            )


def left_behind(
    header: SnapshotHeader, steps: Mapping[str, StepState], changed_steps: Collection[str]
) -> list[str]:
    """The steps whose state is not taken over: those that are gone, and sources, which begin where they are told to.

    A step that is on both sides keeps its state, so that the option does no harm where it is left in a program.
    """
    return [
        name
        for name, step in header.steps.items()
        if name in changed_steps and (name not in steps or step.is_source)
    ]


def _names(steps: Mapping[str, StepState]) -> str:
    return ", ".join(map(repr, steps)) or "none"


async def states_of_tasks(
    stored: StoredSnapshot,
    tasks: Sequence[Task],
    plain_data: PlainData,
    clock: Clock,
    *,
    dropped: Collection[str],
    queues: ExitStack,
) -> dict[str, dict[str, Any]]:
    """The state of each task and service by its name. What is deferred is read from ``stored`` as they take it over.

    Where the parallelism of steps has changed, or other steps are chained, it is shared out anew; what was fed back
    through topics may wait in ``queues`` then, to be closed when the tasks have taken over.
    """
    states: dict[str, Any] = {}
    for name in stored.part_names():
        if PartName.of(name).step in dropped:
            continue
        content = await stored.content(name)
        states[name] = plain_data.decode_state(content, functools.partial(_Again, stored, name, plain_data))
        await asyncio.sleep(0)
    services = {
        f"{part.kind} {part.step}": states.pop(name)
        for name in list(states)
        if (part := PartName.of(name)).kind == SERVICE
    }
    old = OldJob.of(stored.header, states)
    if not fits(old, tasks):
        heads = dict.fromkeys(task.head.step for task in tasks)
        shared_out = await redistributed(
            await with_batches(old, heads, plain_data, clock, queues), tasks, plain_data
        )
        return {**shared_out, **services}
    found: dict[str, dict[str, Any]] = dict(services)
    for task in tasks:
        steps = [instance.step.name for instance in task.instances]
        state = task_state(task.head.step.name, task.head.subtask, steps, states)
        assert state is not None
        found[task.name] = state
    return found


@final
class _Again:
    """The decoded frames of a deferred piece, read anew whenever one goes through them."""

    def __init__(self, stored: StoredSnapshot, part: str, plain_data: PlainData, number: int) -> None:
        self._stored = stored
        self._part = part
        self._plain_data = plain_data
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        return map(self._plain_data.decode, self._stored.frames(self._part, self._number))
