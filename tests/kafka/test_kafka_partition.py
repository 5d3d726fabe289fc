"""Fetched bytes become records with positions, stops, columns and checks of damage, without a broker."""

from __future__ import annotations

import struct

import pytest

from streamiter.errors import TopicError
from streamiter.topics import OutgoingBatch
from streamiter_kafka.packing import Packing, PartitionQueue, ProducerIdentity
from streamiter_kafka.partition import KafkaBatch, ReadPartition


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
