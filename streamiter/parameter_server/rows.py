"""Rows on the client: assembled of blocks, and cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from streamiter.numbers import whole_number
from streamiter.parameter_server.consistency.models import BSP, SSP, Consistency
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.requests import (
    AddRequest,
    ChangedRows,
    Changes,
    GetReply,
    RowChange,
    UpdateRequest,
)
from streamiter.parameter_server.storage.block import Block, Columns, Numbers

__all__ = [
    "CachedRows",
    "Marks",
    "Positions",
    "RowAssembly",
    "RowCache",
    "RowRead",
    "RowsOfBlocks",
    "cache_rules",
]


Positions: TypeAlias = "npt.NDArray[np.intp]"


@final
class RowsOfBlocks:
    """Gives each row of each block a position: block by block, row by row.

    The rows of several blocks, numbered through.
    """

    def __init__(self, blocks: Mapping[int, Block]) -> None:
        self._blocks = blocks
        self._numbers = list(blocks)
        self._starts = np.cumsum([0, *(len(block.rows) for block in blocks.values())])
        self._start_of = dict(zip(self._numbers, self._starts.tolist(), strict=False))
        self._row_bytes = np.array(
            [len(block.columns) * block.dtype.itemsize for block in blocks.values()], np.int64
        )
        self.count = int(self._starts[-1])

    def positions(self, block: int, rows: Sequence[int]) -> slice | list[int]:
        """Where these rows of a block stand."""
        offset = self._start_of[block] - self._blocks[block].rows.start
        if isinstance(rows, range) and rows.step == 1:
            return slice(rows.start + offset, rows.stop + offset)
        return [row + offset for row in rows]

    def mask(self, rows: npt.NDArray[np.int64] | None) -> npt.NDArray[np.bool_]:
        """True where one of these rows stands; None: everywhere."""
        if rows is None:
            return np.ones(self.count, np.bool_)
        mask = np.zeros(self.count, np.bool_)
        for number, block in self._blocks.items():
            here = rows[(rows >= block.rows.start) & (rows < block.rows.stop)]
            mask[here + (self._start_of[number] - block.rows.start)] = True
        return mask

    def size_bytes(self, positions: Positions) -> npt.NDArray[np.int64]:
        """What the values of each of these rows take."""
        return self._row_bytes[self._index_of_block(positions)]

    def read(self, positions: Positions) -> list[ChangedRows]:
        """These rows as they are now; ``positions`` ascending."""
        found: list[ChangedRows] = []
        indices, begins = np.unique(self._index_of_block(positions), return_index=True)
        ends = [*begins[1:].tolist(), len(positions)]
        for index, begin, end in zip(indices.tolist(), begins.tolist(), ends, strict=True):
            number = self._numbers[index]
            block = self._blocks[number]
            rows = positions[begin:end].astype(np.int64) + (block.rows.start - int(self._starts[index]))
            values: npt.NDArray[Any] = np.empty((len(rows), len(block.columns)), block.dtype)
            for row, out in zip(rows.tolist(), values, strict=True):
                block.get(row, None, out)
            found.append(ChangedRows(number, rows, values))
        return found

    def _index_of_block(self, positions: Positions) -> Positions:
        return np.searchsorted(self._starts, positions, side="right") - 1


@final
class Marks:
    """A set of positions, in a byte for each that there could be; quick where those in it lie close together."""

    def __init__(self, count: int) -> None:
        self._is_marked = np.zeros(count, np.bool_)
        self._low, self._high = count, 0
        """All that are marked lie from here to below there."""

    def __bool__(self) -> bool:
        return self._low < self._high

    def add(self, positions: slice | list[int] | Positions) -> None:
        """Mark these; an array is ascending."""
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
        """All that are marked, ascending; none is any more."""
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
    """What has come of some rows, and which of them are still to be told of: in the order they first changed.

    A row is told of only when all of its blocks have come. If rows lie in several blocks, a copy of each is kept.

    Rows that are followed, put together from their blocks.
    """

    def __init__(self, matrix: Matrix, partitioning: MatrixPartitioning) -> None:
        self._matrix = matrix
        self._partitioning = partitioning
        self._rows: dict[int, npt.NDArray[Any]] = {}
        self._missing: dict[int, set[int]] = {}
        """Blocks that have not come yet, by row."""
        self._news: dict[int, dict[int, int]] = {}
        """What is to be told: by row and block, the clock."""
        self._parts: dict[int, dict[int, int]] = {}
        """The same of rows that are not complete."""

    @property
    def has_news(self) -> bool:
        """Whether there is a row to tell of."""
        return bool(self._news)

    def take(self, changes: Changes) -> None:
        """Take what has come from a shard."""
        for number, rows, values in changes.parts:
            columns = self._partitioning.blocks[number].columns
            is_whole = len(columns) == self._matrix.columns
            for row, part in zip(rows.tolist(), values, strict=True):
                if is_whole:
                    # A row that a subscriber keeps must not keep the whole reply in memory.
                    self._rows[row] = part if len(rows) == 1 else part.copy()
                    self._news.setdefault(row, {})[number] = changes.clock
                else:
                    self._put(row, number, columns, part, changes.clock)

    def _put(self, row: int, block: int, columns: range, part: npt.NDArray[Any], clock: int) -> None:
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

    def tell(self) -> RowChange:
        """The first row that there is to tell of."""
        row = next(iter(self._news))
        clocks = self._news.pop(row)
        blocks = [self._partitioning.blocks[number].columns for number in clocks]
        start, stop = min(columns.start for columns in blocks), max(columns.stop for columns in blocks)
        is_whole = stop - start == self._matrix.columns
        is_in_one_block = len(blocks[0]) == self._matrix.columns
        values = self._rows.pop(row) if is_in_one_block else self._rows[row].copy()
        return RowChange(
            self._matrix.name, row, min(clocks.values()), None if is_whole else range(start, stop), values
        )


# Writes are counted by this many groups of rows, and not by row, so that the counters have a bound. Rows of one group
# only keep each other from being cached while one of them is under way.
_GROUPS: Final = 1024


class CacheRules(NamedTuple):
    """What a consistency means for cached rows."""

    staleness: int | None
    """A row is valid while its clock ≥ my clock − staleness; None: never, do not cache."""
    own_adds_show: bool
    """Whether a read that goes to the shard has the worker's own adds in it; then a cached row must have them, too."""


