"""Batches of CSV lines that know their columns, so that a decoder needs no other knowledge of the file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from streamiter.errors import TopicError
from streamiter.topics.topic import TopicBatch

__all__ = ["CsvBatch", "parse_header"]


class CsvBatch(TopicBatch):
    """Records of one CSV file with the names of their columns (None where the file has no header)."""

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

    def __getitem__(self, which: slice) -> CsvBatch:
        return self._with_columns(super().__getitem__(which))

    def take(self, indices: Sequence[int]) -> CsvBatch:
        """The records at ``indices``, in that order."""
        return self._with_columns(super().take(indices))

    def _with_columns(self, part: TopicBatch) -> CsvBatch:
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
    """The names in the first record of a file.

    Raises ``TopicError`` for a name that comes twice or is empty, and where other names are ``expected``.
    """
    try:
        [names] = csv.reader([line.decode()], delimiter=delimiter, strict=True)
    except (UnicodeDecodeError, csv.Error) as error:
        raise TopicError(
            f"file {str(path)!r}: expected a header of names, given {line[:80]!r} ({error})"
        ) from None
    if len(set(names)) < len(names) or not all(names):
        raise TopicError(
            f"file {str(path)!r}: expected a header of names that differ, given {names}; for a file without "
            "header give the options header=False and columns=(…)"
        )
    if expected is not None and tuple(names) != expected:
        raise TopicError(
            f"file {str(path)!r}: expected the header {', '.join(expected)} (option columns), "
            f"given {', '.join(names)}"
        )
    return tuple(names)
