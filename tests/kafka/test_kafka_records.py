"""Records on a real broker, with other clients, compression, compaction and retention."""

import asyncio
import random
from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from support.kafka_retention import delete_records
from support.waiting import PATIENCE_S, until
from topics.topic_case import (
    ManualClock,
    by_partition,
    created,
    numbered,
    numbers_of,
    patiently,
    read_count,
    read_to_end,
    values_of,
    write,
)

from streamiter.errors import (
    ConfigurationError,
    OffsetOutOfRange,
    ProducerFenced,
    RecordTooLarge,
    TopicError,
    TopicNotFound,
)
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, TopicReader
from streamiter_kafka import cluster
from streamiter_kafka.wire import TopicMetadataRequest

MakeTopic = Callable[..., Topic]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_compressed_records_are_read_back_and_stored_with_their_codec(
    kafka_topic: MakeTopic, compression: str
) -> None:
    """A codec was accepted and not applied, and only the costs of the disk showed it."""
    topic = await created(kafka_topic(compression=compression))
    values = [b"%d " % number * 50 for number in range(3000)]
    await write(topic, OutgoingBatch(values, keys=numbered(range(3000)), timestamps_ms=list(range(3000))))
    records = await read_to_end(topic, ReadRequest(stop="latest", max_records=1000))
    assert values_of(records) == values
    assert [record.timestamp_ms for record in records] == list(range(3000))
    codec = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}[compression]
    assert await codecs_on_the_wire(topic) == {codec}


async def codecs_on_the_wire(topic: Topic) -> set[int]:
    """Return the codecs of the record batches as the broker stores them."""
    reader = await topic.open_reader(ReadRequest())
    partition = reader._partitions[0]
    async with asyncio.timeout(PATIENCE_S):
        while not partition.has_records:
            await reader._arrived.wait()
    codecs = {batch.compression_type for answer in partition._answers for batch in answer.batches}
    await reader.close()
    return codecs


async def test_records_pass_on_before_the_broker_is_asked_again(kafka_topic: MakeTopic) -> None:
    """The request for more was encoded and sent first, which delayed each record of a slow stream by a tenth."""
    topic = await created(kafka_topic())
    await write(topic, OutgoingBatch([b"first"]))
    reader = await topic.open_reader(ReadRequest())
    first = await patiently(reader.read())
    for _ in range(10):
        await asyncio.sleep(0)
    assert reader.unanswered_since_s() is None
    reading = asyncio.create_task(reader.read())
    await until(lambda: reader.unanswered_since_s() is not None)
    await write(topic, OutgoingBatch([b"second"]))
    second = await patiently(reading)
    assert [*first.values, *second.values] == [b"first", b"second"]
    await reader.close()


