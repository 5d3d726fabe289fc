"""URLs, options, schemas and records of topics that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/topics/test_refusals.py`` writes the texts as they are now.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import polars
import pytest
from support.refusals import sections, with_errors_now, write
from topics.topic_case import read_to_end
from topics.topic_case import write as write_to

from streamiter import topics
from streamiter.topics import JsonColumns, MemoryBroker, OutgoingBatch, ReadRequest, TopicBatch, topic
from streamiter.values.records import Columns

FILE = Path(__file__).with_name("refusals.txt")


class Click(msgspec.Struct):
    id: int


def columns_encoded(field: Any, column: Any) -> object:
    """Write three records with a good field ``b`` and the field ``a``."""
    fields = Columns({"a": column, "b": np.arange(3)})
    return JsonColumns({"b": "int64", "a": field}).encode(fields)


async def written(**columns: Any) -> None:
    """Write a batch to a topic in memory, which stays empty."""
    clicks = MemoryBroker().topic("clicks")
    await clicks.create()
    try:
        await write_to(clicks, OutgoingBatch(**columns))
    finally:
        assert await read_to_end(clicks) == []


async def opened(**request: Any) -> object:
    clicks = MemoryBroker().topic("clicks")
    await clicks.create()
    return await clicks.open_reader(ReadRequest(**request))


async def created(**settings: str) -> None:
    await MemoryBroker().topic("clicks").create(settings=settings)


OF_THE_TEST = (columns_encoded, written, opened, created, topic, Click, Columns, TopicBatch)
CLICK = {"type": "record", "name": "Click", "fields": [{"name": "user", "type": "string"}]}
NAMES = {each: getattr(topics, each) for each in topics.__all__} | {each.__name__: each for each in OF_THE_TEST}
SASL = {"security_protocol": "SASL_SSL", "sasl_username": "alice", "sasl_password": "hush-hush"}
OAUTH = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
NAMES |= {"CLICKS": "kafka://127.0.0.1:9092/clicks", "SASL": SASL, "OAUTH": OAUTH}
NAMES |= {"np": np, "json": json, "polars": polars, "CLICK": CLICK}
NAMES["PROVIDER"] = SimpleNamespace(token=lambda: "a-token")
NAMES["POINTS"] = JsonColumns({"id": "int64", "x": ("float64", 2), "name": "str"})


async def evaluated(code: str) -> object:
    result = eval(code, dict(NAMES))
    return await result if hasattr(result, "__await__") else result


SECTIONS = ("URLs and options", "URLs and options of Kafka", "schemas and registries", "records", "topics in memory")
CALLS = dict.fromkeys(SECTIONS, evaluated)


@pytest.mark.parametrize("section", CALLS)
async def test_wrong_topics_and_records_are_refused_with_their_texts(section: str) -> None:
    """Each section tells the incidents that its refusals prevent."""
    text = sections(FILE)[section]
    assert not any("hush" in line.lower() for line in text.splitlines() if line.startswith(" ")), (
        "an error shows a secret"
    )
    assert await with_errors_now(text, CALLS[section]) == text


if __name__ == "__main__":
    write(FILE, CALLS)
