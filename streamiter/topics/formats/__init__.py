"""Decoders and encoders: what the bytes of a topic mean. One family a file."""

from streamiter.topics.formats.json import Json, JsonColumns, Typed
from streamiter.topics.formats.raw import Raw, Text, WithMetadata

__all__ = ["Json", "JsonColumns", "Raw", "Text", "Typed", "WithMetadata"]
