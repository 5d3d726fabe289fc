"""What clients ask of shards. Requests are plain values: they may be sent to another process, and be repeated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import GetFunction, UpdateFunction

__all__ = [
    "AbandonBarrier",
    "AddPart",
    "AddRequest",
    "AggregateRequest",
    "ArriveRequest",
    "ChangedRows",
    "Changes",
    "ClockRequest",
    "CreateRequest",
    "FailWaiting",
    "ForgetRequest",
    "GetPart",
    "GetReply",
    "GetRequest",
    "JoinRequest",
    "LeaveRequest",
    "NextChanges",
    "PassBarrier",
    "RaiseRequest",
    "ResetRequest",
    "RestoreState",
    "RowChange",
    "TakeState",
    "TellStatistics",
    "Unsubscribe",
    "UpdateRequest",
    "add_pending",
    "copied_add",
    "size_of_adds",
    "summed_adds",
]


class GetPart(NamedTuple):
    """Columns of one row in one block; None: all of them. ``out`` is where to write them, in the same process only."""

    block: int
    row: int
    columns: npt.NDArray[np.int64] | None
    out: npt.NDArray[Any] | None = None


class AddPart(NamedTuple):
    """Values for columns of one row in one block."""

    block: int
    row: int
    columns: npt.NDArray[np.int64] | None
    values: npt.NDArray[Any]


# Beside the numbers: an add of one part takes that much for its objects. Of adds of one key it is nearly all.
_PART_BYTES: Final = 480


def copied_add(request: AddRequest) -> AddRequest:
    """The same with arrays of its own: the caller may change theirs once the call has returned."""
    parts = [
        AddPart(
            part.block, part.row, None if part.columns is None else part.columns.copy(), part.values.copy()
        )
        for part in request.parts
    ]
    return AddRequest(request.matrix, request.worker, request.observed, parts, request.update, request.get)


def size_of_adds(parts: Iterable[AddPart]) -> int:
    """Memory of the adds."""
    return sum(
        _PART_BYTES + part.values.nbytes + (0 if part.columns is None else part.columns.nbytes)
        for part in parts
    )


def summed_adds(parts: Iterable[AddPart]) -> list[AddPart]:
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


def add_pending(
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


class GetReply(NamedTuple):
    """What was read, one array for each part, and the minimum clock at that moment."""

    values: list[npt.NDArray[Any]]
    clock: int


@dataclass(slots=True)
class Request:
    """Of which matrix, by which worker; ``observed`` is the highest minimum clock of the matrix it has been told of."""

    matrix: str
    worker: int
    observed: int = -1


@dataclass(slots=True)
class GetRequest(Request):
    """Reply: a :class:`GetReply`. Waits as the consistency says."""

    parts: Sequence[GetPart] = ()
    with_own: bool = False
    """Have the worker's own adds in it, even those that wait to be applied."""


@dataclass(slots=True)
class AddRequest(Request):
    """Add, then (``update``) run a function on blocks, then (``get``) read: in one step.

    Reply: as of Get, or the minimum clock.
    """

    parts: Sequence[AddPart] = ()
    update: UpdateRequest | None = None
    get: GetRequest | None = None


@dataclass(slots=True)
class ClockRequest(Request):
    """Reply: the minimum clock."""


@dataclass(slots=True)
class UpdateRequest(Request):
    """Run an update function on some blocks. Reply: None."""

    function: UpdateFunction | None = None
    parts: Sequence[tuple[int, Any]] = ()
    only_check: bool = False
    """Say whether it could be run, and run nothing. Reply: a list of what each block said."""


@dataclass(slots=True)
class AggregateRequest(Request):
    """Run a get function on some blocks. Reply: a list of what each block gave."""

    function: GetFunction | None = None
    parts: Sequence[tuple[int, Any]] = ()


@dataclass(slots=True)
class CreateRequest:
    """Make this shard's blocks of a matrix. Reply: whether they were made; the same once more changes nothing."""

    matrix: Matrix
    shards: int


@dataclass(slots=True)
class ForgetRequest:
    """Drop a matrix that other shards could not make. Reply: None."""

    matrix: str


@dataclass(slots=True)
class JoinRequest:
    """A worker takes part, at the minimum clock of each matrix. Reply: where it stands now, by matrix."""

    worker: int


@dataclass(slots=True)
class RaiseRequest:
    """A worker that has just joined stands further on, by matrix. Reply: None."""

    worker: int
    clocks: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class LeaveRequest:
    """A worker takes part no more; what it waits for fails, and ``reason`` says why. Reply: None."""

    worker: int
    reason: str = "it has left"


@dataclass(slots=True)
class ArriveRequest:
    """A worker is at barrier ``number``. Reply (to be waited for): None, once all workers are there."""

    worker: int
    number: int


@dataclass(slots=True)
class ResetRequest:
    """Every matrix starts over with these workers at clock 0; what waits fails. Parameters stay. Reply: None."""

    workers: tuple[int, ...]


@dataclass(slots=True)
class PassBarrier:
    """The worker's checkpoint barrier: hold what it sends from now on until all workers have passed it. Reply: None."""

    worker: int
    checkpoint: int


@dataclass(slots=True)
class AbandonBarrier:
    """A checkpoint is given up: go on with what was held for it. Reply: None."""

    checkpoint: int


@dataclass(slots=True)
class TakeState:
    """Reply: the state of the shard, with ``Deferred`` pieces.

    Now (``checkpoint`` None), or once all workers have passed the barrier of a checkpoint; None if it is given up.
    """

    checkpoint: int | None = None


@dataclass(slots=True)
class RestoreState:
    """Go back to the state of all shards, with these workers (None: those of then). What waits fails. Reply: None."""

    state: Any
    workers: tuple[int, ...] | None = None


@dataclass(slots=True)
class FailWaiting:
    """The server is closed: nothing that waits will be answered. Reply: None."""

    reason: str


@dataclass(slots=True)
class TellStatistics:
    """Reply: the shard's statistics."""


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
    """Rows that have changed, as they were when the minimum clock was ``clock`` and this was sent.

    What clients and shards say to each other about rows that change, and what a subscriber is told.
    """

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
