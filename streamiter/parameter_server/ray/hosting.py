"""Shards on Ray, as a server sees them: starting their hosts, watching them, and clients in other processes.

``RayHosting`` starts the hosts of a server's shards. Its ``Supervisor`` notices lost shards, brings all shards back to
the last snapshot, and makes silent workers leave. ``RemoteServer`` makes clients in a process that did not start the
shards.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar, cast, final

from streamiter.clock import Clock, SystemClock
from streamiter.errors import RolledBack, StreamiterError, WorkerHasLeft
from streamiter.parameter_server.calls import AnyReply, Call, OnBack, ShardLink, WaitingReply
from streamiter.parameter_server.client import Server
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
from streamiter.parameter_server.ray.connection import ConnectionLink, Connections, ShardConnections, ended
from streamiter.parameter_server.ray.host import (
    GenerationStart,
    HostProcess,
    RayAddress,
    RayCluster,
    Restore,
    ShardHost,
    Untyped,
    imported_ray,
)
from streamiter.parameter_server.requests import (
    CreateRequest,
    ForgetRequest,
    Request,
    RestoreState,
    ServerState,
    TakeState,
)
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.shard import ShardStatistics
from streamiter.parameter_server.snapshots import KeptSnapshots, SnapshotEvery, StartingPoint, in_memory
from streamiter.parameter_server.transport import between_calls

R = TypeVar("R")


# Ray runs so many calls of an actor at a time: enough for all calls that wait, 64 for each of a thousand workers. If
# waiting gets took all of them, the clock that they wait for would never be handled.
_CALLS_AT_A_TIME: Final = 100_000


# The longest wait for statistics. An answer takes 2 to 3 ms, or as long as the shard works on one request.
_STATISTICS_S: Final = 0.1


@final
class RayHosting:
    """Shards in Ray actors, which Ray starts again when their processes die.

    If Ray does not run in this process, it is started on this machine; that takes some seconds. ``on_silent`` is that
    of ``Supervisor``.
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
        hosts = tuple(host.remote(number, count, takes_snapshots=snapshots is not None) for number in range(count))
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
        self._asked: list[Untyped] | None = None
        """The calls for statistics that are not answered yet."""
        self._taking = asyncio.Lock()
        self._asking_for_states: ShardConnections | None = None
        self._is_closed = False

    @property
    def drawn_as(self) -> str:
        return "on Ray"

    def links(
        self, client: str, worker: int | None = None, on_back: OnBack = lambda clocks: None
    ) -> Sequence[ShardLink]:
        links = self._connections.open(client, worker, on_back).links
        return links if worker is not None else [_ServerLink(link, self._supervisor) for link in links]

    def release(self, worker: int) -> None:
        self._connections.close(worker)

    def statistics(self) -> tuple[ShardStatistics, ...]:
        """Ask the shards for their statistics, which takes a few milliseconds.

        If a shard is busy or lost for longer, return the last statistics.
        """
        ray = self._cluster.ray
        if self._is_closed or not ray.is_initialized():
            return self._statistics
        # One question at a time, even if a shard is lost for long.
        patience_s = _STATISTICS_S if self._asked is None else 0.0
        asked = self._asked or [host.statistics.remote() for host in self.address.hosts]
        self._asked = None
        try:
            self._statistics = tuple(ray.get(asked, timeout=patience_s))
        except ray.exceptions.GetTimeoutError:
            self._asked = asked
        except ray.exceptions.RayError:
            pass  # Return the last ones.
        return self._statistics

    async def take_states(self) -> list[ServerState]:
        """Return the states of all shards between the same two calls of each worker of this process."""
        if self._asking_for_states is None:
            self._asking_for_states = self._connections.open(f"{self.address.name}, states")
        asking = self._asking_for_states

        async def take() -> list[ServerState]:
            return await Call([link.send(TakeState()) for link in asking.links], list)

        async with self._taking:
            while True:
                generation = asking.generation
                # RolledBack: the shards went back before they had handled all earlier requests.
                with suppress(RolledBack):
                    states = await between_calls(self._connections.links_of_workers(), take)
                    # Otherwise one state may be from before the shards went back, and one from after.
                    if asking.generation == generation:
                        return states

    @property
    def latest_snapshot(self) -> int | None:
        """The number of the snapshot to which all shards go back after a loss; None: there is no snapshot."""
        latest = self._supervisor.kept.latest
        return None if latest is None else latest.number

    async def close(self) -> None:
        """End the shards, and a Ray that was started here. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._connections.close_all()
        await self._supervisor.stop()
        if self._cluster.ray.is_initialized():  # The user may have ended Ray.
            for host in self.address.hosts:
                self._cluster.ray.kill(host)
        await asyncio.to_thread(self._cluster.close)


@final
class _ServerLink:
    """The server's own link to a shard: notes the matrices that the server makes, and makes states fit to be sent."""

    def __init__(self, link: ConnectionLink, supervisor: Supervisor) -> None:
        self._link = link
        self._supervisor = supervisor

    def send(self, request: Request[R]) -> WaitingReply[R]:
        """Send a request; return the reply to come."""
        if isinstance(request, ForgetRequest):
            self._supervisor.created.pop(request.matrix, None)
        elif isinstance(request, RestoreState):
            # The request is the same for all shards: the first link makes lists of iterators.
            request.state = in_memory(request.state)
            restore = Restore(uuid.uuid4().hex, request.state, request.workers)
            return cast("WaitingReply[R]", self._link.send(restore))
        reply = self._link.send(request)
        if isinstance(request, CreateRequest):
            reply.when_settled(partial(self._note, request, reply))
        return reply

    def _note(self, create: CreateRequest, reply: AnyReply) -> None:
        # Refused: the call of create_matrix gets the error.
        with suppress(StreamiterError, asyncio.CancelledError):
            reply.result()
            self._supervisor.created.setdefault(create.matrix.name, create)


