"""Cases of sources and sinks: positions, and the generation and versions of published models."""

import asyncio
from typing import Any

import numpy as np
from restore.case import Case, fed

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    Json,
    Stream,
    epochs_every,
    feedback_through,
    iterate_unbounded_streams,
    topic,
)
from streamiter.models import ModelSnapshot, initial_model
from streamiter.models.publisher import ModelPublisher, ModelUpdateEncoder
from streamiter.topics import MemoryBroker, OutgoingBatch, Topic
from streamiter.topics.memory import MemoryReader
from streamiter.topics.source_and_sink import TopicSink, TopicSource

PARTITIONS = 5


def memory_topic(values: list[list[bytes]]) -> Topic:
    """Return a topic with these values; each list is a partition."""
    made = MemoryBroker().topic("clicks")
    asyncio.run(written(made, values))
    return made


async def written(made: Topic, values: list[list[bytes]], **options: Any) -> None:
    """Create a topic, and write values to its partitions."""
    await made.create(partitions=len(values), **options)
    writer = await made.open_writer()
    for partition, some in enumerate(values):
        if some:
            await writer.write(OutgoingBatch(some, partition=partition))
    await writer.close()


def numbered(partitions: int = PARTITIONS, records: int = 3) -> list[list[bytes]]:
    """Return JSON texts for each partition except the last, which is empty."""
    full = [[b'{"n":%d}' % (100 * number + n) for n in range(records)] for number in range(partitions - 1)]
    return [*full, []]


def given_items(flow: Flow) -> dict[str, Stream]:
    items = flow.from_items(np.arange(20_000.0), name="items").batch(3_000)
    listed = flow.from_items(list(range(9)), name="dealt out", parallelism=2)
    rows = flow.from_items(Columns({"x": np.arange(5)}), name="rows")
    return {"batches": items, "listed": listed, "rows": rows}


def memory_source(flow: Flow) -> Stream:
    return flow.source(memory_topic(numbered()), stop="latest", parallelism=2)


def memory_source_from_offsets(flow: Flow) -> Stream:
    return flow.source(memory_topic(numbered()), start={0: 2, 1: 1, 2: 0, 3: 3, 4: 0}, stop={0: 3, 1: 2, 3: 3})


def sunk(flow: Flow) -> dict[str, Any]:
    records = fed(flow, [{"n": n} for n in range(6)])
    records.sink(memory_topic([[], []]), key=lambda record: str(record["n"]), name="sink")
    return {"records": records}


def models(flow: Flow) -> Stream:
    """Return a stream of models that all differ."""
    made = [{"weights": np.full(3, n / 7), "intercept": 0.5} for n in range(4)]
    return fed(flow, [*made[:2], ModelSnapshot(made[2], records=7, metrics={"loss": 0.1}), made[3]], name="models")


def published(flow: Flow) -> dict[str, Stream]:
    given = models(flow)
    given.publish_model(memory_topic([[]]), model="ctr")
    return {"models": given}


def warm_start(flow: Flow) -> Stream:
    made = MemoryBroker().topic("models")
    asyncio.run(written(made, [[]]))
    source = initial_model(made, model="ctr", default=np.array([0.5, 1.0]))
    return flow.from_source(source, name="initial", parallelism=2)


CASES = [
    Case(given_items, (), {"cuts": 6}),
    Case(memory_source, (TopicSource, MemoryReader)),
    Case(memory_source_from_offsets, (TopicSource, MemoryReader)),
    Case(sunk, (TopicSink,)),
    Case(published, (TopicSink, ModelPublisher, ModelUpdateEncoder)),
    Case(warm_start, ()),
]


# -- topics that outlive a process, made by the tests -----------------------------------------------------------


def stored_source(url: str, flow: Flow) -> Stream:
    """Return a stream of the decoded records that are in a topic now."""
    return flow.source(topic(url), stop="latest", parallelism=2, name="source")


def stored_sink(url: str, flow: Flow) -> Stream:
    """Build a flow that writes numbers to a topic."""
    records = fed(flow, [{"n": n} for n in range(6)])
    records.sink(topic(url), encode=Json(), name="sink")
    return records


def stored_models(url: str, flow: Flow) -> Stream:
    """Build a flow that publishes models to a topic."""
    given = models(flow)
    given.publish_model(topic(url), model="ctr")
    return given


def loop_through_a_topic(url: str, flow: Flow) -> Stream:
    """Build a loop whose records pass a topic several times."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[list[Stream]]:
        seen = variables[0].union(data[0]).map(lambda x: x)
        back = seen.filter(lambda x: x[1] > 0).map(lambda x: (x[0], x[1] - 1))
        return IterationBodyResult([feedback_through(back, topic(url))], [seen])

    initial = fed(flow, [(100 + number, number % 3) for number in range(4)], name="initial")
    data = epochs_every(fed(flow, [(number, number % 4) for number in range(9)], name="data"), records=2)
    [seen] = iterate_unbounded_streams([initial], [data], body)
    return seen
