"""The store of checkpoints in a directory, on a local disk or on one that all machines share.

:class:`DirectoryStore` has a folder for each flow. :class:`FlowFolder` does the work in it, with calls that block; the
store runs them in a thread. Behind it are the file ``record.json``, which has the runs of a flow and its last commit,
and the conversion of the names of flows and runs to names of files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from streamiter.checkpoints.snapshot import (
    BATCH_BYTES,
    CheckpointId,
    Damage,
    OtherFormat,
    SnapshotFile,
    SnapshotHeader,
    SnapshotPart,
    SnapshotWriter,
    StoredSnapshot,
    errors_of_reading,
)
from streamiter.checkpoints.store import CheckpointStore, ClaimedRuns, CommitPointer, FlowRecord
from streamiter.errors import CheckpointError, ConfigurationError, InternalError, StorageFull
from streamiter.files import FULL_DISK, alone, in_thread, is_free, shared, sync_folder


class DirectoryStore(CheckpointStore):
    """Keeps the snapshots of flows in a directory, which is created when a flow is claimed: a folder for each flow.

    A snapshot is one file (docs/checkpoint-format.md). It is written under another name, synced, and renamed: so after
    ``kill -9`` or a power failure it exists as a whole or not at all. Flows may share the directory. Processes exclude
    each other with ``flock``; a directory on a network must support it.

    Besides the errors of :class:`CheckpointStore`, it raises ``ConfigurationError`` for a directory that this process
    may not write to, and ``InternalError`` for saving, committing or pruning without a claim.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = Path(directory)
        self._runs = ClaimedRuns()
        self._in_use: dict[str, IO[bytes]] = {}

    async def claim(self, flow: str, run: str, *, begin_anew: bool = False) -> CommitPointer | None:
        folder = FlowFolder(self._root, flow)
        claims: list[tuple[FlowRecord | None, IO[bytes]]] = []
        try:
            await in_thread(lambda: claims.append(folder.claim(run, begin_anew=begin_anew)))
        finally:  # a claim is kept even if the caller is cancelled while the thread runs
            for _, in_use in claims:
                self._end_run(flow)
                self._in_use[flow] = in_use
                self._runs[flow] = run
        [(before, _)] = claims
        return before.pointer if before else None

    async def pointer(self, flow: str) -> CommitPointer | None:
        record = await in_thread(FlowFolder(self._root, flow).record)
        return record.pointer if record else None

    async def save(self, header: SnapshotHeader, parts: Iterable[SnapshotPart]) -> int:
        self._runs.of(header.flow)
        folder = FlowFolder(self._root, header.flow)
        writer = folder.writer(header.id)
        try:
            await in_thread(folder.begin, header.id, writer)
            await _write(folder, writer, parts)
            size_bytes = await in_thread(folder.publish, header, writer)
        except BaseException:
            await in_thread(writer.abandon)
            raise
        writer.close()
        return size_bytes

    async def commit(self, flow: str, checkpoint: CheckpointId) -> None:
        await in_thread(FlowFolder(self._root, flow).commit, self._runs.of(flow), checkpoint)

    async def prune(self, flow: str, *, keep: int) -> list[CheckpointId]:
        run = self._runs.of(flow)
        return await in_thread(FlowFolder(self._root, flow).prune, keep=keep, newer=True, run=run)

    async def list(self, flow: str | None = None) -> Sequence[SnapshotHeader]:
        return await in_thread(self._headers, flow)

    async def open(self, flow: str, checkpoint: CheckpointId) -> StoredSnapshot:
        return await in_thread(FlowFolder(self._root, flow).open, checkpoint)

    async def close(self) -> None:
        for flow in [*self._in_use]:
            self._end_run(flow)
        self._runs.clear()

    def _end_run(self, flow: str) -> None:
        handle = self._in_use.pop(flow, None)
        if handle is not None:
            handle.close()

    def _headers(self, flow: str | None) -> Sequence[SnapshotHeader]:
        folders = flows_in(self._root) if flow is None else [FlowFolder(self._root, flow)]
        headers: list[SnapshotHeader] = []
        for folder in folders:
            for checkpoint in folder.snapshots():
                try:
                    headers.append(folder.header(checkpoint))
                except CheckpointError:
                    continue  # open() and verify() raise what is wrong with it
        return headers


