"""Committed positions on a broker: what jobs do with them, and the commit topic, which stays small."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import crash.mortal
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from crash.places import KAFKA_COMMIT
from crash.test_kill_9 import seed
from job_faults.service import Serve, Service, nothing_unheard, one_line
from support.kafka_retention import delete_records
from support.processes import async_process
from support.soak import in_soak
from support.waiting import PATIENCE_S
from topics.topic_case import created, numbered, numbers_of, patiently, read_to_end, write, write_transaction

from streamiter import Checkpoints, Flow
from streamiter.errors import GraphError, JobFailed, OffsetOutOfRange, ProducerFenced, TopicError
from streamiter.topics import OutgoingBatch, Topic, topic
from streamiter.topics.compacted import ensure_commit_topic, last_value
from streamiter.values.helpers.clock import SystemClock

MakeTopic = Callable[..., Topic]
CHILD = Path(__file__).with_name("committed_child.py")
MORTAL = Path(crash.mortal.__file__)
PATIENT = ["0.02", f"{PATIENCE_S}"]
"""Commits every 20 ms, and transactions that end only with their process, also on a busy machine."""


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask a broker until a condition is true."""

    async def ask() -> None:
        while not await condition():
            pass

    await patiently(ask())


# -- kill -9 -------------------------------------------------------------------------------------------------

LIVES = 4


@pytest.mark.parametrize(
    ("numbers_in", "doubled_in", "delivery", "is_once"),
    [
        ("kafka", "kafka", "", True),
        ("kafka", "sqlite", "", False),
        *in_soak(("kafka", "kafka", "at_least_once", False), ("sqlite", "sqlite", "", True)),
    ],
)
async def test_a_job_that_is_killed_at_random_moments_loses_nothing_and_repeats_nothing_if_it_says_so(
    kafka_topic: MakeTopic, tmp_path: Path, numbers_in: str, doubled_in: str, delivery: str, is_once: bool
) -> None:
    """A job without checkpoints read everything again after a crash: 2,000 outputs of 1,000 records."""
    random = Random(f"{seed()} {numbers_in} {doubled_in} {delivery}")

    def made(kind: str, name: str) -> Topic:
        return kafka_topic(name) if kind == "kafka" else topic(f"sqlite:///{tmp_path}/topics.db?topic={name}")

    numbers, doubled = made(numbers_in, "numbers"), made(doubled_in, "doubled")
    await numbers.create(partitions=2)
    await doubled.create(partitions=2)
    arguments = [str(CHILD), kafka_topic("flow").name, numbers.url, doubled.url, delivery]
    has_transactions = (doubled_in, delivery) == ("kafka", "")
    partition_of: dict[int, int] = {}
    for life in range(LIVES):
        # Each second life ends at a place of a commit, which a moment hits once in a thousand lives.
        place, call = random.choice(KAFKA_COMMIT), random.randint(1, 8)
        mortal = [str(MORTAL), *place, str(call), str(int(signal.SIGKILL))] if has_transactions and life % 2 else []
        async with async_process([sys.executable, *mortal, *arguments, "", *PATIENT], is_forked=True) as child:
            end = (await doubled.describe()).records + random.randint(1, 400)

            async def is_over(child: Any = child, end: int | None = None if mortal else end) -> bool:
                written, chunk, partition = len(partition_of), random.randint(1, 50), random.randint(0, 1)
                added = range(written, written + chunk)
                await write(numbers, OutgoingBatch(numbered(added), partition=partition))
                partition_of.update(dict.fromkeys(added, partition))
                return child.returncode is not None or (end is not None and (await doubled.describe()).records >= end)

            await until(is_over)
            child.kill()
            assert await patiently(child.wait()) == -signal.SIGKILL
    async with async_process([sys.executable, *arguments, "latest", *PATIENT], is_forked=True) as child:
        assert await patiently(child.wait()) == 0
    records = await read_to_end(doubled)
    assert {int(record.value or b"") for record in records} == {2 * number for number in partition_of}
    if is_once:
        assert len(records) == len(partition_of)
        # A partition of the output has the records of a partition of the input in order.
        from_one = defaultdict(list)
        for record in records:
            number = int(record.value or b"") // 2
            from_one[record.partition, partition_of[number]].append(number)
        assert all(each == sorted(each) for each in from_one.values())


# -- SIGSTOP -------------------------------------------------------------------------------------------------

