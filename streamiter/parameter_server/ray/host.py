"""The host of a shard: the Ray actor in which the shard is; its messages, and what can be sent to it.

Ray starts an actor again when its process dies. A host that was started again knows nothing: it keeps all callers
waiting until the server's supervisor calls ``begin`` with the start of a new *generation*. All shards go back to a
snapshot together; each time they do, a new generation begins, and messages of earlier generations are answered with
``GoBack``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import SystemClock
from streamiter.errors import ConfigurationError, ParameterServerError, ShardLost
from streamiter.parameter_server.calls import WaitingReply, until_settled
from streamiter.parameter_server.requests import (
    ClientMessage,
    CreateRequest,
    Describe,
    FailWaiting,
    ForgetRequest,
    JoinRequest,
    LeaveRequest,
    RaiseRequest,
    Request,
    ResetRequest,
    RestoreState,
    ServerState,
    TakeState,
)
from streamiter.parameter_server.shard import Shard, ShardStatistics
from streamiter.parameter_server.snapshots import NumberedSnapshots, ShardSnapshot, SnapshotEvery, fetched, thawed
from streamiter.parameter_server.transport import ShardSessions

Untyped: TypeAlias = Any
"""The package ray, and its handles of actors and references to objects: they have no types here."""


def imported_ray() -> Untyped:
    """Return the package ray; raises ConfigurationError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            'ParameterServer(on="ray"): expected the package ray, which is not installed; '
            "install it with: pip install 'streamiter[ray]', or keep the shards in this process"
        ) from error
    return ray


# No other machine needs to reach a Ray of our own.
_LOOPBACK: Final = "127.0.0.1"


@final
class RayCluster:
    """The Ray of the user, if this process has called ``ray.init``; otherwise one on this machine that ``close`` ends.

    A Ray that is started here has no dashboard and sends no usage statistics. Starting it takes some seconds.
    """

    def __init__(self) -> None:
        self.ray = imported_ray()
        self._is_to_end = threading.Event()
        self._thread: threading.Thread | None = None
        if not self.ray.is_initialized():
            # The kernel ends Ray's processes together with the thread that started them, so this thread runs until Ray
            # is ended. In the main thread Ray would take over SIGTERM.
            started: Future[None] = Future()
            self._thread = threading.Thread(target=self._run, args=(started,), name="ray", daemon=True)
            self._thread.start()
            started.result()

    def _run(self, started: Future[None]) -> None:
        try:
            with _starting(self.ray):
                self.ray.init(
                    address="local",  # Without it, Ray would look for a cluster that another program has started.
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=_LOOPBACK,
                )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        self._is_to_end.wait()
        self.ray.shutdown()

    def close(self) -> None:
        """End a Ray that was started here. May be called more than once, and in any thread."""
        if (thread := self._thread) is not None:
            self._thread = None
            self._is_to_end.set()
            thread.join()


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables of the environment for a time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _starting(ray: Untyped) -> Iterator[None]:
    """Have Ray listen on 127.0.0.1 only, and send no usage statistics, unless the user has asked for them.

    On Linux, Ray replaces 127.0.0.1 by the machine's address, and listens on all addresses, unless it is told that
    this system has no clusters. A variable of the environment says so, which Ray reads when it is imported, and which
    its processes inherit. A version of Ray without this constant listens on all addresses.
    """
    constants, constant = ray._private.ray_constants, "ENABLE_RAY_CLUSTER"
    was = getattr(constants, constant, None)
    setattr(constants, constant, False)
    try:
        with _environment(
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            RAY_USAGE_STATS_ENABLED=os.environ.get("RAY_USAGE_STATS_ENABLED", "0"),
        ):
            yield
    finally:
        setattr(constants, constant, was)


def client_name(worker: int) -> str:
    """Return the name of a worker's client in its sessions.

    >>> client_name(3)
    'worker 3'
    """
    return f"worker {worker}"


@dataclass(frozen=True, slots=True)
class RayAddress:
    """The address of a server, for clients in other processes; may be given to Ray's tasks and actors."""

    name: str
    """The name of the server."""
    hosts: tuple[Untyped, ...]
    """The handles of the hosts, by shard."""
    snapshots: SnapshotEvery | None
    """When snapshots are taken; None: never."""
    heartbeat_timeout_s: float | None
    """After how many seconds without a heartbeat a worker is made to leave; None: never."""


class GoBack(NamedTuple):
    """A host's answer to a message of an earlier generation."""

    generation: int
    """The generation now."""
    clocks: dict[str, int] | None
    """The clocks of the worker now, by matrix; None: the worker is not in the snapshot."""
    refusal: str | None = None
    """Why the parameters are lost, if they are: then none can be read or changed."""
    loss: str = ""
    """Which shards were lost, and what all shards have gone back to."""


