"""A reader that follows a model handles order, repetitions, superseded writers, chunks, damage and closing."""

import asyncio
import gc
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.model_case import (
    MakeTopic,
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

from streamiter.errors import DecodeError, TopicNotFound
from streamiter.models import ModelUpdate, ModelUpdateEncoder, UpdateStatistics, model_updates
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, Topic
from streamiter.values.helpers.clock import SystemClock


async def ranks(topic: Topic, **options: Any) -> list[tuple[int, int]]:
    return [update.rank async for update in model_updates(topic, "ctr", follow=False, **options)]


async def soon(updates: Any) -> ModelUpdate:
    update: ModelUpdate = await asyncio.wait_for(anext(updates), PATIENCE_S)
    return update


async def test_a_reader_opened_before_the_write_gets_each_update_live(make_topic: MakeTopic) -> None:
    """A served model must see new updates without being opened again."""
    topic = await make_topic()
    async with model_updates(topic, "ctr", start="latest_model") as updates:
        waiting = asyncio.create_task(soon(updates))
        await write(topic, update_of((1, 1)))
        assert (await waiting).rank == (1, 1)
        await write(topic, large_update((1, 2)))
        assert (await soon(updates)).rank == (1, 2)


writes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.booleans()), max_size=20)


@given(writes)
def test_a_reader_sees_exactly_the_running_maxima(written: list[tuple[int, int, bool]]) -> None:
    """For any interleaving of writers, the versions strictly increase, and only other updates are skipped."""

    async def main() -> list[tuple[int, int]]:
        topic = await memory_topic()
        for generation, version, is_large in written:
            await write(topic, (large_update if is_large else update_of)((generation, version)))
        return await ranks(topic)

    maxima: list[tuple[int, int]] = []
    for generation, version, _ in written:
        if not maxima or (generation, version) > maxima[-1]:
            maxima.append((generation, version))
    assert asyncio.run(main()) == maxima


async def test_records_of_other_models_and_of_no_model_are_skipped(make_topic: MakeTopic) -> None:
    """Many models share one topic, and the topic may also contain commit records."""
    topic = await make_topic()
    strange = OutgoingBatch(values=[b"\x00", b"{}"], keys=[b"ctr-2", None])
    await write(topic, update_of((1, 1), model="spam"), strange, update_of((1, 1)), large_update((9, 9), model="b"))
    updates = model_updates(topic, "ctr", follow=False)
    assert [update.rank async for update in updates] == [(1, 1)]
    assert updates.statistics() == UpdateStatistics(updates=1)


