"""Reading a topic: one fetch at a time from each broker.

`KafkaReader` fetches ahead of its caller by a bounded amount. A `ReadPartition` holds the record batches of one
partition that were fetched and not yet returned; it does no I/O. Plain records become columns at once
(:mod:`streamiter_kafka.record_columns`). A `KafkaBatch` shows all other records as columns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from streamiter.compiled import is_loaded, saying_that_it_compiles
from streamiter.errors import ConfigurationError, InternalError, OffsetOutOfRange, StreamiterError, TopicError
from streamiter.topics.connecting import (
    PartitionEnds,
    check_identities,
    check_named_partitions,
    check_request,
    closed_error,
    first_position,
    out_of_range_message,
    partitions_of,
    recreated_message,
    stop_offsets,
    timestamp_of,
)
from streamiter.topics.topic import Headers, ReadRequest, TopicBatch, TopicReader
from streamiter_kafka.cluster import (
    NO_LEADER,
    READ_COMMITTED,
    BrokerConnections,
    ConnectionPurpose,
    OffsetFinder,
    comparable,
)
from streamiter_kafka.trouble import BrokerTrouble, Code, check, passing, persist
from streamiter_kafka.wire import (
    ABORT_MARKER,
    ControlRecord,
    FetchTopicRequest,
    KafkaRecord,
    MemoryRecords,
    Response,
    UnsupportedCodecError,
    WireBatch,
    batch_bytes,
    fetched_partitions,
)

if TYPE_CHECKING:
    from streamiter_kafka.record_columns import LocatedRecords

# A broker waits so long for records before it answers that it has none. It answers at once when a record arrives, so
# the wait delays no record. Each answer also proves that the broker works.
_MAX_WAIT_MS: Final = 500

_MIN_BYTES: Final = 1

# The records of smaller answers are parsed one by one, and several answers are joined to one batch. An answer with so
# many records is a batch of its own; a flow's costs for a batch are then small for each record.
_LOCATED_FROM: Final = 1_000

# The limit for one partition in one answer. Small parts of more partitions let the partitions take turns.
_PARTITION_BYTES: Final = 1_000_000


async def open_reader(cluster: BrokerConnections, topic: str, request: ReadRequest) -> KafkaReader:
    """Return a reader at its start position, which owns ``cluster`` and closes it."""
    subject = f"topic {topic!r} at {cluster.address}"
    check_request(request, topic)
    leaders = await cluster.require(topic)
    check_named_partitions(request, len(leaders), topic=topic)
    finder = OffsetFinder(cluster, topic, subject)
    share = partitions_of(request, len(leaders))
    identities = await cluster.persist(lambda: finder.identities(share))
    partitions = await cluster.persist(
        lambda: _first_partitions(finder, topic, subject, request, share, identities)
    )
    reader = KafkaReader(cluster, topic, subject, request, finder, identities)
    reader.start(partitions, len(leaders))
    return reader


async def _first_partitions(
    finder: OffsetFinder,
    topic: str,
    subject: str,
    request: ReadRequest,
    share: range,
    identities: Mapping[int, str],
) -> list[ReadPartition]:
    ends = await finder.ends(share)
    check_identities(request, comparable(request.identities or {}, identities), ends, topic=topic)
    by_time: Mapping[int, int] = {}
    if isinstance(request.start, datetime) and request.positions is None:
        by_time = await finder.at_time(share, timestamp_of(request.start))
    stops = stop_offsets(request, {number: ends[number].stable for number in share})
    partitions = []
    for number in share:
        at_time = by_time.get(number, ends[number].stable)
        offset = first_position(request, number, ends[number], partial(_already_found, at_time), topic=topic)
        stop = None if stops is None else stops.get(number, offset)
        partition = ReadPartition(number, subject, offset, stop)
        partition.stable_offset = ends[number].stable
        partitions.append(partition)
    return partitions


def _already_found(offset: int, _timestamp_ms: int) -> int:
    return offset


class KafkaReader(TopicReader):
    """Reads its share of a topic's partitions.

    One task for each leading broker fetches, and one task looks for new partitions. The failure of a task is raised by
    ``read`` after all fetched records have been returned.
    """

    def __init__(
        self,
        cluster: BrokerConnections,
        topic: str,
        subject: str,
        request: ReadRequest,
        finder: OffsetFinder,
        identities: Mapping[int, str],
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._subject = subject
        self._request = request
        self._finder = finder
        self._topic_id = cluster.topic_id(topic)
        self._identities = identities
        self._patience = cluster.patience(subject)
        # In the order of their turns: a partition whose records were returned goes behind the others.
        self._partitions: dict[int, ReadPartition] = {}
        self._partition_count = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._failure: StreamiterError | None = None
        self._is_closed = False

    def start(self, partitions: list[ReadPartition], partition_count: int) -> None:
        self._partitions = {partition.number: partition for partition in partitions}
        self._partition_count = partition_count
        if self._request.stop is None:
            self._run("refresh", self._look_for_partitions)
        self._fetch_from_leaders()

    async def read(self) -> TopicBatch | None:
        # Gives a turn to the tasks that fetch, which would never run if the caller always finds records.
        await asyncio.sleep(0)
        while True:
            if self._is_closed:
                raise closed_error("reader", self._topic)
            batch = self._next_batch()
            if batch is not None:
                return batch
            if self._failure is not None:
                raise self._failure
            if self._is_finished():
                return None
            self._arrived.clear()
            await self._arrived.wait()

    def positions(self) -> Mapping[int, int]:
        return {number: self._partitions[number].position for number in sorted(self._partitions)}

    def identities(self) -> Mapping[int, str]:
        return self._identities

    def lag(self) -> Mapping[int, int]:
        return {number: self._partitions[number].lag for number in sorted(self._partitions)}

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._arrived.set()
        for task in self._tasks.values():
            task.cancel()
        async with self._cluster:  # closed even where this wait is cancelled, as by a job that is aborted
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # -- Returning

    def _next_batch(self) -> TopicBatch | None:
        for number, partition in list(self._partitions.items()):
            if partition.has_records:
                batch = partition.take(self._request.max_records)
                self._taken.set()
                if batch is not None:
                    self._partitions[number] = self._partitions.pop(number)
                    return batch
        return None

    def _is_finished(self) -> bool:
        return self._request.stop is not None and all(each.is_finished for each in self._partitions.values())

    # -- Fetching

    def _fetch_from_leaders(self) -> None:
        """Start a task for each broker that leads a partition and has no task yet."""
        for node in sorted({self._leader(partition) for partition in self._partitions.values()}):
            name = f"fetch from broker {node}"
            if name not in self._tasks or self._tasks[name].done():
                self._run(name, partial(self._fetch_while_leading, node))

    def _leader(self, partition: ReadPartition) -> int:
        return self._cluster.leaders(self._topic).get(partition.number, NO_LEADER)

    async def _fetch_while_leading(self, node: int) -> None:
        while led := [each for each in self._partitions.values() if self._leader(each) == node]:
            wanted = _worth_fetching(led, self._cluster.options.fetch_max_bytes)
            if not wanted:
                self._taken.clear()
                await self._taken.wait()
                continue
            begun_s = self._patience.now_s()
            offsets = {each.number: each.fetch_offset for each in wanted}
            try:
                ailing = await self._take_in(await self._fetch(node, offsets), offsets)
            except BrokerTrouble as trouble:
                ailing = dict.fromkeys((each.number for each in wanted), trouble)
            self._patience.succeeded(each.number for each in wanted if each.number not in ailing)
            self._arrived.set()
            if ailing:
                await self._recover(ailing, begun_s)

    async def _fetch(self, node: int, offsets: Mapping[int, int]) -> Response:
        asked = [(number, offset, _PARTITION_BYTES) for number, offset in offsets.items()]
        request = FetchTopicRequest(
            self._topic,
            self._topic_id,
            asked,
            max_wait_ms=_MAX_WAIT_MS,
            min_bytes=_MIN_BYTES,
            max_bytes=self._cluster.options.fetch_max_bytes,
            isolation_level=READ_COMMITTED,
        )
        return await self._cluster.request(
            node, request, lane=ConnectionPurpose.FETCH, wait_s=_MAX_WAIT_MS / 1000
        )

    async def _take_in(self, response: Response, offsets: Mapping[int, int]) -> dict[int, BrokerTrouble]:
        """Add the fetched records to their partitions; return the trouble of each partition that has some."""
        # Old versions of the answer have no error code for the whole request.
        check(getattr(response, "error_code", Code.NONE), self._subject)
        ailing = {}
        for answer in fetched_partitions(response):
            partition = self._partitions[answer.number]
            if answer.code == Code.OFFSET_OUT_OF_RANGE:
                raise await self._out_of_range(partition)
            trouble = passing(answer.code, f"{self._subject}, partition {answer.number}")
            if trouble is not None:
                ailing[answer.number] = trouble
            else:
                asked_offset = offsets[answer.number]
                partition.add(asked_offset, answer.records, answer.aborted, answer.stable_offset)
        return ailing

    async def _out_of_range(self, partition: ReadPartition) -> OffsetOutOfRange:
        await self._refresh()
        ends = (await self._finder.ends([partition.number]))[partition.number]
        message = out_of_range_message(self._topic, partition.number, partition.fetch_offset, ends)
        return OffsetOutOfRange(message)

    async def _recover(self, ailing: Mapping[int, BrokerTrouble], begun_s: float) -> None:
        """Ask which broker leads now and whether the topic still exists, then wait a moment."""
        trouble = next(iter(ailing.values()))
        try:
            await self._refresh()
        except BrokerTrouble as worse:
            trouble = worse
        await self._patience.failed(trouble, ailing, begun_s=begun_s)
        self._fetch_from_leaders()

    async def _refresh(self) -> Mapping[int, int]:
        """Ask for the leaders; raise ``OffsetOutOfRange`` if the topic was deleted and created again."""
        leaders = await self._cluster.refresh(self._topic)
        found = await self._finder.identities(self._partitions)
        for number, identity in comparable(self._identities, found).items():
            if identity != self._identities[number]:
                raise await self._recreated(self._partitions[number], leaders)
        self._identities = {**found, **self._identities}
        return leaders

    async def _recreated(self, partition: ReadPartition, leaders: Mapping[int, int]) -> OffsetOutOfRange:
        ends = PartitionEnds(0, 0, 0)  # the new topic may have fewer partitions
        if partition.number in leaders:
            ends = (await self._finder.ends([partition.number]))[partition.number]
        message = recreated_message(self._topic, partition.number, partition.position, ends)
        return OffsetOutOfRange(message)

    # -- New partitions

    async def _look_for_partitions(self) -> None:
        patience = self._cluster.patience(self._subject)
        while True:
            await self._request.clock.sleep(self._request.refresh_s)
            await persist(patience, self._add_new_partitions)

    async def _add_new_partitions(self) -> None:
        count = len(await self._refresh())
        new = [number for number in partitions_of(self._request, count) if number >= self._partition_count]
        for number, offset in (await self._finder.earliest(new)).items():
            self._partitions[number] = ReadPartition(number, self._subject, offset, None)
        self._identities = {**await self._finder.identities(new), **self._identities}
        self._partition_count = count
        self._fetch_from_leaders()
        self._taken.set()

    # -- Tasks

    def _run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        # A function and not a coroutine: a coroutine would never be awaited if the reader is closed before the task
        # starts.
        self._tasks[name] = asyncio.create_task(self._guarded(work), name=f"{self._subject}: {name}")

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task; pass its failure on to ``read``."""
        try:
            await work()
        except StreamiterError as error:
            self._fail(error)
        except Exception as error:  # a bug here must not become a silent stall
            self._fail(InternalError(f"{self._subject}: reading broke down ({error!r})"), error)

    def _fail(self, failure: StreamiterError, cause: Exception | None = None) -> None:
        if self._failure is None:
            failure.__cause__ = cause if cause is not None else failure.__cause__
            self._failure = failure
        self._arrived.set()


