"""What a matrix is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.numbers import is_number, plain_float, whole_number
from streamiter.parameter_server.consistency.settings import ASP, Consistency

if TYPE_CHECKING:
    from streamiter.parameter_server.psf.function import UpdateFunction

__all__ = ["DTYPES", "DType", "Init", "Matrix"]

DType = Literal["float32", "float64", "int64"]

DTYPES = ("float32", "float64", "int64")

Init = "float | npt.ArrayLike | UpdateFunction | Sequence[UpdateFunction]"


@dataclass(frozen=True, eq=False)
class Matrix:
    """The settings of one matrix: ``rows`` × ``columns`` numbers, cut into blocks.

    ``block`` is (rows, columns) of one block; None: all rows, and as many columns as give each shard one block. A
    sparse matrix keeps what differs from ``default``. ``init`` is a number, an array of (rows, columns) or
    (columns,), or update functions on this matrix that are applied once it is made. ``on_clock`` is applied whenever
    the minimum clock moves.

    >>> Matrix("w", rows=2, columns=10).block is None
    True
    """

    name: str
    rows: int
    columns: int
    dtype: DType = "float64"
    consistency: Consistency = field(default_factory=ASP)
    sparse: bool = False
    default: float = 0.0
    """Of a sparse matrix: the value of absent columns."""
    block: tuple[int, int] | None = None
    init: Any = 0.0
    on_clock: UpdateFunction | None = None

    def __post_init__(self) -> None:
        where = f"matrix {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"matrix: expected a name, given {self.name!r}")
        for size in ("rows", "columns"):  # Plain ints, as snapshots have them.
            object.__setattr__(self, size, whole_number(f"{where}, {size}=", getattr(self, size), 1))
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ConfigurationError(
                f"{where}, dtype=: expected one of {', '.join(DTYPES)}, given {self.dtype!r}"
            )
        if not isinstance(self.consistency, Consistency):
            raise ConfigurationError(
                f"{where}, consistency=: expected ASP(), BSP() or SSP(staleness=…), given {self.consistency!r}"
            )
        if not isinstance(self.sparse, bool):
            raise ConfigurationError(f"{where}, sparse=: expected True or False, given {self.sparse!r}")
        if not is_number(self.default) or (self.default and not self.sparse):
            raise ConfigurationError(
                f"{where}, default=: expected a number, and sparse=True where it is not 0, given {self.default!r}"
            )
        if not self._compares_with(self.default):
            raise ConfigurationError(
                f"{where}, default=: expected {'a whole' if self.dtype == 'int64' else 'a'} number, as columns of a "
                f"matrix of {self.dtype} can be compared with, given {self.default!r}"
            )
        if self.block is not None:
            if not isinstance(self.block, (tuple, list)) or len(self.block) != 2:
                raise ConfigurationError(f"{where}, block=: expected (rows, columns), given {self.block!r}")
            rows, columns = self.block
            block = (
                whole_number(f"{where}, rows of block=", rows, 1),
                whole_number(f"{where}, columns of block=", columns, 1),
            )
            object.__setattr__(self, "block", block)  # A list is the same setting.

    def _compares_with(self, number: float) -> bool:
        """Whether a column can be this number: NaN equals nothing, and others are too large."""
        as_float = plain_float(number)
        if self.dtype == "int64":
            return as_float.is_integer() and -(2**63) <= number < 2**63
        return math.isfinite(as_float) or as_float == number

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any]) -> Matrix:
        """From settings by name; raises ConfigurationError for one that there is not."""
        known = [field.name for field in fields(cls) if field.name != "name"]
        for missing in ("rows", "columns"):
            if missing not in settings:
                raise ConfigurationError(
                    f"matrix {name!r}: expected {missing}=, given none; say how many it has"
                )
        for setting in settings:
            if setting not in known:
                raise ConfigurationError(
                    f"matrix {name!r}: expected settings {', '.join(known)}, given {setting}=; leave it out"
                )
        return cls(name, **settings)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The same as numpy's own."""
        return np.dtype(self.dtype)

    def differs_from(self, other: Matrix) -> str | None:
        """The first setting that is not the same, for an error; None where both are alike.

        ``init`` is not compared: it matters only to whoever makes the matrix first.
        """
        for name in ("rows", "columns", "dtype", "consistency", "sparse", "default", "block", "on_clock"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}={getattr(self, name)!r} beside {name}={getattr(other, name)!r}"
        return None
