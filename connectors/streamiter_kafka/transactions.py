"""The broker that keeps the state of a transactional id, and its answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from streamiter.errors import (
    ConfigurationError,
    ProducerFenced,
    StreamiterError,
    TopicError,
    TransactionExpired,
)
from streamiter.topics.topic import OutgoingBatch, Topic, Transactions
from streamiter_kafka.cluster import OPEN_TIMEOUT_S, BrokerConnections
from streamiter_kafka.packing import Key, Packing, ProducerIdentity, fenced
from streamiter_kafka.trouble import BrokerTrouble, Code, check, code_name, log, persist
from streamiter_kafka.wire import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    RenewProducerRequest,
    Response,
)
from streamiter_kafka.writer import Sender, open_packing

__all__ = [
    "KafkaTransactions",
    "open_transactions",
]


T = TypeVar("T")

_TRANSACTIONS: Final = 1
_MOVED: Final = frozenset({Code.NOT_COORDINATOR, Code.COORDINATOR_NOT_AVAILABLE})
_FENCED: Final = frozenset({Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED})
# A transaction's markers are written within a few milliseconds of its end. Until then the broker asks to
# come again; beyond a second something is wrong and the usual patience applies.
_FIRST_WAIT_S: Final = 0.002
_LONGEST_WAIT_S: Final = 0.05
_USUAL_END_S: Final = 1.0


class StillEnding(BrokerTrouble):
    """The transaction before is still being ended."""


class Coordinator:
    """Asks the coordinator of one transactional id, finding it anew when it has moved.

    Raises ``BrokerTrouble`` for what may pass and ``ProducerFenced`` when the id belongs to another.
    """

    def __init__(self, cluster: BrokerConnections, transactional_id: str, timeout_s: float) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self.timeout_s = timeout_s
        self._clock = cluster.clock
        self._node: int | None = None
        self.subject = f"transactions {transactional_id!r} at {cluster.address}"
        self.has_lost_end = False
        """Whether a request to end a transaction got no answer: it may yet arrive, and end another one."""

    async def take_over(self) -> ProducerIdentity:
        """Fence whoever had the id, abort what they left open, and return the new identity."""
        return await self._settled(self._take_over)

    async def renew(self, producer: ProducerIdentity) -> ProducerIdentity:
        """A new epoch, which requests of before do not have. Only the owner gets it: have ``end`` find out first.

        A broker aborts whatever is open under the id before it looks at who asks; if that is another owner's, it
        fences them both. Nothing in the protocol asks "only if I am the owner". So an owner that was replaced between
        ``end`` and this, or while this is tried again for want of an answer, still ends the newer one, which then
        has to be started again. Neither loses records or has them twice.
        """
        renewed = await self._settled(lambda: self._renew(producer))
        self.has_lost_end = False
        return renewed

    def expired(self) -> TransactionExpired:
        """What to raise where a transaction was open for so long that the broker must have aborted it."""
        return TransactionExpired(
            f"{self.subject}: the broker aborted the transaction, which was open for over "
            f"{self.timeout_s:g} s, its timeout; open the transactions anew, unless a newer writer has taken over since"
        )

    async def enlist(self, producer: ProducerIdentity, partitions: Iterable[Key]) -> None:
        """Make partitions part of the open transaction."""
        by_topic: dict[str, list[int]] = {}
        for topic, number in partitions:
            by_topic.setdefault(topic, []).append(number)
        await self._settled(lambda: self._enlist(producer, list(by_topic.items())))

    async def end(self, producer: ProducerIdentity, *, commit: bool, is_empty: bool) -> None:
        """Commit or abort; for an empty transaction this only finds out whether the id is still ours."""
        await self._settled(lambda: self._end(producer, commit, is_empty))

    async def wait_until_visible(self, producer: ProducerIdentity, *, commit: bool) -> None:
        """Wait until what ``end`` has decided is written to the partitions.

        The broker answers ``end`` as soon as it is decided; asked to decide the same again, it puts off
        until it is done.
        """
        # A newer owner gets the id only when this transaction is done.
        with contextlib.suppress(ProducerFenced):
            await self._settled(lambda: self._end(producer, commit, is_empty=False))

    @property
    def _timeout_ms(self) -> int:
        return int(1000 * self.timeout_s)

    async def _take_over(self) -> ProducerIdentity:
        response = await self._request(InitProducerIdRequest(self._id, self._timeout_ms))
        if response.error_code == Code.INVALID_TRANSACTION_TIMEOUT:
            raise ConfigurationError(
                f"{self.subject}: the broker does not take a timeout of {self.timeout_s:g} s; expected at "
                "most its transaction.max.timeout.ms"
            )
        # The epoch of an id that is just being taken over by a third one moves on meanwhile.
        self._check(response.error_code, ProducerIdentity(transactional_id=self._id))
        return ProducerIdentity(response.producer_id, response.producer_epoch, self._id)

    async def _renew(self, producer: ProducerIdentity) -> ProducerIdentity:
        request = RenewProducerRequest(self._id, self._timeout_ms, producer.number, producer.epoch)
        response = await self._request(request)
        self._check(response.error_code, producer)
        return ProducerIdentity(response.producer_id, response.producer_epoch, self._id)

    async def _enlist(self, producer: ProducerIdentity, topics: list[tuple[str, list[int]]]) -> None:
        request = AddPartitionsToTxnRequest(self._id, producer.number, producer.epoch, topics)
        response = await self._request(request)
        codes = [code for _topic, answers in response.errors for _number, code in answers]
        for code in codes:
            if code != Code.OPERATION_NOT_ATTEMPTED:  # another one is the reason
                self._check(code, producer)

    async def _end(self, producer: ProducerIdentity, commit: bool, is_empty: bool) -> None:
        request = EndTxnRequest(self._id, producer.number, producer.epoch, commit)
        try:
            code = (await self._request(request)).error_code
        except (BrokerTrouble, asyncio.CancelledError):
            self.has_lost_end = True
            raise
        if code == Code.UNKNOWN_SERVER_ERROR:
            # As a broker answers that stood still in the middle of it: nobody knows whether it is done. Asked for
            # again, the same end is the same end.
            self.has_lost_end = True
            raise BrokerTrouble(f"{self.subject}: the broker answered {code_name(code)}", code)
        if code == Code.INVALID_TXN_STATE:
            if is_empty:
                return
            raise TopicError(
                f"{self.subject}: the broker has no open transaction to {'commit' if commit else 'abort'}; "
                "open the transactions anew"
            )
        self._check(code, producer)

    async def _request(self, request: object) -> Response:
        try:
            if self._node is None:
                self._node = await self._find()
            return await self._cluster.request(self._node, request)
        except BrokerTrouble:
            self._node = None
            raise

    async def _find(self) -> int:
        await self._cluster.find_brokers()
        response = await self._cluster.request_any(FindCoordinatorRequest(self._id, _TRANSACTIONS))
        check(response.error_code, self.subject)
        return int(response.coordinator_id)

    def _check(self, code: int, producer: ProducerIdentity) -> None:
        if code in _MOVED:
            self._node = None
        if code == Code.CONCURRENT_TRANSACTIONS:
            raise StillEnding(f"{self.subject}: the broker answered {code_name(code)}", code)
        if code == Code.INVALID_PRODUCER_ID_MAPPING:
            raise TransactionExpired(
                f"{self.subject}: the broker does not know the transactional id any more, which was not used "
                "for longer than its transactional.id.expiration.ms; open the transactions anew"
            )
        if code in _FENCED:
            raise ProducerFenced(f"{self.subject}: {fenced(producer)}")
        check(code, self.subject)

    async def _settled(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """``attempt`` once the transaction before has ended."""
        wait_s, give_up_s = _FIRST_WAIT_S, self._clock.monotonic_s() + _USUAL_END_S
        while True:
            try:
                return await attempt()
            except StillEnding:
                if self._clock.monotonic_s() > give_up_s:
                    raise
            await self._clock.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


async def open_transactions(
    cluster: BrokerConnections, commit_domain: str, transactional_id: str, timeout_s: float
) -> KafkaTransactions:
    """Take over the id; what is returned owns ``cluster`` and closes it.

    Writing to several topics of a cluster, made visible together.
    """
    if not transactional_id:
        raise ConfigurationError("transactions: expected a transactional id, given an empty one")
    coordinator = Coordinator(cluster, transactional_id, timeout_s)
    producer = await cluster.persist(coordinator.take_over)
    return KafkaTransactions(cluster, commit_domain, coordinator, producer)


class KafkaTransactions(Transactions):
    """Transactions of one transactional id."""

    def __init__(
        self,
        cluster: BrokerConnections,
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
