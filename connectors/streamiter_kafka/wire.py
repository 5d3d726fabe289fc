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

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, SupportsIndex
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
from aiokafka.partitioner import murmur2  # type: ignore[import-untyped]
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


class AnswerReader(asyncio.StreamReader):
    """Keeps the pieces in which an answer arrives, and joins them once.

    asyncio's own buffer is copied while it grows and twice when it is read, wakes its reader for each piece, and pauses
    the connection where it is full: for a megabyte it takes eight times as long. A request limits the size of its
    answer, so this buffer needs no limit.
    """

    _pieces: deque[bytes | memoryview]
    _held_bytes = _wanted_bytes = 0

    @classmethod
    def take_over(cls, reader: asyncio.StreamReader) -> None:
        """Make a reader that has read nothing yet one of these: its protocol and its transport know it already."""
        reader.__class__ = cls
        assert isinstance(reader, AnswerReader)
        reader._pieces = deque()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        piece = bytes(data)  # No copy: it is of bytes.
        self._pieces.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes >= self._wanted_bytes:
            self._wakeup_waiter()  # type: ignore[attr-defined]

    def at_eof(self) -> bool:
        return self._eof and not self._pieces  # type: ignore[attr-defined]

    async def readexactly(self, n: int) -> bytes:
        """Return the next ``n`` bytes. Raises ``IncompleteReadError`` if the connection ends before them."""
        if self._exception is not None:  # type: ignore[attr-defined]
            raise self._exception  # type: ignore[attr-defined]
        while self._held_bytes < n:
            if self._eof:  # type: ignore[attr-defined]
                raise asyncio.IncompleteReadError(b"".join(self._pieces), n)
            self._wanted_bytes = n
            await self._wait_for_data("readexactly")  # type: ignore[attr-defined]
        self._held_bytes -= n
        taken: list[bytes | memoryview] = []
        while n:
            piece = self._pieces.popleft()
            if len(piece) > n:
                piece, rest = memoryview(piece)[:n], memoryview(piece)[n:]
                self._pieces.appendleft(rest)
            taken.append(piece)
            n -= len(piece)
        return b"".join(taken)


class Connection(AIOKafkaConnection):  # type: ignore[misc]
    """A connection of aiokafka that also notices a token that the broker refuses, and reads large answers quickly."""

    def _create_reader_task(self) -> asyncio.Task[None]:
        AnswerReader.take_over(self._reader)
        task: asyncio.Task[None] = super()._create_reader_task()
        return task

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


_TYPES: Final[Mapping[str, object]] = MappingProxyType(
    {
        "bool": Boolean,
        "bytes": CompactBytes,
        "int8": Int8,
        "int16": Int16,
        "int32": Int32,
        "int64": Int64,
        "int32s": CompactArray(Int32),
        "text": CompactString("utf-8"),
        "uuid": Uuid,
    }
)


def _fields(words: Iterator[str]) -> list[tuple[str, object]]:
    """Return the fields that the words name. Each list of fields ends with tags, as KIP-482 demands.

    A field is ``name:type``, or ``name[ … ]`` for a list of items that each have the fields between the brackets.
    """
    fields: list[tuple[str, object]] = []
    for word in words:
        if word == "]":
            break
        name, _, of_type = word.partition(":")
        fields.append((name, _TYPES[of_type]) if of_type else (name.rstrip("["), CompactArray(*_fields(words))))
    return [*fields, ("tags", TaggedFields)]


class FlexibleRequest(Request[RequestStruct]):  # type: ignore[misc]
    """A request in a version that aiokafka does not have.

    A subclass has the fields of the request and of its answer, in the notation of `_fields`. Where a broker does not
    know the version, ``older`` of aiokafka is sent.
    """

    API_KEY = -1
    API_VERSION: int
    FIELDS: str
    ANSWER: str

    def __init_subclass__(cls, of: type[Request], version: int) -> None:
        super().__init_subclass__()
        about = {"API_KEY": of.API_KEY, "API_VERSION": version}
        schemas = [Schema(*_fields(iter(text.split()))) for text in (cls.FIELDS, cls.ANSWER)]
        answer_type = type("Response", (ResponseStruct,), {**about, "SCHEMA": schemas[1]})
        of_version = {"FLEXIBLE_VERSION": True, "RESPONSE_TYPE": answer_type, "SCHEMA": schemas[0]}
        cls.API_KEY, cls.API_VERSION = of.API_KEY, version
        cls._CLASSES = (type("Request", (RequestStruct,), {**about, **of_version}),)

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


