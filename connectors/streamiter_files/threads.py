"""Blocking calls off the event loop, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["OneAtATime"]

Result = TypeVar("Result")


class OneAtATime:
    """Runs calls in threads, never two at once.

    A thread cannot be cancelled: when the waiting task is, the call runs on, and ``settle`` (which ``run``
    begins with) waits for it and raises what it raised. So a call's effects are never lost nor overtaken.
    """

    def __init__(self) -> None:
        self._pending: asyncio.Task[object] | None = None

    async def run(self, call: Callable[[], Result]) -> Result:
        """The result of ``call``, once an earlier one has ended."""
        await self.settle()
        pending = asyncio.ensure_future(asyncio.to_thread(call))
        self._pending = pending
        await asyncio.wait([pending])
        self._pending = None
        return pending.result()

    async def settle(self) -> None:
        """Wait for the call of a cancelled ``run``, if there is one."""
        pending = self._pending
        if pending is not None:
            await asyncio.wait([pending])
            self._pending = None
            pending.result()
