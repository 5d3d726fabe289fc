"""What may go wrong in a simulation, and how much of it does under one seed."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from streamiter.errors import StorageFull, TopicUnavailable
from streamiter.numbers import whole_number
from streamiter.testing.simulation.simulated_time import SimulatedTime, Trace

__all__ = [
    "Crashed",
    "Faults",
    "Levels",
    "NetworkConnection",
    "SimulatedNetwork",
    "SimulatedStorageFull",
    "SimulatedUnavailable",
    "drawn_levels",
    "unwind",
]


# Below the connectors' own deadlines most calls are a little slow; now and then one takes as long as an election.
_SLOW_S_MAX: Final = 2.0

# Longer than sessions and transactions of a simulation last, so that they expire.
_STUCK_S_MAX: Final = 120.0


class SimulatedUnavailable(TopicUnavailable):
    """A fault: the call failed, before or after it took effect."""


class SimulatedStorageFull(StorageFull):
    """A fault: the store had no room."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What may go wrong in the first phase of a simulation; each seed chooses out of it.

    >>> Faults(fenced=False, crashes=1).crashes
    1
    """

    crashes: int = 5
    """At most so many times the job ends early: by a crash, a stop or a pause after which another run has begun."""
    slow: bool = True
    """Calls of topics and of the store take up to seconds."""
    stuck: bool = True
    """For up to two minutes, no call comes back."""
    failing: bool = True
    """Calls fail, before or after they took effect: a commit may have succeeded although an error was raised."""
    duplicates: bool = True
    """Writes outside transactions are stored twice, as by a retry whose first answer was lost."""
    fenced: bool = True
    """Another owner opens the job's transactions."""
    storage_full: bool = True
    """The store has no room for a snapshot."""

    def __post_init__(self) -> None:
        whole_number("Faults: crashes", self.crashes, 0)

    @classmethod
    def none(cls) -> Faults:
        """Nothing goes wrong; tasks still run in shuffled order, and batches are cut at random."""
        switches = {field.name: False for field in fields(cls) if field.name != "crashes"}
        return cls(crashes=0, **switches)


@dataclass(frozen=True, slots=True)
class Levels:
    """How likely each fault is, for a call."""

    slow: float = 0.0
    slow_s_max: float = 0.0
    stuck: float = 0.0
    stuck_s_max: float = 0.0
    failing: float = 0.0
    duplicates: float = 0.0
    fenced: float = 0.0
    """For each turn of the job in which it could be."""
    storage_full: float = 0.0
    cuts_batches: bool = True
    """Whether what is read comes in pieces of random size."""


CALM: Final = Levels()
UNDISTURBED: Final = Levels(cuts_batches=False)


def drawn_levels(faults: Faults, chosen: random.Random) -> Levels:
    """The levels of one seed.

    Each kind is left out by half of the seeds: what hides behind a fault that ends every run early is found by the
    seeds without it (Groce et al., "Swarm testing", ISSTA 2012).
    """

    def level(wanted: bool, highest: float) -> float:
        drawn = chosen.random() < 0.5, chosen.random()
        return highest * drawn[1] if wanted and drawn[0] else 0.0

    return Levels(
        slow=level(faults.slow, 0.5),
        slow_s_max=_SLOW_S_MAX * chosen.choice([0.01, 0.1, 1.0]),
        stuck=level(faults.stuck, 0.01),
        stuck_s_max=_STUCK_S_MAX * chosen.random(),
        failing=level(faults.failing, 0.02),
        duplicates=level(faults.duplicates, 0.5),
        fenced=level(faults.fenced, 0.002),
        storage_full=level(faults.storage_full, 0.3),
    )


T = TypeVar("T")

# Calls that are not slow still let others have their turns in between, now and then: a crash may come there.
_PAUSES: Final = 0.3


class Crashed(BaseException):
    """Whatever of a crashed job still reaches for the world outside gets no further than this."""


class SimulatedNetwork:
    """What lies between all jobs and the world: one state for all calls, which survives crashes.

    The way of a call from a job to its topics and its store, and back: where faults and crashes come in.
    """

    def __init__(self, time: SimulatedTime, trace: Trace, chosen: random.Random, levels: Levels) -> None:
        self.random = chosen
        self.levels = levels
        self.trace = trace
        self._time = time
        self._stuck_until_s = 0.0
        self._waiting: list[asyncio.Future[None]] = []

    def event(self, what: str) -> None:
        """Write down what happened."""
        self.trace.event(self._time.now_s, what)

    def heal(self) -> None:
        """No faults from now on; calls that are stuck come back."""
        self.levels = CALM
        self._stuck_until_s = 0.0
        self._wake()

    def draws(self, probability: float) -> bool:
        """Whether a fault of that probability comes now."""
        return probability > 0.0 and self.random.random() < probability

    async def delay(self, what: str) -> None:
        """What a call waits for on its way."""
        levels = self.levels
        if self.draws(levels.stuck):
            stuck_s = self.random.random() * levels.stuck_s_max
            self.event(f"stuck for {stuck_s:.1f} s, from: {what}")
            self._stuck_until_s = max(self._stuck_until_s, self._time.now_s + stuck_s)
            self._time.call_later(stuck_s, self._wake)
        if self.draws(levels.slow):
            await asyncio.sleep(self.random.random() * levels.slow_s_max)
        elif self.random.random() < _PAUSES:
            await asyncio.sleep(0)
        while self._time.now_s < self._stuck_until_s:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def fail(self, what: str) -> None:
        """Now and then, raise."""
        if self.draws(self.levels.failing):
            self.event(f"fails: {what}")
            raise SimulatedUnavailable(f"{what}: unavailable (simulated)")

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)


class NetworkConnection:
    """What one run of the job has of the network; cut by its crash."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self._is_cut = False

    def cut(self) -> None:
        """The job has crashed: no call of it reaches anything any more."""
        self._is_cut = True

    def check(self) -> None:
        """Raise :class:`Crashed` in a job that has crashed."""
        if self._is_cut:
            raise Crashed

    async def call(self, what: str, effect: Callable[[], Awaitable[T]]) -> T:
        """Have an effect, late, or not, or have it and fail all the same."""
        await self.on_the_way(what)
        result = await effect()
        await self.on_the_way_back(what)
        return result

    async def on_the_way(self, what: str) -> None:
        """Before the effect."""
        self.check()
        await self.network.delay(what)
        self.network.fail(f"{what}, before it took effect")

    async def on_the_way_back(self, what: str) -> None:
        """After the effect."""
        await self.network.delay(what)
        self.network.fail(f"{what}, after it took effect")

    async def slow_call(self, what: str, effect: Callable[[], Awaitable[T]]) -> T:
        """Have an effect, perhaps late."""
        self.check()
        await self.network.delay(what)
        return await effect()


# A coroutine that awaits something in each of its finally blocks has to be closed once for each of them.
_CLOSINGS_MAX: Final = 100


def unwind(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close it, whatever its ``finally`` blocks raise, and whatever they await.

    Ending a coroutine where it stands, without an event loop.
    """
    if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        # Has not begun: what it was given to await would never be awaited, which Python warns of when it is found.
        frame = coroutine.cr_frame
        for given in list(frame.f_locals.values()) if frame is not None else []:
            if inspect.iscoroutine(given):
                unwind(given)
    for _ in range(_CLOSINGS_MAX):
        try:
            coroutine.close()
        except (Exception, asyncio.CancelledError, GeneratorExit, Crashed):  # noqa: S112
            continue  # RuntimeError: it awaits once more; any other: one of its finally blocks has failed
        return
