"""The settings of a matrix, the checks of rows and columns, and how a matrix is cut into blocks for the shards.

A *block* is a range of rows and columns. Each block is stored on one shard; a call is split by block.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple, cast, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError, RowsInDifferentBlocks, UnknownMatrix
from streamiter.operators.definitions import Definition
from streamiter.parameter_server.admission import Admission
from streamiter.parameter_server.consistency import ASP, Consistency
from streamiter.values.numbers import is_number, plain_float, plain_scalar, whole_number

DType = Literal["float32", "float64", "int64"]

DTYPES = ("float32", "float64", "int64")


class DrawnValues(abc.ABC):
    """Values of the columns that a sparse matrix does not store: a function of row and column, so they never change."""

    @abc.abstractmethod
    def draws(self, row: int) -> bool:
        """Whether the row has such values; the default of other rows is 0."""

    @abc.abstractmethod
    def draw(self, row: int, columns: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Write the values of these columns, in any order, to ``out``."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """The settings of one matrix: ``rows`` × ``columns`` numbers, cut into blocks.

    A sparse matrix stores only the numbers that differ from ``default``, or all numbers that were changed if the
    default is drawn.

    >>> Matrix("w", rows=2, columns=10).block is None
    True
    """

    name: str
    rows: int
    columns: int
    dtype: DType = "float64"
    consistency: Consistency = field(default_factory=ASP)
    sparse: bool = False
    default: float | DrawnValues = 0.0
    """The value of columns that a sparse matrix does not store, or a function that draws it."""
    vector: int = 1
    """How many neighbouring columns a sparse matrix stores together: the numbers of one feature."""
    block: tuple[int, int] | None = None
    """(rows, columns) of one block; None: all rows, and as many columns as give each shard one block."""
    admission: Admission | None = None
    """Which vectors of a sparse matrix are stored, and for how long; its last row is for sums, such as gradients."""
    init: object = 0.0
    """The initial values: a number, an array of (rows, columns) or (columns,), or update functions on this matrix."""
    on_clock: object = None
    """An update function that runs whenever the minimum clock moves; None: no function."""

    def __post_init__(self) -> None:
        where = f"matrix {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"matrix: expected a name, given {self.name!r}")
        for size in ("rows", "columns"):  # Plain ints, as in snapshots.
            object.__setattr__(self, size, whole_number(f"{where}, {size}=", getattr(self, size), 1))
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ConfigurationError(f"{where}, dtype=: expected one of {', '.join(DTYPES)}, given {self.dtype!r}")
        if not isinstance(self.consistency, Consistency):
            raise ConfigurationError(
                f"{where}, consistency=: expected ASP(), BSP() or SSP(staleness=…), given {self.consistency!r}"
            )
        if not isinstance(self.sparse, bool):
            raise ConfigurationError(f"{where}, sparse=: expected True or False, given {self.sparse!r}")
        is_drawn = isinstance(self.default, DrawnValues)
        if not (is_drawn or is_number(self.default)) or (self.default and not self.sparse):
            raise ConfigurationError(
                f"{where}, default=: expected a number or random numbers such as psf.RandomNormal(…), and sparse=True "
                f"where it is not 0, given {self.default!r}"
            )
        if not (is_drawn or self._compares_with(cast("float", self.default))):
            raise ConfigurationError(
                f"{where}, default=: expected {'a whole' if self.dtype == 'int64' else 'a'} number, as columns of a "
                f"matrix of {self.dtype} can be compared with, given {self.default!r}"
            )
        vector = whole_number(f"{where}, vector=", self.vector, 1)
        object.__setattr__(self, "vector", vector)
        if vector > 1 and (not self.sparse or self.columns % vector or (self.block and self.block[1] % vector)):
            raise ConfigurationError(
                f"{where}, vector=: expected sparse=True, and columns and blocks of whole vectors, given "
                f"vector={vector}, sparse={self.sparse}, columns={self.columns:,}, block={self.block}"
            )
        if self.admission is not None and not (isinstance(self.admission, Admission) and self.sparse and self.rows > 1):
            raise ConfigurationError(
                f"{where}, admission=: expected Admission(…), sparse=True, and a last row for sums such as gradients, "
                f"given {self.admission!r}, sparse={self.sparse}, rows={self.rows}"
            )
        if self.block is not None:
            if not isinstance(self.block, (tuple, list)) or len(self.block) != 2:
                raise ConfigurationError(f"{where}, block=: expected (rows, columns), given {self.block!r}")
            rows, columns = self.block
            block = (
                whole_number(f"{where}, rows of block=", rows, 1),
                whole_number(f"{where}, columns of block=", columns, 1),
            )
            object.__setattr__(self, "block", block)  # A list is the same setting as a tuple.

    def _compares_with(self, number: float) -> bool:
        """Return whether a number can equal a column: NaN equals nothing, and some numbers are too large."""
        as_float = plain_float(number)
        if self.dtype == "int64":
            return as_float.is_integer() and -(2**63) <= number < 2**63
        return math.isfinite(as_float) or as_float == number

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any]) -> Matrix:
        """Make a matrix from settings by name; raises ConfigurationError for an unknown or missing setting."""
        known = [field.name for field in fields(cls) if field.name != "name"]
        for missing in ("rows", "columns"):
            if missing not in settings:
                raise ConfigurationError(f"matrix {name!r}: expected {missing}=, given none; give their number")
        for setting in settings:
            if setting not in known:
                raise ConfigurationError(
                    f"matrix {name!r}: expected settings {', '.join(known)}, given {setting}=; leave it out"
                )
        return cls(name, **settings)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers."""
        return np.dtype(self.dtype)

    def definition(self) -> Definition:
        """Return on what the meaning of its numbers depends, as plain data."""
        return {
            **{name: getattr(self, name) for name in ("rows", "columns", "dtype", "sparse")},
            "default": repr(self.default),
            "on_clock": self.on_clock and getattr(self.on_clock, "in_words", type(self.on_clock).__qualname__),
            **({} if self.admission is None else {"admission": list(self.block or ()), "vector": self.vector}),
        }

    def draws(self, row: int) -> bool:
        """Whether the default of a row is drawn."""
        return isinstance(self.default, DrawnValues) and self.default.draws(row)

    def check_same(self, other: Matrix) -> None:
        """Raise ParameterServerError if a matrix of the same name has another setting.

        ``init`` is not compared, because only the first call of ``create_matrix`` uses it.
        """
        for name in (
            "rows",
            "columns",
            "dtype",
            "consistency",
            "sparse",
            "default",
            "vector",
            "block",
            "admission",
            "on_clock",
        ):
            if getattr(self, name) != getattr(other, name):
                raise ParameterServerError(
                    f"matrix {self.name!r}: expected the settings it was made with, given "
                    f"{name}={getattr(other, name)!r} instead of {name}={getattr(self, name)!r}; give it another "
                    "name, or the same settings"
                )


