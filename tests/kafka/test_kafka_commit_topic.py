"""The commit topic on a broker stays small, and tools that show the lag see the positions of a group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from support.waiting import PATIENCE_S
from topics.topic_case import created, patiently, read_to_end

from streamiter.errors import TopicError
from streamiter.topics import OutgoingBatch, Topic
from streamiter.topics.compacted import ensure_commit_topic, last_value
from streamiter.values.helpers.clock import SystemClock

MakeTopic = Callable[..., Topic]


class Renamed:
    """Renames the commit topic, so that each test has its own."""

    def __init__(self, outputs: Topic) -> None:
        self._outputs = outputs
        self.url = outputs.url

    def beside(self, name: str) -> Topic:
        return self._outputs.beside(f"{self._outputs.name}-{name}")


async def test_old_commits_are_dropped_although_they_are_small(kafka_topic: MakeTopic) -> None:
    """The broker kept years of commits, because by default it compacts a segment after a gigabyte or a week."""
    commits = await ensure_commit_topic(Renamed(kafka_topic("outputs")))
    writer = await commits.open_writer()
    keys = [b"flow-%d" % (number % 3) for number in range(9_999)]
    async with asyncio.timeout(PATIENCE_S):
        written = 0
        while True:
            await writer.write(OutgoingBatch([b"%d" % number + b" " * 100 for number in range(9_999)], keys=keys))
            await writer.flush()
            written += 9_999
            if len(await read_to_end(commits)) < written / 2:
                break
    await writer.close()
    for flow in range(3):
        record = await last_value(commits, b"flow-%d" % flow, clock=SystemClock())
        assert record is not None
        assert int(record.value or b"") == 9_996 + flow


async def test_a_commit_topic_that_deletes_records_causes_a_warning(
    kafka_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """A flow that was stopped for longer than the retention could not resume, and the reason was unclear."""
    renamed = Renamed(kafka_topic("outputs"))
    await renamed.beside("streamiter-commits").create(settings={"cleanup.policy": "compact,delete"})
    with caplog.at_level(logging.WARNING, "streamiter.topics"):
        await ensure_commit_topic(renamed)
    [warning] = caplog.records
    assert "expected cleanup.policy=compact, found compact,delete" in warning.getMessage()


# -- positions -----------------------------------------------------------------------------------------------


async def group_offsets(broker: str, group: str) -> dict[TopicPartition, int]:
    """Return the committed offsets of a group, which Kafka's own tools show."""
    admin = AIOKafkaAdminClient(bootstrap_servers=broker)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group)
    finally:
        await admin.close()
    return {partition: offset.offset for partition, offset in found.items()}


async def test_lag_tools_see_the_positions_of_a_group(kafka_broker, kafka_topic: MakeTopic) -> None:
    """Every dashboard showed that a running job had stopped, because the group had no positions."""
    made = await created(kafka_topic(), partitions=3)
    group = f"{made.name}-group"
    for positions in ({0: 5, 2: 7}, {0: 6, 1: 1}, {}):
        await patiently(made.report_positions(group, positions))
    assert await group_offsets(kafka_broker.bootstrap, group) == {
        TopicPartition(made.name, 0): 6,
        TopicPartition(made.name, 1): 1,
        TopicPartition(made.name, 2): 7,
    }


async def test_positions_of_a_group_that_consumers_are_in_are_refused(kafka_broker, kafka_topic: MakeTopic) -> None:
    """A job stored positions for the group of another program, whose consumers then skipped records."""
    made = await created(kafka_topic())
    group = f"{made.name}-group"
    consumer = AIOKafkaConsumer(made.name, group_id=group, bootstrap_servers=kafka_broker.bootstrap)
    await consumer.start()
    try:
        with pytest.raises(TopicError, match="expected a group without consumers"):
            await patiently(made.report_positions(group, {0: 5}))
    finally:
        await consumer.stop()
