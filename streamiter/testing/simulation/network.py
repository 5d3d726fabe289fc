"""The way of a call from a job to its topics and its store, and back: where faults and crashes come in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from streamiter.testing.simulation.faults import CALM, Levels, SimulatedUnavailable
from streamiter.testing.simulation.simulated_time import SimulatedTime
from streamiter.testing.simulation.trace import Trace

__all__ = ["Connection", "Crashed", "Network"]

T = TypeVar("T")

# Calls that are not slow still let others have their turns in between, now and then: a crash may come there.
_PAUSES: Final = 0.3


class Crashed(BaseException):
    """Whatever of a crashed job still reaches for the world outside gets no further than this."""


class Network:
    """What lies between all jobs and the world: one state for all calls, which survives crashes."""

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


class Connection:
    """What one run of the job has of the network; cut by its crash."""

    def __init__(self, network: Network) -> None:
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
