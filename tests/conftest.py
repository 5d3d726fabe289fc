"""Fixtures and settings for all tests."""

import hypothesis
import pytest
from support.kafka_fixtures import kafka_broker, kafka_broker_factory, topic_prefix
from support.small_disk import small_disk

__all__ = ["kafka_broker", "kafka_broker_factory", "small_disk", "topic_prefix"]

# A failed assert in the shared checks of the topic contract shows its values, as in a test module.
pytest.register_assert_rewrite(
    "topics.contract_lifecycle",
    "topics.contract_range",
    "topics.contract_reading",
    "topics.contract_transactions",
    "topics.contract_writing",
    "topics.topic_case",
)

# Two busy cores make single examples slow; what must not hang has time limits of its own.
hypothesis.settings.register_profile("streamiter", deadline=None)
hypothesis.settings.load_profile("streamiter")
