"""A client of schema registries with Confluent's interface: it looks schemas up, and registers them.

Registries of Confluent, Apicurio (``/apis/ccompat/v7``), Karapace and Redpanda have this interface. The formats of
:mod:`streamiter.topics.schema_formats` use the client.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar, final
from urllib.parse import quote

import orjson

from streamiter.errors import ConfigurationError, TopicDenied, TopicError, TopicUnavailable
from streamiter.topics.http import HttpAnswer, check_authorities, checked_url, exchange
from streamiter.topics.urls import hide, options_from
from streamiter.values.helpers.clock import Clock

# The pause between two tries doubles: a registry restarts in seconds.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0

_MEDIA_TYPE: Final = "application/vnd.schemaregistry.v1+json"

# Codes of Confluent's interface: there is no such subject, version or schema.
_NO_SUBJECT: Final = 40401
_MISSING: Final = (_NO_SUBJECT, 40402, 40403)
_INCOMPATIBLE: Final = 409
_BUSY: Final = 429


class SchemaReference(NamedTuple):
    """Another schema that a schema uses."""

    name: str
    """Its name in the schema: the full name of an Avro type, the path of a file of Protobuf, a ``$ref`` of JSON."""
    subject: str
    """The subject under which it is registered."""
    version: int
    """Its version there."""


class Schema(NamedTuple):
    """A schema as a registry has it."""

    kind: str
    """AVRO, JSON or PROTOBUF."""
    text: str
    """The schema itself."""
    references: tuple[SchemaReference, ...] = ()
    """The schemas that it uses."""


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """The options of a `SchemaRegistry`."""

    username: str | None = field(default=None, repr=False, metadata={"is_secret": True})
    """The user, or the key of an API."""
    password: str | None = field(default=None, repr=False, metadata={"is_secret": True})
    """The password of the user."""
    token: str | None = field(default=None, repr=False, metadata={"is_secret": True})
    """A token, in place of user and password."""
    ssl_cafile: str | None = field(default=None, repr=False)
    """The file of the authorities that sign the registry's certificate; None for the authorities of the system."""
    request_timeout_s: float = field(default=10.0, metadata={"above": 0})
    """How long one request may take."""
    give_up_after_s: float = field(default=60.0, metadata={"least": 0})
    """How long the registry may be away before a source or a sink raises ``TopicUnavailable``."""


Found = TypeVar("Found")


