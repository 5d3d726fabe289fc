"""The feedback edge never blocks, starves no input, uses the disk, and ends the job at a limit with a clear error."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import SMALL, cut_items, run
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    OutputTag,
    Stream,
    connect,
    epochs_every,
    iterate_unbounded_streams,
)
from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import JobFailed
from streamiter.operators.source import Source, SourceBatch

LEAVES = OutputTag("leaves")


def in_memory(size_bytes: int, disk_bytes: int = 1 << 30) -> IterationConfig:
    return IterationConfig(feedback_limits=FeedbackLimits(memory_bytes=size_bytes, disk_bytes=disk_bytes))


class Branch(Operator):
    """Makes ``width`` records of the next depth from a record (depth, number); the deepest records leave the loop."""

    def __init__(self, width: int) -> None:
        self._width = width

    def process(self, record: tuple[int, int], out: Any) -> None:
        depth, number = record
        if depth == 0:
            out.emit(number, tag=LEAVES)
        else:
            for branch in range(self._width):
                out.emit((depth - 1, number * self._width + branch))


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("memory_bytes", [0, 10_000, 64 << 20])
@pytest.mark.parametrize("seed", range(2))
def test_a_loop_that_multiplies_its_records_never_deadlocks(limit: int, memory_bytes: int, seed: int) -> None:
    """Every channel of the loop was full and waited for the next one, and the last waited for the first."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        spread = variables[0].rebalance().map(lambda x: x, parallelism=2)
        branched = spread.process(lambda: Branch(10), parallelism=2)
        return IterationBodyResult([branched.rebalance()], [branched.side_output(LEAVES)])

    [leaves] = iterate_unbounded_streams(
        [cut_items(flow, [(3, 0), (3, 1)], seed=seed)], [], body, in_memory(memory_bytes)
    )
    collected = leaves.collect()
    run(flow, seed=seed, limits=ChannelLimits(records=limit))
    assert sorted(collected.items) == list(range(2_000))


def test_feedback_on_disk_returns_in_order() -> None:
    """Feedback of one edge came from disk in another order than it was written."""
    flow = Flow("loop")

    class Pump(Operator):
        """Makes many records from the first record; they leave when they return."""

        def process(self, record: int, out: Any) -> None:
            if record < 0:
                for start in range(0, 20_000, 100):
                    out.emit_batch(np.arange(start, start + 100))
            else:
                out.emit(int(record), tag=LEAVES)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        pumped = variables[0].process(Pump)
        return IterationBodyResult([pumped], [pumped.side_output(LEAVES)])

    [leaves] = iterate_unbounded_streams([flow.from_items([-1])], [], body, in_memory(1_000))
    collected = leaves.collect()
    statistics = run(flow)
    assert collected.items == list(range(20_000))
    [channel] = [channel for task in statistics.tasks for channel in task.feedback]
    assert channel.peak_bytes_on_disk > 0
    # Above the limit memory holds only the next batch.
    assert channel.peak_bytes_in_memory < channel.peak_bytes_on_disk / 2


def test_past_its_disk_limit_the_job_ends_with_an_error_that_names_the_loop() -> None:
    """A loop without limit that multiplied its records filled the disk of all programs on the machine."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        branched = variables[0].process(lambda: Branch(50), name="branch")
        return IterationBodyResult([branched], [branched.side_output(LEAVES)])

    config = in_memory(1_000, disk_bytes=100_000)
    iterate_unbounded_streams([flow.from_items([(5, 0)])], [], body, config)
    with pytest.raises(JobFailed, match=r"branch.*expected.*100,?000.*given.*(disk|feedback)"):
        run(flow, limits=SMALL)


class Tap(Source):
    """Gives a record at every read: more new input than the loop can handle."""

    bounded = False

    def __init__(self) -> None:
        self._given = 0

    async def read(self) -> SourceBatch:
        await asyncio.sleep(0)
        self._given += 1
        return SourceBatch([self._given], {"given": self._given})


async def test_new_input_falls_to_one_batch_in_sixteen_but_never_to_none() -> None:
    """A loop that was busy with its feedback did not receive the end of its input, or a new model, for hours."""
    flow = Flow("loop")
    came: list[str] = []

    class Mix(Operator):
        """Feeds everything back, so that the feedback only grows."""

        def process_data(self, record: int, out: Any) -> None:
            came.append("new")
            out.emit(record)

        def process_fed_back(self, record: int, out: Any) -> None:
            came.append("fed back")
            out.emit(record)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mixed = connect(fed_back=variables[0], data=data[0]).process(Mix)
        return IterationBodyResult([mixed], [])

    initial = flow.from_items(range(1_000))
    iterate_unbounded_streams([initial], [flow.from_source(Tap)], body, in_memory(0))
    job = await flow.start(channel_limits=ChannelLimits(records=1))
    await until(lambda: len(came) > 30_000)
    await job.stop("abort")
    busy = came[5_000:30_000]
    new = [place for place, kind in enumerate(busy) if kind == "new"]
    assert len(new) > 10
    # A batch of feedback may have many records after it was on disk, because small batches are joined.
    assert len(new) <= len(busy) / 8


async def test_a_loop_that_is_not_overloaded_is_not_throttled() -> None:
    """The throttling of new input slowed a loop that was not overloaded."""
    flow = Flow("loop")
    seen: list[int] = []

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [data[0]])

    [passed] = iterate_unbounded_streams([flow.from_items([])], [flow.from_items(range(5_000))], body)
    passed.map(seen.append)
    job = await flow.start()
    await job.wait()
    assert seen == list(range(5_000))


async def test_input_ahead_of_its_loop_waits_at_its_source() -> None:
    """A fast topic with a slow model filled the memory with examples of later epochs."""
    flow, taps = Flow("loop"), list[Tap]()

    class Slow(Operator):
        async def process(self, record: int, out: Any) -> None:
            if record > 3:
                await asyncio.Event().wait()
            out.emit(record)

    def tap() -> Tap:
        taps.append(Tap())
        return taps[-1]

    tap.bounded = False  # type: ignore[attr-defined]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        slow = data[0].process(Slow)
        return IterationBodyResult([variables[0].union(slow)], [])

    data = epochs_every(flow.from_source(tap), records=1)
    config = IterationConfig(max_epochs_ahead=0)
    iterate_unbounded_streams([flow.from_items([])], [data], body, config)
    job = await flow.start(channel_limits=ChannelLimits(records=10))
    for _ in range(3_000):
        await asyncio.sleep(0)
    given = taps[0]._given
    for _ in range(3_000):
        await asyncio.sleep(0)
    assert taps[0]._given == given <= 60
    await job.stop("abort")