# A silent worker is noticed at most two checks later than its timeout.
_CHECKS_IN_TIMEOUT: Final = 4


# The pause before a lost host is asked again: about the time that Ray takes to start a process.
_AGAIN_S: Final = 0.2


_log: Final = logging.getLogger(__name__)


@final
class Supervisor:
    """Watches the hosts of a server, in the server's event loop.

    When a host was started again, the supervisor begins a new generation on all hosts, from the last snapshot.
    Snapshots stay in Ray's object store. ``on_silent`` is called with each silent worker that was made to leave, and
    the reason. ``workers_here`` returns the workers of this process: if all shards are lost at once, no other workers
    are known.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[Untyped],
        clock: Clock,
        *,
        snapshots: SnapshotEvery | None,
        heartbeat_timeout_s: float | None,
        on_silent: Callable[[int, str], None],
        workers_here: Callable[[], tuple[int, ...]],
    ) -> None:
        self._name = name
        self._hosts = hosts
        self._clock = clock
        self._takes_snapshots = snapshots is not None
        self._timeout_s = heartbeat_timeout_s
        self._on_silent = on_silent
        self._workers_here = workers_here
        self._ray = imported_ray()
        self.generation = 0
        self.kept = KeptSnapshots[Untyped](len(hosts))
        self._first_starts = [host.begin.remote(GenerationStart(0), None) for host in hosts]
        self._processes: list[HostProcess] = []
        """The process of each host, to notice that a host was started again."""
        self._unrestorable: str | None = None
        """Why the last snapshot could not be restored, if it could not."""
        self._recovering = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._timed: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.created: dict[str, CreateRequest] = {}
        """The matrices that this server has made, by name: if all shards are lost at once, no others are known."""

    def start(self) -> None:
        """Begin to watch, in the event loop; nothing happens if the supervisor watches already."""
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._watch_all()))
            if self._timeout_s is not None:
                self._timed.append(asyncio.create_task(self._watch_workers(self._timeout_s)))

    async def stop(self) -> None:
        """Stop watching, and have the hosts end all waiting calls."""
        self._is_stopping = True
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):
                await asyncio.gather(*[host.end.remote() for host in self._hosts])
        for task in self._timed:
            task.cancel()
        await ended({*self._tasks, *self._timed})

    @property
    def _is_running(self) -> bool:
        # A call after Ray's end would start another Ray.
        return not self._is_stopping and bool(self._ray.is_initialized())

    # -- lost shards -----------------------------------------------------------------------------------

    async def _watch_all(self) -> None:
        self._processes = await asyncio.gather(*self._first_starts)
        for shard in range(len(self._hosts)):
            self._tasks.append(asyncio.create_task(self._watch(shard)))
            if self._takes_snapshots:
                self._tasks.append(asyncio.create_task(self._collect(shard)))

    async def _watch(self, shard: int) -> None:
        while self._is_running:
            instance = self._processes[shard].instance
            await self._hosts[shard].until_replaced.remote(instance)
            async with self._recovering:
                if not self._is_stopping and self._processes[shard].instance == instance:
                    await self._recover_or_refuse(shard)

    async def _recover_or_refuse(self, shard: int) -> None:
        lost = {shard}
        try:
            await self._recover(lost)
        except Exception as error:
            # Workers must not wait for a snapshot that cannot be restored, now or after the next loss.
            latest = self.kept.latest
            point = "the initial values" if latest is None else f"snapshot {latest.number}"
            self._unrestorable = f"{point} could not be restored ({_in_short(error)})"
            self.kept.replace(None)
            _log.warning("%s: %s", self._name, self._unrestorable, exc_info=error)
            await self._recover(lost)

    async def _recover(self, lost: set[int]) -> None:
        """Begin a generation; add to ``lost`` all shards that were started again."""
        generation = self.generation = self.generation + 1
        latest = self.kept.latest
        self.kept.replace(latest)
        found = await asyncio.gather(*[host.present.remote() for host in self._hosts])
        lost.update(number for number, present in enumerate(found) if present is None)
        survivors = [present for present in found if present is not None]
        made = dict(self.created)
        for matrices, _ in survivors:
            made |= {create.matrix.name: create for create in matrices}
        if latest is not None:
            made |= {create.matrix.name: create for create in latest.matrices}
        loss = await self._loss(lost, [create.matrix for create in made.values()])
        creates = tuple(made.values())
        if latest is not None:
            workers = _workers_of(latest, [known for _, known in survivors])
            to = f"all shards went back to snapshot {latest.number}"
            start = GenerationStart(generation, creates, workers, latest.number, loss=f"{loss}; {to}")
        elif self._takes_snapshots and self._unrestorable is None:
            workers = _known_workers([known for _, known in survivors]) if survivors else self._workers_here()
            to = "there is no snapshot yet, so all shards went back to their initial values"
            start = GenerationStart(generation, creates, workers, loss=f"{loss}; {to}")
        else:
            start = GenerationStart(generation, creates, refusal=f"{loss}; {self._why_all_is_lost()}")
        states = latest.states if latest is not None else (None,) * len(self._hosts)
        self._processes = await asyncio.gather(
            *[host.begin.remote(start, state) for host, state in zip(self._hosts, states, strict=True)]
        )

    async def _loss(self, lost: Iterable[int], matrices: Sequence[Matrix]) -> str:
        """Return the start of an error: the lost shards, the end of their processes, and their matrices."""
        nodes = await asyncio.to_thread(self._ray.nodes)
        running = {node["NodeID"] for node in nodes if node["Alive"]}
        ends = []
        for number in sorted(lost):
            process = self._processes[number]
            where = f"node {process.node_address} ({process.node_id[:8]})"
            end = (
                f"process {process.process_id} on {where} has ended"
                if process.node_id in running
                else f"{where} is gone"
            )
            ends.append(f"shard {number} ({end})")
        names = [
            repr(matrix.name)
            for matrix in matrices
            if any(block.shard in lost for block in MatrixPartitioning(matrix, len(self._hosts)).blocks)
        ]
        return (
            f"{self._name}: expected all shards to run, given the loss of {' and '.join(ends)} with "
            f"{'blocks of ' + ', '.join(names) if names else 'no matrices'}"
        )

    def _why_all_is_lost(self) -> str:
        """Return the end of an error: why the parameters are lost, and what to do."""
        if self._unrestorable is not None:
            return f"{self._unrestorable}, so all parameters are lost; make a new server, and start the workers again"
        return (
            "no snapshots are taken, so all parameters are lost; start the flow again, which resumes from its last "
            "checkpoint; without a flow restore a state of your own with server.restore(…), or have snapshots taken: "
            'ParameterServer(snapshots=SnapshotEvery(clocks=10, of="…"))'
        )

    # -- snapshots -------------------------------------------------------------------------------------

    async def _collect(self, shard: int) -> None:
        """Collect the snapshots of one shard, as they are taken."""
        host, after, generation = self._hosts[shard], 0, 0
        # Ray must not repeat this call: if a state is lost, the host would give the state of another moment.
        once = {"num_returns": 2, "max_task_retries": 0}
        while self._is_running:
            part, state = host.next_snapshot.options(**once).remote(generation, after)
            try:
                taken = await part
            except self._ray.exceptions.RayActorError:
                await self._clock.sleep(_AGAIN_S)  # Its process has died.
                taken = None
            if generation != self.generation:
                generation = self.generation
                after = self.kept.latest.number if self.kept.latest is not None else 0
            elif taken is not None:
                self.kept.add(shard, replace(taken, state=state))
                after = taken.number

    # -- workers ---------------------------------------------------------------------------------------

    async def _watch_workers(self, timeout_s: float) -> None:
        suspects: set[int] = set()
        while True:
            await self._clock.sleep(timeout_s / _CHECKS_IN_TIMEOUT)
            if not self._is_running:
                return
            silent_s: dict[int, float] = {}
            for of_shard in await asyncio.gather(*[host.silent_s.remote() for host in self._hosts]):
                for worker, ago_s in of_shard.items():
                    silent_s[worker] = min(ago_s, silent_s.get(worker, ago_s))
            silent = {worker for worker, ago_s in silent_s.items() if ago_s >= timeout_s}
            # A shard or this process may have been busy for long: heartbeats that have arrived meanwhile are noted by
            # the next check.
            for worker in silent & suspects:
                await self._remove_worker(
                    worker, f"nothing was heard of it for {timeout_s:g} s (its heartbeat timeout)"
                )
            suspects = silent

    async def _remove_worker(self, worker: int, reason: str) -> None:
        await asyncio.gather(*[host.leave.remote(worker, reason) for host in self._hosts])
        self._on_silent(worker, reason)


def _known_workers(present: Sequence[Iterable[int]]) -> tuple[int, ...]:
    """Return the workers that any shard knows."""
    return tuple(dict.fromkeys(worker for workers in present for worker in workers))


def _in_short(error: Exception) -> str:
    """Return an error of a shard's process in one line, without its traceback."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def _workers_of(latest: StartingPoint[Untyped], present: Sequence[Iterable[int]]) -> tuple[int, ...]:
    """Return the workers of a snapshot, except those that have left since, as far as a shard knows."""
    if not present:
        return latest.workers
    known = _known_workers(present)
    return tuple(worker for worker in latest.workers if worker in known)


@final
class RemoteServer(Server):
    """Makes clients in this process for a server of another process: a result of ``ParameterServer.connect``.

    ``close`` makes these clients leave; the server itself stays open.
    """

    def __init__(self, address: RayAddress, *, clock: Clock | None = None) -> None:
        self._connections = Connections(address, clock or SystemClock())
        self._links = self._connections.open(f"directory {uuid.uuid4().hex}").links
        super().__init__(address.name, MatrixDirectory(self._links))

    def _links_of(self, worker: int, on_back: OnBack) -> Sequence[ShardLink]:
        return self._connections.open(f"worker {worker}", worker, on_back).links

    def _client_left(self, worker: int) -> None:
        super()._client_left(worker)
        self._connections.close(worker)

    async def close(self) -> None:
        """Make all workers of this process leave. May be called more than once."""
        self._is_closed = True
        try:
            for client in list(self._clients.values()):
                while not client.has_left:
                    # WorkerHasLeft: a newer client of the worker has replaced this one. RolledBack: leave again.
                    with suppress(WorkerHasLeft, RolledBack):
                        await client.leave("its process has ended")
        finally:
            await self._connections.close_all()
