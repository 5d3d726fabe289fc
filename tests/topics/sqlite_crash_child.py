"""Write to a topic until this process is killed, and print the number of acknowledged records.

`test_sqlite_file.py` runs this file as a process: ``sqlite_crash_child.py <url> <way of writing>``.
"""

import asyncio
import itertools
import sys

from streamiter.topics import OutgoingBatch, topic

# The sizes of batches, some of which are larger than a block.
SIZES = (1, 7, 300, 2, 9000, 40)


def batches() -> itertools.chain[OutgoingBatch]:
    """Return endless batches of numbered records; keys spread them over the partitions."""
    count = itertools.count()
    for size in itertools.cycle(SIZES):
        numbers = [next(count) for _ in range(size)]
        yield OutgoingBatch(
            [b"%d" % number + b" " * 100 for number in numbers], keys=[b"%d" % (number % 5) for number in numbers]
        )


async def write_and_flush(url: str) -> None:
    """Write batches, and acknowledge records when they are flushed."""
    writer = await topic(url).open_writer()
    acknowledged = 0
    for batch in batches():
        await writer.write(batch)
        await writer.flush()
        acknowledged += len(batch)
        print(acknowledged, flush=True)


async def commit_transactions(url: str) -> None:
    """Commit transactions, and acknowledge records when they are committed.

    Large transactions are staged, because they are larger than a block.
    """
    clicks = topic(url)
    transactions = await clicks.open_transactions("crash")
    acknowledged = 0
    for batch in batches():
        await transactions.begin()
        for start in range(0, len(batch), 3000):
            part = slice(start, start + 3000)
            await transactions.write(clicks, OutgoingBatch(batch.values[part], keys=batch.keys[part]))
        await transactions.commit()
        acknowledged += len(batch)
        print(acknowledged, flush=True)


if __name__ == "__main__":
    ways = {"flush": write_and_flush, "transactions": commit_transactions}
    asyncio.run(ways[sys.argv[2]](sys.argv[1]))
