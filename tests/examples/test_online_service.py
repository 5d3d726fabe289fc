"""The online service of the examples runs as in ``docker-compose.yml``, but without containers.

The commands and the environment are exactly those of the file, except Kafka's address, the names of the topics,
and the limits that the programs document. The broker of the file is started by the official image's own set-up
program, which is part of Kafka's jars.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import yaml
from support.kafka_fixtures import skip_without_java
from support.kafka_server import KafkaServer, free_ports
from support.processes import async_process

from streamiter.models import ModelUpdate, model_updates
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, TopicRecord, topic

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "online_service"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
PROGRAMS = ("producer", "trainer", "consumer")
DOCKERFILE = (EXAMPLE / "Dockerfile").read_text(encoding="utf-8")
# Python and numpy start in two seconds, and the flights of the year load in two more; a busy machine needs longer.
PATIENCE_S = 60.0


class Program:
    """One service of the file as a process; its output is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.printed: list[str] = []

    async def says(self, pattern: str) -> re.Match[str]:
        """Return the match of the next line that matches; without one, fail with the whole output."""
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while line := await self._process.stdout.readline():
                    self.printed.append(line.decode())
                    if match := re.search(pattern, line.decode()):
                        return match
        pytest.fail(f"expected a line {pattern!r}, given:\n{''.join(self.printed)}")

    async def ends(self) -> int:
        """Wait until the process ends, and return its exit code."""
        rest, _ = await asyncio.wait_for(self._process.communicate(), PATIENCE_S)
        self.printed.append(rest.decode())
        return cast("int", self._process.returncode)

    async def terminated(self) -> int:
        """Send SIGTERM, as ``docker compose stop`` does, and return the exit code."""
        self._process.terminate()
        return await self.ends()


class Stack:
    """The service at one broker, with its own topics."""

    def __init__(self, bootstrap: str, prefix: str, folder: Path) -> None:
        self._bootstrap = bootstrap
        self._names = {
            "CHECKPOINTS": str(folder / "checkpoints"),
            "FLOW": f"{prefix}flow",
            "EVENTS_TOPIC": f"{prefix}flights",
            "UPDATES_TOPIC": f"{prefix}updates",
            "DEAD_LETTERS_TOPIC": f"{prefix}dead-letters",
        }
        self._processes = contextlib.AsyncExitStack()

    def topic(self, variable: str) -> Topic:
        """Return the topic that an environment variable names."""
        return topic(f"kafka://{self._bootstrap}/{self._names[variable]}")

    async def start(self, service: str, *, is_sigint_ignored: bool = False, **environment: str) -> Program:
        """Start a service of the file; ``environment`` replaces variables that the programs document."""
        program, *arguments = SERVICES[service]["command"]
        assert program == "python"
        given = {name: value.replace("kafka:9092", self._bootstrap) for name, value in environment_of(service).items()}
        started = async_process(
            [sys.executable, *arguments],
            is_sigint_ignored=is_sigint_ignored,
            is_forked=True,
            limit_s=2 * PATIENCE_S,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], **given, **self._names, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        process = await self._processes.enter_async_context(started)
        return Program(process)

    async def updates(self) -> list[ModelUpdate]:
        """Return all updates published so far."""
        return [update async for update in model_updates(self.topic("UPDATES_TOPIC"), "late-flights", follow=False)]

    async def stop(self) -> None:
        """Stop all processes that are still running."""
        await self._processes.aclose()


def environment_of(service: str) -> dict[str, str]:
    return dict(SERVICES[service].get("environment", {}))


@pytest.fixture
async def stack(kafka_broker: Any, topic_prefix: str, tmp_path: Path) -> AsyncIterator[Stack]:
    """Return the three programs on the broker of all tests."""
    programs = Stack(kafka_broker.bootstrap, topic_prefix, tmp_path)
    yield programs
    await programs.stop()


async def read_all(topic: Topic) -> list[TopicRecord]:
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    records: list[TopicRecord] = []
    while (batch := await reader.read()) is not None:
        records += batch.records()
    await reader.close()
    return records


async def first_record(topic: Topic) -> TopicRecord:
    reader = await topic.open_reader(ReadRequest())
    batch = await asyncio.wait_for(reader.read(), PATIENCE_S)
    await reader.close()
    assert batch is not None
    return batch.records()[0]


# ---- the programs


