"""Decoders and encoders: from the bytes of a topic to records, and back."""

from streamiter.topics.formats.json import Json, JsonColumns, Typed
from streamiter.topics.formats.raw import Raw, Text, WithMetadata

__all__ = ["Json", "JsonColumns", "Raw", "Text", "Typed", "WithMetadata"]
