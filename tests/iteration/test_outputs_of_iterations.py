"""Output streams leave an iteration without an additional step, and without epochs."""

from __future__ import annotations

from typing import Any

import pytest
from iteration.iteration_support import run

from streamiter import Flow, IterationBodyResult, Operator, Stream, iterate_unbounded_streams
from streamiter.errors import GraphError
from streamiter.flow.building import loop_of

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
