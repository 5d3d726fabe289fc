"""Formats with a schema registry, on a real registry, compared with Confluent's own serializers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import pickle
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from support.kafka_fixtures import GivenKafka
from support.registry_server import RegistryServer
from support.waiting import PATIENCE_S
from topics.topic_case import created

from streamiter import Columns, Flow
from streamiter.errors import ConfigurationError, DecodeError, EncodeError, JobFailed
from streamiter.topics import (
    Avro,
    JsonSchema,
    MemoryBroker,
    OutgoingBatch,
    Protobuf,
    ReadRequest,
    SchemaReference,
    SchemaRegistry,
    TopicBatch,
    WithMetadata,
    topic,
)
from streamiter.topics.protobuf_format import _message_names
from streamiter.topics.schema_formats import RegistryFormat, SchemaEncoder
from streamiter.values.helpers.clock import SystemClock

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:authlib|confluent_kafka")

CLICK: dict[str, Any] = {
    "type": "record",
    "namespace": "shop",
    "name": "Click",
    "fields": [{"name": "user", "type": "string"}, {"name": "price", "type": "double"}],
}
# Apicurio does not know a short schema without it.
DRAFT = "http://json-schema.org/draft-07/schema#"
CLICK_JSON = {
    "title": "Click",
    "type": "object",
    "properties": {"user": {"type": "string"}, "price": {"type": "number"}},
    "required": ["user", "price"],
}
CLICKS = [{"user": "ann", "price": 1.5}, {"user": "bob", "price": 0.0}]


def messages_of(*files: descriptor_pb2.FileDescriptorProto) -> dict[str, Any]:
    """Return the classes of all messages, as protoc generates them."""
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([file.name for file in files], pool)
    for name, kind in list(found.items()):
        for nested in kind.DESCRIPTOR.nested_types:
            found[nested.full_name] = message_factory.GetMessageClass(nested)
            assert nested.full_name.startswith(name)
    return found


def proto(name: str, *messages: str, imports: tuple[str, ...] = ()) -> descriptor_pb2.FileDescriptorProto:
    """Return a file of messages with a text, a number and, with an import, a message ``shop.Shared``."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package="shop", syntax="proto3", dependency=imports)
    for each in messages:
        outer, _, inner = each.partition(".")
        made = file.message_type.add(name=outer)
        for target in [made, *([made.nested_type.add(name=inner)] if inner else [])]:
            target.field.add(name="user", number=1, type=9, label=1)
            target.field.add(name="price", number=2, type=1, label=1)
            if imports:
                target.field.add(name="shared", number=3, type=11, label=1, type_name=".shop.Shared")
    return file


Click = messages_of(proto("clicks.proto", "Other", "Click.Inner"))["shop.Click"]


@functools.cache
def confluent() -> Any:
    """Return the names of Confluent's client, which takes a second to import, for the tests that need them."""
    import confluent_kafka
    from confluent_kafka import schema_registry, serialization
    from confluent_kafka.schema_registry import avro, json_schema, protobuf

    modules = (confluent_kafka, schema_registry, serialization, avro, json_schema, protobuf)
    return SimpleNamespace(**{name: value for each in modules for name, value in vars(each).items() if name[0] != "_"})


@dataclass
class Case:
    """A format, and Confluent's serializer and deserializer of it."""

    ours: Callable[..., RegistryFormat]
    schema: tuple[Any, ...]
    serializer: Callable[[Any], Any]
    deserializer: Callable[[Any], Any]
    records: list[Any] = field(default_factory=lambda: CLICKS)


CASES = {
    "avro": Case(
        Avro,
        (json.dumps(CLICK),),
        lambda client: confluent().AvroSerializer(client, json.dumps(CLICK)),
        lambda client: confluent().AvroDeserializer(client),
    ),
    "json": Case(
        JsonSchema,
        (json.dumps(CLICK_JSON),),
        lambda client: confluent().JSONSerializer(json.dumps(CLICK_JSON), client),
        lambda client: confluent().JSONDeserializer(json.dumps(CLICK_JSON)),
    ),
    "protobuf": Case(
        Protobuf,
        (Click,),
        lambda client: confluent().ProtobufSerializer(Click, client, {"use.deprecated.format": False}),
        lambda client: confluent().ProtobufDeserializer(Click, {"use.deprecated.format": False}),
        [Click(**each) for each in CLICKS],
    ),
}


