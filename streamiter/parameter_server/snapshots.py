"""Snapshots of a server: the states of its shards, and when they are taken.

A *state* is plain data, partly in ``Deferred`` pieces that are encoded later. ``merged`` makes one state of the states
of all shards; a shard takes its own blocks from it, so that a server may go back to the state of one with other shards.

A snapshot of all shards must not contain what a worker sends after its *barrier*. So ``Holding`` holds a worker's later
requests; when the last worker has passed the barrier, the shard's state is taken and the held requests are applied.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeGuard, cast, final

import numpy as np

from streamiter.errors import CheckpointError, StreamiterError
from streamiter.parameter_server.calls import AnyReply, WaitingReply
from streamiter.parameter_server.matrix_shard import MatrixShard
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    ClockRequest,
    GetReply,
    GetRequest,
    KeptAdds,
    LeaveRequest,
    MatrixState,
    PassBarrier,
    ServerState,
    UpdateRequest,
    copied_add,
    size_of_adds,
)
from streamiter.values.deferred import Deferred, PlainValue
from streamiter.values.plain_data import PlainData


def merged(states: Sequence[ServerState]) -> ServerState:
    """Return the state of a server, which ``Shard.restore`` takes, from the results of its shards' ``freeze``."""
    matrices: dict[str, MatrixState] = {}
    for state in states:
        for name, matrix in state["matrices"].items():
            if (there := matrices.get(name)) is None:
                matrices[name] = {**matrix, "blocks": list(matrix["blocks"]), "pending": list(matrix["pending"])}
            else:
                there["blocks"].extend(matrix["blocks"])
                there["pending"].extend(matrix["pending"])
    first = states[0]
    return {"matrices": matrices, "workers": first["workers"], "arrivals": first["arrivals"]}


def is_state(given: object) -> TypeGuard[ServerState]:
    """Return whether this looks like a result of ``merged``."""
    if not isinstance(given, Mapping) or not {"matrices", "workers", "arrivals"} <= given.keys():
        return False
    matrices = given["matrices"]
    return isinstance(matrices, Mapping) and all(
        isinstance(matrix, Mapping) and "clocks" in matrix for matrix in matrices.values()
    )


