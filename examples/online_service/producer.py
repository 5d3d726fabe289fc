"""Write the flights of 2013 to Kafka as if they left and arrived now; start again after the last one.

    pip install ".[kafka,demo]"
    KAFKA=127.0.0.1:9092 EVENTS_PER_SECOND=100 python examples/online_service/producer.py

Environment variables, in addition to those of service.py::

    EVENTS_PER_SECOND  500   0: as fast as possible
    EVENTS             0     end after so many; 0: run until SIGTERM or Ctrl-C
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import cycle, islice

import msgspec
from service import Arrival, Departure, created_topics, until_terminated

from streamiter.learn.flights import FlightEvents
from streamiter.topics import OutgoingBatch, TopicWriter
from streamiter.values.helpers.clock import SystemClock

EVENTS_PER_SECOND = int(os.environ.get("EVENTS_PER_SECOND", "500"))
EVENTS = int(os.environ.get("EVENTS", "0"))
# Ten batches a second look like a steady stream; without a limit, a batch is as large as those of readers.
BATCH = max(1, EVENTS_PER_SECOND // 10) if EVENTS_PER_SECOND else 8192


async def main() -> None:
    events, *_ = await created_topics()
    writer = await events.open_writer()
    try:
        await write_paced(writer)
    finally:
        await writer.close()


async def write_paced(writer: TopicWriter) -> None:
    """Write each batch when it is due, and print a line after every hundred batches."""
    flights = FlightEvents()
    print(f"{len(flights)} events of {flights.flights} flights, {EVENTS_PER_SECOND or 'all'} a second", flush=True)
    clock = SystemClock()
    started_s, written = clock.monotonic_s(), 0
    for number, batch in enumerate(batches(flights), start=1):
        await writer.write(batch)
        written += len(batch)
        if number % 100 == 0:
            print(f"{written} events written", flush=True)
        due_s = started_s + written / EVENTS_PER_SECOND if EVENTS_PER_SECOND else 0.0
        await asyncio.sleep(max(0.0, due_s - clock.monotonic_s()))
    await writer.flush()
    print(f"{written} events written, done", flush=True)


def batches(flights: FlightEvents) -> Iterator[OutgoingBatch]:
    """Return the events again and again, in batches. The key is the flight, so both its events are in one partition.

    The time of a record is the time of its writing: with the time of its event, Kafka would delete it as too old.
    """
    flight_of = msgspec.json.Decoder(Departure | Arrival).decode
    endless = (value for _ in cycle([None]) for batch in flights.batches() for value in batch.values if value)
    values = islice(endless, EVENTS or None)
    while some := list(islice(values, BATCH)):
        yield OutgoingBatch(some, keys=[flight_of(value).flight.encode() for value in some])


if __name__ == "__main__":
    if until_terminated(main()):
        print("stopped", flush=True)
