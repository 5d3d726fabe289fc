"""The store of checkpoints: its protocol, the settings of a job's checkpoints, and the store in memory.

A *run* is one start of a flow. It *claims* the flow in the store, which shuts out older runs; then it *saves* snapshots
and *commits* them. The next run starts from the last committed snapshot. :class:`FlowRecord` has these rules as a pure
data structure, which all stores share.
"""

from __future__ import annotations

import abc
import asyncio
import builtins
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from streamiter.checkpoints.snapshot import (
    CheckpointId,
    SnapshotHeader,
    SnapshotPart,
    StoredSnapshot,
    part_of,
    piece_of,
)
from streamiter.errors import CheckpointError, ConfigurationError, InternalError, ProducerFenced
from streamiter.numbers import positive, whole_number


@dataclass(frozen=True, slots=True)
class CommitPointer:
    """The last run of a flow, and its last commit."""

    run: str
    """The run that claimed the flow last."""
    committed: CheckpointId | None
    """The last committed checkpoint; None if no run has committed one since the flow began without state."""
    committed_by_run: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The highest number that each run has committed, as far back as is known; its earlier checkpoints led to it."""

    def has_led_to_commit(self, checkpoint: CheckpointId) -> bool:
        """Return whether the checkpoint was committed, or a later one of the same run."""
        return checkpoint.number <= self.committed_by_run.get(checkpoint.run, -1)


class CheckpointStore(abc.ABC):
    """Keeps the snapshots of flows by the name of the flow. One object serves one job or one tool.

    Errors: ``CheckpointError`` for a snapshot that is missing, damaged, or of another version; ``StorageFull`` for a
    full disk; ``ProducerFenced`` if a newer run has claimed the flow.
    """

    @abc.abstractmethod
    async def claim(self, flow: str, run: str, *, begin_anew: bool = False) -> CommitPointer | None:
        """Make ``run`` the owner of the flow; from now on, ``save`` and ``commit`` of older runs are refused.

        Returns the pointer before the claim; None if the store has never had the flow, or has its snapshots but not
        which of them is committed. ``begin_anew`` clears the committed checkpoint. Later calls of ``commit`` and
        ``prune`` act for the run of the last claim; a snapshot of an earlier run may be committed too.
        """

    @abc.abstractmethod
    async def pointer(self, flow: str) -> CommitPointer | None:
        """Return the last commit of a flow, without claiming the flow."""

    @abc.abstractmethod
    async def save(self, header: SnapshotHeader, parts: Iterable[SnapshotPart]) -> int:
        """Store a snapshot durably, as a whole or not at all; return its size in bytes.

        The frames of deferred pieces are made in the event loop, one at a time, with other work in between. If the call
        fails or is cancelled, the store has no such snapshot. The caller releases the deferred pieces.
        """

    @abc.abstractmethod
    async def commit(self, flow: str, checkpoint: CheckpointId) -> None:
        """Make a saved checkpoint durably the committed one, which the next run starts from."""

    @abc.abstractmethod
    async def prune(self, flow: str, *, keep: int) -> list[CheckpointId]:
        """Remove all but the committed snapshot and the ``keep`` - 1 newest before it; return the removed ones.

        Orphans are removed too: snapshots that are newer than the committed one, and incomplete files.
        """

    @abc.abstractmethod
    async def list(self, flow: str | None = None) -> Sequence[SnapshotHeader]:
        """Return the snapshots of one flow or of all flows, oldest first, without unreadable ones."""

    @abc.abstractmethod
    async def open(self, flow: str, checkpoint: CheckpointId) -> StoredSnapshot:
        """Open a snapshot for reading."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all files. May be called more than once."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The settings of a job's checkpoints: their store, and how often one is taken.

    A job without state, whose sources all have ``start="committed"``, needs no store: its checkpoints are the positions
    that it commits.

    A checkpoint is taken every ``interval_s`` seconds, and when the job ends or is suspended. Records in transactional
    outputs become visible with the next checkpoint, so the interval is their delay.

    >>> Checkpoints("/var/lib/clicks", interval_s=30).keep
    3
    """

    directory: str | os.PathLike[str] | CheckpointStore | None = None
    """A folder, which is created if it is missing and which other flows may use too; or another
    :class:`~streamiter.checkpoints.store.CheckpointStore`; None for a job without state."""
    interval_s: float = 10.0
    """Seconds from the start of a checkpoint to the start of the next one."""
    keep: int = 3
    """The number of checkpoints that are kept."""
    alignment_timeout_s: float = 60.0
    """Seconds until a checkpoint is given up, with a warning, if its barrier has not passed all steps; the next one is
    tried after the interval."""
    transaction_timeout_s: float = 300.0
    """Seconds until the server aborts an open transaction; must be more than the interval and the alignment together.
    The default is five minutes: Kafka's brokers by default refuse more than fifteen."""

    def __post_init__(self) -> None:
        # An empty text is mostly a variable that is not set, rarely the current folder.
        if not isinstance(self.directory, (str, os.PathLike, CheckpointStore, type(None))) or self.directory == "":
            raise ConfigurationError(
                f"Checkpoints: expected a folder or a CheckpointStore, given {self.directory!r}; "
                'write Checkpoints("/var/lib/…")'
            )
        for name in ("interval_s", "alignment_timeout_s", "transaction_timeout_s"):
            positive(f"Checkpoints: {name}", getattr(self, name))
        whole_number("Checkpoints: keep", self.keep, 1)

    @property
    def has_store(self) -> bool:
        """Whether state is stored; otherwise the job commits positions only."""
        return self.directory is not None

    def check_transactions(self, flow: str) -> None:
        """Raise ConfigurationError if a transaction would be aborted before its checkpoint."""
        if self.interval_s + self.alignment_timeout_s >= self.transaction_timeout_s:
            raise ConfigurationError(
                f"flow {flow!r}, Checkpoints: expected interval_s + alignment_timeout_s below transaction_timeout_s, "
                f"given {self.interval_s:g} + {self.alignment_timeout_s:g} and {self.transaction_timeout_s:g}; its "
                "outputs would be aborted before they are committed: raise transaction_timeout_s, or lower the others"
            )


