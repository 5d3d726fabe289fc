"""A flow that reads a topic on a real broker resumes at the position of a snapshot."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from restore.counted_calls import count_calls
from restore.topic_cases import numbered, stored_source, written

from streamiter.testing import check_flow_restore
from streamiter.topics import topic
from streamiter_kafka.reader import KafkaReader


def test_a_restored_flow_reads_a_kafka_topic_from_its_position(
    kafka_broker: Any, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored flow lost records, because its positions were those behind the fetched and not the handled records."""
    url = f"kafka://{kafka_broker.bootstrap}/{topic_prefix}clicks"
    asyncio.run(written(topic(url), numbered(partitions=4)))
    calls = count_calls(KafkaReader, monkeypatch)
    check_flow_restore(functools.partial(stored_source, url), cuts=2, ordered=False)
    assert calls
