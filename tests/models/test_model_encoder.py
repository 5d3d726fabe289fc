"""The encoder counts versions, refuses bad models, restores its state, and writes chunks under keys for compaction."""

import numpy as np
import pytest
from models.model_case import ManualClock, decoded, encoder, large, large_update, same

from streamiter.errors import ConfigurationError
from streamiter.models import ModelSnapshot
from streamiter.topics.connecting import record_limit
from streamiter.topics.topic import TopicDescription
from streamiter.values.records import Columns


def test_versions_count_up_by_one_across_calls() -> None:
    """A gap in the versions tells a consumer that it has lost an update."""
    one = encoder(generation=3, next_version=5)
    updates = [update for _ in range(2) for update in decoded(one.encode([np.zeros(1), np.ones(1)]))]
    assert [update.rank for update in updates] == [(3, 5), (3, 6), (3, 7), (3, 8)]


def test_a_batch_of_rows_is_one_update_for_each_row() -> None:
    """An operator that emits an (n, d) array emits n models of d weights."""
    updates = decoded(encoder().encode(np.arange(6.0).reshape(2, 3)))
    assert [update.parameters.tolist() for update in updates if isinstance(update.parameters, np.ndarray)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    updates = decoded(encoder().encode(Columns({"weights": np.ones((1, 2)), "intercept": np.array([0.5])})))
    assert same(updates[0].parameters, {"weights": np.ones(2), "intercept": 0.5})


def test_epoch_of_a_snapshot_goes_before_the_epoch_of_the_call() -> None:
    """The epoch of the batch is only used if the operator gives no epoch."""
    models = [ModelSnapshot(np.zeros(1), epoch=0), np.zeros(1)]
    assert [update.epoch for update in decoded(encoder().encode(models, epoch=4))] == [0, 4]
    assert decoded(encoder().encode([np.zeros(1)]))[0].epoch is None


def test_the_creation_time_comes_from_the_given_clock() -> None:
    """The age of a model is computed from this time, and a simulated run must not read the machine's clock."""
    clock = ManualClock(now_s=12.5)
    assert decoded(encoder(clock=clock).encode([np.zeros(1)]))[0].created_at_ms == 12_500


def test_no_models_are_no_records() -> None:
    """A publisher may be called with an empty batch."""
    assert len(encoder().encode([])) == 0


def test_chunks_stay_below_the_limit_of_the_topic() -> None:
    """A record above the broker's limit would fail the job with the first large model."""
    for limit in (600, 1000, 1001):
        batch = encoder(record_bytes_max=limit).encode([np.arange(200.0)])
        assert batch.keys is not None
        assert batch.headers is not None
        for value, key, headers in zip(batch.values, batch.keys, batch.headers, strict=True):
            size = len(value or b"") + len(key or b"") + sum(len(name) + len(text) for name, text in headers)
            assert size <= limit
        assert len(batch) > 2


def test_chunks_have_keys_of_their_own_and_the_last_one_that_of_the_model() -> None:
    """With one key for all chunks, compaction keeps one chunk; without the model's key, it keeps all updates."""
    batch = large_update((2, 7))
    assert batch.keys is not None
    count = len(batch)
    assert batch.keys == [f"ctr#2.7.{index}".encode() for index in range(count - 1)] + [b"ctr"]
    assert batch.partition == 0  # in several partitions the chunks would lose their order


def test_the_chunks_of_an_update_are_deleted_behind_the_next_one() -> None:
    """Keys that are never written again would fill a compacted topic without limit."""
    one = encoder(record_bytes_max=1000)
    one.encode([large(1)])
    second = one.encode([large(2)])
    written = [b"ctr#1.2.0", b"ctr#1.2.1", b"ctr#1.2.2", b"ctr"]
    deleted = [b"ctr#1.1.0", b"ctr#1.1.1", b"ctr#1.1.2"]
    assert second.keys == written + deleted
    assert second.values[4:] == [None] * 3
    small = one.encode([np.zeros(1)])  # an update of one record also deletes older chunks
    assert small.keys == [b"ctr", *written[:3]]
    assert small.values[1:] == [None] * 3
    assert one.encode([np.zeros(1)]).keys == [b"ctr"]


def test_a_limit_too_small_for_the_headers_is_refused() -> None:
    """A very small record limit must not give an endless number of empty chunks."""
    with pytest.raises(ConfigurationError, match="expected a topic that takes records of more than"):
        encoder(record_bytes_max=100).encode([np.zeros(100)])


def test_record_limit_is_the_smaller_one_of_topic_and_client() -> None:
    """A broker may accept larger records than a client sends by default, or smaller ones."""

    def described(**settings: str) -> TopicDescription:
        return TopicDescription("models", {0: (0, 0)}, {k.replace("_", "."): v for k, v in settings.items()})

    assert record_limit(described()) == 1_000_000
    assert record_limit(described(max_message_bytes="5000000")) == 1_000_000
    assert record_limit(described(max_message_bytes="20000")) == 20_000
    assert record_limit(TopicDescription("m", {0: (0, 0)}, {"max_record_bytes": "1000"})) == 1000
