"""Writing lines to files: the writer, the files that it appends to, and the repair of a file after a crash.

A process that is killed during a write leaves a torn last line (in a gzip file: a torn member). Its writer never got
the answer that the line is stored, and writes it again. So the next writer cuts the torn line off. A file that was
made by hand may only lack its last line feed; therefore the cut bytes are kept in a hidden file next to it
(``.<name>.torn``). A last line that is a whole JSON object, list or string gets its line feed instead, since a torn
line never is one.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Final

import orjson

from streamiter.errors import RecordTooLarge, TopicError, TopicNotFound
from streamiter.topics.connecting import check_outgoing, closed_error, spread
from streamiter.topics.topic import OutgoingBatch, TopicWriter
from streamiter.values.helpers.closing import close_now, closed_after, undone_on_failure
from streamiter.values.helpers.files import locked, sync_folder
from streamiter_files.chunks import (
    MAX_RECORD_BYTES,
    UTF8_MARK,
    FileState,
    GzipChunks,
    OneAtATime,
    PlainChunks,
    TornMember,
)
from streamiter_files.options import file_errors, is_gzip

_log: Final = logging.getLogger(__name__)

# This many bytes are gathered before they are appended: enough to make the hop to a thread cheap, as for reading.
_BUFFER_BYTES: Final = 1 << 20


class FilesWriter(TopicWriter):
    """Appends values as lines; ``flush`` makes them durable.

    Values that lines cannot hold raise ``TopicError`` before any record of the batch is written: None, a value with a
    line feed, and a value of white space only. Headers are refused, too. With several files, the key chooses the file
    (CRC-32 modulo their number). Keys and time stamps are not stored.
    """

    def __init__(self, files: Sequence[AppendFile], *, topic: str, comment: bytes | None) -> None:
        self._files = tuple(files)
        self._gathered: list[list[bytes]] = [[] for _ in files]
        self._gathered_bytes = 0
        self._topic = topic
        self._comment = comment
        self._turn = 0
        self._calls = OneAtATime()
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        """Take a batch; wait for the disk when about 1 MiB has gathered."""
        self._check(batch)
        await self._calls.settle()
        if self._gathered_bytes >= _BUFFER_BYTES:
            await self._calls.run(self._append)
        self._gather(batch)

    def _check(self, batch: OutgoingBatch) -> None:
        if self._is_closed:
            raise closed_error("writer", self._topic)
        check_outgoing(batch, topic=self._topic, partitions=len(self._files))
        if any(batch.headers or ()):
            raise TopicError(
                f"topic {self._topic!r}: expected records without headers, which lines cannot hold; put the "
                "headers into the values, or write to a topic that has headers (kafka://, sqlite://)"
            )
        check_lines(batch.values, self._comment, topic=self._topic)

    def _gather(self, batch: OutgoingBatch) -> None:
        for partition, part in spread(batch, len(self._files), unkeyed=self._turn):
            lines = b"\n".join([*filter(None, part.values), b""])
            self._gathered[partition].append(lines)
            self._gathered_bytes += len(lines)
        self._turn = (self._turn + 1) % len(self._files)

    def _append(self) -> None:
        for file, gathered in zip(self._files, self._gathered, strict=True):
            if gathered:
                lines = b"".join(gathered)
                file.append(lines)
                gathered.clear()
                self._gathered_bytes -= len(lines)

    async def flush(self) -> None:
        """Append the gathered lines and wait until the disk has them. After an error it may be called again."""
        await self._calls.run(self._append_and_sync)

    def _append_and_sync(self) -> None:
        self._append()
        for file in self._files:
            file.sync()

    async def close(self) -> None:
        """Flush, then close the files."""
        if self._is_closed:
            return
        self._is_closed = True
        async with closed_after(partial(self._calls.run, self._close_files)):
            await self.flush()

    def _close_files(self) -> None:
        close_now(file.close for file in self._files)


# The end of a file is read backwards, in steps of a few lines.
_STEP_BYTES: Final = 64 << 10


def torn_path(path: Path) -> Path:
    """Return the path of the file that keeps the torn ends of ``path``.

    >>> str(torn_path(Path("out/clicks.jsonl")))
    'out/.clicks.jsonl.torn'
    """
    return path.with_name(f".{path.name}.torn")


def is_whole_json(line: bytes) -> bool:
    """Return whether the line is a whole JSON value for sure: 12 may be a torn 123, {} is whole.

    >>> is_whole_json(b'{"a": 1}'), is_whole_json(b'{"a": 1'), is_whole_json(b"12")
    (True, False, False)
    """
    try:
        return isinstance(orjson.loads(line), (dict, list, str))
    except orjson.JSONDecodeError:
        return False


def mend_lines(handle: int, path: Path, size_bytes: int, is_whole: Callable[[bytes], bool] | None) -> None:
    """Complete or cut the last line of the open file of ``size_bytes`` if it is torn."""
    if size_bytes == 0 or os.pread(handle, 1, size_bytes - 1) == b"\n":
        return
    end = _end_of_lines(handle, path, size_bytes)
    if is_whole is not None and is_whole(os.pread(handle, size_bytes - end, end)):
        os.write(handle, b"\n")
    else:
        _cut(handle, path, end, size_bytes)


def _end_of_lines(handle: int, path: Path, size_bytes: int) -> int:
    end = size_bytes
    while end > 0:
        begin = max(0, end - _STEP_BYTES)
        found = os.pread(handle, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        _check_torn_size(path, size_bytes - begin)
        end = begin
    return 0


def mend_members(handle: int, path: Path, size_bytes: int, begin: int) -> bool:
    """Cut the last member of the open gzip file if it is torn; the members before ``begin`` are whole.

    Returns True if the last line has no line feed: then the next member must begin with one.
    """
    try:
        return _last_byte(path, size_bytes, begin) != b"\n"
    except TornMember as torn:
        _check_torn_size(path, size_bytes - torn.whole_bytes)
        _cut(handle, path, torn.whole_bytes, size_bytes)
        return _last_byte(path, torn.whole_bytes, begin) != b"\n"


def _last_byte(path: Path, size_bytes: int, begin: int) -> bytes:
    members = GzipChunks(PlainChunks(FileState(path, size_bytes, 0), _STEP_BYTES, begin=begin), path, _STEP_BYTES)
    last = b"\n"
    with contextlib.closing(members):
        while chunk := members.read():
            last = chunk[-1:]
    return last


def _check_torn_size(path: Path, size_bytes: int) -> None:
    if size_bytes > MAX_RECORD_BYTES:
        raise TopicError(
            f"file {str(path)!r}: expected lines to append to, found none in the last {size_bytes} bytes; "
            "the file was not changed. Name another file"
        )


def _cut(handle: int, path: Path, end: int, size_bytes: int) -> None:
    torn = os.pread(handle, size_bytes - end, end)
    kept_in = torn_path(path)
    with kept_in.open("ab") as file:
        file.write(torn + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.ftruncate(handle, end)
    _log.warning(
        "file %r: its last line (%d bytes, %r...) was torn, as by a crash; it was cut off and is kept in %r",
        str(path),
        len(torn),
        torn[:40],
        str(kept_in),
    )


class AppendFile:
    """A file to which whole lines are appended, as plain text or as one gzip member for each append. Every call blocks.

    Several objects, in one process or several, may append to one file: each append holds a lock, repairs the end that a
    crashed writer may have left, and is undone where it fails. ``header`` is the first line of a new file. ``is_whole``
    tells a last line that only lacks its line feed from a torn one.
    """

    def __init__(
        self, path: Path, *, header: bytes | None = None, is_whole: Callable[[bytes], bool] | None = None
    ) -> None:
        self._path = path
        self._gzip = is_gzip(path.name)
        self._header = header
        self._is_whole = is_whole
        self._mended_bytes = 0
        self._folder_synced = False
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        with file_errors(path):
            self._handle = os.open(path, flags, 0o666)
        with undone_on_failure(lambda: os.close(self._handle)):
            self._begin()

    def _begin(self) -> None:
        with file_errors(self._path):
            if not S_ISREG(os.fstat(self._handle).st_mode):
                raise TopicError(f"file {str(self._path)!r}: expected a regular file, not a pipe or device")
        self.append(b"")

    def append(self, lines: bytes) -> None:
        """Append lines, each with its line feed: all of them or none."""
        with file_errors(self._path), locked(self._handle):
            lacks_line_feed = self._mend()
            if self._header is not None and os.fstat(self._handle).st_size == 0:
                self._write(self._header)
            if lines:
                self._write(b"\n" + lines if lacks_line_feed else lines)

    def _mend(self) -> bool:
        """Repair the end that another writer has left since the last append; return whether a line feed is missing."""
        size_bytes = os.fstat(self._handle).st_size
        if size_bytes == self._mended_bytes:
            return False
        if self._gzip:
            begin = self._mended_bytes if self._mended_bytes < size_bytes else 0
            if mend_members(self._handle, self._path, size_bytes, begin):
                return True
        else:
            mend_lines(self._handle, self._path, size_bytes, self._is_whole)
        self._mended_bytes = os.fstat(self._handle).st_size
        return False

    def _write(self, lines: bytes) -> None:
        before_bytes = os.fstat(self._handle).st_size
        left = memoryview(gzip.compress(lines, mtime=0) if self._gzip else lines)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            os.ftruncate(self._handle, before_bytes)
            raise
        self._mended_bytes = os.fstat(self._handle).st_size

    def sync(self) -> None:
        """Make the appended lines durable; raise ``TopicNotFound`` if the file was deleted or replaced."""
        with file_errors(self._path):
            os.fsync(self._handle)
            self._sync_folder()
            if not self._is_in_place():
                raise TopicNotFound(
                    f"file {str(self._path)!r}: it was deleted or replaced while it was written; "
                    "the lines appended since are lost. Open a new writer and write them again"
                )

    def _sync_folder(self) -> None:
        """Make the name of a new file durable, which needs a sync of its folder, see fsync(2)."""
        if self._folder_synced:
            return
        sync_folder(self._path.parent)
        self._folder_synced = True

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._handle))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file; the system writes appended lines that were not synced."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def check_lines(values: Sequence[bytes | None], comment: bytes | None, *, topic: str) -> None:
    """Raise ``TopicError`` for the first value that cannot be a line, since reading would not return it.

    The check is fast if all values can be lines.
    """
    present = [value for value in values if value]
    if len(present) == len(values) and not _is_suspicious(present, comment):
        return
    for index, value in enumerate(values):
        reason = why_no_line(value, comment)
        if reason:
            raise TopicError(
                f"topic {topic!r}: record {index} of the batch cannot be a line: {reason}; "
                "nothing of the batch was written. Encode it, for instance with encode=Json()"
            )
        if value is not None and len(value) > MAX_RECORD_BYTES:
            raise RecordTooLarge(
                f"topic {topic!r}: record {index} of the batch has {len(value)} bytes, expected at most "
                f"{MAX_RECORD_BYTES}; nothing of the batch was written"
            )


def _is_suspicious(values: list[bytes], comment: bytes | None) -> bool:
    block = b"\n".join([b"", *values, b""])
    return (
        block.count(b"\n") != len(values) + 1
        or b"\r\n" in block
        or not all(map(bytes.strip, values))
        or (comment is not None and b"\n" + comment in block)
        or b"\n" + UTF8_MARK in block
        or len(block) > MAX_RECORD_BYTES
    )


def why_no_line(value: bytes | None, comment: bytes | None) -> str | None:
    r"""Return the reason why a value cannot be a line, or None.

    >>> why_no_line(b"a\nb", None)
    'it has a line feed within'
    """
    if value is None:
        return "it is None (a deletion), and files have none"
    if b"\n" in value:
        return "it has a line feed within"
    if value.endswith(b"\r"):
        return "it ends with a carriage return, which would be taken for a part of the line's end"
    if not value.strip():
        return "it is empty or white space, and blank lines are no records"
    if comment is not None and value.startswith(comment):
        return f"it begins with {comment.decode()!r}, as comments do"
    return "it begins with a byte order mark" if value.startswith(UTF8_MARK) else None
