"""What is ready to run in a simulated event loop, in an order that a seed decides.

>>> ready = ReadyHandles(Shuffle(seed=3, window=8))
>>> async def nothing(): ...
>>> loop = asyncio.new_event_loop()
>>> for name in "abcd":
...     ready.add(asyncio.Handle(print, [name], loop))
>>> while ready:
...     handle, _ = ready.take()
...     handle._run()
a
b
c
d
>>> loop.close()
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, TypeVar, TypeVarTuple, final

from streamiter.testing.simulation.network import unwind
from streamiter.testing.simulation.simulated_time import SimulatedTime, Trace

__all__ = [
    "Deadlock",
    "Shuffle",
    "SimulatedEventLoop",
    "drop_all",
]


_64_BITS: Final = (1 << 64) - 1

CALLBACKS: Final = 0
"""The number under which the callbacks take turns that belong to no task; tasks are counted from 1."""

FIRST_TURN: Final = 1


def mixed(number: int) -> int:
    """Sixty-four bits that look random and follow from the number.

    The finalizer of splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    >>> hex(mixed(1))
    '0x5692161d100b05e5'
    """
    number &= _64_BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return number ^ (number >> 31)


class SimulatedTask(asyncio.Task[Any]):
    """A task that knows its number in its loop, and how many turns it has asked for."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:
        self.number = number
        self.turns = 0
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        """Follows from the seed; asyncio keeps tasks in sets, and cancels them in the order of their hashes."""
        return self.number


class SimulatedFuture(asyncio.Future[Any]):
    """A future that has a number, too."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How far the order of tasks may differ from that in which they became ready.

    A task that has become ready runs after at most ``window`` turns of others that became ready later; an eighth
    of the tasks, which the seed chooses, is eight times as slow. A window of 0 is asyncio's own order.
    """

    seed: int
    window: int

    def delay(self, task: int, turn: int) -> float:
        """Turns that this turn of the task is put off by, from 0."""
        # A task begins before all that was asked for after it, as it does in asyncio: there is code that creates
        # a task, sleeps for 0 seconds, and takes it that the task has begun.
        if not self.window or turn == FIRST_TURN:
            return 0.0
        # Follows from the task and the turn, not from what was drawn before: asyncio itself goes through sets of
        # tasks, whose order differs from process to process.
        drawn = mixed(mixed(self.seed + task * 0x9E3779B97F4A7C15) + turn)
        window = self.window * 8 if task and mixed(self.seed ^ task) % 8 == 0 else self.window
        return window * (drawn / (1 << 64))


class ReadyHandles:
    """Handles by the order they are to run in. Those of tasks are shuffled, all others keep their order."""

    def __init__(self, shuffle: Shuffle) -> None:
        self._shuffle = shuffle
        self._taken = 0
        self._added = 0
        self._last_callback_due = 0.0
        self._heap: list[tuple[float, int, int, asyncio.Handle]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, handle: asyncio.Handle, task: SimulatedTask | None = None) -> None:
        """One more; ``task`` is the one whose turn it is."""
        self._added += 1
        if task is None:
            number = CALLBACKS
            due = self._taken + self._shuffle.delay(CALLBACKS, FIRST_TURN + self._added)
            due = self._last_callback_due = max(self._last_callback_due, due)
        else:
            number = task.number
            task.turns += 1
            due = self._taken + self._shuffle.delay(number, task.turns)
        heapq.heappush(self._heap, (due, self._added, number, handle))

    def take(self) -> tuple[asyncio.Handle, int]:
        """The next one, with the number of its task."""
        _, _, number, handle = heapq.heappop(self._heap)
        self._taken += 1
        return handle, number

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()


# What a turn of a task takes: some hundred records through a chain. Without it nothing that is not made to wait
# would take any time, and no timer would come due before the end.
TURN_S: Final = 0.001

# Tasks that have ended are let go of when there are twice as many as live, and at least these.
_FEW_TASKS: Final = 64

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Deadlock(Exception):
    """Nothing is ready, no timer is set, and somebody still waits.

    An event loop without threads, sockets or real time, whose every decision follows from a seed.
    """


