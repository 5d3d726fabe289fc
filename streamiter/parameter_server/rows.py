"""Matrices and rows at a client: its calls are split into requests, its replies put together, and rows are cached.

``MatrixDirectory`` knows the matrices. ``MatrixAccess`` makes the requests of a call, one for each shard. ``RowCache``
keeps whole rows that were read, as long as the matrix's consistency allows a read of older values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ParameterServerError
from streamiter.parameter_server.admission import UNKNOWN_TIME
from streamiter.parameter_server.calls import ShardLink, WaitingReply
from streamiter.parameter_server.consistency import rules_of
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning, Slice, fits_int64, unknown_matrix
from streamiter.parameter_server.matrix_shard import check_first_values
from streamiter.parameter_server.psf.function import Part, PartitionFunction, UpdateFunction, check_function
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    CreateRequest,
    Describe,
    ForgetRequest,
    GetPart,
    GetReply,
    MatrixRequest,
    Request,
    UpdateRequest,
)
from streamiter.parameter_server.storage.block import OCCURRENCES, BlockColumns, Numbers
from streamiter.values.numbers import check_memory, whole_number

R = TypeVar("R")
M = TypeVar("M", bound=MatrixRequest[Any])

Occurrences = tuple[npt.ArrayLike, npt.ArrayLike | None]
"""The first columns of vectors that have occurred, in order, with the times in milliseconds; None: not known."""

FunctionParts = dict[int, list[tuple[int, Part]]]
"""The parts of a function: for each shard, the numbers of its blocks with the function's part for each block."""

_KINDS_FOR_INTEGERS: Final = "iub"
_KINDS_FOR_FLOATS: Final = "iubf"


@final
class MatrixDirectory:
    """The matrices that are known in this process: shared by a server and its clients."""

    def __init__(self, links: Sequence[ShardLink]) -> None:
        self._links = links
        self._matrices: dict[str, tuple[Matrix, MatrixPartitioning]] = {}

    def names(self) -> list[str]:
        """Return the names of all matrices, in the order they were made."""
        return list(self._matrices)

    def names_on(self, shard: int) -> list[str]:
        """Return the names of the matrices of which this shard has blocks."""
        return [
            name for name, (_, made) in self._matrices.items() if any(block.shard == shard for block in made.blocks)
        ]

    def matrix(self, name: str) -> Matrix:
        """Return the settings of a matrix that is known here."""
        return self._matrices[name][0]

    async def find(self, name: str) -> tuple[Matrix, MatrixPartitioning]:
        """Return a matrix, which may have been made in another process, and its partitioning; raises UnknownMatrix."""
        if (found := self._matrices.get(name)) is not None:
            return found
        for link in self._links:
            if (matrix := await _sent(link, Describe(name))) is not None:
                found = self._matrices[name] = (matrix, MatrixPartitioning(matrix, len(self._links)))
                return found
        raise unknown_matrix(name, self._matrices)

    async def create(self, matrix: Matrix) -> None:
        """Make a matrix on the shards that get blocks of it; nothing happens if it exists with the same settings."""
        if (there := self._matrices.get(matrix.name)) is not None:
            there[0].check_same(matrix)
            return
        partitioning = MatrixPartitioning(matrix, len(self._links))
        check_first_values(matrix, partitioning)
        holders = dict.fromkeys(block.shard for block in partitioning.blocks)
        await self._make(matrix, [self._links[shard] for shard in holders])
        self._matrices[matrix.name] = (matrix, partitioning)

    async def _make(self, matrix: Matrix, holders: Sequence[ShardLink]) -> None:
        """Make a matrix on all of these shards; if a function of ``init=`` fails on one of them, on none."""
        replies = [_sent(link, CreateRequest(matrix, len(self._links))) for link in holders]
        made: list[ShardLink] = []
        failure: Exception | None = None
        for link, reply in zip(holders, replies, strict=True):
            try:
                if await reply:
                    made.append(link)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            for link in made:
                # A shard that is lost meanwhile has forgotten the matrix. The error says why the matrix failed.
                with suppress(ParameterServerError):
                    await _sent(link, ForgetRequest(matrix.name))
            raise failure


def _sent(link: ShardLink, request: Request[R]) -> WaitingReply[R]:
    """Send a request, and return a waiting reply even if the request is refused at once.

    So all shards are asked before the first reply is awaited.
    """
    reply: WaitingReply[R] = WaitingReply()
    try:
        sent = link.send(request)
    except Exception as error:
        reply.fail(error)
        return reply
    if isinstance(sent, WaitingReply):
        return sent
    reply.succeed(sent)
    return reply


