"""All that is used of aiokafka, in one place: its connections, its requests and its record format.

aiokafka's consumer and producer are not used: their background tasks retry some failures for ever and keep
to themselves why they do, and building an object with eleven fields for each record takes more time than
reading it. The loops in this package send aiokafka's requests over aiokafka's connections, each with a
deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from aiokafka.admin.config_resource import ConfigResourceType  # type: ignore[import-untyped]
from aiokafka.conn import AIOKafkaConnection as Connection  # type: ignore[import-untyped]
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
from aiokafka.protocol.api import (  # type: ignore[import-untyped]
    Request,
    RequestStruct,
)
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
from aiokafka.record.control_record import (  # type: ignore[import-untyped]
    ABORT_MARKER,
    ControlRecord,
)
from aiokafka.record.default_records import DefaultRecordBatchBuilder as RecordBatchBuilder  # type: ignore[import-untyped]
from aiokafka.record.memory_records import MemoryRecords  # type: ignore[import-untyped]

__all__ = [
    "ABORT_MARKER",
    "TOPIC_RESOURCE",
    "AddPartitionsToTxnRequest",
    "AuthenticationFailedError",
    "CloseReason",
    "Connection",
    "ControlRecord",
    "CreatePartitionsRequest",
    "CreateTopicsRequest",
    "DeleteTopicsRequest",
    "DescribeConfigsRequest",
    "EndTxnRequest",
    "FetchTopicRequest",
    "FindCoordinatorRequest",
    "IllegalSaslStateError",
    "IncompatibleBrokerVersion",
    "InitProducerIdRequest",
    "KafkaError",
    "KafkaRecord",
    "MemoryRecords",
    "MetadataRequest",
    "OffsetCommitRequest",
    "OffsetRequest",
    "ProduceRequest",
    "RecordBatchBuilder",
    "RenewProducerRequest",
    "Response",
    "SaslAuthenticationFailed",
    "TopicMetadataRequest",
    "UnsupportedCodecError",
    "UnsupportedSaslMechanismError",
    "create_conn",
    "fetched_partitions",
    "topic_metadata",
]


TOPIC_RESOURCE: int = ConfigResourceType.TOPIC.value

Response = Any
"""A decoded response; its fields are those of the protocol, by the names aiokafka gives them."""


class KafkaRecord(Protocol):
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


_NO_TAGS: Final[Mapping[int, bytes]] = {}
# In place of an id where there is none: brokers before 2.8, and topics of a cluster that was upgraded from these.
_NO_ID: Final = UUID(int=0)


class Uuid:
    """A field of 16 bytes."""

    @staticmethod
    def encode(value: UUID) -> bytes:
        """The bytes of an id."""
        return value.bytes

    @staticmethod
    def decode(data: BytesIO) -> UUID:
        """The id that comes next."""
        return UUID(bytes=data.read(16))

    @staticmethod
    def repr(value: UUID) -> str:
        """For aiokafka's log."""
        return str(value)


# -- InitProducerId ----------------------------------------------------------------------------------------


