"""Topics: durable logs in partitions, and what their bytes mean.

Newcomers read in this order: `topic` (the protocol), `urls` (from a URL to a connector, and passwords in URLs and
options), `formats` and `json_columns` (decoders and encoders), `schema_registry`, `schema_formats` and
`protobuf_format` (those with schemas in a registry), `source_and_sink` (topics as steps of a flow), `dead_letters`,
`memory` (topics in memory), `compacted` (the last record of a key), `connecting` (for authors of a connector).
Connectors to servers and files are packages of their own.
"""

from typing import TYPE_CHECKING

from streamiter.topics.topic import (
    Connector,
    Decoder,
    Encoder,
    GroupPositions,
    Headers,
    OutgoingBatch,
    ReadRequest,
    SizeLimit,
    StartPosition,
    StopPosition,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicReader,
    TopicRecord,
    TopicWriter,
    Transactions,
)
from streamiter.topics.urls import connector_for, topic

if TYPE_CHECKING:
    from streamiter.topics.formats import Json, Raw, Text, Typed, WithMetadata
    from streamiter.topics.json_columns import JsonColumns
    from streamiter.topics.memory import MemoryBroker, MemoryConnector, MemoryTopic
    from streamiter.topics.protobuf_format import Protobuf
    from streamiter.topics.schema_formats import Avro, JsonSchema
    from streamiter.topics.schema_registry import SchemaReference, SchemaRegistry
else:
    from streamiter.values.helpers.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "streamiter.topics.formats": "Json Raw Text Typed WithMetadata",
            "streamiter.topics.json_columns": "JsonColumns",
            "streamiter.topics.memory": "MemoryBroker MemoryConnector MemoryTopic",
            "streamiter.topics.protobuf_format": "Protobuf",
            "streamiter.topics.schema_formats": "Avro JsonSchema",
            "streamiter.topics.schema_registry": "SchemaReference SchemaRegistry",
        },
    )

__all__ = [
    "Avro",
    "Connector",
    "Decoder",
    "Encoder",
    "GroupPositions",
    "Headers",
    "Json",
    "JsonColumns",
    "JsonSchema",
    "MemoryBroker",
    "MemoryConnector",
    "MemoryTopic",
    "OutgoingBatch",
    "Protobuf",
    "Raw",
    "ReadRequest",
    "SchemaReference",
    "SchemaRegistry",
    "SizeLimit",
    "StartPosition",
    "StopPosition",
    "Text",
    "Topic",
    "TopicBatch",
    "TopicDescription",
    "TopicReader",
    "TopicRecord",
    "TopicWriter",
    "Transactions",
    "Typed",
    "WithMetadata",
    "connector_for",
    "topic",
]