def _worth_fetching(led: list[ReadPartition], limit_bytes: int) -> list[ReadPartition]:
    """Return the partitions of one broker to fetch from now, so that the answer neither waits nor overflows.

    While fetched records are left to return, a broker is asked only if it is known to have more. Otherwise the broker
    would wait, and the connection could carry no other fetch meanwhile.
    """
    open_ones = [each for each in led if not each.is_fetched]
    if not any(each.has_records for each in led):
        return open_ones
    if sum(each.held_bytes for each in led) >= limit_bytes:
        return []
    with_room = [each for each in open_ones if each.fetched_bytes < _PARTITION_BYTES]
    return with_room if any(each.is_behind for each in with_room) else []


AbortedTransactions = list[tuple[int, int]]
"""Producer and first offset of each aborted transaction among the fetched records."""


class FetchedAnswer(NamedTuple):
    """The wanted record batches of an answer, all of which share its memory."""

    fetched: bytes
    """The answer."""
    starts: Sequence[int]
    """The index of the first byte of each wanted batch."""
    batches: Sequence[WireBatch]
    """The wanted batches."""

    @property
    def share_bytes(self) -> int:
        """The part of the answer with which each batch counts."""
        return len(self.fetched) // len(self.batches)


class ReadPartition:
    """The offsets of one partition, and its record batches that were fetched and not yet returned.

    ``take`` returns records from ``next_offset`` on. The next fetch begins at ``fetch_offset``: after all fetched
    batches, those that are never returned included (transaction markers, aborted and compacted records).
    """

    def __init__(self, number: int, subject: str, offset: int, stop: int | None) -> None:
        self.number = number
        self.next_offset = offset
        self.fetch_offset = offset
        self.stable_offset = offset
        self.fetched_bytes = 0
        self._subject = subject
        self._stop = stop
        # A fetched record is in one of these, in this order. Batches or located records are of one answer.
        self._opened: list[KafkaRecord] = []
        self._batches: deque[tuple[WireBatch, int]] = deque()
        self._located: LocatedRecords | None = None
        self._answers: deque[FetchedAnswer] = deque()

    @property
    def held_bytes(self) -> int:
        """The bytes of memory of all records that were fetched and not yet returned."""
        return self.fetched_bytes + (self._located.nbytes if self._located else 0)

    @property
    def has_records(self) -> bool:
        """Whether ``take`` may return records without another fetch."""
        return bool(self._opened or self._batches or self._located or self._answers)

    @property
    def is_fetched(self) -> bool:
        """Whether all records before the stop position were fetched."""
        return self._stop is not None and self.fetch_offset >= self._stop

    @property
    def is_finished(self) -> bool:
        """Whether all records before the stop position were returned."""
        return self.is_fetched and not self.has_records

    @property
    def is_behind(self) -> bool:
        """Whether the broker is known to have records that were not fetched."""
        return self.fetch_offset < self.stable_offset and not self.is_fetched

    @property
    def position(self) -> int:
        """The offset at which reading resumes.

        When no fetched record is left to return, this is the end of the fetched batches: the offsets before it hold no
        visible record, and a position among them could fall out of retention for no reason.
        """
        if self.has_records:
            return self.next_offset
        # Records after the stop position were fetched and dropped; a later run may read them.
        behind = self.fetch_offset if self._stop is None else min(self.fetch_offset, self._stop)
        return max(self.next_offset, behind)

    @property
    def lag(self) -> int:
        """The number of offsets between the position and the end, or the stop position."""
        end = self.stable_offset if self._stop is None else min(self.stable_offset, self._stop)
        return max(0, end - self.position)

    def add(
        self, asked_offset: int, fetched: bytes, aborted: AbortedTransactions | None, stable_offset: int
    ) -> None:
        """Add the answer to a fetch at ``asked_offset``.

        The answer is dropped if that is not the next offset to fetch any more. While the leadership of a partition
        moves, both leaders may have been asked, and the old leader may lack records that the new leader has.
        """
        if asked_offset != self.fetch_offset:
            return
        self.stable_offset = stable_offset
        visible = VisibleBatches(aborted)
        records = MemoryRecords(fetched)
        wanted, starts, start = [], [], 0
        while records.has_next():
            batch = records.next_batch()
            if visible.includes(batch) and not self._is_outside(batch):
                wanted.append(batch)
                starts.append(start)
            start += batch_bytes(fetched, start)
            self.fetch_offset = max(self.fetch_offset, batch.next_offset)
        if wanted:
            answer = FetchedAnswer(fetched, starts, wanted)
            self.fetched_bytes += answer.share_bytes * len(wanted)
            self._answers.append(answer)

    def take(self, max_records: int) -> TopicBatch | None:
        """Return the next records, at most that many; None if compaction has dropped all fetched records."""
        batch: TopicBatch
        records = self._opened
        while len(records) < max_records and self._has_batches():
            records = [*records, *self._open_next()] if records else self._open_next()
        if records:
            self._opened = records[max_records:]
            batch = KafkaBatch(self.number, records[:max_records] if self._opened else records)
        elif self._located:
            batch = self._located.take(max_records)
            self._located = self._located or None  # the last one releases the answer
        else:
            return None
        self.next_offset = batch.next_offset
        return batch

    def _has_batches(self) -> bool:
        """Whether there is a record batch to parse, after opening the next answer if nothing else is left."""
        while self._answers and not self._batches and not self._located:
            answer = self._answers.popleft()
            located = self._locate(answer)
            self._located = located or None  # Without records it releases the answer.
            if located is None:
                self._batches.extend((batch, answer.share_bytes) for batch in answer.batches)
            else:
                self.fetched_bytes -= answer.share_bytes * len(answer.batches)
        return bool(self._batches)

    def _locate(self, answer: FetchedAnswer) -> LocatedRecords | None:
        """Return the records of an answer, or None if they must be parsed one by one: few, not plain, or damaged."""
        batches = answer.batches
        if batches[-1].next_offset - _base_offset(batches[0]) < _LOCATED_FROM or not is_loaded():
            return None
        if not all(batch.validate_crc() for batch in batches):
            return None
        located = _compiled_locate()(self.number, answer.fetched, answer.starts)
        if located is None:
            return None
        located.keep(self.next_offset, self._stop)
        # Few records are joined to larger batches; a compacted topic has few in many offsets.
        return None if 0 < len(located) < _LOCATED_FROM else located

    def _is_outside(self, batch: WireBatch) -> bool:
        """Whether all records of the batch are before the position or after the stop."""
        if batch.next_offset <= self.fetch_offset:
            return True
        return self._stop is not None and _base_offset(batch) >= self._stop

    def _open_next(self) -> list[KafkaRecord]:
        batch, size_bytes = self._batches.popleft()
        self.fetched_bytes -= size_bytes
        records = self._opened_records(batch)
        # A fetch returns whole batches: the first may begin before the position, the last may end after the stop.
        if records and records[0].offset < self.next_offset:
            records = [record for record in records if record.offset >= self.next_offset]
        if self._stop is not None and records and records[-1].offset >= self._stop:
            records = [record for record in records if record.offset < self._stop]
        return records

    def _opened_records(self, batch: WireBatch) -> list[KafkaRecord]:
        if not batch.validate_crc():
            raise TopicError(
                f"{self._subject}, partition {self.number}: the record batch that ends before offset "
                f"{batch.next_offset} is damaged (its checksum is wrong); start at that offset to skip the batch"
            )
        try:
            return list(batch)
        except UnsupportedCodecError as error:
            raise ConfigurationError(
                f"{self._subject}, partition {self.number}: {error}; install it with: "
                "pip install 'streamiter[kafka]'"
            ) from None


