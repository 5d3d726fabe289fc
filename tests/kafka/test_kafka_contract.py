"""Kafka topics on a real broker keep the contract of topics."""

from __future__ import annotations

import pytest
from topics.contract_transactions import TransactionsContract
from topics.topic_contract import TopicCase, TopicContract

from streamiter.topics import topic
from streamiter_kafka.wire import FeaturesRequest


@pytest.fixture
def case(kafka_broker, topic_prefix) -> TopicCase:
    return TopicCase(
        handle=lambda name: topic(f"kafka://{kafka_broker.bootstrap}/{name}"),
        prefix=topic_prefix,
        record_limit_settings={"max.message.bytes": "2000"},
        record_limit_bytes=2000,
    )


class TestKafkaTopics(TopicContract):
    """The broker has transactions of version 2."""


class TestKafkaTransactionsOfVersion1(TransactionsContract):
    """The broker seems to be older: it does not tell the features of its cluster."""

    @pytest.fixture(autouse=True)
    def version_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FeaturesRequest, "_CLASSES", ())
