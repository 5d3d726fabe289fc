"""Elementwise functions of one row: the result overwrites row ``to``, which may be the same row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamiter.parameter_server.psf.elementwise import Elementwise
from streamiter.parameter_server.storage.block import Numbers

__all__ = [
    "Abs",
    "Ceil",
    "Copy",
    "Exp",
    "Expm1",
    "Floor",
    "Log",
    "Log1p",
    "Log10",
    "Round",
    "Signum",
    "Sqrt",
    "Unary",
]


@dataclass(frozen=True)
class Unary(Elementwise):
    """Row ``to`` = function of row ``source``.

    >>> Sqrt("w", source=0, to=1)
    Sqrt(matrix='w', source=0, to=1)
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
