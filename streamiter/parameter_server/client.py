"""A worker's client: all calls of a worker to a parameter server.

A call names rows and columns of a matrix. ``rows.MatrixAccess`` splits the call into a request for each shard;
``Participation`` sends the requests; the client puts the replies together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, final

import numpy.typing as npt

from streamiter.errors import OutOfTurn, ParameterServerError
from streamiter.parameter_server.calls import Call, Heartbeats, Participation, Replies, ShardLink
from streamiter.parameter_server.consistency import ASP
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import GetFunction, Part, Result, UpdateFunction
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    ArriveRequest,
    ClockRequest,
    GetPart,
    GetReply,
    GetRequest,
    PassBarrier,
    Request,
)
from streamiter.parameter_server.rows import CachedRows, MatrixAccess, MatrixDirectory, MatrixRead, RowRead
from streamiter.parameter_server.storage.block import Numbers
from streamiter.values.numbers import whole_number

T = TypeVar("T")
R = TypeVar("R")

# Enough for a call to every shard of a large server at a time. Of calls that do not wait there is never more than one.
MAX_CALLS: Final = 64

# The key of the count of barriers among the clocks of matrices, none of which has an empty name.
_BARRIERS: Final = ""


def _ignore() -> None:
    pass


@final
class Client:
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
        self.worker = worker
        self._directory = directory
        limit = whole_number("client(max_calls=)", max_calls, 1)
        self._read_my_writes = read_my_writes
        self._cache = CachedRows(cache_bytes, read_my_writes=read_my_writes)
        self._part = Participation(worker, links, limit, heartbeats, on_left)
        self._further: Callable[[], None] = _ignore
        self._arrived = 0
        """The number of barriers at which this worker has arrived."""
        self._matrices: dict[str, MatrixAccess] = {}
        if joins:
            self._part.begin_to_join()

    # -- joining and leaving ---------------------------------------------------------------------------

    async def join(self) -> None:
        """Return when the worker has joined on all shards: at once in this process. Every call joins first."""
        await self._part.join()

    @property
    def has_left(self) -> bool:
        """Whether this worker has left."""
        return self._part.has_left

    def clock_of(self, matrix: str) -> int:
        """Return this worker's clock on a matrix: the minimum clock when it joined, plus one for each ``clock``."""
        return self._part.clocks.get(matrix, 0)

    def heartbeat(self) -> None:
        """Tell the server that this worker is alive; every other call does so, too."""
        self._part.heartbeat()

    async def leave(self, reason: str = "it has left") -> None:
        """Leave: other workers do not wait for this worker any longer. What it has added stays."""
        if not self._part.has_left:
            self._cache.clear()
            await self._part.leave(reason)

    def left(self, reason: str) -> None:
        """Note that the server has made this worker leave."""
        self._part.left(reason)
        self._cache.clear()

    def go_back(self, clocks: Mapping[str, int]) -> None:
        """The shards went back to a snapshot: take over the worker's clocks in it, by matrix; empty the cache."""
        self._part.go_back(clocks)
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
        reply = await self._part.ask(block.shard, request)
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
        if self._cache.is_on:
            cached = self._cache.find(matrix, numbers, keys, self.clock_of(matrix))
            if cached is not None:
                self._part.heartbeat()
                return Call((), lambda replies: cached[0] if is_single else cached)
            began = self._cache.begin(matrix, numbers, keys)
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
                self._cache.keep(began, reading.result, replies)
            return reading.result[0] if is_single else reading.result

        return await self._send(access.get_requests(reading), finish)

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

        ``update`` is a function that runs on the matrix in the same step (not under BSP: see ``on_clock``). Raises
        OutOfTurn, UnknownMatrix, OutOfRange; then nothing has been added.
        """
        access = self._matrices.get(matrix) or await self._find(matrix)
        if row is None or rows is not None or update is not None or self._cache.is_on:
            await self._check_fused(access, update)
            requests = access.add_requests(row, rows, columns, values, update)
            return await (await self._send(requests, _nothing))
        row = access.partitioning.checked_row(row)
        keys = access.columns_of(columns)
        given = access.values_of(values, (access.width(keys),), "add")
        slices = access.partitioning.split(row, keys)
        if len(slices) != 1 or not isinstance(slices[0].positions, slice):
            adds = access.adds(access.parts_of_row(row, slices, given))
            return await (await self._send(adds, _nothing))
        block = slices[0].block
        part = AddPart(block.number, row, slices[0].columns, given)
        await self._part.ask(block.shard, AddRequest(matrix, self.worker, access.observed, (part,)))
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
    ) -> Call[None]:
        """Begin to add, and return a handle. ``values`` must not change before the handle is done.

        The errors of ``add`` are raised here or by the handle.
        """
        access = self._matrices.get(matrix) or await self._find(matrix)
        await self._check_fused(access, update)
        return await self._send(access.add_requests(row, rows, columns, values, update), _nothing)

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

        return await (await self._send(requests, finish))

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
            call = await self._send(requests, list)
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
        self._part.clocks[name] = self.clock_of(name) + 1
        self._further()

    async def barrier(self, t: int | None = None) -> None:
        """Wait until every worker has arrived at barrier ``t``: 0, 1, 2, …, one after the other; None: the next one.

        Raises OutOfTurn for any other barrier than the next one.
        """
        number = -1 if t is None else whole_number("client.barrier(t)", t, 0, error=OutOfTurn)
        arrival = await self._send([(0, ArriveRequest(self.worker, number))], _nothing)
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
        await (await self._send(access.update_requests(function, parts), _nothing))

    async def _check_blocks(
        self, access: MatrixAccess, function: UpdateFunction, parts: dict[int, list[tuple[int, Part]]]
    ) -> None:
        if function.checks_blocks:
            asked = access.update_requests(function, parts, only_check=True)
            replies: list[list[Result]] = await (await self._send(asked, list))
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

        return await (await self._send(access.aggregate_requests(function, parts), finish))

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
        self._part.heartbeat()
        await self.join()
        await self._directory.create(Matrix.of(name, settings))

    async def _find(self, name: str) -> MatrixAccess:
        self._part.check_open()
        await self.join()
        matrix, partitioning = await self._directory.find(name)
        access = self._matrices[name] = MatrixAccess(matrix, partitioning, self.worker, with_own=self._read_my_writes)
        access.observed = self._part.observed_at_join.get(name, -1)
        self._cache.make_known(matrix, partitioning)
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
        for link in self._part.links:
            link.send(PassBarrier(self.worker, checkpoint))

    # -- inside ----------------------------------------------------------------------------------------

    async def _send(self, requests: Sequence[tuple[int, Request[object]]], finish: Callable[[Replies], T]) -> Call[T]:
        """Begin a call, show its writes to the cache, and send its requests."""
        await self._part.begin()
        if self._cache.is_on:
            self._cache.show_writes(requests)
        try:
            return self._part.send(requests, finish)
        except BaseException:
            self._cache.clear()  # It is unknown which requests were applied.
            raise


def _nothing(replies: Replies) -> None:
    return None
