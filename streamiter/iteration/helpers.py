"""Helpers for algorithms in rounds: each is a function that adds a step to the body of an iteration, and its operator.

``all_reduce`` reduces the records of an epoch to one, ``map_with`` handles data with the value of a variable,
``last_round`` outputs the records of the last round, and ``terminate_after`` makes termination criteria.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from streamiter.engine.graph.graph import StepLoop
from streamiter.errors import ConfigurationError, GraphError, shortened
from streamiter.flow.building import add_next_step, check_same_flow, emits_at_end, loop_of
from streamiter.flow.flow import all_or_nothing
from streamiter.flow.graph_checks import check_user_function
from streamiter.flow.stream import Stream
from streamiter.iteration.loop import for_each_epoch
from streamiter.operators.declared_state import (
    COPIED,
    DICTS_BY_KEY,
    FIRST,
    SAME,
    DeclaredOperator,
    SharedOperator,
    declared,
)
from streamiter.operators.definitions import Definition, function_in_words
from streamiter.operators.functions import checked_batch
from streamiter.operators.operator import Context, IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.values.numbers import whole_number
from streamiter.values.records import Batch


@all_or_nothing
def all_reduce(stream: Stream, f: Callable[[Any, Any], Any] = operator.add, *, name: str | None = None) -> Stream:
    """At the end of each epoch with records, reduce all of them to one record, and send it to all subtasks.

    ``f(result, record)`` returns a new result; the default adds numbers and arrays. First the records of each subtask
    are reduced in their order, then the results of the subtasks in the order of the subtasks, so that sums of
    floating-point numbers do not depend on the speed of subtasks. This works in the body of an iteration whose data has
    epochs.

    Raises GraphError for a stream outside a body, or an ``f`` that is no function.

    >>> import numpy as np
    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination
    >>> flow = Flow("sum")
    >>> def body(variables, data):
    ...     sums = all_reduce(data[0])
    ...     return IterationBodyResult([variables[0]], [sums.filter(lambda _: True)])
    >>> numbers = flow.from_items(np.arange(10), parallelism=2)
    >>> [sums] = iterate_bounded_streams_until_termination([flow.from_items([])], [numbers], body)
    >>> collected = sums.collect()
    >>> flow.run().state, collected.items
    ('finished', [np.int64(45)])
    """
    _check_body_stream(stream, "all_reduce(stream)")
    check_user_function(f, "all_reduce", ["result", "record"], step=name)
    make_parts = _named("all_reduce parts", lambda: ReduceEpoch(f))
    parts = stream.process(make_parts, name=f"{name} parts" if name else None)
    make_whole = _named("all_reduce", lambda: ReduceEpoch(f, of_subtasks=True))
    return parts.process(make_whole, name=name, parallelism=1).broadcast()


def _named(label: str, make: Callable[[], Operator]) -> Callable[[], Operator]:
    """Return the function, with the name of a step that the user has not named."""
    make.__name__ = label
    return make


class ReduceEpoch(DeclaredOperator, IterationListener):
    """Reduces the records of each epoch, and emits (subtask, result) in the callback of the epoch.

    With ``of_subtasks`` its records are such pairs, and it emits the result of all.
    """

    _results: dict[int, dict[int, Any]] = declared(made=dict, form=DICTS_BY_KEY)
    """The results by epoch and subtask."""

    def __init__(self, f: Callable[[Any, Any], Any], *, of_subtasks: bool = False) -> None:
        self._f = f
        self._of_subtasks = self.any_order = of_subtasks

    def definition(self) -> Definition:
        return {**super().definition(), "f": function_in_words(self._f)}

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        results = self._results.setdefault(self._context.epoch or 0, {})
        subtask, value = record if self._of_subtasks else (self._context.subtask_index, record)
        results[subtask] = self._f(results[subtask], value) if subtask in results else value

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self._emit(self._results.pop(epoch_watermark, {}), out)

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        for epoch in sorted(self._results):
            self._emit(self._results[epoch], out)
        self._results = {}

    def _emit(self, results: dict[int, Any], out: Output) -> None:
        if not results:
            return
        if not self._of_subtasks:
            [(subtask, result)] = results.items()
            out.emit((subtask, result))
            return
        subtasks = sorted(results)
        total = results[subtasks[0]]
        for subtask in subtasks[1:]:
            total = self._f(total, results[subtask])
        out.emit(total)

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give the results of old subtask i to the new subtask i modulo ``parallelism``, which reduces them."""
        return [{"results": self._joined(states[subtask::parallelism], subtask)} for subtask in range(parallelism)]

    def _joined(self, states: Sequence[dict[str, Any]], subtask: int) -> dict[int, dict[int, Any]]:
        joined: dict[int, Any] = {}
        for epoch, results in itertools.chain.from_iterable(state["results"].items() for state in states):
            for result in results.values():
                joined[epoch] = self._f(joined[epoch], result) if epoch in joined else result
        return {epoch: {subtask: result} for epoch, result in joined.items()}


def last_round(stream: Stream, *, name: str | None = None) -> Stream:
    """At the end of the iteration, emit the records of the last round that had records, each at its own subtask.

    So a variable is output with its final value. The records of one round are kept in memory.

    Raises GraphError for a stream outside a body.

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
    _check_body_stream(stream, "last_round(stream)")
    return stream.process(_named("last_round", lambda: LastRound()), name=name)


class LastRound(DeclaredOperator, IterationListener):
    """Keeps the records of the latest epoch, and emits them at the end of the iteration."""

    _epoch = declared(-1)
    _batches: list[Batch] = declared(made=list, form=COPIED)

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

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        """Forget the last round, which was emitted."""
        return self.at_start()

    @staticmethod
    def redistribute(states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give the batches of old subtask i to the new subtask i modulo ``parallelism``, which keeps the last round."""
        shared = []
        for given in (states[subtask::parallelism] for subtask in range(parallelism)):
            last = max((state["epoch"] for state in given), default=-1)
            batches = [batch for state in given if state["epoch"] == last for batch in state["batches"]]
            shared.append({"epoch": last, "batches": batches})
        return shared


