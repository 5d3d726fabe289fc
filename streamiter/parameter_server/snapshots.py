"""Snapshots of a server: the states of its shards, when they are taken, and what shards go back to after a loss.

A *state* is plain data, partly in ``Deferred`` pieces that are encoded later. ``merged`` makes one state of the states
of all shards; a shard takes its own blocks from it, so that a server may go back to the state of one with other shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import numpy as np

from streamiter.checkpoints.plain_data import PlainData
from streamiter.deferred import Deferred
from streamiter.errors import ConfigurationError
from streamiter.numbers import whole_number
from streamiter.parameter_server.requests import CreateRequest

S = TypeVar("S")
"""The state of a shard, or a reference to it."""


@dataclass(frozen=True, slots=True)
class SnapshotEvery:
    """Take a snapshot of all shards each time all workers have reached a multiple of ``clocks`` on matrix ``of``.

    ``of`` is the matrix that workers clock last in an iteration. A worker's requests up to that clock are in the
    snapshot. Its later requests are held until the other workers have reached the same clock. Meanwhile, under BSP
    the worker's adds wait; under ASP and SSP they do not; under ASP the worker waits when it reaches its next barrier.

    >>> SnapshotEvery(clocks=10, of="w")
    SnapshotEvery(clocks=10, of='w')
    """

    clocks: int
    """The number of clocks between two snapshots."""
    of: str
    """The name of the matrix."""

    def __post_init__(self) -> None:
        whole_number("SnapshotEvery(clocks=)", self.clocks, 1)
        if not isinstance(self.of, str) or not self.of:
            raise ConfigurationError(
                f"SnapshotEvery(of=): expected the name of a matrix, given {self.of!r}; name the one that "
                "workers clock last in an iteration"
            )


@dataclass(frozen=True, slots=True)
class ShardSnapshot(Generic[S]):
    """The part of one shard in a snapshot."""

    number: int
    """The number of the snapshot, the same on all shards."""
    workers: tuple[int, ...]
    matrices: tuple[CreateRequest, ...]
    """The request that makes each matrix."""
    state: S


@dataclass(frozen=True, slots=True)
class StartingPoint(Generic[S]):
    """A snapshot that all shards have given."""

    number: int
    workers: tuple[int, ...]
    matrices: tuple[CreateRequest, ...]
    """The request that makes each matrix."""
    states: tuple[S, ...]
    """By shard."""


@final
class KeptSnapshots(Generic[S]):
    """Collects the parts of snapshots, and keeps the last snapshot that all shards have given: a pure data structure.

    >>> kept = KeptSnapshots[str](shards=2)
    >>> kept.add(0, ShardSnapshot(1, (7,), (), "left half")), kept.latest
    (False, None)
    >>> kept.add(1, ShardSnapshot(1, (7,), (), "right half")), kept.latest.states
    (True, ('left half', 'right half'))
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._parts: dict[int, dict[int, ShardSnapshot[S]]] = {}
        self.latest: StartingPoint[S] | None = None

    def add(self, shard: int, part: ShardSnapshot[S]) -> bool:
        """Add one shard's part of a snapshot; return whether the snapshot is complete now."""
        if self.latest is not None and part.number <= self.latest.number:
            return False
        parts = self._parts.setdefault(part.number, {})
        parts[shard] = part
        if len(parts) < self._shards:
            return False
        self.latest = _together([parts[number] for number in range(self._shards)])
        # Earlier snapshots lack a part that was lost with its shard.
        self._parts = {number: later for number, later in self._parts.items() if number > part.number}
        return True

    def replace(self, snapshot: StartingPoint[S] | None) -> None:
        """Keep this snapshot, and drop the parts of later ones: the shards have gone back to this snapshot."""
        self.latest = snapshot
        self._parts.clear()


def _together(parts: Sequence[ShardSnapshot[S]]) -> StartingPoint[S]:
    # A worker that joined while the snapshot was taken is known to some shards only: it joins again.
    workers = [worker for worker in parts[0].workers if all(worker in part.workers for part in parts)]
    matrices = {create.matrix.name: create for part in parts for create in part.matrices}
    return StartingPoint(
        parts[0].number, tuple(workers), tuple(matrices.values()), tuple(part.state for part in parts)
    )


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a server, which ``Shard.restore`` takes, from the results of its shards' ``freeze``."""
    matrices: dict[str, dict[str, Any]] = {}
    for state in states:
        for name, matrix in state["matrices"].items():
            if (there := matrices.get(name)) is None:
                matrices[name] = {
                    **matrix,
                    "blocks": list(matrix["blocks"]),
                    "pending": list(matrix["pending"]),
                }
            else:
                there["blocks"].extend(matrix["blocks"])
                there["pending"].extend(matrix["pending"])
    first = states[0]
    return {"matrices": matrices, "workers": first["workers"], "arrivals": first["arrivals"]}


def is_state(given: Any) -> bool:
    """Return whether this looks like a result of ``merged``."""
    if not isinstance(given, Mapping) or not {"matrices", "workers", "arrivals"} <= given.keys():
        return False
    matrices = given["matrices"]
    return isinstance(matrices, Mapping) and all(
        isinstance(matrix, Mapping) and "clocks" in matrix for matrix in matrices.values()
    )


def thawed(state: Any, plain_data: PlainData) -> Any:
    """Return a state with the decoded frames in place of its ``Deferred`` pieces."""
    if isinstance(state, Deferred):
        frames = [plain_data.decode(frame) for frame in state.frames()]
        state.release()
        return frames
    if isinstance(state, Mapping):
        return {key: thawed(value, plain_data) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(thawed(value, plain_data) for value in state)
    return state


def in_memory(state: Any) -> Any:
    """Return a state with lists in place of what it would read piece by piece from a store."""
    if isinstance(state, Mapping):
        return {key: in_memory(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(in_memory(value) for value in state)
    if isinstance(state, Iterable) and not isinstance(state, (str, bytes, np.ndarray)):
        return list(state)
    return state


def clock_in(clocks: Mapping[str, Any], worker: int) -> int:
    """Return the clock of a worker in the state of a tracker: the minimum clock for a worker that is not in it."""
    progress: Mapping[int, int] = clocks["progress"]
    minimum: int = clocks["min_clock"]
    return progress.get(worker, minimum)
