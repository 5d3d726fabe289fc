"""Random numbers that follow from a seed, a sequence of their own for each purpose."""

from __future__ import annotations

import asyncio
import heapq
import random
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

from streamiter.clock import TimerHandle
from streamiter.errors import InternalError
from streamiter.testing.clock import Timer

__all__ = [
    "SimulatedTime",
    "SimulationFailed",
    "TaskClock",
    "Trace",
    "at_once",
    "generator",
    "where_tasks_wait",
]


def generator(seed: int, purpose: str) -> random.Random:
    """What is drawn for one purpose does not depend on how much was drawn for another.

    >>> generator(1, "faults").random() == generator(1, "faults").random()
    True
    """
    return random.Random(f"{seed} {purpose}")  # noqa: S311 (nothing here is a secret)


# FNV-1a, 64 bits (Fowler, Noll, Vo), over whole numbers instead of bytes: a difference in one changes all that follow.
_FNV_BASIS: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_64_BITS: Final = (1 << 64) - 1

# Enough to see what led to a failure, and still to be read.
_EVENTS_KEPT: Final = 60


class Trace:
    """The rolling hash of every decision, and the last events.

    Two runs with equal hashes have taken the same turns in the same order.

    >>> one, other = Trace(), Trace()
    >>> one.turn(3), one.event(0.5, "crash"), other.turn(4), other.event(0.5, "crash")
    (None, None, None, None)
    >>> one.hash == other.hash, one.events
    (False, ['     0.500 s  crash'])

    What happened in a simulation: a hash of all of it, and the last of it in words.
    """

    def __init__(self) -> None:
        self._hash = _FNV_BASIS
        self.turns = 0
        """Turns of tasks so far."""
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)

    @property
    def hash(self) -> str:
        """Of all so far, 16 hexadecimal digits."""
        return f"{self._hash:016x}"

    @property
    def events(self) -> list[str]:
        """The last ones, in order."""
        return list(self._events)

    def turn(self, task: int) -> None:
        """A task has its turn."""
        self.turns += 1
        self._hash = ((self._hash ^ task) * _FNV_PRIME) & _64_BITS

    def event(self, now_s: float, what: str) -> None:
        """Something else that follows from the seed: a fault, a crash, a commit."""
        line = f"{now_s:10.3f} s  {what}"
        self._hash = ((self._hash ^ zlib.crc32(line.encode())) * _FNV_PRIME) & _64_BITS
        self._events.append(line)


class SimulationFailed(AssertionError):
    """A flow did not do under one seed what it does undisturbed.

    ``seed`` replays it exactly; ``what`` is the finding in a line or two, ``trace_hash`` that of the run so far.

    How a simulation says what it has found.
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
    """A line for each task: its name, and the line of code it waits in."""
    return [f"{task.get_name()} waits in {_innermost(task.get_coro())}" for task in tasks]


def _innermost(awaitable: Any) -> str:
    """The last frame of a chain of coroutines."""
    place = "code that has not begun"
    while awaitable is not None:
        frame: FrameType | None = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        code: CodeType | None = getattr(awaitable, "cr_code", None) or getattr(awaitable, "gi_code", None)
        if frame is None or code is None:
            break
        place = f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return place


T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for; no event loop is needed.

    >>> async def two(): return 2
    >>> at_once(two())
    2

    Calling what is a coroutine function but does not wait.
    """
    try:
        coroutine.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    coroutine.close()
    raise InternalError("a coroutine was expected to return at once, and waits")


# The date at which every simulation begins: 2023-11-14.
_START_MS: Final = 1_700_000_000_000


class SimulatedTime:
    """The clock of what survives crashes: topics, the store, whoever feeds the inputs.

    Its timers are called between the turns of tasks.

    >>> time, heard = SimulatedTime(), []
    >>> timer = time.call_later(2.0, lambda: heard.append(time.monotonic_s()))
    >>> time.pass_until(3.0)
    >>> heard, time.now_ms() - SimulatedTime().now_ms()
    ([2.0], 3000)

    Time in a simulation: it passes with each turn of a task, and jumps where all wait.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._asked_for = 0
        self._timers: list[tuple[float, int, Timer]] = []

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return _START_MS + round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        """Seconds since the simulation began."""
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` when so many seconds have passed, whatever has crashed meanwhile."""
        timer = Timer(callback)
        self._asked_for += 1
        heapq.heappush(self._timers, (self.now_s + max(0.0, delay_s), self._asked_for, timer))
        return timer

    async def sleep(self, delay_s: float) -> None:
        """Wait, in the running loop."""
        await asyncio.sleep(delay_s)

    @property
    def next_timer_s(self) -> float | None:
        """When the next call is due, None if there is none."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def pass_until(self, until_s: float) -> None:
        """Let time pass; what becomes due is called at its own time."""
        while self._timers and self._timers[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                self.now_s = max(self.now_s, due_s)
                timer.fire()
        self.now_s = max(self.now_s, until_s)


class TaskClock:
    """The clock of a job: its timers end with the event loop they were asked for in."""

    def __init__(self, time: SimulatedTime) -> None:
        self._time = time

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return self._time.now_ms()

    def monotonic_s(self) -> float:
        """Seconds since the simulation began."""
        return self._time.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` in the running loop when so many seconds have passed."""
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        """Wait."""
        await asyncio.sleep(delay_s)
