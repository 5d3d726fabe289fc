"""Bounded cases with results known from the reference implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from iteration.iteration_support import ended, run, run_shuffled
from iteration.known_cases_support import OUTPUT, SUM, TOTAL, feedback_path, nothing, sequence
from support.waiting import PATIENCE_S

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    OperatorLifeCycle,
    OutputTag,
    Stream,
    connect,
    for_each_round,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.operators.source import Collected
from streamiter.runtime.job import Job
from streamiter.runtime.plan import ChannelLimits

CRITERIA = OutputTag("criteria")
GOES_ON = "goes on"


class Reduce(Operator, IterationListener):
    """Emits the sum of the records of each round, and feeds the records of the rounds before the last back.

    A synchronous one does so in the callback, with the sum of the round; an asynchronous one at once, with each sum so
    far.
    """

    def __init__(self, max_round: int, *, synchronous: bool, rounds: int | None = None) -> None:
        self._max_round = max_round
        self._synchronous = synchronous
        self._rounds = rounds
        self._sums: dict[int, int] = {}
        self._cache: list[int] = []

    def open(self, context: Any) -> None:
        self._context = context

    def process_variable(self, value: int, out: Any) -> None:
        epoch = self._context.epoch
        self._sums[epoch] = self._sums.get(epoch, 0) + value
        if not self._synchronous:
            out.emit((epoch, self._sums[epoch]), tag=OUTPUT)
        if epoch < self._max_round:
            if self._synchronous:
                self._cache.append(value)
            else:
                out.emit(value)

    process_data = process_variable

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        if self._synchronous:
            out.emit((epoch_watermark, self._sums.get(epoch_watermark, 0)), tag=OUTPUT)
            for value in self._cache:
                out.emit(value)
            self._cache = []
        if self._rounds is not None and epoch_watermark + 1 < self._rounds:
            out.emit(GOES_ON, tag=CRITERIA)

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        out.emit("terminated", tag=OUTPUT)

    def snapshot(self) -> Any:
        return {"sums": list(self._sums.items()), "cache": list(self._cache)}

    def restore(self, state: Any) -> None:
        self._sums, self._cache = dict(state["sums"]), list(state["cache"])


class SumOfRound(Operator, IterationListener):
    """Emits the sum of the data of one round; the variable, the number of the round, is fed back plus one."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._sum = 0

    def process_variable(self, number: int, out: Any) -> None:
        self._number = number
        if number + 1 < self._rounds:
            out.emit(number + 1)

    def process_data(self, value: int, out: Any) -> None:
        self._sum += value

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        assert self._number == epoch_watermark
        out.emit((epoch_watermark, self._sum), tag=OUTPUT)

    def snapshot(self) -> Any:
        return {"sum": self._sum, "number": getattr(self, "_number", None)}

    def restore(self, state: Any) -> None:
        self._sum, self._number = state["sum"], state["number"]


Body = Callable[[list[Stream], list[Stream]], IterationBodyResult]


def reducing(max_round: int, *, synchronous: bool, rounds: int | None = None) -> Body:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        reduced = connect(variable=variables[0], data=data[0]).process(
            lambda: Reduce(max_round, synchronous=synchronous, rounds=rounds), name="reduce", parallelism=1
        )
        criteria = None if rounds is None else reduced.side_output(CRITERIA)
        return IterationBodyResult([feedback_path(reduced)], [reduced.side_output(OUTPUT)], criteria)

    return body


def reduced(
    seed: int, *, max_round: int, synchronous: bool, rounds: int | None = None, ahead: int | None = 0
) -> tuple[Flow, list[Collected]]:
    flow = Flow("loop")
    outputs = iterate_bounded_streams_until_termination(
        [nothing(flow)],
        [sequence(flow, seed)],
        reducing(max_round, synchronous=synchronous, rounds=rounds),
        IterationConfig(max_epochs_ahead=ahead),
    )
    return flow, [output.collect() for output in outputs]


def per_round(seed: int, *, rounds: int, memory_bytes: int = 1 << 20) -> tuple[Flow, list[Collected]]:
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        spread = data[0].map(lambda value: value, name="path")
        summed = connect(variable=variables[0], data=spread).process(
            lambda: SumOfRound(rounds), name="sum", parallelism=1
        )
        return IterationBodyResult([summed], [summed.side_output(OUTPUT)])

    outputs = iterate_bounded_streams_until_termination(
        [flow.from_items([0])],
        [replayed(sequence(flow, seed))],
        body,
        IterationConfig(operator_life_cycle=OperatorLifeCycle.PER_ROUND, replay_memory_bytes=memory_bytes),
    )
    return flow, [output.collect() for output in outputs]


def mixed(seed: int) -> tuple[Flow, list[Collected]]:
    flow = Flow("loop")

    def sum_rounds(streams: list[Stream]) -> list[Stream]:
        summed = connect(variable=streams[0], data=streams[1]).process(lambda: SumOfRound(6), name="sum", parallelism=1)
        return [summed, summed.side_output(OUTPUT)]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        numbers, sums = for_each_round([variables[0], data[0]], sum_rounds)
        all_round = reducing(5, synchronous=True)([variables[1]], [data[1]])
        feedback = [numbers, *all_round.feedback_variable_streams]
        return IterationBodyResult(feedback, [sums, *all_round.output_streams])

    outputs = iterate_bounded_streams_until_termination(
        [flow.from_items([0]), nothing(flow)], [replayed(sequence(flow, seed)), sequence(flow, seed + 1)], body
    )
    return flow, [output.collect() for output in outputs]


