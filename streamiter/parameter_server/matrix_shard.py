"""One matrix on one shard: its blocks, its initial values, and the consistency of reads and changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

import numpy as np

from streamiter.errors import ConfigurationError, OutOfTurn, ParameterServerError, ServerReset, StreamiterError
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.consistency import ConsistencyModel, Released
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning, fits_int64
from streamiter.parameter_server.psf.function import PartitionFunction, Result, UpdateFunction, check_function
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    AggregateRequest,
    ClockRequest,
    GetReply,
    GetRequest,
    KeptAdds,
    MatrixState,
    UpdateRequest,
    add_pending,
    copied_add,
    size_of_adds,
)
from streamiter.parameter_server.storage import FeatureBlock, make_block
from streamiter.parameter_server.storage.block import (
    OCCURRENCES,
    Block,
    GuardedBlock,
    Numbers,
    ShardBlock,
    check_blocks_state,
    frozen_blocks,
    restore_blocks,
    saved_blocks,
)
from streamiter.parameter_server.storage.feature_table import FeatureCounts
from streamiter.values.deferred import Encode
from streamiter.values.numbers import is_number

# Above this size the buffered adds of one worker are summed up: many small gradients of one iteration.
_PENDING_BYTES: Final = 64 << 20

# The fields of ``MatrixStatistics`` that a shard adds up.
_ADDED_UP: Final = (
    *("gets", "adds", "clock_calls", "updates", "aggregates"),
    *("numbers_read", "numbers_added", "waits", "waiting_peak"),
)


OwnAdds = Callable[[GetRequest], Iterable[AddPart]]
"""Returns the adds of the worker that are held behind a barrier and that its get shows."""


@final
class MatrixShard:
    """The blocks of one matrix on one shard, and the consistency that says when they are read and changed.

    No method waits: a get that has to wait is answered with a ``WaitingReply``.
    """

    def __init__(self, matrix: Matrix, shard: int, shards: int, workers: Iterable[int]) -> None:
        self.matrix = matrix
        self.shards = shards
        self.partitioning = MatrixPartitioning(matrix, shards)
        mine = [block for block in self.partitioning.blocks if block.shard == shard]
        self.blocks: dict[int, ShardBlock] = {block.number: make_block(matrix, block) for block in mine}
        self.model: ConsistencyModel[AddPart, GetRequest] = ConsistencyModel(
            matrix.consistency, workers, f"matrix {matrix.name!r}", lambda: KeptAdds(size_of_adds, _PENDING_BYTES)
        )
        self._waiting: dict[int, tuple[GetRequest, WaitingReply[GetReply], OwnAdds]] = {}
        """The gets that wait, by the identity of the request object."""
        self._counts = dict.fromkeys(_ADDED_UP, 0)
        self._clock_function = clock_function(matrix)
        self._clock_parts = self._parts_of(self._clock_function) if self._clock_function is not None else []

    def initialize(self) -> None:
        """Set the initial values of a new matrix."""
        functions = init_functions(self.matrix)
        for function in functions:
            if parts := self._parts_of(function):
                self._run(function, parts)
        if functions or (given := init_values(self.matrix)) is None:
            return
        for block in self.blocks.values():
            for row in block.rows:
                values = given[row, block.columns.start : block.columns.stop]
                block.put(row, None, np.ascontiguousarray(values))

    def _parts_of(self, function: UpdateFunction) -> list[tuple[int, object]]:
        """Return the blocks of this shard on which a function of the matrix runs, each with its part."""
        split = function.split(self.matrix, self.partitioning)
        return [(block.number, part) for block, part in split if block.number in self.blocks]

    def reinitialize(self, workers: Iterable[int]) -> None:
        """Set the initial values again, with these workers at clock 0; waiting gets fail."""
        self.reset(workers, "a server that went back to a snapshot of before the matrix was made")
        for number in self.blocks:
            self.blocks[number] = make_block(self.matrix, self.partitioning.blocks[number])
        self.initialize()

    # -- reading ---------------------------------------------------------------------------------------

    def get(
        self, request: GetRequest, own: OwnAdds = lambda request: (), held_clocks: int = 0
    ) -> GetReply | WaitingReply[GetReply]:
        """Return the values or a waiting reply.

        ``own`` and ``held_clocks`` are the worker's adds and clocks that are held behind a barrier.
        """
        self._counts["gets"] += 1
        if self.model.get(request.worker, request, request.observed, held_clocks):
            return self.read(request, own(request))
        waiting: WaitingReply[GetReply] = WaitingReply(lambda: self._forget(request))
        self._waiting[id(request)] = (request, waiting, own)
        self._counts["waits"] += 1
        self._counts["waiting_peak"] = max(self._counts["waiting_peak"], len(self._waiting))
        return waiting

    def read(self, request: GetRequest, own: Iterable[AddPart] = ()) -> GetReply:
        """Return the current values."""
        blocks, counts = self.blocks, self._counts
        values = []
        for block, row, columns, out in request.parts:
            found = blocks[block].get(row, columns, out)
            counts["numbers_read"] += found.size
            values.append(found)
        if request.with_own or own:
            self._overlay(request, values, own)
        return GetReply(values, self.model.tracker.get_min_clock())

    def _overlay(self, request: GetRequest, values: Sequence[Numbers], own: Iterable[AddPart]) -> None:
        pending = list(own)
        if request.with_own:
            pending.extend(self.model.pending_adds(request.worker))
        for part, found in zip(request.parts, values, strict=True):
            add_pending(found, part, pending, self.blocks[part.block].columns.start)

    def _forget(self, request: GetRequest) -> None:
        self._waiting.pop(id(request), None)
        self.model.forget(request)

    # -- adding ----------------------------------------------------------------------------------------

    def add(self, request: AddRequest) -> int | GetReply | WaitingReply[GetReply]:
        """Add now or at the clock, then run the request's function and get."""
        if self.model.rules.keeps_adds:
            self._buffer(request)
        else:
            self.model.add(request.worker, request.parts, request.observed)
            self._apply_parts(request.parts)
            if request.update is not None:
                self._run(request.update.function, request.update.parts)
        self._counts["adds"] += 1
        if request.get is not None:
            return self.get(request.get)
        return self.model.tracker.get_min_clock()

    def _buffer(self, request: AddRequest) -> None:
        if request.update is not None:
            raise OutOfTurn(
                f"matrix {self.matrix.name!r}: expected an add without update= under BSP, where adds wait for the "
                f"clock, given {request.update.function.name}; give it as on_clock= when you make the matrix"
            )
        self.model.add(request.worker, copied_add(request).parts, request.observed)

    def _apply_parts(self, parts: Iterable[AddPart]) -> None:
        blocks, counts = self.blocks, self._counts
        for block, row, columns, values in parts:
            blocks[block].add(row, columns, values)
            counts["numbers_added"] += values.size

    def _apply_kept(self, adds: Sequence[AddPart]) -> None:
        """Apply the adds of an iteration, occurrences first: adds that were summed up are in another order."""
        # A warning of an overflow would appear at the worker that moves the clock, not at the one that added.
        with np.errstate(all="ignore"):
            self._apply_parts(sorted(adds, key=lambda part: part.row != OCCURRENCES))

    # -- the clock -------------------------------------------------------------------------------------

    def clock(self, request: ClockRequest) -> int:
        """A worker has finished an iteration; return the minimum clock."""
        released = self.model.clock(request.worker, request.observed)
        self._counts["clock_calls"] += 1
        if released:
            self._release(released)
        return self.model.tracker.get_min_clock()

    def _release(self, released: Sequence[Released[AddPart, GetRequest]]) -> None:
        """Apply what the moves of the minimum clock release: adds, ``on_clock``, gets, for one clock after the other.

        The minimum may move by several clocks at once. Another shard, where requests arrived in another order, may
        have moved clock by clock, and must reach the same parameters.
        """
        failure: Exception | None = None
        for move in released:
            try:
                if move.adds:
                    self._apply_kept(move.adds)
                if self._clock_function is not None and self._clock_parts:
                    self._run(self._clock_function, self._clock_parts)
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
        if failure is not None:
            raise failure

    # -- functions -------------------------------------------------------------------------------------

    def update(self, request: UpdateRequest) -> list[Result] | None:
        """Run an update function on these blocks; or only check it, and return the results of the blocks' checks."""
        self._check_worker(request.worker)
        if request.only_check:
            function = request.function
            with _named(function, self.matrix):
                return [
                    function.partition_check(self._block_for(function, block), part) for block, part in request.parts
                ]
        self._run(request.function, request.parts)
        return None

    def _run(self, function: UpdateFunction, parts: Sequence[tuple[int, object]]) -> None:
        self._counts["updates"] += 1
        for block, part in parts:
            with _named(function, self.matrix):
                function.partition_update(self._block_for(function, block), part)

    def aggregate(self, request: AggregateRequest) -> list[Result]:
        """Run a get function on these blocks, and return their results."""
        self._check_worker(request.worker)
        self._counts["aggregates"] += 1
        function = request.function
        with _named(function, self.matrix):
            return [function.partition_get(self._block_for(function, block), part) for block, part in request.parts]

    def _block_for(self, function: PartitionFunction, number: int) -> Block:
        """Return a block for this function: guarded, except for our own functions, which are tested."""
        block = self.blocks[number]
        if type(function).__module__.startswith("streamiter."):
            return block
        return GuardedBlock(block, f"{function.name} on matrix {self.matrix.name!r}")

    def _check_worker(self, worker: int) -> None:
        if worker >= 0:  # Below 0: the server itself.
            self.model.tracker.check_worker_valid(worker)

    # -- workers ---------------------------------------------------------------------------------------

    def leave(self, worker: int, error: StreamiterError) -> None:
        """A worker leaves: its own gets fail, gets of other workers may be answered. Its adds stay."""
        self.fail_gets(worker, error)
        self._remove_worker(worker)

    def _remove_worker(self, worker: int) -> None:
        try:
            if released := self.model.leave(worker):
                self._release(released)
        finally:
            if orphaned := self.model.take_orphaned_adds():
                self._apply_kept(orphaned)

    def fail_gets(self, worker: int, error: StreamiterError) -> None:
        """Fail the waiting gets of a worker."""
        for get, waiting, _ in [waits for waits in self._waiting.values() if waits[0].worker == worker]:
            self._forget(get)
            waiting.fail(error)

    def raise_worker(self, worker: int, clock: int) -> None:
        """Raise the clock of a worker that has just joined above this shard's minimum."""
        if released := self.model.raise_worker(worker, clock):
            self._release(released)

    def reset(self, workers: Iterable[int], reason: str) -> None:
        """Set the clocks of these workers to 0; parameters stay as they are, waiting gets fail."""
        self.model.reset(workers)
        self.fail_waiting(
            ServerReset(f"matrix {self.matrix.name!r}: expected to answer this get, given {reason}; ask again")
        )

    def fail_waiting(self, error: StreamiterError) -> None:
        """Fail all waiting gets."""
        waiting, self._waiting = self._waiting, {}
        for _, one, _ in waiting.values():
            one.fail(error)

    # -- state -----------------------------------------------------------------------------------------

    def freeze(self, encode: Encode) -> MatrixState:
        """Return the state of blocks and clocks. Waiting gets are not part of it: their workers ask again."""
        model = self.model.state()
        pending = model["adds"]["by clock"]
        return {
            **frozen_blocks(self.matrix, self.blocks.values(), encode),
            "clocks": model["tracker"],
            "pending": [[clock, worker, [list(part) for part in parts]] for clock, worker, parts in pending],
        }

    def check_state(self, state: MatrixState) -> None:
        """Raise an error if this matrix cannot take over a state of all shards."""
        check_blocks_state(self.matrix, state)

    def restore(self, state: MatrixState, workers: Iterable[int] | None = None) -> None:
        """Take over the merged results of ``freeze`` of all shards: the blocks that are stored here, and all clocks.

        ``workers`` take part from now on; None: the workers of the state. The clock of a worker that is not in the
        state is the minimum clock.
        """
        self.check_state(state)
        restore_blocks(self.matrix, self.blocks.values(), state)
        self.fail_waiting(ServerReset(f"matrix {self.matrix.name!r}: the server went back to a snapshot; ask again"))
        saved = saved_blocks(state)
        adds = [
            (clock, worker, mine)
            for clock, worker, parts in state["pending"]
            if (mine := [part for given in parts for part in self._cut(AddPart(*given), saved)])
        ]
        keeps_adds = self.model.rules.keeps_adds
        self.model.restore({"tracker": state["clocks"], "adds": {"by clock": adds if keeps_adds else ()}})
        if not keeps_adds:  # The matrix was made with another consistency: no add waits for a clock now.
            for _, _, parts in adds:
                self._apply_parts(parts)
        self._change_workers(workers)

    def _cut(self, part: AddPart, saved: Sequence[BlockRange]) -> Iterator[AddPart]:
        """Yield the parts of an add for the blocks that are stored here; its matrix was cut into the saved blocks."""
        place, own = saved[part.block], self.blocks.get(part.block)
        if own is not None and (own.rows, own.columns) == (place.rows, place.columns):
            yield part
            return
        columns = np.arange(place.columns.start, place.columns.stop) if part.columns is None else part.columns
        row = 0 if part.row == OCCURRENCES else part.row
        for block, keys, positions in self.partitioning.split(row, columns):
            if block.number in self.blocks:
                yield AddPart(block.number, part.row, keys, part.values[positions])

    def _change_workers(self, workers: Iterable[int] | None) -> None:
        if workers is None:
            return
        wanted, model = list(workers), self.model
        for worker in wanted:
            if worker not in model.tracker.workers:
                model.join(worker)
        for worker in model.tracker.workers:
            if worker not in wanted:
                self._remove_worker(worker)

    def statistics(self) -> MatrixStatistics:
        """Return the statistics of the matrix on this shard."""
        tracker = self.model.tracker
        return MatrixStatistics(
            matrix=self.matrix.name,
            consistency=repr(self.matrix.consistency),
            minimum_clock=tracker.get_min_clock(),
            clocks={str(worker): tracker.get_progress(worker) for worker in tracker.workers},
            waiting=len(self._waiting),
            buffered_adds=sum(1 for _ in self.model.pending_adds()),
            blocks=len(self.blocks),
            size_bytes=sum(block.size_bytes() for block in self.blocks.values()),
            **_features(self.blocks.values()),
            **self._counts,
        )


