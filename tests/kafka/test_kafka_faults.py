"""Brokers stop, freeze and return, and topics are deleted: no call hangs and no record is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from support.kafka_server import KafkaServer, free_ports
from support.waiting import PATIENCE_S
from topics.topic_case import (
    begun,
    created,
    missing_soon,
    numbered,
    numbers_of,
    patiently,
    read_count,
    read_to_end,
    values_of,
    write,
    write_transaction,
)

from streamiter import Flow
from streamiter.errors import JobFailed, TopicNotFound, TopicUnavailable
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, TopicReader, TopicWriter, connector_for, topic
from streamiter_kafka import cluster

# QUICK gives up after a second; PATIENT is long enough for calls that must survive a restart.
QUICK = {"give_up_after_s": 1.5, "request_timeout_s": 0.3}
PATIENT = {"give_up_after_s": PATIENCE_S, "request_timeout_s": 2.0}


@pytest.fixture
def handle(breakable_broker: KafkaServer, topic_prefix: str) -> Callable[..., Topic]:
    """Return a maker of topics on the broker that will break."""

    def make(name: str = "clicks", **options: object) -> Topic:
        return topic(f"kafka://{breakable_broker.bootstrap}/{topic_prefix}{name}", **options)

    return make


class Outage:
    """An outage of the broker that many scenarios share, because a restart takes 5 to 7 s."""

    def __init__(self, broker: KafkaServer, handle: Callable[..., Topic], how: str) -> None:
        self.address = broker.bootstrap
        self.handle = handle
        self.is_restarted = asyncio.Event()
        """Set when the broker answers again after a restart."""
        self._broker = broker
        self._how = how

    async def run(self, raising: Sequence[Scenario], resuming: Sequence[Scenario] = ()) -> None:
        """Prepare all scenarios, break the broker, and run all scenarios to their ends.

        The broker returns when the first scenarios have ended, if there are others that resume then.
        """
        running = [scenario(self) for scenario in (*raising, *resuming)]
        for each in running:
            await anext(each)
        await asyncio.to_thread(getattr(self._broker, self._how))
        ends = [asyncio.ensure_future(_to_end(each)) for each in running]
        await asyncio.wait(ends[: len(raising)])
        if resuming:
            await asyncio.to_thread(self._broker.start)
            self.is_restarted.set()
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures:
            raise BaseExceptionGroup(f"{len(failures)} of {len(outcomes)} scenarios failed", failures)


Scenario = Callable[[Outage], AsyncIterator[None]]
"""A generator that prepares up to its ``yield``, where the broker breaks, and then checks the behaviour."""


async def _to_end(scenario: AsyncIterator[None]) -> None:
    async for _ in scenario:
        raise AssertionError("a scenario has one yield")


# -- without a broker


@pytest.fixture
async def silent_server() -> AsyncIterator[str]:
    """Return the address of a server that accepts connections and never answers."""
    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _reader, writer: connections.append(writer), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    server.close()
    for writer in connections:
        writer.close()


async def outcomes_of_opening(of: Topic) -> list[object]:
    """Make all calls that connect at the same time, and return the result or error of each."""
    calls = [
        of.open_reader(ReadRequest()),
        of.open_writer(),
        of.open_transactions("t"),
        of.create(),
        of.describe(),
        of.delete(),
        connector_for(of.url).list_topics(of.url, QUICK),
    ]
    return await patiently(asyncio.gather(*calls, return_exceptions=True))


async def test_without_a_broker_opening_is_an_error_with_the_address() -> None:
    """The first run of a new user hung, or failed with a message that had no address."""
    [port] = free_ports(1)
    for outcome in await outcomes_of_opening(topic(f"kafka://127.0.0.1:{port}/clicks", **QUICK)):
        assert isinstance(outcome, TopicUnavailable)
        assert f"127.0.0.1:{port}" in str(outcome)
        assert "Is the broker running" in str(outcome)


async def test_a_server_that_never_answers_is_an_error_with_the_address(silent_server: str) -> None:
    """A job hung behind a firewall, or at the port of another service."""
    for outcome in await patiently(outcomes_of_opening(topic(f"kafka://{silent_server}/clicks", **QUICK))):
        assert isinstance(outcome, TopicUnavailable)
        assert silent_server in str(outcome)


async def test_the_patience_of_a_job_governs_its_start_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker loaded its coordinator for ten seconds, and ended a job with a patience of 30 s after 8 s."""
    monkeypatch.setattr(cluster, "BRIEFLY_S", 0.1)
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    flow = Flow("early")
    flow.source(topic(f"kafka://{address}/clicks", give_up_after_s=1.5, request_timeout_s=0.2), stop="latest").collect()
    with pytest.raises(JobFailed, match=r"within 1\.5 s"):
        await patiently(flow.start())
    assert "trying again for up to" in caplog.text
    with pytest.raises(TopicUnavailable, match=r"within 0\.1 s"):
        await patiently(connector_for("kafka://h").list_topics(f"kafka://{address}", {"give_up_after_s": 0.7}))


