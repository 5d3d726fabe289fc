"""Waking those who wait for something in a topic to change."""

from __future__ import annotations

import asyncio
import contextlib

__all__ = ["Waiters"]


class Waiters:
    """Readers that wait for something to change; woken from any thread and any event loop."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def add(self) -> asyncio.Future[None]:
        """A future of the running loop that the next ``wake`` resolves."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def discard(self, future: asyncio.Future[None]) -> None:
        """Forget a future nobody waits for any more."""
        with contextlib.suppress(ValueError):
            self._futures.remove(future)

    def wake(self) -> None:
        """Resolve all futures, each in its own loop."""
        futures, self._futures = self._futures, []
        for future in futures:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there any more
                future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
