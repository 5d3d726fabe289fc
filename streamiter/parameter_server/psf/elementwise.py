"""Update functions that compute a row number by number, from other rows or from itself.

A result in a column depends on the numbers in that column only, so the function runs on each block by itself. A family
is a class with the arguments; its members differ in one numpy function, and are rows of the table in ``psf``. The last
family, the maps, applies a function of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from streamiter.errors import ConfigurationError, ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import (
    NUMBER,
    SOURCE,
    TARGET,
    ChangedRow,
    Checked,
    Number,
    Part,
    Row,
    Target,
    UpdateFunction,
    UserFunction,
    aligned,
    fields_with,
    same_numbers,
    where,
    without_default,
)
from streamiter.parameter_server.storage.block import Block, BlockColumns, DTypeOfNumbers, Numbers
from streamiter.values.helpers.importing import importable_name, imported

_Absent: TypeAlias = tuple[int, float]
"""The first column that no source row stores (−1: not looked for), and the number of all such columns."""


class Elementwise(Checked, UpdateFunction):
    """A target row becomes a function of source rows and of numbers.

    A derived class is a dataclass; the annotations of its fields say which are source rows, the target row and numbers.
    Its class keyword ``ufunc`` is called as ``ufunc(*sources, *numbers, out=target)``.

    Results are those of IEEE arithmetic (log 0 = −inf, √−1 = NaN), without exceptions or warnings. Arithmetic on int64
    is numpy's, and wraps around at 64 bits. A number is first converted to the dtype of the row: a row of float32 stays
    float32, and a number that is too large for it becomes infinite.

    In a sparse row, the stored values and the default are both computed. Rows that are combined give the union of their
    columns. A value that equals the new default is not stored (−0 equals 0 here).
    """

    _ufunc: ClassVar[Callable[..., object]]

    @property
    def sources(self) -> tuple[int, ...]:
        """The rows that are read."""
        return tuple(getattr(self, field) for field in fields_with(type(self), SOURCE))

    @property
    def target(self) -> int:
        """The row that is overwritten."""
        row: int = getattr(self, fields_with(type(self), TARGET)[0])
        return row

    def compute(self, columns: range | BlockColumns, sources: Sequence[Numbers], out: Numbers) -> None:
        """Write the result for some columns to ``out``, which may be one of the sources."""
        if self._int64 == "copied" and out.dtype.kind == "i":
            np.copyto(out, sources[0])
        else:
            numbers = [out.dtype.type(getattr(self, field)) for field in fields_with(type(self), NUMBER)]
            self._ufunc(*sources, *numbers, out=out)

    def partition_update(self, block: Block, part: Part) -> None:
        with np.errstate(all="ignore"):
            if block.is_sparse:
                columns, values, absent = self.sparse_result(block)
                # If no column is absent, no column has the default.
                default = block.sparse_row(self.target).default if absent is None else absent[1]
                block.replace_row(self.target, without_default(columns, values, default))
            else:
                self.compute(block.columns, self.dense_sources(block), block.dense_row(self.target))

    def dense_sources(self, block: Block) -> list[Numbers]:
        """Return the rows that are read, of a dense block."""
        return [block.dense_row(row) for row in self.sources]

    def sparse_sources(self, block: Block) -> tuple[BlockColumns, list[Numbers]]:
        """Return the columns that a source row of a sparse block stores, and the rows' values there and elsewhere."""
        return aligned([block.sparse_row(row) for row in self.sources], block.dtype)

    def sparse_result(self, block: Block) -> tuple[BlockColumns, Numbers, _Absent | None]:
        """Return the columns that a source row stores, their results, and what absent columns become."""
        # The default is the last element of each array, and is computed with the values.
        columns, sources = self.sparse_sources(block)
        out = np.empty(len(columns) + 1, block.dtype)
        self.compute(columns, sources, out)
        return columns, out[:-1], (-1, out[-1].item())


@dataclass(frozen=True)
class OneRow(Elementwise, sentence="Row ``to`` = {}, for each number x of row ``source``."):
    """Row ``to`` = function of row ``source``; both may be the same row."""

    source: Row
    to: Target


@dataclass(frozen=True)
class TwoRows(Elementwise, sentence="Row ``to`` = {}, for x of row ``first`` and y of row ``second``."):
    """Row ``to`` = function of rows ``first`` (x) and ``second`` (y); ``to`` may be one of them."""

    first: Row
    second: Row
    to: Target


@dataclass(frozen=True)
class RowAndNumber(Elementwise, sentence="Row ``to`` = {}, for each number x of row ``source``."):
    """Row ``to`` = function of row ``source`` (x) and ``scalar``, which must be whole for int64."""

    source: Row
    to: Target
    scalar: Number