async def test_one_live_server_of_several_is_enough(breakable_broker: KafkaServer, topic_prefix: str) -> None:
    """A job did not start because the first server in its address was down, although the second one was alive."""
    [port] = free_ports(1)
    made = await created(topic(f"kafka://127.0.0.1:{port},{breakable_broker.bootstrap}/{topic_prefix}clicks", **QUICK))
    await write(made, [b"a"])
    assert values_of(await read_to_end(made)) == [b"a"]


# -- a broker that does not return


async def reading_raises(outage: Outage) -> AsyncIterator[None]:
    """A consumer hung for days without an error, which is the problem that users report most."""
    made = await created(outage.handle("reading", **QUICK))
    await write(made, numbered(range(3)))
    reader = await made.open_reader(ReadRequest())
    assert numbers_of(await read_count(reader, 3)) == [0, 1, 2]
    yield
    with pytest.raises(TopicUnavailable, match=outage.address):
        await patiently(reader.read())
    await patiently(reader.close())


async def reading_without_partitions_raises(outage: Outage) -> AsyncIterator[None]:
    """A reader without partitions never noticed the outage, because only its search for new partitions calls the
    broker.
    """
    made = await created(outage.handle("idle", **QUICK), partitions=1)
    reader = await made.open_reader(ReadRequest(subtask=1, subtasks=2, refresh_s=0.05))
    yield
    with pytest.raises(TopicUnavailable, match=outage.address):
        await patiently(reader.read())
    await reader.close()


async def fetched_records_are_still_read(outage: Outage) -> AsyncIterator[None]:
    """Records that the reader had fetched were lost with the broker."""
    made = await created(outage.handle("fetched", **QUICK))
    await write(made, numbered(range(50)))
    reader = await made.open_reader(ReadRequest(max_records=10))
    assert numbers_of(await read_count(reader, 10)) == list(range(10))
    yield
    assert numbers_of(await read_count(reader, 40)) == list(range(10, 50))
    with pytest.raises(TopicUnavailable):
        await patiently(reader.read())
    await reader.close()


async def flushing_raises(outage: Outage) -> AsyncIterator[None]:
    """A flush waited for ever, so the checkpoint never completed."""
    made = await created(outage.handle("flushing", **QUICK))
    writer = await made.open_writer()
    await writer.write(OutgoingBatch([b"a"]))
    await writer.flush()
    yield
    await patiently(writer.write(OutgoingBatch([b"b"])))
    with pytest.raises(TopicUnavailable, match=outage.address):
        await patiently(writer.flush())
    with pytest.raises(TopicUnavailable):
        await patiently(writer.write(OutgoingBatch([b"c"])))
    await patiently(writer.close())


async def closing_a_writer_raises(outage: Outage) -> AsyncIterator[None]:
    """A writer closed without an error, and its last records were not stored."""
    made = await created(outage.handle("closing", **QUICK))
    writer = await made.open_writer()
    yield
    await writer.write(OutgoingBatch([b"lost"]))
    with pytest.raises(TopicUnavailable):
        await patiently(writer.close())
    await writer.close()


async def committing_raises(outage: Outage) -> AsyncIterator[None]:
    """A commit hung, or the closing after it hung."""
    made = await created(outage.handle("committing", **QUICK))
    transactions = await begun(made, f"{made.name}-t")
    await transactions.write(made, OutgoingBatch([b"a"]))
    yield
    with pytest.raises(TopicUnavailable, match=outage.address):
        await patiently(transactions.commit())
    await patiently(transactions.close())


# -- a broker that returns


async def reading_resumes(outage: Outage) -> AsyncIterator[None]:
    """A restart of the broker ended consumers permanently, or made them read records twice."""
    made = await created(outage.handle("reading-again", **PATIENT), partitions=2)
    for partition in range(2):
        await write(made, OutgoingBatch(numbered(range(10)), partition=partition))
    reader = await made.open_reader(ReadRequest())
    before = await read_count(reader, 20)
    waiting = asyncio.ensure_future(reader.read())
    yield
    await outage.is_restarted.wait()
    for partition in range(2):
        await write(made, OutgoingBatch(numbered(range(10, 20)), partition=partition))
    batch = await patiently(waiting)
    assert batch is not None
    after = [*batch.records(), *await read_count(reader, 20 - len(batch))]
    for partition in range(2):
        seen = [record for record in [*before, *after] if record.partition == partition]
        assert numbers_of(seen) == list(range(20))
    await reader.close()


