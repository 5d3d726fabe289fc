"""What the forms of a sparse row have in common."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.storage.block import Columns, Numbers

__all__ = ["PART_COLUMNS", "Cells", "differs_from"]

PART_COLUMNS: Final = 1 << 16
"""How much of a row is looked at for one part: with its column numbers some 0.8 MB, and a millisecond."""


class Cells(abc.ABC):
    """One row of a sparse block: a default, and columns with a value of their own, which may well equal the default."""

    default: Any
    """A scalar of the dtype."""
    made_after: int
    """How many times the block had been frozen when this was made: the last of them do not hold it."""

    @abc.abstractmethod
    def get(self, columns: Columns, out: Numbers | None) -> Numbers:
        """Values of these columns; written to ``out`` if that is given."""

    @abc.abstractmethod
    def write_to(self, out: Numbers) -> None:
        """Write all columns of the block."""

    @abc.abstractmethod
    def add(self, columns: Columns, values: Numbers) -> bool:
        """Add; each duplicate counts. False where there is no room for so many columns: then nothing has changed."""

    @abc.abstractmethod
    def put(self, columns: Columns, values: Numbers) -> bool:
        """Overwrite; of duplicates the last counts. False as above."""

    @abc.abstractmethod
    def count_absent(self, columns: Columns) -> int:
        """How many of them have no room yet; duplicates are one."""

    @abc.abstractmethod
    def reset(self, default: Any) -> None:
        """Have all columns this value."""

    @abc.abstractmethod
    def content(self) -> tuple[Columns, Numbers]:
        """The columns that differ from the default, ascending, and their values. Not to be changed."""

    @abc.abstractmethod
    def parts(self) -> Iterator[tuple[Columns, Numbers]]:
        """The same in no order, and a part at a time."""

    def count_different(self) -> int:
        """How many columns differ from the default."""
        return sum(len(columns) for columns, _ in self.parts())

    @abc.abstractmethod
    def copy(self) -> Self:
        """One that changes on its own."""

    @abc.abstractmethod
    def is_large_for(self, count: int) -> bool:
        """Whether so few columns are better kept in something smaller."""

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Memory it takes."""


def differs_from(values: Numbers, default: Any) -> npt.NDArray[np.bool_]:
    """Which values are not the very same number: NaN is the same as NaN; −0.0 is not 0.0, for 1/x tells them apart."""
    bits = np.dtype(f"u{values.itemsize}")
    differs: npt.NDArray[np.bool_] = values.view(bits) != np.asarray(default, values.dtype).view(bits)
    return differs
