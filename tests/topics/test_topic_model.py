"""Random histories of writes and transactions are compared with a very simple model of a topic."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topics.topic_case import by_partition

from streamiter.errors import ProducerFenced
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic, TopicRecord, Transactions, topic

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