_FROZEN_S = 2.5  # longer than the transaction may last, and than the broker needs to notice that


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_job_that_was_frozen_for_too_long_resumes_unless_it_was_replaced(
    kafka_topic: MakeTopic, is_replaced: bool
) -> None:
    """A machine that woke up ended the run that had replaced it, or stayed down although no run had."""
    numbers, doubled = kafka_topic("numbers"), kafka_topic("doubled")
    await numbers.create()
    await doubled.create()
    names = [kafka_topic("flow").name, numbers.url, doubled.url]
    command = [sys.executable, str(CHILD), *names, "", "", "0.5", "1.5"]  # It is frozen for longer than that.

    async def until_there(count: int, *, is_committed: bool = True) -> None:
        async def are_there() -> bool:
            seen = await read_to_end(doubled) if is_committed else range((await doubled.describe()).records)
            return len(seen) >= count

        await until(are_there)

    async with async_process(command, is_forked=True, stderr=asyncio.subprocess.PIPE) as frozen:
        await write(numbers, numbered(range(10)))
        await until_there(10, is_committed=False)
        frozen.send_signal(signal.SIGSTOP)
        await asyncio.sleep(_FROZEN_S)  # The broker measures real time, which no condition signals.
        assert await read_to_end(doubled) == []
        async with contextlib.AsyncExitStack() as stack:
            if is_replaced:
                await stack.enter_async_context(async_process(command, is_forked=True))
                await until_there(10)
            frozen.send_signal(signal.SIGCONT)
            if is_replaced:
                assert await patiently(frozen.wait()) == 1
                assert frozen.stderr is not None
                assert b"another run of the flow has taken over" in await patiently(frozen.stderr.read())
            await write(numbers, numbered(range(10, 20)))
            await until_there(20)
    assert sorted(numbers_of(await read_to_end(doubled))) == [2 * number for number in range(20)]


# -- positions -----------------------------------------------------------------------------------------------


async def positions_of(broker: str, flow: str) -> dict[int, int]:
    """Return the offsets of the group of a flow, as Kafka's own tools show them."""
    admin = AIOKafkaAdminClient(bootstrap_servers=broker)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(f"streamiter-{flow}")
    finally:
        await admin.close()
    return {partition.partition: offset.offset for partition, offset in found.items()}


async def set_position(broker: str, flow: str, made: Topic, offset: int) -> None:
    """Set the offset of a group in partition 0, as ``kafka-consumer-groups --reset-offsets`` does."""
    consumer = AIOKafkaConsumer(group_id=f"streamiter-{flow}", bootstrap_servers=broker, enable_auto_commit=False)
    await consumer.start()
    try:
        consumer.assign([TopicPartition(made.name, 0)])
        await consumer.commit({TopicPartition(made.name, 0): offset})
    finally:
        await consumer.stop()


class Job:
    """A flow that doubles numbers, and its topics."""

    def __init__(self, serve: Serve, numbers: Topic, doubled: Topic) -> None:
        self.name = f"{numbers.name}-flow"
        self.numbers = numbers
        self.doubled = doubled
        self._serve = serve

    def run(self, *, first_start: Any = None, **options: Any) -> Service:
        flow = Flow(self.name)
        read = flow.source(self.numbers, start="committed", first_start=first_start, name="numbers")
        read.map(lambda number: 2 * number).sink(self.doubled)
        return self._serve(flow, Checkpoints(interval_s=0.05), **options)

    async def write(self, *numbers: int, partition: int = 0) -> None:
        await write(self.numbers, OutgoingBatch(numbered(numbers), partition=partition))

    async def outputs(self) -> list[int]:
        return sorted(numbers_of(await read_to_end(self.doubled)))

    async def until_written(self, count: int) -> None:
        async def is_written() -> bool:
            return len(await self.outputs()) >= count

        await until(is_written)


@pytest.fixture
async def job(serve: Serve, kafka_topic: MakeTopic) -> Job:
    """Return a job whose topics are on the broker of all tests."""
    made = Job(serve, kafka_topic("numbers"), kafka_topic("doubled"))
    await made.numbers.create()
    await made.doubled.create()
    return made