def map_with(
    data: Stream,
    variable: Stream,
    f: Callable[[Any, Any], Batch],
    *,
    name: str | None = None,
    parallelism: int | None = None,
) -> Stream:
    """Emit ``f(value, batch)`` for each transport batch of ``data``, with the value of ``variable`` in its epoch.

    ``variable`` has at most one value in each epoch, which goes to all subtasks; in an epoch without a value the last
    one is used. Epochs are handled in order, and data waits for the value. The engine cuts transport batches as it
    likes. This works in the body of a bounded iteration, mostly with replayed data.

    Raises GraphError for streams outside a body, an ``f`` that is no function, and a variable whose values come when
    the iteration has ended (``reduce_all``). The job fails if data arrives and there was no value, if an epoch has a
    second value, and if ``f`` does not return a batch.

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
    _check_body_stream(data, "map_with(data, variable, f)")
    loop = _check_body_stream(variable, "map_with(data, variable, f)")
    check_user_function(f, "map_with", ["value", "batch"], step=name)
    if emits_at_end(variable):
        raise GraphError(
            f"{name or 'map_with'}: expected a variable whose values arrive while the iteration runs, given "
            f"{variable.name!r}, whose records arrive only when it has ended; {for_each_epoch(bounded=loop.bounded)}"
        )
    check_same_flow(variable, data, "connect")
    output = add_next_step(
        {"variable": variable.broadcast(), "data": data},
        name or "map_with",
        lambda: MapWith(f),
        {"name": name, "parallelism": data.parallelism if parallelism is None else parallelism},
        emits_at_end=emits_at_end(data),  # It emits for data only.
    )
    return Stream(data.flow, output)


class MapWith(SharedOperator, IterationListener):
    """Handles data with the value of a variable: it reads the variable of an epoch before the data of that epoch."""

    epochs_in_order = True

    _value: Any = declared(None, share=FIRST)
    _value_epoch = declared(-1, share=SAME)
    _turn = declared(0, share=SAME)
    """The epoch whose records are handled now."""

    def __init__(self, f: Callable[[Any, Any], Batch]) -> None:
        self._f = f

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

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        """Keep the value: no other one comes before the first data."""
        return {"value": state["value"], "value epoch": min(state["value epoch"], 0), "turn": 0}


def terminate_after(stream: Stream, *, rounds: int, tolerance: float | None = None, name: str | None = None) -> Stream:
    """Return termination criteria that end a bounded iteration after ``rounds`` rounds: callbacks 0 … ``rounds`` - 1.

    ``stream`` is any stream of the body. With a ``tolerance`` its records are losses, and the iteration also ends after
    the first round in which their sum is at most the tolerance.

    Raises GraphError for a stream outside a body, and for wrong rounds or a wrong tolerance. The job fails if there is
    a tolerance and a record is no number (an array of one number counts as a number).

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
    _check_body_stream(stream, "terminate_after(stream, …)")
    label = name or "terminate_after"
    remedy = "epoch 0 never ends an iteration: write rounds=1 for a single round"
    rounds = whole_number(f"{label}(rounds=)", rounds, 1, error=GraphError, remedy=remedy)
    if tolerance is not None and not _is_number(tolerance):
        raise GraphError(f"{label}: expected tolerance to be a number, given {tolerance!r}; leave it out for none")
    make = _named("terminate_after", lambda: TerminateAfter(rounds, tolerance))
    return stream.process(make, name=name, parallelism=1)


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and not math.isnan(given)


def _loss(record: Any) -> float:
    # The case of most records; the other checks need four times as long.
    if isinstance(record, (float, int)):
        return float(record)
    value = record.item() if isinstance(record, (np.ndarray, np.generic)) and record.size == 1 else record
    try:
        if hasattr(type(value), "__float__"):  # A text has no such method, although float() would read it.
            return float(value)
    except (TypeError, ValueError):  # An array of several numbers.
        pass
    raise ConfigurationError(
        f"terminate_after(stream, …): tolerance expected records that are numbers, given {shortened(record)}; write "
        "terminate_after(stream.map(f), …) with an f that returns the loss of a record"
    )


class TerminateAfter(DeclaredOperator, IterationListener):
    """Emits a record in the callback of each round after which the iteration is to continue."""

    _losses: dict[int, float] = declared(made=dict, form=COPIED)

    def __init__(self, rounds: int, tolerance: float | None) -> None:
        self._rounds = rounds
        self._tolerance = tolerance
        self.any_order = tolerance is None

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

    def definition(self) -> Definition:
        """Without a tolerance the losses of the round under way are not known."""
        return {**super().definition(), "tolerance": None if self._tolerance is None else "a number"}


def _check_body_stream(stream: Any, call: str) -> StepLoop:
    """Return the loop of a stream of a body.

    Raises GraphError for a stream outside a body, where no epoch ends; ``call`` shows the call of the helper.
    """
    name, _, _ = call.partition("(")
    if not isinstance(stream, Stream):
        raise GraphError(f"{name}: expected a stream of the body, given {shortened(stream)}; write {call}")
    if (loop := loop_of(stream)) is None:
        raise GraphError(
            f"{name}: expected a stream of an iteration body, given {stream.name!r} from outside, where no epoch ends; "
            "call it in the body"
        )
    return loop
