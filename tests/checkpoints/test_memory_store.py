"""The store in memory fulfils the contract, and its content outlives event loops."""

import asyncio

import pytest
from checkpoints.snapshots import CONTENT, content_of, save_and_commit
from checkpoints.store_contract import MakeStore, StoreContract

from streamiter.engine.storage.store import MemoryStore


class TestMemoryStore(StoreContract):
    """The checks for every store."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryStore().another


def test_the_store_outlives_the_event_loop() -> None:
    """A simulated crash ended the event loop, and the next run, in another loop, could not use the store."""
    store = MemoryStore()

    async def first() -> None:
        await store.claim("clicks", "a")
        await save_and_commit(store, 1)

    async def second() -> None:
        pointer = await store.claim("clicks", "b")
        assert pointer is not None
        assert pointer.committed is not None
        assert await content_of(await store.open("clicks", pointer.committed)) == CONTENT

    asyncio.run(first())
    asyncio.run(second())