def unknown_matrix(name: str, known: Iterable[str], where: str = "") -> UnknownMatrix:
    """Return the error for a name that is none of the known ones; ``where`` begins the message."""
    return UnknownMatrix(
        f"{where}matrix {name!r}: expected one of {', '.join(map(repr, known)) or 'none yet'}, given {name!r}; make it "
        "first, with create_matrix"
    )


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The place of a block in its matrix."""

    number: int
    """Blocks are numbered from 0: row of blocks by row of blocks, from left to right."""
    shard: int
    """The shard that stores the block."""
    rows: range
    columns: range


class Slice(NamedTuple):
    """The part of a call that goes to one block."""

    block: BlockRange
    columns: npt.NDArray[np.int64] | None
    """Columns of the matrix, in the caller's order; None: all columns of the block."""
    positions: slice | npt.NDArray[np.intp]
    """The positions of these columns in the caller's array, ascending."""


# Measured for unordered columns of a row with two to four blocks: one mask for each block takes 3 to 6 µs for 100
# columns, 30 to 55 µs for 10,000 and 5 to 8 ms for a million. Sorting by block takes 6 µs, 65 to 75 µs and 10 to 12 ms
# for any number of blocks.
_BLOCKS_BY_MASK: Final = 4
# As many shards can share the matrix, and a step of an optimizer is one call of numpy for each block.
_BLOCKS_WITH_ADMISSION: Final = 4


