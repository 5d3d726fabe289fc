"""From the bytes of a file to its records: chunks, unpacked if needed, split into lines.

`open_chunks` opens a `ByteSource`, which reads a file in large chunks up to the size that it had at a `FileState`. A
`LineSplitter` splits the chunks into records. An identity (`file_identity`) tells a file from one that replaces it.
Readers and writers share the locks of this module, which are advisory: they hold between readers and writers of this
package, on systems with ``flock``. All of it blocks and runs in threads, by way of `OneAtATime`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final, Protocol, TypeVar

import numpy as np

from streamiter.errors import RecordTooLarge, TopicError
from streamiter.topics.joined_values import LINE_FEED, JoinedValues
from streamiter.values.helpers.compiled import is_loaded
from streamiter.values.helpers.files import locked
from streamiter_files.options import FileFormat, file_errors, is_gzip

UTF8_MARK: Final = b"\xef\xbb\xbf"

# In a block of this many bytes, of about 200 lines, the ends of lines are found faster than lines become objects.
_JOINED_FROM: Final = 20_000
_SPACE: Final = 32

# A longer line is a sign of another kind of file, or of a quote that is not closed. It is refused before it fills the
# memory. For comparison: Kafka takes 1 MiB by default, and large models as JSON have about 10 MiB.
MAX_RECORD_BYTES: Final = 64 << 20


def splitter_for(known: FileFormat, delimiter: str | None, path: Path) -> LineSplitter:
    """Return the splitter of a format.

    A record is one line, or in CSV the lines within one pair of quotes. A line ends with a line feed; a carriage
    return before it belongs to the end. Lines of white space are not records, nor are comments in formats that have
    them. A byte order mark at the beginning is dropped.
    """
    delimiter = delimiter or known.delimiter
    if known.delimiter and delimiter:
        return CsvSplitter(path, delimiter)
    if known.name == "jsonl":
        return JsonSplitter(path)
    return LineSplitter(path, known.comment)


Lines = Sequence[bytes | None]
"""Records, none of which is None: a list, or ``JoinedValues``."""


class LineSplitter:
    r"""Splits the chunks of a file into lines.

    >>> lines = LineSplitter(Path("a.txt"))
    >>> lines.feed(b"a\r\n\nb\nc"), lines.end()
    ([b'a', b'b'], [b'c'])
    """

    def __init__(self, path: Path, comment: bytes | None = None) -> None:
        self._path = path
        self._comment = comment
        self._rest = b""
        self._begun = False

    def feed(self, chunk: bytes) -> Lines:
        """Return the records that are complete with this chunk."""
        return self._take(self._rest + chunk if self._rest else chunk, at_end=False)

    def end(self) -> Lines:
        """Return the last record of a file that does not end with a line feed."""
        records = self._take(self._rest + b"\n", at_end=True) if self._rest else []
        if self._rest:
            raise self._unfinished()
        return records

    def _take(self, block: bytes, *, at_end: bool) -> Lines:
        if not self._begun:
            if len(block) < len(UTF8_MARK) and not at_end:
                self._rest = block
                return []
            self._begun, block = True, block.removeprefix(UTF8_MARK)
        records, self._rest = self._split(block)
        self._check_size()
        return records if isinstance(records, JoinedValues) else self._cleaned(records, block)

    def _split(self, block: bytes) -> tuple[list[bytes] | JoinedValues, bytes]:
        end = block.rfind(b"\n") + 1
        if end == 0:
            return [], block
        return block[: end - 1].split(b"\n"), block[end:]

    def _cleaned(self, records: list[bytes], block: bytes) -> list[bytes]:
        records = list(filter(bytes.strip, records))
        if b"\r" in block:  # found fifty times as quickly as b"\r\n"
            records = [record.removesuffix(b"\r") for record in records]
        comment = self._comment
        if comment is not None and comment in block:
            records = [record for record in records if not record.startswith(comment)]
        return records

    def _check_size(self) -> None:
        if len(self._rest) > MAX_RECORD_BYTES:
            raise RecordTooLarge(
                f"file {str(self._path)!r}: a record has more than {MAX_RECORD_BYTES} bytes; it begins with "
                f"{self._rest[:40]!r}. Is this a file of lines?{self._hint()}"
            )

    def _hint(self) -> str:
        return ""

    def _unfinished(self) -> TopicError:
        return TopicError(f"file {str(self._path)!r}: the last record {self._rest[:40]!r} has no end")


class JsonSplitter(LineSplitter):
    """Splits the chunks of a file of JSON; many lines stay in one buffer, from which ``JsonColumns`` decodes them."""

    def _split(self, block: bytes) -> tuple[list[bytes] | JoinedValues, bytes]:
        end = block.rfind(b"\n") + 1
        if end < _JOINED_FROM or b"\r" in block or not is_loaded():
            return super()._split(block)
        data = np.frombuffer(block, np.uint8, end)
        ends = np.flatnonzero(data == LINE_FEED)
        # All white space has codes up to that of a space, and a line that begins with it may be blank.
        if data[0] <= _SPACE or (data[ends[:-1] + 1] <= _SPACE).any():
            return super()._split(block)
        return JoinedValues(data, ends, ends[:0]), block[end:]


def record_pattern(delimiter: str) -> re.Pattern[bytes]:
    r"""Return a pattern that matches one CSV record with its line feed. A field in quotes may contain line feeds.

    A quote within a field that did not begin with a quote is an ordinary character, as for Python's ``csv``. The
    repetitions are possessive, so a record without a closing quote fails to match in linear time.

    >>> record_pattern(",").match(b'1,"a\nb"\n2,c\n').group()
    b'1,"a\nb"\n'
    """
    separator = re.escape(delimiter).encode()
    plain = rb"[^" + separator + rb"\n]*"
    field = rb'(?:"[^"]*+(?:""[^"]*+)*+"' + plain + rb'|(?!")' + plain + rb")"
    return re.compile(field + rb"(?:" + separator + field + rb")*\n")


class CsvSplitter(LineSplitter):
    """Splits the chunks of a CSV file into records."""

    def __init__(self, path: Path, delimiter: str) -> None:
        super().__init__(path)
        self._pattern = record_pattern(delimiter)

    def _split(self, block: bytes) -> tuple[list[bytes] | JoinedValues, bytes]:
        if b'"' not in block:
            return super()._split(block)
        records: list[bytes] = []
        position = 0
        while match := self._pattern.match(block, position):
            records.append(block[position : match.end() - 1])
            position = match.end()
        return records, block[position:]

    def _hint(self) -> str:
        return " Or is a quote not closed?" if b'"' in self._rest else ""

    def _unfinished(self) -> TopicError:
        opened = self._rest[:40]
        return TopicError(f"file {str(self._path)!r}: a quote is not closed in the record that begins {opened!r}")


# zlib's window bits for the largest window and a gzip header (zlib manual, inflateInit2).
_GZIP: Final = 16 + zlib.MAX_WBITS


# The size of the beginning by which a file is told from one that replaces it: some tens of lines, in one page.
_BEGINNING_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file when a reader is opened; bytes that are appended later are not read."""

    path: Path
    """The path of the file."""
    size_bytes: int
    """The size of the file as it is stored."""
    mtime_ms: int
    """The time of its last change."""


