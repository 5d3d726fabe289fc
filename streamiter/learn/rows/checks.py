"""What the learners refuse, and how they say so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.tables import as_floats

__all__ = ["BadRows", "Floats", "holds", "refuse_rows", "row_vector", "row_weights"]

Floats = npt.NDArray[np.float64]

# Rows named in a message; more would bury the reason. All of them are in ``BadRows.rows``.
_ROWS_NAMED: Final = 5


class BadRows(ModelError):
    """These rows of a mini-batch, and not the model, are at fault; nothing was learned from any row.

    ``rows`` are their positions in the batch and ``reason`` is the message without them, so that an
    operator can refuse just these records and learn from the others.

    >>> print(BadRows([3], "LogisticRegression: expected targets 0 or 1, given 7.0"))
    LogisticRegression: expected targets 0 or 1, given 7.0 (row 3 of the batch)
    """

    def __init__(self, rows: Iterable[int], reason: str) -> None:
        self.rows = tuple(int(row) for row in rows)
        self.reason = reason
        named = ", ".join(map(str, self.rows[:_ROWS_NAMED]))
        more = f" and {len(self.rows) - _ROWS_NAMED} more" if len(self.rows) > _ROWS_NAMED else ""
        noun = "row" if len(self.rows) == 1 else "rows"
        super().__init__(f"{reason} ({noun} {named}{more} of the batch)")


def holds(good: npt.NDArray[np.bool_]) -> bool:
    """Whether all of it is true; several times quicker than ``good.all()`` for short arrays."""
    return int(np.count_nonzero(good)) == good.size


def refuse_rows(
    good: npt.NDArray[np.bool_], expected: str, given: Floats, advice: str | None = None
) -> BadRows:
    """The error for the rows that are not ``good``; it shows the value of the first, and says what to do."""
    bad = np.flatnonzero(~good)
    return BadRows(bad, f"{expected}, given {given[bad[0]]}" + (f"; {advice}" if advice else ""))


def row_vector(owner: str, what: str, given: npt.ArrayLike, length: int) -> Floats:
    """``given`` as ``length`` numbers, one for each row; NaN and infinity are left to the caller."""
    vector = as_floats(owner, what, given)
    if vector.shape != (length,):
        raise ModelError(
            f"{owner}: expected {length} {what}, one for each row, given shape {vector.shape}; "
            f"give one number for each row of the batch"
        )
    return vector


def row_weights(owner: str, given: npt.ArrayLike, length: int) -> Floats:
    """Sample weights: one for each row, finite, not negative."""
    weights = row_vector(owner, "sample weights", given, length)
    good = (weights >= 0) & (weights < np.inf)
    if not holds(good):
        raise refuse_rows(good, f"{owner}: expected finite sample weights of 0 or more", weights)
    return weights