async def _write(folder: FlowFolder, writer: SnapshotWriter, parts: Iterable[SnapshotPart]) -> None:
    """Write the parts: frames are made one at a time, with other work in between, and written a megabyte at a time."""
    for part in parts:
        writer.add_part(part.name, part.content)
        for deferred in part.deferred:
            writer.begin_deferred()
            for frame in deferred.frames():
                writer.add_frame(frame)
                await _write_if_enough(folder, writer)
        await _write_if_enough(folder, writer)


async def _write_if_enough(folder: FlowFolder, writer: SnapshotWriter) -> None:
    if writer.pending_bytes >= BATCH_BYTES:
        await in_thread(folder.write, writer)
    else:
        await asyncio.sleep(0)


STORAGE_NAME_CHARACTERS: Final = 200
"""File systems allow names of 255 bytes; the number, the run and the suffix of a file must fit too."""

# Without capital letters: on some file systems "A" and "a" are the same file.
_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-.")
_ESCAPED: Final = re.compile(rb"%([0-9a-f]{2})")

# No escaped name contains these.
_SHORTENED: Final = "~"
_EMPTY: Final = "%"

_SNAPSHOT: Final = re.compile(r"(?P<number>[0-9]{10,})-(?P<run>.+)\.checkpoint")


def storage_name(name: str) -> str:
    """Return the name of a flow or a run as the name of a file or folder, which no other name shares.

    Bytes other than small letters, digits, ``_``, ``-`` and ``.`` (not first) become ``%`` and their hex digits. So no
    name leaves the folder of the store.

    >>> storage_name("clicks-2"), storage_name("../etc"), storage_name("Clicks é")
    ('clicks-2', '%2e.%2fetc', '%43licks%20%c3%a9')
    >>> name_of(storage_name("Clicks é"))
    'Clicks é'
    """
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"checkpoints: expected names of text, given {name!r}, which holds half a character; rename it"
        ) from error
    escaped = "".join(
        chr(byte) if byte in _PLAIN and (position or byte != ord(".")) else f"%{byte:02x}"
        for position, byte in enumerate(encoded)
    )
    return escaped or _EMPTY


def name_of(stored: str) -> str | None:
    """Return the name that ``storage_name`` converted; None for a text that ``storage_name`` never returns."""
    if stored == _EMPTY:
        return ""
    try:
        name = _ESCAPED.sub(lambda found: bytes((int(found[1], 16),)), stored.encode()).decode()
    except UnicodeError:
        return None
    return name if storage_name(name) == stored else None


def shortened_name(name: str) -> str:
    """Return :func:`storage_name`; if it is too long for a file, its end is replaced by the hash of the name."""
    escaped = storage_name(name)
    if len(escaped) <= STORAGE_NAME_CHARACTERS:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{escaped[: STORAGE_NAME_CHARACTERS - len(digest) - 1]}{_SHORTENED}{digest}"


def is_shortened(stored: str) -> bool:
    """Return whether the name cannot be recovered from its stored form."""
    return _SHORTENED in stored


def snapshot_name(checkpoint: CheckpointId) -> str:
    """Return the name of a snapshot's file.

    >>> snapshot_name(CheckpointId(7, "a1")), checkpoint_of("0000000007-a1.checkpoint")
    ('0000000007-a1.checkpoint', CheckpointId(number=7, run='a1'))
    """
    return f"{checkpoint.number:010d}-{storage_name(checkpoint.run)}.checkpoint"


def checkpoint_of(file_name: str) -> CheckpointId | None:
    """Return the checkpoint of a file, by its name; None if the file is no snapshot."""
    match = _SNAPSHOT.fullmatch(file_name)
    run = name_of(match["run"]) if match else None
    if match is None or not run:
        return None
    checkpoint = CheckpointId(int(match["number"]), run)
    return checkpoint if snapshot_name(checkpoint) == file_name else None


RECORD_FORMAT: Final = 1


class _File(msgspec.Struct, frozen=True):
    format: int
    crc32: int
    record: msgspec.Raw


def pack_record(record: FlowRecord) -> bytes:
    """Return the bytes of ``record.json``: one line of JSON, with the checksum of the bytes of ``record`` in it.

    >>> data = pack_record(FlowRecord("clicks").claimed_by("a1").with_commit(CheckpointId(7, "a1")))
    >>> unpack_record(data).committed
    CheckpointId(number=7, run='a1')
    """
    packed = msgspec.json.encode(record)
    return msgspec.json.encode(_File(RECORD_FORMAT, zlib.crc32(packed), msgspec.Raw(packed))) + b"\n"


