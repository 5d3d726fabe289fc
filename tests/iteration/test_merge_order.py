"""A synchronous loop has the same results to the last bit, whichever task is faster and however batches are cut."""

import asyncio
import random
from typing import Any

import pytest
from iteration.iteration_support import Dawdle, cut_items, run
from iteration.loop_ways import WAYS, Ahead, Build, Loop, Way
from runtime.probe import turns
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
from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.iteration import terminate_after
from streamiter.operators import Context, Output
from streamiter.operators.source import Collected

SHUFFLES = 6


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

    def snapshot(self) -> Any:
        return [self._sum, sorted(self._epochs)]

    def restore(self, state: Any) -> None:
        self._sum, self._epochs = state[0], set(state[1])


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


def bounded(loop: Loop) -> Collected:
    """Sum replayed data and a variable of several subtasks, also in new operators for each round."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0].partition_by(lambda x: int(x)).process(lambda: Dawdle(loop.seed), parallelism=3).rebalance()
        weights = connect(left=variables[0].broadcast(), right=rows).process(LeftFirst, parallelism=2)

        def part(given: list[Stream]) -> list[Stream]:
            every = given[0].union(given[1]).reduce_all(lambda a, b: 0.9 * a + b)
            return [every.union(connect(left=given[1], right=every).process(SumOfRound, parallelism=2))]

        [joined] = for_each_round([weights, rows], part)
        total = joined.union(weights.map(lambda x: x / 3)).process(Sum, parallelism=1)
        back = weights.rebalance().process(Sum, parallelism=3).map(lambda x: x / 7).rebalance()
        return IterationBodyResult([back], [total], terminate_after(joined, rounds=4, tolerance=1e-30))

    variables, data = loop.items(numbers(9, 1), parallelism=2), loop.items(numbers(40, 2), parallelism=2)
    limits = FeedbackLimits(memory_bytes=[0, 300, 1 << 20][loop.seed % 3])
    return loop.collect([variables], [replayed(data.rebalance())], body, feedback_limits=limits)[0]


def stamped(loop: Loop) -> Collected:
    """Sum data with epochs that several subtasks have stamped at different speeds, and its feedback."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0].rebalance().process(lambda: Dawdle(loop.seed), parallelism=2)
        mixed = connect(left=variables[0].rebalance(), right=rows.rebalance()).process(Sum, parallelism=2)
        sums = mixed.union(rows).process(Sum, parallelism=1)
        back = sums.filter(lambda x: abs(x) > 1e-6).map(lambda x: x / 1e4).rebalance()
        return IterationBodyResult([back], [sums])

    variables, data = loop.items(numbers(5, 3), parallelism=2), loop.items(numbers(60, 4), parallelism=3)
    limits = FeedbackLimits(memory_bytes=300 * (loop.seed % 2))
    data = epochs_every(data, records=4).rebalance()
    return loop.collect([variables], [data], body, is_unbounded=True, feedback_limits=limits)[0]


def sums_of(build: Build[Collected], seed: int, way: Way = WAYS["in simulated time"], ahead: Ahead = 0) -> list[str]:
    """Return the output of a loop, to the last bit, if this seed decides how fast each task is."""
    return [float(x).hex() for x in way.run(build, seed, ahead).items]


@pytest.mark.parametrize("build", [bounded, stamped])
def test_sums_of_floats_do_not_depend_on_the_speed_of_tasks_or_the_way(build: Build[Collected]) -> None:
    """A sum behind two subtasks ended in …614 or in …607, depending on which of them was slower."""
    expected = sums_of(build, 0)
    assert len(expected) > 4
    for seed in range(1, SHUFFLES):
        assert sums_of(build, seed) == expected, f"seed {seed}"
    for name, way in WAYS.items():
        assert sums_of(build, SHUFFLES, way) == expected, name


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_loop_with_repartitioned_stamped_data_ends_if_epochs_may_be_ahead(ahead: int) -> None:
    """An entrance with a batch too far ahead read no channel, not even one with records of the current epoch."""
    for seed in range(SHUFFLES):
        assert len(sums_of(stamped, seed, ahead=ahead)) > 4


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [bounded, stamped])
def test_sums_of_floats_do_not_depend_on_any_speed(
    build: Build[Collected], way: str, for_each_soak_seed: ForEachSeed
) -> None:
    """Only one schedule in a hundred had another sum."""
    expected = sums_of(build, 0)

    def check(seed: int) -> None:
        assert sums_of(build, seed, WAYS[way]) == expected

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


class Slow(Operator):
    """Its first subtask takes several turns of the loop for each record."""

    def open(self, context: Context) -> None:
        self.turns = 7 if context.subtask_index == 0 else 0

    async def process(self, record: int, out: Output) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        out.emit(record)


def slow_loop() -> tuple[Flow, Collected]:
    """Return a synchronous loop with two initial and two data channels, one of which is slow."""

    def spread(stream: Stream, name: str) -> Stream:
        return stream.rebalance().map(lambda record: record, parallelism=2, name=name)

    flow = Flow("slow")
    initial = spread(flow.from_items([0] * 4, name="initial"), "spread")
    data = epochs_every(spread(flow.from_items(list(range(1, 41)), name="data"), "spread data"), records=4)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        slow = data[0].process(Slow, name="slow", parallelism=2)
        back = slow.map(lambda record: record, name="back", parallelism=2).rebalance()
        return IterationBodyResult([back], [variables[0].map(lambda record: record, name="seen")])

    [seen] = iterate_unbounded_streams([initial.rebalance()], [data], body, IterationConfig(max_epochs_ahead=0))
    return flow, seen.collect()


async def test_a_synchronous_loop_is_restored_at_any_turn() -> None:
    """An end of data waited behind feedback that was set aside. The restored head took it for feedback, and failed."""
    flow, whole = slow_loop()
    await (await flow.start()).wait()
    restored = 0
    for first_turns in range(20, 400, 9):
        flow, _ = slow_loop()
        job = await flow.start()
        await turns(first_turns)
        try:
            snapshot = await job.snapshot()
        except ConfigurationError:  # The job has ended.
            break
        await job.stop("abort")
        flow, seen = slow_loop()
        await (await flow.start(snapshot=snapshot)).wait()
        assert sorted(seen.items) == sorted(whole.items), first_turns
        restored += 1
    assert restored > 10
