"""The parameter server: its shards, its matrices, its workers, and its part in a flow.

``ParameterServer`` makes matrices and clients. A ``Hosting`` keeps the shards: ``InProcess`` here, ``RayHosting`` (in
``transport.ray``) in Ray actors. ``MatrixDirectory`` knows the matrices that were made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import Clock, SystemClock
from streamiter.deferred import release_all
from streamiter.errors import CheckpointError, ConfigurationError, ParameterServerError, ShardLost, shortened
from streamiter.numbers import positive, whole_number
from streamiter.operators.operator import ServiceWorker
from streamiter.parameter_server.calls import Call, Heartbeats, OnBack, ShardLink, SilenceWatch, WaitingReply
from streamiter.parameter_server.client import Client, Server
from streamiter.parameter_server.divided import DividedShards
from streamiter.parameter_server.matrix import unknown_matrix
from streamiter.parameter_server.matrix_shard import MatrixStatistics
from streamiter.parameter_server.psf.function import GetFunction, Result, UpdateFunction
from streamiter.parameter_server.requests import (
    AbandonBarrier,
    FailWaiting,
    JoinRequest,
    LeaveRequest,
    Request,
    ResetRequest,
    RestoreState,
    ServerState,
    TakeState,
)
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.shard import Shard, ShardStatistics
from streamiter.parameter_server.snapshots import SnapshotEvery, clock_in, in_memory, is_state, merged, thawed

if TYPE_CHECKING:
    from streamiter.parameter_server.ray.host import RayAddress
    from streamiter.parameter_server.ray.hosting import RemoteServer

R = TypeVar("R")

Place = Literal["process", "ray"]


OWN_CALLS = -1
"""The worker's number in requests of the server itself."""


