"""The programs of the stack run as in ``docker-compose.yml``, without containers, at a real broker.

Prometheus scrapes the service with its own configuration, and evaluates the rules and the queries of the dashboard. The
broker of the file is started by the official image's own set-up program, which is part of Kafka's jars.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from stack.running_stack import ComposeBroker, Stack
from stack.stack_files import EXAMPLE, environment_of
from support.flights import first_flights
from support.kafka_fixtures import skip_without_java
from support.kafka_server import free_ports
from support.programs import system_program
from support.waiting import PATIENCE_S

from streamiter.models import ModelUpdate
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, TopicRecord

__all__ = ["first_flights"]


@pytest.fixture
async def stack(kafka_broker: Any, topic_prefix: str, tmp_path: Path, first_flights: str) -> AsyncIterator[Stack]:
    """Return the programs on the broker of all tests."""
    programs = Stack(kafka_broker.bootstrap, topic_prefix, tmp_path, first_flights)
    yield programs
    await programs.stop()


async def read_all(topic: Topic) -> list[TopicRecord]:
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    records: list[TopicRecord] = []
    while (batch := await reader.read()) is not None:
        records += batch.records()
    await reader.close()
    return records


def can_confine() -> bool:
    """Return whether this user may make file systems read-only; in CI, fail otherwise."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0 or "CI" not in os.environ, done.stderr
    return done.returncode == 0


async def prepared(stack: Stack) -> None:
    prepare = await stack.start("prepare")
    assert await prepare.ends() == 0, prepare.printed


# ---- the programs


async def test_a_restarted_service_continues_where_it_was_while_the_consumer_predicts(stack: Stack) -> None:
    """A consumer that started before the first model failed. After an update the service started without its state, and
    consumers ignored its versions.
    """
    await prepared(stack)
    producer = await stack.start("producer", EVENTS_PER_SECOND="2000")
    consumer = await stack.start("consumer", REPORT_EVERY="300")
    await consumer.says(r"no model yet \(none has been published\): \d+ departures without a prediction")
    service = await stack.start("service")
    await stack.becomes_healthy("service")
    versions = [int((await consumer.says(r"now with model 1\.(\d+), \d+\.\d\d s old"))[1]) for _ in range(3)]
    assert versions == sorted(versions)
    assert await service.terminated() == 0, service.printed
    before = await stack.updates()

    service = await stack.start("service")
    while int((await consumer.says(r"now with model 1\.(\d+)"))[1]) <= before[-1].version:
        pass
    enough = await stack.start("consumer", PREDICTIONS="100", REPORT_EVERY="50")
    assert await enough.ends() == 0, enough.printed
    for program in (service, consumer, producer):
        assert await program.terminated() == 0, program.printed
    after = await stack.updates()
    assert [update.rank for update in after] == [(1, version) for version in range(1, len(after) + 1)]
    first, last_before = after[len(before)], before[-1]
    assert (first.records or 0) >= (last_before.records or 0)
    before_it, after_it = columns_of(last_before), columns_of(first)
    assert before_it.keys() <= after_it.keys()
    both = np.array([(before_it[column], after_it[column]) for column in before_it])
    assert np.corrcoef(both.T)[0, 1] > 0.5


def columns_of(update: ModelUpdate) -> dict[Any, float]:
    """Return the weight of each field and place."""
    assert isinstance(update.parameters, dict)
    names = [*update.parameters["fields"], *update.parameters["places"].tolist()]
    return dict(zip(names, update.parameters["weights"].tolist(), strict=True))


def test_a_token_that_a_full_disk_has_left_empty_is_written(tmp_path: Path) -> None:
    """The first start found no room for the token; the empty file was kept, and the service refused it for ever."""
    file = tmp_path / "token"
    file.touch()
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE), "TOKEN_FILE": str(file)}
    tokens = set()
    for _ in range(2):
        command = [sys.executable, "-c", "import prepare; prepare.write_token()"]
        subprocess.run(command, env=environment, timeout=PATIENCE_S, check=True)
        tokens.add(file.read_text())
    [token] = tokens
    assert len(token) > 40


async def test_both_events_of_a_flight_are_in_one_partition_in_order(stack: Stack) -> None:
    """An arrival in another partition was read before its departure, so its answer was lost."""
    producer = await stack.start("producer", EVENTS="5000", EVENTS_PER_SECOND="0", PARTITIONS="3")
    assert await producer.ends() == 0, producer.printed
    records = await read_all(stack.topic("EVENTS_TOPIC"))
    assert len(records) == 5_000
    counts = Counter(record.partition for record in records)
    assert len(counts) == 3
    assert min(counts.values()) > 1_000
    departed: set[tuple[int, str]] = set()
    for record in records:
        event = orjson.loads(record.value or b"")
        flight = (record.partition, event["flight"])
        assert (flight in departed) == (event["event"] == "arrival"), event
        departed.add(flight)


