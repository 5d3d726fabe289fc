"""Record batches without a broker: they arrive in pieces, become records, are packed, and keys find partitions."""

import asyncio
import struct
from random import Random

import pytest
from support.examples import random_examples

from streamiter.errors import RecordTooLarge, TopicError
from streamiter.topics import OutgoingBatch
from streamiter_kafka.packing import Packing, PartitionQueue, ProducerIdentity, partitions_of_keys
from streamiter_kafka.partition import KafkaBatch, ReadPartition
from streamiter_kafka.wire import AnswerReader, murmur2


def stored(first: int, count: int, compression: str = "none") -> bytes:
    """Return a record batch as a broker stores it, with ``count`` records from offset ``first``; each value is its
    offset.
    """
    packing = Packing("t", 10**6, compression=compression, max_batch_bytes=10**6, transactional=False)
    queue = PartitionQueue(packing, 0)
    numbers = range(first, first + count)
    batch = OutgoingBatch(
        [b"%d" % number for number in numbers],
        keys=[None if number % 2 else b"k%d" % number for number in numbers],
        headers=[(("h", b"%d" % number),) if number % 3 == 0 else () for number in numbers],
        timestamps_ms=[1000 + number for number in numbers],
    )
    queue.put(batch, 0)
    sealed = bytes(queue.seal(ProducerIdentity()))
    return struct.pack(">q", first) + sealed[8:]  # the broker sets the offset, which is not in the checksum


def partition(offset: int = 0, stop: int | None = None) -> ReadPartition:
    return ReadPartition(0, "topic 't'", offset, stop)


def taken(read: ReadPartition, max_records: int = 100) -> list[int]:
    batch = read.take(max_records)
    return [] if batch is None else list(batch.offsets)


def cut_anywhere(random: Random) -> tuple[list[bytes], int]:
    """Return answers, and a seed for the places where the connection cuts them."""
    return [random.randbytes(random.choice((0, 1, 4, 50))) for _ in range(5)], random.randrange(2**32)


@random_examples(cut_anywhere)
def test_answers_are_the_same_wherever_the_connection_cuts_them(given: tuple[list[bytes], int]) -> None:
    """Pieces of an answer are kept as they arrive, and the rest of one belongs to the answer behind it."""
    asyncio.run(check_that_answers_arrive(*given))


async def check_that_answers_arrive(answers: list[bytes], seed: int) -> None:
    reader, cuts = asyncio.StreamReader(), Random(seed)
    AnswerReader.take_over(reader)

    async def read() -> list[bytes]:
        return [await reader.readexactly(len(answer)) for answer in answers]

    reading, whole = asyncio.create_task(read()), b"".join(answers)
    while whole:
        size = cuts.randint(1, 60)
        reader.feed_data(whole[:size])
        whole = whole[size:]
        if cuts.random() < 0.5:
            await asyncio.sleep(0)
    assert await reading == answers
    reader.feed_data(b"ab")
    reader.feed_eof()
    assert not reader.at_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await reader.readexactly(3)


def test_reading_begins_and_ends_inside_of_stored_batches() -> None:
    """A reader returned records before its start or after its stop, because a broker returns whole batches."""
    read = partition(offset=3, stop=12)
    read.add(read.fetch_offset, stored(0, 5) + stored(5, 5) + stored(10, 5), None, 15)
    assert taken(read) == list(range(3, 12))
    assert read.is_finished
    assert read.lag == 0


def test_the_next_offset_is_never_behind_dropped_records() -> None:
    """A run ended at its stop position, and a run that read further missed records."""
    read = partition(offset=3, stop=7)
    read.add(read.fetch_offset, stored(0, 10), None, 10)
    assert read.position == 3
    assert taken(read) == [3, 4, 5, 6]
    assert read.position == 7
    compacted = partition(stop=50)
    compacted.add(compacted.fetch_offset, stored(60, 2), None, 62)
    assert compacted.position == 50


def test_an_answer_to_an_earlier_fetch_is_dropped() -> None:
    """A partition had a new leader, and the old leader answered last, with records that the new one did not have."""
    read = partition()
    read.add(0, stored(0, 5), None, 10)
    read.add(0, stored(0, 5) + stored(5, 3), None, 5)
    assert taken(read) == [0, 1, 2, 3, 4]
    assert (read.fetch_offset, read.lag, read.is_behind) == (5, 5, True)
    read.add(5, stored(5, 5), None, 10)
    assert taken(read) == [5, 6, 7, 8, 9]


