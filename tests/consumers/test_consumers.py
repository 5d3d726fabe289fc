"""Consumers in other languages follow a model on a real broker, and predict the same numbers as Python."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from models.embedding_cases import EMBEDDED_ROWS, embedded
from models.model_case import encoder, selected, write
from models.shape_cases import ROWS, random_shapes, shaped
from support.kafka_fixtures import GivenKafka
from support.kafka_jars import KAFKA_VERSION, kafka_jars
from support.kafka_server import KafkaServer
from support.processes import async_process
from support.programs import system_program
from support.waiting import PATIENCE_S

from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel, BadRows, LogisticRegression
from streamiter.models import LinearPredictor, ModelUpdateEncoder, roll_back
from streamiter.models.published_embeddings import EmbeddingKind
from streamiter.topics import OutgoingBatch, topic
from streamiter.values.helpers.clock import SystemClock

EXAMPLES = Path(__file__).parents[2] / "examples" / "consumers"
Command = list[str]


def built(command: Command, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def javascript(folder: Path) -> Command:
    system_program("npm", "npm")
    system_program("node", "nodejs")
    copy = folder / "javascript"
    shutil.copytree(EXAMPLES / "javascript", copy, ignore=shutil.ignore_patterns("node_modules"))
    built(["npm", "ci", "--silent"], copy)
    return ["node", str(copy / "consumer.mjs")]


def java(folder: Path) -> Command:
    system_program("javac", "default-jdk-headless")
    needed = ["kafka-clients-", "jackson-annotations-", "jackson-core-", "jackson-databind-", "slf4j-api-"]
    path = ":".join(str(jar) for name in needed for jar in kafka_jars().glob(f"{name}*.jar"))
    sources = [str(file) for file in (EXAMPLES / "java" / "src" / "main" / "java").glob("*.java")]
    options = ["-J-XX:TieredStopAtLevel=1", "--release", "17", "-encoding", "UTF-8"]
    built(["javac", *options, "-cp", path, "-d", str(folder), *sources], folder)
    # With the quick compiler only, it starts in half the time.
    return ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{folder}:{path}", "ModelConsumer"]


@pytest.fixture(scope="module", params=[javascript, java])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Return the command that starts the consumer, which is built once."""
    made: Command = request.param(tmp_path_factory.mktemp("consumer"))
    return made


TOWNS = ["Kyjiw", "Ἀθῆναι", "𝄞", None]


def adaptive(label: Callable[[float, int], Any], **loss: Any) -> dict[str, Any]:
    """Return a version of the default model, with its state, that has learned numbers, texts and missing values."""
    model, random = AdaptiveLinearModel(**loss), np.random.default_rng(5)
    rows = [{"km": float(km), "town": TOWNS[n % 4]} for n, km in enumerate(random.normal(500, 300, 200))]
    rows[7]["km"] = None
    model.learn(rows, [label(row["km"] or 0.0, n) for n, row in enumerate(rows)])
    return model.parameters(state=True)


def of_lists() -> dict[str, Any]:
    """Return the parameters of a model of vectors and of lists of texts."""
    model, random = AdaptiveLinearModel(), np.random.default_rng(6)
    vectors = random.normal(size=(100, 2))
    model.learn(
        [{"v[0]": a, "v[1]": b, "tags": ["x", "y", "x"][: n % 4]} for n, (a, b) in enumerate(vectors.tolist())],
        vectors[:, 0] > 0,
    )
    return model.parameters()


def shapes_of_lists() -> dict[str, Any]:
    """Return tables of the fields of vectors and lists of texts."""
    linear = of_lists()
    shapes = random_shapes(4, 1, len(linear["fields"]), len(linear["places"]))
    return replace(shapes, fields=["v[0]", "v[1]", "v[2]", "tags"]).published()


