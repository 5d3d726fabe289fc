"""Small flows for tests of graphs: a source that tests feed, an operator that emits its input, and the body of a
loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from streamiter import Flow, IterationBodyResult, Operator, Stream, iterate_unbounded_streams, topic
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch


class Fed(Source):
    """A source that gives one batch for each call of ``give``, and ends with ``end``. Its position is a count."""

    bounded = False

    def __init__(self) -> None:
        self._batches: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        self.brought = 0
        self.closed = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        self.began_at = dict(positions) if positions is not None else None

    async def read(self) -> SourceBatch | None:
        batch = await self._batches.get()
        if batch is None:
            return None
        self.brought += len(batch)
        return SourceBatch(batch, {"brought": self.brought})

    def close(self) -> None:
        self.closed += 1

    def give(self, *records: Any) -> None:
        """Give one batch of these records."""
        self._batches.put_nowait(list(records))

    def end(self) -> None:
        """End the source."""
        self._batches.put_nowait(None)


class Pass(Operator):
    def process(self, record: Any, out: Output) -> None:
        out.emit(record)


CLICKS = topic("memory://clicks")


def stream() -> Stream:
    """Return a stream of a new flow."""
    return Flow("f").from_items([1])


def in_body(step: Callable[[Flow, Stream], Any]) -> None:
    """Call ``step`` in the body of an iteration of a new flow, with the flow and the variable."""
    flow = Flow("f")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step(flow, variables[0])
        return IterationBodyResult(variables, variables)

    iterate_unbounded_streams([flow.from_items([0])], [], body)