async def writing_neither_loses_nor_doubles(outage: Outage) -> AsyncIterator[None]:
    """The answer to a request was lost, and the broker stored the records of the repeated request again."""
    made = await created(outage.handle("writing", **PATIENT), partitions=2)
    writer = await made.open_writer()
    writing = asyncio.ensure_future(_write_until_restarted(writer, outage))
    await asyncio.sleep(0)  # the writes begin before the broker breaks
    yield
    written = await patiently(writing)
    await patiently(writer.flush())
    await writer.close()
    records = await read_to_end(made)
    for partition in range(2):
        seen = numbers_of(record for record in records if record.partition == partition)
        assert seen == [number for number in range(written) if number // 20 % 2 == partition]


async def _write_until_restarted(writer: TopicWriter, outage: Outage) -> int:
    written = 0
    while not outage.is_restarted.is_set() or written < 2000:
        numbers = range(written, written + 20)
        await patiently(writer.write(OutgoingBatch(numbered(numbers), partition=written // 20 % 2)))
        written += 20
        await asyncio.sleep(0.005)  # limits the records: a restart takes seconds, and thousands of records are enough
    return written


async def a_transaction_is_committed_once(outage: Outage) -> AsyncIterator[None]:
    """A checkpoint that fell into a restart was never committed, or was committed twice."""
    made = await created(outage.handle("transaction", **PATIENT))
    transactions = await begun(made, f"{made.name}-t")
    await transactions.write(made, OutgoingBatch(numbered(range(5))))
    yield
    await patiently(transactions.write(made, OutgoingBatch(numbered(range(5, 10)))))
    await patiently(transactions.commit())
    await transactions.close()
    assert numbers_of(await read_to_end(made)) == list(range(10))


async def a_commit_is_done_once(outage: Outage) -> AsyncIterator[None]:
    """The answer to a commit was lost with the broker, and the transaction was committed twice or not at all."""
    made = await created(outage.handle("commit", **PATIENT), partitions=2)
    transactions = await begun(made, f"{made.name}-t")
    for number in range(10):
        await patiently(transactions.write(made, OutgoingBatch(numbered([number]), partition=number % 2)))
    committing = asyncio.ensure_future(transactions.commit())
    await asyncio.sleep(0)
    yield
    await patiently(committing)
    await write_transaction(transactions, made, numbered([10]), commit=True)
    await transactions.close()
    assert sorted(numbers_of(await read_to_end(made))) == list(range(11))


RAISING = [
    reading_without_partitions_raises,
    fetched_records_are_still_read,
    closing_a_writer_raises,
    committing_raises,
    reading_raises,
    flushing_raises,
]
# The broker breaks right after the last one has begun its commit.
RESUMING = [reading_resumes, writing_neither_loses_nor_doubles, a_transaction_is_committed_once, a_commit_is_done_once]


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.soak)])
async def test_calls_to_a_broker_that_is_down_raise_in_time_or_survive_its_restart(
    breakable_broker: KafkaServer, handle: Callable[..., Topic], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A call to a broker that was down hung, or gave up without a warning in the log. A restart of the broker ended
    readers and writers, or lost or doubled their records.
    """
    with caplog.at_level(logging.WARNING, "streamiter.kafka"):
        await Outage(breakable_broker, handle, how).run(RAISING, RESUMING)
    assert any("trying again" in record.message for record in caplog.records)


# -- a broker that freezes and resumes


async def test_calls_to_a_frozen_broker_raise_within_their_time_limit(
    breakable_broker: KafkaServer, handle: Callable[..., Topic], caplog: pytest.LogCaptureFixture
) -> None:
    """A call to a broker that accepted its connection hung, or gave up without a warning in the log."""
    with caplog.at_level(logging.WARNING, "streamiter.kafka"):
        await Outage(breakable_broker, handle, "pause").run([reading_raises, flushing_raises])
    assert any("trying again" in record.message for record in caplog.records)


async def test_reading_continues_after_a_freeze(breakable_broker: KafkaServer, handle: Callable[..., Topic]) -> None:
    """After a long garbage collection of the broker, late answers on abandoned connections confused the reader."""
    made = await created(handle(**{**PATIENT, "request_timeout_s": 0.3}))
    reader = await made.open_reader(ReadRequest())
    waiting = asyncio.ensure_future(reader.read())
    await write(made, numbered(range(3)))
    batch = await patiently(waiting)
    breakable_broker.pause()
    waiting = asyncio.ensure_future(reader.read())
    done, _ = await asyncio.wait({waiting}, timeout=1)  # several requests give up meanwhile
    assert not done
    breakable_broker.resume()
    await write(made, numbered(range(3, 6)))
    assert batch is not None
    records = batch.records()
    batch = await patiently(waiting)
    assert batch is not None
    records += batch.records()
    assert numbers_of(records + await read_count(reader, 6 - len(records))) == list(range(6))
    await reader.close()


async def finishes(call: Awaitable[object], *, within_s: float) -> bool:
    try:
        await asyncio.wait_for(call, within_s)
    except TimeoutError:
        return False
    return True


async def test_a_write_waits_while_too_many_bytes_are_unacknowledged(
    breakable_broker: KafkaServer, handle: Callable[..., Topic]
) -> None:
    """The process grew without a limit while the broker was slow."""
    made = await created(handle(**PATIENT, max_unacked_bytes=100_000))
    writer = await made.open_writer()
    breakable_broker.pause()
    given = OutgoingBatch([b"x" * 1000] * 10)
    for _ in range(8):  # There is room for so many.
        await patiently(writer.write(given))
    handed_over = 80
    while await finishes(writer.write(given), within_s=0.5):
        handed_over += 10
    assert handed_over <= 120
    breakable_broker.resume()
    await patiently(writer.flush())
    await writer.close()
    assert len(await read_to_end(made)) == handed_over


async def test_after_an_abort_without_answers_the_next_transaction_is_a_clean_one(
    breakable_broker: KafkaServer, handle: Callable[..., Topic]
) -> None:
    """A transaction after an aborted one used wrong sequence numbers, so its records were lost or refused."""
    made = await created(handle(**{**PATIENT, "request_timeout_s": 0.5}))
    transactions = await begun(made, f"{made.name}-t")
    await transactions.write(made, OutgoingBatch([b"aborted"]))
    await until_stored(made, 1)
    breakable_broker.pause()
    await transactions.write(made, OutgoingBatch([b"aborted, and perhaps never stored"]))
    aborting = asyncio.ensure_future(transactions.abort())
    await asyncio.wait({aborting}, timeout=1.25)  # two requests give up meanwhile
    breakable_broker.resume()
    await patiently(aborting)
    await write_transaction(transactions, made, [b"seen"], commit=True)
    await transactions.close()
    assert values_of(await read_to_end(made)) == [b"seen"]


async def until_stored(made: Topic, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await made.describe()).offsets[0][1] < count:
            pass  # the record is being sent


# -- deleted topics


async def test_a_reader_of_a_deleted_topic_gets_an_error_at_once(handle: Callable[..., Topic]) -> None:
    """A reader waited until its time limit for a deleted topic, which never returns."""
    made = await created(handle(give_up_after_s=600), partitions=2)
    readers: list[TopicReader] = [
        await made.open_reader(ReadRequest(subtask=subtask, subtasks=3, refresh_s=0.05)) for subtask in range(3)
    ]
    reading = [asyncio.ensure_future(reader.read()) for reader in readers]
    await made.delete()
    with missing_soon():
        await asyncio.wait(reading)
    for each, reader in zip(reading, readers, strict=True):
        with pytest.raises(TopicNotFound, match=made.name):
            await patiently(each)
        await reader.close()


async def test_a_writer_to_a_deleted_topic_gets_an_error_at_once(handle: Callable[..., Topic]) -> None:
    """A writer retried for minutes on a deleted topic, as Kafka's own clients do."""
    made = await created(handle(give_up_after_s=600))
    writer = await made.open_writer()
    await made.delete()
    await writer.write(OutgoingBatch([b"a"]))
    with missing_soon(), pytest.raises(TopicNotFound, match=f"{made.name}.*`streamiter topics list kafka://.*` shows"):
        await patiently(writer.flush())
    await writer.close()


async def test_a_transaction_on_a_deleted_topic_gets_an_error_and_the_next_one_works(
    handle: Callable[..., Topic],
) -> None:
    """One sink with a deleted topic made the other sinks of the transaction fail for ever."""
    gone, kept = handle("gone", give_up_after_s=600), handle("kept")
    await gone.create()
    await kept.create()
    transactions = await begun(kept, f"{kept.name}-t")
    await transactions.write(gone, OutgoingBatch([b"a"]))
    await transactions.commit()
    await gone.delete()
    await transactions.begin()
    await transactions.write(gone, OutgoingBatch([b"b"]))
    await transactions.write(kept, OutgoingBatch([b"with b"]))
    with missing_soon(), pytest.raises(TopicNotFound, match=gone.name):
        await patiently(transactions.commit())
    await patiently(transactions.abort())
    await write_transaction(transactions, kept, [b"after b"], commit=True)
    await transactions.close()
    assert values_of(await read_to_end(kept)) == [b"after b"]