class HostProcess(NamedTuple):
    """The process of a host."""

    instance: str
    """Unique for each start of the host."""
    process_id: int
    node_id: str
    node_address: str


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """The start of a generation on a host."""

    generation: int
    matrices: tuple[CreateRequest, ...] = ()
    """The request that makes each matrix."""
    workers: tuple[int, ...] = ()
    snapshot: int = 0
    """The number of the last snapshot; 0: the matrices begin with their initial values."""
    refusal: str | None = None
    """Why the parameters are lost, if they are: then none can be read or changed."""
    loss: str = ""
    """Which shards were lost, and what all shards go back to."""


@dataclass(slots=True)
class Restore(Request[None]):
    """Go back to a state of all shards, as ``RestoreState``, but once for each ``identity``. Reply: None."""

    identity: str
    """Unique for each restore: the request may be sent again after a loss."""
    state: ServerState
    workers: tuple[int, ...] | None


R = TypeVar("R")

_WITHOUT_PARAMETERS: Final = (
    CreateRequest,
    Describe,
    FailWaiting,
    ForgetRequest,
    JoinRequest,
    LeaveRequest,
    RaiseRequest,
    Restore,
)


@final
class ShardHost:
    """One shard in a process of its own: an asyncio actor, whose methods all run in one event loop.

    If the process dies, Ray starts the host again and repeats the calls that it has not answered.
    """

    def __init__(self, number: int, shards: int, *, takes_snapshots: bool) -> None:
        self._number = number
        self._shards = shards
        self._takes_snapshots = takes_snapshots
        self._instance = uuid.uuid4().hex
        self._clock = SystemClock()
        self._generation = -1
        self._refusal: str | None = None
        self._loss = ""
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._clocks: dict[str, dict[str, int]] = {}
        """By client: the clocks of its worker when this generation began."""
        self._heard_s: dict[str, float] = {}
        """By client: the time of its last message."""
        self._snapshot: ShardSnapshot[ServerState] | None = None
        self._restored = ""
        """The identity of the last ``Restore``."""
        self._shard = Shard(number)
        self._sessions = ShardSessions(self)

    # -- clients ---------------------------------------------------------------------------------------

    async def deliver(self, message: ClientMessage) -> object:
        """Take a message of a client; return the outcome of its request, or a ``GoBack``."""
        client, _, generation = message.session
        while self._generation < generation and not self._ended.is_set():
            await self._changed.wait()
        if self._generation == generation and not self._ended.is_set():
            self._heard_s[client] = self._clock.monotonic_s()
            outcome = self._sessions.receive(message)
            if isinstance(outcome, WaitingReply):
                # Several calls may wait for one outcome: Ray repeats a call whose connection breaks.
                await until_settled(outcome)
                outcome = outcome.result()
            if self._generation == generation and not self._ended.is_set():
                return outcome
        if self._ended.is_set():
            raise ParameterServerError(
                "parameter server: expected one that is open, given one that was closed; make a new one"
            )
        return GoBack(self._generation, self._clocks.get(client), self._refusal, self._loss)

    def handle(self, request: Request[R]) -> R | WaitingReply[R]:
        """Have the shard handle a request; its reply can be sent to another process.

        Raises ShardLost for a request that reads or changes parameters, if these are lost and not restored.
        """
        if self._refusal is not None and not isinstance(request, _WITHOUT_PARAMETERS):
            raise ShardLost(self._refusal)
        reply = self._shard.handle(request)
        if not isinstance(request, TakeState):
            return reply
        sent: WaitingReply[R] = WaitingReply()
        sent.follow(reply, fetched)
        return sent

    # -- the server ------------------------------------------------------------------------------------

    async def begin(self, start: GenerationStart, state: ServerState | None) -> HostProcess:
        """Begin a generation with a new shard, from a state or from the initial values of the matrices."""
        if start.generation <= self._generation:
            return self._process()  # Ray has repeated the call.
        old = self._sessions
        snapshots = NumberedSnapshots(self._take_snapshot, start.snapshot) if self._takes_snapshots else None
        self._shard = shard = Shard(self._number, snapshots)
        shard.extend(Restore, self._restore)
        if self._takes_snapshots:
            shard.extend(ResetRequest, self._reset)
        if state is not None:
            shard.restore(state, start.workers)
        for create in start.matrices:
            shard.handle(create)
        if state is None:
            for worker in start.workers:
                shard.handle(JoinRequest(worker))
        self._sessions = ShardSessions(self, generation=start.generation)
        self._note_clocks()
        self._snapshot = None
        # Workers that have not sent a message to the new shard yet have the time of the timeout to do so.
        self._heard_s = {client_name(worker): self._clock.monotonic_s() for worker in start.workers}
        self._refusal, self._loss = start.refusal, start.loss
        self._generation = start.generation
        old.restart(start.generation)  # Ends the calls that wait for an answer of the old shard.
        self._wake()
        return self._process()

    def _process(self) -> HostProcess:
        ray = imported_ray()
        node_id = ray.get_runtime_context().get_node_id()
        return HostProcess(self._instance, os.getpid(), node_id, ray.util.get_node_ip_address())

    async def until_replaced(self, instance: str) -> None:
        """Return when the host ends, or when it is not this instance any more.

        When the process dies, Ray repeats the call in the host's next process.
        """
        if instance == self._instance:
            await self._ended.wait()

    async def end(self) -> None:
        """The server is closed: end all waiting calls, before Ray ends the process."""
        self._ended.set()
        self._sessions.restart(self._generation + 1)
        self._wake()

    async def next_snapshot(self, generation: int, after: int) -> tuple[ShardSnapshot[None] | None, ServerState | None]:
        """Return the next snapshot of this generation after number ``after``, without its state; and the state.

        Both are None if the generation has ended.
        """
        while not self._ended.is_set() and self._snapshot_may_come(generation, after):
            await self._changed.wait()
        if self._generation != generation or self._snapshot is None or self._snapshot.number <= after:
            return None, None
        taken, self._snapshot = self._snapshot, None
        return ShardSnapshot(taken.number, taken.workers, taken.matrices, None), taken.state

    def _snapshot_may_come(self, generation: int, after: int) -> bool:
        """Return whether the next snapshot of that generation has not been taken yet."""
        return self._generation < generation or (
            self._generation == generation and (self._snapshot is None or self._snapshot.number <= after)
        )

    async def present(self) -> tuple[tuple[CreateRequest, ...], tuple[int, ...]] | None:
        """Return the requests that make the matrices, and the workers; None if no generation has begun."""
        if self._generation < 0:
            return None
        creates = [CreateRequest(matrix.matrix, self._shards) for matrix in self._shard.matrices.values()]
        return tuple(creates), tuple(self._shard.workers)

    async def silent_s(self) -> dict[int, float]:
        """Return for each worker the time since its last message, in seconds."""
        now_s = self._clock.monotonic_s()
        return {worker: now_s - self._heard_s.get(client_name(worker), now_s) for worker in self._shard.workers}

    async def leave(self, worker: int, reason: str) -> None:
        """Make a silent worker leave."""
        self.handle(LeaveRequest(worker, reason))

    async def statistics(self) -> ShardStatistics:
        """Return the shard's statistics."""
        return self._shard.statistics()

    # -- inside ----------------------------------------------------------------------------------------

    def _take_snapshot(self, number: int, state: ServerState) -> None:
        self._snapshot = self._snapshot_of(number, state)
        self._wake()

    def _snapshot_of(self, number: int, state: ServerState) -> ShardSnapshot[ServerState]:
        # Without the initial values, which may be as large as the matrix and are not used again.
        matrices = [replace(matrix.matrix, init=0.0) for matrix in self._shard.matrices.values()]
        creates = tuple(CreateRequest(matrix, self._shards) for matrix in matrices)
        return ShardSnapshot(number, tuple(self._shard.workers), creates, thawed(state, PlainData()))

    def _restore(self, request: Restore) -> None:
        if self._takes_snapshots:
            raise ParameterServerError(
                "parameter server, restore: expected a server without snapshots=, given one with snapshots=, whose "
                "shards go back by themselves; make a server without snapshots= to restore a state"
            )
        if request.identity != self._restored:
            self._shard.handle(RestoreState(request.state, request.workers))
            self._restored = request.identity
            self._refusal = None

    def _reset(self, request: ResetRequest) -> None:
        raise ParameterServerError(
            "parameter server, reset: expected a server without snapshots=, given one with snapshots=, whose clocks "
            "must only rise; make a server without snapshots= to reset clocks"
        )

    def _note_clocks(self) -> None:
        matrices = self._shard.matrices
        self._clocks = {
            client_name(worker): {name: matrix.model.tracker.get_progress(worker) for name, matrix in matrices.items()}
            for worker in self._shard.workers
        }

    def _wake(self) -> None:
        """Wake the calls that wait for a generation, a snapshot or the end."""
        self._changed.set()
        self._changed = asyncio.Event()