def unpack_record(data: bytes, *, flow: str | None = None) -> FlowRecord:
    """Return the record, which must be of ``flow`` if one is given.

    Raises ``Damage`` for damaged bytes, and ``OtherFormat`` for a record of another version.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Damage(f"it is not what was written ({problem})") from None
    if file.format != RECORD_FORMAT:
        raise OtherFormat(file.format)
    if zlib.crc32(file.record) != file.crc32:
        raise Damage("it does not match its checksum")
    try:
        record = msgspec.json.decode(file.record, type=FlowRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Damage(f"it holds what no version of this format has ({problem})") from None
    if msgspec.json.encode(record) != bytes(file.record):
        # A field that is missing would be read as its default: "nothing committed".
        raise Damage("it holds what no version of this format has (fields are missing or unknown)")
    if flow not in (None, record.flow):
        raise Damage(f"it is that of flow {record.flow!r}")
    return record


RECORD_NAME: Final = "record.json"
_LOCK: Final = "lock"
_IN_USE: Final = "in-use"
_PARTIAL: Final = ".partial"


class FlowFolder:
    """The folder of ``flow`` in the directory ``root``: its files, and the lock that protects them.

    Every call blocks, so call it in a thread. A process that is killed at any point leaves nothing incomplete:
    snapshots and the record get their names when they are complete and stored on the disk. The folder is created
    by :meth:`claim`.

    ========================  ======================================================
    ``record.json``           the runs of the flow, and its last commit
    ``lock``                  locked while any name in the folder is changed
    ``in-use``                locked (shared) by the runs that are alive
    ``N-RUN.checkpoint``      a snapshot
    ``….partial``             a file that is being written; a snapshot is locked then
    ========================  ======================================================
    """

    def __init__(self, root: Path, flow: str) -> None:
        self.root = root
        self.flow = flow
        self.path = root / shortened_name(flow)
        self._what = f"flow {flow!r}"

    # ---- runs and commits

    def claim(self, run: str, *, begin_anew: bool) -> tuple[FlowRecord | None, IO[bytes]]:
        """Make ``run`` the owner; return the record before it, and a handle whose lock shows that the run is alive."""
        if not run or len(storage_name(run)) > STORAGE_NAME_CHARACTERS:
            raise ConfigurationError(
                f"{self._what}: expected the id of a run of 1 to {STORAGE_NAME_CHARACTERS} letters or digits, given "
                f"{run!r:.100}; it is part of the names of files"
            )
        with errors_of_writing(self._what, self.root):
            self._make()
        with self._alone():
            before = self._record_before(begin_anew=begin_anew)
            after = (before or FlowRecord(self.flow)).claimed_by(run, begin_anew=begin_anew)
            self._write_record(after)
            return before, shared(self.path / _IN_USE)

    def record(self) -> FlowRecord | None:
        """Return the runs of the flow and its last commit; None if there are none. Raises ``CheckpointError`` for
        damage.
        """
        path = self.path / RECORD_NAME
        with errors_of_reading(path):
            if not path.exists():
                return None
            data = path.read_bytes()
        try:
            return unpack_record(data, flow=self.flow)
        except Damage as damage:
            raise CheckpointError(
                f"{path}: expected the runs and the last commit of flow {self.flow!r}, given a damaged file: {damage}; "
                "put it back from a backup, or remove it and start from a checkpoint that you choose "
                "(restore=<number>), or without one (restore=None)"
            ) from damage
        except OtherFormat as other:
            raise CheckpointError(
                f"{path}: written by another streamiter (format {other.given}), expected format {RECORD_FORMAT}; "
                "use that version, or another directory"
            ) from other

    def commit(self, run: str, checkpoint: CheckpointId) -> None:
        """Make a saved checkpoint the committed one, which the next run starts from."""
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
        """Return the path of a snapshot's file, whether it exists or not."""
        return self.path / snapshot_name(checkpoint)

    def snapshots(self) -> list[CheckpointId]:
        """Return the snapshots in the folder by the names of their files, oldest first."""
        found = map(checkpoint_of, self._names())
        return sorted(checkpoint for checkpoint in found if checkpoint is not None)

    def open(self, checkpoint: CheckpointId) -> SnapshotFile:
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
        """Return the header of a snapshot; raises as :meth:`open` does."""
        snapshot = self.open(checkpoint)
        snapshot.close_now()
        return snapshot.header

    def writer(self, checkpoint: CheckpointId) -> SnapshotWriter:
        """Return the writer of a new snapshot, not yet opened."""
        return SnapshotWriter(self.path / f"{snapshot_name(checkpoint)}{_PARTIAL}")

    def begin(self, checkpoint: CheckpointId, writer: SnapshotWriter) -> None:
        """Open the writer. Raises ``ProducerFenced`` if another run owns the flow, before anything is written."""
        with self._alone():
            self._check_may_save(checkpoint)
            writer.open()

    def write(self, writer: SnapshotWriter) -> None:
        """Write the frames that the writer has collected."""
        with errors_of_writing(self._what, self.root):
            writer.write()

    def publish(self, header: SnapshotHeader, writer: SnapshotWriter) -> int:
        """Write the end of the file and give the file its name; return its size in bytes."""
        with errors_of_writing(self._what, self.root):
            size_bytes = writer.finish(header)
        with self._alone():
            self._check_may_save(header.id)
            writer.rename(self.path_of(header.id))
            sync_folder(self.path)
        return size_bytes

    # ---- upkeep

    def prune(self, *, keep: int, newer: bool, run: str | None = None) -> list[CheckpointId]:
        """Remove the snapshots that ``FlowRecord.removable`` returns, and files of dead writers; return the snapshots.

        ``run`` must own the flow. Without ``run``, for a tool, ``newer`` is refused while a run is alive.
        """
        if not self.path.is_dir():
            return []
        with self._alone():
            if run is None and newer and not is_free(self.path / _IN_USE):
                raise ConfigurationError(
                    f"{self._what}: expected no run while checkpoints newer than the committed one are removed, given "
                    "one that is alive and may be about to commit them; stop it first"
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

    def _record_before(self, *, begin_anew: bool) -> FlowRecord | None:
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
            raise InternalError(f"{self._what}: checkpoint {checkpoint} is saved a second time, in {self.path}")

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


def flows_in(root: Path) -> list[FlowFolder]:
    """Return the folders of all flows in a directory, in the order of their names; other folders are left out."""
    with errors_of_reading(root):
        folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        flows = [flow for path in folders if (flow := _flow_of(path)) is not None]
    return [FlowFolder(root, flow) for flow in sorted(flows)]


def _flow_of(path: Path) -> str | None:
    names = sorted(os.listdir(path))
    if not any(name == RECORD_NAME or checkpoint_of(name) for name in names):
        return None
    if not is_shortened(path.name):
        return name_of(path.name)
    # The name was too long for a folder, so it is read from the files in the folder.
    named = (_flow_named_in(path / name) for name in names)
    return next((flow for flow in named if flow is not None and shortened_name(flow) == path.name), None)


def _flow_named_in(path: Path) -> str | None:
    """Return the flow that a file names; None for another file, or a damaged one."""
    with contextlib.suppress(Damage, OtherFormat, CheckpointError):
        if path.name == RECORD_NAME:
            return unpack_record(path.read_bytes()).flow
        if checkpoint_of(path.name):
            snapshot = SnapshotFile(path)
            snapshot.close_now()
            return snapshot.header.flow
    return None


# A wrong folder or a wrong user: errors that do not go away with time.
_NOT_ALLOWED: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG}
)


@contextlib.contextmanager
def errors_of_writing(what: str, root: Path) -> Iterator[None]:
    """Convert errors of the system to errors that say what to do, while the store in ``root`` is written.

    ``what`` (the flow) begins the message.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in FULL_DISK:
            raise StorageFull(
                f"{what}: expected room for checkpoints in {root}, given {reason}; what was committed before is as "
                f"it was: free space on that disk, or keep fewer (`streamiter checkpoints prune {root}`)"
            ) from error
        if error.errno in _NOT_ALLOWED:
            raise ConfigurationError(
                f"{what}: expected a directory for checkpoints that this process may write to, given {root} "
                f"({error.filename or root}: {reason}); choose another, or give it to this process's user"
            ) from error
        raise CheckpointError(
            f"{what}: expected to write checkpoints to {root}, given an error of the system "
            f"({error.filename or root}: {reason}); check that disk, or choose another directory"
        ) from error