@final
class MatrixRead:
    """A read of columns of some rows: the parts to ask each shard for, and the array for the values."""

    __slots__ = ("_scattered", "parts", "result")

    def __init__(self, result: Numbers) -> None:
        self.result = result
        self.parts: dict[int, list[GetPart]] = {}
        """By shard."""
        self._scattered: dict[int, list[tuple[int, Numbers, slice | npt.NDArray[np.intp]]]] = {}
        """By shard: the number of the part, the row of the result, and the positions in that row."""

    def add_row(self, row: int, slices: Sequence[Slice], into: Numbers) -> None:
        """Read the slices of a row into one row of the result."""
        for block, keys, positions in slices:
            parts = self.parts.get(block.shard)
            if parts is None:
                parts = self.parts[block.shard] = []
                self._scattered[block.shard] = []
            out = into[positions] if isinstance(positions, slice) else None
            self._scattered[block.shard].append((len(parts), into, positions))
            parts.append(GetPart(block.number, row, keys, out))

    def take(self, shard: int, reply: GetReply) -> None:
        """Copy the values of a shard's reply into the result, unless the shard has written them there itself."""
        for number, row, positions in self._scattered[shard]:
            values = reply.values[number]
            if values is not self.parts[shard][number].out:
                row[positions] = values


# Rows of this size fit into every memory; asking the system for its memory takes as long as reading a short row.
_ROW_BYTES: Final = 64 << 20


