"""An event loop without threads, sockets or real time, whose every decision follows from a seed.

``SimulatedEventLoop`` runs tasks in an order that the seed shuffles, one turn at a time, in simulated time.
``ReadyHandles`` is its queue:

>>> ready = ReadyHandles(Shuffle(seed=3, window=8))
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
import contextlib
import heapq
import inspect
import random
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple, final

from streamiter.testing.simulated_time import SimulatedTime, Trace, unwind
from streamiter.values.subtasks import mixed

if TYPE_CHECKING:
    from streamiter.testing.simulation.sockets import SimulatedSockets

# The time of a turn of a task: as long as some hundred records take through a chain. If turns took no time, no timer
# would become due before the end.
SIMULATED_TURN_S: Final = 0.001

# Ended tasks are dropped when the list is twice as long as the running tasks, and at least this long.
_FEW_TASKS: Final = 64

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


@final
class SimulatedEventLoop(asyncio.BaseEventLoop):
    """An event loop that runs tasks in shuffled order, one turn at a time, in simulated time.

    The caller of ``run`` decides before each turn whether to continue: it can stop at any await of any task, and call
    ``run`` again, or never. Functions for threads run in this thread, as a callback. Callbacks that belong to no task
    run in the order of their calls.

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

    def __init__(
        self, time: SimulatedTime, shuffle: Shuffle, trace: Trace, sockets: SimulatedSockets | None = None
    ) -> None:
        """``sockets``: the connections to other processes, if there are some."""
        self._is_running = False
        super().__init__()
        self._simulated_time = time
        self._trace = trace
        self._sockets = sockets
        self._handles = ReadyHandles(shuffle)
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self._tasks_made = 0
        self._futures_made = 0
        self._tasks: list[SimulatedTask] = []
        self._tasks_looked_through_at = _FEW_TASKS
        self.errors: list[dict[str, Any]] = []
        """The contexts of exceptions that no code has retrieved."""
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    # -- running ---------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Take turns until the condition holds, which is checked before each turn.

        Raises :class:`Deadlock` if no task is ready and no timer is set.
        """
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        self._is_running = True
        try:
            with _instead_of_the_running(self):
                while not until():
                    self._turn()
        finally:
            self._is_running = False
            sys.set_asyncgen_hooks(*hooks)

    def _turn(self) -> None:
        time = self._simulated_time
        self._take_due_timers()
        if not self._handles:
            pass_time(time, [self])
            return  # A timer may have changed the condition of ``run``.
        handle, number = self._handles.take()
        if handle.cancelled():
            return
        self._trace.turn(number)
        time.pass_until(time.now_s + SIMULATED_TURN_S)
        handle._run()

    def _take_due_timers(self) -> None:
        timers, now_s = self._timers, self._simulated_time.now_s
        while timers and timers[0][0] <= now_s:
            self._handles.add(heapq.heappop(timers)[2])

    def _next_timer_s(self) -> float | None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _close_generator(self, generator: AsyncGenerator[object, object]) -> None:
        """Close an abandoned async generator in a task; after the loop is closed, unwind it."""
        closing = generator.aclose()
        if self.is_closed():
            unwind(closing)
        else:
            self.create_task(closing)

    def is_running(self) -> bool:
        return self._is_running

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is ready to run."""
        return not self._handles

    @property
    def unfinished(self) -> list[SimulatedTask]:
        """The tasks that have not ended, oldest first."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return self._tasks

    def close(self) -> None:
        """Drop all handles and timers, and close the loop."""
        self._handles.clear()
        self._timers.clear()
        super().close()

    async def create_unix_server(self, factory: Any, path: Any = None, **_: Any) -> Any:  # type: ignore[override]
        """Listen for other simulated processes."""
        assert self._sockets is not None
        return self._sockets.listen(self, path, factory)

    async def create_unix_connection(self, factory: Any, path: Any = None, **_: Any) -> Any:  # type: ignore[override]
        """Connect to another simulated process."""
        assert self._sockets is not None
        self._sockets.connect(self, factory(), path)

    # -- the interface of asyncio ----------------------------------------------------------------------

    def time(self) -> float:
        """Return the seconds since the simulation began."""
        return self._simulated_time.now_s

    def create_future(self) -> asyncio.Future[Any]:
        self._futures_made += 1
        return SimulatedFuture(self._futures_made, loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        """Return a task with a number, counted in this loop: numbers of the process differ from run to run."""
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
        """Run a callback as one of the next; a turn of a task in shuffled order."""
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        owner = getattr(callback, "__self__", None)
        self._handles.add(handle, owner if isinstance(owner, SimulatedTask) else None)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, list(args), self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, handle))
        return handle

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        """Run a function as one of the next callbacks, in this thread."""
        result: asyncio.Future[T] = self.create_future()
        self.call_soon(_run_at_once, result, func, args)
        return result

    def get_debug(self) -> bool:
        """Return False: asyncio's debug mode measures real seconds."""
        return False

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")


# A process has a core of its own for some turns, then the others catch up.
_TURNS_OF_A_PROCESS: Final = (1, 2, 4, 16)


