"""Termination criteria: after some rounds, or when a loss is small enough."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from streamiter.errors import ConfigurationError, GraphError
from streamiter.flow.stream import Stream
from streamiter.iteration.checks import check_body_stream
from streamiter.numbers import whole_number
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened

__all__ = ["TerminateAfter", "terminate_after"]


def terminate_after(
    stream: Stream, *, rounds: int, tolerance: float | None = None, name: str | None = None
) -> Stream:
    """Termination criteria that end a bounded iteration after ``rounds`` rounds: callbacks 0 … ``rounds`` - 1.

    ``stream`` is any stream of the body. With a ``tolerance`` its records are losses, and the iteration also
    ends after the first round in which they sum to that or less.

    Raises GraphError for what is no stream of a body, no rounds or no tolerance; the job ends where there is a
    tolerance and a record is no number (arrays of one number are).

    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination
    >>> flow = Flow("halve")
    >>> def body(variables, data):
    ...     halved = variables[0].map(lambda x: x / 2)
    ...     return IterationBodyResult([halved], [halved], terminate_after(halved, rounds=100, tolerance=0.5))
    >>> [halved] = iterate_bounded_streams_until_termination([flow.from_items([4.0])], [], body)
    >>> collected = halved.collect()
    >>> flow.run().state, collected.items
    ('finished', [2.0, 1.0, 0.5, 0.25])
    """
    check_body_stream(stream, "terminate_after(stream, …)")
    label = name or "terminate_after"
    remedy = "epoch 0 never ends an iteration: write rounds=1 for a single round"
    rounds = whole_number(f"{label}(rounds=)", rounds, 1, error=GraphError, remedy=remedy)
    if tolerance is not None and not _is_number(tolerance):
        raise GraphError(
            f"{label}: expected tolerance to be a number, given {tolerance!r}; leave it out for none"
        )

    def make() -> TerminateAfter:
        return TerminateAfter(rounds, tolerance)

    make.__name__ = "terminate_after"
    return stream.process(make, name=name, parallelism=1)


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and not math.isnan(given)


def _loss(record: Any) -> float:
    if isinstance(record, (float, int)):  # Most are, and it is a quarter of the work.
        return float(record)
    value = record.item() if isinstance(record, (np.ndarray, np.generic)) and record.size == 1 else record
    try:
        if hasattr(type(value), "__float__"):  # A text has none, although float() would read it.
            return float(value)
    except (TypeError, ValueError):  # An array of several numbers.
        pass
    raise ConfigurationError(
        f"terminate_after(stream, …): tolerance expected records that are numbers, given {shortened(record)}; write "
        "terminate_after(stream.map(f), …) with an f that gives the loss of a record"
    )


class TerminateAfter(Operator, IterationListener):
    """Emits a record in the callback of each round after which the iteration is to go on."""

    def __init__(self, rounds: int, tolerance: float | None) -> None:
        self._rounds = rounds
        self._tolerance = tolerance
        self._losses: dict[int, float] = {}

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        if self._tolerance is not None:
            epoch = self._context.epoch or 0
            self._losses[epoch] = self._losses.get(epoch, 0.0) + _loss(record)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        loss = self._losses.pop(epoch_watermark, math.inf)
        is_good_enough = self._tolerance is not None and loss <= self._tolerance
        if epoch_watermark + 1 < self._rounds and not is_good_enough:
            out.emit(epoch_watermark)

    def snapshot(self) -> list[tuple[int, float]]:
        return list(self._losses.items())

    def restore(self, state: list[tuple[int, float]]) -> None:
        self._losses = dict(state)