async def test_chunks_of_two_writers_do_not_mix(make_topic: MakeTopic) -> None:
    """Two runs of one generation started at the same time and wrote one version each, with interleaved chunks."""
    topic = await make_topic()
    one = encoder(1, 1, record_bytes_max=1000).encode([large(1.5)])
    other = encoder(1, 1, record_bytes_max=1000).encode([large(2.5)])
    newer = large_update((1, 2))
    await write(topic, interleaved(one, other, newer))
    updates = [update async for update in model_updates(topic, "ctr", follow=False)]
    assert [update.rank for update in updates] == [(1, 1), (1, 2)]
    assert np.array_equal(updates[0].parameters, large(1.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [0, 1, -1])
async def test_an_update_with_a_missing_chunk_is_never_given_out(make_topic: MakeTopic, lost: int) -> None:
    """After a crash between two chunks, or after compaction, the reader must not return a model with missing parts."""
    topic = await make_topic()
    torn = large_update((1, 2))
    kept = [index for index in range(len(torn)) if index != lost % len(torn)]
    await write(topic, update_of((1, 1)), selected(torn, *kept), update_of((1, 3)))
    updates = model_updates(topic, "ctr", follow=False)
    assert [update.rank async for update in updates] == [(1, 1), (1, 3)]
    assert updates.statistics() == UpdateStatistics(updates=2, incomplete=1)


async def test_an_update_torn_by_a_crash_is_whole_when_it_is_written_again(make_topic: MakeTopic) -> None:
    """A run that crashed between two chunks is restored, and writes the version again from the start."""
    topic = await make_topic()
    await write(topic, selected(large_update((1, 1)), 0), large_update((1, 1)))
    assert await ranks(topic) == [(1, 1)]


async def test_damaged_chunks_are_an_error_and_never_given_out(make_topic: MakeTopic) -> None:
    """One flipped bit in a tensor gives a model that looks right but predicts nonsense."""
    topic = await make_topic()
    batch = large_update((1, 1))
    middle = batch.values[1] or b""
    damaged = replace(batch, values=[batch.values[0], bytes([middle[0] ^ 1]) + middle[1:], *batch.values[2:]])
    await write(topic, damaged, update_of((1, 2)))
    updates = model_updates(topic, "ctr", follow=False)
    with pytest.raises(
        DecodeError, match=r"partition 0, offset 3: .*model 'ctr': its chunks are damaged: expected SHA-256"
    ):
        await anext(updates)
    assert (await anext(updates)).rank == (1, 2)  # the iteration continues after the error
    assert await ranks(topic, on_error="skip") == [(1, 2)]


def with_headers(batch: OutgoingBatch, **changes: bytes | None) -> OutgoingBatch:
    assert batch.headers is not None
    changed = {**dict(batch.headers[0]), **changes}
    headers = tuple((name, value) for name, value in changed.items() if value is not None)
    return replace(batch, headers=[headers])


UNREADABLE = {
    "no JSON": replace(update_of((1, 2)), values=[b"{"]),
    "no object": replace(update_of((1, 2)), values=[b"[1]"]),
    "no parameters": replace(update_of((1, 2)), values=[b'{"model":"ctr"}']),
    "parameters null": replace(
        update_of((1, 2)), values=[b'{"model":"ctr","generation":1,"version":2,"parameters":null}']
    ),
    "a number missing": replace(
        update_of((1, 2)), values=[b'{"model":"ctr","generation":1,"version":2,"parameters":[1,null]}']
    ),
    "wrong shape": replace(
        update_of((1, 2)),
        values=[b'{"model":"ctr","generation":1,"version":2,"parameters":{"dtype":"int8","shape":[3],"values":[1]}}'],
    ),
    "version as text": replace(
        update_of((1, 2)), values=[b'{"model":"ctr","generation":1,"version":"2","parameters":[1]}']
    ),
    "nested without end": replace(update_of((1, 2)), values=[b'{"parameters":' + b'{"a":' * 900 + b"1" + b"}" * 901]),
    "torn safetensors": replace(
        encoder(1, 2, format="safetensors").encode([np.zeros(4)]),
        values=[(encoder(1, 2, format="safetensors").encode([np.zeros(4)]).values[0] or b"")[:-1]],
    ),
    "other version in the value": replace(update_of((1, 2)), values=update_of((1, 3)).values),
    "unknown content type": with_headers(update_of((1, 2)), content_type=b"text/csv"),
    "no headers": replace(update_of((1, 2)), headers=None),
    "no generation": with_headers(update_of((1, 2)), generation=None),
    "no number": with_headers(update_of((1, 2)), version=b"two"),
    "a version below 0": with_headers(
        replace(
            update_of((1, 2)), values=[(update_of((1, 2)).values[0] or b"").replace(b'"version":2', b'"version":-2')]
        ),
        version=b"-2",
    ),
    "digits of another script": with_headers(update_of((1, 2)), version="\u0662".encode()),
    "a generation of thousands of digits": with_headers(update_of((1, 2)), generation=b"1" * 5000),
    "a rollback before the first": with_headers(update_of((1, 2)), since_rollback=b"1.-3"),
    "chunk above its count": with_headers(update_of((1, 2)), chunk_index=b"3", chunk_count=b"3", sha256=b"0"),
}


@pytest.mark.parametrize("unreadable", list(UNREADABLE))
async def test_an_unreadable_update_is_an_error_with_its_place_or_skipped(unreadable: str) -> None:
    """A user wrote a record by hand: the error must name its position, and later updates must stay readable."""
    topic = await memory_topic(update_of((1, 1)), UNREADABLE[unreadable], update_of((1, 3)))
    updates = model_updates(topic, "ctr", follow=False)
    assert (await anext(updates)).rank == (1, 1)
    with pytest.raises(DecodeError, match="memory://models, partition 0, offset 1: expected an update of model 'ctr'"):
        await anext(updates)
    assert (await anext(updates)).rank == (1, 3)
    skipping = model_updates(topic, "ctr", follow=False, on_error="skip")
    assert [update.rank async for update in skipping] == [(1, 1), (1, 3)]
    assert skipping.statistics().unreadable == 1
    assert "offset 1" in (skipping.statistics().last_error or "")


async def test_latest_model_begins_with_the_newest_update_and_follows(make_topic: MakeTopic) -> None:
    """A consumer that starts needs a model at once, and not a month of history first."""
    topic = await make_topic()
    await write(topic, *(update_of((1, version)) for version in range(1, 101)))
    async with model_updates(topic, "ctr", start="latest_model") as updates:
        assert (await soon(updates)).rank == (1, 100)
        await write(topic, update_of((1, 99)), update_of((1, 101)))
        assert (await soon(updates)).rank == (1, 101)
        assert updates.statistics() == UpdateStatistics(updates=2, older=1)


async def test_latest_model_finishes_an_update_that_was_partly_written(make_topic: MakeTopic) -> None:
    """A consumer that started during the write of a large update missed the update."""
    topic = await make_topic()
    batch = large_update((1, 2))
    await write(topic, update_of((1, 1)), selected(batch, 0, 1))
    async with model_updates(topic, "ctr", start="latest_model") as updates:
        assert (await soon(updates)).rank == (1, 1)
        await write(topic, selected(batch, *range(2, len(batch))))
        assert (await soon(updates)).rank == (1, 2)


async def test_latest_model_gives_the_last_good_update_before_the_error_behind_it(make_topic: MakeTopic) -> None:
    """The updates are read in the order of the topic, so a bad update must not hide the good one before it."""
    topic = await make_topic()
    await write(topic, update_of((1, 1)), replace(update_of((1, 2)), values=[b"{"]))
    async with model_updates(topic, "ctr", start="latest_model") as updates:
        assert (await soon(updates)).rank == (1, 1)
        with pytest.raises(DecodeError, match="offset 1"):
            await soon(updates)
        await write(topic, update_of((1, 3)))
        assert (await soon(updates)).rank == (1, 3)


async def test_every_start_of_a_topic_is_accepted(make_topic: MakeTopic) -> None:
    """With an offset or a time, a user can read the same updates again that a consumer read."""
    topic = await make_topic()
    await write(topic, update_of((1, 1)), update_of((1, 2)))
    offsets = [record.offset for record in await all_records(topic)]
    assert await ranks(topic, start={0: offsets[1]}) == [(1, 2)]
    assert await ranks(topic, start=datetime.now(UTC) - timedelta(days=1)) == [(1, 1), (1, 2)]
    assert await ranks(topic, start="latest") == []


@pytest.mark.parametrize("start", ["earliest", "latest_model"])
async def test_a_missing_topic_is_an_error(make_topic: MakeTopic, start: Any) -> None:
    """A mistyped topic must not look like a model that was never published."""
    topic = await make_topic()
    await topic.delete()
    with pytest.raises(TopicNotFound):
        await anext(model_updates(topic, "ctr", start=start))


async def test_waiting_can_be_cancelled_and_repeated(make_topic: MakeTopic) -> None:
    """A consumer waits with a time limit, does other work, and waits again."""
    topic = await make_topic()
    async with model_updates(topic, "ctr") as updates:
        for version in range(1, 4):
            waiting = asyncio.create_task(soon(updates))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            await write(topic, update_of((1, version)))
            assert (await soon(updates)).rank == (1, version)


async def test_a_loop_left_by_break_closes_its_reader() -> None:
    """Each loop that a break had left kept a connection to the broker until the process ended."""
    topic = WatchedTopic(await memory_topic(update_of((1, 1)), update_of((1, 2))))
    async for _ in model_updates(topic, "ctr"):  # type: ignore[arg-type]
        assert topic.open_readers == 1
        break
    gc.collect()
    await asyncio.wait_for(topic.closed.wait(), PATIENCE_S)
    assert topic.open_readers == 0


async def test_the_reader_is_closed_at_the_end_and_by_closing_twice() -> None:
    """The reader must be closed once by its end, by `async with` or by aclose()."""
    topic = WatchedTopic(await memory_topic(update_of((1, 1))))
    updates = model_updates(topic, "ctr", start="latest_model", follow=False)  # type: ignore[arg-type]
    assert [update.rank async for update in updates] == [(1, 1)]
    assert topic.open_readers == 0
    await updates.aclose()
    async with model_updates(topic, "ctr") as following:  # type: ignore[arg-type]
        assert topic.open_readers == 1
        await following.aclose()
        await following.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(following)
    assert topic.open_readers == 0


async def test_a_compacted_topic_still_gives_the_last_update(make_topic: MakeTopic) -> None:
    """Compaction may run at any time, and the remaining records must contain the whole newest model."""
    topic = await make_topic()
    one = encoder(record_bytes_max=1000)
    for version in range(1, 6):
        await write(topic, one.encode([large(version)]))
        left = await compacted(topic)
        [update] = [update async for update in model_updates(left, "ctr", follow=False)]
        assert update.rank == (1, version)
        records = await all_records(left)
        assert len(records) == len(large_update((1, version)))  # no record of older versions is left


async def test_compaction_while_an_update_is_written_keeps_the_one_before() -> None:
    """A crash between two chunks and a later compaction left no model at all."""
    topic = await memory_topic()
    one = encoder(record_bytes_max=1000)
    await write(topic, one.encode([large(1.0)]))
    second = one.encode([large(2.0)])
    for index in range(len(second)):
        await write(topic, selected(second, index))
        is_closed = (second.keys or ())[: index + 1].count(b"ctr") > 0
        assert await ranks(await compacted(topic)) == [(1, 2 if is_closed else 1)]


async def test_waiting_for_a_large_update_may_be_cancelled_at_any_moment() -> None:
    """A service was asked to end while a change was applied in a thread, and its next reader missed that version."""
    topic, large = MemoryBroker().topic("models"), np.zeros(300_000)
    await topic.create()
    updates = ModelUpdateEncoder("ctr", 1, clock=SystemClock(), changes=True)
    versions = [large + 0.0, large + 0.0, large + 0.0]
    for number, version in enumerate(versions):
        version[:number] = 1.0
        await write(topic, updates.encode([version]))
    for turns in range(12):
        async with model_updates(topic, "ctr", follow=False) as reader:
            found = []
            waiting = asyncio.ensure_future(anext(reader))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            found += [] if waiting.cancelled() else [waiting.result()]
            found += [update async for update in reader]
        assert [update.version for update in found] == [1, 2, 3]
        assert all(np.array_equal(update.parameters, each) for update, each in zip(found, versions, strict=True))
