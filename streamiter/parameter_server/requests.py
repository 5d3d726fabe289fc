"""Requests of clients to shards, and their replies.

A request is a plain value, so that it can be sent to another process. A call of a client becomes one request for each
shard that has blocks of the call's rows: a ``GetPart`` or an ``AddPart`` for each row and block.

In a message, a request has no arrays to be filled; they stay at the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar, final

import numpy as np

from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import GetFunction, Part, Result, UpdateFunction
from streamiter.parameter_server.storage.block import OCCURRENCES, BlockColumns, BlocksState, Numbers
from streamiter.values.deferred import PlainValue

# -- reading and adding --------------------------------------------------------------------------------------


R = TypeVar("R", covariant=True)


class GetPart(NamedTuple):
    """Columns to read of one row in one block."""

    block: int
    row: int
    columns: BlockColumns | None
    """Columns of the matrix, not of the block; None: all columns of the block."""
    out: Numbers | None = None
    """The array to write the values to; only in the same process."""


class AddPart(NamedTuple):
    """Values to add to columns of one row in one block."""

    block: int
    row: int
    """The row, or ``OCCURRENCES``."""
    columns: BlockColumns | None
    """Columns of the matrix, not of the block; None: all columns of the block."""
    values: Numbers


class GetReply(NamedTuple):
    """The values of a get."""

    values: list[Numbers]
    """One array for each part of the request."""
    clock: int
    """The minimum clock at the moment of the read."""


class Request(Generic[R]):
    """A request to a shard; ``R`` is the type of its reply."""

    __slots__ = ()


@dataclass(slots=True)
class MatrixRequest(Request[R]):
    """A request of a worker on one matrix."""

    matrix: str
    worker: int
    observed: int
    """The highest minimum clock of the matrix that the worker has been told of."""


@dataclass(slots=True)
class GetRequest(MatrixRequest[GetReply]):
    """Read values. Reply: a :class:`GetReply`. Waits as the consistency says."""

    parts: Sequence[GetPart]
    with_own: bool = False
    """Whether the values contain the worker's own adds, even adds that are not applied yet."""


@dataclass(slots=True)
class AddRequest(MatrixRequest[int | GetReply]):
    """Add values, then run a function on blocks, then read values, in one step.

    Reply: the reply to ``get``; without ``get``, the minimum clock.
    """

    parts: Sequence[AddPart]
    update: UpdateRequest | None = None
    get: GetRequest | None = None
    owns_arrays: bool = False
    """Whether no caller can change the arrays of ``parts``."""


@dataclass(slots=True)
class ClockRequest(MatrixRequest[int]):
    """The worker has finished an iteration on the matrix. Reply: the minimum clock."""


@dataclass(slots=True)
class UpdateRequest(MatrixRequest[list[Result] | None]):
    """Run a function that changes parameters on some blocks. Reply: None."""

    parts: Sequence[tuple[int, Part]]
    """For each block its number and the function's part for the block."""
    function: UpdateFunction
    only_check: bool = False
    """Only check whether the function can run. Reply: a list of the results of the blocks' checks."""


@dataclass(slots=True)
class AggregateRequest(MatrixRequest[list[Result]]):
    """Run a function that computes a result on some blocks. Reply: a list of the blocks' results."""

    parts: Sequence[tuple[int, Part]]
    """For each block its number and the function's part for the block."""
    function: GetFunction


# -- matrices and workers ------------------------------------------------------------------------------------


@dataclass(slots=True)
class CreateRequest(Request[bool]):
    """Make the shard's blocks of a matrix. Reply: whether they were made; False: they exist with the same settings."""

    matrix: Matrix
    shards: int
    """The number of shards of the server."""


@dataclass(slots=True)
class Describe(Request[Matrix | None]):
    """Ask for the settings of a matrix. Reply: the ``Matrix``, without initial values, or None if it does not exist."""

    matrix: str


@dataclass(slots=True)
class ForgetRequest(Request[None]):
    """Drop a matrix that other shards could not make. Reply: None."""

    matrix: str


@dataclass(slots=True)
class JoinRequest(Request[dict[str, int]]):
    """A worker joins, at the minimum clock of each matrix. Reply: the worker's clocks, by matrix."""

    worker: int


@dataclass(slots=True)
class RaiseRequest(Request[None]):
    """Raise the clocks of a worker that has just joined. Reply: None."""

    worker: int
    clocks: dict[str, int]
    """The new clocks, by matrix."""


@dataclass(slots=True)
class LeaveRequest(Request[None]):
    """A worker leaves; its waiting calls fail. Reply: None."""

    worker: int
    reason: str = "it has left"
    """Completes the sentence of the error: the worker does not take part because …"""


