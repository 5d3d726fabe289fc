"""The last update of a model, and the generation of a new run, are found from the topic's end."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.model_case import (
    MakeTopic,
    ManualClock,
    WatchedTopic,
    all_records,
    compacted,
    encoder,
    interleaved,
    large,
    large_update,
    memory_topic,
    selected,
    update_of,
    write,
)
from support.waiting import PATIENCE_S

from streamiter.errors import DecodeError, OffsetOutOfRange, TopicNotFound
from streamiter.models import last_update, model_updates, next_run
from streamiter.topics.topic import OutgoingBatch, Topic


async def last_rank(topic: Topic) -> tuple[int, int] | None:
    update = await last_update(topic, "ctr")
    return None if update is None else update.rank


async def next_generation(topic: Topic, model: str) -> int:
    return (await next_run(topic, model)).generation


def timed(batch: OutgoingBatch, first_ms: int) -> OutgoingBatch:
    """Return the batch with time stamps that increase by a millisecond for each record."""
    return replace(batch, timestamps_ms=range(first_ms, first_ms + len(batch)))


async def test_an_empty_topic_has_no_last_update_and_begins_with_generation_1(make_topic: MakeTopic) -> None:
    """The first run of a model finds an empty topic."""
    topic = await make_topic(partitions=2)
    assert await last_update(topic, "ctr") is None
    assert await next_generation(topic, "ctr") == 1


async def test_a_missing_topic_is_an_error(make_topic: MakeTopic) -> None:
    """A mistyped topic gave generation 1, and readers ignored the whole run."""
    topic = await make_topic()
    await topic.delete()
    with pytest.raises(TopicNotFound):
        await last_update(topic, "ctr")
    with pytest.raises(TopicNotFound):
        await next_generation(topic, "ctr")


@pytest.mark.parametrize("opened_before", [0, 1], ids=["search", "follow"])
async def test_a_topic_that_is_created_again_meanwhile_is_an_error(make_topic: MakeTopic, opened_before: int) -> None:
    """After asking for the end of the topic, the search continued in another topic and missed updates."""
    topic = await make_topic()
    await write(topic, *(update_of((1, version)) for version in range(1, 4)))
    watched = WatchedTopic(topic)

    async def create_again() -> None:
        if watched.open_readers_ever == opened_before:
            await topic.delete()
            await make_topic()
            await write(topic, *(update_of((1, version)) for version in range(1, 9)))

    watched.before_open = create_again
    updates = model_updates(watched, "ctr", start="latest_model", follow=False)  # type: ignore[arg-type]
    asking: Awaitable[object] = anext(updates) if opened_before else last_update(watched, "ctr")  # type: ignore[arg-type]
    with pytest.raises(OffsetOutOfRange, match=r"partition 0: offset \d belongs to .*created again"):
        await asking


async def test_the_last_update_is_complete(make_topic: MakeTopic) -> None:
    """The warm start must begin with exactly the published parameters."""
    topic = await make_topic()
    await write(topic, update_of((1, 1)), large_update((1, 2)), update_of((7, 1), model="spam"))
    update = await last_update(topic, "ctr")
    assert update is not None
    assert update.rank == (1, 2)
    assert np.array_equal(update.parameters, large(2))  # type: ignore[arg-type]
    assert await next_generation(topic, "ctr") == 2
    assert await next_generation(topic, "spam") == 8


async def test_a_long_history_is_not_read() -> None:
    """The time of a restart grew with the age of the topic: after a month, a warm start took an hour."""
    topic = await memory_topic()
    one = encoder()
    for start_ms in range(0, 20_000, 1000):
        await write(topic, timed(one.encode([np.zeros(1)] * 1000), start_ms))
    watched = WatchedTopic(topic)
    assert await last_rank(watched) == (1, 20_000)  # type: ignore[arg-type]
    assert watched.records_read < 3000
    assert watched.largest_batch <= 64  # memory stays bounded for any size of an update
    assert watched.open_readers == 0


async def test_few_records_in_very_many_offsets_are_found_at_once() -> None:
    """Compaction leaves gaps, so a warm start that read windows of a few thousand offsets took minutes."""
    topic = await memory_topic(settings={"compact": "1"})
    one = encoder()
    for _ in range(12):  # each batch replaces the previous one, whose offsets become a gap
        await write(topic, OutgoingBatch([b"x"] * 100_000, keys=[b"other"] * 100_000))
    await write(topic, one.encode([np.zeros(1)]))
    for _ in range(12):
        await write(topic, OutgoingBatch([b"x"] * 100_000, keys=[b"other"] * 100_000))
    watched = WatchedTopic(topic)
    assert await last_rank(watched) == (1, 1)  # type: ignore[arg-type]
    assert watched.open_readers_ever < 20


async def test_a_model_not_published_for_long_is_found_behind_the_others() -> None:
    """A model that publishes rarely must be found among models that publish often."""
    topic = await memory_topic(timed(large_update((3, 9)), 0))
    busy = encoder(model="busy")
    await write(topic, *(timed(busy.encode([np.zeros(1)] * 1000), 1000 * turn) for turn in range(1, 12)))
    watched = WatchedTopic(topic)
    assert await last_rank(watched) == (3, 9)  # type: ignore[arg-type]
    assert watched.records_read == 11_004  # the search reads each record once
    assert await next_generation(topic, "ctr") == 4


async def test_a_superseded_writer_at_the_end_does_not_hide_the_newest() -> None:
    """The old process still published for a minute after the new process had started and stopped."""
    topic = await memory_topic(clock=ManualClock())
    await write(topic, timed(encoder(1, 1).encode([np.zeros(1)] * 100), 0), timed(update_of((2, 1)), 100))
    await write(topic, timed(encoder(1, 101).encode([np.zeros(1)] * 500), 101))
    assert await last_rank(topic) == (2, 1)
    assert await next_generation(topic, "ctr") == 3


async def test_the_newest_is_found_in_a_busy_partition_too() -> None:
    """An update in a quiet partition must not end the search in a partition with a newer update further back."""
    topic = await memory_topic(partitions=2)
    await write(topic, timed(update_of((1, 1), partition=1), 0), timed(update_of((1, 2), partition=0), 10))
    busy = encoder(model="busy", partition=0)
    await write(topic, *(timed(busy.encode([np.zeros(1)] * 1000), 1000 * turn) for turn in range(1, 6)))
    assert await last_rank(topic) == (1, 2)


async def test_an_update_of_many_chunks_is_found_between_those_of_others() -> None:
    """Other updates spread the chunks over more windows than the update itself needs."""
    topic = await memory_topic()
    many = encoder(1, 2, record_bytes_max=460).encode([np.arange(20_000.0)], epoch=1)
    assert len(many) > 300
    other = encoder(model="busy").encode([np.zeros(1)] * len(many))
    await write(topic, timed(update_of((1, 1)), 0), timed(interleaved(many, other), 1))
    update = await last_update(topic, "ctr")
    assert update is not None
    assert np.array_equal(update.parameters, np.arange(20_000.0))  # type: ignore[arg-type]


async def test_the_search_continues_for_the_chunks_of_a_newer_update() -> None:
    """A superseded writer's small update at the end must not end the search in the middle of a large one."""
    topic = await memory_topic()
    many = encoder(2, 1, record_bytes_max=460).encode([np.arange(40_000.0)], epoch=1)
    other = encoder(model="busy").encode([np.zeros(1)] * len(many))
    assert len(many) + len(other) > 1024 + 64
    await write(
        topic, timed(update_of((1, 1)), 0), timed(interleaved(many, other), 1), timed(update_of((1, 2)), 10_000)
    )
    assert await last_rank(topic) == (2, 1)


