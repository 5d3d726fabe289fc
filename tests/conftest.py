"""Fixtures for all tests."""

from support.kafka_fixtures import kafka_broker, kafka_broker_factory, topic_prefix

__all__ = ["kafka_broker", "kafka_broker_factory", "topic_prefix"]