async def test_a_restarted_trainer_continues_where_it_was_while_the_consumer_predicts(stack: Stack) -> None:
    """After an update of the trainer the service started without its state, and consumers ignored its updates."""
    often = {"CHECKPOINT_INTERVAL": "0.1"}
    producer = await stack.start("producer", EVENTS_PER_SECOND="2000")
    trainer = await stack.start("trainer", REPORT_EVERY="1000", **often)
    consumer = await stack.start("consumer", REPORT_EVERY="300")
    await trainer.says("starts without state")
    await trainer.says(r"the last 1000 flights: AUC 0\.\d+, log loss 0\.\d+")
    versions = [int((await consumer.says(r"now with model 1\.(\d+), \d+\.\d\d s old"))[1]) for _ in range(3)]
    assert versions == sorted(set(versions))
    assert await trainer.terminated() == 0
    assert "suspended after" in trainer.printed[-1]
    before = await stack.updates()

    trainer = await stack.start("trainer", **often)
    await trainer.says(r"resumes from checkpoint \d+")
    while int((await consumer.says(r"now with model 1\.(\d+)"))[1]) <= before[-1].version:
        pass
    for program in (trainer, consumer, producer):
        assert await program.terminated() == 0, program.printed
    assert re.search(", 0 undecodable, 0 skipped", trainer.printed[-1])

    after = await stack.updates()
    assert [update.rank for update in after] == [(1, version) for version in range(1, len(after) + 1)]
    first, last_before = after[len(before)], before[-1]
    assert 0 <= (first.records or 0) - (last_before.records or 0) <= int(environment_of("trainer")["MINI_BATCH"])
    before_it, after_it = columns_of(last_before), columns_of(first)
    assert before_it.keys() <= after_it.keys()
    both = np.array([(before_it[column], after_it[column]) for column in before_it])
    assert np.corrcoef(both.T)[0, 1] > 0.9


def columns_of(update: ModelUpdate) -> dict[Any, float]:
    """Return the weight of each field and place."""
    assert isinstance(update.parameters, dict)
    names = [*update.parameters["fields"], *update.parameters["places"].tolist()]
    return dict(zip(names, update.parameters["weights"].tolist(), strict=True))


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


async def test_undecodable_events_go_to_the_dead_letters_and_the_rest_is_learned(stack: Stack) -> None:
    """The trainer failed at one bad event, restarted, and failed at it again for ever."""
    producer = await stack.start("producer", EVENTS="2000", EVENTS_PER_SECOND="0")
    assert await producer.ends() == 0
    bad = [
        b"not json",
        b'{"event": "departure", "flight": "UA1"}',
        b'{"event": "arrival", "flight": "UA1", "delay": "?"}',
    ]
    writer = await stack.topic("EVENTS_TOPIC").open_writer()
    await writer.write(OutgoingBatch(bad))
    await writer.close()
    trainer = await stack.start("trainer", REPORT_EVERY="800")
    await trainer.says("the last 800 flights")
    letter = await first_record(stack.topic("DEAD_LETTERS_TOPIC"))
    assert letter.value == b"not json"
    assert dict(letter.headers)["offset"] == b"2000"
    assert await trainer.terminated() == 0
    assert re.search("suspended after 200[03] events, 3 undecodable, 0 skipped", trainer.printed[-1])
    assert [record.value for record in await read_all(stack.topic("DEAD_LETTERS_TOPIC"))] == bad
    values = [record.value or b"" for record in await read_all(stack.topic("EVENTS_TOPIC"))]
    arrivals = sum(b'"arrival"' in value for value in values if value not in bad)
    assert 800 <= ((await stack.updates())[-1].records or 0) <= arrivals


async def test_a_consumer_waits_for_a_model_and_ends_when_it_has_predicted_enough(stack: Stack) -> None:
    """A consumer that started before the first model failed, and its callers failed with it."""
    consumer = await stack.start("consumer", PREDICTIONS="500", REPORT_EVERY="100")
    producer = await stack.start("producer", EVENTS_PER_SECOND="1000")
    await consumer.says(r"no model yet \(none has been published\): \d+ departures without a prediction")
    await stack.start("trainer")
    assert await consumer.ends() == 0
    assert "predictions, now with model 1." in consumer.printed[-1]
    assert await producer.terminated() == 0


async def test_programs_wait_for_kafka_and_can_be_stopped_meanwhile(topic_prefix: str, tmp_path: Path) -> None:
    """A program that started before the broker gave up, or could be ended only by force."""
    absent = Stack(f"127.0.0.1:{free_ports(1)[0]}", topic_prefix, tmp_path)
    try:
        programs = [await absent.start(service, is_sigint_ignored=True) for service in PROGRAMS]
        for program in programs:
            await program.says("Kafka is not up yet, trying again")
            assert await program.terminated() == 0, program.printed
    finally:
        await absent.stop()


