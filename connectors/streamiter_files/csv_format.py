"""CSV records to dicts or columns, and back."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.records import Batch, Columns
from streamiter.topics.formats.failures import BAD_INPUT, NO_VALUE, decode_each, encode_each, rows_to_encode
from streamiter.topics.topic import OutgoingBatch, TopicBatch
from streamiter_files.csv_batch import CsvBatch
from streamiter_files.csv_types import ColumnType

__all__ = ["Csv"]


@final
class Csv:
    """CSV records, both ways: dicts by the names of the columns, or `Columns` with ``as_columns``.

    The names come from the header of the file that is read, or from ``columns`` where there is none (values
    of a Kafka topic, a file without header). Types are never guessed: a column is text unless ``types``
    says otherwise (float, int, bool, str or a numpy type). A field of ``missing`` is NaN in a column of
    floats; an empty field is missing only if ``missing`` has ``""``. The delimiter is that of the file, else
    a comma. Text is UTF-8; a field has at most ``csv.field_size_limit()`` characters (131,072).

    When encoding, ``columns`` gives the order (else the first record's), None becomes an empty field, and a
    field with a line end in it is refused.

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

    def __init__(
        self,
        types: Mapping[str, npt.DTypeLike] | None = None,
        *,
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        missing: Collection[str] = (),
        as_columns: bool = False,
    ) -> None:
        if isinstance(missing, str):
            raise ConfigurationError(f"Csv: expected a list of texts as missing, given {missing!r}")
        self._types = {name: ColumnType(name, dtype, missing) for name, dtype in (types or {}).items()}
        self._columns = None if columns is None else tuple(columns)
        self._delimiter = delimiter
        self._as_columns = as_columns
        if self._columns is not None:
            self._check_types(self._columns)

    def decode(self, batch: TopicBatch) -> Batch:
        """Raises ``DecodeError`` for records of another number of fields, or with fields of another type."""
        lines = _Lines(self._names(batch), self._delimiter_of(batch), self._types)
        try:
            rows = lines.parse_all(batch.values)
            return self._made(lines, rows)
        except BAD_INPUT:  # one of them is bad: find out which
            return self._made(lines, decode_each(batch.values, lines.parse_one))

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

    def _made(self, lines: _Lines, rows: Sequence[Sequence[str]]) -> Batch:
        if self._as_columns:
            return lines.as_columns(rows)
        return lines.as_records(rows)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Raises ``EncodeError`` for records of other columns, and for fields that no line holds."""
        batch = rows_to_encode(batch)
        names = self._columns or _names_of(batch)
        return OutgoingBatch(encode_each(batch, _LineMaker(names, self._delimiter or ",").line))

    def __repr__(self) -> str:
        return f"Csv(types={list(self._types)}, columns={self._columns}, as_columns={self._as_columns})"


class _Lines:
    """How the lines of one file are read."""

    def __init__(self, names: tuple[str, ...], delimiter: str, types: Mapping[str, ColumnType]) -> None:
        self._names = names
        self._delimiter = delimiter
        self._types = [types.get(name) for name in names]

    def parse_all(self, values: Sequence[bytes | None]) -> list[list[str]]:
        """The fields of all; a ``ValueError`` or ``TypeError`` if any is bad."""
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

    def parse_one(self, value: bytes | None) -> list[str]:
        """The fields of one, checked; a ``ValueError`` with the reason."""
        if value is None:
            raise ValueError(NO_VALUE)
        rows = self._rows([value.decode()])
        if len(rows) != 1 or len(rows[0]) != len(self._names):
            given = len(rows[0]) if rows else 0
            names = ", ".join(self._names)
            raise ValueError(f"expected {len(self._names)} fields ({names}), given {given}")
        self._converted(rows)
        return rows[0]

    def _converted(self, rows: Sequence[Sequence[str]]) -> list[Sequence[str] | npt.NDArray[Any]]:
        fields = zip(*rows, strict=True)
        return [
            column if of_type is None or of_type.is_text else of_type.convert(column)
            for column, of_type in zip(fields, self._types, strict=True)
        ]

    def as_records(self, rows: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """A dict for each row, with Python's own types."""
        names = self._names
        if not any(self._types) or not rows:
            return [dict(zip(names, row, strict=True)) for row in rows]
        columns = [
            column.tolist() if isinstance(column, np.ndarray) else column for column in self._converted(rows)
        ]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def as_columns(self, rows: Sequence[Sequence[str]]) -> Columns:
        """An array for each column."""
        return Columns(dict(zip(self._names, map(np.asarray, self._converted(rows)), strict=True)))


def _texts(values: Sequence[bytes | None]) -> list[str]:
    texts = b"\n".join(values).decode().split("\n")  # type: ignore[arg-type]  # None is a TypeError, as meant
    if len(texts) == len(values):
        return texts
    return [value.decode() for value in values if value is not None]  # some have line ends within quotes


def _names_of(batch: Batch) -> tuple[str, ...]:
    if isinstance(batch, Columns):
        return batch.names
    first = batch[0] if len(batch) else {}
    return tuple(first) if isinstance(first, dict) else ()


class _LineMaker:
    """Makes lines of records."""

    def __init__(self, names: tuple[str, ...], delimiter: str) -> None:
        self._names = names
        self._text = io.StringIO()
        self._writer = csv.writer(self._text, delimiter=delimiter, lineterminator="\n")

    def line(self, record: Any) -> bytes:
        """One line without its end; raises ``ValueError`` or ``TypeError`` with the reason."""
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
    raise TypeError(
        f"column {name!r}: expected text, a number, a truth value or None, given {type(value).__name__}"
    )
