"""A closing that is cancelled leaves no connection open."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable

import pytest
from topics.topic_case import begun, created, numbered, patiently

from streamiter.topics import OutgoingBatch, ReadRequest, Topic

Closing = Callable[[], Awaitable[None]]


async def closing_of_a_reader(topic: Topic) -> Closing:
    reader = await topic.open_reader(ReadRequest())
    await reader.read()
    return reader.close


async def closing_of_a_writer(topic: Topic) -> Closing:
    """Return the closing of a writer that is sending records."""
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch(numbered(range(10))))
    return writer.close


async def closing_of_transactions(topic: Topic) -> Closing:
    """Return the closing of transactions, one of which is open and is sending records."""
    transactions = await begun(topic, f"{topic.name}-t")
    await transactions.write(topic, OutgoingBatch(numbered(range(10))))
    return transactions.close


async def cancelled_after(turns: int, close: Closing, *, times: int) -> None:
    """Close, and after some turns of the event loop cancel the closing in each of ``times`` turns."""

    async def closed() -> None:
        await close()

    closing = asyncio.create_task(closed())
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(times):
        closing.cancel()
        await asyncio.sleep(0)
    await patiently(asyncio.wait({closing}))


async def unclosed_after(
    turns: int, opened: Callable[[Topic], Awaitable[Closing]], topic: Topic, *, times: int
) -> list[str]:
    """Return Python's warnings about unclosed resources after a cancelled closing, when all references are gone."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        await cancelled_after(turns, await opened(topic), times=times)
        gc.collect()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("opened", [closing_of_a_reader, closing_of_a_writer, closing_of_transactions])
async def test_closing_that_is_cancelled_leaves_no_connection_open(
    kafka_topic: Callable[..., Topic], opened: Callable[[Topic], Awaitable[Closing]], times: int
) -> None:
    """A step failed while the source next to it was closing at its end: its two connections stayed open."""
    topic = await created(kafka_topic())
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch([b"to read"]))
    await writer.close()
    for turns in range(1, 6):
        assert await unclosed_after(turns, opened, topic, times=times) == [], f"cancelled after {turns} turns"


async def test_a_reader_that_is_closed_as_soon_as_it_is_open_leaves_nothing_behind(
    kafka_topic: Callable[..., Topic],
) -> None:
    """A caller that refused the reader it had opened got warnings about coroutines that were never awaited."""
    topic = await created(kafka_topic())
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = await topic.open_reader(ReadRequest())
        await reader.close()
        del reader
        gc.collect()
    assert [str(each.message) for each in caught] == []
