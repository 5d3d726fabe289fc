"""Sparse blocks whose vectors come and go: they are admitted, expire, and leave where there is no room.

A ``FeatureTable`` has an entry for each vector that has occurred, and a row for each admitted one: the numbers of all
rows of the matrix but the last, one row behind the other. The last row has sums that are added up and taken away again,
such as gradients. It is stored as in any sparse block, for admitted vectors only.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import InternalError
from streamiter.parameter_server.admission import UNKNOWN_TIME
from streamiter.parameter_server.matrix import BlockRange, Matrix
from streamiter.parameter_server.storage.block import (
    OCCURRENCES,
    BlockColumns,
    BlockRow,
    FrozenState,
    Numbers,
    gathered,
)
from streamiter.parameter_server.storage.cells import distinct, ranges, vectors_of
from streamiter.parameter_server.storage.feature_files import FeatureFiles
from streamiter.parameter_server.storage.feature_table import FeatureCounts, FeatureTable
from streamiter.parameter_server.storage.sparse import SparseBlock
from streamiter.values.deferred import Encode
from streamiter.values.numbers import Indices

# A number of a table has four bytes, and four more for its sum of squares, which are numbers of the matrix here.
_PAIR_BYTES: Final = 8


@final
class FeatureBlock(SparseBlock):
    """A block of a matrix with admission.

    An occurrence is an ``add`` to the row ``OCCURRENCES``. Vectors that are not admitted have the default: adds to them
    are lost, and a ``put`` admits them. A block has its share of the memory, so which vectors leave does not depend on
    other blocks.
    """

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        super().__init__(matrix, block)
        admission = matrix.admission
        assert admission is not None
        self._last = matrix.rows - 1
        self._table = FeatureTable.of_bytes(
            -(-self._last * self._vector * self.dtype.itemsize // _PAIR_BYTES),
            weights=0,
            admit=admission.admit,
            size_bytes=admission.size_bytes * len(block.columns) // matrix.columns,
            expire_ms=admission.expire_ms,
        )
        self._files = FeatureFiles(self._table, name=self._name)
        self._row_length = self._table.width * _PAIR_BYTES // self.dtype.itemsize

    def counts(self) -> FeatureCounts:
        """Return how many vectors have occurred, are admitted, and have left."""
        return self._table.counts()

    @property
    def _numbers(self) -> Numbers:
        """All rows of the table, one behind the other; not a copy."""
        return self._table.arrays.rows.view(self.dtype)

    def _places(self, row: int, columns: BlockColumns) -> tuple[Indices, npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
        """Return the places of columns, whether they are admitted, and the entries of the vectors that are."""
        firsts, parts = vectors_of(columns, self._vector)
        # They are found at any time, until they have left.
        entries = self._table.find(firsts // self._vector, np.full(len(firsts), -UNKNOWN_TIME))
        rows = self._table.arrays.row_of[entries].astype(np.int64)
        begins, is_admitted = rows * self._row_length + row * self._vector, rows > 0
        if parts is None:
            return ranges(begins, self._vector), is_admitted.repeat(self._vector), entries[is_admitted]
        vectors, within = parts
        return begins[vectors] + within, is_admitted[vectors], entries[is_admitted]

    def _occur(self, firsts: BlockColumns, times_ms: Indices, *, is_enough: bool = False) -> None:
        rows = self._table.touch(firsts // self._vector, times_ms, is_enough=is_enough)[1]
        new = rows.nonzero()[0]
        begins, columns = rows[new].astype(np.int64) * self._row_length, ranges(firsts[new], self._vector)
        for row in range(self._last):  # Of vectors that got the same row, the last one has it.
            self._numbers[ranges(begins + row * self._vector, self._vector)] = super().get(row, columns)

    def get(self, row: int, columns: BlockColumns | None, out: Numbers | None = None) -> Numbers:
        columns = self._named(columns)
        if row == self._last:
            return super().get(row, columns, out)
        places, is_admitted, _ = self._places(row, columns)
        values = gathered(self._numbers, places, out)
        if len(absent := np.flatnonzero(~is_admitted)):  # To draw no numbers takes .2 ms.
            values[absent] = super().get(row, columns[absent])
        return values

    def add(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        columns = self._named(columns)
        if row == OCCURRENCES:
            self._occur(columns, values)
            return
        places, is_admitted, entries = self._places(row, columns)
        if row == self._last:
            super().add(row, columns[is_admitted], values[is_admitted])
        else:
            np.add.at(self._numbers, places[is_admitted], values[is_admitted])
            self._table.renew(entries)

    def put(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        columns = self._named(columns)
        places, is_admitted, entries = self._places(row, columns)
        if not is_admitted.all():
            absent = columns[~is_admitted]
            firsts = distinct(absent - absent % self._vector)
            self._occur(firsts, np.full(len(firsts), UNKNOWN_TIME), is_enough=True)
            places, is_admitted, entries = self._places(row, columns)  # Without room, some are not admitted.
        if row == self._last:
            super().put(row, columns[is_admitted], values[is_admitted])
        else:
            self._numbers[places[is_admitted]] = values[is_admitted]
            self._table.renew(entries)

    def _named(self, columns: BlockColumns | None) -> BlockColumns:
        return np.arange(self.columns.start, self.columns.stop) if columns is None else columns

    def sparse_row(self, row: int) -> BlockRow:
        content = super().sparse_row(row)
        if row == self._last:
            _, is_admitted, _ = self._places(row, content.columns)  # Some may have left since.
            return BlockRow(content.columns[is_admitted], content.values[is_admitted], content.default)
        columns = ranges(self._table.arrays.keys[self._table.admitted()] * self._vector, self._vector)
        return BlockRow(columns, self.get(row, columns), content.default)

    def size_bytes(self) -> int:
        return self._table.size_bytes() + super().size_bytes()

    def freeze(self, encode: Encode) -> FrozenState:
        return super().freeze(encode) | {"table": self._files.snapshot()}

    def restore(self, state: FrozenState) -> None:
        super().restore(state)
        self._files.restore(state["table"])

    def take_over(self, other: SparseBlock, rows: range, columns: range) -> None:
        raise InternalError(f"{self._name}: expected the blocks of its state, given others")
