"""Asking the leaders for offsets: the earliest, the last stable, the end, the first of some time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from streamiter.errors import ConfigurationError, TopicDenied, TopicError
from streamiter.topics.topic import PartitionEnds, TopicDescription
from streamiter_kafka.cluster import NO_LEADER, BrokerConnections
from streamiter_kafka.trouble import BrokerTrouble, Code, TopicMissing, check, code_name
from streamiter_kafka.wire import (
    TOPIC_RESOURCE,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetRequest,
)

__all__ = [
    "READ_COMMITTED",
    "OffsetFinder",
    "commit_group_offsets",
    "comparable",
    "shown_settings",
]


READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
# Instead of a time stamp, the protocol takes these two numbers.
_LATEST: Final = -1
_EARLIEST: Final = -2
# The answer for a time stamp after the last record.
_NONE: Final = -1
# The first record of a partition is the first one of this time or later.
_BEGINNING_MS: Final = 0


class FoundOffset(NamedTuple):
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

    def __init__(self, cluster: BrokerConnections, topic: str, subject: str) -> None:
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

    async def _find(self, times: Mapping[int, int], isolation: int) -> dict[int, FoundOffset]:
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

    async def _ask(self, node: int, asked: list[tuple[int, int]], isolation: int) -> dict[int, FoundOffset]:
        response = await self._cluster.request(node, OffsetRequest(-1, isolation, [(self._topic, asked)]))
        found = {}
        for _topic, partitions in response.topics:
            for number, code, timestamp_ms, offset in partitions:
                check(code, f"{self._subject}, partition {number}")
                found[number] = FoundOffset(offset, timestamp_ms)
        return found


def _offsets(found: Mapping[int, FoundOffset]) -> dict[int, int]:
    return {number: each.offset for number, each in found.items()}


# Not one of Kafka's settings, but what every other tool calls it.
_REPLICATION: Final = "replication.factor"
_BROKER_DEFAULT: Final = -1

_WRONG: Final = frozenset(
    {
        Code.INVALID_TOPIC_EXCEPTION,
        Code.INVALID_PARTITIONS,
        Code.INVALID_REPLICATION_FACTOR,
        Code.INVALID_CONFIG,
        Code.POLICY_VIOLATION,
    }
)


async def create(
    cluster: BrokerConnections, topic: str, partitions: int, settings: Mapping[str, str]
) -> None:
    """Create or widen a topic; returns when each of its partitions can be read and written.

    ``settings`` are Kafka's own, and ``replication.factor``.

    Creating, describing and deleting topics.
    """
    if partitions < 1:
        raise ConfigurationError(f"topic {topic!r}: expected partitions >= 1, given {partitions}")
    replicas = settings.get(_REPLICATION, str(_BROKER_DEFAULT))
    if not re.fullmatch(r"-1|[0-9]{1,4}", str(replicas)):
        raise ConfigurationError(
            f"topic {topic!r}: expected {_REPLICATION} as a whole number of brokers, given {replicas!r}"
        )
    await cluster.persist(lambda: _create(cluster, topic, partitions, int(replicas), settings))
    await cluster.persist(lambda: _widen(cluster, topic, partitions))
    await cluster.persist(lambda: _check_usable(cluster, topic, partitions))


async def describe(cluster: BrokerConnections, topic: str) -> TopicDescription:
    """The offsets of each partition, and all settings the broker tells: none without the right to see them."""
    leaders = await cluster.require(topic)
    finder = OffsetFinder(cluster, topic, f"topic {topic!r}")
    ends = await cluster.persist(lambda: finder.ends(leaders))
    return TopicDescription(
        topic,
        {number: (each.earliest, each.end) for number, each in ends.items()},
        await shown_settings(cluster, topic),
        await cluster.persist(lambda: finder.identities(leaders)),
    )


async def delete(cluster: BrokerConnections, topic: str) -> None:
    """Delete a topic; returns when the cluster does not know it any more."""
    await cluster.require(topic)
    await cluster.persist(lambda: _delete(cluster, topic))
    await cluster.persist(lambda: _check_gone(cluster, topic))


async def shown_settings(cluster: BrokerConnections, topic: str) -> dict[str, str]:
    """As ``settings_of``; empty where this user may not see them, which reading and writing do not need."""
    try:
        return await cluster.persist(lambda: settings_of(cluster, topic))
    except TopicDenied:
        return {}


async def settings_of(cluster: BrokerConnections, topic: str) -> dict[str, str]:
    """The settings of a topic, those by default included."""
    request = DescribeConfigsRequest([(TOPIC_RESOURCE, topic, None)])
    response = await cluster.request_any(request)
    [(code, detail, _type, _name, entries)] = response.resources
    if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        raise TopicMissing(f"there is no topic {topic!r} at {cluster.address}")
    check(code, f"settings of topic {topic!r}", detail)
    return {name: value for name, value, *_ in entries if value is not None}


async def _create(
    cluster: BrokerConnections, topic: str, partitions: int, replicas: int, settings: Mapping[str, str]
) -> None:
    kafka_settings = [(name, str(value)) for name, value in settings.items() if name != _REPLICATION]
    request = CreateTopicsRequest(
        create_topic_requests=[(topic, partitions, replicas, [], kafka_settings)],
        timeout=_timeout_ms(cluster),
        validate_only=False,
    )
    response = await cluster.request_controller(request)
    [(_name, code, detail)] = response.topic_errors
    if code != Code.TOPIC_ALREADY_EXISTS:
        _check_asked(code, f"topic {topic!r}", detail)


async def _widen(cluster: BrokerConnections, topic: str, partitions: int) -> None:
    if len(await _leaders(cluster, topic)) >= partitions:
        return
    request = CreatePartitionsRequest(
        [(topic, (partitions, None))], _timeout_ms(cluster), validate_only=False
    )
    response = await cluster.request_controller(request)
    [(_name, code, detail)] = response.topic_errors
    # A topic that has just been created may show its partitions one by one: they are there already.
    if code != Code.INVALID_PARTITIONS:
        _check_asked(code, f"topic {topic!r}", detail)


async def _check_usable(cluster: BrokerConnections, topic: str, partitions: int) -> None:
    leaders = await _leaders(cluster, topic)
    if len(leaders) < partitions or NO_LEADER in leaders.values():
        raise BrokerTrouble(f"topic {topic!r}: not all of its {partitions} partitions have a leader yet")
    # A broker may be named as leader a moment before it knows that it is.
    await OffsetFinder(cluster, topic, f"topic {topic!r}").earliest(leaders)


async def _leaders(cluster: BrokerConnections, topic: str) -> Mapping[int, int]:
    """A topic that was just created and is not known yet will be: that is no reason to call it missing."""
    try:
        return await cluster.refresh(topic)
    except TopicMissing as missing:
        raise BrokerTrouble(f"topic {topic!r}: created, but not known to the brokers yet") from missing


async def _delete(cluster: BrokerConnections, topic: str) -> None:
    response = await cluster.request_controller(DeleteTopicsRequest([topic], _timeout_ms(cluster)))
    [(_name, code)] = response.topic_error_codes
    if code == Code.TOPIC_DELETION_DISABLED:
        raise ConfigurationError(
            f"topic {topic!r}: this cluster does not let topics be deleted (delete.topic.enable)"
        )
    # An attempt whose answer was lost may have deleted it.
    if code != Code.UNKNOWN_TOPIC_OR_PARTITION:
        check(code, f"topic {topic!r}")


async def _check_gone(cluster: BrokerConnections, topic: str) -> None:
    try:
        await cluster.refresh(topic)
    except TopicMissing:
        return
    raise BrokerTrouble(f"topic {topic!r}: still there after it was deleted")


def _check_asked(code: int, subject: str, detail: str | None) -> None:
    if code in _WRONG:
        raise ConfigurationError(
            f"{subject}: the broker refused what was asked for: {detail or code_name(code)}"
        )
    check(code, subject, detail)


def _timeout_ms(cluster: BrokerConnections) -> int:
    return int(1000 * cluster.options.request_timeout_s)


_GROUPS: Final = 0
# What the protocol takes from one who assigns partitions itself: no generation, and no member of the group.
_NO_GENERATION: Final = -1
_NO_MEMBER: Final = ""
# For as long as the broker keeps offsets of groups (offsets.retention.minutes).
_NO_METADATA: Final = ""


async def commit_group_offsets(
    cluster: BrokerConnections, group: str, topic: str, positions: Mapping[int, int]
) -> None:
    """Store ``positions``, the next offset by partition, as those of ``group``.

    Raises ``TopicError`` where consumers are in the group just now: it is theirs.

    Offsets of a consumer group, for the tools that show its lag; nothing here reads them back.
    """
    if positions:
        await cluster.persist(lambda: _commit(cluster, group, topic, positions))


async def _commit(cluster: BrokerConnections, group: str, topic: str, positions: Mapping[int, int]) -> None:
    subject = f"offsets of the consumer group {group!r} in topic {topic!r} at {cluster.address}"
    node = await _coordinator(cluster, group, subject)
    partitions = [(number, offset, _NO_METADATA) for number, offset in sorted(positions.items())]
    request = OffsetCommitRequest(group, _NO_GENERATION, _NO_MEMBER, _BROKER_DEFAULT, [(topic, partitions)])
    response = await cluster.request(node, request)
    for _topic, answers in response.topics:
        for _number, code in answers:
            _check(code, group, subject)


async def _coordinator(cluster: BrokerConnections, group: str, subject: str) -> int:
    await cluster.find_brokers()
    response = await cluster.request_any(FindCoordinatorRequest(group, _GROUPS))
    check(response.error_code, subject)
    return int(response.coordinator_id)


def _check(code: int, group: str, subject: str) -> None:
    if code == Code.UNKNOWN_MEMBER_ID:
        raise TopicError(
            f"{subject}: consumers are in this group just now; expected a group of nobody else, given {group!r}"
        )
    check(code, subject)
