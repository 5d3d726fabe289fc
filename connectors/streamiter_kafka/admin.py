"""Creating, describing and deleting topics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from streamiter.errors import ConfigurationError, TopicDenied
from streamiter.topics.topic import TopicDescription
from streamiter_kafka.cluster import NO_LEADER, Cluster
from streamiter_kafka.codes import Code, code_name
from streamiter_kafka.offsets import OffsetFinder
from streamiter_kafka.trouble import BrokerTrouble, TopicMissing, check
from streamiter_kafka.wire import (
    TOPIC_RESOURCE,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
)

__all__ = ["create", "delete", "describe", "settings_of", "shown_settings"]

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


async def create(cluster: Cluster, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
    """Create or widen a topic; returns when each of its partitions can be read and written.

    ``settings`` are Kafka's own, and ``replication.factor``.
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


async def describe(cluster: Cluster, topic: str) -> TopicDescription:
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


async def delete(cluster: Cluster, topic: str) -> None:
    """Delete a topic; returns when the cluster does not know it any more."""
    await cluster.require(topic)
    await cluster.persist(lambda: _delete(cluster, topic))
    await cluster.persist(lambda: _check_gone(cluster, topic))


async def shown_settings(cluster: Cluster, topic: str) -> dict[str, str]:
    """As ``settings_of``; empty where this user may not see them, which reading and writing do not need."""
    try:
        return await cluster.persist(lambda: settings_of(cluster, topic))
    except TopicDenied:
        return {}


async def settings_of(cluster: Cluster, topic: str) -> dict[str, str]:
    """The settings of a topic, those by default included."""
    request = DescribeConfigsRequest([(TOPIC_RESOURCE, topic, None)])
    response = await cluster.request_any(request)
    [(code, detail, _type, _name, entries)] = response.resources
    if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        raise TopicMissing(f"there is no topic {topic!r} at {cluster.address}")
    check(code, f"settings of topic {topic!r}", detail)
    return {name: value for name, value, *_ in entries if value is not None}


async def _create(
    cluster: Cluster, topic: str, partitions: int, replicas: int, settings: Mapping[str, str]
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


async def _widen(cluster: Cluster, topic: str, partitions: int) -> None:
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


async def _check_usable(cluster: Cluster, topic: str, partitions: int) -> None:
    leaders = await _leaders(cluster, topic)
    if len(leaders) < partitions or NO_LEADER in leaders.values():
        raise BrokerTrouble(f"topic {topic!r}: not all of its {partitions} partitions have a leader yet")
    # A broker may be named as leader a moment before it knows that it is.
    await OffsetFinder(cluster, topic, f"topic {topic!r}").earliest(leaders)


async def _leaders(cluster: Cluster, topic: str) -> Mapping[int, int]:
    """A topic that was just created and is not known yet will be: that is no reason to call it missing."""
    try:
        return await cluster.refresh(topic)
    except TopicMissing as missing:
        raise BrokerTrouble(f"topic {topic!r}: created, but not known to the brokers yet") from missing


async def _delete(cluster: Cluster, topic: str) -> None:
    response = await cluster.request_controller(DeleteTopicsRequest([topic], _timeout_ms(cluster)))
    [(_name, code)] = response.topic_error_codes
    if code == Code.TOPIC_DELETION_DISABLED:
        raise ConfigurationError(
            f"topic {topic!r}: this cluster does not let topics be deleted (delete.topic.enable)"
        )
    # An attempt whose answer was lost may have deleted it.
    if code != Code.UNKNOWN_TOPIC_OR_PARTITION:
        check(code, f"topic {topic!r}")


async def _check_gone(cluster: Cluster, topic: str) -> None:
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


def _timeout_ms(cluster: Cluster) -> int:
    return int(1000 * cluster.options.request_timeout_s)
