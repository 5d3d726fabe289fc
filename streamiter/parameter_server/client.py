"""A worker's client: all calls of a worker to a parameter server.

A call names rows and columns of a matrix. ``rows.MatrixAccess`` splits the call into a request for each shard;
``Participation``, which a client is, sends the requests; the client puts the replies together.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import OutOfTurn, ParameterServerError
from streamiter.parameter_server.calls import Call, Heartbeats, Participation, Replies, ShardLink
from streamiter.parameter_server.consistency import ASP
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import GetFunction, Part, Result, UpdateFunction
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    AggregateRequest,
    ArriveRequest,
    ClockRequest,
    GetPart,
    GetReply,
    GetRequest,
    PassBarrier,
    Request,
    UpdateRequest,
)
from streamiter.parameter_server.rows import MatrixAccess, MatrixDirectory, MatrixRead, Occurrences, RowCache, RowRead
from streamiter.parameter_server.storage.block import Numbers
from streamiter.values.numbers import whole_number

T = TypeVar("T")
R = TypeVar("R")

# Enough for a call to every shard of a large server at a time. Of calls that do not wait there is never more than one.
MAX_CALLS: Final = 64

# The key of the count of barriers among the clocks of matrices, none of which has an empty name.
_BARRIERS: Final = ""


@final
class Client(Participation):
    """One worker's access to the matrices of a server; used in one event loop.

    Made by ``server.client(worker=…)``. A call that need not wait is answered without a turn of the event loop.
    ``row`` is one row: values have the shape (columns,). ``rows`` are several rows: (rows, columns). ``columns=None``
    means all columns. Columns may be in any order, and may be repeated. Arrays that are read have the matrix's dtype,
    and belong to the caller. Values that are added are converted to that dtype, except floats to int64; one number
    stands for all values.

    Errors are :class:`~streamiter.errors.ParameterServerError` and classes derived from it: every call raises
    WorkerHasLeft once the worker has left, and UnknownMatrix for a matrix that does not exist. A call that is cancelled
    while it waits takes a get back; all other requests that were sent are carried out.

    >>> import asyncio
    >>> from streamiter.parameter_server import BSP, ParameterServer
    >>> async def main() -> None:
    ...     async with ParameterServer() as server:
    ...         await server.create_matrix("w", rows=2, columns=4, consistency=BSP())
    ...         client = server.client(worker=0)
    ...         await client.add("w", rows=[0, 1], columns=[3, 1], values=[[1.0, 2.0], [3.0, 4.0]])
    ...         print(await client.get("w", row=0), await client.clock("w"), await client.get("w", row=0, columns=[3]))
    >>> asyncio.run(main())
    [0. 0. 0. 0.] 1 [1.]
    """

    def __init__(
        self,
        worker: int,
        links: Sequence[ShardLink],
        directory: MatrixDirectory,
        *,
        read_my_writes: bool = False,
        cache_bytes: int = 0,
        max_calls: int = MAX_CALLS,
        joins: bool = True,
        heartbeats: Heartbeats | None = None,
        on_left: Callable[[int], None] = lambda worker: None,
    ) -> None:
        super().__init__(worker, links, max_calls, heartbeats, on_left)
        self._directory = directory
        self._read_my_writes = read_my_writes
        self._cache = RowCache(cache_bytes)
        self._further: Callable[[], None] = lambda: None
        self._arrived = 0
        """The number of barriers at which this worker has arrived."""
        self._matrices: dict[str, MatrixAccess] = {}
        if joins:
            self._begin_to_join()

    def left(self, reason: str) -> None:
        super().left(reason)
        self._cache.clear()

    def go_back(self, clocks: Mapping[str, int]) -> None:
        super().go_back(clocks)
        self._arrived = 0
        self._cache.clear()
        for access in self._matrices.values():
            access.observed = -1

    async def settings(self, matrix: str) -> Matrix:
        """Return the settings of a matrix. Raises UnknownMatrix if there is none of this name."""
        return (self._matrices.get(matrix) or await self._find(matrix)).matrix

    # -- reading ---------------------------------------------------------------------------------------

    async def get(
        self,
        matrix: str,
        *,
        row: int | None = None,
        rows: Sequence[int] | None = None,
        columns: npt.ArrayLike | None = None,
    ) -> Numbers:
        """Read values: an array of (columns,), or of (rows, columns) for ``rows``. Waits as the consistency says.

        Raises OutOfTurn where BSP does not allow it, UnknownMatrix, OutOfRange; ServerReset or WorkerHasLeft while it
        waits.
        """
        access = self._matrices.get(matrix) or await self._find(matrix)
        if row is None or rows is not None or self._cache.is_on:
            return await (await self.start_get(matrix, row=row, rows=rows, columns=columns))
        row = access.partitioning.checked_row(row)
        keys = access.columns_of(columns)
        slices = access.partitioning.split(row, keys)
        if len(slices) != 1 or not isinstance(slices[0].positions, slice):
            return await (await self._read(access, access.reading_of_row(row, keys, slices), is_single=True))
        [(block, keys, _)] = slices
        parts = (GetPart(block.number, row, keys),)
        request = GetRequest(matrix, self.worker, access.observed, parts, self._read_my_writes)
        reply = await self._ask(block.shard, request)
        if reply.clock > access.observed:
            access.observed = reply.clock
        return reply.values[0]

    async def start_get(
        self,
        matrix: str,
        *,
        row: int | None = None,
        rows: Sequence[int] | None = None,
        columns: npt.ArrayLike | None = None,
    ) -> Call[Numbers]:
        """Begin to read, and return a handle; ``await handle`` gives the result of ``get``, also more than once.

        This method waits only while ``max_calls`` calls are under way. The errors of ``get`` are raised here or by the
        handle. A task that is cancelled while it awaits the handle gives the read up.
        """
        access = self._matrices.get(matrix) or await self._find(matrix)
        numbers, is_single = access.rows_of(row, rows, "get")
        keys = access.columns_of(columns)
        began: Sequence[RowRead] = ()
        if self._cache.is_on and access.staleness < math.inf:
            clock = self.clock_of(matrix)
            found = [self._cache.find(matrix, number, clock, access.staleness, keys) for number in numbers]
            cached = [values for values in found if values is not None]
            if cached and len(cached) == len(numbers):
                self.heartbeat()
                return Call((), lambda replies: cached[0] if is_single else np.stack(cached))
            if keys is None:  # Only whole rows are kept.
                began = [self._cache.begin(matrix, number) for number in numbers]
        return await self._read(access, access.reading(numbers, keys), began, is_single=is_single)

    async def _read(
        self, access: MatrixAccess, reading: MatrixRead, began: Sequence[RowRead] = (), *, is_single: bool
    ) -> Call[Numbers]:
        """Ask the shards to read. ``began`` are the reads for the cache: one for each row of the result, or none."""

        def finish(replies: Sequence[GetReply]) -> Numbers:
            for shard, reply in zip(reading.parts, replies, strict=True):
                reading.take(shard, reply)
                access.observed = max(access.observed, reply.clock)
            if began:
                lowest = min((reply.clock for reply in replies), default=0)
                for row, values in zip(began, reading.result, strict=True):
                    self._cache.put(row, values, lowest)
            return reading.result[0] if is_single else reading.result

        return await self._call(access.requests(GetRequest, reading.parts, self._read_my_writes), finish)

    # -- adding ----------------------------------------------------------------------------------------

    async def add(
        self,
        matrix: str,
        *,
        row: int | None = None,
        rows: Sequence[int] | None = None,
        columns: npt.ArrayLike | None = None,
        values: npt.ArrayLike,
        update: UpdateFunction | None = None,
    ) -> None:
        """Add values; for a column that is named twice, both values count. Under BSP they are applied at the clock.

        NaN and infinities are added, too: the sums follow IEEE arithmetic. Check gradients with ``np.isfinite`` before.

        ``update`` is a function that runs on the matrix in the same step (not under BSP: see ``on_clock``). Raises
        OutOfTurn, UnknownMatrix, OutOfRange; then nothing has been added.
        """
        access = self._matrices.get(matrix) or await self._find(matrix)
        if row is None or rows is not None or update is not None or self._cache.is_on:
            await self._check_fused(access, update)
            requests = access.add_requests(row, rows, columns, values, update)
            return await (await self._call(requests, _nothing))
        row = access.partitioning.checked_row(row)
        keys = access.columns_of(columns)
        given = access.values_of(values, (access.width(keys),), "add")
        slices = access.partitioning.split(row, keys)
        if len(slices) != 1 or not isinstance(slices[0].positions, slice):
            adds = access.requests(AddRequest, access.parts_of_row(row, slices, given))
            return await (await self._call(adds, _nothing))
        block = slices[0].block
        part = AddPart(block.number, row, slices[0].columns, given)
        await self._ask(block.shard, AddRequest(matrix, self.worker, access.observed, (part,)))
        return None

    async def start_add(
        self,
        matrix: str,
        *,
        row: int | None = None,
        rows: Sequence[int] | None = None,
        columns: npt.ArrayLike | None = None,
        values: npt.ArrayLike,
        update: UpdateFunction | None = None,
        occurrences: Occurrences | None = None,
    ) -> Call[None]:
        """Begin to add, and return a handle. ``values`` must not change before the handle is done.

        ``occurrences`` is for a matrix with admission: the first columns of vectors that have occurred, in order, once
        for each occurrence, and their times in milliseconds, or None if they are not known. They count before the
        values are added. The errors of ``add`` are raised here or by the handle.
        """
        access = self._matrices.get(matrix) or await self._find(matrix)
        await self._check_fused(access, update)
        return await self._call(access.add_requests(row, rows, columns, values, update, occurrences), _nothing)

    async def add_get(
        self,
        matrix: str,
        *,
        row: int | None = None,
        rows: Sequence[int] | None = None,
        columns: npt.ArrayLike | None = None,
        values: npt.ArrayLike,
        update: UpdateFunction | None = None,
    ) -> Numbers:
        """Add values, then read the same columns, in one step on each shard.

        The read waits as ``get`` does; under BSP it does not see the add, unless the client reads its own writes.
        """
        access = self._matrices.get(matrix) or await self._find(matrix)
        await self._check_fused(access, update)
        numbers, is_single = access.rows_of(row, rows, "add_get")
        keys = access.columns_of(columns)
        reading = access.reading(numbers, keys)
        requests = access.add_requests(row, rows, columns, values, update)
        for shard, request in requests:
            if shard in reading.parts:
                request.get = GetRequest(
                    matrix, self.worker, access.observed, reading.parts[shard], self._read_my_writes
                )

        def finish(replies: Replies) -> Numbers:
            for (shard, request), reply in zip(requests, replies, strict=True):
                if request.get is not None:
                    reading.take(shard, reply)
                    access.observed = max(access.observed, reply.clock)
            return reading.result[0] if is_single else reading.result

        return await (await self._call(requests, finish))

    async def _check_fused(self, access: MatrixAccess, update: UpdateFunction | None) -> None:
        """Raise an error for a wrong ``update=`` of an add, before anything is added."""
        if update is not None:
            self._check_function(update, UpdateFunction, "add(update=)")
            if not update.checks_when_run:
                await self._check_blocks(access, update, access.function_parts(update))

    # -- clocks ----------------------------------------------------------------------------------------

    async def clock(self, matrix: str | None = None) -> int:
        """Tell the shards that this worker has finished an iteration on a matrix; return the minimum clock.

        ``matrix=None``: on all matrices that were made or used in this process, one after the other; return the lowest
        of their minimum clocks, or −1 if there is no matrix. Raises OutOfTurn where BSP does not allow it.
        """
        names = [matrix] if matrix is not None else self._directory.names()
        lowest = -1
        for name in names:
            access = self._matrices.get(name) or await self._find(name)
            requests = [(shard, ClockRequest(name, self.worker, access.observed)) for shard in access.shards]
            call = await self._call(requests, list)
            try:
                moved = max(await call)
            except asyncio.CancelledError:  # The shards count the clock all the same.
                self._has_clocked(name)
                raise
            self._has_clocked(name)
            access.observed = max(access.observed, moved)
            lowest = moved if lowest < 0 else min(lowest, moved)
        return lowest

    def _has_clocked(self, name: str) -> None:
        self._clocks[name] = self.clock_of(name) + 1
        self._further()

    async def barrier(self, t: int | None = None) -> None:
        """Wait until every worker has arrived at barrier ``t``: 0, 1, 2, …, one after the other; None: the next one.

        Raises OutOfTurn for any other barrier than the next one.
        """
        number = -1 if t is None else whole_number("client.barrier(t)", t, 0, error=OutOfTurn)
        arrival = await self._call([(0, ArriveRequest(self.worker, number))], _nothing)
        self._arrived += 1
        self._further()
        await arrival

    # -- functions -------------------------------------------------------------------------------------

    async def update(self, function: UpdateFunction) -> None:
        """Run a psf that changes parameters, on the shards. It waits for no clock, and moves none.

        Raises OutOfRange, RowsInDifferentBlocks, ParameterServerError; then nothing has changed.
        """
        self._check_function(function, UpdateFunction, "update")
        access = self._matrices.get(function.matrix) or await self._find(function.matrix)
        parts = access.function_parts(function)
        await self._check_blocks(access, function, parts)
        await (await self._call(access.requests(UpdateRequest, parts, function), _nothing))

    async def _check_blocks(
        self, access: MatrixAccess, function: UpdateFunction, parts: dict[int, list[tuple[int, Part]]]
    ) -> None:
        if function.checks_blocks:
            asked = access.requests(UpdateRequest, parts, function, True)
            replies: list[list[Result]] = await (await self._call(asked, list))
            function.check_together([check for reply in replies for check in reply])

    async def aggregate(self, function: GetFunction) -> Result:
        """Run a psf that computes a result from parameters, on the shards; return the result. It waits for no clock.

        Raises OutOfRange, RowsInDifferentBlocks, ParameterServerError.
        """
        self._check_function(function, GetFunction, "aggregate")
        access = self._matrices.get(function.matrix) or await self._find(function.matrix)
        parts = access.function_parts(function)

        def finish(replies: Sequence[list[Result]]) -> Result:
            by_block = {
                block: result
                for of_shard, reply in zip(parts.values(), replies, strict=True)
                for (block, _), result in zip(of_shard, reply, strict=True)
            }
            return function.merge([by_block[block] for block in sorted(by_block)])

        return await (await self._call(access.requests(AggregateRequest, parts, function), finish))

    def _check_function(self, function: object, kind: type, call: str) -> None:
        if not isinstance(function, kind):
            made = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
            raise ParameterServerError(
                f"client.{call}: expected a psf such as {'psf.Axpy(…)' if kind is UpdateFunction else 'psf.Sum(…)'}, "
                f"derived from {kind.__name__}, given {made}"
            )

    # -- matrices --------------------------------------------------------------------------------------

    async def create_matrix(self, name: str, **settings: Any) -> None:
        """Make a matrix, as ``server.create_matrix`` does; nothing happens if it exists with the same settings.

        Raises ConfigurationError for wrong settings, ParameterServerError if it exists with other settings.
        """
        self.heartbeat()
        await self.join()
        await self._directory.create(Matrix.of(name, settings))

    async def _find(self, name: str) -> MatrixAccess:
        self._check_open()
        await self.join()
        matrix, partitioning = await self._directory.find(name)
        access = self._matrices[name] = MatrixAccess(matrix, partitioning, self.worker, with_own=self._read_my_writes)
        access.observed = self._observed_at_join.get(name, -1)
        return access

    # -- checkpoints of a flow -------------------------------------------------------------------------

    def counted_clocks(self) -> dict[str, int]:
        """Return this worker's clocks on the matrices whose clocks make workers wait, and its count of barriers."""
        clocks = {
            name: self.clock_of(name)
            for name in self._directory.names()
            if not isinstance(self._directory.matrix(name).consistency, ASP)
        }
        return {_BARRIERS: self._arrived, **clocks} if self._arrived else clocks

    def call_when_further(self, further: Callable[[], None]) -> None:
        """Call ``further`` whenever one of the counted clocks has grown."""
        self._further = further

    def pass_barrier(self, checkpoint: int) -> None:
        """Tell the shards that this worker's later requests are not part of this checkpoint."""
        for link in self._links:
            link.send(PassBarrier(self.worker, checkpoint))

    # -- inside ----------------------------------------------------------------------------------------

    async def _call(self, requests: Sequence[tuple[int, Request[object]]], finish: Callable[[Replies], T]) -> Call[T]:
        """Begin a call, show its writes to the cache, and send its requests."""
        await self._begin()
        if self._cache.is_on:
            self._show_writes(requests)
        try:
            return self._send(requests, finish)
        except BaseException:
            self._cache.clear()  # It is unknown which requests were applied.
            raise

    def _show_writes(self, requests: Sequence[tuple[int, Request[object]]]) -> None:
        """Show writes in the cached rows, when the writes are sent and not before: a call may be cancelled."""
        for _, request in requests:
            update = request.update if isinstance(request, AddRequest) else request
            if isinstance(update, UpdateRequest) and not update.only_check:
                self._cache.invalidate(update.matrix)
            elif isinstance(request, AddRequest) and (access := self._matrices[request.matrix]).own_adds_show:
                for block, row, columns, values in request.parts:
                    of_block = access.partitioning.blocks[block].columns
                    whole = slice(of_block.start, of_block.stop)
                    self._cache.own_add(request.matrix, row, whole if columns is None else columns, values)


def _nothing(replies: Replies) -> None:
    return None