def _features(blocks: Iterable[ShardBlock]) -> dict[str, int]:
    """Return the counts of ``FeatureCounts`` of all blocks together."""
    counts = [block.counts() for block in blocks if isinstance(block, FeatureBlock)]
    return dict(zip(FeatureCounts._fields, map(sum, zip(*counts, strict=True)), strict=False))


@contextlib.contextmanager
def _named(function: PartitionFunction, matrix: Matrix) -> Iterator[None]:
    """Name the function and the matrix in an error of a user's function."""
    try:
        yield
    except StreamiterError:
        raise
    except Exception as error:
        raise ParameterServerError(
            f"{function.name} on matrix {matrix.name!r}: expected it to work on every block, given "
            f"{type(error).__name__}: {error}; correct the function"
        ) from error


@dataclass(frozen=True, slots=True)
class MatrixStatistics:
    """The statistics of one matrix at one moment, on one shard or on all shards, since the matrix was made.

    On all shards (``ParameterServerStatistics.matrix``) counts are sums: a call to two shards counts twice.
    """

    matrix: str
    """The name of the matrix."""
    consistency: str
    """The consistency as code, such as ``"SSP(staleness=2)"``."""
    minimum_clock: int = field(metadata={"together": min})
    """The clock of the slowest worker; on all shards, the lowest."""
    clocks: dict[str, int]
    """The clock of each worker. The keys are the workers' numbers as text, as JSON requires."""
    gets: int
    """Requests to read, including those of ``add_get``."""
    adds: int
    """Requests to add."""
    clock_calls: int = field(metadata={"together": max})
    """The clocks of all workers together; on all shards, the highest."""
    updates: int
    """Runs of functions that change parameters, including ``init`` and ``on_clock``."""
    aggregates: int
    """Runs of functions that compute a result."""
    numbers_read: int
    """Numbers read by gets."""
    numbers_added: int
    """Numbers added by adds that were applied."""
    waits: int
    """Gets that had to wait."""
    waiting: int
    """Gets that wait now."""
    waiting_peak: int = field(metadata={"together": max})
    """The most gets that waited at the same time; on all shards, the highest of one shard."""
    buffered_adds: int
    """Parts of adds that wait for a clock; many are summed up to one."""
    blocks: int
    """The number of blocks."""
    size_bytes: int
    """The memory of the blocks, in bytes."""
    features: int = 0
    """With admission: the vectors that are known, of which ``admitted`` ones are stored."""
    admitted: int = 0
    expired: int = 0
    """The vectors that have left, or began anew, because they were expired."""
    evicted: int = 0
    """The vectors that have left because there was no room."""


