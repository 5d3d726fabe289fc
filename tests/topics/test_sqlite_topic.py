"""Topics in an SQLite file handle damage, staging, polling and retention."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sqlite3
import sys
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from support.processes import async_process
from support.soak import ForEachSeed
from support.waiting import until
from topics.topic_case import (
    ManualClock,
    numbered,
    numbers_of,
    patiently,
    read_count,
    read_to_end,
    values_of,
    write,
    write_and_flush,
    write_transaction,
)

from streamiter import Flow
from streamiter.errors import (
    JobFailed,
    OffsetOutOfRange,
    ProducerFenced,
    TopicDenied,
    TopicError,
    TopicNotFound,
    TopicUnavailable,
    TransactionExpired,
)
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, connector_for, topic

MiB = 1 << 20
PAGE_BYTES = 4096
TOPICS = ("clicks", "sums", "views")


def sqlite_topic(folder: Path, name: str = "clicks", **options: object) -> Topic:
    return topic(f"sqlite:///{folder}/topics.db?topic={name}", **options)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the file as any SQLite tool does."""
    connection = sqlite3.connect(folder / "topics.db", isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def stored_blocks(folder: Path) -> tuple[int, int]:
    """Return the number of blocks, and how many of them are staged."""
    with opened(folder) as connection:
        [blocks] = connection.execute("SELECT count(*) FROM blocks").fetchone()
        [staged] = connection.execute("SELECT count(*) FROM staged").fetchone()
        return blocks, staged


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- the file ----------------------------------------------------------------------------------------------


async def test_the_error_about_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    """The opening of a missing file left an empty file behind, and the next error was another one."""
    clicks = sqlite_topic(tmp_path)
    for call in (clicks.describe, clicks.open_writer, clicks.delete):
        with pytest.raises(TopicNotFound, match=r"'clicks'.*topics\.db: expected a file of topics, found none"):
            await call()
    assert files_in(tmp_path) == []
    assert await connector_for(clicks.url).list_topics(clicks.url, {}) == []


async def test_the_error_about_a_missing_topic_names_the_existing_topics(tmp_path: Path) -> None:
    """The error about a misspelt topic did not name the topics of the file."""
    await sqlite_topic(tmp_path, "clicks").create()
    await sqlite_topic(tmp_path, "views").create()
    with pytest.raises(TopicNotFound, match=r"'click' .*there are: clicks, views\. Create it with"):
        await sqlite_topic(tmp_path, "click").describe()


async def test_a_file_without_topics_is_left_unchanged(tmp_path: Path) -> None:
    """A path was misspelt, and a user's data was turned into a log."""
    text = b"not a database, but long enough to be looked at: " + b"x" * 5000
    (tmp_path / "topics.db").write_bytes(text)
    with pytest.raises(TopicError, match="expected a file of topics"):
        await sqlite_topic(tmp_path).create()
    assert (tmp_path / "topics.db").read_bytes() == text
    (tmp_path / "topics.db").unlink()
    with opened(tmp_path) as connection:
        connection.execute("CREATE TABLE customers (name)")
    with pytest.raises(TopicError, match="SQLite database of something else"):
        await sqlite_topic(tmp_path).create()
    with opened(tmp_path) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("customers",)]


@dataclass(frozen=True)
class WholeFile:
    """A folder with a file of about 50 pages, in which each table has rows, and the file's whole content."""

    folder: Path
    content: list[object]


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> WholeFile:
    folder, copy = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("copy")
    asyncio.run(_fill(folder))
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return WholeFile(folder, asyncio.run(_all_of(copy)))


async def _fill(folder: Path) -> None:
    for name in TOPICS:
        topic = sqlite_topic(folder, name)
        await topic.create(partitions=2)
        for block in range(8):
            await write(topic, OutgoingBatch([b"%d %s" % (block, name.encode() * 20)] * 20, keys=[b"k"] * 20))
        transactions = await topic.open_transactions(f"t-{name}")
        await write_transaction(transactions, topic, [b"in a transaction"] * 5, commit=True)
        await transactions.close()


async def _all_of(folder: Path) -> list[object]:
    """Read everything from a file, then write to it in every way."""
    topics = [sqlite_topic(folder, name) for name in TOPICS]
    found: list[object] = [await connector_for("sqlite:").list_topics(f"sqlite:///{folder}/topics.db", {})]
    for each in topics:
        found.append(await each.describe())
        found.append(sorted(await read_to_end(each), key=lambda record: (record.partition, record.offset)))
    for each in topics:
        await write(each, [b"new"])
        transactions = await each.open_transactions(f"t-{each.name}")
        try:
            await write_transaction(transactions, each, [b"new"], commit=True)
        finally:
            await transactions.close()
    return found


