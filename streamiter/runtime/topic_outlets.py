"""The outgoing side: from the subtasks that feed back into the topic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, Literal, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import InternalError, RecordTooLarge, TopicError, shortened
from streamiter.operators.output import Origin
from streamiter.records import (
    Batch,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EpochWatermark,
    Idle,
    slice_batch,
)
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.port import Port
from streamiter.topics.topic import Headers, OutgoingBatch, Topic, TopicWriter

__all__ = [
    "DATA",
    "HEADER_BYTES_MAX",
    "RUN_HEADER",
    "START",
    "FeedbackOutlet",
    "Message",
    "OutgoingPump",
    "control_of",
    "not_fed_back",
]


# Records of at most so many bytes, and one of them more, are written at once and held in memory until they are stored.
_WRITE_BYTES: Final = 1 << 20


@final
class FeedbackOutlet:
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

    def __init__(
        self, run_id: str, start: str, outlets: Sequence[FeedbackOutlet], plain_data: PlainData
    ) -> None:
        self._run_id = run_id
        self._start = start
        self._outlets = outlets
        self._plain_data = plain_data
        self._limit_bytes = 0
        self._writer: TopicWriter | None = None
        self._ready: deque[FeedbackOutlet] = deque()
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

    def _list(self, outlet: FeedbackOutlet) -> None:
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

    def _take_next(self, outlet: FeedbackOutlet, entries: Entries) -> None:
        if isinstance(outlet.queue.peek(), DataBatch):
            batch = outlet.queue.take_data()
            for value in encoded_pieces(batch.records, self._limit_bytes, self._plain_data):
                self._add(entries, outlet, outlet.home, DATA, batch.epoch, value)
            return
        control = outlet.queue.take()
        assert isinstance(control, Control)
        if not isinstance(control, Idle):  # A head does not ask who is idle.
            self._add_to_all(entries, outlet, *message_of(control))

    def _add_to_all(self, entries: Entries, outlet: FeedbackOutlet, kind: Kind, number: int) -> None:
        for partition in outlet.partitions:
            self._add(entries, outlet, partition, kind, number)

    def _add(
        self,
        entries: Entries,
        outlet: FeedbackOutlet,
        partition: int,
        kind: Kind,
        number: int,
        value: bytes = b"",
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


Kind = Literal["data", "watermark", "end of data", "barrier", "suspend", "start"]

RUN_HEADER: Final = "feedback-run"
DATA: Final = DataBatch.kind
START: Final = "start"
SUSPEND: Final = "suspend"
_BARRIERS: Final = (CheckpointBarrier.kind, SUSPEND)
_KINDS: Final = (DATA, EpochWatermark.kind, EndOfData.kind, *_BARRIERS, START)

# All headers of one record of data, with what topics add around it: 6 names of 37 characters in all, a run id
# of 64, 4 numbers of 20, lengths of some 10 for each header, and Kafka's framing of a batch with one record.
HEADER_BYTES_MAX: Final = 512


@final
@dataclass(frozen=True, slots=True)
class Message:
    """The headers of one record of a feedback topic.

    What a loop writes into its topic: one record for a batch or a control record, told apart by headers.

    ====================  ==================================================================================
    header                meaning
    ====================  ==================================================================================
    ``feedback-run``      the run of the job; records of other runs are skipped
    ``producer``          number of the subtask that feeds back, counted over all workers
    ``kind``              ``data``, ``watermark``, ``end of data``, ``barrier``, ``suspend`` (a barrier at which
                          the job stops) or ``start``
    ``epoch``             of data: that of its records, already grown by one; of a watermark and of the end
                          of data: the last complete one. A barrier has ``checkpoint`` instead
    ``sequence``          0, 1, 2, … for each producer in each partition
    ``home``              the partition with this producer's data for this head; of the copies of a control
                          record in all partitions of a head, the one there counts
    ``step``, ``start``   of a start: the step that feeds back, and what tells one start from another
    ====================  ==================================================================================

    The value of data is a batch as plain data; other kinds have an empty one.
    """

    run: str
    producer: int
    kind: Kind
    number: int
    """The epoch, or the number of the checkpoint."""
    sequence: int
    home: int
    step: str = ""
    start: str = ""

    @property
    def epoch(self) -> int | None:
        """None for a barrier and a start."""
        return None if self.kind in (*_BARRIERS, START) else self.number

    def headers(self) -> Headers:
        """As they are written."""
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
    def of(cls, headers: Headers) -> Message:
        """What headers say; ValueError for those of other records."""
        fields = dict(headers)
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


def message_of(control: Control) -> tuple[Kind, int]:
    """The kind of a control record, and its number."""
    if isinstance(control, EpochWatermark):
        return control.kind, control.epoch
    if isinstance(control, EndOfData):
        return control.kind, control.epoch
    if isinstance(control, CheckpointBarrier):
        return SUSPEND if control.suspend else control.kind, control.checkpoint
    raise InternalError(f"{control!r} has no form in a topic")


def control_of(kind: Kind, number: int) -> Control:
    """The control record of a kind that is neither data nor a start."""
    if kind == EpochWatermark.kind:
        return EpochWatermark(number)
    if kind == EndOfData.kind:
        return EndOfData(number)
    return CheckpointBarrier(number, suspend=kind == SUSPEND)


def not_fed_back(topic: Topic, partition: int, offset: int, error: ValueError) -> TopicError:
    """The error for a record whose headers are not those of feedback."""
    return TopicError(
        f"{Origin(topic.url, partition, offset)}: expected only what the loop feeds back, given another "
        f"record ({error}); give the loop a topic of its own"
    )


def encoded_pieces(records: Batch, limit_bytes: int, plain_data: PlainData) -> Iterator[bytes]:
    """The encodings of consecutive pieces of a batch, each of at most ``limit_bytes``.

    Raises PlainDataError for what is not plain data, RecordTooLarge for a record that does not fit by itself.

    >>> [len(piece) <= 400 for piece in encoded_pieces([b"x" * 100] * 10, 400, PlainData())]
    [True, True, True, True]

    Batches as values of a topic, none above what it takes.
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
    # Records differ in size: pieces that still are too large are cut again.
    pieces = min(count, len(value) // limit_bytes + 1)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    for start, stop in pairwise(bounds):
        yield from encoded_pieces(slice_batch(records, start, stop), limit_bytes, plain_data)
