"""What blocks of all kinds have in common."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Encode
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange

__all__ = ["Block", "Columns", "Numbers", "SparseRow"]

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
