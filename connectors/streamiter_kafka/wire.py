"""The parts of aiokafka that this package uses: connections, requests and the record format.

Only this module imports aiokafka. Its consumer and producer are not used: their background tasks retry some failures
for ever without telling why, and they build an object of eleven fields for each record, which takes longer than reading
the record. The loops of this package send aiokafka's requests over aiokafka's connections, each with a deadline.

Eight requests are defined here, in versions that aiokafka does not have: the next epoch of a producer, the metadata of
a topic with the topic's id, a fetch by that id, the offsets of a group without those of open transactions, the features
of a cluster, and the three requests of transactions of version 2. Where a broker does not know such a version of
metadata, fetch or features, the newest version of aiokafka is sent instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from aiokafka.abc import AbstractTokenProvider  # type: ignore[import-untyped]
from aiokafka.admin.config_resource import ConfigResourceType  # type: ignore[import-untyped]
from aiokafka.conn import AIOKafkaConnection, CloseReason, OAuthAuthenticator  # type: ignore[import-untyped]
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
    ApiVersionRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
)
from aiokafka.protocol.api import Request, RequestStruct, ResponseHeader_v0  # type: ignore[import-untyped]
from aiokafka.protocol.api import Response as ResponseStruct
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest  # type: ignore[import-untyped]
from aiokafka.protocol.coordination import FindCoordinatorRequest  # type: ignore[import-untyped]
from aiokafka.protocol.fetch import FetchRequest  # type: ignore[import-untyped]
from aiokafka.protocol.metadata import MetadataRequest  # type: ignore[import-untyped]
from aiokafka.protocol.offset import OffsetRequest  # type: ignore[import-untyped]
from aiokafka.protocol.produce import ProduceRequest  # type: ignore[import-untyped]
from aiokafka.protocol.transaction import (  # type: ignore[import-untyped]
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
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
from aiokafka.record.default_records import DefaultRecordBatchBuilder as RecordBatchBuilder  # type: ignore[import-untyped]
from aiokafka.record.memory_records import MemoryRecords  # type: ignore[import-untyped]

TOPIC_RESOURCE: int = ConfigResourceType.TOPIC.value


class Response(Protocol):
    """A decoded response: a response has some of these fields, which have the names that aiokafka gives them."""

    API_VERSION: int
    error_code: int
    brokers: Sequence[tuple[int, str, int]]
    controller_id: int
    coordinator_id: int
    producer_id: int
    producer_epoch: int
    topics: Sequence[ResponseRow]
    resources: Sequence[ResponseRow]
    errors: Sequence[ResponseRow]
    topic_errors: Sequence[ResponseRow]
    topic_error_codes: Sequence[ResponseRow]
    tags: Mapping[int, bytes]


ResponseRow = Sequence[Any]
"""The fields of an item of a list in a response; their number and their types depend on the version."""

ApiVersions = dict[int, tuple[int, int]]
"""The lowest and the highest version that a broker knows, by the key of the request."""


class KafkaRecord(Protocol):
    """A record as aiokafka's parser returns it."""

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


class WireBatch(Protocol):
    """A record batch of aiokafka's parser: its compiled and its plain class have no common base."""

    next_offset: int
    is_control_batch: bool
    is_transactional: bool
    producer_id: int

    def validate_crc(self) -> bool: ...
    def __iter__(self) -> Iterator[KafkaRecord]: ...
    def __next__(self) -> KafkaRecord: ...


class Connection(AIOKafkaConnection):  # type: ignore[misc]
    """A connection of aiokafka that also notices a token that the broker refuses."""

    def authenticator_oauth(self) -> BearerAuthenticator:
        return BearerAuthenticator(sasl_oauth_token_provider=self._sasl_oauth_token_provider)


