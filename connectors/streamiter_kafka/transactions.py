"""Writing to several topics of a cluster, made visible together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from streamiter.errors import (
    ConfigurationError,
    ProducerFenced,
    StreamiterError,
    TopicError,
    TransactionExpired,
)
from streamiter.topics.topic import OutgoingBatch, Topic, Transactions
from streamiter_kafka.cluster import OPEN_TIMEOUT_S, Cluster
from streamiter_kafka.coordinator import Coordinator
from streamiter_kafka.packing import Packing, ProducerIdentity
from streamiter_kafka.partition_queue import Key
from streamiter_kafka.sender import Sender
from streamiter_kafka.trouble import log, persist
from streamiter_kafka.writer import open_packing

__all__ = ["KafkaTransactions", "open_transactions"]

T = TypeVar("T")


async def open_transactions(
    cluster: Cluster, commit_domain: str, transactional_id: str, timeout_s: float
) -> KafkaTransactions:
    """Take over the id; what is returned owns ``cluster`` and closes it."""
    if not transactional_id:
        raise ConfigurationError("transactions: expected a transactional id, given an empty one")
    coordinator = Coordinator(cluster, transactional_id, timeout_s)
    producer = await cluster.persist(coordinator.take_over)
    return KafkaTransactions(cluster, commit_domain, coordinator, producer)


class KafkaTransactions(Transactions):
    """Transactions of one transactional id."""

    def __init__(
        self,
        cluster: Cluster,
        commit_domain: str,
        coordinator: Coordinator,
        producer: ProducerIdentity,
    ) -> None:
        self._cluster = cluster
        self._commit_domain = commit_domain
        self._coordinator = coordinator
        self._producer = producer
        self._subject = coordinator.subject
        self._packings: dict[str, Packing] = {}
        self._enlisted: dict[Key, None] = {}
        self._open_since_s: float | None = None
        """Since when the broker may count the transaction's time: it does so from its first partition on."""
        self._sender = self._new_sender()
        self._is_open = False
        self._is_closed = False
        self._has_lost_records = False
        self._dead_because: StreamiterError | None = None

    async def begin(self) -> None:
        self._check_alive()
        if self._is_open:
            raise TopicError(f"{self._subject}: commit or abort the open transaction before begin()")
        # Nothing else would tell a run that was replaced before its first write or, with none, at all. And one that
        # was must not come to renew its epoch: see there.
        await self._end(commit=False)
        if self._must_renew:
            await self._renew()
        self._is_open = True

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        self._check_open()
        packing = await self._packing(topic)
        # A turn for the tasks that send: a caller that never waits would never let them run.
        await asyncio.sleep(0)
        await self._noting_fences(self._sender.room())
        leaders = await self._cluster.fresh_leaders(topic.name)
        for number, part in packing.spread(batch, leaders):
            self._sender.put(packing, number, part)

    async def commit(self) -> None:
        self._check_open()
        await self._noting_fences(self._sender.flush())
        await self._end(commit=True)

    async def abort(self) -> None:
        self._check_open()
        await self._abort()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        async with self._cluster:  # closed even where one of these waits is cancelled
            try:
                if self._is_open and self._dead_because is None:
                    await asyncio.wait_for(self._abort(), OPEN_TIMEOUT_S)
            except ProducerFenced:
                pass  # its transaction was aborted by the newer owner
            except (StreamiterError, TimeoutError) as error:
                log.warning("%s: not aborted on closing, so its timeout will: %s", self._subject, error)
            finally:
                await self._sender.stop()

    async def _abort(self) -> None:
        if await self._sender.discard():
            # Their records are aborted, but the numbers that the broker expects next are not known any more.
            self._has_lost_records = True
        await self._end(commit=False)
        self._sender.failure = None

    async def _end(self, *, commit: bool) -> None:
        is_empty = not self._enlisted
        patience = self._cluster.patience(self._subject)
        end, wait = self._coordinator.end, self._coordinator.wait_until_visible
        ending = persist(patience, lambda: end(self._producer, commit=commit, is_empty=is_empty))
        await self._noting_fences(ending)
        # Decided: whatever happens to the wait, an abort must not seem possible any more.
        self._is_open = False
        self._enlisted.clear()
        self._open_since_s = None
        if not is_empty:
            await persist(patience, lambda: wait(self._producer, commit=commit))

    async def _enlist(self, partitions: Iterable[Key]) -> None:
        new = [key for key in partitions if key not in self._enlisted]
        if new:
            if self._open_since_s is None:
                self._open_since_s = self._cluster.clock.monotonic_s()
            await self._coordinator.enlist(self._producer, new)
            self._enlisted.update(dict.fromkeys(new))

    async def _packing(self, topic: Topic) -> Packing:
        if topic.commit_domain != self._commit_domain:
            raise TopicError(
                f"{self._subject}: {topic.url} is of another commit domain ({topic.commit_domain}); expected a "
                f"topic of {self._commit_domain}"
            )
        packing = self._packings.get(topic.name)
        if packing is None:
            await self._cluster.require(topic.name)
            options = getattr(topic, "options", self._cluster.options)
            packing = await open_packing(self._cluster, topic.name, options, transactional=True)
            self._packings[topic.name] = packing
        return packing

    @property
    def _must_renew(self) -> bool:
        return self._has_lost_records or self._coordinator.has_lost_end

    async def _renew(self) -> None:
        """Go on with a new epoch, so that nothing that is still on its way can end the next transaction."""
        patience = self._cluster.patience(self._subject)
        renewing = persist(patience, lambda: self._coordinator.renew(self._producer))
        self._producer = await self._noting_fences(renewing)
        await self._sender.stop()
        self._sender = self._new_sender()
        self._has_lost_records = False

    def _new_sender(self) -> Sender:
        return Sender(self._cluster, self._subject, self._producer, self._enlist)

    async def _noting_fences(self, work: Awaitable[T]) -> T:
        """Once fenced, for ever fenced, and for the first reason."""
        try:
            return await work
        except ProducerFenced as error:
            if self._dead_because is None:
                self._dead_because = self._explained(error)
            if self._dead_because is error:
                raise
            raise self._dead_because from error

    def _explained(self, fence: ProducerFenced) -> ProducerFenced:
        """Whether it may have been the transaction's timeout: the broker's error is that of another owner.

        Only our own clock is asked. A broker asked for a new epoch would know, but where another owner has a
        transaction open, it aborts that one before it looks at who asks.
        """
        if isinstance(fence, TransactionExpired) or self._open_since_s is None:
            return fence
        open_for_s = self._cluster.clock.monotonic_s() - self._open_since_s
        return self._coordinator.expired() if open_for_s > self._coordinator.timeout_s else fence

    def _check_alive(self) -> None:
        if self._is_closed:
            raise TopicError(f"{self._subject}: they are closed")
        if self._dead_because is not None:
            raise self._dead_because

    def _check_open(self) -> None:
        self._check_alive()
        if not self._is_open:
            raise TopicError(f"{self._subject}: none is open; call begin() first")
