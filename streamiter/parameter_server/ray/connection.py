"""Connections of clients to the shards of a server on Ray, across losses of shards.

When the shards go back to a snapshot, the calls of a worker under way fail with ``RolledBack``, which has the worker's
clocks in the snapshot. New calls fail with it, too, until the worker has seen one of these errors. A connection also
sends a worker's heartbeats, and its barriers for ``SnapshotEvery``.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, final

from streamiter.clock import Clock, TimerHandle
from streamiter.errors import OutOfTurn, ParameterServerError, RolledBack, ShardLost, StreamiterError
from streamiter.parameter_server.calls import AnyReply, OnBack, highest_clocks
from streamiter.parameter_server.divided import importable
from streamiter.parameter_server.ray.host import GoBack, RayAddress, Untyped, client_name, imported_ray
from streamiter.parameter_server.requests import (
    Changes,
    ClientMessage,
    ClockRequest,
    GetReply,
    JoinRequest,
    NextChanges,
    PassBarrier,
    RaiseRequest,
    Request,
    SessionControl,
    SessionId,
    rolled_back,
)
from streamiter.parameter_server.snapshots import SnapshotEvery
from streamiter.parameter_server.transport import RemoteLink

R = TypeVar("R")


# A worker is alive even if two heartbeats in a row are late by as much again.
_HEARTBEATS_IN_TIMEOUT: Final = 4


class _Reply(AnyReply):
    """A reply that reports when its RolledBack error is raised in a task."""

    __slots__ = ("_on_raised", "generation")

    def __init__(self, on_raised: Callable[[int], None]) -> None:
        super().__init__()
        self._on_raised = on_raised
        self.generation = 0
        """The generation of the error."""

    def result(self) -> object:
        try:
            return super().result()
        except RolledBack:
            self._on_raised(self.generation)
            raise


class ConnectionLink(NamedTuple):
    """The link to one shard that a connection gives to its client."""

    send: Callable[[Request[Any]], AnyReply]
    """Sends a request by way of the connection."""


@final
class ShardConnections:
    """The links of one client to all shards of a server.

    ``worker`` is None for a client that is no worker. ``on_back`` is called with the worker's clocks when the shards go
    back to a snapshot; ``on_used`` is called at each request. Used in one event loop.
    """

    def __init__(
        self,
        address: RayAddress,
        clock: Clock,
        *,
        worker: int | None,
        name: str = "",
        incarnation: int = 0,
        on_back: OnBack = lambda clocks: None,
        on_used: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._clock = clock
        self._name = address.name
        self._on_back = on_back
        self._on_used = on_used
        self._generation = 0
        session = SessionId(client_name(worker) if worker is not None else name, incarnation)
        self._session = session
        self._carriers: list[RayCarrier] = []
        self._remote: list[RemoteLink] = []
        self.links: list[ConnectionLink] = []
        for number, host in enumerate(address.hosts):
            self._connect(number, host, session, f"{address.name}, shard {number}")
        self._unseen: RolledBack | None = None
        """The last rollback, until the worker has seen its error."""
        self._going_back: list[_Reply] | None = None
        """The replies that fail once the worker's clocks after a rollback are known; None: no rollback is under way."""
        self._barriers: _SnapshotBarriers | None = None
        if worker is not None and address.snapshots is not None:
            self._barriers = _SnapshotBarriers(address.snapshots, worker, self._remote)
        self._is_new = True
        """Whether a rollback is invisible: no shard has answered this worker yet, or the client is no worker.

        Then the requests under way are sent again after a rollback.
        """
        self._is_closed = False
        self._heartbeat: TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        if worker is not None and address.heartbeat_timeout_s is not None:
            self._set_heartbeat(address.heartbeat_timeout_s)

    def _connect(self, number: int, host: Untyped, session: SessionId, shard: str) -> None:
        def gone(error: BaseException) -> None:
            link.lost(error)

        carrier = RayCarrier(host, go_back=self._go_back, gone=gone)
        link = RemoteLink(shard, session, carrier, self._clock)
        self._carriers.append(carrier)
        self._remote.append(link)
        self.links.append(ConnectionLink(partial(self._send, number)))

    @property
    def remote_links(self) -> Sequence[RemoteLink]:
        """The links to the shards, without the rules of this connection for losses."""
        return self._remote

    @property
    def generation(self) -> int:
        """How often the shards have gone back, as far as this connection has heard."""
        return self._generation

    @property
    def has_joined(self) -> bool:
        """Whether a shard has answered this worker."""
        return not self._is_new

    # -- requests --------------------------------------------------------------------------------------

    def _send(self, shard: int, request: Request[object]) -> AnyReply:
        self._on_used()
        request = importable(request)
        # A subscription's error may be raised in a task that is not the worker's.
        tells_worker = not isinstance(request, NextChanges)
        reply = _Reply(self._error_seen if tells_worker else _ignore)
        if self._going_back is not None:
            self._going_back.append(reply)
            return reply
        if self._unseen is not None and tells_worker:
            self._fail(reply, self._unseen)
            return reply
        if self._barriers is not None:
            self._barriers.before(shard, request)
        sent = self._remote[shard].send(request)
        self._chain(shard, request, sent, reply)
        if self._barriers is not None:
            self._barriers.after(shard, request, sent)
        return reply

    def _chain(self, shard: int, request: Request[object], sent: AnyReply, reply: _Reply) -> None:
        """Settle the client's reply with the reply of the link, under the rules for rollbacks."""
        reply.on_given_up = sent.give_up

        def settle() -> None:
            try:
                result = sent.result()
            except RolledBack:
                if self._going_back is None:  # The connection is new: the rollback is invisible.
                    self._chain(shard, request, self._remote[shard].send(request), reply)
                else:
                    self._going_back.append(reply)
            except BaseException as error:
                if self._is_closed and isinstance(request, NextChanges):
                    reply.succeed(Changes(0, 0, has_ended=True))  # As a shard answers at the end of a server.
                else:
                    reply.fail(error)
            else:
                self._is_new = self._worker is None
                reply.succeed(_with_own_arrays(result))

        sent.when_settled(settle)

    # -- going back ------------------------------------------------------------------------------------

    def _go_back(self, answer: GoBack) -> None:
        """A shard has answered that the shards have gone back."""
        if answer.generation <= self._generation or self._is_closed:
            return
        self._generation = answer.generation
        if self._barriers is not None:
            self._barriers.forget()
        if self._going_back is None and not self._is_new:
            self._going_back = []
        for link in self._remote:
            link.replaced(answer.generation, answer.clocks or {})
        if self._is_new:
            return
        assert self._worker is not None
        if answer.refusal is not None:
            self._end_going_back(ShardLost(answer.refusal))
        elif answer.clocks is not None:
            self._finish_rollback(answer.clocks, answer.loss)
        else:
            task = asyncio.get_running_loop().create_task(self._join_again(self._worker, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _join_again(self, worker: int, answer: GoBack) -> None:
        """Join again: the worker joined after the snapshot was taken."""
        joining = [link.send(JoinRequest(worker)) for link in self._remote]
        try:
            clocks = highest_clocks([await reply for reply in joining])
        except RolledBack:
            return  # The shards have gone back once more; that rollback is handled by another task.
        except StreamiterError as error:
            self._end_going_back(error)
            return
        if answer.generation == self._generation:
            for shard, link in enumerate(self._remote):
                raising = RaiseRequest(worker, clocks)
                sent = link.send(raising)
                if self._barriers is not None:
                    self._barriers.after(shard, raising, sent)
            self._finish_rollback(clocks, answer.loss)

    def _finish_rollback(self, clocks: Mapping[str, int], loss: str) -> None:
        """The worker's clocks are known: fail its calls with RolledBack."""
        error = rolled_back(f"{loss}:", clocks)
        if self._barriers is not None:
            self._barriers.go_back(clocks)
        self._unseen = error
        self._on_back(clocks)
        self._end_going_back(error)

    def _end_going_back(self, error: StreamiterError) -> None:
        replies, self._going_back = self._going_back or [], None
        for reply in replies:
            self._fail(reply, error)

    def _fail(self, reply: _Reply, error: StreamiterError) -> None:
        reply.generation = self._generation
        reply.fail(copy.copy(error))  # Each copy is raised in another task.

    def _error_seen(self, generation: int) -> None:
        if generation == self._generation:
            self._unseen = None

    # -- life ------------------------------------------------------------------------------------------

    def _set_heartbeat(self, timeout_s: float) -> None:
        def beat() -> None:
            session = self._session._replace(generation=self._generation)
            try:
                message = ClientMessage(session, 0, (), SessionControl.ACKNOWLEDGE)
                self._carriers[0].send(message, lambda outcome: None)
            except ParameterServerError:
                return  # Ray has been ended; the next call of the worker raises an error.
            self._set_heartbeat(timeout_s)

        self._heartbeat = self._clock.call_later(timeout_s / _HEARTBEATS_IN_TIMEOUT, beat)

    def close(self) -> set[asyncio.Task[None]]:
        """Fail the calls under way, and tell the shards; return the tasks that wait for the shards' answers."""
        self._is_closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._remote:
            link.close()
        return self._tasks.union(*[carrier.under_way for carrier in self._carriers])


@final
class _SnapshotBarriers:
    """Passes a worker's barriers for ``SnapshotEvery``: on each shard directly after the clock of the snapshot."""

    def __init__(self, every: SnapshotEvery, worker: int, links: Sequence[RemoteLink]) -> None:
        self._every = every
        self._worker = worker
        self._links = links
        self._clock = 0
        """The worker's clock on the matrix of ``SnapshotEvery``."""
        self._counted_shard: int | None = None
        """The shard whose clocks of that matrix are counted: the first one that gets a clock."""
        self._owed: dict[int, PassBarrier] = {}
        """By shard: the barrier that the worker passes before its next request, except for the clock itself."""

    def before(self, shard: int, request: Request[object]) -> None:
        """Pass a barrier before a request that is not the clock of the snapshot."""
        if not self._is_clock(request):
            self._pass_owed(shard)

    def after(self, shard: int, request: Request[object], sent: AnyReply) -> None:
        """Count a clock that was sent, and pass the barrier that belongs to it."""
        if isinstance(request, RaiseRequest):
            self._clock = request.clocks.get(self._every.of, 0)
            self._owe(shard)
            self._pass_owed(shard)
        elif self._is_clock(request):
            self._count(shard, sent)
            self._pass_owed(shard)

    def forget(self) -> None:
        """The shards go back: pass none of the barriers that are owed."""
        self._owed.clear()

    def go_back(self, clocks: Mapping[str, int]) -> None:
        """Take over the worker's clocks in the snapshot, by matrix."""
        self._clock = clocks.get(self._every.of, 0)

    def _is_clock(self, request: Request[object]) -> bool:
        return isinstance(request, ClockRequest) and request.matrix == self._every.of

    def _count(self, shard: int, sent: AnyReply) -> None:
        if self._counted_shard is None:
            self._counted_shard = shard
        if shard != self._counted_shard:
            return
        self._clock += 1
        sent.when_settled(lambda: self._uncount(sent))
        if self._clock % self._every.clocks == 0:
            for number in range(len(self._links)):
                self._owe(number)
            # Shards without blocks of the matrix get no clock, so they get the barrier in the next turn.
            asyncio.get_running_loop().call_soon(self._pass_all_owed)

    def _uncount(self, clock: AnyReply) -> None:
        """Take back the count of a clock that the shard has refused."""
        try:
            clock.result()
        except OutOfTurn:
            self._clock -= 1
        except BaseException:  # noqa: S110 - the caller of the clock gets the error
            pass

    def _owe(self, shard: int) -> None:
        if number := self._clock // self._every.clocks:
            self._owed[shard] = PassBarrier(self._worker, number)

    def _pass_owed(self, shard: int) -> None:
        if (barrier := self._owed.pop(shard, None)) is not None:
            self._links[shard].send(barrier)

    def _pass_all_owed(self) -> None:
        for shard in list(self._owed):
            self._pass_owed(shard)


def _with_own_arrays(reply: object) -> object:
    """Return a reply whose arrays can be written to: arrays in Ray's object store cannot."""
    if not isinstance(reply, GetReply):
        return reply
    return reply._replace(values=[values if values.flags.writeable else values.copy() for values in reply.values])


def _ignore(generation: int) -> None:
    del generation


# A process that is alive answers within this time. Ray reports a call that is under way when it ends a process as
# failed.
_END_S: Final = 1.0


async def ended(tasks: set[asyncio.Task[None]]) -> None:
    """Return when these tasks have ended; cancel those that do not end within a second."""
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_END_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@final
class Connections:
    """All connections of one process to the shards of one server.

    The newest connection of a worker has the highest incarnation, also across processes.
    """

    def __init__(self, address: RayAddress, clock: Clock, *, on_used: Callable[[], None] = lambda: None) -> None:
        self._address = address
        self._clock = clock
        self._on_used = on_used
        self._open: dict[int, ShardConnections] = {}
        self._others: list[ShardConnections] = []
        self._incarnation = 0

    def open(self, client: str, worker: int | None = None, on_back: OnBack = lambda clocks: None) -> ShardConnections:
        """Open a connection for a worker, or for a client that is no worker (None)."""
        # The time in ms: a worker in another process that replaces one that has died has a higher incarnation.
        self._incarnation = max(self._incarnation + 1, self._clock.now_ms())
        connection = ShardConnections(
            self._address,
            self._clock,
            worker=worker,
            name=client,
            incarnation=self._incarnation,
            on_back=on_back,
            on_used=self._on_used,
        )
        if worker is None:
            self._others.append(connection)
        else:
            self._open[worker] = connection
        return connection

    def close(self, worker: int) -> None:
        """Close the connection of a worker whose client has left."""
        if (connection := self._open.pop(worker, None)) is not None:
            connection.close()

    def links_of_workers(self) -> list[RemoteLink]:
        """Return the links of all workers of this process that have not left."""
        return [link for connection in self._open.values() for link in connection.remote_links]

    def joined(self) -> tuple[int, ...]:
        """Return the workers of this process that a shard has answered."""
        return tuple(worker for worker, connection in self._open.items() if connection.has_joined)

    async def close_all(self) -> None:
        """Close all connections."""
        connections = (*self._open.values(), *self._others)
        self._open.clear()
        self._others.clear()
        await ended({task for connection in connections for task in connection.close()})


@final
class RayCarrier:
    """Carries the messages of one client to one host, with one call of the host for each message.

    Large arrays go through Ray's object store, small ones in the message. If the host's process has died, Ray waits for
    its next process and sends the message there.
    """

    def __init__(
        self, host: Untyped, *, go_back: Callable[[GoBack], None], gone: Callable[[BaseException], None]
    ) -> None:
        self._host = host
        self._go_back = go_back
        self._gone = gone
        self._ray = imported_ray()
        self._calls: set[asyncio.Task[None]] = set()
        """No more than a link sends: its window, calls given up, and acknowledgements."""

    def send(self, message: ClientMessage, answered: Callable[[object], None]) -> None:
        """Call the host with a message. Ray has taken its arrays when this returns."""
        if not self._ray.is_initialized():  # Otherwise the call would start another Ray.
            raise ParameterServerError("Ray has been ended in this process")
        reply = self._host.deliver.remote(message)
        call = asyncio.get_running_loop().create_task(self._await(reply, answered))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _await(self, reply: Untyped, answered: Callable[[object], None]) -> None:
        try:
            answer = await reply
        except self._ray.exceptions.RayError as error:
            gone = ParameterServerError("the server was closed, or its process is gone")
            gone.__cause__ = error
            self._gone(gone)
            return
        if isinstance(answer, GoBack):
            self._go_back(answer)
        else:
            answered(answer)

    @property
    def under_way(self) -> set[asyncio.Task[None]]:
        """The calls that the host has not answered yet."""
        return set(self._calls)
