"""A flow in several processes whose channels are links: planners and links fit together."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from processes.linked_jobs import joined_jobs, run_joined
from runtime.probe import Life, ProbeSource, Valve, turns
from runtime.test_several_processes import Awaited

import streamiter
from streamiter import Columns, Flow, Operator, OutputTag, Stream
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.operators import Output

ODD = OutputTag("odd")


class SplitOdd(Operator):
    def process(self, record: int, out: Output) -> None:
        out.emit(record, tag=ODD) if record % 2 else out.emit(record)


class Both(Operator):
    def process_left(self, record: int, out: Output) -> None:
        out.emit((record, "left"))

    def process_right(self, record: int, out: Output) -> None:
        out.emit((record, "right"))


def connected(stream: Stream) -> Stream:
    return streamiter.connect(left=stream.rebalance(), right=stream.map(lambda n: -n)).process(Both)


KINDS: dict[str, Callable[[Stream], Stream]] = {
    "forward": lambda stream: stream.map(lambda n: n + 1).process(Awaited).map(str),
    "rebalance": lambda stream: stream.rebalance().map(lambda n: n * 2, name="doubled"),
    "broadcast": lambda stream: stream.broadcast().map(lambda n: n, name="copies"),
    "by key": lambda stream: (
        stream.map(lambda n: (n % 7, 1)).key_by(lambda pair: pair[0]).reduce(lambda a, b: (a[0], a[1] + b[1]))
    ),
    "by function": lambda stream: stream.partition_by(lambda n: n // 10).map(lambda n: n, name="tens"),
    "one subtask": lambda stream: stream.map(lambda n: n, parallelism=1).rebalance().map(str, parallelism=4),
    "union": lambda stream: stream.union(stream.rebalance().map(lambda n: -n)).map(str),
    "connect": connected,
    "side output": lambda stream: (split := stream.process(SplitOdd)).union(
        split.side_output(ODD).rebalance().map(lambda n: -n)
    ),
    "reduced": lambda stream: stream.reduce_all(lambda a, b: a + b),
}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_output_is_that_of_one_process(kind: str, processes: int) -> None:
    """Records were lost, doubled or sent to another subtask where an edge crossed processes."""

    def build(_: int) -> tuple[Flow, Any]:
        flow = Flow("f", parallelism=3)
        return flow, KINDS[kind](flow.from_items(range(100), name="numbers")).collect()

    expected, collected = await run_joined(build, 1), await run_joined(build, processes)
    assert Counter(map(str, collected.items)) == Counter(map(str, expected.items))
    assert collected.items


async def test_arrays_and_columns_arrive_with_little_room() -> None:
    """A batch of arrays larger than the limits of a channel stood still before the socket."""

    def build(_: int) -> tuple[Flow, Any]:
        flow = Flow("f", parallelism=2)
        numbers = flow.from_items(list(range(5000))).map_batch(lambda batch: Columns({"n": np.asarray(batch)}))
        sums = numbers.rebalance().map_batch(lambda batch: [int(batch["n"].sum())])
        return flow, sums.collect()

    options = JobOptions(channel_limits=ChannelLimits(records=100, size_bytes=1000))
    assert sum((await run_joined(build, 2, options)).items) == sum(range(5000))


async def test_a_slow_process_holds_the_sources_of_another_back() -> None:
    """A reader in another process was slow, and the memory of the writer grew until the process was killed."""
    life, opened = Life(), asyncio.Event()

    def build() -> Flow:
        flow = Flow("f", parallelism=2)
        flow.from_source(lambda: ProbeSource(life)).rebalance().process(lambda: Valve(opened))
        return flow

    joined = joined_jobs([build(), build()], JobOptions(channel_limits=ChannelLimits(records=4)))
    await joined.start()
    await turns(3000)
    # Each source has a channel for its feeder, and one for each reader: in its process, and over a link.
    assert 4 < life.count("source read") <= 2 * (3 * 4 + 8 * 4 + 5)
    await joined.abort()
