"""Topics in an SQLite file: commits, polling, retention and transactions."""

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest
from support.processes import async_process
from support.waiting import until
from topics.sqlite_support import opened, sqlite_topic, stored_blocks
from topics.topic_case import (
    ManualClock,
    begun,
    created,
    numbered,
    numbers_of,
    patiently,
    read_count,
    read_to_end,
    values_of,
    write,
    write_transaction,
)

from streamiter.errors import (
    OffsetOutOfRange,
    ProducerFenced,
    TopicError,
    TopicNotFound,
    TopicUnavailable,
    TransactionExpired,
)
from streamiter.topics import OutgoingBatch, ReadRequest, topic

MiB = 1 << 20


# -- writing -----------------------------------------------------------------------------------------------


async def test_the_event_loop_continues_while_a_commit_waits(tmp_path: Path) -> None:
    """A commit blocked the event loop, and with it all heartbeats of the job."""
    clicks = await created(sqlite_topic(tmp_path))
    writer = await clicks.open_writer()
    with opened(tmp_path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        await writer.write(OutgoingBatch([b"a"]))
        flushing = asyncio.ensure_future(writer.flush())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not flushing.done()
        connection.execute("ROLLBACK")
    await patiently(flushing)
    await writer.close()
    assert values_of(await read_to_end(clicks)) == [b"a"]


async def test_records_that_arrive_during_a_commit_are_in_the_next_one(tmp_path: Path) -> None:
    """Each record had its own commit, so a thousand records a second were written instead of millions."""
    clicks = await created(sqlite_topic(tmp_path))
    writer = await clicks.open_writer()
    with opened(tmp_path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for number in range(500):
            await writer.write(OutgoingBatch(numbered([number])))
            await asyncio.sleep(0)
        connection.execute("ROLLBACK")
    await writer.close()
    assert numbers_of(await read_to_end(clicks)) == list(range(500))
    assert stored_blocks(tmp_path)[0] <= 3


async def test_a_write_waits_while_too_many_bytes_are_unwritten(tmp_path: Path) -> None:
    """A slow disk filled the memory, because the flow was not slowed down."""
    clicks = await created(sqlite_topic(tmp_path))
    writer = await clicks.open_writer()
    with opened(tmp_path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        handed_over = 0

        async def write_much() -> None:
            nonlocal handed_over
            for _ in range(64):
                await writer.write(OutgoingBatch([b"x" * MiB]))
                handed_over += 1
                await asyncio.sleep(0)

        writing = asyncio.ensure_future(write_much())
        for _ in range(300):
            await asyncio.sleep(0)
        assert not writing.done()
        assert handed_over < 40  # the records of one commit, which waits in the thread, and as many behind it
        connection.execute("ROLLBACK")
    await patiently(writing)
    await writer.close()
    assert len(await read_to_end(clicks)) == 64


async def test_a_cancelled_flush_does_not_cancel_the_commit(tmp_path: Path) -> None:
    """A caller's timeout cancelled a flush, and records were lost or doubled."""
    clicks = await created(sqlite_topic(tmp_path))
    writer = await clicks.open_writer()
    for number in range(20):
        await writer.write(OutgoingBatch(numbered([number])))
        flushing = asyncio.ensure_future(writer.flush())
        for _ in range(number % 4):
            await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)
    await writer.close()
    assert numbers_of(await read_to_end(clicks)) == list(range(20))


async def test_a_writer_finds_partitions_that_were_added(tmp_path: Path) -> None:
    """A write to a new partition of a larger topic was refused."""
    clicks = await created(sqlite_topic(tmp_path), partitions=1)
    writer = await clicks.open_writer()
    await clicks.create(partitions=3)
    await writer.write(OutgoingBatch([b"a"], partition=2))
    await writer.close()
    assert (await clicks.describe()).offsets == {0: (0, 0), 1: (0, 0), 2: (0, 1)}


WRITER = """
import asyncio, sys
from streamiter.topics import OutgoingBatch, topic

async def main(url, name):
    writer = await topic(url).open_writer()
    for number in range(100):
        await writer.write(OutgoingBatch([b"%d" % (name * 1000 + number)]))
        await writer.flush()
    await writer.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def test_several_processes_write_while_another_reads(tmp_path: Path) -> None:
    """Several processes wrote to one file, and records were lost or read in another order."""
    clicks = await created(sqlite_topic(tmp_path))
    reader = await clicks.open_reader(ReadRequest())
    async with contextlib.AsyncExitStack() as writers:
        commands = [[sys.executable, "-c", WRITER, clicks.url, str(name)] for name in range(3)]
        processes = [await writers.enter_async_context(async_process(command, is_forked=True)) for command in commands]
        records = await patiently(read_count(reader, 300))
        assert [await process.wait() for process in processes] == [0, 0, 0]
    assert [record.offset for record in records] == list(range(300))
    for name in range(3):
        of_writer = [number for number in numbers_of(records) if number // 1000 == name]
        assert of_writer == list(range(name * 1000, name * 1000 + 100))
    await reader.close()


# -- reading -----------------------------------------------------------------------------------------------


class CountingClock(ManualClock):
    """A clock that records the length of each sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses_s: list[float] = []

    async def sleep(self, delay_s: float) -> None:
        self.pauses_s.append(delay_s)
        await super().sleep(delay_s)


async def test_an_idle_reader_looks_more_rarely_with_time(tmp_path: Path) -> None:
    """Each idle reader looked fifty times a second, which was a noticeable load on the machine."""
    clicks = await created(sqlite_topic(tmp_path))
    clock = CountingClock()
    reader = await clicks.open_reader(ReadRequest(clock=clock))
    reading = asyncio.ensure_future(reader.read())
    for looks in range(1, 30):
        await until(lambda looks=looks: len(clock.pauses_s) == looks)
        clock.advance(clock.pauses_s[-1])
    assert clock.pauses_s[0] == 0.02
    assert clock.pauses_s == sorted(clock.pauses_s)
    assert clock.pauses_s[-1] == 0.2
    await write(clicks, [b"a"])
    await until(lambda: clock.advance(0.2) or reading.done())
    reading = asyncio.ensure_future(reader.read())
    clock.pauses_s.clear()
    await until(lambda: len(clock.pauses_s) == 1)
    assert clock.pauses_s == [0.02]
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await reader.close()


async def test_a_small_max_records_reads_a_large_block_once(tmp_path: Path) -> None:
    """A block of 8192 records was unpacked for every ten of them, which is a hundred times the work."""
    clicks = await created(sqlite_topic(tmp_path))
    await write(clicks, numbered(range(8000)))
    assert stored_blocks(tmp_path)[0] == 1
    reader = await clicks.open_reader(ReadRequest(max_records=10))
    await read_count(reader, 10)
    with opened(tmp_path) as connection:
        connection.execute("UPDATE blocks SET payload = x'00'")  # a second reading of the block would fail
    assert numbers_of(await read_count(reader, 7990)) == list(range(10, 8000))
    await reader.close()


async def test_a_recreated_topic_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    """A topic was deleted and created again, and its reader used the old offsets for other records."""
    clicks = await created(sqlite_topic(tmp_path))
    await write(clicks, numbered(range(3)))
    reader, writer = await clicks.open_reader(ReadRequest()), await clicks.open_writer()
    await read_count(reader, 3)
    await clicks.delete()
    await clicks.create()
    await write(clicks, numbered(range(9)))
    with pytest.raises(TopicNotFound, match="deleted"):
        await patiently(reader.read())
    await writer.write(OutgoingBatch([b"lost"]))
    with pytest.raises(TopicNotFound, match="deleted"):
        await patiently(writer.flush())
    await reader.close()
    with pytest.raises(TopicNotFound, match="deleted"):
        await patiently(writer.close())
    assert numbers_of(await read_to_end(clicks)) == list(range(9))


# -- retention ---------------------------------------------------------------------------------------------


async def test_retention_by_bytes_keeps_the_newest_blocks(tmp_path: Path) -> None:
    """The file of a topic with a retention by bytes never stopped growing."""
    clicks = await created(sqlite_topic(tmp_path), partitions=2, settings={"retention_bytes": str(50_000)})
    writer = await clicks.open_writer()
    for number in range(100):
        await writer.write(OutgoingBatch([b"%d" % number + b" " * 10_000], partition=0))
        await writer.flush()
    await writer.write(OutgoingBatch([b"x" * 100_000], partition=1))
    await writer.close()
    offsets = (await clicks.describe()).offsets
    assert offsets == {0: (96, 100), 1: (0, 1)}
    assert stored_blocks(tmp_path) == (5, 0)
    assert [int(value or b"") for value in values_of(await read_to_end(clicks))[:4]] == [96, 97, 98, 99]


async def test_retention_by_time_uses_the_time_of_the_records(tmp_path: Path) -> None:
    """A retention by time used the time of the writing instead of the records' own time."""
    clock = ManualClock(1_000.0)
    clicks = await created(sqlite_topic(tmp_path, clock=clock), settings={"retention_ms": "10000"})
    for number in range(6):
        await write(clicks, numbered([number]))
        clock.advance(4.0)
    assert numbers_of(await read_to_end(clicks)) == [3, 4, 5]
    with pytest.raises(OffsetOutOfRange, match="expected 3 to 6"):
        await clicks.open_reader(ReadRequest(positions={0: 2}))


async def test_retention_by_count_is_exact_although_blocks_are_not_cut(tmp_path: Path) -> None:
    """An offset before the start could be read, because its block was still stored."""
    clicks = await created(sqlite_topic(tmp_path), settings={"retention_records": "5"})
    for start in range(0, 12, 4):
        await write(clicks, numbered(range(start, start + 4)))
    assert (await clicks.describe()).offsets == {0: (7, 12)}
    assert numbers_of(await read_to_end(clicks)) == [7, 8, 9, 10, 11]
    assert stored_blocks(tmp_path)[0] == 2


# -- transactions ------------------------------------------------------------------------------------------


async def test_large_transactions_are_staged_and_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Ten seconds of output exceeded the memory, or another flow in the same file waited for them."""
    clicks = await created(sqlite_topic(tmp_path))
    first, second = [await clicks.open_transactions(name) for name in ("first", "second")]
    await first.begin()
    await second.begin()
    for number in range(5):
        for name, transactions in enumerate((first, second)):
            values = [b"%d" % (10 * name + number) + b" " * MiB]
            await patiently(transactions.write(clicks, OutgoingBatch(values)))
        await patiently(write(clicks, numbered([100 + number])))
    assert stored_blocks(tmp_path) == (15, 10)
    assert numbers_of(await read_to_end(clicks)) == [100, 101, 102, 103, 104]
    await second.commit()
    await first.abort()
    assert stored_blocks(tmp_path) == (10, 0)
    records = await read_to_end(clicks)
    assert numbers_of(records)[5:] == [10, 11, 12, 13, 14]
    assert [record.offset for record in records] == list(range(10))
    await first.close()
    await second.close()


async def test_a_small_transaction_is_one_block(tmp_path: Path) -> None:
    """Many small writes between two checkpoints made many small rows."""
    clicks = await created(sqlite_topic(tmp_path))
    transactions = await begun(clicks, "t")
    for number in range(100):
        await transactions.write(clicks, OutgoingBatch(numbered([number])))
    await transactions.commit()
    await transactions.close()
    assert numbers_of(await read_to_end(clicks)) == list(range(100))
    assert stored_blocks(tmp_path) == (1, 0)


async def test_staged_records_of_a_dead_owner_are_discarded(tmp_path: Path) -> None:
    """The staged records of killed runs filled the disk.

    The next owner of the id removes them at once, and any other writer removes them after the timeout.
    """
    clock = ManualClock()
    clicks = await created(sqlite_topic(tmp_path, clock=clock))
    dead = []
    for name in ("same", "other"):
        transactions = await clicks.open_transactions(name, timeout_s=60.0)
        await transactions.begin()
        await transactions.write(clicks, OutgoingBatch([b"x" * MiB]))
        dead.append(transactions)
    assert stored_blocks(tmp_path) == (2, 2)
    await (await clicks.open_transactions("same")).close()
    assert stored_blocks(tmp_path) == (1, 1)
    clock.advance(59.0)
    await (await clicks.open_transactions("third")).close()
    assert stored_blocks(tmp_path) == (1, 1)
    clock.advance(2.0)
    await (await clicks.open_transactions("fourth")).close()
    assert stored_blocks(tmp_path) == (0, 0)
    replaced, expired = dead
    with pytest.raises(ProducerFenced, match="newer writer") as caught:
        await replaced.commit()
    assert not isinstance(caught.value, TransactionExpired)
    with pytest.raises(TransactionExpired, match="longer than its timeout"):
        await expired.commit()
    for transactions in dead:
        await transactions.close()
    assert await read_to_end(clicks) == []


async def test_an_owner_whose_records_were_discarded_reports_the_reason(tmp_path: Path) -> None:
    """Another process, whose clock was ahead, discarded a transaction, and the error had the wrong reason."""
    slow, fast = ManualClock(), ManualClock()
    clicks, same = sqlite_topic(tmp_path, clock=slow), sqlite_topic(tmp_path, clock=fast)
    await clicks.create()
    owners = []
    for name in ("a", "b"):
        transactions = await clicks.open_transactions(name, timeout_s=60.0)
        await transactions.begin()
        await transactions.write(clicks, OutgoingBatch([b"x" * MiB]))
        owners.append(transactions)
    fast.advance(61.0)
    for _ in range(2):  # the second cleaner finds nothing to discard
        await (await same.open_transactions("cleaner")).close()
    newer = await same.open_transactions("b")
    with pytest.raises(TransactionExpired, match="another process discarded it"):
        await owners[0].commit()
    with pytest.raises(ProducerFenced, match="newer writer") as caught:
        await owners[1].commit()
    assert not isinstance(caught.value, TransactionExpired)
    for transactions in (*owners, newer):
        await transactions.close()
    assert await read_to_end(clicks) == []


async def test_a_transaction_open_for_too_long_is_aborted(tmp_path: Path) -> None:
    """An owner committed after its timeout, although some of its records may have been deleted."""
    clock = ManualClock()
    clicks = await created(sqlite_topic(tmp_path, clock=clock))
    transactions = await clicks.open_transactions("t", timeout_s=60.0)
    await transactions.begin()
    await transactions.write(clicks, OutgoingBatch([b"late" + b" " * MiB]))
    clock.advance(61.0)
    for call in (transactions.commit, transactions.begin):
        with pytest.raises(TransactionExpired, match="open for over 60 s"):
            await call()
    await transactions.close()
    assert stored_blocks(tmp_path) == (0, 0)
    assert await read_to_end(clicks) == []


async def test_a_transaction_waits_for_the_lock_and_can_be_tried_again(tmp_path: Path) -> None:
    """A backup locked the file for long, and the outputs since the last checkpoint were lost."""
    clicks = await created(sqlite_topic(tmp_path, lock_timeout_s=0.05))
    transactions = await begun(clicks, "t")
    await transactions.write(clicks, OutgoingBatch([b"gathered"]))
    large = b"staged" + b" " * MiB
    with opened(tmp_path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(TopicUnavailable, match="locked for longer than lock_timeout_s"):
            await patiently(transactions.write(clicks, OutgoingBatch([large])))
        for _ in range(2):
            with pytest.raises(TopicUnavailable, match="locked for longer than lock_timeout_s"):
                await patiently(transactions.commit())
        with pytest.raises(TopicUnavailable, match="locked for longer than lock_timeout_s"):
            await patiently(clicks.open_transactions("other"))
        assert await read_to_end(clicks) == []
        connection.execute("ROLLBACK")
    await patiently(transactions.commit())
    await transactions.close()
    assert values_of(await read_to_end(clicks)) == [b"gathered", large]


async def test_a_topic_deleted_during_a_transaction_fails_the_whole_commit(tmp_path: Path) -> None:
    """One of two topics was deleted, and the other topic's half of the transaction became visible."""
    clicks, views = sqlite_topic(tmp_path, "clicks"), sqlite_topic(tmp_path, "views")
    await clicks.create()
    await views.create()
    transactions = await begun(clicks, "t")
    await transactions.write(clicks, OutgoingBatch([b"x" * MiB]))
    await transactions.write(views, OutgoingBatch([b"a"]))
    await clicks.delete()
    await clicks.create()
    with pytest.raises(TopicNotFound, match="'clicks' was deleted"):
        await transactions.commit()
    await transactions.abort()
    assert await read_to_end(views) == []
    assert await read_to_end(clicks) == []
    await write_transaction(transactions, clicks, [b"b"], commit=True)
    assert values_of(await read_to_end(clicks)) == [b"b"]
    await transactions.close()


async def test_a_cancelled_commit_is_done_or_not_but_never_twice(tmp_path: Path) -> None:
    """A commit was done although its waiter was cancelled, and the second try wrote the records again."""
    clicks = await created(sqlite_topic(tmp_path))
    transactions = await clicks.open_transactions("t")
    for number in range(20):
        await transactions.begin()
        await transactions.write(clicks, OutgoingBatch(numbered([number])))
        committing = asyncio.ensure_future(transactions.commit())
        for _ in range(number % 5):
            await asyncio.sleep(0)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        with contextlib.suppress(TopicError):  # "none is open": the cancelled commit was done
            await transactions.commit()
    await transactions.close()
    assert numbers_of(await read_to_end(clicks)) == list(range(20))


async def test_another_file_is_another_commit_domain(tmp_path: Path) -> None:
    """A transaction had records in two files, which cannot be committed at once."""
    other = topic(f"sqlite:///{tmp_path}/other.db?topic=clicks")
    clicks = await created(sqlite_topic(tmp_path))
    await other.create()
    transactions = await begun(clicks, "t")
    with pytest.raises(TopicError, match="commit domain"):
        await transactions.write(other, OutgoingBatch([b"a"]))
    await transactions.close()


# -- queues of one flow ------------------------------------------------------------------------------------


async def test_a_queue_drops_what_a_committed_checkpoint_has_read_and_no_more(tmp_path: Path) -> None:
    """A file grew for ever, or dropped records that a restored job would have read."""
    queue = sqlite_topic(tmp_path)
    await queue.create(settings={"delete_read": "1"})
    for batch in (numbered(range(3)), numbered(range(3, 6))):
        await write(queue, batch)
    reader = await queue.open_reader(ReadRequest())
    await queue.report_positions("flow", {0: 2})
    assert numbers_of(await read_to_end(queue)) == [2, 3, 4, 5]
    assert stored_blocks(tmp_path) == (2, 0)
    await queue.report_positions("flow", {0: 1})  # An older position changes nothing.
    await queue.report_positions("flow", {0: 4})
    assert numbers_of(await read_to_end(queue)) == [4, 5]
    assert stored_blocks(tmp_path) == (1, 0)
    await queue.report_positions("flow", {0: 6})
    assert stored_blocks(tmp_path) == (0, 0)
    assert (await queue.describe()).offsets == {0: (6, 6)}
    await write(queue, numbered(range(6, 7)))
    assert numbers_of(await read_to_end(queue)) == [6]
    with opened(tmp_path) as connection:
        sizes = connection.execute("SELECT partitions.size_bytes, entries.size_bytes FROM partitions JOIN entries")
        assert len(set(sizes.fetchone())) == 1
    await reader.close()


async def test_a_topic_that_is_no_queue_keeps_what_was_read(tmp_path: Path) -> None:
    """The input of a service was deleted behind its checkpoints."""
    clicks = await created(sqlite_topic(tmp_path))
    await write(clicks, numbered(range(3)))
    reader = await clicks.open_reader(ReadRequest())
    await clicks.report_positions("flow", {0: 3})
    await reader.close()
    assert numbers_of(await read_to_end(clicks)) == [0, 1, 2]
