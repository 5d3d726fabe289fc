"""A batch with timestamps goes wherever a batch goes: cut, joined, to disk, into state, to another process."""

from collections.abc import Callable
from tempfile import gettempdir
from typing import Any

import numpy as np
import pytest

from streamiter.engine.graph.channels import Channel
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.errors import PlainDataError
from streamiter.operators.output import DeadLetter
from streamiter.values.plain_data import PlainData
from streamiter.values.records import (
    ORDER_COLUMNS,
    Columns,
    DataBatch,
    EpochWatermark,
    EventTimeWatermark,
    TimedBatch,
    can_concatenate,
    concatenate,
    control_from_plain,
    control_to_plain,
    estimated_bytes,
    slice_batch,
    take,
)
from streamiter.values.times import MAX_TIME, MIN_TIME

TIMES = np.array([5, MIN_TIME, 7], np.int64)
RECORDS: dict[str, Any] = {
    "texts": ["a", "b", "c"],
    "tuples": [(1, 2), (3,), ()],
    "array": np.arange(6.0).reshape(3, 2),
    "columns": Columns({"x": [1, 2, 3], "y": ["a", "b", "c"]}),
    "big": np.arange(30_000).reshape(3, 10_000),
}


def through_plain_data(batch: TimedBatch) -> Any:
    plain = PlainData()
    assert plain.decode(plain.encode({"held": [batch]})) == {"held": [batch]}
    return plain.decode_batch(plain.encode_batch(batch))


def through_a_link(batch: TimedBatch) -> Any:
    encoding = FrameEncoding(PlainData())
    body = b"".join(encoding.encode_batch(DataBatch(batch, 3), 100))
    decoded, _ = encoding.decode_batch(memoryview(bytearray(body)))
    return decoded.records


def through_a_disk_queue(batch: TimedBatch) -> Any:
    queue = SpillQueue(name="q", directory=gettempdir(), memory_limit_bytes=1, disk_limit_bytes=1 << 20)
    for _ in range(2):
        queue.put(DataBatch(batch, 1))
    assert queue.statistics().batches_on_disk == 1
    queue.take()
    item = queue.take()
    queue.close()
    assert isinstance(item, DataBatch)
    return item.records


def through_a_replay_cache(batch: TimedBatch) -> Any:
    cache = ReplayCache(name="c", memory_limit_bytes=1, disk_limit_bytes=1 << 20, directory=gettempdir())
    cache.append(slice_batch(batch, 0, 1))
    cache.append(slice_batch(batch, 1, 3))
    batches = [cache.batch(number) for number in range(len(cache))]
    cache.close()
    return concatenate(batches)


def through_cuts(batch: TimedBatch) -> Any:
    parts = [slice_batch(batch, 0, 1), take(batch, [1, 2])]
    assert can_concatenate(*parts)
    assert not can_concatenate(batch, batch.records)
    return concatenate(parts)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(
    "way", [through_plain_data, through_a_link, through_a_disk_queue, through_a_replay_cache, through_cuts]
)
def test_records_keep_their_timestamps_and_their_order_on_every_way(
    name: str, way: Callable[[TimedBatch], Any]
) -> None:
    for order in (None, np.arange(3 * ORDER_COLUMNS).reshape(3, ORDER_COLUMNS)):
        batch = TimedBatch(RECORDS[name], TIMES, order)
        assert way(batch) == batch
        assert order is None or way(batch) != TimedBatch(RECORDS[name], TIMES, order + 1)


def test_dead_letters_cross_a_link_with_timestamps() -> None:
    batch = TimedBatch([DeadLetter({1}, "parse", "no")], TIMES[:1])
    arrived = through_a_link(batch)
    assert (arrived.records[0].error, arrived.times.tolist()) == ("no", [5])


def test_a_record_that_is_not_plain_data_is_named() -> None:
    with pytest.raises(PlainDataError, match=r"^record 1 of the batch: record: expected plain data"):
        PlainData().encode_batch(TimedBatch([1, {2}, 3], TIMES))
    with pytest.raises(PlainDataError, match=r'^state\["held"\]\[1\]: expected plain data'):
        PlainData().encode({"held": TimedBatch([1, bytearray(), 3], TIMES)}, name="state")


def test_the_size_includes_the_timestamps() -> None:
    assert estimated_bytes(TimedBatch(np.zeros(3), TIMES)) == 48


def test_a_watermark_replaces_only_one_of_its_kind() -> None:
    channel = Channel("a → b")
    for control in (EventTimeWatermark(1), EventTimeWatermark(2, True), EpochWatermark(1), EventTimeWatermark(3)):
        channel.put_control(control)
    found = []
    while channel.peek() is not None:
        found.append(repr(channel.take()))
    assert found == ["EventTimeWatermark(2, idle)", "EpochWatermark(1)", "EventTimeWatermark(3)"]


@pytest.mark.parametrize("control", [EventTimeWatermark(MAX_TIME), EventTimeWatermark(MIN_TIME, True)], ids=repr)
def test_the_watermark_has_words_for_snapshots_and_links(control: EventTimeWatermark) -> None:
    assert repr(control_from_plain(control_to_plain(control))) == repr(control)
    encoding = FrameEncoding(PlainData())
    assert repr(encoding.decode_control(memoryview(encoding.encode_control(control)))) == repr(control)
