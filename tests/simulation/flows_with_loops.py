"""These flows have loops: synchronous, asynchronous, bounded, with replay, rounds or feedback in a topic."""

import asyncio
from collections.abc import Callable
from typing import Any

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    OutputTag,
    Stream,
    connect,
    epochs_every,
    feedback_through,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.iteration import terminate_after
from streamiter.testing import Simulation

LATE = OutputTag("late")


class SumOfEpoch(Operator, IterationListener):
    """Sums the records of an epoch, times the model; the callback emits the sum as the next model."""

    epochs_in_order = True

    def __init__(self) -> None:
        self._model, self._sum, self._records = 0, 0, 0
        self._turn, self._has_model_of = 0, -1

    def open(self, context: Any) -> None:
        self._context = context

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return None if self._has_model_of >= self._turn else ("model",)

    def process_model(self, model: int, out: Any) -> None:
        self._model, self._has_model_of = model, self._context.epoch

    def process_data(self, record: int, out: Any) -> None:
        self._sum += record * (self._model % 5 + 1)
        self._records += 1

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        self._turn = epoch_watermark + 1
        out.emit([epoch_watermark, self._sum, self._records], tag=LATE)
        if self._records:
            out.emit(self._sum)
        self._records = 0

    def snapshot(self) -> Any:
        return [self._model, self._sum, self._records, self._turn, self._has_model_of]

    def restore(self, state: Any) -> None:
        self._model, self._sum, self._records, self._turn, self._has_model_of = state


def unbounded_synchronous_loop(simulation: Simulation) -> Flow:
    """Return a flow whose epochs have five records and wait for the model of the previous epoch."""
    flow = Flow("synchronous")
    numbers = flow.source(simulation.input("numbers", range(1, 33), over_s=0.5))
    start = flow.from_items([1], name="start")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        sums = connect(model=variables[0], data=data[0]).process(SumOfEpoch, name="sum")
        return IterationBodyResult([sums], [sums.side_output(LATE)])

    config = IterationConfig(max_epochs_ahead=0)
    [sums] = iterate_unbounded_streams([start], [epochs_every(numbers, records=5, name="fives")], body, config)
    sums.sink(simulation.output("sums"))
    return flow


class SumInOrder(Operator, IterationListener):
    """Adds floats as they arrive, and emits the sum at the end of each epoch; the last bits show the order."""

    def __init__(self) -> None:
        self._sum = 0.0

    def process(self, record: float, out: Any) -> None:
        self._sum = 0.7 * self._sum + record

    process_left = process_right = process

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit(self._sum)
        if epoch_watermark < 12:
            out.emit(self._sum / 3, tag=LATE)

    def snapshot(self) -> Any:
        return self._sum

    def restore(self, state: Any) -> None:
        self._sum = state


def floats_in_order(simulation: Simulation) -> Flow:
    """Return a synchronous loop of several subtasks whose sums depend on the order of all records."""
    flow = Flow("floats", parallelism=2)
    numbers = flow.source(simulation.input("numbers", [1 / n for n in range(1, 40)], partitions=2, over_s=0.5))

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mixed = connect(left=variables[0].rebalance(), right=data[0].rebalance()).process(SumInOrder, name="mixed")
        sums = mixed.union(data[0]).process(SumInOrder, name="sums", parallelism=1)
        return IterationBodyResult([mixed.side_output(LATE).rebalance()], [sums])

    start = flow.from_items([0.1, 0.2, 0.3], name="start")
    config = IterationConfig(max_epochs_ahead=0)
    data = epochs_every(numbers, records=4, name="fours").rebalance()
    [sums] = iterate_unbounded_streams([start], [data], body, config)
    sums.sink(simulation.output("sums"), parallelism=1)
    return flow


def unbounded_asynchronous_loop(simulation: Simulation) -> Flow:
    """Return a flow of two subtasks whose records each make several rounds, together with new records."""
    flow = Flow("asynchronous", parallelism=2)
    records = [[number, number % 4] for number in range(24)]
    data = flow.source(simulation.input("records", records, partitions=2, over_s=0.5))
    start = flow.from_items([[100, 3], [101, 0]], name="start")
    [passed] = iterate_unbounded_streams([start], [data], _loop_body(None))
    passed.sink(simulation.output("passed", order="any"))
    return flow


def stale_loop_with_an_idle_subtask(simulation: Simulation) -> Flow:
    """Return such a loop that runs at most an epoch ahead; one subtask has no partition, and completes all epochs."""
    flow = Flow("stale", parallelism=2)
    records = [[number, number % 4] for number in range(18)]
    data = flow.source(simulation.input("records", records, over_s=0.5))
    start = flow.from_items([[100, 3], [101, 0]], name="start")
    stamped = epochs_every(data, records=3, idle_timeout=0.2, name="threes")
    config = IterationConfig(max_epochs_ahead=1)
    [passed] = iterate_unbounded_streams([start], [stamped], _loop_body(None), config)
    passed.sink(simulation.output("passed", order="any"))
    return flow