def each_round(rounds: int) -> list[Any]:
    return [(epoch, SUM) for epoch in range(rounds)]


LIMITS = [ChannelLimits(records=1), ChannelLimits(records=2), ChannelLimits(records=3), ChannelLimits()]


@pytest.mark.parametrize("seed", range(4))
def test_data_is_summed_in_each_round_synchronously(seed: int) -> None:
    """A callback came before the records of its round from four instances behind a keyed exchange."""
    flow, [outputs] = reduced(seed, max_round=4, synchronous=True)
    run(flow, seed=seed, limits=LIMITS[seed])
    assert outputs.items == [*each_round(5), "terminated"]


@pytest.mark.parametrize(("seed", "ahead"), [(0, 0), (1, 1), (2, None), (3, 0), (0, None)])
def test_criteria_stop_after_four_rounds(seed: int, ahead: int | None) -> None:
    """Criteria did not stop the loop, whose feedback would last forty rounds, after four callbacks."""
    flow, [outputs] = reduced(seed, max_round=40, synchronous=True, rounds=4, ahead=ahead)
    run(flow, seed=seed, limits=LIMITS[seed])
    assert outputs.items == [*each_round(4), "terminated"]


@pytest.mark.parametrize(("seed", "ahead"), [(0, 0), (1, 2), (3, None)])
def test_data_is_summed_in_each_round_asynchronously(seed: int, ahead: int | None) -> None:
    """Records that overtook records of earlier rounds were counted in another round."""
    flow, [outputs] = reduced(seed, max_round=4, synchronous=False, ahead=ahead)
    run(flow, seed=seed, limits=LIMITS[seed])
    assert outputs.items[-1] == "terminated"
    assert len(outputs.items) == 5 * TOTAL + 1
    assert sorted(dict(outputs.items[:-1]).items()) == each_round(5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_replayed_data_is_summed_per_round(seed: int, memory_bytes: int) -> None:
    """A sum from the round before doubled the sum of the next round."""
    flow, [sums] = per_round(seed, rounds=5, memory_bytes=memory_bytes)
    run(flow, seed=seed, limits=LIMITS[seed])
    assert sums.items == each_round(5)


@pytest.mark.parametrize("seed", range(4))
def test_per_round_and_all_round_steps_side_by_side(seed: int) -> None:
    """With two variables and two data streams, one replayed, one part ended the other too early."""
    flow, [sums, outputs] = mixed(seed)
    run(flow, seed=seed, limits=LIMITS[seed])
    assert sums.items == each_round(6)
    assert outputs.items == [*each_round(6), "terminated"]


# -- failures --------------------------------------------------------------------------------------------


def records_in(job: Job, *steps: str) -> int:
    return sum(job.statistics().step(step).records_in for step in steps)


async def fail_after(make: Callable[[], tuple[Flow, Any]], records: int, steps: tuple[str, ...]) -> list[Any]:
    """Abort a job after this number of records, restore its last snapshot, and return the collected outputs."""
    flow, _ = make()
    job = await flow.start(channel_limits=ChannelLimits(records=20))
    async with asyncio.timeout(PATIENCE_S):
        while records_in(job, *steps) < records:
            for _ in range(10):  # Statistics take longer than one turn.
                await asyncio.sleep(0)
        snapshot = await job.snapshot()
    await job.stop("abort")
    flow, collected = make()
    await ended(await flow.start(channel_limits=ChannelLimits(records=20), snapshot=snapshot))
    return [outputs.items for outputs in collected]


@pytest.mark.parametrize("records", [0, 1_000, 3_975])
@pytest.mark.parametrize("ahead", [0, None])
@pytest.mark.parametrize("synchronous", [True, False])
def test_after_a_failure_on_the_feedback_path_every_round_sums_up(
    records: int, ahead: int | None, synchronous: bool
) -> None:
    """A record that was on the feedback path when the barrier passed was lost or counted twice."""

    def make() -> tuple[Flow, list[Collected]]:
        return reduced(records, max_round=4, synchronous=synchronous, ahead=ahead)

    [outputs] = run_shuffled(fail_after(make, records, ("reduce",)), records)
    assert outputs[-1] == "terminated"
    assert outputs.count("terminated") == 1
    assert sorted(dict(outputs[:-1]).items()) == each_round(5)
    assert len(outputs) == (6 if synchronous else 5 * TOTAL + 1)


@pytest.mark.parametrize("records", [0, 250, 1_000, 1_531, 2_000, 2_719, 3_975])
@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_after_a_failure_in_the_replayed_data_every_round_sums_up(records: int, memory_bytes: int) -> None:
    """The replay started again from its first record, or continued with records that it had not kept."""

    def make() -> tuple[Flow, list[Collected]]:
        return per_round(records, rounds=4, memory_bytes=memory_bytes)

    [sums] = run_shuffled(fail_after(make, records, ("path",)), records)
    assert sums == each_round(4)


@pytest.mark.parametrize("records", [0, 500, 2_250, 4_750])
def test_after_a_failure_both_parts_of_a_mixed_body_sum_up(records: int) -> None:
    """An unfinished round of the per-round part started again, while the all-round part continued."""
    sums, outputs = run_shuffled(fail_after(lambda: mixed(records), records, ("reduce",)), records)
    assert sums == each_round(6)
    assert outputs == [*each_round(6), "terminated"]