def check_first_values(matrix: Matrix, partitioning: MatrixPartitioning) -> None:
    """Raise an error for wrong ``init=`` or ``on_clock=``, before a shard makes the matrix.

    Without this check a function that runs on no block would do nothing, without an error.
    """
    functions = list(init_functions(matrix))
    if not functions:
        init_values(matrix)
    if (on_clock := clock_function(matrix)) is not None:
        functions.append(on_clock)
    if isinstance(matrix.default, UpdateFunction):
        check_function(matrix.default, replace(matrix, default=0.0, admission=None), partitioning)
    for function in functions:
        check_function(function, matrix, partitioning)


def clock_function(matrix: Matrix) -> UpdateFunction | None:
    """Return the function of ``on_clock=``; raise ConfigurationError for any other value."""
    function = matrix.on_clock
    if function is None or isinstance(function, UpdateFunction):
        return function
    raise ConfigurationError(
        f"matrix {matrix.name!r}, on_clock=: expected a psf that changes parameters such as psf.Optimize(…), "
        f"given {function!r}"
    )


def init_functions(matrix: Matrix) -> Sequence[UpdateFunction]:
    """Return the functions of ``init=``; none where ``init=`` is numbers."""
    init = matrix.init
    given = init if isinstance(init, (list, tuple)) else (init,)
    functions = [one for one in given if isinstance(one, UpdateFunction)]
    return functions if len(functions) == len(given) else ()


def init_values(matrix: Matrix) -> Numbers | None:
    """Return the numbers of ``init=``, with shape (rows, columns); None where all are 0."""
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
