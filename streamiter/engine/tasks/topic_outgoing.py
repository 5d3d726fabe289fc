"""Feedback through a topic, the outgoing side: from the subtasks that feed back into the topic.

Each subtask that feeds back has an :class:`OutgoingPath` for each head: a queue that never blocks. An
:class:`OutgoingPump`, an asyncio task, writes the items of all paths to the topic: a batch as one record or more, a
control record as one record in each partition of its head. :class:`Message` are the headers of such a record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, Literal, final

from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.port_log import Port, ReadyPorts
from streamiter.errors import RecordTooLarge, TopicError, shortened
from streamiter.operators.output import Origin
from streamiter.topics.topic import Headers, OutgoingBatch, Topic, TopicWriter
from streamiter.values.plain_data import PlainData
from streamiter.values.records import (
    Batch,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    Idle,
    control_from_plain,
    control_to_plain,
    slice_batch,
)

# The pump writes about this many bytes at once, and keeps them in memory until they are stored.
_WRITE_BYTES: Final = 1 << 20


@final
class OutgoingPath:
    """The feedback of one subtask to one head: a queue that never blocks, and the partitions of the head.

    All its data goes to one partition, its *home*, which keeps the order. Control records go to each partition.
    """

    def __init__(self, producer: int, step: str, head: int, channel: FeedbackChannel) -> None:
        self.producer = producer
        self.step = step
        self.head = head
        self.channel = channel
        self.queue = Port(0, "feedback", channel)
        self.partitions: Sequence[int] = ()
        self.home = 0
        self._sequences: dict[int, int] = {}

    def assign(self, partitions: Sequence[int]) -> None:
        self.partitions = partitions
        self.home = partitions[self.producer % len(partitions)]
        self._sequences = dict.fromkeys(partitions, 0)

    def message(self, partition: int, kind: MessageKind, number: int, *, run: str, start: str) -> Message:
        """Return the next message for a partition, of this run and start."""
        sequence = self._sequences[partition]
        self._sequences[partition] = sequence + 1
        return Message(run, self.producer, kind, number, sequence, self.home, step=self.step, start=start)


@final
class OutgoingRecords:
    """Records of the topic that are written together."""

    def __init__(self) -> None:
        self._columns: dict[int, tuple[list[bytes | None], list[Headers]]] = {}
        self.size_bytes = 0

    def add(self, partition: int, value: bytes, headers: Headers) -> None:
        values, all_headers = self._columns.setdefault(partition, ([], []))
        values.append(value)
        all_headers.append(headers)
        self.size_bytes += len(value) + HEADER_BYTES_MAX

    def batches(self) -> list[OutgoingBatch]:
        return [
            OutgoingBatch(values, headers=headers, partition=partition)
            for partition, (values, headers) in self._columns.items()
        ]


@final
class OutgoingPump:
    """Writes the items of all paths to the topic; ``run`` is an asyncio task of its own.

    After each write it waits until the records are stored, so a failed write is reported even if no other follows.
    Meanwhile, new items wait in the queues of the paths, where small batches of one epoch are joined: the slower the
    topic is, the larger are its records.
    """

    def __init__(self, run_id: str, start: str, paths: Sequence[OutgoingPath], plain_data: PlainData) -> None:
        self._run_id = run_id
        self._start = start
        self._paths = paths
        self._plain_data = plain_data
        self._limit_bytes = 0
        self._writer: TopicWriter | None = None
        self._ready = ReadyPorts()
        """The queues of the paths that may have items. The index of a queue is the number of its path."""

    async def open(self, writer: TopicWriter, limit_bytes: int) -> None:
        """Write the start record of this run into every partition; later values have at most ``limit_bytes``."""
        self._writer = writer
        self._limit_bytes = limit_bytes
        starts = OutgoingRecords()
        for number, path in enumerate(self._paths):
            self._add_to_all(starts, path, START, 0)
            path.queue.index = number
            path.channel.attach(partial(self._ready.add, path.queue))
        await self._write(starts)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            while self._ready.queue:
                await self._write(self._take_items())
                await asyncio.sleep(0)  # A writer that never waits must let other tasks run.
            await self._ready.news()

    def _take_items(self) -> OutgoingRecords:
        """Take items from the paths in turns, up to the size of one write."""
        entries = OutgoingRecords()
        while self._ready.queue and entries.size_bytes < _WRITE_BYTES:
            queue = self._ready.queue.popleft()
            queue.is_queued = False
            if queue.peek() is not None:
                self._take_next(self._paths[queue.index], entries)
                self._ready.add(queue)
        return entries

    def _take_next(self, path: OutgoingPath, entries: OutgoingRecords) -> None:
        if isinstance(path.queue.peek(), DataBatch):
            batch = path.queue.take_batch()
            assert isinstance(batch, DataBatch)
            for value in encoded_pieces(batch.records, self._limit_bytes, self._plain_data):
                self._add(entries, path, path.home, DATA, batch.epoch, value)
            return
        control = path.queue.take()
        assert isinstance(control, Control)
        if not isinstance(control, (Idle, EndOfInput)):  # A head does not use them.
            self._add_to_all(entries, path, *kind_and_number(control))

    def _add_to_all(self, entries: OutgoingRecords, path: OutgoingPath, kind: MessageKind, number: int) -> None:
        for partition in path.partitions:
            self._add(entries, path, partition, kind, number)

    def _add(
        self,
        entries: OutgoingRecords,
        path: OutgoingPath,
        partition: int,
        kind: MessageKind,
        number: int,
        value: bytes = b"",
    ) -> None:
        message = path.message(partition, kind, number, run=self._run_id, start=self._start)
        entries.add(partition, value, message.headers())

    async def _write(self, entries: OutgoingRecords) -> None:
        assert self._writer is not None
        for batch in entries.batches():
            await self._writer.write(batch)
        await self._writer.flush()


MessageKind = Literal["data", "watermark", "end of data", "barrier", "suspend", "start"]

RUN_HEADER: Final = "feedback-run"
DATA: Final = DataBatch.kind
START: Final = "start"
SUSPEND: Final = "suspend"
_BARRIERS: Final = (CheckpointBarrier.kind, SUSPEND)
_KINDS: Final = (DATA, EpochWatermark.kind, EndOfData.kind, *_BARRIERS, START)

# The most bytes of the headers of one record of data, and of its framing in a topic: 6 names of 37 characters in
# all, a run id of 64, 4 numbers of 20, about 10 bytes for the lengths of each header, and Kafka's framing.
HEADER_BYTES_MAX: Final = 512


@final
@dataclass(frozen=True, slots=True)
class Message:
    """The headers of one record of a feedback topic: a batch, or a control record.

    ====================  ==================================================================================
    header                meaning
    ====================  ==================================================================================
    ``feedback-run``      the run of the job; records of other runs are skipped
    ``producer``          number of the subtask, among all that feed back to the heads
    ``kind``              ``data``, ``watermark``, ``end of data``, ``barrier``, ``suspend`` (a barrier at which
                          the job stops) or ``start``
    ``epoch``             of data: the epoch of its records, already increased by one; of a watermark and of the
                          end of data: the last complete epoch. A barrier has ``checkpoint`` instead
    ``sequence``          0, 1, 2, … for each producer in each partition
    ``home``              the partition with this producer's data for this head; of a control record, which is in
                          all partitions of a head, only the copy in this partition counts
    ``step``, ``start``   of a start: the step that feeds back, and the id of the start
    ====================  ==================================================================================

    The value of data is a batch as plain data; other kinds have an empty one.
    """

    run: str
    producer: int
    kind: MessageKind
    number: int
    """``epoch`` or ``checkpoint``."""
    sequence: int
    home: int
    step: str = ""
    start: str = ""

    @property
    def epoch(self) -> int | None:
        """The epoch; None for a barrier and a start."""
        return None if self.kind in (*_BARRIERS, START) else self.number

    def headers(self) -> Headers:
        """Return the headers of the record."""
        written = (
            (RUN_HEADER, self.run.encode()),
            ("producer", b"%d" % self.producer),
            ("kind", self.kind.encode()),
            ("checkpoint" if self.kind in _BARRIERS else "epoch", b"%d" % self.number),
            ("sequence", b"%d" % self.sequence),
            ("home", b"%d" % self.home),
        )
        if self.kind != START:
            return written
        return (*written, ("step", self.step.encode()), ("start", self.start.encode()))

    @classmethod
    def from_headers(cls, headers: Headers) -> Message:
        """Return the message of these headers. Raises ValueError for the headers of another record."""
        fields = {name: value or b"" for name, value in headers}
        try:
            kind = fields["kind"].decode()
            if kind not in _KINDS:
                raise ValueError(f"kind {kind!r}")
            return cls(
                run=fields[RUN_HEADER].decode(),
                producer=int(fields["producer"]),
                kind=kind,  # type: ignore[arg-type]
                number=int(fields["checkpoint" if kind in _BARRIERS else "epoch"]),
                sequence=int(fields["sequence"]),
                home=int(fields["home"]),
                step=fields.get("step", b"").decode(),
                start=fields.get("start", b"").decode(),
            )
        except KeyError as missing:
            raise ValueError(f"no header {missing}") from None


def kind_and_number(control: Control) -> tuple[MessageKind, int]:
    """Return the kind of a control record, and its number."""
    kind, number, *suspend = control_to_plain(control)
    return (SUSPEND if any(suspend) else kind), number


def control_from_kind(kind: MessageKind, number: int) -> Control:
    """Return the control record of a kind; the kind is neither data nor a start."""
    return control_from_plain((_BARRIERS[0], number, kind == SUSPEND) if kind in _BARRIERS else (kind, number))


def message_of(headers: Headers, topic: Topic, partition: int, offset: int) -> Message:
    """Return the message of a record in the topic. Raises TopicError for a record that is no feedback."""
    try:
        return Message.from_headers(headers)
    except ValueError as error:
        raise TopicError(
            f"{Origin(topic.url, partition, offset)}: expected only feedback of the loop, given another "
            f"record ({error}); give the loop a topic of its own"
        ) from None


def encoded_pieces(records: Batch, limit_bytes: int, plain_data: PlainData) -> Iterator[bytes]:
    """Give the encodings of consecutive pieces of a batch, each of at most ``limit_bytes``.

    Raises PlainDataError for a record that is not plain data, and RecordTooLarge for a record above the limit.

    >>> [len(piece) <= 400 for piece in encoded_pieces([b"x" * 100] * 10, 400, PlainData())]
    [True, True, True, True]
    """
    value = plain_data.encode_batch(records)
    if len(value) <= limit_bytes:
        yield value
        return
    count = len(records)
    if count == 1:
        raise RecordTooLarge(
            f"expected records of at most {limit_bytes} bytes, given one of {len(value)}: "
            f"{shortened(records[0])}; feed back smaller ones, or raise the topic's limit"
        )
    # Records differ in size, so pieces that are still too large are cut again.
    pieces = min(count, len(value) // limit_bytes + 1)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    for start, stop in pairwise(bounds):
        yield from encoded_pieces(slice_batch(records, start, stop), limit_bytes, plain_data)
