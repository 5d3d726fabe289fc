"""What a crash may leave at the end of a file, and how it is set right before more is appended.

A process killed within a write leaves a torn last line (in a gzip file: a torn member). Whoever appended it
was never told that it is stored, and will write it again. So it is cut off, and as a file that somebody made
by hand may simply lack its last line feed, what is cut is kept in a hidden file beside it (``.<name>.torn``).
A last line that is a whole JSON object, list or string is completed instead: a torn one never is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import orjson

from streamiter.errors import TopicError
from streamiter_files.chunks import FileState, GzipChunks, PlainChunks, TornMember
from streamiter_files.splitting import MAX_RECORD_BYTES

__all__ = ["is_whole_json", "mend_lines", "mend_members", "torn_path"]

_log: Final = logging.getLogger(__name__)

# Read backwards in steps of a few lines' size.
_STEP_BYTES: Final = 64 << 10


def torn_path(path: Path) -> Path:
    """Where torn ends of ``path`` are kept.

    >>> str(torn_path(Path("out/clicks.jsonl")))
    'out/.clicks.jsonl.torn'
    """
    return path.with_name(f".{path.name}.torn")


def is_whole_json(line: bytes) -> bool:
    """Whether it is a JSON value of which no beginning is one: 12 may be a torn 123, {} is whole.

    >>> is_whole_json(b'{"a": 1}'), is_whole_json(b'{"a": 1'), is_whole_json(b"12")
    (True, False, False)
    """
    try:
        return isinstance(orjson.loads(line), (dict, list, str))
    except orjson.JSONDecodeError:
        return False


def mend_lines(handle: int, path: Path, size_bytes: int, is_whole: Callable[[bytes], bool] | None) -> None:
    """See to it that the open file of ``size_bytes`` ends with a whole line."""
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
    """See to it that the open gzip file ends with a whole member; what lies before ``begin`` is known to.

    True where its last line has no line feed: then the next member has to begin with one.
    """
    try:
        return _last_byte(path, size_bytes, begin) != b"\n"
    except TornMember as torn:
        _check_torn_size(path, size_bytes - torn.whole_bytes)
        _cut(handle, path, torn.whole_bytes, size_bytes)
        return _last_byte(path, torn.whole_bytes, begin) != b"\n"


def _last_byte(path: Path, size_bytes: int, begin: int) -> bytes:
    members = GzipChunks(
        PlainChunks(FileState(path, size_bytes, 0), _STEP_BYTES, begin=begin), path, _STEP_BYTES
    )
    last = b"\n"
    try:
        while chunk := members.read():
            last = chunk[-1:]
    finally:
        members.close()
    return last


def _check_torn_size(path: Path, size_bytes: int) -> None:
    if size_bytes > MAX_RECORD_BYTES:
        raise TopicError(
            f"file {str(path)!r}: expected lines to append to, found none in the last {size_bytes} bytes; "
            "nothing was changed. Name another file"
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
