"""Reading a topic into a flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from streamiter.errors import DecodeError
from streamiter.operators.operator import Context, Operator
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


_IDENTITIES: Final = "identities"
"""Among the positions, whose other keys are partitions: to which topic the offsets belong, by partition."""


class TopicSource(Source):
    """One subtask's share of a topic's partitions, as :class:`TopicBatch` es.

    Positions are the offsets by partition and, under ``"identities"``, the identities of the partitions as far as
    they are known.
    """

    def __init__(self, topic: Topic, start: StartPosition = "earliest", stop: StopPosition = None) -> None:
        self._topic = topic
        self._url = topic.url
        self._start = start
        self._stop = stop
        self._reader: TopicReader | None = None
        self._told: Mapping[int, str] = {}
        """The identities that the positions have."""

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
            found = self.positions().get(_IDENTITIES, {})  # a partition is new, or has its first record
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
        """Partition p belongs to subtask p mod n; it goes on from where whoever read it before has come to."""
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
    """The same state is the same bytes, whatever the order in which partitions had their turns."""
    return dict(sorted(identities.items()))


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
