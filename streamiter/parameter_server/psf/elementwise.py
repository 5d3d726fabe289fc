"""What all psfs have in common whose result in a column depends on that column only."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamiter.errors import ConfigurationError, ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import (
    UpdateFunction,
    aligned,
    check_fits_dtype,
    check_fractions_fit,
    set_numbers,
    set_rows,
    where,
    without_default,
)
from streamiter.parameter_server.storage.block import Block, Numbers

__all__ = [
    "Abs",
    "Add",
    "AddS",
    "Axpy",
    "Ceil",
    "Copy",
    "Div",
    "DivS",
    "Elementwise",
    "Exp",
    "Expm1",
    "Floor",
    "Log",
    "Log1p",
    "Log10",
    "MaxV",
    "MinV",
    "Mul",
    "MulS",
    "Pow",
    "Round",
    "Scale",
    "Signum",
    "Sqrt",
    "Sub",
    "SubS",
]


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


@dataclass(frozen=True)
class Unary(Elementwise):
    """Row ``to`` = function of row ``source``.

    >>> Sqrt("w", source=0, to=1)
    Sqrt(matrix='w', source=0, to=1)

    Elementwise functions of one row: the result overwrites row ``to``, which may be the same row.
    """

    matrix: str
    source: int
    to: int

    source_fields = ("source",)
    target_field = "to"
    body: ClassVar[Callable[..., Any]]
    keeps_whole_numbers: ClassVar[bool] = False
    """It changes no whole number."""

    def compute(self, sources: Sequence[Numbers], out: Numbers) -> None:
        if self.keeps_whole_numbers and out.dtype.kind == "i":
            np.copyto(out, sources[0])
        else:
            type(self).body(sources[0], out=out)


class Abs(Unary):
    """``|x|``."""

    body = np.absolute


class Ceil(Unary):
    """The least whole number that is not below x."""

    body = np.ceil
    keeps_whole_numbers = True


class Copy(Unary):
    """x."""

    body = np.positive
    keeps_whole_numbers = True


class Exp(Unary):
    """e to the x. Not for int64."""

    body = np.exp
    gives_fractions = True


class Expm1(Unary):
    """eˣ − 1, precise near 0. Not for int64."""

    body = np.expm1
    gives_fractions = True


class Floor(Unary):
    """The greatest whole number that is not above x."""

    body = np.floor
    keeps_whole_numbers = True


class Log(Unary):
    """The natural logarithm; of 0 it is −inf, below 0 NaN. Not for int64."""

    body = np.log
    gives_fractions = True


class Log10(Unary):
    """The logarithm to base 10. Not for int64."""

    body = np.log10
    gives_fractions = True


class Log1p(Unary):
    """log(1 + x), precise near 0. Not for int64."""

    body = np.log1p
    gives_fractions = True


def _round(values: Numbers, out: Numbers) -> None:
    np.add(values, values.dtype.type(0.5), out=out)
    np.floor(out, out=out)


class Round(Unary):
    """⌊x + ½⌋: ties go up (0.5 → 1, −0.5 → 0, 2.5 → 3), unlike numpy's."""

    body = _round
    keeps_whole_numbers = True


class Signum(Unary):
    """−1, 0 or 1; of NaN, NaN."""

    body = np.sign


class Sqrt(Unary):
    """The square root; below 0 NaN. Not for int64."""

    body = np.sqrt
    gives_fractions = True


@dataclass(frozen=True)
class Binary(Elementwise):
    """Row ``to`` = function of rows ``first`` and ``second``.

    >>> Add("w", 0, 1, to=2)
    Add(matrix='w', first=0, second=1, to=2)

    Elementwise functions of two rows: the result overwrites row ``to``, which may be one of them.
    """

    matrix: str
    first: int
    second: int
    to: int

    source_fields = ("first", "second")
    target_field = "to"
    body: ClassVar[Callable[..., Any]]

    def compute(self, sources: Sequence[Numbers], out: Numbers) -> None:
        type(self).body(*sources, out=out)


class Add(Binary):
    """x + y."""

    body = np.add


class Sub(Binary):
    """x − y."""

    body = np.subtract


class Mul(Binary):
    """x · y, number by number."""

    body = np.multiply


class Div(Binary):
    """x / y; x/0 = ±inf, 0/0 = NaN. Not for int64."""

    body = np.divide
    gives_fractions = True


class MaxV(Binary):
    """The larger of x and y; NaN where one is NaN."""

    body = np.maximum


class MinV(Binary):
    """The smaller of x and y; NaN where one is NaN."""

    body = np.minimum


# Where a number stands beside a row it is first made one of the row's dtype: a row of float32 stays one, and what is
# too large for it is infinite.


@dataclass(frozen=True)
class Scalar(Elementwise):
    """Row ``to`` = function of row ``source`` and a number. For int64 the number has to be whole.

    >>> MulS("w", source=0, to=1, scalar=2.0)
    MulS(matrix='w', source=0, to=1, scalar=2.0)

    Elementwise functions of a row and a number, and those that change a row in place.
    """

    matrix: str
    source: int
    to: int
    scalar: float

    source_fields = ("source",)
    target_field = "to"
    number_fields = ("scalar",)
    body: ClassVar[Callable[..., Any]]

    def compute(self, sources: Sequence[Numbers], out: Numbers) -> None:
        type(self).body(sources[0], out.dtype.type(self.scalar), out=out)


class AddS(Scalar):
    """x + scalar."""

    body = np.add


class SubS(Scalar):
    """x − scalar."""

    body = np.subtract


class MulS(Scalar):
    """x · scalar."""

    body = np.multiply


class DivS(Scalar):
    """x / scalar, which is not 0. Not for int64."""

    body = np.divide
    gives_fractions = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scalar == 0:
            raise ConfigurationError(
                f"psf.DivS(scalar=): expected a number other than 0, given {self.scalar!r}"
            )


@dataclass(frozen=True)
class Pow(Elementwise):
    """Row ``to`` = row ``source`` to a power. For int64 the exponent has to be whole and not negative."""

    matrix: str
    source: int
    to: int
    exponent: float

    source_fields = ("source",)
    target_field = "to"
    number_fields = ("exponent",)

    def check(self, matrix: Matrix) -> None:
        super().check(matrix)
        if matrix.dtype == "int64" and self.exponent < 0:
            raise ParameterServerError(
                f"{where(self, matrix)}, exponent=: expected a number of 0 or more, for the matrix is of int64, "
                f"given {self.exponent!r}"
            )

    def compute(self, sources: Sequence[Numbers], out: Numbers) -> None:
        np.power(sources[0], out.dtype.type(self.exponent), out=out)


@dataclass(frozen=True)
class Scale(Elementwise):
    """The row itself times ``scalar``."""

    matrix: str
    row: int
    scalar: float

    source_fields = ("row",)
    target_field = "row"
    number_fields = ("scalar",)

    def compute(self, sources: Sequence[Numbers], out: Numbers) -> None:
        np.multiply(sources[0], out.dtype.type(self.scalar), out=out)


@dataclass(frozen=True)
class Axpy(Elementwise):
    """Row ``y`` = a · row ``x`` + row ``y``.

    >>> Axpy("w", x=0, y=1, a=2.0)
    Axpy(matrix='w', x=0, y=1, a=2.0)
    """

    matrix: str
    x: int
    y: int
    a: float

    source_fields = ("x", "y")
    target_field = "y"
    number_fields = ("a",)

    def compute(self, sources: Sequence[Numbers], out: Numbers) -> None:
        np.add(np.multiply(sources[0], out.dtype.type(self.a)), sources[1], out=out)
