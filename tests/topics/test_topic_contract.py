"""The contract of topics, kept by the memory topic."""

from __future__ import annotations

import pytest
from topics.topic_contract import TopicCase, TopicContract

from streamiter.topics import MemoryBroker


class TestMemoryTopics(TopicContract):
    @pytest.fixture
    def case(self) -> TopicCase:
        return TopicCase(
            handle=MemoryBroker().topic,
            record_limit_settings={"max_record_bytes": "1000"},
            record_limit_bytes=1000,
            retention_settings={"retention_records": "35"},
            url_is_global=False,
        )
