"""Elementwise functions of two rows: the result overwrites row ``to``, which may be one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamiter.parameter_server.psf.elementwise import Elementwise
from streamiter.parameter_server.storage.block import Numbers

__all__ = ["Add", "Binary", "Div", "MaxV", "MinV", "Mul", "Sub"]


@dataclass(frozen=True)
class Binary(Elementwise):
    """Row ``to`` = function of rows ``first`` and ``second``.

    >>> Add("w", 0, 1, to=2)
    Add(matrix='w', first=0, second=1, to=2)
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
