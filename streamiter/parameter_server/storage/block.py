"""What blocks of all kinds have in common."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Encode
from streamiter.errors import CheckpointError, OutOfRange
from streamiter.parameter_server.matrix import BlockRange, Matrix

__all__ = [
    "PART_COLUMNS",
    "Block",
    "Cells",
    "Columns",
    "GuardedBlock",
    "Numbers",
    "SparseRow",
    "block_shape",
    "check_shape",
    "differs_from",
    "gathered",
]


Numbers = npt.NDArray[Any]
"""Of the dtype of the matrix."""

Columns = npt.NDArray[np.int64]
"""Global column numbers; in any order, also twice."""


@dataclass(frozen=True, slots=True)
class SparseRow:
    """The columns of one row of one block whose value is not the default: ``columns`` ascending, none twice."""

    columns: Columns
    values: Numbers
    default: float


class Block(abc.ABC):
    """The numbers of a range of rows and columns. Rows and columns are named by their global numbers.

    Nothing is checked here: the client has checked what a caller gave, and cut it to this block. Arrays that are given
    are not kept, and arrays that are handed out belong to the caller, except the views of ``dense_row`` and what
    ``sparse_row`` gives.
    """

    is_sparse: bool

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        self.rows = block.rows
        self.columns = block.columns
        self.dtype = matrix.numpy_dtype
        self.updates = 0
        """How many times an optimizer has been applied; part of the state."""
        self._name = f"matrix {matrix.name!r}"

    @abc.abstractmethod
    def get(self, row: int, columns: Columns | None, out: Numbers | None = None) -> Numbers:
        """Values of some columns, None: of all, dense; written to ``out`` if that is given."""

    @abc.abstractmethod
    def add(self, row: int, columns: Columns | None, values: Numbers) -> None:
        """Add values to some columns, None: to all; a column that is named twice gets both."""

    @abc.abstractmethod
    def put(self, row: int, columns: Columns | None, values: Numbers) -> None:
        """Overwrite values; of a column that is named twice the last counts."""

    @abc.abstractmethod
    def dense_row(self, row: int) -> npt.NDArray[Any]:
        """Of a dense block: the row itself, to be changed in place."""

    @abc.abstractmethod
    def sparse_row(self, row: int) -> SparseRow:
        """Of a sparse block: what is there, not to be changed."""

    @abc.abstractmethod
    def replace_row(self, row: int, content: SparseRow) -> None:
        """Of a sparse block: have the row hold this, and no more."""

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Memory it takes."""

    @abc.abstractmethod
    def freeze(self, encode: Encode) -> dict[str, Any]:
        """Its state as it is now, for ``restore``: plain data, large arrays as :class:`~streamiter.deferred.Deferred`.

        Later changes are not in it: dense arrays are copied at once (some ms for 10 M numbers), sparse rows when they
        change, and encoded later, in pieces.
        """

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``freeze`` gave, decoded: a Deferred comes back as an iterable of its decoded frames."""


def block_shape(block: Block) -> tuple[str, int, int, int, int]:
    """Its dtype, first and last row, first and last column (half-open).

    Of what block a frozen state is.
    """
    rows, columns = block.rows, block.columns
    return (str(block.dtype), rows.start, rows.stop, columns.start, columns.stop)


def check_shape(block: Block, given: Any, name: str) -> None:
    """Raise CheckpointError unless the state is of this very block."""
    expected = block_shape(block)
    if given != expected:
        raise CheckpointError(
            f"state of {name}: expected a block of (dtype, first row, end of rows, first column, end of columns) "
            f"{expected}, given {given}; make the matrix with the settings it had"
        )


def gathered(numbers: Numbers, at: npt.NDArray[np.integer[Any]], out: Numbers | None) -> Numbers:
    """``numbers[at]``, written to ``out`` if that is given; ``at`` is known to lie within.

    Reading numbers that lie here and there.
    """
    if out is None:
        result: Numbers = numbers[at]
        return result
    # mode="raise" would gather into a buffer first, and copy that.
    numbers.take(at, out=out, mode="clip")
    return out


PART_COLUMNS: Final = 1 << 16
"""How much of a row is looked at for one part: with its column numbers some 0.8 MB, and a millisecond."""


class Cells(abc.ABC):
    """One row of a sparse block: a default, and columns with a value of their own, which may well equal the default.

    What the forms of a sparse row have in common.
    """

    default: Any
    """A scalar of the dtype."""
    made_after: int
    """How many times the block had been frozen when this was made: the last of them do not hold it."""

    @abc.abstractmethod
    def get(self, columns: Columns, out: Numbers | None) -> Numbers:
        """Values of these columns; written to ``out`` if that is given."""

    @abc.abstractmethod
    def write_to(self, out: Numbers) -> None:
        """Write all columns of the block."""

    @abc.abstractmethod
    def add(self, columns: Columns, values: Numbers) -> bool:
        """Add; each duplicate counts. False where there is no room for so many columns: then nothing has changed."""

    @abc.abstractmethod
    def put(self, columns: Columns, values: Numbers) -> bool:
        """Overwrite; of duplicates the last counts. False as above."""

    @abc.abstractmethod
    def count_absent(self, columns: Columns) -> int:
        """How many of them have no room yet; duplicates are one."""

    @abc.abstractmethod
    def reset(self, default: Any) -> None:
        """Have all columns this value."""

    @abc.abstractmethod
    def content(self) -> tuple[Columns, Numbers]:
        """The columns that differ from the default, ascending, and their values. Not to be changed."""

    @abc.abstractmethod
    def parts(self) -> Iterator[tuple[Columns, Numbers]]:
        """The same in no order, and a part at a time."""

    def count_different(self) -> int:
        """How many columns differ from the default."""
        return sum(len(columns) for columns, _ in self.parts())

    @abc.abstractmethod
    def copy(self) -> Self:
        """One that changes on its own."""

    @abc.abstractmethod
    def is_large_for(self, count: int) -> bool:
        """Whether so few columns are better kept in something smaller."""

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Memory it takes."""


