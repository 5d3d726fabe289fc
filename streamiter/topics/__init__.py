"""Topics: durable logs in partitions, and what their bytes mean.

The protocol is in `topic.py`, the way from a URL to a connector in `lookup.py`, decoders and encoders in
`formats/`, topics in memory in `memory/`. Connectors to servers and files are packages of their own.
"""

from streamiter.topics.formats import Json, JsonColumns, Raw, Text, Typed, WithMetadata
from streamiter.topics.lookup import connector_for, topic
from streamiter.topics.memory import MemoryBroker, MemoryConnector, MemoryTopic
from streamiter.topics.topic import (
    Connector,
    Decoder,
    Encoder,
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

__all__ = [
    "Connector",
    "Decoder",
    "Encoder",
    "Headers",
    "Json",
    "JsonColumns",
    "MemoryBroker",
    "MemoryConnector",
    "MemoryTopic",
    "OutgoingBatch",
    "Raw",
    "ReadRequest",
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
