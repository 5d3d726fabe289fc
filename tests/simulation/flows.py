"""Flows to be simulated: small, and each with a part of the engine that has a state of its own.

Inputs are the same under every seed, so that one undisturbed run of each flow serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

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
from streamiter.learn import FTRL, Examples, LogisticRegression, train_online
from streamiter.models.headers import UpdateHeaders
from streamiter.testing import Simulation
from streamiter.topics.topic import TopicRecord

MakeFlow = Callable[[Simulation], Flow]

LATE = OutputTag("late")


class CountWithReminder(Operator):
    """Emits each key's count; a second after its first record, once, that it is there."""

    def open(self, context: Any) -> None:
        self.context = context

    def process(self, record: Any, out: Any) -> None:
        state = self.context.state
        if not state:
            self.context.set_timer(1.0, "is there")
        state["count"] = state.get("count", 0) + 1
        out.emit([self.context.key, state["count"]])

    def on_timer(self, payload: str, out: Any) -> None:
        out.emit([self.context.key, payload])


def keyed_state_and_timers(simulation: Simulation) -> Flow:
    """Counts by key over partitions, with a timer for each; two subtasks, an unbounded source."""
    flow = Flow("keyed", parallelism=2)
    records = [{"user": f"u{number % 5}", "n": number} for number in range(30)]
    clicks = flow.source(
        simulation.input("clicks", records, partitions=3, key=lambda r: r["user"], over_s=3.0)
    )
    counted = clicks.key_by(lambda r: r["user"]).process(CountWithReminder, name="count")
    counted.sink(simulation.output("counts", partitions=2, order="any"), key=lambda r: r[0])
    return flow


def running_totals(simulation: Simulation) -> Flow:
    """What each key's records say in order comes out in order; partitions and two subtasks."""
    flow = Flow("totals", parallelism=2)
    numbers = simulation.input("numbers", range(40), partitions=4, key=lambda n: str(n % 6), over_s=1.0)
    keyed = flow.source(numbers).key_by(lambda n: n % 6)
    totals = keyed.stateful_map(
        lambda state, n: ((state[0] + n, state[1] + 1), [n % 6, state[0] + n, state[1]]),
        (0, 0),
        name="total",
    )
    totals.sink(simulation.output("totals", partitions=3, order="key"), key=lambda r: str(r[0]))
    return flow


def mini_batches(simulation: Simulation) -> Flow:
    """Mini-batches cut from transport batches that are cut anywhere, and their remainder at the end."""
    flow = Flow("mini-batches")
    numbers = flow.source(simulation.input("numbers", range(45), over_s=0.5), stop={0: 45})
    sums = numbers.batch(7, name="sevens").map(lambda batch: [len(batch), int(sum(batch))])
    sums.sink(simulation.output("sums"))
    return flow


class Sieve(Operator):
    """Odd numbers go to a side output."""

    def process(self, number: int, out: Any) -> None:
        out.emit(number, tag=LATE if number % 2 else None)


def side_outputs_and_dead_letters(simulation: Simulation) -> Flow:
    """What cannot be decoded, what a step rejects and what goes to the side: three topics, one transaction."""
    flow = Flow("sieve")
    values = [b"not json" if number % 9 == 4 else str(number).encode() for number in range(40)]
    numbers = flow.source(
        simulation.input("numbers", values, over_s=0.5),
        on_error="dead_letter",
        dead_letter=simulation.output("undecodable"),
    )
    sieved = numbers.process(Sieve)
    sieved.sink(simulation.output("even"))
    late = sieved.side_output(LATE)
    late.map(
        lambda n: 100 // (n % 5), on_error="dead_letter", dead_letter=simulation.output("indivisible")
    ).sink(simulation.output("late"))
    return flow