# ---- the files


@pytest.mark.parametrize("service", PROGRAMS)
def test_a_service_runs_a_program_that_the_image_contains(service: str) -> None:
    """A program was renamed, and only the container failed."""
    config = SERVICES[service]
    assert (ROOT / config["build"]["context"] / config["build"]["dockerfile"]).samefile(EXAMPLE / "Dockerfile")
    interpreter, program = config["command"]
    assert interpreter == "python"
    assert (ROOT / program).is_file()
    assert any(program.startswith(f"{copied}/") for copied in copied_paths())
    assert config["depends_on"] == {"kafka": {"condition": "service_healthy"}}


@pytest.mark.parametrize("service", [*PROGRAMS, "kafka"])
def test_a_service_is_restarted_and_has_time_to_stop(service: str) -> None:
    """A trainer was killed ten seconds after SIGTERM, during a flush."""
    assert SERVICES[service]["restart"] in ("on-failure", "unless-stopped")
    assert int(SERVICES[service]["stop_grace_period"].removesuffix("s")) >= 20


def test_the_image_has_the_files_and_extras_that_it_uses() -> None:
    """The image had no Kafka, because .dockerignore left out a folder or an extra was misspelt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for path in copied_paths():
        assert (ROOT / path).exists(), path
        assert not is_ignored(path), path
    assert {"README.md", project["license-files"][0]} <= set(copied_paths())
    install = re.search(r'pip install .*-c constraints\.txt "\.\[(.*)\]"', DOCKERFILE)
    assert install is not None
    assert set(install[1].split(",")) <= set(project["optional-dependencies"])
    assert "FROM python:3.12-slim\n" in DOCKERFILE
    assert re.search(r"^USER (?!root)\w+$", DOCKERFILE, re.MULTILINE)
    command = re.search(r'^CMD \["python", "(.*)"\]$', DOCKERFILE, re.MULTILINE)
    assert command is not None
    assert (ROOT / command[1]).is_file()


@pytest.mark.parametrize("path", [".venv", ".git", "tests", "streamiter/__pycache__", "benchmarks/results"])
def test_files_that_the_image_does_not_need_are_not_sent_to_the_build(path: str) -> None:
    """Each build first copied a virtual environment of a gigabyte."""
    assert is_ignored(path)


def copied_paths() -> list[str]:
    lines = re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)
    return [path for line in lines for path in line.split()[:-1]]


def is_ignored(path: str) -> bool:
    """Return whether Docker ignores the path: the last rule that matches the path or a folder above it counts."""
    ignored = False
    above = [path, *map(str, Path(path).parents)][:-1]
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        rule = line.removeprefix("!").removeprefix("**/")
        names = [*above, *(Path(each).name for each in above if "**/" in line)]
        if line and not line.startswith("#") and any(fnmatch(name, rule) for name in names):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize(
    ("service", "file"),
    [("producer", "producer.py"), ("trainer", "trainer.py"), ("consumer", "model_consumer.py")],
)
def test_each_variable_of_a_service_is_read_and_documented(service: str, file: str) -> None:
    """A misspelt variable in docker-compose.yml had no effect, and no error named it."""
    texts = [(EXAMPLE / name).read_text(encoding="utf-8") for name in (file, "service.py")]
    read = {name for text in texts for name in re.findall(r'(?:environ\.get|_topic)\("(\w+)"', text)}
    documented = {name for text in texts for name in re.findall(r"^    ([A-Z_]+)  ", text, re.MULTILINE)}
    assert documented == read
    assert set(environment_of(service)) <= read


KNOWN_KEYS = {
    "build", "command", "depends_on", "environment", "healthcheck", "image", "init", "ports", "restart",
    "stop_grace_period", "volumes",
}  # fmt: skip


def test_the_compose_file_is_valid() -> None:
    """Docker compose refused the file: an unknown key, a number or boolean as environment, or an undeclared volume."""
    assert set(COMPOSE) == {"name", "x-program", "services", "volumes"}
    for service, config in SERVICES.items():
        assert set(config) <= KNOWN_KEYS, service
        assert all(isinstance(value, str) for value in environment_of(service).values()), service
        assert set(config["depends_on"] if service != "kafka" else ()) <= set(SERVICES)
        volumes = {volume.split(":")[0] for volume in config.get("volumes", [])}
        assert volumes <= set(COMPOSE["volumes"])


# ---- the broker of the file


class ComposeBroker(KafkaServer):
    """A broker that is configured only by the file's KAFKA_* variables, on free ports of the loopback address."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.inside, self.outside, self._controller = (f"127.0.0.1:{port}" for port in free_ports(3))

    @property
    def bootstrap(self) -> str:
        return self.inside

    def _formatted(self) -> None:
        """The tool reads the configuration of the file, as it does in the image."""

    def _write_files(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        super()._write_files()  # writes the configuration of the logging
        folders = {name: self.directory / name for name in ("default", "mounted", "final")}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        command = [*self._java(), "kafka.docker.KafkaDockerWrapper", "setup"]
        for name, folder in folders.items():
            command += [f"--{name}-configs-dir", str(folder)]
        environment = {"PATH": os.environ["PATH"], **self._environment()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        properties = self.directory / "server.properties"
        return Path(shutil.copy(folders["final"] / "server.properties", properties))

    def _environment(self) -> dict[str, str]:
        places = {
            "INTERNAL://:9092": f"INTERNAL://{self.inside}",
            "EXTERNAL://:29092": f"EXTERNAL://{self.outside}",
            "CONTROLLER://:9093": f"CONTROLLER://{self._controller}",
            "INTERNAL://kafka:9092": f"INTERNAL://{self.inside}",
            "EXTERNAL://127.0.0.1:9092": f"EXTERNAL://{self.outside}",
            "1@localhost:9093": f"1@{self._controller}",
            "/var/lib/kafka/data": str(self.directory / "data"),
        }
        environment = environment_of("kafka")
        text = "\n".join(environment.values())
        assert all(place in text for place in places)
        return {name: replaced(value, places) for name, value in environment.items()}


def replaced(text: str, replacements: Mapping[str, str]) -> str:
    return ",".join(replacements.get(part, part) for part in text.split(","))


@pytest.fixture
def compose_broker(tmp_path: Path) -> Iterator[ComposeBroker]:
    """Start the broker of the file, and stop it after the test."""
    skip_without_java()
    broker = ComposeBroker(tmp_path)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


async def test_the_broker_of_the_file_serves_programs_inside_and_outside(
    compose_broker: ComposeBroker, topic_prefix: str, tmp_path: Path
) -> None:
    """A variable was missing, so the broker did not start, or sent clients an address that they could not reach."""
    properties = (compose_broker.directory / "server.properties").read_text()
    variables = [name for name in environment_of("kafka") if name.startswith("KAFKA_")]
    assert len(properties.split()) == len(variables), properties
    inside = Stack(compose_broker.inside, topic_prefix, tmp_path)
    try:
        producer = await inside.start("producer", EVENTS="3000", EVENTS_PER_SECOND="0")
        trainer = await inside.start("trainer", REPORT_EVERY="1000")
        assert await producer.ends() == 0, producer.printed
        await trainer.says("the last 1000 flights")
        assert await trainer.terminated() == 0
    finally:
        await inside.stop()
    outside = Stack(compose_broker.outside, topic_prefix, tmp_path)
    assert len(await read_all(outside.topic("EVENTS_TOPIC"))) == 3_000
    versions = [update.version for update in await outside.updates()]
    assert versions == list(range(1, len(versions) + 1)) != []
    settings = (await outside.topic("UPDATES_TOPIC").describe()).settings
    assert settings["cleanup.policy"] == "compact"


def test_the_broker_of_the_file_is_published_and_checked_on_its_own_ports() -> None:
    """A health check of a port without a listener prevented the start of all other services."""
    environment = environment_of("kafka")
    listeners = dict(each.split("://") for each in environment["KAFKA_LISTENERS"].split(","))
    advertised = dict(each.split("://") for each in environment["KAFKA_ADVERTISED_LISTENERS"].split(","))
    [(host, published, container)] = [port.split(":") for port in SERVICES["kafka"]["ports"]]
    assert advertised["EXTERNAL"] == f"{host}:{published}"
    assert listeners["EXTERNAL"] == f":{container}"
    assert advertised["INTERNAL"] == f"kafka{listeners['INTERNAL']}"
    assert advertised["INTERNAL"] in SERVICES["kafka"]["healthcheck"]["test"]
    assert all(environment_of(service)["KAFKA"] == advertised["INTERNAL"] for service in PROGRAMS)