def test_batches_of_any_size_are_cut_and_joined_to_the_size_asked_for() -> None:
    """The size of a producer's batches decided how many records a flow took at once."""
    read = partition()
    read.add(read.fetch_offset, b"".join(stored(first, 1) for first in range(4)) + stored(4, 30), None, 40)
    assert taken(read, 10) == list(range(10))
    assert (read.position, read.lag) == (10, 30)
    read.add(read.fetch_offset, stored(34, 6), None, 40)
    assert taken(read, 10) == list(range(10, 20))
    assert taken(read, 10) == list(range(20, 30))
    assert taken(read, 10) == list(range(30, 40))
    assert not read.has_records


def test_offsets_that_were_compacted_away_are_passed_over() -> None:
    """A reader waited for ever for an offset that compaction had removed."""
    read = partition(stop=50)
    read.add(read.fetch_offset, stored(7, 2) + stored(60, 2), None, 62)
    assert taken(read) == [7, 8]
    assert read.is_finished


def test_fetched_bytes_are_counted_and_released() -> None:
    """The limit of memory had no effect, because it uses this number of bytes."""
    read = partition()
    read.add(read.fetch_offset, stored(0, 50) + stored(50, 50), None, 100)
    held = read.fetched_bytes
    assert held > 1000
    taken(read, 50)
    assert 0 < read.fetched_bytes < held
    taken(read, 50)
    assert read.fetched_bytes == 0


def test_a_damaged_batch_is_an_error_that_names_its_offset() -> None:
    """A reader continued after a damaged batch, and returned records that were never written."""
    damaged = bytearray(stored(20, 5))
    damaged[-3] ^= 1
    read = partition(offset=20)
    read.add(read.fetch_offset, bytes(damaged), None, 25)
    with pytest.raises(TopicError, match="offset 25 is damaged"):
        read.take(10)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_all_columns_belong_to_the_same_records_however_a_batch_is_cut(compression: str) -> None:
    """A part of a batch had the columns of other records, because columns are built only when they are used."""
    read = partition()
    read.add(read.fetch_offset, stored(0, 12, compression), None, 12)
    batch = read.take(12)
    assert isinstance(batch, KafkaBatch)
    whole = batch.records()
    assert [record.offset for record in whole] == list(range(12))
    assert batch[3:7].records() == whole[3:7]
    assert batch.take([5, 1, 11]).records() == [whole[5], whole[1], whole[11]]
    assert (batch[3:7].next_offset, batch.next_offset, len(batch[3:7])) == (7, 12, 4)
    assert whole[6].key == b"k6"
    assert whole[6].headers == (("h", b"6"),)
    assert whole[6].timestamp_ms == 1006
    assert whole[7].key is None


LEADERS = {0: 1, 1: 1, 2: 1}


def packing(limit_bytes: int = 1000, compression: str = "none") -> Packing:
    return Packing("clicks", limit_bytes, compression=compression, max_batch_bytes=10**6, transactional=False)


def test_a_record_above_the_limit_is_named_with_both_sizes() -> None:
    """The error did not say which of 8,000 records was too large."""
    batch = OutgoingBatch([b"a", b"x" * 1000, b"b"], keys=[b"k0", b"k1", b"k2"])
    with pytest.raises(RecordTooLarge, match=r"record 1 .*k1.* takes 1\d\d\d bytes, expected at most 1000"):
        packing().spread(batch, LEADERS)


@pytest.mark.parametrize("over_bytes", [0, 1])
def test_the_limit_is_exact(over_bytes: int) -> None:
    """A record that just fits was refused, or a record above the limit was sent and refused by the broker."""
    largest = 1000 - 61 - len(b"\x80\x01") - len(b"\x00\x00\x00\x01\x80\x01\x00")
    batch = OutgoingBatch([b"x" * (largest + over_bytes)])
    if over_bytes:
        with pytest.raises(RecordTooLarge):
            packing().spread(batch, LEADERS)
    else:
        assert packing().spread(batch, LEADERS)


def test_headers_count_for_the_size() -> None:
    """A record with large headers was sent, and the broker, which counts headers, refused it."""
    batch = OutgoingBatch([b"a"], headers=[(("h", b"x" * 1000),)])
    with pytest.raises(RecordTooLarge):
        packing().spread(batch, LEADERS)


