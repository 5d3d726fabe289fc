"""Checks of the first and the last record that a reader returns."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from topics.topic_case import (
    TopicCase,
    by_partition,
    numbered,
    numbers_of,
    patiently,
    read_count,
    read_to_end,
    values_of,
    write,
    write_transaction,
)

from streamiter.errors import ConfigurationError, OffsetOutOfRange
from streamiter.topics import OutgoingBatch, ReadRequest, Topic
from streamiter.topics.connecting import ReaderBehindLosses


class RangeContract:
    """The part of `TopicContract` on the range of a reader."""

    async def test_reading_from_latest_sees_only_later_records(self, case: TopicCase) -> None:
        """A predictor that started now read the whole history first."""
        topic = await case.make_topic()
        await write(topic, numbered(range(3)))
        reader = await topic.open_reader(ReadRequest(start="latest"))
        await write(topic, numbered(range(3, 5)))
        assert numbers_of(await read_count(reader, 2)) == [3, 4]
        await reader.close()

    async def test_reading_from_offsets_begins_at_the_earliest_in_other_partitions(self, case: TopicCase) -> None:
        """A user gave offsets for some partitions, and the other partitions were skipped."""
        topic = await case.make_topic(partitions=2)
        for partition in range(2):
            await write(topic, OutgoingBatch(numbered(range(5)), partition=partition))
        parts = by_partition(await read_to_end(topic, ReadRequest(start={1: 3}, stop="latest")))
        assert numbers_of(parts[0]) == [0, 1, 2, 3, 4]
        assert numbers_of(parts[1]) == [3, 4]

    async def test_reading_from_a_time_begins_with_the_first_record_not_before_it(self, case: TopicCase) -> None:
        """A read from a time lost the record of exactly this time."""
        topic = await case.make_topic()
        start = datetime(2024, 3, 1, 12, tzinfo=UTC)
        first_ms = int(start.timestamp() * 1000)
        await write(
            topic, OutgoingBatch(numbered(range(5)), timestamps_ms=[first_ms + second * 1000 for second in range(5)])
        )
        for seconds, expected in ((-10, [0, 1, 2, 3, 4]), (2, [2, 3, 4]), (2.5, [3, 4]), (60, [])):
            request = ReadRequest(start=start + timedelta(seconds=seconds), stop="latest")
            assert numbers_of(await read_to_end(topic, request)) == expected

    async def test_a_time_without_a_zone_is_refused(self, case: TopicCase) -> None:
        """A time without a zone meant another hour on another machine."""
        topic = await case.make_topic()
        with pytest.raises(ConfigurationError, match="aware"):
            await patiently(topic.open_reader(ReadRequest(start=datetime(2024, 3, 1))))

    async def test_an_offset_behind_the_end_is_an_error(self, case: TopicCase) -> None:
        """A topic was created again, and a job with an old snapshot waited silently for its offset."""
        topic = await case.make_topic()
        await write(topic, numbered(range(3)))
        with pytest.raises(OffsetOutOfRange, match="99"):
            await self._open_and_read(topic, ReadRequest(positions={0: 99}))

    async def test_an_offset_that_fell_out_of_retention_is_an_error(self, case: TopicCase) -> None:
        """A reader continued at the earliest record, and lost the records before it."""
        if case.retention_settings is None:
            pytest.skip("this connector has no retention that acts at once")
        topic = await case.make_topic(settings=case.retention_settings)
        for start in range(0, 100, 10):
            await write(topic, numbered(range(start, start + 10)))
        earliest, end = (await topic.describe()).offsets[0]
        assert 0 < earliest < end
        with pytest.raises(OffsetOutOfRange, match=str(earliest)):
            await self._open_and_read(topic, ReadRequest(positions={0: 0}))
        kept = await read_to_end(topic)
        assert numbers_of(kept)[-1] == 99
        assert kept[0].offset == earliest

    async def test_a_reader_behind_losses_leaves_out_the_lost_records_only(
        self, case: TopicCase, caplog: pytest.LogCaptureFixture
    ) -> None:
        """To continue behind lost records of one partition, all records of the others were read again."""
        topic = await case.make_topic(partitions=2, settings=case.retention_settings)
        await write(topic, OutgoingBatch(numbered([200, 201]), partition=1))
        running = await ReaderBehindLosses.open(topic, ReadRequest())
        assert numbers_of(await read_count(running, 2)) == [200, 201]
        for start in range(0, 100, 10):
            await write(topic, OutgoingBatch(numbered(range(start, start + 10)), partition=0))
        earliest, end = (await topic.describe()).offsets[0]
        assert (earliest > 0) is (case.retention_settings is not None)
        request = ReadRequest(positions={0: 0, 1: 1}, identities=running.identities(), stop="latest")
        resumed = await ReaderBehindLosses.open(topic, request)
        assert dict(resumed.positions()) == {0: earliest, 1: 1}
        left = list(range(100 - (end - earliest), 100))
        assert sorted(numbers_of(await read_count(resumed, len(left) + 1))) == [*left, 201]
        # Retention has deleted records that the running reader has not read, unless it has read ahead.
        numbers = numbers_of(await read_count(running, len(left))) if earliest else left
        assert numbers == left
        assert (f"{earliest} deleted records are left out" in caplog.text) is (earliest > 0)
        for reader in (running, resumed):
            await reader.close()

    async def test_a_reader_behind_losses_begins_another_topic_at_the_start(self, case: TopicCase) -> None:
        """A job whose input was another topic now could not keep its model."""
        topic = await case.make_topic(partitions=2)
        await write(topic, OutgoingBatch(numbered(range(5)), partition=1))
        identities = (await topic.describe()).identities
        await topic.delete()
        await case.make_topic(partitions=1)
        await write(topic, numbered(range(300, 305)))
        for start, first in (("earliest", 300), ({0: 3}, 303)):
            for positions in ({0: 1}, {0: 1, 1: 5}):
                request = ReadRequest(positions=positions, identities=identities, start=start, stop="latest")  # type: ignore[arg-type]
                with pytest.raises(OffsetOutOfRange):
                    await self._open_and_read(topic, request)
                reader = await ReaderBehindLosses.open(topic, request)
                assert numbers_of(await read_count(reader, 305 - first)) == list(range(first, 305))
                await reader.close()

    async def test_offsets_of_a_deleted_topic_are_refused_by_a_new_topic_of_its_name(self, case: TopicCase) -> None:
        """A new topic had more records than were read of the deleted one, and a job skipped 1,035 of them."""
        topic = await case.make_topic(partitions=2)
        await write(topic, OutgoingBatch(numbered(range(5)), partition=1))
        reader = await topic.open_reader(ReadRequest())
        await read_count(reader, 5)
        positions, identities = dict(reader.positions()), dict(reader.identities())
        await reader.close()
        assert sorted(identities) == [0, 1]
        assert (await topic.describe()).identities == identities
        await topic.delete()
        await case.make_topic(partitions=2)
        await write(topic, OutgoingBatch(numbered(range(100, 110)), partition=1))
        for place in ({"positions": {1: positions[1]}}, {"start": {1: positions[1]}}):
            with pytest.raises(OffsetOutOfRange, match=r"partition 1: offset 5 .*again.* 0 to 10") as caught:
                await self._open_and_read(topic, ReadRequest(**place, identities=identities, stop="latest"))
            assert topic.name in str(caught.value)
        # Old snapshots have no identities, and some starts have no offset: neither is refused.
        request = ReadRequest(positions={1: 5}, stop={1: 10})
        assert numbers_of(await read_to_end(topic, request)) == list(range(105, 110))
        request = ReadRequest(start="earliest", identities=identities, stop="latest")
        assert numbers_of(await read_to_end(topic, request)) == list(range(100, 110))

    async def test_offsets_stay_valid_until_a_deletion(self, case: TopicCase) -> None:
        """A job refused to resume after a partition was added, although its offsets were still right."""
        settings = case.retention_settings
        topic = await case.make_topic(settings=settings)
        await write(topic, numbered(range(5)))
        identities = (await topic.describe()).identities
        reader = await topic.open_reader(ReadRequest())
        await read_count(reader, 5)
        for start in range(5, 55, 10):
            await write(topic, numbered(range(start, start + 10)))
            await read_count(reader, 10)
        await topic.create(partitions=3)
        positions = reader.positions()
        assert dict(reader.identities()).items() >= identities.items()
        await reader.close()
        described = (await case.topic().describe()).identities
        assert described.items() >= identities.items()
        assert sorted(described) == [0, 1, 2]
        request = ReadRequest(positions=positions, identities=identities, stop="latest")
        assert await read_to_end(topic, request) == []

    async def _open_and_read(self, topic: Topic, request: ReadRequest) -> None:
        reader = await patiently(topic.open_reader(request))
        try:
            await patiently(reader.read())
        finally:
            await reader.close()

    async def test_stop_latest_ends_at_the_end_the_topic_had_when_opened(self, case: TopicCase) -> None:
        """A bounded run over a topic with a writer never ended."""
        topic = await case.make_topic(partitions=2)
        await write(topic, OutgoingBatch(numbered(range(5)), partition=0))
        reader = await topic.open_reader(ReadRequest(stop="latest"))
        await write(topic, OutgoingBatch(numbered(range(5, 9)), partition=0))
        await write(topic, OutgoingBatch(numbered(range(5, 9)), partition=1))
        assert numbers_of(await read_count(reader, 5)) == [0, 1, 2, 3, 4]
        assert await patiently(reader.read()) is None
        assert await patiently(reader.read()) is None
        await reader.close()

    async def test_a_bounded_read_of_an_empty_topic_ends_at_once(self, case: TopicCase) -> None:
        """A bounded read of an empty topic waited for ever for a first record."""
        topic = await case.make_topic(partitions=3)
        assert await read_to_end(topic) == []
        assert await read_to_end(topic, ReadRequest(stop={0: 0, 1: 0, 2: 0})) == []
        assert await read_to_end(topic, ReadRequest(start="latest", stop="latest")) == []

    async def test_a_stop_offset_is_not_read(self, case: TopicCase) -> None:
        """A restore of a feedback log read records outside of its snapshot's range, or of other partitions."""
        topic = await case.make_topic(partitions=3)
        for partition in range(3):
            await write(topic, OutgoingBatch(numbered(range(6)), partition=partition))
        records = await read_to_end(topic, ReadRequest(start={0: 2}, stop={0: 4, 1: 1}))
        assert {part: numbers_of(rows) for part, rows in by_partition(records).items()} == {0: [2, 3], 1: [0]}

    async def test_a_stop_offset_in_the_future_is_waited_for(self, case: TopicCase) -> None:
        """A read ended before its stop offset, and its range was incomplete."""
        topic = await case.make_topic()
        await write(topic, numbered(range(2)))
        reader = await topic.open_reader(ReadRequest(stop={0: 4}))
        assert numbers_of(await read_count(reader, 2)) == [0, 1]
        waiting = asyncio.ensure_future(reader.read())
        await write(topic, numbered(range(2, 6)))
        batch = await patiently(waiting)
        assert batch is not None
        rest = numbers_of(batch.records())
        while (batch := await patiently(reader.read())) is not None:
            rest += numbers_of(batch.records())
        assert rest == [2, 3]
        await reader.close()

    async def test_a_bounded_read_ends_behind_aborted_records(self, case: TopicCase) -> None:
        """An aborted transaction was at the end of a topic, and a bounded read waited for ever for its last offset."""
        topic = await case.make_topic()
        await write(topic, [b"seen"])
        transactions = await case.transactions(topic)
        await write_transaction(transactions, topic, [b"aborted"] * 3, commit=False)
        await transactions.close()
        assert values_of(await read_to_end(topic)) == [b"seen"]
        _, end = (await topic.describe()).offsets[0]
        assert values_of(await read_to_end(topic, ReadRequest(stop={0: end}))) == [b"seen"]
        assert await read_to_end(topic, ReadRequest(start="latest", stop="latest")) == []

    async def test_a_bounded_read_does_not_wait_for_an_open_transaction(self, case: TopicCase) -> None:
        """A bounded read waited for an open transaction, although its end is the last stable offset."""
        topic = await case.make_topic()
        await write(topic, [b"seen"])
        transactions = await case.transactions(topic)
        await patiently(transactions.begin())
        await patiently(transactions.write(topic, OutgoingBatch([b"open"] * 3)))
        assert values_of(await read_to_end(topic)) == [b"seen"]
        await patiently(transactions.close())
