"""A topic as the first or the last step of a flow: the source, its decoder, and the sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from streamiter.errors import DecodeError, EncodeError, shortened
from streamiter.operators.functions import FunctionResultError, apply_to_each
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Origin, Output
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Batch, BatchOrigin, take
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.topics.topic import (
    Decoder,
    Encoder,
    OutgoingBatch,
    ReadRequest,
    SizeLimit,
    StartPosition,
    StopPosition,
    Topic,
    TopicBatch,
    TopicReader,
    TopicWriter,
)

_IDENTITIES: Final = "identities"
"""The key of the identities among the positions; the other keys are partitions."""


class TopicSource(Source):
    """Reads one subtask's share of a topic's partitions, as objects of :class:`TopicBatch`.

    Its positions are the offsets by partition and, under ``"identities"``, the identities of the partitions as far as
    they are known.
    """

    def __init__(self, topic: Topic, start: StartPosition = "earliest", stop: StopPosition = None) -> None:
        self._topic = topic
        self._url = topic.url
        self._start = start
        self._stop = stop
        self._reader: TopicReader | None = None
        self._told: Mapping[int, str] = {}
        """The identities that the positions of the last batch had."""

    async def open(self, context: Context, positions: Positions | None) -> None:
        restored = None if positions is None else positions.get(_IDENTITIES)
        self._reader = await self._topic.open_reader(
            ReadRequest(
                subtask=context.subtask_index,
                subtasks=context.parallelism,
                start=self._start,
                stop=self._stop,
                positions=None if positions is None else _offsets(positions),
                identities=restored,
                clock=context.clock,
            )
        )
        self._told = self.positions().get(_IDENTITIES, {}) if restored is None else restored

    async def read(self) -> SourceBatch | None:
        assert self._reader is not None
        batch = await self._reader.read()
        if batch is None:
            return None
        partition, following = batch.partition, batch.next_offset
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

    def positions(self) -> Positions:
        if self._reader is None:
            return {}
        return _positions_of(self._reader.positions(), self._reader.identities())

    def is_idle(self) -> bool:
        return self._reader is not None and not self._reader.positions()

    def lag(self) -> Mapping[int, int]:
        return {} if self._reader is None else self._reader.lag()

    async def report_positions(self, group: str, positions: Positions) -> None:
        await self._topic.report_positions(group, _offsets(positions))

    @staticmethod
    def redistribute(positions: Sequence[Positions], parallelism: int) -> list[Positions]:
        """Give partition p to subtask p mod n, with the position of the subtask that read it before."""
        read: dict[int, int] = {}
        identities: dict[int, str] = {}
        for of_subtask in positions:
            identities |= of_subtask.get(_IDENTITIES, {})
            for partition, offset in _offsets(of_subtask).items():
                read[partition] = max(offset, read.get(partition, offset))
        return [
            _positions_of(
                {number: read[number] for number in sorted(read) if number % parallelism == subtask},
                identities,
            )
            for subtask in range(parallelism)
        ]

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()


def _offsets(positions: Positions) -> dict[int, int]:
    return {partition: offset for partition, offset in positions.items() if partition != _IDENTITIES}


def _positions_of(offsets: Mapping[int, int], identities: Mapping[int, str]) -> Positions:
    known = _in_order({partition: identities[partition] for partition in offsets if partition in identities})
    return {**offsets, **({_IDENTITIES: known} if known else {})}


def _in_order(identities: Mapping[int, str]) -> dict[int, str]:
    """Return the identities in the order of the partitions, so that equal states are equal bytes."""
    return dict(sorted(identities.items()))


class DecodeValues(Operator):
    """Decodes the batches of a :class:`TopicSource`; a value that cannot be decoded follows the step's policy."""

    is_stateless = True

    def __init__(self, topic: Topic, decoder: Decoder) -> None:
        self._url = topic.url
        self._decoder = decoder

    def process_batch(self, batch: TopicBatch, out: Output) -> None:
        """Emit the records of the batch."""
        try:
            records = self._decoder.decode(batch)
        except DecodeError as error:
            self._refuse(batch, error, out)
            return
        out.emit_batch(records)

    def _refuse(self, batch: TopicBatch, error: DecodeError, out: Output) -> None:
        for index, reason in error.failures.items():
            origin = Origin(self._url, batch.partition, batch.offsets[index])
            value = batch.values[index]
            if not out.tolerates_rejections:
                out.fail(
                    DecodeError({index: f"{reason}; the value begins {(value or b'')[:80]!r}"}),
                    value,
                    origin=origin,
                )
            out.reject(value, reason, origin=origin, key=batch.keys[index])
        good = [index for index in range(len(batch)) if index not in error.failures]
        if good:
            self.process_batch(batch.take(good), out)