@final
class SimulatedEventLoop(asyncio.BaseEventLoop):
    """Runs tasks in shuffled order, one turn at a time, in simulated time.

    Whoever has it decides after each turn whether there is another one: ``run`` can be left at any await of any
    task, gone on with later, or never. Functions for threads run at once, as a callback. Callbacks that belong to
    no task keep the order they were asked for in.

    >>> async def main():
    ...     asyncio.get_running_loop().call_later(60, print, "a minute later")
    ...     await asyncio.sleep(3600)
    ...     return await asyncio.to_thread(lambda: "an hour later")
    >>> loop = SimulatedEventLoop(SimulatedTime(), Shuffle(seed=1, window=8), Trace())
    >>> task = loop.create_task(main())
    >>> loop.run(until=task.done)
    a minute later
    >>> task.result()
    'an hour later'
    >>> loop.close()
    """

    def __init__(self, time: SimulatedTime, shuffle: Shuffle, trace: Trace) -> None:
        self._is_running = False
        super().__init__()
        self._simulated_time = time
        self._trace = trace
        self._handles = ReadyHandles(shuffle)
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self._tasks_made = 0
        self._futures_made = 0
        self._tasks: list[SimulatedTask] = []
        self._tasks_looked_through_at = _FEW_TASKS
        self.errors: list[dict[str, Any]] = []
        """What asyncio's exception handler was told of: exceptions that nobody looks at."""
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    # -- running ---------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Take turns until the condition holds, which is asked before each.

        Raises :class:`Deadlock` where there is nothing to do and nothing to come.
        """
        around = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        self._is_running = True
        try:
            while not until():
                self._turn()
        finally:
            self._is_running = False
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(around)

    def _turn(self) -> None:
        time = self._simulated_time
        self._take_due_timers()
        while not self._handles:
            time.pass_until(self._next_timer_s())
            self._take_due_timers()
        handle, number = self._handles.take()
        if handle.cancelled():
            return
        self._trace.turn(number)
        time.pass_until(time.now_s + TURN_S)
        handle._run()

    def _take_due_timers(self) -> None:
        timers, now_s = self._timers, self._simulated_time.now_s
        while timers and timers[0][0] <= now_s:
            self._handles.add(heapq.heappop(timers)[2])

    def _next_timer_s(self) -> float:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        dates_s = [self._timers[0][0]] if self._timers else []
        if (of_others := self._simulated_time.next_timer_s) is not None:
            dates_s.append(of_others)
        if not dates_s:
            raise Deadlock
        return min(dates_s)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """An async generator that nobody goes on with is closed by a task, or where all was dropped, by nobody."""
        closing = generator.aclose()
        if self.is_closed():
            unwind(closing)
        else:
            self.create_task(closing)

    def is_running(self) -> bool:
        """Whether one of its tasks has its turn."""
        return self._is_running

    @property
    def is_quiet(self) -> bool:
        """Whether no task is ready."""
        return not self._handles

    @property
    def unfinished(self) -> list[SimulatedTask]:
        """The tasks that have not ended, oldest first."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return self._tasks

    def close(self) -> None:
        """Drop all that is to come."""
        self._handles.clear()
        self._timers.clear()
        super().close()

    # -- what asyncio asks of a loop -------------------------------------------------------------------

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self._simulated_time.now_s

    def create_future(self) -> asyncio.Future[Any]:
        """A future with a number."""
        self._futures_made += 1
        return SimulatedFuture(self._futures_made, loop=self)

    def create_task(
        self, coro: Any, *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """A task with a number, counted in this loop: names that count in the process differ from run to run."""
        self._tasks_made += 1
        number = self._tasks_made
        task = SimulatedTask(coro, number, loop=self, name=str(name or f"task {number}"), context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._tasks_looked_through_at:
            self._tasks_looked_through_at = 2 * len(self.unfinished) + _FEW_TASKS
        return task

    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """Run it as one of the next callbacks, or where it is a turn of a task in shuffled order."""
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        owner = getattr(callback, "__self__", None)
        self._handles.add(handle, owner if isinstance(owner, SimulatedTask) else None)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """The same; there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run it when so many seconds have passed."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run it at that time."""
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, list(args), self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, handle))
        return handle

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        """Run it as one of the next callbacks, in this thread."""
        result: asyncio.Future[T] = self.create_future()
        self.call_soon(_run_at_once, result, func, args)
        return result

    def get_debug(self) -> bool:
        """Off: what it watches are real seconds."""
        return False

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")


def _run_at_once(result: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if result.done():
        return
    try:
        result.set_result(func(*args))
    except Exception as error:
        result.set_exception(error)


def drop_all(loop: SimulatedEventLoop) -> None:
    """End every task of the loop without a turn, and close the loop.

    A process that is killed runs nothing more. Here coroutines are unwound, or Python would do it some time later:
    what their ``finally`` blocks do must be without effect by then, so connections are to be cut before.
    What they raise is nobody's business, and nobody is warned of what they leave undone.

    Dropping all that runs in an event loop, as the end of a process would.
    """
    loop.set_exception_handler(lambda loop, context: None)
    unfinished = loop.unfinished
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What asks for a loop meanwhile gets this one, which is closed, and not a new one that nobody closes.
        around = asyncio._get_running_loop()
        asyncio._set_running_loop(loop)
        try:
            for task in reversed(unfinished):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own way not to warn of it
                coroutine = task.get_coro()
                if inspect.iscoroutine(coroutine):
                    unwind(coroutine)
        finally:
            asyncio._set_running_loop(around)