@cache
def _compiled_locate() -> Callable[[int, bytes, Sequence[int]], LocatedRecords | None]:
    from streamiter_kafka import record_columns

    with saying_that_it_compiles("the reader of Kafka topics"):
        record_columns.compile_it()
    return record_columns.located_records


class VisibleBatches:
    """Selects the visible batches of one fetch: no markers, and no records of aborted transactions."""

    def __init__(self, aborted: AbortedTransactions | None) -> None:
        self._upcoming = deque(sorted(aborted or (), key=lambda transaction: transaction[1]))
        self._aborted_producers: set[int] = set()

    def includes(self, batch: WireBatch) -> bool:
        """Return whether ``batch`` has visible records. Call this for each batch, in order."""
        if batch.is_control_batch:
            self._end_transaction(batch)
            return False
        if not self._upcoming and not self._aborted_producers:
            return True
        self._begin_transactions(_base_offset(batch))
        return not (batch.is_transactional and batch.producer_id in self._aborted_producers)

    def _begin_transactions(self, offset: int) -> None:
        while self._upcoming and self._upcoming[0][1] <= offset:
            self._aborted_producers.add(self._upcoming.popleft()[0])

    def _end_transaction(self, marker: WireBatch) -> None:
        self._begin_transactions(_base_offset(marker))
        if ControlRecord.parse(next(marker).key) == ABORT_MARKER:
            self._aborted_producers.discard(marker.producer_id)


