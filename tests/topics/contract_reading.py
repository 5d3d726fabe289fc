"""Checks of the reading of records: shares, turns, waiting, resuming and lag."""

import asyncio

from support.waiting import PATIENCE_S
from topics.topic_case import (
    ManualClock,
    TopicCase,
    numbered,
    numbers_of,
    patiently,
    read_count,
    read_to_end,
    write,
    write_transaction,
)

from streamiter.topics import OutgoingBatch, ReadRequest, TopicRecord


class ReadingContract:
    """The part of `TopicContract` on reading."""

    async def test_each_subtask_reads_its_share_of_the_partitions(self, case: TopicCase) -> None:
        """A partition was read by two subtasks and counted twice, or was read by none."""
        topic = await case.make_topic(partitions=5)
        for partition in range(5):
            await write(topic, OutgoingBatch(numbered([partition]), partition=partition))
        for subtasks in (1, 2, 5):
            for subtask in range(subtasks):
                request = ReadRequest(subtask=subtask, subtasks=subtasks, stop="latest")
                numbers = sorted(numbers_of(await read_to_end(topic, request)))
                assert numbers == list(range(subtask, 5, subtasks))

    async def test_a_reader_returns_its_next_offset_before_and_after_its_first_record(self, case: TopicCase) -> None:
        """A job that started at the end and stopped before its first record resumed from the beginning."""
        topic = await case.make_topic(partitions=2)
        await write(topic, OutgoingBatch(numbered(range(3)), partition=1))
        reader = await patiently(topic.open_reader(ReadRequest(start="latest")))
        try:
            assert dict(reader.positions()) == {0: 0, 1: 3}
            await write(topic, OutgoingBatch(numbered(range(2)), partition=1))
            await read_count(reader, 2)
            assert dict(reader.positions()) == {0: 0, 1: 5}
        finally:
            await reader.close()

    async def test_a_subtask_without_partitions_ends_a_bounded_read(self, case: TopicCase) -> None:
        """A subtask without a partition kept a bounded job from ending."""
        topic = await case.make_topic(partitions=1)
        await write(topic, [b"a"])
        assert await read_to_end(topic, ReadRequest(subtask=1, subtasks=2, stop="latest")) == []

    async def test_a_batch_is_in_one_partition_and_within_max_records(self, case: TopicCase) -> None:
        """A batch had records of two partitions, whose positions are separate, or exceeded the memory limit."""
        topic = await case.make_topic(partitions=2)
        for partition in range(2):
            await write(topic, OutgoingBatch(numbered(range(50)), partition=partition))
        reader = await topic.open_reader(ReadRequest(stop="latest", max_records=7))
        seen = {0: 0, 1: 0}
        while (batch := await patiently(reader.read())) is not None:
            assert 1 <= len(batch) <= 7
            assert list(batch.offsets) == list(range(seen[batch.partition], batch.next_offset))
            seen[batch.partition] = batch.next_offset
        assert seen == {0: 50, 1: 50}
        await reader.close()

    async def test_partitions_with_records_take_turns(self, case: TopicCase) -> None:
        """One full partition starved the other partitions."""
        topic = await case.make_topic(partitions=3)
        for partition in range(3):
            await write(topic, OutgoingBatch(numbered(range(100)), partition=partition))
        reader = await topic.open_reader(ReadRequest(max_records=10))
        served = []
        for _ in range(15):
            batch = await patiently(reader.read())
            assert batch is not None
            served.append(batch.partition)
        assert set(served) == {0, 1, 2}
        await reader.close()

    async def test_reading_resumes_exactly_where_a_batch_ended(self, case: TopicCase) -> None:
        """A restored job lost or repeated a record at the end of a batch."""
        topic = await case.make_topic(partitions=2)
        transactions = await topic.open_transactions(case.prefix + "t") if topic.has_transactions else None
        for start in range(0, 40, 10):
            await write(topic, OutgoingBatch(numbered(range(start, start + 5)), partition=0))
            if transactions is not None:  # aborted records leave gaps
                await write_transaction(transactions, topic, numbered([999]), commit=False)
            await write(topic, OutgoingBatch(numbered(range(start, start + 5)), partition=1))
        if transactions is not None:
            await transactions.close()
        whole = [(record.partition, record.offset, record.value) for record in await read_to_end(topic)]
        resumed: list[tuple[int, int, bytes | None]] = []
        positions: dict[int, int] = {}
        for _ in range(len(whole) + 1):
            reader = await topic.open_reader(ReadRequest(positions=positions, stop="latest", max_records=3))
            batch = await patiently(reader.read())
            await patiently(reader.close())
            if batch is None:
                break
            resumed += [(record.partition, record.offset, record.value) for record in batch.records()]
            positions[batch.partition] = batch.next_offset
        assert sorted(resumed) == sorted(whole)

    async def test_a_cancelled_read_loses_no_record(self, case: TopicCase) -> None:
        """A barrier or a stop request interrupted a read, and its records were lost."""
        topic = await case.make_topic()
        reader = await topic.open_reader(ReadRequest(max_records=4))
        records: list[TopicRecord] = []

        async def read_but_cancel_after(yields: int) -> None:
            reading = asyncio.ensure_future(reader.read())
            for _ in range(yields):
                await asyncio.sleep(0)
            reading.cancel()
            [outcome] = await patiently(asyncio.gather(reading, return_exceptions=True))
            if not isinstance(outcome, asyncio.CancelledError):
                assert outcome is not None
                assert not isinstance(outcome, BaseException), outcome
                records.extend(outcome.records())

        for yields in range(5):
            await read_but_cancel_after(yields)
        writer = await topic.open_writer()
        for start in range(0, 60, 3):
            await patiently(writer.write(OutgoingBatch(numbered(range(start, start + 3)))))
            await patiently(writer.flush())
            await read_but_cancel_after(start % 7)
        await writer.close()
        while len(records) < 60:
            batch = await patiently(reader.read())
            assert batch is not None
            records.extend(batch.records())
        assert numbers_of(records) == list(range(60))
        await reader.close()

    async def test_a_waiting_reader_gets_written_records(self, case: TopicCase) -> None:
        """A consumer stopped without an error, which is the trouble that users report most."""
        topic = await case.make_topic(partitions=2)
        reader = await topic.open_reader(ReadRequest())
        for number in range(3):
            waiting = asyncio.ensure_future(reader.read())
            await write(topic, OutgoingBatch(numbered([number]), partition=number % 2))
            batch = await patiently(waiting)
            assert batch is not None
            assert numbers_of(batch.records()) == [number]
        await reader.close()

    async def test_lag_counts_unread_records(self, case: TopicCase) -> None:
        """The lag, which operators watch, never reached zero on an idle partition."""
        topic = await case.make_topic(partitions=2)
        await write(topic, OutgoingBatch(numbered(range(30)), partition=0))
        reader = await topic.open_reader(ReadRequest(max_records=10))
        await read_count(reader, 10)
        assert reader.lag()[0] == 20
        await read_count(reader, 10)
        await read_count(reader, 10)
        assert dict(reader.lag()) == {0: 0, 1: 0}
        await reader.close()

    async def test_a_partition_added_later_is_found_and_read_from_its_beginning(self, case: TopicCase) -> None:
        """The first records of a new partition were lost, because they were written before the reader found it."""
        topic = await case.make_topic(partitions=1)
        clock = ManualClock()
        reader = await topic.open_reader(ReadRequest(start="latest", refresh_s=30.0, clock=clock))
        reading = asyncio.ensure_future(reader.read())
        await topic.create(partitions=2)
        await write(topic, OutgoingBatch(numbered([7]), partition=1))
        async with asyncio.timeout(PATIENCE_S):
            while not reading.done():
                clock.advance(30.0)
                await asyncio.wait({reading}, timeout=0.02)  # the server uses real time
        batch = reading.result()
        assert batch is not None
        assert (batch.partition, numbers_of(batch.records())) == (1, [7])
        assert set(reader.lag()) == {0, 1}
        await reader.close()