def run_together(
    loops: Sequence[SimulatedEventLoop],
    until: Callable[[], bool],
    time: SimulatedTime,
    trace: Trace,
    chosen: random.Random,
) -> None:
    """Take turns of several processes, in any order, until the condition holds. Raises :class:`Deadlock`."""
    while not until():
        for loop in loops:
            loop._take_due_timers()
        if ready := [loop for loop in loops if not loop.is_quiet]:
            loop, last = chosen.choice(ready), trace.turns + chosen.choice(_TURNS_OF_A_PROCESS)
            loop.run(lambda: loop.is_quiet or trace.turns >= last or until())  # noqa: B023 (called at once)
        else:
            pass_time(time, loops)


def pass_time(time: SimulatedTime, loops: Sequence[SimulatedEventLoop]) -> None:
    """Let time pass until the next timer of the world or of these loops, none of which has anything to do."""
    dates_s = [date_s for loop in loops if (date_s := loop._next_timer_s()) is not None]
    if (of_others := time.next_timer_s) is not None:
        dates_s.append(of_others)
    if not dates_s:
        raise Deadlock
    time.pass_until(min(dates_s))
    for loop in loops:
        loop._take_due_timers()


def _run_at_once(result: asyncio.Future[T], func: Callable[[*Arguments], T], args: tuple[*Arguments]) -> None:
    if result.done():
        return
    try:
        result.set_result(func(*args))
    except Exception as error:
        result.set_exception(error)


class Deadlock(Exception):
    """No task is ready and no timer is set, but a task still waits."""


def drop_all(loop: SimulatedEventLoop) -> None:
    """End every task of the loop without a turn, and close the loop, as the end of a process would.

    A killed process runs no more code. Here the coroutines are unwound, or Python would do that some time later. Their
    ``finally`` blocks must have no effect: cut connections before. Their exceptions and warnings are dropped.
    """
    loop.set_exception_handler(lambda loop, context: None)
    unfinished = loop.unfinished
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Code that asks for a loop meanwhile gets this closed one, not a new one that is never closed.
        with _instead_of_the_running(loop):
            for task in reversed(unfinished):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own way to drop the warning
                coroutine = task.get_coro()
                if inspect.iscoroutine(coroutine):
                    unwind(coroutine)


@contextlib.contextmanager
def _instead_of_the_running(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Make a loop the running one of this thread, also in a task of another loop."""
    around, task = asyncio._get_running_loop(), None
    if (
        sys.version_info >= (3, 14) and around is not None
    ):  # A thread has one current task there, not one for each loop.
        task = asyncio.tasks._swap_current_task(around, None)
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(around)
        if sys.version_info >= (3, 14) and task is not None:
            asyncio.tasks._swap_current_task(around, task)


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How far the order of tasks may differ from the order in which they became ready."""

    seed: int
    """Decides the order."""
    window: int
    """A ready task waits for at most this many turns of tasks that became ready later. An eighth of the tasks, which
    the seed chooses, waits eight times as long. 0: asyncio's own order."""

    def delay(self, task: int, turn: int) -> float:
        """Return by how many turns a turn of a task is delayed, from 0."""
        # A task starts before everything that was scheduled after it, as in asyncio: some code creates a task, sleeps
        # for 0 seconds, and assumes that the task has started.
        if not self.window or turn == FIRST_TURN:
            return 0.0
        # The delay follows from the task and the turn, not from earlier draws: asyncio iterates over sets of tasks,
        # whose order differs from process to process.
        drawn = mixed(mixed(self.seed + task * 0x9E3779B97F4A7C15) + turn)
        window = self.window * 8 if task and mixed(self.seed ^ task) % 8 == 0 else self.window
        return window * (drawn / (1 << 64))


class ReadyHandles:
    """The queue of ready handles. Handles of tasks are shuffled; all others keep their order."""

    def __init__(self, shuffle: Shuffle) -> None:
        self._shuffle = shuffle
        self._turns = 0
        self._added = 0
        self._last_callback_due = 0.0
        self._heap: list[tuple[float, int, int, asyncio.Handle]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, handle: asyncio.Handle, task: SimulatedTask | None = None) -> None:
        """Add a handle; ``task`` is its task, if it is the turn of one."""
        self._added += 1
        if task is None:
            number = CALLBACKS
            due = self._turns + self._shuffle.delay(CALLBACKS, FIRST_TURN + self._added)
            due = self._last_callback_due = max(self._last_callback_due, due)
        else:
            number = task.number
            task.turns += 1
            due = self._turns + self._shuffle.delay(number, task.turns)
        heapq.heappush(self._heap, (due, self._added, number, handle))

    def take(self) -> tuple[asyncio.Handle, int]:
        """Remove and return the next handle, with the number of its task."""
        _, _, number, handle = heapq.heappop(self._heap)
        self._turns += 1
        return handle, number

    def clear(self) -> None:
        self._heap.clear()


CALLBACKS: Final = 0
"""The number of callbacks that belong to no task; tasks are counted from 1."""
FIRST_TURN: Final = 1


class SimulatedTask(asyncio.Task[Any]):
    """A task that knows its number in its loop, and the count of its turns."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:
        self.number = number
        self.turns = 0
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        """Return a hash that follows from the seed: asyncio cancels tasks in the order of a set of them."""
        return self.number


class SimulatedFuture(asyncio.Future[Any]):
    """A future with a number."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number
