"""From where to where one file is read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from streamiter.errors import OffsetOutOfRange
from streamiter.topics.positions import timestamp_of
from streamiter.topics.topic import ReadRequest

__all__ = ["bounds"]


def bounds(request: ReadRequest, number: int, mtime_ms: int, *, topic: str) -> tuple[int, int | None]:
    """The first offset to read of partition ``number``, and the one to stop before (None: the end).

    >>> bounds(ReadRequest(positions={0: 7}, stop="latest"), 0, 0, topic="t")
    (7, None)
    """
    start = _start(request, number, mtime_ms)
    if start is None:
        return 0, 0
    if start < 0:
        raise OffsetOutOfRange(f"topic {topic!r}, partition {number}: expected offsets from 0, given {start}")
    return start, request.stop.get(number, start) if isinstance(request.stop, Mapping) else None


def _start(request: ReadRequest, number: int, mtime_ms: int) -> int | None:
    """None is the end of the file."""
    if request.positions is not None:
        return request.positions.get(number, 0)
    start = request.start
    if isinstance(start, datetime):
        return 0 if mtime_ms >= timestamp_of(start) else None
    if isinstance(start, Mapping):
        return start.get(number, 0)
    return None if start == "latest" else 0
