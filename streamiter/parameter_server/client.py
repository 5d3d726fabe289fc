"""What a worker holds of a parameter server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import numpy.typing as npt

from streamiter.errors import OutOfTurn, ParameterServerError
from streamiter.numbers import whole_number
from streamiter.parameter_server.calls import Call, ShardLink
from streamiter.parameter_server.consistency.models import ASP
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
from streamiter.parameter_server.participation import Heartbeats, Participation
from streamiter.parameter_server.psf.function import GetFunction, UpdateFunction
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    ArriveRequest,
    ClockRequest,
    GetPart,
    GetReply,
    GetRequest,
    PassBarrier,
)
from streamiter.parameter_server.rows import CachedRows, MatrixAccess, MatrixRead, RowRead
from streamiter.parameter_server.subscriptions import Subscription

if TYPE_CHECKING:
    from streamiter.parameter_server.server import MatrixDirectory

__all__ = ["MAX_CALLS", "Client"]

T = TypeVar("T")

Numbers = npt.NDArray[Any]

# Enough to have a call to every shard of a large server under way; of calls that do not wait there is never more than
# one.
MAX_CALLS: Final = 64

# Beside the clocks of matrices, none of which has an empty name.
_BARRIERS: Final = ""


def _nobody_asks() -> None:
    pass


@final
class Client:
    """One worker's access to the matrices of a server; used in one event loop.

    Made by ``server.client(worker=…)``. A call whose condition holds is answered directly. ``row`` is one row: values
    have the shape (columns,). ``rows`` are several: (rows, columns). ``columns=None`` means all of them. Columns may
    come in any order, and twice. Arrays that are read have the matrix's dtype, and are the caller's. Values that are
    added become that dtype (floats do not become int64); one number stands for all.

    Errors are :class:`~streamiter.errors.ParameterServerError` and what derives from it: every call raises
    WorkerHasLeft once the worker has left, and UnknownMatrix for a matrix that there is not. A call that is cancelled
    while it waits takes back a get, and nothing else: what was sent happens.

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
        self._further: Callable[[], None] = _nobody_asks
        self._arrived = 0
        """How many barriers this worker has come to."""
        self._matrices: dict[str, MatrixAccess] = {}
        self._subscriptions: dict[int, Subscription] = {}
        self._subscribed = 0
        if joins:
            self._part.begin_to_join()

    # -- joining and leaving ---------------------------------------------------------------------------

    async def join(self) -> None:
        """Return when the shards know of this worker: at once in this process. Every call does so first."""
        await self._part.join()

    @property
    def has_left(self) -> bool:
        """Whether this worker takes part no more."""
        return self._part.has_left

    def clock_of(self, matrix: str) -> int:
        """Where this worker stands on a matrix: the minimum clock when it joined, and one more for each ``clock``."""
        return self._part.clocks.get(matrix, 0)

    def heartbeat(self) -> None:
        """Say that this worker is alive; every other call says so, too."""
        self._part.heartbeat()

    async def leave(self, reason: str = "it has left") -> None:
        """Take part no more: the others do not wait for this worker any longer. What it has added stays.

        Raises RolledBack where the shards have gone back to a snapshot: then the worker still takes part.
        """
        if not self._part.has_left:
            for subscription in list(self._subscriptions.values()):
                subscription.close()
            self._cache.clear()
            await self._part.leave(reason)

    def left(self, reason: str) -> None:
        """The server has let this worker leave."""
        self._part.left(reason)
        self._cache.clear()

    def go_back(self, clocks: Mapping[str, int]) -> None:
        """The shards went back to a snapshot: stand where it says, by matrix, with nothing in the cache."""
        self._part.go_back(clocks)
        self._arrived = 0
        self._cache.clear()
        for access in self._matrices.values():
            access.observed = -1

    # -- reading ---------------------------------------------------------------------------------------

    async def get(
        self, matrix: str, *, row: int | None = None, rows: Sequence[int] | None = None, columns: Any = None
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
        values: Numbers = reply.values[0]
        return values

    async def start_get(
        self, matrix: str, *, row: int | None = None, rows: Sequence[int] | None = None, columns: Any = None
    ) -> Call[Numbers]:
        """Begin to read: gives a handle; ``await handle`` gives what ``get`` does, also more than once.

        Waits itself only while ``max_calls`` are under way. What ``get`` raises comes from here, or from the handle.
        Who is cancelled while it awaits the handle gives the read up.
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
        """Have the shards read; ``began``: the rows that the cache is to be given, one for each row of the result."""

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
        columns: Any = None,
        values: Any,
        update: UpdateFunction | None = None,
    ) -> None:
        """Add values; of a column that is named twice, both count. Under BSP they are applied when the clock moves.

        ``update`` runs on the matrix in the same step, on the blocks that it names (not under BSP: see ``on_clock``).
        Raises OutOfTurn, UnknownMatrix, OutOfRange; then nothing has been added.
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
        columns: Any = None,
        values: Any,
        update: UpdateFunction | None = None,
    ) -> Call[None]:
        """Begin to add: gives a handle. ``values`` must not change before it is done.

        What ``add`` raises comes from here, or from the handle.
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
        columns: Any = None,
        values: Any,
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

        def finish(replies: Sequence[Any]) -> Numbers:
            for (shard, request), reply in zip(requests, replies, strict=True):
                if request.get is not None:
                    reading.take(shard, reply)
                    access.observed = max(access.observed, reply.clock)
            return reading.result[0] if is_single else reading.result

        return await (await self._send(requests, finish))

    async def _check_fused(self, access: MatrixAccess, update: UpdateFunction | None) -> None:
        """Raise what is wrong with a function beside an add, before anything is added."""
        if update is not None:
            self._check_function(update, UpdateFunction, "add(update=)")
            if not update.checks_when_run:
                await self._check_blocks(access, update, access.function_parts(update))

    # -- clocks ----------------------------------------------------------------------------------------

    async def clock(self, matrix: str | None = None) -> int:
        """Say that this worker has finished an iteration on a matrix; gives the minimum clock.

        ``matrix=None``: on all matrices that were made or used in this process, one after the other; gives the lowest
        of their minimum clocks, −1 where there is none. Raises OutOfTurn where BSP does not allow it.
        """
        names = [matrix] if matrix is not None else self._directory.names()
        lowest = -1
        for name in names:
            access = self._matrices.get(name) or await self._find(name)
            requests = [(shard, ClockRequest(name, self.worker, access.observed)) for shard in access.shards]
            call = await self._send(requests, list)
            try:
                moved = max(await call)
            except asyncio.CancelledError:  # What was sent happens all the same.
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
        """Wait until every worker is at barrier ``t``: 0, 1, 2, …; None: the next one. Raises OutOfTurn for others."""
        number = -1 if t is None else whole_number("client.barrier(t)", t, 0, error=OutOfTurn)
        arrival = await self._send([(0, ArriveRequest(self.worker, number))], _nothing)
        self._arrived += 1
        self._further()
        await arrival

    # -- functions -------------------------------------------------------------------------------------

    async def update(self, function: UpdateFunction) -> None:
        """Run a psf that changes parameters, where they are. It waits for no clock, and moves none.

        Raises OutOfRange, RowsInDifferentBlocks, ParameterServerError; then nothing has changed.
        """
        self._check_function(function, UpdateFunction, "update")
        access = self._matrices.get(function.matrix) or await self._find(function.matrix)
        parts = access.function_parts(function)
        await self._check_blocks(access, function, parts)
        await (await self._send(access.update_requests(function, parts), _nothing))

    async def _check_blocks(
        self, access: MatrixAccess, function: UpdateFunction, parts: dict[int, list[tuple[int, Any]]]
    ) -> None:
        if function.checks_blocks:
            asked = access.update_requests(function, parts, only_check=True)
            replies: list[list[Any]] = await (await self._send(asked, list))
            function.check_together([check for reply in replies for check in reply])

    async def aggregate(self, function: GetFunction) -> Any:
        """Compute something from parameters, where they are; gives what the psf says. It waits for no clock.

        Raises OutOfRange, RowsInDifferentBlocks, ParameterServerError.
        """
        self._check_function(function, GetFunction, "aggregate")
        access = self._matrices.get(function.matrix) or await self._find(function.matrix)
        parts = access.function_parts(function)

        def finish(replies: Sequence[list[Any]]) -> Any:
            by_block = {
                block: result
                for of_shard, reply in zip(parts.values(), replies, strict=True)
                for (block, _), result in zip(of_shard, reply, strict=True)
            }
            return function.merge([by_block[block] for block in sorted(by_block)])

        return await (await self._send(access.aggregate_requests(function, parts), finish))

    def _check_function(self, function: Any, kind: type, call: str) -> None:
        if not isinstance(function, kind):
            made = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
            raise ParameterServerError(
                f"client.{call}: expected a psf such as {'psf.Axpy(…)' if kind is UpdateFunction else 'psf.Sum(…)'}, "
                f"derived from {kind.__name__}, given {made}"
            )

    # -- following -------------------------------------------------------------------------------------

    def subscribe(self, matrix: str, *, rows: Sequence[int] | None = None) -> Subscription:
        """Follow some rows, None: all: ``async for change in client.subscribe("w")``; see :class:`Subscription`."""
        self._part.heartbeat()
        number = self._subscribed
        self._subscribed += 1
        subscription = Subscription(
            matrix,
            self._part.links,
            self._find_followed,
            worker=self.worker,
            number=number,
            rows=rows,
            on_ended=lambda number: self._subscriptions.pop(number, None),
        )
        self._subscriptions[number] = subscription
        return subscription

    async def _find_followed(self, name: str) -> tuple[Matrix, MatrixPartitioning]:
        access = self._matrices.get(name) or await self._find(name)
        return access.matrix, access.partitioning

    # -- matrices --------------------------------------------------------------------------------------

    async def create_matrix(self, name: str, **settings: Any) -> None:
        """The same as ``server.create_matrix``: nothing happens if it is there with the same settings.

        Raises ConfigurationError for settings that cannot be, ParameterServerError for others than it was made with.
        """
        self._part.heartbeat()
        await self.join()
        await self._directory.create(Matrix.of(name, settings))

    async def _find(self, name: str) -> MatrixAccess:
        self._part.check_open()
        await self.join()
        matrix, partitioning = await self._directory.find(name)
        access = self._matrices[name] = MatrixAccess(
            matrix, partitioning, self.worker, with_own=self._read_my_writes
        )
        access.observed = self._part.observed_at_join.get(name, -1)
        self._cache.make_known(matrix, partitioning)
        return access

    # -- checkpoints of a flow -------------------------------------------------------------------------

    def counted_clocks(self) -> dict[str, int]:
        """Where this worker stands on the matrices whose clocks make workers wait for each other, and in barriers."""
        clocks = {
            name: self.clock_of(name)
            for name in self._directory.names()
            if not isinstance(self._directory.matrix(name).consistency, ASP)
        }
        return {_BARRIERS: self._arrived, **clocks} if self._arrived else clocks

    def call_when_further(self, further: Callable[[], None]) -> None:
        """Call this whenever one of the counted clocks has grown."""
        self._further = further

    def pass_barrier(self, checkpoint: int) -> None:
        """What this worker sends from now on is not part of this checkpoint."""
        for link in self._part.links:
            link.send(PassBarrier(self.worker, checkpoint))

    # -- inside ----------------------------------------------------------------------------------------

    async def _send(
        self, requests: Sequence[tuple[int, Any]], finish: Callable[[Sequence[Any]], T]
    ) -> Call[T]:
        """Send one request to each shard; the call is under way until all have replied."""
        await self._part.begin()
        if self._cache.is_on:
            self._cache.show_writes(requests)
        try:
            return self._part.send(requests, finish)
        except BaseException:
            self._cache.clear()  # nobody knows which of them has counted
            raise


def _nothing(replies: Sequence[Any]) -> None:
    return None
