"""What all parts of a simulation share: time, the trace of a run, random numbers, and coroutines without a loop."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import random
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

from streamiter.clock import TimerHandle
from streamiter.errors import InternalError
from streamiter.testing.clock import Timer

# The date at which every simulation begins: 2023-11-14.
_START_MS: Final = 1_700_000_000_000


class SimulatedTime:
    """The time of a simulation, and the clock of what survives crashes: topics, the store, the feeding of inputs.

    Time passes with each turn of a task, and jumps to the next timer when all tasks wait. Timers are called between the
    turns of tasks.

    >>> time, heard = SimulatedTime(), []
    >>> timer = time.call_later(2.0, lambda: heard.append(time.monotonic_s()))
    >>> time.pass_until(3.0)
    >>> heard, time.now_ms() - SimulatedTime().now_ms()
    ([2.0], 3000)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._asked_for = 0
        self._timers: list[tuple[float, int, Timer]] = []

    def now_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC."""
        return _START_MS + round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        """Return the seconds since the simulation began."""
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` when so many seconds have passed, also if a job crashes meanwhile."""
        timer = Timer(callback)
        self._asked_for += 1
        heapq.heappush(self._timers, (self.now_s + max(0.0, delay_s), self._asked_for, timer))
        return timer

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
        while self._timers and self._timers[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                self.now_s = max(self.now_s, due_s)
                timer.fire()
        self.now_s = max(self.now_s, until_s)


class TaskClock:
    """The clock of a job: its timers belong to the running event loop, and end with it."""

    def __init__(self, time: SimulatedTime) -> None:
        self._time = time

    def now_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC."""
        return self._time.now_ms()

    def monotonic_s(self) -> float:
        """Return the seconds since the simulation began."""
        return self._time.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` in the running loop when so many seconds have passed."""
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        """Wait."""
        await asyncio.sleep(delay_s)


# FNV-1a, 64 bits (Fowler, Noll, Vo), over whole numbers instead of bytes: one difference changes all later hashes.
_FNV_BASIS: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3


_64_BITS: Final = (1 << 64) - 1


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
        self._hash = ((self._hash ^ task) * _FNV_PRIME) & _64_BITS

    def event(self, now_s: float, what: str) -> None:
        """Record another event that follows from the seed: a fault, a crash, a commit."""
        line = f"{now_s:10.3f} s  {what}"
        self._hash = ((self._hash ^ zlib.crc32(line.encode())) * _FNV_PRIME) & _64_BITS
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


def where_tasks_wait(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """Return a line for each task: its name, and the line of code in which it waits."""
    return [f"{task.get_name()} waits in {_innermost(task.get_coro())}" for task in tasks]


def _innermost(awaitable: Any) -> str:
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


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
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


def unwind(coroutine: Coroutine[Any, Any, Any]) -> None:
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
