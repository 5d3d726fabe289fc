"""Subscriptions: clients follow rows of a matrix and are told when the rows change.

At a client, a ``Subscription`` asks each shard for changes and puts whole rows together (``RowAssembly``). On a shard,
``Subscriptions`` keeps one mark for each row and subscription: the row has changed since it was last sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import OutOfTurn, ParameterServerError, StreamiterError
from streamiter.parameter_server.calls import ShardLink, WaitingReply
from streamiter.parameter_server.consistency import ASP
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.requests import ChangedRows, Changes, NextChanges, RowChange, Unsubscribe
from streamiter.parameter_server.storage.block import Block, Columns, Numbers

if TYPE_CHECKING:
    from streamiter.parameter_server.matrix_shard import MatrixShard


@final
class Subscription:
    """``async for change in subscription``: each row with its current values, then again whenever it has changed.

    Under BSP and SSP, changes are sent when the minimum clock moves, under ASP after each call. A row that changes
    several times while the subscriber is busy is sent once, with its newest values. The memory of a subscription has a
    limit: on each shard one byte for each row and block, and one reply. When the server goes back to a snapshot, all
    rows are sent again.

    A subscription ends when the client leaves, when the server is closed, and with ``close``; ``async with
    subscription`` closes it. A subscription that is neither closed nor read keeps its memory until the client leaves.
    The first step raises UnknownMatrix or OutOfRange. An error of a shard is raised (ShardLost: the shard was lost;
    WorkerHasLeft: the server made this worker leave); the next step gets all rows of that shard again, or the same
    error.

    A step that is cancelled loses no change. If rows are stored in several blocks, the subscription keeps a copy of
    each followed row, to put its parts together.
    """

    def __init__(
        self,
        matrix: str,
        links: Sequence[ShardLink],
        find: Callable[[str], Awaitable[tuple[Matrix, MatrixPartitioning]]],
        *,
        worker: int,
        number: int,
        rows: Sequence[int] | None = None,
        on_ended: Callable[[int], object] = lambda number: None,
    ) -> None:
        """``number`` is unique among the subscriptions of the worker; ``rows`` None: all rows."""
        self._name = matrix
        self._links = links
        self._find = find
        self._worker = worker
        self._number = number
        self._wanted = rows
        self._on_ended = on_ended
        self._shards: list[_SubscribedShard] = []
        """Empty until the first step."""
        self._rows: RowAssembly | None = None
        self._is_waited_for = False
        self._woken: asyncio.Future[None] | None = None
        self._has_ended = False

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> RowChange:
        """Return the next row that has changed."""
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
                return self._rows.take_row()
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
            _SubscribedShard(self._links[number], wanted) for number in dict.fromkeys(block.shard for block in blocks)
        ]
        if not self._shards:
            self._end()  # The subscription is to no rows.

    def _collect(self) -> None:
        """Take the replies that have come from the shards."""
        for shard in self._shards:
            if (waiting := shard.waiting) is not None and waiting.is_settled:
                shard.waiting = None
                try:
                    self._take(shard, waiting.result())
                except ParameterServerError:
                    shard.number = 0
                    raise

    def _ask(self) -> bool:
        """Ask each shard that has answered the last question; return whether a reply has come at once."""
        has_come = False
        for shard in self._shards:
            if shard.waiting is not None or self._has_ended:
                continue
            reply = shard.link.send(
                NextChanges(self._name, self._worker, subscription=self._number, rows=shard.wanted, after=shard.number)
            )
            if isinstance(reply, WaitingReply):
                shard.waiting = reply
                reply.when_settled(self._wake)
                has_come = has_come or reply.is_settled
            else:
                self._take(shard, reply)
                has_come = True
        return has_come

    def _take(self, shard: _SubscribedShard, changes: Changes) -> None:
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
        """End the subscription, and the loop that waits for a change. Nothing happens if it has ended before."""
        if self._has_ended:
            return
        self._rows = None
        self._end()
        for shard in self._shards:
            # The shard may be gone, or not know this worker.
            with contextlib.suppress(ParameterServerError):
                shard.link.send(Unsubscribe(self._name, self._worker, subscription=self._number))

    async def aclose(self) -> None:
        """Close, as ``contextlib.aclosing`` calls it."""
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
                waiting.give_up()  # Wakes the task that waits for it.
        self._on_ended(self._number)


class _SubscribedShard:
    """A shard that a subscription asks for changes."""

    def __init__(self, link: ShardLink, wanted: Columns | None) -> None:
        self.link = link
        self.wanted = wanted
        self.number = 0
        """The number of the last reply that has come."""
        self.waiting: WaitingReply[Changes] | None = None


# The size of the values in one reply (at least one row): several times the cost of a message itself, and little
# compared with the parameters. The other rows are first in the next reply.
REPLY_BYTES: Final = 16 << 20


@final
class Subscriptions:
    """The subscriptions to the matrices of one shard: a pure data structure.

    For each row of each block a subscription has one mark (a byte): the row has changed since it was last sent. A reply
    has the values of the row at the moment of the reply. So a slow subscriber misses values in between, and needs no
    more memory than a fast one.

    Under BSP and SSP subscribers are told of changes whenever the minimum clock moves, under ASP after each request.
    A matrix with subscriptions tells them of its changes (``MatrixShard.followed``).
    """

    def __init__(self, matrix: Callable[[str], MatrixShard], *, reply_bytes: int = REPLY_BYTES) -> None:
        """``matrix`` returns a matrix of the shard, or raises UnknownMatrix."""
        self._matrix = matrix
        self._reply_bytes = reply_bytes
        self._followed: dict[str, FollowedMatrix] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return sum(len(followed.followers) for followed in self._followed.values())

    def next(self, request: NextChanges) -> Changes | WaitingReply[Changes]:
        """Return the changes that a subscription has not been sent yet, or a waiting reply. Raises UnknownWorker."""
        shard = self._matrix(request.matrix)
        if self._is_closed:
            return Changes(request.after, shard.model.tracker.get_min_clock(), has_ended=True)
        if request.worker >= 0:  # Below 0: the server itself.
            shard.model.tracker.check_worker_valid(request.worker)
        followed = self._followed.get(request.matrix)
        if followed is None:
            followed = self._followed[request.matrix] = FollowedMatrix(shard, self._reply_bytes)
            shard.followed = followed
        return followed.next(request)

    def unsubscribe(self, request: Unsubscribe) -> None:
        """End a subscription."""
        self._remove(request.matrix, (request.worker, request.subscription), None)

    def leave(self, worker: int, error: StreamiterError | None = None) -> None:
        """End all subscriptions of a worker; waiting replies fail with the error if one is given."""
        for matrix, followed in list(self._followed.items()):
            for key in [key for key in followed.followers if key[0] == worker]:
                self._remove(matrix, key, error)

    def reload(self) -> None:
        """The shard went back to a snapshot: send all rows again."""
        for followed in self._followed.values():
            followed.reload()

    def close(self) -> None:
        """End all subscriptions, and accept no new ones."""
        self._is_closed = True
        for matrix, followed in list(self._followed.items()):
            for key in list(followed.followers):
                self._remove(matrix, key, None)

    def _remove(self, matrix: str, key: tuple[int, int], error: StreamiterError | None) -> None:
        followed = self._followed.get(matrix)
        if followed is None or (follower := followed.followers.pop(key, None)) is None:
            return
        if not followed.followers:
            del self._followed[matrix]
            followed.shard.followed = None
        if (waiting := follower.waiting) is not None:
            follower.waiting = None
            if error is not None:
                waiting.fail(error)
            else:
                waiting.succeed(Changes(follower.number, followed.clock, has_ended=True))


@final
class FollowedMatrix:
    """The subscriptions to one matrix on a shard; the matrix tells it of its changes."""

    def __init__(self, shard: MatrixShard, reply_bytes: int) -> None:
        self.shard = shard
        self.followers: dict[tuple[int, int], _SubscriptionState] = {}
        """By worker and subscription."""
        self._tells_at_once = isinstance(shard.matrix.consistency, ASP)
        self._rows = RowsOfBlocks(shard.blocks)
        self._reply_bytes = reply_bytes
        self._changed = Marks(self._rows.count)
        """The rows that have changed since subscribers were last told."""

    @property
    def clock(self) -> int:
        """The minimum clock."""
        return self.shard.model.tracker.get_min_clock()

    def changed(self, block: int, rows: Sequence[int]) -> None:
        """These rows of a block have changed."""
        self._changed.add(self._rows.positions(block, rows))

    def applied(self) -> None:
        """A request has been applied completely."""
        if self._tells_at_once:
            self._tell()

    def clock_moved(self) -> None:
        """The minimum clock has moved, and its consequences have been applied."""
        self._tell()

    def reload(self) -> None:
        """All rows have changed."""
        self._changed.add(slice(0, self._rows.count))
        self._tell()

    def _tell(self) -> None:
        if not self._changed:
            return
        changed = self._changed.take()
        for follower in list(self.followers.values()):
            follower.mark(changed)
            if follower.has_news and (waiting := follower.waiting) is not None:
                follower.waiting = None
                waiting.succeed(self._changes(follower))

    def next(self, request: NextChanges) -> Changes | WaitingReply[Changes]:
        """Return the changes that a subscription has not been sent yet, or a waiting reply.

        An unknown subscription is a new one.
        """
        key = (request.worker, request.subscription)
        follower = self.followers.get(key)
        if follower is None:
            follower = self.followers[key] = _SubscriptionState(self._rows.mask(request.rows), request.after)
        if (earlier := follower.waiting) is not None:
            follower.waiting = None
            earlier.fail(
                OutOfTurn(
                    f"subscription {request.subscription} of worker {request.worker} to matrix {request.matrix!r}: "
                    "expected one call for changes at a time, given another while this one waited"
                )
            )
        follower.acknowledge(request.after)
        if follower.has_news:
            return self._changes(follower)
        follower.waiting = WaitingReply(follower.stop_waiting)
        return follower.waiting

    def _changes(self, follower: _SubscriptionState) -> Changes:
        taken = follower.take(self._rows, self._reply_bytes)
        return Changes(follower.number, self.clock, self._rows.read(taken))


@final
class _SubscriptionState:
    """One subscription on a shard: the rows to send, and the rows that were sent last."""

    def __init__(self, wanted: npt.NDArray[np.bool_], after: int) -> None:
        """``after`` is the number of the subscriber's last reply, from an earlier process of this shard; 0: none."""
        self.waiting: WaitingReply[Changes] | None = None
        self.number = after
        """The number of the last reply. It continues the numbers of an earlier process of this shard."""
        self._wanted = wanted
        self._sent: Positions = np.empty(0, np.intp)
        """The rows of the last reply, until the subscriber has acknowledged it."""
        self._news = Marks(len(wanted))
        self.acknowledge(0)
        self._turn = 0
        """The position from which the next reply begins."""

    @property
    def has_news(self) -> bool:
        """Whether there are rows to send."""
        return bool(self._news)

    def stop_waiting(self) -> None:
        """The subscriber's call was given up; it will ask again, or unsubscribe."""
        self.waiting = None

    def mark(self, positions: Positions) -> None:
        """Mark these rows, ascending, as changed."""
        self._news.add(positions[self._wanted[positions]])

    def acknowledge(self, after: int) -> None:
        """Reply ``after`` is the last one that has arrived at the subscriber; 0: none, so all rows are sent."""
        if after == 0:
            self._news.add(np.flatnonzero(self._wanted))
        elif after != self.number:
            self._news.add(self._sent)
        self._sent = self._sent[:0]

    def take(self, rows: RowsOfBlocks, limit_bytes: int) -> Positions:
        """Return the rows of the next reply.

        Each reply begins where the last one ended, so no row is left out for ever where many rows change all the time.
        """
        news = self._news.take()
        cut = int(np.searchsorted(news, self._turn))
        in_turn = np.concatenate((news[cut:], news[:cut]))
        size_bytes = np.cumsum(rows.size_bytes(in_turn))
        count = max(1, int(np.searchsorted(size_bytes, limit_bytes, side="right")))
        self._turn = int(in_turn[count - 1]) + 1
        self._news.add(np.sort(in_turn[count:]))
        self._sent = np.sort(in_turn[:count])
        self.number += 1
        return self._sent


