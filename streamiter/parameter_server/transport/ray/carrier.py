"""Carries the messages of one client to one host, and its answers back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, final

from streamiter.errors import ParameterServerError
from streamiter.parameter_server.transport.messages import ClientMessage, ServerMessage
from streamiter.parameter_server.transport.ray.cluster import imported_ray
from streamiter.parameter_server.transport.ray.protocol import GoBack

__all__ = ["RayCarrier"]


@final
class RayCarrier:
    """A call of the host for each message. Arrays go through Ray's object store, or in the message if it is small.

    Ray itself waits where the host's process has died, and sends the message to its successor.
    """

    def __init__(
        self,
        host: Any,
        *,
        receive: Callable[[ServerMessage], None],
        go_back: Callable[[GoBack], None],
        gone: Callable[[BaseException], None],
    ) -> None:
        self._host = host
        self._receive = receive
        self._go_back = go_back
        self._gone = gone
        self._ray = imported_ray()
        self._calls: set[asyncio.Task[None]] = set()
        """No more than a link sends: its window, and now and then a question."""

    def send(self, message: ClientMessage) -> None:
        """Send it. Ray has taken its arrays when this returns."""
        if not self._ray.is_initialized():  # Or the call would start another Ray.
            raise ParameterServerError("Ray has been ended in this process")
        reply = self._host.deliver.remote(message)
        call = asyncio.get_running_loop().create_task(self._await(reply))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _await(self, reply: Any) -> None:
        try:
            answer = await reply
        except self._ray.exceptions.RayError as error:
            gone = ParameterServerError("the server was closed, or its process is gone")
            gone.__cause__ = error
            self._gone(gone)
            return
        if isinstance(answer, GoBack):
            self._go_back(answer)
        elif answer is not None:
            self._receive(answer)

    @property
    def under_way(self) -> set[asyncio.Task[None]]:
        """Calls of the host that it has yet to answer."""
        return set(self._calls)
