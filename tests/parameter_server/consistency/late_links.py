"""Clients whose requests reach each shard in order, but with delays drawn from a seed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from random import Random
from typing import Any

from parameter_server.consistency.client_run import turns

from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.shard import Shard


class LateLink:
    """A link from one client to one shard; a request waits here until ``deliver``."""

    def __init__(self, shard: Shard, pace: float) -> None:
        self.pace = pace
        """The weight of this link when the next delivery is drawn."""
        self._shard = shard
        self._requests: deque[tuple[Any, WaitingReply[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def send(self, request: Any) -> WaitingReply[Any]:
        waiting: WaitingReply[Any] = WaitingReply()
        self._requests.append((request, waiting))
        return waiting

    def deliver(self) -> None:
        request, waiting = self._requests.popleft()
        try:
            reply = self._shard.handle(request)
        except Exception as error:
            waiting.fail(error)
            return
        if not isinstance(reply, WaitingReply):
            waiting.succeed(reply)
            return

        def settle() -> None:
            try:
                waiting.succeed(reply.result())
            except Exception as error:
                waiting.fail(error)

        reply.when_settled(settle)


class LateServer:
    """Shards that receive requests with different delays."""

    def __init__(self, shards: int, seed: int) -> None:
        self.random = Random(seed)
        self.shards = [Shard(number) for number in range(shards)]
        self.directory = MatrixDirectory(self.shards)
        self._links: list[LateLink] = []
        self.clients: list[Client] = []
        """All clients, also clients that are still joining."""

    async def client(self, worker: int) -> Client:
        links = [LateLink(shard, self.random.choice((1, 0.1, 0.01))) for shard in self.shards]
        self._links += links
        client = Client(worker, links, self.directory, cache_bytes=self.random.choice((0, 1 << 20)))
        self.clients.append(client)
        await client.join()
        return client

    async def run(self, *programs: Coroutine[Any, Any, None]) -> None:
        """Deliver one request after another until all programs have ended."""
        tasks = [asyncio.ensure_future(program) for program in programs]
        await turns()
        while busy := [link for link in self._links if link]:
            [link] = self.random.choices(busy, [link.pace for link in busy])
            link.deliver()
            await turns()
        stuck = [task for task in tasks if not task.done()]
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        for task in tasks:
            if task not in stuck:
                task.result()
        assert not stuck, f"{len(stuck)} workers wait forever"
