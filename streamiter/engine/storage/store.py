"""The store of checkpoints, and the settings of a job's checkpoints.

A *run* is one start of a flow. It *claims* the flow in the store, which shuts out older runs; then it *saves* snapshots
and *commits* them. The next run starts from the last committed snapshot.

:class:`CheckpointStore` has these calls for jobs, and
:class:`~streamiter.engine.storage.flow_checkpoints.FlowCheckpoints` does the work. Both work on blobs of any kind: in
memory, in a folder, or in an object store.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Final

from streamiter.engine.storage.blobs import Blobs, MemoryBlobs, run_call
from streamiter.engine.storage.flow_checkpoints import FlowCheckpoints, flows_in
from streamiter.engine.storage.flow_record import CommitPointer, FlowRecord, snapshot_name
from streamiter.engine.storage.folder_blobs import FolderBlobs
from streamiter.engine.storage.snapshot import CheckpointId, PartsFile, SnapshotHeader, SnapshotPart
from streamiter.engine.storage.snapshot_file import WRITE_BYTES, SnapshotWriter, StoredSnapshot
from streamiter.errors import CheckpointError, ConfigurationError, InternalError
from streamiter.topics.urls import shown_url
from streamiter.values.deferred import DeferredFiles
from streamiter.values.helpers.importing import need_package
from streamiter.values.numbers import positive, whole_number
from streamiter.values.times import in_seconds

OtherFiles = Callable[[], Awaitable[Sequence[PartsFile]]]
"""Returns the files of the other processes that take the snapshot, when they are written."""


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

    async def save(
        self, header: SnapshotHeader, parts: Iterable[SnapshotPart], others: OtherFiles | None = None
    ) -> int:
        """Store a snapshot durably, as a whole or not at all; return the bytes that were stored for it.

        The frames of deferred pieces are made in the event loop, one at a time, with other work in between. If the call
        fails or is cancelled, the store has no such snapshot. The caller releases the deferred pieces. ``others`` is
        awaited when the parts are written: the other processes write theirs at the same time.
        """
        own = await self._save(header, parts, others)
        return sum(file.bytes + file.new_bytes for file in (own, *(() if others is None else await others())))

    async def follow(self, flow: str, run: str, process: int) -> None:
        """Let this process store parts for ``run``, which has claimed the flow in process 0.

        Raises ``ConfigurationError`` if the claim cannot be seen here, because this process has another folder.
        """
        await run_call(self._blobs, self._of(flow).check_claim, run, process)
        self._runs[flow] = run

    async def save_parts(self, header: SnapshotHeader, parts: Iterable[SnapshotPart], process: int) -> PartsFile:
        """Store the parts of one process durably. They belong to a snapshot when the manifest of process 0 has them."""
        return await self._save(header, parts, None, process)

    async def _save(
        self, header: SnapshotHeader, parts: Iterable[SnapshotPart], others: OtherFiles | None, process: int = 0
    ) -> PartsFile:
        self._run_of(header.flow)
        flow, writer = self._of(header.flow), SnapshotWriter(snapshot_name(header.id, process))
        try:
            await run_call(self._blobs, flow.begin, header.id, writer)
            await self._write(flow, writer, parts, header.id, process)
            found = () if others is None else await others()
            size_bytes = await run_call(self._blobs, flow.publish, header, writer, found)
            return PartsFile(process, size_bytes, writer.manifest_crc32, writer.new_bytes)
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

    async def _write(
        self,
        flow: FlowCheckpoints,
        writer: SnapshotWriter,
        parts: Iterable[SnapshotPart],
        checkpoint: CheckpointId,
        process: int,
    ) -> None:
        """Write the parts: frames are made one at a time, with other work between, and written a megabyte at a time."""
        for part in parts:
            writer.add_part(part.name, part.content)
            for deferred in part.deferred:
                writer.begin_deferred(has_files=isinstance(deferred, DeferredFiles))
                if isinstance(deferred, DeferredFiles):
                    # In one call: the event loop may be slow to notice the end of each.
                    await run_call(self._blobs, flow.share, checkpoint, process, writer, deferred)
                else:
                    for frame in deferred.frames():
                        writer.add_frame(frame)
                        await self._write_if_enough(flow, writer)
            await self._write_if_enough(flow, writer)

    async def _write_if_enough(self, flow: FlowCheckpoints, writer: SnapshotWriter) -> None:
        if writer.pending_bytes >= WRITE_BYTES:
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
    :class:`~streamiter.engine.storage.store.CheckpointStore`. Other flows may use it, too. None for a job
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
            object.__setattr__(self, name, positive(f"Checkpoints: {name}", in_seconds(getattr(self, name))))
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
    need_package(f"checkpoints in {shown_url(url)!r}", "obstore", "object-store")
    from streamiter.engine.storage.object_blobs import ObjectBlobs, ObjectStoreUrl

    return ObjectBlobs(ObjectStoreUrl.of(url))


# A single letter is a drive of Windows.
_URL: Final = re.compile(r"[A-Za-z][\w+.-]+:/|(s3|gs|az):")


def is_url(place: object) -> bool:
    """Whether a place of checkpoints is a URL, perhaps a misspelt one such as ``s3:bucket``, and not a folder."""
    text = os.fspath(place) if isinstance(place, (str, os.PathLike)) else ""
    return isinstance(text, str) and _URL.match(text) is not None