class Zip(Operator):
    """Pairs the records of two inputs, one of each in turn; what has no partner goes out alone."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("b",) if self.left else ("a",)

    def process_a(self, record: Any, out: Any) -> None:
        if self.left:
            out.emit([self.left.pop(), None])
        self.left.append(record)

    def process_b(self, record: Any, out: Any) -> None:
        out.emit([self.left.pop() if self.left else None, record])

    def finish(self, out: Any) -> None:
        out.emit(["left", self.left])

    def snapshot(self) -> list[Any]:
        return list(self.left)

    def restore(self, state: list[Any]) -> None:
        self.left = list(state)


def wanted_inputs(simulation: Simulation) -> Flow:
    """An operator that reads its inputs in turn: barriers pass what it does not want now."""
    flow = Flow("pairs")
    a = flow.source(simulation.input("a", range(20), over_s=0.3), stop={0: 20}, name="source a")
    b = flow.source(simulation.input("b", range(100, 115), over_s=0.6), stop={0: 15}, name="source b")
    pairs = connect(a=a, b=b).process(Zip, name="zip")
    pairs.sink(simulation.output("pairs"))
    return flow


def joined_at_the_end(simulation: Simulation) -> Flow:
    """State that is kept until the input ends; with a sink that writes at once beside the transactional ones."""
    flow = Flow("join")
    orders = flow.source(
        simulation.input("orders", [{"id": n % 7, "n": n} for n in range(20)]), stop="latest"
    )
    names = flow.source(
        simulation.input("names", [{"id": n, "name": f"n{n}"} for n in range(5)]), stop="latest"
    )
    joined = orders.join(names, on="id", name="join").map(lambda pair: [pair[0]["n"], pair[1]["name"]])
    joined.sink(simulation.output("joined", order="any"))
    orders.map(lambda order: order["n"]).sink(
        simulation.output("seen", delivery="at_least_once"), delivery="at_least_once"
    )
    orders.map(lambda order: order["n"]).reduce_all(lambda a, b: a + b, name="sum").sink(
        simulation.output("sum")
    )
    return flow


class SumOfEpoch(Operator, IterationListener):
    """Adds up the records of an epoch, times the model; in its callback the sum becomes the model that is fed back."""

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
    """Every five records make an epoch, and wait for what the epoch before has made of the model."""
    flow = Flow("synchronous")
    numbers = flow.source(simulation.input("numbers", range(1, 33), over_s=0.5))
    start = flow.from_items([1], name="start")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        sums = connect(model=variables[0], data=data[0]).process(SumOfEpoch, name="sum")
        return IterationBodyResult([sums], [sums.side_output(LATE)])

    config = IterationConfig(max_epochs_ahead=0)
    [sums] = iterate_unbounded_streams(
        [start], [epochs_every(numbers, records=5, name="fives")], body, config
    )
    sums.sink(simulation.output("sums"))
    return flow


def unbounded_asynchronous_loop(simulation: Simulation) -> Flow:
    """Each record goes round as often as it says, beside those that come in; two subtasks."""
    flow = Flow("asynchronous", parallelism=2)
    records = [[number, number % 4] for number in range(24)]
    data = flow.source(simulation.input("records", records, partitions=2, over_s=0.5))
    start = flow.from_items([[100, 3], [101, 0]], name="start")
    [passed] = iterate_unbounded_streams([start], [data], _going_round(None))
    passed.sink(simulation.output("passed", order="any"))
    return flow


def feedback_in_a_topic(simulation: Simulation) -> Flow:
    """The same, with the feedback in a topic."""
    flow = Flow("through a topic", parallelism=2)
    loop = simulation.topic("loop", partitions=2)
    data = flow.source(
        simulation.input("records", [[number, number % 4] for number in range(16)], over_s=0.5)
    )
    start = flow.from_items([[100, 3]], name="start")
    [passed] = iterate_unbounded_streams([start], [data], _going_round(loop))
    passed.sink(simulation.output("passed", order="any"))
    return flow


def _going_round(through: Any) -> Callable[[list[Stream], list[Stream]], IterationBodyResult]:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        every = variables[0].union(*data).rebalance()
        passed = every.map(lambda record: record, name="pass", parallelism=2)
        back = passed.filter(lambda record: record[1] > 0).map(lambda record: [record[0], record[1] - 1])
        feedback = back.rebalance()
        return IterationBodyResult(
            [feedback if through is None else feedback_through(feedback, through)], [passed]
        )

    return body


class Descend(Operator, IterationListener):
    """One step of a gradient descent for each pass over the data, in whole numbers."""

    def __init__(self) -> None:
        self._model, self._sum = 0, 0

    def process_model(self, model: int, out: Any) -> None:
        self._model = model

    def process_data(self, record: int, out: Any) -> None:
        self._sum = (self._sum * 31 + record * 7) % 1_000_003

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
    """Six passes over the same data, in the same order each time, with a model that goes round."""
    flow = Flow("replay")
    data = flow.source(simulation.input("data", range(15), over_s=0.1), stop={0: 15})
    start = flow.from_items([1], name="start")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step = connect(model=variables[0], data=data[0]).process(Descend, name="descend")
        return IterationBodyResult(
            [step], [step.side_output(LATE)], terminate_after(step, rounds=6, name="six rounds")
        )

    [models] = iterate_bounded_streams_until_termination([start], [replayed(data)], body)
    models.sink(simulation.output("models"))
    return flow


class ShowRound(Operator):
    """Shows what the round has come to, and feeds half of it on."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, total: int, out: Any) -> None:
        out.emit(total // 2)
        out.emit([self._context.epoch, total], tag=LATE)


def per_round_operators(simulation: Simulation) -> Flow:
    """A sum that begins anew in each round, over replayed data and what goes round."""
    flow = Flow("rounds")
    data = flow.source(simulation.input("data", range(1, 12)), stop="latest")
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


def _example_rows(rows: list[dict[str, Any]]) -> Examples:
    return Examples(np.array([row["x"] for row in rows]), [row["y"] for row in rows])


def version_and_parameters(record: TopicRecord) -> Hashable:
    """What of a model update does not depend on time."""
    headers = UpdateHeaders.parse(record.headers)
    assert headers is not None
    return headers.generation, headers.version, headers.epoch, record.value


def online_learner(simulation: Simulation) -> Flow:
    """Synchronous mini-batch learning with an optimizer that has slots; every version is published, once."""
    flow = Flow("learner")
    generator = np.random.default_rng(5)
    features = generator.normal(size=(48, 3)).round(3)
    rows = [{"x": x.tolist(), "y": float(x.sum() > 0)} for x in features]
    examples = flow.source(simulation.input("examples", rows, over_s=0.5))
    training = train_online(
        examples,
        lambda: LogisticRegression(3, optimizer=FTRL(alpha=0.5)),
        extract=_example_rows,
        mini_batch=6,
        mode="synchronous",
        report_every=12,
    )
    training.models.publish_model(simulation.output("models", compare=version_and_parameters), model="m")
    training.validation.sink(simulation.output("validation"))
    return flow


FLOWS: tuple[MakeFlow, ...] = (
    keyed_state_and_timers,
    running_totals,
    mini_batches,
    side_outputs_and_dead_letters,
    wanted_inputs,
    joined_at_the_end,
    unbounded_synchronous_loop,
    unbounded_asynchronous_loop,
    feedback_in_a_topic,
    bounded_loop_with_replay,
    per_round_operators,
    online_learner,
)

SETTLE_S = {"keyed_state_and_timers": 5.0}
"""Seconds that timers are waited for, by flow."""
