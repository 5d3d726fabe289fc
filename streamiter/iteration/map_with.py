"""Data handled with the value that a variable has in its epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamiter.errors import ConfigurationError, GraphError
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.checks import check_body_stream
from streamiter.iteration.rounds import for_each_epoch
from streamiter.operators.context import Context
from streamiter.operators.functions import checked_batch
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["MapWith", "map_with"]


def map_with(
    data: Stream,
    variable: Stream,
    f: Callable[[Any, Any], Batch],
    *,
    name: str | None = None,
    parallelism: int | None = None,
) -> Stream:
    """``f(value, batch)`` for each transport batch of ``data``, with the value of ``variable`` in its epoch.

    ``variable`` brings at most one value in each epoch, which goes to all subtasks; in an epoch without one the
    last before it holds. Epochs are handled in order, and data waits for the value. Where transport batches
    are cut carries no meaning. In the body of a bounded iteration, mostly with replayed data.

    Raises GraphError for what are no streams of a body or no function, and for a variable whose values come when the
    iteration has ended (``reduce_all``); the job ends where there is data and no
    value yet, or a second value in one epoch, and where ``f`` gives no batch.

    >>> import numpy as np
    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination, replayed
    >>> flow = Flow("multiples")
    >>> def body(variables, data):
    ...     multiples = map_with(data[0], variables[0], lambda factor, batch: factor * batch)
    ...     return IterationBodyResult([variables[0].map(lambda x: x + 1).filter(lambda x: x < 3)], [multiples])
    >>> [multiples] = iterate_bounded_streams_until_termination(
    ...     [flow.from_items([1])], [replayed(flow.from_items(np.array([10, 20])))], body
    ... )
    >>> collected = multiples.collect()
    >>> flow.run().state, [int(record) for record in collected.items]
    ('finished', [10, 20, 20, 40])
    """
    for given in (data, variable):
        check_body_stream(given, "map_with(data, variable, f)")
    check_function(f, "map_with", ["value", "batch"], step=name)

    if variable.emits_at_end:
        raise GraphError(
            f"{name or 'map_with'}: expected a variable whose values come while the iteration runs, given "
            f"{variable.name!r}, whose records come when it has ended; {for_each_epoch(bounded=variable.loop.bounded)}"
        )

    def make() -> MapWith:
        return MapWith(f)

    make.__name__ = "map_with"
    mapped = connect(variable=variable.broadcast(), data=data).process(
        make, name=name, parallelism=data.parallelism if parallelism is None else parallelism
    )
    # It emits for data only.
    mapped.steps[0].emits_at_end = data.emits_at_end
    return mapped


class MapWith(Operator, IterationListener):
    """Reads the variable of an epoch before the data of that epoch."""

    epochs_in_order = True

    def __init__(self, f: Callable[[Any, Any], Batch]) -> None:
        self._f = f
        self._value: Any = None
        self._value_epoch = -1
        self._turn = 0
        """The epoch whose records come now."""

    def open(self, context: Context) -> None:
        self._context = context

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return ("variable",) if self._value_epoch < self._turn else None

    def process_variable(self, value: Any, out: Output) -> None:
        epoch = self._context.epoch or 0
        if self._value_epoch == epoch:
            raise ConfigurationError(
                f"map_with: expected one value of the variable in an epoch, given a second in epoch {epoch}; bring "
                "them together first, for instance with all_reduce (one array is [array]: the rows of an array are "
                "records)"
            )
        self._value, self._value_epoch = value, epoch

    def process_data_batch(self, batch: Batch, out: Output) -> None:
        if self._value_epoch < 0:
            raise ConfigurationError(
                "map_with: expected a value of the variable in epoch 0, given none; begin with one initial value"
            )
        out.emit_batch(checked_batch("map_with(data, variable, f)", self._f(self._value, batch)))

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self._turn = epoch_watermark + 1

    def snapshot(self) -> dict[str, Any]:
        return {"value": self._value, "value epoch": self._value_epoch, "turn": self._turn}

    def restore(self, state: dict[str, Any]) -> None:
        self._value, self._value_epoch = state["value"], state["value epoch"]
        self._turn = state["turn"]