async def test_another_client_reads_written_records(kafka_broker, kafka_topic: MakeTopic) -> None:
    """A service in another language could not read the records of a shared topic."""
    topic = await created(kafka_topic())
    batch = OutgoingBatch(
        [b"v", None], keys=[b"k", b"gone"], headers=[(("h", b"1"), ("h", b"2")), ()], timestamps_ms=[7, 8]
    )
    await write(topic, batch)
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka_broker.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        partition = TopicPartition(topic.name, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning()
        seen = [await patiently(consumer.getone()) for _ in range(2)]
    finally:
        await consumer.stop()
    assert [(each.key, each.value, each.headers, each.timestamp) for each in seen] == [
        (b"k", b"v", (("h", b"1"), ("h", b"2")), 7),
        (b"gone", None, (), 8),
    ]


async def test_keys_go_to_the_same_partitions_as_with_another_client(kafka_broker, kafka_topic: MakeTopic) -> None:
    """Two programs wrote one topic, and the records of a key were in two partitions."""
    topic = await created(kafka_topic(), partitions=7)
    keys = [b"user-%d" % number for number in range(200)]
    producer = AIOKafkaProducer(bootstrap_servers=kafka_broker.bootstrap)
    await producer.start()
    try:
        for key in keys:
            await producer.send(topic.name, b"theirs", key=key)
        await producer.flush()
    finally:
        await producer.stop()
    await write(topic, OutgoingBatch([b"ours"] * len(keys), keys=keys))
    placed: dict[bytes | None, set[int]] = {}
    for record in await read_to_end(topic):
        placed.setdefault(record.key, set()).add(record.partition)
    assert set(placed) == set(keys)
    assert all(len(partitions) == 1 for partitions in placed.values())


async def test_unkeyed_batches_spread_over_all_partitions(kafka_topic: MakeTopic) -> None:
    """One partition got all records, so one subtask did all the work."""
    topic = await created(kafka_topic(), partitions=3)
    writer = await topic.open_writer()
    for number in range(9):
        await writer.write(OutgoingBatch(numbered([number])))
    await writer.close()
    parts = by_partition(await read_to_end(topic))
    assert sorted(len(part) for part in parts.values()) == [3, 3, 3]


async def test_a_writer_finds_partitions_that_were_added(
    kafka_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions were added to a busy topic, and the writer left them empty."""
    topic = await created(kafka_topic(), partitions=1)
    writer = await topic.open_writer()
    await topic.create(partitions=3)
    monkeypatch.setattr(cluster, "_STALE_S", 0.0)
    for number in range(3):
        await writer.write(OutgoingBatch(numbered([number])))
    await writer.close()
    assert set(by_partition(await read_to_end(topic))) == {0, 1, 2}


async def test_records_can_be_acknowledged_by_the_leader_alone(kafka_topic: MakeTopic) -> None:
    """Users who prefer speed to safety could not write with the leader's acknowledgement alone."""
    topic = await created(kafka_topic(acks="1"), partitions=2)
    await write(topic, OutgoingBatch(numbered(range(1000)), keys=numbered(range(1000))))
    assert sorted(numbers_of(await read_to_end(topic))) == list(range(1000))


async def test_small_writes_travel_together_under_load(kafka_topic: MakeTopic) -> None:
    """Each record was sent in its own request, so a thousand writes a second were the limit."""
    topic = await created(kafka_topic())
    writer = await topic.open_writer()
    for number in range(2000):
        await writer.write(OutgoingBatch(numbered([number])))
    await writer.close()
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    assert numbers_of(await read_count(reader, 2000)) == list(range(2000))
    await reader.close()
    stored = await stored_batches(topic)
    assert stored < 500, f"2000 writes were stored as {stored} record batches"


async def stored_batches(topic: Topic) -> int:
    reader = await topic.open_reader(ReadRequest())
    partition = reader._partitions[0]
    _, end = (await topic.describe()).offsets[0]
    async with asyncio.timeout(PATIENCE_S):
        while partition.fetch_offset < end:
            reader._arrived.clear()
            await reader._arrived.wait()
    count = sum(len(answer.batches) for answer in partition._answers)
    await reader.close()
    return count


async def test_a_lingering_writer_waits_for_more_but_not_at_a_flush(kafka_topic: MakeTopic) -> None:
    """A writer sent each record alone although it was asked to linger, or a flush lingered too."""
    topic = await created(kafka_topic(linger_s=600))
    writer = await topic.open_writer()
    for number in range(50):
        await writer.write(OutgoingBatch(numbered([number])))
        await topic.describe()  # gives the writer time to send each record alone
    await patiently(writer.flush())
    assert await stored_batches(topic) == 1
    await writer.close()


async def test_a_record_above_the_limit_leaves_the_rest_of_its_batch_unwritten(kafka_topic: MakeTopic) -> None:
    """The caller removed the large record and wrote the batch again, and some records were stored twice."""
    topic = await created(kafka_topic(), settings={"max.message.bytes": "10000"})
    writer = await topic.open_writer()
    values = [*numbered(range(100)), b"x" * 20_000]
    with pytest.raises(RecordTooLarge, match=r"record 100 .* 200\d\d bytes.* 10000"):
        await writer.write(OutgoingBatch(values))
    await writer.write(OutgoingBatch(values[:-1]))
    await writer.close()
    assert numbers_of(await read_to_end(topic)) == list(range(100))


async def test_a_record_that_stays_too_large_compressed_is_an_error(kafka_topic: MakeTopic) -> None:
    """A record was too large even after compression, and the broker's refusal was not reported."""
    topic = await created(kafka_topic(compression="gzip"), settings={"max.message.bytes": "1000"})
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch([b"x" * 100_000]))
    await patiently(writer.flush())
    await writer.write(OutgoingBatch([random.Random(7).randbytes(50_000)]))
    with pytest.raises(RecordTooLarge, match=r"max\.message\.bytes"):
        await patiently(writer.flush())
    await writer.close()
    assert len(await read_to_end(topic)) == 1


async def test_a_record_larger_than_one_fetch_is_read(kafka_topic: MakeTopic) -> None:
    """A reader that fetched less than one record at a time hung before a large record."""
    topic = kafka_topic(max_batch_bytes=10**7, fetch_max_bytes=1000)
    await topic.create(settings={"max.message.bytes": str(10**7)})
    values = [b"small", b"x" * 3_000_000, b"behind"]
    await write(topic, OutgoingBatch(values))
    assert values_of(await read_to_end(topic)) == values


async def test_a_compacted_topic_ends_a_bounded_read(kafka_topic: MakeTopic) -> None:
    """A bounded read waited for ever for last offsets that compaction had removed."""
    topic = kafka_topic()
    settings = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.001",
        "max.compaction.lag.ms": "100",
        "delete.retention.ms": "0",
    }
    await topic.create(settings=settings)
    written = 0
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await write(topic, OutgoingBatch(numbered(range(written, written + 100)), keys=[b"same"] * 100))
            written += 100
            numbers = numbers_of(await read_to_end(topic))
            assert numbers[-1] == written - 1
            if len(numbers) < written:
                break
            await asyncio.sleep(0.1)  # the cleaner works in real time
    # All records of this range were compacted.
    first = (await read_to_end(topic))[0].offset
    assert await read_to_end(topic, ReadRequest(start={0: 0}, stop={0: first})) == []


