"""The brokers of one cluster: connections, metadata, settings and offsets.

`BrokerConnections` opens a connection when a request needs it, remembers which broker leads each partition, and gives
each request a deadline. A failure that may be temporary is a `BrokerTrouble`; the caller decides how long to retry.
`OffsetFinder` asks the leaders of a topic for offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar
from uuid import UUID

from streamiter.errors import ConfigurationError, StreamiterError, TopicDenied, TopicError
from streamiter.topics.connecting import PartitionEnds
from streamiter.topics.urls import has_secret, shown_path
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter_kafka.options import KafkaOptions, Server, shown_server
from streamiter_kafka.trouble import BrokerTrouble, Code, RetryLimit, TopicMissing, check_code, persist_within
from streamiter_kafka.wire import (
    TOPIC_RESOURCE,
    AIOKafkaConnection,
    AuthenticationFailedError,
    CloseReason,
    Connection,
    DescribeConfigsRequest,
    FindCoordinatorRequest,
    IllegalSaslStateError,
    IncompatibleBrokerVersion,
    KafkaError,
    MetadataRequest,
    OffsetRequest,
    Response,
    ResponseRow,
    SaslAuthenticationFailed,
    TopicMetadataRequest,
    UnsupportedSaslMechanismError,
    topic_metadata,
)

T = TypeVar("T")

BRIEFLY_S: Final = 8.0
"""How long a call waits for a broker if no job depends on it: a broker that was just started answers by then."""

# So long a closing client waits for brokers of which none has answered for as long.
_CLOSING_S: Final = 3.0

NO_LEADER: Final = -1

# A writer asks for added partitions at this interval, as Kafka's own clients do (metadata.max.age.ms).
_STALE_S: Final = 300.0


class ConnectionPurpose(enum.Enum):
    """The purpose of a connection.

    A broker answers the requests of a connection one after the other, so a fetch that waits for data must not delay
    other requests.
    """

    CONTROL = "control"
    FETCH = "fetch"
    PRODUCE = "produce"


class CoordinatorKind(enum.IntEnum):
    """The kinds of ids that a broker coordinates, as the protocol numbers them."""

    GROUP = 0
    TRANSACTIONAL_ID = 1


class BrokerConnections:
    """The connections to the brokers of one cluster, and the metadata that the brokers have given.

    A connection is opened when a request needs it. Each request has a deadline. A failure that may be temporary is a
    ``BrokerTrouble``; the caller decides whether to try again.
    """

    def __init__(
        self, servers: tuple[Server, ...], options: KafkaOptions, subject: str, clock: Clock | None = None
    ) -> None:
        self.options = options
        # The system clock, also for a job with another clock: the brokers know no other time.
        self.clock: Clock = clock if clock is not None else SystemClock()
        self._servers = servers
        self._subject = subject
        self._tls = options.ssl_context(subject)
        self._brokers: dict[int, Server] = {}
        self._controller = NO_LEADER
        self._leaders: dict[str, dict[int, int]] = {}
        self._topic_ids: dict[str, UUID | None] = {}
        self._refreshed_s: dict[str, float] = {}
        self._connections: dict[tuple[Server, ConnectionPurpose], Connection] = {}
        self._locks: dict[tuple[Server, ConnectionPurpose], asyncio.Lock] = {}
        self.unanswered_since_s: float | None = None
        """Since when the brokers owe an answer, and none has answered."""

    def is_silent(self) -> bool:
        """Return whether it is in vain to wait for an answer while closing."""
        since_s = self.unanswered_since_s
        return since_s is not None and self.clock.monotonic_s() - since_s > _CLOSING_S

    @property
    def address(self) -> str:
        """The brokers that the URL names."""
        return ",".join(map(shown_server, self._servers))

    def leaders(self, topic: str) -> Mapping[int, int]:
        """Return the broker that leads each partition, by the last answer; ``NO_LEADER`` where none does."""
        return self._leaders.get(topic, {})

    def topic_id(self, topic: str) -> UUID | None:
        """Return the id of the topic by the last answer; None where the broker gives none (before Kafka 2.8)."""
        return self._topic_ids.get(topic)

    def patience(self, subject: str | None = None) -> RetryLimit:
        """Return a limit for retries, of the duration that the options say."""
        return RetryLimit(subject or self._subject, self.options.give_up_after_s, self.clock)

    async def persist(self, attempt: Callable[[], Awaitable[T]], *, briefly: bool = False) -> T:
        """Return the result of ``attempt``, retried for as long as the options say."""
        limit_s = self.options.give_up_after_s
        return await persist_within(min(BRIEFLY_S, limit_s) if briefly else limit_s, self._subject, attempt)

    async def request(
        self, node: int, request: object, *, lane: ConnectionPurpose = ConnectionPurpose.CONTROL, wait_s: float = 0.0
    ) -> Response:
        """Return the answer of broker ``node``; the broker itself may delay its answer by ``wait_s``."""
        server = self._brokers.get(node)
        if server is None:
            reason = "has no leader" if node == NO_LEADER else f"is led by the unknown broker {node}"
            raise BrokerTrouble(f"{self.address}: a partition {reason} now")
        return await self._request_at(server, request, lane, wait_s)

    async def request_any(self, request: object) -> Response:
        """Return the answer of the first broker that answers; they are tried in turn."""
        troubles = []
        for server in self._candidates():
            try:
                return await self._request_at(server, request, ConnectionPurpose.CONTROL, 0.0)
            except BrokerTrouble as trouble:
                troubles.append(str(trouble))
        raise BrokerTrouble("; ".join(troubles))

    async def request_controller(self, request: object) -> Response:
        """Return the answer of the controller (with KRaft: of any broker, which passes the request on)."""
        if self._controller in self._brokers:
            return await self.request(self._controller, request)
        return await self.request_any(request)

    async def find_coordinator(self, name: str, kind: CoordinatorKind, subject: str) -> int:
        """Return the broker that coordinates a group or a transactional id."""
        self._remember_brokers(await self.request_any(MetadataRequest([], allow_auto_topic_creation=False)))
        response = await self.request_any(FindCoordinatorRequest(name, kind.value))
        check_code(response.error_code, subject)
        return int(response.coordinator_id)

    async def refresh(self, topic: str) -> Mapping[int, int]:
        """Ask for the leaders of ``topic``; return them. Raises ``TopicMissing`` where there is no such topic."""
        response = await self.request_any(TopicMetadataRequest(topic))
        self._remember_brokers(response)
        answered = topic_metadata(response)
        self._leaders[topic] = self._leaders_of(answered.code, topic, answered.partitions)
        self._topic_ids[topic] = answered.id
        self._refreshed_s[topic] = self.clock.monotonic_s()
        return self._leaders[topic]

    async def fresh_leaders(self, topic: str) -> Mapping[int, int]:
        """Return the leaders; ask for them again every few minutes, so that new partitions are found."""
        now_s = self.clock.monotonic_s()
        if now_s - self._refreshed_s[topic] > _STALE_S:
            self._refreshed_s[topic] = now_s
            with contextlib.suppress(BrokerTrouble):  # a lasting failure is raised where records are sent
                await self.refresh(topic)
        return self._leaders[topic]

    async def require(self, topic: str) -> Mapping[int, int]:
        """Ask for the leaders as :meth:`refresh`, with retries; raise ``TopicNotFound`` or ``TopicUnavailable``."""
        return await self.persist(lambda: self.refresh(topic))

    async def topic_names(self) -> list[str]:
        """Return the names of all topics but Kafka's own, sorted."""
        response = await self.request_any(MetadataRequest(None, allow_auto_topic_creation=False))
        self._remember_brokers(response)
        return sorted(name for _code, name, is_internal, _partitions in response.topics if not is_internal)

    async def close(self) -> None:
        connections = list(self._connections.values())
        self._connections.clear()
        await disconnect(connections)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _candidates(self) -> Iterable[Server]:
        """Return the brokers to ask: those with a connection, then those of the metadata, then those of the URL."""
        connected = [server for (server, _lane), each in self._connections.items() if each.connected()]
        known = [server for _node, server in sorted(self._brokers.items())]
        return dict.fromkeys([*connected, *known, *self._servers])

    async def _request_at(self, server: Server, request: object, lane: ConnectionPurpose, wait_s: float) -> Response:
        if self.unanswered_since_s is None:
            self.unanswered_since_s = self.clock.monotonic_s()
        connection = await self._connection(server, lane)
        response = await send(connection, request, server, self.options.request_timeout_s + wait_s)
        self.unanswered_since_s = None
        return response

    async def _connection(self, server: Server, lane: ConnectionPurpose) -> Connection:
        key = (server, lane)
        connection = self._connections.get(key)
        if connection is not None and connection.connected():
            return connection
        async with self._locks.setdefault(key, asyncio.Lock()):
            connection = self._connections.get(key)
            if connection is None or not connection.connected():
                connection = self._connections[key] = await connect_to_broker(server, self.options, self._tls)
            return connection

    def _remember_brokers(self, response: Response) -> None:
        if response.brokers:
            self._brokers = {node: (host, port) for node, host, port, *_ in response.brokers}
        self._controller = response.controller_id

    def _leaders_of(self, code: int, topic: str, partitions: Sequence[ResponseRow]) -> dict[int, int]:
        if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
            raise TopicMissing(
                f"there is no topic {topic!r} at {self.address} (any more). `streamiter topics list "
                f"kafka://{self.address}` shows those that are there; create it with `await topic.create(partitions=…)`"
            )
        if code == Code.INVALID_TOPIC_EXCEPTION:
            raise ConfigurationError(f"{self._subject}: {topic!r} is not a name that Kafka takes for a topic")
        check_code(code, self._subject)
        return {partition: leader for _code, partition, leader, *_ in sorted(partitions, key=lambda p: p[1])}