class BearerAuthenticator(OAuthAuthenticator):  # type: ignore[misc]
    """A login by OAUTHBEARER.

    A broker that refuses a token answers with the reason, as a challenge without an error code. aiokafka takes this for
    a login, and the broker then drops the connection without an error. The reply that RFC 7628 (section 3.2.3) demands
    makes the broker answer with an error code.
    """

    _has_replied = False

    async def step(self, payload: bytes | None) -> tuple[bytes, bool] | None:
        """Return the next message to the broker; None after the last one."""
        if payload and not self._has_replied:
            self._has_replied = True
            return b"\x01", True
        message: tuple[bytes, bool] | None = await super().step(payload)
        return message


# Measured: with aiokafka's 64 KiB, a flow that only reads pauses and resumes 1,600 times for 100 MB, and needs a
# tenth more CPU time. A request limits the size of its answer, so this adds nothing to the memory of a connection.
_BUFFER_BYTES: Final = 4_000_000


def buffer_whole_answers(connection: Connection) -> None:
    """Let a connection read an answer without pauses."""
    connection._reader._limit = _BUFFER_BYTES


def fetched_batch_bytes(fetched: bytes, start: int) -> int:
    """Return the size of the record batch, of any format, that begins at an index of a fetched answer."""
    return 12 + int.from_bytes(fetched[start + 8 : start + 12], "big")


_NO_TAGS: Final[Mapping[int, bytes]] = {}
# Stands for a missing id: of brokers before 2.8, and of topics in a cluster that was upgraded from such a version.
_NO_ID: Final = UUID(int=0)


class Uuid:
    """A field of 16 bytes."""

    @staticmethod
    def encode(value: UUID) -> bytes:
        return value.bytes

    @staticmethod
    def decode(data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))

    @staticmethod
    def repr(value: UUID) -> str:
        """Return the id as aiokafka's log shows it."""
        return str(value)


# -- The fields of the requests and of their responses -----------------------------------------------------

_TAGS: Final = ("tags", TaggedFields)
_TEXT: Final = CompactString("utf-8")


def _request_type(
    api_key: int, version: int, *, request: Iterable[object], response: Iterable[object]
) -> type[RequestStruct]:
    """Return the class of a request with these fields. Each list of fields ends with tags, as KIP-482 demands."""
    about = {"API_KEY": api_key, "API_VERSION": version}
    answer = type("Response", (ResponseStruct,), {**about, "SCHEMA": Schema(*response, _TAGS)})
    fields = {"FLEXIBLE_VERSION": True, "RESPONSE_TYPE": answer, "SCHEMA": Schema(*request, _TAGS)}
    return type("Request", (RequestStruct,), {**about, **fields})


def _list_of(name: str, *fields: object) -> tuple[str, CompactArray]:
    """Return the field ``name``: a list of items, each with these fields."""
    return name, CompactArray(*fields, _TAGS)


_PRODUCER: Final = (("producer_id", Int64), ("producer_epoch", Int16))
_NEW_PRODUCER: Final = (("throttle_time_ms", Int32), ("error_code", Int16), *_PRODUCER)

_INIT_PRODUCER_ID: Final = _request_type(
    InitProducerIdRequest.API_KEY,
    3,
    request=[("transactional_id", _TEXT), ("transaction_timeout_ms", Int32), *_PRODUCER],
    response=_NEW_PRODUCER,
)

_METADATA: Final = _request_type(
    MetadataRequest.API_KEY,
    11,
    request=[
        _list_of("topics", ("topic_id", Uuid), ("name", _TEXT)),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
    ],
    response=[
        ("throttle_time_ms", Int32),
        _list_of("brokers", ("node_id", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT)),
        ("cluster_id", _TEXT),
        ("controller_id", Int32),
        _list_of(
            "topics",
            ("error_code", Int16),
            ("name", _TEXT),
            ("topic_id", Uuid),
            ("is_internal", Boolean),
            _list_of(
                "partitions",
                ("error_code", Int16),
                ("partition", Int32),
                ("leader", Int32),
                ("leader_epoch", Int32),
                ("replicas", CompactArray(Int32)),
                ("isr", CompactArray(Int32)),
                ("offline_replicas", CompactArray(Int32)),
            ),
            ("authorized_operations", Int32),
        ),
    ],
)

