"""A shard: the blocks of all matrices that are stored here, and the clocks of all workers.

A shard is a pure data structure: it has no tasks, and no method waits. A request is answered at once, or with a
``WaitingReply`` that a later request settles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, final

from streamiter.errors import OutOfTurn, ParameterServerError, ServerReset, StreamiterError, WorkerHasLeft
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.consistency import ProgressTracker
from streamiter.parameter_server.matrix import Matrix, unknown_matrix
from streamiter.parameter_server.matrix_shard import MatrixShard, MatrixStatistics
from streamiter.parameter_server.requests import (
    AddRequest,
    AggregateRequest,
    ArrivalsState,
    ArriveRequest,
    ClockRequest,
    CreateRequest,
    Describe,
    ForgetRequest,
    GetRequest,
    JoinRequest,
    LeaveRequest,
    MatrixState,
    PassBarrier,
    RaiseRequest,
    Request,
    ServerState,
    UpdateRequest,
)
from streamiter.parameter_server.snapshots import HeldRequest, Holding, thawed
from streamiter.values.plain_data import PlainData

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """The statistics of one shard at one moment."""

    shard: int
    """Its number, from 0."""
    matrices: tuple[MatrixStatistics, ...]
    held: int
    """The number of requests held behind a checkpoint's barrier."""

    @property
    def size_bytes(self) -> int:
        """The memory of the shard's blocks, in bytes."""
        return sum(matrix.size_bytes for matrix in self.matrices)


_ON_MATRIX: Final[Mapping[type[Request[object]], Callable[[MatrixShard, Any], object]]] = {
    GetRequest: lambda matrix, request: matrix.get(request),
    AddRequest: lambda matrix, request: matrix.add(request),
    ClockRequest: lambda matrix, request: matrix.clock(request),
    UpdateRequest: lambda matrix, request: matrix.update(request),
    AggregateRequest: lambda matrix, request: matrix.aggregate(request),
}


