"""A stream waits until an endless table has been read to the end that its topic had at the start, and at a restart."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.kafka_fixtures import GivenKafka
from support.waiting import turn, until

from streamiter import Checkpoints, Flow, IterationBodyResult, RocksState, Stream, iterate_unbounded_streams
from streamiter.engine.graph.channels import Channel
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.inbox.port_progress import AwaitedInput
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import GraphError
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.operators import Source
from streamiter.operators.source import Collected
from streamiter.topics import MemoryBroker, OutgoingBatch, Topic, topic
from streamiter.values.plain_data import PlainData
from streamiter.values.records import CheckpointBarrier, Control, DataBatch, EndOfInput, ReadToEnd

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
    values = [orjson.dumps(each) for each in records]  # A compacted topic takes no record without a key.
    await transactions.write(made, OutgoingBatch(values, [b"key"] * len(values), partition=partition))
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


def taken(job: Job) -> int:
    """Return the number of committed checkpoints."""
    checkpoints = job.statistics().checkpoints
    return 0 if checkpoints is None else checkpoints.taken


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
    await write(names, [{"id": n, "name": f"old {n}"} for n in range(KEYS)], partition=0)
    if names.has_transactions:
        await abort(names, [{"id": 1, "name": "aborted"}], partition=0)
        await abort(names, [{"id": 1, "name": "aborted"}], partition=2)
    await write(numbers, list(range(KEYS + 2)) * 20)
    state = RocksState(tmp_path / "states") if "memory" in numbers.url else None

    flow, _ = flow_of(numbers, names, Held(), state=state)
    job = await started(flow, tmp_path)
    await until(lambda: taken(job) > 3)
    await job.stop("suspend")

    # The table has changed since: the end that the first job has found is not the end now.
    await write(names, [{"id": n, "name": f"new {n}"} for n in range(KEYS)], partition=0)
    await write(names, [{"id": n, "name": None} for n in range(0, KEYS, 4)], partition=0)
    flow, found = flow_of(numbers, names, held := Held(), state=state)
    job = await started(flow, tmp_path)
    await until(lambda: taken(job) > 3)
    statistics = job.statistics()
    assert statistics.title.endswith(" s, joined waits for its table")
    waiting = [task for task in statistics.tasks if task.waits_for]
    assert [task.name for task in waiting] == ["joined[0]", "joined[1]"]
    assert "its input 'table' must first be read to its end: " in (waiting[0].waits_for or "")
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
    await until(lambda: taken(job) > 3)
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


class Endless(Source):
    bounded = False


def by_self(stream: Stream[Any]) -> KeyedStream[Any, Any]:
    return stream.key_by(lambda record: record)


async def test_memory_is_bounded_while_the_stream_waits_for_a_table_that_always_grows(tmp_path: Path) -> None:
    """A stream was faster than its table; the job held a day of it until it was killed."""
    made, records = MemoryBroker(), 100_000
    await made.topic("numbers").create()
    await made.topic("names").create(partitions=3)
    await write(made.topic("numbers"), [n % KEYS for n in range(records)])
    await write(made.topic("names"), [{"id": n, "name": "first"} for n in range(KEYS)])
    flow, found = flow_of(made.topic("numbers"), made.topic("names"), held := Held())
    job = await started(flow, tmp_path)

    async def grow() -> None:
        while True:
            await write(made.topic("names"), [{"id": n, "name": "later"} for n in range(KEYS)])
            await asyncio.sleep(0)

    growing = asyncio.create_task(grow())
    await until(lambda: any(task.is_paused for task in job.statistics().tasks if task.name == "numbers[0]"))
    before = taken(job)
    await until(lambda: taken(job) > before + 2)
    assert sum(task.held_records for task in job.statistics().tasks) < records / 2
    held.go.set()
    await until(lambda: len(found.items) == records)
    growing.cancel()
    assert {name for n, name in found.items} <= {"first", "later"}
    await job.stop("abort")


@pytest.mark.parametrize("make_topic", ["memory", "sqlite"], indirect=True)
async def test_keys_whose_records_are_compacted_while_the_table_is_read_are_there_when_the_stream_begins(
    make_topic: MakeTopic, tmp_path: Path
) -> None:
    """A name changed after the start, before its old record was read: that was gone, and the new one behind the end."""
    numbers, names = make_topic("numbers"), make_topic("names")
    await numbers.create()
    await names.create(partitions=12, settings={**names.compaction_settings, **names.eager_compaction_settings})
    ids = range(KEYS + 1, KEYS + 2401)
    await write(names, [{"id": n, "name": "first"} for n in ids])
    await write(numbers, [*ids])
    flow, found = flow_of(numbers, names, held := Held())
    job = await started(flow, tmp_path)
    await until(lambda: taken(job) > 0)
    await write(names, [{"id": n, "name": "later"} for n in ids])
    held.go.set()
    await until(lambda: len(found.items) == len(ids))
    assert {name for _, name in found.items} <= {"first", "later"}
    await job.stop("abort")


async def test_a_job_that_waits_says_so_and_can_be_drained() -> None:
    made = MemoryBroker()
    for name in ("numbers", "names"):
        await made.topic(name).create()
        await write(made.topic(name), [{"id": 1, "name": "one"}] if name == "names" else [1, 2])
    flow, found = flow_of(made.topic("numbers"), made.topic("names"), held := Held())
    job = await flow.start(stall_after_s=0.04)
    await until(lambda: any(each.cause == "held" for each in job.statistics().stalled))
    [reason, *_] = [each.reason for each in job.statistics().stalled if each.cause == "held" and "joined" in each.name]
    assert re.match(r"joined\[.\] is held: its input 'table' must first be read to its end: ", reason)
    held.go.set()
    await job.stop("drain")
    assert dict(found.items) == {1: "one", 2: None}


async def test_a_job_that_waits_is_drained_when_the_table_is_read(tmp_path: Path) -> None:
    """A drained job had joined the records that were read already with a part of its table."""
    made, records = MemoryBroker(), 2_000
    await made.topic("numbers").create()
    await made.topic("names").create(partitions=16)  # A batch has records of one partition.
    await write(made.topic("names"), [{"id": n % KEYS, "name": f"{n // KEYS}"} for n in range(records)])
    await write(made.topic("numbers"), list(range(8)))
    flow, _ = flow_of(made.topic("numbers"), made.topic("names"), Held())
    job = await started(flow, tmp_path)
    draining = asyncio.create_task(job.stop("drain"))
    before = taken(job)
    await until(lambda: taken(job) > before + 2)
    assert (await job.stop("suspend")).state == (await draining).state == "suspended"

    # No source had ended; so the next job reads new records of both topics.
    await write(made.topic("names"), [{"id": n, "name": "last"} for n in range(KEYS)])
    await write(made.topic("numbers"), list(range(8)))
    flow, found = flow_of(made.topic("numbers"), made.topic("names"), held := Held())
    job = await started(flow, tmp_path)
    before = taken(job)
    await until(lambda: taken(job) > before + 2)
    draining = asyncio.create_task(job.stop("drain"))
    await turn()
    held.go.set()
    assert (await draining).state == "finished"
    assert sorted(found.items) == sorted([(n, "last") for n in range(8)] * 2)


async def test_two_tables_of_one_topic_and_a_table_of_a_file(tmp_path: Path) -> None:
    """The second join waits for a topic that the first one reads, too; neither holds up the other."""
    made, records = MemoryBroker(), 5_000
    await made.topic("names").create(partitions=2)
    await write(made.topic("names"), [{"id": n, "name": f"{n % 7}"} for n in range(records)])
    await made.topic("numbers").create()
    await write(made.topic("numbers"), list(range(records)))
    (tmp_path / "sizes.csv").write_text("name,size\n" + "".join(f"{n},{n * n}\n" for n in range(7)))
    flow = Flow("two tables", parallelism=2)
    names = flow.source(made.topic("names"))
    numbers = by_self(flow.source(made.topic("numbers")))
    by_id, by_name = names.key_by(lambda each: each["id"]), names.rebalance().key_by(lambda each: each["name"])
    named = numbers.join_table(by_id, value="name", time="processing").key_by(lambda pair: pair[1])
    known = named.join_table(by_name, time="processing", how="inner").key_by(lambda pair: pair[0][1])
    sizes = flow.source(topic(f"file:{tmp_path}/sizes.csv")).key_by(lambda row: row["name"])
    found = known.join_table(sizes, value="size", time="processing").collect()
    job = await flow.start(channel_limits=ChannelLimits(records=8))
    await until(lambda: len(found.items) == records)
    assert {(pair[0][0], int(size)) for pair, size in found.items} == {(n, (n % 7) ** 2) for n in range(records)}
    await job.stop("abort")


async def test_records_held_since_the_last_run_do_not_hold_up_the_table_that_two_joins_wait_for(tmp_path: Path) -> None:
    """A job stood still after each restart: its second join held records, so the source of its first one paused."""
    made = MemoryBroker()
    for name in ("names", "numbers"):
        await made.topic(name).create()
    await write(made.topic("names"), [{"id": n, "name": "old"} for n in range(KEYS)])
    await write(made.topic("numbers"), [n % KEYS for n in range(2_000)])

    async def job_of(held: Held) -> tuple[Job, Collected]:
        flow = Flow("names twice")
        names = flow.source(made.topic("names"), name="names")
        by_id, later = (
            stream.key_by(lambda each: each["id"]) for stream in (names, names.map_async(held, name="held"))
        )
        once = by_self(flow.source(made.topic("numbers"), name="numbers")).join_table(
            by_id, value="name", time="processing", name="once"
        )
        twice = once.key_by(lambda pair: pair[0]).join_table(later, value="name", time="processing", name="twice")
        found = twice.collect(name="found")
        return await started(flow, tmp_path), found

    job, _ = await job_of(Held())
    await until(lambda: any(task.is_paused for task in job.statistics().tasks))
    await job.stop("suspend")
    await write(made.topic("names"), [{"id": n % KEYS, "name": "new"} for n in range(2_000)])
    held = Held()
    held.go.set()
    job, found = await job_of(held)
    await until(lambda: len(found.items) == 2_000)
    assert {pair[1] for pair in found.items} == {"new"}
    await job.stop("abort")


async def test_a_table_that_is_read_later_does_not_hold_up_a_barrier_or_a_restore() -> None:
    """A snapshot held the news of an end that was found before the restart; the next job did not wait."""

    def port(index: int, name: str) -> Port:
        return Port(index, name, Channel(f"{name} {index}"))

    def inbox() -> tuple[Inbox, list[Channel]]:
        ports = [port(0, "stream"), port(1, "table"), port(2, "table")]
        made = Inbox(ports, awaited=AwaitedInput("table"))
        made.want(["table"])
        return made, [each.channel for each in ports]  # type: ignore[misc]

    def handled(made: Inbox) -> list[str]:
        seen = []
        while (polled := made.poll()) is not None:
            from_port, message = polled
            events = [message]
            if from_port is not None and isinstance(message, Control):
                events = [*made.accept(from_port, message)]
            seen += [f"{event}" for event in events]
        return seen

    first, [stream, table, other] = inbox()
    for item in (DataBatch([1]), ReadToEnd(), DataBatch([2]), CheckpointBarrier(1)):
        stream.try_put(item) if isinstance(item, DataBatch) else stream.put_control(item)
    table.put_control(ReadToEnd())
    table.put_control(CheckpointBarrier(1))
    other.put_control(CheckpointBarrier(1))
    assert handled(first) == ["CheckpointBarrier(1)"]
    assert first.unread_table() == "its input 'table' must first be read to its end: table 2"
    state = first.snapshot()
    assert [each[0] for port in state for each in port["held"]] == ["data", "data"]
    other.put_control(ReadToEnd())
    assert handled(first) == ["DataBatch(1 records, epoch 0)", "ReadToEnd()", "DataBatch(1 records, epoch 0)"]
    assert first.unread_table() is None

    again, [stream, table, other] = inbox()
    again.restore(state, PlainData())
    assert handled(again) == []
    table.put_control(EndOfInput())  # An end says as much, and a task whose inputs have all ended passes on the end.
    handled(again)
    other.put_control(ReadToEnd())
    assert [each for each in handled(again) if each.startswith("Data")] == ["DataBatch(2 records, epoch 0)"]
    other.put_control(ReadToEnd())
    stream.put_control(ReadToEnd())
    assert handled(again) == ["ReadToEnd()"]


def of_topic(flow: Flow, name: str) -> Stream[Any]:
    return flow.source(MemoryBroker().topic(name))


def crossed(flow: Flow) -> None:
    one, two = of_topic(flow, "one"), of_topic(flow, "two")
    by_self(one).join_table(by_self(two), time="processing")
    by_self(two.map(str)).join_table(by_self(one), time="processing")


def in_a_loop(flow: Flow) -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        joined = by_self(variables[0]).join_table(by_self(data[0]), time="processing")
        return IterationBodyResult([joined], [joined])

    iterate_unbounded_streams([flow.from_items([1])], [of_topic(flow, "table")], body)


def behind_a_loop(flow: Flow) -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0]], [data[0]])

    [table] = iterate_unbounded_streams([flow.from_items([1])], [of_topic(flow, "table")], body)
    by_self(of_topic(flow, "stream")).join_table(by_self(table), time="processing")


def one_source(flow: Flow) -> None:
    items = flow.from_items([1])
    by_self(items.map(str)).join_table(by_self(items), time="processing")


REFUSED: dict[Callable[[Flow], Any], str] = {
    one_source: "step 'join_table': expected a stream and a table from different sources, since the stream waits for "
    "the table, given 'items', which both need; read it twice, or write wait_for_table=False",
    crossed: "given 'two', which both need",
    in_a_loop: "step 'join_table': expected an endless table from outside of iterations and without epochs, since the "
    "stream waits for it, given one that comes through 'data 0'",
    behind_a_loop: "step 'join_table': expected an endless table from outside of iterations",
    lambda flow: by_self(of_topic(flow, "one")).join_table(by_self(flow.from_source(Endless)), time="processing"): (
        "step 'join_table': expected a table that ends or comes from topics, since the stream waits for it, given one "
        "from the source 'Endless', which never ends; write wait_for_table=False"
    ),
}


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_a_join_that_would_wait_for_ever_is_refused(build: Callable[[Flow], Any]) -> None:
    """A flow with a large topic stood still: its stream was full, and its table behind the same source."""
    flow = Flow("refused")
    with pytest.raises(GraphError) as refused:
        build(flow)
    assert REFUSED[build] in str(refused.value)
    assert "test_waiting_for_tables.py:" in str(refused.value)
