"""Replayed data beyond the memory limit: the same results, within the limit."""

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import SMALL, Dawdle, cut_items, ended, run, run_shuffled
from iteration.random_bodies import Show
from support.waiting import PATIENCE_S

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    Stream,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import JobFailed
from streamiter.operators.source import Source, SourceBatch

ROUNDS = 4


def replay(flow: Flow, data: Stream, seed: int, **config: Any) -> Any:
    """Return the records that a slow step receives from replayed data in four rounds."""

    def body(variables: list[Stream], entered: list[Stream]) -> IterationBodyResult:
        token = variables[0].map(lambda x: x + 1).filter(lambda x: x < ROUNDS)
        seen = entered[0].process(lambda: Dawdle(seed)).process(Show)
        return IterationBodyResult([token], [seen])

    [seen] = iterate_bounded_streams_until_termination(
        [flow.from_items([0])], [replayed(data)], body, IterationConfig(**config)
    )
    return seen.collect()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory_bytes", [0, 1_000, 1 << 20])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_replay_from_disk_gives_the_same_records(memory_bytes: int, parallelism: int, seed: int) -> None:
    """Records from disk had another order or another type."""
    flow, rows = Flow("loop"), [(number, "ä" * (number % 7), None) for number in range(60)]
    collected = replay(
        flow, cut_items(flow, rows, seed=seed, parallelism=parallelism), seed, replay_memory_bytes=memory_bytes
    )
    run(flow, seed=seed, limits=SMALL)
    assert sorted(collected.items) == [(epoch, row) for epoch in range(ROUNDS) for row in rows]
    for subtask in range(parallelism):
        for epoch in range(ROUNDS):
            mine = rows[subtask::parallelism]
            assert [row for of, row in collected.items if of == epoch and row in mine] == mine


@pytest.mark.parametrize("memory_bytes", [0, 5_000])
def test_arrays_and_columns_keep_their_types(memory_bytes: int) -> None:
    """A matrix was replayed as a list of lists, and every later step was a hundred times slower."""
    flow, kinds = Flow("loop"), list[Any]()
    columns = Columns({"x": np.arange(100.0), "name": np.array(["a", "b"] * 50)})

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        token = variables[0].map(lambda x: x + 1).filter(lambda x: x < ROUNDS)
        for stream in data:
            stream.process(lambda: Kinds(kinds))
        return IterationBodyResult([token], [])

    matrix = flow.from_items(np.arange(1_000.0).reshape(100, 10))
    data = [replayed(matrix), replayed(flow.from_items(columns))]
    config = IterationConfig(replay_memory_bytes=memory_bytes)
    iterate_bounded_streams_until_termination([flow.from_items([0])], data, body, config)
    run(flow)
    assert sorted(kinds) == sorted(
        ROUNDS * [("Columns", float(np.arange(100.0).sum())), ("ndarray", float(np.arange(1_000.0).sum()))]
    )


class Kinds(Operator):
    """Records the kind of the batches in one round, and the sum of their numbers."""

    def __init__(self, kinds: list[Any]) -> None:
        self._kinds = kinds
        self._sums: dict[tuple[int, str], float] = {}

    def open(self, context: Any) -> None:
        self._context = context

    def process_batch(self, batch: Any, out: Any) -> None:
        numbers = batch.arrays["x"] if isinstance(batch, Columns) else batch
        key = self._context.epoch, type(batch).__name__
        self._sums[key] = self._sums.get(key, 0.0) + float(np.sum(numbers))

    def finish(self, out: Any) -> None:
        self._kinds += [(kind, total) for (_, kind), total in self._sums.items()]


def test_above_its_disk_limit_the_job_ends_with_an_error_that_names_the_remedy() -> None:
    """Replayed data filled the disk of all programs on the machine."""
    flow = Flow("loop")
    limits = FeedbackLimits(disk_bytes=10_000)
    replay(flow, cut_items(flow, ["x" * 1_000] * 30), 0, replay_memory_bytes=1_000, feedback_limits=limits)
    with pytest.raises(
        JobFailed,
        match=r"step 'data 0' .*expected at most 10000 bytes of replayed data on disk, given \d+ with the next batch.*"
        r"raise a limit: IterationConfig\(replay_memory_bytes=…",
    ):
        run(flow)


