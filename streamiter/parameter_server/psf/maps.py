"""Functions of the user's, applied to one, two or three rows: arrays in, an array out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from streamiter.errors import ConfigurationError, ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.elementwise import Elementwise
from streamiter.parameter_server.psf.function import (
    aligned,
    importable_name,
    imported,
    same_numbers,
    without_default,
)
from streamiter.parameter_server.storage.block import Block, Columns, Numbers

__all__ = [
    "Map",
    "MapWithIndex",
    "Zip2Map",
    "Zip2MapWithIndex",
    "Zip3Map",
    "Zip3MapWithIndex",
]


class Mapped(Elementwise):
    """Row ``to`` = the user's function of rows.

    ``function`` gets the same columns of each row, as arrays that it must not change, and returns an array of as many
    numbers. It is a callable, or its name as ``"module:function"``; where shards are in other processes they have to be
    able to import it. It may be called for any columns in any number, so a number must not depend on those beside it;
    and, to check it before anything is changed, more than once.
    """

    function: Callable[..., Any] | str

    target_field = "to"
    checks_blocks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function) and not isinstance(self.function, str):
            raise ConfigurationError(
                f"psf.{self.name}(function=): expected a function or its name as 'module:function', "
                f"given {self.function!r}"
            )

    def check(self, matrix: Matrix) -> None:
        super().check(matrix)
        self._callable()

    def require_importable(self) -> Self:
        super().require_importable()
        if isinstance(self.function, str):
            return self
        name = importable_name(self.function, f"psf.{self.name}(function=)", "a function")
        return replace(self, function=name)  # type: ignore[type-var]

    def partition_check(self, block: Block, part: Any) -> Any:
        with np.errstate(all="ignore"):
            if block.is_sparse:
                _, sources = aligned([block.sparse_row(row) for row in self.sources], block.dtype)
            else:
                sources = [block.dense_row(row) for row in self.sources]
            self.call(sources, block.dtype)

    def compute(self, sources: Sequence[Numbers], out: Numbers) -> None:
        np.copyto(out, self.call(sources, out.dtype), casting="unsafe")

    def call(self, arguments: Sequence[Numbers], dtype: np.dtype[Any]) -> Numbers:
        """What the function returns, checked to fit numbers of ``dtype``."""
        expected = f"psf.{self.name} on matrix {self.matrix!r}: expected its function to return"
        views = [argument.view() for argument in arguments]
        for view in views:
            view.setflags(write=False)
        try:
            result = np.asarray(self._callable()(*views))
        except Exception as error:
            raise ParameterServerError(
                f"{expected} an array, given {type(error).__name__}: {error}"
            ) from error
        if result.shape != arguments[0].shape:
            raise ParameterServerError(
                f"{expected} an array of shape {arguments[0].shape}, as its arguments have, given {result.shape}"
            )
        if result.dtype.kind not in ("iub" if dtype.kind == "i" else "iubf"):
            numbers = "whole numbers" if dtype.kind == "i" else "numbers"
            raise ParameterServerError(f"{expected} {numbers}, for a matrix of {dtype}; given {result.dtype}")
        return result

    def _callable(self) -> Callable[..., Any]:
        if not isinstance(self.function, str):
            return self.function
        function = imported(self.function, f"psf.{self.name}(function=)")
        if not callable(function):
            raise ConfigurationError(
                f"psf.{self.name}(function=): expected a function, given {self.function!r}, which is {function!r}"
            )
        return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Map(Mapped):
    """f(x).

    >>> Map("w", 0, 1, "numpy:tanh")
    Map(matrix='w', source=0, to=1, function='numpy:tanh')
    """

    matrix: str
    source: int
    to: int
    function: Callable[..., Any] | str

    source_fields = ("source",)


@dataclass(frozen=True)
class Zip2Map(Mapped):
    """f(x, y).

    >>> Zip2Map("w", 0, 1, to=2, function="numpy:hypot")
    Zip2Map(matrix='w', first=0, second=1, to=2, function='numpy:hypot')
    """

    matrix: str
    first: int
    second: int
    to: int
    function: Callable[..., Any] | str

    source_fields = ("first", "second")


@dataclass(frozen=True)
class Zip3Map(Mapped):
    """f(x, y, z)."""

    matrix: str
    first: int
    second: int
    third: int
    to: int
    function: Callable[..., Any] | str

    source_fields = ("first", "second", "third")


_PIECE = 1 << 16
"""Absent columns that are tried at a time: a megabyte of arguments, however wide the matrix is."""


class IndexedMap(Mapped):
    """Row ``to`` = the user's function of global column numbers (int64) and rows.

    On sparse rows it has to give one number for all columns that are absent from all rows; this is the new default. It
    is tried on each of them, which takes time in proportion to the width of the matrix. Settings are those of the map
    without the index.

    Functions of the user's that see the column's number, too.
    """

    def partition_check(self, block: Block, part: Any) -> Any:
        with np.errstate(all="ignore"):
            if block.is_sparse:
                columns, sources = aligned([block.sparse_row(row) for row in self.sources], block.dtype)
                self._values(columns, sources, block.dtype)
                return self._default(block, columns, sources)
            self._dense(block)
            return None

    def check_together(self, checks: Sequence[Any]) -> None:
        """One number for the absent columns of all blocks."""
        found = [check for check in checks if check is not None]
        for column, default in found[1:]:
            self._check_same(found[0], np.array([column]), np.array([default]))

    def partition_update(self, block: Block, part: Any) -> None:
        with np.errstate(all="ignore"):
            if block.is_sparse:
                columns, sources = aligned([block.sparse_row(row) for row in self.sources], block.dtype)
                values = self._values(columns, sources, block.dtype)
                found = self._default(block, columns, sources)
                # With no column absent the default matters to nobody.
                default = block.sparse_row(self.target).default if found is None else found[1]
                block.replace_row(self.target, without_default(columns, values, default))
            else:
                np.copyto(block.dense_row(self.target), self._dense(block), casting="unsafe")

    def _dense(self, block: Block) -> Numbers:
        index = np.arange(block.columns.start, block.columns.stop)
        return self.call([index, *(block.dense_row(row) for row in self.sources)], block.dtype)

    def _values(self, columns: Columns, sources: Sequence[Numbers], dtype: np.dtype[Any]) -> Numbers:
        """Where some row has a value of its own."""
        if not len(columns):
            return np.empty(0, dtype)
        return self.call([columns, *(source[:-1] for source in sources)], dtype).astype(dtype)

    def _default(
        self, block: Block, columns: Columns, sources: Sequence[Numbers]
    ) -> tuple[int, float] | None:
        """The first absent column and what it gets, as all others do; None where no column is absent."""
        found: tuple[int, float] | None = None
        for start in range(block.columns.start, block.columns.stop, _PIECE):
            stop = min(start + _PIECE, block.columns.stop)
            present = columns[np.searchsorted(columns, start) : np.searchsorted(columns, stop)]
            is_absent = np.ones(stop - start, bool)
            is_absent[present - start] = False
            absent = np.flatnonzero(is_absent) + start
            if not len(absent):
                continue
            values = self.call(
                [absent, *(np.full(len(absent), source[-1]) for source in sources)], block.dtype
            ).astype(block.dtype)
            if found is None:
                found = int(absent[0]), values[0].item()
            self._check_same(found, absent, values)
        return found

    def _check_same(self, first: tuple[int, float], columns: Columns, values: Numbers) -> None:
        same = same_numbers(values, first[1])
        if not same.all():
            at = int(same.argmin())
            given = f"{first[1]} for column {first[0]} and {values[at].item()} for column {columns[at]}"
            raise ParameterServerError(
                f"psf.{self.name} on matrix {self.matrix!r}: expected its function to return one number for all "
                f"columns that are absent from sparse rows, given {given}; use a dense matrix"
            )


@dataclass(frozen=True)
class MapWithIndex(IndexedMap, Map):
    """f(i, x).

    >>> MapWithIndex("w", 0, 1, function="numpy:multiply")
    MapWithIndex(matrix='w', source=0, to=1, function='numpy:multiply')
    """


@dataclass(frozen=True)
class Zip2MapWithIndex(IndexedMap, Zip2Map):
    """f(i, x, y)."""


@dataclass(frozen=True)
class Zip3MapWithIndex(IndexedMap, Zip3Map):
    """f(i, x, y, z)."""
