"""The outgoing side: from the subtasks that feed back into the topic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.records import Control, DataBatch, Idle
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.port import Port
from streamiter.runtime.topic_feedback.message import (
    DATA,
    HEADER_BYTES_MAX,
    START,
    Kind,
    Message,
    message_of,
)
from streamiter.runtime.topic_feedback.pieces import encoded_pieces
from streamiter.topics.topic import Headers, OutgoingBatch, TopicWriter

__all__ = ["OutgoingPump", "Outlet"]

# Records of at most so many bytes, and one of them more, are written at once and held in memory until they are stored.
_WRITE_BYTES: Final = 1 << 20


@final
class Outlet:
    """What one subtask feeds back to one head: a queue that never blocks it, and the partitions of the head.

    All of its data goes to one of them, its *home*, so that it keeps its order; control records go to each.
    """

    def __init__(self, producer: int, step: str, head: int, channel: FeedbackChannel) -> None:
        self.producer = producer
        self.step = step
        self.head = head
        self.channel = channel
        self.queue = Port(0, "feedback", channel, is_feedback=True)
        self.partitions: Sequence[int] = ()
        self.home = 0
        self.is_listed = False
        self._sequences: dict[int, int] = {}

    def assign(self, partitions: Sequence[int]) -> None:
        """These are the partitions of the head."""
        self.partitions = partitions
        self.home = partitions[self.producer % len(partitions)]
        self._sequences = dict.fromkeys(partitions, 0)

    def next_sequence(self, partition: int) -> int:
        """The number of the next record in a partition."""
        number = self._sequences[partition]
        self._sequences[partition] = number + 1
        return number


@final
class Entries:
    """Records of the topic that are written together."""

    def __init__(self) -> None:
        self._columns: dict[int, tuple[list[bytes | None], list[Headers]]] = {}
        self.size_bytes = 0

    def add(self, partition: int, value: bytes, headers: Headers) -> None:
        """Put one behind the others of its partition."""
        values, all_headers = self._columns.setdefault(partition, ([], []))
        values.append(value)
        all_headers.append(headers)
        self.size_bytes += len(value) + HEADER_BYTES_MAX

    def batches(self) -> list[OutgoingBatch]:
        """One for each partition."""
        return [
            OutgoingBatch(values, headers=headers, partition=partition)
            for partition, (values, headers) in self._columns.items()
        ]


@final
class OutgoingPump:
    """Writes what waits in the outlets, all that does in one go; ``run`` is an asyncio task of its own.

    It waits until that is stored, so that a failed write is heard of although nothing follows it. What comes meanwhile
    waits in the outlets, where small batches of one epoch are joined: the slower the topic, the larger its records.
    """

    def __init__(self, run_id: str, start: str, outlets: Sequence[Outlet], plain_data: PlainData) -> None:
        self._run_id = run_id
        self._start = start
        self._outlets = outlets
        self._plain_data = plain_data
        self._limit_bytes = 0
        self._writer: TopicWriter | None = None
        self._ready: deque[Outlet] = deque()
        self._news = asyncio.Event()
        self._is_finishing = False

    async def open(self, writer: TopicWriter, limit_bytes: int) -> None:
        """Write the start of this run into every partition; values are at most ``limit_bytes`` from then on."""
        self._writer = writer
        self._limit_bytes = limit_bytes
        starts = Entries()
        for outlet in self._outlets:
            self._add_to_all(starts, outlet, START, 0)
            outlet.channel.attach(partial(self._list, outlet))
        await self._write(starts)

    async def run(self) -> None:
        """Write for ever, or after ``finish`` until all has been written."""
        while True:
            while self._ready:
                await self._write(self._take_what_waits())
                await asyncio.sleep(0)  # A writer that never waits must leave others their turn.
            if self._is_finishing:
                return
            self._news.clear()
            await self._news.wait()

    def finish(self) -> None:
        """Have ``run`` return once all that waits is stored."""
        self._is_finishing = True
        self._news.set()

    def _list(self, outlet: Outlet) -> None:
        if not outlet.is_listed:
            outlet.is_listed = True
            self._ready.append(outlet)
            self._news.set()

    def _take_what_waits(self) -> Entries:
        """What is in the outlets, taken from them in turns, up to the size of one write."""
        entries = Entries()
        while self._ready and entries.size_bytes < _WRITE_BYTES:
            outlet = self._ready.popleft()
            outlet.is_listed = False
            if outlet.queue.peek() is not None:
                self._take_next(outlet, entries)
                self._list(outlet)
        return entries

    def _take_next(self, outlet: Outlet, entries: Entries) -> None:
        if isinstance(outlet.queue.peek(), DataBatch):
            batch = outlet.queue.take_data()
            for value in encoded_pieces(batch.records, self._limit_bytes, self._plain_data):
                self._add(entries, outlet, outlet.home, DATA, batch.epoch, value)
            return
        control = outlet.queue.take()
        assert isinstance(control, Control)
        if not isinstance(control, Idle):  # A head does not ask who is idle.
            self._add_to_all(entries, outlet, *message_of(control))

    def _add_to_all(self, entries: Entries, outlet: Outlet, kind: Kind, number: int) -> None:
        for partition in outlet.partitions:
            self._add(entries, outlet, partition, kind, number)

    def _add(
        self, entries: Entries, outlet: Outlet, partition: int, kind: Kind, number: int, value: bytes = b""
    ) -> None:
        message = Message(
            run=self._run_id,
            producer=outlet.producer,
            kind=kind,
            number=number,
            sequence=outlet.next_sequence(partition),
            home=outlet.home,
            step=outlet.step,
            start=self._start,
        )
        entries.add(partition, value, message.headers())

    async def _write(self, entries: Entries) -> None:
        assert self._writer is not None
        for batch in entries.batches():
            await self._writer.write(batch)
        await self._writer.flush()
