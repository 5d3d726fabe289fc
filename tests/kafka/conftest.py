"""Fixtures that the tests of the Kafka connector share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from job_faults.service import serve
from support.kafka_server import KafkaServer

from streamiter.topics import Topic, topic

__all__ = ["serve"]


@pytest.fixture
def kafka_topic(kafka_broker, topic_prefix) -> Callable[..., Topic]:
    """Return a maker of topics on the shared broker, with options."""

    def handle(name: str = "clicks", **options: object) -> Topic:
        return topic(f"kafka://{kafka_broker.bootstrap}/{topic_prefix}{name}", **options)

    return handle


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Add the end of the broker's log to the report of a failed test."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for name, server in item.funcargs.items():
            if isinstance(server, KafkaServer):
                report.sections.append((f"log of {name}", server.log_tail()))
    return report
