"""The broker that keeps the state of a transactional id, and its answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from streamiter.errors import ConfigurationError, ProducerFenced, TopicError, TransactionExpired
from streamiter_kafka.cluster import Cluster
from streamiter_kafka.codes import Code, code_name
from streamiter_kafka.newer_requests import RenewProducerRequest
from streamiter_kafka.packing import ProducerIdentity
from streamiter_kafka.partition_queue import Key
from streamiter_kafka.refusal import fenced
from streamiter_kafka.trouble import BrokerTrouble, check
from streamiter_kafka.wire import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    Response,
)

__all__ = ["Coordinator"]

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

    def __init__(self, cluster: Cluster, transactional_id: str, timeout_s: float) -> None:
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
