"""How large a record a topic takes."""

from __future__ import annotations

from typing import Final

from streamiter.topics.topic import TopicDescription

__all__ = ["RECORD_BYTES_MAX", "record_limit"]

# Kafka's brokers and clients take 1 MiB unless told otherwise, framing and headers included.
RECORD_BYTES_MAX: Final = 1_000_000

# Where a topic tells the largest record it takes: Kafka's name, and that of the memory and SQLite topics.
_LIMIT_SETTINGS: Final = ("max.message.bytes", "max_record_bytes")


def record_limit(description: TopicDescription) -> int:
    """The largest record to write to the topic: its own limit, at most ``RECORD_BYTES_MAX``.

    >>> record_limit(TopicDescription("models", {0: (0, 0)}, {"max.message.bytes": "500000"}))
    500000
    """
    limits = [int(description.settings[name]) for name in _LIMIT_SETTINGS if name in description.settings]
    return min([RECORD_BYTES_MAX, *limits])
