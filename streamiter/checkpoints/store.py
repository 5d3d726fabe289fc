"""The store of checkpoints, and the settings of a job's checkpoints.

A *run* is one start of a flow. It *claims* the flow in the store, which shuts out older runs; then it *saves* snapshots
and *commits* them. The next run starts from the last committed snapshot.

:class:`CheckpointStore` has these calls for jobs. :class:`FlowCheckpoints` does the work for one flow, with calls that
block. Both work on blobs of any kind: in memory, in a folder, or in an object store.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Final

from streamiter.checkpoints.blobs import BlobChanged, BlobReader, Blobs, MemoryBlobs, run_call
from streamiter.checkpoints.flow_record import (
    RECORD_FORMAT,
    STORAGE_NAME_CHARACTERS,
    CommitPointer,
    FlowRecord,
    checkpoint_of,
    file_of,
    is_shortened,
    name_of,
    pack_record,
    shortened_name,
    snapshot_name,
    storage_name,
    unpack_record,
)
from streamiter.checkpoints.folder_blobs import FolderBlobs
from streamiter.checkpoints.snapshot import (
    BATCH_BYTES,
    FORMAT,
    FORMAT_WITH_OTHERS,
    CheckpointId,
    Damage,
    OtherFormat,
    PartsFile,
    SnapshotHeader,
    SnapshotPart,
    SnapshotWriter,
    StoredSnapshot,
)
from streamiter.errors import CheckpointError, ConfigurationError, InternalError, StreamiterError
from streamiter.numbers import positive, whole_number
from streamiter.topics.urls import shown_url


class CheckpointStore:
    """Keeps the snapshots of flows by the name of the flow. One object serves one job or one tool.

    A snapshot is one file (docs/checkpoint-format.md), or one for each process that takes it; then the file of process
    0 is written last, and names the others. A file is written as a whole and then gets its name: so after ``kill -9``
    or a power failure a snapshot exists as a whole or not at all.

    Errors: ``CheckpointError`` for a snapshot that is missing, damaged, or of another version; ``StorageFull`` for a
    full disk; ``StoreUnavailable`` if an object store does not answer; ``ProducerFenced`` if a newer run has claimed
    the flow; ``ConfigurationError`` for a place that this process may not write to; ``InternalError`` for saving,
    committing or pruning without a claim.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._runs: dict[str, str] = {}
        self._in_use: dict[str, IO[bytes]] = {}

    async def claim(self, flow: str, run: str, *, forget_committed: bool = False) -> CommitPointer | None:
        """Make ``run`` the owner of the flow; from now on, ``save`` and ``commit`` of older runs are refused.

        Returns the pointer before the claim; None if the store has never had the flow, or has its snapshots but not
        which of them is committed. ``forget_committed`` clears the committed checkpoint. Later calls of ``commit`` and
        ``prune`` act for the run of the last claim; a snapshot of an earlier run may be committed too.
        """
        claims: list[tuple[FlowRecord | None, IO[bytes] | None]] = []
        claim = self._of(flow).claim
        try:
            await run_call(self._blobs, lambda: claims.append(claim(run, forget_committed=forget_committed)))
        finally:  # a claim is kept even if the caller is cancelled while the thread runs
            for _, in_use in claims:
                self._end_run(flow)
                if in_use is not None:
                    self._in_use[flow] = in_use
                self._runs[flow] = run
        [(before, _)] = claims
        return before.pointer if before else None

    async def pointer(self, flow: str) -> CommitPointer | None:
        """Return the last commit of a flow, without claiming the flow."""
        record = await run_call(self._blobs, self._of(flow).record)
        return record.pointer if record else None

    async def save(self, header: SnapshotHeader, parts: Iterable[SnapshotPart]) -> int:
        """Store a snapshot durably, as a whole or not at all; return its size in bytes.

        The frames of deferred pieces are made in the event loop, one at a time, with other work in between. If the call
        fails or is cancelled, the store has no such snapshot. The caller releases the deferred pieces.
        """
        return (await self._save(header, parts, SnapshotWriter(snapshot_name(header.id)))).bytes

    async def save_manifest(
        self,
        header: SnapshotHeader,
        parts: Iterable[SnapshotPart],
        others: Callable[[], Awaitable[Sequence[PartsFile]]],
    ) -> int:
        """Store a snapshot as ``save`` does, with the files of other processes; return the size of all files.

        ``others`` is awaited when the own parts are written: the other processes write theirs at the same time.
        """
        own = await self._save(header, parts, SnapshotWriter(snapshot_name(header.id), FORMAT_WITH_OTHERS), others)
        return own.bytes + sum(other.bytes for other in await others())

    async def follow(self, flow: str, run: str, process: int) -> None:
        """Let this process store parts for ``run``, which has claimed the flow in process 0.

        Raises ``ConfigurationError`` if the claim cannot be seen here, because this process has another folder.
        """
        await run_call(self._blobs, self._of(flow).check_claim, run, process)
        self._runs[flow] = run

    async def save_parts(self, header: SnapshotHeader, parts: Iterable[SnapshotPart], process: int) -> PartsFile:
        """Store the parts of one process durably. They belong to a snapshot when the manifest of process 0 has them."""
        return await self._save(header, parts, SnapshotWriter(snapshot_name(header.id, process), FORMAT), None, process)

    async def _save(
        self,
        header: SnapshotHeader,
        parts: Iterable[SnapshotPart],
        writer: SnapshotWriter,
        others: Callable[[], Awaitable[Sequence[PartsFile]]] | None = None,
        process: int = 0,
    ) -> PartsFile:
        self._run_of(header.flow)
        flow = self._of(header.flow)
        try:
            await run_call(self._blobs, flow.begin, header.id, writer)
            await self._write(flow, writer, parts)
            found = () if others is None else await others()
            size_bytes = await run_call(self._blobs, flow.publish, header, writer, found)
            return PartsFile(process, size_bytes, writer.manifest_crc32)
        except BaseException:
            await run_call(self._blobs, flow.abandon, writer)
            raise

    async def commit(self, flow: str, checkpoint: CheckpointId) -> None:
        """Make a saved checkpoint durably the committed one, which the next run starts from."""
        await run_call(self._blobs, self._of(flow).commit, self._run_of(flow), checkpoint)

    async def prune(self, flow: str, *, keep: int) -> list[CheckpointId]:
        """Remove all but the committed snapshot and the ``keep`` - 1 newest before it; return the removed ones.

        Orphans are removed too: snapshots that are newer than the committed one, and incomplete files.
        """
        run = self._run_of(flow)
        return await run_call(self._blobs, self._of(flow).prune, keep=keep, newer=True, run=run)

    async def list(self, flow: str | None = None) -> Sequence[SnapshotHeader]:
        """Return the snapshots of one flow or of all flows, oldest first, without unreadable ones."""
        return await run_call(self._blobs, self._headers, flow)

    async def open(self, flow: str, checkpoint: CheckpointId) -> StoredSnapshot:
        """Open a snapshot for reading."""
        return await run_call(self._blobs, self._of(flow).open, checkpoint)

    async def close(self) -> None:
        """Close all files. May be called more than once."""
        for flow in [*self._in_use]:
            self._end_run(flow)
        self._runs.clear()

    def _of(self, flow: str) -> FlowCheckpoints:
        return FlowCheckpoints(self._blobs, flow)

    def _run_of(self, flow: str) -> str:
        if flow not in self._runs:
            raise InternalError(f"flow {flow!r}: it was not claimed before something was stored")
        return self._runs[flow]

    def _end_run(self, flow: str) -> None:
        handle = self._in_use.pop(flow, None)
        if handle is not None:
            handle.close()

    def _headers(self, flow: str | None) -> builtins.list[SnapshotHeader]:
        headers: list[SnapshotHeader] = []
        for each in flows_in(self._blobs) if flow is None else [self._of(flow)]:
            for checkpoint in each.snapshots():
                with contextlib.suppress(CheckpointError):  # open() and verify() raise what is wrong with it
                    headers.append(each.header(checkpoint))
        return headers

    async def _write(self, flow: FlowCheckpoints, writer: SnapshotWriter, parts: Iterable[SnapshotPart]) -> None:
        """Write the parts: frames are made one at a time, with other work between, and written a megabyte at a time."""
        for part in parts:
            writer.add_part(part.name, part.content)
            for deferred in part.deferred:
                writer.begin_deferred()
                for frame in deferred.frames():
                    writer.add_frame(frame)
                    await self._write_if_enough(flow, writer)
            await self._write_if_enough(flow, writer)

    async def _write_if_enough(self, flow: FlowCheckpoints, writer: SnapshotWriter) -> None:
        if writer.pending_bytes >= BATCH_BYTES:
            await run_call(self._blobs, flow.write, writer)
        await asyncio.sleep(0)