@pytest.fixture
def client(schema_registry: RegistryServer) -> Iterator[Any]:
    """Return Confluent's client."""
    with confluent().SchemaRegistryClient({"url": schema_registry.url}) as opened:
        yield opened


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def registered(registry: RegistryServer, subject: str, schema: object, kind: str = "AVRO", **more: object) -> int:
    """Register a schema without the client under test; return its id."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    body = json.dumps({"schema": text, "schemaType": kind, **more}).encode()
    request = urllib.request.Request(
        f"{registry.url}/subjects/{subject}/versions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return int(json.load(response)["id"])


async def decoded(form: Any, values: list[bytes | None]) -> list[Any]:
    """Decode as a source does."""
    batch = TopicBatch(values=values)
    await form.before_decoding(batch, SystemClock())
    return list(form.decode(batch))


async def encoder(form: RegistryFormat, topic: str) -> SchemaEncoder:
    return await form.encoder_for(topic, SystemClock())


async def encoded(form: RegistryFormat, topic: str, records: Any) -> list[bytes | None]:
    """Encode as a sink does."""
    return list((await encoder(form, topic)).encode(records).values)


# -- as Confluent's serializers --------------------------------------------------------------------------------


async def test_values_are_those_of_confluents_serializers(
    schema_registry: RegistryServer, client: Any, case: Case, topic_prefix: str
) -> None:
    """Each side reads what the other one wrote, and both write the same bytes."""
    context = confluent().SerializationContext(f"{topic_prefix}clicks", confluent().MessageField.VALUE)
    serializer, deserializer = case.serializer(client), case.deserializer(client)
    theirs = await asyncio.to_thread(lambda: [serializer(record, context) for record in case.records])
    form = case.ours(schema_registry.url, *case.schema)
    ours = await encoded(form, context.topic, case.records)
    assert [json.loads(value[5:]) if case.ours is JsonSchema else value for value in ours] == [
        json.loads(value[5:]) if case.ours is JsonSchema else value for value in theirs
    ]
    assert await decoded(form, [*theirs, None]) == [*case.records, None]
    assert await asyncio.to_thread(lambda: [deserializer(value, context) for value in ours]) == case.records


async def test_confluents_programs_and_flows_share_topics(
    kafka_broker: GivenKafka, schema_registry: RegistryServer, client: Any, topic_prefix: str
) -> None:
    read, written = (topic(f"kafka://{kafka_broker.bootstrap}/{topic_prefix}{name}") for name in ("clicks", "doubled"))
    for each in (read, written):
        await each.create()
    servers, clicks = {"bootstrap.servers": kafka_broker.bootstrap}, 150 * CLICKS
    case, value = CASES["avro"], confluent().MessageField.VALUE

    def produce() -> None:
        producer, serialized = confluent().Producer(servers), case.serializer(client)
        for click in clicks:
            producer.produce(read.name, serialized(click, confluent().SerializationContext(read.name, value)))
        assert producer.flush(PATIENCE_S) == 0

    def consume() -> list[tuple[bytes | None, Any]]:
        consumer = confluent().Consumer(servers | {"group.id": written.name, "auto.offset.reset": "earliest"})
        try:
            consumer.subscribe([written.name])
            messages = consumer.consume(len(clicks), PATIENCE_S)
        finally:
            consumer.close()
        deserialized, context = case.deserializer(client), confluent().SerializationContext(written.name, value)
        return [(each.key(), deserialized(each.value(), context)) for each in messages]

    await asyncio.to_thread(produce)
    flow = Flow("double")
    doubled = flow.source(read, stop="latest", decode=Avro(schema_registry.url)).map(twice_the_price)
    doubled.sink(written, encode=Avro(schema_registry.url, CLICK), key=lambda click: click["user"])
    await (await flow.start()).wait()
    assert await asyncio.to_thread(consume) == [(each["user"].encode(), twice_the_price(each)) for each in clicks]


def twice_the_price(click: dict[str, Any]) -> dict[str, Any]:
    return {**click, "price": 2 * click["price"]}


async def test_a_flow_reads_and_writes_topics(schema_registry: RegistryServer, case: Case, topic_prefix: str) -> None:
    broker = MemoryBroker()
    clicks, dead = broker.topic(f"{topic_prefix}clicks"), broker.topic("dead")
    for each in (clicks, dead):
        await each.create()
    form = case.ours(schema_registry.url, *case.schema)
    flow = Flow("write")
    flow.from_items(case.records).sink(clicks, encode=form)
    await (await flow.start()).wait()
    writer = await clicks.open_writer()
    unknown = b"\0\x7f\xff\xff\xff{}"
    await writer.write(OutgoingBatch([unknown, b"plain", b"", None]))
    await writer.close()

    flow = Flow("read")
    read = flow.source(clicks, stop="latest", decode=WithMetadata(form), dead_letter=dead).collect()
    await (await flow.start()).wait()
    assert [each["value"] for each in read.items] == [*case.records, None]
    letters = (await (await dead.open_reader(ReadRequest(stop="latest"))).read()).records()  # type: ignore[union-attr]
    assert {letter.value: dict(letter.headers)["error"].decode() for letter in letters} == {
        unknown: f"schema registry {schema_registry.url!r} has no schema with the id 2147483647",
        b"plain": "expected a zero byte and the id of a schema in four bytes, given a value that begins with b'plain'",
        b"": "expected a zero byte and the id of a schema in four bytes, given a value that begins with b''",
    }


async def test_formats_are_sent_to_other_processes(
    schema_registry: RegistryServer, case: Case, topic_prefix: str
) -> None:
    """Ray pickles flows: a format that has read values could not be sent."""
    form = case.ours(schema_registry.url, *case.schema)
    values = await encoded(form, topic_prefix, case.records)
    assert await decoded(form, values) == case.records
    if case.ours is not Protobuf:  # this class of messages has no module
        assert await decoded(pickle.loads(pickle.dumps(form)), values) == case.records
    assert repr(pickle.loads(pickle.dumps(SchemaRegistry("https://h")))) == "SchemaRegistry('https://h')"


# -- subjects and schemas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({}, "{topic}-value"),
        ({"strategy": "record"}, "{name}"),
        ({"strategy": "topic-record"}, "{topic}-{name}"),
        ({"subject": "my/own"}, "my/own"),
    ],
)
async def test_subjects(
    schema_registry: RegistryServer, client: Any, case: Case, topic_prefix: str, options: dict[str, Any], subject: str
) -> None:
    name = {Avro: "shop.Click", JsonSchema: "Click", Protobuf: "shop.Click"}[case.ours]  # type: ignore[index]
    if "own" in subject:
        subject += topic_prefix
        options = {**options, "subject": subject}
    found = await encoder(case.ours(schema_registry.url, *case.schema, **options), topic_prefix)
    wanted = subject.format(topic=topic_prefix, name=name)
    latest = await asyncio.to_thread(client.get_latest_version, wanted)
    assert latest.schema_id == found.schema_id
    # The subject has it now, so a sink that may not register finds it.
    again = case.ours(schema_registry.url, *case.schema, register=False, **options)
    assert (await encoder(again, topic_prefix)).schema_id == found.schema_id


async def test_a_sink_without_a_schema_writes_with_the_newest_one(
    schema_registry: RegistryServer, topic_prefix: str
) -> None:
    form = Avro(schema_registry.url)
    with pytest.raises(ConfigurationError, match=r"to have a schema \(version latest\), found none; register it"):
        await encoder(form, topic_prefix)
    schema_id = registered(schema_registry, f"{topic_prefix}-value", CLICK)
    values = await encoded(form, topic_prefix, Columns({"user": ["ann", "bob"], "price": np.array([1.5, 0.0])}))
    assert values[0] == b"\0" + schema_id.to_bytes(4) + b"\x06ann" + np.float64(1.5).tobytes()
    assert await decoded(form, values) == CLICKS
    registered(schema_registry, f"{topic_prefix}j-value", CLICK_JSON, "JSON")
    with pytest.raises(ConfigurationError, match="expected a schema of AVRO, given one of JSON"):
        await encoder(form, f"{topic_prefix}j")


async def test_reader_schema(schema_registry: RegistryServer, topic_prefix: str) -> None:
    """Records written with two versions of a schema become records of a third one."""
    older = await encoded(Avro(schema_registry.url, CLICK), topic_prefix, CLICKS[:1])
    fields = [*CLICK["fields"], {"name": "page", "type": ["null", "string"], "default": None}]
    newer = await encoded(
        Avro(schema_registry.url, {**CLICK, "fields": fields}), topic_prefix, [{**CLICKS[1], "page": "/"}]
    )
    wanted = {**CLICK, "fields": [CLICK["fields"][0], {"name": "page", "type": ["null", "string"], "default": None}]}
    form = Avro(schema_registry.url, wanted)
    assert await decoded(form, [*older, *newer]) == [{"user": "ann", "page": None}, {"user": "bob", "page": "/"}]
    other = Avro(schema_registry.url, {**CLICK, "fields": [{"name": "clicks", "type": "int"}]})
    with pytest.raises(
        DecodeError, match=r"does not fit its schema: No default value for field clicks .*\(and 1 more\)"
    ):
        await decoded(other, [*older, *newer])


async def test_an_incompatible_schema_is_refused_before_anything_is_written(
    schema_registry: RegistryServer, client: Any, topic_prefix: str
) -> None:
    broker = MemoryBroker()
    clicks = await created(broker.topic(topic_prefix))
    registered(schema_registry, f"{topic_prefix}-value", CLICK)
    await asyncio.to_thread(client.set_compatibility, f"{topic_prefix}-value", "BACKWARD")
    other = {**CLICK, "fields": [{"name": "user", "type": "int"}]}
    flow = Flow("write")
    flow.from_items([{"user": 7}]).sink(clicks, encode=Avro(schema_registry.url, other), name="write")
    with pytest.raises(JobFailed) as failed:
        await (await flow.start()).wait()
    assert "step 'write'" in str(failed.value)
    assert f"the registry refuses the schema for the subject '{topic_prefix}-value' (409)" in str(failed.value)
    assert (await clicks.describe()).records == 0


async def test_a_schema_that_is_not_registered(schema_registry: RegistryServer, case: Case, topic_prefix: str) -> None:
    form = case.ours(schema_registry.url, *case.schema, register=False)
    with pytest.raises(ConfigurationError, match="expected the schema to be registered under the subject"):
        await encoder(form, topic_prefix)


async def test_references(schema_registry: RegistryServer, topic_prefix: str) -> None:
    """A schema may use types of other subjects, also through a second one."""
    inner = {"type": "enum", "name": "shop.Kind", "symbols": ["A", "B"]}
    middle = {"type": "record", "name": "shop.Page", "fields": [{"name": "kind", "type": "shop.Kind"}]}
    outer = {"type": "record", "name": "shop.Visit", "fields": [{"name": "page", "type": "shop.Page"}]}
    registered(schema_registry, f"{topic_prefix}kind", inner)
    to_kind = SchemaReference("shop.Kind", f"{topic_prefix}kind", 1)
    registered(schema_registry, f"{topic_prefix}page", middle, references=[to_kind._asdict()])
    to_page = SchemaReference("shop.Page", f"{topic_prefix}page", 1)
    records = [{"page": {"kind": "B"}}]
    values = await encoded(Avro(schema_registry.url, outer, references=[to_page]), topic_prefix, records)
    assert await decoded(Avro(schema_registry.url), values) == records
    union = Avro(schema_registry.url, ["shop.Page", "null"], references=[to_page], subject=f"{topic_prefix}union")
    values = await encoded(union, topic_prefix, [{"kind": "A"}])
    assert await decoded(Avro(schema_registry.url), values) == [{"kind": "A"}]

    registered(schema_registry, f"{topic_prefix}user", {"$schema": DRAFT, "type": "string", "maxLength": 3}, "JSON")
    to_user = SchemaReference("user.json", f"{topic_prefix}user", 1)
    form = JsonSchema(
        schema_registry.url,
        {"title": "V", "properties": {"user": {"$ref": "user.json"}}},
        references=[to_user],
        subject=f"{topic_prefix}visit",
    )
    values = await encoded(form, topic_prefix, [{"user": "ann"}])
    assert await decoded(JsonSchema(schema_registry.url), values) == [{"user": "ann"}]
    with pytest.raises(EncodeError, match=r"\"anna\" is longer than 3 characters, at \['user'\]"):
        await encoded(form, topic_prefix, [{"user": "anna"}])


async def test_protobuf_imports_are_registered(schema_registry: RegistryServer, client: Any, topic_prefix: str) -> None:
    shared = proto(f"{topic_prefix}shared.proto", "Shared")
    files = proto(f"{topic_prefix}visit.proto", "Visit", imports=(shared.name,))
    kinds = messages_of(shared, files)
    visit = kinds["shop.Visit"](user="ann", shared=kinds["shop.Shared"](price=2.5))
    form = Protobuf(schema_registry.url, kinds["shop.Visit"])
    values = await encoded(form, topic_prefix, [visit])
    assert await decoded(form, values) == [visit]
    latest = await asyncio.to_thread(client.get_latest_version, f"{topic_prefix}-value")
    assert [each.subject for each in latest.schema.references] == [shared.name]


async def test_messages_of_several_types_in_one_topic(schema_registry: RegistryServer, topic_prefix: str) -> None:
    """A message of another type was decoded without an error, with all its fields unknown."""
    kinds = messages_of(proto(f"{topic_prefix}kinds.proto", "First", "Second.Inner"))
    first, second, inner = (kinds[f"shop.{name}"] for name in ("First", "Second", "Second.Inner"))
    values = []
    for number, kind in enumerate((first, second, inner)):
        values += await encoded(Protobuf(schema_registry.url, kind), topic_prefix, [kind(price=number)])
    assert [value[5:8] for value in values] == [b"\0", b"\2\2\x11", b"\4\2\0"]
    assert await decoded(Protobuf(schema_registry.url, first, inner, second), values) == [
        first(price=0),
        second(price=1),
        inner(price=2),
    ]
    with pytest.raises(DecodeError) as error:
        await decoded(Protobuf(schema_registry.url, first, inner), values)
    assert error.value.failures == {1: "expected a message shop.First or shop.Second.Inner, given shop.Second"}
    beyond = values[0][:5] + b"\2\x10"
    with pytest.raises(DecodeError, match=r"given one at \[8\], where the schema has none"):
        await decoded(Protobuf(schema_registry.url, first), [beyond])


def test_messages_of_a_text_have_places() -> None:
    text = """
        syntax = "proto3"; // message No {}
        package shop.v1; /* message Not { } */
        option (x) = { message: "}" };
        message A { string message = 1; enum E { Z = 0; } oneof o { string s = 2; } message B { message C {} } }
        service S { rpc message (A) returns (A) {} }
        message D { optional group Result = 1 { } message F {} map<string, A> m = 3; reserved 'a{b', "c"; }
        extend A { optional int32 e = 100; }
        message G {}
    """
    assert _message_names(text) == {
        (0,): "shop.v1.A",
        (0, 0): "shop.v1.A.B",
        (0, 0, 0): "shop.v1.A.B.C",
        (1,): "shop.v1.D",
        (1, 0): "shop.v1.D.Result",
        (1, 1): "shop.v1.D.F",
        (2,): "shop.v1.G",
    }


# -- bad records --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"user": "ann"}, "Click.price"),
        ({"user": "ann", "price": "dear"}, "Click.price is <dear> of type <class 'str'> expected double"),
        ({"user": "ann", "price": 1.0, "page": "/"}, "record contains more fields than the schema specifies: page"),
        (7, "of type <class 'int'> expected"),
    ],
)
async def test_records_that_a_schema_does_not_fit(
    schema_registry: RegistryServer, topic_prefix: str, record: object, reason: str
) -> None:
    with pytest.raises(EncodeError) as error:
        await encoded(Avro(schema_registry.url, CLICK), topic_prefix, [CLICKS[0], record])
    assert list(error.value.failures) == [1]
    assert reason in error.value.failures[1]


async def test_numbers_are_not_cut(schema_registry: RegistryServer, topic_prefix: str) -> None:
    """Fastavro's writer alone makes 1 of 1.5, and takes a number of 40 bits as an int."""
    form = Avro(schema_registry.url, {"type": "record", "name": "N", "fields": [{"name": "n", "type": "int"}]})
    with pytest.raises(EncodeError) as error:
        await encoded(form, topic_prefix, [{"n": 1.5}, {"n": 1 << 40}, {"n": 3}])
    assert list(error.value.failures) == [0, 1]


