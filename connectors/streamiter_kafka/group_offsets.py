"""Offsets of a consumer group, for the tools that show its lag; nothing here reads them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from streamiter.errors import TopicError
from streamiter_kafka.cluster import Cluster
from streamiter_kafka.codes import Code
from streamiter_kafka.trouble import check
from streamiter_kafka.wire import FindCoordinatorRequest, OffsetCommitRequest

__all__ = ["commit_group_offsets"]

_GROUPS: Final = 0
# What the protocol takes from one who assigns partitions itself: no generation, and no member of the group.
_NO_GENERATION: Final = -1
_NO_MEMBER: Final = ""
# For as long as the broker keeps offsets of groups (offsets.retention.minutes).
_BROKER_DEFAULT: Final = -1
_NO_METADATA: Final = ""


async def commit_group_offsets(
    cluster: Cluster, group: str, topic: str, positions: Mapping[int, int]
) -> None:
    """Store ``positions``, the next offset by partition, as those of ``group``.

    Raises ``TopicError`` where consumers are in the group just now: it is theirs.
    """
    if positions:
        await cluster.persist(lambda: _commit(cluster, group, topic, positions))


async def _commit(cluster: Cluster, group: str, topic: str, positions: Mapping[int, int]) -> None:
    subject = f"offsets of the consumer group {group!r} in topic {topic!r} at {cluster.address}"
    node = await _coordinator(cluster, group, subject)
    partitions = [(number, offset, _NO_METADATA) for number, offset in sorted(positions.items())]
    request = OffsetCommitRequest(group, _NO_GENERATION, _NO_MEMBER, _BROKER_DEFAULT, [(topic, partitions)])
    response = await cluster.request(node, request)
    for _topic, answers in response.topics:
        for _number, code in answers:
            _check(code, group, subject)


async def _coordinator(cluster: Cluster, group: str, subject: str) -> int:
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
