"""Open a transaction, write into it, and continue on request, like a replaced run that wakes up.

`contract_transactions.py` runs this file as a process: ``zombie_child.py <url> <transactional id>``. It prints
``open`` when the transaction is open, waits for a line, and prints the errors of the next calls.
"""

import asyncio
import sys

from streamiter.errors import TopicError
from streamiter.topics import OutgoingBatch, topic

# Larger than a block of a file, and than a request to a server, so that a part is stored before the commit.
LARGE = b"zombie" + b" " * (1 << 19)
BATCHES = 4


async def main(url: str, transactional_id: str) -> None:
    outputs = topic(url)
    transactions = await outputs.open_transactions(transactional_id)
    await transactions.begin()
    for _ in range(BATCHES):
        await transactions.write(outputs, OutgoingBatch([LARGE]))
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for call in (lambda: transactions.write(outputs, OutgoingBatch([LARGE])), transactions.commit, transactions.begin):
        try:
            await call()
        except TopicError as error:
            print(type(error).__name__, flush=True)
        else:
            print("nothing", flush=True)
    await transactions.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