@final
class SchemaRegistry:
    """A schema registry at an HTTP address, for the formats ``Avro``, ``JsonSchema`` and ``Protobuf``.

    ``options`` are those of `RegistryOptions`. ``username``, ``password`` and ``token`` are secrets, which no message
    shows; in place of a secret its source may be given: as ``…_env`` the name of an environment variable, or as
    ``…_file`` the path of a file of one line. A new object connects to no server.

    >>> SchemaRegistry("http://127.0.0.1:8081", give_up_after_s=5)
    SchemaRegistry('http://127.0.0.1:8081')
    >>> SchemaRegistry("http://ann:hush@127.0.0.1:8081")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: schema registry: expected http://host or https://host, given \
'http://…@127.0.0.1:8081'; give credentials as username= and password=
    """

    def __init__(self, url: str, **options: object) -> None:
        self.url = checked_url(url, "schema registry", "give credentials as username= and password=")
        self._options = options_from(RegistryOptions, options, f"{self}")
        check_authorities(self._options.ssl_cafile, "ssl_cafile", f"{self}")
        self._headers = {"Accept": f"{_MEDIA_TYPE}, application/json", "Content-Type": _MEDIA_TYPE}
        if (login := self._login()) is not None:
            self._headers["Authorization"] = login

    def _login(self) -> str | None:
        username, password, token = self._options.username, self._options.password, self._options.token
        if (username is None) != (password is None) or (username is not None and token is not None):
            raise ConfigurationError(f"{self}: expected username and password together, or token alone")
        if token is not None:
            if not (token.isascii() and token.isprintable()):
                raise ConfigurationError(f"{self}: expected token to be ASCII text in one line, given another one")
            return f"Bearer {token}"
        return None if username is None else f"Basic {base64.b64encode(f'{username}:{password}'.encode()).decode()}"

    async def patiently(self, clock: Clock, call: Callable[[], Found]) -> Found:
        """Return what ``call`` returns, which blocks; while the registry is away, call again.

        Raises ``TopicUnavailable`` after ``give_up_after_s``.
        """
        began_s, pause_s = clock.monotonic_s(), _FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.to_thread(call)
            except TopicUnavailable as error:
                if clock.monotonic_s() + pause_s - began_s > self._options.give_up_after_s:
                    raise TopicUnavailable(
                        f"{error}; gave up after {self._options.give_up_after_s:g} s (option give_up_after_s)"
                    ) from None
            await clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    # -- Calls that block. TopicUnavailable: no answer; TopicDenied: wrong credentials.

    def schema(self, schema_id: int) -> Schema | None:
        """Return the schema with this id; None if the registry has none."""
        found = self._ask(f"/schemas/ids/{schema_id}")
        return None if found is None else _schema(found)

    def references_of(self, schema: Schema) -> dict[str, Schema]:
        """Return the schemas that ``schema`` uses, by name; each one after the schemas that it uses itself."""
        found: dict[str, Schema] = {}
        self._add_references(schema.references, found, ())
        return found

    def _add_references(
        self, references: Iterable[SchemaReference], found: dict[str, Schema], within: tuple[SchemaReference, ...]
    ) -> None:
        for reference in references:
            if reference in within:
                raise TopicError(f"{self}: the references of {reference.subject!r} lead back to it")
            if reference.name not in found:
                used = self._version(reference.subject, str(reference.version))
                self._add_references(used.schema.references, found, (*within, reference))
                found[reference.name] = used.schema

    def latest(self, subject: str) -> tuple[int, Schema]:
        """Return the newest schema of a subject, with its id."""
        found = self._version(subject, "latest")
        return found.id, found.schema

    def _version(self, subject: str, version: str) -> _Version:
        found = self._ask(f"/subjects/{quote(subject, safe='')}/versions/{version}")
        if found is None:
            raise ConfigurationError(
                f"{self}: expected the subject {subject!r} to have a schema (version {version}), found none; "
                "register it, or give the sink schema="
            )
        return _Version(found["id"], found["version"], _schema(found))

    def id_of(self, subject: str, schema: Schema, *, register: bool) -> int:
        """Return the id of a schema of a subject; ``register`` it before, or expect that it is registered.

        Raises ``ConfigurationError`` where the registry refuses the schema, or does not have it.
        """
        if register:
            try:
                found = self._ask(f"/subjects/{quote(subject, safe='')}/versions", _body(schema), subject=subject)
            except ConfigurationError:
                # Apicurio refuses a schema (409) that another sink, or another subtask, registers at the same moment.
                if (found := self._ask(f"/subjects/{quote(subject, safe='')}", _body(schema), subject=subject)) is None:
                    raise
        else:
            found = self._registered(subject, schema)
        return int((found or {})["id"])

    def reference(self, name: str, schema: Schema, *, register: bool) -> SchemaReference:
        """Return a reference to a schema of the subject ``name``, under the same name; ``register`` it before."""
        self.id_of(name, schema, register=register)
        return SchemaReference(name, name, self._registered(name, schema)["version"])

    def _registered(self, subject: str, schema: Schema) -> dict[str, Any]:
        found = self._ask(f"/subjects/{quote(subject, safe='')}", _body(schema), subject=subject)
        if found is None:
            raise ConfigurationError(
                f"{self}: expected the schema to be registered under the subject {subject!r}, found none; register "
                "it, or let the sink do so (register=True)"
            )
        return found

    def _ask(self, path: str, body: bytes | None = None, *, subject: str = "") -> dict[str, Any] | None:
        """Return the answer of the registry; None if it has no such subject, version or schema."""
        options = self._options
        try:
            answer = exchange(
                self.url + path,
                headers=self._headers,
                body=body,
                cafile=options.ssl_cafile,
                timeout_s=options.request_timeout_s,
            )
        except OSError as error:
            reason = self._hidden(error.strerror or str(error) or type(error).__name__)
            raise TopicUnavailable(f"{self}: no answer ({reason})") from None
        found = _json_object(answer)
        if answer.status == 200 and found is not None:
            return found
        if found is not None and found.get("error_code") in _MISSING:
            return None
        raise self._refusal(answer, found or {}, subject)

    def _refusal(self, answer: HttpAnswer, found: Mapping[str, Any], subject: str) -> Exception:
        reason = self._hidden(f"{found.get('message', 'no message')}"[:500]).rstrip(".")
        if answer.status in (401, 403):
            return TopicDenied(
                f"{self}: the registry refuses the credentials ({answer.status}, {reason}); check username and "
                "password, or token, and the rights of the user"
            )
        if answer.status >= 500 or answer.status == _BUSY:
            return TopicUnavailable(f"{self}: status {answer.status} ({reason})")
        if found and subject:
            advice = "check the schema"
            if answer.status == _INCOMPATIBLE:
                advice = "give fields that you add a default, or ask for another compatibility of the subject"
            return ConfigurationError(
                f"{self}: the registry refuses the schema for the subject {subject!r} ({answer.status}): {reason}; "
                f"{advice}"
            )
        return TopicError(
            f"{self}: expected the interface of a schema registry, given status {answer.status} ({reason}); check the "
            "address: Apicurio's ends with /apis/ccompat/v7"
        )

    def _hidden(self, text: str) -> str:
        options = self._options
        return hide(text, filter(None, (options.username, options.password, options.token)))

    def __repr__(self) -> str:
        return f"SchemaRegistry({self.url!r})"

    def __str__(self) -> str:
        return f"schema registry {self.url!r}"


class _Version(NamedTuple):
    id: int
    version: int
    schema: Schema


def _json_object(answer: HttpAnswer) -> dict[str, Any] | None:
    try:
        found = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _schema(found: Mapping[str, Any]) -> Schema:
    references = [
        SchemaReference(each["name"], each["subject"], each["version"]) for each in found.get("references") or ()
    ]
    return Schema(found.get("schemaType") or "AVRO", found["schema"], tuple(references))  # AVRO is left out


def _body(schema: Schema) -> bytes:
    body: dict[str, Any] = {"schema": schema.text}
    if schema.kind != "AVRO":
        body["schemaType"] = schema.kind
    if schema.references:
        body["references"] = [reference._asdict() for reference in schema.references]
    return orjson.dumps(body)