def feedback_in_a_topic(simulation: Simulation) -> Flow:
    """Return the same loop with its feedback in a topic."""
    flow = Flow("through a topic", parallelism=2)
    loop = simulation.topic("loop", partitions=2)
    data = flow.source(simulation.input("records", [[number, number % 4] for number in range(16)], over_s=0.5))
    start = flow.from_items([[100, 3]], name="start")
    [passed] = iterate_unbounded_streams([start], [data], _loop_body(loop))
    passed.sink(simulation.output("passed", order="any"))
    return flow


def _loop_body(through: Any) -> Callable[[list[Stream], list[Stream]], IterationBodyResult]:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        every = variables[0].union(*data).rebalance()
        passed = every.map(lambda record: record, name="pass", parallelism=2)
        back = passed.filter(lambda record: record[1] > 0).map(lambda record: [record[0], record[1] - 1])
        feedback = back.rebalance()
        return IterationBodyResult([feedback if through is None else feedback_through(feedback, through)], [passed])

    return body


class Descend(Operator, IterationListener):
    """Makes one step of gradient descent, in whole numbers, for each pass over the data."""

    def __init__(self) -> None:
        self._model, self._sum = 0, 0

    def process_model(self, model: int, out: Any) -> None:
        self._model = model

    async def process_data(self, record: int, out: Any) -> None:
        self._sum = (self._sum * 31 + record * 7) % 1_000_003
        await asyncio.sleep(0)  # The step gives way, so that barriers arrive in the middle of a pass.

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        self._model = (self._model + self._sum) % 1_000_003
        out.emit(self._model)
        out.emit([epoch_watermark, self._model], tag=LATE)

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        out.emit(["end", self._model], tag=LATE)

    def snapshot(self) -> Any:
        return [self._model, self._sum]

    def restore(self, state: Any) -> None:
        self._model, self._sum = state


def bounded_loop_with_replay(simulation: Simulation) -> Flow:
    """Return a flow with eight passes over the same data, in the same order, with a model as feedback."""
    flow = Flow("replay")
    data = flow.source(simulation.input("data", range(12), over_s=0.25), stop={0: 12})
    start = flow.from_items([1], name="start")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step = connect(model=variables[0], data=data[0]).process(Descend, name="descend")
        return IterationBodyResult(
            [step], [step.side_output(LATE)], terminate_after(step, rounds=8, name="eight rounds")
        )

    [models] = iterate_bounded_streams_until_termination([start], [replayed(data)], body)
    models.sink(simulation.output("models"))
    return flow


class GoRound(Operator, IterationListener):
    """Emits each record until its rounds are over, and in each callback the number of records of the epoch."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def open(self, context: Any) -> None:
        self._context = context

    async def process(self, record: list[int], out: Any) -> None:
        self._counts[self._context.epoch] = self._counts.get(self._context.epoch, 0) + 1
        await asyncio.sleep(0)
        if record[1] > 0:
            out.emit([record[0], record[1] - 1])

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit([epoch_watermark, context.subtask_index, self._counts.pop(epoch_watermark, 0)], tag=LATE)

    def snapshot(self) -> Any:
        return list(self._counts.items())

    def restore(self, state: Any) -> None:
        self._counts = dict(state)


def bounded_loop_of_many(simulation: Simulation) -> Flow:
    """Return a loop of two heads and two subtasks, whose records are held until all have arrived."""
    flow = Flow("many", parallelism=2)
    start = flow.from_items([[number, number % 7] for number in range(14)], name="start")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        by_number = variables[0].partition_by(lambda record: record[0])
        turn = by_number.process(GoRound, name="turn")
        return IterationBodyResult([turn.partition_by(lambda record: record[0] + 1)], [turn.side_output(LATE)])

    [counts] = iterate_bounded_streams_until_termination([start], [], body)
    counts.sink(simulation.output("counts", order="any"))
    return flow


class ShowRound(Operator):
    """Emits the result of the round, and half of the result as feedback."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, total: int, out: Any) -> None:
        out.emit(total // 2)
        out.emit([self._context.epoch, total], tag=LATE)


def per_round_operators(simulation: Simulation) -> Flow:
    """Return a flow with a sum that starts again in each round, over replayed data and feedback."""
    flow = Flow("rounds")
    data = flow.source(simulation.input("data", range(1, 12), over_s=0.2), stop={0: 11})
    start = flow.from_items([64, 32], name="start")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        def of_one_round(streams: list[Stream]) -> list[Stream]:
            both = streams[0].union(streams[1])
            return [both.reduce_all(lambda a, b: a + b, name="sum of the round")]

        [total] = for_each_round([variables[0], data[0]], of_one_round)
        shown = total.process(ShowRound, name="show")
        return IterationBodyResult(
            [shown], [shown.side_output(LATE)], terminate_after(shown, rounds=4, name="four rounds")
        )

    [sums] = iterate_bounded_streams_until_termination([start], [replayed(data)], body)
    sums.sink(simulation.output("sums"))
    return flow
