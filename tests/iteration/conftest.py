"""Fixtures for tests of loops through topics."""

from pathlib import Path

import pytest
from iteration.topic_loops_support import MakeTopic

from streamiter import topic
from streamiter.topics import MemoryBroker, Topic


@pytest.fixture(params=["memory", "sqlite", "kafka"])
def make_topic(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTopic:
    """Return a coroutine function that creates a topic."""
    broker = MemoryBroker()
    if request.param == "kafka":
        address = request.getfixturevalue("kafka_broker").bootstrap
        prefix = request.getfixturevalue("topic_prefix")

    async def make(partitions: int = 1, name: str = "loop", **settings: str) -> Topic:
        made: Topic
        if request.param == "memory":
            made = broker.topic(name)
        elif request.param == "sqlite":
            made = topic(f"sqlite:///{tmp_path}/topics.db?topic={name}", poll_interval_s=0.001)
        else:
            made = topic(f"kafka://{address}/{prefix}{name}")
        await made.create(partitions=partitions, settings=settings)
        return made

    return make