async def test_bad_events_go_to_the_dead_letters_and_the_rest_is_learned(stack: Stack) -> None:
    """The service failed at one bad event, restarted, and failed at it again for ever. In a read-only container,
    it wrote to a folder that is no volume.
    """
    await prepared(stack)
    producer = await stack.start("producer", EVENTS="2000", EVENTS_PER_SECOND="0")
    assert await producer.ends() == 0
    bad = [b"not json", b"[1,2]"]
    writer = await stack.topic("EVENTS_TOPIC").open_writer()
    await writer.write(OutgoingBatch(bad))
    await writer.close()
    arrivals = sum(b'"arrival"' in (record.value or b"") for record in await read_all(stack.topic("EVENTS_TOPIC")))
    # Without the stored functions of the image, the service would compile them.
    service = await stack.start("service", is_confined=can_confine(), NUMBA_DISABLE_JIT="1")
    async with asyncio.timeout(PATIENCE_S):
        while not (updates := await stack.updates()) or (updates[-1].records or 0) < arrivals:
            await asyncio.sleep(0.1)
    assert updates[-1].records == arrivals
    assert await service.terminated() == 0, service.printed
    letters = {record.value: dict(record.headers) for record in await read_all(stack.topic("DEAD_LETTERS_TOPIC"))}
    assert letters.keys() == set(bad)
    assert letters[b"not json"]["offset"] == b"2000"


async def test_programs_wait_for_kafka_and_can_be_stopped_meanwhile(
    topic_prefix: str, tmp_path: Path, first_flights: str
) -> None:
    """A program that started before the broker gave up, or could be ended only by force."""
    absent = Stack(f"127.0.0.1:{free_ports(1)[0]}", topic_prefix, tmp_path, first_flights)
    try:
        soon = dict.fromkeys(("EVENTS_TOPIC", "UPDATES_TOPIC"), "t?give_up_after_s=0.5&request_timeout_s=0.5")
        names = ("prepare", "producer", "consumer")
        programs = [await absent.start(name, is_sigint_ignored=True, **soon) for name in names]
        for program in programs:
            await program.says("Kafka is not up yet, trying again")
            assert await program.terminated() == 0, program.printed
    finally:
        await absent.stop()


# ---- Prometheus


async def test_prometheus_scrapes_the_service_and_evaluates_rules_and_dashboard(stack: Stack) -> None:
    """The dashboard was empty: the token was wrong, a metric had another name, or a rule failed at run time."""
    system_program("prometheus", "prometheus")
    await prepared(stack)
    await stack.start("producer", EVENTS_PER_SECOND="2000")
    service = await stack.start("service")
    await stack.start("prometheus")
    await stack.becomes_healthy("service")
    await stack.becomes_healthy("prometheus")
    async with httpx.AsyncClient(base_url=f"http://{stack.prometheus}/api/v1/") as prometheus:

        async def value_of(expression: str) -> list[float]:
            answer = (await prometheus.get("query", params={"query": expression})).json()
            assert answer["status"] == "success", (expression, answer)
            return [float(row["value"][1]) for row in answer["data"]["result"]]

        until_s = asyncio.get_running_loop().time() + PATIENCE_S
        while not await value_of("streamiter_model_version > 2 and on (instance) up == 1"):
            targets = (await prometheus.get("targets")).json()["data"]["activeTargets"]
            assert asyncio.get_running_loop().time() < until_s, [
                (each["health"], each["lastError"], each["lastScrape"]) for each in targets
            ]
            await asyncio.sleep(0.2)
        instance = f"http://{stack.http}".removeprefix("http://")
        for title, expression in dashboard_queries():
            shown = expression.replace("$instance", instance).replace("$__interval", "1m")
            await value_of(shown)
            assert "instance" in expression, title
        rules = (await prometheus.get("rules")).json()["data"]["groups"]
        states = {rule["name"]: (rule["health"], rule["state"]) for group in rules for rule in group["rules"]}
        assert states["ServiceDown"] == states["NoCheckpoint"] == states["SourceSilent"] == ("ok", "inactive")
        assert {health for health, _ in states.values()} == {"ok"}
    assert await service.terminated() == 0, service.printed


def dashboard_queries() -> list[tuple[str, str]]:
    """Return the title of each panel with each of its queries."""
    board = json.loads((EXAMPLE / "grafana" / "dashboards" / "streamiter.json").read_text(encoding="utf-8"))
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", ())]


# ---- the broker of the file


@pytest.fixture
def compose_broker(tmp_path: Path) -> Iterator[ComposeBroker]:
    """Start the broker of the file, and stop it after the test."""
    skip_without_java()
    broker = ComposeBroker(tmp_path / "broker")
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


async def test_the_broker_of_the_file_serves_programs_inside_and_outside(
    compose_broker: ComposeBroker, topic_prefix: str, tmp_path: Path, first_flights: str
) -> None:
    """A variable was missing, so the broker did not start, or sent clients an address that they could not reach."""
    properties = (compose_broker.directory / "server.properties").read_text()
    settings = [name for name in environment_of("kafka") if name.startswith("KAFKA_") and name != "KAFKA_HEAP_OPTS"]
    assert len(properties.split()) == len(settings), properties
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
    inside = Stack(compose_broker.inside, topic_prefix, tmp_path / "inside", first_flights)
    try:
        await prepared(inside)
        producer = await inside.start("producer", EVENTS="3000", EVENTS_PER_SECOND="0")
        service = await inside.start("service")
        assert await producer.ends() == 0, producer.printed
        async with asyncio.timeout(PATIENCE_S):
            while not await inside.updates():
                await asyncio.sleep(0.1)
        assert await service.terminated() == 0, service.printed
    finally:
        await inside.stop()
    outside = Stack(compose_broker.outside, topic_prefix, tmp_path / "outside", first_flights)
    assert len(await read_all(outside.topic("EVENTS_TOPIC"))) == 3_000
    versions = [update.version for update in await outside.updates()]
    assert versions == list(range(1, len(versions) + 1)) != []
    assert (await outside.topic("UPDATES_TOPIC").describe()).settings["cleanup.policy"] == "compact"
