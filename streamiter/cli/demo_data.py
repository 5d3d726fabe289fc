"""The flights in the demo's topic: written once, and recognised again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.learn.flights.events import FlightEvents, Labels
from streamiter.topics import Headers, OutgoingBatch, ReadRequest, Topic, topic

__all__ = ["UPDATES_BYTES", "Contents", "DemoTopics", "flights_in_topic", "start_over", "write_flights"]

DATABASE: Final = "streamiter.db"

# A header of the first record of the events tells what they are, so that they can be used again.
_HEADER: Final = "streamiter_demo"

# The demo's own transactions; a run that was killed leaves one open, and the next takes its id over.
_TRANSACTIONAL_ID: Final = "streamiter demo"
# Many times what writing takes on a slow disk.
_WRITING_TIMEOUT_S: Final = 600.0

# What is kept of the updates: about 15,000, more than two runs of the demo with mini-batches of 100. With smaller
# ones there are up to 327,346, over a gigabyte.
UPDATES_BYTES: Final = 64 << 20


class Contents(msgspec.Struct, frozen=True):
    """What events were asked for: ``flights`` None is all."""

    labels: Labels
    flights: int | None


@dataclass(frozen=True)
class DemoTopics:
    """The topics of the demo, all in one file."""

    database: Path
    flights: Topic
    updates: Topic
    validation: Topic

    @classmethod
    def in_directory(cls, directory: Path) -> DemoTopics:
        """Those in ``directory``, which need not be there yet."""
        database = directory / DATABASE
        url = f"sqlite:///{quote(str(database))}?topic="
        return cls(database, topic(f"{url}flights"), topic(f"{url}model-updates"), topic(f"{url}validation"))

    def check_directory(self) -> None:
        """Raise ``ConfigurationError`` where the directory cannot be, without making it."""
        directory = self.database.parent
        there = next(folder for folder in (directory, *directory.parents) if folder.exists())
        if not there.is_dir():
            raise ConfigurationError(f"--directory {directory}: it cannot be made: {there} is a file")

    async def create(self) -> None:
        """Make the directory, the file and the topics, as far as they are not there."""
        try:
            self.database.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--directory {self.database.parent}: it cannot be made: {error.strerror}"
            ) from error
        await self.flights.create()
        await self.updates.create(settings={"retention_bytes": str(UPDATES_BYTES)})
        await self.validation.create()


class _Found(msgspec.Struct, frozen=True):
    """What the header says: what was asked for, and how many events and flights there are."""

    contents: Contents
    events: int
    flights: int


async def flights_in_topic(topics: DemoTopics, wanted: Contents) -> tuple[int, int] | None:
    """How many events and flights there are, or None where other ones (or none) are there, to be written anew.

    Raises ``ConfigurationError`` where the topic holds what the demo has not written.
    """
    found = await _found(topics)
    return (found.events, found.flights) if found is not None and found.contents == wanted else None


async def start_over(topics: DemoTopics) -> bool:
    """Delete the demo's topics, if it has written there before; the events last, as they are what tells."""
    found = await _found(topics)
    if found is not None:
        for each in (topics.updates, topics.validation, topics.flights):
            await _delete(each)
    return found is not None


async def write_flights(
    topics: DemoTopics, wanted: Contents, events: FlightEvents, on_written: Callable[[int], None]
) -> None:
    """Write the events, all or none, in place of other ones of the demo.

    ``on_written(count)`` is told how many so far.
    """
    if await _found(topics) is not None:
        await _delete(topics.flights)
    await topics.create()
    header = msgspec.json.encode(_Found(wanted, len(events), events.flights))
    transactions = await topics.flights.open_transactions(_TRANSACTIONAL_ID, timeout_s=_WRITING_TIMEOUT_S)
    try:
        await transactions.begin()
        written = 0
        for batch in events.batches():
            await transactions.write(topics.flights, batch if written else _with_header(batch, header))
            written += len(batch)
            on_written(written)
        await transactions.commit()
    finally:
        await transactions.close()


def _with_header(batch: OutgoingBatch, header: bytes) -> OutgoingBatch:
    headers = [((_HEADER, header),), *[()] * (len(batch) - 1)]
    return OutgoingBatch(
        batch.values, headers=headers, timestamps_ms=batch.timestamps_ms, partition=batch.partition
    )


async def _delete(one: Topic) -> None:
    try:
        await one.delete()
    except TopicNotFound:
        return


async def _found(topics: DemoTopics) -> _Found | None:
    """What the demo has written there; None for nothing at all."""
    if not topics.database.exists():
        return None
    try:
        description = await topics.flights.describe()
    except TopicNotFound:
        return None
    records = sum(end - start for start, end in description.offsets.values())
    if not records:
        return None
    header = dict(await _first_headers(topics.flights)).get(_HEADER)
    if header is None:
        raise _not_ours(topics.flights, "records without its mark")
    found = msgspec.json.decode(header, type=_Found)
    if found.events != records:
        raise _not_ours(topics.flights, f"{records:,} records instead of its {found.events:,}")
    return found


async def _first_headers(flights: Topic) -> Headers:
    reader = await flights.open_reader(ReadRequest(start="earliest", stop="latest", max_records=1))
    try:
        batch = await reader.read()
        return () if batch is None else batch.headers[0]
    finally:
        await reader.close()


def _not_ours(flights: Topic, given: str) -> ConfigurationError:
    return ConfigurationError(
        f"{flights.url}: expected a topic that the demo has written, given {given}; use another --directory"
    )