_FETCH: Final = _request_type(
    FetchRequest.API_KEY,
    13,
    request=[
        ("replica_id", Int32),
        ("max_wait_ms", Int32),
        ("min_bytes", Int32),
        ("max_bytes", Int32),
        ("isolation_level", Int8),
        ("session_id", Int32),
        ("session_epoch", Int32),
        _list_of(
            "topics",
            ("topic_id", Uuid),
            _list_of(
                "partitions",
                ("partition", Int32),
                ("current_leader_epoch", Int32),
                ("fetch_offset", Int64),
                ("last_fetched_epoch", Int32),
                ("log_start_offset", Int64),
                ("max_bytes", Int32),
            ),
        ),
        _list_of("forgotten_topics", ("topic_id", Uuid), ("partitions", CompactArray(Int32))),
        ("rack_id", _TEXT),
    ],
    response=[
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("session_id", Int32),
        _list_of(
            "topics",
            ("topic_id", Uuid),
            _list_of(
                "partitions",
                ("partition", Int32),
                ("error_code", Int16),
                ("high_watermark", Int64),
                ("last_stable_offset", Int64),
                ("log_start_offset", Int64),
                _list_of("aborted_transactions", ("producer_id", Int64), ("first_offset", Int64)),
                ("preferred_read_replica", Int32),
                ("records", CompactBytes),
            ),
        ),
    ],
)


_GROUP_OFFSETS: Final = _request_type(
    OffsetFetchRequest.API_KEY,
    7,
    request=[
        ("group_id", _TEXT),
        _list_of("topics", ("name", _TEXT), ("partitions", CompactArray(Int32))),
        ("require_stable", Boolean),
    ],
    response=[
        ("throttle_time_ms", Int32),
        _list_of(
            "topics",
            ("name", _TEXT),
            _list_of(
                "partitions",
                ("partition", Int32),
                ("committed_offset", Int64),
                ("committed_leader_epoch", Int32),
                ("metadata", _TEXT),
                ("error_code", Int16),
            ),
        ),
        ("error_code", Int16),
    ],
)

_FEATURES: Final = _request_type(
    ApiVersionRequest.API_KEY,
    3,
    request=[("client_software_name", _TEXT), ("client_software_version", _TEXT)],
    response=[
        ("error_code", Int16),
        _list_of("api_versions", ("api_key", Int16), ("min_version", Int16), ("max_version", Int16)),
        ("throttle_time_ms", Int32),
    ],
)
# The one response whose header never has tags, so that a client of any age can read it.
_FEATURES.parse_response_header = staticmethod(ResponseHeader_v0.decode)
_FINALIZED_FEATURES_TAG: Final = 2
_FINALIZED_FEATURES: Final = CompactArray(("name", _TEXT), ("max_level", Int16), ("min_level", Int16), _TAGS)

_PRODUCE_V2: Final = _request_type(
    ProduceRequest.API_KEY,
    12,
    request=[
        ("transactional_id", _TEXT),
        ("required_acks", Int16),
        ("timeout", Int32),
        _list_of("topics", ("name", _TEXT), _list_of("partitions", ("partition", Int32), ("records", CompactBytes))),
    ],
    response=[
        _list_of(
            "topics",
            ("name", _TEXT),
            _list_of(
                "partitions",
                ("partition", Int32),
                ("error_code", Int16),
                ("offset", Int64),
                ("timestamp", Int64),
                ("log_start_offset", Int64),
                _list_of("record_errors", ("index", Int32), ("message", _TEXT)),
                ("error_message", _TEXT),
            ),
        ),
        ("throttle_time_ms", Int32),
    ],
)

_END_TXN_V2: Final = _request_type(
    EndTxnRequest.API_KEY,
    5,
    request=[("transactional_id", _TEXT), *_PRODUCER, ("transaction_result", Boolean)],
    response=_NEW_PRODUCER,
)

