"""Transactions: records of several topics of a cluster that become visible together.

`KafkaTransactions` is the interface to the engine. It writes with a `Sender` and asks the `Coordinator` to begin and
end transactions. The coordinator of a transactional id is the broker that keeps its state.

Transactions have version 2 where the cluster has it (KIP-890, the default of new clusters from Kafka 4.0 on). There a
broker makes a partition part of the transaction when it gets the first records, and each end gives the producer a new
epoch, so that no late request can change the next transaction. In version 1 the client sends requests for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Concatenate, Final, ParamSpec, TypeVar

from streamiter.errors import ConfigurationError, ProducerFenced, StreamiterError, TopicError, TransactionExpired
from streamiter.topics.connecting import TransactionState
from streamiter.topics.topic import GroupPositions, OutgoingBatch, Topic, Transactions
from streamiter.values.helpers.closing import closed_after
from streamiter_kafka.cluster import BRIEFLY_S, BrokerConnections, CoordinatorKind
from streamiter_kafka.packing import Packing, PartitionKey, ProducerIdentity, loss_of_id
from streamiter_kafka.trouble import BrokerTrouble, Code, check_code, log, persist
from streamiter_kafka.wire import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    EndTxnRequestV2,
    FeaturesRequest,
    InitProducerIdRequest,
    RenewProducerRequest,
    Response,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestV2,
    finalized_features,
)
from streamiter_kafka.writer import Sender, open_packing

T = TypeVar("T")
Parameters = ParamSpec("Parameters")

_MOVED: Final = frozenset({Code.NOT_COORDINATOR, Code.COORDINATOR_NOT_AVAILABLE})
# A broker writes the markers of a transaction within a few milliseconds of its end. Until then it tells the client to
# try again. After a second something is wrong, and the usual limit for retries applies.
_FIRST_WAIT_S: Final = 0.002
_LONGEST_WAIT_S: Final = 0.05
_USUAL_END_S: Final = 1.0
_VERSION_2: Final = 2


# The offsets of a group are in a partition of a topic of Kafka's own, which the client does not know.
_OF_GROUP: Final = -1


def offsets_of(group: str, topic: str, cluster: BrokerConnections) -> str:
    """Return the subject of errors about the offsets of a consumer group."""
    return f"offsets of the consumer group {group!r} in topic {topic!r} at {cluster.address}"


class TransactionStillEnding(BrokerTrouble):
    """The broker is still ending the transaction before."""


def _settled(
    attempt: Callable[Concatenate[Coordinator, Parameters], Awaitable[T]],
) -> Callable[Concatenate[Coordinator, Parameters], Awaitable[T]]:
    """Repeat the calls of a method until the transaction before has ended."""

    @functools.wraps(attempt)
    async def until_settled(self: Coordinator, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> T:
        clock = self._cluster.clock
        wait_s, give_up_s = _FIRST_WAIT_S, clock.monotonic_s() + _USUAL_END_S
        while True:
            try:
                return await attempt(self, *args, **kwargs)
            except TransactionStillEnding:
                if clock.monotonic_s() > give_up_s:
                    raise
            await clock.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    return until_settled


class Coordinator:
    """Asks the coordinator of one transactional id, and finds it again when it has moved.

    Raises ``BrokerTrouble`` for a failure that may be temporary, and ``ProducerFenced`` when another writer owns the
    id.
    """

    def __init__(self, cluster: BrokerConnections, transactional_id: str, timeout_s: float) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self.timeout_s = timeout_s
        self._node: int | None = None
        self.subject = f"transactions {transactional_id!r} at {cluster.address}"
        self.has_lost_request = False
        """Whether a request got no answer that may arrive late, and then end another transaction or change it."""
        self._last_end: tuple[ProducerIdentity, bool] | None = None
        """The producer of the last end, and whether it was a commit."""

    @_settled
    async def take_over(self) -> ProducerIdentity:
        """Fence the owner of the id, abort its open transaction, and return the new identity."""
        features = finalized_features(await self._cluster.request_any(FeaturesRequest()))
        response = await self._request(InitProducerIdRequest(self._id, self._timeout_ms))
        if response.error_code == Code.INVALID_TRANSACTION_TIMEOUT:
            raise ConfigurationError(
                f"{self.subject}: the broker does not take a timeout of {self.timeout_s:g} s; expected at "
                "most its transaction.max.timeout.ms"
            )
        # The epoch of the id may change meanwhile if a third writer takes over at the same time.
        self._check(response.error_code, ProducerIdentity(transactional_id=self._id))
        has_version_2 = features.get("transaction.version", 0) >= _VERSION_2
        return ProducerIdentity(response.producer_id, response.producer_epoch, self._id, has_version_2)

    @_settled
    async def renew(self, producer: ProducerIdentity) -> ProducerIdentity:
        """Return an identity with a new epoch, which earlier requests of version 1 do not have.

        Only the owner of the id may call this; call ``end`` first, which raises for a writer that was replaced. A
        broker aborts the open transaction of the id before it checks the sender; if the transaction belongs to
        another owner, it fences both. The protocol has no request "only if I am the owner". So a writer that is
        replaced between ``end`` and this call, or while this call is repeated, also ends the newer writer, which must
        then be restarted. Neither of them loses or duplicates records.
        """
        request = RenewProducerRequest(self._id, self._timeout_ms, producer.number, producer.epoch)
        response = await self._request(request)
        self._check(response.error_code, producer)
        self.has_lost_request = False
        return ProducerIdentity(response.producer_id, response.producer_epoch, self._id)

    def expired(self) -> TransactionExpired:
        """Return the error for a transaction that was open for so long that the broker must have aborted it."""
        return TransactionExpired(
            f"{self.subject}: the broker aborted the transaction, which was open for over "
            f"{self.timeout_s:g} s, its timeout (of a job: transaction_timeout_s of its checkpoints); open new "
            "transactions, unless a newer writer has taken over since"
        )

    @_settled
    async def enlist(self, producer: ProducerIdentity, partitions: Sequence[PartitionKey]) -> None:
        """Make partitions part of the open transaction."""
        by_topic: dict[str, list[int]] = {}
        for topic, number in partitions:
            by_topic.setdefault(topic, []).append(number)
        request = AddPartitionsToTxnRequest(self._id, producer.number, producer.epoch, list(by_topic.items()))
        response = await self._request(request)
        codes = [code for _topic, answers in response.errors for _number, code in answers]
        for code in codes:
            if code != Code.OPERATION_NOT_ATTEMPTED:  # the code of another partition is the reason
                self._check(code, producer)

    @_settled
    async def enlist_group(self, producer: ProducerIdentity, group: str) -> None:
        """Make the offsets of a consumer group part of the open transaction."""
        request = AddOffsetsToTxnRequest(self._id, producer.number, producer.epoch, group)
        self._check((await self._request(request)).error_code, producer)

    async def store_offsets(
        self, producer: ProducerIdentity, group: str, topic: str, positions: GroupPositions
    ) -> None:
        """Write the offsets of an enlisted group to the broker that coordinates the group."""
        subject = offsets_of(group, topic, self._cluster)
        node = await self._cluster.find_coordinator(group, CoordinatorKind.GROUP, subject)
        offsets = [(number, offset, positions.run) for number, offset in sorted(positions.offsets.items())]
        request_type = TxnOffsetCommitRequestV2 if producer.has_version_2 else TxnOffsetCommitRequest
        request = request_type(self._id, group, producer.number, producer.epoch, [(topic, offsets)])
        try:
            response = await self._cluster.request(node, request)
        except (BrokerTrouble, asyncio.CancelledError):
            self.has_lost_request = True
            raise
        for _topic, answers, *_ in response.errors:
            for _number, code, *_ in answers:
                if lost := loss_of_id(code, producer, self.subject):
                    raise lost
                check_code(code, subject)

    async def end(self, producer: ProducerIdentity, *, commit: bool, is_empty: bool) -> ProducerIdentity:
        """Commit or abort, and return the next identity; if there is nothing to end, only find out who owns the id."""
        if not is_empty:
            return await self._end(producer, commit, is_empty=False)
        if producer.has_version_2 and self._last_end is not None:
            # Changes nothing, also if it arrives late: it has the epoch before.
            return await self._end(*self._last_end, is_empty=False)
        return await self._end(producer, commit=False, is_empty=True)

    async def wait_until_visible(self, producer: ProducerIdentity) -> ProducerIdentity:
        """Wait until the partitions have the last end, and return the next identity, which ``producer`` is by then.

        The broker answers ``end`` as soon as the end is decided. When the same end is requested again, the broker tells
        the client to try again until the partitions have it.
        """
        # A newer owner gets the id only after this transaction has ended.
        with contextlib.suppress(ProducerFenced):
            if self._last_end is not None:
                return await self._end(*self._last_end, is_empty=False)
        return producer

    @property
    def _timeout_ms(self) -> int:
        return int(1000 * self.timeout_s)

    @_settled
    async def _end(self, producer: ProducerIdentity, commit: bool, is_empty: bool) -> ProducerIdentity:
        request_type = EndTxnRequestV2 if producer.has_version_2 else EndTxnRequest
        try:
            response = await self._request(request_type(self._id, producer.number, producer.epoch, commit))
        except (BrokerTrouble, asyncio.CancelledError):
            self.has_lost_request = True
            raise
        code = response.error_code
        if code == Code.UNKNOWN_SERVER_ERROR:
            # A broker that paused in the middle of the request answers so. The end may have happened or not; requesting
            # the same end again is safe.
            self.has_lost_request = True
            raise BrokerTrouble(f"{self.subject}: the broker answered {Code(code).name}", code)
        if code == Code.INVALID_TXN_STATE:
            if is_empty:
                return producer
            if not (producer.has_version_2 and commit):
                raise TopicError(
                    f"{self.subject}: the broker has no open transaction to {'commit' if commit else 'abort'}; "
                    "open new transactions"
                )
            # The broker aborted the transaction after its timeout or for a newer writer, and raised the epoch once. To
            # a request with the epoch before it answers as if this writer had requested the abort.
            code = Code.PRODUCER_FENCED
        self._check(code, producer)
        self._last_end = producer, commit
        if not producer.has_version_2:
            return producer
        return producer._replace(number=response.producer_id, epoch=response.producer_epoch)

    async def _request(self, request: object) -> Response:
        try:
            if self._node is None:
                kind = CoordinatorKind.TRANSACTIONAL_ID
                self._node = await self._cluster.find_coordinator(self._id, kind, self.subject)
            return await self._cluster.request(self._node, request)
        except BrokerTrouble:
            self._node = None
            raise

    def _check(self, code: int, producer: ProducerIdentity) -> None:
        if code in _MOVED:
            self._node = None
        if code == Code.CONCURRENT_TRANSACTIONS:
            raise TransactionStillEnding(f"{self.subject}: the broker answered {Code(code).name}", code)
        if lost := loss_of_id(code, producer, self.subject):
            raise lost
        check_code(code, self.subject)


async def open_transactions(
    cluster: BrokerConnections, commit_domain: str, transactional_id: str, timeout_s: float
) -> KafkaTransactions:
    """Take over the id and return its transactions, which own ``cluster`` and close it."""
    if not transactional_id:
        raise ConfigurationError("transactions: expected a transactional id, given an empty one")
    coordinator = Coordinator(cluster, transactional_id, timeout_s)
    producer = await cluster.persist(coordinator.take_over)
    return KafkaTransactions(cluster, commit_domain, coordinator, producer)


class KafkaTransactions(Transactions):
    """Transactions of one transactional id in a Kafka cluster."""

    def __init__(
        self, cluster: BrokerConnections, commit_domain: str, coordinator: Coordinator, producer: ProducerIdentity
    ) -> None:
        self._cluster = cluster
        self._commit_domain = commit_domain
        self._coordinator = coordinator
        self._producer = producer
        self._state = TransactionState(coordinator.subject)
        self._packings: dict[str, Packing] = {}
        self._enlisted: dict[PartitionKey, None] = {}
        self._open_since_s: float | None = None
        """When the broker may have begun to count the transaction's time: with the first partition."""
        self._sender = Sender(cluster, coordinator.subject, producer, self._enlist)
        self._has_lost_records = False

    async def begin(self) -> None:
        self._state.check_idle()
        # Raises in a run that was replaced before its first write, which no other request would tell. Such a run must
        # not renew its epoch either (see `Coordinator.renew`).
        await self._end(commit=False)
        if self._must_renew:
            await self._renew()
        self._state.begin()

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        self._state.check_open()
        packing = await self._packing(topic)
        # Gives a turn to the tasks that send, which would never run if the caller never waits.
        await asyncio.sleep(0)
        await self._noting_fences(self._sender.room())
        leaders = await self._cluster.fresh_leaders(topic.name)
        for number, part in packing.spread(batch, leaders):
            self._sender.put(packing, number, part)

    async def commit_positions(self, topic: Topic, group: str, positions: GroupPositions) -> None:
        """Make the positions the offsets of the consumer group; their metadata is the id of the run."""
        self._state.check_open()
        self._state.check_topic(topic, self._commit_domain)
        patience = self._cluster.patience(self._subject)
        await self._noting_fences(persist(patience, lambda: self._commit_positions(topic.name, group, positions)))

    async def _commit_positions(self, topic: str, group: str, positions: GroupPositions) -> None:
        if (group, _OF_GROUP) not in self._enlisted:
            self._count_time()
            if not self._producer.has_version_2:
                await self._coordinator.enlist_group(self._producer, group)
            self._enlisted[group, _OF_GROUP] = None
        await self._coordinator.store_offsets(self._producer, group, topic, positions)

    async def commit(self) -> None:
        self._state.check_open()
        await self._noting_fences(self._sender.flush())
        await self._end(commit=True)

    async def abort(self) -> None:
        self._state.check_open()
        await self._abort()

    def unanswered_since_s(self) -> float | None:
        return self._cluster.unanswered_since_s

    async def close(self) -> None:
        if self._state.is_closed:
            return
        is_open = self._state.is_open
        self._state.close()
        limit_s = 0.0 if self._cluster.is_silent() else BRIEFLY_S
        async with closed_after(self._sender.stop, self._cluster.close):  # also where one of these waits is cancelled
            try:
                if is_open:
                    await asyncio.wait_for(self._abort(), limit_s)
            except ProducerFenced:
                pass  # the newer owner has aborted the transaction
            except (StreamiterError, TimeoutError) as error:
                log.warning(
                    "%s: the open transaction was not aborted on closing; its timeout will abort it: %s",
                    self._subject,
                    error if str(error) else "no broker answers",
                )

    async def _abort(self) -> None:
        if await self._sender.discard():
            # The records are aborted, but the sequence numbers that the broker expects next are unknown.
            self._has_lost_records = True
        await self._end(commit=False)
        self._sender.failure = None

    async def _end(self, *, commit: bool) -> None:
        is_empty = not self._enlisted
        patience = self._cluster.patience(self._subject)
        before, end, wait = self._producer, self._coordinator.end, self._coordinator.wait_until_visible
        ending = persist(patience, lambda: end(before, commit=commit, is_empty=is_empty))
        self._continue_as(await self._noting_fences(ending))
        # The end is decided: even if the wait below fails, an abort must not look possible.
        self._state.end()
        self._enlisted.clear()
        self._open_since_s = None
        if not is_empty or self._producer != before:
            self._continue_as(await persist(patience, lambda: wait(self._producer)))

    async def _enlist(self, partitions: Iterable[PartitionKey]) -> None:
        new = [key for key in partitions if key not in self._enlisted]
        if new:
            self._count_time()
            if not self._producer.has_version_2:
                await self._coordinator.enlist(self._producer, new)
            self._enlisted.update(dict.fromkeys(new))

    def _count_time(self) -> None:
        if self._open_since_s is None:
            self._open_since_s = self._cluster.clock.monotonic_s()

    async def _packing(self, topic: Topic) -> Packing:
        self._state.check_topic(topic, self._commit_domain)
        packing = self._packings.get(topic.name)
        if packing is None:
            await self._cluster.require(topic.name)
            options = getattr(topic, "options", self._cluster.options)
            packing = await open_packing(self._cluster, topic.name, options, transactional=True)
            self._packings[topic.name] = packing
        return packing

    @property
    def _must_renew(self) -> bool:
        has_lost = self._has_lost_records or self._coordinator.has_lost_request
        return has_lost and not self._producer.has_version_2

    async def _renew(self) -> None:
        """Take a new epoch, so that no late request can end the next transaction."""
        patience = self._cluster.patience(self._subject)
        renewing = persist(patience, lambda: self._coordinator.renew(self._producer))
        self._continue_as(await self._noting_fences(renewing))
        self._has_lost_records = False

    def _continue_as(self, producer: ProducerIdentity) -> None:
        if producer != self._producer:
            self._producer = producer
            self._sender.restart(producer)

    async def _noting_fences(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``; a fence that it raises is final, and the first fence is raised again."""
        try:
            return await work
        except ProducerFenced as error:
            first = self._state.fence(self._explained(error))
            if first is error:
                raise
            raise first from error

    @property
    def _subject(self) -> str:
        return self._state.subject

    def _explained(self, fence: ProducerFenced) -> ProducerFenced:
        """Return ``TransactionExpired`` if the timeout may be the cause: the broker answers both with the same error.

        Only this process's clock decides. A request for a new epoch would tell, but if another owner has a transaction
        open, the broker aborts it before it checks the sender.
        """
        if isinstance(fence, TransactionExpired) or self._open_since_s is None:
            return fence
        open_for_s = self._cluster.clock.monotonic_s() - self._open_since_s
        return self._coordinator.expired() if open_for_s > self._coordinator.timeout_s else fence
