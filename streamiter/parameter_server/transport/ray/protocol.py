"""The way to Ray: starting it, its calls, the messages of a server and its shards' hosts, and what can be sent.

A *host* is the Ray actor of one shard. All shards go back to a snapshot together; each time they do, a new *generation*
begins, and messages of earlier generations are answered with ``GoBack``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar, final

import numpy as np

from streamiter.deferred import Deferred
from streamiter.errors import ConfigurationError, InternalError, ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.matrix_shard import init_functions
from streamiter.parameter_server.requests import (
    AddRequest,
    AggregateRequest,
    CreateRequest,
    Request,
    UpdateRequest,
)
from streamiter.parameter_server.snapshots import SnapshotEvery
from streamiter.parameter_server.transport.messages import ClientMessage

Q = TypeVar("Q", bound=Request[Any])


def imported_ray() -> Any:
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
        self._ours = None if self.ray.is_initialized() else _Started(self.ray)

    def close(self) -> None:
        """End a Ray that was started here. May be called more than once, and in any thread."""
        if self._ours is not None:
            ours, self._ours = self._ours, None
            ours.end()


@final
class _Started:
    """A Ray of our own, started in a thread that runs until Ray is ended.

    The kernel ends Ray's processes together with the thread that started them. In the main thread Ray would take over
    SIGTERM.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._has_started = threading.Event()
        self._is_to_end = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()
        self._has_started.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with _usage_statistics_off(), _no_cluster(self._ray):
                self._ray.init(
                    address="local",  # Without it, Ray would look for a cluster that another program has started.
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=_LOOPBACK,
                )
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._has_started.set()
        self._is_to_end.wait()
        self._ray.shutdown()

    def end(self) -> None:
        self._is_to_end.set()
        self._thread.join()


@contextmanager
def _usage_statistics_off() -> Iterator[None]:
    """Turn usage statistics off while Ray starts, unless the user has asked for them."""
    name = "RAY_USAGE_STATS_ENABLED"
    is_ours = name not in os.environ
    if is_ours:
        os.environ[name] = "0"
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(name, None)


@contextmanager
def _no_cluster(ray: Any) -> Iterator[None]:
    """Have Ray listen on 127.0.0.1 only.

    On Linux, Ray replaces 127.0.0.1 by the machine's address, and listens on all addresses, unless it is told that
    this system has no clusters. A variable of the environment says so, which Ray reads when it is imported, and which
    its processes inherit. A version of Ray without this constant listens on all addresses.
    """
    constants = ray._private.ray_constants
    name, constant = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"
    before, was = os.environ.get(name), getattr(constants, constant, None)
    os.environ[name] = "0"
    setattr(constants, constant, False)
    try:
        yield
    finally:
        setattr(constants, constant, was)
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


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
    hosts: tuple[Any, ...]
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
class Describe(Request[Matrix | None]):
    """Ask for the settings of a matrix. Reply: the ``Matrix``, or None if it does not exist."""

    matrix: str


@dataclass(slots=True)
class Restore(Request[None]):
    """Go back to a state of all shards, as ``RestoreState``, but once for each ``identity``. Reply: None."""

    identity: str
    """Unique for each restore: the request may be sent again after a loss."""
    state: Any
    workers: tuple[int, ...] | None


@final
class RayCarrier:
    """Carries the messages of one client to one host, with one call of the host for each message.

    Large arrays go through Ray's object store, small ones in the message. If the host's process has died, Ray waits for
    its next process and sends the message there.
    """

    def __init__(
        self,
        host: Any,
        *,
        go_back: Callable[[GoBack], None],
        gone: Callable[[BaseException], None],
    ) -> None:
        self._host = host
        self._go_back = go_back
        self._gone = gone
        self._ray = imported_ray()
        self._calls: set[asyncio.Task[None]] = set()
        """No more than a link sends: its window, calls given up, and acknowledgements."""

    def send(self, message: ClientMessage, answered: Callable[[Any], None]) -> None:
        """Call the host with a message. Ray has taken its arrays when this returns."""
        if not self._ray.is_initialized():  # Otherwise the call would start another Ray.
            raise ParameterServerError("Ray has been ended in this process")
        reply = self._host.deliver.remote(message)
        call = asyncio.get_running_loop().create_task(self._await(reply, answered))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _await(self, reply: Any, answered: Callable[[Any], None]) -> None:
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


@final
class FetchedFrames(Deferred):
    """A ``Deferred`` piece of a shard's state that was encoded on the shard."""

    def __init__(self, name: str, frames: list[bytes]) -> None:
        self.name = name
        self._frames = frames[::-1]
        """In reverse order: the next frame is the last."""
        self._is_released = False

    def frames(self) -> Iterator[bytes]:
        left = len(self._frames)
        while left:
            if self._is_released:
                raise InternalError(f"the state of {self.name} was released before all of it was read")
            yield self._frames.pop()
            left -= 1
        self.release()

    def release(self) -> None:
        self._is_released = True
        self._frames = []


def fetched(state: Any) -> Any:
    """Return a state with its ``Deferred`` pieces encoded, so that it can be sent to another process.

    >>> fetched({"clock": 3})
    {'clock': 3}
    """
    if isinstance(state, Deferred):
        frames = FetchedFrames(state.name, list(state.frames()))
        state.release()
        return frames
    if isinstance(state, Mapping):
        return {key: fetched(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(fetched(value) for value in state)
    return state


def sendable(state: Any) -> Any:
    """Return a state with lists in place of iterators: several shards read it.

    >>> sendable({"content": iter([1, 2])})
    {'content': [1, 2]}
    """
    if isinstance(state, Mapping):
        return {key: sendable(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(sendable(value) for value in state)
    if state is None or isinstance(state, (str, bytes, int, float, np.ndarray, np.generic)):
        return state
    return list(state)


def importable(request: Q) -> Q:
    """Return a request whose functions another process can import, by name.

    Raises ConfigurationError for a function that cannot be imported, such as a lambda.
    """
    if isinstance(request, (UpdateRequest, AggregateRequest)):
        function = request.function
        return request if function is None else replace(request, function=_named(function).without_arrays())
    if isinstance(request, AddRequest) and request.update is not None:
        return replace(request, update=importable(request.update))
    if isinstance(request, CreateRequest):
        return replace(request, matrix=_matrix(request.matrix))
    return request


def _named(function: Any) -> Any:
    return function.require_importable()


def _matrix(matrix: Matrix) -> Matrix:
    init = matrix.init
    if functions := init_functions(matrix):
        init = [_named(function) for function in functions]
    on_clock = None if matrix.on_clock is None else _named(matrix.on_clock)
    return replace(matrix, init=init, on_clock=on_clock)
