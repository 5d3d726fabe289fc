"""Checks of the creation and deletion of topics, and of the closing of readers and writers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.waiting import PATIENCE_S
from topics.topic_case import (
    ManualClock,
    TopicCase,
    missing_soon,
    numbered,
    patiently,
    read_count,
    read_to_end,
    values_of,
    write,
    write_and_commit,
)

from streamiter.errors import ConfigurationError, OffsetOutOfRange, TopicError, TopicNotFound
from streamiter.topics import OutgoingBatch, ReadRequest, TopicReader, TopicWriter, Transactions, connector_for


class LifecycleContract:
    """The part of `TopicContract` on the life of topics, readers and writers."""

    async def test_a_missing_topic_is_an_error_that_names_it(self, case: TopicCase) -> None:
        """A misspelt topic was created silently, or a job waited for it for ever."""
        missing = case.topic("nowhere")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: missing.open_reader(ReadRequest()),
            missing.open_writer,
            missing.describe,
            missing.delete,
        ]
        with missing_soon():
            outcomes = await patiently(asyncio.gather(*(call() for call in calls), return_exceptions=True))
        for outcome in outcomes:
            assert isinstance(outcome, TopicNotFound)
            assert "nowhere" in str(outcome)

    async def test_writing_to_a_missing_topic_in_a_transaction_is_an_error(self, case: TopicCase) -> None:
        """A write to a missing topic succeeded, and the records were lost at the commit."""
        topic = await case.make_topic()
        transactions = await case.transactions(topic)
        await patiently(transactions.begin())
        with missing_soon(), pytest.raises(TopicNotFound, match="nowhere"):
            await write_and_commit(transactions, case.topic("nowhere"), [b"a"])
        await patiently(transactions.close())

    async def test_a_reader_of_a_topic_that_is_deleted_gets_an_error(self, case: TopicCase) -> None:
        """A reader retried a deleted topic for ever, as some clients do."""
        topic = await case.make_topic()
        clock = ManualClock()
        reader = await topic.open_reader(ReadRequest(clock=clock))
        reading = asyncio.ensure_future(reader.read())
        await topic.delete()
        with missing_soon():
            async with asyncio.timeout(PATIENCE_S):
                while not reading.done():
                    clock.advance(30.0)
                    await asyncio.wait({reading}, timeout=0.02)  # the server uses real time
        with pytest.raises(TopicNotFound, match=topic.name):
            reading.result()
        await patiently(reader.close())

    async def test_a_reader_never_continues_with_the_records_of_a_topic_created_again(self, case: TopicCase) -> None:
        """A topic was missing for half a second, in which its reader did not ask for records."""
        topic = await case.make_topic()
        await write(topic, numbered(range(5)))
        clock = ManualClock()
        reader = await topic.open_reader(ReadRequest(clock=clock))
        await read_count(reader, 5)
        await topic.delete()
        await case.make_topic()
        await write(topic, numbered(range(100, 110)))
        reading = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(PATIENCE_S):
            while not reading.done():
                clock.advance(30.0)
                await asyncio.wait({reading}, timeout=0.02)  # the server uses real time
        with pytest.raises((TopicNotFound, OffsetOutOfRange), match=f"{topic.name}.*(again|was deleted)"):
            reading.result()
        await patiently(reader.close())

    async def test_creating_again_keeps_the_records_and_adds_partitions(self, case: TopicCase) -> None:
        """A job created its topics again at its start, and their records were lost."""
        topic = await case.make_topic(partitions=2)
        await write(topic, OutgoingBatch([b"a"], partition=1))
        await topic.create(partitions=1)
        assert (await topic.describe()).offsets == {0: (0, 0), 1: (0, 1)}
        await topic.create(partitions=4)
        described = await topic.describe()
        assert (described.name, described.partitions) == (topic.name, 4)
        assert values_of(await read_to_end(topic)) == [b"a"]

    async def test_a_deleted_topic_is_missing_and_can_be_created_again(self, case: TopicCase) -> None:
        """The records of a deleted topic came back in a new topic of the same name."""
        topic = await case.make_topic(partitions=3)
        await write(topic, [b"old"])
        await topic.delete()
        with missing_soon(), pytest.raises(TopicNotFound):
            await patiently(topic.describe())
        again = await case.make_topic(partitions=1)
        assert (await again.describe()).partitions == 1
        assert await read_to_end(again) == []

    async def test_topics_are_listed_and_found_by_url(self, case: TopicCase) -> None:
        """The command line could not find a topic, because it only has the URL."""
        if not case.url_is_global:
            pytest.skip("the URL of this case leads to another server")
        topic = await case.make_topic("listed", partitions=2)
        connector = connector_for(topic.url)
        assert topic.name in await connector.list_topics(topic.url, {})
        found = connector.topic(topic.url, {})
        assert (found.url, found.name, found.commit_domain) == (topic.url, topic.name, topic.commit_domain)
        assert (await found.describe()).partitions == 2

    async def test_an_unknown_setting_is_refused(self, case: TopicCase) -> None:
        """A misspelt retention kept records for ever, or deleted them at once."""
        with pytest.raises((ConfigurationError, TopicError), match="no_such_setting"):
            await patiently(case.topic().create(settings={"no_such_setting": "1"}))

    async def test_everything_can_be_closed_twice(self, case: TopicCase) -> None:
        """An error path closed a reader a second time, and the closing failed."""
        topic = await case.make_topic()
        opened: list[TopicWriter | TopicReader | Transactions] = [
            await topic.open_writer(),
            await topic.open_reader(ReadRequest()),
        ]
        if topic.has_transactions:
            opened.append(await topic.open_transactions(case.prefix + "t"))
        for each in [*opened, *opened]:
            await patiently(each.close())

    async def test_a_closed_reader_or_writer_refuses_to_continue(self, case: TopicCase) -> None:
        """A record was written after the closing, and was lost without an error."""
        topic = await case.make_topic()
        writer = await topic.open_writer()
        reader = await topic.open_reader(ReadRequest())
        await patiently(writer.close())
        await patiently(reader.close())
        with pytest.raises(TopicError, match="closed"):
            await patiently(writer.write(OutgoingBatch([b"a"])))
        with pytest.raises(TopicError, match="closed"):
            await patiently(reader.read())