@final
class ParameterServer(Server):
    """Matrices of parameters that workers read, add to and clock, under BSP, ASP or SSP.

    The columns of each matrix (or its blocks) are divided among ``shards``. ``on="process"``: the shards are in this
    process, and calls that need not wait are direct calls; ``on="ray"``: each shard is a Ray actor.
    ``heartbeat_timeout_s``: a worker without a request for so long is made to leave; None: workers leave only by
    themselves. To use the server in a step of a flow, give it as ``parameter_server=``.

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
        on: Place = "process",
        name: str = "parameter server",
        clock: Clock | None = None,
        heartbeat_timeout_s: float | None = None,
        snapshots: SnapshotEvery | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        if snapshots is not None and on != "ray":
            raise ConfigurationError(
                f'{name}, snapshots=: expected on="ray", where shards may be lost, given on={on!r}; leave it out'
            )
        self._snapshots = snapshots
        count = whole_number("ParameterServer(shards=)", shards, 1)
        if heartbeat_timeout_s is not None:
            heartbeat_timeout_s = positive("ParameterServer(heartbeat_timeout_s=)", heartbeat_timeout_s)
        self._hosting: Hosting
        if on == "process":
            self._hosting = InProcess(count)
        elif on == "ray":
            # Imported only where it is used: the package may be missing.
            from streamiter.parameter_server.ray.hosting import RayHosting

            self._hosting = RayHosting(
                count,
                name=name,
                clock=self._clock,
                snapshots=snapshots,
                heartbeat_timeout_s=heartbeat_timeout_s,
                on_silent=self._silent_worker_left,
            )
        else:
            raise ConfigurationError(f'{name}, on=: expected "process" or "ray", given {on!r}')
        self._links = self._hosting.links(name)
        super().__init__(name, MatrixDirectory(self._links))
        self._own = Client(OWN_CALLS, self._links, self._directory, joins=False)
        """The client of the server itself, which is no worker."""
        self._heartbeats: Heartbeats | None = None
        self._silence: SilenceWatch | None = None
        if heartbeat_timeout_s is not None and on == "process":  # On Ray the shards note the heartbeats.
            self._heartbeats = Heartbeats(self._clock, heartbeat_timeout_s)
            self._silence = SilenceWatch(self._clock, self._heartbeats, self._remove_silent)
        self._divided: DividedShards | None = None
        """The shards of this process, if several processes run the flow that uses the server."""
        self._flow: str | None = None
        """The flow that uses the server now."""
        self._interrupted: str | None = None
        """The flow whose last run ended before its end."""
        self._plain_data = PlainData()
        self._taking: dict[int, list[ServerState | WaitingReply[ServerState | None] | None]] = {}
        """The replies of the shards with their states, by checkpoint."""

    # -- matrices --------------------------------------------------------------------------------------

    @property
    def matrices(self) -> list[str]:
        """The names of all matrices."""
        return self._directory.names()

    async def update(self, function: UpdateFunction) -> None:
        """Run a psf that changes parameters, as :meth:`Client.update` does, without a worker."""
        self._check_open()
        await self._own.update(function)

    async def aggregate(self, function: GetFunction) -> Result:
        """Run a psf that computes a result, as :meth:`Client.aggregate` does, without a worker."""
        self._check_open()
        return await self._own.aggregate(function)

    # -- workers ---------------------------------------------------------------------------------------

    def _make_client(self, worker: int, **options: Any) -> Client:
        client = super()._make_client(worker, heartbeats=self._heartbeats, **options)
        if self._heartbeats is not None and self._silence is not None:
            self._heartbeats.joined(worker)
            self._silence.start()
        return client

    def _links_of(self, worker: int, on_back: OnBack) -> Sequence[ShardLink]:
        return self._hosting.links(f"worker {worker}", worker, on_back)

    def _client_left(self, worker: int) -> None:
        super()._client_left(worker)
        if self._heartbeats is not None:
            self._heartbeats.left(worker)
        self._hosting.release(worker)

    def _silent_worker_left(self, worker: int, reason: str) -> None:
        """The shards have removed a silent worker."""
        if (client := self._clients.get(worker)) is not None:
            client.left(reason)
        self._client_left(worker)

    def address(self) -> RayAddress:
        """Return the address for ``connect`` in other processes: may be given to tasks and actors of Ray."""
        from streamiter.parameter_server.ray.hosting import RayHosting

        if not isinstance(self._hosting, RayHosting):
            raise ConfigurationError(
                f'{self.name}: expected shards on Ray, given shards {self._hosting.drawn_as}; make it with on="ray"'
            )
        return self._hosting.address

    @staticmethod
    def connect(address: RayAddress, *, clock: Clock | None = None) -> RemoteServer:
        """In another process: return a server whose clients use the shards of this ``address()``."""
        from streamiter.parameter_server.ray.hosting import RemoteServer

        return RemoteServer(address, clock=clock)

    def _remove_silent(self, worker: int, reason: str) -> None:
        """Make a silent worker leave."""
        for link in self._links:
            # If a function of on_clock= fails, the calls that wait for the clock get the error.
            with suppress(ParameterServerError):
                link.send(LeaveRequest(worker, reason))
        self._silent_worker_left(worker, reason)

    @property
    def workers(self) -> list[int]:
        """The workers of this process that take part."""
        return list(self._clients)

    async def reset(self) -> None:
        """Set all clocks of all workers to 0. Parameters stay; waiting calls fail with ServerReset."""
        self._check_whole()
        await self._ask_own(ResetRequest(tuple(self._clients)))
        for client in self._clients.values():
            client.go_back({})

    # -- state -----------------------------------------------------------------------------------------

    async def snapshot(self) -> ServerState:
        """Return parameters, clocks and buffered adds at one moment, as plain data for ``restore``.

        Each call of a worker of this process is in the snapshot on all shards, or on none. A call of a worker in
        another process that is under way may be in the snapshot on some of its shards only.
        """
        self._check_whole()
        return merged([thawed(state, self._plain_data) for state in await self._hosting.take_states()])

    async def restore(self, state: ServerState) -> None:
        """Go back to a snapshot, with the workers that take part now; waiting calls fail with ServerReset.

        A matrix that is not made yet takes over its state when it is made.
        """
        self._check_whole()
        if not is_state(state):
            raise ParameterServerError(
                f"{self.name}, restore: expected a result of snapshot(), given {shortened(state)}"
            )
        await self._restore(state, self._clients)

    async def _restore(self, state: ServerState, workers: Iterable[int]) -> None:
        await self._ask_own(RestoreState(state, tuple(workers)))
        for worker, client in self._clients.items():
            client.go_back({name: clock_in(matrix["clocks"], worker) for name, matrix in state["matrices"].items()})

    def statistics(self) -> ParameterServerStatistics:
        """Return the statistics of all shards."""
        return ParameterServerStatistics(self.name, tuple(self._clients), self._hosting.statistics())

    async def _ask_own(self, request: Request[R]) -> list[R]:
        return await Call([link.send(request) for link in self._own_links], list)

    # -- in a flow: see streamiter.operators.operator ---------------------------------------------------

    @property
    def drawn_as(self) -> str:
        """The line for a drawing below the server's name."""
        count = len(self._links)
        return f"{count} shard{'s' if count > 1 else ''} {self._hosting.drawn_as}"

    def divide(self, own: int, processes: int, send: Callable[..., None]) -> None:
        """Keep the shards of process ``own``; ``send`` sends messages to the others, whose ``received`` takes them."""
        if not isinstance(self._hosting, InProcess) or self._divided is not None:
            raise ConfigurationError(
                f"{self.name}: expected a new server with its shards in the processes of the flow, given one "
                f"{'that a run has used' if self._divided else self._hosting.drawn_as}; make a new one without on="
            )
        self._divided = DividedShards(self._directory, self._hosting.shards, own, processes, send)

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

    @property
    def _own_links(self) -> Sequence[ShardLink]:
        """The links to the shards that this process takes states of."""
        return self._links if self._divided is None else self._divided.here

    async def begin_job(
        self, flow: str, workers: int, states: Sequence[ServerState], *, here: Sequence[int], has_checkpoints: bool
    ) -> list[ServiceWorker]:
        """A flow with so many workers on this server begins; return the workers ``here``, those of this process.

        It begins from ``states``, the parts of a checkpoint, if there are any.
        """
        state = merged(states) if states else None
        self._check_open()
        if self._snapshots is not None:
            raise ConfigurationError(
                f"{self.name}: expected none of snapshots= for flow {flow!r}, whose checkpoints hold its state, "
                f"given snapshots={self._snapshots!r}; leave that out"
            )
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
                    for shard in self._divided.here:
                        shard.handle(JoinRequest(worker))
            # None of the clients is ever silent.
            clients = [Server._make_client(self, worker, joins=self._divided is None) for worker in here]
            for client in clients:
                await client.join()
            # The state is read now: a matrix that is made later takes it over when its store is closed.
            if state is not None:
                await self._restore(in_memory(state), range(workers))
        except BaseException:
            await self.end_job(went_well=state is None)
            raise
        return [*clients]

    def checkpoint_begins(self, checkpoint: int) -> None:
        """A checkpoint begins: ask the shards for their states at its barrier."""
        self._taking[checkpoint] = [link.send(TakeState(checkpoint)) for link in self._own_links]

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
        for link in self._own_links:
            link.send(AbandonBarrier(checkpoint))
        for reply in self._taking.pop(checkpoint, ()):
            # While a state is frozen, its block copies the numbers that change.
            if isinstance(reply, WaitingReply) and reply.is_settled:
                # The shard is lost, or the call given up.
                with suppress(ParameterServerError, asyncio.CancelledError):
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
        if self._silence is not None:
            self._silence.stop()
        with suppress(ParameterServerError):  # On a lost shard no call waits.
            await self._ask_own(FailWaiting(f"a server ({self.name}) that was closed meanwhile"))
        for client in list(self._clients.values()):
            client.left("the server was closed")
        self._clients.clear()
        await self._hosting.close()


