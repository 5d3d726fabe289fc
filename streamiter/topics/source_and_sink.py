"""A topic as the first or the last step of a flow: the source, its decoder, and the sink."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

from streamiter.errors import DecodeError, EncodeError
from streamiter.operators.declared_state import by_partition
from streamiter.operators.event_time import PartState
from streamiter.operators.operator import Context, EngineOperator, Operator
from streamiter.operators.output import DeadLetter, Origin, Output, emit_read, keep_rows, origin_at, reject_letter
from streamiter.operators.source import Positions, SourceBatch, TellsEnd
from streamiter.topics.compacted import committed_positions
from streamiter.topics.connecting import ReaderBehindLosses
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.topics.record_functions import RecordFunctions
from streamiter.topics.topic import (
    Decoder,
    Encoder,
    GroupPositions,
    OutgoingBatch,
    ReadRequest,
    SizeLimit,
    SourceStart,
    StartPosition,
    StopPosition,
    Topic,
    TopicBatch,
    TopicReader,
    TopicWriter,
)
from streamiter.values.helpers.clock import Clock
from streamiter.values.origins import BatchOrigin, Originals
from streamiter.values.records import Batch, take

_log = logging.getLogger("streamiter.job")

T = TypeVar("T")

_IDENTITIES: Final = "identities"
_FIRST: Final = "first"
"""The keys of the identities, and of first offsets that are not 0, among the positions; other keys are partitions."""


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """The group for which a job commits the positions of its sources; the job puts it into its scope."""

    name: str = ""
    """The name of the group."""
    ignores_positions: Callable[[str], bool] = lambda step: True
    """Whether the source of this step begins as in its first run, and ignores the positions of the group."""


class TopicSource(TellsEnd):
    """Reads one subtask's share of a topic's partitions, as objects of :class:`TopicBatch`.

    Its positions are the offsets by partition; under ``"identities"``, the identities of the partitions as far as they
    are known; and if it ends, under ``"first"``, the offsets at which the first run began, except 0.
    """

    def __init__(
        self,
        topic: Topic,
        start: SourceStart | None = None,
        stop: StopPosition = None,
        decoder: Decoder | None = None,
        *,
        first_start: StartPosition = "earliest",
        on_lost: Literal["fail", "skip"] = "fail",
    ) -> None:
        """``start``: None is the default, the earliest record; "committed" uses ``first_start`` in the first run."""
        self._open_reader = topic.open_reader if on_lost == "fail" else partial(ReaderBehindLosses.open, topic)
        self.topic = topic
        self.start = start
        self.stop = stop
        self._ahead: Callable[[TopicBatch], Callable[[], object] | None] | None = getattr(decoder, "ahead", None)
        self._before_decoding: Callable[[TopicBatch, Clock], Awaitable[None]] | None = getattr(
            decoder, "before_decoding", None
        )
        self._clock: Clock | None = None
        self._url = topic.url
        self.topic_name = topic.name
        self.brings_events = getattr(decoder, "brings_events", True)
        self._timestamps_ms: dict[int, int] = {}
        self._returned: dict[int, int] = {}
        """For each partition the offset after the last record that the reader has returned."""
        self._first_start = first_start
        self._request = ReadRequest()
        self._reader: TopicReader | None = None
        self._pending: TopicBatch | None = None
        """A batch whose decoding was interrupted; the next read begins with it."""
        self._told: Mapping[int, str] = {}
        """The identities that the positions of the last batch had."""
        self._ends = stop is not None or bool(getattr(topic, "bounded", False))
        self._first: Mapping[int, int] = {}

    async def open(self, context: Context, positions: Positions | None) -> None:
        if positions is None and self.start == "committed":
            positions = await self._committed(context)
        restored = None if positions is None else positions.get(_IDENTITIES)
        self._clock = context.clock
        self._request = ReadRequest(
            subtask=context.subtask_index,
            subtasks=context.parallelism,
            start=self._first_start if self.start is None or self.start == "committed" else self.start,
            stop="latest" if self.tells_end else self.stop,
            positions=None if positions is None else _offsets(positions),
            identities=restored,
            clock=context.clock,
        )
        self._reader = await self._open_reader(self._request)
        self._told = self.positions().get(_IDENTITIES, {}) if restored is None else restored
        if positions is None and isinstance(self.start, Mapping):
            self._warn_of_others(context.name, [each for each in self._reader.positions() if each not in self.start])
        if self._ends:
            begin = self._reader.positions() if positions is None else positions.get(_FIRST, {})
            self._first = {partition: offset for partition, offset in begin.items() if offset}

    def _warn_of_others(self, step: str, partitions: Sequence[int]) -> None:
        if partitions:
            _log.warning(
                "step %r: start= names no offset for the partitions %s of topic %s, which are read from their earliest "
                "record",
                step,
                ", ".join(map(str, partitions)),
                self._url,
            )

    async def _committed(self, context: Context) -> Positions | None:
        group = context.scope.get(ConsumerGroup, ConsumerGroup)
        found = await committed_positions(self.topic, group.name, clock=context.clock)
        if group.ignores_positions(context.name):
            return None
        if found is not None:
            return _positions_of(found.offsets, found.identities)
        if context.subtask_index == 0:
            _log.info(
                "step %r: group %r has no positions in topic %s, so the source begins at first_start=%r",
                context.name,
                group.name,
                self._url,
                self._first_start,
            )
        return None

    async def read(self) -> SourceBatch | None:
        assert self._reader is not None
        batch = await self._reader.read() if self._pending is None else self._pending
        if batch is None:
            return None
        self._returned[batch.partition] = batch.next_offset
        if self._before_decoding is not None:
            assert self._clock is not None
            self._pending = batch
            await self._before_decoding(batch, self._clock)
        if self._ahead is not None and (work := self._ahead(batch)) is not None:
            self._pending = batch
            await asyncio.to_thread(work)
        self._pending = None
        partition, following = batch.partition, batch.next_offset
        self._timestamps_ms[partition] = batch.last_timestamp_ms
        changed: Positions = {}
        if self._reader.identities().get(partition) != self._told.get(partition):
            found = self.positions().get(_IDENTITIES, {})  # the partition is new, or has its first record
            changed[_IDENTITIES] = self._told = _in_order({**self._told, **found})
        return SourceBatch(
            batch,
            {partition: following, **changed},
            BatchOrigin(self._url, partition, batch.first_offset, following - 1),
            positions_after=lambda records: {partition: batch.offsets[records - 1] + 1, **changed},
        )

    async def read_on(self) -> bool:
        await self._read_up_to(self.stop)
        return not any(self.lag().values())

    async def find_end(self) -> None:
        await self._read_up_to("latest")

    async def _read_up_to(self, stop: StopPosition) -> None:
        # A new reader, since each connector knows how to stop at an end behind which offsets may have no records.
        assert self._reader is not None
        before = self._reader
        self._reader = await self._open_reader(
            replace(self._request, stop=stop, positions=before.positions(), identities=before.identities())
        )
        await before.close()

    def positions(self) -> Positions:
        if self._reader is None:
            return {}
        return _positions_of(self._reader.positions(), self._reader.identities(), self._first)

    def settled(self, positions: Positions) -> Positions:
        """Skip offsets without records, such as the end of a transaction, where all returned records are handled."""
        following = {} if self._reader is None else self._reader.positions()
        return {
            part: following[part] if part in following and self._returned.get(part, position) == position else position
            for part, position in positions.items()
        }

    def is_idle(self) -> bool:
        return self._reader is not None and not self._reader.positions()

    def lag(self) -> Mapping[int, int]:
        return {} if self._reader is None else self._reader.lag()

    def read_records(self) -> int | None:
        if not self._ends or self._reader is None:
            return None
        return sum(offset - self._first.get(part, 0) for part, offset in self._reader.positions().items())

    def timestamps_ms(self) -> Mapping[int, int]:
        return self._timestamps_ms

    def parts(self, handled: Positions) -> Mapping[int | None, PartState]:
        if self._reader is None:
            return {}
        lag, parts = self._reader.lag(), dict[int | None, PartState]()
        for partition, position in self._reader.positions().items():
            waits = partition in self._returned and self._returned[partition] != handled.get(partition)
            if waits or lag.get(partition, 1):
                parts[partition] = PartState.READING
            else:
                stops = self.stop.get(partition, 0) if isinstance(self.stop, Mapping) else position
                ended = self.stop is not None and position >= stops
                parts[partition] = PartState.ENDED if ended else PartState.AT_END
        return parts

    def unanswered_since_s(self) -> float | None:
        return None if self._reader is None else self._reader.unanswered_since_s()

    async def report_positions(self, group: str, positions: Positions) -> None:
        await self.topic.report_positions(group, _offsets(positions))

    @classmethod
    def group_positions(cls, positions: Sequence[Positions], run: str) -> GroupPositions:
        """Merge the positions of all subtasks into the positions that a run commits for its consumer group."""
        [merged] = cls.redistribute(positions, 1)
        return GroupPositions(_offsets(merged), run, merged.get(_IDENTITIES, {}))

    @staticmethod
    def redistribute(positions: Sequence[Positions], parallelism: int) -> list[Positions]:
        """Give partition p to subtask p mod n, with the position of the subtask that read it before."""
        identities: dict[int, str] = {}
        first: dict[int, int] = {}
        for of_subtask in positions:
            identities |= of_subtask.get(_IDENTITIES, {})
            first |= of_subtask.get(_FIRST, {})
        shares = by_partition(max)("offsets", list(map(_offsets, positions)), parallelism)
        return [_positions_of(_in_order(offsets), identities, first) for offsets in shares]

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()


def _offsets(positions: Positions) -> dict[int, int]:
    return {partition: offset for partition, offset in positions.items() if isinstance(partition, int)}


def _positions_of(
    offsets: Mapping[int, int], identities: Mapping[int, str], first: Mapping[int, int] = MappingProxyType({})
) -> Positions:
    known: Positions = {**offsets}
    for key, by_number in ((_IDENTITIES, identities), (_FIRST, first)):
        if of_these := _in_order({number: by_number[number] for number in offsets if number in by_number}):
            known[key] = of_these
    return known


def _in_order(by_number: Mapping[int, T]) -> dict[int, T]:
    """Return a dict in the order of the partitions, so that equal states are equal bytes."""
    return dict(sorted(by_number.items()))


class DecodeValues(EngineOperator):
    """Decodes the batches of a :class:`TopicSource`; a value that cannot be decoded follows the step's policy."""

    is_stateless = True

    def __init__(self, topic: Topic, decoder: Decoder) -> None:
        self._url = topic.url
        self._decoder = decoder
        self._parts: Callable[[TopicBatch], Iterable[TopicBatch]] | None = getattr(decoder, "parts", None)
        self.decoded: TopicBatch | None = None
        """The records that are emitted now, as they came from the topic."""

    def process_batch(self, batch: TopicBatch, out: Output) -> None:
        for part in [batch] if self._parts is None else self._parts(batch):
            self._emit(part, out)

    def _emit(self, batch: TopicBatch, out: Output) -> None:
        try:
            records = self._decoder.decode(batch)
        except DecodeError as error:
            self._refuse(batch, error, out)
            return
        self.decoded = batch
        emit_read(out, records, self._url, batch)

    def _refuse(self, batch: TopicBatch, error: DecodeError, out: Output) -> None:
        read = Originals.read(self._url, batch, len(batch))
        for index, reason in error.failures.items():
            value = batch.values[index]
            if not out.tolerates_rejections:
                origin = Origin(self._url, batch.partition, batch.offsets[index])
                out.fail(
                    DecodeError({index: f"{reason}; the value begins {(value or b'')[:80]!r}"}), value, origin=origin
                )
            original = read.taken(range(index, index + 1))
            out.reject(value, reason, origin=BatchOrigin(self._url, originals=original))
        good = [index for index in range(len(batch)) if index not in error.failures]
        if good:
            self._emit(batch.take(good), out)


