"""Reading a topic into a flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamiter.errors import DecodeError
from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import Origin
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import BatchOrigin
from streamiter.topics.topic import (
    Decoder,
    ReadRequest,
    StartPosition,
    StopPosition,
    Topic,
    TopicBatch,
    TopicReader,
)

__all__ = ["DecodeValues", "TopicSource"]


class TopicSource(Source):
    """One subtask's share of a topic's partitions, as :class:`TopicBatch` es; positions are offsets."""

    def __init__(self, topic: Topic, start: StartPosition = "earliest", stop: StopPosition = None) -> None:
        self._topic = topic
        self._url = topic.url
        self._start = start
        self._stop = stop
        self._reader: TopicReader | None = None

    async def open(self, context: Context, positions: Positions | None) -> None:
        self._reader = await self._topic.open_reader(
            ReadRequest(
                subtask=context.subtask_index,
                subtasks=context.parallelism,
                start=self._start,
                stop=self._stop,
                positions=positions,
                clock=context.clock,
            )
        )

    async def read(self) -> SourceBatch | None:
        assert self._reader is not None
        batch = await self._reader.read()
        if batch is None:
            return None
        partition, following = batch.partition, batch.next_offset
        return SourceBatch(
            batch,
            {partition: following},
            BatchOrigin(self._url, partition, batch.first_offset, following - 1),
            positions_after=lambda records: {partition: batch.offsets[records - 1] + 1},
        )

    def positions(self) -> Positions:
        return {} if self._reader is None else dict(self._reader.positions())

    def is_idle(self) -> bool:
        return self._reader is not None and not self._reader.positions()

    def lag(self) -> Mapping[int, int]:
        return {} if self._reader is None else self._reader.lag()

    async def report_positions(self, group: str, positions: Positions) -> None:
        await self._topic.report_positions(group, positions)

    @staticmethod
    def redistribute(positions: Sequence[Positions], parallelism: int) -> list[Positions]:
        """Partition p belongs to subtask p mod n; it goes on from where whoever read it before has come to."""
        read: Positions = {}
        for of_subtask in positions:
            for partition, offset in of_subtask.items():
                read[partition] = max(offset, read.get(partition, offset))
        return [
            {
                partition: offset
                for partition, offset in sorted(read.items())
                if partition % parallelism == subtask
            }
            for subtask in range(parallelism)
        ]

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()


class DecodeValues(Operator):
    """Decodes what a :class:`TopicSource` reads; values that cannot be decoded follow the step's policy."""

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
