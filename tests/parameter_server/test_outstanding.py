"""The bound on calls under way: it is never exceeded, callers wait in order, and a cancelled task loses no room."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_S

from streamiter.errors import WorkerHasLeft
from streamiter.parameter_server.calls import Outstanding


async def _turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_room_is_taken_at_once_while_there_is_some() -> None:
    """A call that need not wait cost a turn of the event loop."""
    outstanding = Outstanding(limit=2)
    assert outstanding.take() is None
    with pytest.raises(StopIteration):
        outstanding.acquire().send(None)
    assert outstanding.now == 2


async def test_waiting_callers_get_room_in_order_and_no_other_caller_before_them() -> None:
    """A busy caller took the room that it had just released, and starved all others."""
    outstanding, order = Outstanding(limit=1), []
    assert outstanding.take() is None

    async def call(name: str) -> None:
        await outstanding.acquire()
        order.append(name)

    tasks = [asyncio.ensure_future(call(name)) for name in "abc"]
    await _turns()
    for expected in ("a", "ab", "abc"):
        outstanding.release()
        late = outstanding.take()
        assert late is not None
        late.give_up()
        await _turns()
        assert "".join(order) == expected
    await asyncio.gather(*tasks)
    outstanding.release()
    assert outstanding.now == 0


async def test_a_caller_that_is_cancelled_as_it_gets_room_passes_the_room_on() -> None:
    """Room given to a task in the same turn in which it was cancelled was lost, and finally all calls hung."""
    outstanding = Outstanding(limit=1)
    assert outstanding.take() is None
    first, second = (asyncio.ensure_future(outstanding.acquire()) for _ in range(2))
    await _turns()
    outstanding.release()
    first.cancel()
    await asyncio.wait_for(second, PATIENCE_S)
    assert first.cancelled()
    outstanding.release()
    assert outstanding.now == 0


async def test_callers_waiting_for_room_get_an_error_when_the_client_leaves() -> None:
    """A call that waited for room in a client that had left waited forever."""
    outstanding = Outstanding(limit=1)
    assert outstanding.take() is None
    waiting = [asyncio.ensure_future(outstanding.acquire()) for _ in range(2)]
    await _turns()
    outstanding.fail_waiting(WorkerHasLeft("worker 1 has left"))
    for task in waiting:
        with pytest.raises(WorkerHasLeft, match="worker 1 has left"):
            await task
    outstanding.release()
    assert outstanding.now == 0


@given(
    limit=st.integers(1, 3),
    steps=st.lists(st.sampled_from(["acquire", "release", "cancel", "turn"]), max_size=40),
    chosen=st.randoms(use_true_random=False),
)
def test_any_mix_of_calls_and_cancellations_keeps_the_bound_and_ends_with_room(
    limit: int, steps: list[str], chosen: object
) -> None:
    """The count of room drifted by one after a rare order of a release and a cancellation."""

    async def run() -> None:
        outstanding = Outstanding(limit)
        tasks: list[asyncio.Task[None]] = []

        def holders() -> list[asyncio.Task[None]]:
            return [task for task in tasks if task.done() and not task.cancelled()]

        for step in steps:
            if step == "acquire":
                tasks.append(asyncio.ensure_future(outstanding.acquire()))
            elif step == "release" and holders():
                tasks.remove(holders()[0])
                outstanding.release()
            elif step == "cancel" and tasks:
                chosen.choice(tasks).cancel()  # type: ignore[attr-defined]
            elif step == "turn":
                await asyncio.sleep(0)
            assert outstanding.now <= limit
        await _turns(5)
        while holders():
            tasks.remove(holders()[0])
            outstanding.release()
            await _turns(5)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        assert outstanding.now == 0

    asyncio.run(run())
