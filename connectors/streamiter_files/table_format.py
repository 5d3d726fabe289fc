"""Tables in files: Parquet, and the file format of Arrow (also called Feather): reading, writing, and their format.

A file has *units*: the row groups of Parquet, the record batches of Arrow. Rows are read and written by unit, as
columns, without a Python object for a row. Needs the extra ``arrow`` (pyarrow, which is imported when a file is read or
written).
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final, overload

from streamiter.errors import ConfigurationError, EncodeError, TopicError
from streamiter.topics.connecting import closed_error
from streamiter.topics.dead_letters import dead_letter_value
from streamiter.topics.topic import OutgoingBatch, TopicBatch, TopicWriter
from streamiter.values.helpers.closing import undone_on_failure
from streamiter.values.helpers.files import is_free, sync_folder
from streamiter.values.helpers.importing import need_package
from streamiter.values.records import Batch, Columns, estimated_bytes, rows_of_table
from streamiter.values.tables import arrow_table
from streamiter_files.chunks import FileState, OneAtATime
from streamiter_files.options import (
    FileFormat,
    file_errors,
    file_failure,
    is_pattern,
    name_parts,
    names_a_folder,
    sorted_paths,
)
from streamiter_files.reader import FilePartition

# Rows become columns in pieces of this many, counted from the beginning of their unit. So the types of a piece do not
# depend on where a reader begins. A piece of ten columns of numbers takes 5 MB, and its conversion some milliseconds.
_PIECE_ROWS: Final = 1 << 16

# This many bytes of rows make a unit: large enough for a good compression, small enough to be held in memory.
_UNIT_BYTES: Final = 32 << 20


@final
class TableValues(Sequence[bytes | None]):
    """The rows of a table in the place of values. A row becomes JSON if it is asked for as a value.

    >>> TableValues([{"x": 1}, {"x": 2}])[1]
    b'{"x":2}'
    """

    __slots__ = ("rows", "table")

    def __init__(self, rows: Batch, table: Any = None) -> None:
        self.rows = rows
        self.table = table
        """For a writer: the rows as a table of Arrow."""

    @property
    def nbytes(self) -> int:
        """The bytes of memory."""
        return estimated_bytes(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, which: int) -> bytes | None: ...
    @overload
    def __getitem__(self, which: slice) -> TableValues: ...
    def __getitem__(self, which: int | slice) -> bytes | TableValues | None:
        if isinstance(which, slice):
            return TableValues(self.rows[which])
        return dead_letter_value(self.rows[which])

    def __iter__(self) -> Iterator[bytes | None]:
        return map(dead_letter_value, self.rows)


@final
class Table:
    """The format of Parquet and Arrow files, both ways; their topics use it by default.

    Reading gives `Columns` or, where a column has lists, dicts, bytes or missing texts, a list of dicts;
    :mod:`streamiter.values.tables` describes each type. Writing takes ``Columns``, tables of pandas, polars and Arrow,
    and dicts with equal keys. The types of the file are those of the first records; missing values are None, and NaN is
    a number. ``schema``, a ``pyarrow.Schema``, says the types instead.

    >>> values = Table().encode([{"user": "ann", "price": 2}]).values
    >>> Table().decode(TopicBatch(values=values))
    [{'user': 'ann', 'price': 2}]
    """

    def __init__(self, schema: Any = None) -> None:
        need_package("Table", "pyarrow", "arrow")
        if schema is not None and not hasattr(schema, "pandas_metadata"):
            raise ConfigurationError(f"Table: expected schema= to be a pyarrow.Schema, given {type(schema).__name__}")
        self._schema = schema

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the rows as they were read."""
        if not isinstance(batch.values, TableValues):
            raise ConfigurationError(
                "Table: expected rows of a Parquet or Arrow file, given bytes of another topic; decode them as what "
                "they are, such as decode=Json()"
            )
        return batch.values.rows

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the rows for a writer of tables; raise ``EncodeError`` for records that do not fit the others."""
        try:
            return OutgoingBatch(TableValues(batch, self._as_table(batch)))
        except (ValueError, TypeError) as error:  # pyarrow's errors derive from them
            if not isinstance(batch, list):
                raise EncodeError(dict.fromkeys(range(len(batch)), _first_line(error))) from None
            raise self._failures(batch, error) from None

    def _as_table(self, batch: Any) -> Any:
        return arrow_table("Table", batch.arrays if isinstance(batch, Columns) else batch, TopicError, self._schema)

    def _failures(self, records: list[Any], error: Exception) -> EncodeError:
        """Return the error that names each record that does not fit the first record that can be a row."""
        failures: dict[int, str] = {}
        first: Any = None
        for index, record in enumerate(records):
            try:
                self._as_table([record] if first is None else [first, record])
                first = record if first is None else first
            except (ValueError, TypeError) as reason:
                failures[index] = _first_line(reason)
        return EncodeError(failures or dict.fromkeys(range(len(records)), _first_line(error)))

    def __repr__(self) -> str:
        return "Table()"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


# -- reading -------------------------------------------------------------------------------------------------


class _ParquetUnits:
    """The row groups of a Parquet file."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path, page_checksum_verification=True)
        self._columns = _chosen(self._file.schema_arrow.names, columns, path)
        metadata = self._file.metadata
        self.lengths: list[int] = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    def read(self, number: int) -> Any:
        """Return a unit as a table."""
        return self._file.read_row_group(number, columns=self._columns)

    def close(self) -> None:
        self._file.close()


