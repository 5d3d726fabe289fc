"""Topics in memory and in an SQLite file keep the contract of topics, follow a simple model, and are compacted."""

import asyncio
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topics.topic_case import (
    begun,
    by_partition,
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
from topics.topic_contract import TopicCase, TopicContract

from streamiter.errors import ProducerFenced
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic, TopicRecord, Transactions, topic
from streamiter.topics.compacted import ensure_commit_topic, last_value
from streamiter.values.helpers.clock import SystemClock


class TestMemoryTopics(TopicContract):
    @pytest.fixture
    def case(self) -> TopicCase:
        return TopicCase(
            handle=MemoryBroker().topic,
            record_limit_settings={"max_record_bytes": "2000"},
            record_limit_bytes=2000,
            retention_settings={"retention_records": "35"},
            url_is_global=False,
        )


class TestSqliteTopics(TopicContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TopicCase:
        return TopicCase(
            handle=lambda name: topic(f"sqlite:///{tmp_path}/topics.db?topic={name}"),
            record_limit_settings={"max_record_bytes": "2000"},
            record_limit_bytes=2000,
            retention_settings={"retention_records": "35"},
        )


PARTITIONS = 2

steps = st.one_of(
    st.tuples(st.just("write"), st.integers(0, PARTITIONS - 1), st.integers(1, 4)),
    st.tuples(st.just("write in transaction"), st.integers(0, PARTITIONS - 1), st.integers(1, 4)),
    st.tuples(st.just("commit")),
    st.tuples(st.just("abort")),
    st.tuples(st.just("take over")),
    st.tuples(st.just("read"), st.integers(1, 3)),
)


@dataclass
class Model:
    """The expected content of a topic: the visible values, and those of the open transaction."""

    committed: list[tuple[int, bytes]] = field(default_factory=list)
    open: list[tuple[int, bytes]] = field(default_factory=list)
    count: int = 0

    def new_values(self, count: int) -> list[bytes]:
        self.count += count
        return [b"%d" % number for number in range(self.count - count, self.count)]


class History:
    """Runs steps on a topic and on its model, with a reader that is restored after each read."""

    def __init__(self, under_test: Topic) -> None:
        self.topic = under_test
        self.model = Model()
        self.transactions: Transactions | None = None
        self.positions: dict[int, int] = {}
        self.seen: list[TopicRecord] = []

    async def run(self, script: list[tuple[str, ...]]) -> None:
        await self.topic.create(partitions=PARTITIONS)
        writer = await self.topic.open_writer()
        for name, *arguments in script:
            if name == "write":
                partition, count = arguments
                values = self.model.new_values(count)
                await writer.write(OutgoingBatch(values, partition=partition))
                await writer.flush()
                self.model.committed += [(partition, value) for value in values]
            elif name == "read":
                await self.read(*arguments)
            else:
                await getattr(self, name.replace(" ", "_"))(*arguments)
        await writer.close()
        if self.transactions is not None:
            await self.transactions.close()
        self.model.open.clear()
        await self.read(100)

    async def write_in_transaction(self, partition: int, count: int) -> None:
        if self.transactions is None:
            self.transactions = await self.topic.open_transactions("t")
        if not self.model.open:
            await self.transactions.begin()
        values = self.model.new_values(count)
        await self.transactions.write(self.topic, OutgoingBatch(values, partition=partition))
        self.model.open += [(partition, value) for value in values]

    async def commit(self) -> None:
        if self.model.open:
            assert self.transactions is not None
            await self.transactions.commit()
            self.model.committed += self.model.open
            self.model.open = []

    async def abort(self) -> None:
        if self.model.open:
            assert self.transactions is not None
            await self.transactions.abort()
            self.model.open = []

    async def take_over(self) -> None:
        older, self.transactions = self.transactions, await self.topic.open_transactions("t")
        if older is not None:
            if self.model.open:
                with pytest.raises(ProducerFenced):
                    await older.commit()
            await older.close()
        self.model.open = []

    async def read(self, max_records: int) -> None:
        """Read with a new reader from the position of the last one."""
        reader = await self.topic.open_reader(
            ReadRequest(positions=self.positions, stop="latest", max_records=max_records)
        )
        while (batch := await reader.read()) is not None:
            assert len(batch) <= max_records
            assert batch.offsets[0] >= self.positions.get(batch.partition, 0)
            self.positions[batch.partition] = batch.next_offset
            self.seen += batch.records()
        await reader.close()
        assert {(record.partition, record.value) for record in self.seen} <= set(self.model.committed)

    def check_end(self) -> None:
        seen = [(record.partition, record.value) for record in self.seen]
        assert sorted(seen) == sorted(self.model.committed)
        for part in by_partition(self.seen).values():
            offsets = [record.offset for record in part]
            assert offsets == sorted(set(offsets))


def memory_topic(folder: Path) -> Topic:
    return MemoryBroker().topic("a")


def sqlite_topic(folder: Path) -> Topic:
    return topic(f"sqlite:///{folder}/a.db?topic=a")


@pytest.mark.parametrize("make_topic", [memory_topic, sqlite_topic])
@settings(max_examples=40, deadline=None)
@given(script=st.lists(steps, max_size=25))
def test_in_any_history_committed_records_are_read_once_and_others_never(
    make_topic: Callable[[Path], Topic], script: list[tuple[str, ...]]
) -> None:
    """A rare order of commits, aborts, take-overs and restores lost a record, or showed an aborted one."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(make_topic(Path(folder)))
        asyncio.run(history.run(script))
        history.check_end()


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
