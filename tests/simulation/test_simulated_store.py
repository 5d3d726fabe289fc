"""The store of a simulation follows the contract of stores, and violates it only on request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checkpoints.snapshots import header, save
from checkpoints.store_contract import MakeStore, StoreContract

from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import StorageFull
from streamiter.testing.simulated_time import Crashed, SimulatedTime, Trace, generator
from streamiter.testing.simulation.network import (
    CALM,
    NetworkConnection,
    SimulatedNetwork,
    SimulatedStore,
    SimulatedUnavailable,
)


def connection(seed: int = 0) -> NetworkConnection:
    return NetworkConnection(SimulatedNetwork(SimulatedTime(), Trace(), generator(seed, "network"), CALM))


class TestSimulatedStore(StoreContract):
    """Runs the checks for every store."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        stored = MemoryStore()
        return lambda: SimulatedStore(stored.another(), connection())


async def test_a_full_store_keeps_nothing_of_a_snapshot() -> None:
    """A job continues without that checkpoint, and must never restore a part of it."""
    to_it = connection()
    store = SimulatedStore(MemoryStore(), to_it)
    await store.claim("clicks", "a")
    to_it.network.levels = replace(CALM, storage_full=1.0)
    with pytest.raises(StorageFull):
        await save(store, 1)
    to_it.network.heal()
    assert await store.list("clicks") == []


async def test_a_save_fails_before_or_after_the_snapshot_is_stored() -> None:
    """A snapshot that was saved in spite of an error is unused, and the next number must differ from its number."""
    seen = set()
    for seed in range(40):
        to_it = connection(seed)
        stored = MemoryStore()
        store = SimulatedStore(stored, to_it)
        await store.claim("clicks", "a")
        to_it.network.levels = replace(CALM, failing=0.5)
        try:
            await save(store, 1)
            seen.add(("saved", len(await stored.list("clicks"))))
        except SimulatedUnavailable:
            seen.add(("failed", len(await stored.list("clicks"))))
    assert seen == {("saved", 1), ("failed", 0), ("failed", 1)}


async def test_nothing_of_a_crashed_job_reaches_the_store() -> None:
    """After a crash, a finally block pruned the store, and removed the snapshot that the next run needed."""
    stored, to_it = MemoryStore(), connection()
    store = SimulatedStore(stored, to_it)
    await store.claim("clicks", "a")
    to_it.cut()
    for call in (
        store.claim("clicks", "b"),
        save(store, 1),
        store.commit("clicks", header(1).id),
        store.prune("clicks", keep=1),
        store.close(),
    ):
        with pytest.raises(Crashed):
            await call
    assert await stored.list("clicks") == []