@final
class MatrixAccess:
    """Makes the requests of one worker's calls on one matrix.

    ``observed`` is the highest minimum clock that the worker has been told of. With ``with_own``, reads show the
    worker's own adds that wait for a clock.
    """

    def __init__(self, matrix: Matrix, partitioning: MatrixPartitioning, worker: int, *, with_own: bool) -> None:
        self._worker = worker
        self.matrix = matrix
        self.partitioning = partitioning
        self.shards = tuple(dict.fromkeys(block.shard for block in partitioning.blocks))
        """The shards that hold blocks of the matrix."""
        self.observed = -1
        rules = rules_of(matrix.consistency)
        self.staleness = rules.staleness
        """A cached row may be this many clocks old. Infinite under ASP: then no row is cached."""
        self.own_adds_show = with_own or not rules.keeps_adds
        """Whether a read shows the worker's own adds, even if they are not applied yet."""
        self._dtype = matrix.numpy_dtype
        self._row_bytes = matrix.columns * self._dtype.itemsize
        self._kinds = _KINDS_FOR_INTEGERS if self._dtype.kind == "i" else _KINDS_FOR_FLOATS

    # -- arguments of calls ----------------------------------------------------------------------------

    def rows_of(self, row: int | None, rows: Sequence[int] | None, call: str) -> tuple[list[int], bool]:
        """Check the rows of a call; return them, and whether the call names a single row."""
        if (row is None) == (rows is None):
            raise ParameterServerError(
                f"{call} on matrix {self.matrix.name!r}: expected row= or rows=, given "
                f"{'neither' if row is None else 'both'}; name one row, or a list of rows"
            )
        if rows is None:
            return [self.partitioning.checked_row(row)], True
        return self.partitioning.checked_rows(rows), False

    def columns_of(self, columns: npt.ArrayLike | None) -> BlockColumns | None:
        """Check the columns of a call and return them; None for all columns, which must fit into memory."""
        if columns is not None:
            return self.partitioning.checked_columns(columns)
        if self.matrix.admission is not None:
            raise ParameterServerError(
                f"matrix {self.matrix.name!r}: expected columns=, as it has admission, given none; name columns, or "
                "use psf.PullSparse"
            )
        if self._row_bytes > _ROW_BYTES:
            where = f"all columns of matrix {self.matrix.name!r}"
            check_memory(where, self._row_bytes, "name columns, or use psf.PullSparse", error=ParameterServerError)
        return None

    def values_of(self, values: npt.ArrayLike, shape: tuple[int, ...], call: str) -> Numbers:
        """Check the values of a call; return them with the matrix's dtype and this shape.

        One number stands for all values.
        """
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
            f"{call} on matrix {self.matrix.name!r}: expected values of shape {shape}, one for each named column "
            f"(all {self.matrix.columns:,} columns, if none is named), given shape {given.shape}"
        )

    def width(self, columns: BlockColumns | None) -> int:
        """Return the number of columns that a call names."""
        return self.matrix.columns if columns is None else len(columns)

    # -- requests --------------------------------------------------------------------------------------

    def reading(self, rows: Sequence[int], columns: BlockColumns | None) -> MatrixRead:
        """Return a read of these rows and columns into an array of (rows, columns)."""
        reading = MatrixRead(np.empty((len(rows), self.width(columns)), self._dtype))
        for into, (row, slices) in zip(reading.result, self._split(rows, columns), strict=True):
            reading.add_row(row, slices, into)
        return reading

    def reading_of_row(self, row: int, columns: BlockColumns | None, slices: Sequence[Slice]) -> MatrixRead:
        """Return a read of one row that is split already."""
        reading = MatrixRead(np.empty((1, self.width(columns)), self._dtype))
        reading.add_row(row, slices, reading.result[0])
        return reading

    def _split(self, rows: Sequence[int], columns: BlockColumns | None) -> Iterator[tuple[int, Sequence[Slice]]]:
        """Yield each row with its slices; rows of the same row block have the same slices."""
        block_rows: range | None = None
        slices: Sequence[Slice] = ()
        for row in rows:
            if block_rows is None or row not in block_rows:
                slices = self.partitioning.split(row, columns)
                block_rows = slices[0].block.rows if slices else None
            yield row, slices

    def add_parts(self, rows: Sequence[int], columns: BlockColumns | None, values: Numbers) -> dict[int, list[AddPart]]:
        """Return the parts to add, by shard; ``values`` has the shape (rows, columns)."""
        parts: dict[int, list[AddPart]] = {}
        for of_row, (row, slices) in zip(values, self._split(rows, columns), strict=True):
            for shard, of_shard in self.parts_of_row(row, slices, of_row).items():
                parts.setdefault(shard, []).extend(of_shard)
        return parts

    def parts_of_row(self, row: int, slices: Sequence[Slice], values: Numbers) -> dict[int, list[AddPart]]:
        """Return the parts to add, by shard, for one row that is split already."""
        parts: dict[int, list[AddPart]] = {}
        for block, keys, positions in slices:
            parts.setdefault(block.shard, []).append(AddPart(block.number, row, keys, values[positions]))
        return parts

    def requests(
        self, kind: Callable[..., M], parts: Mapping[int, Sequence[object]], *settings: object
    ) -> list[tuple[int, M]]:
        """Return a request of this kind to each shard, with the shard's parts and these settings."""
        name, worker, observed = self.matrix.name, self._worker, self.observed
        return [(shard, kind(name, worker, observed, of_shard, *settings)) for shard, of_shard in parts.items()]

    def add_requests(
        self,
        row: int | None,
        rows: Sequence[int] | None,
        columns: npt.ArrayLike | None,
        values: npt.ArrayLike,
        update: UpdateFunction | None,
        occurrences: Occurrences | None = None,
    ) -> list[tuple[int, AddRequest]]:
        """Return the requests of an add to the shards that get some of the values or run the function."""
        numbers, is_single = self.rows_of(row, rows, "add")
        keys = self.columns_of(columns)
        width = self.width(keys)
        given = self.values_of(values, (width,) if is_single else (len(numbers), width), "add")
        parts = {} if occurrences is None else self._occurrence_parts(*occurrences)
        for shard, adds in self.add_parts(numbers, keys, given[np.newaxis] if is_single else given).items():
            parts.setdefault(shard, []).extend(adds)
        if update is None:
            return self.requests(AddRequest, parts)
        runs = dict(self.requests(UpdateRequest, self.function_parts(update), update))
        requests = self.requests(AddRequest, {shard: parts.get(shard, ()) for shard in (*parts, *runs)})
        for shard, add in requests:
            add.update = runs.get(shard)
        return requests

    def _occurrence_parts(self, columns: npt.ArrayLike, times_ms: npt.ArrayLike | None) -> dict[int, list[AddPart]]:
        keys, vector = self.partitioning.checked_columns(columns), self.matrix.vector
        times = np.full(len(keys), UNKNOWN_TIME) if times_ms is None else np.asarray(times_ms)
        if (
            self.matrix.admission is None
            or times.shape != keys.shape
            or times.dtype != np.int64
            or (keys % vector).any()
        ):
            raise ParameterServerError(
                f"add(occurrences=) on matrix {self.matrix.name!r}: expected admission=, first columns of vectors, and "
                f"an int64 time for each, given admission={self.matrix.admission!r}, columns of shape {keys.shape} and "
                f"times of {times.dtype} of shape {times.shape}; make the matrix with admission=Admission(…)"
            )
        return self.parts_of_row(OCCURRENCES, self.partitioning.split(0, keys), times)

    # -- functions -------------------------------------------------------------------------------------

    def function_parts(self, function: PartitionFunction) -> FunctionParts:
        """Return the parts of a function, by shard; raise an error for a function that does not fit the matrix."""
        check_function(function, self.matrix, self.partitioning)
        parts: FunctionParts = {}
        for block, part in function.split(self.matrix, self.partitioning):
            parts.setdefault(block.shard, []).append((block.number, part))
        return parts


# Writes are counted for this many groups of rows, not for each row, so that the number of counters has a limit. Rows of
# one group only keep each other from being cached while a write to one of them is under way.
_GROUPS: Final = 1024