class _ArrowUnits:
    """The record batches of an Arrow file, whose lengths are known by their metadata only."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        import pyarrow

        self._mapped = pyarrow.memory_map(str(path))
        with undone_on_failure(self._mapped.close):
            self._file = pyarrow.ipc.open_file(self._mapped)
            self._columns = _chosen(self._file.schema.names, columns, path)
            batches = map(self._file.get_batch, range(self._file.num_record_batches))
            self.lengths: list[int] = [batch.num_rows for batch in batches]

    def read(self, number: int) -> Any:
        """Return a unit as a table."""
        batch = self._file.get_batch(number)
        return batch if self._columns is None else batch.select(self._columns)

    def close(self) -> None:
        self._mapped.close()


def _chosen(names: Sequence[str], columns: Sequence[str] | None, path: Path) -> list[str] | None:
    for name in columns or ():
        if name not in names:
            raise ConfigurationError(
                f"file {str(path)!r}: expected a column {name!r} (option columns), found {', '.join(names)}"
            )
    return None if columns is None else list(columns)


def open_units(path: Path, known: FileFormat, columns: Sequence[str] | None) -> _ParquetUnits | _ArrowUnits:
    """Open a file; raise ``TopicError`` for one of another format."""
    kind = _ParquetUnits if known.name == "parquet" else _ArrowUnits
    with file_errors(path):
        try:
            return kind(path, columns)
        except ValueError as error:  # pyarrow.ArrowInvalid
            raise TopicError(
                f"file {str(path)!r}: expected a complete {known.name} file, given another one ({_first_line(error)})"
            ) from None


class TablePartition(FilePartition):
    """The rows of a file of tables."""

    advice = "let files of tables be as they are"

    def __init__(
        self,
        number: int,
        state: FileState,
        known: FileFormat,
        columns: Sequence[str] | None,
        *,
        start: int = 0,
        stop: int | None = None,
        identity: str | None = None,
    ) -> None:
        super().__init__(number, state, start=start, stop=stop, identity=identity)
        self._format = known
        self._columns = columns
        self._units: _ParquetUnits | _ArrowUnits | None = None
        self._unit_begin = 0
        self._unit: Any = None
        """The rows of the unit that is read now; ``_unit_begin`` is the offset of its first row."""

    def fill(self) -> None:
        units = self._opened
        while not self.has_records and not self.is_ended:
            if self._unit is None and not self._next_unit(units):
                self._end(sum(units.lengths))
            elif self._unit is not None:
                self._next_piece()

    @property
    def _opened(self) -> _ParquetUnits | _ArrowUnits:
        self._units = self._units or open_units(self._state.path, self._format, self._columns)
        return self._units

    def _next_unit(self, units: _ParquetUnits | _ArrowUnits) -> bool:
        """Read the unit of the next row; return whether there is one. The units before it are not read."""
        begin = 0
        for number, length in enumerate(units.lengths):
            if begin + length > self.next_offset:
                self._unit, self._unit_begin = self._read(units, number), begin
                return True
            begin += length
        return False

    def _read(self, units: _ParquetUnits | _ArrowUnits, number: int) -> Any:
        """Return a unit; raise ``TopicError`` for one that is damaged."""
        path, length = self._state.path, units.lengths[number]
        try:
            unit = units.read(number)
            unit.validate()
        except OSError as error:
            if error.errno is not None:
                raise file_failure(error, path) from error
            reason = _first_line(error)  # pyarrow's errors of pages have no number
        except (ValueError, NotImplementedError) as error:
            reason = _first_line(error)
        else:
            if len(unit) == length:
                return unit
            reason = f"it has {len(unit)} rows, and its metadata says {length}"
        raise TopicError(
            f"file {str(path)!r}: expected a complete {self._format.name} file, given one whose unit {number} of "
            f"{len(units.lengths)} is damaged ({reason}); restore it from its origin, or remove it"
        )

    def _next_piece(self) -> None:
        at = self.next_offset - self._unit_begin
        begin = at - at % _PIECE_ROWS
        piece = self._unit.slice(begin, _PIECE_ROWS)
        rows = rows_of_table(f"file {str(self._state.path)!r}", piece, TopicError)
        assert rows is not None
        if begin + len(rows) >= len(self._unit):
            self._unit = None
        skipped = at - begin
        wanted = len(rows) if self._stop is None else min(len(rows), skipped + self._stop - self.next_offset)
        self._records, self._taken = rows[skipped:wanted], 0
        self.is_ended = self._stop is not None and self.next_offset + len(self._records) >= self._stop

    def _beginning(self, count: int) -> bytes:
        with file_errors(self._state.path), self._state.path.open("rb") as file:
            return file.read(count)

    def _batch(self, records: Batch, offsets: range, timestamps_ms: list[int]) -> TopicBatch:
        return TopicBatch(
            partition=self.number, values=TableValues(records), offsets=offsets, timestamps_ms=timestamps_ms
        )

    def lag(self) -> int | None:
        """Return the number of rows that are left; None before the file is opened."""
        if self._units is None:
            return 0 if self.is_ended else None
        end = sum(self._units.lengths)
        stop = end if self._stop is None else min(end, self._stop)
        return max(0, stop - self.next_offset)

    def close(self) -> None:
        if self._units is not None:
            self._units.close()


def count_rows(path: Path, known: FileFormat) -> int:
    """Return the number of rows of a file."""
    units = open_units(path, known, None)
    units.close()
    return sum(units.lengths)


# -- writing -------------------------------------------------------------------------------------------------


class TableWriter(TopicWriter):
    """Writes rows into new files of a folder or pattern, or into the one file of a path, which must not exist yet.

    A file has its name only when it is complete and durable: rows are written into a hidden file next to it, unit by
    unit, and ``flush`` completes it. In a folder the next rows go into a new file; a single file takes no more. After
    an error, every later call raises the same error. Keys and time stamps are not stored.
    """

    def __init__(self, path: str, known: FileFormat, given: FileFormat | None, existing: list[Path], name: str) -> None:
        self._path = path
        self._format = known
        self._given = given
        self._existing = existing
        self._topic = name
        self._gathered: list[Any] = []
        self._gathered_bytes = 0
        self._file: _NewFile | None = None
        self._calls = OneAtATime()
        self._failure: Exception | None = None
        self._is_closed = False
        self._is_complete = False
        if self._is_single:  # claimed now, so that a second writer fails at its start
            self._file = self._new_file()

    @property
    def _is_single(self) -> bool:
        return not (names_a_folder(self._path) or is_pattern(self._path))

    async def write(self, batch: OutgoingBatch) -> None:
        """Take rows; wait for the disk when a unit has gathered."""
        if self._is_closed:
            raise closed_error("writer", self._topic)
        table = self._table_of(batch)
        await self._calls.settle()
        self._check()
        if self._is_complete:
            raise TopicError(
                f"topic {self._topic!r}: expected no more records, because the file is complete since the first "
                "checkpoint; write to a folder, in which each checkpoint completes a file: "
                f"'file:{os.path.dirname(self._topic) or '.'}/?format={self._format.name}'"
            )
        self._gathered.append(table)
        self._gathered_bytes += table.nbytes
        if self._gathered_bytes >= _UNIT_BYTES:
            await self._calls.run(self._write_unit)

    def _table_of(self, batch: OutgoingBatch) -> Any:
        table = batch.values.table if isinstance(batch.values, TableValues) else None
        if table is None:
            raise TopicError(
                f"topic {self._topic!r}: expected rows of a table, given bytes; leave out encode=, or write "
                "encode=Table()"
            )
        if batch.headers is not None and any(batch.headers):
            raise TopicError(f"topic {self._topic!r}: expected records without headers, which tables do not have")
        return table

    async def check(self) -> None:
        """Do nothing: rows are durable after ``flush``, which would complete the file."""

    async def flush(self) -> None:
        """Complete the file, and wait until the disk has it."""
        await self._calls.run(self._complete)

    async def close(self) -> None:
        """Flush; after an error remove the hidden file."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._failure is None:
                await self.flush()
        finally:
            await self._calls.run(self._drop)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write_unit(self) -> None:
        self._check()
        if not self._gathered:
            return
        try:
            self._file = self._file or self._new_file()
            self._file.write(self._gathered)
        except Exception as error:
            self._failure = error
            raise
        self._gathered, self._gathered_bytes = [], 0

    def _complete(self) -> None:
        self._write_unit()
        file = self._file
        if file is None or not file.has_rows:
            return
        try:
            file.complete(self._names())
        except Exception as error:
            self._failure = error
            raise
        self._file, self._is_complete = None, self._is_single

    def _new_file(self) -> _NewFile:
        if self._is_single:
            path = Path(self._path)
            with file_errors(path):
                if path.exists() and path.stat().st_size:
                    raise TopicError(
                        f"file {self._path!r}: expected no such file, because tables are not appended to; delete it, "
                        "or write to a folder"
                    )
            return _NewFile(path.with_name(f".{path.name}.writing"), self._format)
        before, after = name_parts(self._path, self._given)
        folder, name = os.path.split(before)
        _remove_left(Path(folder), f".{name}", f"{after}.writing")
        unique = f"{os.getpid()}-{id(self):x}"
        return _NewFile(Path(folder, f".{name}{unique}{after}.writing"), self._format)

    def _names(self) -> Iterator[Path]:
        """Yield the names that the file may have; it gets the first one that is free."""
        if self._is_single:
            return iter([Path(self._path)])
        before, after = name_parts(self._path, self._given)
        return (Path(f"{before}{number}{after}") for number in itertools.count(self._first_number(before, after)))

    def _first_number(self, before: str, after: str) -> int:
        """Return a number whose file is the last one by name, so that no partition gets another number."""
        if not self._existing:
            return 0
        last, number = str(self._existing[-1]), len(self._existing)
        middle = last.removeprefix(before).removesuffix(after)
        if last == f"{before}{middle}{after}" and middle.isdecimal():
            return max(number, int(middle) + 1)
        name = Path(f"{before}{number}{after}")
        if sorted_paths([last, str(name)])[-1] != name:
            raise ConfigurationError(
                f"topic {self._topic!r}: a new file {name.name!r} would not be the last in the order of names, and "
                f"would change the numbers of later partitions; the last file is {Path(last).name!r}. "
                "Write to another folder"
            )
        return number

    def _drop(self) -> None:
        if self._file is not None:
            self._file.drop()
            self._file = None


