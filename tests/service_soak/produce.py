"""The producer: writes numbered events at a steady rate, and continues after the last one that is in the topic.

``python -m service_soak.produce TOPIC EVENTS_PER_SECOND``, until SIGTERM. Each tenth of a second is a transaction. A
killed producer leaves one open: the next producer aborts it, or learns that it was committed.
"""

import asyncio
import signal
import sys
from typing import Final

from service_soak.events import event, number_of

from streamiter import topic
from streamiter.topics import OutgoingBatch, ReadRequest, Topic
from streamiter.values.helpers.clock import SystemClock

_BATCH_S: Final = 0.1
# More than the records of a transaction, and the markers of many that were aborted.
_LAST_OFFSETS: Final = 20_000


async def main(url: str, events_per_s: int) -> None:
    events, clock = topic(url), SystemClock()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    transactions = await events.open_transactions("soak producer", timeout_s=20.0)
    try:
        number = await next_number(events)
        print(f"continues with event {number}", flush=True)
        due_s, size = clock.monotonic_s(), max(1, round(events_per_s * _BATCH_S))
        while not stopped.is_set():
            await transactions.begin()
            batch = OutgoingBatch([event(each) for each in range(number, number + size)])
            await transactions.write(events, batch)
            await transactions.commit()
            number += size
            due_s = max(due_s + _BATCH_S, clock.monotonic_s() - _BATCH_S)  # What an outage delayed is not made up for.
            await asyncio.sleep(due_s - clock.monotonic_s())
        print(f"stopped before event {number}", flush=True)
    finally:
        await transactions.close()


async def next_number(events: Topic) -> int:
    """Return the number after that of the last committed event."""
    start, end = (await events.describe()).offsets[0]
    reader = await events.open_reader(ReadRequest(start={0: max(start, end - _LAST_OFFSETS)}, stop={0: end}))
    number = 0
    try:
        while (batch := await reader.read()) is not None:
            number = number_of(batch.values[-1] or b"") + 1
    finally:
        await reader.close()
    return number


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