def round_up(values: Numbers, out: Numbers) -> None:
    """Round to whole numbers; ties go up."""
    np.add(values, values.dtype.type(0.5), out=out)
    np.floor(out, out=out)


@dataclass(frozen=True)
class DivS(RowAndNumber, ufunc=np.divide, int64="refused"):
    """Row ``to`` = x / ``scalar``, for each number x of row ``source``; ``scalar`` is not 0. Not for int64.

    >>> DivS("w", source=0, to=1, scalar=2.0)
    DivS(matrix='w', source=0, to=1, scalar=2.0)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scalar == 0:
            raise ConfigurationError(f"psf.DivS(scalar=): expected a number other than 0, given {self.scalar!r}")


@dataclass(frozen=True)
class Pow(Elementwise, ufunc=np.power):
    """Row ``to`` = row ``source`` to the power ``exponent``. For int64 the exponent must be whole and not negative.

    >>> Pow("w", source=0, to=1, exponent=2)
    Pow(matrix='w', source=0, to=1, exponent=2)
    """

    source: Row
    to: Target
    exponent: Number

    def check(self, matrix: Matrix) -> None:
        super().check(matrix)
        if matrix.dtype == "int64" and self.exponent < 0:
            raise ParameterServerError(
                f"{where(self, matrix)}, exponent=: expected a number of 0 or more, because the matrix stores int64, "
                f"given {self.exponent!r}"
            )


@dataclass(frozen=True)
class Scale(Elementwise, ufunc=np.multiply):
    """Row = row · ``scalar``. For int64 ``scalar`` must be whole.

    >>> Scale("w", row=0, scalar=2.0)
    Scale(matrix='w', row=0, scalar=2.0)
    """

    row: ChangedRow
    scalar: Number


def _axpy(x: Numbers, y: Numbers, a: Numbers, out: Numbers) -> None:
    np.add(np.multiply(x, a), y, out=out)


@dataclass(frozen=True)
class Axpy(Elementwise, ufunc=_axpy):
    """Row ``y`` = a · row ``x`` + row ``y``. For int64 ``a`` must be whole.

    >>> Axpy("w", x=0, y=1, a=2.0)
    Axpy(matrix='w', x=0, y=1, a=2.0)
    """

    x: Row
    y: ChangedRow
    a: Number


# -- functions of the user -------------------------------------------------------------------------------------


class _Mapped(Elementwise):
    """Row ``to`` = a function of the user, applied to source rows.

    ``function`` takes one array for each source row, with the same columns, and returns an array of as many numbers. It
    must not change its arguments. It is a callable, or its name as ``"module:function"``. Where shards run in other
    processes, they must be able to import it. The engine may call it for any columns, in any number, so the result for
    one column must not depend on another column. The engine may call it twice: once to check it, before any block is
    changed.
    """

    function: UserFunction

    checks_blocks = True

    @property
    def _option(self) -> str:
        return f"psf.{self.name}(function=)"

    def check(self, matrix: Matrix) -> None:
        super().check(matrix)
        self._callable()

    def require_importable(self) -> Self:
        super().require_importable()
        if isinstance(self.function, str):
            return self
        name = importable_name(self.function, self._option, "a function")
        return replace(self, function=name)  # type: ignore[call-arg]

    def partition_check(self, block: Block, part: Part) -> _Absent | None:
        with np.errstate(all="ignore"):
            if block.is_sparse:
                return self.sparse_result(block)[2]
            self._call(block.columns, self.dense_sources(block), block.dtype)
            return None

    def compute(self, columns: range | BlockColumns, sources: Sequence[Numbers], out: Numbers) -> None:
        np.copyto(out, self._call(columns, sources, out.dtype), casting="unsafe")

    def arguments(self, columns: range | BlockColumns, sources: Sequence[Numbers]) -> Sequence[Numbers]:
        """Return the arguments of the user's function for some columns."""
        return sources

    def _call(self, columns: range | BlockColumns, sources: Sequence[Numbers], dtype: DTypeOfNumbers) -> Numbers:
        """Return the result of the function; raise ParameterServerError unless it fits numbers of ``dtype``."""
        expected = f"psf.{self.name} on matrix {self.matrix!r}: expected its function to return"
        views = [argument.view() for argument in self.arguments(columns, sources)]
        for view in views:
            view.setflags(write=False)
        try:
            result = np.asarray(self._callable()(*views))
        except Exception as error:
            raise ParameterServerError(f"{expected} an array, given {type(error).__name__}: {error}") from error
        if result.shape != views[0].shape:
            raise ParameterServerError(
                f"{expected} an array of shape {views[0].shape}, as its arguments have, given {result.shape}"
            )
        if result.dtype.kind not in ("iub" if dtype.kind == "i" else "iubf"):
            numbers = "whole numbers" if dtype.kind == "i" else "numbers"
            raise ParameterServerError(f"{expected} {numbers}, for a matrix of {dtype}; given {result.dtype}")
        return result

    def _callable(self) -> Callable[..., Any]:
        if not isinstance(self.function, str):
            return self.function
        function = imported(self.function, self._option)
        if not callable(function):
            raise ConfigurationError(
                f"{self._option}: expected a function, given {self.function!r}, which is {function!r}"
            )
        return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Map(_Mapped):
    """Row ``to`` = f(x) of row ``source``.

    >>> Map("w", 0, 1, "numpy:tanh")
    Map(matrix='w', source=0, to=1, function='numpy:tanh')
    """

    source: Row
    to: Target
    function: UserFunction