@final
class Shard:
    """Handles requests one by one, in the order of their arrival."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.matrices: dict[str, MatrixShard] = {}
        self.workers: dict[int, None] = {}
        """The workers that take part, in the order they joined."""
        self._plain_data = PlainData()
        self._arrivals = Arrivals()
        self._holding = Holding(self)
        self._restored: dict[str, MatrixState] = {}
        """The restored state of matrices that are not made yet."""
        self._handlers: dict[type[Request[object]], Callable[[Any], Any]] = {
            GetRequest: self._hold_or_apply,
            AddRequest: self._hold_or_apply,
            ClockRequest: self._hold_or_apply,
            UpdateRequest: self._hold_or_apply,
            AggregateRequest: self.apply,
            CreateRequest: self._create,
            Describe: self._describe,
            ForgetRequest: self._forget,
            JoinRequest: self._join,
            RaiseRequest: self._raise,
            LeaveRequest: self._leave,
            ArriveRequest: lambda request: self._arrivals.arrive(request.worker, request.number),
            PassBarrier: self._holding.pass_barrier,
        }

    def handle(self, request: Request[R]) -> R | WaitingReply[R]:
        """Return the reply to a request, or a ``WaitingReply``; raise an error for a request that is refused.

        A refused request changes nothing.
        """
        reply: R | WaitingReply[R] = self._handlers[type(request)](request)
        return reply

    send = handle
    """A shard in the same process is its own link."""

    # -- requests on one matrix ------------------------------------------------------------------------

    def matrix(self, name: str) -> MatrixShard:
        """Return the shard's part of a matrix; raises UnknownMatrix."""
        found = self.matrices.get(name)
        if found is None:
            raise unknown_matrix(name, self.matrices)
        return found

    def _hold_or_apply(self, request: HeldRequest) -> object:
        if self._holding.is_behind(request.worker):
            return self._holding.handle(request)
        return _ON_MATRIX[type(request)](self.matrix(request.matrix), request)

    def apply(self, request: HeldRequest | AggregateRequest | LeaveRequest) -> object:
        """Handle a request at once, also one that was held."""
        if isinstance(request, LeaveRequest):
            self._leave(request)
            return None
        return _ON_MATRIX[type(request)](self.matrix(request.matrix), request)

    # -- matrices and workers --------------------------------------------------------------------------

    def _create(self, request: CreateRequest) -> bool:
        matrix = request.matrix
        made = self.matrices.get(matrix.name)
        if made is not None:
            made.matrix.check_same(matrix)
            return False
        made = MatrixShard(matrix, self.number, request.shards, self.workers)
        if (state := self._restored.get(matrix.name)) is not None:
            made.restore(state, self.workers)
            del self._restored[matrix.name]
        else:
            made.initialize()
        self.matrices[matrix.name] = made
        return True

    def _describe(self, request: Describe) -> Matrix | None:
        # Initial values may be as large as the matrix.
        found = self.matrices.get(request.matrix)
        return None if found is None else replace(found.matrix, init=0.0)

    def _forget(self, request: ForgetRequest) -> None:
        if (made := self.matrices.pop(request.matrix, None)) is not None:
            made.fail_waiting(
                ServerReset(
                    f"matrix {request.matrix!r}: expected to answer this call, given a shard that could not make its "
                    "part of the matrix; the call of create_matrix says why"
                )
            )

    def _join(self, request: JoinRequest) -> dict[str, int]:
        worker = request.worker
        if worker in self.workers:
            raise ParameterServerError(
                f"worker {worker}: expected a worker that does not take part yet, given a worker that does; use its "
                "client, or let it leave first"
            )
        self.workers[worker] = None
        self._arrivals.join(worker)
        return {name: matrix.model.join(worker) for name, matrix in self.matrices.items()}

    def _raise(self, request: RaiseRequest) -> None:
        for name, clock in request.clocks.items():
            if (matrix := self.matrices.get(name)) is not None:
                matrix.raise_worker(request.worker, clock)

    def _leave(self, request: LeaveRequest) -> None:
        worker = request.worker
        if worker not in self.workers:
            return
        error = WorkerHasLeft(
            f"worker {worker}: expected a worker that takes part, given a worker that does not: {request.reason}; "
            "make a new client"
        )
        if not self._holding.leave(request, error):
            return
        del self.workers[worker]
        self._holding.worker_left()
        self._arrivals.leave(worker, error)
        failures = []
        for matrix in self.matrices.values():
            try:
                matrix.leave(worker, error)
            except Exception as failure:
                # A function of on_clock= has failed: the worker must leave the other matrices all the same.
                failures.append(failure)
        if failures:
            raise failures[0]

    def reset(self, workers: Iterable[int]) -> None:
        """Set the clocks of these workers to 0 on all matrices; waiting calls fail, parameters stay."""
        self.workers = dict.fromkeys(workers)
        self._holding.reset(
            ServerReset("parameter server: expected to answer this call, given a server that started over; ask again")
        )
        for matrix in self.matrices.values():
            matrix.reset(workers, "a server that started over")
        self._arrivals.reset(workers, ServerReset("barrier: the server started over; arrive again"))

    # -- state -----------------------------------------------------------------------------------------

    def abandon(self, checkpoint: int) -> None:
        """A checkpoint is abandoned: apply the requests that are held for it."""
        self._holding.abandon(checkpoint)

    def take_state(self, checkpoint: int) -> WaitingReply[ServerState | None]:
        """Return the state when all workers have passed the barrier of a checkpoint; None: it was abandoned."""
        return self._holding.take_state(checkpoint)

    def state_now(self) -> ServerState:
        """Return the state with the held requests applied: their workers may have been told that they count."""
        if not self._holding.held:
            return self.freeze()
        copy = Shard(self.number)
        copy.restore(thawed(self.freeze(), self._plain_data))
        for matrix in self.matrices.values():
            copy.handle(CreateRequest(matrix.matrix, matrix.shards))
        for request in self._holding.changes():
            with suppress(Exception):  # The worker gets the error when the request is applied on this shard.
                copy.apply(request)
        return copy.freeze()

    def freeze(self) -> ServerState:
        """Return the shard's state now: plain data, with ``Deferred`` pieces."""
        encode = self._plain_data.encode
        return {
            "matrices": {
                # The restored state is that of all shards: one shard gives it.
                **(self._restored if self.number == 0 else {}),
                **{name: matrix.freeze(encode) for name, matrix in self.matrices.items()},
            },
            "workers": list(self.workers),
            "arrivals": self._arrivals.snapshot(),
        }

    def restore(self, state: ServerState, workers: Iterable[int] | None = None) -> None:
        """Take over the merged results of ``freeze`` of all shards. Waiting calls fail.

        A matrix that is not made yet takes over its state when it is made; a matrix that is not in the state gets its
        initial values again.
        """
        for name, matrix in self.matrices.items():
            if (saved := state["matrices"].get(name)) is not None:
                matrix.check_state(saved)
        self.workers = dict.fromkeys(state["workers"] if workers is None else workers)
        error = ServerReset("parameter server: expected to answer this call, given a snapshot to go back to; ask again")
        self._holding.forget(error)
        self._arrivals.restore(state["arrivals"], self.workers, error)
        self._restored = dict(state["matrices"])
        for name, matrix in self.matrices.items():
            if (saved := self._restored.pop(name, None)) is not None:
                matrix.restore(saved, self.workers)
            else:
                matrix.reinitialize(self.workers)

    def fail_waiting(self, error: StreamiterError) -> None:
        """Fail all waiting calls."""
        self._holding.fail(error)
        self._arrivals.fail(error)
        for matrix in self.matrices.values():
            matrix.fail_waiting(error)

    def statistics(self) -> ShardStatistics:
        """Return the shard's statistics."""
        return ShardStatistics(
            self.number, tuple(matrix.statistics() for matrix in self.matrices.values()), self._holding.held
        )


