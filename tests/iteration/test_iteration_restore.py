"""A restored loop has the same results as an undisturbed one, with a snapshot at any moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from iteration.iteration_support import Dawdle, Endless
from support.waiting import PATIENCE_S, until

from streamiter import Flow, IterationBodyResult, IterationConfig, Stream, epochs_every, iterate_unbounded_streams
from streamiter.iteration.progress import Ended, LoopProgress
from streamiter.runtime.checkpointing.commit import JobSnapshot


def going_round(flow: Flow, initial: Stream, data: list[Stream], ahead: int | None, seed: int) -> Any:
    """Each record is a number and its remaining rounds; the outputs of all rounds are collected."""

    def body(variables: list[Stream], entered: list[Stream]) -> IterationBodyResult:
        every = variables[0].rebalance().union(*(stream.rebalance() for stream in entered))
        slow = every.rebalance().process(lambda: Dawdle(seed), name="slow", parallelism=2)
        back = slow.filter(lambda x: x[1] > 0).map(lambda x: (x[0], x[1] - 1))
        return IterationBodyResult([back.rebalance()], [slow])

    config = IterationConfig(max_epochs_ahead=ahead)
    [passed] = iterate_unbounded_streams([initial], data, body, config)
    return passed.collect()


def rounds(items: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted((number, left) for number, times in items for left in range(times + 1))


@pytest.mark.parametrize("records", [2, 3, 12])
async def test_data_that_is_held_at_the_entrance_when_its_source_has_ended(records: int) -> None:
    """The end was queued after data of an epoch that never came, and the barrier waited for that end."""
    items = [(number, 0) for number in range(records)]

    def made() -> tuple[Flow, Any]:
        flow = Flow("loop")
        held = epochs_every(flow.from_items(items), records=1)
        silent = epochs_every(flow.from_source(Endless()), records=1)
        return flow, going_round(flow, flow.from_items([]), [held, silent], 0, 0)

    snapshot: JobSnapshot | None = None
    for _ in range(3):
        flow, passed = made()
        job = await flow.start(snapshot=snapshot)
        await until(lambda passed=passed: len(passed.items) == 1)  # type: ignore[misc]
        for _ in range(50):
            await asyncio.sleep(0)
        snapshot = await asyncio.wait_for(job.snapshot(), PATIENCE_S)
        await job.stop("abort")
    flow, passed = made()
    job = await flow.start(snapshot=snapshot)
    await asyncio.wait_for(job.stop("drain"), PATIENCE_S)
    assert sorted(passed.items) == items


def test_a_restored_loop_decides_nothing_until_every_head_has_reported_again() -> None:
    """The entrances reported first: an epoch counted as without feedback, and the loop ended with records in it."""
    progress = LoopProgress(heads=2, entrances=1)
    assert progress.entrance_ended(0) == []
    progress.head_restored(0, received=1, counts=[(1, 0)])
    progress.head_restored(1, received=1, counts=[(1, 5)])
    decisions = progress.resume_after(released=1, complete=0, ended_in=None)
    assert not any(isinstance(decision, Ended) for decision in decisions)
    assert progress.last_complete == 1
