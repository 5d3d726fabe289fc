"""What is published is what the specification of the wire format says: docs/model-updates.md and its JSON Schema."""

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import orjson
import pytest
from jsonschema_rs import Draft202012Validator
from models.embedding_cases import embedded
from models.model_case import MakeTopic, all_records, encoder, memory_topic, write
from models.shape_cases import shaped

from streamiter.errors import DecodeError
from streamiter.learn import AdaptiveLinearModel, Embeddings, FeatureHasher, KMeans, LogisticRegression
from streamiter.models import LinearPredictor, exported, find_update, model_updates, roll_back
from streamiter.models.documents import JSON_CONTENT_TYPE
from streamiter.models.update import UpdateHeaders
from streamiter.networks import Network
from streamiter.networks.serving import version_of
from streamiter.topics import Topic
from streamiter.values.numbers import Moments

SCHEMA = json.loads(files("streamiter.models").joinpath("model-update.schema.json").read_text("utf-8"))
DOCUMENT = Draft202012Validator(SCHEMA)
HEADERS = Draft202012Validator({"$ref": "#/$defs/headers", "$defs": SCHEMA["$defs"]})
ROWS = [{"km": float(n), "town": ["Rome", "Oslo", None][n % 3], "x": n % 5} for n in range(40)]


def adaptive(label: Any, rows: Any = ROWS, **options: Any) -> dict[str, Any]:
    model = AdaptiveLinearModel(**options)
    model.learn(rows, [label(n) for n in range(len(rows))])
    return model.parameters(state=True)


def scaled() -> dict[str, Any]:
    model = LogisticRegression(2)
    model.scale(Moments(3, np.ones(2), np.ones(2)))
    return model.parameters(state=True)


def centroids() -> dict[str, Any]:
    model = KMeans(clusters=2, seed=1)
    model.fit(np.random.default_rng(1).normal(size=(20, 2)), progress=False)
    return model.parameters()


def network() -> dict[str, object]:
    """Return a small network as it is published."""
    layers = [
        {"name": "wide", "type": "SimpleInputLayer", "outputdim": 1},
        {"name": "loss", "type": "LossLayer", "lossfunc": "logloss", "inputlayer": "wide"},
    ]
    made = Network.from_json({"data": {"indexrange": 5, "numfield": 2}, "model": {"modelsize": 5}, "layers": layers})
    return version_of(made, made.initial_parameters(seed=1))


KINDS: dict[str, Any] = {
    "bare weights": lambda: np.array([0.5, -1.0]),
    "linear": lambda: LogisticRegression(3).parameters(),
    "scaled": scaled,
    "truth values": lambda: adaptive(lambda n: n % 7 > 3),
    "numbers": lambda: adaptive(lambda n: n / 3, task="regression"),
    "classes": lambda: adaptive(lambda n: "abc"[n % 3]),
    "two labels": lambda: adaptive(lambda n: "abc"[n % 2]),
    "crosses": lambda: adaptive(lambda n: n % 2 > 0, crosses=[("km", "town"), ("km", "x")]),
    "hashed": lambda: adaptive(lambda n: n % 2 > 0, FeatureHasher(["km", "town"], bits=10).rows(ROWS)),
    "tables": lambda: shaped("logit"),
    "tables of classes": lambda: shaped("softmax", scores=3),
    "texts only": lambda: adaptive(lambda n: n % 2 > 0, [{"town": row["town"]} for row in ROWS]),
    "centroids": lambda: centroids(),
    "a network": network,
    "another library": lambda: {"saved": np.frombuffer(b"bytes", np.uint8)},
    "every tag": lambda: {
        "single": np.float32(0.5),
        "half": np.array([0.5], np.float16),
        "tuple": (1, None, [True, "text"]),
        "bytes": b"\x00",
        "tag": {"list": 1},
        "words": np.array(["late"]),
        "none": np.zeros((0, 2)),
    },
}


