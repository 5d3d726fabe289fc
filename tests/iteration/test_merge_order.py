"""A synchronous loop has the same results to the last bit, whichever task is faster and however batches are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from iteration.bounded_bodies import MadeBody, Maker, limits, restored, snapshot_of
from iteration.iteration_support import Dawdle, cut_items, run, run_shuffled
from support.soak import ForEachSeed

from streamiter import (
    FeedbackLimits,
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    connect,
    epochs_every,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.errors import StreamiterError
from streamiter.iteration import terminate_after
from streamiter.runtime.checkpointing.commit import JobSnapshot
from streamiter.runtime.plan import ChannelLimits
from streamiter.testing.simulated_time import SimulatedTime, TaskClock, Trace, where_tasks_wait
from streamiter.testing.simulation.event_loop import Shuffle, SimulatedEventLoop

SEEDS, SHUFFLES = 6, 20


def numbers(count: int, seed: int) -> list[float]:
    """Return numbers of very different sizes: every order of adding them has another sum."""
    drawn = random.Random(seed)
    return [drawn.uniform(-1, 1) * 10 ** drawn.randint(-8, 8) for _ in range(count)]


class Sum(Operator, IterationListener):
    """Adds all its records to one number, and emits it at the end of each epoch with records; keeps it by epoch."""

    def __init__(self) -> None:
        self._sum, self._epochs = 0.0, set[int]()

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: float, out: Any) -> None:
        self._sum = self._sum * 0.9999 + record
        self._epochs.add(self._context.epoch)

    process_left = process_right = process

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        if epoch_watermark in self._epochs:
            out.emit(self._sum)
            self._sum /= 1e3

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        out.emit(self._sum)


class LeftFirst(Sum):
    """Reads a record of the left input before the right input."""

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return None if self._epochs else ("left",)

    def input_ended(self, name: str, out: Any) -> None:
        out.emit(self._sum)


class SumOfRound(Sum):
    """Adds the records of one round; the ends of the inputs count, too."""

    def input_ended(self, name: str, out: Any) -> None:
        self._sum = self._sum / 3 + len(name)

    def finish(self, out: Any) -> None:
        out.emit(self._sum)


# A loop that takes longer stands still.
_WITHIN_S = 100.0


def bounded(flow: Flow, seed: int) -> Stream:
    """Sum replayed data and a variable of several subtasks, also in new operators for each round."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0].partition_by(lambda x: int(x)).process(lambda: Dawdle(seed), parallelism=3).rebalance()
        weights = connect(left=variables[0].broadcast(), right=rows).process(LeftFirst, parallelism=2)

        def part(given: list[Stream]) -> list[Stream]:
            every = given[0].union(given[1]).reduce_all(lambda a, b: 0.9 * a + b)
            return [every.union(connect(left=given[1], right=every).process(SumOfRound, parallelism=2))]

        [joined] = for_each_round([weights, rows], part)
        total = joined.union(weights.map(lambda x: x / 3)).process(Sum, parallelism=1)
        back = weights.rebalance().process(Sum, parallelism=3).map(lambda x: x / 7).rebalance()
        return IterationBodyResult([back], [total], terminate_after(joined, rounds=4, tolerance=1e-30))

    variables = cut_items(flow, numbers(9, 1), seed=seed, parallelism=2)
    data = cut_items(flow, numbers(40, 2), seed=seed, parallelism=2).rebalance()
    config = IterationConfig(feedback_limits=FeedbackLimits(memory_bytes=[0, 300, 1 << 20][seed % 3]))
    return iterate_bounded_streams_until_termination([variables], [replayed(data)], body, config)[0]