async def shown_settings(cluster: BrokerConnections, topic: str) -> dict[str, str]:
    """Return the settings of a topic; none where this user may not see them, since reading and writing need none."""
    try:
        return await cluster.persist(lambda: settings_of(cluster, topic))
    except TopicDenied:
        return {}


async def settings_of(cluster: BrokerConnections, topic: str) -> dict[str, str]:
    """Return the settings of a topic, default values included."""
    request = DescribeConfigsRequest([(TOPIC_RESOURCE, topic, None)])
    response = await cluster.request_any(request)
    [(code, detail, _type, _name, entries)] = response.resources
    if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        raise TopicMissing(f"there is no topic {topic!r} at {cluster.address}")
    check_code(code, f"settings of topic {topic!r}", detail)
    return {name: value for name, value, *_ in entries if value is not None}


READ_UNCOMMITTED: Final = 0

READ_COMMITTED: Final = 1

# The protocol takes these two numbers in place of a time stamp.
_LATEST: Final = -1

_EARLIEST: Final = -2

# The answer for a time stamp after the last record.
_NONE: Final = -1

# The first record of a partition is the first record of this time or later.
_BEGINNING_MS: Final = 0


class FoundOffset(NamedTuple):
    """An offset and, where the request had a time, the time stamp of its record."""

    offset: int
    timestamp_ms: int


