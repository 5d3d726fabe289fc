"""Outgoing batches are packed into record batches, without a broker."""

from __future__ import annotations

import pytest

from streamiter.errors import RecordTooLarge, TopicError
from streamiter.topics import OutgoingBatch
from streamiter_kafka.packing import Packing, PartitionQueue, ProducerIdentity

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
