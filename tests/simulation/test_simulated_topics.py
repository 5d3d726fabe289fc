"""Topics and stores of a simulation follow their contracts, violate them only on request; outputs have rules."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from checkpoints.snapshots import header, save
from checkpoints.store_contract import MakeStore, StoreContract
from topics.topic_contract import TopicCase, TopicContract

from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import StorageFull
from streamiter.testing.simulated_time import Crashed, SimulatedTime, Trace, generator
from streamiter.testing.simulation.network import (
    CALM,
    UNDISTURBED,
    Levels,
    NetworkConnection,
    SimulatedNetwork,
    SimulatedStore,
    SimulatedTopic,
    SimulatedTopics,
    SimulatedUnavailable,
)
from streamiter.testing.simulation.world import Delivery, OutputOrder, OutputRules, key_and_value
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest
from streamiter.topics.topic import TopicRecord


class Made:
    """A simulated cluster, with the stored topics that it wraps."""

    def __init__(self, levels: Levels = CALM, seed: int = 0) -> None:
        self.commits = 0
        self.network = SimulatedNetwork(SimulatedTime(), Trace(), generator(seed, "network"), levels)
        self.connection = NetworkConnection(self.network)
        self.broker = MemoryBroker()
        self.cluster = SimulatedTopics(self.broker, self.connection, self._committed)

    def _committed(self) -> None:
        self.commits += 1

    def topic(self, name: str) -> SimulatedTopic:
        return SimulatedTopic(self.cluster, name)

    async def stored(self) -> list[bytes | None]:
        """Return all records of the topic ``t`` that a reader of committed records returns."""
        reader = await self.broker.topic("t").open_reader(ReadRequest(stop="latest"))
        values: list[bytes | None] = []
        while (batch := await reader.read()) is not None:
            values += batch.values
        return values


class TestSimulatedTopics(TopicContract):
    @pytest.fixture
    def case(self) -> TopicCase:
        return TopicCase(
            handle=Made(UNDISTURBED).topic,
            record_limit_settings={"max_record_bytes": "2000"},
            record_limit_bytes=2000,
            retention_settings={"retention_records": "35"},
            url_is_global=False,
        )


async def test_a_batch_is_cut_anywhere_and_nothing_of_it_is_lost() -> None:
    """The positions of a reader were ahead of its pieces, so each restart lost the rest of a batch."""
    sizes = set()
    for seed in range(20):
        made = Made(seed=seed)
        topic = made.topic("t")
        await topic.create()
        await (await topic.open_writer()).write(OutgoingBatch([b"%d" % n for n in range(30)]))
        reader = await topic.open_reader(ReadRequest(stop="latest"))
        values: list[bytes | None] = []
        while (batch := await reader.read()) is not None:
            values += batch.values
            sizes.add(len(batch))
            assert reader.positions() == {0: len(values)}
            assert reader.lag() == {0: 30 - len(values)}
        assert values == [b"%d" % n for n in range(30)]
    assert {1, 2, 3} < sizes


async def test_a_call_fails_before_or_after_its_effect() -> None:
    """If failed commits were never committed, the simulation would miss jobs that do not check for them."""
    seen = set()
    for seed in range(40):
        made = Made(seed=seed)
        topic = made.topic("t")
        await topic.create()
        transactions = await topic.open_transactions("id")
        await transactions.begin()
        await transactions.write(topic, OutgoingBatch([b"a"]))
        made.network.levels = replace(CALM, failing=0.5)
        try:
            await transactions.commit()
            seen.add(("committed", len(await made.stored())))
        except SimulatedUnavailable:
            seen.add(("failed", len(await made.stored())))
    assert seen == {("committed", 1), ("failed", 0), ("failed", 1)}


async def test_records_written_outside_transactions_may_be_repeated() -> None:
    """At-least-once delivery permits repetitions, so the simulation must find a sink that forbids them."""
    made = Made(replace(CALM, duplicates=1.0))
    topic = made.topic("t")
    await topic.create()
    await (await topic.open_writer()).write(OutgoingBatch([b"a", b"b"]))
    assert await made.stored() == [b"a", b"b", b"a", b"b"]


async def test_stuck_calls_return_when_the_network_heals() -> None:
    """The job must make progress after the last fault, so every stuck call must end."""
    made = Made(replace(CALM, stuck=1.0, stuck_s_max=1e9))
    calls = [asyncio.create_task(made.topic("t").create()) for _ in range(3)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(call.done() for call in calls)
    made.network.heal()
    await asyncio.gather(*calls)


@pytest.mark.parametrize(
    "call",
    [
        lambda topic: topic.create(),
        lambda topic: topic.describe(),
        lambda topic: topic.open_reader(ReadRequest()),
        lambda topic: topic.open_writer(),
        lambda topic: topic.open_transactions("id"),
    ],
)
async def test_nothing_of_a_crashed_job_reaches_a_topic(call: Callable[[SimulatedTopic], object]) -> None:
    """A finally block aborted a transaction, and thus hid that a crash leaves the transaction open."""
    made = Made()
    await made.broker.topic("t").create()
    made.connection.cut()
    with pytest.raises(Crashed):
        await call(made.topic("t"))  # type: ignore[misc]


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


def records(*written: str) -> list[TopicRecord]:
    """Return records from texts such as ``"0 key value"``: partition, key and value."""
    parts = [text.split() for text in written]
    return [
        TopicRecord(int(partition), offset, 0, key.encode(), value.encode())
        for offset, (partition, key, value) in enumerate(parts)
    ]


EXPECTED = records("0 a 1", "0 b 2", "1 a 3", "0 a 4")


@pytest.mark.parametrize(
    ("order", "delivery", "given", "part", "whole"),
    [
        ("partition", "exactly_once", [], None, "the first that is missing: (b'a', b'1')"),
        ("partition", "exactly_once", ["0 a 1", "0 b 2"], None, "the first that is missing: (b'a', b'4')"),
        ("partition", "exactly_once", ["1 a 3", "0 a 1", "0 b 2", "0 a 4"], None, None),
        (
            "partition",
            "exactly_once",
            ["0 b 2"],
            "expected record 0 to be (b'a', b'1'), given (b'b', b'2')",
            "expected",
        ),
        ("partition", "exactly_once", ["1 a 3", "1 a 3"], "the first that is too many: (b'a', b'3')", "expected"),
        ("partition", "exactly_once", ["2 a 3"], "expected 0 records, given 1", "expected"),
        ("key", "exactly_once", ["1 b 2", "0 a 1", "0 a 3", "1 a 4"], None, None),
        ("key", "exactly_once", ["0 a 1", "0 a 4"], "expected record 1 to be (b'a', b'3')", "expected"),
        ("any", "exactly_once", ["0 a 4", "0 a 3", "0 b 2", "0 a 1"], None, None),
        ("any", "exactly_once", ["0 a 4", "0 a 4"], "expected it 1 times, given 2 times", "expected"),
        ("any", "exactly_once", ["0 a 5"], "expected no such record, given (b'a', b'5')", "expected"),
        ("any", "at_least_once", ["0 a 4", "0 a 4", "0 a 3", "0 b 2"], None, "expected it 1 times, given 0 times"),
        ("any", "at_least_once", ["0 a 4", "0 a 4", "0 a 3", "0 b 2", "1 a 1"], None, None),
        ("partition", "at_least_once", ["1 a 1"], "expected no such record", "expected"),
    ],
)
def test_a_part_may_lack_only_its_end_and_the_whole_must_be_complete(
    order: OutputOrder, delivery: Delivery, given: list[str], part: str | None, whole: str | None
) -> None:
    """A check that accepts a gap or a repeated record misses the bugs that it must find."""
    rules = OutputRules("out", order, delivery, key_and_value)
    for is_complete, expected in ((False, part), (True, whole)):
        wrong = rules.what_is_wrong(records(*given), EXPECTED, is_complete=is_complete)
        if expected is None:
            assert wrong is None
        else:
            assert wrong is not None
            assert expected in wrong
