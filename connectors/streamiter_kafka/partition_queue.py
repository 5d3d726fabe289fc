"""The batches of one partition on their way, in order and numbered.

Nothing here does I/O.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

from streamiter.topics.topic import OutgoingBatch
from streamiter_kafka.packing import Packing, PendingBatch, ProducerIdentity, rows

__all__ = ["Key", "PartitionQueue"]

Key = tuple[str, int]
"""Topic and partition."""


class PartitionQueue:
    """The batches of one partition that are not stored yet, in order."""

    def __init__(self, packing: Packing, number: int) -> None:
        self.packing = packing
        self.key: Key = (packing.topic, number)
        self.batches: deque[PendingBatch] = deque()
        self.next_sequence = 0
        self.is_sending = False
        self.opened_s = 0.0

    def put(self, batch: OutgoingBatch, now_ms: int) -> int:
        """Append records; the bytes they add."""
        remaining = iter(rows(batch, now_ms))
        added_bytes = 0
        while True:
            pending = self._open_batch()
            before_bytes = pending.size_bytes
            left = pending.fill(remaining)
            added_bytes += pending.size_bytes - before_bytes
            if left is None:
                return added_bytes
            remaining = chain([left], remaining)

    def seal(self, producer: ProducerIdentity) -> bytes:
        """The bytes of the first batch; its numbers follow those of the batch before."""
        head = self.batches[0]
        if not head.is_sealed:
            head.seal(producer, self.next_sequence)
            self.next_sequence = head.next_sequence
        return head.seal(producer, head.base_sequence)

    def take_back(self) -> PendingBatch:
        """Remove the first batch, which the broker has refused: its numbers are free again."""
        head = self.batches.popleft()
        self.next_sequence = head.base_sequence
        return head

    def _open_batch(self) -> PendingBatch:
        if not self.batches or not self.batches[-1].is_open:
            self.batches.append(self.packing.new_batch())
        return self.batches[-1]
