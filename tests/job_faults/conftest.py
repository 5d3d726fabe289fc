"""Shared fixtures for tests of jobs under faults."""

import pytest
from job_faults.service import serve
from job_faults.sums import Topics

from streamiter.topics import MemoryBroker

__all__ = ["serve"]


@pytest.fixture
async def topics() -> Topics:
    """Return topics in memory."""
    broker = MemoryBroker()
    made = Topics.same(broker.topic("numbers"), broker.topic("sums"))
    await made.create()
    return made
