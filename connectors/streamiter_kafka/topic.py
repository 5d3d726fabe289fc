"""A topic of a Kafka cluster, and the connector that makes it from a URL.

A topic opens readers, writers and transactions, each with connections of its own. The requests that create, describe
and delete topics are here too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from streamiter.errors import ConfigurationError, TopicDenied, TopicError, TopicNotFound
from streamiter.topics.connecting import check_partition_count, closed_on_failure
from streamiter.topics.topic import (
    Connector,
    Decoder,
    GroupPositions,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicDescription,
    TopicReader,
    TopicWriter,
    Transactions,
)
from streamiter_kafka.cluster import NO_LEADER, BrokerConnections, CoordinatorKind, OffsetFinder, shown_settings
from streamiter_kafka.options import KafkaAddress, KafkaOptions
from streamiter_kafka.reader import open_reader
from streamiter_kafka.transactions import offsets_of, open_transactions
from streamiter_kafka.trouble import BrokerTrouble, Code, TopicMissing, check_code
from streamiter_kafka.wire import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    GroupOffsetsRequest,
    OffsetCommitRequest,
)
from streamiter_kafka.writer import open_packing, open_writer


class KafkaConnector(Connector):
    """Topics on Kafka: ``kafka://host:9092,host2:9092/topic``.

    Options are given by keyword or in the URL's query; give passwords by keyword. :class:`KafkaOptions` lists them.

    >>> KafkaConnector().topic("kafka://127.0.0.1:9092/clicks?compression=lz4", {"give_up_after_s": 5})
    KafkaTopic('kafka://127.0.0.1:9092/clicks?compression=lz4')
    """

    def topic(self, url: str, options: Mapping[str, object]) -> KafkaTopic:
        address = KafkaAddress.parse(url)
        if not address.topic:
            raise ConfigurationError(f"topic {address.url!r}: expected a topic, as in {address.url}clicks")
        return KafkaTopic(address, _options(address, options, f"topic {address.url!r}"))

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        address = KafkaAddress.parse(url)
        subject = f"topics of {address.cluster}"
        async with BrokerConnections(address.servers, _options(address, options, subject), subject) as cluster:
            return await cluster.persist(cluster.topic_names, briefly=True)


def _options(address: KafkaAddress, options: Mapping[str, object], subject: str) -> KafkaOptions:
    """Return the options; a keyword option replaces one of the URL."""
    return KafkaOptions.parse({**address.query, **options}, subject)


class KafkaTopic(Topic):
    """A topic of a Kafka cluster. Each reader, writer and transaction has connections of its own."""

    keeps_positions = True
    compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({"cleanup.policy": "compact"})
    eager_compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            # Brokers compact closed segments only. By default a segment is open for 7 days, or up to 1 GiB. 1 MiB is
            # the smallest size that brokers take (since 4.1), and holds about 4,000 commits.
            "segment.bytes": str(1 << 20),
            "segment.ms": str(60 * 60 * 1000),
            # By default a broker compacts a partition only when half of it could be dropped.
            "min.cleanable.dirty.ratio": "0.01",
            # The ends of transactions are records, too. They are kept as long as tombstones: 24 h by default.
            "delete.retention.ms": str(60 * 60 * 1000),
        }
    )

    def __init__(self, address: KafkaAddress, options: KafkaOptions, commit_domain: str | None = None) -> None:
        self._address = address
        self.options = options
        self._commit_domain = commit_domain or f"kafka://{address.cluster}"

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def name(self) -> str:
        return self._address.topic

    @property
    def commit_domain(self) -> str:
        return self._commit_domain

    async def in_domain_of(self, other: Topic) -> KafkaTopic:
        if not isinstance(other, KafkaTopic) or other.commit_domain == self.commit_domain:
            return self
        # A server is in one cluster, which may have several addresses.
        is_one = not set(self._address.servers).isdisjoint(other._address.servers) or await self._is_at(other)
        return KafkaTopic(self._address, self.options, other.commit_domain) if is_one else self

    async def _is_at(self, other: KafkaTopic) -> bool:
        """Whether the cluster of another topic has this topic, and not one of the same name; False before Kafka 2.8."""
        ids = set()
        for topic in (self, other.beside(self.name)):
            async with topic._cluster() as cluster:
                try:
                    await cluster.require(topic.name)
                except (TopicNotFound, TopicDenied):
                    return False
                ids.add(cluster.topic_id(topic.name))
        return len(ids) == 1 and None not in ids

    def beside(self, name: str) -> KafkaTopic:
        return KafkaTopic(self._address.beside(name), self.options, self._commit_domain)

    def default_decoder(self) -> Decoder | None:
        return None

    async def open_reader(self, request: ReadRequest) -> TopicReader:
        async with closed_on_failure(self._cluster()) as cluster:
            return await open_reader(cluster, self.name, request)

    async def open_writer(self) -> TopicWriter:
        async with closed_on_failure(self._cluster()) as cluster:
            return await open_writer(cluster, self.name)

    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> Transactions:
        async with closed_on_failure(self._cluster()) as cluster:
            return await open_transactions(cluster, self.commit_domain, transactional_id, timeout_s)

    async def committed_positions(self, group: str) -> GroupPositions | None:
        """Return the offsets of the consumer group ``group``."""
        async with self._cluster() as cluster:
            partitions = await cluster.require(self.name)
            return await cluster.persist(lambda: _group_offsets(cluster, group, self.name, partitions))

    async def report_positions(self, group: str, positions: Mapping[int, int]) -> None:
        """Commit ``positions`` as the offsets of the consumer group ``group``, outside any transaction.

        Tools show the lag of the group from them. Raises ``TopicError`` while consumers are in the group, since the
        offsets are theirs.
        """
        if not positions:
            return
        async with self._cluster() as cluster:
            await cluster.persist(lambda: _commit_offsets(cluster, group, self.name, positions), briefly=True)

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Create the topic, or the partitions that it lacks; return when all of them can be read and written.

        ``settings`` are those of Kafka, and ``replication.factor``.
        """
        check_partition_count(self.name, partitions)
        kafka_settings = dict(settings or {})
        replicas = str(kafka_settings.pop(_REPLICATION, _BROKER_DEFAULT))
        if not re.fullmatch(r"-1|[0-9]{1,4}", replicas):
            raise ConfigurationError(
                f"topic {self.name!r}: expected {_REPLICATION} as a whole number of brokers, given {replicas!r}"
            )
        async with self._cluster() as cluster:
            await cluster.persist(lambda: _create(cluster, self.name, partitions, int(replicas), kafka_settings))
            await cluster.persist(lambda: _add_partitions(cluster, self.name, partitions))
            await cluster.persist(lambda: _check_usable(cluster, self.name, partitions))

    def settings_to_keep(self, seconds: float) -> Mapping[str, str]:
        return {**self.compaction_settings, _COMPACTION_LAG: _milliseconds(seconds), "segment.bytes": _SEGMENT_BYTES}

    def early_deletion(self, settings: Mapping[str, str], seconds: float) -> str | None:
        better = settings_that_keep(settings, seconds)
        if not better:
            return None
        given = ", ".join(f"{name}={settings.get(name, 'unknown')}" for name in better)
        changed = ",".join(f"{name}={value}" for name, value in better.items())
        return (
            f"it has {given}; change that with: kafka-configs.sh --bootstrap-server {self._address.cluster} --alter "
            f"--entity-type topics --entity-name {self.name} --add-config {changed}"
        )

    async def describe(self) -> TopicDescription:
        """Return the offsets of each partition, and the settings; none without the right to see them."""
        async with self._cluster() as cluster:
            leaders = await cluster.require(self.name)
            finder = OffsetFinder(cluster, self.name, f"topic {self.name!r}")
            ends = await cluster.persist(lambda: finder.ends(leaders))
            return TopicDescription(
                self.name,
                {number: (each.earliest, each.end) for number, each in ends.items()},
                await shown_settings(cluster, self.name),
                await cluster.persist(lambda: finder.identities(leaders)),
            )

    async def size_limit(self) -> SizeLimit:
        async with self._cluster() as cluster:
            await cluster.require(self.name)
            packing = await open_packing(cluster, self.name, self.options, transactional=False)
        return packing.size_limit()

    async def delete(self) -> None:
        """Delete the topic; return when the cluster does not know it any more."""
        async with self._cluster() as cluster:
            await cluster.require(self.name)
            await cluster.persist(lambda: _delete(cluster, self.name))
            await cluster.persist(lambda: _check_deleted(cluster, self.name))

    def _cluster(self) -> BrokerConnections:
        return BrokerConnections(self._address.servers, self.options, f"topic {self.name!r}")


