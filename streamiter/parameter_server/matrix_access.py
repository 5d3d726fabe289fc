"""How a client gets at one matrix: calls become requests to shards, replies become arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ParameterServerError
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning, Slice, fits_int64
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

__all__ = ["FunctionParts", "MatrixAccess", "MatrixRead"]

Columns = npt.NDArray[np.int64]

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
