"""A client that sends requests at a fixed rate over connections that stay open.

A request that finds no free connection waits, and its time counts from the moment at which it was due: a server that
stops for a second cannot hide that by receiving fewer requests.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Load", "send"]

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_PATIENCE_S = 60.0
# uvloop rounds to milliseconds: a shorter pause would be none, and the client would take a whole core.
_PAUSE_S = 0.001


@dataclass
class Load:
    """What came of the requests."""

    seconds: list[float] = field(default_factory=list)
    """The time of each answer of status 200, from the moment at which its request was due."""
    refused: int = 0
    """Other answers."""
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return len(self.seconds) / (self.ended_s - self.began_s)

    def milliseconds(self, percent: float) -> float:
        """Return a percentile of the times."""
        return 1000.0 * sorted(self.seconds)[min(len(self.seconds) - 1, int(len(self.seconds) * percent / 100))]


class _Client(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._received = b""
        self._due_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport

    def send(self, request: bytes, due_s: float) -> None:
        self._due_s = due_s
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if length is not None and len(body) >= int(length[1]):
            self._received = b""
            self._pool.answered(self, head.startswith(b"HTTP/1.1 200"), self._due_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)


class _Pool:
    def __init__(self, request: bytes, load: Load) -> None:
        self._request = request
        self._load = load
        self._free: deque[_Client] = deque()
        self._waiting: deque[float] = deque()
        self._missing = 0
        self._none_missing = asyncio.Event()

    def ask(self, due_s: float) -> None:
        self._missing += 1
        self._none_missing.clear()
        if self._free:
            self._free.popleft().send(self._request, due_s)
        else:
            self._waiting.append(due_s)

    def answered(self, client: _Client, is_good: bool, due_s: float) -> None:
        self._note_answer()
        if is_good:
            self._load.seconds.append(asyncio.get_running_loop().time() - due_s)
        else:
            self._load.refused += 1
        self.free(client)

    def _note_answer(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._none_missing.set()

    def lost(self, client: _Client) -> None:
        """Note a connection that the server has ended; a request on it is refused."""
        if client in self._free:
            self._free.remove(client)
        else:
            self._load.refused += 1
            self._note_answer()

    async def all_answered(self) -> None:
        await self._none_missing.wait()

    def free(self, client: _Client) -> None:
        if self._waiting:
            client.send(self._request, self._waiting.popleft())
        else:
            self._free.append(client)


async def send(host: str, port: int, request: bytes, *, per_s: float, seconds: float, connections: int = 128) -> Load:
    """Send the request at a fixed rate for some seconds; wait for the last answers."""
    loop, load = asyncio.get_running_loop(), Load()
    pool = _Pool(request, load)
    clients = [(await loop.create_connection(lambda: _Client(pool), host, port))[1] for _ in range(connections)]
    for client in clients:
        pool.free(client)
    sent = 0
    load.began_s = loop.time()
    while (elapsed_s := loop.time() - load.began_s) < seconds:
        while sent <= elapsed_s * per_s:
            pool.ask(load.began_s + sent / per_s)
            sent += 1
        await asyncio.sleep(_PAUSE_S)
    async with asyncio.timeout(_PATIENCE_S):
        await pool.all_answered()
    load.ended_s = loop.time()
    for client in clients:
        client.transport.close()
    return load