RAW: list[Any] = [
    "1.5", " -2\n", "7", "007", "-0", ".5e1", "5.", "1e999", "1,5", "", "NA", "-inf", "x\0", "İ_1",
    "Gift Card, gift", "GIFT", "Straße ΟΔΟΣ", "2024-05-01", "2024-05-01T23:30", "2024-05-01 23:30Z",
    "2024-03-31T02:30:00.5+05:45", "0999-12-31T23:59+14:00", "1900-02-29", "2024-10-27T00:30:59,999999999Z",
    "2024-05-01T24:00", ["Gift", "card", "card"], [], ["1.5"], None, 0, 4.0, 7.25, -0.0, True, False, 1e101,
    "1e3", " 5 ", "+5", "NaN", "Infinity", "true", "True", "1_000", "0x10", "１２", "٣", "\xa05", "\u20035\t", "1e-400",
    "--1", "+", ".", "e5", "1e", "\ufeff1", "1\n2", " na ", "N/A\n", "None", "NULL", "nUlL ", "\x1f5", "5\x85",
    "2024-05-01t10:00", "2024-05-01T10:00z", "2024-05-01T10:00 +02:00", "2024-05-01T10:00+2:00", "2024-5-1",
    "2024-05-01T10:00:00.1234567890", "2024-05-01T10:00:60", "2024-05-01T10", "20240501", "2024-W18-3", "-2024-05-01",
    "2024-05-01T10:00+24:00", "2024-05-01T10:00−02:00", "0001-01-01T00:00+01:00", "9999-12-31T23:59-01:00",
    "２０２４-05-01", "2024-02-30", " 2024-05-01 ", "2024-05-01\u2003", "1e11", "100000000001", "-1e13",
    10**30, 2**53 + 1, 2**63, -(2**63) - 1, 10**99, 10**101, 10**310, 1e308, 5e-324, 123456789012345680.0, 1e16, 1e21,
    1e22, 0.1 + 0.2, 1e-5, 123e-7, [[]], [None], ["a", None], ["a", 1], [True], {}, "ß", "ǅ", "a\u0301b", "x" * 300,
    " ".join(map(str, range(300))), "Ａ_ｂ", "don't", "a-b", "²", "Ⅳ", "\u0130", "ΣΑΣ", "_", "1.0", "1", 1.0, 1,
    -1e-7, 1.5e-5, 0.0001, 1e20, 1_700_000_000, 1_700_000_000_123, -1.5, -7e13, 3e14, {"a": 1}, [1.0, None],
]  # fmt: skip


def raw_records(random: Random, count: int) -> list[Any]:
    """Return records with any values in fields of all kinds."""
    names = ["number", "category", "words", "last", "time", "mixed", "km", "town", "other"]
    return [{name: random.choice(RAW) for name in names if random.random() < 0.4} for _ in range(count)]


def of_kinds(random: Random, time_zone: str | None, *, shapes: bool = False) -> AdaptiveLinearModel:
    """Return a model with fields of all kinds, which has learned from raw records."""
    kinds: Any = {"number": "number", "category": "category", "words": "words", "last": "last 2", "time": "time"}
    model = AdaptiveLinearModel(kinds=kinds, time_zone=time_zone, shapes=shapes)
    model.learn([{"km": 1.0, "town": "Kyjiw", "mixed": "7"}, {"km": 2.5, "town": "x", "mixed": "x"}], [1, 0])
    for record in raw_records(random, 400):
        with suppress(BadRows):
            model.learn([record], [random.randrange(2)])
    return model


LISTS = [{"v": [0.5, -2.0], "tags": ["x", "x", "y", "z"]}, {"tags": []}, {"v": [1.5, None]}]
NAMED = [
    {"km": 700.25, "town": "Ἀθῆναι"},
    {"km": None, "town": None, "other": "x"},
    {"km": 1e101, "town": "𝄞", "other": 3},
    {"km": True, "town": "never seen"},
    {"km": -1e9},
    {},
]
LISTED = [[0.1, 2.5, -3.0], [0.0, 0.0, 0.0], [1e3, -7.25, 1e-9]]
WEIGHTS = np.array([0.3, -1.7, 0.1])


@pytest.fixture(scope="module")
def models_and_rows() -> list[tuple[Any, list[Any]]]:
    """Return the parameters of each kind of model, with rows to predict."""
    random = Random(7)
    return [
        (WEIGHTS, LISTED),
        ({"weights": WEIGHTS, "intercept": 0.25, "link": "logit"}, LISTED),
        ({"weights": WEIGHTS, "link": "log", "mean": np.ones(3), "deviation": np.array([2.0, 0.0, 0.5])}, LISTED),
        (adaptive(lambda km, n: km > 400), NAMED),
        (adaptive(lambda km, n: km / 7 + n), NAMED),
        (adaptive(lambda km, n: km / 7 + n, loss="quantile", quantile=0.9), NAMED),
        (adaptive(lambda km, n: n % 5, loss="poisson"), NAMED),
        (adaptive(lambda km, n: ["früh", "late", "gone"][n % 3]), NAMED),
        (adaptive(lambda km, n: "spät" if km > 400 else "früh"), NAMED),
        (of_lists(), LISTS),
        *((shaped(link), ROWS) for link in ("logit", "clipped", "log")),
        (shaped("softmax", scores=3), ROWS),
        (of_lists() | {"shapes": shapes_of_lists()}, LISTS),
        *(
            (embedded(link, kind, seed), [row for row in EMBEDDED_ROWS if row.get("km") == row.get("km")])
            for seed, (link, kind) in enumerate(product(("logit", "clipped", "softmax"), get_args(EmbeddingKind)))
        ),
        *(
            (of_kinds(random, zone, shapes=shapes).parameters(), raw_records(random, 500))
            for zone, shapes in ((None, False), (None, True), ("Europe/Berlin", False), ("America/St_Johns", True))
        ),
    ]


