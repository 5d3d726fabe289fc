"""At a client: the rows it follows, put together from what its shards tell."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ParameterServerError, RolledBack
from streamiter.parameter_server.changes import Changes, NextChanges, RowChange, Unsubscribe
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange, Partitioning
from streamiter.parameter_server.row_assembly import RowAssembly
from streamiter.parameter_server.transport.link import ShardLink
from streamiter.parameter_server.waiting import Waiting

__all__ = ["Subscription"]


@final
class Subscription:
    """``async for change in subscription``: each row first as it is now, then as it is when it has changed.

    Under BSP and SSP, changes are told when the minimum clock moves, under ASP after each call. Of a row that changes
    several times while the subscriber is busy, it is told once. What waits for it is bounded: on each shard a byte for
    each row and block, and one reply. The newest values of a row are always told in the end. When the server goes back
    to a snapshot, all rows are told again.

    It ends when the client leaves or the server is closed, and with ``close``; ``async with subscription`` closes it.
    One that is neither closed nor read goes on to cost those bytes until the client leaves. The first change to be
    asked for raises UnknownMatrix or OutOfRange. An error of a shard is raised (it was lost: ShardLost; the server had
    this worker leave: WorkerHasLeft); whoever asks on gets all rows of that shard again, or the same error.

    A step that is cancelled loses nothing. Where rows lie in several blocks, a copy of each row that is followed is
    kept here, to put them together.
    """

    def __init__(
        self,
        matrix: str,
        links: Sequence[ShardLink],
        find: Callable[[str], Awaitable[tuple[Matrix, Partitioning]]],
        *,
        worker: int,
        number: int,
        rows: Sequence[int] | None = None,
        on_ended: Callable[[int], object] = lambda number: None,
    ) -> None:
        """``number`` is another for each subscription of the worker; ``rows``: None for all."""
        self._name = matrix
        self._links = links
        self._find = find
        self._worker = worker
        self._number = number
        self._wanted = rows
        self._on_ended = on_ended
        self._shards: list[_Shard] = []
        """Empty until it has begun."""
        self._rows: RowAssembly | None = None
        self._is_waited_for = False
        self._woken: asyncio.Future[None] | None = None
        self._has_ended = False

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> RowChange:
        """The next row that has changed."""
        if self._is_waited_for:
            raise ParameterServerError(
                f"subscription to matrix {self._name!r}: expected one task that waits for changes, given a second one; "
                "subscribe once more for it"
            )
        self._is_waited_for = True
        try:
            return await self._next()
        finally:
            self._is_waited_for = False

    async def _next(self) -> RowChange:
        if not self._shards and not self._has_ended:
            await self._begin()
        while True:
            self._collect()
            if self._rows is not None and self._rows.has_news:
                return self._rows.tell()
            if self._has_ended:
                raise StopAsyncIteration
            if not self._ask():
                await self._wait()

    async def _begin(self) -> None:
        matrix, partitioning = await self._find(self._name)
        blocks: Sequence[BlockRange] = partitioning.blocks
        wanted = None
        if self._wanted is not None:
            rows = sorted(set(partitioning.checked_rows(self._wanted)))
            blocks = [block for row in rows for block in partitioning.blocks_of_row(row)]
            wanted = np.array(rows, np.int64)
        self._rows = RowAssembly(matrix, partitioning)
        self._shards = [
            _Shard(self._links[number], wanted) for number in dict.fromkeys(block.shard for block in blocks)
        ]
        if not self._shards:
            self._end()  # of no rows

    def _collect(self) -> None:
        """Take what has come from the shards since they were asked."""
        for shard in self._shards:
            if (waiting := shard.waiting) is not None and waiting.is_settled:
                shard.waiting = None
                try:
                    self._take(shard, waiting.result())
                except RolledBack:
                    shard.number = 0  # it is asked anew at once: the subscriber has no clocks to go back to
                except ParameterServerError:
                    shard.number = 0
                    raise

    def _ask(self) -> bool:
        """Ask each shard that is not being asked already; whether something has come at once."""
        has_come = False
        for shard in self._shards:
            if shard.waiting is not None or self._has_ended:
                continue
            reply = shard.link.send(
                NextChanges(
                    self._name,
                    self._worker,
                    subscription=self._number,
                    rows=shard.wanted,
                    after=shard.number,
                )
            )
            if isinstance(reply, Waiting):
                shard.waiting = reply
                reply.when_settled(self._wake)
                has_come = has_come or reply.is_settled
            else:
                self._take(shard, reply)
                has_come = True
        return has_come

    def _take(self, shard: _Shard, changes: Changes) -> None:
        if changes.has_ended:
            self._end()
        elif self._rows is not None:
            shard.number = changes.number
            self._rows.take(changes)

    async def _wait(self) -> None:
        self._woken = asyncio.get_running_loop().create_future()
        try:
            await self._woken
        finally:
            self._woken = None

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """No more changes: who waits for one is told that it is the end. Nothing happens if it has ended before."""
        if self._has_ended:
            return
        self._rows = None
        self._end()
        for shard in self._shards:
            with contextlib.suppress(
                ParameterServerError
            ):  # a shard that is gone, or does not know of this worker
                shard.link.send(Unsubscribe(self._name, self._worker, subscription=self._number))

    async def aclose(self) -> None:
        """The same, for ``contextlib.aclosing``."""
        self.close()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        self._has_ended = True
        for shard in self._shards:
            waiting, shard.waiting = shard.waiting, None
            if waiting is not None:
                waiting.give_up()  # which wakes who waits for it
        self._on_ended(self._number)


class _Shard:
    """A shard that is asked for changes."""

    def __init__(self, link: ShardLink, wanted: npt.NDArray[np.int64] | None) -> None:
        self.link = link
        self.wanted = wanted
        self.number = 0
        """Of the last reply that has come."""
        self.waiting: Waiting[Changes] | None = None