async def test_tools_of_kafka_see_and_set_the_positions_of_a_job(
    job: Job, kafka_broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No tool showed the lag of the job, and records could not be read again without another name of the flow."""
    with nothing_unheard(caplog):
        service = job.run()
        await job.write(*range(10))
        await job.until_written(10)
        assert await positions_of(kafka_broker.bootstrap, job.name) == {0: 10}
        await service.suspended()
        await set_position(kafka_broker.bootstrap, job.name, job.numbers, 7)
        service = job.run()
        await job.until_written(13)
        await service.suspended()
    assert await job.outputs() == sorted(2 * number for number in (*range(10), 7, 8, 9))
    assert await positions_of(kafka_broker.bootstrap, job.name) == {0: 10}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


async def test_the_end_of_a_transaction_is_no_lag_and_does_not_fall_out_of_retention(
    job: Job, kafka_broker: Any
) -> None:
    """A job that had read everything showed a lag for ever, and after the retention time it did not start any more."""
    transactions = await job.numbers.open_transactions(f"{job.name}-before")
    service = job.run()
    await write_transaction(transactions, job.numbers, numbered(range(10)), commit=True)
    await transactions.close()
    await job.until_written(10)
    [(_, end)] = (await job.numbers.describe()).offsets.values()
    assert end == 11

    async def is_at_end() -> bool:
        return await positions_of(kafka_broker.bootstrap, job.name) == {0: end}

    await until(is_at_end)
    await service.suspended()
    # As an earlier job, or another program, has left it.
    await set_position(kafka_broker.bootstrap, job.name, job.numbers, end - 1)
    service = job.run()
    await until(is_at_end)
    await service.suspended()
    await delete_records(kafka_broker.bootstrap, job.numbers, end)
    service = job.run()
    await job.write(10)
    await job.until_written(11)
    await service.suspended()
    assert await job.outputs() == [2 * number for number in range(11)]


async def test_the_first_run_begins_where_first_start_says_and_later_runs_where_it_has_committed(job: Job) -> None:
    """With Kafka's ``auto.offset.reset=latest``, consumers skip the first records of an added partition."""
    await job.write(1, 2)
    service = job.run(first_start="latest")
    await service.works()
    await service.suspended()  # It has read nothing, but its place is known.
    await job.write(3, 4)
    await job.numbers.create(partitions=2)
    await job.write(5, partition=1)
    service = job.run(first_start="latest")
    await job.until_written(3)
    await service.suspended()
    assert await job.outputs() == [6, 8, 10]


async def test_a_second_copy_takes_over_and_the_first_ends_with_an_error_that_says_so(job: Job) -> None:
    """Two copies wrote each output twice, and nothing was said."""
    first = job.run()
    await job.write(*range(10))
    await job.until_written(10)
    second = job.run()
    error = await first.failed()
    assert isinstance(error, JobFailed)
    assert isinstance(error.__cause__, ProducerFenced)
    assert "another run of the flow has taken over, so this one must end" in one_line(error)
    await job.write(*range(10, 20))
    await job.until_written(20)
    await second.suspended()
    assert await job.outputs() == [2 * number for number in range(20)]


async def test_a_cluster_is_one_commit_domain_under_all_its_addresses(
    job: Job, kafka_broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A flow with two addresses of a cluster shut itself out at its start, and said that another run had taken over;
    with checkpoints, one of its two outputs came twice after a restart.
    """
    port = kafka_broker.bootstrap.rpartition(":")[2]
    addresses = f"{kafka_broker.bootstrap},nowhere:{port}", f"localhost:{port}", kafka_broker.bootstrap
    outputs = [topic(f"kafka://{address}/{job.doubled.name}-{n}") for n, address in enumerate(addresses)]
    await job.write(*range(10))
    flow = Flow(job.name)
    read = flow.source(job.numbers, start="committed")
    for output in outputs:
        await output.create()
        read.sink(output)
    started = await flow.start(checkpoints=Checkpoints(interval_s=200))

    async def are_written() -> bool:
        return all([(await output.describe()).records >= 10 for output in outputs])

    await until(are_written)
    assert [await read_to_end(output) for output in outputs] == [[], [], []]  # The transaction is open.
    await started.stop()
    assert [numbers_of(await read_to_end(output)) for output in outputs] == [[*range(10)]] * 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


async def test_two_sources_of_a_topic_are_refused_under_all_its_addresses(job: Job, kafka_broker: Any) -> None:
    """Each source committed positions of the same partitions, so records of the one that was behind were skipped."""
    port = kafka_broker.bootstrap.rpartition(":")[2]
    flow = Flow(job.name)
    first = flow.source(job.numbers, start="committed", name="first")
    again = flow.source(topic(f"kafka://localhost:{port}/{job.numbers.name}"), start="committed", name="again")
    first.union(again).sink(job.doubled)
    with pytest.raises(GraphError, match=r"step 'again': .* a group has one position in a partition"):
        await flow.start()


@pytest.mark.parametrize("choice", [{"changed_steps": ["numbers"]}, {"restore": None}])
async def test_a_position_that_fell_out_of_retention_is_an_error_with_the_choices(
    job: Job, kafka_broker: Any, choice: dict[str, Any]
) -> None:
    """A job that was stopped over the holidays resumed without the records of these days, and without an error."""
    service = job.run()
    await job.write(*range(10))
    await job.until_written(10)
    await service.suspended()
    await job.write(*range(10, 30))
    await delete_records(kafka_broker.bootstrap, job.numbers, 20)
    error = await job.run().failed()
    assert isinstance(error.__cause__, OffsetOutOfRange)
    for said in (
        "partition 0: offset 10 fell out of retention; expected 20 to 30",
        "changed_steps=['numbers'] lets this source begin where its first_start= says, in one run",
        "restore=None does so with all sources",
    ):
        assert said in one_line(error)
    service = job.run(**choice)
    await job.until_written(20)
    await service.suspended()
    assert await job.outputs() == [2 * number for number in (*range(10), *range(20, 30))]


MakesTopic = Callable[..., Topic]


class Renamed:
    """Renames the commit topic, so that each test has its own."""

    def __init__(self, outputs: Topic) -> None:
        self._outputs = outputs
        self.url = outputs.url

    def beside(self, name: str) -> Topic:
        return self._outputs.beside(f"{self._outputs.name}-{name}")


async def test_old_commits_are_dropped_although_they_are_small(kafka_topic: MakesTopic) -> None:
    """The broker kept years of commits, because by default it compacts a segment after a gigabyte or a week."""
    commits = await ensure_commit_topic(Renamed(kafka_topic("outputs")))
    writer = await commits.open_writer()
    keys = [b"flow-%d" % (number % 3) for number in range(9_999)]
    async with asyncio.timeout(PATIENCE_S):
        written = 0
        while True:
            await writer.write(OutgoingBatch([b"%d" % number + b" " * 100 for number in range(9_999)], keys=keys))
            await writer.flush()
            written += 9_999
            if len(await read_to_end(commits)) < written / 2:
                break
    await writer.close()
    for flow in range(3):
        record = await last_value(commits, b"flow-%d" % flow, clock=SystemClock())
        assert record is not None
        assert int(record.value or b"") == 9_996 + flow


async def test_a_commit_topic_that_deletes_records_causes_a_warning(
    kafka_topic: MakesTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """A flow that was stopped for longer than the retention could not resume, and the reason was unclear."""
    renamed = Renamed(kafka_topic("outputs"))
    await renamed.beside("streamiter-commits").create(settings={"cleanup.policy": "compact,delete"})
    with caplog.at_level(logging.WARNING, "streamiter.topics"):
        await ensure_commit_topic(renamed)
    [warning] = caplog.records
    assert "expected cleanup.policy=compact, found compact,delete" in warning.getMessage()


# -- positions -----------------------------------------------------------------------------------------------


async def group_offsets(broker: str, group: str) -> dict[TopicPartition, int]:
    """Return the committed offsets of a group, which Kafka's own tools show."""
    admin = AIOKafkaAdminClient(bootstrap_servers=broker)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group)
    finally:
        await admin.close()
    return {partition: offset.offset for partition, offset in found.items()}


async def test_lag_tools_see_the_positions_of_a_group(kafka_broker, kafka_topic: MakesTopic) -> None:
    """Every dashboard showed that a running job had stopped, because the group had no positions."""
    made = await created(kafka_topic(), partitions=3)
    group = f"{made.name}-group"
    for positions in ({0: 5, 2: 7}, {0: 6, 1: 1}, {}):
        await patiently(made.report_positions(group, positions))
    assert await group_offsets(kafka_broker.bootstrap, group) == {
        TopicPartition(made.name, 0): 6,
        TopicPartition(made.name, 1): 1,
        TopicPartition(made.name, 2): 7,
    }


async def test_positions_of_a_group_that_consumers_are_in_are_refused(kafka_broker, kafka_topic: MakesTopic) -> None:
    """A job stored positions for the group of another program, whose consumers then skipped records."""
    made = await created(kafka_topic())
    group = f"{made.name}-group"
    consumer = AIOKafkaConsumer(made.name, group_id=group, bootstrap_servers=kafka_broker.bootstrap)
    await consumer.start()
    try:
        with pytest.raises(TopicError, match="expected a group without consumers"):
            await patiently(made.report_positions(group, {0: 5}))
    finally:
        await consumer.stop()
