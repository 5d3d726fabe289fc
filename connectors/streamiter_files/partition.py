"""One file read as one partition: from chunks to batches with offsets."""

from __future__ import annotations

from dataclasses import dataclass

from streamiter.errors import OffsetOutOfRange
from streamiter.topics.topic import TopicBatch
from streamiter_files.chunks import ByteSource, FileState, has_identity, open_chunks, splitter_for
from streamiter_files.csv_format import CsvBatch, parse_header
from streamiter_files.options import FileFormat, FileOptions

__all__ = ["FileLayout", "FilePartition", "count_records"]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What is to be known of a topic's files to read them: their format and the options."""

    format: FileFormat
    options: FileOptions

    @property
    def delimiter(self) -> str | None:
        """What stands between two fields; None for formats that are not CSV."""
        return (self.options.delimiter or self.format.delimiter) if self.format.delimiter else None

    @property
    def has_header(self) -> bool:
        """Whether the first line names the columns."""
        return self.delimiter is not None and self.options.header


class FilePartition:
    """The records of one file from offset ``start`` (the n-th record) to before ``stop``.

    ``fill`` blocks and runs in a thread; the rest is quick and must not be called meanwhile.
    """

    def __init__(
        self,
        number: int,
        state: FileState,
        layout: FileLayout,
        *,
        start: int = 0,
        stop: int | None = None,
        identity: str | None = None,
    ) -> None:
        """``identity`` is that of the file, as :func:`~streamiter_files.chunks.identity_of` gives it."""
        self.number = number
        self.identity = identity
        self.is_ended = stop is not None and stop <= start
        self._state = state
        self._layout = layout
        self._stop = stop
        self._to_skip = self._next_offset = start
        self._columns = layout.options.columns
        self._wants_header = layout.has_header
        self._splitter = splitter_for(layout.format, layout.delimiter, state.path)
        self._chunks: ByteSource | None = None
        self._records: list[bytes] = []
        self._taken = 0
        self._records_seen = 0

    @property
    def has_records(self) -> bool:
        """Whether ``take`` has something to give."""
        return self._taken < len(self._records)

    def fill(self) -> None:
        """Read on until there are records or the file ends."""
        chunks = self._opened
        while not self.has_records and not self.is_ended:
            chunk = chunks.read()
            self._accept(self._splitter.feed(chunk) if chunk else self._splitter.end())
            if not chunk:
                self._end()

    @property
    def _opened(self) -> ByteSource:
        self._chunks = self._chunks or open_chunks(self._state, self._layout.options.chunk_bytes)
        return self._chunks

    def _accept(self, records: list[bytes]) -> None:
        if self._wants_header and records:
            self._read_header(records.pop(0))
        self._records_seen += len(records)
        skipped = min(self._to_skip, len(records))
        self._to_skip -= skipped
        self._records, self._taken = self._before_stop(records[skipped:] if skipped else records), 0

    def _end(self) -> None:
        if self.identity is not None and not has_identity(self.identity, self._opened.beginning):
            raise OffsetOutOfRange(
                f"file {str(self._state.path)!r}, partition {self.number}: its first lines are others now than when "
                f"it was opened: it was replaced while its records up to {self._next_offset + len(self._records)} "
                "were read. Start from 'earliest', and let files be appended to only"
            )
        if self._to_skip:
            raise self._too_short()
        self.is_ended = True

    def _read_header(self, line: bytes) -> None:
        assert self._layout.delimiter is not None
        self._columns = parse_header(
            line, self._layout.delimiter, path=self._state.path, expected=self._layout.options.columns
        )
        self._wants_header = False

    def _before_stop(self, records: list[bytes]) -> list[bytes]:
        if self._stop is None:
            return records
        wanted = self._stop - self._next_offset
        self.is_ended = self.is_ended or len(records) >= wanted
        return records[:wanted]

    def _too_short(self) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"file {str(self._state.path)!r}, partition {self.number}: expected at least {self._next_offset} "
            f"records, as reading is to go on there, found {self._records_seen}; the file was cut or "
            "replaced. Bring it back, or start from 'earliest'"
        )

    def take(self, max_records: int) -> TopicBatch:
        """The next records, at most so many; there must be some."""
        values = self._records[self._taken : self._taken + max_records]
        self._taken += len(values)
        offsets = range(self._next_offset, self._next_offset + len(values))
        self._next_offset = offsets.stop
        timestamps_ms = [self._state.mtime_ms] * len(values)
        if self._layout.delimiter is None:
            return TopicBatch(
                partition=self.number, values=values, offsets=offsets, timestamps_ms=timestamps_ms
            )
        return CsvBatch(
            partition=self.number,
            values=values,
            offsets=offsets,
            timestamps_ms=timestamps_ms,
            columns=self._columns,
            delimiter=self._layout.delimiter,
        )

    @property
    def next_offset(self) -> int:
        """Offset of the record that ``take`` gives next."""
        return self._next_offset

    def lag(self) -> int | None:
        """Records still to come: estimated by the bytes left, None as long as no record was seen."""
        buffered = len(self._records) - self._taken
        left = self._left_bytes()
        if left == 0:
            return buffered
        if self._records_seen == 0:
            return None
        read_bytes = self._state.size_bytes - left
        unread = max(0, left * self._records_seen // max(1, read_bytes) - self._to_skip)
        return self._up_to_stop(buffered + unread)

    def _left_bytes(self) -> int:
        if self.is_ended:
            return 0
        return self._state.size_bytes if self._chunks is None else self._chunks.left_bytes

    def _up_to_stop(self, records: int) -> int:
        return records if self._stop is None else min(records, self._stop - self._next_offset)

    def close(self) -> None:
        """Let go of the file."""
        if self._chunks is not None:
            self._chunks.close()


def count_records(state: FileState, layout: FileLayout) -> int:
    """How many records the file has: reads all of it."""
    partition = FilePartition(0, state, layout)
    records = 0
    try:
        while not partition.is_ended:
            partition.fill()
            records += len(partition.take(1 << 30)) if partition.has_records else 0
    finally:
        partition.close()
    return records
