"""What clients and shards say to each other about rows that change, and what a subscriber is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.requests import Request

__all__ = ["ChangedRows", "Changes", "NextChanges", "RowChange", "Unsubscribe"]


@dataclass(slots=True)
class NextChanges(Request):
    """Which rows have changed since reply number ``after``? Reply: :class:`Changes`, once there are any.

    The first one subscribes, and is answered with all rows. Each says all that a shard has to know, so that one that
    was started anew goes on with any: it answers the first one that it gets with all rows, too.
    """

    subscription: int = 0
    """Different for each subscription of a worker."""
    rows: npt.NDArray[np.int64] | None = None
    """None: all that the shard has."""
    after: int = 0
    """The number of the last reply that has come. One that was sent later is lost: its rows go out again. 0: none."""


@dataclass(slots=True)
class Unsubscribe(Request):
    """No more. Reply: None, also where there is no such subscription."""

    subscription: int = 0


class ChangedRows(NamedTuple):
    """Rows of one block as they are now."""

    block: int
    rows: npt.NDArray[np.int64]
    """Ascending."""
    values: npt.NDArray[Any]
    """(rows, columns of the block)"""


@dataclass(slots=True)
class Changes:
    """Rows that have changed, as they were when the minimum clock was ``clock`` and this was sent."""

    number: int
    clock: int
    parts: Sequence[ChangedRows] = ()
    has_ended: bool = False
    """There will be no more: the worker has left, or the server is closed."""


@dataclass(frozen=True, slots=True, eq=False)
class RowChange:
    """A row that has changed, as a subscriber gets it."""

    matrix: str
    row: int
    clock: int
    """The minimum clock when what is new in it was read; the lowest, where it was put together from several shards."""
    columns: range | None
    """All that has changed lies in here; None: anywhere."""
    values: npt.NDArray[Any]
    """The whole row, shape (columns,). It belongs to the subscriber."""
