"""Rows on the client: assembled of blocks, and cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ParameterServerError
from streamiter.numbers import whole_number
from streamiter.parameter_server.consistency.models import BSP, SSP, Consistency
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning, Slice, fits_int64
from streamiter.parameter_server.psf.function import (
    GetFunction,
    PartitionFunction,
    UpdateFunction,
    check_function,
)
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    AggregateRequest,
    GetPart,
    GetReply,
    GetRequest,
    UpdateRequest,
)
from streamiter.parameter_server.storage.block import Columns, Numbers

__all__ = [
    "CachedRows",
    "FunctionParts",
    "MatrixAccess",
    "MatrixRead",
    "RowCache",
    "RowRead",
    "cache_rules",
]


FunctionParts = dict[int, list[tuple[int, Any]]]
"""What a function does where: blocks by number and their parts, by shard."""

_KINDS_FOR_INTEGERS: Final = "iub"
_KINDS_FOR_FLOATS: Final = "iubf"


@final
class MatrixRead:
    """Columns of some rows being read: what to ask which shard, and how its replies come together."""

    __slots__ = ("_scattered", "parts", "result")

    def __init__(self, result: npt.NDArray[Any]) -> None:
        self.result = result
        self.parts: dict[int, list[GetPart]] = {}
        """By shard."""
        self._scattered: dict[int, list[tuple[int, npt.NDArray[Any], Any]]] = {}

    def ask_all(self, row: int, slices: Sequence[Slice], into: npt.NDArray[Any]) -> None:
        """Have the parts of a row read into one row of the result."""
        for block, keys, positions in slices:
            parts = self.parts.get(block.shard)
            if parts is None:
                parts = self.parts[block.shard] = []
                self._scattered[block.shard] = []
            out = into[positions] if isinstance(positions, slice) else None
            self._scattered[block.shard].append((len(parts), into, positions))
            parts.append(GetPart(block.number, row, keys, out))

    def take(self, shard: int, reply: GetReply) -> None:
        """Put what a shard has read where it belongs; what it wrote there itself is there."""
        for number, row, positions in self._scattered[shard]:
            values = reply.values[number]
            if values is not self.parts[shard][number].out:
                row[positions] = values


@final
class MatrixAccess:
    """One matrix as one worker's client sees it. ``observed`` is the highest minimum clock that it has been told of.

    ``with_own``: what it reads is to have adds of its own in it that wait for a clock.
    """

    __slots__ = ("_dtype", "_kinds", "_with_own", "_worker", "matrix", "observed", "partitioning", "shards")

    def __init__(
        self, matrix: Matrix, partitioning: MatrixPartitioning, worker: int, *, with_own: bool
    ) -> None:
        self._worker = worker
        self._with_own = with_own
        self.matrix = matrix
        self.partitioning = partitioning
        self.shards = tuple(dict.fromkeys(block.shard for block in partitioning.blocks))
        """Those that hold a part of it."""
        self.observed = -1
        self._dtype = matrix.numpy_dtype
        self._kinds = _KINDS_FOR_INTEGERS if self._dtype.kind == "i" else _KINDS_FOR_FLOATS

    # -- what callers give -----------------------------------------------------------------------------

    def rows_of(self, row: Any, rows: Any, call: str) -> tuple[list[int], bool]:
        """The rows that a call names, checked, and whether it is one row only."""
        if (row is None) == (rows is None):
            raise ParameterServerError(
                f"{call} on matrix {self.matrix.name!r}: expected row= or rows=, given "
                f"{'neither' if row is None else 'both'}; name one row, or a list of rows"
            )
        if rows is None:
            return [self.partitioning.checked_row(row)], True
        return self.partitioning.checked_rows(rows), False

    def columns_of(self, columns: Any) -> npt.NDArray[np.int64] | None:
        """The columns that a call names, checked; None for all."""
        return None if columns is None else self.partitioning.checked_columns(columns)

    def values_of(self, values: Any, shape: tuple[int, ...], call: str) -> npt.NDArray[Any]:
        """Numbers of the matrix's dtype in the shape that the call names; one number stands for all."""
        try:
            given = np.asarray(values)
        except ValueError as error:
            raise ParameterServerError(
                f"{call} on matrix {self.matrix.name!r}: expected values of shape {shape}, given lists of different "
                f"lengths ({error})"
            ) from error
        if given.dtype != self._dtype:
            if given.dtype.kind not in self._kinds:
                raise ParameterServerError(
                    f"{call} on matrix {self.matrix.name!r}: expected values of {self._dtype.name}, given "
                    f"{given.dtype}; convert them first, or make the matrix with another dtype"
                )
            if self._dtype.kind == "i" and not fits_int64(given):
                raise ParameterServerError(
                    f"{call} on matrix {self.matrix.name!r}: expected values of int64, which are below 2**63, given "
                    f"{given.max()}; make the matrix with another dtype"
                )
            given = given.astype(self._dtype)
        if given.shape == shape:
            return given
        if given.ndim == 0:
            return np.full(shape, given, self._dtype)
        raise ParameterServerError(
            f"{call} on matrix {self.matrix.name!r}: expected values of shape {shape}, one for each column named "
            f"(for all {self.matrix.columns:,} where none is), given shape {given.shape}"
        )

    def width(self, columns: Columns | None) -> int:
        """How many numbers of each row a call is about."""
        return self.matrix.columns if columns is None else len(columns)

    # -- requests --------------------------------------------------------------------------------------

    def reading(self, rows: Sequence[int], columns: Columns | None) -> MatrixRead:
        """What to ask the shards for, to be read into an array of (rows, columns)."""
        reading = MatrixRead(np.empty((len(rows), self.width(columns)), self._dtype))
        for into, (row, slices) in zip(reading.result, self._split(rows, columns), strict=True):
            reading.ask_all(row, slices, into)
        return reading

    def reading_of_row(self, row: int, columns: Columns | None, slices: Sequence[Slice]) -> MatrixRead:
        """The same for one row that has been split already."""
        reading = MatrixRead(np.empty((1, self.width(columns)), self._dtype))
        reading.ask_all(row, slices, reading.result[0])
        return reading

    def _split(self, rows: Sequence[int], columns: Columns | None) -> Iterator[tuple[int, Sequence[Slice]]]:
        """Each row with its parts; rows of one row block are split alike, so only the numbers of blocks differ."""
        block_rows: range | None = None
        slices: Sequence[Slice] = ()
        for row in rows:
            if block_rows is None or row not in block_rows:
                slices = self.partitioning.split(row, columns)
                block_rows = slices[0].block.rows if slices else None
            yield row, slices

    def add_parts(
        self, rows: Sequence[int], columns: Columns | None, values: npt.NDArray[Any]
    ) -> dict[int, list[AddPart]]:
        """What to have added, by shard; ``values`` are (rows, columns)."""
        parts: dict[int, list[AddPart]] = {}
        for of_row, (row, slices) in zip(values, self._split(rows, columns), strict=True):
            for shard, of_shard in self.parts_of_row(row, slices, of_row).items():
                parts.setdefault(shard, []).extend(of_shard)
        return parts

    def parts_of_row(
        self, row: int, slices: Sequence[Slice], values: npt.NDArray[Any]
    ) -> dict[int, list[AddPart]]:
        """The same for one row that has been split already."""
        parts: dict[int, list[AddPart]] = {}
        for block, keys, positions in slices:
            parts.setdefault(block.shard, []).append(AddPart(block.number, row, keys, values[positions]))
        return parts

    def get_requests(self, reading: MatrixRead) -> list[tuple[int, GetRequest]]:
        """Of each shard."""
        name, worker, observed, own = self.matrix.name, self._worker, self.observed, self._with_own
        return [
            (shard, GetRequest(name, worker, observed, parts, own)) for shard, parts in reading.parts.items()
        ]

    def adds(self, parts: Mapping[int, Sequence[AddPart]]) -> list[tuple[int, AddRequest]]:
        """Of each shard."""
        name, worker, observed = self.matrix.name, self._worker, self.observed
        return [(shard, AddRequest(name, worker, observed, of_shard)) for shard, of_shard in parts.items()]

    def add_requests(
        self, row: Any, rows: Any, columns: Any, values: Any, update: UpdateFunction | None
    ) -> list[tuple[int, AddRequest]]:
        """Of each shard that gets some of the values, or runs the function beside them."""
        name, worker, observed = self.matrix.name, self._worker, self.observed
        numbers, is_single = self.rows_of(row, rows, "add")
        keys = self.columns_of(columns)
        width = self.width(keys)
        given = self.values_of(values, (width,) if is_single else (len(numbers), width), "add")
        parts = self.add_parts(numbers, keys, given[np.newaxis] if is_single else given)
        if update is None:
            return self.adds(parts)
        runs = dict(self.update_requests(update, self.function_parts(update)))
        return [
            (shard, AddRequest(name, worker, observed, parts.get(shard, ()), runs.get(shard)))
            for shard in dict.fromkeys((*parts, *runs))
        ]

    # -- functions -------------------------------------------------------------------------------------

    def function_parts(self, function: PartitionFunction) -> FunctionParts:
        """What a function does where, by shard; raises what is wrong with it."""
        check_function(function, self.matrix, self.partitioning)
        parts: FunctionParts = {}
        for block, part in function.split(self.matrix, self.partitioning):
            parts.setdefault(block.shard, []).append((block.number, part))
        return parts

    def update_requests(
        self, function: UpdateFunction, parts: FunctionParts, *, only_check: bool = False
    ) -> list[tuple[int, UpdateRequest]]:
        """Of each shard."""
        name, worker, observed = self.matrix.name, self._worker, self.observed
        return [
            (shard, UpdateRequest(name, worker, observed, function, of_shard, only_check))
            for shard, of_shard in parts.items()
        ]

    def aggregate_requests(
        self, function: GetFunction, parts: FunctionParts
    ) -> list[tuple[int, AggregateRequest]]:
        """Of each shard."""
        name, worker, observed = self.matrix.name, self._worker, self.observed
        return [
            (shard, AggregateRequest(name, worker, observed, function, of_shard))
            for shard, of_shard in parts.items()
        ]


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
