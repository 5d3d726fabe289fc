"""Each test of models that asks for ``make_topic`` runs on memory and on SQLite."""

from pathlib import Path

import pytest
from models.model_case import MakeTopic

from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import Topic
from streamiter.topics.urls import topic


@pytest.fixture(params=["memory", "sqlite"])
def make_topic(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTopic:
    """Return a function that creates a topic and returns it."""
    broker = MemoryBroker()

    async def make(partitions: int = 1, name: str = "models") -> Topic:
        if request.param == "memory":
            made: Topic = broker.topic(name)
        else:
            made = topic(f"sqlite:///{tmp_path}/topics.db?topic={name}")
        await made.create(partitions=partitions)
        return made

    return make