async def test_a_compacted_topic_refuses_records_without_keys_with_the_reason(kafka_topic: MakeTopic) -> None:
    """The error was only the number of the broker's own answer."""
    topic = await created(kafka_topic(), settings={"cleanup.policy": "compact"})
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch([b"a"]))
    with pytest.raises(TopicError, match="compacted topic takes only records with keys"):
        await patiently(writer.flush())
    with pytest.raises(TopicError, match="compacted"):
        await patiently(writer.write(OutgoingBatch([b"b"], keys=[b"k"])))
    await writer.close()


async def test_a_position_that_fell_out_of_retention_is_an_error_with_the_numbers(
    kafka_broker, kafka_topic: MakeTopic
) -> None:
    """A reader continued at the earliest record, and lost the records before it without an error."""
    topic = await created(kafka_topic())
    await write(topic, numbered(range(100)))
    await delete_records(kafka_broker.bootstrap, topic, 60)
    for request in (ReadRequest(positions={0: 30}), ReadRequest(start={0: 30})):
        with pytest.raises(OffsetOutOfRange, match=r"30.*60 to 100.*earliest") as caught:
            await patiently(topic.open_reader(request))
        assert topic.name in str(caught.value)
    assert numbers_of(await read_to_end(topic)) == list(range(60, 100))


async def test_records_that_fall_out_of_retention_before_they_are_fetched_are_an_error(
    kafka_broker, kafka_topic: MakeTopic
) -> None:
    """The retention overtook a slow reader, and the deleted records were missing without an error."""
    topic = await created(kafka_topic(fetch_max_bytes=1000))
    await write_in_blocks(topic, range(100))
    reader = await topic.open_reader(ReadRequest())
    first = await read_count(reader, 10)
    assert numbers_of(first) == list(range(10))
    # The reader has asked for nothing beyond the second block: it holds one block and asks for no more.
    await delete_records(kafka_broker.bootstrap, topic, 95)
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange, match="95 to 100"):
            await read_for_ever(reader)
    await reader.close()


