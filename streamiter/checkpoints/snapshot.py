"""What a store keeps: the snapshot of a job, in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streamiter.deferred import Deferred

__all__ = ["CheckpointId", "Part", "SnapshotHeader", "StepState", "frames_of"]


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """A checkpoint of a flow: its number, which grows from run to run, and the run that took it."""

    number: int
    run: str

    def __str__(self) -> str:
        return f"{self.number} of run {self.run}"


@dataclass(frozen=True, slots=True)
class StepState:
    """A step as the snapshot knows it."""

    parallelism: int
    operator: str
    """The class of its operators, for people."""
    is_source: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What there is to know of a snapshot before its parts are read."""

    flow: str
    id: CheckpointId
    created_at_ms: int
    """Milliseconds since 1970-01-01 UTC."""
    steps: Mapping[str, StepState]
    """The steps that keep state, by name."""
    job_ended: bool = False
    """Whether it is the last of a job whose inputs have all ended."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """For people: versions of streamiter, Python and numpy; the commit domain."""


@dataclass(frozen=True, slots=True)
class Part:
    """One named piece of a snapshot: the state of one subtask of one step."""

    name: str
    content: bytes
    """Plain data, encoded; it refers to what is deferred by number."""
    deferred: Sequence[Deferred] = ()


def frames_of(part: Part) -> Iterator[Iterator[bytes]]:
    """The frames of each deferred piece of a part, in order."""
    return (deferred.frames() for deferred in part.deferred)