_TXN_OFFSETS_V2: Final = _request_type(
    TxnOffsetCommitRequest.API_KEY,
    5,
    request=[
        ("transactional_id", _TEXT),
        ("group_id", _TEXT),
        *_PRODUCER,
        ("generation_id", Int32),
        ("member_id", _TEXT),
        ("group_instance_id", _TEXT),
        _list_of(
            "topics",
            ("name", _TEXT),
            _list_of(
                "partitions", ("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", _TEXT)
            ),
        ),
    ],
    response=[
        ("throttle_time_ms", Int32),
        _list_of("errors", ("topic", _TEXT), _list_of("partition_errors", ("partition", Int32), ("error_code", Int16))),
    ],
)


# -- The requests ------------------------------------------------------------------------------------------


class FlexibleRequest(Request[RequestStruct]):  # type: ignore[misc]
    """A request that is defined here. Where a broker does not know its version, ``older`` of aiokafka is sent."""

    API_KEY = -1

    def __init_subclass__(cls, struct: type[RequestStruct]) -> None:
        super().__init_subclass__()
        cls.API_KEY, cls._CLASSES = struct.API_KEY, (struct,)

    def __init__(self, *fields: object, older: Request | None = None) -> None:
        self._fields = fields
        self._older = older

    def prepare(self, versions: ApiVersions) -> RequestStruct:
        """Return the newest request that the broker knows."""
        try:
            return super().prepare(versions)
        except NotImplementedError:
            if self._older is None:
                raise
            return self._older.prepare(versions)

    def build(self, request_type: Callable[..., RequestStruct]) -> RequestStruct:
        return request_type(*self._fields, _NO_TAGS)


class RenewProducerRequest(FlexibleRequest, struct=_INIT_PRODUCER_ID):
    """Asks for the epoch after ``epoch``. A producer that no longer owns the id gets the error code of a fence.

    The request names the producer's id and epoch. The broker gives a new epoch only if both are still the newest ones
    of the transactional id (KIP-360). A request of version 0 names neither and always fences a newer owner. This
    version fences a newer owner, too, if that owner has a transaction open: the broker first aborts that transaction.
    So the request cannot be used to find out who owns the id.
    """

    def __init__(self, transactional_id: str, timeout_ms: int, number: int, epoch: int) -> None:
        super().__init__(transactional_id, timeout_ms, number, epoch)


class TopicMetadataRequest(FlexibleRequest, struct=_METADATA):
    """Asks for the leaders of one topic and, from Kafka 2.8 on, for the topic's id. It never creates the topic."""

    def __init__(self, topic: str) -> None:
        older = MetadataRequest([topic], allow_auto_topic_creation=False)
        super().__init__([(_NO_ID, topic, _NO_TAGS)], False, False, older=older)


class TopicMetadata(NamedTuple):
    """The answer of a broker about one topic."""

    code: int
    """The error code."""
    id: UUID | None
    """The topic's id; None where the broker gives none."""
    partitions: Sequence[ResponseRow]
    """For each partition its error code, number, leader, and further fields."""


def topic_metadata(response: Response) -> TopicMetadata:
    """Return the answer to a `TopicMetadataRequest`, in either version."""
    [topic] = response.topics
    if response.API_VERSION < _METADATA.API_VERSION:
        return TopicMetadata(topic[0], None, topic[-1])
    code, _name, topic_id, _is_internal, partitions, *_ = topic
    return TopicMetadata(code, None if topic_id == _NO_ID else topic_id, partitions)


class FetchTopicRequest(FlexibleRequest, struct=_FETCH):
    """Fetches from partitions of one topic; each is given as (number, offset, size of the largest answer in bytes).

    From Kafka 3.1 on, the request names the topic's id. If the topic was deleted and created again between two fetches,
    the broker answers with an error and not with records of the new topic. For older brokers, and for topics without an
    id, the request names the topic.
    """

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
        limits = (max_wait_ms, min_bytes, max_bytes, isolation_level)
        by_id = [(number, -1, offset, -1, -1, max_bytes, _NO_TAGS) for number, offset, max_bytes in partitions]
        self._by_name = FetchRequest(*limits, [(topic, list(partitions))])
        self._has_id = topic_id is not None
        # In the order of the protocol; an unused field is 0, -1 or empty.
        super().__init__(-1, *limits, 0, -1, [(topic_id, by_id, _NO_TAGS)], [], "", older=self._by_name)

    def prepare(self, versions: ApiVersions) -> RequestStruct:
        """Return the newest request that the broker knows, or one that needs no id."""
        return super().prepare(versions) if self._has_id else self._by_name.prepare(versions)


