"""Writing: record batches are sent in order for each partition, with one request at a time to each broker.

A `Sender` sends batches until they are stored; `KafkaWriter` writes to one topic with it, transactions write to
several. While a request is under way, further records join the open batch of their partition: batches grow with the
load, and at low load a record is sent at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from streamiter.errors import InternalError, StreamiterError
from streamiter.topics.connecting import closed_error
from streamiter.topics.topic import OutgoingBatch, TopicWriter
from streamiter.values.helpers.clock import TimerHandle
from streamiter.values.helpers.closing import closed_after
from streamiter_kafka.cluster import NO_LEADER, BrokerConnections, ConnectionPurpose, shown_settings
from streamiter_kafka.options import KafkaOptions
from streamiter_kafka.packing import (
    DEFAULT_LIMIT_BYTES,
    Packing,
    PartitionKey,
    PartitionQueue,
    PendingBatch,
    ProducerIdentity,
    produce_refusal,
)
from streamiter_kafka.trouble import BrokerTrouble, Code, check_code
from streamiter_kafka.wire import InitProducerIdRequest, ProduceRequest, ProduceRequestV2, Response

# Brokers refuse requests above 100 MB (socket.request.max.bytes), and answer smaller requests sooner.
_REQUEST_BYTES: Final = 8_000_000
# The broker stops waiting for replicas after the request timeout; its answer to that must still arrive in time.
_ANSWER_MARGIN_S: Final = 1.0

_STORED: Final = frozenset({Code.NONE, Code.DUPLICATE_SEQUENCE_NUMBER})

Enlist = Callable[[Iterable[PartitionKey]], Awaitable[None]]
"""Called with the partitions of a request before it is sent; a transaction adds the partitions to itself."""


class Sender:
    """Sends batches until they are stored. After a lasting failure every call raises it."""

    def __init__(
        self, cluster: BrokerConnections, subject: str, producer: ProducerIdentity, enlist: Enlist | None = None
    ) -> None:
        self._cluster = cluster
        self._subject = subject
        self._producer = producer
        self._clock = cluster.clock
        self._enlist = enlist
        self._patience = cluster.patience(subject)
        self._queues: dict[PartitionKey, PartitionQueue] = {}
        # The queues with batches to send, in the order of their turns.
        self._waiting: dict[PartitionKey, PartitionQueue] = {}
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._unacked_bytes = 0
        self._progress = asyncio.Event()
        self._linger: TimerHandle | None = None
        self._is_flushing = False
        self._is_stopped = False
        self.failure: StreamiterError | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all records are stored."""
        return not self._waiting and not self._in_flight

    def put(self, packing: Packing, number: int, batch: OutgoingBatch) -> None:
        """Append records for a partition; the event loop sends them from its next turn on."""
        key = (packing.topic, number)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = PartitionQueue(packing, number)
        if key not in self._waiting:
            self._waiting[key] = queue
            queue.opened_s = self._clock.monotonic_s()
        self._unacked_bytes += queue.put(batch, self._clock.now_ms())
        self._pump()

    async def room(self) -> None:
        """Wait until fewer bytes than the limit are not yet stored."""
        self._raise_failure()
        while self._unacked_bytes >= self._cluster.options.max_unacked_bytes:
            await self._next_progress()

    async def flush(self) -> None:
        """Wait until all records are stored."""
        self._is_flushing = True
        try:
            self._pump()
            self._raise_failure()
            while not self.is_idle:
                await self._next_progress()
        finally:
            self._is_flushing = False

    async def discard(self) -> bool:
        """Drop the records that are not known to be stored; return whether some of them may have been sent."""
        self._is_stopped = True
        await asyncio.gather(*self._in_flight.values())
        dropped = [pending for queue in self._waiting.values() for pending in queue.batches]
        for queue in self._waiting.values():
            queue.batches.clear()
        self._waiting.clear()
        self._unacked_bytes = 0
        self._is_stopped = False
        return any(pending.is_sealed for pending in dropped)

    def restart(self, producer: ProducerIdentity) -> None:
        """Continue with another identity, whose sequence numbers begin at 0; call this while ``is_idle``."""
        self._producer = producer
        self._queues.clear()
        self._patience = self._cluster.patience(self._subject)

    async def stop(self) -> None:
        self._is_stopped = True
        if self._linger is not None:
            self._linger.cancel()
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- Sending

    def _pump(self) -> None:
        """Start a request to each broker that has records to get and no request under way."""
        if self._is_stopped or self.failure is not None:
            return
        for node, queues in self._ready_by_leader().items():
            for queue in queues:
                queue.is_sending = True
                self._waiting[queue.key] = self._waiting.pop(queue.key)
            self._in_flight[node] = asyncio.create_task(self._send(node, queues))

    def _ready_by_leader(self) -> dict[int, list[PartitionQueue]]:
        ready: dict[int, list[PartitionQueue]] = {}
        sizes: dict[int, int] = {}
        for queue in self._waiting.values():
            topic, number = queue.key
            node = self._cluster.leaders(topic).get(number, NO_LEADER)
            size_bytes = sizes.get(node, 0) + queue.batches[0].size_bytes
            if node in self._in_flight or queue.is_sending or self._lingers(queue):
                continue
            if node in ready and size_bytes > _REQUEST_BYTES:
                continue
            ready.setdefault(node, []).append(queue)
            sizes[node] = size_bytes
        return ready

    def _lingers(self, queue: PartitionQueue) -> bool:
        """Return whether the queue waits for more records; then a timer ends the wait."""
        linger_s = self._cluster.options.linger_s
        if not linger_s or self._is_flushing or not queue.batches[0].is_open:
            return False
        left_s = queue.opened_s + linger_s - self._clock.monotonic_s()
        if left_s > 0 and self._linger is None:
            self._linger = self._clock.call_later(left_s, self._linger_is_over)
        return left_s > 0

    def _linger_is_over(self) -> None:
        self._linger = None
        self._pump()

    async def _send(self, node: int, queues: list[PartitionQueue]) -> None:
        """Send one request and handle its answer; after trouble, wait before the next attempt."""
        begun_s = self._patience.now_s()
        try:
            ailing = await self._produce(node, queues)
            self._patience.succeeded(queue.key for queue in queues if queue.key not in ailing)
            self._progress.set()
            if ailing:
                await self._patience.recover(ailing, lambda: self._refresh(ailing), begun_s)
        except StreamiterError as failure:
            self._fail(failure)
        except Exception as error:  # a bug here must not become a silent stall
            self._fail(InternalError(f"{self._subject}: writing broke down ({error!r})"), error)
        finally:
            for queue in queues:
                queue.is_sending = False
            self._in_flight.pop(node, None)
            self._progress.set()
            self._pump()

    async def _produce(self, node: int, queues: list[PartitionQueue]) -> dict[PartitionKey, BrokerTrouble]:
        """Send the first batch of each queue; return the trouble of the queues whose batch must be sent again."""
        try:
            if self._enlist is not None:
                await self._enlist(queue.key for queue in queues)
            request = self._request(queues)
            wait_s = _ANSWER_MARGIN_S
            response = await self._cluster.request(node, request, lane=ConnectionPurpose.PRODUCE, wait_s=wait_s)
        except BrokerTrouble as trouble:
            return {queue.key: trouble for queue in queues}
        return self._take_in(response, {queue.key: queue for queue in queues})

    def _request(self, queues: list[PartitionQueue]) -> ProduceRequest | ProduceRequestV2:
        by_topic: dict[str, list[tuple[int, bytes]]] = {}
        for queue in queues:
            topic, number = queue.key
            by_topic.setdefault(topic, []).append((number, queue.seal(self._producer)))
        request_type = ProduceRequestV2 if self._producer.has_version_2 else ProduceRequest
        return request_type(
            transactional_id=self._producer.transactional_id,
            required_acks=-1 if self._cluster.options.acks == "all" else 1,
            timeout=self._cluster.options.request_timeout_ms,
            topics=list(by_topic.items()),
        )

    def _take_in(
        self, response: Response, queues: Mapping[PartitionKey, PartitionQueue]
    ) -> dict[PartitionKey, BrokerTrouble]:
        ailing: dict[PartitionKey, BrokerTrouble] = {}
        failures: list[StreamiterError] = []
        for topic, answers, *_ in response.topics:
            for number, code, *_ in answers:
                failure = self._answered(queues[topic, number], code)
                if isinstance(failure, BrokerTrouble):
                    ailing[topic, number] = failure
                elif failure is not None:
                    failures.append(failure)
        if failures:
            raise failures[0]
        return ailing

    def _answered(self, queue: PartitionQueue, code: int) -> BrokerTrouble | StreamiterError | None:
        if code in _STORED:
            self._remove(queue, queue.batches.popleft())
            return None
        topic, number = queue.key
        subject = f"topic {topic!r} at {self._cluster.address}, partition {number}"
        failure = produce_refusal(code, queue.batches[0], self._producer, subject)
        if not isinstance(failure, BrokerTrouble):
            self._remove(queue, queue.take_back())
        return failure

    def _remove(self, queue: PartitionQueue, batch: PendingBatch) -> None:
        self._unacked_bytes -= batch.size_bytes
        if queue.batches:
            queue.opened_s = self._clock.monotonic_s()
        else:
            del self._waiting[queue.key]

    async def _refresh(self, ailing: Iterable[PartitionKey]) -> None:
        for topic in dict.fromkeys(topic for topic, _number in ailing):
            await self._cluster.refresh(topic)

    # -- Waiting

    async def _next_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _fail(self, failure: StreamiterError, cause: Exception | None = None) -> None:
        if self.failure is None:
            failure.__cause__ = cause if cause is not None else failure.__cause__
            self.failure = failure


