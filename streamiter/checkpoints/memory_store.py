"""The store of checkpoints in memory, for simulations and tests.

:class:`MemoryStore` obeys the same rules as the store in a directory; its snapshots are lost with the process.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader, SnapshotPart, frames_of
from streamiter.checkpoints.store import CheckpointStore, CommitPointer, FlowRecord, StoredSnapshot
from streamiter.errors import CheckpointError, InternalError


@dataclass(slots=True)
class _StoredPart:
    content: bytes
    deferred: list[list[bytes]]


@dataclass(slots=True)
class _StoredFlow:
    record: FlowRecord
    snapshots: dict[CheckpointId, _MemorySnapshot] = field(default_factory=dict)


class MemoryStore(CheckpointStore):
    """Keeps snapshots in dicts, across jobs and event loops.

    A job that stands for another process uses :meth:`another`, which shares the snapshots.

    >>> async def run_twice() -> CommitPointer | None:
    ...     store = MemoryStore()
    ...     await store.claim("clicks", "a")
    ...     header = SnapshotHeader("clicks", CheckpointId(1, "a"), created_at_ms=0, steps={})
    ...     await store.save(header, [])
    ...     await store.commit("clicks", header.id)
    ...     return await store.another().claim("clicks", "b")
    >>> asyncio.run(run_twice()).committed
    CheckpointId(number=1, run='a')
    """

    def __init__(self) -> None:
        self._flows: dict[str, _StoredFlow] = {}
        self._runs: dict[str, str] = {}

    def another(self) -> MemoryStore:
        """Return a store of the same snapshots for another job; only the job that claimed a flow last may continue."""
        store = MemoryStore()
        store._flows = self._flows
        return store

    async def claim(self, flow: str, run: str, *, begin_anew: bool = False) -> CommitPointer | None:
        if not run:
            raise InternalError(f"flow {flow!r}: a run without an id")
        known = self._flows.get(flow)
        before = known.record if known else FlowRecord(flow)
        after = before.claimed_by(run, begin_anew=begin_anew)
        if known is None:
            self._flows[flow] = _StoredFlow(after)
        else:
            known.record = after
        self._runs[flow] = run
        return before.pointer

    async def pointer(self, flow: str) -> CommitPointer | None:
        known = self._flows.get(flow)
        return known.record.pointer if known else None

    async def save(self, header: SnapshotHeader, parts: Iterable[SnapshotPart]) -> int:
        self._claimed_by(header.flow)
        known = self._flows[header.flow]
        self._check_may_save(known, header.id)
        stored = {}
        for part in parts:
            if part.name in stored:
                raise InternalError(f"checkpoint {header.id}: two parts are called {part.name!r}")
            stored[part.name] = _StoredPart(part.content, await _frames_in_memory(part))
        self._check_may_save(known, header.id)
        snapshot = known.snapshots[header.id] = _MemorySnapshot(header, stored)
        return snapshot.size_bytes

    async def commit(self, flow: str, checkpoint: CheckpointId) -> None:
        run = self._claimed_by(flow)
        known = self._flows[flow]
        known.record.check_owner(run, f"commit checkpoint {checkpoint.number}")
        if checkpoint not in known.snapshots:
            raise CheckpointError(
                f"flow {flow!r}: expected checkpoint {checkpoint} in the store to commit it, given none; it was not "
                "saved"
            )
        known.record = known.record.with_commit(checkpoint)

    async def prune(self, flow: str, *, keep: int) -> builtins.list[CheckpointId]:
        run = self._claimed_by(flow)
        known = self._flows[flow]
        known.record.check_owner(run, "remove checkpoints")
        removed = known.record.removable(known.snapshots, keep=keep, newer=True)
        for checkpoint in removed:
            del known.snapshots[checkpoint]
        return removed

    async def list(self, flow: str | None = None) -> Sequence[SnapshotHeader]:
        flows = sorted(self._flows) if flow is None else [flow]
        return [
            known.snapshots[checkpoint].header
            for known in (self._flows[each] for each in flows if each in self._flows)
            for checkpoint in sorted(known.snapshots)
        ]

    async def open(self, flow: str, checkpoint: CheckpointId) -> StoredSnapshot:
        there = self._flows[flow].snapshots if flow in self._flows else {}
        if checkpoint not in there:
            given = ", ".join(map(str, sorted(there))) or "none"
            raise CheckpointError(
                f"flow {flow!r}: expected checkpoint {checkpoint} in the store, given {given}; choose one of these"
            )
        return there[checkpoint]

    async def close(self) -> None:
        self._runs.clear()

    def _claimed_by(self, flow: str) -> str:
        try:
            return self._runs[flow]
        except KeyError:
            raise InternalError(f"flow {flow!r}: it was not claimed before something was stored") from None

    @staticmethod
    def _check_may_save(known: _StoredFlow, checkpoint: CheckpointId) -> None:
        known.record.check_owner(checkpoint.run, f"save checkpoint {checkpoint.number}")
        if checkpoint in known.snapshots:
            raise InternalError(f"flow {known.record.flow!r}: checkpoint {checkpoint} is saved a second time")


async def _frames_in_memory(part: SnapshotPart) -> list[list[bytes]]:
    deferred: list[list[bytes]] = []
    for frames in frames_of(part):
        taken: list[bytes] = []
        for frame in frames:
            taken.append(frame)
            await asyncio.sleep(0)
        deferred.append(taken)
    return deferred


class _MemorySnapshot(StoredSnapshot):
    def __init__(self, header: SnapshotHeader, parts: dict[str, _StoredPart]) -> None:
        self.header = header
        self._parts = parts

    @property
    def size_bytes(self) -> int:
        return sum(
            len(part.content) + sum(len(frame) for frames in part.deferred for frame in frames)
            for part in self._parts.values()
        )

    def part_names(self) -> Sequence[str]:
        return list(self._parts)

    async def content(self, part: str) -> bytes:
        return self._part(part).content

    def frames(self, part: str, deferred: int) -> Iterator[bytes]:
        pieces = self._part(part).deferred
        if not 0 <= deferred < len(pieces):
            raise CheckpointError(
                f"checkpoint {self.header.id}: expected deferred piece {deferred} of part {part!r}, given "
                f"{len(pieces)} of them; it was written by another version of the program"
            )
        return iter(pieces[deferred])

    async def verify(self) -> None:
        """Do nothing: memory is not damaged."""

    async def close(self) -> None:
        """Do nothing: no file is open."""

    def _part(self, name: str) -> _StoredPart:
        try:
            return self._parts[name]
        except KeyError:
            raise InternalError(f"checkpoint {self.header.id}: it has no part {name!r}") from None