class MemoryStore(CheckpointStore):
    """Keeps snapshots in memory, across jobs and event loops, for simulations and tests.

    Its snapshots are lost with the process. A job that stands for another process uses :meth:`another`, which shares
    the snapshots.

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
        super().__init__(MemoryBlobs())

    def another(self) -> MemoryStore:
        """Return a store of the same snapshots for another job; only the job that claimed a flow last may continue."""
        store = MemoryStore()
        store._blobs = self._blobs
        return store


RECORD_NAME: Final = "record.json"

# Each failed try means that another run has changed the record; runs start seconds apart.
_TRIES: Final = 100


class FlowCheckpoints:
    """The checkpoints of one flow in a store: ``record.json``, and a blob for each snapshot.

    Every call blocks, except on blobs in memory. :meth:`claim` creates the folder of the flow.

    The record is replaced only in the version that was read, so no claim or commit is lost, whichever runs make them at
    the same time. What is not in the record is checked against it afterward: a snapshot is published, and removed again
    if another run has claimed the flow; snapshots to be pruned are listed before the record is read, so that none of
    a newer run is among them.
    """

    def __init__(self, blobs: Blobs, flow: str) -> None:
        self.flow = flow
        self._blobs = blobs
        self._folder = shortened_name(flow)
        self._record_name = f"{self._folder}/{RECORD_NAME}"
        self._what = f"flow {flow!r}"

    # ---- runs and commits

    def claim(self, run: str, *, forget_committed: bool) -> tuple[FlowRecord | None, IO[bytes] | None]:
        """Make ``run`` the owner; return the record before it, and a handle which shows that the run is alive."""
        if not run or len(storage_name(run)) > STORAGE_NAME_CHARACTERS:
            raise ConfigurationError(
                f"{self._what}: expected the id of a run of 1 to {STORAGE_NAME_CHARACTERS} letters or digits, given "
                f"{run!r:.100}; it is part of the names of files"
            )
        with self._explained():
            self._blobs.make(self._folder)
        with self._alone():
            before = self._change(
                lambda record: (record or FlowRecord(self.flow)).claimed_by(run, forget_committed=forget_committed),
                lambda: self._before_claim(forget_committed=forget_committed),
            )
            self._blobs.check_versions(self._record_name)
            return before, self._blobs.enter(self._folder)

    def check_claim(self, run: str, process: int) -> None:
        """Raise ``ConfigurationError`` unless ``run`` has claimed the flow here; ``process`` is the one that looks."""
        record = self.record()
        if record is None or run not in [each.run for each in record.runs]:
            raise ConfigurationError(
                f"{self._what}: expected one store of checkpoints for all processes, given {self._place}, in which "
                f"process {process} does not find the claim of process 0 (run {run}); use a folder that all machines "
                "share, or an object store"
            )

    def record(self) -> FlowRecord | None:
        """Return the runs of the flow and its last commit; None if there are none. Raises ``CheckpointError`` for
        damage.
        """
        with self._explained():
            return self._versioned_record()[0]

    def commit(self, run: str, checkpoint: CheckpointId) -> None:
        """Make a saved checkpoint the committed one, which the next run starts from."""

        def committed(record: FlowRecord | None) -> FlowRecord:
            wanted = f"commit checkpoint {checkpoint.number}"
            owned = self._owned(record, run, wanted)
            if self.size_of(checkpoint) is None:
                self._owned(self._versioned_record()[0], run, wanted)  # A newer run may just have removed it.
                raise CheckpointError(
                    f"{self._what}: expected checkpoint {checkpoint} in {self._place} to commit it, given none; it was "
                    "not saved, or something else has removed it: let nothing else write there"
                )
            return owned.with_commit(checkpoint)

        with self._alone():
            self._change(committed, self._versioned_record)

    # ---- snapshots

    def place_of(self, checkpoint: CheckpointId) -> str:
        """Return the path or the URL of a snapshot, whether it exists or not."""
        return self._blobs.place_of(self._name_of(checkpoint))

    def size_of(self, checkpoint: CheckpointId) -> int | None:
        """Return the size of a snapshot's own file in bytes; None if it does not exist."""
        with self._explained():
            return self._blobs.size(self._name_of(checkpoint))

    def snapshots(self) -> list[CheckpointId]:
        """Return the snapshots by the names of their blobs, oldest first."""
        with self._explained():
            return _snapshots_in(self._blobs.names(self._folder))

    def open(self, checkpoint: CheckpointId) -> StoredSnapshot:
        """Open a snapshot. Raises ``CheckpointError`` if it is missing, damaged, or not what its name says."""
        return self._opened(checkpoint, self._blobs.open)

    def header(self, checkpoint: CheckpointId) -> SnapshotHeader:
        """Return the header of a snapshot; raises as :meth:`open` does, but not for files of other processes."""
        snapshot = self._opened(checkpoint, self._blobs.peek, with_others=False)
        snapshot.close()
        return snapshot.header

    def peek(self, checkpoint: CheckpointId) -> StoredSnapshot:
        """Open a snapshot of which only the header and the sizes of its parts are read."""
        return self._opened(checkpoint, self._blobs.peek)

    def begin(self, checkpoint: CheckpointId, writer: SnapshotWriter) -> None:
        """Begin a snapshot. Raises ``ProducerFenced`` if another run owns the flow, before anything is written."""
        with self._alone():
            self._check_may_save(checkpoint)
            name = f"{self._folder}/{writer.name}"
            if self._blobs.size(name) is not None:
                raise InternalError(f"{self._what}: checkpoint {checkpoint} is saved a second time, in {self._place}")
            writer.begin(self._blobs.create(name))

    def write(self, writer: SnapshotWriter) -> None:
        """Write the frames that the writer has collected."""
        with self._explained():
            writer.write()

    def publish(self, header: SnapshotHeader, writer: SnapshotWriter, others: Sequence[PartsFile] = ()) -> int:
        """Write the rest of the snapshot and give it its name; return the size of the file in bytes."""
        with self._explained():
            size_bytes = writer.finish(header, others)
            self._blobs.complete(writer.file)
        with self._alone():
            self._check_may_save(header.id)
            self._blobs.publish(writer.file, f"{self._folder}/{writer.name}")
            writer.is_published = True
            self._check_may_save(header.id)
            writer.file.close()
        return size_bytes

    def abandon(self, writer: SnapshotWriter) -> None:
        """Remove a snapshot whose writing has ended early."""
        if writer.has_begun:
            with contextlib.suppress(StreamiterError), self._explained():
                name = f"{self._folder}/{writer.name}"
                self._blobs.abandon(writer.file, name, is_published=writer.is_published)

    # ---- upkeep

    def prune(self, *, keep: int, newer: bool, run: str | None = None) -> list[CheckpointId]:
        """Remove the snapshots that ``FlowRecord.removable`` returns, and files of dead writers; return the snapshots.

        ``run`` must own the flow. Without ``run``, for a tool, ``newer`` is refused while a run is alive. With
        ``newer``, no snapshot is being written: so parts of other processes without one are removed, too.
        """
        with self._explained():
            names = self._blobs.names(self._folder)
        found = _snapshots_in(names)
        with self._alone():
            if run is None and newer and (given := self._blobs.living_run(self._folder)):
                raise ConfigurationError(
                    f"{self._what}: expected no run while checkpoints newer than the committed one are removed, given "
                    f"{given}"
                )
            record, _ = self._versioned_record()
            if run is not None:
                record = self._owned(record, run, "remove checkpoints")
            removed = record.removable(found, keep=keep, newer=newer) if record else []
            for checkpoint in removed:
                self._blobs.delete(self._name_of(checkpoint))
            for name, (checkpoint, process) in ((name, file) for name in names if (file := file_of(name)) is not None):
                if process and (checkpoint in removed or (newer and checkpoint not in found)):
                    self._blobs.delete(f"{self._folder}/{name}")
            self._blobs.remove_remains(self._folder, lambda name: file_of(name) is not None)
        return removed

    # ---- inside

    @property
    def _place(self) -> str:
        return self._blobs.place_of(self._folder)

    def _name_of(self, checkpoint: CheckpointId) -> str:
        return f"{self._folder}/{snapshot_name(checkpoint)}"

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return self._blobs.explained(self._what)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._explained(), self._blobs.alone(self._folder):
            yield

    def _change(
        self,
        change: Callable[[FlowRecord | None], FlowRecord],
        read: Callable[[], tuple[FlowRecord | None, str | None]],
    ) -> FlowRecord | None:
        """Replace the record by the result of ``change``; return the record before.

        If another run has replaced it meanwhile, it is read and changed again.
        """
        before, version = read()
        for _ in range(_TRIES):
            after = change(before)
            try:
                self._blobs.replace(self._record_name, pack_record(after), version)
            except BlobChanged:
                now, version = read()
                if now == after:  # This change was made; a store that did not answer was asked again.
                    return before
                before = now
            else:
                return before
        raise CheckpointError(
            f"{self._what}: expected to replace {self._blobs.place_of(self._record_name)}, given {_TRIES} changes of "
            "it by other runs meanwhile; start fewer runs at the same time"
        )

    def _versioned_record(self) -> tuple[FlowRecord | None, str | None]:
        blob = self._blobs.read(self._record_name)
        if blob is None:
            return None, None
        place = self._blobs.place_of(self._record_name)
        try:
            return unpack_record(blob.content, flow=self.flow), blob.version
        except Damage as damage:
            raise CheckpointError(
                f"{place}: expected the runs and the last commit of flow {self.flow!r}, given a damaged file: "
                f"{damage}; put it back from a backup, or remove it and start from a checkpoint that you choose "
                "(restore=<number>), or without one (restore=None)"
            ) from damage
        except OtherFormat as other:
            raise CheckpointError(
                f"{place}: written by another streamiter (format {other.given}), expected format {RECORD_FORMAT}; "
                "use that version, or another store"
            ) from other

    def _before_claim(self, *, forget_committed: bool) -> tuple[FlowRecord | None, str | None]:
        try:
            record, version = self._versioned_record()
        except CheckpointError:
            blob = self._blobs.read(self._record_name)
            if not forget_committed or blob is None:
                raise
            return None, blob.version
        if record is None and self.snapshots():
            return FlowRecord(self.flow, is_lost=True), None
        return record, version

    def _owned(self, record: FlowRecord | None, run: str, wanted: str) -> FlowRecord:
        if record is None:
            raise CheckpointError(
                f"{self._what}: expected {self._blobs.place_of(self._record_name)} to {wanted}, given none; something "
                "else has removed it: let nothing else write there, and start the flow again"
            )
        record.check_owner(run, wanted)
        return record

    def _check_may_save(self, checkpoint: CheckpointId) -> None:
        record, _ = self._versioned_record()
        self._owned(record, checkpoint.run, f"save checkpoint {checkpoint.number}")

    def _opened(
        self, checkpoint: CheckpointId, opener: Callable[[str], BlobReader], *, with_others: bool = True
    ) -> StoredSnapshot:
        with self._explained():
            if self.size_of(checkpoint) is None:
                there = ", ".join(map(str, self.snapshots()))
                raise CheckpointError(
                    f"{self._what}: expected checkpoint {checkpoint} in {self._place}, given {there or 'none'}; "
                    f"{'choose one of these, or ' if there else ''}give the store that the last run had"
                )
            snapshot = StoredSnapshot(opener(self._name_of(checkpoint)), self._blobs.place)
        try:
            snapshot.check_identity(self.flow, checkpoint)
            for other in snapshot.others if with_others else ():
                snapshot.add(other, self._opened_parts(checkpoint, other.process, opener))
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def _opened_parts(
        self, checkpoint: CheckpointId, process: int, opener: Callable[[str], BlobReader]
    ) -> StoredSnapshot:
        name = f"{self._folder}/{snapshot_name(checkpoint, process)}"
        with self._explained():
            if self._blobs.size(name) is None:
                raise CheckpointError(
                    f"{self._blobs.place_of(name)}: expected the parts of checkpoint {checkpoint} that process "
                    f"{process} wrote, given no such file; put it back from a backup, or start from another checkpoint"
                )
            return StoredSnapshot(opener(name), self._blobs.place)


