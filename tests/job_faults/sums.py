"""A flow with known outputs, its input, and checks of its committed outputs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import orjson
from support.waiting import PATIENCE_S
from topics.topic_case import patiently, read_to_end

from streamiter import Flow, RocksState
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, TopicReader

__all__ = ["KEYS", "Feed", "Topics", "check_committed", "expected", "feeding", "sums_flow", "until_committed", "write"]

KEYS: Final = 3
# Each test has some hundred records, few enough for two busy cores.
_NUMBERS_PER_TURN: Final = 5
_TURN_S: Final = 0.02


@dataclass(frozen=True)
class Topics:
    """The topics of the flow, with its own handles, and more patient handles for observers."""

    numbers: Topic
    sums: Topic
    watched_numbers: Topic
    watched_sums: Topic

    @classmethod
    def same(cls, numbers: Topic, sums: Topic) -> Topics:
        """Return topics whose observers use the flow's own handles."""
        return cls(numbers, sums, numbers, sums)

    async def create(self) -> None:
        """Create topics with one partition each, so that there is one order."""
        await self.watched_numbers.create()
        await self.watched_sums.create()


def sums_flow(
    name: str,
    topics: Topics,
    *,
    stop: Any = None,
    padding: int = 0,
    source: str = "numbers",
    state: RocksState | None = None,
) -> Flow:
    """Return a flow that emits each number with its key's sum; ``padding`` adds twice as many bytes to each output."""
    flow = Flow(name, state=state)
    numbers = flow.source(topics.numbers, stop=stop, name=source)

    def add(total: int, number: int) -> tuple[int, list[Any]]:
        total += number
        # The padding is random, so that no compression makes it small.
        return total, [number, total, Random(number).randbytes(padding).hex()]

    sums = numbers.key_by(lambda number: number % KEYS).stateful_map(add, 0, name="sum")
    sums.sink(topics.sums, name="sums")
    return flow


def expected(count: int) -> list[list[int]]:
    """Return the outputs of the flow for the numbers below ``count``."""
    totals = [0] * KEYS
    outputs = []
    for number in range(count):
        totals[number % KEYS] += number
        outputs.append([number, totals[number % KEYS]])
    return outputs


class Feed:
    """Writes the numbers 0, 1, 2, … until it is stopped."""

    def __init__(self, numbers: Topic) -> None:
        self._numbers = numbers
        self._is_over = False
        self._has_ended = asyncio.Event()
        self.count = 0

    async def run(self) -> None:
        """Write numbers through all faults of the topic."""
        writer = await patiently(self._numbers.open_writer())
        while not self._is_over:
            await writer.write(_batch(range(self.count, self.count + _NUMBERS_PER_TURN)))
            self.count += _NUMBERS_PER_TURN
            await asyncio.sleep(_TURN_S)  # The pause makes a stream of the numbers.
        await writer.close()
        self._has_ended.set()

    def end(self) -> None:
        """Stop writing."""
        self._is_over = True

    async def ended(self) -> None:
        """Stop writing; return when all written numbers are stored."""
        self.end()
        await patiently(self._has_ended.wait())


@contextlib.asynccontextmanager
async def feeding(numbers: Topic) -> AsyncIterator[Feed]:
    """Write numbers; at the end of the block all of them are stored."""
    feed = Feed(numbers)
    running = asyncio.create_task(feed.run())
    try:
        yield feed
        feed.end()
        await patiently(running)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def write(numbers: Topic, start: int, stop: int) -> None:
    """Write the numbers from ``start`` to ``stop`` at once."""
    writer = await patiently(numbers.open_writer())
    await patiently(writer.write(_batch(range(start, stop))))
    await patiently(writer.close())


def _batch(numbers: range) -> OutgoingBatch:
    return OutgoingBatch([orjson.dumps(number) for number in numbers])


async def until_committed(sums: Topic, count: int | None = None, *, last: int | None = None) -> None:
    """Wait until readers of committed records receive this number of outputs, or the output for the number ``last``."""
    reader: TopicReader = await patiently(sums.open_reader(ReadRequest()))
    try:
        async with asyncio.timeout(PATIENCE_S):
            seen: list[int] = []
            while len(seen) < count if count is not None else last not in seen[-1:]:
                batch = await reader.read()
                assert batch is not None
                seen += [orjson.loads(value or b"")[0] for value in batch.values]
    finally:
        await reader.close()


async def check_committed(sums: Topic, count: int) -> None:
    """Check that the committed outputs are those for the numbers below ``count``, once each, in order."""
    records = [orjson.loads(record.value or b"null")[:2] for record in await read_to_end(sums)]
    assert records == expected(count)
