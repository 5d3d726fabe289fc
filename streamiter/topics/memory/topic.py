"""A topic in memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from streamiter.topics.memory.reader import MemoryReader
from streamiter.topics.memory.store import MemoryStore
from streamiter.topics.memory.transactions import MemoryTransactions
from streamiter.topics.memory.writer import MemoryWriter
from streamiter.topics.positions import check_request
from streamiter.topics.topic import Decoder, ReadRequest, SizeLimit, Topic, TopicDescription

__all__ = ["MemoryTopic"]


class MemoryTopic(Topic):
    """A topic of a `MemoryBroker`. Its ``memory://`` URL leads to it only in the process's own broker."""

    compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({"compact": "1"})

    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def commit_domain(self) -> str:
        return self._store.commit_domain

    def beside(self, name: str) -> MemoryTopic:
        return MemoryTopic(self._store, name)

    def default_decoder(self) -> Decoder | None:
        return None

    async def open_reader(self, request: ReadRequest) -> MemoryReader:
        check_request(request, self._name)
        return MemoryReader(self._store, self._name, request)

    async def open_writer(self) -> MemoryWriter:
        with self._store.lock:
            return MemoryWriter(self._store, self._store.log(self._name))

    async def open_transactions(
        self, transactional_id: str, *, timeout_s: float = 60.0
    ) -> MemoryTransactions:
        transactions = MemoryTransactions(self._store, transactional_id, timeout_s)
        self._store.take_over(transactional_id, transactions)
        return transactions

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        self._store.create(self._name, partitions, settings or {})

    async def describe(self) -> TopicDescription:
        with self._store.lock:
            log = self._store.log(self._name)
            offsets = {
                number: (partition.start_offset, partition.end_offset)
                for number, partition in enumerate(log.partitions)
            }
            return TopicDescription(self._name, offsets, dict(log.settings), log.identities)

    async def size_limit(self) -> SizeLimit | None:
        settings = (await self.describe()).settings
        return SizeLimit(int(settings["max_record_bytes"])) if "max_record_bytes" in settings else None

    async def delete(self) -> None:
        self._store.delete(self._name)

    def __repr__(self) -> str:
        return f"MemoryTopic({self._name!r})"
