"""Tests of models share this code: a clock, short functions that write updates, and the compaction of a topic."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from topics import topic_case

from streamiter.models import ModelUpdate, ModelUpdateEncoder
from streamiter.models.intake import UpdateIntake
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, ReadRequest, Topic, TopicBatch, TopicReader, TopicRecord
from streamiter.values.helpers.clock import Clock

MakeTopic = Callable[..., Awaitable[Topic]]


class ManualClock(topic_case.ManualClock):
    """A clock that advances only when a test advances it."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        super().__init__(now_s)


def encoder(generation: int = 1, next_version: int = 1, model: str = "ctr", **options: Any) -> ModelUpdateEncoder:
    clock = options.pop("clock", None) or ManualClock()
    return ModelUpdateEncoder(model, generation, next_version, clock=clock, **options)


def update_of(rank: tuple[int, int], model: str = "ctr", **options: Any) -> OutgoingBatch:
    """Return an update whose parameters equal its version."""
    return encoder(*rank, model=model, **options).encode([np.array([float(rank[1])])])


def large_update(rank: tuple[int, int], **options: Any) -> OutgoingBatch:
    """Return an update of 4 chunks whose parameters equal its version."""
    batch = encoder(*rank, record_bytes_max=1000, **options).encode([large(rank[1])])
    assert len(batch) == 4
    return batch


def large(value: float) -> np.ndarray[Any, Any]:
    """Return parameters that fill 4 chunks if records have at most 1,000 bytes."""
    return np.full(500, float(value))


def selected(batch: OutgoingBatch, *indices: int) -> OutgoingBatch:
    """Return some records of a batch, in the given order."""
    assert batch.keys is not None
    assert batch.headers is not None
    return OutgoingBatch(
        values=[batch.values[index] for index in indices],
        keys=[batch.keys[index] for index in indices],
        headers=[batch.headers[index] for index in indices],
        partition=batch.partition,
    )


def interleaved(*batches: OutgoingBatch) -> OutgoingBatch:
    """Return the records of several batches: one record of each batch in turn."""
    rows = [list(zip(one.values, one.keys or (), one.headers or (), strict=True)) for one in batches]
    mixed = [row for turn in itertools.zip_longest(*rows) for row in turn if row is not None]
    values, keys, headers = zip(*mixed, strict=True)
    return OutgoingBatch(values=values, keys=keys, headers=headers, partition=0)


async def memory_topic(
    *batches: OutgoingBatch, partitions: int = 1, clock: Clock | None = None, **settings: Any
) -> Topic:
    """Return a new topic in memory with these updates."""
    made = MemoryBroker(**({} if clock is None else {"clock": clock})).topic("models")
    await made.create(partitions=partitions, **settings)
    await write(made, *batches)
    return made


class WatchedTopic:
    """Counts the records that are read and the open readers, and can act before a reader is opened."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.records_read = 0
        self.largest_batch = 0
        self.open_readers = self.open_readers_ever = 0
        self.closed = asyncio.Event()
        self.before_open: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topic, name)

    async def open_reader(self, request: ReadRequest) -> TopicReader:
        if self.before_open is not None:
            await self.before_open()
        self.open_readers_ever += 1
        reader = await self._topic.open_reader(request)
        self.open_readers += 1
        return _WatchedReader(self, reader)


class _WatchedReader(TopicReader):
    def __init__(self, topic: WatchedTopic, reader: TopicReader) -> None:
        self._topic = topic
        self._reader = reader

    async def read(self) -> TopicBatch | None:
        batch = await self._reader.read()
        if batch is not None:
            self._topic.records_read += len(batch)
            self._topic.largest_batch = max(self._topic.largest_batch, len(batch))
        return batch

    def positions(self) -> Any:
        return self._reader.positions()

    def lag(self) -> Any:
        return self._reader.lag()

    async def close(self) -> None:
        self._topic.open_readers -= 1
        self._topic.closed.set()
        await self._reader.close()


async def write(topic: Topic, *batches: OutgoingBatch) -> None:
    writer = await topic.open_writer()
    try:
        for batch in batches:
            await writer.write(batch)
        await writer.flush()
    finally:
        await writer.close()


async def all_records(topic: Topic) -> list[TopicRecord]:
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    try:
        records: list[TopicRecord] = []
        while (batch := await reader.read()) is not None:
            records += batch.records()
        return records
    finally:
        await reader.close()


async def compacted(topic: Topic) -> Topic:
    """Return a copy of ``topic`` after compaction: the last record of each key, without deleted keys."""
    last = {(record.partition, record.key): record for record in await all_records(topic)}
    kept = sorted(
        (record for record in last.values() if record.value is not None),
        key=lambda record: (record.partition, record.offset),
    )
    target = MemoryBroker().topic("compacted")
    await target.create(partitions=(await topic.describe()).partitions)
    for record in kept:
        await write(target, outgoing(record))
    return target


def outgoing(record: TopicRecord) -> OutgoingBatch:
    return OutgoingBatch(
        values=[record.value],
        keys=[record.key],
        headers=[record.headers],
        timestamps_ms=[record.timestamp_ms],
        partition=record.partition,
    )


def decoded(batch: OutgoingBatch, model: str = "ctr") -> list[ModelUpdate]:
    """Return the updates in a batch as a reader returns them."""
    intake = UpdateIntake(MemoryBroker().topic("models"), model)
    columns = zip(batch.values, batch.keys or (), batch.headers or (), strict=True)
    records = [TopicRecord(0, offset, 0, key, value, headers) for offset, (value, key, headers) in enumerate(columns)]
    return [update for record in records if (update := intake.take(record)) is not None]


def same(first: Any, second: Any) -> bool:
    """Return whether two values have equal content, type, dtype and shape at all levels."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        same_kind = first.dtype == second.dtype and first.shape == second.shape
        return bool(same_kind and first.tobytes() == second.tobytes())
    if isinstance(first, np.generic):
        return bool(first.dtype == second.dtype and first.tobytes() == second.tobytes())
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return repr(first) == repr(second)  # repr also distinguishes 0.0 and -0.0