def file_state(path: Path) -> FileState:
    """Return the state of a file between two appends of the writers of this package; check that it can be read."""
    with file_errors(path):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block here
        try:
            if not S_ISREG(os.fstat(handle).st_mode):
                raise TopicError(f"file {str(path)!r}: expected a regular file, not a folder, pipe or device")
            with locked(handle, shared=True):
                status = os.fstat(handle)
        finally:
            os.close(handle)
    return FileState(path, status.st_size, status.st_mtime_ns // 1_000_000)


def file_identity(path: Path, *, is_table: bool = False) -> str | None:
    """Return a text that tells a file from one that replaces it: the length and the checksum of its beginning.

    The beginning of lines has whole lines only, or a whole member of gzip, because the next writer cuts off a torn end.
    None where there is no such beginning yet, as in an empty file.
    """
    with file_errors(path), path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
    if is_table:
        return _identity(beginning) if beginning else None
    whole = _whole_member(beginning) if is_gzip(path.name) else _whole_lines(beginning)
    return _identity(whole) if whole else None


def has_identity(identity: str, beginning: Callable[[int], bytes]) -> bool:
    """Return whether it is the identity of a file; ``beginning(n)`` returns the first n bytes of the file."""
    return _identity(beginning(int(identity.split()[1]))) == identity


def _identity(beginning: bytes) -> str:
    return f"first {len(beginning)} bytes={hashlib.sha256(beginning).hexdigest()}"


def _whole_lines(beginning: bytes) -> bytes:
    end = beginning.rfind(b"\n") + 1
    return beginning if len(beginning) == _BEGINNING_BYTES and not end else beginning[:end]


def _whole_member(beginning: bytes) -> bytes:
    member = zlib.decompressobj(_GZIP)
    try:
        member.decompress(beginning)
    except zlib.error:
        return b""  # reading the file raises the error
    if member.eof:
        return beginning[: len(beginning) - len(member.unused_data)]
    return beginning if len(beginning) == _BEGINNING_BYTES else b""


class ByteSource(Protocol):
    """The content of a file, chunk after chunk."""

    @property
    def left_bytes(self) -> int:
        """The number of stored bytes that are not read yet."""

    def read(self) -> bytes:
        """Return the next chunk; empty at the end."""

    def beginning(self, count: int) -> bytes:
        """Return the first ``count`` bytes of the file as they are stored now."""

    def close(self) -> None:
        """Close the file."""


def open_chunks(state: FileState, chunk_bytes: int) -> ByteSource:
    """Open the content of the file, up to the size of its state."""
    plain = PlainChunks(state, chunk_bytes)
    return GzipChunks(plain, state.path, chunk_bytes) if is_gzip(state.path.name) else plain


class TornMember(TopicError):
    """A gzip file ends within a member, as after a crash; its first ``whole_bytes`` are intact."""

    def __init__(self, message: str, whole_bytes: int) -> None:
        self.whole_bytes = whole_bytes
        super().__init__(message)


class PlainChunks:
    """The bytes of a file as they are stored, from byte ``begin``."""

    def __init__(self, state: FileState, chunk_bytes: int, *, begin: int = 0) -> None:
        self._state = state
        self._chunk_bytes = chunk_bytes
        self.left_bytes = state.size_bytes - begin
        with file_errors(state.path):
            self._file = state.path.open("rb", buffering=0)
            self._file.seek(begin)

    @property
    def position(self) -> int:
        """The byte that is read next."""
        return self._state.size_bytes - self.left_bytes

    def read(self) -> bytes:
        if self.left_bytes == 0:
            return b""
        with file_errors(self._state.path):
            chunk = self._file.read(min(self._chunk_bytes, self.left_bytes)) or b""
        if not chunk:
            raise TopicError(
                f"file {str(self._state.path)!r}: expected {self._state.size_bytes} bytes as when it was "
                f"opened, found {self.position}: it was cut while it was read"
            )
        self.left_bytes -= len(chunk)
        return chunk

    def beginning(self, count: int) -> bytes:
        with file_errors(self._state.path):
            return os.pread(self._file.fileno(), count, 0)

    def close(self) -> None:
        self._file.close()


class GzipChunks:
    """The unpacked content of a gzip file with one or more members; at most ``chunk_bytes`` at a time."""

    def __init__(self, packed: PlainChunks, path: Path, chunk_bytes: int) -> None:
        self._packed = packed
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._input = b""
        self._member: zlib._Decompress | None = None
        self._whole_bytes = packed.position  # up to the end of the last member that was read whole

    @property
    def left_bytes(self) -> int:
        """The number of stored bytes that are not read yet."""
        return self._packed.left_bytes + len(self._input)

    def read(self) -> bytes:
        while self._has_input() or self._member is not None:
            chunk = self._unpack()
            if chunk:
                return chunk
        return b""

    def beginning(self, count: int) -> bytes:
        return self._packed.beginning(count)

    def _has_input(self) -> bool:
        self._input = self._input or self._packed.read()
        if self._member is None:  # zeros between members are padding (gzip manual, "tape")
            self._input = self._input.lstrip(b"\0")
            while not self._input and self._packed.left_bytes:
                self._input = self._packed.read().lstrip(b"\0")
        return bool(self._input)

    def _unpack(self) -> bytes:
        member = self._member = self._member or zlib.decompressobj(_GZIP)
        at_end = not self._input
        try:
            chunk = member.decompress(self._input, self._chunk_bytes)
        except zlib.error as error:
            raise TopicError(self._message(str(error))) from None
        if member.eof:
            self._input, self._member = member.unused_data, None
            self._whole_bytes = self._packed.position - len(self._input)
            return chunk
        self._input = member.unconsumed_tail
        if at_end and not chunk:
            raise TornMember(self._message("the end of the file within compressed data"), self._whole_bytes)
        return chunk

    def _message(self, given: str) -> str:
        return (
            f"file {str(self._path)!r}: expected gzip data, given {given}; the member that begins at byte "
            f"{self._whole_bytes} is broken before byte {self._packed.position}; the members before it are intact"
        )

    def close(self) -> None:
        self._packed.close()


Result = TypeVar("Result")


class OneAtATime:
    """Runs blocking calls in threads, one after the other.

    A thread cannot be cancelled. When the waiting task is cancelled, the call continues, and ``settle`` waits for it
    and raises its error; ``run`` settles first. So the effects of a call are never lost, and no later call overtakes
    it.
    """

    def __init__(self) -> None:
        self._pending: asyncio.Task[object] | None = None

    async def run(self, call: Callable[[], Result]) -> Result:
        """Return the result of ``call``, which runs after the call before."""
        await self.settle()
        pending = asyncio.ensure_future(asyncio.to_thread(call))
        self._pending = pending
        await asyncio.wait([pending])
        self._pending = None
        return pending.result()

    async def settle(self) -> None:
        """Wait for the call of a cancelled ``run``, if there is one; raise its error."""
        pending = self._pending
        if pending is not None:
            await asyncio.wait([pending])
            self._pending = None
            pending.result()