@dataclass(frozen=True)
class Zip2Map(_Mapped):
    """Row ``to`` = f(x, y) of rows ``first`` and ``second``.

    >>> Zip2Map("w", 0, 1, to=2, function="numpy:hypot")
    Zip2Map(matrix='w', first=0, second=1, to=2, function='numpy:hypot')
    """

    first: Row
    second: Row
    to: Target
    function: UserFunction


@dataclass(frozen=True)
class Zip3Map(_Mapped):
    """Row ``to`` = f(x, y, z) of rows ``first``, ``second`` and ``third``."""

    first: Row
    second: Row
    third: Row
    to: Target
    function: UserFunction


_TRIED_COLUMNS = 1 << 16
"""Absent columns for which the function is called at a time: a megabyte of arguments, however wide the matrix is."""


class _IndexedMap(_Mapped):
    """Row ``to`` = a function of the user, applied to global column numbers (int64) and source rows.

    On sparse rows the function must return one number for all columns that are absent from all source rows: this
    number is the new default. The engine calls the function for each absent column, which takes time in proportion to
    the width of the matrix. The settings are those of the map without the index.
    """

    def arguments(self, columns: range | BlockColumns, sources: Sequence[Numbers]) -> Sequence[Numbers]:
        return [np.arange(columns.start, columns.stop) if isinstance(columns, range) else columns, *sources]

    def check_together(self, checks: Sequence[_Absent | None]) -> None:
        """Raise ParameterServerError unless the absent columns of all blocks get the same number."""
        found = [check for check in checks if check is not None]
        for column, default in found[1:]:
            self._check_same(found[0], np.array([column]), np.array([default]))

    def sparse_result(self, block: Block) -> tuple[BlockColumns, Numbers, _Absent | None]:
        columns, sources = self.sparse_sources(block)
        values = np.empty(len(columns), block.dtype)
        if len(columns):
            self.compute(columns, [source[:-1] for source in sources], values)
        return columns, values, self._absent(block, columns, sources)

    def _absent(self, block: Block, columns: BlockColumns, sources: Sequence[Numbers]) -> _Absent | None:
        """Return the first absent column and the number of all absent columns; None if no column is absent."""
        found: _Absent | None = None
        for start in range(block.columns.start, block.columns.stop, _TRIED_COLUMNS):
            stop = min(start + _TRIED_COLUMNS, block.columns.stop)
            present = columns[np.searchsorted(columns, start) : np.searchsorted(columns, stop)]
            is_absent = np.ones(stop - start, bool)
            is_absent[present - start] = False
            absent = np.flatnonzero(is_absent) + start
            if not len(absent):
                continue
            values = np.empty(len(absent), block.dtype)
            self.compute(absent, [np.full(len(absent), source[-1]) for source in sources], values)
            if found is None:
                found = int(absent[0]), values[0].item()
            self._check_same(found, absent, values)
        return found

    def _check_same(self, first: _Absent, columns: BlockColumns, values: Numbers) -> None:
        same = same_numbers(values, first[1])
        if not same.all():
            at = int(same.argmin())
            given = f"{first[1]} for column {first[0]} and {values[at].item()} for column {columns[at]}"
            raise ParameterServerError(
                f"psf.{self.name} on matrix {self.matrix!r}: expected its function to return one number for all "
                f"columns that are absent from sparse rows, given {given}; use a dense matrix"
            )


@dataclass(frozen=True)
class MapWithIndex(_IndexedMap, Map):
    """Row ``to`` = f(i, x) of column numbers and row ``source``.

    >>> MapWithIndex("w", 0, 1, function="numpy:multiply")
    MapWithIndex(matrix='w', source=0, to=1, function='numpy:multiply')
    """


@dataclass(frozen=True)
class Zip2MapWithIndex(_IndexedMap, Zip2Map):
    """Row ``to`` = f(i, x, y) of column numbers and rows ``first`` and ``second``."""


@dataclass(frozen=True)
class Zip3MapWithIndex(_IndexedMap, Zip3Map):
    """Row ``to`` = f(i, x, y, z) of column numbers and rows ``first``, ``second`` and ``third``."""
