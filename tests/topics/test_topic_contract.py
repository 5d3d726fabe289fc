"""Topics in memory and in an SQLite file keep the contract of topics."""

from __future__ import annotations

from pathlib import Path

import pytest
from topics.topic_contract import TopicCase, TopicContract

from streamiter.topics import MemoryBroker, topic


class TestMemoryTopics(TopicContract):
    @pytest.fixture
    def case(self) -> TopicCase:
        return TopicCase(
            handle=MemoryBroker().topic,
            record_limit_settings={"max_record_bytes": "2000"},
            record_limit_bytes=2000,
            retention_settings={"retention_records": "35"},
            url_is_global=False,
        )


class TestSqliteTopics(TopicContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TopicCase:
        return TopicCase(
            handle=lambda name: topic(f"sqlite:///{tmp_path}/topics.db?topic={name}"),
            record_limit_settings={"max_record_bytes": "2000"},
            record_limit_bytes=2000,
            retention_settings={"retention_records": "35"},
        )
