"""Formats whose schemas are in a registry: `Avro` and `JsonSchema`, both ways, and the base of these and `Protobuf`.

A value begins with a zero byte and the id of its schema in four bytes. Confluent's serializers write and read such
values.

A source looks up the ids that are new in a batch before the batch is decoded, once for the batch; a sink registers its
schema when it is opened. What a format has made of a schema is kept by id. Needs the extra ``schema``.
"""

from __future__ import annotations

import abc
import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, cast, final, get_args

import orjson

from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.topics.formats import decode_each, encode_each, json_bytes, loads_exactly, rows_to_encode
from streamiter.topics.schema_registry import Schema, SchemaReference, SchemaRegistry
from streamiter.topics.topic import OutgoingBatch, TopicBatch
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.importing import need_package
from streamiter.values.numbers import one_of
from streamiter.values.records import Batch, Columns

SubjectStrategy = Literal["topic", "record", "topic-record"]
"""The subject of a schema: ``clicks-value`` by the topic, ``shop.Click`` by the full name of the record, or
``clicks-shop.Click`` by both."""


ReadValue = Callable[[bytes], Any]
WriteValue = Callable[[Any], bytes]

# A zero byte, and the id.
PREFIX_BYTES: Final = 5

# A topic has a few schemas for each of its types; more are a sign of a program that registers one for each record.
_READERS_MAX: Final = 1_000

# A registry is asked again for an id that it did not have: replicas of a registry may be late.
_UNKNOWN_FOR_S: Final = 60.0


