"""What a matrix begins with, and what runs on its clock, checked before a shard makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Encode
from streamiter.errors import (
    ConfigurationError,
    OutOfTurn,
    ParameterServerError,
    ServerReset,
    StreamiterError,
)
from streamiter.numbers import is_number
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.consistency import model_of
from streamiter.parameter_server.consistency.models import BSP, ConsistencyModel, Released
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning, fits_int64
from streamiter.parameter_server.psf.function import PartitionFunction, UpdateFunction, check_function
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    AggregateRequest,
    ClockRequest,
    GetReply,
    GetRequest,
    UpdateRequest,
    add_pending,
    copied_add,
    size_of_adds,
    summed_adds,
)
from streamiter.parameter_server.snapshots import check_state, frozen_blocks, restore_blocks
from streamiter.parameter_server.storage import make_block
from streamiter.parameter_server.storage.block import Block, GuardedBlock

__all__ = [
    "MatrixCounts",
    "MatrixShard",
    "MatrixStatistics",
    "check_first_values",
    "init_functions",
]


def check_first_values(matrix: Matrix, partitioning: MatrixPartitioning) -> None:
    """Raise what is wrong with ``init=`` and ``on_clock=``: a function that fits no block would be none, silently."""
    functions = list(init_functions(matrix))
    if not functions:
        init_values(matrix)
    if matrix.on_clock is not None:
        if not isinstance(matrix.on_clock, UpdateFunction):
            raise ConfigurationError(
                f"matrix {matrix.name!r}, on_clock=: expected a psf that changes parameters such as psf.Optimize(…), "
                f"given {matrix.on_clock!r}"
            )
        functions.append(matrix.on_clock)
    for function in functions:
        check_function(function, matrix, partitioning)


def init_functions(matrix: Matrix) -> Sequence[UpdateFunction]:
    """The functions that ``init=`` names; none where it is numbers."""
    init = matrix.init
    given: Sequence[Any] = init if isinstance(init, (list, tuple)) else (init,)
    return given if given and all(isinstance(one, UpdateFunction) for one in given) else ()


def init_values(matrix: Matrix) -> npt.NDArray[Any] | None:
    """The numbers that ``init=`` gives, as (rows, columns); None where all are 0."""
    init, shape = matrix.init, (matrix.rows, matrix.columns)
    if is_number(init) and not init:
        return None
    where = f"matrix {matrix.name!r}, init="
    try:
        given = np.asarray(init)
    except ValueError:
        given = np.empty(0, object)
    are_numbers = fits_int64(given) if matrix.dtype == "int64" else given.dtype.kind in "iubf"
    if not are_numbers or given.shape not in ((), shape[1:], shape):
        shown = f"{init!r}" if given.ndim == 0 else f"{given.dtype} of shape {given.shape}"
        raise ConfigurationError(
            f"{where}: expected numbers of {matrix.dtype}: one, {matrix.columns:,} for each row, or "
            f"{matrix.rows:,} × {matrix.columns:,}; or psfs that change parameters; given {shown}"
        )
    return np.broadcast_to(given.astype(matrix.numpy_dtype, copy=False), shape)


# Adds of one worker that wait for a clock are summed up past this: many small gradients of one iteration.
_PENDING_BYTES: Final = 64 << 20


@dataclass(slots=True)
class MatrixCounts:
    """Counts of one matrix on one shard, since it was made."""

    gets: int = 0
    adds: int = 0
    clocks: int = 0
    updates: int = 0
    aggregates: int = 0
    numbers_read: int = 0
    numbers_added: int = 0
    waits: int = 0
    """Gets that had to wait."""
    waiting_peak: int = 0


@dataclass(frozen=True, slots=True)
class MatrixStatistics:
    """One matrix on one shard at one moment, or on all of them. Counts are since it was made there.

    On all of them (``ParameterServerStatistics.matrix``) counts are sums: a call to two shards counts twice.
    """

    matrix: str
    """Its name."""
    consistency: str
    """As it is written: ``"SSP(staleness=2)"``."""
    minimum_clock: int
    """That of the slowest worker; on all shards, the lowest."""
    clocks: dict[str, int]
    """Where each worker stands, by its number, as text, which JSON wants of keys."""
    gets: int
    """Requests to read; those of ``add_get``, too."""
    adds: int
    """Requests to add."""
    clock_calls: int
    """How often workers have clocked, all together; on all shards, the highest."""
    updates: int
    """How often a function has run that changes parameters, ``init`` and ``on_clock`` included."""
    aggregates: int
    """How often one has run that computes something."""
    numbers_read: int
    """By gets."""
    numbers_added: int
    """By adds that were applied."""
    waits: int
    """Gets that had to wait."""
    waiting: int
    """Gets that wait now."""
    waiting_peak: int
    """The most that waited at the same time; on all shards, the highest of one shard."""
    buffered_adds: int
    """Adds that wait for a clock."""
    blocks: int
    """How many there are."""
    size_bytes: int
    """Memory of its blocks."""


OwnAdds = Callable[[GetRequest], Iterable[AddPart]]
"""The adds of a worker that are held elsewhere, and that its get is to show."""


def _nothing_held(request: GetRequest) -> Iterable[AddPart]:
    del request
    return ()


class Followed(Protocol):
    """Told of what changes, while somebody follows the matrix."""

    def changed(self, block: int, rows: Sequence[int]) -> None:
        """These rows of a block have changed."""

    def applied(self) -> None:
        """A request has been handled as a whole."""

    def clock_moved(self) -> None:
        """The minimum clock has moved, and what had to follow from that has been done."""


@final
class MatrixShard:
    """Handles what is asked of its blocks. Nothing here waits: what cannot be answered now is a ``Waiting``.

    One matrix on one shard: its blocks, and the consistency that says when they are read and changed.
    """

    def __init__(self, matrix: Matrix, shard: int, shards: int, workers: Iterable[int]) -> None:
        self.matrix = matrix
        self.shards = shards
        self.partitioning = MatrixPartitioning(matrix, shards)
        mine = [block for block in self.partitioning.blocks if block.shard == shard]
        self.blocks: dict[int, Block] = {block.number: make_block(matrix, block) for block in mine}
        self.model: ConsistencyModel[AddRequest, GetRequest] = model_of(
            matrix.consistency, workers, name=f"matrix {matrix.name!r}"
        )
        self._buffers = isinstance(matrix.consistency, BSP)
        self._waiting: dict[int, tuple[GetRequest, WaitingReply[GetReply], OwnAdds]] = {}
        """The gets that wait, by the identity of the request."""
        self._pending_bytes: dict[int, int] = {}
        self._sum_up_above: dict[int, int] = {}
        """By worker: above the bound where the sum of its adds is large, or each further one had it summed anew."""
        self._counts = MatrixCounts()
        self._on_clock: list[tuple[int, Any]] = []
        if matrix.on_clock is not None:
            split = matrix.on_clock.split(matrix, self.partitioning)
            self._on_clock = [(block.number, part) for block, part in split if block.number in self.blocks]
        self.followed: Followed | None = None

    def initialize(self) -> None:
        """Give a new matrix its first values."""
        functions = init_functions(self.matrix)
        for function in functions:
            split = function.split(self.matrix, self.partitioning)
            if parts := [(block.number, part) for block, part in split if block.number in self.blocks]:
                self._run(function, parts)
        if functions or (given := init_values(self.matrix)) is None:
            return
        for block in self.blocks.values():
            for row in block.rows:
                values = given[row, block.columns.start : block.columns.stop]
                block.put(row, None, np.ascontiguousarray(values))

    def begin_anew(self, workers: Iterable[int]) -> None:
        """As it was made, with these workers at clock 0; what waits fails."""
        self.reset(workers, "a server that went back to a snapshot of before it was made")
        for number in self.blocks:
            self.blocks[number] = make_block(self.matrix, self.partitioning.blocks[number])
        self.initialize()

    # -- reading ---------------------------------------------------------------------------------------

    def get(
        self, request: GetRequest, own: OwnAdds = _nothing_held, held_clocks: int = 0
    ) -> GetReply | WaitingReply[GetReply]:
        """The values, or a wait for them. ``own`` and ``held_clocks`` are of the worker, and held elsewhere."""
        self._counts.gets += 1
        if self.model.get(request.worker, request, request.observed, held_clocks):
            return self.read(request, own(request))
        waiting: WaitingReply[GetReply] = WaitingReply(lambda: self._forget(request))
        self._waiting[id(request)] = (request, waiting, own)
        self._counts.waits += 1
        self._counts.waiting_peak = max(self._counts.waiting_peak, len(self._waiting))
        return waiting

    def read(self, request: GetRequest, own: Iterable[AddPart] = ()) -> GetReply:
        """The values as they are now."""
        blocks, counts = self.blocks, self._counts
        values = []
        for block, row, columns, out in request.parts:
            found = blocks[block].get(row, columns, out)
            counts.numbers_read += found.size
            values.append(found)
        if request.with_own or own:
            self._overlay(request, values, own)
        return GetReply(values, self.model.tracker.get_min_clock())

    def _overlay(self, request: GetRequest, values: Sequence[Any], own: Iterable[AddPart]) -> None:
        pending = list(own)
        if request.with_own:
            for add in self.model.pending_adds(request.worker):
                pending.extend(add.parts)
        for part, found in zip(request.parts, values, strict=True):
            add_pending(found, part, pending, self.blocks[part.block].columns.start)

    def _forget(self, request: GetRequest) -> None:
        self._waiting.pop(id(request), None)
        self.model.forget(request)

    # -- adding ----------------------------------------------------------------------------------------

    def add(self, request: AddRequest) -> int | GetReply | WaitingReply[GetReply]:
        """Add now or at the clock, then do what was fused with it."""
        if self._buffers:
            self._buffer(request)
        else:
            self.model.add(request.worker, request, request.observed)
            self._apply(request)
        self._counts.adds += 1
        if request.get is not None:
            return self.get(request.get)
        return self.model.tracker.get_min_clock()

    def _buffer(self, request: AddRequest) -> None:
        if request.update is not None:
            raise OutOfTurn(
                f"matrix {self.matrix.name!r}: expected an add without update= under BSP, where adds wait for the "
                f"clock, given {_name_of(request.update)}; give it as on_clock= when you make the matrix"
            )
        worker, copied = request.worker, copied_add(request)
        self.model.add(worker, copied, request.observed)
        held_bytes = self._pending_bytes.get(worker, 0) + size_of_adds(copied.parts)
        if held_bytes > self._sum_up_above.get(worker, _PENDING_BYTES):
            held_bytes = self._sum_up(worker)
            self._sum_up_above[worker] = max(_PENDING_BYTES, 2 * held_bytes)
        self._pending_bytes[worker] = held_bytes

    def _forget_pending(self, worker: int) -> None:
        self._pending_bytes.pop(worker, None)
        self._sum_up_above.pop(worker, None)

    def _sum_up(self, worker: int) -> int:
        """One add in place of all that the worker has waiting; gives its size."""
        size_bytes = 0

        def merge(adds: Sequence[AddRequest]) -> list[AddRequest]:
            nonlocal size_bytes
            parts = summed_adds(part for add in adds for part in add.parts)
            size_bytes = size_of_adds(parts)
            return [AddRequest(self.matrix.name, worker, -1, parts)]

        self.model.merge_pending(worker, merge)
        return size_bytes

    def _apply(self, request: AddRequest) -> None:
        self._apply_parts(request.parts)
        if request.update is not None:
            self._run_update(request.update)
        if self.followed is not None:
            self.followed.applied()

    def _apply_parts(self, parts: Iterable[AddPart]) -> None:
        blocks, counts, followed = self.blocks, self._counts, self.followed
        for block, row, columns, values in parts:
            blocks[block].add(row, columns, values)
            counts.numbers_added += values.size
            if followed is not None:
                followed.changed(block, (row,))

    def _apply_kept(self, adds: Sequence[AddRequest]) -> None:
        if adds:
            with np.errstate(
                all="ignore"
            ):  # The worker that moves the clock, or leaves, may not be the one that overflows.
                for add in adds:
                    self._apply_parts(add.parts)

    # -- the clock -------------------------------------------------------------------------------------

    def clock(self, request: ClockRequest) -> int:
        """A worker has finished an iteration; gives the minimum clock."""
        released = self.model.clock(request.worker, request.observed)
        self._counts.clocks += 1
        self._forget_pending(request.worker)
        if released:
            self._release(released)
        return self.model.tracker.get_min_clock()

    def _release(self, released: Sequence[Released[AddRequest, GetRequest]]) -> None:
        """The minimum has moved, perhaps by several clocks at once: ``on_clock`` runs for each of them.

        Another shard that heard of things in another order may have moved clock by clock, and has to come to the same.
        """
        failure: Exception | None = None
        for move in released:
            try:
                self._apply_kept(move.adds)
                self._finish_iteration()
            except Exception as error:
                failure = failure or error
            for get in move.gets:
                if (waits := self._waiting.pop(id(get), None)) is None:
                    continue
                _, waiting, own = waits
                if failure is None:
                    waiting.succeed(self.read(get, own(get)))
                else:
                    waiting.fail(failure)
        if self.followed is not None:
            self.followed.clock_moved()
        if failure is not None:
            raise failure

    def _finish_iteration(self) -> None:
        function = self.matrix.on_clock
        if function is not None and self._on_clock:
            self._run(function, self._on_clock)

    # -- functions -------------------------------------------------------------------------------------

    def update(self, request: UpdateRequest) -> list[Any] | None:
        """Run an update function on these blocks, or ask them whether it can be run: what each of them says."""
        self._check_worker(request.worker)
        if request.only_check:
            function = request.function
            assert function is not None
            with _named(function, self.matrix):
                return [
                    function.partition_check(self._block_for(function, block), part)
                    for block, part in request.parts
                ]
        self._run_update(request)
        if self.followed is not None:
            self.followed.applied()
        return None

    def _run_update(self, request: UpdateRequest) -> None:
        assert request.function is not None
        self._run(request.function, request.parts)

    def _run(self, function: Any, parts: Sequence[tuple[int, Any]]) -> None:
        self._counts.updates += 1
        for block, part in parts:
            with _named(function, self.matrix):
                function.partition_update(self._block_for(function, block), part)
            if self.followed is not None:
                self.followed.changed(block, function.changed_rows(self.matrix, self.blocks[block]))

    def aggregate(self, request: AggregateRequest) -> list[Any]:
        """What each of these blocks gives."""
        self._check_worker(request.worker)
        assert request.function is not None
        self._counts.aggregates += 1
        function = request.function
        with _named(function, self.matrix):
            return [
                function.partition_get(self._block_for(function, block), part)
                for block, part in request.parts
            ]

    def _block_for(self, function: PartitionFunction, number: int) -> Block:
        """A block as this function is to get it: ours are tested on blocks of all shapes, and trusted."""
        block = self.blocks[number]
        if type(function).__module__.startswith("streamiter."):
            return block
        return GuardedBlock(block, f"{function.name} on matrix {self.matrix.name!r}")

    def _check_worker(self, worker: int) -> None:
        if worker >= 0:  # Below 0: the server itself.
            self.model.tracker.check_worker_valid(worker)

    # -- workers ---------------------------------------------------------------------------------------

    def leave(self, worker: int, error: StreamiterError) -> None:
        """A worker takes part no more: its own waits fail, those of others may end. What it added stays."""
        self.fail_gets(worker, error)
        self._forget_pending(worker)
        self._let_leave(worker)

    def _let_leave(self, worker: int) -> None:
        try:
            if released := self.model.leave(worker):
                self._release(released)
        finally:
            if orphaned := self.model.take_orphaned_adds():
                self._apply_kept(orphaned)
                if self.followed is not None:
                    self.followed.applied()

    def fail_gets(self, worker: int, error: StreamiterError) -> None:
        """The gets of a worker that wait will not be answered."""
        for get, waiting, _ in [waits for waits in self._waiting.values() if waits[0].worker == worker]:
            self._forget(get)
            waiting.fail(error)

    def raise_worker(self, worker: int, clock: int) -> None:
        """A worker that has just joined stands further on than this shard's minimum."""
        if released := self.model.raise_worker(worker, clock):
            self._release(released)

    def reset(self, workers: Iterable[int], reason: str) -> None:
        """Start over with these workers at clock 0; parameters stay as they are, what waits fails."""
        self.model.reset(workers)
        self._pending_bytes.clear()
        self._sum_up_above.clear()
        self.fail_waiting(
            ServerReset(
                f"matrix {self.matrix.name!r}: expected to answer this get, given {reason}; ask again"
            )
        )

    def fail_waiting(self, error: StreamiterError) -> None:
        """Nothing that waits will be answered."""
        waiting, self._waiting = self._waiting, {}
        for _, one, _ in waiting.values():
            one.fail(error)

    # -- state -----------------------------------------------------------------------------------------

    def freeze(self, encode: Encode) -> dict[str, Any]:
        """Blocks and clocks as they are now; gets that wait are no state, their workers ask again."""
        model = self.model.snapshot()
        return {
            **frozen_blocks(self.matrix, self.blocks.values(), encode),
            "clocks": model["tracker"],
            "pending": [
                [clock, worker, [list(part) for part in add.parts]]
                for clock, worker, add in model.get("adds", ())
            ],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what keeps this matrix from taking over a state of all shards together."""
        check_state(self.matrix, self.blocks.values(), state)

    def restore(self, state: Mapping[str, Any], workers: Iterable[int] | None = None) -> None:
        """Take over what all shards gave in ``freeze``, together: of the blocks those that lie here.

        ``workers`` take part from now on, None: those of then. One that was not there stands at the minimum clock.
        """
        self.check_state(state)
        restore_blocks(self.blocks.values(), state)
        self.fail_waiting(
            ServerReset(f"matrix {self.matrix.name!r}: the server went back to a snapshot; ask again")
        )
        adds = [
            (clock, worker, AddRequest(self.matrix.name, worker, -1, mine))
            for clock, worker, parts in state["pending"]
            if (mine := [AddPart(*part) for part in parts if part[0] in self.blocks])
        ]
        self.model.restore({"tracker": state["clocks"], "adds": adds})
        if not self._buffers:  # The matrix was made with another consistency: nothing waits for a clock now.
            for _, _, add in adds:
                self._apply_parts(add.parts)
        self._pending_bytes.clear()
        self._sum_up_above.clear()
        self._change_workers(workers)

    def _change_workers(self, workers: Iterable[int] | None) -> None:
        if workers is None:
            return
        wanted, model = list(workers), self.model
        for worker in wanted:
            if worker not in model.tracker.workers:
                model.join(worker)
        for worker in model.tracker.workers:
            if worker not in wanted:
                self._let_leave(worker)

    def statistics(self) -> MatrixStatistics:
        """Where it stands now."""
        tracker, counts = self.model.tracker, self._counts
        return MatrixStatistics(
            matrix=self.matrix.name,
            consistency=repr(self.matrix.consistency),
            minimum_clock=tracker.get_min_clock(),
            clocks={str(worker): tracker.get_progress(worker) for worker in tracker.workers},
            gets=counts.gets,
            adds=counts.adds,
            clock_calls=counts.clocks,
            updates=counts.updates,
            aggregates=counts.aggregates,
            numbers_read=counts.numbers_read,
            numbers_added=counts.numbers_added,
            waits=counts.waits,
            waiting=len(self._waiting),
            waiting_peak=counts.waiting_peak,
            buffered_adds=sum(1 for _ in self.model.pending_adds()),
            blocks=len(self.blocks),
            size_bytes=sum(block.size_bytes() for block in self.blocks.values()),
        )


def _name_of(update: UpdateRequest) -> str:
    return update.function.name if update.function is not None else "update="


@contextlib.contextmanager
def _named(function: PartitionFunction, matrix: Matrix) -> Iterator[None]:
    """An error of a function that a user wrote says which it was."""
    try:
        yield
    except StreamiterError:
        raise
    except Exception as error:
        raise ParameterServerError(
            f"{function.name} on matrix {matrix.name!r}: expected it to work on every block, given "
            f"{type(error).__name__}: {error}; mend the function"
        ) from error
