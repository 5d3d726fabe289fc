"""Values with schemas of a registry on Kafka: programs with Confluent's library write them and read them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from support.kafka_fixtures import GivenKafka
from support.registry_server import RegistryServer

from streamiter import Flow
from streamiter.topics import Avro, topic

CLICK = json.dumps(
    {"type": "record", "name": "Click", "fields": [{"name": "user", "type": "string"}, {"name": "n", "type": "long"}]}
)
CLICKS = [{"user": f"user {number % 7}", "n": number} for number in range(300)]


async def test_confluents_programs_and_flows_share_topics(
    kafka_broker: GivenKafka, schema_registry: RegistryServer, topic_prefix: str
) -> None:
    read = topic(f"kafka://{kafka_broker.bootstrap}/{topic_prefix}clicks")
    written = topic(f"kafka://{kafka_broker.bootstrap}/{topic_prefix}doubled")
    for each in (read, written):
        await each.create()
    await asyncio.to_thread(_produce, kafka_broker.bootstrap, schema_registry.url, read.name)

    flow = Flow("double")
    clicks = flow.source(read, stop="latest", decode=Avro(schema_registry.url))
    doubled = clicks.map(lambda click: {**click, "n": 2 * click["n"]})
    doubled.sink(written, encode=Avro(schema_registry.url, CLICK), key=lambda click: click["user"])
    await (await flow.start()).wait()

    found = await asyncio.to_thread(_consume, kafka_broker.bootstrap, schema_registry.url, written.name, len(CLICKS))
    assert found == [(click["user"].encode(), {**click, "n": 2 * click["n"]}) for click in CLICKS]


def _produce(broker: str, registry: str, name: str) -> None:
    with SchemaRegistryClient({"url": registry}) as client:
        serializer, context = AvroSerializer(client, CLICK), SerializationContext(name, MessageField.VALUE)
        producer = Producer({"bootstrap.servers": broker})
        for click in CLICKS:
            producer.produce(name, serializer(click, context))
        assert producer.flush(30) == 0


def _consume(broker: str, registry: str, name: str, count: int) -> list[tuple[bytes | None, Any]]:
    consumer = Consumer({"bootstrap.servers": broker, "group.id": name, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([name])
        messages = consumer.consume(count, 30)
    finally:
        consumer.close()
    with SchemaRegistryClient({"url": registry}) as client:
        deserializer, context = AvroDeserializer(client), SerializationContext(name, MessageField.VALUE)
        return [(each.key(), deserializer(each.value(), context)) for each in messages]
