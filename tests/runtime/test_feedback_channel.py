"""Feedback that is read back from disk."""

from pathlib import Path

import numpy as np

from streamiter.engine.graph.channels import LIMIT_BYTES
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.values.records import CheckpointBarrier, DataBatch


def test_feedback_on_disk_is_read_in_pieces_that_fit_into_memory(tmp_path: Path) -> None:
    """Joined by their number alone, eight thousand large records were read from disk as one batch."""
    queue = SpillQueue(name="head", directory=tmp_path, memory_limit_bytes=1 << 20, disk_limit_bytes=1 << 30)
    channel = FeedbackChannel("tail → head", queue)
    port = Port(0, "feedback", channel)
    for _ in range(24):
        channel.put(DataBatch(np.zeros((1, 1 << 17))))
    assert channel.is_spilling
    pieces = []
    while port.peek() is not None:
        pieces.append(port.take_batch().records)
    channel.close()
    assert sum(len(piece) for piece in pieces) == 24
    assert 1 << 20 < max(np.asarray(piece).nbytes for piece in pieces) <= LIMIT_BYTES


def test_a_waiting_consumer_handles_feedback_only_if_nothing_is_before_it(tmp_path: Path) -> None:
    """Criteria that were counted before a barrier in front of them would have belonged to its checkpoint twice."""
    queue = SpillQueue(name="head", directory=tmp_path, memory_limit_bytes=1 << 20, disk_limit_bytes=1 << 30)
    channel = FeedbackChannel("tail → criteria", queue)
    handled: list[object] = []
    channel.hand_over = lambda item: isinstance(item, DataBatch) and not handled.append(item)
    channel.put(DataBatch([1], 1))
    channel.put_control(CheckpointBarrier(1))
    channel.put(DataBatch([2, 3], 2))
    assert [type(channel.take()) for _ in range(2)] == [CheckpointBarrier, DataBatch]
    statistics = channel.statistics()
    assert (len(handled), statistics.total_records, statistics.peak_records, statistics.last_epoch) == (1, 3, 2, 2)
    channel.close()
