"""What all psfs have in common whose result in a column depends on that column only."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.psf.settings import (
    check_fits_dtype,
    check_fractions_fit,
    set_numbers,
    set_rows,
)
from streamiter.parameter_server.psf.sparse_rows import aligned, without_default
from streamiter.parameter_server.storage.block import Block, Numbers

__all__ = ["Elementwise"]


class Elementwise(UpdateFunction):
    """A row becomes a function of others, or of itself; a derived class names its fields and has the body.

    Results are those of IEEE arithmetic (log 0 = −inf, √−1 = NaN), without exceptions or warnings. On whole numbers
    arithmetic is numpy's, and wraps around at 64 bits.

    Of a sparse row the values that are there and the default are both mapped; rows that are combined bring the
    union of their columns. A value that equals the new default is not stored (−0 counts as 0 there).
    """

    source_fields: ClassVar[tuple[str, ...]] = ()
    target_field: ClassVar[str]
    number_fields: ClassVar[tuple[str, ...]] = ()
    gives_fractions: ClassVar[bool] = False
    """Then it is refused for a matrix of whole numbers."""

    def __post_init__(self) -> None:
        set_rows(self, *self.source_fields, self.target_field)
        set_numbers(self, *self.number_fields)

    @abc.abstractmethod
    def compute(self, sources: Sequence[Numbers], out: Numbers) -> None:
        """The body: the same columns of each source, to ``out``, which may be one of the sources itself."""

    @property
    def sources(self) -> tuple[int, ...]:
        """The rows that are read."""
        return tuple(getattr(self, field) for field in self.source_fields)

    @property
    def target(self) -> int:
        """The row that is overwritten."""
        row: int = getattr(self, self.target_field)
        return row

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return (*self.sources, self.target)

    def changed_rows(self, matrix: Matrix, block: Block) -> Sequence[int]:
        return (self.target,)

    def check(self, matrix: Matrix) -> None:
        if self.gives_fractions:
            check_fractions_fit(self, matrix)
        check_fits_dtype(self, matrix, self.number_fields)

    def partition_update(self, block: Block, part: Any) -> None:
        del part
        with np.errstate(all="ignore"):
            if block.is_sparse:
                self._update_sparse(block)
            else:
                self.compute([block.dense_row(row) for row in self.sources], block.dense_row(self.target))

    def _update_sparse(self, block: Block) -> None:
        # The default stands behind the values, and is mapped with them.
        columns, sources = aligned([block.sparse_row(row) for row in self.sources], block.dtype)
        out = np.empty(len(columns) + 1, block.dtype)
        self.compute(sources, out)
        block.replace_row(self.target, without_default(columns, out[:-1], out[-1].item()))
