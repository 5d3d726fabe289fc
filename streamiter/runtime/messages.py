"""Messages between the processes of a run, and the points that all of them reach before any goes on.

In each process a job sends messages of plain data to the jobs of the other processes: reports of loops, barriers and
their answers, statistics. What carries them is a :class:`Messages`: links between processes, or an event loop in which
several jobs run. A :class:`Meeting` uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, final

from streamiter.deferred import PlainValue

Handler = Callable[..., None]
"""Takes the number of the sender, then the contents of a message."""


class Messages(Protocol):
    """Carries messages between the processes of a run, in the thread of the event loop.

    Messages from one process to another arrive in order, behind all batches and control records sent before them.
    Those of two senders have no order. When a process is lost, the run ends, so no answer needs a time limit.
    """

    def send(self, process: int, kind: str, *contents: PlainValue) -> None:
        """Send a message to another process. Raises ``PlainDataError`` for other data."""

    def handle(self, kind: str, handler: Handler) -> None:
        """Give the messages of this kind to ``handler``.

        All handlers are set while the job is made, before any process sends. A message without a handler is an error.
        """


_REACHED: Final = "reached"
_GO_ON: Final = "go on"


@final
class Meeting:
    """Lets all processes of a run wait for each other at named points."""

    def __init__(self, messages: Messages, own: int, processes: int) -> None:
        """``own`` is the number of this process. The messages of a run have one meeting in each process."""
        self._messages = messages
        self._own = own
        self._processes = processes
        self._arrived: dict[str, set[int]] = {}
        self._open: dict[str, asyncio.Event] = {}
        messages.handle(_REACHED, self._has_reached)
        messages.handle(_GO_ON, self._go_on)

    async def reach(self, point: str) -> None:
        """Wait until all processes have reached this point."""
        if self._own:
            self._messages.send(0, _REACHED, point)
        else:
            self._has_reached(0, point)
        await self._opened(point).wait()

    def _has_reached(self, process: int, point: str) -> None:
        arrived = self._arrived.setdefault(point, set())
        arrived.add(process)
        if len(arrived) == self._processes:
            for other in range(1, self._processes):
                self._messages.send(other, _GO_ON, point)
            self._go_on(0, point)

    def _go_on(self, process: int, point: str) -> None:
        self._opened(point).set()

    def _opened(self, point: str) -> asyncio.Event:
        return self._open.setdefault(point, asyncio.Event())
