"""One topic in memory. The broker's lock is held around every call."""

from __future__ import annotations

from collections.abc import Mapping

from streamiter.errors import TopicNotFound
from streamiter.topics.memory.partition_log import PartitionLog, Transaction
from streamiter.topics.memory.waiters import Waiters
from streamiter.topics.outgoing import check_outgoing, check_record_sizes, spread
from streamiter.topics.topic import OutgoingBatch

__all__ = ["TopicLog", "append", "check_not_deleted"]


class TopicLog:
    """One topic: its partitions, its settings, and who waits for its records."""

    def __init__(self, name: str, settings: Mapping[str, str], creation: int) -> None:
        """``creation`` counts how often a topic of this name was created."""
        self.name = name
        self._creation = creation
        self.settings = dict(settings)
        self.partitions: list[PartitionLog] = []
        self.waiters = Waiters()
        self.is_deleted = False

    @property
    def identities(self) -> dict[int, str]:
        """What tells the topic from those of its name that were deleted, by partition.

        In another process the count begins again: a flow that is tested there may go on with topics that were
        filled in the same way.
        """
        return dict.fromkeys(range(len(self.partitions)), f"creation {self._creation}")

    def add_partitions(self, partitions: int) -> None:
        """Grow to that many partitions; never shrinks."""
        while len(self.partitions) < partitions:
            self.partitions.append(PartitionLog())
        self.waiters.wake()

    def delete(self) -> None:
        """Drop the records and wake the readers, who find that it is gone."""
        self.is_deleted = True
        self.partitions.clear()
        self.waiters.wake()

    def retain(self) -> None:
        """Apply the retention and compaction that the settings ask for."""
        if "retention_records" in self.settings:
            for partition in self.partitions:
                partition.retain(int(self.settings["retention_records"]))
        if int(self.settings.get("compact", "0")):
            for partition in self.partitions:
                partition.compact()


def append(
    log: TopicLog,
    batch: OutgoingBatch,
    now_ms: int,
    *,
    unkeyed: int,
    transaction: Transaction | None = None,
) -> None:
    """Check ``batch`` and write it all, or nothing; the broker's lock must be held."""
    check_not_deleted(log)
    partitions = len(log.partitions)
    check_outgoing(batch, topic=log.name, partitions=partitions)
    if "max_record_bytes" in log.settings:
        check_record_sizes(batch, int(log.settings["max_record_bytes"]), topic=log.name)
    for number, part in spread(batch, partitions, unkeyed=unkeyed % partitions):
        timestamps_ms = part.timestamps_ms if part.timestamps_ms is not None else [now_ms] * len(part)
        log.partitions[number].append(part, timestamps_ms, transaction)


def check_not_deleted(log: TopicLog) -> None:
    """Raise ``TopicNotFound`` for a topic that was deleted while it was open."""
    if log.is_deleted:
        raise TopicNotFound(f"topic {log.name!r} was deleted while it was written")