def differs_from(values: Numbers, default: Any) -> npt.NDArray[np.bool_]:
    """Which values are not the very same number: NaN is the same as NaN; −0.0 is not 0.0, for 1/x tells them apart."""
    bits = np.dtype(f"u{values.itemsize}")
    differs: npt.NDArray[np.bool_] = values.view(bits) != np.asarray(default, values.dtype).view(bits)
    return differs


@final
class GuardedBlock(Block):
    """The block itself, but rows and columns that lie in other blocks are refused.

    Counted from this block's first ones they would be below 0, and stand for others of its own. ``who`` names the
    function in errors.

    >>> from streamiter.parameter_server.matrix import Matrix
    >>> from streamiter.parameter_server.matrix import BlockRange
    >>> from streamiter.parameter_server.storage import make_block
    >>> block = make_block(Matrix("w", rows=4, columns=3), BlockRange(1, 0, range(2, 4), range(0, 3)))
    >>> GuardedBlock(block, "f").get(0, None)
    Traceback (most recent call last):
        ...
    streamiter.errors.OutOfRange: f: expected a row of the block, 2 to 3, given 0; let its rows() name the rows it needs

    Blocks as functions of users get them.
    """

    def __init__(self, block: Block, who: str) -> None:
        self.is_sparse = block.is_sparse
        self.rows = block.rows
        self.columns = block.columns
        self.dtype = block.dtype
        self._block = block
        self._who = who

    @property
    def updates(self) -> int:
        """Those of the block."""
        return self._block.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._block.updates = count

    def get(self, row: int, columns: Columns | None, out: Numbers | None = None) -> Numbers:
        return self._block.get(self._here(row, columns), columns, out)

    def add(self, row: int, columns: Columns | None, values: Numbers) -> None:
        self._block.add(self._here(row, columns), columns, values)

    def put(self, row: int, columns: Columns | None, values: Numbers) -> None:
        self._block.put(self._here(row, columns), columns, values)

    def dense_row(self, row: int) -> npt.NDArray[Any]:
        return self._block.dense_row(self._here(row))

    def sparse_row(self, row: int) -> SparseRow:
        return self._block.sparse_row(self._here(row))

    def replace_row(self, row: int, content: SparseRow) -> None:
        self._block.replace_row(self._here(row, content.columns), content)

    def size_bytes(self) -> int:
        return self._block.size_bytes()

    def freeze(self, encode: Encode) -> dict[str, Any]:
        return self._block.freeze(encode)

    def restore(self, state: dict[str, Any]) -> None:
        self._block.restore(state)

    def _here(self, row: int, columns: Columns | None = None) -> int:
        """The row; raises OutOfRange unless all of this lies in the block."""
        if row not in self.rows:
            raise OutOfRange(
                f"{self._who}: expected a row of the block, {self.rows.start} to {self.rows.stop - 1}, given {row}; "
                "let its rows() name the rows it needs"
            )
        if columns is not None and np.size(columns):
            for column in (np.min(columns), np.max(columns)):
                if column not in self.columns:
                    raise OutOfRange(
                        f"{self._who}: expected columns of the block, {self.columns.start} to "
                        f"{self.columns.stop - 1}, given {column}; take those in block.columns, or let its split() "
                        "give each block its own"
                    )
        return row
