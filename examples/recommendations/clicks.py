"""Write the views and clicks of a shop to a topic: generated events, the same ones for each seed.

    pip install ".[kafka,service]"
    TOPIC=kafka://127.0.0.1:9092/clicks python examples/recommendations/clicks.py

A view is a question, and a click on it, five seconds later, its answer. Each user likes some kinds of items, and each
item is of some kinds: so neither the user alone nor the item alone says much about a click. Users and items come and
go: in 20,000 views, one in twenty of them is replaced. Twenty thousand views are a day of the shop, too.

Environment variables::

    TOPIC              kafka://127.0.0.1:9092/clicks   the topic of the events; it is created
    MODELS             none                            the topic of the model's versions; created, too, if it is given
    EVENTS_PER_SECOND  500                             0: as fast as possible, with the times of 500
    VIEWS              0                               end after so many views; 0: run until SIGTERM or Ctrl-C
    CHOICES            0                               1: only what users choose, for choices.toml
    SEED               1                               of the events
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import Any

from streamiter import topic
from streamiter.errors import TopicUnavailable
from streamiter.topics import OutgoingBatch, Topic

USERS, ITEMS, KINDS = 200, 100, 3
# The share of clicks is about a fifth.
AVERAGE = -2.2
CHURN = 1 / 20
VIEWS_A_DAY = 20_000
PER_SECOND = 500
CLICK_AFTER_MS = 5_000


@dataclass
class Shop:
    """The users and items of a shop, and its views in the order of time."""

    seed: int = 1
    per_second: int = PER_SECOND
    tastes: dict[str, list[float]] = field(default_factory=dict)
    """By user and by item, how much of each kind there is."""

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._numbers = itertools.count()
        self.users = [self._new("u") for _ in range(USERS)]
        self.items = [self._new("i") for _ in range(ITEMS)]

    def _new(self, letter: str) -> str:
        name = f"{letter}{next(self._numbers)}"
        self.tastes[name] = [self._random.gauss(0.0, 1.0) for _ in range(KINDS)]
        return name

    def chance(self, user: str, item: str, hour: int) -> float:
        """Return the probability of a click."""
        liked = sum(a * b for a, b in zip(self.tastes[user], self.tastes[item], strict=True))
        return 1.0 / (1.0 + exp(-(AVERAGE + liked + (0.5 if hour >= 18 else 0.0))))

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield views and clicks without end; their times are in milliseconds, from 0 on."""
        random = self._random
        waiting: list[dict[str, Any]] = []
        for number in itertools.count():
            at = number * 1_000 // self.per_second
            while waiting and waiting[0]["at"] <= at:
                yield waiting.pop(0)
            if random.random() < CHURN * (USERS + ITEMS) / VIEWS_A_DAY:
                names, letter = random.choice([(self.users, "u"), (self.items, "i")])
                names[random.randrange(len(names))] = self._new(letter)
            user, item, hour = random.choice(self.users), random.choice(self.items), number * 24 // VIEWS_A_DAY % 24
            view = {"event": "view", "view": str(number), "at": at, "user": user, "item": item, "hour": str(hour)}
            yield view
            if random.random() < self.chance(user, item, hour):
                waiting.append({"event": "click", "view": str(number), "at": at + CLICK_AFTER_MS})

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yield what users choose, without what they have seen, as purchases are known."""
        for event in self.events():
            if event["event"] == "view":
                chosen = {name: event[name] for name in ("user", "item", "hour", "at")}
                if self._random.random() < self.chance(event["user"], event["item"], int(event["hour"])):
                    yield chosen


async def main() -> None:
    """Write events, paced."""
    per_second, views = int(os.environ.get("EVENTS_PER_SECOND", "500")), int(os.environ.get("VIEWS", "0"))
    clicks = topic(os.environ.get("TOPIC", "kafka://127.0.0.1:9092/clicks"))
    for each in [clicks, *(topic(url) for url in [os.environ.get("MODELS")] if url)]:
        await create(each)
    shop = Shop(int(os.environ.get("SEED", "1")), per_second or PER_SECOND)
    events = shop.choices() if os.environ.get("CHOICES") == "1" else shop.events()
    await write(events, clicks, per_second, views)


async def create(given: Topic) -> None:
    """Create a topic if it does not exist, after waiting until it answers."""
    while True:
        try:
            await given.create()
        except TopicUnavailable as error:
            print(f"the topic does not answer yet, trying again: {error}", flush=True)
            await asyncio.sleep(1.0)
        else:
            return


async def write(events: Iterator[dict[str, Any]], clicks: Topic, per_second: int = 0, views: int = 0) -> None:
    """Write events: so many a second, with times from now on, and so many views, or choices; 0: without a limit.

    Without a limit of events a second, the last of the views is seen now.
    """
    writer = await clicks.open_writer()
    began_ms = int(time.time() * 1000) - (0 if per_second else views * 1_000 // PER_SECOND)
    began_s, written, seen = time.monotonic(), 0, 0
    while not views or seen < views:
        batch = list(itertools.islice(events, max(1, per_second // 10) if per_second else 1_000))
        seen += sum(event.get("event") != "click" for event in batch)
        values = [json.dumps({**event, "at": began_ms + event["at"]}).encode() for event in batch]
        await writer.write(
            OutgoingBatch(values, keys=[event.get("view", event.get("user")).encode() for event in batch])
        )
        written += len(batch)
        await asyncio.sleep(max(0.0, began_s + written / per_second - time.monotonic()) if per_second else 0.0)
    await writer.close()
    print(f"{written} events written, of {seen} views", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
