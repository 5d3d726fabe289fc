"""Shards in Ray actors, as the server sees them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, final

from streamiter.clock import Clock
from streamiter.errors import RolledBack, StreamiterError
from streamiter.parameter_server.call import Call
from streamiter.parameter_server.recovery import SnapshotEvery
from streamiter.parameter_server.requests import Create, Forget, RestoreState
from streamiter.parameter_server.statistics import ShardStatistics
from streamiter.parameter_server.transport.link import ShardLink
from streamiter.parameter_server.transport.ray.cluster import RayCluster
from streamiter.parameter_server.transport.ray.connection import Connection
from streamiter.parameter_server.transport.ray.connections import Connections
from streamiter.parameter_server.transport.ray.fences import Fence, PassFences, TakeBetween
from streamiter.parameter_server.transport.ray.fetched import sendable
from streamiter.parameter_server.transport.ray.host import ShardHost
from streamiter.parameter_server.transport.ray.protocol import RayAddress, Restore
from streamiter.parameter_server.transport.ray.supervisor import Supervisor
from streamiter.parameter_server.waiting import Waiting

__all__ = ["RayHosting"]

# Ray runs so many calls of an actor at a time: enough for all calls that wait, 64 of each of a thousand workers. If
# all of them were waiting gets, the clock they wait for would never be heard.
_CALLS_AT_A_TIME: Final = 100_000

# An answer takes two or three, and no longer than a shard works on one request.
_STATISTICS_S: Final = 0.1


@final
class RayHosting:
    """Each shard in an actor, which Ray starts again where its process dies.

    Starts Ray on this machine unless it is there; that takes some seconds. ``on_silent`` as of ``Supervisor``.
    """

    def __init__(
        self,
        count: int,
        *,
        name: str,
        clock: Clock,
        snapshots: SnapshotEvery | None = None,
        heartbeat_timeout_s: float | None = None,
        on_silent: Callable[[int, str], None] = lambda worker, reason: None,
    ) -> None:
        self._cluster = RayCluster()
        host = self._cluster.ray.remote(ShardHost).options(
            num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=_CALLS_AT_A_TIME
        )
        hosts = tuple(
            host.remote(number, count, takes_snapshots=snapshots is not None) for number in range(count)
        )
        self.address = RayAddress(name, hosts, snapshots, heartbeat_timeout_s)
        self._supervisor = Supervisor(
            name,
            hosts,
            clock,
            snapshots=snapshots,
            heartbeat_timeout_s=heartbeat_timeout_s,
            on_silent=on_silent,
            workers_here=lambda: self._connections.joined(),
        )
        self._connections = Connections(self.address, clock, on_used=self._supervisor.start)
        self._statistics = tuple(ShardStatistics(number, (), 0) for number in range(count))
        self._asked: list[Any] | None = None
        """Statistics that are still to come."""
        self._taking = asyncio.Lock()
        self._taken = 0
        self._asking_for_states: Connection | None = None
        self._is_closed = False

    @property
    def drawn_as(self) -> str:
        """Where they are, for drawings and errors."""
        return "on Ray"

    def links(
        self,
        client: str,
        worker: int | None = None,
        on_back: Callable[[Mapping[str, int]], None] = lambda clocks: None,
    ) -> Sequence[ShardLink]:
        """A link to each shard, for a client of this name; what it sends is handled in order."""
        links = self._connections.open(client, worker, on_back).links
        return links if worker is not None else [_ServerLink(link, self._supervisor) for link in links]

    def release(self, worker: int) -> None:
        """The client of this worker has left."""
        self._connections.close(worker)

    def statistics(self) -> tuple[ShardStatistics, ...]:
        """Where the shards stand: they are asked, which takes some milliseconds.

        One that is busy or lost is not waited for longer than that: then it is where they stood when they said so last.
        """
        ray = self._cluster.ray
        if self._is_closed or not ray.is_initialized():
            return self._statistics
        # One question at a time, also where a shard is lost for long.
        patience_s = _STATISTICS_S if self._asked is None else 0.0
        asked = self._asked or [host.statistics.remote() for host in self.address.hosts]
        self._asked = None
        try:
            self._statistics = tuple(ray.get(asked, timeout=patience_s))
        except ray.exceptions.GetTimeoutError:
            self._asked = asked
        except ray.exceptions.RayError:
            pass  # The old ones stay.
        return self._statistics

    async def take_states(self) -> list[Any]:
        """The states of all shards between the same two calls of each worker of this process."""
        async with self._taking:
            if self._asking_for_states is None:
                self._asking_for_states = self._connections.open(f"{self.address.name}, states")
            while True:
                self._taken += 1
                workers = self._connections.of_workers()
                request = TakeBetween(self._taken, tuple(workers))
                states = [link.send(request) for link in self._asking_for_states.links]
                # All of them at once: no call gets in between.
                fences = [
                    link.send(Fence(worker, self._taken))
                    for worker, connection in workers.items()
                    for link in connection.links
                ]
                try:
                    await Call(fences, list)
                    return await Call(states, list)
                except RolledBack:  # Some fences are gone, so no state would ever come.
                    pass
                except BaseException:
                    # Once the states are given up nobody asks for them again after a loss, which fences may outlive.
                    for link in self._asking_for_states.links:
                        link.send(PassFences(request.number))
                    raise
                finally:
                    for state in states:
                        state.give_up()

    @property
    def latest_snapshot(self) -> int | None:
        """The number of the snapshot that a lost shard would bring all back to; None: there is none."""
        latest = self._supervisor.kept.latest
        return None if latest is None else latest.number

    async def close(self) -> None:
        """Let go of the shards, and of a Ray that was started here. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._connections.close_all()
        await self._supervisor.stop()
        if self._cluster.ray.is_initialized():  # Its owner may have ended it.
            for host in self.address.hosts:
                self._cluster.ray.kill(host)
        await asyncio.to_thread(self._cluster.close)


@final
class _ServerLink:
    """Notes what the server makes, and makes states fit to be sent."""

    def __init__(self, link: ShardLink, supervisor: Supervisor) -> None:
        self._link = link
        self._supervisor = supervisor

    def send(self, request: Any) -> Any | Waiting[Any]:
        """The reply to come."""
        if isinstance(request, Forget):
            self._supervisor.created.pop(request.matrix, None)
        elif isinstance(request, RestoreState):
            # For all shards: what can be gone through once only is made a list by the first of them.
            request.state = sendable(request.state)
            request = Restore(uuid.uuid4().hex, request.state, request.workers)
        reply = self._link.send(request)
        if isinstance(request, Create):
            reply.when_settled(partial(self._note, request, reply))
        return reply

    def _note(self, create: Create, reply: Waiting[bool]) -> None:
        with suppress(StreamiterError, asyncio.CancelledError):  # Refused: whoever makes the matrix is told.
            reply.result()
            self._supervisor.created.setdefault(create.matrix.name, create)
