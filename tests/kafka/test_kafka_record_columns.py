"""Records that compiled code locates are those of aiokafka's parser: the same columns, positions and errors."""

import contextlib
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from aiokafka.errors import CorruptRecordException  # type: ignore[import-untyped]
from aiokafka.record.memory_records import MemoryRecords  # type: ignore[import-untyped]
from aiokafka.record.util import calc_crc32c  # type: ignore[import-untyped]
from support.examples import random_examples
from topics.topic_case import write

from streamiter import Flow
from streamiter.errors import TopicError
from streamiter.topics import JsonColumns, OutgoingBatch, Topic, TopicBatch, TopicRecord, json_columns
from streamiter.topics.joined_values import JoinedValues
from streamiter.values.helpers.compiled import is_compiling
from streamiter_kafka import partition
from streamiter_kafka.packing import Packing, PartitionQueue, ProducerIdentity
from streamiter_kafka.partition import ReadPartition
from streamiter_kafka.record_columns import located_records

_RECORD_COUNT_AT = 57
_CHECKSUM = slice(17, 21)
_CHECKED_FROM = 21
_ATTRIBUTES_AT = 22
_LOG_APPEND_TIME = 8


@pytest.fixture(autouse=True)
def located_from_the_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled code locate the records of every answer, however few."""
    if not is_compiling():
        pytest.skip("records are located only where Numba is installed")
    monkeypatch.setattr(partition, "_LOCATED_FROM", 1)
    monkeypatch.setattr(partition, "is_loaded", lambda: True)


def entry(random: Random) -> bytes | None:
    """Return a key or a value: any bytes, often with a line feed, sometimes None."""
    kind = random.randrange(10)
    if kind == 0:
        return None
    return b"\n" * kind if kind < 3 else random.randbytes(random.choice((0, 1, 5, 63, 64, 200)))


def stored_batch(random: Random, first_offset: int) -> tuple[bytes, int]:
    """Return a record batch as a broker stores it, and the offset after it."""
    count = random.choice((1, 2, 5, 20))
    oddness = random.choice((0.0, 0.0, 0.0, 0.3))
    codec = random.choice(("gzip", "zstd")) if random.random() < oddness else "none"
    packing = Packing("t", 10**6, compression=codec, max_batch_bytes=10**6, transactional=False)
    queue = PartitionQueue(packing, 0)
    has_keys, has_headers = random.random() < 0.5, random.random() < oddness
    batch = OutgoingBatch(
        [entry(random) for _ in range(count)],
        keys=[entry(random) for _ in range(count)] if has_keys else None,
        headers=[(("h", b"v"),) * random.randrange(3) for _ in range(count)] if has_headers else None,
        timestamps_ms=[random.randrange(2**41) for _ in range(count)],
    )
    queue.put(batch, 0)
    sealed = bytearray(queue.seal(ProducerIdentity()))
    sealed[:8] = struct.pack(">q", first_offset)
    if random.random() < 0.2:
        sealed[_ATTRIBUTES_AT] |= _LOG_APPEND_TIME
    following = first_offset + count
    if random.random() < 0.2:  # compaction dropped the last records, whose offsets still belong to the batch
        following += random.randrange(5)
        sealed[23:27] = struct.pack(">i", following - first_offset - 1)
    if random.random() < oddness / 2:
        at = random.randrange(_RECORD_COUNT_AT, len(sealed))
        sealed[at] = random.randrange(256)
    if random.random() < oddness / 2:
        sealed[61:62] = random.randbytes(random.randrange(3))
        sealed[8:12] = struct.pack(">i", len(sealed) - 12)
    sealed[_CHECKSUM] = struct.pack(">I", calc_crc32c(bytes(sealed[_CHECKED_FROM:])))
    if random.random() < oddness / 4:
        sealed[-1] ^= 1
    return bytes(sealed), following


@dataclass
class Fetched:
    """The answers to some fetches, and the range of offsets to read."""

    answers: list[tuple[int, bytes]]
    first: int
    stop: int | None
    max_records: int


def fetched(random: Random) -> Fetched:
    answers, offset = [], random.randrange(1000)
    first = offset + random.randrange(5)
    for _ in range(random.randint(1, 3)):
        asked, batches = max(first, offset), []
        for _ in range(random.randint(1, 3)):
            batch, offset = stored_batch(random, offset + random.choice((0, 0, 0, 3)))
            batches.append(batch)
        answers.append((asked, b"".join(batches)))
    stop = random.choice((None, first + random.randrange(40)))
    return Fetched(answers, first, stop, random.choice((1, 3, 10, 1000)))


def outcome(given: Fetched) -> tuple[list[TopicRecord], list[int], str]:
    """Return the records, the positions after them, and the error that ended the reading."""
    partition = ReadPartition(0, "topic 't'", given.first, given.stop)
    records: list[TopicRecord] = []
    positions: list[int] = []
    try:
        for asked, data in given.answers:
            # A reader asks for the offset after the answer before.
            partition.fetch_offset = max(partition.fetch_offset, asked)
            partition.add(partition.fetch_offset, data, None, asked + 10**6)
        for batch in batches_of(partition, given.max_records):
            assert 1 <= len(batch) <= given.max_records
            assert (batch.first_offset, batch.next_offset) == (batch.offsets[0], partition.next_offset)
            assert {type(number) for number in [*batch.offsets, *batch.timestamps_ms]} == {int}
            records += batch.records()
    except CorruptRecordException as error:
        # Of damage with a right checksum aiokafka's parser reads bytes behind the record batch, so its text is chance.
        return records, positions, type(error).__name__
    except Exception as error:
        return records, positions, f"{type(error).__name__}: {error}"
    positions += [partition.position, partition.lag, partition.fetched_bytes]
    return records, positions, ""


def batches_of(partition: ReadPartition, max_records: int) -> Iterator[TopicBatch]:
    while partition.has_records:
        if (batch := partition.take(max_records)) is not None:
            yield batch


def is_out_of_order(given: Fetched) -> bool:
    """Whether a record has an offset that is not above all those before it, or is below the offset of its batch."""
    last = -1
    for _, data in given.answers:
        batches = MemoryRecords(data)
        while batches.has_next():
            batch = batches.next_batch()
            last = max(last, batch.base_offset - 1)
            with contextlib.suppress(Exception):  # Damage of another kind; both ways meet it.
                for record in batch:
                    if record.offset <= last:
                        return True
                    last = record.offset
    return False


@random_examples(fetched)
def test_located_records_are_those_of_the_parser(given: Fetched) -> None:
    """A record had another key, time stamp or offset, or was lost, as soon as Numba was loaded.

    Only the number of records that are returned before an error may differ.
    """
    records, positions, error = outcome(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "is_loaded", lambda: False)
        parsed, *rest = outcome(given)
    if is_out_of_order(given):
        return  # damage with a right checksum; a broker stores no records out of order
    assert [positions, error] == rest
    same = min(len(records), len(parsed)) if error else None
    assert records[:same] == parsed[:same]


def plain_answer(count: int, size: int = 100) -> bytes:
    packing = Packing("t", 10**6, compression="none", max_batch_bytes=10**6, transactional=False)
    queue = PartitionQueue(packing, 0)
    queue.put(OutgoingBatch([b"%d" % number * size for number in range(count)]), 0)
    return bytes(queue.seal(ProducerIdentity()))


@pytest.mark.parametrize("has_instruction", [True, False])
def test_plain_records_are_located(has_instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of the usual form were parsed one by one, and the speed of long streams was that of short ones."""
    if not has_instruction:
        monkeypatch.setattr("streamiter_kafka.record_columns.has_crc32c_instruction", lambda: False)
    for count in range(20, 28):  # Checksums take eight bytes at once, and then those that are left.
        partition, whole = ReadPartition(0, "topic 't'", 0, None), plain_answer(count, size=1)
        # The second record batch begins at each place within eight bytes.
        partition.add(0, whole + struct.pack(">q", count) + whole[8:], None, 2 * count)
        batch = partition.take(2 * count)
        assert batch is not None
        assert len(batch) == 2 * count
        assert isinstance(batch.values, JoinedValues)


