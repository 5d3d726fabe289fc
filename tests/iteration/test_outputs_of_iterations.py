"""Outputs of an iteration leave it without an additional step and without epochs, some of them only at its end."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from iteration.iteration_support import run

from streamiter import (
    Flow,
    IterationBodyResult,
    Operator,
    OutputTag,
    Stream,
    connect,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.errors import GraphError, JobFailed
from streamiter.flow.building import loop_of
from streamiter.iteration import map_with, terminate_after

SEEDS = range(3)


def counted_to(limit: int, flow: Flow, *, parallelism: int = 1, repartition: str | None = None) -> Stream:
    """Return the output of a loop that counts to ``limit``."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(lambda n: n + 1, name="raise")
        output = raised if repartition is None else getattr(raised, repartition)()
        return IterationBodyResult([raised.filter(lambda n: n < limit)], [output])

    [output] = iterate_unbounded_streams([flow.from_items([0, 0], parallelism=parallelism)], [], body)
    return output


class Epochs(Operator):
    """Emits the epoch of each record with the record."""

    def open(self, context: Any) -> None:
        self.context = context

    def process(self, record: int, out: Any) -> None:
        out.emit((self.context.epoch, record))


@pytest.mark.parametrize("seed", SEEDS)
def test_outputs_have_no_epochs_and_no_additional_step(seed: int) -> None:
    """A step outside took the epochs of the loop for epochs of its own data."""
    flow = Flow("count")
    seen = counted_to(3, flow).process(Epochs).collect()
    assert [step.name for step in flow.steps] == ["items", "variable 0", "raise", "filter", "Epochs", "collect"]
    run(flow, seed=seed)
    assert sorted(seen.items, key=lambda pair: pair[1]) == [(None, n) for n in (1, 1, 2, 2, 3, 3)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize(("repartition", "copies"), [("broadcast", True), ("rebalance", False)])
def test_a_repartitioned_output_is_partitioned_at_the_parallelism_of_the_body(
    repartition: str, copies: bool, parallelism: int, seed: int
) -> None:
    """A next step of another parallelism received another number of copies."""
    flow = Flow("count")
    output = counted_to(1, flow, parallelism=parallelism, repartition=repartition)
    seen = output.map(lambda n: n, parallelism=3).collect()
    assert ("output 0" in [step.name for step in flow.steps]) == (parallelism > 1)
    run(flow, seed=seed)
    assert seen.items == [1] * 2 * (parallelism if copies else 1)


def test_outputs_are_outside_and_streams_of_the_body_are_not() -> None:
    """An output and a stream of the body, which come from the same step, were not distinguished."""
    flow = Flow("count")
    kept: list[Stream] = []

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        kept.append(variables[0].map(lambda n: n + 1))
        return IterationBodyResult([kept[0].filter(lambda n: n < 1)], kept)

    [output] = iterate_unbounded_streams([flow.from_items([0])], [], body)
    assert (loop_of(output) is None, loop_of(kept[0]) is None) == (True, False)
    output.collect()
    with pytest.raises(GraphError, match="expected a stream from outside the iteration, given 'map'"):
        kept[0].map(str)


@pytest.mark.parametrize("seed", SEEDS)
def test_dead_letters_of_a_body_are_written_outside(seed: int) -> None:
    """The sink of dead letters became a step of the loop, where sinks are refused."""
    from streamiter.topics import MemoryBroker

    letters = MemoryBroker().topic("letters")
    flow = Flow("count")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(lambda n: 1 // n, name="inverse", dead_letter=letters)
        return IterationBodyResult([raised.filter(lambda n: n < 0)], [raised])

    iterate_unbounded_streams([flow.from_items([0, 1])], [], body)
    sink = next(step for step in flow.steps if step.name == "dead letters of inverse")
    assert (sink.loop, sink.shape) == (None, "sink")


def bounded(flow: Flow, body: Any, data: Any = ()) -> Any:
    return iterate_bounded_streams_until_termination([flow.from_items([0], name="start")], data, body)


class Meets(Operator):
    """Handles a total before numbers, or both in any order."""

    def __init__(self, *wanted: str) -> None:
        self._wanted = wanted
        self._has_total = False

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return None if self._has_total or not self._wanted else self._wanted

    def process_total(self, record: Any, out: Any) -> None:
        self._has_total = True

    def process_numbers(self, record: int, out: Any) -> None:
        out.emit(record + 1)


def total_of(stream: Stream) -> Stream:
    return stream.reduce_all(lambda a, b: a + b, name="total")


EACH_EPOCH = "for a result of each epoch write "


IN_BOUNDED = EACH_EPOCH + "for_each_round([stream], lambda streams: [streams[0].reduce_all(f)]), or "


ALL_REDUCE = "all_reduce(stream, f)"


@pytest.mark.parametrize(
    "waits",
    [
        total_of,
        lambda stream: stream.sort(),
        lambda stream: stream.join(stream, on=lambda n: n),
        lambda stream: total_of(stream).map(lambda n: n).union(stream.sort()),
        lambda stream: total_of(stream).batch(3),
        lambda stream: total_of(stream).process(DoublesOnly).key_by(str).reduce(max),
        lambda stream: map_with(stream.sort(), stream, lambda value, batch: batch),
        lambda stream: total_of(stream).side_output(OutputTag("side")),
    ],
    ids=[
        "reduce_all",
        "sort",
        "join",
        "union",
        "what follows",
        "operators that follow",
        "data of map_with",
        "side output",
    ],
)
def test_feedback_and_criteria_do_not_wait_for_the_end_of_the_iteration(waits: Callable[[Stream], Stream]) -> None:
    """The loop ended in epoch 1 without an error: it had fed back nothing, and the results at the end were dropped."""
    flow = Flow("loop")
    start = flow.from_items([1])
    names: list[str] = []

    def feeds_back(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        late = waits(variables[0])
        names.append(late.name)
        return IterationBodyResult([late], [])

    def has_criteria(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [], waits(variables[0]))

    for iterate, body, what, instead in (
        (iterate_bounded_streams_until_termination, feeds_back, "feedback stream 0", IN_BOUNDED + ALL_REDUCE),
        (iterate_unbounded_streams, feeds_back, "feedback stream 0", EACH_EPOCH + ALL_REDUCE),
        (iterate_bounded_streams_until_termination, has_criteria, "termination_criteria", IN_BOUNDED + ALL_REDUCE),
    ):
        with pytest.raises(GraphError) as caught:
            iterate([start], [], body)
        assert caught.value.args[0] == (
            f"iteration: expected {what} to receive records while the iteration runs, given {names[-1]!r}, whose "
            f"records arrive only when it has ended; {instead}"
        )


def test_a_variable_of_map_with_does_not_wait_for_the_end_of_the_iteration() -> None:
    """The job failed because epoch 0 had no value, and the message asked for an initial value."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        scaled = map_with(variables[0], total_of(data[0]), lambda total, batch: batch, name="scale")
        return IterationBodyResult([scaled], [scaled])

    with pytest.raises(GraphError) as caught:
        bounded(flow, body, data=[flow.from_items([1, 2])])
    assert caught.value.args[0] == (
        "scale: expected a variable whose values arrive while the iteration runs, given 'total', whose records "
        f"arrive only when it has ended; {IN_BOUNDED}{ALL_REDUCE}"
    )


@pytest.mark.parametrize("source", ["variable", "replayed"])
@pytest.mark.parametrize("again", [False, True], ids=["", "behind a map"])
def test_a_step_of_the_loop_that_wants_the_end_of_the_iteration_first_is_refused(source: str, again: bool) -> None:
    """The step waited for the total, the total for the end of the iteration, and the end for the step."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        total = total_of(variables[0] if source == "variable" else data[0])
        total = total.map(lambda n: n) if again else total
        met = connect(total=total, numbers=variables[0]).process(lambda: Meets("total"), name="meet")
        return IterationBodyResult([met.filter(lambda n: n < 5)], [met])

    bounded(flow, body, data=[replayed(flow.from_items([1, 2]))])
    message = (
        "step 'meet': expected wanted_inputs() to name an input that receives records while the iteration runs, given "
        f"only 'total', whose records arrive only when it has ended; {IN_BOUNDED}{ALL_REDUCE} (at "
        "test_outputs_of_iterations.py:"
    )
    with pytest.raises(JobFailed, match=re.escape(message)):
        run(flow)


@pytest.mark.parametrize(
    ("wanted", "of_data", "is_fed_back"),
    [
        ((), False, True),  # It waits for nothing.
        (("total", "numbers"), False, True),
        (("total",), True, True),  # It does not wait for the total.
        (("total",), False, False),  # Nothing in the loop waits for this step.
    ],
)
def test_a_step_that_does_not_wait_for_its_total_is_accepted(
    wanted: tuple[str, ...], of_data: bool, is_fed_back: bool
) -> None:
    """A total of all epochs was refused, although it is a valid output, and a step may have it as a second input."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        total = total_of(data[0] if of_data else variables[0])
        met = connect(total=total, numbers=variables[0]).process(lambda: Meets(*wanted))
        back = met if is_fed_back else variables[0].map(lambda n: n + 1)
        return IterationBodyResult([back.filter(lambda n: n < 4)], [met, total])

    met, totals = bounded(flow, body, data=[flow.from_items([1, 2])])
    met, totals = met.collect(), totals.collect()
    run(flow)
    assert met.items == [1, 2, 3, 4]
    assert totals.items == [3 if of_data else 6]


def test_criteria_behind_a_total_may_come_before_it() -> None:
    """Criteria after a total were refused, although a listener emits them in its callbacks before the total arrives."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        total = total_of(variables[0])
        raised = variables[0].map(lambda n: n + 1)
        return IterationBodyResult([raised], [raised, total], terminate_after(total, rounds=2))

    raised, totals = bounded(flow, body)
    collected, totals = raised.collect(), totals.collect()
    run(flow)
    assert (collected.items, totals.items) == ([1, 2, 3], [3])


class DoublesOnly(Operator):
    """Emits for records only: it has no method that could emit at other times."""

    def process(self, record: int, out: Any) -> None:
        out.emit(2 * record)


def test_a_round_may_wait_for_its_end() -> None:
    """A step that waits for the end of its round was refused in ``for_each_round``, which exists for such steps."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [total] = for_each_round([variables[0]], lambda streams: [total_of(streams[0]).map(lambda n: n + 1)])
        return IterationBodyResult([total.filter(lambda n: n < 4)], [total])

    [totals] = bounded(flow, body)
    collected = totals.collect()
    run(flow)
    assert collected.items == [1, 2, 3, 4]
