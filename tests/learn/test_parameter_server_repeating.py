"""Each subtask repeats its data in several passes, at its own pace."""

import asyncio
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import cut_items, ended, run, run_shuffled
from support.waiting import PATIENCE_S, until

from streamiter import Flow, Operator
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.learn.server_training import repeated

IN_MEMORY = 1 << 20


class Tagged(Operator):
    """Emits each record with the index of the subtask."""

    def open(self, context: Any) -> None:
        self.subtask = context.subtask_index

    async def process(self, record: Any, out: Any) -> None:
        await asyncio.sleep(0)
        out.emit((self.subtask, record))


def passing(items: Any, *, passes: int = 3, memory_bytes: int = IN_MEMORY, seed: int = 0) -> tuple[Flow, Any]:
    flow = Flow("again")
    stream = cut_items(flow, items, seed=seed, parallelism=2)
    again = repeated(stream, passes, memory_bytes=memory_bytes, name="again")
    return flow, again.process(Tagged, name="tagged").collect()


def by_subtask(items: list[tuple[int, Any]]) -> list[list[Any]]:
    return [[record for subtask, record in items if subtask == which] for which in range(2)]


@pytest.mark.parametrize("memory_bytes", [IN_MEMORY, 1])
@pytest.mark.parametrize("seed", range(3))
def test_each_subtask_sees_its_records_in_the_same_order_in_every_pass(seed: int, memory_bytes: int) -> None:
    """The order must be the same from memory and from disk."""
    flow, seen = passing(range(21), seed=seed, memory_bytes=memory_bytes)
    run(flow, seed=seed, limits=ChannelLimits(records=3))
    assert by_subtask(seen.items) == [[*range(0, 21, 2)] * 3, [*range(1, 21, 2)] * 3]


def test_arrays_from_disk_equal_the_stored_arrays() -> None:
    """Mini-batches are arrays, and must keep their shape and values on disk."""
    arrays = [np.full((2, 3), float(number)) for number in range(5)]
    flow, seen = passing(arrays, memory_bytes=1, passes=2)
    run(flow)
    assert [record[0, 0] for record in by_subtask(seen.items)[0]] == [0.0, 2.0, 4.0] * 2
    assert all(record.shape == (2, 3) for _, record in seen.items)


@pytest.mark.parametrize("count", [0, 1])
def test_a_subtask_without_records_ends(count: int) -> None:
    """A subtask without records failed because it read its first record."""
    flow, seen = passing(range(count), passes=2)
    assert run(flow).state == "finished"
    assert seen.items == [(0, 0)] * 2 * count


def test_a_subtask_that_hangs_does_not_keep_the_others_from_their_next_pass() -> None:
    """The passes of a replayed stream are epochs that all subtasks share; these passes must not wait for each other."""
    flow = Flow("at their own pace")
    may_go_on = asyncio.Event()

    class Halting(Tagged):
        async def process(self, record: Any, out: Any) -> None:
            if self.subtask == 1:
                await may_go_on.wait()
            await super().process(record, out)

    again = repeated(cut_items(flow, range(20), parallelism=2), 50, memory_bytes=IN_MEMORY, name="again")
    seen = again.process(Halting, name="halting").collect()

    async def main() -> None:
        job = await flow.start(channel_limits=ChannelLimits(records=2))
        await until(lambda: len(seen.items) == 500)
        may_go_on.set()
        await ended(job)

    run_shuffled(asyncio.wait_for(main(), PATIENCE_S))
    assert len(seen.items) == 1_000


@pytest.mark.parametrize("after", [1, 30])
def test_a_job_that_is_drained_ends_in_the_middle_of_a_pass(after: int) -> None:
    """After Ctrl-C the job first made a thousand more passes."""

    async def main() -> list[Any]:
        flow, seen = passing(range(21), passes=1_000)
        job = await flow.start(channel_limits=ChannelLimits(records=3))
        await until(lambda: len(seen.items) >= after)
        assert (await job.stop("drain")).state == "finished"
        return seen.items

    items = run_shuffled(asyncio.wait_for(main(), PATIENCE_S))
    assert after <= len(items) < after + 30
    evens = by_subtask(items)[0]
    assert evens == ([*range(0, 21, 2)] * 9)[: len(evens)]


@pytest.mark.parametrize("after", [1, 9, 25, 60])
@pytest.mark.parametrize("seed", range(2))
def test_a_restored_job_resumes_where_each_subtask_was(after: int, seed: int) -> None:
    """The snapshot comes in the first pass, between two passes, or in the last; no record may be repeated or lost."""

    async def main() -> list[Any]:
        flow, first = passing(range(21), seed=seed)
        job = await flow.start(channel_limits=ChannelLimits(records=3))
        await until(lambda: len(first.items) >= after)
        snapshot = await job.snapshot()
        await job.stop("abort")
        flow, rest = passing(range(21), seed=seed)
        await ended(await flow.start(snapshot=snapshot, channel_limits=ChannelLimits(records=3)))
        return rest.items

    items = run_shuffled(main(), seed)
    assert by_subtask(items) == [[*range(0, 21, 2)] * 3, [*range(1, 21, 2)] * 3]