class OffsetFinder:
    """Asks the leaders of one topic for offsets. A failure that may be temporary is a ``BrokerTrouble``."""

    def __init__(self, cluster: BrokerConnections, topic: str, subject: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._subject = subject

    async def ends(self, partitions: Iterable[int]) -> dict[int, PartitionEnds]:
        """Return the earliest offset, the last stable offset and the end of each partition."""
        wanted = list(partitions)
        earliest, stable, end = await asyncio.gather(
            self.earliest(wanted),
            self._find(dict.fromkeys(wanted, _LATEST), READ_COMMITTED),
            self._find(dict.fromkeys(wanted, _LATEST), READ_UNCOMMITTED),
        )
        return {number: PartitionEnds(earliest[number], stable[number].offset, end[number].offset) for number in wanted}

    async def earliest(self, partitions: Iterable[int]) -> dict[int, int]:
        return _offsets(await self._find(dict.fromkeys(partitions, _EARLIEST), READ_UNCOMMITTED))

    async def identities(self, partitions: Iterable[int]) -> dict[int, str]:
        """Return a text for each partition that differs for another topic of the same name.

        The text is the topic's id. Brokers before 2.8 give none; there it is the time of the first record, which helps
        until retention or compaction drops that record.
        """
        topic_id = self._cluster.topic_id(self._topic)
        if topic_id is not None:
            return dict.fromkeys(partitions, f"topic id={topic_id}")
        there = self._cluster.leaders(self._topic)
        wanted = [number for number in partitions if number in there]
        found = await self._find(dict.fromkeys(wanted, _BEGINNING_MS), READ_UNCOMMITTED)
        return {
            number: f"record {first.offset}={first.timestamp_ms}"
            for number, first in found.items()
            if first.offset != _NONE
        }

    async def at_time(self, partitions: Iterable[int], timestamp_ms: int) -> dict[int, int]:
        """Return the first offset of that time or later; partitions without such a record are left out."""
        found = await self._find(dict.fromkeys(partitions, timestamp_ms), READ_COMMITTED)
        return {number: offset for number, offset in _offsets(found).items() if offset != _NONE}

    async def _find(self, times: Mapping[int, int], isolation: int) -> dict[int, FoundOffset]:
        leaders = self._cluster.leaders(self._topic)
        by_leader: dict[int, list[tuple[int, int]]] = {}
        for number, time in times.items():
            by_leader.setdefault(leaders.get(number, NO_LEADER), []).append((number, time))
        try:
            parts = [await self._ask(node, asked, isolation) for node, asked in by_leader.items()]
        except BrokerTrouble:
            # The next attempt must not ask the same wrong broker.
            await self._cluster.refresh(self._topic)
            raise
        return {number: found for part in parts for number, found in part.items()}

    async def _ask(self, node: int, asked: list[tuple[int, int]], isolation: int) -> dict[int, FoundOffset]:
        response = await self._cluster.request(node, OffsetRequest(-1, isolation, [(self._topic, asked)]))
        found = {}
        for _topic, partitions in response.topics:
            for number, code, timestamp_ms, offset in partitions:
                check_code(code, f"{self._subject}, partition {number}")
                found[number] = FoundOffset(offset, timestamp_ms)
        return found


def _offsets(found: Mapping[int, FoundOffset]) -> dict[int, int]:
    return {number: each.offset for number, each in found.items()}


def comparable(known: Mapping[int, str], found: Mapping[int, str]) -> dict[int, str]:
    """Return the found identities that are of the same kind as the known ones.

    >>> comparable({0: "record 0=17", 1: "record 3=18"}, {0: "record 0=99", 1: "topic id=..."})
    {0: 'record 0=99'}
    """
    return {
        number: identity
        for number, identity in found.items()
        if number in known and known[number].partition("=")[0] == identity.partition("=")[0]
    }


# aiokafka's own deadline is later than each deadline of this package, so it never acts: a fetch may wait at the broker.
_MARGIN_S: Final = 60.0

# Brokers drop a connection that was idle for 10 minutes. Dropping it earlier avoids a failed request.
_IDLE_MS: Final = 9 * 60 * 1000

_CLOSE_TIMEOUT_S: Final = 1.0


_REFUSED: Final = (
    AuthenticationFailedError,
    IllegalSaslStateError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)


async def connect_to_broker(server: Server, options: KafkaOptions, tls: ssl.SSLContext | None) -> Connection:
    """Connect and log in, within the request timeout.

    Raises ``BrokerTrouble`` where the broker does not answer, and ``TopicDenied`` where the login or the certificate is
    not accepted.
    """
    try:
        async with asyncio.timeout(options.request_timeout_s):
            with _logging_without_secrets(options):
                return await _open_connection(server, options, tls)
    except TimeoutError:
        waited = f"no connection within {options.request_timeout_s:g} s"
        raise BrokerTrouble(f"{shown_server(server)}: {waited}") from None
    except ssl.SSLError as error:
        raise _tls_failure(server, error, options) from None
    except _REFUSED as error:
        with_token = options.sasl_mechanism == "OAUTHBEARER"
        checked = "the token and its issuer" if with_token else "sasl_username and sasl_password"
        raise TopicDenied(
            f"{shown_server(server)}: the broker refused the login by {options.sasl_mechanism} "
            f"({options.hide_secrets(str(error))}); check sasl_mechanism, {checked}"
        ) from None
    except (OSError, KafkaError) as error:
        raise BrokerTrouble(f"{shown_server(server)}: {options.hide_secrets(_reason(error, options))}") from None


@contextlib.contextmanager
def _logging_without_secrets(options: KafkaOptions) -> Iterator[None]:
    """Drop log records with secrets: during a login aiokafka logs the user and, at level DEBUG, the password."""

    def has_none(record: logging.LogRecord) -> bool:
        return not has_secret(record.getMessage(), options.secrets)

    logger = logging.getLogger(AIOKafkaConnection.__module__)
    logger.addFilter(has_none)
    try:
        yield
    finally:
        logger.removeFilter(has_none)


async def _open_connection(server: Server, options: KafkaOptions, tls: ssl.SSLContext | None) -> Connection:
    host, port = server
    connection = Connection(
        host,
        port,
        client_id=options.client_id,
        request_timeout_ms=int(1000 * (options.request_timeout_s + _MARGIN_S)),
        max_idle_ms=_IDLE_MS,
        ssl_context=tls,
        security_protocol=options.security_protocol,
        sasl_mechanism=options.sasl_mechanism,
        sasl_plain_username=options.sasl_username,
        sasl_plain_password=options.sasl_password,
        sasl_oauth_token_provider=options.sasl_oauth_token_provider,
    )
    await connection.connect()
    return connection


async def send(connection: Connection, request: object, server: Server, timeout_s: float) -> Response:
    """Send one request and return its answer within ``timeout_s``; raise ``BrokerTrouble`` otherwise."""
    try:
        async with asyncio.timeout(timeout_s):
            response: Response = await connection.send(request)
            return response
    except TimeoutError:
        # A later answer on this connection would be taken for that of the next request.
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
        raise BrokerTrouble(f"{shown_server(server)}: no answer within {timeout_s:g} s") from None
    except (NotImplementedError, IncompatibleBrokerVersion) as error:
        raise TopicError(
            f"{shown_server(server)}: this broker and aiokafka have no version of {type(request).__name__} in common "
            f"({error}); expected Apache Kafka 2.5 or later"
        ) from error
    except (OSError, KafkaError) as error:
        raise BrokerTrouble(f"{shown_server(server)}: {_described(error)}") from None


async def disconnect(connections: list[Connection]) -> None:
    """Close connections and wait until their sockets are closed."""
    closing = [connection.close(reason=CloseReason.SHUTDOWN) for connection in connections]
    waiting = [future for future in closing if future is not None]
    if waiting:
        await asyncio.wait(waiting, timeout=_CLOSE_TIMEOUT_S)


def _tls_failure(server: Server, error: ssl.SSLError, options: KafkaOptions) -> StreamiterError:
    if isinstance(error, ssl.SSLCertVerificationError):
        authorities = (
            f"ssl_cafile {shown_path(options.ssl_cafile)}" if options.ssl_cafile else "the system's authorities"
        )
        return TopicDenied(
            f"{shown_server(server)}: the broker's certificate does not verify against {authorities} "
            f"({error.verify_message}); set ssl_cafile to the authority that signed it"
        )
    return TopicDenied(
        f"{shown_server(server)}: no encrypted connection ({error.reason or error}); check that this port speaks TLS "
        "and, where the broker asks for a client's certificate, ssl_certfile and ssl_keyfile"
    )


def _reason(error: Exception, options: KafkaOptions) -> str:
    """Return the reason with a hint: a broker drops a connection of the wrong protocol without an error."""
    if isinstance(error, KafkaError):
        return f"{_described(error)}; does it expect another security_protocol than {options.security_protocol}?"
    return _described(error)


def _described(error: Exception) -> str:
    return str(error) or type(error).__name__