def stamped(flow: Flow, seed: int, ahead: int = 0) -> Stream:
    """Sum data with epochs that several subtasks have stamped at different speeds, and its feedback."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0].rebalance().process(lambda: Dawdle(seed), parallelism=2)
        mixed = connect(left=variables[0].rebalance(), right=rows.rebalance()).process(Sum, parallelism=2)
        sums = mixed.union(rows).process(Sum, parallelism=1)
        back = sums.filter(lambda x: abs(x) > 1e-6).map(lambda x: x / 1e4).rebalance()
        return IterationBodyResult([back], [sums])

    variables = cut_items(flow, numbers(5, 3), seed=seed, parallelism=2)
    data = epochs_every(cut_items(flow, numbers(60, 4), seed=seed, parallelism=3), records=4).rebalance()
    config = IterationConfig(max_epochs_ahead=ahead, feedback_limits=FeedbackLimits(memory_bytes=300 * (seed % 2)))
    return iterate_unbounded_streams([variables], [data], body, config)[0]


def sums_of(loop: Callable[[Flow, int], Stream], seed: int) -> list[str]:
    """Return the output of a loop, to the last bit, if this seed decides how fast each task is."""
    flow, time = Flow("sums"), SimulatedTime()
    collected = loop(flow, seed).collect()
    events = SimulatedEventLoop(time, Shuffle(seed, window=seed % 17), Trace())

    async def main() -> None:
        job = await flow.start(clock=TaskClock(time), channel_limits=ChannelLimits(records=1 + seed % 4))
        await job.wait()

    task = events.create_task(main())
    events.run(until=lambda: task.done() or time.now_s > _WITHIN_S)
    assert task.done(), where_tasks_wait(events.unfinished)
    events.close()
    task.result()
    return [float(x).hex() for x in collected.items]


@pytest.mark.parametrize("loop", [bounded, stamped])
def test_sums_of_floats_do_not_depend_on_the_speed_of_tasks(loop: Callable[[Flow, int], Stream]) -> None:
    """A sum behind two subtasks ended in …614 or in …607, depending on which of them was slower."""
    expected = sums_of(loop, 0)
    assert len(expected) > 4
    for seed in range(1, SHUFFLES):
        assert sums_of(loop, seed) == expected, f"seed {seed}"


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_loop_with_repartitioned_stamped_data_ends_if_epochs_may_be_ahead(ahead: int) -> None:
    """An entrance with a batch too far ahead read no channel, not even one with records of the current epoch."""
    for seed in range(SHUFFLES):
        assert len(sums_of(lambda flow, seed: stamped(flow, seed, ahead), seed)) > 4


@pytest.mark.soak
@pytest.mark.parametrize("loop", [bounded, stamped])
def test_sums_of_floats_do_not_depend_on_any_speed(
    loop: Callable[[Flow, int], Stream], for_each_soak_seed: ForEachSeed
) -> None:
    """Only one schedule in a hundred had another sum."""
    expected = sums_of(loop, 0)

    def check(seed: int) -> None:
        assert sums_of(loop, seed) == expected

    for_each_soak_seed(check)


def test_records_before_their_turn_beyond_the_limit_on_disk_end_the_job() -> None:
    """A loop set aside all data of one subtask, and filled the disk."""
    flow = Flow("limit")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0]], [data[0].rebalance().process(Sum, parallelism=1)])

    config = IterationConfig(feedback_limits=FeedbackLimits(memory_bytes=0, disk_bytes=2_000))
    data = cut_items(flow, numbers(2_000, 1), parallelism=2)
    iterate_bounded_streams_until_termination([flow.from_items([])], [data], body, config)
    with pytest.raises(StreamiterError, match="expected at most 2000 bytes of batches waiting on disk"):
        run(flow)


# -- random bodies --------------------------------------------------------------------------------------------


def made_by(seed: int, schedule: int) -> MadeBody:
    made = Maker(seed, ahead=0, sources_seed=schedule).make()
    run(made.flow, seed=schedule, limits=limits(schedule))
    return made


def check_sequences(seed: int) -> None:
    expected = made_by(seed, seed).log
    for schedule in (seed + 1_000, seed + 2_000):
        assert made_by(seed, schedule).log == expected, f"schedule {schedule}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_step_sees_the_same_sequence_of_calls(seed: int) -> None:
    """A record, a callback or the end of an input had another place in one of the runs."""
    check_sequences(seed)


@pytest.mark.soak
def test_every_step_of_any_body_sees_the_same_sequence_of_calls(for_each_soak_seed: ForEachSeed) -> None:
    """An arrangement that no other run has tested had two orders."""
    for_each_soak_seed(check_sequences)


def check_resumed(seed: int) -> None:
    expected, chosen = made_by(seed, seed).log, random.Random(seed)
    for schedule in range(seed, seed + 3):
        snapshot: JobSnapshot | None = None
        for _ in range(chosen.randint(1, 3)):
            made = Maker(seed, ahead=0, sources_seed=seed).make()
            taken = run_shuffled(snapshot_of(made, int(200 * chosen.random() ** 3), schedule, snapshot), schedule)
            snapshot = taken or snapshot
        made = Maker(seed, ahead=0, sources_seed=seed).make()
        run_shuffled(restored(made, snapshot, schedule + 1), schedule + 1)
        assert made.log == expected, f"schedule {schedule}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_resumed_run_has_the_sequence_of_a_run_that_was_never_stopped(seed: int) -> None:
    """Records that were set aside had another place after a restore."""
    check_resumed(seed)


@pytest.mark.soak
def test_a_run_that_is_resumed_at_any_moment_has_the_same_sequence(for_each_soak_seed: ForEachSeed) -> None:
    """Only one snapshot in a hundred was taken at the wrong moment."""
    for_each_soak_seed(check_resumed)
