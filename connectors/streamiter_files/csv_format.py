"""CSV: the format `Csv`, and batches of CSV lines that know the names of their columns.

`Csv` decodes the lines of a batch to dicts or to `Columns`, and encodes records as lines. A `ColumnType` converts a
column of text to a numpy type. A `CsvBatch` has the column names of its file, so the decoder does not need the file.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, final, get_args

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, TopicError
from streamiter.topics.formats import BAD_INPUT, decode_values, encode_each, even_parts, rows_to_encode
from streamiter.topics.topic import OutgoingBatch, TopicBatch, longest
from streamiter.values.numbers import has_plain_digits, one_of
from streamiter.values.records import Batch, Columns
from streamiter_files.chunks import UTF8_MARK

# The number of characters of a field in a message.
_SHOWN_CHARACTERS: Final = 40

_TRUTH: Final[Mapping[str, bool]] = MappingProxyType({"true": True, "1": True, "false": False, "0": False})

EmptyFields = Literal["refuse", "missing", "zero"]

# pyarrow reads a record of six fields in a third of the time (0.6 and not 1.9 µs). To import it takes 0.3 s, which
# is worth it for 200,000 lines, and to call it 0.1 ms, which is worth it for a batch of 200.
_ARROW_FROM: Final = 200_000
_ARROW_BATCH: Final = 200

# Floats hold all integers up to this one exactly.
_EXACT_IN_FLOATS: Final = 2**53


Column = Sequence[str] | npt.NDArray[Any]
"""The fields of a column: texts, or converted."""


class ColumnType:
    """The type of one column: text, or a numpy type of truth values, whole numbers or floats.

    >>> ColumnType("age", "int64").convert(["7", "42"])
    array([ 7, 42])
    >>> ColumnType("x", float, missing=["NA"]).convert(["0.5", "NA"])
    array([0.5, nan])
    >>> ColumnType("age", int).convert(["seven"])
    Traceback (most recent call last):
    ...
    ValueError: column 'age': expected int64, given 'seven'
    """

    def __init__(
        self,
        name: str,
        dtype: npt.DTypeLike,
        missing: Collection[str] = (),
        empty: EmptyFields = "refuse",
        *,
        as_columns: bool = False,
    ) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self._empty = empty
        self._missing = frozenset(missing) | ({""} if empty == "missing" else set())
        self._as_columns = as_columns
        if self._dtype.kind not in "fiubU":
            raise ConfigurationError(
                f"Csv: expected as type of column {name!r} str, bool, or a numpy type of integers or floats, "
                f"given {dtype!r}"
            )
        if self._dtype.kind == "b" and empty == "missing" and as_columns:
            raise ConfigurationError(
                f"Csv: column {name!r} has no missing truth value as an array; give it the type float, or empty='zero'"
            )

    @property
    def is_text(self) -> bool:
        """Whether the fields stay text."""
        return self._dtype.kind == "U"

    def convert(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        """Return the column; raise ``ValueError`` that names a field of another type."""
        if self.is_text:
            return np.array(fields, dtype=np.str_)
        try:
            return self._convert(fields)
        except (ValueError, KeyError, OverflowError, FloatingPointError):
            shown = "" if len(fields) > 1 else f", given {_shortened(fields[0])}"
            raise ValueError(f"column {self.name!r}: expected {self._dtype}{shown}") from None

    def arrow_type(self, pyarrow: Any) -> Any:
        """Return the type as which pyarrow may read the column; None where empty fields have a meaning."""
        if self.is_text:
            return pyarrow.string()
        if self._missing or self._empty != "refuse":
            return None
        return pyarrow.float64() if self._dtype.kind == "f" else pyarrow.from_numpy_dtype(self._dtype)

    def of_arrow(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the column; raise ``ValueError`` for numbers that pyarrow may have read from another text."""
        if self._dtype.kind == "f" and not np.isfinite(numbers).all():  # 1e400 is refused, and inf is a number
            raise ValueError("not a finite number")
        with np.errstate(over="raise"):
            return numbers.astype(self._dtype)

    def _convert(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        if self._empty == "zero":
            fields = [field or "0" for field in fields]
        if self._dtype.kind == "f":
            return self._floats(fields)
        if self._empty == "missing":
            return self._with_missing(fields)
        return self._present(fields)

    def _present(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        if self._dtype.kind == "b":
            return np.array([_TRUTH[field.lower()] for field in fields], dtype=np.bool_)
        return self._integers(fields)

    def _with_missing(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        """Return integers as floats with NaN, in each batch; for dicts, an array of objects with None."""
        is_there = np.array([field not in self._missing for field in fields], dtype=np.bool_)
        present = self._present([field for field in fields if field not in self._missing])
        if not self._as_columns:
            objects = np.full(len(fields), None, dtype=np.object_)
            objects[is_there] = present.tolist()
            return objects
        if len(present) and max(-int(present.min()), int(present.max())) > _EXACT_IN_FLOATS:
            raise OverflowError
        floats = np.full(len(fields), np.nan)
        floats[is_there] = present
        return floats

    def _floats(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        missing = self._missing
        if missing:
            fields = ["nan" if field in missing else field for field in fields]
        _check_plain(fields)
        numbers = np.array(list(map(float, fields)))
        for index in np.flatnonzero(np.isinf(numbers)).tolist():
            if "inf" not in fields[index].lower():  # a number too large for a float
                raise OverflowError
        with np.errstate(over="raise"):
            return numbers.astype(self._dtype)

    def _integers(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        _check_plain(fields)
        numbers = list(map(int, fields))
        limits = np.iinfo(self._dtype)
        if numbers and (min(numbers) < limits.min or max(numbers) > limits.max):
            raise OverflowError
        return np.array(numbers, dtype=self._dtype)


def _check_plain(fields: Sequence[str]) -> None:
    """Raise ``ValueError`` for underscores, and for digits and spaces of other scripts, which Python accepts."""
    if not has_plain_digits("".join(fields)):
        raise ValueError


def _shortened(field: str) -> str:
    if len(field) <= _SHOWN_CHARACTERS:
        return repr(field)
    return f"{field[:_SHOWN_CHARACTERS] + '…'!r} ({len(field):,} characters)"


class CsvBatch(TopicBatch):
    """Records of one CSV file with the names of their columns, which are None where the file has no header."""

    __slots__ = ("columns", "delimiter")

    def __init__(
        self,
        *,
        values: Sequence[bytes | None],
        partition: int,
        offsets: Sequence[int],
        timestamps_ms: Sequence[int],
        columns: tuple[str, ...] | None,
        delimiter: str,
    ) -> None:
        super().__init__(values=values, partition=partition, offsets=offsets, timestamps_ms=timestamps_ms)
        self.columns = columns
        self.delimiter = delimiter

    def _part(self, part_of: Callable[[Sequence[Any]], Sequence[Any]]) -> CsvBatch:
        part = super()._part(part_of)
        return CsvBatch(
            values=part.values,
            partition=part.partition,
            offsets=part.offsets,
            timestamps_ms=part.timestamps_ms,
            columns=self.columns,
            delimiter=self.delimiter,
        )


def parse_header(
    line: bytes, delimiter: str, *, path: Path, expected: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Return the names in the first record of a file.

    Raises ``TopicError`` for a name that occurs twice or is empty, and for other names than the ``expected`` ones.
    """
    try:
        [names] = csv.reader([line.decode()], delimiter=delimiter, strict=True)
    except (UnicodeDecodeError, csv.Error) as error:
        raise TopicError(f"file {str(path)!r}: expected a header of names, given {line[:80]!r} ({error})") from None
    if len(set(names)) < len(names) or not all(names):
        raise TopicError(
            f"file {str(path)!r}: expected a header of names that differ, given {names}; for a file without "
            "header give the options header=False and columns=(…)"
        )
    if expected is not None and tuple(names) != expected:
        raise TopicError(
            f"file {str(path)!r}: expected the header {', '.join(expected)} (option columns), given {', '.join(names)}"
        )
    return tuple(names)


@final
class Csv:
    """CSV records, both ways: dicts by the names of the columns, or `Columns` with ``as_columns``.

    The names are those of the file's header, or of ``columns`` where there is no header (values of a Kafka topic, a
    file without header). Types are never guessed: a column is text unless ``types`` has another type for it (float,
    int, bool, str or a numpy type); the ready-made learner reads texts that are numbers as numbers. In a column of
    floats, the texts of ``missing`` are NaN.

    ``empty`` is the policy for empty fields of columns with a type; a text may be empty. ``"refuse"``: the line is a
    bad record. ``"zero"``: 0 or False. ``"missing"``: NaN in a column of floats, else None; in ``Columns`` all
    integers become floats, with NaN. The texts of ``missing`` count as empty then.

    The delimiter is that of the file, otherwise a comma. Text is UTF-8. A
    field has at most ``csv.field_size_limit()`` characters (131,072).

    Encoding writes the fields in the order of ``columns``, otherwise in that of the first record. None becomes an empty
    field, and a field with a line end is refused.

    >>> decoder = Csv({"x": float}, columns=("id", "x"))
    >>> decoder.decode(TopicBatch(values=[b"7,0.5", b'"a,b",1e3']))
    [{'id': '7', 'x': 0.5}, {'id': 'a,b', 'x': 1000.0}]
    >>> decoder.decode(TopicBatch(values=[b"7,0.5", b"8", b"9,many"]))
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 1 of the batch: expected 2 fields (id, x), given 1 (and 1 more)
    >>> decoder.encode([{"id": "a,b", "x": 1.5}]).values
    [b'"a,b",1.5']
    """

    gives_texts: Final = True
    """A value that has no type is a text, whatever it means."""

    def __init__(
        self,
        types: Mapping[str, npt.DTypeLike] | None = None,
        *,
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        missing: Collection[str] = (),
        empty: EmptyFields = "refuse",
        as_columns: bool = False,
    ) -> None:
        if isinstance(missing, str):
            raise ConfigurationError(f"Csv: expected a list of texts as missing, given {missing!r}")
        one_of("Csv(empty=)", empty, *get_args(EmptyFields))
        self._types = {
            name: ColumnType(name, dtype, missing, empty, as_columns=as_columns)
            for name, dtype in (types or {}).items()
        }
        self._columns = None if columns is None else tuple(columns)
        self._delimiter = delimiter
        self._as_columns = as_columns
        self._lines_read = 0
        if self._columns is not None:
            self._check_types(self._columns)

    def parts(self, batch: TopicBatch) -> Sequence[TopicBatch]:
        """Return the parts of the batch to decode one by one: in an array each text is as wide as the longest."""
        return even_parts(batch, 4 if self._as_columns else 0)

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the records; raise ``DecodeError`` for another number of fields, and for fields of another type."""
        lines = _CsvLines(self._names(batch), self._delimiter_of(batch), self._types)
        columns = lines.by_arrow(batch.values) if self._is_worth_arrow(len(batch.values)) else None
        if columns is not None:
            return lines.made(columns, as_columns=self._as_columns)
        try:
            return lines.parsed(lines.parse_all(batch.values), as_columns=self._as_columns)
        except BAD_INPUT:  # one line is bad: find it
            return lines.parsed(decode_values(batch.values, lines.parse_one), as_columns=self._as_columns)

    def _is_worth_arrow(self, lines: int) -> bool:
        self._lines_read += lines
        if lines < _ARROW_BATCH:
            return False
        return "pyarrow.csv" in sys.modules or (self._lines_read > _ARROW_FROM and find_spec("pyarrow") is not None)

    def _names(self, batch: TopicBatch) -> tuple[str, ...]:
        given = batch.columns if isinstance(batch, CsvBatch) else None
        names = given or self._columns
        if names is None:
            raise ConfigurationError("Csv: the source has no header; name the columns with Csv(columns=(…))")
        if self._columns not in (None, names):
            raise ConfigurationError(
                f"Csv: expected the columns {', '.join(self._columns or ())}, the file has {', '.join(names)}"
            )
        self._check_types(names)
        return names

    def _check_types(self, names: tuple[str, ...]) -> None:
        unknown = [name for name in self._types if name not in names]
        if unknown:
            raise ConfigurationError(
                f"Csv: types names a column {unknown[0]!r}, but the columns are {', '.join(names)}"
            )

    def _delimiter_of(self, batch: TopicBatch) -> str:
        return self._delimiter or (batch.delimiter if isinstance(batch, CsvBatch) else ",")

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the lines; raise ``EncodeError`` for records of other columns, and fields that no line can hold."""
        batch = rows_to_encode(batch)
        names = self._columns or _names_of(batch)
        return OutgoingBatch(encode_each(batch, _LineMaker(names, self._delimiter or ",").line))

    def __repr__(self) -> str:
        return f"Csv(types={list(self._types)}, columns={self._columns}, as_columns={self._as_columns})"


class _CsvLines:
    """Parses the lines of one file."""

    def __init__(self, names: tuple[str, ...], delimiter: str, types: Mapping[str, ColumnType]) -> None:
        self._names = names
        self._delimiter = delimiter
        self._types = [types.get(name) for name in names]

    def parse_all(self, values: Sequence[bytes | None]) -> list[list[str]]:
        """Return the fields of all lines; raise ``ValueError`` or ``TypeError`` if one of them is bad."""
        texts = _texts(values)
        rows = self._rows(texts)
        if len(rows) != len(texts) or any(len(row) != len(self._names) for row in rows):
            raise ValueError("wrong number of fields")
        return rows

    def _rows(self, texts: Iterable[str]) -> list[list[str]]:
        try:
            return list(csv.reader(texts, delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            raise ValueError(str(error).partition(" - ")[0]) from None

    def parse_one(self, value: bytes) -> list[str]:
        """Return the fields of one line, checked; raise ``ValueError`` with the reason."""
        rows = self._rows([value.decode()])
        if len(rows) != 1 or len(rows[0]) != len(self._names):
            given = len(rows[0]) if rows else 0
            names = ", ".join(self._names)
            raise ValueError(f"expected {len(self._names)} fields ({names}), given {given}")
        self._converted(rows)
        return rows[0]

    def by_arrow(self, values: Sequence[bytes | None]) -> list[Column] | None:
        """Return the columns as pyarrow reads them; None for lines that it refuses, or may read in another way.

        Python's csv reads such lines again, so values and messages do not depend on pyarrow.
        """
        import pyarrow
        from pyarrow import csv as arrow_csv

        types = [pyarrow.string() if each is None else each.arrow_type(pyarrow) for each in self._types]
        if None in types or not all(values):
            return None
        block = b"\n".join(filter(None, values))
        # Quotes, line ends within a line, hexadecimal numbers and a mark of the encoding have other rules in pyarrow.
        odd = [b'"', b"\r", *([b"0x", b"0X"] if any(map(pyarrow.types.is_integer, filter(None, types))) else [])]
        if any(each in block for each in odd) or block.count(b"\n") != len(values) - 1 or block.startswith(UTF8_MARK):
            return None
        names = [str(number) for number in range(len(types))]
        try:
            table = arrow_csv.read_csv(
                pyarrow.BufferReader(block),
                arrow_csv.ReadOptions(use_threads=False, column_names=names),
                arrow_csv.ParseOptions(delimiter=self._delimiter, quote_char=False, ignore_empty_lines=False),
                arrow_csv.ConvertOptions(
                    column_types=dict(zip(names, types, strict=True)), null_values=[], strings_can_be_null=False
                ),
            )
            if len(table) != len(values) or longest(values) > csv.field_size_limit():
                return None
            return [
                column.to_pylist() if of_type is None or of_type.is_text else of_type.of_arrow(column.to_numpy())
                for column, of_type in zip(table.columns, self._types, strict=True)
            ]
        except (ValueError, FloatingPointError):  # pyarrow's errors are ValueErrors
            return None

    def _converted(self, rows: Sequence[Sequence[str]]) -> list[Column]:
        fields = zip(*rows, strict=True) if rows else [()] * len(self._names)
        return [
            column if of_type is None or of_type.is_text else of_type.convert(column)
            for column, of_type in zip(fields, self._types, strict=True)
        ]

    def parsed(self, rows: Sequence[Sequence[str]], *, as_columns: bool) -> Batch:
        """Return the records of rows of text."""
        if not as_columns and not any(self._types):
            return [dict(zip(self._names, row, strict=True)) for row in rows]
        return self.made(self._converted(rows), as_columns=as_columns)

    def made(self, columns: Sequence[Column], *, as_columns: bool) -> Batch:
        """Return the records of converted columns."""
        if as_columns:
            return Columns(dict(zip(self._names, map(np.asarray, columns), strict=True)))
        lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
        return [dict(zip(self._names, row, strict=True)) for row in zip(*lists, strict=True)]


def _texts(values: Sequence[bytes | None]) -> list[str]:
    texts = b"\n".join(values).decode().split("\n")  # type: ignore[arg-type]  # None raises a TypeError, as intended
    if len(texts) == len(values):
        return texts
    return [value.decode() for value in values if value is not None]  # some have line ends within quotes


def _names_of(batch: Batch) -> tuple[str, ...]:
    if isinstance(batch, Columns):
        return batch.names
    first = batch[0] if len(batch) else {}
    return tuple(first) if isinstance(first, dict) else ()


class _LineMaker:
    """Encodes records as lines."""

    def __init__(self, names: tuple[str, ...], delimiter: str) -> None:
        self._names = names
        self._text = io.StringIO()
        self._writer = csv.writer(self._text, delimiter=delimiter, lineterminator="\n")

    def line(self, record: object) -> bytes:
        """Return one line without its end; raise ``ValueError`` or ``TypeError`` with the reason."""
        if not isinstance(record, dict) or record.keys() != set(self._names):
            given = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
            raise TypeError(f"expected the columns {', '.join(self._names)}, given {given}")
        self._text.seek(0)
        self._text.truncate()
        self._writer.writerow([_field(name, record[name]) for name in self._names])
        return self._text.getvalue()[:-1].encode()


def _field(name: str, value: Any) -> Any:
    if isinstance(value, str) and ("\n" in value or "\r" in value):
        raise ValueError(f"column {name!r}: a line end within the field")
    if value is None or isinstance(value, (str, int, float, np.generic)):
        return value
    raise TypeError(f"column {name!r}: expected text, a number, a truth value or None, given {type(value).__name__}")
