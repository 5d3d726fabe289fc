"""What workers send behind a checkpoint's barrier, held until all workers have passed it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, final

from streamiter.errors import CheckpointError, StreamiterError
from streamiter.parameter_server import add_parts
from streamiter.parameter_server.consistency.settings import ASP
from streamiter.parameter_server.requests import (
    AbandonBarrier,
    Add,
    AddPart,
    Clock,
    Get,
    Leave,
    PassBarrier,
    Update,
)
from streamiter.parameter_server.waiting import Waiting

if TYPE_CHECKING:
    from streamiter.parameter_server.shard import Shard

__all__ = ["Holding"]

# Above it, adds and clocks under ASP wait for the checkpoint, too: as much as adds of one iteration may take elsewhere.
_HELD_BYTES: Final = 64 << 20

# Of a clock that is held: the request, and its place in the queue.
_CLOCK_BYTES: Final = 128


@final
class Holding:
    """Keeps a snapshot free of what comes after its barrier.

    Gets of a worker behind its barrier are answered from what is there, unless a clock of its own is held and its
    matrix counts clocks. Under ASP, adds and clocks are acknowledged at once; everything else waits until it has
    happened. No worker before its barrier waits for one behind it: all have come to the same clock, or wait for no
    clock.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._behind: dict[int, None] = {}
        self._checkpoint: int | None = None
        self._held: deque[tuple[Any, Waiting[Any] | None]] = deque()
        self._held_bytes = 0
        self._seen: dict[tuple[int, str], add_parts.SeenAdds] = {}
        """The adds that are held, by worker and matrix."""
        self._late_errors: dict[int, Exception] = {}
        """Of requests that were acknowledged before they were tried."""
        self._taking: dict[int, Waiting[Any]] = {}
        """Who wants the state at the barrier of a checkpoint."""
        self._abandoned = 0
        """The last checkpoint that was given up: its barrier may still come, from a worker that was busy."""

    @property
    def held(self) -> int:
        """Requests that are held now."""
        return len(self._held)

    def is_behind(self, worker: int) -> bool:
        """Whether what this worker sends comes after its barrier."""
        if self._late_errors and (error := self._late_errors.pop(worker, None)) is not None:
            raise error
        return worker in self._behind

    # -- barriers --------------------------------------------------------------------------------------

    def pass_barrier(self, request: PassBarrier) -> None:
        """A worker has passed the barrier of a checkpoint."""
        if request.checkpoint <= self._abandoned:
            return
        if self._checkpoint is not None and self._checkpoint != request.checkpoint:
            raise CheckpointError(
                f"parameter server: expected the barrier of checkpoint {self._checkpoint}, given that of "
                f"{request.checkpoint}; one checkpoint at a time"
            )
        self._checkpoint = request.checkpoint
        self._behind[request.worker] = None
        self._check()

    def take_state(self, checkpoint: int) -> Waiting[Any]:
        """The state of the shard once all workers have passed this barrier; None if the checkpoint is given up."""
        self._checkpoint = checkpoint
        taking = self._taking[checkpoint] = Waiting()
        self._check()
        return taking

    def leave(self, request: Leave, error: StreamiterError) -> bool:
        """A worker takes part no more; says whether it leaves now, or after what it has sent behind its barrier.

        Nobody waits for its replies any more, but what it has added counts.
        """
        self._late_errors.pop(request.worker, None)
        if request.worker not in self._behind:
            return True
        for held, waiting in self._held:
            if held.worker == request.worker and waiting is not None:
                waiting.fail(error)
        self._held.append((request, None))
        return False

    def left(self) -> None:
        """A worker that has not passed the barrier will not do so any more."""
        if not self._shard.workers:
            self._abandoned = 0  # The next job may count its checkpoints from the beginning.
        self._check()

    def abandon(self, request: AbandonBarrier) -> None:
        """The checkpoint is given up: go on with what is held."""
        self._abandoned = max(self._abandoned, request.checkpoint)
        for checkpoint in [number for number in self._taking if number <= request.checkpoint]:
            self._taking.pop(checkpoint).succeed(None)
        if self._checkpoint is not None and self._checkpoint <= request.checkpoint:
            self._go_on()

    def forget(self, error: StreamiterError) -> None:
        """Everything goes back to a snapshot; what is held never happens, and who waits for it gets this error."""
        self.fail(error)
        self._held_bytes = 0
        self._behind.clear()
        self._late_errors.clear()
        self._checkpoint = None

    def start_over(self, error: StreamiterError) -> None:
        """Clocks go back to 0, parameters stay: so do adds that were acknowledged. Who waits gets this error."""
        held = self._take_held()
        for request, waiting in held:
            if waiting is not None:
                waiting.fail(error)
            elif not isinstance(request, Clock):
                self._hold(request, None)

    def fail(self, error: StreamiterError) -> None:
        """Nothing that is held will happen, and no state is taken."""
        for _, waiting in self._take_held():
            if waiting is not None:
                waiting.fail(error)
        self._take_nothing()

    def _take_nothing(self) -> None:
        taking, self._taking = self._taking, {}
        for one in taking.values():
            one.succeed(None)

    def _check(self) -> None:
        if self._checkpoint is not None and all(worker in self._behind for worker in self._shard.workers):
            if (taking := self._taking.pop(self._checkpoint, None)) is None:
                return  # Whoever wants the state has not asked for it yet.
            taking.succeed(self._shard.freeze())
            self._go_on()

    def _go_on(self) -> None:
        self._checkpoint = None
        self._behind.clear()
        self._held_bytes = 0
        for request, waiting in self._take_held():
            if waiting is not None and waiting.is_settled and isinstance(request, Get):
                continue  # Given up; what was to be added or clocked happens all the same, here as on other shards.
            try:
                reply = self._shard.apply(request)
            except Exception as error:
                if waiting is None:
                    self._late_errors.setdefault(request.worker, error)
                else:
                    waiting.fail(error)
                continue
            if waiting is not None:
                _pass_on(reply, waiting)

    # -- requests --------------------------------------------------------------------------------------

    def get(self, request: Get) -> Any:
        """Read what is there, with the worker's own adds under ASP and SSP, where adds count at once."""
        matrix = self._shard.matrix(request.matrix)
        counts_clocks = not isinstance(matrix.matrix.consistency, ASP)
        if counts_clocks and self._holds_clock_of(request.worker):
            return self.later(request)
        return matrix.get(request, self._own_adds(request))

    def add(self, request: Add) -> Any:
        """Keep a copy; under ASP that is enough for the caller to go on."""
        matrix = self._shard.matrix(request.matrix)
        copied = add_parts.kept(request)
        size_bytes = add_parts.size_bytes(copied.parts)
        goes_on = isinstance(matrix.matrix.consistency, ASP) and self._held_bytes + size_bytes <= _HELD_BYTES
        if not goes_on or request.get is not None:
            return self.later(copied)
        matrix.model.tracker.check_worker_valid(request.worker)
        self._held_bytes += size_bytes
        self._hold(copied, None)
        return matrix.model.tracker.get_min_clock()

    def clock(self, request: Clock) -> Any:
        """Keep it; under ASP nothing follows from it for its worker."""
        matrix = self._shard.matrix(request.matrix)
        if not isinstance(matrix.matrix.consistency, ASP) or self._held_bytes + _CLOCK_BYTES > _HELD_BYTES:
            return self.later(request)
        matrix.model.tracker.check_worker_valid(request.worker)
        self._held_bytes += _CLOCK_BYTES
        self._held.append((request, None))
        return matrix.model.tracker.get_min_clock()

    def later(self, request: Get | Add | Clock | Update) -> Waiting[Any]:
        """Do it when all workers have passed the barrier."""
        waiting: Waiting[Any] = Waiting()
        self._hold(request, waiting)
        return waiting

    def _hold(self, request: Any, waiting: Waiting[Any] | None) -> None:
        self._held.append((request, waiting))
        if isinstance(request, Add):
            self._seen.setdefault((request.worker, request.matrix), add_parts.SeenAdds()).note(request.parts)

    def _take_held(self) -> deque[tuple[Any, Waiting[Any] | None]]:
        held, self._held = self._held, deque()
        self._seen.clear()
        return held

    def _holds_clock_of(self, worker: int) -> bool:
        return any(isinstance(request, Clock) and request.worker == worker for request, _ in self._held)

    def _own_adds(self, request: Get) -> list[AddPart]:
        seen = self._seen.get((request.worker, request.matrix))
        return [] if seen is None else seen.parts


def _pass_on(reply: Any, waiting: Waiting[Any]) -> None:
    """Settle a wait with a reply, which may itself have to wait."""
    if not isinstance(reply, Waiting):
        waiting.succeed(reply)
        return

    def settle() -> None:
        try:
            waiting.succeed(reply.result())
        except BaseException as error:
            waiting.fail(error)

    waiting.on_given_up = reply.give_up
    reply.when_settled(settle)
