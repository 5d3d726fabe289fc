"""A model is rolled back while its trainer runs, and while it is dead: the trainer resumes from the old state."""

import itertools
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from support.kafka_fixtures import GivenKafka
from support.kafka_server import KafkaServer
from support.processes import async_process

from streamiter.learn import AdaptiveLinearModel
from streamiter.models import ModelUpdate, model_updates, roll_back
from streamiter.models.update import UpdateHeaders
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, topic

TRAINER = Path(__file__).with_name("rolled_back_trainer.py")


def rows(count: int, seed: int, *, turned: bool = False) -> list[dict[str, Any]]:
    """Return rows; ``turned`` ones have the wrong labels, and make a model bad."""
    random = np.random.default_rng(seed)
    km = random.normal(size=count)
    towns = random.choice(["Rome", "Oslo"], count)
    return [
        {"km": float(x), "town": str(town), "late": bool((x > 0) != turned)} for x, town in zip(km, towns, strict=True)
    ]


async def write(events: Topic, records: list[dict[str, Any]]) -> None:
    writer = await events.open_writer()
    await writer.write(OutgoingBatch([orjson.dumps(record) for record in records]))
    await writer.close()


async def learned_first(events: Topic, updates: Topic) -> dict[str, Any]:
    """Return the first row that was learned by the old state: the trainer hears of a rollback a moment later.

    Each row is written when the version with the row before it is published.
    """
    ends = (await updates.describe()).offsets
    reader = await updates.open_reader(ReadRequest(start={number: end for number, (_, end) in ends.items()}))
    for seed in itertools.count(100):
        [row] = rows(1, seed)
        await write(events, [row])
        batch = await reader.read()
        assert batch is not None
        if UpdateHeaders.parse(batch.headers[-1]).since_rollback is not None:
            await reader.close()
            return row
    raise AssertionError


def learned_since(update: ModelUpdate, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the parameters of a model that starts from an update and learns the records, in one process."""
    model = AdaptiveLinearModel()
    assert isinstance(update.parameters, dict)
    model.start_from(update.parameters, records=update.records or 0)
    features = [{name: value for name, value in record.items() if name != "late"} for record in records]
    model.learn(features, [record["late"] for record in records])
    assert model.records == (update.records or 0) + len(records)
    return model.parameters(state=False)


def assert_same(update: ModelUpdate, expected: dict[str, Any]) -> None:
    assert isinstance(update.parameters, dict)
    np.testing.assert_equal(update.parameters, expected)


async def test_a_killed_trainer_resumes_from_the_rollback_and_from_nothing_else(
    kafka_broker: KafkaServer | GivenKafka, topic_prefix: str, tmp_path: Path
) -> None:
    """The trainer continued with the bad model after a restart, and its next version replaced the rollback."""
    base = f"kafka://{kafka_broker.bootstrap}/{topic_prefix}"
    events, updates = topic(f"{base}events"), topic(f"{base}updates")
    await events.create()
    await updates.create()
    command = [sys.executable, TRAINER, f"{base}events", f"{base}updates", tmp_path]

    def trainer() -> AbstractAsyncContextManager[Any]:
        return async_process(command, is_forked=True)

    async with model_updates(updates, "flights") as followed:

        async def version(records: int, generation: int) -> ModelUpdate:
            """Return the version that has learned from this many rows."""
            async for update in followed:
                assert update.generation == generation
                if update.records == records:
                    return update
            raise AssertionError

        async with trainer() as process:
            await write(events, rows(300, 1))
            good = await version(300, generation=1)
            await write(events, rows(300, 2, turned=True))
            await version(600, generation=1)
            # While it runs: the next rows are learned by the old state.
            rolled_back = await roll_back(updates, "flights", f"{good.generation}.{good.version}")
            assert (await anext(followed)).rank == rolled_back.rank == (2, 1)
            first = await learned_first(events, updates)
            after = [first, *rows(200, 3)]
            await write(events, after[1:])
            resumed = await version(501, generation=2)
            assert resumed.since_rollback == (2, 1)
            assert_same(resumed, learned_since(good, after))
            process.kill()
        # Dead: the checkpoint has a model that was rolled back since.
        again = await roll_back(updates, "flights", f"{good.generation}.{good.version}")
        assert (await anext(followed)).rank == again.rank == (3, 1)
        await write(events, rows(100, 4))
        async with trainer() as process:
            update = await version(400, generation=4)
            assert update.since_rollback == (3, 1)
            assert_same(update, learned_since(good, rows(100, 4)))
            process.kill()
        # Killed again: the state since the rollback is that of the checkpoint.
        await write(events, rows(100, 5))
        async with trainer() as process:
            update = await version(500, generation=4)
            assert update.since_rollback == (3, 1)
            # Not killed: with an open transaction it would delay the starts of other flows on this broker.
            process.terminate()
            assert await process.wait() == 0
