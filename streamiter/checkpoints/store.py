"""The store: where the snapshots of flows are kept, behind a small protocol."""

from __future__ import annotations

import abc
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader, SnapshotPart
from streamiter.errors import ConfigurationError, ProducerFenced
from streamiter.numbers import positive, whole_number

__all__ = [
    "CheckpointStore",
    "Checkpoints",
    "CommitPointer",
    "FlowRecord",
    "RunRecord",
    "StoredSnapshot",
]


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
    async def save(self, header: SnapshotHeader, parts: Iterable[SnapshotPart]) -> int:
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


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints are kept, and how often one is taken.

    ``directory`` is a folder, made if it is missing, that other flows may use as well; or another
    :class:`~streamiter.checkpoints.store.CheckpointStore`. Every ``interval_s`` seconds a checkpoint is taken,
    and one more when the job ends or is suspended; the last ``keep`` stay. Records in transactional outputs
    become visible with the checkpoint after them, so the interval is their delay.

    One whose barrier has not passed all steps within ``alignment_timeout_s`` seconds is given up, with a warning; the
    next one is tried after the interval. A transaction that is open for longer than ``transaction_timeout_s`` seconds
    is aborted by its server; it must be longer than the interval and the alignment together.

    >>> Checkpoints("/var/lib/clicks", interval_s=30).keep
    3

    What a job is told about its checkpoints.
    """

    directory: str | os.PathLike[str] | CheckpointStore
    interval_s: float = 10.0
    keep: int = 3
    alignment_timeout_s: float = 60.0
    transaction_timeout_s: float = 300.0
    """Five minutes: Kafka's brokers refuse more than fifteen unless told otherwise."""

    def __post_init__(self) -> None:
        # An empty one is a variable that is not set, rarely the folder one happens to be in.
        if not isinstance(self.directory, (str, os.PathLike, CheckpointStore)) or self.directory == "":
            raise ConfigurationError(
                f"Checkpoints: expected a folder or a CheckpointStore, given {self.directory!r}; "
                'write Checkpoints("/var/lib/…")'
            )
        for name in ("interval_s", "alignment_timeout_s", "transaction_timeout_s"):
            positive(f"Checkpoints: {name}", getattr(self, name))
        whole_number("Checkpoints: keep", self.keep, 1)

    def check_transactions(self, flow: str) -> None:
        """Raise ConfigurationError where a transaction would be aborted before its checkpoint."""
        if self.interval_s + self.alignment_timeout_s >= self.transaction_timeout_s:
            raise ConfigurationError(
                f"flow {flow!r}, Checkpoints: expected interval_s + alignment_timeout_s below transaction_timeout_s, "
                f"given {self.interval_s:g} + {self.alignment_timeout_s:g} and {self.transaction_timeout_s:g}; its "
                "outputs would be taken back before they are committed: raise transaction_timeout_s, or lower the rest"
            )


# A run that was superseded a hundred runs ago and still lives would not be told from a new one; and snapshots of
# such a run are no longer kept. The record stays below 10 kB.
_RUNS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that has claimed the flow."""

    run: str
    committed: int | None = None
    """The highest number that was committed of those it took."""


@dataclass(frozen=True, slots=True)
class FlowRecord:
    """The runs of a flow in the order of their claims, and what was committed last.

    What a store knows of a flow: its runs, what is committed, and so what may be removed. Without any I/O.

    >>> record = FlowRecord("clicks").claimed_by("a").with_commit(CheckpointId(7, "a")).claimed_by("b")
    >>> record.pointer
    CommitPointer(run='b', committed=CheckpointId(number=7, run='a'), committed_by_run={'a': 7})
    >>> record = record.with_commit(CheckpointId(9, "b"))
    >>> ids = [CheckpointId(6, "a"), CheckpointId(7, "a"), CheckpointId(8, "a"), CheckpointId(9, "b")]
    >>> record.removable(ids, keep=2, newer=True)  # 8 of run a was never committed: run b went on from 7
    [CheckpointId(number=6, run='a'), CheckpointId(number=8, run='a')]
    """

    flow: str
    runs: tuple[RunRecord, ...] = ()
    committed: CheckpointId | None = None
    is_lost: bool = False
    """Whether there were snapshots but no record of what is committed: nobody knows until something is."""

    @property
    def run(self) -> str | None:
        """The run that owns the flow."""
        return self.runs[-1].run if self.runs else None

    @property
    def pointer(self) -> CommitPointer | None:
        """The same for the job; None where it is not known what is committed."""
        if self.run is None or self.is_lost:
            return None
        committed = {each.run: each.committed for each in self.runs if each.committed is not None}
        return CommitPointer(self.run, self.committed, committed)

    def claimed_by(self, run: str, *, begin_anew: bool = False) -> FlowRecord:
        """The record with ``run`` as the owner. ``ProducerFenced`` where a newer one has claimed the flow."""
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
        """Raise ``ProducerFenced`` where the flow is another run's."""
        if run != self.run:
            raise ProducerFenced(
                f"flow {self.flow!r}: run {run} cannot {wanted}: run {self.run} has claimed the flow since; only one "
                f"run of a flow may go on, so run {run} must end"
            )

    def with_commit(self, checkpoint: CheckpointId) -> FlowRecord:
        """The record with this as what to go on from."""
        runs = [
            replace(each, committed=max(checkpoint.number, each.committed or 0))
            if each.run == checkpoint.run
            else each
            for each in self.runs
        ]
        if checkpoint.run not in [each.run for each in runs]:
            runs.insert(0, RunRecord(checkpoint.run, checkpoint.number))
        return replace(self, runs=tuple(runs), committed=checkpoint, is_lost=False)

    def removable(self, ids: Collection[CheckpointId], *, keep: int, newer: bool) -> list[CheckpointId]:
        """Which of these snapshots nobody needs, in order; ``newer``: also what is newer than the committed one.

        Nothing where what is committed is not known, or not among them: then it is not certain what is needed.
        """
        committed = self.committed
        if committed is None or committed not in ids:
            return []
        before = sorted(each for each in ids if each.number < committed.number and self._led_to_commit(each))
        kept = {committed, *before[max(0, len(before) - (keep - 1)) :]}
        return sorted(each for each in ids if each not in kept and (newer or each.number <= committed.number))

    def _led_to_commit(self, checkpoint: CheckpointId) -> bool:
        """Whether its run went on from it to something committed; if not, a later run has begun before it."""
        return any(
            each.run == checkpoint.run and each.committed is not None and checkpoint.number <= each.committed
            for each in self.runs
        )
