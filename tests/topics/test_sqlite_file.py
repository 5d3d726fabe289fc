"""The SQLite file of topics: its form, a kill -9 while it is written, and a full disk."""

import asyncio
import itertools
import random
import re
import shutil
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from support.processes import async_process
from support.soak import ForEachSeed, in_soak
from topics.sqlite_crash_child import SIZES
from topics.sqlite_support import files_in, opened, sqlite_topic
from topics.topic_case import (
    begun,
    by_partition,
    created,
    numbered,
    numbers_of,
    patiently,
    read_to_end,
    values_of,
    write,
    write_and_flush,
    write_transaction,
)

from streamiter import Flow
from streamiter.errors import JobFailed, StorageFull, TopicDenied, TopicError, TopicNotFound, TopicUnavailable
from streamiter.topics import OutgoingBatch, ReadRequest, connector_for, topic

PAGE_BYTES = 4096
TOPICS = ("clicks", "sums", "views")


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
    found = [await check_damage(whole_file, tmp_path / "copy", seed) for seed in range(18)]
    assert sum(found) > 12  # other damage is in unused parts of the file


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


CHILD = Path(__file__).with_name("sqlite_crash_child.py")


async def killed_after(acknowledgements: int, url: str, way: str, more_lines: random.Random) -> int:
    """Kill the child some turns after an acknowledgement, and return the number of records that it acknowledged."""
    command = [sys.executable, CHILD, url, way]
    async with async_process(command, is_forked=True, stdout=asyncio.subprocess.PIPE) as child:
        assert child.stdout is not None
        acknowledged = 0
        for _ in range(acknowledgements):
            acknowledged = int(await patiently(child.stdout.readline()))
        for _ in range(more_lines.randrange(2000)):  # moves the kill to any point of the next commit
            await asyncio.sleep(0)
        child.kill()
        for line in (await patiently(child.stdout.read())).splitlines():
            acknowledged = int(line)
        assert await child.wait() == -9
    return acknowledged


@pytest.mark.parametrize(
    ("way", "acknowledgements"),
    [
        ("flush", 5),
        ("transactions", 2),
        *in_soak(("flush", 1), ("flush", 40), ("transactions", 1), ("transactions", 17)),
    ],
)
async def test_a_killed_writer_leaves_all_acknowledged_records_and_no_torn_batch(
    tmp_path: Path, way: str, acknowledgements: int
) -> None:
    """A killed writer lost records that were acknowledged, and that the engine had reported as safe."""
    clicks = topic(f"sqlite:///{tmp_path}/topics.db?topic=clicks")
    await clicks.create(partitions=3)
    acknowledged = await killed_after(acknowledgements, clicks.url, way, random.Random(acknowledgements))
    records = await read_to_end(clicks)
    # Each batch is complete or absent, and no batch is absent before a complete one.
    assert sorted(numbers_of(records)) == list(range(len(records)))
    assert len(records) >= acknowledged
    assert len(records) in itertools.takewhile(
        lambda total: total <= len(records), itertools.accumulate(itertools.cycle(SIZES), initial=0)
    )
    for part in by_partition(records).values():
        assert [record.offset for record in part] == list(range(len(part)))
    await check_writing_continues(tmp_path, len(records), way)


async def check_writing_continues(folder: Path, count: int, way: str) -> None:
    """Check that the next run writes behind the existing records, and has cleaned up."""
    clicks = topic(f"sqlite:///{folder}/topics.db?topic=clicks")
    if way == "transactions":
        transactions = await clicks.open_transactions("crash")
        await write_transaction(transactions, clicks, [b"%d" % count], commit=True)
        await transactions.close()
    else:
        writer = await clicks.open_writer()
        await writer.write(OutgoingBatch([b"%d" % count]))
        await writer.close()
    assert sorted(numbers_of(await read_to_end(clicks))) == list(range(count + 1))
    connection = sqlite3.connect(folder / "topics.db")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    orphans = connection.execute(
        "SELECT count(*) FROM blocks WHERE id NOT IN (SELECT block_id FROM entries)"
    ).fetchone()
    assert orphans == (0,)
    connection.close()


MiB = 1 << 20


async def test_a_full_disk_stores_nothing_of_the_write_and_the_writer_can_continue(
    small_disk: tuple[Path, Callable[[], bool]],
) -> None:
    """A job stopped on a full disk, and its topics were broken when the disk had room again."""
    disk, give_more_room = small_disk
    clicks = await created(topic(f"sqlite:///{disk}/topics.db?topic=clicks"), partitions=2)
    await write(clicks, [b"before"])
    writer = await clicks.open_writer()
    large = [b"%d" % number + b" " * MiB for number in range(6)]
    await patiently(writer.write(OutgoingBatch(large, partition=0)))
    for _ in range(2):
        with pytest.raises(StorageFull, match=r"disk/topics\.db: no room left .*Make room"):
            await patiently(writer.flush())
    assert values_of(await read_to_end(clicks)) == [b"before"]
    assert (await clicks.describe()).offsets == {0: (0, 1), 1: (0, 0)}
    assert give_more_room()
    await patiently(writer.flush())
    await patiently(writer.close())
    assert values_of(await read_to_end(clicks)) == [b"before", *large]


async def test_a_transaction_on_a_full_disk_can_be_tried_again_or_aborted(
    small_disk: tuple[Path, Callable[[], bool]],
) -> None:
    """Records that were staged before the disk was full were visible alone, or were lost."""
    disk, give_more_room = small_disk
    clicks = await created(topic(f"sqlite:///{disk}/topics.db?topic=clicks"))
    transactions = await begun(clicks, "t")
    large = [b"%d" % number + b" " * (MiB // 2) for number in range(8)]

    async def write_all() -> None:
        for value in large:
            await patiently(transactions.write(clicks, OutgoingBatch([value])))
        await patiently(transactions.commit())

    with pytest.raises(StorageFull):
        await write_all()
    with pytest.raises(StorageFull):
        await patiently(transactions.commit())
    assert await read_to_end(clicks) == []
    assert give_more_room()
    await patiently(transactions.commit())
    written = values_of(await read_to_end(clicks))
    assert written == large[: len(written)]
    assert len(written) > 2
    await patiently(transactions.close())


LIMITED = """
import asyncio, resource, sys
from streamiter.errors import StorageFull
from streamiter.topics import OutgoingBatch, topic

async def main(url):
    writer = await topic(url).open_writer()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
    await writer.write(OutgoingBatch([b"x" * (1 << 20)] * 6))
    try:
        await writer.flush()
    except StorageFull as error:
        print("full:", error)
    try:
        await writer.close()
    except StorageFull:
        print("closed")

asyncio.run(main(sys.argv[1]))
"""


async def test_a_limit_on_file_sizes_counts_as_a_full_disk(tmp_path: Path) -> None:
    """A quota refused a write with another error than a full disk, and the job did not recognize it."""
    clicks = await created(topic(f"sqlite:///{tmp_path}/topics.db?topic=clicks"))
    await write(clicks, [b"before"])
    command = [sys.executable, "-c", LIMITED, clicks.url]
    async with async_process(command, is_forked=True, stdout=asyncio.subprocess.PIPE) as child:
        output, _ = await patiently(child.communicate())
    assert b"no room left" in output
    assert output.endswith(b"closed\n")
    assert child.returncode == 0
    assert values_of(await read_to_end(clicks)) == [b"before"]