KeyFunction = Callable[[Any], bytes | str | None]

# The next write or flush raises the failure of a write in the background. If no further record arrives, a timer
# flushes so long after the last write. It is far below the deadlines of the connectors.
_FLUSH_AFTER_S: Final = 1.0


class TopicSink(Operator):
    """Encodes records and writes them to a topic: in the job's transaction if it has one for the topic, else at once.

    Records that are written at once are stored when the sink has handled a barrier or the end of its input.
    """

    def __init__(
        self, topic: Topic, encoder: Encoder, key: KeyFunction | None = None, *, at_least_once: bool = False
    ) -> None:
        self.topic = topic
        self.at_least_once = at_least_once
        self._encoder = encoder
        self._key_bytes = None if key is None else _bytes_of(key)
        self._writer: TopicWriter | None = None
        self._context: Context | None = None
        self._flush_is_due = False
        self._limit: SizeLimit | None = None
        self._limit_is_known = False

    @property
    def is_for_dead_letters(self) -> bool:
        """Whether the sink writes dead letters and no results."""
        return isinstance(self._encoder, DeadLetterEncoder)

    async def open(self, context: Context) -> None:
        self._context = context
        self._outputs = context.scope.get(Outputs, Outputs)
        self._writer = await self._outputs.open_writer(
            self.topic, at_least_once=self.at_least_once, step=context.name
        )
        if isinstance(self._encoder, DeadLetterEncoder):
            self._encoder.cut_to(await self.topic.size_limit(), self.topic.name)

    async def process_batch(self, batch: Batch, out: Output) -> None:
        """Write the records of the batch."""
        assert self._writer is not None
        assert self._context is not None
        if out.tolerates_rejections and not self._limit_is_known:
            self._limit, self._limit_is_known = await self.topic.size_limit(), True
        outgoing = self._encode(batch, out)
        if outgoing is None:
            return
        await self._writer.write(outgoing)
        if not self._flush_is_due:
            self._flush_is_due = True
            self._context.set_timer(_FLUSH_AFTER_S)

    async def on_timer(self, payload: object, out: Output) -> None:
        """Flush, so that a failure in the background is raised."""
        self._flush_is_due = False
        await self._flush()

    async def finish(self, out: Output) -> None:
        await self._flush()

    async def snapshot(self) -> Any:
        if self._writer is not None:
            await self._outputs.barrier_passed(self._writer)

    async def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.close()

    async def _flush(self) -> None:
        if self._writer is not None:
            await self._writer.flush()

    def _encode(self, batch: Batch, out: Output) -> OutgoingBatch | None:
        """Return the records to write; refuse records without a valid key, and records that cannot be encoded."""
        keys: list[bytes | None] | None = None
        if self._key_bytes is not None:
            batch, keys = apply_to_each(self._key_bytes, batch, out)
        while len(batch):
            try:
                outgoing = self._encoder.encode(batch)
                self._check_sizes(outgoing if keys is None else replace(outgoing, keys=keys))
            except EncodeError as error:
                for index, reason in error.failures.items():
                    out.reject(batch[index], reason, origin=out.batch_origin)
                good = [index for index in range(len(batch)) if index not in error.failures]
                batch = take(batch, good)
                keys = None if keys is None else [keys[index] for index in good]
            else:
                return outgoing if keys is None else replace(outgoing, keys=keys)
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


def _bytes_of(key: KeyFunction) -> Callable[[Any], bytes | None]:
    def key_bytes(record: Any) -> bytes | None:
        given = key(record)
        if isinstance(given, str):
            return given.encode()
        if given is None or type(given) is bytes:
            return given
        if isinstance(given, bytes):
            return bytes(given)  # a subclass, such as that of numpy: topics take plain bytes only
        raise FunctionResultError(
            f"key: expected the function to return bytes, str or None, given {shortened(given)} "
            f"({type(given).__name__}); return str(…) or its bytes"
        )

    return key_bytes


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
