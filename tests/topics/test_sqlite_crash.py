"""A kill -9 during writing to a file loses no acknowledged record, and tears no batch."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import sys
from pathlib import Path

import pytest
from support.processes import async_process
from topics.sqlite_crash_child import SIZES
from topics.topic_case import by_partition, numbers_of, patiently, read_to_end, write_transaction

from streamiter.topics import OutgoingBatch, topic

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
    [*itertools.product(["flush"], [1, 5, 40]), *itertools.product(["transactions"], [1, 2, 17])],
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
