"""Values together with where they come from."""

from __future__ import annotations

from typing import Any, final

from streamiter.records import Batch
from streamiter.topics.topic import Decoder, TopicBatch

__all__ = ["WithMetadata"]


@final
class WithMetadata:
    """Records as dicts: what another decoder makes of the value, with key, time stamp and origin.

    >>> from streamiter.topics import Json
    >>> decoder = WithMetadata(Json())
    >>> decoder.decode(TopicBatch(partition=3, offsets=[7], keys=[b"k"], values=[b"[1]"], timestamps_ms=[9]))
    [{'key': b'k', 'value': [1], 'timestamp_ms': 9, 'partition': 3, 'offset': 7, 'headers': ()}]
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def struct_types(self) -> tuple[type[Any], ...]:
        """Those of the inner decoder."""
        return getattr(self.decoder, "struct_types", ())

    def decode(self, batch: TopicBatch) -> Batch:
        """Raises the ``DecodeError`` of the inner decoder."""
        columns = zip(
            batch.keys,
            self.decoder.decode(batch),
            batch.timestamps_ms,
            batch.offsets,
            batch.headers,
            strict=True,
        )
        return [
            {
                "key": key,
                "value": value,
                "timestamp_ms": timestamp_ms,
                "partition": batch.partition,
                "offset": offset,
                "headers": headers,
            }
            for key, value, timestamp_ms, offset, headers in columns
        ]

    def __repr__(self) -> str:
        return f"WithMetadata({self.decoder!r})"