# A writer locks its file at once, so a file that is older and not locked has no writer any more.
_LEFT_AFTER_S: Final = 60.0


def _remove_left(folder: Path, before: str, after: str) -> None:
    """Remove the hidden files that killed processes have left."""
    with suppress(OSError, ImportError):
        for path in folder.iterdir():
            is_hidden = path.name.startswith(before) and path.name.endswith(after)
            if is_hidden and time.time() - path.stat().st_mtime > _LEFT_AFTER_S and is_free(path):
                path.unlink()


class _NewFile:
    """A hidden file that gets its name when it is complete. Every call blocks."""

    def __init__(self, path: Path, known: FileFormat) -> None:
        self._path = path
        self._format = known
        self._writer: Any = None
        self._schema: Any = None
        with file_errors(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._file = os.fdopen(handle, "wb")
            self._lock()
            self._file.truncate(0)  # what a killed process has left

    def _lock(self) -> None:
        """Hold the file until it is closed: two writers of one file would write the rows of one of them only."""
        try:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError:
            self._file.close()
            raise TopicError(
                f"file {str(self._path)!r}: expected one writer, given another one that writes it; give the sink "
                "parallelism=1, or write to a folder"
            ) from None

    @property
    def has_rows(self) -> bool:
        return self._writer is not None

    def write(self, tables: list[Any]) -> None:
        """Write the rows as one unit."""
        import pyarrow

        with file_errors(self._path):
            try:
                joined = pyarrow.concat_tables(tables, promote_options="permissive")
                if self._writer is None:
                    self._schema = joined.schema
                    self._writer = self._opened(joined.schema)
                self._writer.write_table(joined.select(self._schema.names).cast(self._schema).combine_chunks())
            except (ValueError, TypeError, KeyError) as error:
                raise TopicError(
                    f"file {str(self._path)!r}: expected rows with the columns and types of the first ones "
                    f"({', '.join(f'{field.name} {field.type}' for field in self._schema or [])}), given others "
                    f"({_first_line(error)}); give the types: encode=Table(pyarrow.schema(…))"
                ) from None

    def _opened(self, schema: Any) -> Any:
        if self._format.name == "parquet":
            from pyarrow import parquet

            return parquet.ParquetWriter(self._file, schema, write_page_checksum=True)
        import pyarrow

        return pyarrow.ipc.new_file(self._file, schema)

    def complete(self, names: Iterator[Path]) -> None:
        """Write the end of the file, and give it the first of the names that is free."""
        with file_errors(self._path):
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            for name in names:
                if not self._named(name):
                    continue
                self._path.unlink()
                sync_folder(name.parent)
                break
            else:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._file.close()

    def _named(self, name: Path) -> bool:
        """Give the file a name that no other file has, or an empty one, as ``create`` makes it."""
        try:
            os.link(self._path, name)
        except FileExistsError:
            if name.stat().st_size:
                return False
            os.replace(name, f"{self._path}.empty")
            os.unlink(f"{self._path}.empty")
            return self._named(name)
        return True

    def drop(self) -> None:
        """Remove the hidden file."""
        if self._writer is not None:
            with suppress(Exception):  # the disk is full
                self._writer.close()
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._path.unlink()
