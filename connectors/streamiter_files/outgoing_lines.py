"""Which values can be lines of a file, so that reading gives back what was written."""

from __future__ import annotations

from collections.abc import Sequence

from streamiter.errors import RecordTooLarge, TopicError
from streamiter_files.splitting import MAX_RECORD_BYTES, UTF8_MARK

__all__ = ["check_lines", "why_no_line"]


def check_lines(values: Sequence[bytes | None], comment: bytes | None, *, topic: str) -> None:
    """Raise ``TopicError`` for the first value that a line cannot hold; quick where all of them can."""
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
    r"""The reason why a value cannot be a line, or None.

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
