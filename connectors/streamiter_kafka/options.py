"""What can be set on a Kafka topic: as keyword options, or in the URL's query.

>>> KafkaOptions.parse({"compression": "zstd", "give_up_after_s": "5"}, "topic 'clicks'").give_up_after_s
5.0
>>> KafkaOptions.parse({"compresion": "zstd"}, "topic 'clicks'")
Traceback (most recent call last):
...
streamiter.errors.ConfigurationError: topic 'clicks': unknown option 'compresion'; the options are acks, \
client_id, compression, fetch_max_bytes, give_up_after_s, linger_s, max_batch_bytes, max_unacked_bytes, \
request_timeout_s, sasl_mechanism, sasl_password, sasl_username, security_protocol, ssl_cafile, \
ssl_certfile, ssl_check_hostname, ssl_keyfile, ssl_password
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from streamiter.errors import ConfigurationError

__all__ = ["KafkaOptions", "is_shown"]

_SECRET: Final = frozenset({"sasl_username", "sasl_password", "ssl_password"})

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "security_protocol": ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
        "sasl_mechanism": ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
        "compression": ("none", "gzip", "snappy", "lz4", "zstd"),
        # Not 0: flush() promises that records are stored, and nobody would say so.
        "acks": ("all", "1"),
    }
)


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Options of a Kafka topic, checked.

    ``security_protocol``, ``sasl_mechanism``, ``sasl_username``, ``sasl_password``, ``ssl_cafile``,
    ``ssl_certfile``, ``ssl_keyfile``, ``ssl_password``, ``ssl_check_hostname``: how to connect.
    ``request_timeout_s``: how long one request may take. ``give_up_after_s``: how long a broker may be
    away before reading or writing ends with ``TopicUnavailable``.
    ``acks``: ``all`` in-sync replicas or ``1`` store a record before it counts as written; only with
    ``all`` are repeated sends recognized, so that no record is stored twice.
    ``compression``: none, gzip, snappy, lz4 or zstd. ``linger_s``: how long a writer waits for more
    records before it sends a batch that is not full. ``max_batch_bytes``: how large such a batch grows.
    ``max_unacked_bytes``: how much a writer has under way. ``fetch_max_bytes``: how much a reader asks
    a broker for at a time; it holds up to twice as much.
    """

    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = field(default=None, repr=False)
    sasl_password: str | None = field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_password: str | None = field(default=None, repr=False)
    ssl_check_hostname: bool = True
    client_id: str = "streamiter"
    # A broker answers in milliseconds; one that stands still for 10 s (a long garbage collection) is as
    # good as gone, and the request is repeated.
    request_timeout_s: float = 10.0
    # A rolling restart of a broker takes 10 to 30 s.
    give_up_after_s: float = 60.0
    acks: str = "all"
    compression: str = "none"
    linger_s: float = 0.0
    # Measured: 250 to 500 kB cost the least CPU a record; twice as much costs a fifth more, in memory that
    # is fetched anew for each request. A topic takes 1,048,588 bytes by default.
    max_batch_bytes: int = 500_000
    max_unacked_bytes: int = 16_000_000
    # Measured: more does not read faster, less than 4 MB does read slower.
    fetch_max_bytes: int = 8_000_000

    @classmethod
    def parse(cls, given: Mapping[str, object], subject: str) -> KafkaOptions:
        """The options out of values or their text; ``ConfigurationError`` names ``subject`` and the option."""
        known = {each.name: each.type for each in fields(cls)}
        for name in given:
            if name not in known:
                listed = ", ".join(sorted(known))
                raise ConfigurationError(f"{subject}: unknown option {name!r}; the options are {listed}")
        converted: dict[str, Any] = {
            name: _converted(name, str(known[name]), value, subject)
            for name, value in given.items()
            if value is not None
        }
        options = cls(**converted)
        options._check(subject)
        return options

    @property
    def uses_sasl(self) -> bool:
        """Whether a name and a password are sent."""
        return self.security_protocol.startswith("SASL")

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.security_protocol.endswith("SSL")

    def ssl_context(self, subject: str) -> ssl.SSLContext | None:
        """The TLS settings out of the files; None without TLS. Reads the files."""
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
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"{subject}: expected ssl_cafile to be a file of certificates (PEM), "
                f"given {self.ssl_cafile!r} ({error})"
            ) from None

    def _load_certificate(self, context: ssl.SSLContext, subject: str) -> None:
        assert self.ssl_certfile is not None
        try:
            # A password that is missing must be an error, not a question on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, self.ssl_password or "")
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"{subject}: expected ssl_certfile, ssl_keyfile and ssl_password to fit each other, given "
                f"{self.ssl_certfile!r} and {self.ssl_keyfile!r} ({error})"
            ) from None

    def _check(self, subject: str) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(choices)
                raise ConfigurationError(
                    f"{subject}: expected {name} out of {listed}, given {getattr(self, name)!r}"
                )
        self._check_sizes(subject)
        self._check_security(subject)

    def _check_sizes(self, subject: str) -> None:
        for name in ("request_timeout_s", "give_up_after_s", "max_batch_bytes", "max_unacked_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{subject}: expected {name} above 0, given {getattr(self, name)}")
        if self.linger_s < 0:
            raise ConfigurationError(f"{subject}: expected linger_s of 0 or more, given {self.linger_s}")
        if self.fetch_max_bytes < 1:
            raise ConfigurationError(
                f"{subject}: expected fetch_max_bytes above 0, given {self.fetch_max_bytes}"
            )

    def _check_security(self, subject: str) -> None:
        has_name, has_password = self.sasl_username is not None, self.sasl_password is not None
        if self.uses_sasl and not (has_name and has_password):
            raise ConfigurationError(
                f"{subject}: expected sasl_username and sasl_password with {self.security_protocol}"
            )
        if not self.uses_sasl and (has_name or has_password):
            raise ConfigurationError(
                f"{subject}: expected security_protocol SASL_SSL or SASL_PLAINTEXT with sasl_username and "
                f"sasl_password, given {self.security_protocol}"
            )
        files = [self.ssl_cafile, self.ssl_certfile, self.ssl_keyfile]
        if not self.uses_tls and any(file is not None for file in files):
            raise ConfigurationError(
                f"{subject}: expected security_protocol SSL or SASL_SSL with ssl_cafile, ssl_certfile or "
                f"ssl_keyfile, given {self.security_protocol}"
            )


def is_shown(name: str) -> bool:
    """Whether an option may be seen in a URL: a secret may not, and neither a misspelt one, which may be."""
    return name not in _SECRET and any(name == each.name for each in fields(KafkaOptions))


_TRUTHS: Final[Mapping[str, bool]] = MappingProxyType(
    {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
)


def _converted(name: str, annotation: str, value: object, subject: str) -> object:
    try:
        if annotation == "bool":
            return _TRUTHS[str(value).lower()]
        if annotation == "float":
            return float(str(value))
        if annotation == "int":
            return int(str(value))
    except (KeyError, ValueError):
        raise ConfigurationError(f"{subject}: expected {name} as {annotation}, given {value!r}") from None
    return str(value)
