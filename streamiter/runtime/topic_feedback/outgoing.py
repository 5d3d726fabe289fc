"""The outgoing side: from the subtasks that feed back into the topic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.records import Control, DataBatch, Idle
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.port import Port
from streamiter.runtime.topic_feedback.message import DATA, START, Kind, Message, message_of
from streamiter.runtime.topic_feedback.pieces import encoded_pieces
from streamiter.topics.topic import OutgoingBatch, TopicWriter

__all__ = ["OutgoingPump", "Outlet"]


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
class OutgoingPump:
    """Writes what waits in the outlets, in turns; ``run`` is an asyncio task of its own.

    What has found no room in the writer stays in the outlets. Whenever they are empty it waits until all is
    stored, so that a failed write is heard of although nothing follows it.
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
        for outlet in self._outlets:
            await self._write_to_all(outlet, START, 0)
            outlet.channel.attach(partial(self._list, outlet))
        await writer.flush()

    async def run(self) -> None:
        """Write for ever, or after ``finish`` until all has been written."""
        assert self._writer is not None
        while True:
            while self._ready:
                outlet = self._ready.popleft()
                outlet.is_listed = False
                if outlet.queue.peek() is not None:
                    await self._write_next(outlet)
                    self._list(outlet)
                    await asyncio.sleep(0)  # A writer that never waits must leave others their turn.
            await self._writer.flush()
            if self._ready:
                continue
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

    async def _write_next(self, outlet: Outlet) -> None:
        if isinstance(outlet.queue.peek(), Control):
            control = outlet.queue.take()
            assert isinstance(control, Control)
            if isinstance(control, Idle):
                return  # A head does not ask who is idle.
            await self._write_to_all(outlet, *message_of(control))
        else:
            await self._write_data(outlet, outlet.queue.take_data())

    async def _write_data(self, outlet: Outlet, batch: DataBatch) -> None:
        for value in encoded_pieces(batch.records, self._limit_bytes, self._plain_data):
            await self._write(outlet, outlet.home, DATA, batch.epoch, value)

    async def _write_to_all(self, outlet: Outlet, kind: Kind, number: int) -> None:
        for partition in outlet.partitions:
            await self._write(outlet, partition, kind, number)

    async def _write(
        self, outlet: Outlet, partition: int, kind: Kind, number: int, value: bytes = b""
    ) -> None:
        assert self._writer is not None
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
        await self._writer.write(
            OutgoingBatch([value], headers=[message.headers()], partition=partition),
        )
