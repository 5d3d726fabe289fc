"""Kafka topics on a real broker keep the contract of topics."""

from __future__ import annotations

import pytest
from topics.topic_contract import TopicCase, TopicContract

from streamiter.topics import topic


class TestKafkaTopics(TopicContract):
    @pytest.fixture
    def case(self, kafka_broker, topic_prefix) -> TopicCase:
        return TopicCase(
            handle=lambda name: topic(f"kafka://{kafka_broker.bootstrap}/{name}"),
            prefix=topic_prefix,
            record_limit_settings={"max.message.bytes": "2000"},
            record_limit_bytes=2000,
        )
