"""What a stream brought in its last round."""

from __future__ import annotations

from typing import Any

from streamiter.flow.stream import Stream
from streamiter.iteration.checks import check_body_stream
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["LastRound", "last_round"]


def last_round(stream: Stream, *, name: str | None = None) -> Stream:
    """At the end of the iteration, the records of the last round that brought any, each at its own subtask.

    So a variable comes out as it was at the end, whatever was fed back before. In memory, round by round.

    Raises GraphError for what is no stream of a body.

    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination
    >>> flow = Flow("count to five")
    >>> def body(variables, data):
    ...     raised = variables[0].map(lambda x: x + 1)
    ...     return IterationBodyResult([raised.filter(lambda x: x < 5)], [last_round(raised)])
    >>> [last] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    >>> collected = last.collect()
    >>> flow.run().state, collected.items
    ('finished', [5])
    """
    check_body_stream(stream, "last_round(stream)")

    def make() -> LastRound:
        return LastRound()

    make.__name__ = "last_round"
    return stream.process(make, name=name)


class LastRound(Operator, IterationListener):
    """Keeps the records of the latest epoch, and emits them at the end."""

    def __init__(self) -> None:
        self._epoch = -1
        self._batches: list[Batch] = []

    def open(self, context: Context) -> None:
        self._context = context

    def process_batch(self, batch: Batch, out: Output) -> None:
        epoch = self._context.epoch or 0
        if epoch > self._epoch:
            self._epoch = epoch
            self._batches = []
        if epoch == self._epoch:
            self._batches.append(batch)

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        for batch in self._batches:
            out.emit_batch(batch)

    def snapshot(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches": list(self._batches)}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._batches = list(state["batches"])