def cache_rules(consistency: Consistency, *, read_my_writes: bool = False) -> CacheRules:
    """What the cache may do, so that a hit gives what a read that goes to the shard could have given.

    - ASP: a read is answered with what is there at that moment, so no older row will do.
    - BSP: nothing that other workers add is applied within a clock, so a row that was read in this clock is valid for
      all of it. Own adds wait for the end of the clock like those of others, and show only with ``read_my_writes``.
    - SSP(s): a row may miss what others added in the last s clocks (Ho et al. 2013). Own adds are applied at once: they
      show.

    >>> from streamiter.parameter_server.consistency.models import SSP
    >>> cache_rules(SSP(staleness=2))
    CacheRules(staleness=2, own_adds_show=True)
    """
    if isinstance(consistency, SSP):
        return CacheRules(consistency.staleness, True)
    if isinstance(consistency, BSP):
        return CacheRules(0, read_my_writes)
    return CacheRules(None, False)


class RowRead(NamedTuple):
    """A read of a row that has begun. It is kept nowhere: a read that fails is simply forgotten."""

    matrix: str
    row: int
    generation: int
    writes: int


@dataclass(frozen=True, slots=True)
class RowCacheStatistics:
    """What a cache has done, and what it holds."""

    hits: int
    misses: int
    evictions: int
    """Rows that were still there and had to go for others; rows too old to be used are not counted."""
    rows: int
    size_bytes: int


@dataclass(slots=True)
class _CachedRow:
    values: Numbers
    clock: int


@final
class RowCache:
    """Whole rows by matrix and row, each with its *row clock*, in at most ``limit_bytes`` of values; 0: no row is kept.

    The row clock is the minimum clock when the row was read: the lowest, where several shards hold it. A row may be
    used while row clock ≥ my clock − staleness. When there is no room, the one goes that was used least recently.

    A read that goes to the shards is bracketed by ``begin`` and ``put``. If the worker writes to the row in between,
    the row is not kept: nobody can say whether the write is in what was read (a read that had to wait is answered
    later than it was sent). So ``own_add`` and ``invalidate`` are called as the write is sent, nothing awaited in
    between. If the shard refuses the write, ``invalidate`` the matrix.

    All arrays are copied, coming and going: those handed out belong to the caller, as those that come from a shard do.
    What other workers' update functions (psfs) do is seen once the row is too old, as they belong to no clock.

    >>> cache = RowCache(limit_bytes=1024)
    >>> cache.put(cache.begin("w", row=0), np.zeros(3), clock=4)
    >>> cache.own_add("w", 0, np.array([1, 1]), np.array([1.0, 2.0]))
    >>> cache.find("w", 0, my_clock=6, staleness=2)
    array([0., 3., 0.])
    >>> cache.find("w", 0, my_clock=7, staleness=2)

    A worker's own copies of whole rows, which its consistency lets it read again without asking a shard.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = whole_number("RowCache(limit_bytes=)", limit_bytes, 0)
        self._rows: OrderedDict[tuple[str, int], _CachedRow] = OrderedDict()
        self._size_bytes = 0
        self._generation = 0
        self._writes = [0] * _GROUPS
        self._hits = self._misses = self._evictions = 0

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything at all."""
        return self._limit_bytes > 0

    def find(
        self, matrix: str, row: int, my_clock: int, staleness: int, columns: Columns | None = None
    ) -> Numbers | None:
        """The row, or some columns of it, if there is one that is new enough."""
        key = (matrix, row)
        cached = self._rows.get(key)
        if cached is None:
            self._misses += 1
            return None
        if cached.clock < my_clock - staleness:
            self._misses += 1
            self._drop(key)  # clocks only go up: it will not be valid again
            return None
        self._hits += 1
        self._rows.move_to_end(key)
        return cached.values.copy() if columns is None else cached.values[columns]

    def begin(self, matrix: str, row: int) -> RowRead:
        """A read of the row is about to be sent."""
        return RowRead(matrix, row, self._generation, self._writes[_group(matrix, row)])

    def put(self, reading: RowRead, values: Numbers, clock: int) -> None:
        """It has been answered with the whole row, of this row clock."""
        key = (reading.matrix, reading.row)
        if reading != self.begin(*key) or values.nbytes > self._limit_bytes:
            return
        cached = self._rows.get(key)
        if cached is not None:
            if cached.clock > clock:
                return  # a read that was sent later has been answered first
            self._drop(key)
        self._rows[key] = _CachedRow(values.copy(), clock)
        self._size_bytes += values.nbytes
        while self._size_bytes > self._limit_bytes:
            self._drop(next(iter(self._rows)))
            self._evictions += 1

    def own_add(self, matrix: str, row: int, columns: Columns | slice, values: Numbers) -> None:
        """The worker is sending an add that its reads are to show: wherever ``own_adds_show``, and only there."""
        self._writes[_group(matrix, row)] += 1
        cached = self._rows.get((matrix, row))
        if cached is None:
            return
        if isinstance(columns, slice):
            cached.values[columns] += values
        else:
            np.add.at(cached.values, columns, values)

    def invalidate(self, matrix: str) -> None:
        """The worker is sending an update function (psf) on this matrix: what it changes is known to the shard only."""
        self._generation += 1
        for key in [key for key in self._rows if key[0] == matrix]:
            self._drop(key)

    def clear(self) -> None:
        """Clocks have gone back (reset, rollback), or the client leaves."""
        self._generation += 1
        self._rows.clear()
        self._size_bytes = 0

    def statistics(self) -> RowCacheStatistics:
        """What it has done, and what it holds."""
        return RowCacheStatistics(
            self._hits, self._misses, self._evictions, len(self._rows), self._size_bytes
        )

    def _drop(self, key: tuple[str, int]) -> None:
        self._size_bytes -= self._rows.pop(key).values.nbytes


