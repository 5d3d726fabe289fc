"""A full disk causes a clear error and no partial records, and writing continues when the disk has room again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import async_process
from topics.topic_case import begun, created, patiently, read_to_end, values_of, write

from streamiter.errors import StorageFull
from streamiter.topics import OutgoingBatch, topic

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
    async with async_process(command, stdout=asyncio.subprocess.PIPE) as child:
        output, _ = await patiently(child.communicate())
    assert b"no room left" in output
    assert output.endswith(b"closed\n")
    assert child.returncode == 0
    assert values_of(await read_to_end(clicks)) == [b"before"]
