"""One database of RocksDB: rows of bytes, ordered by key, and checkpoints of them that do not stop the writer.

A *checkpoint* of RocksDB is a folder with links to the files of the database, which never change. To make one, RocksDB
first writes its memtable to a file. That takes some tenths of a second, so a thread does it, and the rows that are
written meanwhile wait in a dict: the checkpoint has the rows of the moment in which it was asked for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from heapq import merge
from itertools import takewhile
from pathlib import Path
from typing import Final

from rocksdict import AccessType, Checkpoint, DbClosedError, Rdict, ReadOptions, WriteBatch, WriteOptions

from streamiter.errors import CheckpointError, ConfigurationError, StorageFull
from streamiter.values.helpers.files import NOT_ALLOWED, RunFolder, advice_for, says_full
from streamiter.values.helpers.rocks import DatabaseMemory

# A checkpoint writes one memtable of this size at the most.
_MEMTABLE_BYTES: Final = 32 << 20

# Checkpoints of the databases of a process that are made at the same time; they wait for the disk.
_THREADS: Final = 4

# What may wait for the thread of a checkpoint: more than a second of writing as fast as Python can.
_WAITING_BYTES_MAX: Final = 64 << 20
# Of a row in a dict, besides its bytes.
_ROW_BYTES: Final = 200

SST: Final = ".sst"
"""The suffix of the files that never change and have the rows."""

# They belong to the process that has the database open.
_NOT_KEPT: Final = (".log", "LOG", "LOCK", "IDENTITY")

StoredRow = tuple[bytes, bytes]
RowChange = tuple[bytes, bytes | None]
"""The key of a row and its new value; None: the row is deleted."""


class DatabaseHome:
    """What the databases of a job share in one process: a folder, memory, threads. They are made by the first use."""

    def __init__(self, place: Path, memory_bytes: int, *, flow: str) -> None:
        """``place`` is the folder of the flow, in which each job has a folder of its own."""
        self._place = place
        self._memory_bytes = memory_bytes
        self._flow = flow
        self._folder = RunFolder(place)

    @cached_property
    def memory(self) -> DatabaseMemory:
        """The memory of all databases."""
        return DatabaseMemory(self._memory_bytes)

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """The threads that make checkpoints."""
        return ThreadPoolExecutor(_THREADS, thread_name_prefix=f"{self._flow}-state")

    @cached_property
    def folder(self) -> Path:
        """The folder of the job, which is locked until it is closed. Folders of jobs that are dead are deleted."""
        try:
            return self._folder.path
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            if error.errno not in NOT_ALLOWED:
                raise explained(OSError(reason), f"flow {self._flow!r}", self._place / "run") from error
            raise ConfigurationError(
                f"flow {self._flow!r}: expected a folder for its state that this process may write to, given "
                f"{self._place} ({reason}); choose another with RocksState(…)"
            ) from error

    def close(self) -> None:
        """Delete the folder. May be called more than once; the databases are closed before."""
        if "threads" in vars(self):
            self.threads.shutdown()
        self._folder.close()


class Database:
    """A database in a folder of its own. One thread at a time uses it, besides its checkpoints.

    Errors: ``StorageFull`` for a full disk, ``CheckpointError`` for any other error of RocksDB, for example of a
    damaged file.
    """

    def __init__(self, home: DatabaseHome, number: int, *, owner: str) -> None:
        """``owner`` begins the messages; ``number`` is the number of the database in its home."""
        self._home = home
        self._number = number
        self._owner = owner
        self._opened: Rdict | None = None
        self._options = WriteOptions()
        self._options.disable_wal = True  # type: ignore[method-assign, assignment]
        self._making: Future[None] | None = None
        """The checkpoint that a thread makes now."""
        self._waiting: dict[bytes, bytes | None] = {}
        """What was written since it was asked for."""
        self._waiting_bytes = 0
        self._checkpoints = 0

    @property
    def _folder(self) -> Path:
        return self._home.folder / str(self._number)

    @property
    def fetched_folder(self) -> Path:
        """A folder that does not exist yet, for a database that is fetched from a store."""
        return self._home.folder / f"{self._number}-fetched"

    @property
    def _rows(self) -> Rdict:
        if self._opened is None:
            folder, memory = self._folder, self._home.memory
            with self._explained():
                self._opened = Rdict(str(folder), memory.options(_MEMTABLE_BYTES, is_large=True))
                self._opened.set_write_options(self._options)
        return self._opened

    def read(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the value of each key; None where there is no row."""
        rows, waiting = self._rows, self._waiting
        with self._explained():
            values: list[bytes | None] = rows.get(keys)  # type: ignore[assignment, arg-type]
        if waiting:
            return [waiting.get(key, value) for key, value in zip(keys, values, strict=True)]
        return values

    def write(self, changes: Sequence[RowChange]) -> None:
        """Write and delete rows."""
        if self._making is not None:
            if not self._making.done() and self._waiting_bytes < _WAITING_BYTES_MAX:
                self._waiting.update(changes)
                self._waiting_bytes += sum(len(key) + len(value or b"") + _ROW_BYTES for key, value in changes)
                return
            self.settle()
        self._write(changes)

    def _write(self, changes: Sequence[RowChange]) -> None:
        batch = WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        for key, value in changes:
            if value is None:
                delete(key)
            else:
                put(key, value)
        rows = self._rows
        with self._explained():
            rows.write(batch, self._options)

    def settle(self) -> None:
        """Wait for the checkpoint that is being made, and write what has waited for it."""
        making, self._making = self._making, None
        if making is not None:
            with contextlib.suppress(Exception):  # The error is that of the checkpoint, which raises it.
                making.result()
            waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
            self._write([*waiting.items()])

    @property
    def is_making_checkpoint(self) -> bool:
        """Whether writes wait for a checkpoint."""
        return self._making is not None and not self._making.done()

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Delete the rows from ``begin`` to before ``end``."""
        self.settle()
        rows = self._rows
        with self._explained():
            rows.delete_range(begin, end)

    def rows(self, begin: bytes, end: bytes) -> Iterator[StoredRow]:
        """Give the rows from ``begin`` to before ``end``, in order, as they are now."""
        if not self.is_making_checkpoint:
            self.settle()
        rows, waiting = rows_in(self._rows, begin, end), dict(self._waiting)
        if not waiting:
            return rows
        written = sorted((key, value) for key, value in waiting.items() if begin <= key < end and value is not None)
        return merge((row for row in rows if row[0] not in waiting), written)

    def rows_behind(self, keys: Sequence[bytes]) -> list[list[StoredRow]]:
        """Return for each key, in order, the rows whose keys are longer and begin with it."""
        if not keys:
            return []
        if not self.is_making_checkpoint:
            self.settle()
        waiting, found = sorted(self._waiting), []
        rows_of = self._rows.iter(ReadOptions())
        for key in keys:
            rows: dict[bytes, bytes | None] = {}
            with self._explained():
                rows_of.seek(key + b"\x00")
                while rows_of.valid() and (row := rows_of.key()).startswith(key):
                    rows[row] = rows_of.value()
                    rows_of.next()
                rows_of.status()  # It raises the error that ends the rows as if there were no more.
            place = bisect_right(waiting, key)
            while place < len(waiting) and waiting[place].startswith(key):
                rows[waiting[place]] = self._waiting[waiting[place]]
                place += 1
            found.append(sorted((row, value) for row, value in rows.items() if value is not None))
        return found

    def keys_from_the_end(self, begin: bytes, end: bytes) -> Iterator[bytes]:
        """Give the keys of the rows from before ``end`` back to ``begin``; there is no row with the key ``end``."""
        self.settle()
        keys: Iterator[bytes] = self._rows.keys(backwards=True, from_key=end)  # type: ignore[assignment]
        return takewhile(begin.__lt__, keys)

    @property
    def row_count(self) -> int:
        """The number of rows, estimated."""
        return self._rows.property_int_value("rocksdb.estimate-num-keys") or 0

    def checkpoint(self) -> tuple[Path, Future[None]]:
        """Begin a checkpoint of the present rows; return its folder, and when it is complete."""
        self.settle()
        self._checkpoints += 1
        folder = self._home.folder / f"{self._number}-{self._checkpoints}"
        rows = self._rows

        def make() -> None:
            with self._explained():
                Checkpoint(rows).create_checkpoint(str(folder))

        self._making = self._home.threads.submit(make)
        return folder, self._making

    def replace(self, folder: Path) -> None:
        """Go on with the database in ``folder``, which becomes the folder of this one; all rows are replaced."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        folder.rename(self._folder)

    def close(self) -> None:
        """Close it. May be called more than once."""
        if self._making is not None:
            with contextlib.suppress(Exception):
                self._making.result()
            self._making = None
        self._waiting, self._waiting_bytes = {}, 0
        if self._opened is not None:
            rows, self._opened = self._opened, None
            with self._explained():  # It writes what is in memory.
                rows.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors of RocksDB, which have a text only."""
        try:
            yield
        except DbClosedError:
            raise
        except Exception as error:
            raise explained(error, self._owner, self._folder) from error


def explained(error: Exception, owner: str, folder: Path) -> Exception:
    """Return the error to raise for an error of RocksDB, or of the disk."""
    text = str(error)
    if says_full(text):
        return StorageFull(
            f"{owner}: expected room for its state in {folder.parent}, given {text:.200}; the last checkpoint is as it "
            "was: free space on that disk, or choose another with RocksState(…), and start the flow again"
        )
    return CheckpointError(
        f"{owner}: expected to read and write its state in {folder.parent}, given {text:.200}; "
        f"{advice_for(text)}, and start the flow again: it resumes from the last checkpoint"
    )


@contextlib.contextmanager
def opened(folder: Path, *, owner: str) -> Iterator[Rdict]:
    """Open a checkpoint for reading; with little memory, since its rows are read once and in order."""
    options = DatabaseMemory(_MEMTABLE_BYTES).options(_MEMTABLE_BYTES, is_large=True)
    try:
        rows = Rdict(str(folder), options, access_type=AccessType.read_only(False))
    except Exception as error:
        raise explained(error, owner, folder) from error
    with contextlib.closing(rows):
        yield rows


def rows_in(rows: Rdict, begin: bytes, end: bytes) -> Iterator[StoredRow]:
    """Give the rows of an open database or checkpoint from ``begin`` to before ``end``, in order."""
    options = ReadOptions()
    options.set_iterate_upper_bound(end)
    options.fill_cache(False)  # type: ignore[call-arg]
    # `items` begins at the first row in spite of a lower bound, unless it is given a key.
    return rows.items(from_key=begin, read_opt=options)  # type: ignore[return-value]


def files_of(folder: Path) -> tuple[list[Path], Mapping[str, bytes]]:
    """Return the files of a checkpoint that never change, and the content of the others, which are small."""
    paths = sorted(path for path in folder.iterdir() if not path.name.endswith(_NOT_KEPT))
    files = [path for path in paths if path.suffix == SST]
    return files, {path.name: path.read_bytes() for path in paths if path.suffix != SST}