def test_the_schema_names_all_keys_of_embeddings() -> None:
    """Vectors of 4 bits came to the page of the format, and a team that had read the schema predicted without them."""
    embeddings = Embeddings(factors=2, hidden=(3,))
    rows = [{"id": str(n // 2)} for n in range(40)]
    found = adaptive(lambda n: "abc"[n % 3], rows, embeddings=embeddings)["embeddings"]
    for part, name in ((found, "embeddings"), (found["experts"][0], "expert")):
        assert part.keys() == SCHEMA["$defs"][name]["properties"].keys()


async def published(topic: Topic) -> list[tuple[UpdateHeaders, Any]]:
    """Return headers and document of each update, checked as any program in another language would read them."""
    parts: dict[Any, list[bytes]] = {}
    found = []
    for record in await all_records(topic):
        if record.value is None:
            assert {name for name, _ in record.headers} == {"model", "deletes"}
            continue
        HEADERS.validate({name: value.decode() for name, value in record.headers})
        headers = UpdateHeaders.parse(record.headers)
        chunks = parts.setdefault(headers.rank, [])
        chunks.append(record.value)
        if headers.is_last:
            found.append((headers, document(headers.content_type, b"".join(chunks))))
    return found


def document(content_type: str, value: bytes) -> Any:
    if content_type == JSON_CONTENT_TYPE:
        return orjson.loads(value)
    header = orjson.loads(value[8 : 8 + int.from_bytes(value[:8], "little")])
    return orjson.loads(header["__metadata__"]["streamiter.model_update"])


@pytest.mark.parametrize("kind", list(KINDS))
async def test_each_kind_of_update_is_as_specified(kind: str) -> None:
    """A team wrote a reader by the specification, and it failed at the first model with classes."""
    topic = await memory_topic()
    model = KINDS[kind]()
    for generation, (form, limit) in enumerate([("json", 10**6), ("safetensors", 10**6), ("auto", 3_000)], start=1):
        await write(topic, encoder(generation, format=form, record_bytes_max=limit).encode([model], epoch=4))
    await roll_back(topic, "ctr", "1.1")
    updates = await published(topic)
    assert [headers.rank for headers, _ in updates] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    for _, given in updates:
        DOCUMENT.validate(given)
    rollback = updates[-1][0]
    assert (rollback.rollback_to, rollback.since_rollback) == ((1, 1), (4, 1))
    exported_one = orjson.loads(exported(await find_update(topic, "ctr"), "json"))
    DOCUMENT.validate(exported_one)


@pytest.mark.parametrize("form", ["json", "safetensors"])
@pytest.mark.parametrize("kind", ["truth values", "tables", "every tag", "a network", "bare weights"])
async def test_each_change_is_as_specified(kind: str, form: Any) -> None:
    """The specification had the whole models only, and a reader of changes was written by trying."""
    topic = await memory_topic()
    model = KINDS[kind]()
    other = np.append(model, 1.0) if isinstance(model, np.ndarray) else {**model, "new": [np.ones(3), {"a": 1}]}
    padding = np.zeros(3000)
    first = padding if isinstance(model, np.ndarray) else {"padding": padding, **model}
    second = np.append(padding, 1.0) if isinstance(model, np.ndarray) else {"padding": padding, **other}
    third = {**second, "padding": np.append(padding, 1.0)} if isinstance(second, dict) else second + 0.0
    one = encoder(1, format=form, changes=True)
    await write(topic, *(one.encode([each]) for each in (first, second, third)))
    updates = await published(topic)
    assert [headers.format for headers, _ in updates][1:] == ["4", "4"]
    for _, given in updates:
        DOCUMENT.validate(given)
    change = updates[1][1]
    assert not DOCUMENT.is_valid(change | {"parameters": [1.0]})
    assert not DOCUMENT.is_valid(change | {"changes": {"list": [{"value": 1}]}})


@pytest.mark.parametrize(
    "broken",
    [
        {"generation": 0},
        {"metrics": {"loss": None}},
        {"parameters": 1.0},
        {"parameters": {"w": {"dtype": "float64", "shape": [1]} | {"values": [{}]}}},
        {"parameters": {"w": []}},
        {"parameters": {"w": {"tensor": 1}}},
        {"parameters": {"weights": [1.0], "center": [0.0]}},
        {"model": "a#b"},
    ],
)
def test_the_schema_refuses_what_no_publisher_writes(broken: dict[str, Any]) -> None:
    """The schema accepted everything, so a wrong publisher was found by its consumers."""
    update = {
        "model": "ctr",
        "generation": 1,
        "version": 1,
        "epoch": None,
        "records": 5,
        "metrics": {"loss": 0.5},
        "parameters": {"weights": [0.5]},
    }
    DOCUMENT.validate(update)
    assert not DOCUMENT.is_valid(update | broken)
    assert not DOCUMENT.is_valid({name: value for name, value in update.items() if name not in broken})


async def test_an_update_of_a_later_format_is_not_read_as_this_one(make_topic: MakeTopic) -> None:
    """Weights of a later format were read with the meaning of this one, and each prediction was wrong."""
    topic = await make_topic()
    later = encoder(2).encode([np.zeros(1)])
    await write(topic, encoder(1).encode([np.ones(1)]), replace(later, headers=[(*later.headers[0], ("format", b"9"))]))
    with pytest.raises(DecodeError) as refused:
        [update async for update in model_updates(topic, "ctr", follow=False)]
    assert "expected an update of format 1, which has no header format, 2, 3 or 4, given '9'; install" in str(
        refused.value
    )
    skipping = model_updates(topic, "ctr", follow=False, on_error="skip")
    assert [update.rank async for update in skipping] == [(1, 1)]


async def test_an_update_with_tables_is_of_the_second_format() -> None:
    """A consumer that knew linear models only predicted with the linear member alone, and nobody noticed."""
    topic = await memory_topic()
    await write(
        topic,
        encoder(1).encode([np.ones(1), shaped("logit")]),
        encoder(2, record_bytes_max=900).encode([shaped("logit")]),
    )
    await roll_back(topic, "ctr", "1.2")
    assert [headers.format for headers, _ in await published(topic)] == ["1", "2", "2", "2"]


@pytest.mark.parametrize("form", ["json", "safetensors"])
async def test_an_update_with_embeddings_is_of_the_third_format_and_keeps_all_bits_of_its_keys(form: Any) -> None:
    """A consumer of tables predicted without the embeddings; keys of 62 bits were rounded to 53."""
    topic = await memory_topic()
    parameters = embedded("logit", seed=2)
    await write(topic, encoder(1, format=form, record_bytes_max=9_000).encode([parameters]))
    [(headers, given)] = await published(topic)
    assert headers.format == "3"
    DOCUMENT.validate(given)
    assert not DOCUMENT.is_valid(given | {"parameters": given["parameters"] | {"embeddings": {"kind": "fm"}}})
    read = await find_update(topic, "ctr")
    assert isinstance(read.parameters, dict)
    assert read.parameters["embeddings"]["keys"].tolist() == parameters["embeddings"]["keys"].tolist()
    row = {"km": 3.0, "town": "Roma"}
    assert LinearPredictor(read.parameters)(row) == LinearPredictor(parameters)(row)
