"""Calls that wait for the first model: a bounded number of them, each for a bounded time."""

from __future__ import annotations

import asyncio
from typing import Final

from streamiter.clock import Clock
from streamiter.errors import ModelError

__all__ = ["NoModel", "WaitingCalls"]


class NoModel(ModelError):
    """There is no model to answer with."""


_RELEASED: Final = "released"


class WaitingCalls:
    """Holds calls back until they are released, or fail together."""

    def __init__(self, subject: str, calls_max: int, clock: Clock) -> None:
        self._subject = subject
        self._calls_max = calls_max
        self._clock = clock
        self._futures: dict[asyncio.Future[str], None] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self, timeout_s: float) -> None:
        """Return when released. Raises :class:`NoModel` after ``timeout_s``, if too many wait, on failure."""
        if len(self._futures) >= self._calls_max:
            raise NoModel(f"{self._subject}: no model yet, and {self._calls_max} calls wait for it already")
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._futures[future] = None
        timer = self._clock.call_later(timeout_s, lambda: _resolve(future, f"no model after {timeout_s:g} s"))
        try:
            outcome = await future
        finally:
            timer.cancel()
            del self._futures[future]
        if outcome != _RELEASED:
            raise NoModel(f"{self._subject}: {outcome}")

    def release(self) -> None:
        """Let all go on."""
        self._resolve_all(_RELEASED)

    def fail(self, reason: str) -> None:
        """All that wait now get :class:`NoModel` with ``reason``."""
        self._resolve_all(reason)

    def _resolve_all(self, outcome: str) -> None:
        for future in self._futures:
            _resolve(future, outcome)


def _resolve(future: asyncio.Future[str], outcome: str) -> None:
    if not future.done():
        future.set_result(outcome)
