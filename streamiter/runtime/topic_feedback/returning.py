"""The returning side: from the topic to one head."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import PlainDataError, TopicError
from streamiter.operators.rejection import Origin
from streamiter.records import Batch, CheckpointBarrier, Control, DataBatch
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.topic_feedback.message import DATA, RUN_HEADER, START, Message, control_of
from streamiter.topics.topic import Headers, Topic, TopicBatch, TopicReader

__all__ = ["Inlet", "ReturningPump", "Supply"]


@final
class Inlet:
    """Where what one producer feeds back to one head comes out: a channel of the head's gate."""

    def __init__(self, channel: FeedbackChannel, *, takes_barriers: bool, takes_epochs: bool) -> None:
        """``takes_barriers``: not those of another worker. ``takes_epochs``: whether watermarks count."""
        self.channel = channel
        self._takes_barriers = takes_barriers
        self._takes_epochs = takes_epochs

    def put_control(self, control: Control) -> None:
        """Bring a control record to the head, if it concerns it."""
        is_barrier = isinstance(control, CheckpointBarrier)
        if self._takes_barriers if is_barrier else self._takes_epochs:
            self.channel.put_control(control)


@final
class Supply:
    """What a channel of a head is told of the topic behind it, and tells it."""

    def __init__(self, pump: ReturningPump, outgoing: FeedbackChannel, *, is_shared: bool) -> None:
        """``outgoing`` is where this process feeds into the topic what comes back in the channel; where the
        channel ``is_shared``, what comes from other processes does, too.
        """
        self._pump = pump
        self._outgoing = outgoing
        self._is_shared = is_shared

    @property
    def is_behind(self) -> bool:
        return self._pump.is_paused or self._outgoing.is_spilling

    def under_way(self, came: int) -> int:
        return 0 if self._is_shared else self._outgoing.total_records - came

    def taken(self) -> None:
        self._pump.look_for_room()

    def closed(self) -> None:
        self._pump.look_for_room()
        self._outgoing.close()


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
    ) -> None:
        """``inlets`` by the number of the producer."""
        self._run_id = run_id.encode()
        self._topic = topic
        self._inlets = inlets
        self._memory_bytes = memory_bytes
        self._plain_data = plain_data
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
        """Read for ever."""
        while (batch := await reader.read()) is not None:
            await self._take_in(batch)
            await asyncio.sleep(0)  # A reader that always has something must leave others their turn.

    def look_for_room(self) -> None:
        """Something was taken from one of the channels."""
        if self._full is not None and not self._is_full(self._full):
            self._room.set()

    def _is_full(self, channel: FeedbackChannel) -> bool:
        return len(channel.queue) > 0 and channel.queue.bytes_in_memory >= self._memory_bytes

    async def _take_in(self, batch: TopicBatch) -> None:
        columns = zip(batch.offsets, batch.headers, batch.values, strict=True)
        for offset, headers, value in columns:
            message = self._message(batch.partition, offset, headers)
            if message is None or not self._is_next(message, batch.partition, offset):
                continue
            inlet = self._inlets[message.producer]
            if message.kind == DATA:
                records = self._decoded(value or b"", batch.partition, offset)
                inlet.channel.put(DataBatch(records, message.number))
                await self._make_room(inlet.channel)
            elif message.kind != START and message.home == batch.partition:
                inlet.put_control(control_of(message.kind, message.number))

    def _message(self, partition: int, offset: int, headers: Headers) -> Message | None:
        """What a record says; None if it is of another run."""
        run = next((value for name, value in headers if name == RUN_HEADER), None)
        if run is not None and run != self._run_id:
            return None
        try:
            message = Message.of(headers)
        except ValueError as error:
            raise TopicError(
                f"{self._place(partition, offset)}: expected only what the loop feeds back, given another "
                f"record ({error}); give the loop a topic of its own"
            ) from None
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
