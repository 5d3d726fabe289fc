"""The state of a task as parts of a snapshot: one for each of its operators, one for the task itself.

Parts are named after steps, so that chains may change between two runs: ``step NAME[i]`` is the state of subtask i of
an operator, ``task NAME[i]`` that of the task at whose head the step stands, ``feedback NAME[i]`` what came
back to it between its barrier and the barrier's return, ``service NAME[0]`` that of a parameter server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from streamiter.checkpoints.pieces import release_all
from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotPart
from streamiter.deferred import Deferred
from streamiter.errors import PlainDataError
from streamiter.operators.rejection import RecordFailure

__all__ = [
    "PartName",
    "encode_log",
    "encode_service",
    "encode_task",
    "held_in_memory",
    "release_parts",
    "task_state",
]

STEP, TASK, FEEDBACK, SERVICE = "step", "task", "feedback", "service"


class PartName(NamedTuple):
    """What a part holds, and whose.

    >>> PartName.of("step per user[3]")
    PartName(kind='step', step='per user', subtask=3)
    """

    kind: str
    step: str
    subtask: int

    def __str__(self) -> str:
        return f"{self.kind} {self.step}[{self.subtask}]"

    @classmethod
    def of(cls, name: str) -> PartName:
        """The reverse of ``str``."""
        kind, _, rest = name.partition(" ")
        step, _, subtask = rest.removesuffix("]").rpartition("[")
        return cls(kind, step, int(subtask))


def encode_task(
    head: str, subtask: int, state: Mapping[str, Any], plain_data: PlainData
) -> list[SnapshotPart]:
    """What ``Task.snapshot`` gave, as it is now: nothing that changes later is in it."""
    parts: list[SnapshotPart] = []
    of_task = {key: value for key, value in state.items() if key != "operators"}
    pieces = [(PartName(STEP, step, subtask), of_step) for step, of_step in state["operators"].items()]
    try:
        for name, piece in (*pieces, (PartName(TASK, head, subtask), of_task)):
            parts.append(_encoded(name, piece, plain_data))
    except BaseException:
        release_all(state)
        raise
    return parts


def release_parts(parts: Iterable[SnapshotPart]) -> None:
    """Nobody needs what is deferred in these parts any more."""
    for part in parts:
        for deferred in part.deferred:
            deferred.release()


def encode_log(head: str, subtask: int, logged: Any, plain_data: PlainData) -> SnapshotPart:
    """The feedback that belongs to the snapshot of a head."""
    return _encoded(PartName(FEEDBACK, head, subtask), logged, plain_data)


def encode_service(name: PartName, state: Any, plain_data: PlainData) -> SnapshotPart:
    """The state of a parameter server."""
    return _encoded(name, state, plain_data)


def _encoded(name: PartName, state: Any, plain_data: PlainData) -> SnapshotPart:
    try:
        content, deferred = plain_data.encode_state(state, name=f"state of step {name.step!r}")
    except PlainDataError as error:
        raise RecordFailure(name.step) from error
    return SnapshotPart(str(name), content, deferred)


def held_in_memory(deferred: Deferred) -> list[bytes]:
    """All frames of a deferred piece, which is released."""
    try:
        return list(deferred.frames())
    finally:
        deferred.release()


def task_state(
    head: str, subtask: int, steps: Iterable[str], states: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What ``Task.open`` takes, from states by the names of their parts; None if nothing is known of the task."""
    of_task = states.get(str(PartName(TASK, head, subtask)))
    if of_task is None:
        return None
    names = {step: str(PartName(STEP, step, subtask)) for step in steps}
    operators = {step: states[name] for step, name in names.items() if name in states}
    state = {**of_task, "operators": operators}
    log = str(PartName(FEEDBACK, head, subtask))
    if log in states:
        state["logged"] = states[log]
    return state
