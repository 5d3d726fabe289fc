"""The connectors on which the main job runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from streamiter.topics import MemoryBroker, Topic, topic

MakeTopic = Callable[[str], Topic]


@pytest.fixture(params=["memory", "sqlite", "kafka"])
def any_topic(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTopic:
    """Return a function from names to topics, on each connector in turn; the topics must be created."""
    if request.param == "memory":
        return MemoryBroker().topic
    if request.param == "sqlite":
        return lambda name: topic(f"sqlite:///{tmp_path}/log.db?topic={name}")
    broker = request.getfixturevalue("kafka_broker")
    prefix = request.getfixturevalue("topic_prefix")
    return lambda name: topic(f"kafka://{broker.bootstrap}/{prefix}{name}")