_NO_TRANSACTION_TIMEOUT_MS: Final = 2**31 - 1


async def open_writer(cluster: BrokerConnections, topic: str) -> KafkaWriter:
    """Return a writer to one topic, outside transactions; it owns ``cluster`` and closes it."""
    await cluster.require(topic)
    packing = await open_packing(cluster, topic, cluster.options, transactional=False)
    producer = await cluster.persist(lambda: _new_producer(cluster, topic))
    return KafkaWriter(cluster, packing, producer)


async def open_packing(
    cluster: BrokerConnections, topic: str, options: KafkaOptions, *, transactional: bool
) -> Packing:
    """Return the packing for ``topic``; ask the broker for the largest size of a record batch."""
    return Packing(
        topic,
        await _limit_bytes(cluster, topic),
        compression=options.compression,
        max_batch_bytes=options.max_batch_bytes,
        transactional=transactional,
    )


async def _limit_bytes(cluster: BrokerConnections, topic: str) -> int:
    settings = await shown_settings(cluster, topic)
    return int(settings.get("max.message.bytes", DEFAULT_LIMIT_BYTES))


async def _new_producer(cluster: BrokerConnections, topic: str) -> ProducerIdentity:
    """Ask for an identity by which brokers recognize a batch that is sent again."""
    if cluster.options.acks != "all":
        return ProducerIdentity()
    response = await cluster.request_any(InitProducerIdRequest(None, _NO_TRANSACTION_TIMEOUT_MS))
    check_code(response.error_code, f"writer to topic {topic!r}")
    return ProducerIdentity(response.producer_id, response.producer_epoch)