class Hosting(Protocol):
    """Keeps the shards of a server, and makes the links to them."""

    @property
    def drawn_as(self) -> str:
        """Where the shards are, for drawings and errors."""

    def links(
        self, client: str, worker: int | None = None, on_back: OnBack = lambda clocks: None
    ) -> Sequence[ShardLink]:
        """Return a link to each shard, for a client of this name; the shard handles its requests in order.

        ``on_back`` is called with the worker's clocks when the shards go back to a snapshot by themselves.
        """

    def release(self, worker: int) -> None:
        """Release the links of a worker whose client has left."""

    def statistics(self) -> tuple[ShardStatistics, ...]:
        """Return the statistics of the shards, now or a moment ago."""

    async def take_states(self) -> list[ServerState]:
        """Return the states of all shards at one moment, with ``Deferred`` pieces."""

    async def close(self) -> None:
        """Release the shards. May be called more than once."""


@final
class InProcess:
    """Shards in this process: each shard is its own link, and nothing is copied."""

    def __init__(self, count: int) -> None:
        self.shards: list[ShardLink] = [Shard(number) for number in range(count)]
        """All clients share this list. In a flow in several processes, links replace the shards of the others."""

    @property
    def drawn_as(self) -> str:
        return "in this process"

    def links(
        self, client: str, worker: int | None = None, on_back: OnBack = lambda clocks: None
    ) -> Sequence[ShardLink]:
        return self.shards

    def release(self, worker: int) -> None:
        pass

    def statistics(self) -> tuple[ShardStatistics, ...]:
        return tuple(shard.statistics() for shard in self.shards if isinstance(shard, Shard))

    async def take_states(self) -> list[ServerState]:
        states = [shard.send(TakeState()) for shard in self.shards]
        return cast("list[ServerState]", states)  # Each shard answers at once.

    async def close(self) -> None:
        pass


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
