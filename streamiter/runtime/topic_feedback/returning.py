"""The returning side: from the topic to one head."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from itertools import count
from typing import Final, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import Clock
from streamiter.errors import PlainDataError, TopicError
from streamiter.operators.rejection import Origin
from streamiter.records import Batch, DataBatch
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.topic_feedback.inlet import Inlet
from streamiter.runtime.topic_feedback.message import (
    DATA,
    RUN_HEADER,
    START,
    Message,
    control_of,
    not_fed_back,
)
from streamiter.runtime.topic_feedback.ranges import Point
from streamiter.runtime.topic_feedback.restored import restored_records
from streamiter.runtime.topic_feedback.track import Restored
from streamiter.topics.topic import Headers, Topic, TopicBatch, TopicReader

__all__ = ["RECORDS_PER_READ", "ReturningPump"]

# Records of one read: each may be a batch of up to a megabyte, and all of them wait beside what the head holds.
RECORDS_PER_READ: Final = 256


@final
class ReturningPump:
    """Reads the partitions of one head, and puts what belongs to this run into the head's channels.

    While a channel holds more than its limit, nothing is read: the topic keeps the rest.
    """

    def __init__(
        self,
        run_id: str,
        topic: Topic,
        inlets: Mapping[int, Inlet],
        memory_bytes: int,
        plain_data: PlainData,
        clock: Clock,
    ) -> None:
        """``inlets`` by the number of the producer."""
        self._run_id = run_id.encode()
        self._topic = topic
        self._inlets = inlets
        self._memory_bytes = memory_bytes
        self._plain_data = plain_data
        self._clock = clock
        self._following: dict[tuple[int, int], int] = {}
        """The next sequence number, by producer and partition."""
        self._starts: dict[tuple[int, int], str] = {}
        self._full: FeedbackChannel | None = None
        self._room = asyncio.Event()

    @property
    def is_paused(self) -> bool:
        """Whether the head has to take something before more is read."""
        return self._full is not None

    async def run(self, reader: TopicReader) -> None:
        """Bring first what a checkpoint goes on with from earlier runs, then what comes in this one, for ever."""
        await self._bring_restored()
        while (batch := await reader.read()) is not None:
            await self._take_in(batch)
            await asyncio.sleep(0)  # A reader that always has something must leave others their turn.

    def look_for_room(self) -> None:
        """Something was taken from one of the channels."""
        if self._full is not None and not self._is_full(self._full):
            self._room.set()

    def _is_full(self, channel: FeedbackChannel) -> bool:
        return len(channel.queue) > 0 and channel.queue.bytes_in_memory >= self._memory_bytes

    async def _bring_restored(self) -> None:
        """One range of each channel after the other: where there are several, they are of several runs."""
        inlets = self._inlets.values()
        for number in count():
            of_channels = {
                inlet.track.restored[number]: inlet for inlet in inlets if number < len(inlet.track.restored)
            }
            if not of_channels:
                return
            records = restored_records(
                self._topic, list(of_channels), max_records=RECORDS_PER_READ, clock=self._clock
            )
            async with aclosing(records):
                async for restored, message, at, partition, value in records:
                    await self._bring(of_channels[restored], message, at, partition, value, restored)

    async def _take_in(self, batch: TopicBatch) -> None:
        columns = zip(batch.offsets, batch.headers, batch.values, strict=True)
        for offset, headers, value in columns:
            message = self._message(batch.partition, offset, headers)
            if message is None or not self._is_next(message, batch.partition, offset):
                continue
            if message.home == batch.partition:
                inlet, at = self._inlets[message.producer], Point(offset, message.sequence)
                inlet.track.passed(at)
                await self._bring(inlet, message, at, batch.partition, value or b"")

    async def _bring(
        self,
        inlet: Inlet,
        message: Message,
        at: Point,
        partition: int,
        value: bytes,
        restored: Restored | None = None,
    ) -> None:
        if message.kind == DATA:
            records = self._decoded(value, partition, at.offset)
            inlet.put(DataBatch(records, message.number), at, restored)
            await self._make_room(inlet.channel)
        elif message.kind != START:
            inlet.put_control(control_of(message.kind, message.number), at, restored)

    def _message(self, partition: int, offset: int, headers: Headers) -> Message | None:
        """What a record says; None if it is of another run."""
        run = next((value for name, value in headers if name == RUN_HEADER), None)
        if run is not None and run != self._run_id:
            return None
        try:
            message = Message.of(headers)
        except ValueError as error:
            raise not_fed_back(self._topic, partition, offset, error) from None
        if message.producer not in self._inlets:
            raise TopicError(
                f"{self._place(partition, offset)}: expected a producer of this flow, given number "
                f"{message.producer}; start the same flow with the same parallelism in all workers"
            )
        return message

    def _is_next(self, message: Message, partition: int, offset: int) -> bool:
        """Whether it has not come before; a record that is missing, or a second start, is an error."""
        key = message.producer, partition
        following = self._following.get(key, 0)
        if message.kind == START and self._starts.setdefault(key, message.start) != message.start:
            raise TopicError(
                f"{self._place(partition, offset)}: expected each worker to be started once in run "
                f"{message.run!r}, given a second start (step {message.step!r}, producer {message.producer}); "
                "what its loop held is lost: stop all workers, and start them with a new run_id"
            )
        if message.sequence > following:
            raise TopicError(
                f"{self._place(partition, offset)}: expected record {following} of producer "
                f"{message.producer}, given {message.sequence}; the topic has lost what lies between: let it keep "
                "records longer, and do not compact it"
            )
        if message.sequence < following:
            return False
        self._following[key] = following + 1
        return True

    def _decoded(self, value: bytes, partition: int, offset: int) -> Batch:
        try:
            return self._plain_data.decode_batch(value)
        except PlainDataError as error:
            raise TopicError(f"{self._place(partition, offset)}: {error}") from error

    def _place(self, partition: int, offset: int) -> Origin:
        return Origin(self._topic.url, partition, offset)

    async def _make_room(self, channel: FeedbackChannel) -> None:
        if not self._is_full(channel):
            return
        self._full = channel
        try:
            while self._is_full(channel):
                self._room.clear()
                await self._room.wait()
        finally:
            self._full = None
