"""Reading a topic: one fetch at a time from each broker.

`KafkaReader` fetches ahead of its caller by a bounded amount.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Final

from streamiter.errors import InternalError, OffsetOutOfRange, StreamiterError
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
from streamiter.topics.topic import ReadRequest, TopicBatch, TopicReader
from streamiter.values.helpers.compiled import is_loaded
from streamiter_kafka.cluster import (
    NO_LEADER,
    READ_COMMITTED,
    BrokerConnections,
    ConnectionPurpose,
    OffsetFinder,
    comparable,
)
from streamiter_kafka.partition import ReadPartition, compiled_locate
from streamiter_kafka.trouble import BrokerTrouble, Code, check_code, passing, persist
from streamiter_kafka.wire import FetchTopicRequest, Response, fetched_partitions

# A broker waits so long for records before it answers that it has none. It answers at once when a record arrives, so
# the wait delays no record. Each answer also proves that the broker works.
_MAX_WAIT_MS: Final = 500

_MIN_BYTES: Final = 1


# The limit for one partition in one answer, so that partitions take turns. A broker cuts its answer at this limit, and
# the part of a record batch at its end is fetched again. With 1 MB, batches of half a megabyte were fetched almost
# twice, and the broker took twice as much CPU time.
_PARTITION_BYTES: Final = 4_000_000


async def open_reader(cluster: BrokerConnections, topic: str, request: ReadRequest) -> KafkaReader:
    """Return a reader at its start position, which owns ``cluster`` and closes it."""
    subject = f"topic {topic!r} at {cluster.address}"
    check_request(request, topic)
    leaders = await cluster.require(topic)
    check_named_partitions(request, len(leaders), topic=topic)
    finder = OffsetFinder(cluster, topic, subject)
    share = partitions_of(request, len(leaders))
    identities = await cluster.persist(lambda: finder.identities(share))
    partitions = await cluster.persist(lambda: _first_partitions(finder, topic, subject, request, share, identities))
    return KafkaReader(cluster, topic, subject, request, finder, identities, partitions, len(leaders))


async def _first_partitions(
    finder: OffsetFinder, topic: str, subject: str, request: ReadRequest, share: range, identities: Mapping[int, str]
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
        partitions: list[ReadPartition],
        partition_count: int,
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
        self._partitions = {partition.number: partition for partition in partitions}
        self._partition_count = partition_count
        self._asked_s: dict[int, float] = {}
        """The partitions that a broker was asked for, and when it was first asked; an answer removes them."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._failure: StreamiterError | None = None
        self._is_closed = False
        self._is_compiled = False
        if self._request.stop is None:
            self._run("refresh", self._look_for_partitions)
        self._fetch_from_leaders()

    async def read(self) -> TopicBatch | None:
        # Gives a turn to the tasks that fetch, which would never run if the caller always finds records.
        await asyncio.sleep(0)
        self._taken.set()
        while True:
            if self._is_closed:
                raise closed_error("reader", self._topic)
            if not self._is_compiled and is_loaded():
                # Unless the compiled code is stored, this takes seconds, in which all other tasks continue.
                await asyncio.to_thread(compiled_locate)
                self._is_compiled = True
            if (work := self._locating()) is not None:
                await asyncio.to_thread(work)
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

    def unanswered_since_s(self) -> float | None:
        return min(self._asked_s.values(), default=None)

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

    def _locating(self) -> Callable[[], None] | None:
        """Return the part of the next ``_next_batch`` that runs in a thread; None if there is none."""
        with_records = next((each for each in self._partitions.values() if each.has_records), None)
        return None if with_records is None else with_records.locating(self._request.max_records)

    def _next_batch(self) -> TopicBatch | None:
        for number, partition in list(self._partitions.items()):
            if partition.has_records:
                batch = partition.take(self._request.max_records)
                # A broker that has no more is asked when the caller reads again. These records then pass through the
                # flow before the request is made, which takes a tenth of a millisecond.
                if batch is None or any(each.is_behind for each in self._partitions.values()):
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
            for number in offsets:
                self._asked_s.setdefault(number, begun_s)
            try:
                ailing = await self._take_in(await self._fetch(node, offsets), offsets)
            except BrokerTrouble as trouble:
                ailing = dict.fromkeys((each.number for each in wanted), trouble)
            self._patience.succeeded(each.number for each in wanted if each.number not in ailing)
            self._arrived.set()
            if ailing:
                await self._patience.recover(ailing, self._refresh, begun_s)
                self._fetch_from_leaders()

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
        return await self._cluster.request(node, request, lane=ConnectionPurpose.FETCH, wait_s=_MAX_WAIT_MS / 1000)

    async def _take_in(self, response: Response, offsets: Mapping[int, int]) -> dict[int, BrokerTrouble]:
        """Add the fetched records to their partitions; return the trouble of each partition that has some."""
        # Old versions of the answer have no error code for the whole request.
        check_code(getattr(response, "error_code", Code.NONE), self._subject)
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
                self._asked_s.pop(answer.number, None)
                partition.add(asked_offset, answer.records, answer.aborted, answer.stable_offset)
        return ailing

    async def _out_of_range(self, partition: ReadPartition) -> OffsetOutOfRange:
        await self._refresh()
        ends = (await self._finder.ends([partition.number]))[partition.number]
        message = out_of_range_message(self._topic, partition.number, partition.fetch_offset, ends)
        return OffsetOutOfRange(message)

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
