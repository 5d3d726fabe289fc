"""One connection to one broker, and what its failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator
from typing import Final

from streamiter.errors import StreamiterError, TopicDenied, TopicError
from streamiter.topics.secrets import has_secret, shown_path
from streamiter_kafka.address import Server, shown
from streamiter_kafka.options import KafkaOptions
from streamiter_kafka.trouble import BrokerTrouble
from streamiter_kafka.wire import (
    AuthenticationFailedError,
    CloseReason,
    Connection,
    IllegalSaslStateError,
    IncompatibleBrokerVersion,
    KafkaError,
    Response,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
    create_conn,
)

__all__ = ["connect", "disconnect", "send"]

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
