"""The statistics of a loop while it runs."""

import asyncio
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import ended, run
from runtime.probe import Valve
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    Stream,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.engine.graph.statistics import LoopStatistics
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits


def loop_of(job: Job) -> LoopStatistics:
    [loop] = job.statistics().loops
    return loop


async def test_epochs_reached_and_records_held_by_a_head() -> None:
    """A loop waited for the slower of its variables, and the statistics did not show its epoch."""
    flow, opened = Flow("loop"), asyncio.Event()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(lambda x: x + 1)
        slow = variables[1].process(lambda: Valve(opened))
        return IterationBodyResult([raised.filter(lambda x: x < 3), slow.filter(lambda x: False)], [])

    initial = [flow.from_items([0, 0]), flow.from_items([0])]
    iterate_unbounded_streams(initial, [], body, IterationConfig(max_epochs_ahead=0))
    job = await flow.start()
    await until(lambda: loop_of(job).held_records == 2 and loop_of(job).epoch_received == 0)
    loop = loop_of(job)
    assert loop.heads == ("variable 0", "variable 1")
    assert (loop.epoch_reached, loop.epoch_received, loop.epoch_complete, loop.ended_in) == (1, 0, 0, None)
    assert (loop.fed_back_records, loop.waiting_records) == (2, 0)
    assert loop.bytes_in_memory > 0
    opened.set()
    await ended(job)
    loop = loop_of(job)
    assert (loop.epoch_reached, loop.epoch_received, loop.epoch_complete, loop.ended_in) == (3, 3, 3, 3)
    assert (loop.fed_back_records, loop.waiting_records, loop.held_records) == (4, 0, 0)
    assert (loop.bytes_in_memory, loop.bytes_on_disk) == (0, 0)


class FeedsMuchBack(Operator):
    """Emits eight records of a kilobyte for the first record, and then waits until it is opened."""

    def __init__(self, opened: asyncio.Event) -> None:
        self._opened = opened

    async def process(self, record: Any, out: Any) -> None:
        if isinstance(record, str):
            for number in range(8):
                # Arrays of different shapes, so that the head does not join them to one batch.
                out.emit_batch(np.zeros((1, 1 + number % 2, 500 - 250 * (number % 2)), np.int16))
        else:
            await self._opened.wait()


async def test_feedback_that_waits_in_memory_and_on_disk_with_its_peaks() -> None:
    """The disk filled up, and the statistics did not show which loop filled it, either then or later."""
    flow, opened = Flow("loop"), asyncio.Event()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0].process(lambda: FeedsMuchBack(opened))], [])

    config = IterationConfig(feedback_limits=FeedbackLimits(memory_bytes=2_500))
    iterate_unbounded_streams([flow.from_items(["first"])], [], body, config)
    job = await flow.start(channel_limits=ChannelLimits(records=1))
    await until(lambda: loop_of(job).fed_back_records == 8 and loop_of(job).waiting_records < 6)
    loop = loop_of(job)
    assert loop.waiting_records >= 1
    assert loop.bytes_on_disk > 0
    opened.set()
    await ended(job)
    [channel] = [channel for task in job.statistics().tasks for channel in task.feedback]
    # The head passes on two of them at once: the channel behind it and its lane have room.
    assert (channel.records, channel.total_records, channel.peak_records, channel.last_epoch) == (0, 8, 6, 1)
    assert 1_000 <= channel.peak_bytes_in_memory <= 2_500
    assert channel.peak_bytes_on_disk >= 4_000
    assert (channel.bytes_in_memory, channel.bytes_on_disk) == (0, 0)


def counts_of_a_bounded_loop(processes: int) -> tuple[object, ...]:
    """Return the final statistics of a loop of six rounds with two heads and criteria, in this many processes."""
    flow = Flow("loop", parallelism=3)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        together = variables[0].union(data[0]).rebalance()
        fed_back = together.filter(lambda x: x > 0).map(lambda x: x - 1)
        return IterationBodyResult([fed_back], [together], fed_back.map(lambda x: x))

    initial, kept = flow.from_items([3, 6, 4]), flow.from_items([0, 0])
    iterate_bounded_streams_until_termination([initial.rebalance()], [replayed(kept.rebalance())], body)
    [loop] = run(flow, seed=processes, processes=processes).loops
    rounds = [(each.first_epoch, each.last_epoch, each.records) for each in loop.rounds]
    epochs = (loop.epoch_reached, loop.epoch_received, loop.epoch_complete, loop.ended_in, loop.end_reason)
    return *epochs, loop.fed_back_records, loop.criteria_records, rounds, loop.waiting_records, loop.held_records


@pytest.mark.parametrize("processes", [2, 3])
def test_the_statistics_of_a_loop_are_those_of_all_processes(processes: int) -> None:
    """Process 0 counted only its own heads, and half of the feedback seemed lost."""
    counts = counts_of_a_bounded_loop(processes)
    assert counts == counts_of_a_bounded_loop(1)
    assert counts[5] == 13
