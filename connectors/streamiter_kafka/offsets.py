"""Asking the leaders for offsets: the earliest, the last stable, the end, the first of some time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from streamiter.topics.positions import PartitionEnds
from streamiter_kafka.cluster import NO_LEADER, Cluster
from streamiter_kafka.trouble import BrokerTrouble, check
from streamiter_kafka.wire import OffsetRequest

__all__ = ["READ_COMMITTED", "OffsetFinder", "comparable"]

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
# Instead of a time stamp, the protocol takes these two numbers.
_LATEST: Final = -1
_EARLIEST: Final = -2
# The answer for a time stamp after the last record.
_NONE: Final = -1
# The first record of a partition is the first one of this time or later.
_BEGINNING_MS: Final = 0


class Found(NamedTuple):
    """An offset and, where a time was asked for, that of its record."""

    offset: int
    timestamp_ms: int


def comparable(known: Mapping[int, str], found: Mapping[int, str]) -> dict[int, str]:
    """Those of the found identities that tell about the same thing as the known ones.

    >>> comparable({0: "record 0=17", 1: "record 3=18"}, {0: "record 0=99", 1: "topic id=..."})
    {0: 'record 0=99'}
    """
    return {
        number: identity
        for number, identity in found.items()
        if number in known and known[number].partition("=")[0] == identity.partition("=")[0]
    }


class OffsetFinder:
    """Finds offsets of one topic. Raises ``BrokerTrouble`` for what may pass."""

    def __init__(self, cluster: Cluster, topic: str, subject: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._subject = subject

    async def ends(self, partitions: Iterable[int]) -> dict[int, PartitionEnds]:
        """The earliest offset, the last stable one and the end of each partition."""
        wanted = list(partitions)
        earliest, stable, end = await asyncio.gather(
            self.earliest(wanted),
            self._find(dict.fromkeys(wanted, _LATEST), READ_COMMITTED),
            self._find(dict.fromkeys(wanted, _LATEST), READ_UNCOMMITTED),
        )
        return {
            number: PartitionEnds(earliest[number], stable[number].offset, end[number].offset)
            for number in wanted
        }

    async def earliest(self, partitions: Iterable[int]) -> dict[int, int]:
        """The earliest offset of each partition."""
        return _offsets(await self._find(dict.fromkeys(partitions, _EARLIEST), READ_UNCOMMITTED))

    async def identities(self, partitions: Iterable[int]) -> dict[int, str]:
        """What tells the topic from others of its name, before or after it, by partition.

        It is the topic's id. Brokers before 2.8 give none; there it is the time of the first record, which says
        something as long as retention and compaction leave that record where it is.
        """
        topic_id = self._cluster.topic_id(self._topic)
        if topic_id is not None:
            return dict.fromkeys(partitions, f"topic id={topic_id}")
        there = self._cluster.leaders(self._topic)
        wanted = [number for number in partitions if number in there]
        found = await self._find(dict.fromkeys(wanted, _BEGINNING_MS), READ_UNCOMMITTED)
        return {
            number: f"record {first.offset}={first.timestamp_ms}"
            for number, first in found.items()
            if first.offset != _NONE
        }

    async def at_time(self, partitions: Iterable[int], timestamp_ms: int) -> dict[int, int]:
        """The first offset of that time or later; partitions without such a record are left out."""
        found = await self._find(dict.fromkeys(partitions, timestamp_ms), READ_COMMITTED)
        return {number: offset for number, offset in _offsets(found).items() if offset != _NONE}

    async def _find(self, times: Mapping[int, int], isolation: int) -> dict[int, Found]:
        leaders = self._cluster.leaders(self._topic)
        by_leader: dict[int, list[tuple[int, int]]] = {}
        for number, time in times.items():
            by_leader.setdefault(leaders.get(number, NO_LEADER), []).append((number, time))
        try:
            parts = [await self._ask(node, asked, isolation) for node, asked in by_leader.items()]
        except BrokerTrouble:
            # The next attempt should not ask the same wrong broker.
            await self._cluster.refresh(self._topic)
            raise
        return {number: found for part in parts for number, found in part.items()}

    async def _ask(self, node: int, asked: list[tuple[int, int]], isolation: int) -> dict[int, Found]:
        response = await self._cluster.request(node, OffsetRequest(-1, isolation, [(self._topic, asked)]))
        found = {}
        for _topic, partitions in response.topics:
            for number, code, timestamp_ms, offset in partitions:
                check(code, f"{self._subject}, partition {number}")
                found[number] = Found(offset, timestamp_ms)
        return found


def _offsets(found: Mapping[int, Found]) -> dict[int, int]:
    return {number: each.offset for number, each in found.items()}
