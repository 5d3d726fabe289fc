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
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["ReadyHandles", "Shuffle", "SimulatedFuture", "SimulatedTask", "mixed"]

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
