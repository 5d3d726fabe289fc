"""Models pass a real broker, with its record limit, its transactions, and its order over partitions."""

import asyncio
from typing import Any

import numpy as np
import pytest
from models.model_case import encoder, selected, update_of, write
from support.waiting import PATIENCE_S, until

from streamiter.errors import ModelError, OffsetOutOfRange, TopicNotFound
from streamiter.models import ModelUpdateEncoder, ServedModel, last_update, model_updates, next_run
from streamiter.topics.connecting import record_limit
from streamiter.topics.topic import ReadRequest, Topic
from streamiter.topics.urls import topic
from streamiter.values.helpers.clock import SystemClock


@pytest.fixture
def models(kafka_broker: Any, topic_prefix: str) -> Topic:
    """Return a handle of a topic that does not exist yet."""
    return topic(f"kafka://{kafka_broker.bootstrap}/{topic_prefix}models")


async def test_a_model_above_the_limits_of_broker_and_client_arrives_whole(models: Topic) -> None:
    """The update has 5 MB of weights, and the compacted topic has the default limits."""
    await models.create(settings={"cleanup.policy": "compact"})
    weights = np.random.default_rng(7).normal(size=600_000)
    limit = record_limit(await models.describe())
    large = ModelUpdateEncoder("ctr", 1, clock=SystemClock(), record_bytes_max=limit)
    async with model_updates(models, "ctr", start="latest_model") as updates:
        first = asyncio.create_task(asyncio.wait_for(anext(updates), PATIENCE_S))
        await write(models, large.encode([weights]), large.encode([{"weights": weights, "link": "logit"}]))
        assert np.array_equal((await first).parameters, weights)  # type: ignore[arg-type]
        assert (await asyncio.wait_for(anext(updates), PATIENCE_S)).rank == (1, 2)
    last = await last_update(models, "ctr")
    assert last is not None
    assert last.rank == (1, 2)
    assert np.array_equal(last.parameters["weights"], weights)  # type: ignore[call-overload]
    assert (await next_run(models, "ctr")).generation == 2


async def test_followers_of_a_topic_that_was_created_again_get_an_error(models: Topic) -> None:
    """A training started again in a new topic with the same name, and for weeks the service used the old model."""
    await models.create()
    await write(models, update_of((5, 1)), update_of((5, 2)))
    async with ServedModel(models, "ctr") as served, model_updates(models, "ctr") as updates:
        await served.ready()
        assert (await anext(updates)).rank == (5, 1)
        assert (await anext(updates)).rank == (5, 2)
        await models.delete()
        await models.create()
        await write(models, *(update_of((1, version)) for version in range(1, 6)))
        with pytest.raises(OffsetOutOfRange, match=r"offset 2 belongs to .* created again"):
            await asyncio.wait_for(anext(updates), PATIENCE_S)
        await until(lambda: "created again, so" in (served.statistics().last_error or ""))
        with pytest.raises(ModelError, match="following has ended"):
            served.check()


async def test_a_smaller_limit_of_the_topic_is_kept(models: Topic) -> None:
    """The broker must accept records up to the limit in the description of the topic."""
    await models.create(settings={"max.message.bytes": "20000"})
    limit = record_limit(await models.describe())
    assert limit == 20_000
    small = ModelUpdateEncoder("ctr", 1, clock=SystemClock(), record_bytes_max=limit)
    await write(models, small.encode([np.random.default_rng(7).normal(size=20_000)]))
    assert (await last_update(models, "ctr")) is not None


async def test_the_last_update_is_before_open_and_aborted_transactions(models: Topic) -> None:
    """A publisher with checkpoints nearly always has an open transaction."""
    await models.create(partitions=3)
    await write(models, update_of((1, 1), partition=2), update_of((1, 2), partition=2))
    transactions = await models.open_transactions(f"{models.name}-job")
    try:
        for decide in (transactions.abort, transactions.commit):
            await transactions.begin()
            await transactions.write(models, encoder(1, 3, partition=2).encode([np.zeros(1)] * 100))
            last = await asyncio.wait_for(last_update(models, "ctr"), PATIENCE_S)
            assert last is not None
            assert last.rank == (1, 2)
            await decide()
    finally:
        await transactions.close()
    last = await last_update(models, "ctr")
    assert last is not None
    assert last.rank == (1, 102)


async def test_a_served_model_follows_through_transactions(models: Topic) -> None:
    """All chunks of one transaction must become visible together, and chunks of an aborted transaction never."""
    await models.create()
    chunked = encoder(1, 1, record_bytes_max=1000, clock=SystemClock())
    transactions = await models.open_transactions(f"{models.name}-job")
    try:
        async with ServedModel(models, "ctr") as served:
            waiting = asyncio.create_task(served.predict_when_ready(np.ones(500), timeout_s=PATIENCE_S))
            await transactions.begin()
            await transactions.write(models, encoder(9, 9).encode([np.zeros(500)]))
            await transactions.abort()
            first = chunked.encode([np.ones(500)])
            await transactions.begin()
            await transactions.write(models, selected(first, 0, 1))
            await transactions.write(models, selected(first, *range(2, len(first))))
            await transactions.commit()
            prediction = await waiting
            assert (prediction.generation, prediction.version, prediction.value) == (1, 1, 500.0)
    finally:
        await transactions.close()


async def test_a_missing_topic_is_an_error(models: Topic) -> None:
    """A mistyped topic must not look like a model that was never published."""
    with pytest.raises(TopicNotFound):
        await next_run(models, "ctr")


async def test_a_broker_that_compacts_keeps_each_chain(models: Topic) -> None:
    """The cleaner of a broker had dropped a change that the last version needed, and a new consumer had no model."""
    settings = {
        "cleanup.policy": "compact",
        "segment.bytes": "1048576",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.001",
        "delete.retention.ms": "0",
        "max.message.bytes": "20000",
    }
    await models.create(settings=settings)
    limit = record_limit(await models.describe())
    one = ModelUpdateEncoder("ctr", 1, clock=SystemClock(), record_bytes_max=limit, changes=True)
    weights, random = np.zeros(20_000), np.random.default_rng(1)
    written = 0
    async with asyncio.timeout(PATIENCE_S):
        # Until the cleaner has dropped the first base.
        while written < 20 or (await models.describe()).offsets[0][1] - await records_in(models) < 40:
            weights[random.integers(0, len(weights), 2_000)] += 1.0
            await write(models, one.encode([weights]))
            written += 1
            for update in [
                await last_update(models, "ctr"),
                *[u async for u in model_updates(models, "ctr", follow=False)][-1:],
            ]:
                assert update is not None
                assert update.version == written
                assert np.array_equal(update.parameters, weights)  # type: ignore[arg-type]
            await asyncio.sleep(0.1)  # The cleaner works in real time.


async def records_in(given: Topic) -> int:
    reader = await given.open_reader(ReadRequest(stop="latest"))
    count = 0
    while (batch := await reader.read()) is not None:
        count += len(batch)
    await reader.close()
    return count