class GroupOffsetsRequest(FlexibleRequest, struct=_GROUP_OFFSETS):
    """Asks for the offsets that a consumer group has committed in one topic.

    While a transaction that changes an offset is open, the broker answers with an error code (KIP-447, Kafka 2.5). It
    does so also for the moment after a commit in which it would still return the offset before.
    """

    def __init__(self, group: str, topic: str, partitions: Iterable[int]) -> None:
        super().__init__(group, [(topic, list(partitions), _NO_TAGS)], True)


class FeaturesRequest(FlexibleRequest, struct=_FEATURES):
    """Asks for the features that all brokers of a cluster have agreed on (KIP-584, Kafka 2.7)."""

    def __init__(self) -> None:
        super().__init__("streamiter", "1", older=ApiVersionRequest())


def finalized_features(response: Response) -> dict[str, int]:
    """Return the level of each feature in the answer to a `FeaturesRequest`; none from an older broker."""
    if response.API_VERSION < _FEATURES.API_VERSION:
        return {}
    listed = _FINALIZED_FEATURES.decode(BytesIO(response.tags.get(_FINALIZED_FEATURES_TAG, b"\1")))
    return {name: level for name, level, *_ in listed}


class ProduceRequestV2(FlexibleRequest, struct=_PRODUCE_V2):
    """Writes records in a transaction of version 2, which the records add their partition to."""

    def __init__(
        self,
        transactional_id: str | None,
        required_acks: int,
        timeout: int,
        topics: Iterable[tuple[str, Iterable[tuple[int, bytes]]]],
    ) -> None:
        tagged = [(topic, [(*batch, _NO_TAGS) for batch in batches], _NO_TAGS) for topic, batches in topics]
        super().__init__(transactional_id, required_acks, timeout, tagged)


class EndTxnRequestV2(FlexibleRequest, struct=_END_TXN_V2):
    """Ends a transaction of version 2: the answer has the identity for the next one, which has another epoch."""

    def __init__(self, transactional_id: str, number: int, epoch: int, commit: bool) -> None:
        super().__init__(transactional_id, number, epoch, commit)


class TxnOffsetCommitRequestV2(FlexibleRequest, struct=_TXN_OFFSETS_V2):
    """Writes offsets of a group in a transaction of version 2, which they add the group to."""

    def __init__(
        self,
        transactional_id: str,
        group: str,
        number: int,
        epoch: int,
        topics: Iterable[tuple[str, Iterable[tuple[int, int, str]]]],
    ) -> None:
        tagged = [
            (topic, [(partition, offset, -1, metadata, _NO_TAGS) for partition, offset, metadata in offsets], _NO_TAGS)
            for topic, offsets in topics
        ]
        super().__init__(transactional_id, group, number, epoch, -1, "", None, tagged)  # not of a group's member


class FetchedPartition(NamedTuple):
    """The answer of a broker about one partition."""

    number: int
    """The partition."""
    code: int
    """The error code."""
    stable_offset: int
    """The last stable offset: the records before it are committed or aborted."""
    aborted: list[tuple[int, int]]
    """Producer and first offset of each aborted transaction among the records."""
    records: bytes
    """The record batches as they are on the wire."""


def fetched_partitions(response: Response) -> Iterator[FetchedPartition]:
    """Yield the answers to a `FetchTopicRequest`, in any version."""
    for _topic, answers, *_ in response.topics:
        for number, code, _high_watermark, stable_offset, *rest in answers:
            # The other fields between the last stable offset and the records differ by version; only one is a list.
            aborted = next((field for field in rest if isinstance(field, list)), [])
            records = next(field for field in reversed(rest) if isinstance(field, bytes | None))
            yield FetchedPartition(
                number, code, stable_offset, [(each[0], each[1]) for each in aborted], records or b""
            )
