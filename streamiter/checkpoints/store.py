"""The store: where the snapshots of flows are kept, behind a small protocol."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from streamiter.checkpoints.snapshot import CheckpointId, Part, SnapshotHeader

__all__ = ["CheckpointStore", "CommitPointer", "StoredSnapshot"]


@dataclass(frozen=True, slots=True)
class CommitPointer:
    """What a store knows of the runs of a flow: who owns it now, and what was committed last."""

    run: str
    """The run that claimed the flow last."""
    committed: CheckpointId | None
    """The last checkpoint that was committed; None if a run has begun and none was yet."""
    committed_by_run: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The highest number that each run has committed, as far back as is known; what it took before led to that."""

    def has_led_to_commit(self, checkpoint: CheckpointId) -> bool:
        """Whether it was committed, or one that its run took after it."""
        return checkpoint.number <= self.committed_by_run.get(checkpoint.run, -1)


class StoredSnapshot(abc.ABC):
    """One snapshot in a store, open for reading; every byte that is read is checked against its checksum."""

    header: SnapshotHeader

    @abc.abstractmethod
    def part_names(self) -> Sequence[str]:
        """The names of its parts."""

    @abc.abstractmethod
    async def content(self, part: str) -> bytes:
        """The content of a part."""

    @abc.abstractmethod
    def frames(self, part: str, deferred: int) -> Iterable[bytes]:
        """The frames of the ``deferred``-th deferred piece of a part, in order; read as one goes on."""

    @abc.abstractmethod
    async def verify(self) -> None:
        """Read all of it. Raises CheckpointError where anything is damaged or missing."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of it. May be called more than once."""


class CheckpointStore(abc.ABC):
    """Keeps the snapshots of flows, each under the flow's name. One object serves one job or one tool.

    Errors: ``CheckpointError`` for what is missing, damaged, or of another version; ``StorageFull`` for a
    full disk; ``ProducerFenced`` where a newer run has claimed the flow.
    """

    @abc.abstractmethod
    async def claim(self, flow: str, run: str, *, begin_anew: bool = False) -> CommitPointer | None:
        """Make ``run`` the owner of the flow, so that ``save`` and ``commit`` of older runs are refused from now on.

        Gives what the pointer was before; None if the flow was never here, or has snapshots and nobody knows which
        of them is committed (until one is). ``begin_anew`` clears what was committed. ``commit`` and ``prune``
        are those of the run that this object claimed the flow for; what an earlier run saved may be committed too.
        """

    @abc.abstractmethod
    async def pointer(self, flow: str) -> CommitPointer | None:
        """What is committed, without claiming it."""

    @abc.abstractmethod
    async def save(self, header: SnapshotHeader, parts: Iterable[Part]) -> int:
        """Store a snapshot durably, as a whole or not at all; gives its size in bytes.

        Takes the frames of what is deferred in the event loop, one at a time, with other work in between.
        When cancelled or failing it leaves nothing that counts. Releases nothing: the caller does.
        """

    @abc.abstractmethod
    async def commit(self, flow: str, checkpoint: CheckpointId) -> None:
        """Note durably that this checkpoint is the one to go on from. It must have been saved."""

    @abc.abstractmethod
    async def prune(self, flow: str, *, keep: int) -> list[CheckpointId]:
        """Remove all but the committed snapshot and the ``keep`` - 1 newest before it; gives what was removed.

        So also orphans: snapshots newer than the committed one, and files half written.
        """

    @abc.abstractmethod
    async def list(self, flow: str | None = None) -> Sequence[SnapshotHeader]:
        """The snapshots that are there, of one flow or of all, oldest first; unreadable ones are left out."""

    @abc.abstractmethod
    async def open(self, flow: str, checkpoint: CheckpointId) -> StoredSnapshot:
        """Open a snapshot for reading."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of files. May be called more than once."""
