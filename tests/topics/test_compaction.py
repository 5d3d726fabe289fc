"""Topics that keep the last record of each key, in memory and in an SQLite file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from topics.topic_case import (
    numbered,
    numbers_of,
    patiently,
    read_count,
    read_to_end,
    values_of,
    write,
    write_transaction,
)

from streamiter.clock import SystemClock
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic, TopicRecord, topic
from streamiter.topics.compacted import ensure_commit_topic, last_value

COMPACTED = {"compact": "1"}

MakeTopic = Callable[..., Topic]


@pytest.fixture(params=["memory", "sqlite"])
def handle(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTopic:
    if request.param == "memory":
        return MemoryBroker().topic
    return lambda name: topic(f"sqlite:///{tmp_path}/topics.db?topic={name}", synchronous="normal")


async def test_commits_of_years_leave_one_record_for_each_flow(handle: MakeTopic) -> None:
    """A commit every ten seconds makes three million commit records a year; only the last one is used."""
    commits = await ensure_commit_topic(handle("outputs"))
    flows = [await commits.open_transactions(f"flow-{number}") for number in range(3)]
    for commit in range(400):
        owner = commit % 7 % 3  # one of them commits more often than the others
        await flows[owner].begin()
        batch = OutgoingBatch([b"%d" % commit], keys=[b"flow-%d" % owner])
        await flows[owner].write(commits, batch)
        await flows[owner].commit()
    for flow in flows:
        await flow.close()
    left = await read_to_end(commits)
    assert {record.key: record.value for record in left} == {
        b"flow-0": b"399",
        b"flow-1": b"396",
        b"flow-2": b"397",
    }
    assert len(left) == 3
    for number, last in enumerate([b"399", b"396", b"397"]):
        record = await last_value(commits, b"flow-%d" % number, clock=SystemClock())
        assert record is not None
        assert record.value == last


async def test_what_is_not_committed_supersedes_nothing(handle: MakeTopic) -> None:
    """The last commit record would be lost when the present transaction is aborted."""
    clicks = handle("clicks")
    await clicks.create(settings=COMPACTED)
    await write(clicks, OutgoingBatch([b"committed"], keys=[b"k"]))
    aborted = await clicks.open_transactions("aborted")
    await aborted.begin()
    await aborted.write(clicks, OutgoingBatch([b"aborted"], keys=[b"k"]))
    other = await clicks.open_transactions("other")
    await write_transaction(other, clicks, [b"unkeyed"], commit=True)
    await aborted.abort()
    await write_transaction(other, clicks, [b"unkeyed"], commit=True)
    assert values_of(await read_to_end(clicks)) == [b"committed", b"unkeyed", b"unkeyed"]
    await aborted.close()
    await other.close()


def surviving(history: list[TopicRecord], left: list[TopicRecord]) -> None:
    """The remaining records are unchanged, and no required record is missing."""
    assert all(record in history for record in left)
    assert [record.offset for record in left] == sorted(record.offset for record in left)
    last = {record.key: record for record in history if record.key is not None}
    unkeyed = [record for record in history if record.key is None]
    assert all(record in left for record in (*last.values(), *unkeyed))


async def written(clicks: Topic, batch: OutgoingBatch, history: list[TopicRecord]) -> None:
    keys = batch.keys or [None] * len(batch)
    rows = zip(range(len(history), len(history) + len(batch)), keys, batch.values, strict=True)
    history += [TopicRecord(0, offset, 1000, key, value) for offset, key, value in rows]
    await write(clicks, batch)


@pytest.mark.parametrize("seed", range(4))
async def test_readers_pass_over_the_gaps_wherever_they_begin_and_end(handle: MakeTopic, seed: int) -> None:
    """A gap at a reader's start, at its stop, or between must neither hold it up nor shift offsets."""
    choice = random.Random(seed)
    clicks = handle("clicks")
    await clicks.create(settings=COMPACTED)
    history: list[TopicRecord] = []
    for _ in range(25):
        count = choice.choice([1, 1, 1, 2, 5])
        keys = [choice.choice([b"a", b"b", b"c", b"a", None][: choice.choice([3, 5])]) for _ in range(count)]
        values = numbered(range(len(history), len(history) + count))
        await written(clicks, OutgoingBatch(values, keys=keys, timestamps_ms=[1000] * count), history)
    left = await read_to_end(clicks)
    surviving(history, left)
    assert len(left) < len(history)
    for _ in range(40):
        start, stop = sorted(choice.choices(range(len(history) + 1), k=2))
        expected = [record for record in left if start <= record.offset < stop]
        request = ReadRequest(start={0: start}, stop={0: stop}, max_records=choice.choice([1, 3, 100]))
        assert await read_to_end(clicks, request) == expected


async def test_a_reader_that_was_overtaken_continues_behind_the_gap(handle: MakeTopic) -> None:
    """A superseded record is no loss: it must not end a reader as records out of retention do."""
    clicks = handle("clicks")
    await clicks.create(settings=COMPACTED)
    await write(clicks, OutgoingBatch(numbered([0]), keys=[b"k"]))
    reader = await clicks.open_reader(ReadRequest())
    assert numbers_of(await read_count(reader, 1)) == [0]
    for number in range(1, 20):
        await write(clicks, OutgoingBatch(numbered([number]), keys=[b"k"]))
    assert numbers_of(await read_count(reader, 1)) == [19]
    assert reader.positions() == {0: 20}
    await patiently(reader.close())