@pytest.mark.parametrize("has_instruction", [True, False])
def test_damaged_records_are_an_error(has_instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged bytes of a batch became records that were never written."""
    if not has_instruction:
        monkeypatch.setattr("streamiter_kafka.record_columns.has_crc32c_instruction", lambda: False)
    whole = plain_answer(20)
    partition = ReadPartition(0, "topic 't'", 0, None)
    partition.add(0, whole, None, 20)
    assert len(batches := list(batches_of(partition, 20))) == 1
    assert isinstance(batches[0].values, JoinedValues)
    partition.add(20, struct.pack(">q", 20) + whole[8:-3] + b"!" + whole[-2:], None, 40)
    with pytest.raises(TopicError, match="offset 40 is damaged"):
        partition.take(20)


def test_few_records_do_not_keep_an_answer_in_memory() -> None:
    """A record that waited for its partner kept the megabyte that it was fetched with, for each partition."""
    answer = plain_answer(2000)
    partition = ReadPartition(0, "topic 't'", 0, None)
    unused = sys.getrefcount(answer)
    partition.add(0, answer, None, 2000)
    batch = partition.take(1000)
    assert batch is not None
    last = partition.take(1000)
    assert last is not None
    assert not partition.has_records
    assert sys.getrefcount(answer) == unused
    assert 100 < batch[5:6].nbytes < 1000


def test_located_records_count_as_held_until_the_last_is_taken() -> None:
    """Each partition kept an answer that counted as nothing, so a reader of many held ten times its limit."""
    answer = plain_answer(2000)
    partition = ReadPartition(0, "topic 't'", 0, None)
    partition.add(0, answer, None, 2000)
    partition.take(1000)
    assert partition.fetched_bytes == 0
    assert partition.held_bytes > 1000 * len(b"1000" * 100)
    partition.take(1000)
    assert partition.held_bytes == 0


async def test_a_flow_reads_columns_that_were_located_and_scanned_in_a_thread(
    kafka_topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts were tested one by one, and a job never used them, or used them in the event loop."""
    monkeypatch.setattr(json_columns, "_LOADED_AFTER", 1000)
    topic, threads = kafka_topic(), set[tuple[object, bool]]()
    scan = json_columns.ColumnScanner.scan

    def noted(self: json_columns.ColumnScanner, values: Sequence[bytes | None]) -> object:
        threads.add((type(values), threading.current_thread() is threading.main_thread()))
        return scan(self, values)

    def noted_locate(*given: Any) -> object:
        threads.add(("locate", threading.current_thread() is threading.main_thread()))
        return located_records(*given)

    monkeypatch.setattr(json_columns.ColumnScanner, "scan", noted)
    monkeypatch.setattr(partition, "compiled_locate", lambda: noted_locate)
    await topic.create()
    await write(topic, OutgoingBatch([b'{"n":%d}' % number for number in range(30_000)]))
    flow = Flow("columns")
    read = flow.source(topic, decode=JsonColumns({"n": "int64"}), stop="latest").collect()
    await (await flow.start()).wait()
    assert [record["n"] for record in read.items] == list(range(30_000))
    assert {(JoinedValues, False), ("locate", False)} <= threads
    assert ("locate", True) not in threads