async def write_in_blocks(topic: Topic, numbers: range) -> None:
    """Write ten records in each block; an answer of a kilobyte has no room for two blocks."""
    writer = await topic.open_writer()
    for start in range(0, len(numbers), 10):
        await writer.write(OutgoingBatch([b"%d" % number + b" " * 200 for number in numbers[start : start + 10]]))
        await writer.flush()
    await writer.close()


async def read_for_ever(reader: TopicReader, into: list[int] | None = None) -> None:
    while True:
        batch = await patiently(reader.read())
        assert batch is not None
        if into is not None:
            into += numbers_of(batch.records())


@pytest.mark.parametrize("broker_of", ["now", "before ids"])
async def test_a_slow_reader_gets_no_record_of_a_topic_created_again(
    kafka_topic: MakeTopic, broker_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader fetched nothing while the topic was deleted, and took 100 records of the new topic for the old one.

    Brokers before 2.8 have no ids of topics. With them the reader compares the time of the first record when it looks
    for new partitions or when the broker returns an error. For a broker, a client without the newer requests looks the
    same.
    """
    if broker_of == "before ids":
        monkeypatch.setattr(TopicMetadataRequest, "_CLASSES", ())
    topic = await created(kafka_topic(fetch_max_bytes=1000))
    await write_in_blocks(topic, range(100))
    clock = ManualClock()
    reader = await topic.open_reader(ReadRequest(clock=clock))
    first = await read_count(reader, 10)
    identities = reader.identities()
    await topic.delete()
    await topic.create()
    await write_in_blocks(topic, range(1000, 1200))
    if broker_of == "before ids":
        clock.advance(30.0)
        await until(lambda: not any(task.get_name().endswith(": refresh") for task in asyncio.all_tasks()))
    given = numbers_of(first)
    with pytest.raises(OffsetOutOfRange, match=r"created again, with other records, .* the offsets 0 to 200"):
        await read_for_ever(reader, given)
    assert given == list(range(len(given)))
    await reader.close()
    with pytest.raises(OffsetOutOfRange, match=r"partition 0: offset 10 belongs to .* has the offsets 0 to 200"):
        await patiently(topic.open_reader(ReadRequest(positions={0: 10}, identities=identities)))


async def test_positions_of_missing_partitions_are_refused(kafka_topic: MakeTopic) -> None:
    """The topic was created again, and positions of the old topic were used for other records."""
    topic = await created(kafka_topic(), partitions=2)
    with pytest.raises(OffsetOutOfRange, match="partition 5"):
        await patiently(topic.open_reader(ReadRequest(positions={5: 0})))


async def test_settings_are_described_and_wrong_ones_refused(kafka_topic: MakeTopic) -> None:
    """A topic had another retention than the user had set, and lost records or kept them too long."""
    topic = await created(kafka_topic(), partitions=2, settings={"retention.ms": "12345", "replication.factor": "1"})
    described = await topic.describe()
    assert described.settings["retention.ms"] == "12345"
    assert described.settings["cleanup.policy"] == "delete"
    with pytest.raises(ConfigurationError, match="replication"):
        await kafka_topic("other").create(settings={"replication.factor": "9"})
    with pytest.raises(ConfigurationError, match=r"replication\.factor as a whole number .* given 'two'"):
        await kafka_topic("third").create(settings={"replication.factor": "two"})
    with pytest.raises(ConfigurationError, match="partitions"):
        await kafka_topic("other").create(partitions=0)


async def test_settings_that_delete_too_early_are_told_with_the_command_that_changes_them(
    kafka_topic: MakeTopic,
) -> None:
    """After a wrong day one could not roll back, since the broker had kept the newest version of the model only."""
    seconds = 86_400.0

    async def told(name: str, **settings: str) -> str | None:
        topic = await created(kafka_topic(name), settings={n.replace("_", "."): v for n, v in settings.items()})
        return topic.early_deletion((await topic.describe()).settings, seconds)

    compacted = await told("compacted", cleanup_policy="compact", max_compaction_lag_ms="3600000")
    assert compacted is not None
    changed = "min.compaction.lag.ms=86400000,max.compaction.lag.ms=86400000"
    assert compacted.startswith("it has min.compaction.lag.ms=0, max.compaction.lag.ms=3600000; change that with: ")
    assert compacted.endswith(f"-compacted --add-config {changed}")
    # The broker takes what is told, and what is created so is kept.
    assert (
        await told("changed", cleanup_policy="compact", **dict(each.split("=") for each in changed.split(","))) is None
    )
    assert await told("good", **kafka_topic().settings_to_keep(seconds)) is None
    deleted = await told("deleted", retention_ms="3600000", retention_bytes="1000000")
    assert deleted is not None
    assert deleted.endswith("retention.ms=86400000,retention.bytes=-1")
    assert await told("long", retention_ms="172800000") is None


async def test_a_topic_can_be_used_as_soon_as_it_is_created(kafka_topic: MakeTopic) -> None:
    """A new topic refused the first records, because its partitions had no leader yet."""
    for number in range(5):
        topic = await created(kafka_topic(f"fresh-{number}"), partitions=4)
        for partition in range(4):
            await write(topic, OutgoingBatch([b"a"], partition=partition))
        assert len(await read_to_end(topic)) == 4


async def test_a_missing_topic_is_told_by_an_error_alone(
    kafka_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """`topics create` asks whether the topic exists, and printed first that there is none, and that it tries again."""
    with pytest.raises(TopicNotFound):
        await patiently(kafka_topic("new").describe())
    assert caplog.text == ""


async def test_aborted_records_are_left_out_wherever_reading_begins(kafka_topic: MakeTopic) -> None:
    """Aborted records were read, because each answer lists the aborted producers only from its own position on."""
    topic = await created(kafka_topic())
    choice = random.Random(11)
    producers = [await topic.open_transactions(f"{topic.name}-{number}") for number in range(3)]
    open_now: dict[int, list[bytes]] = {}
    committed: list[bytes] = []
    for step in range(60):
        number = choice.randrange(3)
        if number not in open_now:
            await producers[number].begin()
            open_now[number] = []
        elif open_now[number] and choice.random() < 0.5:
            values = open_now.pop(number)
            if choice.random() < 0.5:
                await producers[number].commit()
                committed += values
            else:
                await producers[number].abort()
        else:
            value = b"%d of %d" % (step, number)
            await producers[number].write(topic, OutgoingBatch([value]))
            open_now[number].append(value)
    for producer in producers:
        await producer.close()
    records = await read_to_end(topic)
    assert sorted(values_of(records)) == sorted(committed)
    _, end = (await topic.describe()).offsets[0]
    for start in range(0, end, 3):
        rest = [record for record in records if record.offset >= start]
        assert await read_to_end(topic, ReadRequest(start={0: start}, stop="latest")) == rest


async def test_a_transaction_left_open_is_aborted_after_its_timeout(kafka_topic: MakeTopic) -> None:
    """A dead run's open transaction held up all readers for ever."""
    topic = await created(kafka_topic())
    transactions = await topic.open_transactions(f"{topic.name}-t", timeout_s=1.0)
    await transactions.begin()
    await transactions.write(topic, OutgoingBatch([b"left open"]))
    async with asyncio.timeout(PATIENCE_S):
        while (await topic.describe()).offsets[0] == (0, 0):
            pass  # the record is being sent
    await write(topic, [b"behind"])
    reader = await topic.open_reader(ReadRequest())
    assert values_of(await read_count(reader, 1)) == [b"behind"]
    with pytest.raises(ProducerFenced, match="timeout"):
        await patiently(transactions.commit())
    await transactions.close()
    await reader.close()


async def test_a_transaction_timeout_that_the_broker_does_not_take_is_refused(kafka_topic: MakeTopic) -> None:
    """A checkpoint interval above the broker's limit could never work, and no error said so."""
    topic = await created(kafka_topic())
    with pytest.raises(ConfigurationError, match=r"transaction\.max\.timeout\.ms"):
        await patiently(topic.open_transactions(f"{topic.name}-t", timeout_s=10**6))