@final
class Arrivals:
    """The barriers at which workers wait for each other (``client.barrier``): a pure data structure, on shard 0.

    Barrier ``t`` opens when every worker has arrived at it.
    """

    def __init__(self) -> None:
        self._tracker = ProgressTracker()
        self._tracker.init(())
        self._waiting: dict[int, tuple[int, WaitingReply[None]]] = {}
        """By worker: the barrier at which the worker waits, and its reply."""

    def arrive(self, worker: int, number: int) -> WaitingReply[None] | None:
        """A worker arrives at barrier ``number``; below 0: at its next one. Return None if the barrier is open."""
        self._tracker.check_worker_valid(worker)
        expected = self._tracker.get_progress(worker)
        if worker in self._waiting:
            raise _out_of_turn(worker, f"the end of its wait at barrier {expected - 1}", number)
        if number not in (expected, -1):
            raise _out_of_turn(worker, f"barrier {expected}", number)
        self._tracker.advance_and_get_changed_min_clock(worker)
        self._open()
        if self._tracker.get_min_clock() > expected:
            return None
        waiting: WaitingReply[None] = WaitingReply(lambda: self._give_up(worker))
        self._waiting[worker] = (expected, waiting)
        return waiting

    def _give_up(self, worker: int) -> None:
        """The worker's call was cancelled: the worker has arrived all the same, and may call again."""
        self._waiting.pop(worker, None)

    def join(self, worker: int) -> None:
        """A worker joins: its first barrier is the first one that is not open."""
        self._tracker.join(worker)

    def leave(self, worker: int, error: StreamiterError) -> None:
        """A worker leaves: its own wait fails, waits of other workers may end."""
        if (waits := self._waiting.pop(worker, None)) is not None:
            waits[1].fail(error)
        self._tracker.leave(worker)
        self._open()

    def reset(self, workers: Iterable[int], error: StreamiterError) -> None:
        """Begin with barrier 0 and these workers; all waits fail."""
        self.fail(error)
        self._tracker.init(workers)

    def fail(self, error: StreamiterError) -> None:
        """Fail all waits."""
        waiting, self._waiting = self._waiting, {}
        for _, one in waiting.values():
            one.fail(error)

    def _open(self) -> None:
        lowest = self._tracker.get_min_clock()
        for worker, (number, waiting) in list(self._waiting.items()):
            if number < lowest:
                del self._waiting[worker]
                waiting.succeed(None)

    def snapshot(self) -> ArrivalsState:
        """Return plain data: how many barriers each worker has passed. A worker that waits will arrive again."""
        return {
            "passed": [
                [worker, self._tracker.get_progress(worker) - (worker in self._waiting)]
                for worker in self._tracker.workers
            ]
        }

    def restore(self, state: ArrivalsState, workers: Iterable[int], error: StreamiterError) -> None:
        """Take over the result of ``snapshot``; all waits fail.

        For a worker that is not in the snapshot, the first barrier that is not open comes next.
        """
        self.fail(error)
        passed = {entry[0]: entry[1] for entry in state["passed"]}
        lowest = min(passed.values(), default=0)
        self._tracker.init(())
        for worker in workers:
            self._tracker.join(worker, passed.get(worker, lowest))


def _out_of_turn(worker: int, expected: str, number: int) -> OutOfTurn:
    return OutOfTurn(
        f"barrier of worker {worker}: expected {expected}, given "
        f"{'the next one' if number < 0 else f'barrier {number}'}; "
        "every worker passes every barrier, one after the other"
    )