def _damage(file: Path, random: Random) -> None:
    """Damage the file as disks, cables and backups do."""
    content = bytearray(file.read_bytes())
    place, page = random.randrange(len(content)), random.randrange(len(content) // PAGE_BYTES) * PAGE_BYTES
    match random.choice(["bits", "bytes", "zeros", "page", "page of zeros", "cut", "header"]):
        case "bits":
            content[place] ^= 1 << random.randrange(8)
        case "bytes":
            content[place : place + 64] = random.randbytes(len(content[place : place + 64]))
        case "zeros":
            content[place : place + 512] = bytes(len(content[place : place + 512]))
        case "page":
            content[page : page + PAGE_BYTES] = random.randbytes(PAGE_BYTES)
        case "page of zeros":
            content[page : page + PAGE_BYTES] = bytes(PAGE_BYTES)
        case "cut":
            del content[max(place, 1) :]
        case "header":
            content[:100] = random.randbytes(100)
    file.write_bytes(content)


async def check_damage(whole_file: WholeFile, folder: Path, seed: int) -> bool:
    """Return whether damage was found; if it was not, check that the records are unchanged."""
    shutil.copytree(whole_file.folder, folder)
    _damage(folder / "topics.db", Random(seed))
    found, error = await _outcome(_all_of(folder))
    shutil.rmtree(folder)
    if error is None:
        assert found == whole_file.content
    else:
        assert re.search(r"topics\.db: .*(is damaged \(|is damaged at its beginning).*restore it", str(error))
    return error is not None


async def _outcome(asking: Awaitable[list[object]]) -> tuple[list[object], TopicError | None]:
    try:
        return await asking, None
    except TopicError as error:
        return [], error


async def test_a_damaged_file_is_called_damaged_and_never_gives_other_records(
    whole_file: WholeFile, tmp_path: Path
) -> None:
    """Of 700 damaged files, 196 gave other or fewer records without an error, and 77 an error of another library."""
    found = [await check_damage(whole_file, tmp_path / "copy", seed) for seed in range(36)]
    assert sum(found) > 25  # other damage is in unused parts of the file


@pytest.mark.soak
def test_damage_anywhere_is_found(whole_file: WholeFile, tmp_path: Path, for_each_soak_seed: ForEachSeed) -> None:
    """Damage at a rare place in the file gave other records without an error."""
    for_each_soak_seed(lambda seed: asyncio.run(check_damage(whole_file, tmp_path / "copy", seed)))


async def test_a_job_names_the_step_the_topic_and_the_file_that_is_damaged(
    whole_file: WholeFile, tmp_path: Path
) -> None:
    """The log said 'database disk image is malformed', and the job had five files."""
    shutil.copytree(whole_file.folder, tmp_path, dirs_exist_ok=True)
    content = bytearray((tmp_path / "topics.db").read_bytes())
    for page in range(PAGE_BYTES, len(content), PAGE_BYTES):
        content[page : page + PAGE_BYTES] = bytes(PAGE_BYTES)
    (tmp_path / "topics.db").write_bytes(content)
    flow = Flow("damaged")
    flow.source(sqlite_topic(tmp_path), name="clicks").collect()
    with pytest.raises(
        JobFailed, match=r"step 'clicks'.*topic 'clicks': .*/topics\.db: the file is damaged .*; restore it from a copy"
    ):
        await (await flow.start()).wait()


async def test_a_changed_block_is_refused(tmp_path: Path) -> None:
    """SQLite itself has no checksums: a changed payload was read as other records."""
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
    await write(clicks, numbered(range(10)))
    with opened(tmp_path) as connection:
        connection.execute("UPDATE blocks SET payload = CAST(replace(payload, '9', '8') AS BLOB)")
    with pytest.raises(TopicError, match="a block of records has a wrong checksum"):
        await read_to_end(clicks)


async def test_a_deleted_or_replaced_file_ends_its_readers_and_writers(tmp_path: Path) -> None:
    """A reader waited for ever in a file that had lost its name, and a writer stored its records in it."""
    clicks = sqlite_topic(tmp_path)
    for replaced in (False, True):
        await clicks.create()
        reader, writer = await clicks.open_reader(ReadRequest()), await clicks.open_writer()
        for name in files_in(tmp_path):
            (tmp_path / name).unlink()
        if replaced:
            await clicks.create()
        for using in (reader.read(), write_and_flush(writer, OutgoingBatch([b"lost"]))):
            with pytest.raises(TopicNotFound, match=r"topic 'clicks'.*was deleted, or replaced"):
                await patiently(using)
        await reader.close()
        with pytest.raises(TopicNotFound, match="was deleted"):
            await writer.close()


async def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    """A file of a later format was read, and gave wrong records."""
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
    with opened(tmp_path) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(TopicError, match="expected format 1, given format 2"):
        await clicks.describe()


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """The error 'unable to open database file' did not name the missing folder."""
    with pytest.raises(TopicError, match=r"the folder .*/absent does not exist"):
        await sqlite_topic(tmp_path / "absent").create()


async def test_a_file_that_cannot_be_written_is_denied(tmp_path: Path) -> None:
    """The error about a file without rights did not name it. The test uses a directory, which no user can open."""
    (tmp_path / "topics.db").mkdir()
    with pytest.raises(TopicDenied, match=r"topics\.db: not allowed to open"):
        await sqlite_topic(tmp_path).describe()


async def test_a_file_is_created_once_by_any_number_of_callers(tmp_path: Path) -> None:
    """Two processes created a file at once, and one of them saw the other's tables before its mark."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        clicks = sqlite_topic(folder)
        await asyncio.gather(*(clicks.create(partitions=count + 1) for count in range(10)))
        assert (await clicks.describe()).partitions == 10


async def test_a_lock_that_is_not_released_is_an_error(tmp_path: Path) -> None:
    """A process that hung with a lock stopped all other processes silently."""
    clicks = sqlite_topic(tmp_path, lock_timeout_s=0.05)
    await clicks.create()
    await write(clicks, [b"before"])
    writer = await clicks.open_writer()
    with opened(tmp_path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        await patiently(writer.write(OutgoingBatch([b"during"])))
        with pytest.raises(TopicUnavailable, match="locked for longer than lock_timeout_s"):
            await patiently(writer.flush())
        assert values_of(await read_to_end(clicks)) == [b"before"]
        connection.execute("ROLLBACK")
    await patiently(writer.close())
    assert values_of(await read_to_end(clicks)) == [b"before", b"during"]


# -- writing -----------------------------------------------------------------------------------------------


async def test_the_event_loop_continues_while_a_commit_waits(tmp_path: Path) -> None:
    """A commit blocked the event loop, and with it all heartbeats of the job."""
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create(partitions=1)
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create(partitions=2, settings={"retention_bytes": str(50_000)})
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
    clicks = sqlite_topic(tmp_path, clock=clock)
    await clicks.create(settings={"retention_ms": "10000"})
    for number in range(6):
        await write(clicks, numbered([number]))
        clock.advance(4.0)
    assert numbers_of(await read_to_end(clicks)) == [3, 4, 5]
    with pytest.raises(OffsetOutOfRange, match="expected 3 to 6"):
        await clicks.open_reader(ReadRequest(positions={0: 2}))


async def test_retention_by_count_is_exact_although_blocks_are_not_cut(tmp_path: Path) -> None:
    """An offset before the start could be read, because its block was still stored."""
    clicks = sqlite_topic(tmp_path)
    await clicks.create(settings={"retention_records": "5"})
    for start in range(0, 12, 4):
        await write(clicks, numbered(range(start, start + 4)))
    assert (await clicks.describe()).offsets == {0: (7, 12)}
    assert numbers_of(await read_to_end(clicks)) == [7, 8, 9, 10, 11]
    assert stored_blocks(tmp_path)[0] == 2


# -- transactions ------------------------------------------------------------------------------------------


async def test_large_transactions_are_staged_and_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Ten seconds of output exceeded the memory, or another flow in the same file waited for them."""
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
    transactions = await clicks.open_transactions("t")
    await transactions.begin()
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
    clicks = sqlite_topic(tmp_path, clock=clock)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path, clock=clock)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path, lock_timeout_s=0.05)
    await clicks.create()
    transactions = await clicks.open_transactions("t")
    await transactions.begin()
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
    transactions = await clicks.open_transactions("t")
    await transactions.begin()
    await transactions.write(clicks, OutgoingBatch([b"x" * MiB]))
    await transactions.write(views, OutgoingBatch([b"a"]))
    await clicks.delete()
    await clicks.create()
    with pytest.raises(TopicNotFound, match="'clicks' was deleted"):
        await transactions.commit()
    await transactions.abort()
    assert await read_to_end(views) == []
    assert await read_to_end(clicks) == []
    await transactions.begin()
    await transactions.write(clicks, OutgoingBatch([b"b"]))
    await transactions.commit()
    assert values_of(await read_to_end(clicks)) == [b"b"]
    await transactions.close()


async def test_a_cancelled_commit_is_done_or_not_but_never_twice(tmp_path: Path) -> None:
    """A commit was done although its waiter was cancelled, and the second try wrote the records again."""
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
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
    clicks = sqlite_topic(tmp_path)
    await clicks.create()
    await other.create()
    transactions = await clicks.open_transactions("t")
    await transactions.begin()
    with pytest.raises(TopicError, match="commit domain"):
        await transactions.write(other, OutgoingBatch([b"a"]))
    await transactions.close()
