"""Records of several topics in memory that become visible together."""

from __future__ import annotations

from streamiter.clock import TimerHandle
from streamiter.errors import ProducerFenced, TopicError, TransactionExpired
from streamiter.topics.memory.partition_log import Transaction
from streamiter.topics.memory.store import MemoryStore
from streamiter.topics.memory.topic_log import TopicLog, append, check_not_deleted
from streamiter.topics.topic import OutgoingBatch, Topic, Transactions

__all__ = ["MemoryTransactions"]


class MemoryTransactions(Transactions):
    """Transactions over all topics of one store."""

    def __init__(self, store: MemoryStore, transactional_id: str, timeout_s: float) -> None:
        self._store = store
        self._id = transactional_id
        self._timeout_s = timeout_s
        self._turn = 0
        self._transaction: Transaction | None = None
        self._logs: list[TopicLog] = []
        self._timer: TimerHandle | None = None
        self._fenced_because: ProducerFenced | None = None
        self._is_closed = False

    async def begin(self) -> None:
        with self._store.lock:
            self._check_usable()
            if self._transaction is not None:
                raise TopicError(f"transactions {self._id!r}: commit or abort the open one before begin()")
            self._transaction = Transaction()
        self._timer = self._store.clock.call_later(self._timeout_s, self._expire)

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        if topic.commit_domain != self._store.commit_domain:
            raise TopicError(
                f"transactions {self._id!r}: {topic.url} is of another commit domain; expected a topic of "
                "the same memory broker"
            )
        with self._store.lock:
            transaction = self._open_transaction()
            log = self._store.log(topic.name)
            append(log, batch, self._store.clock.now_ms(), unkeyed=self._turn, transaction=transaction)
            if log not in self._logs:
                self._logs.append(log)
        self._turn += 1

    async def commit(self) -> None:
        with self._store.lock:
            self._open_transaction()
            for log in self._logs:
                check_not_deleted(log)
            self._end(committed=True)

    async def abort(self) -> None:
        with self._store.lock:
            self._open_transaction()
            self._end(committed=False)

    async def close(self) -> None:
        with self._store.lock:
            if self._transaction is not None:
                self._end(committed=False)
            self._is_closed = True

    def fence(self, reason: ProducerFenced) -> None:
        """Abort what is open and refuse all further calls; the store's lock must be held."""
        self._fenced_because = reason
        if self._transaction is not None:
            self._end(committed=False)

    def _expire(self) -> None:
        with self._store.lock:
            self.fence(
                TransactionExpired(
                    f"transaction of {self._id!r} aborted: it was open for over {self._timeout_s:g} s"
                )
            )

    def _check_usable(self) -> None:
        if self._is_closed:
            raise TopicError(f"transactions {self._id!r} are closed")
        if self._fenced_because is not None:
            raise self._fenced_because

    def _open_transaction(self) -> Transaction:
        self._check_usable()
        if self._transaction is None:
            raise TopicError(f"transactions {self._id!r}: none is open; call begin() first")
        return self._transaction

    def _end(self, *, committed: bool) -> None:
        transaction, self._transaction = self._transaction, None
        assert transaction is not None
        logs, self._logs = self._logs, []
        for log in logs:
            for partition in log.partitions:
                partition.end_transaction(transaction, committed=committed)
            log.retain()
        for log in logs:
            log.waiters.wake()
        if self._timer is not None:
            self._timer.cancel()