# With this limit the record stays below 10 kB. A run that was replaced a hundred runs ago and is still alive could not
# be told from a new one; but snapshots of such a run are no longer kept.
_RUNS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that has claimed the flow."""

    run: str
    """The id of the run."""
    committed: int | None = None
    """The highest number of its checkpoints that was committed."""


@dataclass(frozen=True, slots=True)
class FlowRecord:
    """The runs of a flow, its last commit, and so which snapshots may be removed. It does no I/O.

    >>> record = FlowRecord("clicks").claimed_by("a").with_commit(CheckpointId(7, "a")).claimed_by("b")
    >>> record.pointer
    CommitPointer(run='b', committed=CheckpointId(number=7, run='a'), committed_by_run={'a': 7})
    >>> record = record.with_commit(CheckpointId(9, "b"))
    >>> ids = [CheckpointId(6, "a"), CheckpointId(7, "a"), CheckpointId(8, "a"), CheckpointId(9, "b")]
    >>> record.removable(ids, keep=2, newer=True)  # 8 of run a was never committed: run b started from 7
    [CheckpointId(number=6, run='a'), CheckpointId(number=8, run='a')]
    """

    flow: str
    """The name of the flow."""
    runs: tuple[RunRecord, ...] = ()
    """The runs in the order of their claims; the last one owns the flow."""
    committed: CheckpointId | None = None
    """The last committed checkpoint."""
    is_lost: bool = False
    """Whether snapshots were found without a record: which of them is committed is unknown until the next commit."""

    @property
    def run(self) -> str | None:
        """The run that owns the flow."""
        return self.runs[-1].run if self.runs else None

    @property
    def pointer(self) -> CommitPointer | None:
        """The last run and the last commit, for a job; None if it is unknown what is committed."""
        if self.run is None or self.is_lost:
            return None
        return CommitPointer(self.run, self.committed, self._committed_by_run)

    @property
    def _committed_by_run(self) -> dict[str, int]:
        return {each.run: each.committed for each in self.runs if each.committed is not None}

    def claimed_by(self, run: str, *, begin_anew: bool = False) -> FlowRecord:
        """Return the record with ``run`` as the owner. Raises ``ProducerFenced`` if a newer run has claimed the
        flow.
        """
        record = self
        if any(earlier.run == run for earlier in self.runs[:-1]):
            record.check_owner(run, "claim the flow again")
        if run != self.run:
            record = replace(record, runs=(*record.runs, RunRecord(run))[-_RUNS_MAX:])
        if begin_anew:
            runs = tuple(RunRecord(earlier.run) for earlier in record.runs)
            record = replace(record, runs=runs, committed=None, is_lost=False)
        return record

    def check_owner(self, run: str, wanted: str) -> None:
        """Raise ``ProducerFenced`` if another run owns the flow; ``wanted`` is what this run was about to do."""
        if run != self.run:
            raise ProducerFenced(
                f"flow {self.flow!r}: run {run} cannot {wanted}: run {self.run} has claimed the flow since; only one "
                f"run of a flow may continue, so run {run} must end"
            )

    def with_commit(self, checkpoint: CheckpointId) -> FlowRecord:
        """Return the record with this checkpoint as the last commit."""
        runs = [
            replace(each, committed=max(checkpoint.number, each.committed or 0)) if each.run == checkpoint.run else each
            for each in self.runs
        ]
        if checkpoint.run not in [each.run for each in runs]:
            runs.insert(0, RunRecord(checkpoint.run, checkpoint.number))
        return replace(self, runs=tuple(runs), committed=checkpoint, is_lost=False)

    def removable(self, ids: Collection[CheckpointId], *, keep: int, newer: bool) -> list[CheckpointId]:
        """Return the snapshots that are not needed, in order; ``newer``: also those newer than the committed one.

        If the committed checkpoint is unknown, or not among ``ids``, none is removable.
        """
        committed = self.committed
        if committed is None or committed not in ids:
            return []
        # A checkpoint whose run committed neither it nor a later one led to no commit: a later run started before it.
        led = self._committed_by_run
        before = sorted(each for each in ids if each.number < committed.number and each.number <= led.get(each.run, -1))
        kept = {committed, *before[max(0, len(before) - (keep - 1)) :]}
        return sorted(each for each in ids if each not in kept and (newer or each.number <= committed.number))


class ClaimedRuns(dict[str, str]):
    """The run of each flow that a store has claimed."""

    def of(self, flow: str) -> str:
        """Return the run; raise ``InternalError`` if the flow is not claimed."""
        if flow not in self:
            raise InternalError(f"flow {flow!r}: it was not claimed before something was stored")
        return self[flow]


@dataclass(slots=True)
class _StoredPart:
    content: bytes
    deferred: list[list[bytes]]


@dataclass(slots=True)
class _StoredFlow:
    record: FlowRecord
    snapshots: dict[CheckpointId, _MemorySnapshot] = field(default_factory=dict)


class MemoryStore(CheckpointStore):
    """Keeps snapshots in dicts, across jobs and event loops, for simulations and tests.

    It obeys the same rules as the store in a directory; its snapshots are lost with the process. A job that stands for
    another process uses :meth:`another`, which shares the snapshots.

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
        self._runs = ClaimedRuns()

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
        self._runs.of(header.flow)
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
        run = self._runs.of(flow)
        known = self._flows[flow]
        known.record.check_owner(run, f"commit checkpoint {checkpoint.number}")
        if checkpoint not in known.snapshots:
            raise CheckpointError(
                f"flow {flow!r}: expected checkpoint {checkpoint} in the store to commit it, given none; it was not "
                "saved"
            )
        known.record = known.record.with_commit(checkpoint)

    async def prune(self, flow: str, *, keep: int) -> builtins.list[CheckpointId]:
        run = self._runs.of(flow)
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

    @staticmethod
    def _check_may_save(known: _StoredFlow, checkpoint: CheckpointId) -> None:
        known.record.check_owner(checkpoint.run, f"save checkpoint {checkpoint.number}")
        if checkpoint in known.snapshots:
            raise InternalError(f"flow {known.record.flow!r}: checkpoint {checkpoint} is saved a second time")


async def _frames_in_memory(part: SnapshotPart) -> list[list[bytes]]:
    deferred: list[list[bytes]] = []
    for piece in part.deferred:
        taken: list[bytes] = []
        for frame in piece.frames():
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
        return iter(piece_of(self._part(part).deferred, deferred, part, f"checkpoint {self.header.id}"))

    async def verify(self) -> None:
        """Do nothing: memory is not damaged."""

    async def close(self) -> None:
        """Do nothing: no file is open."""

    def _part(self, name: str) -> _StoredPart:
        return part_of(self._parts, name, f"checkpoint {self.header.id}")