Positions: TypeAlias = "npt.NDArray[np.intp]"


@final
class RowsOfBlocks:
    """Numbers the rows of several blocks: each row of each block has a position, block by block, row by row."""

    def __init__(self, blocks: Mapping[int, Block]) -> None:
        self._blocks = blocks
        self._numbers = list(blocks)
        self._starts = np.cumsum([0, *(len(block.rows) for block in blocks.values())])
        self._start_of = dict(zip(self._numbers, self._starts.tolist(), strict=False))
        self._row_bytes = np.array([len(block.columns) * block.dtype.itemsize for block in blocks.values()], np.int64)
        self.count = int(self._starts[-1])

    def positions(self, block: int, rows: Sequence[int]) -> slice | list[int]:
        """Return the positions of these rows of a block."""
        offset = self._start_of[block] - self._blocks[block].rows.start
        if isinstance(rows, range) and rows.step == 1:
            return slice(rows.start + offset, rows.stop + offset)
        return [row + offset for row in rows]

    def mask(self, rows: Columns | None) -> npt.NDArray[np.bool_]:
        """Return an array that is True at the positions of these rows; None: at all positions."""
        if rows is None:
            return np.ones(self.count, np.bool_)
        mask = np.zeros(self.count, np.bool_)
        for number, block in self._blocks.items():
            here = rows[(rows >= block.rows.start) & (rows < block.rows.stop)]
            mask[here + (self._start_of[number] - block.rows.start)] = True
        return mask

    def size_bytes(self, positions: Positions) -> npt.NDArray[np.int64]:
        """Return the size of the values of each of these rows, in bytes."""
        return self._row_bytes[self._index_of_block(positions)]

    def read(self, positions: Positions) -> list[ChangedRows]:
        """Return the current values of these rows; ``positions`` are ascending."""
        found: list[ChangedRows] = []
        indices, begins = np.unique(self._index_of_block(positions), return_index=True)
        ends = [*begins[1:].tolist(), len(positions)]
        for index, begin, end in zip(indices.tolist(), begins.tolist(), ends, strict=True):
            number = self._numbers[index]
            block = self._blocks[number]
            rows = positions[begin:end].astype(np.int64) + (block.rows.start - int(self._starts[index]))
            values: Numbers = np.empty((len(rows), len(block.columns)), block.dtype)
            for row, out in zip(rows.tolist(), values, strict=True):
                block.get(row, None, out)
            found.append(ChangedRows(number, rows, values))
        return found

    def _index_of_block(self, positions: Positions) -> Positions:
        return np.searchsorted(self._starts, positions, side="right") - 1