def with_values_changed(state: PlainValue, change: Callable[[object], object]) -> PlainValue:
    """Return plain data in which ``change`` has replaced each value that is no mapping, list or tuple."""
    if isinstance(state, Mapping):
        return {key: with_values_changed(value, change) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(with_values_changed(value, change) for value in state)
    return change(state)


def thawed(state: PlainValue, plain_data: PlainData) -> PlainValue:
    """Return a state with the decoded frames in place of its ``Deferred`` pieces."""

    def thaw(value: object) -> object:
        if not isinstance(value, Deferred):
            return value
        frames = [plain_data.decode(frame) for frame in value.frames()]
        value.release()
        return frames

    return with_values_changed(state, thaw)


def in_memory(state: PlainValue) -> PlainValue:
    """Return a state with lists in place of iterators, which would read it piece by piece, and only once.

    >>> in_memory({"content": iter([1, 2])})
    {'content': [1, 2]}
    """

    def read(value: object) -> object:
        is_read = isinstance(value, Iterable) and not isinstance(value, (str, bytes, np.ndarray))
        return list(cast("Iterable[object]", value)) if is_read else value

    return with_values_changed(state, read)


def clock_in(clocks: Mapping[str, Any], worker: int) -> int:
    """Return the clock of a worker in the state of a tracker: the minimum clock for a worker that is not in it."""
    progress: Mapping[int, int] = clocks["progress"]
    minimum: int = clocks["min clock"]
    return progress.get(worker, minimum)


# Above this size adds and clocks under ASP and SSP wait for the checkpoint, too. The limit is that of buffered adds of
# one iteration (matrix_shard).
_HELD_BYTES: Final = 64 << 20

# The memory of a clock that is held: the request, and its place in the queue.
_CLOCK_BYTES: Final = 128


HeldRequest = GetRequest | AddRequest | ClockRequest | UpdateRequest
"""The requests that may be held and answered later."""


_Entry = tuple[HeldRequest | LeaveRequest | PassBarrier, AnyReply | None]
"""A held request, and its reply if its worker waits for it."""


# A read looks through this many parts in a few µs.
_FEW: Final = 64


class HeldShard(Protocol):
    """The shard of a ``Holding``."""

    matrices: dict[str, MatrixShard]
    workers: dict[int, None]

    def matrix(self, name: str) -> MatrixShard:
        """Return the shard's part of a matrix; raises UnknownMatrix."""

    def apply(self, request: HeldRequest | LeaveRequest) -> object:
        """Handle a request at once, also one that was held."""

    def freeze(self) -> ServerState:
        """Return the shard's state now: plain data, with ``Deferred`` pieces."""


@final
class Holding:
    """Holds the requests that workers send behind a barrier.

    A worker is *behind* a barrier from its ``PassBarrier`` until all workers have passed the barrier. Under ASP and
    SSP, adds and clocks of a worker behind a barrier are acknowledged at once. Its gets are answered from the storage
    with its own held adds on top, within the bound of SSP, for which held clocks count. Under BSP, and for functions,
    the worker waits until its request has been applied. A worker may reach its next barrier before other workers have
    passed this one: the next barrier is held with the other requests. From then on the worker waits on matrices under
    ASP, where nothing else limits how far the worker runs ahead.

    No worker before its barrier waits for a worker behind it: all workers have reached the same clock, or wait for no
    clock.
    """

    def __init__(self, shard: HeldShard) -> None:
        self._shard = shard
        self._behind: dict[int, int] = {}
        """By worker: how many incomplete barriers the worker has passed."""
        self._checkpoint: int | None = None
        self._held: deque[_Entry] = deque()
        self._releasing: deque[_Entry] = deque()
        """The requests that were held for a complete barrier, while they are being applied."""
        self._is_releasing = False
        self._held_bytes = 0
        self._seen: dict[tuple[int, str], KeptAdds] = {}
        """The held adds, by worker and matrix."""
        self._clocks: dict[tuple[int, str], int] = {}
        """The number of held clocks, by worker and matrix."""
        self._late_errors: dict[int, Exception] = {}
        """By worker: the first error of requests that were acknowledged before they were applied."""
        self._taking: dict[int, AnyReply] = {}
        """The replies that wait for the state at a barrier, by checkpoint."""
        self._abandoned = 0
        """The last abandoned checkpoint: its barrier may still come, from a worker that was busy."""

    @property
    def held(self) -> int:
        """The number of requests that are held now."""
        return len(self._held)

    def changes(self) -> Iterator[AddRequest | ClockRequest | UpdateRequest | LeaveRequest]:
        """Return the held requests that change the shard when they are applied, in order."""
        return (request for request, _ in self._held if not isinstance(request, (GetRequest, PassBarrier)))

    def is_behind(self, worker: int) -> bool:
        """Return whether the worker is behind a barrier. Raises the error of an acknowledged request, once."""
        if self._late_errors and (error := self._late_errors.pop(worker, None)) is not None:
            raise error
        return worker in self._behind

    # -- barriers --------------------------------------------------------------------------------------

    def pass_barrier(self, request: PassBarrier) -> None:
        """Note that a worker has passed a barrier: the one under way or, behind that one, a later one."""
        if request.checkpoint <= self._abandoned:
            return
        if self._checkpoint is None:
            self._checkpoint = request.checkpoint
        passed = self._behind.get(request.worker, 0)
        if passed and request.checkpoint > self._checkpoint:
            self._behind[request.worker] = passed + 1
            self._hold(request, None)
            return
        if self._checkpoint != request.checkpoint:
            raise CheckpointError(
                f"parameter server: expected the barrier of checkpoint {self._checkpoint}, given that of "
                f"{request.checkpoint}; each worker passes one barrier after the other"
            )
        self._behind[request.worker] = max(passed, 1)
        self._check()

    def take_state(self, checkpoint: int) -> AnyReply:
        """Return the state of the shard at this barrier, when all workers have passed it; None: it was abandoned.

        The states at several barriers may be asked for, in the order of their numbers.
        """
        if self._checkpoint is None or not self._behind:
            self._checkpoint = checkpoint
        taking = self._taking[checkpoint] = WaitingReply()
        self._check()
        return taking

    def leave(self, request: LeaveRequest, error: StreamiterError) -> bool:
        """Return whether a worker leaves now; False: it leaves after its held requests, which still count.

        The worker's waiting calls fail.
        """
        self._late_errors.pop(request.worker, None)
        if request.worker not in self._behind:
            return True
        for matrix in self._shard.matrices.values():
            matrix.fail_gets(request.worker, error)
        for held, waiting in self._held:
            if held.worker == request.worker and waiting is not None:
                waiting.fail(error)
        self._held.append((request, None))
        return False

    def worker_left(self) -> None:
        """A worker has left: the barrier may be complete without it."""
        if not self._shard.workers:
            self._abandoned = 0  # The next job may number its checkpoints from 1 again.
        self._check()

    def abandon(self, abandoned: int) -> None:
        """A checkpoint is abandoned: apply the held requests."""
        self._abandoned = max(self._abandoned, abandoned)
        for checkpoint in [number for number in self._taking if number <= abandoned]:
            self._taking.pop(checkpoint).succeed(None)
        if self._checkpoint is not None and self._checkpoint <= abandoned:
            self._release()
            self._check()

    def forget(self, error: StreamiterError) -> None:
        """The shard goes back to a snapshot: drop the held requests; their waiting calls fail with this error."""
        self.fail(error)
        self._held_bytes = 0
        self._behind.clear()
        self._late_errors.clear()
        self._checkpoint = None

    def reset(self, error: StreamiterError) -> None:
        """Clocks go back to 0: drop held clocks, keep acknowledged adds; waiting calls fail with this error."""
        held = self._take_held()
        for request, waiting in held:
            if waiting is not None:
                waiting.fail(error)
            elif not isinstance(request, ClockRequest):
                self._hold(request, None)

    def fail(self, error: StreamiterError) -> None:
        """Drop the held requests, and take no state; waiting calls fail with this error."""
        for _, waiting in self._take_held():
            if waiting is not None:
                waiting.fail(error)
        taking, self._taking = self._taking, {}
        for one in taking.values():
            one.succeed(None)

    def _check(self) -> None:
        while not self._is_releasing and self._checkpoint is not None and self._is_complete():
            if (taking := self._taking.pop(self._checkpoint, None)) is None:
                return  # The checkpoint has not asked for the state yet.
            taking.succeed(self._shard.freeze())
            self._release()

    def _is_complete(self) -> bool:
        return all(worker in self._behind for worker in self._shard.workers)

    def _release(self) -> None:
        """Apply the held requests, up to the next barrier of each worker."""
        self._checkpoint = None
        self._behind.clear()
        self._held_bytes = 0
        self._releasing = self._take_held()
        # A leave among them must not complete the next barrier before the last of them is applied.
        self._is_releasing = True
        try:
            while self._releasing:
                request, waiting = self._releasing.popleft()
                if isinstance(request, PassBarrier):
                    self.pass_barrier(request)
                elif request.worker not in self._behind:
                    self._apply(self._shard.apply, request, waiting)
                elif waiting is None:
                    self._held_bytes += _size_bytes(request)
                    self._hold(request, None)
                else:
                    self._apply(self.handle, request, waiting)
        finally:
            self._is_releasing = False
        if self._checkpoint is None and self._taking:
            self._checkpoint = min(self._taking)

    def handle(self, request: HeldRequest) -> object:
        """Handle a request of a worker that is behind a barrier."""
        if isinstance(request, GetRequest):
            return self.get(request)
        if isinstance(request, AddRequest):
            return self.add(request)
        if isinstance(request, ClockRequest):
            return self.clock(request)
        return self._shard.apply(request) if request.only_check else self.wait(request)

    def _apply(
        self, handle: Callable[[Any], object], request: HeldRequest | LeaveRequest, waiting: AnyReply | None
    ) -> None:
        if waiting is not None and waiting.is_settled and isinstance(request, GetRequest):
            return  # Given up. Adds and clocks are applied all the same, as on the other shards.
        try:
            reply = handle(request)
        except Exception as error:
            if waiting is None:
                self._late_errors.setdefault(request.worker, error)
            else:
                waiting.fail(error)
            return
        if waiting is not None:
            waiting.follow(reply)

    # -- requests --------------------------------------------------------------------------------------

    def get(self, request: GetRequest) -> GetReply | WaitingReply[GetReply]:
        """Read the stored values, with the worker's own held adds under ASP and SSP, where adds count at once."""
        matrix = self._shard.matrix(request.matrix)
        clocks = self._clocks.get((request.worker, request.matrix), 0)
        if self._has_to_wait(matrix, request.worker) and (clocks or not matrix.model.rules.keeps_adds):
            return self.wait(request)
        return matrix.get(request, self._own_adds, clocks)

    def add(self, request: AddRequest) -> int | GetReply | AnyReply:
        """Hold a copy of an add; under ASP and SSP the worker continues."""
        matrix = self._shard.matrix(request.matrix)
        copied = copied_add(request)
        size_bytes = _size_bytes(copied)
        # The function's result is known only when the function has run.
        reads_result = request.get is not None and request.update is not None
        if reads_result or self._has_to_wait(matrix, request.worker) or self._held_bytes + size_bytes > _HELD_BYTES:
            return self.wait(copied)
        matrix.model.tracker.check_worker_valid(request.worker)
        self._held_bytes += size_bytes
        self._hold(replace(copied, get=None), None)
        return matrix.model.tracker.get_min_clock() if request.get is None else self.get(request.get)

    def clock(self, request: ClockRequest) -> int | WaitingReply[int]:
        """Hold a clock; under ASP and SSP the worker continues."""
        matrix = self._shard.matrix(request.matrix)
        if self._has_to_wait(matrix, request.worker) or self._held_bytes + _CLOCK_BYTES > _HELD_BYTES:
            return self.wait(request)
        matrix.model.tracker.check_worker_valid(request.worker)
        self._held_bytes += _CLOCK_BYTES
        self._hold(request, None)
        return matrix.model.tracker.get_min_clock()

    def wait(self, request: HeldRequest) -> AnyReply:
        """Hold a request, and let the worker wait until the request is applied."""
        waiting: AnyReply = WaitingReply()
        self._hold(request, waiting)
        return waiting

    def _has_to_wait(self, matrix: MatrixShard, worker: int) -> bool:
        """Return whether requests on this matrix are acknowledged only when they are applied."""
        rules = matrix.model.rules
        return rules.keeps_adds or (rules.staleness == math.inf and self._behind[worker] > 1)

    def _hold(self, request: HeldRequest | LeaveRequest | PassBarrier, waiting: AnyReply | None) -> None:
        self._held.append((request, waiting))
        if isinstance(request, AddRequest):
            self._seen.setdefault((request.worker, request.matrix), KeptAdds(len, _FEW)).extend(request.parts)
        elif isinstance(request, ClockRequest):
            of_worker = (request.worker, request.matrix)
            self._clocks[of_worker] = self._clocks.get(of_worker, 0) + 1

    def _take_held(self) -> deque[_Entry]:
        held, self._held = self._held, deque()
        self._seen.clear()
        self._clocks.clear()
        return held

    def _own_adds(self, request: GetRequest) -> list[AddPart]:
        """Return the worker's held adds that a get shows."""
        if self._shard.matrix(request.matrix).model.rules.keeps_adds and not request.with_own:
            return []
        of_worker = (request.worker, request.matrix)
        own = list(self._seen.get(of_worker, ()))
        for held, _ in self._releasing:
            if isinstance(held, AddRequest) and (held.worker, held.matrix) == of_worker:
                own.extend(held.parts)
        return own


def _size_bytes(request: HeldRequest | LeaveRequest) -> int:
    if isinstance(request, AddRequest):
        return size_of_adds(request.parts)
    return _CLOCK_BYTES if isinstance(request, ClockRequest) else 0
