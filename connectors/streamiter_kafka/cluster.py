"""One connection to one broker, and what its failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from uuid import UUID

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ConfigurationError, StreamiterError, TopicDenied, TopicError
from streamiter.topics.secrets import has_secret, shown_path
from streamiter_kafka.options import KafkaOptions, Server, shown
from streamiter_kafka.trouble import BrokerTrouble, Code, RetryLimit, TopicMissing, check, persist_within
from streamiter_kafka.wire import (
    AuthenticationFailedError,
    CloseReason,
    Connection,
    IllegalSaslStateError,
    IncompatibleBrokerVersion,
    KafkaError,
    MetadataRequest,
    Response,
    SaslAuthenticationFailed,
    TopicMetadataRequest,
    UnsupportedSaslMechanismError,
    create_conn,
    topic_metadata,
)

__all__ = [
    "NO_LEADER",
    "OPEN_TIMEOUT_S",
    "BrokerConnections",
    "ConnectionPurpose",
]


# Longer than any deadline of ours, so that ours are the ones that act: a fetch may wait at the broker.
_MARGIN_S: Final = 60.0
# Brokers drop connections that were idle for 10 minutes; dropping first avoids a failed request.
_IDLE_MS: Final = 9 * 60 * 1000
_CLOSE_TIMEOUT_S: Final = 1.0

_REFUSED: Final = (
    AuthenticationFailedError,
    IllegalSaslStateError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)


async def connect(server: Server, options: KafkaOptions, tls: ssl.SSLContext | None) -> Connection:
    """Connect and log in, within the request timeout.

    Raises ``BrokerTrouble`` where the broker does not answer and ``TopicDenied`` where it, or its
    certificate, is not accepted.
    """
    try:
        async with asyncio.timeout(options.request_timeout_s):
            with _logging_without_secrets(options):
                return await _create(server, options, tls)
    except TimeoutError:
        waited = f"no connection within {options.request_timeout_s:g} s"
        raise BrokerTrouble(f"{shown(server)}: {waited}") from None
    except ssl.SSLError as error:
        raise _tls_failure(server, error, options) from None
    except _REFUSED as error:
        raise TopicDenied(
            f"{shown(server)}: the broker refused the login by {options.sasl_mechanism} "
            f"({options.hide_secrets(str(error))}); check sasl_mechanism, sasl_username and sasl_password"
        ) from None
    except (OSError, KafkaError) as error:
        raise BrokerTrouble(f"{shown(server)}: {options.hide_secrets(_reason(error, options))}") from None


@contextlib.contextmanager
def _logging_without_secrets(options: KafkaOptions) -> Iterator[None]:
    """While it logs in, aiokafka logs who it is and, at level DEBUG, the request with the password."""

    def has_none(record: logging.LogRecord) -> bool:
        return not has_secret(record.getMessage(), options.secrets)

    logger = logging.getLogger(create_conn.__module__)
    logger.addFilter(has_none)
    try:
        yield
    finally:
        logger.removeFilter(has_none)


async def _create(server: Server, options: KafkaOptions, tls: ssl.SSLContext | None) -> Connection:
    host, port = server
    return await create_conn(
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
    )


async def send(connection: Connection, request: object, server: Server, timeout_s: float) -> Response:
    """Send one request and return its answer, within ``timeout_s``; ``BrokerTrouble`` otherwise."""
    try:
        async with asyncio.timeout(timeout_s):
            return await connection.send(request)
    except TimeoutError:
        # What the broker still answers on this connection would be late.
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
        raise BrokerTrouble(f"{shown(server)}: no answer within {timeout_s:g} s") from None
    except (NotImplementedError, IncompatibleBrokerVersion) as error:
        raise TopicError(
            f"{shown(server)}: this broker and aiokafka have no version of {type(request).__name__} in common "
            f"({error}); expected Apache Kafka 2.5 or later"
        ) from error
    except (OSError, KafkaError) as error:
        raise BrokerTrouble(f"{shown(server)}: {_described(error)}") from None


async def disconnect(connections: list[Connection]) -> None:
    """Close connections and wait until their sockets are closed."""
    closing = [connection.close(reason=CloseReason.SHUTDOWN) for connection in connections]
    waiting = [future for future in closing if future is not None]
    if waiting:
        await asyncio.wait(waiting, timeout=_CLOSE_TIMEOUT_S)


def _tls_failure(server: Server, error: ssl.SSLError, options: KafkaOptions) -> StreamiterError:
    if isinstance(error, ssl.SSLCertVerificationError):
        authorities = (
            f"ssl_cafile {shown_path(options.ssl_cafile)}"
            if options.ssl_cafile
            else "the system's authorities"
        )
        return TopicDenied(
            f"{shown(server)}: the broker's certificate does not verify against {authorities} "
            f"({error.verify_message}); set ssl_cafile to the authority that signed it"
        )
    return TopicDenied(
        f"{shown(server)}: no encrypted connection ({error.reason or error}); check that this port speaks TLS "
        "and, where the broker asks for a client's certificate, ssl_certfile and ssl_keyfile"
    )


def _reason(error: Exception, options: KafkaOptions) -> str:
    """Brokers drop a connection of the wrong protocol without a word."""
    if isinstance(error, KafkaError):
        return (
            f"{_described(error)}; does it expect another security_protocol than {options.security_protocol}?"
        )
    return _described(error)


def _described(error: Exception) -> str:
    return str(error) or type(error).__name__


T = TypeVar("T")

OPEN_TIMEOUT_S: Final = 8.0
"""How long opening waits for a broker: one that has just been started is there by then."""

NO_LEADER: Final = -1

# How soon a writer finds partitions that were added: as Kafka's own clients do (metadata.max.age.ms).
_STALE_S: Final = 300.0


class ConnectionPurpose(enum.Enum):
    """What a connection is for. A broker answers one request of a connection after the other, so a fetch
    that waits for data must not hold up anything else.
    """

    CONTROL = "control"
    FETCH = "fetch"
    PRODUCE = "produce"


class BrokerConnections:
    """Connections to the brokers, and the metadata they gave.

    Every request has a deadline; what may pass is a ``BrokerTrouble`` for the caller to bear.

    The brokers of one cluster: connections made when they are needed, who leads what, a deadline each.
    """

    def __init__(
        self,
        servers: tuple[Server, ...],
        options: KafkaOptions,
        subject: str,
        clock: Clock | None = None,
    ) -> None:
        self.options = options
        # The machine's own time, whatever a job runs on: the brokers have no other.
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

    @property
    def address(self) -> str:
        """The brokers the URL names."""
        return ",".join(map(shown, self._servers))

    def leaders(self, topic: str) -> Mapping[int, int]:
        """The node that leads each partition, as of the last answer; ``NO_LEADER`` where none does."""
        return self._leaders.get(topic, {})

    def topic_id(self, topic: str) -> UUID | None:
        """The id of the topic as of the last answer; None where the broker gives none (before Kafka 2.8)."""
        return self._topic_ids.get(topic)

    def patience(self, subject: str | None = None) -> RetryLimit:
        """Patience for as long as the options say."""
        return RetryLimit(subject or self._subject, self.options.give_up_after_s, self.clock)

    async def persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """``attempt`` with the patience for what a user waits for: opening, creating, describing."""
        limit_s = min(OPEN_TIMEOUT_S, self.options.give_up_after_s)
        return await persist_within(limit_s, self._subject, attempt)

    async def request(
        self,
        node: int,
        request: object,
        *,
        lane: ConnectionPurpose = ConnectionPurpose.CONTROL,
        wait_s: float = 0.0,
    ) -> Response:
        """The answer of broker ``node``; ``wait_s`` is how long the broker itself may hold it back."""
        server = self._brokers.get(node)
        if server is None:
            reason = "has no leader" if node == NO_LEADER else f"is led by the unknown broker {node}"
            raise BrokerTrouble(f"{self.address}: a partition {reason} just now")
        return await self._request_at(server, request, lane, wait_s)

    async def request_any(self, request: object) -> Response:
        """The answer of whichever broker answers first, tried in turn."""
        troubles = []
        for server in self._candidates():
            try:
                return await self._request_at(server, request, ConnectionPurpose.CONTROL, 0.0)
            except BrokerTrouble as trouble:
                troubles.append(str(trouble))
        raise BrokerTrouble("; ".join(troubles))

    async def request_controller(self, request: object) -> Response:
        """The answer of the controller (with KRaft: of any broker, which passes the request on)."""
        if self._controller in self._brokers:
            return await self.request(self._controller, request)
        return await self.request_any(request)

    async def find_brokers(self) -> None:
        """Ask which brokers there are."""
        self._take_in(await self.request_any(MetadataRequest([], allow_auto_topic_creation=False)))

    async def refresh(self, topic: str) -> Mapping[int, int]:
        """Ask who leads the partitions of ``topic`` now; ``TopicMissing`` where there is no such topic."""
        response = await self.request_any(TopicMetadataRequest(topic))
        self._take_in(response)
        answered = topic_metadata(response)
        self._leaders[topic] = self._leaders_of(answered.code, topic, answered.partitions)
        self._topic_ids[topic] = answered.id
        self._refreshed_s[topic] = self.clock.monotonic_s()
        return self._leaders[topic]

    async def fresh_leaders(self, topic: str) -> Mapping[int, int]:
        """As :meth:`leaders`, asked for again every few minutes so that new partitions are found."""
        now_s = self.clock.monotonic_s()
        if now_s - self._refreshed_s[topic] > _STALE_S:
            self._refreshed_s[topic] = now_s
            with contextlib.suppress(BrokerTrouble):  # what it means is found out where records are sent
                await self.refresh(topic)
        return self._leaders[topic]

    async def require(self, topic: str) -> Mapping[int, int]:
        """As :meth:`refresh`, bearing what passes; ``TopicNotFound`` or ``TopicUnavailable`` otherwise."""
        return await self.persist(lambda: self.refresh(topic))

    async def topic_names(self) -> list[str]:
        """The names of all topics but Kafka's own, sorted."""
        response = await self.request_any(MetadataRequest(None, allow_auto_topic_creation=False))
        self._take_in(response)
        return sorted(name for _code, name, is_internal, _partitions in response.topics if not is_internal)

    async def close(self) -> None:
        """Close all connections."""
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
        """Brokers to ask: first those with a connection, then those known, then those of the URL."""
        connected = [server for (server, _lane), each in self._connections.items() if each.connected()]
        known = [server for _node, server in sorted(self._brokers.items())]
        return dict.fromkeys([*connected, *known, *self._servers])

    async def _request_at(
        self, server: Server, request: object, lane: ConnectionPurpose, wait_s: float
    ) -> Response:
        connection = await self._connection(server, lane)
        return await send(connection, request, server, self.options.request_timeout_s + wait_s)

    async def _connection(self, server: Server, lane: ConnectionPurpose) -> Connection:
        key = (server, lane)
        connection = self._connections.get(key)
        if connection is not None and connection.connected():
            return connection
        async with self._locks.setdefault(key, asyncio.Lock()):
            connection = self._connections.get(key)
            if connection is None or not connection.connected():
                connection = self._connections[key] = await connect(server, self.options, self._tls)
            return connection

    def _take_in(self, response: Response) -> None:
        if response.brokers:
            self._brokers = {node: (host, port) for node, host, port, *_ in response.brokers}
        self._controller = response.controller_id

    def _leaders_of(self, code: int, topic: str, partitions: Sequence[Sequence[Any]]) -> dict[int, int]:
        if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
            raise TopicMissing(
                f"there is no topic {topic!r} at {self.address} (any more). Create it with "
                "`await topic.create(partitions=...)`"
            )
        if code == Code.INVALID_TOPIC_EXCEPTION:
            raise ConfigurationError(f"{self._subject}: {topic!r} is not a name that Kafka takes for a topic")
        check(code, self._subject)
        return {partition: leader for _code, partition, leader, *_ in sorted(partitions, key=lambda p: p[1])}