class KafkaWriter(TopicWriter):
    """Writes to one topic. After an error, every later call raises the same error."""

    def __init__(self, cluster: BrokerConnections, packing: Packing, producer: ProducerIdentity) -> None:
        self._cluster = cluster
        self._packing = packing
        self._sender = Sender(cluster, f"writer to topic {packing.topic!r} at {cluster.address}", producer)
        self._has_reported = False
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        self._check_open()
        if not len(batch):
            return
        leaders = await self._prepare()
        # No wait from here on: the batch is taken as a whole, or not at all where an earlier wait was cancelled.
        for number, part in self._packing.spread(batch, leaders):
            self._sender.put(self._packing, number, part)

    async def flush(self) -> None:
        self._check_open()
        await self._reporting(self._sender.flush())

    def unanswered_since_s(self) -> float | None:
        return self._cluster.unanswered_since_s

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        async with closed_after(self._sender.stop, self._cluster.close):  # also where one of these waits is cancelled
            if not self._has_reported:
                await self._sender.flush()

    async def _prepare(self) -> Mapping[int, int]:
        if not self._sender.is_idle:
            # Gives a turn to the tasks that send, which would never run if the caller never waits.
            await asyncio.sleep(0)
        await self._reporting(self._sender.room())
        return await self._cluster.fresh_leaders(self._packing.topic)

    async def _reporting(self, work: Awaitable[None]) -> None:
        """Await work of the sender. Remember that a failure was raised, so that ``close`` does not raise it again."""
        try:
            await work
        except StreamiterError:
            self._has_reported = True
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error("writer", self._packing.topic)
