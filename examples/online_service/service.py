"""The parts that the three programs share: the topics, the events, and the end of a program.

Environment variables, the same for each program::

    KAFKA               127.0.0.1:9092        host:port of a broker (more of them: host:port,host:port)
    EVENTS_TOPIC        flights               departures and arrivals, in the order of time
    UPDATES_TOPIC       model-updates         every state of the model
    DEAD_LETTERS_TOPIC  flights-dead-letters  events that the trainer cannot decode
    MODEL               late-flights          the model's name in the topic of updates
    PARTITIONS          1                     of the events
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, NamedTuple

import msgspec

from streamiter import topic
from streamiter.errors import TopicUnavailable
from streamiter.topics import Topic

KAFKA = os.environ.get("KAFKA", "127.0.0.1:9092")
MODEL = os.environ.get("MODEL", "late-flights")
PARTITIONS = int(os.environ.get("PARTITIONS", "1"))

# Kafka keeps a day of events, and deletes them in files of 64 MB.
EVENTS_SETTINGS = {"retention.ms": "86400000", "segment.bytes": "67108864"}
# Kafka keeps the last update for ever, and earlier ones for a day, so that one can roll back to yesterday's model.
UPDATES_SETTINGS = {
    "cleanup.policy": "compact",
    "segment.bytes": "16777216",
    "min.compaction.lag.ms": "86400000",
    "max.compaction.lag.ms": "90000000",
}


class Departure(msgspec.Struct, tag_field="event", tag="departure"):
    """A flight at its scheduled departure: will it be late?"""

    flight: str
    carrier: str
    origin: str
    dest: str
    hour: int
    weekday: int
    month: int
    distance: int


class Arrival(msgspec.Struct, tag_field="event", tag="arrival"):
    """The arrival of a flight, hours later: its delay in minutes."""

    flight: str
    delay: int


class Topics(NamedTuple):
    """The topics of the service."""

    events: Topic
    updates: Topic
    dead_letters: Topic


def topics() -> Topics:
    """Return the topics without connecting to Kafka."""
    return Topics(
        _topic("EVENTS_TOPIC", "flights"),
        _topic("UPDATES_TOPIC", "model-updates"),
        _topic("DEAD_LETTERS_TOPIC", "flights-dead-letters"),
    )


async def created_topics() -> Topics:
    """Create the topics that do not exist, after waiting until Kafka answers; return all topics."""
    events, updates, dead_letters = all_topics = topics()
    while True:
        try:
            await events.create(partitions=PARTITIONS, settings=EVENTS_SETTINGS)
            await updates.create(settings=UPDATES_SETTINGS)
            await dead_letters.create()
        except TopicUnavailable as error:
            print(f"Kafka is not up yet, trying again: {error}", flush=True)
            await asyncio.sleep(1.0)
        else:
            return all_topics


def until_terminated(program: Coroutine[Any, Any, None]) -> bool:
    """Run a program to its end; return whether SIGTERM or Ctrl-C has cancelled it."""
    return asyncio.run(_until_terminated(program))


async def _until_terminated(program: Coroutine[Any, Any, None]) -> bool:
    task = asyncio.ensure_future(program)
    for number in (signal.SIGTERM, signal.SIGINT):
        # In the background of a script Ctrl-C is ignored, because the user does not mean this program.
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


def _topic(variable: str, default: str) -> Topic:
    return topic(f"kafka://{KAFKA}/{os.environ.get(variable, default)}")
