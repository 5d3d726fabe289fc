"""The parameter server: its shards, its matrices, its workers, and its part in a flow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Self, final

from streamiter.errors import (
    CheckpointError,
    ConfigurationError,
    ParameterServerError,
    ServerReset,
    ShardLost,
    shortened,
)
from streamiter.operators.services import ServiceWorker
from streamiter.parameter_server.calls import Call, Heartbeats, ShardLink, WaitingReply
from streamiter.parameter_server.client import MAX_CALLS, Client
from streamiter.parameter_server.divided import DividedShards
from streamiter.parameter_server.matrix import Matrix, unknown_matrix
from streamiter.parameter_server.matrix_shard import MatrixStatistics
from streamiter.parameter_server.psf.function import GetFunction, Result, UpdateFunction
from streamiter.parameter_server.requests import JoinRequest, LeaveRequest, ServerState
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.shard import Shard, ShardStatistics
from streamiter.parameter_server.snapshots import clock_in, in_memory, is_state, merged, thawed
from streamiter.values.deferred import release_all
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.numbers import positive, whole_number
from streamiter.values.plain_data import PlainData
from streamiter.values.times import Seconds, in_seconds

OWN_CALLS = -1
"""The worker's number in requests of the server itself."""


@final
class ParameterServer:
    """Matrices of parameters that workers read, add to and clock, under BSP, ASP or SSP.

    The columns of each matrix (or its blocks) are divided among ``shards``. They are in this process, and calls that
    need not wait are direct calls. To use the server in a step of a flow, give it as ``parameter_server=``; a flow that
    runs in several processes has its shards there. ``heartbeat_timeout_s``: a worker without a request for so long is
    made to leave; None: workers leave only by themselves. ``async with`` closes the server at the end.

    >>> import asyncio
    >>> from streamiter.parameter_server import SSP
    >>> async def main() -> list[float]:
    ...     async with ParameterServer(shards=2) as server:
    ...         await server.create_matrix("w", rows=1, columns=6, consistency=SSP(staleness=1))
    ...         client = server.client(worker=0)
    ...         await client.add("w", row=0, columns=[5, 0, 5], values=[1.0, 2.0, 3.0])
    ...         await client.clock("w")
    ...         return (await client.get("w", row=0)).tolist()
    >>> asyncio.run(main())
    [2.0, 0.0, 0.0, 0.0, 0.0, 4.0]
    """

    def __init__(
        self,
        shards: int = 1,
        *,
        name: str = "parameter server",
        clock: Clock | None = None,
        heartbeat_timeout_s: Seconds | None = None,
        on: str | None = None,
    ) -> None:
        if on is not None:
            raise ConfigurationError(
                f"{name}, on=: expected no place, given {on!r}; leave it out. The shards are in the processes of the "
                "flow that uses the server: flow.run(on=LocalProcesses(2)), or flow.run(on=Ray(2))"
            )
        self.name = name
        count = whole_number("ParameterServer(shards=)", shards, 1)
        if heartbeat_timeout_s is not None:
            heartbeat_timeout_s = positive("ParameterServer(heartbeat_timeout_s=)", in_seconds(heartbeat_timeout_s))
        self._here = [Shard(number) for number in range(count)]
        """The shards of this process."""
        self._links: list[ShardLink] = [*self._here]
        """All clients share this list. In a flow in several processes, links replace the shards of the others."""
        self._directory = MatrixDirectory(self._links)
        self._clients: dict[int, Client] = {}
        """The clients of this process that have not left, by worker."""
        self._is_closed = False
        self._own = Client(OWN_CALLS, self._links, self._directory, joins=False)
        """The client of the server itself, which is no worker."""
        self._heartbeats: Heartbeats | None = None
        if heartbeat_timeout_s is not None:
            self._heartbeats = Heartbeats(clock or SystemClock(), in_seconds(heartbeat_timeout_s), self._remove_silent)
        self._divided: DividedShards | None = None
        """The shards of this process, if several processes run the flow that uses the server."""
        self._flow: str | None = None
        """The flow that uses the server now."""
        self._interrupted: str | None = None
        """The flow whose last run ended before its end."""
        self._plain_data = PlainData()
        self._taking: dict[int, list[WaitingReply[ServerState | None]]] = {}
        """The replies of the shards with their states, by checkpoint."""

    # -- matrices --------------------------------------------------------------------------------------

    @property
    def matrices(self) -> list[str]:
        """The names of all matrices."""
        return self._directory.names()

    async def create_matrix(self, name: str, **settings: Any) -> None:
        """Make a matrix, with the settings of :class:`~streamiter.parameter_server.matrix.Matrix`.

        Nothing happens if it exists with the same settings. Raises ConfigurationError for wrong settings,
        ParameterServerError if it exists with other settings, and the errors of a function of ``init``; then no shard
        has the matrix.
        """
        self._check_open()
        await self._directory.create(Matrix.of(name, settings))

    async def update(self, function: UpdateFunction) -> None:
        """Run a psf that changes parameters, as :meth:`Client.update` does, without a worker."""
        self._check_open()
        await self._own.update(function)

    async def aggregate(self, function: GetFunction) -> Result:
        """Run a psf that computes a result, as :meth:`Client.aggregate` does, without a worker."""
        self._check_open()
        return await self._own.aggregate(function)

    # -- workers ---------------------------------------------------------------------------------------

    def client(
        self, worker: int, *, read_my_writes: bool = False, cache_bytes: int = 0, max_calls: int = MAX_CALLS
    ) -> Client:
        """Let a worker join, at the minimum clock of each matrix, and return its client.

        Make the clients of all workers before the first worker begins: it waits only for workers that have joined.
        ``read_my_writes``: reads show the worker's own adds even while these wait for a clock. ``cache_bytes``: keep
        rows that were read whole, as long as the consistency allows it. ``max_calls``: how many calls may be under way
        at a time; further calls wait. Raises ParameterServerError for a worker that takes part already.
        """
        self._check_open()
        worker = whole_number("ParameterServer.client(worker=)", worker, 0)
        if worker in self._clients:
            raise ParameterServerError(
                f"worker {worker}: expected a worker without a client, given a worker that has one; use its client, "
                "or let it leave first"
            )
        client = self._clients[worker] = Client(
            worker,
            self._links,
            self._directory,
            read_my_writes=read_my_writes,
            cache_bytes=cache_bytes,
            max_calls=max_calls,
            heartbeats=self._heartbeats,
            on_left=self._client_left,
        )
        if self._heartbeats is not None:
            self._heartbeats.joined(worker)
        return client

    def _client_left(self, worker: int) -> None:
        self._clients.pop(worker, None)
        if self._heartbeats is not None:
            self._heartbeats.left(worker)

    def _remove_silent(self, worker: int, reason: str) -> None:
        """Make a silent worker leave."""
        for link in self._links:
            # If a function of on_clock= fails, the calls that wait for the clock get the error.
            with suppress(ParameterServerError):
                link.send(LeaveRequest(worker, reason))
        if (client := self._clients.get(worker)) is not None:
            client.left(reason)
        self._client_left(worker)

    @property
    def workers(self) -> list[int]:
        """The workers of this process that take part."""
        return list(self._clients)

    async def reset(self) -> None:
        """Set all clocks of all workers to 0. Parameters stay; waiting calls fail with ServerReset."""
        self._check_whole()
        for shard in self._here:
            shard.reset(self._clients)
        for client in self._clients.values():
            client.go_back({})

    # -- state -----------------------------------------------------------------------------------------

    async def snapshot(self) -> ServerState:
        """Return parameters, clocks and buffered adds at one moment, as plain data for ``restore``."""
        self._check_whole()
        return merged([thawed(shard.state_now(), self._plain_data) for shard in self._here])

    async def restore(self, state: ServerState) -> None:
        """Go back to a snapshot, with the workers that take part now; waiting calls fail with ServerReset.

        A matrix that is not made yet takes over its state when it is made.
        """
        self._check_whole()
        if not is_state(state):
            raise ParameterServerError(
                f"{self.name}, restore: expected a result of snapshot(), given {shortened(state)}"
            )
        self._restore(state, self._clients)

    def _restore(self, state: ServerState, workers: Iterable[int]) -> None:
        for shard in self._here:
            shard.restore(state, workers)
        for worker, client in self._clients.items():
            client.go_back({name: clock_in(matrix["clocks"], worker) for name, matrix in state["matrices"].items()})

    def statistics(self) -> ParameterServerStatistics:
        """Return the statistics of all shards of this process."""
        shards = tuple(shard.statistics() for shard in self._here)
        return ParameterServerStatistics(self.name, tuple(self._clients), shards)

    # -- in a flow: see streamiter.operators.operator ---------------------------------------------------

    @property
    def drawn_as(self) -> str:
        """The line for a drawing below the server's name."""
        count = len(self._links)
        where = "this process" if self._divided is None else "the processes of the flow"
        return f"{count} shard{'s' if count > 1 else ''} in {where}"

    def divide(self, own: int, processes: int, send: Callable[..., Callable[[], None]]) -> None:
        """Keep the shards of process ``own``; ``send`` sends messages to the others, whose ``received`` takes them."""
        if self._divided is not None:
            raise ConfigurationError(
                f"{self.name}: expected a new server, given one that a run in several processes has used; make another"
            )
        self._here = self._here[own::processes]
        self._divided = DividedShards(self._directory, self._links, self._here, processes, send)

    def received(self, process: int, *contents: Any) -> None:
        """Take a message of this server in another process."""
        assert self._divided is not None
        self._divided.received(process, *contents)

    def _check_whole(self) -> None:
        self._check_open()
        if self._divided is not None:
            raise ParameterServerError(
                f"{self.name}: expected all shards in this process, given a flow that runs in several processes; its "
                "checkpoints have the states of all shards"
            )

    async def begin_job(
        self, flow: str, workers: int, states: Sequence[ServerState], *, here: Sequence[int], has_checkpoints: bool
    ) -> list[ServiceWorker]:
        """A flow with this many workers on this server begins; return the workers ``here``, those of this process.

        It begins from ``states``, the parts of a checkpoint, if there are any.
        """
        state = merged(states) if states else None
        self._check_open()
        if state is None and has_checkpoints and self._interrupted == flow:
            raise ParameterServerError(
                f"{self.name}: expected a checkpoint of flow {flow!r} to go back to, given none, and parameters that "
                "its last run has changed before it was cut off; make a new server, or the changes count twice"
            )
        if self._clients:
            raise ParameterServerError(
                f"{self.name}: expected no workers yet as flow {flow!r} begins, given {len(self._clients)}; one "
                "flow at a time, and no other clients"
            )
        self._flow = flow
        try:
            if self._divided is not None:
                # Each process lets all workers join on its own shards: a message might come before a restored state.
                for worker in range(workers):
                    for shard in self._here:
                        shard.handle(JoinRequest(worker))
            joins = self._divided is None
            for worker in here:  # None of them is ever silent.
                self._clients[worker] = Client(
                    worker, self._links, self._directory, joins=joins, on_left=self._client_left
                )
            # The state is read now: a matrix that is made later takes it over when its store is closed.
            if state is not None:
                self._restore(in_memory(state), range(workers))
        except BaseException:
            await self.end_job(went_well=state is None)
            raise
        return [self._clients[worker] for worker in here]

    def checkpoint_begins(self, checkpoint: int) -> None:
        """A checkpoint begins: ask the shards for their states at its barrier."""
        self._taking[checkpoint] = [shard.take_state(checkpoint) for shard in self._here]

    async def take_state(self, checkpoint: int) -> ServerState | None:
        """Return the state of all shards at the barrier of a checkpoint: of those of this process; None without any."""
        states = await Call(self._taking[checkpoint], list)
        del self._taking[checkpoint]
        if any(state is None for state in states):
            raise CheckpointError(
                f"{self.name}: expected its state at the barrier of checkpoint {checkpoint}, given a server that was "
                "closed, reset or restored before all workers had passed it"
            )
        return merged(states) if states else None

    def checkpoint_abandoned(self, checkpoint: int) -> None:
        """A checkpoint is abandoned: have the shards apply the requests that they hold for it."""
        for shard in self._here:
            shard.abandon(checkpoint)
        for reply in self._taking.pop(checkpoint, ()):
            # While a state is frozen, its block copies the numbers that change.
            if reply.is_settled:
                with suppress(asyncio.CancelledError):  # The call was given up.
                    release_all(reply.result())

    async def end_job(self, *, went_well: bool) -> None:
        """The flow has ended: its workers leave. Matrices stay."""
        if self._flow is not None:
            self._interrupted = None if went_well else self._flow
            self._flow = None
        if self._divided is not None:
            self._divided.close()
        for client in list(self._clients.values()):
            with suppress(ShardLost):  # A lost shard has forgotten its workers.
                await client.leave("its flow has ended")

    # -- life ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the server; waiting calls fail with ServerReset. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._heartbeats is not None:
            self._heartbeats.stop()
        given = f"a server ({self.name}) that was closed meanwhile"
        for shard in self._here:
            shard.fail_waiting(ServerReset(f"parameter server: expected to answer this call, given {given}"))
        for client in list(self._clients.values()):
            client.left("the server was closed")
        self._clients.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ParameterServerError(
                f"{self.name}: expected a server that is open, given one that was closed; make a new one"
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class ParameterServerStatistics:
    """The statistics of all shards at one moment."""

    name: str
    """The name of the server."""
    workers: tuple[int, ...]
    """The workers of this process that take part."""
    shards: tuple[ShardStatistics, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """The lines for a drawing: the number of workers, if there are any, and each matrix with its minimum clock."""
        found = [self.matrix(name) for name in self._names()]
        count = len(self.workers)
        workers = [f"{count:,} worker{'s' if count > 1 else ''}"] if count else []
        return (
            *workers,
            *(
                f"{one.matrix}, {one.consistency.removesuffix('()')}: minimum clock {one.minimum_clock:,}"
                for one in found
            ),
        )

    def matrix(self, name: str) -> MatrixStatistics:
        """Return the statistics of a matrix on all shards together; raises UnknownMatrix."""
        parts = [matrix for shard in self.shards for matrix in shard.matrices if matrix.matrix == name]
        if not parts:
            raise unknown_matrix(name, self._names(), f"{self.name}, statistics of ")
        slowest = min(parts, key=lambda part: part.minimum_clock)
        counts = {
            field.name: field.metadata.get("together", sum)(getattr(part, field.name) for part in parts)
            for field in fields(MatrixStatistics)
            if field.type == "int"
        }
        return replace(slowest, **counts)

    def _names(self) -> Iterable[str]:
        return dict.fromkeys(matrix.matrix for shard in self.shards for matrix in shard.matrices)
