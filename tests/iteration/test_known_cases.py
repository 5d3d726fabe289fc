"""Unbounded cases with results known from the reference implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from iteration.iteration_support import SMALL, Dawdle, ended, run
from iteration.known_cases_support import OUTPUT, SUM, TOTAL, feedback_path, nothing, sequence
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationListener,
    Operator,
    Stream,
    connect,
    iterate_unbounded_streams,
)


class Reduce(Operator, IterationListener):
    """Emits the sum of the records of each round, and feeds the records of the rounds before the last back."""

    def __init__(self, max_round: int) -> None:
        self._max_round = max_round
        self._sums: dict[int, int] = {}

    def open(self, context: Any) -> None:
        self._context = context

    def process_variable(self, value: int, out: Any) -> None:
        epoch = self._context.epoch
        self._sums[epoch] = self._sums.get(epoch, 0) + value
        if epoch < self._max_round:
            out.emit(value)
        out.emit((epoch, self._sums[epoch]), tag=OUTPUT)

    process_data = process_variable

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        out.emit("terminated", tag=OUTPUT)


def reducing(through: Callable[[Stream], Stream], max_round: int = 1) -> Callable[..., IterationBodyResult]:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        reduced = connect(variable=through(variables[0]), data=data[0]).process(
            lambda: Reduce(max_round), name="reduce", parallelism=1
        )
        return IterationBodyResult([feedback_path(reduced)], [reduced.side_output(OUTPUT)])

    return body


def last_sums(outputs: list[Any]) -> dict[int, int]:
    return dict(entry for entry in outputs if entry != "terminated")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "through", [pytest.param(lambda s: s, id="as they are"), pytest.param(lambda s: s.broadcast(), id="broadcast")]
)
def test_variables_that_end_are_summed_in_two_rounds(seed: int, through: Callable[[Stream], Stream]) -> None:
    """A record was counted twice in a round, or the loop ended with records in it."""
    flow = Flow("loop")
    [outputs] = iterate_unbounded_streams([sequence(flow, seed)], [nothing(flow)], reducing(through))
    collected = outputs.collect()
    run(flow, seed=seed, limits=SMALL)
    assert len(collected.items) == 2 * TOTAL + 1
    assert collected.items[-1] == "terminated"
    assert last_sums(collected.items) == {0: SUM, 1: SUM}
    assert [sum(entry[0] == epoch for entry in collected.items[:-1]) for epoch in (0, 1)] == [TOTAL, TOTAL]


@pytest.mark.parametrize("seed", range(3))
def test_data_that_ends_is_summed_in_two_rounds(seed: int) -> None:
    """A loop without initial variables did not end at the end of its data."""
    flow = Flow("loop")
    [outputs] = iterate_unbounded_streams([nothing(flow)], [sequence(flow, seed)], reducing(lambda s: s))
    collected = outputs.collect()
    run(flow, seed=seed, limits=SMALL)
    assert len(collected.items) == 2 * TOTAL + 1
    assert collected.items[-1] == "terminated"
    assert last_sums(collected.items) == {0: SUM, 1: SUM}


async def test_endless_data_has_the_same_sums_and_the_job_keeps_running() -> None:
    """An unbounded iteration ended before its input."""
    flow = Flow("loop")
    data = sequence(flow, 1, ends=False)
    [outputs] = iterate_unbounded_streams([nothing(flow)], [data], reducing(lambda s: s))
    collected = outputs.collect()
    job = await flow.start(channel_limits=SMALL)
    await until(lambda: len(collected.items) == 2 * TOTAL)
    assert last_sums(collected.items) == {0: SUM, 1: SUM}
    assert job.statistics().state == "running"
    await job.stop("drain")
    assert collected.items[2 * TOTAL :] == ["terminated"]
    assert (await ended(job)).state == "finished"


@pytest.mark.parametrize("seed", range(3))
def test_data_on_a_side_output_stays_in_order(seed: int) -> None:
    """A loop without variables did not end, or its side output came in another order."""

    class ToSide(Operator):
        def process(self, record: int, out: Any) -> None:
            out.emit(record, tag=OUTPUT)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [data[0].process(ToSide).side_output(OUTPUT)])

    flow = Flow("loop")
    [outputs] = iterate_unbounded_streams([flow.from_items([])], [flow.from_items([1, 2, 3])], body)
    collected = outputs.process(lambda: Dawdle(seed)).collect()
    run(flow, seed=seed, limits=SMALL)
    assert collected.items == [1, 2, 3]
