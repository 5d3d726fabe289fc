"""The reader of files: each file is a partition, and several partitions take turns.

A `LinesPartition` turns the chunks of one file into batches of records with offsets. Its ``fill`` blocks, so a
`FilesReader` runs it in a thread.
"""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from streamiter.errors import OffsetOutOfRange, TopicError
from streamiter.topics.connecting import closed_error, timestamp_of
from streamiter.topics.topic import ReadRequest, TopicBatch, TopicReader
from streamiter.values.helpers.closing import close_now, closed_after
from streamiter.values.records import Batch
from streamiter_files.chunks import ByteSource, FileState, Lines, OneAtATime, has_identity, open_chunks, splitter_for
from streamiter_files.csv_format import CsvBatch, parse_header
from streamiter_files.options import FileFormat, FileOptions


class FilesReader(TopicReader):
    """Reads files to the end that each had when the reader was opened.

    ``files_at_once`` files are open and take turns. When one of them ends, the next file is opened. With 1, the files
    are read one after the other, in the order of their partitions.
    """

    def __init__(
        self, partitions: Sequence[FilePartition], *, topic: str, max_records: int, files_at_once: int
    ) -> None:
        self._topic = topic
        self._is_closed = False
        self._partitions = tuple(partitions)
        self._waiting = deque(partitions)
        self._open: deque[FilePartition] = deque()
        self._max_records = max_records
        self._files_at_once = files_at_once
        self._calls = OneAtATime()

    async def read(self) -> TopicBatch | None:
        """Return the next records of a file; None when all files have ended."""
        if self._is_closed:
            raise closed_error("reader", self._topic)
        await self._calls.settle()
        while partition := self._next_partition():
            if not partition.has_records and not partition.is_ended:
                await self._calls.run(partition.fill)
            if partition.has_records:
                self._open.rotate(-1)
                return partition.take(self._max_records)
            partition.close()
            self._open.popleft()
        return None

    def _next_partition(self) -> FilePartition | None:
        while self._waiting and len(self._open) < self._files_at_once:
            self._open.append(self._waiting.popleft())
        return self._open[0] if self._open else None

    def positions(self) -> Mapping[int, int]:
        return {partition.number: partition.next_offset for partition in self._partitions}

    def identities(self) -> Mapping[int, str]:
        return known_identities({partition.number: partition.identity for partition in self._partitions})

    def lag(self) -> Mapping[int, int]:
        """Return the lag, estimated from the bytes that are left. Before the first record of any file it is missing."""
        lags = {partition: partition.lag() for partition in self._partitions}
        known = [(partition, lag) for partition, lag in lags.items() if lag is not None and partition.size_bytes]
        records = sum(partition.next_offset + lag for partition, lag in known)
        if records:
            size_bytes = sum(partition.size_bytes for partition, _ in known)
            for partition in [partition for partition, lag in lags.items() if lag is None]:
                lags[partition] = max(0, partition.size_bytes * records // size_bytes - partition.next_offset)
        return {partition.number: lag for partition, lag in lags.items() if lag is not None}

    async def close(self) -> None:
        self._is_closed = True
        self._waiting.clear()
        async with closed_after(self._close_partitions):
            with suppress(TopicError):  # the failure of a cancelled read, for which no caller waits
                await self._calls.settle()

    def _close_partitions(self) -> None:
        opened = [*self._open]
        self._open.clear()
        close_now(partition.close for partition in opened)


def known_identities(identities: Mapping[int, str | None]) -> dict[int, str]:
    """Return the identities without those of files that have none yet."""
    return {number: identity for number, identity in identities.items() if identity is not None}


class FilePartition(abc.ABC):
    """The records of one file, from the offset ``start`` to before ``stop``.

    ``fill`` blocks and runs in a thread. The other calls do not block, and must not be made meanwhile.
    """

    advice: ClassVar[str]
    """What to do so that no file is replaced while it is read."""

    def __init__(
        self, number: int, state: FileState, *, start: int = 0, stop: int | None = None, identity: str | None = None
    ) -> None:
        """``identity`` is the identity of the file, as :func:`~streamiter_files.chunks.file_identity` returns it."""
        self.number = number
        self.identity = identity
        self.next_offset = start
        """The offset of the record that ``take`` returns next."""
        self.is_ended = stop is not None and stop <= start
        self._state = state
        self._stop = stop
        self._records: Lines | Batch = []
        self._taken = 0

    @property
    def size_bytes(self) -> int:
        return self._state.size_bytes

    @property
    def has_records(self) -> bool:
        return self._taken < len(self._records)

    @abc.abstractmethod
    def fill(self) -> None:
        """Read until there are records or the file ends."""

    def _end(self, records: int) -> None:
        """Check, at the end of the file, that it is the file that was opened and has the records before ``start``."""
        found = f"file {str(self._state.path)!r}, partition {self.number}"
        if self.identity is not None and not has_identity(self.identity, self._beginning):
            read = self.next_offset + len(self._records) - self._taken
            raise OffsetOutOfRange(
                f"{found}: its beginning differs from that when it was opened: it was replaced while its records up to "
                f"{read} were read. Start from 'earliest', and {self.advice}"
            )
        if self.next_offset > records:
            raise OffsetOutOfRange(
                f"{found}: expected at least {self.next_offset} records, where reading resumes, found {records}; the "
                "file was cut or replaced. Restore it, or start from 'earliest'"
            )
        self.is_ended = True

    @abc.abstractmethod
    def _beginning(self, count: int) -> bytes:
        """Return the first bytes of the file as they are stored now."""

    def take(self, max_records: int) -> TopicBatch:
        """Return the next records, at most ``max_records``. There must be records."""
        records = self._records[self._taken : self._taken + max_records]
        self._taken += len(records)
        offsets = range(self.next_offset, self.next_offset + len(records))
        self.next_offset = offsets.stop
        return self._batch(records, offsets, [self._state.mtime_ms] * len(records))

    @abc.abstractmethod
    def _batch(self, records: Any, offsets: range, timestamps_ms: list[int]) -> TopicBatch:
        """Return a batch of some of the records."""

    @abc.abstractmethod
    def lag(self) -> int | None:
        """Return the number of records that are left; None where it is not known yet."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file."""


class LinesPartition(FilePartition):
    """The records of a file of lines."""

    advice = "let files be appended to only"

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
        super().__init__(number, state, start=start, stop=stop, identity=identity)
        self._layout = layout
        self._to_skip = start
        self._columns = layout.options.columns
        self._wants_header = layout.has_header
        self._splitter = splitter_for(layout.format, layout.delimiter, state.path)
        self._chunks: ByteSource | None = None
        self._records_seen = 0

    def fill(self) -> None:
        chunks = self._opened
        while not self.has_records and not self.is_ended:
            chunk = chunks.read()
            self._accept(self._splitter.feed(chunk) if chunk else self._splitter.end())
            if not chunk:
                self._end(self._records_seen)

    @property
    def _opened(self) -> ByteSource:
        self._chunks = self._chunks or open_chunks(self._state, self._layout.options.chunk_bytes)
        return self._chunks

    def _beginning(self, count: int) -> bytes:
        return self._opened.beginning(count)

    def _accept(self, records: Lines) -> None:
        if self._wants_header and records:
            header, records = records[0], records[1:]
            assert header is not None
            assert self._layout.delimiter is not None
            self._columns = parse_header(
                header, self._layout.delimiter, path=self._state.path, expected=self._layout.options.columns
            )
            self._wants_header = False
        self._records_seen += len(records)
        skipped = min(self._to_skip, len(records))
        self._to_skip -= skipped
        records = records[skipped:] if skipped else records
        if self._stop is not None:
            wanted = self._stop - self.next_offset
            self.is_ended = self.is_ended or len(records) >= wanted
            records = records[:wanted]
        self._records, self._taken = records, 0

    def _batch(self, records: Lines, offsets: range, timestamps_ms: list[int]) -> TopicBatch:
        if self._layout.delimiter is None:
            return TopicBatch(partition=self.number, values=records, offsets=offsets, timestamps_ms=timestamps_ms)
        return CsvBatch(
            partition=self.number,
            values=records,
            offsets=offsets,
            timestamps_ms=timestamps_ms,
            columns=self._columns,
            delimiter=self._layout.delimiter,
        )

    def lag(self) -> int | None:
        """Return the number of records that are left, estimated from the bytes left; None before any record."""
        buffered = len(self._records) - self._taken
        left = 0 if self.is_ended else self._state.size_bytes if self._chunks is None else self._chunks.left_bytes
        if left == 0:
            return buffered
        if self._records_seen == 0:
            return None
        read_bytes = self._state.size_bytes - left
        unread = max(0, left * self._records_seen // max(1, read_bytes) - self._to_skip)
        records = buffered + unread
        return records if self._stop is None else min(records, self._stop - self.next_offset)

    def close(self) -> None:
        if self._chunks is not None:
            self._chunks.close()


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The format and the options of a topic's files."""

    format: FileFormat
    options: FileOptions

    @property
    def delimiter(self) -> str | None:
        """The text between two fields; None for formats that are not CSV."""
        return (self.options.delimiter or self.format.delimiter) if self.format.delimiter else None

    @property
    def has_header(self) -> bool:
        """Whether the first line names the columns."""
        return self.delimiter is not None and self.options.header


def count_records(state: FileState, layout: FileLayout) -> int:
    """Read the whole file, and return its number of records."""
    partition = LinesPartition(0, state, layout)
    records = 0
    with contextlib.closing(partition):
        while not partition.is_ended:
            partition.fill()
            records += len(partition.take(1 << 30)) if partition.has_records else 0
    return records


def bounds(request: ReadRequest, number: int, mtime_ms: int, *, topic: str) -> tuple[int, int | None]:
    """Return the first offset to read of partition ``number``, and the offset to stop before (None: the end).

    >>> bounds(ReadRequest(positions={0: 7}, stop="latest"), 0, 0, topic="t")
    (7, None)
    """
    given = request.start if request.positions is None else request.positions
    if given == "latest" or (isinstance(given, datetime) and mtime_ms < timestamp_of(given)):
        return 0, 0
    start = given.get(number, 0) if isinstance(given, Mapping) else 0
    if start < 0:
        raise OffsetOutOfRange(f"topic {topic!r}, partition {number}: expected offsets from 0, given {start}")
    return start, request.stop.get(number, start) if isinstance(request.stop, Mapping) else None