class RenewProducerRequest(FlexibleRequest, of=InitProducerIdRequest, version=3):
    """Asks for the epoch after ``epoch``. A producer that no longer owns the id gets the error code of a fence.

    The request names the producer's id and epoch. The broker gives a new epoch only if both are still the newest ones
    of the transactional id (KIP-360). A request of version 0 names neither and always fences a newer owner. This
    version fences a newer owner, too, if that owner has a transaction open: the broker first aborts that transaction.
    So the request cannot be used to find out who owns the id.
    """

    FIELDS = "transactional_id:text transaction_timeout_ms:int32 producer_id:int64 producer_epoch:int16"
    ANSWER = "throttle_time_ms:int32 error_code:int16 producer_id:int64 producer_epoch:int16"

    def __init__(self, transactional_id: str, timeout_ms: int, number: int, epoch: int) -> None:
        super().__init__(transactional_id, timeout_ms, number, epoch)


class TopicMetadataRequest(FlexibleRequest, of=MetadataRequest, version=11):
    """Asks for the leaders of one topic and, from Kafka 2.8 on, for the topic's id. It never creates the topic."""

    FIELDS = """
        topics[ topic_id:uuid name:text ] allow_auto_topic_creation:bool include_topic_authorized_operations:bool
    """
    ANSWER = """
        throttle_time_ms:int32
        brokers[ node_id:int32 host:text port:int32 rack:text ]
        cluster_id:text controller_id:int32
        topics[
            error_code:int16 name:text topic_id:uuid is_internal:bool
            partitions[
                error_code:int16 partition:int32 leader:int32 leader_epoch:int32
                replicas:int32s isr:int32s offline_replicas:int32s
            ]
            authorized_operations:int32
        ]
    """

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
    if response.API_VERSION < TopicMetadataRequest.API_VERSION:
        return TopicMetadata(topic[0], None, topic[-1])
    code, _name, topic_id, _is_internal, partitions, *_ = topic
    return TopicMetadata(code, None if topic_id == _NO_ID else topic_id, partitions)