def _snapshots_in(names: Iterable[str]) -> list[CheckpointId]:
    return sorted(checkpoint for name in names if (checkpoint := checkpoint_of(name)) is not None)


def flows_in(blobs: Blobs) -> list[FlowCheckpoints]:
    """Return the checkpoints of all flows, in the order of their names; other folders are left out."""
    with blobs.explained("checkpoints"):
        flows = [flow for folder in blobs.folders() if (flow := _flow_of(blobs, folder)) is not None]
    return [FlowCheckpoints(blobs, flow) for flow in sorted(flows)]


def _flow_of(blobs: Blobs, folder: str) -> str | None:
    names = blobs.names(folder)
    if not any(name == RECORD_NAME or checkpoint_of(name) for name in names):
        return None
    if not is_shortened(folder):
        return name_of(folder)
    # The name was too long for a folder, so it is read from the blobs in the folder.
    named = (_flow_named_in(blobs, f"{folder}/{name}") for name in names)
    return next((flow for flow in named if flow is not None and shortened_name(flow) == folder), None)


def _flow_named_in(blobs: Blobs, name: str) -> str | None:
    """Return the flow that a blob names; None for another blob, or a damaged one."""
    with contextlib.suppress(Damage, OtherFormat, CheckpointError):
        _, _, file_name = name.rpartition("/")
        if file_name == RECORD_NAME and (blob := blobs.read(name)):
            return unpack_record(blob.content).flow
        if checkpoint_of(file_name):
            snapshot = StoredSnapshot(blobs.peek(name), blobs.place)
            snapshot.close()
            return snapshot.header.flow
    return None


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

    store: str | os.PathLike[str] | CheckpointStore | None = None
    """A folder, which is created if it is missing; the URL of an object store, such as ``s3://bucket/prefix``; or a
    :class:`~streamiter.checkpoints.store.CheckpointStore`. Other flows may use it, too. None for a job
    without state."""
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
        if not isinstance(self.store, (str, os.PathLike, CheckpointStore, type(None))) or self.store == "":
            raise ConfigurationError(
                f"Checkpoints: expected a folder, a URL or a CheckpointStore, given {self.store!r}; "
                'write Checkpoints("/var/lib/…")'
            )
        if is_url(self.store):
            object_store(str(self.store))
        for name in ("interval_s", "alignment_timeout_s", "transaction_timeout_s"):
            positive(f"Checkpoints: {name}", getattr(self, name))
        whole_number("Checkpoints: keep", self.keep, 1)

    @property
    def has_store(self) -> bool:
        """Whether state is stored; otherwise the job commits positions only."""
        return self.store is not None

    def check_transactions(self, flow: str) -> None:
        """Raise ConfigurationError if a transaction would be aborted before its checkpoint."""
        if self.interval_s + self.alignment_timeout_s >= self.transaction_timeout_s:
            raise ConfigurationError(
                f"flow {flow!r}, Checkpoints: expected interval_s + alignment_timeout_s below transaction_timeout_s, "
                f"given {self.interval_s:g} + {self.alignment_timeout_s:g} and {self.transaction_timeout_s:g}; its "
                "outputs would be aborted before they are committed: raise transaction_timeout_s, or lower the others"
            )