@pytest.mark.parametrize("lost", range(4))
async def test_a_torn_update_is_not_the_last_one_but_its_generation_counts(make_topic: MakeTopic, lost: int) -> None:
    """A run that crashed in its first update has used its generation, so the next run must use another one."""
    topic = await make_topic()
    kept = [index for index in range(4) if index != lost]
    await write(topic, update_of((1, 1)), large_update((1, 2)), selected(large_update((2, 1)), *kept))
    assert await last_rank(topic) == (1, 2)
    assert await next_generation(topic, "ctr") == 3


async def test_an_unreadable_record_behind_the_last_update_is_an_error_or_skipped(make_topic: MakeTopic) -> None:
    """A warm start must not silently use a model older than the last one in the topic."""
    topic = await make_topic()
    broken = replace(update_of((1, 2)), values=[b"{"])
    await write(topic, broken, update_of((1, 1)))
    assert await last_rank(topic) == (1, 1)  # an unreadable record before the last update is ignored
    await write(topic, broken)
    with pytest.raises(DecodeError, match=r"partition 0, offset \d+: expected an update of model 'ctr'"):
        await last_update(topic, "ctr")
    skipped = await last_update(topic, "ctr", on_error="skip")
    assert skipped is not None
    assert skipped.rank == (1, 1)
    assert await next_generation(topic, "ctr") == 2