# Not one of Kafka's settings, but the name that every other tool uses.
_REPLICATION: Final = "replication.factor"
_BROKER_DEFAULT: Final = -1

_COMPACTION_LAG: Final = "min.compaction.lag.ms"
_LONGEST_LAG: Final = "max.compaction.lag.ms"
# Brokers compact closed segments only, and close one by default at 1 GiB, or after 7 days. Not less than 16 MiB: each
# segment is a file.
_SEGMENT_BYTES: Final = str(16 << 20)


def settings_that_keep(settings: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Return what to change in the settings of a topic, so that each record is kept for ``seconds``.

    >>> settings_that_keep({"cleanup.policy": "compact", "min.compaction.lag.ms": "0"}, 3600)
    {'min.compaction.lag.ms': '3600000'}
    >>> settings_that_keep({"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}, 3600)
    {}
    """
    wanted, better = _milliseconds(seconds), {}
    policies = settings.get("cleanup.policy", "").split(",")
    if "compact" in policies and int(settings.get(_COMPACTION_LAG, 0)) < int(wanted):
        better[_COMPACTION_LAG] = wanted
        # A broker refuses a longest lag below the shortest one.
        if int(settings.get(_LONGEST_LAG, wanted)) < int(wanted):
            better[_LONGEST_LAG] = wanted
    if "delete" in policies:
        if 0 <= int(settings.get("retention.ms", -1)) < int(wanted):
            better["retention.ms"] = wanted
        if int(settings.get("retention.bytes", -1)) >= 0:
            better["retention.bytes"] = "-1"
    return better


def _milliseconds(seconds: float) -> str:
    return str(math.ceil(1000 * seconds))


_REFUSALS: Final = frozenset(
    {
        Code.INVALID_TOPIC_EXCEPTION,
        Code.INVALID_PARTITIONS,
        Code.INVALID_REPLICATION_FACTOR,
        Code.INVALID_CONFIG,
        Code.POLICY_VIOLATION,
    }
)


async def _create(
    cluster: BrokerConnections, topic: str, partitions: int, replicas: int, settings: Mapping[str, str]
) -> None:
    as_texts = [(name, str(value)) for name, value in settings.items()]
    request = CreateTopicsRequest(
        create_topic_requests=[(topic, partitions, replicas, [], as_texts)],
        timeout=cluster.options.request_timeout_ms,
        validate_only=False,
    )
    response = await cluster.request_controller(request)
    [(_name, code, detail)] = response.topic_errors
    if code != Code.TOPIC_ALREADY_EXISTS:
        _check_refusal(code, f"topic {topic!r}", detail)


async def _add_partitions(cluster: BrokerConnections, topic: str, partitions: int) -> None:
    if len(await _leaders(cluster, topic)) >= partitions:
        return
    request = CreatePartitionsRequest(
        [(topic, (partitions, None))], cluster.options.request_timeout_ms, validate_only=False
    )
    response = await cluster.request_controller(request)
    [(_name, code, detail)] = response.topic_errors
    # The partitions of a new topic may appear one by one; then this request comes too late, and is not needed.
    if code != Code.INVALID_PARTITIONS:
        _check_refusal(code, f"topic {topic!r}", detail)


async def _check_usable(cluster: BrokerConnections, topic: str, partitions: int) -> None:
    leaders = await _leaders(cluster, topic)
    if len(leaders) < partitions or NO_LEADER in leaders.values():
        raise BrokerTrouble(f"topic {topic!r}: not all of its {partitions} partitions have a leader yet")
    # The metadata may name a broker as leader a moment before the broker knows that it is.
    await OffsetFinder(cluster, topic, f"topic {topic!r}").earliest(leaders)


async def _leaders(cluster: BrokerConnections, topic: str) -> Mapping[int, int]:
    """Return the leaders of a topic that was just created; brokers that do not know it yet are asked again."""
    try:
        return await cluster.refresh(topic)
    except TopicMissing as missing:
        raise BrokerTrouble(f"topic {topic!r}: created, but the brokers do not know it yet") from missing


def _check_refusal(code: int, subject: str, detail: str | None) -> None:
    if code in _REFUSALS:
        raise ConfigurationError(f"{subject}: the broker refused the request: {detail or Code(code).name}")
    check_code(code, subject, detail)


async def _delete(cluster: BrokerConnections, topic: str) -> None:
    request = DeleteTopicsRequest([topic], cluster.options.request_timeout_ms)
    response = await cluster.request_controller(request)
    [(_name, code)] = response.topic_error_codes
    if code == Code.TOPIC_DELETION_DISABLED:
        raise ConfigurationError(f"topic {topic!r}: this cluster does not let topics be deleted (delete.topic.enable)")
    # An earlier attempt whose answer was lost may have deleted the topic.
    if code != Code.UNKNOWN_TOPIC_OR_PARTITION:
        check_code(code, f"topic {topic!r}")


async def _check_deleted(cluster: BrokerConnections, topic: str) -> None:
    try:
        await cluster.refresh(topic)
    except TopicMissing:
        return
    raise BrokerTrouble(f"topic {topic!r}: the brokers still know it after it was deleted")


# The protocol's values for a client that assigns partitions itself: no generation, and no member of the group.
_NO_GENERATION: Final = -1
_NO_MEMBER: Final = ""
# The broker keeps the offsets of a group for its own default time (offsets.retention.minutes).
_DEFAULT_RETENTION: Final = -1
_NO_METADATA: Final = ""


async def _group_offsets(
    cluster: BrokerConnections, group: str, topic: str, partitions: Iterable[int]
) -> GroupPositions | None:
    """Return the offsets that a consumer group has in a topic, with the run in their metadata; None without any."""
    subject = offsets_of(group, topic, cluster)
    node = await cluster.find_coordinator(group, CoordinatorKind.GROUP, subject)
    response = await cluster.request(node, GroupOffsetsRequest(group, topic, partitions))
    check_code(response.error_code, subject)
    offsets, runs = {}, []
    for _topic, answers, _tags in response.topics:
        for number, offset, _leader_epoch, metadata, code, _tags_of_partition in answers:
            check_code(code, subject)
            if offset >= 0:
                offsets[number] = offset
                runs.append(metadata or "")
    # Offsets that another program has changed do not belong to a run.
    return GroupPositions(offsets, runs[0] if len(set(runs)) == 1 else "") if offsets else None


async def _commit_offsets(cluster: BrokerConnections, group: str, topic: str, positions: Mapping[int, int]) -> None:
    subject = offsets_of(group, topic, cluster)
    node = await cluster.find_coordinator(group, CoordinatorKind.GROUP, subject)
    partitions = [(number, offset, _NO_METADATA) for number, offset in sorted(positions.items())]
    request = OffsetCommitRequest(group, _NO_GENERATION, _NO_MEMBER, _DEFAULT_RETENTION, [(topic, partitions)])
    response = await cluster.request(node, request)
    for _topic, answers in response.topics:
        for _number, code in answers:
            if code == Code.UNKNOWN_MEMBER_ID:
                raise TopicError(
                    f"{subject}: expected a group without consumers, given {group!r}, which has some; use another group"
                )
            check_code(code, subject)