@dataclass(slots=True)
class ArriveRequest(Request[None]):
    """A worker arrives at barrier ``number`` of ``client.barrier``. Reply, once all workers have arrived: None."""

    worker: int
    number: int


# -- state ---------------------------------------------------------------------------------------------------


class MatrixState(BlocksState):
    """The state of a matrix."""

    clocks: Any
    """The state of a ``ProgressTracker``."""
    pending: list[list[PlainValue]]
    """Kept adds: the clock, the worker, and a list of parts, each with the fields of an ``AddPart``."""


class ArrivalsState(TypedDict):
    """The state of the barriers of ``client.barrier``."""

    passed: list[list[int]]
    """Each worker, with the number of barriers that it has passed."""


class ServerState(TypedDict):
    """The state of one shard or of all shards: plain data, partly in ``Deferred`` pieces."""

    matrices: dict[str, MatrixState]
    workers: list[int]
    arrivals: ArrivalsState


@dataclass(slots=True)
class PassBarrier(Request[None]):
    """A worker passes a checkpoint's barrier: its later requests are not in the checkpoint's state. Reply: None."""

    worker: int
    checkpoint: int


# -- the arrays of adds that wait ----------------------------------------------------------------------------

# Memory of the objects of one part, without the numbers. For an add of one key it is nearly all of the memory.
_PART_BYTES: Final = 480


def copied_add(request: AddRequest) -> AddRequest:
    """Return the request with arrays of its own: the caller may change its arrays once the call has returned."""
    if request.owns_arrays:
        return request
    parts = [
        AddPart(part.block, part.row, None if part.columns is None else part.columns.copy(), part.values.copy())
        for part in request.parts
    ]
    return replace(request, parts=parts, owns_arrays=True)


def size_of_adds(parts: Iterable[AddPart]) -> int:
    """Return the memory of the parts, in bytes."""
    return sum(
        _PART_BYTES + part.values.nbytes + (0 if part.columns is None else part.columns.nbytes) for part in parts
    )


def summed_adds(parts: Iterable[AddPart]) -> list[AddPart]:
    """Return the sum of many parts, as at most two parts for each row and block.

    One of the two is for parts that name columns; it has only the named columns.
    """
    grouped: dict[tuple[int, int, bool], list[AddPart]] = {}
    for part in parts:
        grouped.setdefault((part.block, part.row, part.columns is None), []).append(part)
    return [_sum(block, row, group) for (block, row, _), group in grouped.items()]


@final
class KeptAdds(list[AddPart]):
    """The parts of a worker's adds that wait, in order; they are summed up when they ``measure`` more than ``most``."""

    def __init__(self, measure: Callable[[Sequence[AddPart]], int], most: int) -> None:
        super().__init__()
        self._measure = measure
        self._most = self._sum_up_above = most
        self._size = 0

    def extend(self, parts: Iterable[AddPart]) -> None:
        """Keep the parts of one more add; their arrays must not change afterwards."""
        more = list(parts)
        super().extend(more)
        self._size += self._measure(more)
        if self._size > self._sum_up_above:
            self[:] = summed_adds(self)
            self._size = self._measure(self)
            # Twice the size of the last sum: otherwise each further add would sum up a large sum again.
            self._sum_up_above = max(self._most, 2 * self._size)


def _sum(block: int, row: int, group: Sequence[AddPart]) -> AddPart:
    named = [part.columns for part in group if part.columns is not None]
    if not named:
        total = group[0].values.copy()
        for part in group[1:]:
            total += part.values
        return AddPart(block, row, None, total)
    if row == OCCURRENCES:
        return AddPart(block, row, np.concatenate(named), np.concatenate([part.values for part in group]))
    names, where = np.unique(np.concatenate(named), return_inverse=True)
    values = np.zeros(len(names), dtype=group[0].values.dtype)
    np.add.at(values, where, np.concatenate([part.values for part in group]))
    return AddPart(block, row, names, values)


def add_pending(values: Numbers, part: GetPart, pending: Iterable[AddPart], first_column: int) -> Numbers:
    """Add the pending adds of a part's row and columns to the values that were read for the part, in place.

    ``first_column`` is the first column of the block.
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


# -- messages to a shard in another process ----------------------------------------------------------


def without_outputs(request: Request[object]) -> Request[object]:
    """Return the request without the arrays that its caller wants filled: they stay at the client."""
    if isinstance(request, AddRequest) and request.get is not None:
        return replace(request, get=_cleared(request.get))
    return _cleared(request) if isinstance(request, GetRequest) else request


def _cleared(get: GetRequest) -> GetRequest:
    if all(part.out is None for part in get.parts):
        return get
    return replace(get, parts=[part._replace(out=None) for part in get.parts])
