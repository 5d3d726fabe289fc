"""One client's way to all shards, across losses of shards."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

from streamiter.clock import Clock, TimerHandle
from streamiter.errors import OutOfTurn, ParameterServerError, RolledBack, ShardLost, StreamiterError
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import (
    Changes,
    ClockRequest,
    GetReply,
    JoinRequest,
    NextChanges,
    PassBarrier,
    RaiseRequest,
)
from streamiter.parameter_server.transport.messages import ClientMessage, SessionControl, SessionId
from streamiter.parameter_server.transport.ray.protocol import (
    GoBack,
    RayAddress,
    RayCarrier,
    client_name,
    importable,
)
from streamiter.parameter_server.transport.sessions import RemoteLink

__all__ = [
    "Connections",
    "ShardConnections",
    "ended",
]


# A heartbeat may be late by as much again, and another one be lost.
_HEARTBEATS_IN_TIMEOUT: Final = 4


class _Reply(WaitingReply[Any]):
    """Knows when its error has reached somebody."""

    __slots__ = ("generation", "on_raised")

    def __init__(self, on_raised: Callable[[int], None]) -> None:
        super().__init__()
        self.on_raised = on_raised
        self.generation = 0

    def result(self) -> Any:
        try:
            return super().result()
        except RolledBack:
            self.on_raised(self.generation)
            raise


@final
class _ClientLink:
    """One of the links, as its client sees it."""

    def __init__(self, send: Callable[[Any], WaitingReply[Any]]) -> None:
        self._send = send

    def send(self, request: Any) -> WaitingReply[Any]:
        """The reply to come."""
        return self._send(request)


@final
class ShardConnections:
    """Links to all shards. When these go back to a snapshot, calls fail with RolledBack until one of them has told so.

    ``worker`` is None for the server itself. ``on_back`` is told the worker's clocks in the snapshot.
    Used in one event loop.
    """

    def __init__(
        self,
        address: RayAddress,
        clock: Clock,
        *,
        worker: int | None,
        name: str = "",
        incarnation: int = 0,
        on_back: Callable[[Mapping[str, int]], None] = lambda clocks: None,
        on_used: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._clock = clock
        self._name = address.name
        self._every = address.snapshots if worker is not None else None
        self._on_back = on_back
        self._on_used = on_used
        self._generation = 0
        session = SessionId(client_name(worker) if worker is not None else name, incarnation)
        self._session = session
        self._carriers: list[RayCarrier] = []
        self._remote: list[RemoteLink] = []
        self.links: list[_ClientLink] = []
        for number, host in enumerate(address.hosts):
            self._connect(number, host, session, f"{address.name}, shard {number}")
        self._untold: RolledBack | None = None
        """Nobody has been told yet."""
        self._going_back: list[_Reply] | None = None
        """What is to fail once it is known where this worker stands."""
        self._clocks = 0
        """Of the matrix whose clocks snapshots are taken at."""
        self._first_shard: int | None = None
        """Of those that this matrix lies on."""
        self._owes: dict[int, PassBarrier] = {}
        """By shard: the barrier to pass before anything else but the clock itself."""
        self._is_new = True
        """Until its first answer a worker has nothing to go back from; and the server itself never has.

        What they ask is asked again after a loss.
        """
        self._is_closed = False
        self._heartbeat: TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        if worker is not None and address.heartbeat_timeout_s is not None:
            self._set_heartbeat(address.heartbeat_timeout_s)

    def _connect(self, number: int, host: Any, session: SessionId, shard: str) -> None:
        def gone(error: BaseException) -> None:
            link.lost(error)

        carrier = RayCarrier(host, go_back=self._go_back, gone=gone)
        link = RemoteLink(shard, session, carrier, self._clock)
        self._carriers.append(carrier)
        self._remote.append(link)
        self.links.append(_ClientLink(partial(self._send, number)))

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
        """Whether the shards have answered this worker."""
        return not self._is_new

    # -- requests --------------------------------------------------------------------------------------

    def _send(self, shard: int, request: Any) -> WaitingReply[Any]:
        self._on_used()
        request = importable(request)
        # A subscription's error may be raised in a task that is not the worker's.
        tells_worker = not isinstance(request, NextChanges)
        reply = _Reply(self._told if tells_worker else _nothing)
        if self._going_back is not None:
            self._going_back.append(reply)
            return reply
        if (
            self._untold is not None and tells_worker
        ):  # The others do not go by the worker's clocks: they go on.
            self._fail(reply, self._untold)
            return reply
        is_clock = (
            self._every is not None and isinstance(request, ClockRequest) and request.matrix == self._every.of
        )
        if not is_clock:
            self._pass_barrier(shard)
        sent = self._remote[shard].send(request)
        self._chain(shard, request, sent, reply)
        if self._every is not None:
            self._count(shard, request, sent, is_clock)
        return reply

    def _chain(self, shard: int, request: Any, sent: WaitingReply[Any], reply: _Reply) -> None:
        reply.on_given_up = sent.give_up

        def settle() -> None:
            try:
                result = sent.result()
            except RolledBack:
                if (
                    self._going_back is None
                ):  # Nothing has been answered yet, so there is nothing to go back from.
                    self._chain(shard, request, self._remote[shard].send(request), reply)
                else:
                    self._going_back.append(reply)
            except BaseException as error:
                if self._is_closed and isinstance(request, NextChanges):
                    reply.succeed(
                        Changes(0, 0, has_ended=True)
                    )  # As a shard says that has been told of the end.
                else:
                    reply.fail(error)
            else:
                self._is_new = self._worker is None
                reply.succeed(_with_own_arrays(result))

        sent.when_settled(settle)

    # -- snapshots at clocks ---------------------------------------------------------------------------

    def _count(self, shard: int, request: Any, sent: WaitingReply[Any], is_clock: bool) -> None:
        """A worker passes a barrier on each shard right after the clock that it belongs to."""
        assert self._every is not None
        if isinstance(request, RaiseRequest):
            self._clocks = request.clocks.get(self._every.of, 0)
            self._owe(shard)
        elif is_clock:
            if self._first_shard is None:
                self._first_shard = shard
            if shard == self._first_shard:
                self._clocks += 1
                sent.when_settled(lambda: self._uncount(sent))
                if self._clocks % self._every.clocks == 0:
                    for number in range(len(self._remote)):
                        self._owe(number)
                    # Shards without a part of the matrix get no clock.
                    asyncio.get_running_loop().call_soon(self._pass_barriers)
        if isinstance(request, RaiseRequest) or is_clock:
            self._pass_barrier(shard)

    def _uncount(self, clock: WaitingReply[Any]) -> None:
        try:
            clock.result()
        except OutOfTurn:
            self._clocks -= 1
        except BaseException:  # noqa: S110 - whoever called it is told
            pass

    def _owe(self, shard: int) -> None:
        assert self._every is not None
        assert self._worker is not None
        if number := self._clocks // self._every.clocks:
            self._owes[shard] = PassBarrier(self._worker, number)

    def _pass_barrier(self, shard: int) -> None:
        if (barrier := self._owes.pop(shard, None)) is not None:
            self._remote[shard].send(barrier)

    def _pass_barriers(self) -> None:
        for shard in list(self._owes):
            self._pass_barrier(shard)

    # -- going back ------------------------------------------------------------------------------------

    def _go_back(self, answer: GoBack) -> None:
        if answer.generation <= self._generation or self._is_closed:
            return
        self._generation = answer.generation
        self._owes.clear()
        if self._going_back is None and not self._is_new:
            self._going_back = []
        for link in self._remote:
            link.replaced(answer.generation, answer.clocks or {})
        if self._is_new:
            return
        assert self._worker is not None
        if answer.refusal is not None:
            self._fail_going_back(ShardLost(answer.refusal))
        elif answer.clocks is not None:
            self._have_gone_back(answer.clocks, answer.loss)
        else:
            task = asyncio.get_running_loop().create_task(self._join_again(self._worker, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _join_again(self, worker: int, answer: GoBack) -> None:
        """The snapshot is from before this worker."""
        clocks: dict[str, int] = {}
        try:
            for reply in [link.send(JoinRequest(worker)) for link in self._remote]:
                for name, clock in (await reply).items():
                    clocks[name] = max(clock, clocks.get(name, 0))
        except RolledBack:
            return  # Once more; that one has begun already.
        except StreamiterError as error:
            self._fail_going_back(error)
            return
        if answer.generation == self._generation:
            for shard, link in enumerate(self._remote):
                raise_ = RaiseRequest(worker, clocks)
                sent = link.send(raise_)
                if self._every is not None:
                    self._count(shard, raise_, sent, is_clock=False)
            self._have_gone_back(clocks, answer.loss)

    def _have_gone_back(self, clocks: Mapping[str, int], loss: str) -> None:
        error = RolledBack(
            f"{loss}: go on from its clocks: "
            f"{', '.join(f'{name} {clock}' for name, clock in clocks.items()) or 'none'}",
            clocks,
        )
        if self._every is not None:
            self._clocks = clocks.get(self._every.of, 0)
        self._untold = error
        self._on_back(clocks)
        self._fail_going_back(error)

    def _fail_going_back(self, error: StreamiterError) -> None:
        replies, self._going_back = self._going_back or [], None
        for reply in replies:
            self._fail(reply, error)

    def _fail(self, reply: _Reply, error: StreamiterError) -> None:
        reply.generation = self._generation
        reply.fail(copy.copy(error))  # Each is raised somewhere else.

    def _told(self, generation: int) -> None:
        if generation == self._generation:
            self._untold = None

    # -- life ------------------------------------------------------------------------------------------

    def _set_heartbeat(self, timeout_s: float) -> None:
        def beat() -> None:
            session = self._session._replace(generation=self._generation)
            try:
                message = ClientMessage(session, 0, (), SessionControl.ACKNOWLEDGE)
                self._carriers[0].send(message, lambda outcome: None)
            except ParameterServerError:
                return  # Ray has been ended: nobody listens any more, and calls say so.
            self._set_heartbeat(timeout_s)

        self._heartbeat = self._clock.call_later(timeout_s / _HEARTBEATS_IN_TIMEOUT, beat)

    def close(self) -> set[asyncio.Task[None]]:
        """The client has ended; calls under way fail, and the shards are told. Gives what waits for their answers."""
        self._is_closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._remote:
            link.close()
        return self._tasks.union(*[carrier.under_way for carrier in self._carriers])


def _with_own_arrays(reply: Any) -> Any:
    """What lies in the object store cannot be written to; what a client has read can."""
    if not isinstance(reply, GetReply):
        return reply
    return reply._replace(
        values=[values if values.flags.writeable else values.copy() for values in reply.values]
    )


def _nothing(generation: int) -> None:
    del generation


# Whoever answers at all does so at once. What is still under way when Ray ends a process it reports as a failure.
_END_S: Final = 1.0


async def ended(tasks: set[asyncio.Task[None]]) -> None:
    """Return when these tasks have ended by themselves, or have been cancelled because they have not."""
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_END_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@final
class Connections:
    """Opens and closes them. A worker's newest connection has the highest incarnation, across processes, too.

    All connections of one process to the shards of one server.
    """

    def __init__(
        self, address: RayAddress, clock: Clock, *, on_used: Callable[[], None] = lambda: None
    ) -> None:
        self._address = address
        self._clock = clock
        self._on_used = on_used
        self._open: dict[int, ShardConnections] = {}
        self._others: list[ShardConnections] = []
        self._incarnation = 0

    def open(
        self,
        client: str,
        worker: int | None = None,
        on_back: Callable[[Mapping[str, int]], None] = lambda clocks: None,
    ) -> ShardConnections:
        """A connection of a worker, or of what is none (None)."""
        # Milliseconds: workers in other processes take the place of one that died later than that.
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
        """The client of this worker has left."""
        if (connection := self._open.pop(worker, None)) is not None:
            connection.close()

    def links_of_workers(self) -> list[RemoteLink]:
        """The links of all workers of this process that have not left."""
        return [link for connection in self._open.values() for link in connection.remote_links]

    def joined(self) -> tuple[int, ...]:
        """The workers of this process that the shards have answered."""
        return tuple(worker for worker, connection in self._open.items() if connection.has_joined)

    async def close_all(self) -> None:
        """Nothing is sent any more."""
        connections = (*self._open.values(), *self._others)
        self._open.clear()
        self._others.clear()
        await ended({task for connection in connections for task in connection.close()})