class FetchTopicRequest(FlexibleRequest, of=FetchRequest, version=13):
    """Fetches from partitions of one topic; each is given as (number, offset, size of the largest answer in bytes).

    From Kafka 3.1 on, the request names the topic's id. If the topic was deleted and created again between two fetches,
    the broker answers with an error and not with records of the new topic. For older brokers, and for topics without an
    id, the request names the topic.
    """

    FIELDS = """
        replica_id:int32 max_wait_ms:int32 min_bytes:int32 max_bytes:int32
        isolation_level:int8 session_id:int32 session_epoch:int32
        topics[
            topic_id:uuid
            partitions[
                partition:int32 current_leader_epoch:int32 fetch_offset:int64
                last_fetched_epoch:int32 log_start_offset:int64 max_bytes:int32
            ]
        ]
        forgotten_topics[ topic_id:uuid partitions:int32s ]
        rack_id:text
    """
    ANSWER = """
        throttle_time_ms:int32 error_code:int16 session_id:int32
        topics[
            topic_id:uuid
            partitions[
                partition:int32 error_code:int16 high_watermark:int64 last_stable_offset:int64 log_start_offset:int64
                aborted_transactions[ producer_id:int64 first_offset:int64 ]
                preferred_read_replica:int32 records:bytes
            ]
        ]
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


class GroupOffsetsRequest(FlexibleRequest, of=OffsetFetchRequest, version=7):
    """Asks for the offsets that a consumer group has committed in one topic.

    While a transaction that changes an offset is open, the broker answers with an error code (KIP-447, Kafka 2.5). It
    does so also for the moment after a commit in which it would still return the offset before.
    """

    FIELDS = "group_id:text topics[ name:text partitions:int32s ] require_stable:bool"
    ANSWER = """
        throttle_time_ms:int32
        topics[
            name:text
            partitions[
                partition:int32 committed_offset:int64 committed_leader_epoch:int32 metadata:text error_code:int16
            ]
        ]
        error_code:int16
    """

    def __init__(self, group: str, topic: str, partitions: Iterable[int]) -> None:
        super().__init__(group, [(topic, list(partitions), _NO_TAGS)], True)


class FeaturesRequest(FlexibleRequest, of=ApiVersionRequest, version=3):
    """Asks for the features that all brokers of a cluster have agreed on (KIP-584, Kafka 2.7)."""

    FIELDS = "client_software_name:text client_software_version:text"
    ANSWER = """
        error_code:int16 api_versions[ api_key:int16 min_version:int16 max_version:int16 ] throttle_time_ms:int32
    """

    def __init__(self) -> None:
        super().__init__("streamiter", "1", older=ApiVersionRequest())


# The one response whose header never has tags, so that a client of any age can read it.
FeaturesRequest._CLASSES[0].parse_response_header = staticmethod(ResponseHeader_v0.decode)
_FINALIZED_FEATURES_TAG: Final = 2
_FINALIZED_FEATURES: Final = CompactArray(*_fields(iter(["name:text", "max_level:int16", "min_level:int16"])))


def finalized_features(response: Response) -> dict[str, int]:
    """Return the level of each feature in the answer to a `FeaturesRequest`; none from an older broker."""
    if response.API_VERSION < FeaturesRequest.API_VERSION:
        return {}
    listed = _FINALIZED_FEATURES.decode(BytesIO(response.tags.get(_FINALIZED_FEATURES_TAG, b"\1")))
    return {name: level for name, level, *_ in listed}


class ProduceRequestV2(FlexibleRequest, of=ProduceRequest, version=12):
    """Writes records in a transaction of version 2, which the records add their partition to."""

    FIELDS = """
        transactional_id:text required_acks:int16 timeout:int32
        topics[ name:text partitions[ partition:int32 records:bytes ] ]
    """
    ANSWER = """
        topics[
            name:text
            partitions[
                partition:int32 error_code:int16 offset:int64 timestamp:int64 log_start_offset:int64
                record_errors[ index:int32 message:text ] error_message:text
            ]
        ]
        throttle_time_ms:int32
    """

    def __init__(
        self,
        transactional_id: str | None,
        required_acks: int,
        timeout: int,
        topics: Iterable[tuple[str, Iterable[tuple[int, bytes]]]],
    ) -> None:
        tagged = [(topic, [(*batch, _NO_TAGS) for batch in batches], _NO_TAGS) for topic, batches in topics]
        super().__init__(transactional_id, required_acks, timeout, tagged)


class EndTxnRequestV2(FlexibleRequest, of=EndTxnRequest, version=5):
    """Ends a transaction of version 2: the answer has the identity for the next one, which has another epoch."""

    FIELDS = "transactional_id:text producer_id:int64 producer_epoch:int16 transaction_result:bool"
    ANSWER = "throttle_time_ms:int32 error_code:int16 producer_id:int64 producer_epoch:int16"

    def __init__(self, transactional_id: str, number: int, epoch: int, commit: bool) -> None:
        super().__init__(transactional_id, number, epoch, commit)


class TxnOffsetCommitRequestV2(FlexibleRequest, of=TxnOffsetCommitRequest, version=5):
    """Writes offsets of a group in a transaction of version 2, which they add the group to."""

    FIELDS = """
        transactional_id:text group_id:text producer_id:int64 producer_epoch:int16
        generation_id:int32 member_id:text group_instance_id:text
        topics[ name:text partitions[ partition:int32 offset:int64 leader_epoch:int32 metadata:text ] ]
    """
    ANSWER = "throttle_time_ms:int32 errors[ topic:text partition_errors[ partition:int32 error_code:int16 ] ]"

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
