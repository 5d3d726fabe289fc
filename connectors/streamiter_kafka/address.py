"""``kafka://host:9092,host2:9092/topic?option=value``: its parts, and the same without secrets.

>>> address = KafkaAddress.parse("kafka://one,two:9093/clicks?compression=zstd&sasl_password=secret")
>>> address.servers, address.topic, address.url
((('one', 9092), ('two', 9093)), 'clicks', 'kafka://one:9092,two:9093/clicks?compression=zstd')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from streamiter.errors import ConfigurationError
from streamiter.topics.secrets import shown_url
from streamiter_kafka.options import is_shown

__all__ = ["KafkaAddress", "Server", "shown"]

Server = tuple[str, int]
"""Host and port of a broker."""

_DEFAULT_PORT: Final = 9092
_EXAMPLE: Final = "kafka://127.0.0.1:9092/clicks"
# What brokers take as the name of a topic.
_TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_SERVER: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:@\s]+)(?::(?P<port>[0-9]{1,5}))?")


def shown(server: Server) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    host, port = server
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """The parts of a Kafka URL; ``topic`` is empty where the URL names none."""

    servers: tuple[Server, ...]
    topic: str
    query: Mapping[str, str]

    @classmethod
    def parse(cls, url: str) -> KafkaAddress:
        """Split ``url``; raises ``ConfigurationError``, which never repeats a password."""
        parts = urlsplit(url)
        if "@" in url.partition("?")[0]:
            raise ConfigurationError(
                f"expected a topic URL such as {_EXAMPLE}, given one with a user before the host: give name and "
                "password as the options sasl_username and sasl_password"
            )
        if parts.fragment:
            raise ConfigurationError(
                f"expected a topic URL such as {_EXAMPLE}, given one with a '#', behind which nothing counts; write "
                "options behind a '?', and %23 for a '#' that is part of a value"
            )
        return cls(_servers(parts.netloc), _topic(parts.path), _query(parts.query))

    @property
    def cluster(self) -> str:
        """The servers, sorted: equal for equal clusters as far as a URL can tell."""
        return ",".join(sorted(shown(server) for server in self.servers))

    @property
    def url(self) -> str:
        """The URL without secrets."""
        shown_options = {name: value for name, value in self.query.items() if is_shown(name, value)}
        query = f"?{urlencode(shown_options)}" if shown_options else ""
        return f"kafka://{','.join(map(shown, self.servers))}/{self.topic}{query}"

    def beside(self, name: str) -> KafkaAddress:
        """The same for another topic of the cluster."""
        return replace(self, topic=_checked_name(name))


def _servers(netloc: str) -> tuple[Server, ...]:
    if not netloc:
        raise ConfigurationError(f"expected a topic URL such as {_EXAMPLE}, given one without a host")
    return tuple(_server(part) for part in netloc.split(","))


def _server(text: str) -> Server:
    match = _SERVER.fullmatch(text)
    port = int(match["port"] or _DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65_536:
        raise ConfigurationError(
            f"expected brokers as host:port,host:port in {_EXAMPLE}, given {_shown_server(text)}"
        )
    return match["host"].strip("[]"), port


def _shown_server(text: str) -> str:
    """What is no port may be a password: ``kafka://alice:password/clicks``."""
    host, _, port = text.rpartition(":")
    return repr(text) if host and port.isdecimal() else "another text"


def _topic(path: str) -> str:
    name = unquote(path.strip("/"))
    return _checked_name(name) if name else name


def _checked_name(name: str) -> str:
    if _TOPIC_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"expected a topic name of at most 249 letters, digits, '.', '_' and '-', given {shown_url(name)!r}"
        )
    return name


def _query(query: str) -> dict[str, str]:
    if any("=" not in option for option in query.split("&") if option):
        raise ConfigurationError(
            f"expected options as in {_EXAMPLE}?compression=zstd&acks=1, given one without '='; write %26 for a '&' "
            "that is part of a value"
        )
    return dict(parse_qsl(query, keep_blank_values=True))