def test_a_record_that_compresses_well_may_be_larger() -> None:
    """A record that compresses well was refused, although the broker measures the compressed batch."""
    assert packing(compression="gzip").spread(OutgoingBatch([b"x" * 5000]), LEADERS)


def test_unkeyed_batches_take_turns_over_the_partitions_that_have_a_leader() -> None:
    """A partition without a leader held up a third of the records, although they had no keys."""
    packs = packing()
    leaders = {0: 1, 1: -1, 2: 1}
    served = [packs.spread(OutgoingBatch([b"a"]), leaders)[0][0] for _ in range(4)]
    assert sorted(served) == [0, 0, 2, 2]


def test_unkeyed_records_among_keyed_ones_stay_together() -> None:
    """A key of None was treated as the empty key."""
    keys = [b"a", None, b"", None, b"a", None]
    parts = packing().spread(OutgoingBatch([b"%d" % n for n in range(6)], keys=keys), LEADERS)
    placed = {value: number for number, part in parts for value in part.values}
    assert placed[b"1"] == placed[b"3"] == placed[b"5"]
    assert placed[b"0"] == placed[b"4"]
    assert sum(len(part) for _, part in parts) == 6


def test_columns_of_unequal_length_are_refused() -> None:
    """The shortest column cut the other columns off."""
    with pytest.raises(TopicError, match="keys"):
        packing().spread(OutgoingBatch([b"a", b"b"], keys=[b"k"]), LEADERS)


def test_a_partition_splits_records_into_batches_in_order() -> None:
    """A record was lost or doubled between two batches."""
    queue = PartitionQueue(packing(), 0)
    queue.put(OutgoingBatch([b"%03d" % n * 10 for n in range(100)]), 0)
    queue.put(OutgoingBatch([b"last"]), 0)
    assert sum(batch.count for batch in queue.batches) == 101
    assert all(batch.size_bytes <= 1000 for batch in queue.batches)
    assert [batch.is_open for batch in queue.batches] == [False] * (len(queue.batches) - 1) + [True]


def test_sequence_numbers_follow_each_other_and_are_free_again_after_a_refusal() -> None:
    """A gap in the sequence numbers made the broker refuse all later batches."""
    queue, producer = PartitionQueue(packing(), 0), ProducerIdentity(7, 0)
    queue.put(OutgoingBatch([b"%03d" % n * 10 for n in range(60)]), 0)
    queue.seal(producer)
    first = queue.batches.popleft()
    queue.seal(producer)
    assert queue.batches[0].base_sequence == first.count
    queue.take_back()
    queue.seal(producer)
    assert queue.batches[0].base_sequence == first.count


def test_sequence_numbers_begin_again_behind_the_largest() -> None:
    """After 2,147,483,648 records the sequence number became negative, and the writer ended."""
    queue, producer = PartitionQueue(packing(), 0), ProducerIdentity(7, 0)
    queue.next_sequence = 2**31 - 2
    queue.put(OutgoingBatch([b"a", b"b", b"c"]), 0)
    queue.seal(producer)
    assert queue.next_sequence == 1


def test_a_sealed_batch_keeps_its_bytes() -> None:
    """A batch that was sent again had other bytes, so the broker stored it twice."""
    queue, producer = PartitionQueue(packing(), 0), ProducerIdentity(7, 3)
    queue.put(OutgoingBatch([b"a"]), 0)
    once = bytes(queue.seal(producer))
    queue.put(OutgoingBatch([b"b"]), 0)
    assert bytes(queue.seal(producer)) == once
    assert len(queue.batches) == 2


# The hashes are those of the Java client's own test, UtilsTest.testMurmur2.
JAVA_HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "expected"), JAVA_HASHES.items())
def test_the_hash_is_that_of_the_java_client(key: bytes, expected: int) -> None:
    """Records with equal keys from two languages went to different partitions, because the hashes differed."""
    assert murmur2(key) == expected % 2**32


def keys_and_partitions(random: Random) -> tuple[list[bytes], int]:
    keys = [random.randbytes(random.randrange(41)) for _ in range(random.randint(8, 40))]
    return keys, random.randint(1, 1000)


@random_examples(keys_and_partitions, examples=500)
def test_many_keys_go_to_the_same_partitions_as_single_keys(example: tuple[list[bytes], int]) -> None:
    """The partition of a key depended on the size of its batch, because many keys are hashed together."""
    keys, partitions = example
    alone = [(murmur2(key) & 0x7FFFFFFF) % partitions for key in keys]
    assert partitions_of_keys(keys, partitions) == alone