def store_at(given: str | os.PathLike[str] | CheckpointStore) -> CheckpointStore:
    """Return the store in a folder or at a URL; a store is returned itself."""
    return given if isinstance(given, CheckpointStore) else CheckpointStore(blobs_at(given))


def blobs_at(place: str | os.PathLike[str]) -> Blobs:
    """Return the blobs in a folder or at a URL."""
    return object_store(str(place)) if is_url(place) else FolderBlobs(place)


def object_store(url: str) -> Blobs:
    """Return the blobs at a URL; this connects to no server. Raises ``ConfigurationError``, also without obstore."""
    try:
        from streamiter.checkpoints.object_blobs import ObjectBlobs, ObjectStoreUrl
    except ImportError as error:
        raise ConfigurationError(
            f"checkpoints in {shown_url(url)!r}: expected the package obstore, given none ({error.name}); "
            "install it with: pip install 'streamiter[object-store]'"
        ) from None
    return ObjectBlobs(ObjectStoreUrl.of(url))


# A single letter is a drive of Windows.
_URL: Final = re.compile(r"[A-Za-z][\w+.-]+:/|(s3|gs|az):")


def is_url(place: object) -> bool:
    """Whether a place of checkpoints is a URL, perhaps a misspelt one such as ``s3:bucket``, and not a folder."""
    text = os.fspath(place) if isinstance(place, (str, os.PathLike)) else ""
    return isinstance(text, str) and _URL.match(text) is not None