async def test_logical_types(schema_registry: RegistryServer, topic_prefix: str) -> None:
    schema = {
        "type": "record",
        "name": "L",
        "fields": [{"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}}],
    }
    form = Avro(schema_registry.url, schema)
    values = await encoded(form, topic_prefix, [{"d": Decimal("12.34")}])
    assert await decoded(form, values) == [{"d": Decimal("12.34")}]


class Visit(msgspec.Struct):
    user: str
    price: Any


async def test_json_records_are_checked_both_ways(schema_registry: RegistryServer, topic_prefix: str) -> None:
    form = JsonSchema(schema_registry.url, CLICK_JSON)
    values = await encoded(form, topic_prefix, [Visit("ann", np.float64(1.5)), {"user": "bob", "price": 0}])
    assert await decoded(form, values) == CLICKS
    with pytest.raises(EncodeError) as error:
        await encoded(form, topic_prefix, [Visit("ann", "dear"), CLICKS[0], {"user": "ann"}, {1, 2}])
    assert error.value.failures == {
        0: '"dear" is not of type "number", at [\'price\']',
        2: '"price" is a required property',
        3: "JSON has no form for set; make numbers, texts, lists or dicts of it, for instance with value=",
    }
    values = await encoded(JsonSchema(schema_registry.url, {"$schema": DRAFT}), f"{topic_prefix}2", [{"user": 7}])
    assert await decoded(JsonSchema(schema_registry.url), values) == [{"user": 7}]
    with pytest.raises(DecodeError, match="is a required property"):
        await decoded(form, values)
    with pytest.raises(DecodeError, match="unexpected end of data"):
        await decoded(form, [values[0][:-1]])


async def test_damaged_values(schema_registry: RegistryServer, case: Case, topic_prefix: str) -> None:
    """A damaged value is a bad record, whatever error the library raises."""
    form = case.ours(schema_registry.url, *case.schema)
    [value, _] = await encoded(form, topic_prefix, case.records)
    with pytest.raises(DecodeError) as error:
        await decoded(form, [value, *(value[:length] for length in range(6, len(value))), value + b"\xff"])
    assert 0 not in error.value.failures
    assert len(value) - 5 in error.value.failures
    random = np.random.default_rng(7)
    noise = [value[:5] + random.bytes(20) for _ in range(200)]
    with contextlib.suppress(DecodeError):
        await decoded(form, noise)


async def test_a_schema_of_another_kind(schema_registry: RegistryServer, topic_prefix: str) -> None:
    values = await encoded(JsonSchema(schema_registry.url, CLICK_JSON), topic_prefix, CLICKS)
    with pytest.raises(DecodeError, match=r"expected a schema of the kind AVRO, given schema \d+ of JSON"):
        await decoded(Avro(schema_registry.url), values)


# -- the user's line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "schema"), [(Avro, {"type": "array", "items": "int"}), (JsonSchema, {"type": "object"}), (Avro, None)]
)
async def test_a_strategy_needs_the_name_of_a_record(
    schema_registry: RegistryServer, form: Callable[..., RegistryFormat], schema: object
) -> None:
    with pytest.raises(ConfigurationError, match="with the strategy 'record'"):
        await encoder(form(schema_registry.url, schema, strategy="record"), "t")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamiter.values.helpers.importing.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"Avro: expected the package fastavro, found none; .*\[schema\]"):
        Avro("http://h")