@final
class MatrixPartitioning:
    """Cuts a matrix into blocks, and assigns each block to a shard; neighbouring blocks are on the same shard.

    All blocks have the same size, except those at the right and lower border. If the matrix has no ``block=``, each
    shard has one block with all rows (the last shards have none if the columns are few). With admission there are four
    blocks for any number of shards, since which vectors leave depends on the room of their block.

    >>> partitioning = MatrixPartitioning(Matrix("w", rows=2, columns=10, block=(1, 5)), shards=2)
    >>> [(block.rows, block.columns, block.shard) for block in partitioning.blocks[:2]]
    [(range(0, 1), range(0, 5), 0), (range(0, 1), range(5, 10), 0)]
    """

    def __init__(self, matrix: Matrix, shards: int) -> None:
        self._matrix = matrix
        vectors = matrix.columns // matrix.vector
        across = shards if matrix.admission is None else _BLOCKS_WITH_ADMISSION
        rows, columns = matrix.block or (matrix.rows, -(-vectors // min(across, vectors)) * matrix.vector)
        rows, columns = min(rows, matrix.rows), min(columns, matrix.columns)
        self._block_rows, self._block_columns = rows, columns
        row_ranges = [range(row, min(row + rows, matrix.rows)) for row in range(0, matrix.rows, rows)]
        column_ranges = [
            range(column, min(column + columns, matrix.columns)) for column in range(0, matrix.columns, columns)
        ]
        across = self._across = len(column_ranges)
        count = len(row_ranges) * across
        self.blocks = tuple(
            BlockRange(number, number * shards // count, row_ranges[number // across], column_ranges[number % across])
            for number in range(count)
        )
        self._bounds = np.arange(columns, matrix.columns, columns, dtype=np.int64)
        """The first column of each block, except the first block."""
        self._first_bounds: list[int] = self._bounds[:_BLOCKS_BY_MASK].tolist()
        self._number_dtype = np.min_scalar_type(across)

    def checked_row(self, row: object) -> int:
        """Return the row as a plain int. Raises OutOfRange for a value that is not a row of the matrix."""
        matrix = self._matrix
        if type(row) is int and 0 <= row < matrix.rows:
            return row
        if isinstance(row, (int, np.integer)) and not isinstance(row, bool) and 0 <= row < matrix.rows:
            return int(row)
        raise OutOfRange(
            f"matrix {matrix.name!r}, row: expected a whole number from 0 to {matrix.rows - 1}, given {_shown(row)}"
        )

    def checked_rows(self, rows: object) -> list[int]:
        """Return several rows, in the given order. Raises OutOfRange for a value that is not a list of rows."""
        if isinstance(rows, str) or not isinstance(rows, Iterable):
            raise OutOfRange(f"matrix {self._matrix.name!r}, rows: expected a list of rows, given {rows!r}")
        return [self.checked_row(row) for row in rows]

    def checked_columns(self, columns: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the columns as a one-dimensional int64 array: the given array, if it is one already.

        Raises OutOfRange for values that are not columns of the matrix; the error names the first one.
        """
        if type(columns) is np.ndarray and columns.dtype == _INT64 and columns.ndim == 1:
            array = columns
        else:
            array = _integers(columns, self._matrix)
        if len(array):
            # As unsigned numbers negative columns are large, so one pass finds both kinds. argmax has less overhead
            # than max: 0.5 in place of 1.3 µs for 100 columns.
            unsigned = array.view(_UINT64)
            if unsigned.item(unsigned.argmax()) >= self._matrix.columns:
                raise _missing_column(array, self._matrix)
        return array

    def blocks_of_row(self, row: int) -> tuple[BlockRange, ...]:
        """Return the blocks of a row, from left to right."""
        first = row // self._block_rows * self._across
        return self.blocks[first : first + self._across]

    def split(self, row: int, columns: npt.NDArray[np.int64] | None) -> list[Slice]:
        """Split columns of a row (None: all columns) by block; blocks without any of them are left out.

        ``columns`` is a result of ``checked_columns``. The columns of a slice may be a view of it.
        """
        blocks = self.blocks_of_row(row)
        if columns is None:
            return [Slice(block, None, slice(block.columns.start, block.columns.stop)) for block in blocks]
        if len(columns) == 0:
            return []
        if len(blocks) == 1:
            return [Slice(blocks[0], columns, slice(0, len(columns)))]
        if _is_ascending(columns):
            return self._split_ascending(blocks, columns)
        if len(blocks) <= _BLOCKS_BY_MASK:
            return self._split_by_mask(blocks, columns)
        return self._split_by_sorting(blocks, columns)

    def _split_ascending(self, blocks: tuple[BlockRange, ...], columns: npt.NDArray[np.int64]) -> list[Slice]:
        """Split ascending columns without a copy: each slice has a view."""
        first = columns.item(0) // self._block_columns
        last = columns.item(-1) // self._block_columns
        if last - first > len(columns):
            return _slices_of_runs(blocks, columns // self._block_columns, columns, None)
        ends = [*columns.searchsorted(self._bounds[first:last]).tolist(), len(columns)]
        slices, begin = [], 0
        for block, end in zip(blocks[first : last + 1], ends, strict=True):
            if begin < end:
                slices.append(Slice(block, columns[begin:end], slice(begin, end)))
                begin = end
        return slices

    def _split_by_mask(self, blocks: tuple[BlockRange, ...], columns: npt.NDArray[np.int64]) -> list[Slice]:
        masks, before = [], None
        for bound in self._first_bounds:
            below = columns < bound
            masks.append(below if before is None else below ^ before)
            before = below
        assert before is not None
        masks.append(~before)
        return [
            Slice(block, columns[positions], positions)
            for block, mask in zip(blocks, masks, strict=True)
            if len(positions := mask.nonzero()[0])
        ]

    def _split_by_sorting(self, blocks: tuple[BlockRange, ...], columns: npt.NDArray[np.int64]) -> list[Slice]:
        # Numbers of one or two bytes are sorted by radix; to sort 10,000 int64 numbers would take 600 µs.
        at = (columns // self._block_columns).astype(self._number_dtype)
        order = at.argsort(kind="stable")
        return _slices_of_runs(blocks, at[order], columns[order], order)

    def check_same_row_block(self, rows: Iterable[int], who: str) -> None:
        """Raise RowsInDifferentBlocks unless all rows are in the same row of blocks. ``who`` begins the error."""
        rows = list(dict.fromkeys(rows))
        if len({row // self._block_rows for row in rows}) > 1:
            raise RowsInDifferentBlocks(
                f"{who} on matrix {self._matrix.name!r}: expected rows of one row block "
                f"({self._block_rows} rows each), given rows {', '.join(map(str, rows))}; make the matrix with "
                f"blocks of more rows: block=({self._matrix.rows}, {self._block_columns})"
            )


def _slices_of_runs(
    blocks: tuple[BlockRange, ...],
    at: npt.NDArray[np.integer[Any]],
    columns: npt.NDArray[np.int64],
    positions: npt.NDArray[np.intp] | None,
) -> list[Slice]:
    """Return a slice for each run of columns with the same block, for columns that are sorted by block.

    ``at`` has for each column the index of its block in ``blocks``. Blocks without columns take no time.
    ``positions`` None: the columns are in the caller's order.
    """
    begins = [0, *((at[1:] != at[:-1]).nonzero()[0] + 1).tolist()]
    ends = [*begins[1:], len(at)]
    return [
        Slice(blocks[number], columns[begin:end], slice(begin, end) if positions is None else positions[begin:end])
        for number, begin, end in zip(at[begins].tolist(), begins, ends, strict=True)
    ]


def _is_ascending(columns: npt.NDArray[np.int64]) -> bool:
    # Three columns are enough to find most unordered ones, at a tenth of the cost.
    if not columns.item(0) <= columns.item(len(columns) // 2) <= columns.item(-1):
        return False
    return bool((columns[1:] >= columns[:-1]).all())


_INT64: Final = np.dtype(np.int64)
_UINT64: Final = np.dtype(np.uint64)


def _integers(columns: npt.ArrayLike, matrix: Matrix) -> npt.NDArray[np.int64]:
    where = f"matrix {matrix.name!r}, columns: expected a one-dimensional array of whole numbers"
    try:
        array = np.asarray(columns)
    except ValueError as error:
        raise OutOfRange(f"{where}, given lists of different lengths ({error})") from error
    if array.ndim != 1:
        raise OutOfRange(f"{where}, given {_shown(columns) if array.ndim == 0 else f'an array of shape {array.shape}'}")
    if not len(array) and not isinstance(columns, np.ndarray):
        return np.empty(0, np.int64)  # numpy makes floats of an empty list.
    if array.dtype.kind not in "iu":
        raise OutOfRange(
            f"{where}, given dtype {array.dtype} (it begins with {_shown(array[0]) if len(array) else 'nothing'}); "
            f"convert it: columns.astype(np.int64)"
        )
    if array.dtype == _UINT64 and len(array) and int(array.max()) >= 1 << 63:
        raise _missing_column(array, matrix)
    return array.astype(np.int64)


def _missing_column(columns: npt.NDArray[Any], matrix: Matrix) -> OutOfRange:
    position = int(((columns < 0) | (columns >= matrix.columns)).argmax())
    return OutOfRange(
        f"matrix {matrix.name!r}, columns: expected columns from 0 to {matrix.columns - 1}, given "
        f"{columns[position]} at position {position}"
    )


def _shown(value: object) -> str:
    shown = repr(plain_scalar(value))
    return shown if len(shown) <= 100 else f"{shown[:100]}…"


def fits_int64(values: npt.NDArray[Any]) -> bool:
    """Return whether all values are whole numbers of 64 bits, of any dtype: numpy would wrap others around.

    >>> fits_int64(np.array([2.0, -3.0])), fits_int64(np.array([1.5])), fits_int64(np.array([1 << 63], np.uint64))
    (True, False, False)
    """
    if values.dtype.kind == "f":
        return bool(((values == np.floor(values)) & (values >= -(2.0**63)) & (values < 2.0**63)).all())
    return values.dtype.kind in "ib" or (values.dtype.kind == "u" and bool((values < 1 << 63).all()))