class RegistryFormat(abc.ABC):
    """What the three formats have in common: the subject, the ids, and the readers by id."""

    kind: ClassVar[str]
    library: ClassVar[str]
    """The module that reads and writes the format."""

    def __init__(
        self, registry: SchemaRegistry | str, subject: str | None, strategy: SubjectStrategy, register: bool
    ) -> None:
        need_package(type(self).__name__, self.library, "schema")
        one_of(f"{type(self).__name__}(strategy=)", strategy, *get_args(SubjectStrategy))
        self.registry = SchemaRegistry(registry) if isinstance(registry, str) else registry
        if not isinstance(self.registry, SchemaRegistry):
            raise ConfigurationError(
                f"{type(self).__name__}: expected registry= to be a SchemaRegistry or its URL, given "
                f"{type(registry).__name__}"
            )
        self._subject = subject
        self._strategy = strategy
        self._register = register
        self._readers: dict[bytes, ReadValue] = {}
        """The readers by the beginning of the values, in the order of their last use."""
        self._unknown_until_s: dict[bytes, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Ray sends flows to other processes, which look schemas up themselves.
        return {**vars(self), "_readers": {}, "_unknown_until_s": {}}

    # -- decoding

    async def before_decoding(self, batch: TopicBatch, clock: Clock) -> None:
        """Look up the schemas of the batch that are not known yet; wait while the registry is away."""
        readers, unknown = self._readers, self._unknown_until_s
        for prefix in {value[:PREFIX_BYTES] for value in batch.values if value is not None}:
            if (reader := readers.pop(prefix, None)) is not None:
                readers[prefix] = reader
                continue
            if not _is_prefix(prefix) or unknown.get(prefix, -1.0) > clock.monotonic_s():
                continue
            unknown.pop(prefix, None)
            found = await self.registry.patiently(clock, functools.partial(self._look_up, prefix))
            if found is None:
                _keep(unknown, prefix, clock.monotonic_s() + _UNKNOWN_FOR_S)
            else:
                _keep(readers, prefix, found)

    def _look_up(self, prefix: bytes) -> ReadValue | None:
        """Return the reader of the values with this beginning; None for an id that the registry does not have."""
        schema_id = int.from_bytes(prefix[1:])
        schema = self.registry.schema(schema_id)
        if schema is None:
            return None
        if schema.kind != self.kind:
            return _refuses(f"expected a schema of the kind {self.kind}, given schema {schema_id} of {schema.kind}")
        references = self.registry.references_of(schema)
        try:
            return self._reader(schema, references)
        except StreamiterError:
            raise
        except Exception as error:  # a schema that the library does not take
            return _refuses(f"schema {schema_id} of {self.registry} is not usable: {short_reason(error)}")

    @abc.abstractmethod
    def _reader(self, schema: Schema, references: Mapping[str, Schema]) -> ReadValue:
        """Return the function that reads a value of this schema; it raises ``ValueError`` for a bad one."""

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the records, None for tombstones; raise ``DecodeError`` for values that no schema fits."""
        return decode_each(batch.values, self._decode_one)

    def _decode_one(self, value: bytes | None) -> Any:
        if value is None:
            return None
        reader = self._readers.get(value[:PREFIX_BYTES])
        return (reader or self._missing_reader(value[:PREFIX_BYTES]))(value)

    def _missing_reader(self, prefix: bytes) -> ReadValue:
        if not _is_prefix(prefix):
            raise ValueError(
                f"expected a zero byte and the id of a schema in four bytes, given a value that begins with {prefix!r}"
            )
        # Without a source, or where more ids are under way than are kept.
        found = None if prefix in self._unknown_until_s else self._look_up(prefix)
        if found is None:
            raise ValueError(f"{self.registry} has no schema with the id {int.from_bytes(prefix[1:])}")
        _keep(self._readers, prefix, found)
        return found

    # -- encoding

    async def encoder_for(self, topic: str, clock: Clock) -> SchemaEncoder:
        """Return the encoder for a topic; the sink calls it. Registers the schema, or looks it up.

        Raises ``TopicUnavailable`` if the registry is away for ``give_up_after_s``, and ``ConfigurationError`` for a
        schema that it refuses or does not have.
        """
        return await self.registry.patiently(clock, functools.partial(self._encoder, topic))

    @abc.abstractmethod
    def _encoder(self, topic: str) -> SchemaEncoder: ...

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Raise ``ConfigurationError``: only the encoder of a topic knows the id of the schema."""
        raise ConfigurationError(
            f"{self!r}: expected a sink, which asks for the id of the schema; write stream.sink(topic, encode=…), or "
            "await ….encoder_for(topic, SystemClock())"
        )

    def _subject_of(self, topic: str, record: Callable[[], str]) -> str:
        """Return the subject; ``record`` returns the full name of the record."""
        if self._subject is not None:
            return self._subject
        if self._strategy == "topic":
            return f"{topic}-value"
        return record() if self._strategy == "record" else f"{topic}-{record()}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.registry.url!r})"


@final
class SchemaEncoder:
    """Encodes records with one schema of a registry, whose id the values begin with."""

    def __init__(self, schema_id: int, write: WriteValue) -> None:
        self.schema_id = schema_id
        self._write = write
        self._prefix = b"\0" + schema_id.to_bytes(4)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values; raise ``EncodeError`` for records that the schema does not fit."""
        batch = rows_to_encode(batch)
        rows = _plain_rows(batch) if isinstance(batch, Columns) else batch
        return OutgoingBatch(encode_each(rows, self._encode_one))

    def _encode_one(self, record: object) -> bytes | None:
        return None if record is None else self._prefix + self._write(record)

    def __repr__(self) -> str:
        return f"SchemaEncoder(schema {self.schema_id})"


def _plain_rows(columns: Columns) -> list[dict[str, Any]]:
    names = columns.names
    arrays = [array.tolist() for array in columns.arrays.values()]
    return [dict(zip(names, row, strict=True)) for row in zip(*arrays, strict=True)]


class _TextFormat(RegistryFormat):
    """A format whose schemas are JSON."""

    def __init__(
        self,
        registry: SchemaRegistry | str,
        schema: str | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        subject: str | None = None,
        strategy: SubjectStrategy = "topic",
        references: Iterable[SchemaReference] = (),
        register: bool = True,
    ) -> None:
        super().__init__(registry, subject, strategy, register)
        text = schema if schema is None or isinstance(schema, str) else orjson.dumps(schema).decode()
        self._given = None if text is None else Schema(self.kind, text, tuple(references))
        if self._given is not None and not self._given.references:
            try:
                self._writer(self._given, {})
            except Exception as error:
                raise ConfigurationError(
                    f"{type(self).__name__}: expected a schema of {self.kind}, given {self._given.text[:200]}: "
                    f"{short_reason(error)}"
                ) from None

    def _encoder(self, topic: str) -> SchemaEncoder:
        given = self._given
        if given is None:
            if self._strategy != "topic" and self._subject is None:
                raise ConfigurationError(f"{self!r}: expected schema= or subject= with the strategy {self._strategy!r}")
            schema_id, schema = self.registry.latest(self._subject_of(topic, str))
            if schema.kind != self.kind:
                raise ConfigurationError(f"{self!r}: expected a schema of {self.kind}, given one of {schema.kind}")
        else:
            schema, subject = given, self._subject_of(topic, functools.partial(self._record_name, given))
            schema_id = self.registry.id_of(subject, schema, register=self._register)
        return SchemaEncoder(schema_id, self._writer(schema, self.registry.references_of(schema)))

    @abc.abstractmethod
    def _writer(self, schema: Schema, references: Mapping[str, Schema]) -> WriteValue: ...

    @abc.abstractmethod
    def _record_name(self, schema: Schema) -> str: ...


@final
class Avro(_TextFormat):
    """Avro with a schema registry, both ways: records are dicts, or what the schema says.

    Reading: each value is read with the schema that has written it. ``schema`` is the *reader schema*: then the records
    have its fields, also if values were written with older or newer schemas, by Avro's rules of resolution. A value
    whose schema is unknown, or does not resolve to the reader schema, is a bad record; a tombstone is None.

    Writing: a sink registers ``schema`` under its ``subject`` or, with ``register=False``, expects it there. Without
    ``schema`` it writes with the newest one of the subject. The subject is ``subject``, or follows ``strategy``:
    ``"topic"`` (``clicks-value``), ``"record"`` (``shop.Click``) or ``"topic-record"`` (``clicks-shop.Click``).
    ``references`` are registered schemas whose types the schema uses. A record with a field that the schema does not
    have, or a value of another type, is refused.

    >>> Avro("http://127.0.0.1:8081", {"type": "record", "name": "Click", "fields": [{"name": "x", "type": "int"}]})
    Avro('http://127.0.0.1:8081')
    """

    kind: ClassVar[str] = "AVRO"
    library: ClassVar[str] = "fastavro"

    def _reader(self, schema: Schema, references: Mapping[str, Schema]) -> ReadValue:
        from fastavro import schemaless_reader

        wanted = self._given
        is_field = not (_is_record(schema) and (wanted is None or _is_record(wanted)))
        written = _avro(schema, references, is_field=is_field)
        wanted_type = None
        if wanted is not None:
            wanted_type = _avro(wanted, self.registry.references_of(wanted), is_field=is_field)

        def read(value: bytes) -> Any:
            stream = io.BytesIO(value)
            stream.seek(PREFIX_BYTES)
            try:
                record = schemaless_reader(stream, written, wanted_type)
            except Exception as error:  # fastavro raises errors of many classes for damaged values
                raise ValueError(f"the value does not fit its schema: {short_reason(error)}") from error
            if stream.tell() != len(value):
                raise ValueError(f"{len(value) - stream.tell()} bytes follow after the record")
            return record[_FIELD] if is_field else record  # type: ignore[call-overload, index]

        return read

    def _writer(self, schema: Schema, references: Mapping[str, Schema]) -> WriteValue:
        from fastavro import schemaless_writer, validate

        is_field = not _is_record(schema)
        parsed = _avro(schema, references, is_field=is_field)

        def write(record: Any) -> bytes:
            stream = io.BytesIO()
            given = {_FIELD: record} if is_field else record
            try:
                validate(given, parsed)  # The writer alone would write 1.5 as the integer 1.
                schemaless_writer(stream, parsed, given, strict_allow_default=True)
            except Exception as error:
                raise ValueError(short_reason(error)) from error
            return stream.getvalue()

        return write

    def _record_name(self, schema: Schema) -> str:
        given = orjson.loads(schema.text)
        if not isinstance(given, dict) or "name" not in given:
            raise ConfigurationError(
                f"{self!r}: expected the schema of a named type with the strategy {self._strategy!r}"
            )
        name, namespace = given["name"], given.get("namespace")
        return name if "." in name or not namespace else f"{namespace}.{name}"


def _is_record(schema: Schema) -> bool:
    given = orjson.loads(schema.text)
    return isinstance(given, dict) and given.get("type") == "record"


# A record with one field is encoded as the field alone. fastavro forgets the types that are used by name only in a
# union, an array or a map, but not in a record.
_FIELD: Final = "value"


def _avro(schema: Schema, references: Mapping[str, Schema], *, is_field: bool) -> Any:
    """Return a schema as fastavro takes it; with ``is_field`` the schema of a record with one field of this type."""
    from fastavro import parse_schema

    named: dict[str, Any] = {}
    for reference in references.values():
        parse_schema(orjson.loads(reference.text), named)
    given = orjson.loads(schema.text)
    if is_field:
        given = {"type": "record", "name": "Record", "fields": [{"name": _FIELD, "type": given}]}
    return parse_schema(given, named)


@final
class JsonSchema(_TextFormat):
    """JSON with a schema registry, both ways: records are Python objects, as with ``Json``, checked by a schema.

    Reading checks each value by the schema that it was written with or, if ``schema`` is given, by that one. Writing
    checks each record; its other options are those of `Avro`. The name of a record is the ``title`` of its schema.

    >>> JsonSchema("http://127.0.0.1:8081", {"title": "Click", "type": "object", "required": ["user"]})
    JsonSchema('http://127.0.0.1:8081')
    """

    kind: ClassVar[str] = "JSON"
    library: ClassVar[str] = "jsonschema_rs"

    def _reader(self, schema: Schema, references: Mapping[str, Schema]) -> ReadValue:
        if self._given is not None:
            schema, references = self._given, self.registry.references_of(self._given)
        check = _json_check(schema, references)

        def read(value: bytes) -> Any:
            record = loads_exactly(value[PREFIX_BYTES:])
            check(record)
            return record

        return read

    def _writer(self, schema: Schema, references: Mapping[str, Schema]) -> WriteValue:
        check = _json_check(schema, references)

        def write(record: Any) -> bytes:
            value = json_bytes(record)
            check(loads_exactly(value))  # arrays and structs have become lists and objects
            return value

        return write

    def _record_name(self, schema: Schema) -> str:
        given = orjson.loads(schema.text)
        if not isinstance(given, dict) or not isinstance(given.get("title"), str):
            raise ConfigurationError(f"{self!r}: expected a schema with a title with the strategy {self._strategy!r}")
        return cast(str, given["title"])


def _json_check(schema: Schema, references: Mapping[str, Schema]) -> Callable[[Any], None]:
    from jsonschema_rs import ValidationError, validator_for

    def referred(uri: str) -> Any:
        """Return a referred schema: never from the network."""
        for name, reference in references.items():
            if uri == name or uri.endswith(f"/{name.lstrip('/')}"):
                return orjson.loads(reference.text)
        raise ValueError(f"the schema has no reference for {uri}")

    validator = validator_for(orjson.loads(schema.text), retriever=referred)

    def check(record: Any) -> None:
        try:
            validator.validate(record)
        except ValidationError as error:
            place = "".join(f"[{part!r}]" for part in error.instance_path)
            raise ValueError(f"{error.message}{f', at {place}' if place else ''}") from None

    return check


def _is_prefix(prefix: bytes) -> bool:
    return len(prefix) == PREFIX_BYTES and prefix[0] == 0


def _refuses(reason: str) -> ReadValue:
    def refuse(_: bytes) -> Any:
        raise ValueError(reason)

    return refuse


def _keep(kept: dict[bytes, Any], prefix: bytes, entry: object) -> None:
    """Keep an entry; the entry that was not used for the longest time gives way."""
    kept[prefix] = entry
    if len(kept) > _READERS_MAX:
        del kept[next(iter(kept))]


def short_reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