# The next write or flush raises the failure of a write in the background. If no further record arrives, a timer
# flushes this long after the last write. It is far below the deadlines of the connectors.
_FLUSH_AFTER_S: Final = 1.0

# A server that works stores what a writer holds within a second.
_CLOSE_UNFLUSHED_S: Final = 5.0


class TopicSink(Operator):
    """Encodes records and writes them to a topic: in the job's transaction if it has one for the topic, else at once.

    Records that are written at once are stored when the sink has handled a barrier or the end of its input.
    """

    def __init__(
        self, topic: Topic, encoder: Encoder, functions: RecordFunctions | None = None, *, at_least_once: bool = False
    ) -> None:
        self.topic = topic
        self.at_least_once = at_least_once
        self._encoder = encoder
        self._functions = functions or RecordFunctions()
        self._writer: TopicWriter | None = None
        self._context: Context | None = None
        self._flush_is_due = False
        self._is_flushed = False
        """Whether all records of the input are stored."""
        self._limit: SizeLimit | None = None
        self._limit_is_known = False

    @property
    def is_transactional(self) -> bool:
        """Whether the sink can write in the job's transaction."""
        return self.topic.has_transactions and not self.at_least_once

    @property
    def is_for_dead_letters(self) -> bool:
        """Whether the sink writes dead letters and no results."""
        return isinstance(self._encoder, DeadLetterEncoder)

    @property
    def takes_encoded(self) -> bool:
        """Whether another process can encode the records: the encoder needs nothing that only the open sink knows."""
        return type(self) is TopicSink and not self.is_for_dead_letters and not hasattr(self._encoder, "encoder_for")

    async def open(self, context: Context) -> None:
        self._context = context
        self._outputs = context.scope.get(Outputs, Outputs)
        self._writer = await self._outputs.open_writer(self.topic, at_least_once=self.at_least_once, step=context.name)
        if (encoder_for := getattr(self._encoder, "encoder_for", None)) is not None:
            self._encoder = await encoder_for(self.topic.name, context.clock)
        if isinstance(self._encoder, DeadLetterEncoder):
            self._encoder.clock = context.clock
            self._encoder.cut_to(await self.topic.size_limit(), self.topic.name)

    async def process_batch(self, batch: Batch, out: Output) -> None:
        assert self._writer is not None
        assert self._context is not None
        outgoing = await self._outgoing(batch, out)
        if outgoing is None:
            return
        await self._writer.write(outgoing)
        if not self._flush_is_due:
            self._flush_is_due = True
            self._context.set_timer(_FLUSH_AFTER_S)

    async def _outgoing(self, batch: Any, out: Output) -> OutgoingBatch | None:
        if isinstance(batch, OutgoingBatch):  # Another process has encoded the records.
            return batch
        if type(batch) is list and batch and type(batch[0]) is DeadLetter and batch[0].step == out.step:
            for letter in batch:  # Another process could not encode the records.
                reject_letter(out, letter)
            return None
        await self.ask_for_limit(out)
        return self._encode(batch, out)

    async def ask_for_limit(self, out: Output) -> None:
        """Find out which records are too large, if the step refuses them and continues."""
        if out.tolerates_rejections and not self._limit_is_known:
            self._limit, self._limit_is_known = await self.topic.size_limit(), True

    def encode(self, batch: Batch, out: Output) -> None:
        """Emit the records as the sink in another process writes them, and refuse those that cannot be encoded."""
        outgoing = self._encode(batch, out)
        if outgoing is not None:
            out.emit_batch(outgoing)  # type: ignore[arg-type]  # The batch of a sink is never read record by record.

    async def on_timer(self, payload: object, out: Output) -> None:
        """Raise a failure in the background."""
        self._flush_is_due = False
        if self._writer is not None:
            await self._writer.check()

    async def finish(self, out: Output) -> None:
        await self._flush()
        self._is_flushed = True

    def unanswered_since_s(self) -> float | None:
        """Return since when a server owes an answer, by the clock's seconds; None if none is owed."""
        return None if self._writer is None else self._writer.unanswered_since_s()

    async def snapshot(self) -> Any:
        if self._writer is not None:
            await self._outputs.barrier_passed(self._writer)

    async def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            if self._is_flushed:
                await writer.close()
                return
            # The job has failed or is aborted: nobody counts on records that were not flushed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_UNFLUSHED_S):
                    await writer.close()

    async def _flush(self) -> None:
        if self._writer is not None:
            await self._writer.flush()

    def _encode(self, batch: Batch, out: Output) -> OutgoingBatch | None:
        """Return the records to write; refuse a record that a function refuses, or that cannot be encoded."""
        batch, columns = self._functions.apply(batch, out)
        while len(batch):
            try:
                outgoing = columns.encode(batch, self._encoder, with_tombstones=self.topic.has_tombstones)
                self._check_sizes(outgoing)
            except EncodeError as error:
                for index, reason in error.failures.items():
                    out.reject(batch[index], reason, origin=origin_at(out, index))
                good = [index for index in range(len(batch)) if index not in error.failures]
                keep_rows(out, good)
                batch, columns = take(batch, good), columns.take(good)
            else:
                return outgoing
        return None

    def _check_sizes(self, outgoing: OutgoingBatch) -> None:
        """Raise ``EncodeError`` for records that are too large. Without a limit, the topic's own error ends the job."""
        if self._limit is not None and (too_large := self._limit.exceeded_by(outgoing)):
            limit_bytes = self._limit.size_bytes
            raise EncodeError(
                {
                    index: f"it takes {size_bytes} bytes in topic {self.topic.name!r}, which takes {limit_bytes}"
                    for index, size_bytes in too_large.items()
                }
            )


class Outputs:
    """Opens the writers of all sinks of a job. These writers write at once, so records are stored at least once.

    A job that writes in transactions puts a subclass into its scope.
    """

    async def open_writer(self, topic: Topic, *, at_least_once: bool, step: str) -> TopicWriter:
        """Return a writer for one subtask of the sink ``step``; with ``at_least_once`` one that writes at once."""
        return await topic.open_writer()

    async def barrier_passed(self, writer: TopicWriter) -> None:
        """Make all records that were written before belong to the checkpoint whose barrier the sink has handled."""
        await writer.flush()

    def unanswered_since_s(self) -> float | None:
        """Return since when the server of the job's transaction owes an answer; None if none is owed."""
        return None
