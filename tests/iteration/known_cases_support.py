"""The inputs and the feedback path that the cases of the reference implementation share."""

from __future__ import annotations

import asyncio
from typing import Any

from iteration.iteration_support import CutItems

from streamiter import Flow, Operator, OutputTag, Stream

OUTPUT = OutputTag("output")
INSTANCES = 4
NUMBERS = 250
"""The reference implementation takes 1000, which takes four times as long and tests the same."""
SUM = INSTANCES * sum(range(NUMBERS))
TOTAL = INSTANCES * NUMBERS


class SequenceSource(CutItems):
    """Gives 0..n−1 in each parallel instance, and then ends or waits forever."""

    def open(self, context: Any, positions: Any) -> None:
        super().open(context, positions)
        self._items = range(NUMBERS)
        self._random.seed(self._seed * 1_000 + context.subtask_index)


def sequence(flow: Flow, seed: int, *, ends: bool = True) -> Stream:
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    class Endless(SequenceSource):
        bounded = False

    def make() -> SequenceSource:
        return SequenceSource([], seed) if ends else Endless([], seed, at_end=never)

    make.bounded = ends  # type: ignore[attr-defined]
    return flow.from_source(make, parallelism=INSTANCES)


def nothing(flow: Flow) -> Stream:
    return flow.from_items([], parallelism=INSTANCES)


class Count(Operator):
    """Counts the records of each key, and passes them on."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, value: int, out: Any) -> None:
        self._context.state["seen"] = self._context.state.get("seen", 0) + 1
        out.emit(value)


def feedback_path(stream: Stream) -> Stream:
    """Send the stream by value % 4 through a map and a keyed counter."""
    spread = stream.partition_by(lambda value: value % INSTANCES).map(lambda value: value, parallelism=INSTANCES)
    return spread.key_by(lambda value: value).process(Count, parallelism=INSTANCES)
