"""Feedback that is read back from disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from streamiter.engine.graph.channels import LIMIT_BYTES
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.values.records import CheckpointBarrier, DataBatch, EpochWatermark


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


def test_feedback_ahead_is_taken_up_to_the_control_record_behind_it(tmp_path: Path) -> None:
    """Records of an epoch that was admitted, or what is behind a control record, would have been set aside, too."""
    queue = SpillQueue(name="head", directory=tmp_path, memory_limit_bytes=1 << 20, disk_limit_bytes=1 << 30)
    channel = FeedbackChannel("tail → head", queue)
    for item in (DataBatch([1], 2), DataBatch([2], 1), DataBatch([3], 2), EpochWatermark(2), DataBatch([4], 3)):
        if isinstance(item, DataBatch):
            channel.put(item)
        else:
            channel.put_control(item)
    taken = [
        item.records for item, size_bytes in channel.take_ahead(1, 4) if isinstance(item, DataBatch) and size_bytes
    ]
    admitted = channel.take()
    behind = [item for item, _ in channel.take_ahead(1, 4)]
    assert (taken, isinstance(admitted, DataBatch) and admitted.records) == ([[1]], [2])
    assert [type(item) for item in behind] == [DataBatch, EpochWatermark]
    assert (channel.records, queue.records, len(queue)) == (1, 1, 1)
    channel.take()
    assert (channel.peek(), queue.bytes_in_memory) == (None, 0)
    channel.close()


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