def _group(matrix: str, row: int) -> int:
    return hash((matrix, row)) % _GROUPS


@final
class CachedRows:
    """The rows that one client keeps, in at most ``limit_bytes``; 0: none. Each matrix must be made known first.

    What the calls of a client mean for its row cache: which reads it answers, which it keeps, what writes do to it.
    """

    def __init__(self, limit_bytes: int, *, read_my_writes: bool) -> None:
        self._cache = RowCache(whole_number("client(cache_bytes=)", limit_bytes, 0))
        self._read_my_writes = read_my_writes
        self._rules: dict[str, CacheRules] = {}
        self._blocks: dict[str, Sequence[BlockRange]] = {}
        self.is_on = self._cache.is_on
        """Whether any row is kept; where none is, nothing else here needs to be called."""

    def make_known(self, matrix: Matrix, partitioning: MatrixPartitioning) -> None:
        """Its rows may be read and written from now on."""
        self._rules[matrix.name] = cache_rules(matrix.consistency, read_my_writes=self._read_my_writes)
        self._blocks[matrix.name] = partitioning.blocks

    def find(
        self, matrix: str, rows: Sequence[int], columns: Columns | None, my_clock: int
    ) -> Numbers | None:
        """What a read would give; None unless all of its rows are here, and new enough."""
        staleness = self._rules[matrix].staleness
        if staleness is None:
            return None
        found = []
        for row in rows:
            values = self._cache.find(matrix, row, my_clock, staleness, columns)
            if values is None:
                return None
            found.append(values)
        return np.stack(found) if found else None

    def begin(self, matrix: str, rows: Sequence[int], columns: Columns | None) -> list[RowRead]:
        """A read is about to be sent; gives what ``keep`` needs. Only whole rows are kept."""
        return [self._cache.begin(matrix, row) for row in rows] if columns is None else []

    def keep(self, readings: Sequence[RowRead], result: Numbers, replies: Sequence[GetReply]) -> None:
        """It has been answered, with one row of the result for each reading."""
        lowest = min((reply.clock for reply in replies), default=0)
        for reading, values in zip(readings, result, strict=True):
            self._cache.put(reading, values, lowest)

    def show_writes(self, requests: Sequence[tuple[int, Any]]) -> None:
        """Show what is being sent to the shards, no sooner (it may yet be cancelled) and no later."""
        for _, request in requests:
            update = request.update if isinstance(request, AddRequest) else request
            if isinstance(update, UpdateRequest) and not update.only_check:
                self._cache.invalidate(request.matrix)
            elif isinstance(request, AddRequest) and self._rules[request.matrix].own_adds_show:
                blocks = self._blocks[request.matrix]
                for block, row, columns, values in request.parts:
                    of_block = blocks[block].columns
                    whole = slice(of_block.start, of_block.stop)
                    self._cache.own_add(request.matrix, row, whole if columns is None else columns, values)

    def clear(self) -> None:
        """Keep nothing of what is here, or is being read."""
        self._cache.clear()
