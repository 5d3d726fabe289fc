"""Bytes as they are, and text."""

from __future__ import annotations

from typing import Any, final

from streamiter.records import Batch
from streamiter.topics.formats.failures import decode_each, encode_each
from streamiter.topics.topic import OutgoingBatch, TopicBatch

__all__ = ["Raw", "Text"]


@final
class Raw:
    """Values as bytes, both ways. A record without a value (a tombstone) is None, both ways.

    >>> Raw().decode(TopicBatch(values=[b"a", None]))
    [b'a', None]
    >>> Raw().encode([b"a", "b"])
    Traceback (most recent call last):
    ...
    streamiter.errors.EncodeError: record 1 of the batch: expected bytes or None, given str
    """

    def decode(self, batch: TopicBatch) -> Batch:
        """The values themselves."""
        return list(batch.values)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """The records themselves; bytearray and memoryview are copied."""
        return OutgoingBatch(encode_each(batch, _as_bytes))

    def __repr__(self) -> str:
        return "Raw()"


def _as_bytes(record: Any) -> bytes | None:
    if record is None or type(record) is bytes:
        return record
    if isinstance(record, (bytes, bytearray, memoryview)):
        return bytes(record)
    raise TypeError(f"expected bytes or None, given {type(record).__name__}")


@final
class Text:
    r"""Values as text, both ways. A record without a value (a tombstone) is None, both ways.

    >>> Text().decode(TopicBatch(values=["grün".encode(), None]))
    ['grün', None]
    >>> Text("latin-1").encode(["grün"]).values
    [b'gr\xfcn']
    """

    def __init__(self, encoding: str = "utf-8") -> None:
        "".encode(encoding)  # an unknown encoding is found where it is written
        self.encoding = encoding

    def decode(self, batch: TopicBatch) -> Batch:
        """Raises ``DecodeError`` for bytes that are not of this encoding."""
        return decode_each(batch.values, self._decode_one)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Raises ``EncodeError`` for what is not text, or has no form in this encoding."""
        return OutgoingBatch(encode_each(batch, self._encode_one))

    def _decode_one(self, value: bytes | None) -> str | None:
        return None if value is None else value.decode(self.encoding)

    def _encode_one(self, record: Any) -> bytes | None:
        if record is None:
            return None
        if not isinstance(record, str):
            raise TypeError(f"expected str or None, given {type(record).__name__}")
        return record.encode(self.encoding)

    def __repr__(self) -> str:
        return f"Text({self.encoding!r})"
