"""The checkpoints of one flow in a store, with calls that block: runs, commits and snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Final

from streamiter.engine.storage.blobs import BlobChanged, BlobReader, Blobs
from streamiter.engine.storage.flow_record import (
    RECORD_FORMAT,
    STORAGE_NAME_CHARACTERS,
    FlowRecord,
    StoredName,
    checkpoint_of,
    is_shortened,
    name_of,
    pack_record,
    removable_shared,
    shared_of,
    shortened_name,
    snapshot_name,
    storage_name,
    unpack_record,
)
from streamiter.engine.storage.snapshot import CheckpointId, Damage, OtherFormat, PartsFile, SharedFile, SnapshotHeader
from streamiter.engine.storage.snapshot_file import SnapshotWriter, StoredSnapshot, size_and_crc32
from streamiter.errors import CheckpointError, ConfigurationError, InternalError, StreamiterError
from streamiter.values.deferred import DeferredFiles, LocalFile
from streamiter.values.helpers.closing import undone_on_failure

RECORD_NAME: Final = "record.json"

# Each failed try means that another run has changed the record; runs start seconds apart.
_TRIES: Final = 100


class FlowCheckpoints:
    """The checkpoints of one flow in a store: ``record.json``, a blob for each snapshot, and shared files.

    Every call blocks, except on blobs in memory. :meth:`claim` creates the folder of the flow.

    The record is replaced only in the version that was read, so no claim or commit is lost, whichever runs make them at
    the same time. What is not in the record is checked against it afterward: a snapshot is published, and removed again
    if another run has claimed the flow; snapshots to be pruned are listed before the record is read, so that none of
    a newer run is among them. What a snapshot shares is stored before it is published.
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
        """Open a snapshot to read only its header and the sizes of its parts."""
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

    def share(self, checkpoint: CheckpointId, process: int, writer: SnapshotWriter, piece: DeferredFiles) -> None:
        """Store the files of a deferred piece that are not stored yet, and add the piece to the writer.

        The new files belong to nothing until a snapshot is published that names them.
        """
        piece.wait()
        with self._explained():
            for file in piece.files():
                shared = piece.stored.get(file.name)
                is_new = not isinstance(shared, SharedFile)
                if not isinstance(shared, SharedFile):
                    shared = self._shared(file, str(StoredName(checkpoint, process, writer.shared_files)))
                    piece.stored[file.name] = shared
                writer.add_shared(shared, is_new=is_new)
        writer.add_frame(piece.rest())

    def _shared(self, file: LocalFile, blob: str) -> SharedFile:
        size_bytes, crc32 = size_and_crc32(file.path)
        self._blobs.adopt(file.path, f"{self._folder}/{blob}")
        return SharedFile(file.name, blob, size_bytes, crc32)

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

        Shared files that no kept snapshot names are removed, too (``removable_shared``). ``run`` must own the flow.
        Without ``run``, for a tool, ``newer`` is refused while a run is alive. With ``newer``, no snapshot is being
        written: so parts of other processes without one are removed, too.
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
            needless = self._needless_files(names, record, [each for each in found if each not in removed])
            for checkpoint in removed:
                self._blobs.delete(self._name_of(checkpoint))
            for name in needless:
                self._blobs.delete(f"{self._folder}/{name}")
            for stored in filter(None, map(StoredName.of, names)):
                is_needless = stored.checkpoint in removed or (newer and stored.checkpoint not in found)
                if stored.process and stored.shared is None and is_needless:
                    self._blobs.delete(f"{self._folder}/{stored}")
            self._blobs.remove_remains(self._folder, lambda name: StoredName.of(name) is not None)
        return removed

    def _needless_files(
        self, names: Sequence[str], record: FlowRecord | None, kept: Sequence[CheckpointId]
    ) -> Sequence[str]:
        """Return the shared files that no kept snapshot names; none if a snapshot cannot be read."""
        committed = None if record is None else record.committed
        if committed is None or committed not in kept or not any(map(shared_of, names)):
            return ()
        needed: set[str] = set()
        try:
            for checkpoint in kept:
                with contextlib.closing(self.peek(checkpoint)) as snapshot:
                    needed.update(file.blob for file in snapshot.shared())
        except CheckpointError:
            return ()
        return removable_shared(names, needed, committed)

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
            snapshot = StoredSnapshot(opener(self._name_of(checkpoint)), self._blobs.place, (self._blobs, self._folder))
        with undone_on_failure(snapshot.close):
            snapshot.check_identity(self.flow, checkpoint)
            for other in snapshot.others if with_others else ():
                snapshot.add(other, self._opened_parts(checkpoint, other.process, opener))
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
            return StoredSnapshot(opener(name), self._blobs.place, (self._blobs, self._folder))


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