class _RenewalResponse(ResponseStruct):  # type: ignore[misc]
    API_KEY = 22
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _Renewal(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY = _RenewalResponse.API_KEY
    API_VERSION = _RenewalResponse.API_VERSION
    RESPONSE_TYPE = _RenewalResponse
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class RenewProducerRequest(Request[_Renewal]):  # type: ignore[misc]
    """Asks for the epoch after ``epoch``; the error of one who is not the owner any more is that of a fence.

    With the producer's id and epoch in it, the broker gives a new epoch only if they are still the newest ones of
    the transactional id (KIP-360). Without, as in version 0, it would fence a newer owner in any case. With them it
    still does so while that one has a transaction open, which it aborts first; so this is no way to ask who the
    owner is.

    Requests of versions that aiokafka lacks: a producer's next epoch, the id of a topic, fetches by that id.

    Where a broker does not have such a version of metadata or fetches, the newest one of aiokafka is sent instead.
    """

    API_KEY = _Renewal.API_KEY

    def __init__(self, transactional_id: str, timeout_ms: int, number: int, epoch: int) -> None:
        self._fields = (transactional_id, timeout_ms, number, epoch)

    def build(self, request_struct_class: Any) -> Any:
        """The fields as the protocol has them."""
        return request_struct_class(*self._fields, _NO_TAGS)


# -- Metadata ----------------------------------------------------------------------------------------------


class _MetadataResponse(ResponseStruct):  # type: ignore[misc]
    API_KEY = MetadataRequest.API_KEY
    API_VERSION = 11
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _Metadata(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY = _MetadataResponse.API_KEY
    API_VERSION = _MetadataResponse.API_VERSION
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", Uuid), ("name", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class TopicMetadataRequest(Request[_Metadata]):  # type: ignore[misc]
    """Asks for the leaders of one topic and, from Kafka 2.8 on, for its id. It never creates the topic."""

    API_KEY = _Metadata.API_KEY

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def prepare(self, versions: Any) -> Any:
        """The newest request that the broker knows."""
        try:
            return super().prepare(versions)
        except NotImplementedError:
            return MetadataRequest([self._topic], allow_auto_topic_creation=False).prepare(versions)

    def build(self, request_struct_class: Any) -> Any:
        """The fields as the protocol has them."""
        return request_struct_class([(_NO_ID, self._topic, _NO_TAGS)], False, False, _NO_TAGS)


class TopicMetadata(NamedTuple):
    """What a broker answers about one topic."""

    code: int
    id: UUID | None
    """None where the broker gives none."""
    partitions: Sequence[Sequence[Any]]
    """Error code, number and leader of each, and more."""


def topic_metadata(response: Response) -> TopicMetadata:
    """The answer to a `TopicMetadataRequest`, of either version."""
    [topic] = response.topics
    if response.API_VERSION < _MetadataResponse.API_VERSION:
        return TopicMetadata(topic[0], None, topic[-1])
    code, _name, topic_id, _is_internal, partitions, *_ = topic
    return TopicMetadata(code, None if topic_id == _NO_ID else topic_id, partitions)


# -- Fetch -------------------------------------------------------------------------------------------------


class _FetchResponse(ResponseStruct):  # type: ignore[misc]
    API_KEY = FetchRequest.API_KEY
    API_VERSION = 13
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("session_id", Int32),
        (
            "topics",
            CompactArray(
                ("topic_id", Uuid),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("high_watermark", Int64),
                        ("last_stable_offset", Int64),
                        ("log_start_offset", Int64),
                        (
                            "aborted_transactions",
                            CompactArray(
                                ("producer_id", Int64), ("first_offset", Int64), ("tags", TaggedFields)
                            ),
                        ),
                        ("preferred_read_replica", Int32),
                        ("records", CompactBytes),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _Fetch(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY = _FetchResponse.API_KEY
    API_VERSION = _FetchResponse.API_VERSION
    RESPONSE_TYPE = _FetchResponse
    SCHEMA = Schema(
        ("replica_id", Int32),
        ("max_wait_ms", Int32),
        ("min_bytes", Int32),
        ("max_bytes", Int32),
        ("isolation_level", Int8),
        ("session_id", Int32),
        ("session_epoch", Int32),
        (
            "topics",
            CompactArray(
                ("topic_id", Uuid),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("current_leader_epoch", Int32),
                        ("fetch_offset", Int64),
                        ("last_fetched_epoch", Int32),
                        ("log_start_offset", Int64),
                        ("max_bytes", Int32),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        (
            "forgotten_topics",
            CompactArray(("topic_id", Uuid), ("partitions", CompactArray(Int32)), ("tags", TaggedFields)),
        ),
        ("rack_id", CompactString("utf-8")),
        ("tags", TaggedFields),
    )


class FetchTopicRequest(Request[_Fetch]):  # type: ignore[misc]
    """Fetches from partitions of one topic, given as (number, offset, largest answer in bytes).

    From Kafka 3.1 on it asks by the topic's id: a topic that was deleted and created again between two fetches
    answers with an error, and not with other records. Older brokers, and topics without an id, are asked by name.
    """

    API_KEY = _Fetch.API_KEY

    def __init__(
        self,
        topic: str,
        topic_id: UUID | None,
        partitions: Sequence[tuple[int, int, int]],
        *,
        max_wait_ms: int,
        min_bytes: int,
        max_bytes: int,
        isolation_level: int,
    ) -> None:
        self._topic = topic
        self._topic_id = topic_id
        self._partitions = partitions
        self._limits = (max_wait_ms, min_bytes, max_bytes, isolation_level)

    def prepare(self, versions: Any) -> Any:
        """The newest request that the broker knows."""
        if self._topic_id is not None:
            try:
                return super().prepare(versions)
            except NotImplementedError:
                pass
        return FetchRequest(*self._limits, [(self._topic, list(self._partitions))]).prepare(versions)

    def build(self, request_struct_class: Any) -> Any:
        """The fields as the protocol has them; a field that is not used is 0, -1 or empty, as the protocol asks."""
        partitions = [
            (number, -1, offset, -1, -1, max_bytes, _NO_TAGS)
            for number, offset, max_bytes in self._partitions
        ]
        topics = [(self._topic_id, partitions, _NO_TAGS)]
        return request_struct_class(-1, *self._limits, 0, -1, topics, [], "", _NO_TAGS)


class FetchedPartition(NamedTuple):
    """What a broker answers about one partition."""

    number: int
    code: int
    stable_offset: int
    aborted: list[tuple[int, int]]
    """Producer and first offset of each aborted transaction among the records."""
    records: bytes


def fetched_partitions(response: Response) -> Iterator[FetchedPartition]:
    """The answers to a `FetchTopicRequest`, of any version."""
    for _topic, answers, *_ in response.topics:
        for number, code, _high_watermark, stable_offset, *rest in answers:
            # The only list between the last stable offset and the records, whose other fields differ by version.
            aborted = next((field for field in rest if isinstance(field, list)), [])
            records = next(field for field in reversed(rest) if isinstance(field, bytes | None))
            yield FetchedPartition(
                number, code, stable_offset, [(each[0], each[1]) for each in aborted], records or b""
            )
