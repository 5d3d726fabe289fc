"""Compacted topics in memory and in an SQLite file keep the last record of each key."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from topics.topic_case import (
    begun,
    created,
    numbered,
    numbers_of,
    patiently,
    read_count,
    read_to_end,
    values_of,
    write,
    write_transaction,
)

from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic, TopicRecord, topic
from streamiter.topics.compacted import ensure_commit_topic, last_value
from streamiter.values.helpers.clock import SystemClock

COMPACTED = {"compact": "1"}

MakeTopic = Callable[..., Topic]


@pytest.fixture(params=["memory", "sqlite"])
def handle(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTopic:
    if request.param == "memory":
        return MemoryBroker().topic
    return lambda name: topic(f"sqlite:///{tmp_path}/topics.db?topic={name}", synchronous="normal")


async def test_many_commits_leave_one_record_for_each_flow(handle: MakeTopic) -> None:
    """A commit every ten seconds stored three million commit records in a year, although only the last one is used."""
    commits = await ensure_commit_topic(handle("outputs"))
    flows = [await commits.open_transactions(f"flow-{number}") for number in range(3)]
    for commit in range(400):
        owner = commit % 7 % 3  # one flow commits more often than the others
        await flows[owner].begin()
        batch = OutgoingBatch([b"%d" % commit], keys=[b"flow-%d" % owner])
        await flows[owner].write(commits, batch)
        await flows[owner].commit()
    for flow in flows:
        await flow.close()
    left = await read_to_end(commits)
    assert {record.key: record.value for record in left} == {b"flow-0": b"399", b"flow-1": b"396", b"flow-2": b"397"}
    assert len(left) == 3
    for number, last in enumerate([b"399", b"396", b"397"]):
        record = await last_value(commits, b"flow-%d" % number, clock=SystemClock())
        assert record is not None
        assert record.value == last


async def test_uncommitted_records_supersede_nothing(handle: MakeTopic) -> None:
    """An open transaction superseded the last commit record, and was aborted later."""
    clicks = await created(handle("clicks"), settings=COMPACTED)
    await write(clicks, OutgoingBatch([b"committed"], keys=[b"k"]))
    aborted = await begun(clicks, "aborted")
    await aborted.write(clicks, OutgoingBatch([b"aborted"], keys=[b"k"]))
    other = await clicks.open_transactions("other")
    await write_transaction(other, clicks, [b"unkeyed"], commit=True)
    await aborted.abort()
    await write_transaction(other, clicks, [b"unkeyed"], commit=True)
    assert values_of(await read_to_end(clicks)) == [b"committed", b"unkeyed", b"unkeyed"]
    await aborted.close()
    await other.close()


def surviving(history: list[TopicRecord], left: list[TopicRecord]) -> None:
    """Check that the remaining records are unchanged, and that no required record is missing."""
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
async def test_readers_skip_gaps_at_any_start_and_stop(handle: MakeTopic, seed: int) -> None:
    """A gap at a reader's start or stop, or between them, held the reader up, or shifted its offsets."""
    choice = random.Random(seed)
    clicks = await created(handle("clicks"), settings=COMPACTED)
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


async def test_a_reader_before_a_gap_continues_behind_it(handle: MakeTopic) -> None:
    """A superseded record ended a reader, as a record out of retention does, although it is no loss."""
    clicks = await created(handle("clicks"), settings=COMPACTED)
    await write(clicks, OutgoingBatch(numbered([0]), keys=[b"k"]))
    reader = await clicks.open_reader(ReadRequest())
    assert numbers_of(await read_count(reader, 1)) == [0]
    for number in range(1, 20):
        await write(clicks, OutgoingBatch(numbered([number]), keys=[b"k"]))
    assert numbers_of(await read_count(reader, 1)) == [19]
    assert reader.positions() == {0: 20}
    await patiently(reader.close())
