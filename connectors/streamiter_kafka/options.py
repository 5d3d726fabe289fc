"""The options and the URL of a Kafka topic. Options are keyword arguments, or parameters of the URL's query.

>>> KafkaOptions.parse({"compression": "zstd", "give_up_after_s": "5"}, "topic 'clicks'").give_up_after_s
5.0
>>> KafkaOptions.parse({"compresion": "zstd"}, "topic 'clicks'")
Traceback (most recent call last):
...
streamiter.errors.ConfigurationError: topic 'clicks': unknown option 'compresion'; the options are acks, \
client_id, compression, fetch_max_bytes, give_up_after_s, linger_s, max_batch_bytes, max_unacked_bytes, \
request_timeout_s, sasl_mechanism, sasl_oauth_cafile, sasl_oauth_client_id, sasl_oauth_client_secret, \
sasl_oauth_client_secret_env, sasl_oauth_client_secret_file, sasl_oauth_scope, sasl_oauth_token_endpoint, \
sasl_oauth_token_file, sasl_oauth_token_provider, sasl_password, sasl_password_env, sasl_password_file, \
sasl_username, sasl_username_env, sasl_username_file, security_protocol, ssl_cafile, ssl_certfile, ssl_check_hostname, \
ssl_keyfile, ssl_password, ssl_password_env, ssl_password_file; did you mean 'compression'?
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode

from streamiter.errors import ConfigurationError
from streamiter.topics.urls import hide, is_shown_option, options_from, shown_path, shown_url, split_url
from streamiter_kafka.tokens import ClientCredentials, Login, TokenFile, TokenProvider


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Options of a Kafka topic, checked.

    ``sasl_username``, ``sasl_password``, ``sasl_oauth_client_secret`` and ``ssl_password`` are secrets, which no
    message shows. In place of a secret its source may be given: as ``…_env`` the name of an environment variable, or
    as ``…_file`` the path of a file of one line.
    """

    security_protocol: str = field(
        default="PLAINTEXT", metadata={"choices": ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")}
    )
    """How to connect: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL."""
    sasl_mechanism: str = field(
        default="PLAIN", metadata={"choices": ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")}
    )
    """How to log in: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER."""
    sasl_username: str | None = field(default=None, repr=False, metadata={"is_secret": True})
    """The user of the login."""
    sasl_password: str | None = field(default=None, repr=False, metadata={"is_secret": True})
    """The password of the login."""
    sasl_oauth_token_file: str | None = field(default=None, repr=False)
    """The file of the token for OAUTHBEARER, which is read at each login."""
    sasl_oauth_token_endpoint: str | None = field(default=None, repr=False)
    """The URL that gives tokens to the client with these credentials (OpenID Connect)."""
    sasl_oauth_client_id: str | None = field(default=None, repr=False)
    """The id of the client."""
    sasl_oauth_client_secret: str | None = field(default=None, repr=False, metadata={"is_secret": True})
    """The secret of the client."""
    sasl_oauth_scope: str | None = field(default=None, repr=False)
    """The scope that the tokens should have."""
    sasl_oauth_cafile: str | None = field(default=None, repr=False)
    """The file of the authorities that sign the endpoint's certificate; None for those of the system."""
    sasl_oauth_token_provider: TokenProvider | None = field(default=None, repr=False)
    """An object of your own that gives tokens, in place of a file and an endpoint; a keyword only."""
    ssl_cafile: str | None = field(default=None, repr=False)
    """The file of the authorities that sign the brokers' certificates; None for those of the system."""
    ssl_certfile: str | None = field(default=None, repr=False)
    """The file of the client's own certificate."""
    ssl_keyfile: str | None = field(default=None, repr=False)
    """The file of the certificate's private key."""
    ssl_password: str | None = field(default=None, repr=False, metadata={"is_secret": True})
    """The password of the private key."""
    ssl_check_hostname: bool = True
    """Whether a broker's certificate must name the broker's host."""
    client_id: str = field(default="streamiter", repr=False)
    """The name of this client in the brokers' logs and quotas."""
    request_timeout_s: float = field(default=10.0, metadata={"above": 0})
    """How long one request may take. A broker answers in milliseconds; after a pause of 10 s, such as a long garbage
    collection, it counts as lost, and the request is repeated."""
    give_up_after_s: float = field(default=60.0, metadata={"above": 0})
    """How long a broker may be away before a read or write raises ``TopicUnavailable``. A rolling restart takes 10 to
    30 s."""
    # Not 0: flush() promises that records are stored, which no broker would confirm then.
    acks: str = field(default="all", metadata={"choices": ("all", "1")})
    """Which replicas store a record before it counts as written: ``all`` that are in sync, or ``1``. Only with ``all``
    does a broker recognize a batch that is sent again, so that no record is stored twice."""
    compression: str = field(default="none", metadata={"choices": ("none", "gzip", "snappy", "lz4", "zstd")})
    """How batches are compressed: none, gzip, snappy, lz4 or zstd."""
    linger_s: float = field(default=0.0, metadata={"least": 0})
    """How long a writer waits for more records before it sends a batch that is not full."""
    max_batch_bytes: int = field(default=500_000, metadata={"least": 1})
    """The size of a full batch. Measured: 250 to 500 kB cost the least CPU for a record; twice the size costs a fifth
    more, because the memory of each request is allocated again. A topic takes 1,048,588 bytes by default."""
    max_unacked_bytes: int = field(default=16_000_000, metadata={"least": 1})
    """The largest number of bytes of a writer that are not yet stored."""
    fetch_max_bytes: int = field(default=8_000_000, metadata={"least": 1})
    """The size that a reader asks a broker for at a time; it holds up to twice as much. Measured: more does not read
    faster, less than 4 MB reads slower."""

    @classmethod
    def parse(cls, given: Mapping[str, object], subject: str) -> KafkaOptions:
        """Return the options from values or texts; a ``ConfigurationError`` names ``subject`` and the option."""
        options = options_from(cls, given, subject)
        options._check_security(subject)
        return options._with_login(subject)

    def _with_login(self, subject: str) -> KafkaOptions:
        """Return the options with one object that gives tokens, for all connections."""
        provider = self.sasl_oauth_token_provider
        if self.sasl_oauth_token_file is not None:
            provider = TokenFile(self.sasl_oauth_token_file, subject)
        elif self.sasl_oauth_token_endpoint is not None:
            provider = ClientCredentials(
                self.sasl_oauth_token_endpoint,
                (self.sasl_oauth_client_id or "", self.sasl_oauth_client_secret or ""),
                self.sasl_oauth_scope,
                self.sasl_oauth_cafile,
                subject,
                self.request_timeout_s,
            )
        return self if provider is None else replace(self, sasl_oauth_token_provider=Login(provider, subject))

    @property
    def uses_sasl(self) -> bool:
        """Whether the client logs in."""
        return self.security_protocol.startswith("SASL")

    @property
    def uses_tokens(self) -> bool:
        """Whether the login is by OAUTHBEARER."""
        return self.uses_sasl and self.sasl_mechanism == "OAUTHBEARER"

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.security_protocol.endswith("SSL")

    def ssl_context(self, subject: str) -> ssl.SSLContext | None:
        """Read the files and return the TLS settings; None without TLS."""
        if not self.uses_tls:
            return None
        context = self._with_authorities(subject)
        context.check_hostname = self.ssl_check_hostname
        if self.ssl_certfile is not None:
            self._load_certificate(context, subject)
        return context

    def _with_authorities(self, subject: str) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.ssl_cafile)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{subject}: expected ssl_cafile to be a file of certificates (PEM), "
                f"given {shown_path(self.ssl_cafile or '')} ({self._reason(error)})"
            ) from None

    def _load_certificate(self, context: ssl.SSLContext, subject: str) -> None:
        assert self.ssl_certfile is not None
        try:
            # A missing password must be an error, not a question on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, self.ssl_password or "")
        except (OSError, ValueError) as error:  # A password of more than 1,024 bytes.
            raise ConfigurationError(
                f"{subject}: expected ssl_certfile, ssl_keyfile and ssl_password to fit each other, given "
                f"{shown_path(self.ssl_certfile)} and {shown_path(self.ssl_keyfile or '')} ({self._reason(error)})"
            ) from None

    @property
    def request_timeout_ms(self) -> int:
        """The request timeout in the unit of the protocol."""
        return int(1000 * self.request_timeout_s)

    def hide_secrets(self, text: str) -> str:
        """Return a text of a library without the secrets of this connection."""
        return hide(text, self.secrets)

    @property
    def secrets(self) -> list[str]:
        """The texts that no message may show."""
        login = self.sasl_oauth_token_provider
        token = login.last_token if isinstance(login, Login) else None
        known = (self.sasl_username, self.sasl_password, self.ssl_password, self.sasl_oauth_client_secret, token)
        return [secret for secret in known if secret]

    def _reason(self, error: Exception) -> str:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return self.hide_secrets(reason)

    def _check_security(self, subject: str) -> None:
        """Raise ConfigurationError for the first rule between several options that these options break."""
        if (rule := next((rule for is_broken, rule in self._rules() if is_broken), None)) is not None:
            raise ConfigurationError(f"{subject}: expected {rule}")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Yield whether a rule is broken, and what it expects: refused options in one order, whatever their values."""
        for name in ("sasl_username", "sasl_password", "ssl_password", "sasl_oauth_client_secret"):
            is_text = _is_text(getattr(self, name) or "")
            yield not is_text, f"{name} to be a text in UTF-8 without NUL characters, given another one"
        sasl, given = "security_protocol SASL_SSL or SASL_PLAINTEXT", f"given {self.security_protocol}"
        client = (self.sasl_oauth_client_id, self.sasl_oauth_client_secret)
        of_endpoint = _count(*client, self.sasl_oauth_scope, self.sasl_oauth_cafile)
        endpoint, provider = self.sasl_oauth_token_endpoint, self.sasl_oauth_token_provider
        sources, uses_tokens = _count(self.sasl_oauth_token_file, endpoint, provider), self.uses_tokens
        yield (
            not uses_tokens and sources + of_endpoint > 0,
            f"{sasl} and sasl_mechanism OAUTHBEARER with the options sasl_oauth_…, {given} and {self.sasl_mechanism}",
        )
        yield (
            uses_tokens and sources != 1,
            "one of sasl_oauth_token_file, sasl_oauth_token_endpoint and sasl_oauth_token_provider with OAUTHBEARER, "
            f"given {sources or 'none'}",
        )
        yield (
            _count(*client) != 2 if endpoint is not None else of_endpoint > 0,
            "sasl_oauth_client_id and sasl_oauth_client_secret together with sasl_oauth_token_endpoint, given a part of"
            " them",
        )
        yield (
            provider is not None and not callable(getattr(provider, "token", None)),
            "sasl_oauth_token_provider to be an object with a method token(), given another one",
        )
        login, both = _count(self.sasl_username, self.sasl_password), "sasl_username and sasl_password"
        yield uses_tokens and login > 0, f"no {both} with OAUTHBEARER, whose tokens name the user"
        yield self.uses_sasl and not uses_tokens and login != 2, f"{both} with {self.security_protocol}"
        yield not self.uses_sasl and login > 0, f"{sasl} with {both}, {given}"
        files = _count(self.ssl_cafile, self.ssl_certfile, self.ssl_keyfile)
        rule = f"security_protocol SSL or SASL_SSL with ssl_cafile, ssl_certfile or ssl_keyfile, {given}"
        yield not self.uses_tls and files > 0, rule


def _count(*options: object) -> int:
    """Return how many of the options are given."""
    return sum(option is not None for option in options)


def _is_text(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # bytes of the environment that are not UTF-8
        return False


Server = tuple[str, int]
"""Host and port of a broker."""

_DEFAULT_PORT: Final = 9092
_EXAMPLE: Final = "kafka://127.0.0.1:9092/clicks"
# What brokers take as the name of a topic.
_TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_SERVER: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:@\s]+)(?::(?P<port>[0-9]{1,5}))?")


def shown_server(server: Server) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    host, port = server
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """The parts of a Kafka URL: ``kafka://host:9092,host2:9092/topic?option=value``.

    >>> address = KafkaAddress.parse("kafka://one,two:9093/clicks?compression=zstd&sasl_password=secret")
    >>> address.servers, address.topic, address.url
    ((('one', 9092), ('two', 9093)), 'clicks', 'kafka://one:9092,two:9093/clicks?compression=zstd')
    """

    servers: tuple[Server, ...]
    """The brokers to ask first."""
    topic: str
    """The topic; empty where the URL names none."""
    query: Mapping[str, str]
    """The options of the query, as texts."""

    @classmethod
    def parse(cls, url: str) -> KafkaAddress:
        """Return the parts of ``url``; raise ``ConfigurationError``, whose message never repeats a password."""
        parts = split_url(url)
        if "@" in url.partition("?")[0]:
            raise ConfigurationError(
                f"expected a topic URL such as {_EXAMPLE}, given one with a user before the host: give name and "
                "password as the options sasl_username and sasl_password"
            )
        if parts.fragment:
            raise ConfigurationError(
                f"expected a topic URL such as {_EXAMPLE}, given one with a '#', after which all text is ignored; "
                "write options after a '?', and %23 for a '#' that is part of a value"
            )
        return cls(_servers(parts.netloc), _topic(parts.path), _query(parts.query))

    @property
    def cluster(self) -> str:
        """The servers, sorted, so that URLs of one cluster have the same text."""
        return ",".join(sorted(shown_server(server) for server in self.servers))

    @property
    def url(self) -> str:
        """The URL without secrets."""
        shown_options = {
            name: value for name, value in self.query.items() if is_shown_option(KafkaOptions, name, value)
        }
        query = f"?{urlencode(shown_options)}" if shown_options else ""
        return f"kafka://{','.join(map(shown_server, self.servers))}/{self.topic}{query}"

    def beside(self, name: str) -> KafkaAddress:
        """Return the address of another topic of the cluster."""
        return replace(self, topic=_checked_name(name))


def _servers(netloc: str) -> tuple[Server, ...]:
    if not netloc:
        raise ConfigurationError(f"expected a topic URL such as {_EXAMPLE}, given one without a host")
    return tuple(_server(part) for part in netloc.split(","))


def _server(text: str) -> Server:
    match = _SERVER.fullmatch(text)
    port = int(match["port"] or _DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65_536:
        raise ConfigurationError(f"expected brokers as host:port,host:port in {_EXAMPLE}, given {_shown_server(text)}")
    return match["host"].strip("[]"), port


def _shown_server(text: str) -> str:
    """Return the server as text, but not a text without a port, which may be a password: ``kafka://alice:password/clicks``."""
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
