"""The event loop of simulations has simulated time and shuffled turns, and depends only on the seed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from streamiter.testing.simulated_time import SimulatedTime, Trace, where_tasks_wait
from streamiter.testing.simulation.event_loop import Deadlock, Shuffle, SimulatedEventLoop, drop_all


class Run:
    """A simulated loop, with the notes of its tasks."""

    def __init__(self, seed: int = 0, window: int = 8) -> None:
        self.time, self.trace = SimulatedTime(), Trace()
        self.loop = SimulatedEventLoop(self.time, Shuffle(seed, window), self.trace)
        self.noted: list[Any] = []

    def main(self, function: Callable[[Run], Awaitable[Any]]) -> Any:
        """Run a coroutine function to its end."""
        task = self.loop.create_task(function(self), name="main")
        self.loop.run(until=task.done)
        drop_all(self.loop)
        return task.result()


async def three_tasks(run: Run) -> None:
    async def count(name: str) -> None:
        for number in range(4):
            run.noted.append(f"{name}{number}")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(count(name))


def test_the_order_of_tasks_follows_from_the_seed_and_from_nothing_else() -> None:
    """A failure that its seed does not repeat cannot be examined."""
    orders = {}
    for seed in range(20):
        one, other = Run(seed), Run(seed)
        one.main(three_tasks)
        other.main(three_tasks)
        assert (one.noted, one.trace.hash) == (other.noted, other.trace.hash)
        orders[tuple(one.noted)] = seed
        for name in "abc":
            assert [noted for noted in one.noted if noted[0] == name] == [f"{name}{n}" for n in range(4)]
    assert len(orders) > 10


def test_without_a_window_the_order_is_that_of_asyncio() -> None:
    """The undisturbed run must have the same order as a run outside of simulations."""
    simulated = Run(window=0)
    simulated.main(three_tasks)
    real = Run()
    asyncio.run(three_tasks(real))
    drop_all(real.loop)
    assert simulated.noted == real.noted


@pytest.mark.parametrize("seed", range(10))
def test_callbacks_keep_their_order_and_a_task_starts_before_later_requests(seed: int) -> None:
    """Asyncio promises both, and code relies on them: a task that was cancelled before its start closed nothing."""

    async def main(run: Run) -> None:
        async def child() -> None:
            run.noted.append("begun")
            await asyncio.get_running_loop().create_future()

        loop = asyncio.get_running_loop()
        for number in range(10):
            loop.call_soon(run.noted.append, number)
        for _ in range(5):
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
            assert run.noted.pop(run.noted.index("begun")) == "begun"
            task.cancel()
        await asyncio.sleep(1)

    run = Run(seed, window=32)
    run.main(main)
    assert run.noted == list(range(10))


def test_time_jumps_if_all_tasks_wait_and_timers_keep_their_order() -> None:
    """An hour of simulated waiting must cost nothing."""

    async def main(run: Run) -> float:
        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)
            run.noted.append(seconds)

        await asyncio.gather(*(sleep(seconds) for seconds in (3600.0, 60.0, 7200.0)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    run = Run()
    assert run.main(main) == pytest.approx(7210, abs=1)
    assert run.noted == [60.0, 3600.0, 7200.0]


def test_functions_for_threads_run_in_this_thread() -> None:
    """The operating system would decide when a real thread runs."""

    async def main(run: Run) -> list[Any]:
        loop = asyncio.get_running_loop()
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, divmod, 1, 0)
        return [await asyncio.to_thread(threading.get_ident), await loop.run_in_executor(None, divmod, 7, 2)]

    assert Run().main(main) == [threading.get_ident(), (3, 1)]


def test_a_deadlock_is_found_with_the_places_where_tasks_wait() -> None:
    """A simulation that hangs gives no information about its cause."""

    async def main(run: Run) -> None:
        first, second = asyncio.Lock(), asyncio.Lock()

        async def take(one: asyncio.Lock, other: asyncio.Lock) -> None:
            async with one:
                await asyncio.sleep(0.1)
                await other.acquire()

        await asyncio.gather(take(first, second), take(second, first))

    run = Run()
    task = run.loop.create_task(main(run), name="main")
    with pytest.raises(Deadlock):
        run.loop.run(until=task.done)
    waiting = where_tasks_wait(run.loop.unfinished)
    assert len(waiting) == 3
    assert all("Lock.acquire (locks.py:" in line for line in waiting[1:])
    drop_all(run.loop)


def test_a_dropped_task_takes_no_turn_and_gives_no_warning() -> None:
    """A crash must leave no task that Python closes, or warns of, in the middle of the next run."""
    reached: list[str] = []

    async def main(run: Run) -> None:
        async def stubborn() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(1)
                reached.append("behind an await in a finally block")

        async def never_begun() -> None:
            reached.append("begun")

        async def numbers() -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                raise ValueError("the generator fails when it is closed")

        async def in_the_middle() -> None:
            async for _ in numbers():
                await asyncio.sleep(3600)

        async def given(awaitable: Awaitable[None]) -> None:
            await awaitable

        async with asyncio.TaskGroup() as group:
            group.create_task(stubborn())
            group.create_task(in_the_middle())
            await asyncio.sleep(0.1)
            group.create_task(given(never_begun()))
            run.noted.append("all there")
            await asyncio.sleep(3600)

    run = Run(window=0)
    run.loop.create_task(main(run))
    run.loop.run(until=lambda: bool(run.noted))
    drop_all(run.loop)
    gc.collect()  # Warnings are errors, so this fails if a dropped task warns.
    assert reached == []


def test_a_paused_loop_can_continue() -> None:
    """Fencing exists because a paused process can be replaced and then continue."""
    one, other = Run(seed=1), Run(seed=2)
    tasks = [run.loop.create_task(three_tasks(run)) for run in (one, other)]
    while not all(task.done() for task in tasks):
        for run, task in zip((one, other), tasks, strict=True):
            turns = run.trace.turns + 3
            run.loop.run(until=lambda run=run, task=task, turns=turns: task.done() or run.trace.turns >= turns)  # type: ignore[misc]
    assert sorted(one.noted) == sorted(other.noted)
    drop_all(one.loop)
    drop_all(other.loop)
