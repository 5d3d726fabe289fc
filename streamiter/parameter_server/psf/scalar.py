"""Elementwise functions of a row and a number, and those that change a row in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamiter.errors import ConfigurationError, ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.elementwise import Elementwise
from streamiter.parameter_server.psf.settings import where
from streamiter.parameter_server.storage.block import Numbers

__all__ = ["AddS", "Axpy", "DivS", "MulS", "Pow", "Scalar", "Scale", "SubS"]

# Where a number stands beside a row it is first made one of the row's dtype: a row of float32 stays one, and what is
# too large for it is infinite.


@dataclass(frozen=True)
class Scalar(Elementwise):
    """Row ``to`` = function of row ``source`` and a number. For int64 the number has to be whole.

    >>> MulS("w", source=0, to=1, scalar=2.0)
    MulS(matrix='w', source=0, to=1, scalar=2.0)
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
