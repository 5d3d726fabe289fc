"""The folder that a directory store has for one flow: its files, and the lock that they are changed under.

Everything here blocks, and belongs into a thread. Whatever is killed at any point leaves nothing that counts
half done: snapshots and the record get their names when they are whole and on the disk.

========================  ======================================================
``record.json``           who owns the flow, and what is committed
``lock``                  locked while any name in the folder is changed
``in-use``                locked (shared) by runs that are going on
``N-RUN.checkpoint``      a snapshot
``….partial``             a file that is being written; a snapshot is locked then
========================  ======================================================
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from streamiter.checkpoints.file_locks import alone, is_free, shared, sync_folder
from streamiter.checkpoints.flow_record import FlowRecord
from streamiter.checkpoints.record_file import RECORD_FORMAT, pack_record, unpack_record
from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader
from streamiter.checkpoints.snapshot_file import SnapshotFile
from streamiter.checkpoints.snapshot_format import Damage, OtherFormat
from streamiter.checkpoints.snapshot_writer import SnapshotWriter
from streamiter.checkpoints.storage_errors import errors_of_reading, errors_of_writing
from streamiter.checkpoints.storage_names import (
    STORAGE_NAME_CHARACTERS,
    checkpoint_of,
    shortened_name,
    snapshot_name,
    storage_name,
)
from streamiter.errors import CheckpointError, ConfigurationError, InternalError

__all__ = ["RECORD_NAME", "FlowFolder"]

RECORD_NAME: Final = "record.json"
_LOCK: Final = "lock"
_IN_USE: Final = "in-use"
_PARTIAL: Final = ".partial"


class FlowFolder:
    """The folder of ``flow`` in the directory ``root``; nothing is made before something is to be written."""

    def __init__(self, root: Path, flow: str) -> None:
        self.root = root
        self.flow = flow
        self.path = root / shortened_name(flow)
        self._what = f"flow {flow!r}"

    # ---- runs and commits

    def claim(self, run: str, *, begin_anew: bool) -> tuple[FlowRecord | None, IO[bytes]]:
        """Make ``run`` the owner; gives the record as it was before, and what shows, until closed, that it goes on."""
        if not run or len(storage_name(run)) > STORAGE_NAME_CHARACTERS:
            raise ConfigurationError(
                f"{self._what}: expected the id of a run of 1 to {STORAGE_NAME_CHARACTERS} letters or digits, given "
                f"{run!r:.100}; it is part of the names of files"
            )
        with errors_of_writing(self._what, self.root):
            self._make()
        with self._alone():
            before = self._record_to_go_on_from(begin_anew=begin_anew)
            after = (before or FlowRecord(self.flow)).claimed_by(run, begin_anew=begin_anew)
            self._write_record(after)
            return before, shared(self.path / _IN_USE)

    def record(self) -> FlowRecord | None:
        """What is known of the flow. Raises ``CheckpointError`` where that is damaged."""
        path = self.path / RECORD_NAME
        with errors_of_reading(path):
            if not path.exists():
                return None
            data = path.read_bytes()
        try:
            return unpack_record(data, flow=self.flow)
        except Damage as damage:
            raise CheckpointError(
                f"{path}: expected what is known of flow {self.flow!r}, given a damaged file: {damage}; put it back "
                "from a backup, or remove it and go on from a checkpoint that you choose (restore=<number>), or begin "
                "anew (restore=None)"
            ) from damage
        except OtherFormat as other:
            raise CheckpointError(
                f"{path}: written by another streamiter (format {other.given}), expected format {RECORD_FORMAT}; "
                "use that version, or another directory"
            ) from other

    def commit(self, run: str, checkpoint: CheckpointId) -> None:
        """Note that this is what to go on from."""
        with self._alone():
            record = self._owned(run, f"commit checkpoint {checkpoint.number}")
            if not self.path_of(checkpoint).exists():
                raise CheckpointError(
                    f"{self._what}: expected checkpoint {checkpoint} in {self.path} to commit it, given none; it was "
                    "not saved, or something else has removed it: let nothing else write there"
                )
            self._write_record(record.with_commit(checkpoint))

    # ---- snapshots

    def path_of(self, checkpoint: CheckpointId) -> Path:
        """Where a snapshot is, or would be."""
        return self.path / snapshot_name(checkpoint)

    def snapshots(self) -> list[CheckpointId]:
        """The snapshots that are there, as their names tell, oldest first."""
        found = map(checkpoint_of, self._names())
        return sorted(checkpoint for checkpoint in found if checkpoint is not None)

    def open(self, checkpoint: CheckpointId) -> SnapshotFile:
        """Open one for reading."""
        path = self.path_of(checkpoint)
        if not path.exists():
            there = ", ".join(map(str, self.snapshots()))
            raise CheckpointError(
                f"{self._what}: expected checkpoint {checkpoint} in {self.path}, given {there or 'none'}; "
                f"{'choose one of these, or ' if there else ''}give the directory that the last run had"
            )
        snapshot = SnapshotFile(path)
        try:
            snapshot.check_identity(self.flow, checkpoint)
        except BaseException:
            snapshot.close_now()
            raise
        return snapshot

    def header(self, checkpoint: CheckpointId) -> SnapshotHeader:
        """What one begins with; raises as :meth:`open` does."""
        snapshot = self.open(checkpoint)
        snapshot.close_now()
        return snapshot.header

    def writer(self, checkpoint: CheckpointId) -> SnapshotWriter:
        """What writes a new one, not opened yet."""
        return SnapshotWriter(self.path / f"{snapshot_name(checkpoint)}{_PARTIAL}")

    def begin(self, checkpoint: CheckpointId, writer: SnapshotWriter) -> None:
        """Open the writer. Raises ``ProducerFenced`` before anything is written in vain."""
        with self._alone():
            self._check_may_save(checkpoint)
            writer.open()

    def write(self, writer: SnapshotWriter) -> None:
        """Write what the writer has collected."""
        with errors_of_writing(self._what, self.root):
            writer.write()

    def publish(self, header: SnapshotHeader, writer: SnapshotWriter) -> int:
        """Write the end, and give the file its name; gives its size in bytes."""
        with errors_of_writing(self._what, self.root):
            size_bytes = writer.finish(header)
        with self._alone():
            self._check_may_save(header.id)
            writer.rename(self.path_of(header.id))
            sync_folder(self.path)
        return size_bytes

    # ---- upkeep

    def prune(self, *, keep: int, newer: bool, run: str | None = None) -> list[CheckpointId]:
        """Remove what ``FlowRecord.removable`` gives, and what dead writers left. Gives the snapshots among it.

        ``run`` must own the flow. Without a ``run``, for a tool, ``newer`` is refused while one goes on.
        """
        if not self.path.is_dir():
            return []
        with self._alone():
            if run is None and newer and not is_free(self.path / _IN_USE):
                raise ConfigurationError(
                    f"{self._what}: expected no run while checkpoints newer than the committed one are removed, given "
                    "one that is going on and may be about to commit them; stop it first"
                )
            record = self.record() if run is None else self._owned(run, "remove checkpoints")
            removed = record.removable(self.snapshots(), keep=keep, newer=newer) if record else []
            for checkpoint in removed:
                self.path_of(checkpoint).unlink(missing_ok=True)
            self._remove_dead_partials()
            sync_folder(self.path)
        return removed

    # ---- inside

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with errors_of_writing(self._what, self.root), alone(self.path / _LOCK):
            yield

    def _record_to_go_on_from(self, *, begin_anew: bool) -> FlowRecord | None:
        try:
            record = self.record()
        except CheckpointError:
            if not begin_anew:
                raise
            return None
        if record is None and self.snapshots():
            return FlowRecord(self.flow, is_lost=True)
        return record

    def _owned(self, run: str, wanted: str) -> FlowRecord:
        record = self.record()
        if record is None:
            raise CheckpointError(
                f"{self._what}: expected {self.path / RECORD_NAME} to {wanted}, given none; something else has removed "
                "it: let nothing else write there, and start the flow again"
            )
        record.check_owner(run, wanted)
        return record

    def _check_may_save(self, checkpoint: CheckpointId) -> None:
        self._owned(checkpoint.run, f"save checkpoint {checkpoint.number}")
        if self.path_of(checkpoint).exists():
            raise InternalError(
                f"{self._what}: checkpoint {checkpoint} is saved a second time, in {self.path}"
            )

    def _make(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync_folder(folder.parent)

    def _write_record(self, record: FlowRecord) -> None:
        path = self.path / RECORD_NAME
        partial = path.with_name(f"{path.name}{_PARTIAL}")
        try:
            with open(partial, "wb") as file:
                file.write(pack_record(record))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_folder(self.path)

    def _remove_dead_partials(self) -> None:
        for name in self._names():
            path = self.path / name
            if name.endswith(_PARTIAL) and checkpoint_of(name.removesuffix(_PARTIAL)) and is_free(path):
                path.unlink(missing_ok=True)

    def _names(self) -> list[str]:
        with errors_of_reading(self.path):
            return sorted(os.listdir(self.path)) if self.path.is_dir() else []