class RowRead(NamedTuple):
    """A read of a row that has begun. The cache does not keep it, so a read that fails needs no end."""

    matrix: str
    row: int
    generation: int
    writes: int


@dataclass(slots=True)
class _CachedRow:
    values: Numbers
    clock: int


@final
class RowCache:
    """A worker's own copies of whole rows, which it may read again without asking a shard.

    The cache keeps at most ``limit_bytes`` of values; 0: no row. Each row has a *row clock*: the minimum clock when the
    row was read; for parts from several shards, the lowest of their clocks. A row is valid while row clock ≥ the
    worker's clock − staleness; then it is a possible result of a read from the shard:

    - ASP: a read returns the values of its moment, so no older row is valid.
    - BSP: no add of another worker is applied within a clock, so a row that was read in this clock is valid for the
      whole clock. Own adds wait for the end of the clock, as those of others do, and show only with ``read_my_writes``.
    - SSP(s): a row may lack the adds of others in the last s clocks (Ho et al. 2013). Own adds are applied at once, so
      they show.

    When there is no room, the row that was used least recently is removed.

    A read from the shards is between ``begin`` and ``put``. If the worker writes to the row in between, the row is not
    kept, because it is unknown whether the write is in the values (a read that had to wait is answered later than it
    was sent). So call ``own_add`` and ``invalidate`` when the write is sent, without an await in between. If the shard
    refuses the write, ``invalidate`` the matrix.

    All arrays are copied: arrays that the cache returns belong to the caller, as those of a shard do. Changes by
    update functions (psfs) of other workers are seen when the row is too old, because they belong to no clock.

    >>> cache = RowCache(limit_bytes=1024)
    >>> cache.put(cache.begin("w", row=0), np.zeros(3), clock=4)
    >>> cache.own_add("w", 0, np.array([1, 1]), np.array([1.0, 2.0]))
    >>> cache.find("w", 0, my_clock=6, staleness=2)
    array([0., 3., 0.])
    >>> cache.find("w", 0, my_clock=7, staleness=2)
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = whole_number("client(cache_bytes=)", limit_bytes, 0)
        self.is_on = self._limit_bytes > 0
        """Whether rows are kept. If not, no other method needs to be called."""
        self._rows: OrderedDict[tuple[str, int], _CachedRow] = OrderedDict()
        self.size_bytes = 0
        """The memory of the values, in bytes."""
        self._generation = 0
        self._writes = [0] * _GROUPS

    def find(
        self, matrix: str, row: int, my_clock: int, staleness: float, columns: BlockColumns | None = None
    ) -> Numbers | None:
        """Return the row, or some columns of it; None if there is no valid row."""
        key = (matrix, row)
        cached = self._rows.get(key)
        if cached is None:
            return None
        if cached.clock < my_clock - staleness:
            self._drop(key)  # Clocks only rise: the row cannot become valid again.
            return None
        self._rows.move_to_end(key)
        return cached.values.copy() if columns is None else cached.values[columns]

    def begin(self, matrix: str, row: int) -> RowRead:
        """Begin a read of the row: call this before the read is sent."""
        return RowRead(matrix, row, self._generation, self._writes[_group(matrix, row)])

    def put(self, reading: RowRead, values: Numbers, clock: int) -> None:
        """End a read with the values of the whole row and its row clock."""
        key = (reading.matrix, reading.row)
        if reading != self.begin(*key) or values.nbytes > self._limit_bytes:
            return
        cached = self._rows.get(key)
        if cached is not None:
            if cached.clock > clock:
                return  # A read that was sent later has been answered first.
            self._drop(key)
        self._rows[key] = _CachedRow(values.copy(), clock)
        self.size_bytes += values.nbytes
        while self.size_bytes > self._limit_bytes:
            self._drop(next(iter(self._rows)))

    def own_add(self, matrix: str, row: int, columns: BlockColumns | slice, values: Numbers) -> None:
        """The worker sends an add that its reads show."""
        self._writes[_group(matrix, row)] += 1
        cached = self._rows.get((matrix, row))
        if cached is None:
            return
        if isinstance(columns, slice):
            cached.values[columns] += values
        else:
            np.add.at(cached.values, columns, values)

    def invalidate(self, matrix: str) -> None:
        """The worker sends an update function (psf) on this matrix; only the shard knows what the function changes."""
        self._generation += 1
        for key in [key for key in self._rows if key[0] == matrix]:
            self._drop(key)

    def clear(self) -> None:
        """Remove all rows: clocks have gone back (reset, rollback), or the client leaves."""
        self._generation += 1
        self._rows.clear()
        self.size_bytes = 0

    def _drop(self, key: tuple[str, int]) -> None:
        self.size_bytes -= self._rows.pop(key).values.nbytes


def _group(matrix: str, row: int) -> int:
    return hash((matrix, row)) % _GROUPS
