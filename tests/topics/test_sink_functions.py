"""Functions of a sink say keys, values, headers and time stamps of records; a value of None is a tombstone."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.kafka_fixtures import GivenKafka
from topics.topic_case import created, read_to_end

from streamiter import Columns, Flow
from streamiter.errors import GraphError, JobFailed
from streamiter.topics import MemoryBroker, Topic, TopicRecord, topic

CLICKS = [{"user": f"user {number}", "at": 1_000 * number, "price": number or None} for number in range(4)]


@pytest.fixture(params=["memory", "sqlite", "kafka"])
async def made(request: pytest.FixtureRequest, tmp_path: Path, topic_prefix: str) -> Topic:
    if request.param == "memory":
        found: Topic = MemoryBroker().topic("clicks")
    elif request.param == "sqlite":
        found = topic(f"sqlite:///{tmp_path}/data.db?topic=clicks")
    else:
        broker: GivenKafka = request.getfixturevalue("kafka_broker")
        found = topic(f"kafka://{broker.bootstrap}/{topic_prefix}clicks")
    await found.create()
    return found


async def written(items: Any, made: Topic, **options: Any) -> list[TopicRecord]:
    flow = Flow("write")
    flow.from_items(items).sink(made, **options)
    await (await flow.start()).wait()
    return await read_to_end(made)


async def test_all_columns(made: Topic) -> None:
    records = await written(
        CLICKS,
        made,
        key="user",
        value="price",
        headers=lambda click: {"type": "click", "at": b"%d" % click["at"]},
        timestamp=lambda click: click["at"] + 5,
    )
    assert [(each.key, each.value) for each in records] == [
        (b"user 0", None),
        *((b"user %d" % number, b"%d" % number) for number in (1, 2, 3)),
    ]
    assert [dict(each.headers) for each in records] == [
        {"type": b"click", "at": b"%d" % (1000 * number)} for number in range(4)
    ]
    assert [each.timestamp_ms for each in records] == [5, 1005, 2005, 3005]


async def test_tombstones(made: Topic) -> None:
    """A key could only be deleted with values of bytes, and a copy of a tombstone was the text null."""
    copies = await written([None, 1], made, key=str)
    assert [(each.key, each.value) for each in copies] == [(b"None", None), (b"1", b"1")]
    none = await written([1, 2], made, key=str, value=lambda _: None)
    assert [(each.key, each.value) for each in none[2:]] == [(b"1", None), (b"2", None)]


@pytest.mark.parametrize(
    ("time", "expected_ms"),
    [
        (1500, 1500),
        (np.int64(1500), 1500),
        (datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC), 1500),
        (np.datetime64("1970-01-01T00:00:01.5"), 1500),
        (np.datetime64("1970-01-02"), 86_400_000),
    ],
)
async def test_units_of_time_stamps(time: Any, expected_ms: int) -> None:
    made = await created(MemoryBroker().topic("clicks"))
    [record] = await written([0], made, timestamp=lambda _: time)
    assert record.timestamp_ms == expected_ms


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("timestamp", 1.5, "timestamp: expected the function to return milliseconds since 1970 as an int, an aware"),
        ("timestamp", datetime(2026, 1, 1), "return int(1000 * …) for seconds, or a datetime with a time zone"),
        ("timestamp", -1, "given -1 (int)"),
        ("timestamp", True, "given True (bool)"),
        ("timestamp", np.datetime64("NaT"), "(datetime64)"),
        ("headers", None, "headers: expected the function to return a dict or pairs of names (str) and values"),
        ("headers", {"a": 5}, "given {'a': 5} (dict); return {'name': str(…)}"),
        ("headers", {b"a": b"b"}, "(dict)"),
        ("headers", ["abc"], "(list)"),
        (
            "key",
            5,
            "key: expected the function to return bytes, str or None, given 5 (int); return str(…) or its bytes",
        ),
    ],
)
async def test_wrong_results_follow_the_policy(option: str, given: Any, message: str) -> None:
    made = await created(MemoryBroker().topic("clicks"))
    with pytest.raises(JobFailed) as error:
        await written([0], made, **{option: lambda _: given})
    assert message in str(error.value) + str(error.value.__cause__)
    good: dict[str, Any] = {"timestamp": 7, "headers": {}, "key": "k"}
    records = await written(
        Columns({"n": np.arange(3)}),
        made,
        on_error="skip",
        value=lambda record: record["n"] if record["n"] < 2 else object(),
        **{option: lambda record: given if record["n"] == 0 else good[option]},
    )
    assert [record.value for record in records] == [b"1"]


def test_errors_at_the_users_line(tmp_path: Path) -> None:
    items = Flow("write").from_items([1])
    with pytest.raises(
        GraphError, match=r"step 'sink .*a\.jsonl': expected a topic with headers, given file:.*; leave headers= out"
    ):
        items.sink(topic(f"file:{tmp_path}/a.jsonl"), headers=lambda record: {})
    function: Callable[..., Any] = lambda: 0  # noqa: E731
    for option in ("value", "headers", "timestamp"):
        with pytest.raises(GraphError, match=f"sink {option}"):
            items.sink(MemoryBroker().topic("clicks"), **{option: function})
