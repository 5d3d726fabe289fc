"""The arrays of adds that wait to be applied: copied, seen by their own worker, summed up where they are too many.

Which adds wait, and for which clock, the consistency models know (``consistency/pending_adds.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.requests import AddPart, AddRequest, GetPart

__all__ = ["SeenAdds", "kept", "size_bytes", "summed", "with_pending"]

# Beside the numbers: an add of one part takes that much for its objects. Of adds of one key it is nearly all.
_PART_BYTES: Final = 480

# As many parts are looked through in some µs.
_FEW: Final = 64


def kept(request: AddRequest) -> AddRequest:
    """The same with arrays of its own: the caller may change theirs once the call has returned."""
    parts = [
        AddPart(
            part.block, part.row, None if part.columns is None else part.columns.copy(), part.values.copy()
        )
        for part in request.parts
    ]
    return AddRequest(request.matrix, request.worker, request.observed, parts, request.update, request.get)


def size_bytes(parts: Iterable[AddPart]) -> int:
    """Memory of the adds."""
    return sum(
        _PART_BYTES + part.values.nbytes + (0 if part.columns is None else part.columns.nbytes)
        for part in parts
    )


def summed(parts: Iterable[AddPart]) -> list[AddPart]:
    """At most two parts for each row and block in place of many: no larger than the columns that were named."""
    grouped: dict[tuple[int, int, bool], list[AddPart]] = {}
    for part in parts:
        grouped.setdefault((part.block, part.row, part.columns is None), []).append(part)
    return [_sum(block, row, group) for (block, row, _), group in grouped.items()]


def _sum(block: int, row: int, group: Sequence[AddPart]) -> AddPart:
    named = [part.columns for part in group if part.columns is not None]
    if not named:
        total = group[0].values.copy()
        for part in group[1:]:
            total += part.values
        return AddPart(block, row, None, total)
    names, where = np.unique(np.concatenate(named), return_inverse=True)
    values = np.zeros(len(names), dtype=group[0].values.dtype)
    np.add.at(values, where, np.concatenate([part.values for part in group]))
    return AddPart(block, row, names, values)


def with_pending(
    values: npt.NDArray[Any], part: GetPart, pending: Iterable[AddPart], first_column: int
) -> npt.NDArray[Any]:
    """What was read, and on top of it those pending adds that touch it; ``first_column`` is the block's.

    ``values`` is changed in place.
    """
    relevant = [add for add in pending if add.block == part.block and add.row == part.row]
    if not relevant:
        return values
    if part.columns is None:
        for add in relevant:
            if add.columns is None:
                values += add.values
            else:
                np.add.at(values, add.columns - first_column, add.values)
        return values
    names, where = np.unique(part.columns, return_inverse=True)
    extra = np.zeros(len(names), dtype=values.dtype)
    for add in relevant:
        if add.columns is None:
            extra += add.values[names - first_column]
        else:
            at = np.minimum(np.searchsorted(names, add.columns), len(names) - 1)
            is_there = names[at] == add.columns
            np.add.at(extra, at[is_there], add.values[is_there])
    values += extra[where]
    return values


@final
class SeenAdds:
    """What a worker has added and its reads are to show, though it is not applied yet: summed up as it becomes more."""

    def __init__(self) -> None:
        self.parts: list[AddPart] = []
        self._sum_up_above = _FEW

    def note(self, parts: Iterable[AddPart]) -> None:
        """The worker has added these, too; their arrays do not change."""
        self.parts.extend(parts)
        if len(self.parts) > self._sum_up_above:
            self.parts = summed(self.parts)
            self._sum_up_above = max(_FEW, 2 * len(self.parts))
