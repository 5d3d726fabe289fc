"""Time in tests: a virtual clock, and the time of a simulation with its seeds and its trace."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import random
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Final, Never, TypeVar, final

from streamiter.errors import ConfigurationError, InternalError
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.times import Seconds, in_seconds

# The date at which clocks of tests begin: 2023-11-14.
START_MS: Final = 1_700_000_000_000


class TimedCalls:
    """A clock whose time passes only when it is told to; it calls its timers in the order of their times."""

    def __init__(self, *, start_ms: int = START_MS) -> None:
        """``start_ms`` is its first date, in milliseconds since 1970-01-01 UTC."""
        self._start_ms = start_ms
        self._calls = 0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self.now_s = 0.0
        """The seconds that have passed."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC."""
        return self._start_ms + round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        """Return the seconds that have passed."""
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> VirtualTimer:
        """Call ``callback`` when ``delay_s`` seconds have passed."""
        timer = VirtualTimer(callback)
        self._calls += 1
        heapq.heappush(self._timers, (self.now_s + max(0.0, delay_s), self._calls, timer))
        return timer

    def due_timers(self, until_s: float) -> Iterator[VirtualTimer]:
        """Let time pass up to ``until_s``; yield each timer at its own time, for the caller to fire."""
        while self._timers and self._timers[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                self.now_s = max(self.now_s, due_s)
                yield timer
        self.now_s = max(self.now_s, until_s)


class VirtualClock(TimedCalls):
    """A :class:`~streamiter.values.helpers.clock.Clock` whose time passes only in ``advance``.

    Timers fire in the order of their times, and timers of equal times in the order of their calls. A timer that another
    timer sets within the span fires in the same ``advance``. After each timer the tasks of the event loop run;
    ``advance`` does not wait for threads, sockets and processes.

    >>> async def main():
    ...     clock, heard = VirtualClock(), []
    ...     clock.call_later(2.0, lambda: heard.append(clock.monotonic_s()))
    ...     await clock.advance(1.5)
    ...     await clock.advance(1.5)
    ...     return heard, clock.monotonic_s()
    >>> asyncio.run(main())
    ([2.0], 3.0)
    """

    async def sleep(self, delay_s: Seconds) -> None:
        """Return within the ``advance`` that passes ``delay_s`` seconds from now."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(in_seconds(delay_s), lambda: woken.set_result(None))
        try:
            await woken
        finally:
            timer.cancel()

    @property
    def timers(self) -> int:
        """The count of calls and sleeps that are not yet due."""
        return sum(not timer.is_cancelled for _, _, timer in self._timers)

    async def advance(self, seconds: Seconds) -> None:
        """Let time pass: fire the timers that become due; tasks run before the first and after each of them.

        An exception of a callback is raised here; the time is then the one at which that callback was due.
        """
        seconds = in_seconds(seconds)
        if seconds < 0:
            raise ConfigurationError(
                f"VirtualClock.advance: expected seconds of at least 0, given {seconds}; time does not go back"
            )
        until_s = self.now_s + seconds
        await _let_tasks_run()
        for timer in self.due_timers(until_s):
            timer.fire()
            await _let_tasks_run()
        await _let_tasks_run()


# Turns of the event loop that tasks get after each timer: more than a record needs to pass a dozen tasks, and well
# under a millisecond if there is nothing to do.
_TURNS: Final = 100


async def _let_tasks_run() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@final
class VirtualTimer:
    """A call that is due later, on a clock of tests; it runs once, unless it is cancelled before."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled, or has run."""
        return self._callback is None

    def cancel(self) -> None:
        """Cancel it; without effect after it has run."""
        self._callback = None

    def fire(self) -> None:
        """Run the callback."""
        callback, self._callback = self._callback, None
        assert callback is not None
        callback()


class SimulatedTime(TimedCalls):
    """The time of a simulation, and the clock of what survives crashes: topics, the store, the feeding of inputs.

    Time passes with each turn of a task, and jumps to the next timer when all tasks wait. Timers are called between the
    turns of tasks, also if a job crashes before.

    >>> time, heard = SimulatedTime(), []
    >>> timer = time.call_later(2.0, lambda: heard.append(time.monotonic_s()))
    >>> time.pass_until(3.0)
    >>> heard, time.now_ms() - SimulatedTime().now_ms()
    ([2.0], 3000)
    """

    async def sleep(self, delay_s: float) -> None:
        """Wait, in the running loop."""
        await asyncio.sleep(delay_s)

    @property
    def next_timer_s(self) -> float | None:
        """The time of the next call; None if there is none."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def pass_until(self, until_s: float) -> None:
        """Let time pass; call each timer at its own time."""
        for timer in self.due_timers(until_s):
            timer.fire()


class TaskClock(SystemClock):
    """The clock of a job in simulated time: its timers belong to the running event loop, and end with it."""

    def __init__(self, time: SimulatedTime) -> None:
        self._time = time

    def now_ms(self) -> int:
        return self._time.now_ms()

    def monotonic_s(self) -> float:
        return self._time.now_s


# FNV-1a, 64 bits (Fowler, Noll, Vo), over whole numbers instead of bytes: one difference changes all later hashes.
_FNV_BASIS: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
SIXTY_FOUR_BITS: Final = (1 << 64) - 1

# Enough events to see the cause of a failure, and few enough to read.
_EVENTS_KEPT: Final = 60


class Trace:
    """The trace of a run: a hash of every decision, and the last events in words.

    Two runs with equal hashes have taken the same turns in the same order.

    >>> one, other = Trace(), Trace()
    >>> one.turn(3), one.event(0.5, "crash"), other.turn(4), other.event(0.5, "crash")
    (None, None, None, None)
    >>> one.hash == other.hash, one.events
    (False, ['     0.500 s  crash'])
    """

    def __init__(self) -> None:
        self._hash = _FNV_BASIS
        self.turns = 0
        """The count of turns of tasks so far."""
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)

    @property
    def hash(self) -> str:
        """The hash of all decisions so far, 16 hexadecimal digits."""
        return f"{self._hash:016x}"

    @property
    def events(self) -> list[str]:
        """The last events, in order."""
        return list(self._events)

    def turn(self, task: int) -> None:
        """Record the turn of a task."""
        self.turns += 1
        self._hash = ((self._hash ^ task) * _FNV_PRIME) & SIXTY_FOUR_BITS

    def event(self, now_s: float, what: str) -> None:
        """Record another event that follows from the seed: a fault, a crash, a commit."""
        line = f"{now_s:10.3f} s  {what}"
        self._hash = ((self._hash ^ zlib.crc32(line.encode())) * _FNV_PRIME) & SIXTY_FOUR_BITS
        self._events.append(line)


class SimulationFailed(AssertionError):
    """Under one seed, a flow has not done the same as undisturbed.

    ``seed`` repeats the run exactly; ``what`` is the finding in a line or two; ``trace_hash`` is the hash of the run.
    """

    def __init__(self, flow: str, seed: int, what: str, *, trace_hash: str, events: Sequence[str]) -> None:
        self.seed = seed
        self.what = what
        self.trace_hash = trace_hash
        lines = [
            f"flow {flow!r}, seed {seed}: {what}",
            f"run simulate(…, seed={seed}) again to see exactly the same (trace {trace_hash}). The last events:",
            *(f"  {event}" for event in events),
        ]
        super().__init__("\n".join(lines))


def where_tasks_wait(tasks: Iterable[asyncio.Task[object]]) -> list[str]:
    """Return a line for each task: its name, and the line of code in which it waits."""
    return [f"{task.get_name()} waits in {_innermost(task.get_coro())}" for task in tasks]


def _innermost(awaitable: object) -> str:
    """Return the place of the last frame of a chain of coroutines."""
    place = "code that has not begun"
    while awaitable is not None:
        frame: FrameType | None = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        code: CodeType | None = getattr(awaitable, "cr_code", None) or getattr(awaitable, "gi_code", None)
        if frame is None or code is None:
            break
        place = f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return place


def generator(seed: int, purpose: str) -> random.Random:
    """Return a generator for one purpose, which does not depend on the numbers drawn for another.

    >>> generator(1, "faults").random() == generator(1, "faults").random()
    True
    """
    return random.Random(f"{seed} {purpose}")  # noqa: S311 (nothing here is a secret)


T = TypeVar("T")


def at_once(coroutine: Coroutine[object, None, T]) -> T:
    """Return the result of a coroutine that waits for nothing; it needs no event loop.

    >>> async def two(): return 2
    >>> at_once(two())
    2
    """
    try:
        coroutine.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    coroutine.close()
    raise InternalError("expected a coroutine that returns at once, given one that waits")


class Crashed(BaseException):
    """Raised in code of a crashed job that calls a topic or the store."""


# A coroutine that awaits in each of its finally blocks must be closed once for each of them.
_CLOSINGS_MAX: Final = 100


def unwind(coroutine: Coroutine[object, Never, object]) -> None:
    """Close a coroutine without an event loop, whatever its ``finally`` blocks raise or await."""
    if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        # It has not started: coroutines among its arguments would never be awaited, and Python would warn of them.
        frame = coroutine.cr_frame
        for given in list(frame.f_locals.values()) if frame is not None else []:
            if inspect.iscoroutine(given):
                unwind(given)
    for _ in range(_CLOSINGS_MAX):
        try:
            coroutine.close()
        except (Exception, asyncio.CancelledError, GeneratorExit, Crashed):  # noqa: S112
            continue  # RuntimeError: it awaits again; any other: one of its finally blocks has failed.
        return