def test_objects_that_are_no_plain_data_are_refused_only_on_disk() -> None:
    """An object that can be replayed only from memory was refused in memory, or not refused on disk."""
    for memory_bytes in (1 << 20, 0):
        flow = Flow("loop")
        collected = replay(flow, flow.from_items([{1, 2}]), 0, replay_memory_bytes=memory_bytes)
        if memory_bytes:
            run(flow)
            assert collected.items == [(epoch, {1, 2}) for epoch in range(ROUNDS)]
        else:
            with pytest.raises(JobFailed, match=r"step 'data 0' .*set"):
                run(flow)


BLOCKS = 6


class GivesBlocks(Source):
    """Gives arrays so large that each is replayed alone."""

    _given = 0

    def open(self, context: Any, positions: Any) -> None:
        self._given = (positions or {}).get("given", 0)

    async def read(self) -> SourceBatch | None:
        if self._given == BLOCKS:
            return None
        self._given += 1
        return SourceBatch(np.full((16, 16_384), float(self._given)), {"given": self._given})


def blocks_seen(memory_bytes: int) -> tuple[Flow, Any]:
    """Return the epoch and number of every row of the blocks, after a slow step."""
    flow = Flow("blocks")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        token = variables[0].map(lambda x: x + 1).filter(lambda x: x < ROUNDS)
        numbers = data[0].process(lambda: Dawdle(1)).map_batch(lambda batch: batch[:, 0])
        return IterationBodyResult([token], [numbers.process(Show)])

    data = replayed(flow.from_source(GivesBlocks))
    config = IterationConfig(replay_memory_bytes=memory_bytes)
    [seen] = iterate_bounded_streams_until_termination([flow.from_items([0])], [data], body, config)
    return flow, seen.collect()


@pytest.mark.parametrize("memory_bytes", [0, 5 << 20, 1 << 30])
def test_a_replay_resumes_in_its_middle_from_a_snapshot(memory_bytes: int) -> None:
    """The replay started again at its first block, or lost the blocks in transit."""
    expected = [(epoch, number) for epoch in range(ROUNDS) for number in range(1, BLOCKS + 1) for _ in range(16)]
    limits = ChannelLimits(records=16)
    in_the_middle = 0

    async def after(turns: int) -> None:
        nonlocal in_the_middle
        flow, _ = blocks_seen(memory_bytes)
        job = await flow.start(channel_limits=limits)
        for _ in range(turns):
            await asyncio.sleep(0)
        snapshot = await asyncio.wait_for(job.snapshot(), PATIENCE_S)
        await job.stop("abort")
        replayer = snapshot["data 0[0]"]["operators"]["data 0"]["operator"]
        in_the_middle += 0 < replayer["position"] < BLOCKS
        flow, seen = blocks_seen(memory_bytes)
        await ended(await flow.start(channel_limits=limits, snapshot=snapshot))
        assert [(epoch, int(number)) for epoch, number in seen.items] == expected

    for turns in range(0, 120, 12):
        run_shuffled(after(turns), turns)
    assert in_the_middle >= 3


_BIG_REPLAY = """
import resource, sys
import numpy as np
from streamiter import (Flow, IterationBodyResult, IterationConfig, Operator,
    iterate_bounded_streams_until_termination, replayed)
from streamiter.operators.source import Source, SourceBatch

MIB = 1 << 20
times, rounds = int(sys.argv[1]), 5

class Blocks(Source):
    def open(self, context, positions):
        self.given = 0
    async def read(self):
        if self.given == times * 10:
            return None
        self.given += 1
        return SourceBatch(np.full((128, 1024), float(self.given)), {"given": self.given})

class Sum(Operator):
    total = 0.0
    def process_batch(self, batch, out):
        Sum.total += float(batch[:, 0].sum())

def body(variables, data):
    token = variables[0].map(lambda x: x + 1).filter(lambda x: x < rounds)
    data[0].process(Sum)
    return IterationBodyResult([token], [])

flow = Flow("big")
data = replayed(flow.from_source(Blocks))
iterate_bounded_streams_until_termination([flow.from_items([0])], [data], body,
    IterationConfig(replay_memory_bytes=10 * MIB))
flow.run()
blocks = times * 10
assert Sum.total == rounds * 128 * blocks * (blocks + 1) / 2, Sum.total
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def _peak_mib(times: int) -> int:
    """Return the peak of resident memory of a run that replays this multiple of the 10 MiB limit."""
    result = subprocess.run(
        [sys.executable, "-c", _BIG_REPLAY, str(times)], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return int(result.stdout)


def test_memory_is_flat_for_a_stream_of_ten_times_the_limit() -> None:
    """Replayed data of 100 MiB stayed in memory, although the limit was 10 MiB."""
    assert _peak_mib(10) <= _peak_mib(2) + 20