def _base_offset(batch: WireBatch) -> int:
    """Return the first offset. Batches of the formats before Kafka 0.11 do not hold it, and have one record each."""
    return int(getattr(batch, "base_offset", batch.next_offset - 1))


class KafkaBatch(TopicBatch):
    """Records of one partition as columns. Only the values are extracted at once.

    Most flows use no other column, and building the lists of all columns would cost more than the reading.
    """

    __slots__ = ("_records",)

    def __init__(self, partition: int, records: list[KafkaRecord]) -> None:
        super().__init__(partition=partition, values=[record.value for record in records])
        self._records = records

    @property
    def offsets(self) -> Sequence[int]:
        if self._offsets is None:
            self._offsets = [record.offset for record in self._records]
        return self._offsets

    @property
    def timestamps_ms(self) -> Sequence[int]:
        if self._timestamps_ms is None:
            self._timestamps_ms = [record.timestamp for record in self._records]
        return self._timestamps_ms

    @property
    def keys(self) -> Sequence[bytes | None]:
        if self._keys is None:
            self._keys = [record.key for record in self._records]
        return self._keys

    @property
    def headers(self) -> Sequence[Headers]:
        if self._headers is None:
            self._headers = [_headers(record.headers) for record in self._records]
        return self._headers

    @property
    def first_offset(self) -> int:
        return self._records[0].offset

    @property
    def next_offset(self) -> int:
        return self._records[-1].offset + 1

    def __getitem__(self, which: slice) -> KafkaBatch:
        return KafkaBatch(self.partition, self._records[which])

    def take(self, indices: Sequence[int]) -> KafkaBatch:
        return KafkaBatch(self.partition, [self._records[index] for index in indices])


def _headers(given: list[tuple[str, bytes | None]]) -> Headers:
    """Return the headers; Kafka lets the value of a header be null, which becomes empty."""
    return tuple((name, value or b"") for name, value in given) if given else ()
