"""All that is used of aiokafka, in one place: its connections, its requests and its record format.

aiokafka's consumer and producer are not used: their background tasks retry some failures for ever and keep
to themselves why they do, and building an object with eleven fields for each record takes more time than
reading it. The loops in this package send aiokafka's requests over aiokafka's connections, each with a
deadline.
"""

from __future__ import annotations

from typing import Any, Protocol

from aiokafka.admin.config_resource import ConfigResourceType  # type: ignore[import-untyped]
from aiokafka.conn import (  # type: ignore[import-untyped]
    AIOKafkaConnection as Connection,
)
from aiokafka.conn import CloseReason, create_conn
from aiokafka.errors import (  # type: ignore[import-untyped]
    AuthenticationFailedError,
    IllegalSaslStateError,
    IncompatibleBrokerVersion,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedCodecError,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import (  # type: ignore[import-untyped]
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
)
from aiokafka.protocol.api import Request, RequestStruct  # type: ignore[import-untyped]
from aiokafka.protocol.api import Response as ResponseStruct
from aiokafka.protocol.commit import OffsetCommitRequest  # type: ignore[import-untyped]
from aiokafka.protocol.coordination import FindCoordinatorRequest  # type: ignore[import-untyped]
from aiokafka.protocol.fetch import FetchRequest  # type: ignore[import-untyped]
from aiokafka.protocol.metadata import MetadataRequest  # type: ignore[import-untyped]
from aiokafka.protocol.offset import OffsetRequest  # type: ignore[import-untyped]
from aiokafka.protocol.produce import ProduceRequest  # type: ignore[import-untyped]
from aiokafka.protocol.transaction import (  # type: ignore[import-untyped]
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)
from aiokafka.protocol.types import (  # type: ignore[import-untyped]
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord  # type: ignore[import-untyped]
from aiokafka.record.default_records import (  # type: ignore[import-untyped]
    DefaultRecordBatchBuilder as RecordBatchBuilder,
)
from aiokafka.record.memory_records import MemoryRecords  # type: ignore[import-untyped]

__all__ = [
    "ABORT_MARKER",
    "TOPIC_RESOURCE",
    "AddPartitionsToTxnRequest",
    "AuthenticationFailedError",
    "Boolean",
    "CloseReason",
    "CompactArray",
    "CompactBytes",
    "CompactString",
    "Connection",
    "ControlRecord",
    "CreatePartitionsRequest",
    "CreateTopicsRequest",
    "DeleteTopicsRequest",
    "DescribeConfigsRequest",
    "EndTxnRequest",
    "FetchRequest",
    "FindCoordinatorRequest",
    "IllegalSaslStateError",
    "IncompatibleBrokerVersion",
    "InitProducerIdRequest",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "KafkaError",
    "MemoryRecords",
    "MetadataRequest",
    "OffsetCommitRequest",
    "OffsetRequest",
    "ProduceRequest",
    "Record",
    "RecordBatchBuilder",
    "Request",
    "RequestStruct",
    "Response",
    "ResponseStruct",
    "SaslAuthenticationFailed",
    "Schema",
    "TaggedFields",
    "UnsupportedCodecError",
    "UnsupportedSaslMechanismError",
    "create_conn",
]

TOPIC_RESOURCE: int = ConfigResourceType.TOPIC.value

Response = Any
"""A decoded response; its fields are those of the protocol, by the names aiokafka gives them."""


class Record(Protocol):
    """A record as aiokafka's parser gives it."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> list[tuple[str, bytes | None]]: ...