def same(given: Any, expected: Any, classes: list[Any] | None) -> bool:
    if classes is None:
        return abs(given - expected) <= 1e-12 * max(1.0, abs(expected))
    labels = [*classes, "(other)"][: len(expected)]
    return list(given) == labels and np.allclose(list(given.values()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_a_version_with_tables_predicts_what_its_learner_predicts_of_any_record(seed: int) -> None:
    """An hour that no learned row had was missing for the service, and an hour for the learner."""
    random = Random(seed)
    model = of_kinds(random, (None, "Europe/Berlin")[seed % 2], shapes=True)
    predict = LinearPredictor(model.parameters(state=False))
    for record in raw_records(random, 500):
        try:
            learned = model.predict([record])
        except (BadRows, ModelError):
            with pytest.raises(ModelError):
                predict(record)
        else:
            assert abs(predict(record) - learned[0]) < 1e-6, record


class Consumer:
    """A running consumer: rows go in, updates and predictions come out."""

    def __init__(self, process: Any) -> None:
        self._process = process

    async def line(self) -> dict[str, Any]:
        printed = await self._process.stdout.readline()
        assert printed, (await self._process.stderr.read()).decode()
        return dict(json.loads(printed))

    async def trouble(self) -> str:
        """Return the next line of stderr about a record."""
        while not (line := (await self._process.stderr.readline()).decode()).startswith("partition"):
            assert line, "expected a line about a record, given the end"
        return str(line)

    async def predictions(self, rows: list[Any]) -> list[dict[str, Any]]:
        self._process.stdin.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        return [await self.line() for _ in rows]


@asynccontextmanager
async def consuming(command: Command, *arguments: str) -> Any:
    pipes: dict[str, Any] = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    async with async_process([*command, *arguments], **pipes) as process:
        yield Consumer(process)
        process.kill()


async def test_a_consumer_predicts_what_python_predicts(
    command: Command,
    kafka_broker: KafkaServer | GivenKafka,
    topic_prefix: str,
    models_and_rows: list[tuple[Any, list[Any]]],
) -> None:
    """A service in another language served other probabilities than those that validation had measured."""
    name = f"{topic_prefix}models"
    models = topic(f"kafka://{kafka_broker.bootstrap}/{name}")
    await models.create()
    await write(models, encoder(1, model="other").encode([np.zeros(1)]))
    async with consuming(command, kafka_broker.bootstrap, name, "m") as consumer:
        version = 0
        for parameters, rows in models_and_rows:
            predict = LinearPredictor(parameters)
            # In one record as JSON, and as safetensors in chunks: the same numbers, which a few rows show.
            for form, limit in (("json", 1_000_000), ("safetensors", 2_000)):
                version += 1
                one = ModelUpdateEncoder("m", 1, version, clock=SystemClock(), format=form, record_bytes_max=limit)
                await write(models, one.encode([parameters]))
                update = await consumer.line()
                assert (update["generation"], update["version"]) == (1, version)
                asked = rows if form == "json" else rows[:50]
                for row, given in zip(asked, await consumer.predictions(asked), strict=True):
                    assert given["version"] == version
                    try:
                        expected = predict(row)
                    except ModelError:
                        assert given["error"].startswith("expected "), (row, given)
                    else:
                        assert "prediction" in given, (row, given)
                        assert same(given["prediction"], expected, predict.classes), (row, given, expected)
                        assert given.get("positive") == predict.positive


def chain_of(kind: str, count: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return versions of a model that learns on, with new fields and texts, and rows to predict."""
    random = Random(8)
    if kind == "plain":
        parameters, versions = LogisticRegression(500).parameters(), []
        for _ in range(count):
            weights = parameters["weights"].copy()
            weights[random.randrange(500)] += 0.5
            parameters = {**parameters, "weights": weights}
            versions.append(parameters)
        return versions, [np.random.default_rng(n).random(500).tolist() for n in range(3)]
    learner = AdaptiveLinearModel(shapes=kind == "tables")
    rows = [{"km": random.random(), "id": f"u{random.randrange(300)}"} for _ in range(400)]
    learner.learn(rows, [row["km"] > 0.5 for row in rows])
    versions = []
    for number in range(count):
        some = [{"km": random.random(), f"x{number // 3}": 1.5, "id": f"u{random.randrange(900)}"} for _ in range(3)]
        learner.learn(some, [row["km"] > 0.5 for row in some])
        versions.append(learner.parameters())
    return versions, [*rows[:5], {"x0": 2.0, "x1": 1.0, "id": "u7"}]


@pytest.mark.parametrize("kind", ["plain", "texts", "tables"])
async def test_a_consumer_follows_versions_as_changes(
    kind: str, command: Command, kafka_broker: KafkaServer | GivenKafka, topic_prefix: str
) -> None:
    """A service in another language read 3 MB for each version of which little had changed, or mixed two versions."""
    name = f"{topic_prefix}models"
    models = topic(f"kafka://{kafka_broker.bootstrap}/{name}")
    await models.create()
    versions, rows = chain_of(kind, 12)
    one = encoder(1, model="m", format="json" if kind == "plain" else "auto", record_bytes_max=20_000, changes=True)
    batches = [one.encode([parameters]) for parameters in versions]
    changes = [batch for batch in batches if any(name == "follows" for name, _ in (batch.headers or [()])[0])]
    assert len(changes) > 4
    async with consuming(command, kafka_broker.bootstrap, name, "m") as consumer:
        for number, (batch, parameters) in enumerate(zip(batches, versions, strict=True), 1):
            await write(models, batch)
            update = await consumer.line()
            assert (update["generation"], update["version"]) == (1, number)
            predict = LinearPredictor(parameters)
            for row, given in zip(rows, await consumer.predictions(rows), strict=True):
                assert same(given["prediction"], predict(row), predict.classes), (number, row, given)
        await roll_back(models, "m", "1.5")
        assert (await consumer.line())["generation"] == 2
        [given] = await consumer.predictions(rows[:1])
        assert same(given["prediction"], LinearPredictor(versions[4])(rows[0]), None)
    async with consuming(command, kafka_broker.bootstrap, name, "m") as late:
        assert [(await late.line())["version"] for _ in range(13)] == [*range(1, 13), 1]


async def test_a_consumer_tells_a_gap_between_changes_and_takes_the_next_whole_version(
    command: Command, kafka_broker: KafkaServer | GivenKafka, topic_prefix: str
) -> None:
    """After a lost change it predicted with rows of two versions."""
    name = f"{topic_prefix}models"
    models = topic(f"kafka://{kafka_broker.bootstrap}/{name}")
    await models.create()
    one = encoder(1, model="m", changes=True)
    base, lost, change, damaged = (one.encode([np.append(np.zeros(999), float(n))]) for n in range(4))
    headers = (damaged.headers or [()])[0]
    damaged = replace(damaged, headers=[tuple((k, b"1.1" if k == "follows" else v) for k, v in headers)])
    again = encoder(1, 5, model="m", changes=True)
    async with consuming(command, kafka_broker.bootstrap, name, "m") as consumer:
        await write(models, base, change, change, damaged, *(again.encode([np.full(1000, float(n))]) for n in range(2)))
        assert [(await consumer.line())["version"] for _ in range(3)] == [1, 5, 6]
        assert "a change of 1.2, given 1.1: waiting for a whole update" in await consumer.trouble()
        assert "a damaged update, or a change of another one" in await consumer.trouble()
        [given] = await consumer.predictions([[1.0] * 1000])
        assert given["prediction"] == 1000.0
    assert len(lost) == 1


def wrong_records(good: OutgoingBatch) -> list[OutgoingBatch]:
    """Return records that say they are versions of the model, and are not: each breaks another reader."""
    headers = dict(good.headers[0]) if good.headers else {}

    def record(value: bytes, **changes: bytes | None) -> OutgoingBatch:
        given = {name: text for name, text in {**headers, **changes}.items() if text is not None}
        return OutgoingBatch([value], keys=good.keys, headers=[tuple(given.items())])

    value, tensors = good.values[0] or b"", b"application/vnd.safetensors"
    return [
        record(b"{"),
        record(b"[]"),
        record(b"null"),
        record(b'{"model": "m"}'),
        record(value.replace(b'"parameters"', b'"parameter"')),
        record(value, generation=None),
        record(value, version=b"one"),
        record(value, content_type=None),
        record(b"", content_type=tensors),
        record(b"\xff" * 8, content_type=tensors),
        record((1 << 40).to_bytes(8, "little") + b"{}", content_type=tensors),
        record((2).to_bytes(8, "little") + b"{}", content_type=tensors),
        record(value, format=b"4", base=b"1.1", follows=None),
        record(value, chunk_index=b"0", chunk_count=b"-1", sha256=b"0"),
    ]


async def test_a_consumer_skips_what_is_older_incomplete_or_of_another_format(
    command: Command, kafka_broker: KafkaServer | GivenKafka, topic_prefix: str
) -> None:
    """A trainer that had been replaced went on publishing, and every second answer was by its model."""
    name = f"{topic_prefix}models"
    models = topic(f"kafka://{kafka_broker.bootstrap}/{name}")
    await models.create()

    def update(generation: int, version: int, weight: float, **options: Any) -> Any:
        return encoder(generation, version, model="m", **options).encode([np.full(100, weight)])

    later = update(9, 1, 9.0)
    cut = update(7, 1, 7.0, record_bytes_max=500)
    async with consuming(command, kafka_broker.bootstrap, name, "m") as consumer:
        await write(
            models,
            update(2, 10, 1.0),
            update(2, 9, 2.0),
            update(1, 99, 3.0),
            selected(cut, *range(1, len(cut))),
            replace(later, headers=[(*later.headers[0], ("format", b"9"))]),
            *wrong_records(later),
            update(3, 1, 4.0, record_bytes_max=500),
        )
        assert [(await consumer.line())["generation"] for _ in range(2)] == [2, 3]
        for _ in range(1 + len(wrong_records(later))):  # And each of them is told.
            await consumer.trouble()
        await roll_back(models, "m", "2.10")
        rolled_back = await consumer.line()
        assert rolled_back["generation"] > 7  # A run begins after every rank in the topic, also an incomplete one.
        [given] = await consumer.predictions([[1.0] + [0.0] * 99])
        assert given["prediction"] == 1.0


async def test_a_consumer_refuses_a_version_that_only_a_newer_one_can_prepare(
    command: Command, kafka_broker: KafkaServer | GivenKafka, topic_prefix: str
) -> None:
    """A consumer answered with the rows of an older preparation, and nobody noticed; or a wrong row ended it."""
    name = f"{topic_prefix}models"
    models = topic(f"kafka://{kafka_broker.bootstrap}/{name}")
    await models.create()
    parameters = adaptive(lambda km, n: km > 400)
    newer = parameters | {"kinds": {"town": "bigrams"}}
    shapes = random_shapes(1).published()
    newest = shaped("logit") | {"shapes": shapes | {"kinds": ["spline", *shapes["kinds"][1:]]}}
    newest_embeddings = embedded("logit")
    newest_embeddings |= {"embeddings": newest_embeddings["embeddings"] | {"kind": "transformer"}}
    clusters = {"centroids": np.zeros((2, 2)), "weights": np.ones(2)}
    async with consuming(command, kafka_broker.bootstrap, name, "m") as consumer:
        for version, given in enumerate(
            (parameters, newer, newest, newest_embeddings, clusters, parameters | {"intercept": 30.0}), 1
        ):
            await write(models, encoder(1, version, model="m").encode([given]))
        assert [(await consumer.line())["version"] for _ in range(2)] == [1, 6]
        assert "kind bigrams, which only a newer consumer can prepare" in await consumer.trouble()
        assert "a column of the kind spline, which only a newer consumer knows" in await consumer.trouble()
        assert "embeddings of the kind transformer, which only a newer consumer knows" in await consumer.trouble()
        assert "a model with centroids, which only the predictor in Python has" in await consumer.trouble()
        rows = [{"town": 7}, "no row", {"km": "many"}, {"km": 500.0}]
        *wrong, good = await consumer.predictions(rows)
        assert ["error" in each for each in wrong] == [True] * 3
        assert good["prediction"] > 0.99


def test_the_consumer_in_java_has_the_client_of_the_test_broker() -> None:
    """The example named a client that no test had run."""
    pom = (EXAMPLES / "java" / "pom.xml").read_text()
    found = re.findall(r"<artifactId>(kafka-clients|jackson-databind)</artifactId>\s*<version>(.+)</version>", pom)
    assert ("kafka-clients", KAFKA_VERSION) in found
    for artifact, version in found:
        assert (kafka_jars() / f"{artifact}-{version}.jar").exists()


def test_the_lock_file_names_versions_and_checksums_only() -> None:
    """The lock file had the addresses of one company's registry."""
    lock = json.loads((EXAMPLES / "javascript" / "package-lock.json").read_text())
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert packages
    for entry in packages.values():
        assert entry["integrity"].startswith("sha512-")
        assert "resolved" not in entry
