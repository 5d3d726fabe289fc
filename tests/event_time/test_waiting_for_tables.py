"""A stream waits until an endless table has been read to the end that its topic had at the start, and at a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.kafka_fixtures import GivenKafka
from support.waiting import turn, until

from streamiter import Checkpoints, Flow, RocksState
from streamiter.operators.source import Collected
from streamiter.runtime.job import Job
from streamiter.runtime.plan import ChannelLimits
from streamiter.topics import MemoryBroker, OutgoingBatch, Topic, topic

MakeTopic = Callable[[str], Topic]
KEYS = 40


@pytest.fixture(params=["memory", "sqlite", "kafka"])
def make_topic(request: pytest.FixtureRequest, tmp_path: Path, topic_prefix: str) -> MakeTopic:
    if request.param == "memory":
        return MemoryBroker().topic
    if request.param == "sqlite":
        return lambda name: topic(f"sqlite:///{tmp_path}/data.db?topic={name}")
    broker: GivenKafka = request.getfixturevalue("kafka_broker")
    return lambda name: topic(f"kafka://{broker.bootstrap}/{topic_prefix}{name}")


async def write(made: Topic, records: list[Any], partition: int | None = None) -> None:
    writer = await made.open_writer()
    keys = [b"%d" % (record["id"] if isinstance(record, dict) else record) for record in records]
    await writer.write(OutgoingBatch([orjson.dumps(record) for record in records], keys, partition=partition))
    await writer.close()


async def abort(made: Topic, records: list[Any], partition: int) -> None:
    """Leave offsets without records at the end of a partition."""
    transactions = await made.open_transactions(f"abort {made.name}")
    await transactions.begin()
    await transactions.write(made, OutgoingBatch([orjson.dumps(each) for each in records], partition=partition))
    await transactions.abort()
    await transactions.close()


class Held:
    """Lets the records of a table pass when it is told so."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, change: Any) -> Any:
        await self.go.wait()
        return change


def flow_of(numbers: Topic, names: Topic, held: Held, *, state: Any = None) -> tuple[Flow, Collected]:
    """Return a flow that joins numbers with an endless table of names, behind steps and other subtasks."""
    flow = Flow("names", parallelism=2, state=state)
    changes = flow.source(names, name="changes").map_async(held, name="held").partition_by(lambda each: each["id"])
    more = flow.from_items([{"id": KEYS, "name": "bounded"}], name="more", parallelism=1)
    table = changes.filter(lambda change: change["id"] >= 0, parallelism=3).union(more).key_by(lambda each: each["id"])
    stream = flow.source(numbers, name="numbers").map(int).key_by(lambda number: number)
    return flow, stream.join_table(table, value="name", time="processing", name="joined").collect(name="found")


async def started(flow: Flow, folder: Path) -> Job:
    checkpoints = Checkpoints(folder, interval_s=0.01)
    return await flow.start(checkpoints=checkpoints, restore="last", channel_limits=ChannelLimits(records=16))


@pytest.mark.parametrize("make_topic", ["memory", "sqlite", "kafka"], indirect=True)
async def test_the_stream_waits_at_each_start_until_the_table_is_read_to_its_end(
    make_topic: MakeTopic, tmp_path: Path
) -> None:
    """A job was started again, and joined its first records with yesterday's table."""
    numbers, names = make_topic("numbers"), make_topic("names")
    await numbers.create(partitions=2)
    await names.create(partitions=4, settings=names.compaction_settings)  # The last one is empty.
    for version in ("old", "new"):
        await write(names, [{"id": n, "name": f"{version} {n}"} for n in range(KEYS)], partition=0)
    await write(names, [{"id": n, "name": None} for n in range(0, KEYS, 4)], partition=0)
    if names.has_transactions:
        await abort(names, [{"id": 1, "name": "aborted"}], partition=0)
        await abort(names, [{"id": 1, "name": "aborted"}], partition=2)
    await write(numbers, list(range(KEYS + 2)) * 20)
    state = RocksState(tmp_path / "states") if "memory" in numbers.url else None

    flow, found = flow_of(numbers, names, held := Held(), state=state)
    job = await started(flow, tmp_path)
    await until(lambda: (job.statistics().checkpoints or pytest.fail("none")).taken > 3)
    statistics = job.statistics()
    assert "joined[0] waits for its table" in statistics.title
    waiting = [task for task in statistics.tasks if task.waits_for]
    assert [task.name for task in waiting] == ["joined[0]", "joined[1]"]
    assert "its input 'table' must first be read to the end that was found at the start: " in (
        waiting[0].waits_for or ""
    )
    assert found.items == []
    assert all(task.held_records for task in waiting), "a barrier passes before the records that wait"
    held.go.set()
    await until(lambda: len(found.items) == 20 * (KEYS + 2))
    expected = {n: None if n % 4 == 0 or n > KEYS else f"new {n}" for n in range(KEYS + 2)} | {KEYS: "bounded"}
    assert dict(found.items) == expected
    assert sorted(found.items, key=str) == sorted([*expected.items()] * 20, key=str)
    assert not any(task.waits_for for task in job.statistics().tasks)
    # The table is endless: its changes arrive later, too.
    await write(names, [{"id": 0, "name": "back"}], partition=2)
    while (0, "back") not in found.items:
        await write(numbers, [0])
        await turn()
    await job.stop("suspend")

    # While no job runs, both change; the next one waits for the end that the table has now.
    await write(names, [{"id": n, "name": f"newest {n}"} for n in range(KEYS)], partition=1)
    await write(numbers, list(range(KEYS)))
    flow, again = flow_of(numbers, names, held := Held(), state=state)
    job = await started(flow, tmp_path)
    await until(lambda: (job.statistics().checkpoints or pytest.fail("none")).taken > 3)
    assert len(again.items) == len(found.items)
    held.go.set()
    await until(lambda: {(n, f"newest {n}") for n in range(KEYS)} <= {*again.items})
    new = again.items[len(found.items) :]
    assert all(name == f"newest {n}" for n, name in new), new
    await job.stop("suspend")

    # Nothing is new: a job whose positions are at the end does not wait.
    flow, last = flow_of(numbers, names, Held(), state=state)
    job = await started(flow, tmp_path)
    await write(numbers, [1])
    await until(lambda: last.items[-1] == (1, "newest 1") and len(last.items) > len(again.items))
    assert not any(task.waits_for for task in job.statistics().tasks)
    await job.stop("drain")
    assert (await job.wait()).state == "finished"
