"""Decoders and encoders: what the bytes of a topic mean. One family a file."""

from streamiter.topics.formats.json import Json
from streamiter.topics.formats.json_columns import JsonColumns
from streamiter.topics.formats.json_typed import Typed
from streamiter.topics.formats.raw import Raw, Text
from streamiter.topics.formats.with_metadata import WithMetadata

__all__ = ["Json", "JsonColumns", "Raw", "Text", "Typed", "WithMetadata"]
