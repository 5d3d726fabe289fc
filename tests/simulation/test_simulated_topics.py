"""Topics of a simulation follow the contract of topics, and violate it only on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from topics.topic_contract import TopicCase, TopicContract

from streamiter.testing.simulated_time import Crashed, SimulatedTime, Trace, generator
from streamiter.testing.simulation.network import (
    CALM,
    UNDISTURBED,
    Levels,
    NetworkConnection,
    SimulatedNetwork,
    SimulatedTopic,
    SimulatedTopics,
    SimulatedUnavailable,
)
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest


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
