"""Functions of the user's, applied to one, two or three rows: arrays in, an array out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from streamiter.errors import ConfigurationError, ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.elementwise import Elementwise
from streamiter.parameter_server.psf.importing import importable_name, imported
from streamiter.parameter_server.psf.sparse_rows import aligned
from streamiter.parameter_server.storage.block import Block, Numbers

__all__ = ["Map", "Mapped", "Zip2Map", "Zip3Map"]


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
