"""Rows of large arrays in RocksDB: ``StoredRows`` takes the place of an array, and ``RowsDatabase`` has its rows.

A stored row never changes. Each place of the array has the number of its row on disk; a row that changes gets a new
number. So a version that answers has its own rows while the next one is written, and needs no copy of them. The rows
that no version names any more are deleted with their *table*, the rows of one array and of its changes.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError, StorageFull
from streamiter.values.helpers.files import advice_for, says_full
from streamiter.values.numbers import Array, Indices

if TYPE_CHECKING:
    from rocksdict import Rdict

StoredNumbers = npt.NDArray[np.int32]
"""The number of the row on disk, by place in the array."""

PartPath = tuple[Any, ...]
"""The way to a part of parameters: names in dicts, places in lists."""

RowWrite = tuple[bytes, bytes | None]
"""A key and its value; None: it is deleted."""

# Rows are written and read in blocks of so many bytes: a million rows of eight numbers are 31,250 blocks.
_BLOCK_BYTES: Final = 1024

# Of a row in memory: its number, and half of a key, since other arrays have that list of keys, too.
_NUMBERS_BYTES: Final = 8

# Blocks, indexes, filters, and memtables, which are half of it. The system keeps files in its own cache.
_MEMORY_BYTES: Final = 16 << 20
_MEMTABLE_BYTES: Final = 4 << 20

# Blocks that are written at once, a few megabytes: the memory of a batch.
_BLOCKS_AT_ONCE: Final = 4096

# A table has a number of four bytes, from 1 on; all other keys begin with the number 0.
_NUMBER_BYTES: Final = 4
NO_TABLE: Final = bytes(_NUMBER_BYTES)
"""The beginning of all keys that are not of rows."""


class _Table:
    """The rows of one array and of its changes. The rows are deleted when nothing refers to this object."""

    def __init__(self, number: int) -> None:
        self.number = number


class StoredRows:
    """An array whose rows are on disk: ``rows[places]`` reads some. It has the ``dtype`` and ``shape`` of the array.

    A change gives another object; rows that came with it are in memory until :meth:`RowsDatabase.write` has them.
    """

    def __init__(
        self,
        database: RowsDatabase,
        table: _Table,
        numbers: StoredNumbers,
        like: Array,
        end: int,
        unwritten: tuple[tuple[int, Array], ...] = (),
    ) -> None:
        """``like`` has the type and shape of a row; rows with numbers from ``end`` on are not used yet."""
        self._database, self._table = database, table
        self.like = like
        self.numbers = numbers
        """The number of the row on disk, by place."""
        self.end = end
        self.unwritten = unwritten
        """The rows that are not on disk yet, by the number of the first one of each part."""
        self.dtype = like.dtype
        self.shape = (len(numbers), *like.shape)
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"StoredRows({self.dtype}, shape {self.shape})"

    def __getitem__(self, places: Indices) -> Array:
        """Return the rows at these places. Raises ``ModelError`` if they cannot be read."""
        return self._database.rows(self._table.number, self.numbers[places], self.like)

    @property
    def table(self) -> int:
        """The number of the table on disk."""
        return self._table.number

    def with_rows(self, numbers: StoredNumbers, values: Array) -> StoredRows:
        """Return the array with other numbers, of which the last ``values`` have their first from ``end`` on."""
        per_block = _rows_per_block(self.like)
        end = self.end + -(-len(values) // per_block) * per_block
        unwritten = (*self.unwritten, (self.end, values)) if len(values) else self.unwritten
        return StoredRows(self._database, self._table, numbers, self.like, end, unwritten)

    def written(self) -> StoredRows:
        """Return the array as it is when all its rows are on disk."""
        return StoredRows(self._database, self._table, self.numbers, self.like, self.end)

    def puts(self) -> Iterator[RowWrite]:
        """Yield the rows that are not on disk yet, in blocks."""
        for first, values in self.unwritten:
            yield from _blocks(self._table.number, first, values)


def belongs_on_disk(part: object, dtype: np.dtype[Any]) -> bool:
    """Whether a part of parameters is rows of this type, with more bytes than their numbers and keys have in memory."""
    if isinstance(part, StoredRows):
        return part.dtype == dtype
    return isinstance(part, np.ndarray) and part.dtype == dtype and part.ndim > 1 and part[:1].nbytes > _NUMBERS_BYTES


def _rows_per_block(like: Array) -> int:
    return max(1, _BLOCK_BYTES // like.nbytes)


def _key(table: int, block: int) -> bytes:
    return table.to_bytes(_NUMBER_BYTES, "big") + block.to_bytes(_NUMBER_BYTES, "big")


def _blocks(table: int, first: int, rows: Array) -> Iterator[RowWrite]:
    """Yield rows whose numbers begin with ``first``, the number of the first row of a block."""
    per_block = _rows_per_block(rows[0])
    content, size = np.ascontiguousarray(rows).tobytes(), per_block * rows[0].nbytes
    for block, start in enumerate(range(0, len(content), size), first // per_block):
        yield _key(table, block), content[start : start + size]


class RowsDatabase:
    """A database of rows in a folder, which one process uses at a time. One thread writes, any may read.

    Errors: ``StorageFull`` for a full disk, ``ModelError`` for any other error of RocksDB.
    """

    def __init__(self, folder: Path, subject: str) -> None:
        """``subject`` begins the messages."""
        self._folder = folder
        self._subject = subject
        self._unused: list[int] = []
        """Tables that nothing refers to any more."""
        self._next_table = 1
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "CURRENT").exists() and any(folder.iterdir()):
                raise ModelError(
                    f"{subject}: expected a new folder, an empty one, or that of this model, given {folder} with other "
                    "files; choose another folder"
                )
            self._rows = _opened(folder)
        self._is_writable = True

    def close(self) -> None:
        """Close it. Rows can no longer be read."""
        with contextlib.suppress(StorageFull), self._explained():  # What it cannot write now is in its log.
            self._rows.close()

    def rows(self, table: int, numbers: StoredNumbers, like: Array) -> Array:
        """Return the rows of a table with these numbers."""
        blocks, places = np.divmod(numbers, _rows_per_block(like))
        if not len(numbers):
            return np.empty((0, *like.shape), like.dtype)
        with self._explained():
            found: list[bytes | None] = self._rows.get([_key(table, block) for block in blocks.tolist()])  # type: ignore[assignment]
        size, parts = like.nbytes, []
        for content, place in zip(found, places.tolist(), strict=True):
            part = b"" if content is None else content[place * size : (place + 1) * size]
            if len(part) != size:
                raise self.error("a row that is missing")
            parts.append(part)
        return np.frombuffer(bytearray().join(parts), like.dtype).reshape(len(parts), *like.shape)

    def value(self, name: bytes) -> bytes | None:
        """Return what was written under a name."""
        options = _without_cache()
        with self._explained():
            value: bytes | None = self._rows.get(NO_TABLE + name, read_opt=options)
        return value

    def add(self, array: Array, numbers: StoredNumbers) -> StoredRows:
        """Write the rows of an array as a new table; ``numbers`` are 0, 1, and so on."""
        table = self._table(self._next_table)
        stored = StoredRows(self, table, numbers, np.empty(array.shape[1:], array.dtype), 0).with_rows(numbers, array)
        puts: list[RowWrite] = []
        for put in stored.puts():
            puts.append(put)
            if len(puts) == _BLOCKS_AT_ONCE:
                self.write(puts)
                puts = []
        self.write(puts)
        return stored.written()

    def stored(self, table: int, numbers: StoredNumbers, like: Array, end: int) -> StoredRows:
        """Return an array that was written before, whose ``table``, ``numbers`` and ``end`` these are."""
        return StoredRows(self, self._table(table), numbers, like, end)

    def write(self, puts: Iterable[RowWrite]) -> None:
        """Write and delete at once: after a crash all of it is there, or nothing."""
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, value in puts:
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        with self._writing():
            self._rows.write(batch)

    def delete_unused(self) -> None:
        """Delete the tables that nothing refers to any more."""
        for number in [*self._unused]:
            self._delete(number, number + 1)
            self._unused.remove(number)

    def delete_others(self, tables: Iterable[int]) -> None:
        """Delete all tables but these: a process that was killed has left them."""
        first = 1
        for number in [*sorted(tables), 1 << 32]:
            if number > first:
                self._delete(first, number)
            first = number + 1

    def _delete(self, first: int, end: int) -> None:
        begin = first.to_bytes(_NUMBER_BYTES + 1, "big")[1:]
        behind = b"\xff" * 9 if end >> 32 else end.to_bytes(_NUMBER_BYTES, "big")
        with self._writing():
            self._rows.delete_range(begin, behind)
            self._rows.compact_range(begin, behind)  # It frees the disk.

    def _table(self, number: int) -> _Table:
        self._next_table = max(self._next_table, number + 1)
        table = _Table(number)
        weakref.finalize(table, self._unused.append, number).atexit = False
        return table

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Let the block write. After a write that found no room RocksDB takes no others, until it is opened again.

        Meanwhile rows are read. There is no call of ``close``, since another thread may read at this moment.
        """
        try:
            with self._explained():
                if not self._is_writable:
                    self._rows, self._is_writable = _opened(self._folder), True
                yield
        except StorageFull:
            if self._is_writable:
                with self._explained():
                    self._rows, self._is_writable = _opened(self._folder, is_read_only=True), False
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors of RocksDB, which have a text only."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            number = getattr(error, "errno", None)
            raise self.error(os.strerror(number) if number else str(error)) from error

    def error(self, given: str) -> Exception:
        """Return the error to raise for what the folder has, or RocksDB says."""
        begin = f"{self._subject}: expected to read and write its rows in {self._folder}, given"
        if says_full(given):
            return StorageFull(
                f"{begin} {given:.200}; the version there is complete: free space on that disk, then a follower that "
                "runs goes on, and one that could not start is started again"
            )
        if "lock file" in given or "lock hold" in given:
            return ModelError(
                f"{begin} another process, or another ServedModel of this one, that uses the folder; give each a "
                "folder of its own"
            )
        otherwise = "delete the folder and start again, then the model is loaded from its topic"
        return ModelError(f"{begin} {given:.200}; {advice_for(given, otherwise)}")


def _opened(folder: Path, *, is_read_only: bool = False) -> Rdict:
    from rocksdict import AccessType, Rdict

    from streamiter.values.helpers.rocks import DatabaseMemory

    # Learned numbers are hardly compressed.
    options = DatabaseMemory(_MEMORY_BYTES).options(_MEMTABLE_BYTES, is_large=False)
    access = AccessType.read_only(False) if is_read_only else AccessType.read_write()
    return Rdict(str(folder), options, access_type=access)


def _without_cache() -> Any:
    from rocksdict import ReadOptions

    options = ReadOptions()
    options.fill_cache(False)  # type: ignore[call-arg]  # A value of megabytes would drive out the rows.
    return options
