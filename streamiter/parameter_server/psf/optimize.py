"""Optimizers as psfs: they update the weights on the shards, where the weights are stored.

The weights, the optimizer's slots (its state for each weight, such as Adam's m and v) and the sum of the workers'
gradients are rows of one matrix, in one row block. For Adam on two rows of weights (``weights=2``):

===========  ====================================================
rows         content
===========  ====================================================
0, 1         the weights
2, 3         slot m of row 0, slot m of row 1
4, 5         slot v of row 0, slot v of row 1
6, 7         the gradients of rows 0 and 1: ``add`` to these rows
===========  ====================================================

>>> from streamiter.parameter_server.optimizers import Adam
>>> optimize = Optimize("w", Adam(0.01), weights=2)
>>> Optimize.rows_needed(Adam(), weights=2), optimize.slot_row("v", 1), optimize.gradient_row(0)
(8, 5, 6)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, Self

import numpy as np

from streamiter.errors import OutOfRange, ParameterServerError
from streamiter.parameter_server.matrix import DrawnValues, Matrix
from streamiter.parameter_server.optimizers import Optimizer, checked_optimizer
from streamiter.parameter_server.psf.function import (
    AtLeast1,
    AtLeast1OrNone,
    Checked,
    GetFunction,
    Part,
    Positive,
    UpdateFunction,
    where,
)
from streamiter.parameter_server.storage.block import Block, BlockRow, Numbers
from streamiter.values.helpers.importing import importable_name
from streamiter.values.numbers import whole_number

# Columns of a row that are updated at once: the two or three temporary arrays of the optimizer stay below 1 MB, and in
# the processor's cache. For a whole row of 10 M numbers they would take 240 MB.
_CHUNK_COLUMNS: Final = 1 << 15


@dataclass(frozen=True)
class OptimizerRows(Checked, UpdateFunction, int64="refused"):
    """A psf on the rows of an optimizer; its methods return the number of each row."""

    optimizer: Optimizer
    _: KW_ONLY
    weights: AtLeast1 = 1

    def __post_init__(self) -> None:
        checked_optimizer(f"psf.{self.name}", self.optimizer)
        super().__post_init__()

    def require_importable(self) -> Self:
        super().require_importable()
        importable_name(type(self.optimizer), f"psf.{self.name}(optimizer=)", "its class")
        return self

    @property
    def in_words(self) -> str:
        """What a definition has of it: learning rates may change, slots may not."""
        return f"{self.name} with {self.optimizer.name}"

    @staticmethod
    def rows_needed(optimizer: Optimizer, weights: int = 1) -> int:
        """Return the least number of rows of the matrix: those of the weights, the slots and the gradients."""
        return weights * (2 + len(checked_optimizer("Optimize.rows_needed", optimizer).slot_names))

    def gradient_row(self, weight_row: int = 0) -> int:
        """Return the row of the gradients of a row of weights."""
        return self._row(1 + len(self.optimizer.slot_names), weight_row)

    def slot_row(self, slot: str, weight_row: int = 0) -> int:
        """Return the row of a slot (a name of ``optimizer.slot_names``) of a row of weights."""
        names = self.optimizer.slot_names
        if slot not in names:
            raise OutOfRange(
                f"psf.{self.name}.slot_row: expected a slot of {self.optimizer.name!r} ({', '.join(names) or 'none'}), "
                f"given {slot!r}"
            )
        return self._row(1 + names.index(slot), weight_row)

    def _row(self, group: int, weight_row: int) -> int:
        option = f"psf.{self.name}, row of weights"
        return group * self.weights + whole_number(option, weight_row, 0, self.weights - 1, error=OutOfRange)

    def rows(self, matrix: Matrix) -> Sequence[int]:
        needed = self.rows_needed(self.optimizer, self.weights)
        if matrix.rows < needed:  # Checked first: the error of a missing row would not say why.
            raise ParameterServerError(
                f"{where(self, matrix)}: expected at least {needed} rows ({self.weights} each of weights, "
                f"{''.join(f'{name}, ' for name in self.optimizer.slot_names)}and gradients), given {matrix.rows}; "
                f"make the matrix with rows={needed}"
            )
        return range(needed)

    def check(self, matrix: Matrix) -> None:
        needed = self.rows(matrix)
        super().check(matrix)
        if matrix.admission is not None and (self.weights > 1 or len(needed) != matrix.rows):
            raise ParameterServerError(
                f"{where(self, matrix)}: expected a matrix with admission to have the gradient as its last row, given "
                f"weights={self.weights} and {matrix.rows} rows; make it with weights=1 and rows={len(needed)}"
            )
        has_gradient = any(matrix.draws(self.gradient_row(row)) for row in range(self.weights))
        if has_gradient or (matrix.default and not isinstance(matrix.default, DrawnValues)):
            raise ParameterServerError(
                f"{where(self, matrix)}: expected default=0.0, the first value of gradients and slots, given "
                f"{matrix.default}; give the weights their default with psf.Fill"
            )


@dataclass(frozen=True)
class Optimize(OptimizerRows):
    """Update the weights with the sum of the gradients, once, and set the gradients to 0. Not for int64.

    ``optimizer`` is one of :mod:`streamiter.parameter_server.optimizers`. The gradients are first divided by ``scale``:
    the number of workers or examples whose gradients were added. ``step`` is the number of the update, from 1, for
    rates that decay and for Adam; None: each block counts its updates. ``weights`` is the number of rows of weights.

    On a dense matrix all columns are updated, also those whose gradient is 0: momentum and l2 still change the weight.
    With ``sparse=True``, and always on a sparse matrix, only columns whose gradient is not 0 are updated; the weights
    and slots of the other columns stay. (A sum of gradients that is exactly 0 counts as no gradient.) For FTRL both are
    the same; for SGD and AdaGrad both are the same without l1 and l2.

    As ``on_clock=`` of a matrix it runs whenever the minimum clock advances; as ``update=`` of an ``add``, once for
    each add. Raises ParameterServerError if the matrix has too few rows, or int64, or a default other than 0.

    >>> from streamiter.parameter_server.optimizers import SGD
    >>> Optimize("w", SGD(0.5), scale=4).gradient_row()
    1
    """

    _: KW_ONLY
    step: AtLeast1OrNone = None
    scale: Positive = 1.0
    sparse: bool = False

    only_stored = True
    checks_blocks = True
    checks_when_run = True

    def partition_check(self, block: Block, part: Part) -> None:
        if not block.is_sparse:
            return
        for weight_row in range(self.weights):
            row = self.gradient_row(weight_row)
            if default := block.sparse_row(row).default:
                raise ParameterServerError(
                    f"psf.Optimize on matrix {self.matrix!r}: expected gradients (row {row}) with a "
                    f"default of 0, given a default of {default}; add gradients for the columns that have one"
                )

    def partition_update(self, block: Block, part: Part) -> None:
        self.partition_check(block, part)  # The shard does not call it for ``on_clock`` and ``update=``.
        step = block.updates + 1 if self.step is None else self.step
        # Numbers that grow too large become infinite, as everywhere on the server; they must not fail other workers.
        with np.errstate(all="ignore"):
            for weight_row in range(self.weights):
                if block.is_sparse:
                    self._update_sparse(block, weight_row, step)
                else:
                    self._update_dense(block, weight_row, step)
        block.updates += 1

    def _update_dense(self, block: Block, weight_row: int, step: int) -> None:
        weights = block.dense_row(weight_row)
        gradient = block.dense_row(self.gradient_row(weight_row))
        slots = {name: block.dense_row(self.slot_row(name, weight_row)) for name in self.optimizer.slot_names}
        for begin in range(0, len(weights), _CHUNK_COLUMNS):
            chunk = slice(begin, min(begin + _CHUNK_COLUMNS, len(weights)))
            some_gradient = gradient[chunk]
            named = np.flatnonzero(some_gradient) if self.sparse else None
            if named is not None and not len(named):
                continue
            if self.scale != 1.0:
                some_gradient /= self.scale
            some_slots = {name: slot[chunk] for name, slot in slots.items()}
            if named is None:
                self.optimizer.update(weights[chunk], some_gradient, some_slots, step)
            else:
                self.optimizer.update_at(named, weights[chunk], some_gradient[named], some_slots, step)
            some_gradient.fill(0.0)

    def _update_sparse(self, block: Block, weight_row: int, step: int) -> None:
        gradient_row = self.gradient_row(weight_row)
        given = block.sparse_row(gradient_row)
        if not len(given.columns):
            return
        columns = given.columns
        rows = {name: self.slot_row(name, weight_row) for name in self.optimizer.slot_names}
        weights = block.get(weight_row, columns)
        slots = {name: block.get(row, columns) for name, row in rows.items()}
        self.optimizer.update(weights, given.values / self.scale, slots, step)
        block.put(weight_row, columns, weights)
        for name, row in rows.items():
            block.put(row, columns, slots[name])
        block.replace_row(gradient_row, BlockRow(columns[:0].copy(), given.values[:0].copy(), 0.0))


@dataclass(frozen=True)
class UpdatesMade(GetFunction):
    """Return how many updates the optimizer has made; of blocks that differ, the most."""

    matrix: str

    only_stored = True

    def partition_get(self, block: Block, part: Part) -> int:
        return block.updates

    def merge(self, parts: Sequence[int]) -> int:
        return max(parts)


@dataclass(frozen=True)
class ContinueUpdates(UpdateFunction):
    """Let the optimizer count on from the updates that it has made elsewhere. In ``init=``, of a new matrix."""

    matrix: str
    updates: int

    only_stored = True

    def partition_update(self, block: Block, part: Part) -> None:
        block.updates = self.updates


@dataclass(frozen=True)
class InitialSlots(OptimizerRows):
    """Fill the rows of slots with the optimizer's initial slots for the weights as they are now. Not for int64.

    Most slots are 0 initially, as the rows of a matrix are. ``FTRL(keep_start=True)`` needs this psf, and so does a
    reset of the optimizer. In ``init=``, write it behind the function that sets the weights.

    >>> from streamiter.parameter_server.optimizers import FTRL
    >>> InitialSlots("w", FTRL(keep_start=True)).slot_row("z")
    1
    """

    def partition_update(self, block: Block, part: Part) -> None:
        for weight_row in range(self.weights):
            if block.is_sparse:
                self._fill_sparse(block, weight_row)
            else:
                self._fill_dense(block, weight_row)

    def _fill_dense(self, block: Block, weight_row: int) -> None:
        weights = block.dense_row(weight_row)
        for begin in range(0, len(weights), _CHUNK_COLUMNS):
            chunk = slice(begin, begin + _CHUNK_COLUMNS)
            for name, slot in self._slots(weights[chunk]).items():
                block.dense_row(self.slot_row(name, weight_row))[chunk] = slot

    def _fill_sparse(self, block: Block, weight_row: int) -> None:
        weights = block.sparse_row(weight_row)
        values = np.append(weights.values, weights.values.dtype.type(weights.default))
        for name, slot in self._slots(values).items():
            content = BlockRow(weights.columns.copy(), slot[:-1], float(slot[-1]))
            block.replace_row(self.slot_row(name, weight_row), content)

    def _slots(self, weights: Numbers) -> dict[str, Numbers]:
        return self.optimizer.new_slots(weights) if self.optimizer.slot_names else {}