async def test_an_unreadable_record_between_the_chunks_of_the_last_update_is_history() -> None:
    """An unreadable record counts as older if it is before the update's last chunk."""
    topic = await memory_topic()
    many = encoder(1, 2, record_bytes_max=1000).encode([np.zeros(10_000)])
    broken = replace(update_of((1, 1)), values=[b"{"])
    middle = len(many) // 2
    await write(topic, selected(many, *range(middle)), broken, selected(many, *range(middle, len(many))))
    assert middle > 32  # the first and the last chunk are in different windows
    assert await last_rank(topic) == (1, 2)


async def test_an_open_transaction_at_the_end_is_neither_seen_nor_waited_for(make_topic: MakeTopic) -> None:
    """A job with checkpoints nearly always has an open transaction, and a consumer's start took a whole interval."""
    topic = await make_topic()
    await write(topic, update_of((1, 1)))
    transactions = await topic.open_transactions("job")
    try:
        await transactions.begin()
        await transactions.write(topic, encoder(1, 2).encode([np.zeros(1)] * 100))
        assert await asyncio.wait_for(last_rank(topic), PATIENCE_S) == (1, 1)
        await transactions.commit()
        assert await last_rank(topic) == (1, 101)
        await transactions.begin()
        await transactions.write(topic, encoder(1, 102).encode([np.zeros(1)] * 100))
        await transactions.abort()
        assert await last_rank(topic) == (1, 101)
    finally:
        await transactions.close()


async def test_retention_that_overtakes_the_search_does_not_end_it() -> None:
    """In a busy topic with short retention, the next records of the search may have been deleted."""
    topic = await memory_topic(settings={"retention_records": "200"})
    await write(topic, update_of((1, 1)), encoder(model="busy").encode([np.zeros(1)] * 150))
    watched = WatchedTopic(topic)

    async def overtake() -> None:
        if watched.open_readers_ever == 1:
            await write(topic, encoder(model="busy").encode([np.zeros(1)] * 130))

    watched.before_open = overtake
    assert await last_update(watched, "ctr") is None  # type: ignore[arg-type]
    assert watched.open_readers_ever > 2
    assert watched.open_readers == 0


entries = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from(["small", "large", "torn", "other"]), st.integers(0, 2)
)


@given(st.lists(entries, max_size=60))
def test_the_last_update_is_the_highest_complete_one(written: list[tuple[int, int, str, int]]) -> None:
    """For any content, the result must equal the result of reading all records."""

    async def main() -> tuple[tuple[int, int] | None, int]:
        topic = await memory_topic(partitions=3)
        for generation, version, kind, partition in written:
            rank = (generation, version)
            batch = {
                "small": lambda rank=rank, where=partition: update_of(rank, partition=where),
                "large": lambda rank=rank, where=partition: large_update(rank, partition=where),
                # This is the first chunk of an update that no other entry completes.
                "torn": lambda rank=rank, where=partition: selected(
                    large_update((rank[0], rank[1] + 4), partition=where), 0
                ),
                "other": lambda rank=rank, where=partition: update_of(rank, model="other", partition=where),
            }[kind]()
            await write(topic, batch)
        return await last_rank(topic), await next_generation(topic, "ctr")

    complete = [(g, v) for g, v, kind, _ in written if kind in ("small", "large")]
    generations = [g for g, _, kind, _ in written if kind != "other"]
    assert asyncio.run(main()) == (max(complete, default=None), max(generations, default=0) + 1)


async def test_a_deletion_that_no_run_wrote_is_passed_over(make_topic: MakeTopic) -> None:
    """A header of 5,000 digits, which Python does not convert to a number, prevented every trainer from starting."""
    topic = await make_topic()
    headers = (("model", b"ctr"), ("deletes", b"1" * 5000 + b".1"))
    await write(topic, OutgoingBatch([None], keys=[b"ctr#1.1.0"], headers=[headers]))
    assert (await next_run(topic, "ctr")).generation == 1


async def test_a_new_run_deletes_the_chunks_of_the_runs_before(make_topic: MakeTopic) -> None:
    """Each fresh start left one large model in the compacted topic for ever."""
    topic = await make_topic()
    old = encoder(1, 1, record_bytes_max=1000)
    await write(topic, old.encode([large(1)]), old.encode([large(2)]))
    await write(topic, selected(large_update((2, 1)), 0, 1))  # this run crashed
    start = await next_run(topic, "ctr")
    assert start.generation == 3
    assert start.leftovers == [(1, 2, 3), (2, 1, 3)]  # its own run deleted (1, 1)
    new = encoder(start.generation, record_bytes_max=1000, leftovers=start.leftovers)
    await write(topic, new.encode([large(1)]))
    left = await all_records(await compacted(topic))
    assert [record.key for record in left] == [b"ctr#3.1.0", b"ctr#3.1.1", b"ctr#3.1.2", b"ctr"]