@final
class Marks:
    """A set of positions, with one byte for each possible position; fast if marked positions are close together."""

    def __init__(self, count: int) -> None:
        self._is_marked = np.zeros(count, np.bool_)
        self._low, self._high = count, 0
        """All marked positions are from ``_low`` to below ``_high``."""

    def __bool__(self) -> bool:
        return self._low < self._high

    def add(self, positions: slice | list[int] | Positions) -> None:
        """Mark these positions; an array is ascending."""
        if isinstance(positions, slice):
            low, high = positions.start, positions.stop
        elif isinstance(positions, list):
            low, high = min(positions, default=0), max(positions, default=-1) + 1
        else:
            low, high = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
        if low < high:
            self._is_marked[positions] = True
            self._low, self._high = min(low, self._low), max(high, self._high)

    def take(self) -> Positions:
        """Return all marked positions, ascending, and unmark them."""
        low, high = self._low, self._high
        if low >= high:
            return np.empty(0, np.intp)
        span = self._is_marked[low:high]
        positions = np.flatnonzero(span) + low
        span[:] = False
        self._low, self._high = len(self._is_marked), 0
        return positions


@final
class RowAssembly:
    """Puts followed rows together from the parts that shards send, in the order in which the rows first changed.

    A row is complete when the parts of all its blocks have come. If rows are stored in several blocks, a copy of each
    row is kept.
    """

    def __init__(self, matrix: Matrix, partitioning: MatrixPartitioning) -> None:
        self._matrix = matrix
        self._partitioning = partitioning
        self._rows: dict[int, Numbers] = {}
        self._missing: dict[int, set[int]] = {}
        """The blocks whose parts have not come yet, by row."""
        self._news: dict[int, dict[int, int]] = {}
        """Complete rows that have changed: by row and block, the clock of the change."""
        self._parts: dict[int, dict[int, int]] = {}
        """The same for rows that are not complete."""

    @property
    def has_news(self) -> bool:
        """Whether ``take_row`` has a row to return."""
        return bool(self._news)

    def take(self, changes: Changes) -> None:
        """Take the changes of a shard."""
        for number, rows, values in changes.parts:
            columns = self._partitioning.blocks[number].columns
            is_whole = len(columns) == self._matrix.columns
            for row, part in zip(rows.tolist(), values, strict=True):
                if is_whole:
                    # If a subscriber keeps the row, it must not keep the whole reply in memory.
                    self._rows[row] = part if len(rows) == 1 else part.copy()
                    self._news.setdefault(row, {})[number] = changes.clock
                else:
                    self._put(row, number, columns, part, changes.clock)

    def _put(self, row: int, block: int, columns: range, part: Numbers, clock: int) -> None:
        if row not in self._rows:
            self._rows[row] = np.empty(self._matrix.columns, self._matrix.numpy_dtype)
            self._missing[row] = {one.number for one in self._partitioning.blocks_of_row(row)}
        self._rows[row][columns.start : columns.stop] = part
        missing = self._missing.get(row)
        if missing is None:
            self._news.setdefault(row, {})[block] = clock
            return
        missing.discard(block)
        self._parts.setdefault(row, {})[block] = clock
        if not missing:
            del self._missing[row]
            self._news[row] = self._parts.pop(row)

    def take_row(self) -> RowChange:
        """Return the complete row that changed first."""
        row = next(iter(self._news))
        clocks = self._news.pop(row)
        blocks = [self._partitioning.blocks[number].columns for number in clocks]
        start, stop = min(columns.start for columns in blocks), max(columns.stop for columns in blocks)
        is_whole = stop - start == self._matrix.columns
        is_in_one_block = len(blocks[0]) == self._matrix.columns
        values = self._rows.pop(row) if is_in_one_block else self._rows[row].copy()
        return RowChange(self._matrix.name, row, min(clocks.values()), None if is_whole else range(start, stop), values)
