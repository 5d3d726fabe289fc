"""A flow of running sums with checkpoints, and its topics in memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
from support.waiting import until

from streamiter import Checkpoints, Flow
from streamiter.engine.job.job import Job
from streamiter.engine.storage.store import CheckpointStore
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic

RARELY_S = 100.0


def settings(folder: Path | CheckpointStore, **options: Any) -> Checkpoints:
    """Return checkpoints that are taken on request."""
    return Checkpoints(folder, **{"interval_s": RARELY_S, **options})


async def written(topic: Topic) -> list[Any]:
    """Return the records that a reader of committed records receives now."""
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    values: list[Any] = []
    while (batch := await reader.read()) is not None:
        values += [orjson.loads(value) for value in batch.values if value is not None]
    await reader.close()
    return values


async def write(topic: Topic, values: Iterable[Any]) -> None:
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch([orjson.dumps(value) for value in values]))
    await writer.close()


async def broker_of_sums() -> MemoryBroker:
    """Return a broker with the topics that :func:`summing` reads and writes."""
    broker = MemoryBroker()
    await broker.topic("numbers").create()
    await broker.topic("sums").create()
    return broker


def summing(broker: MemoryBroker, *, name: str = "sums of numbers", stop: Any = None, **sink: Any) -> Flow:
    """Return a flow of running sums, one for each parity."""
    flow = Flow(name)
    numbers = flow.source(broker.topic("numbers"), stop=stop)
    sums = numbers.key_by(lambda number: number % 2).reduce(lambda a, b: a + b, name="sum")
    sums.sink(broker.topic("sums"), **sink)
    return flow


def expected(count: int) -> list[int]:
    sums = [0, 0]
    seen = []
    for number in range(count):
        sums[number % 2] += number
        seen.append(sums[number % 2])
    return seen


async def handled(job: Job, step: str, count: int) -> None:
    await until(lambda: job.statistics().step(step).records_in >= count)
