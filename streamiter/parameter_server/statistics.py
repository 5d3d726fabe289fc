"""What a parameter server tells of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streamiter.errors import UnknownMatrix

__all__ = ["MatrixCounts", "MatrixStatistics", "ParameterServerStatistics", "ShardStatistics"]


@dataclass(slots=True)
class MatrixCounts:
    """Counts of one matrix on one shard, since it was made."""

    gets: int = 0
    adds: int = 0
    clocks: int = 0
    updates: int = 0
    aggregates: int = 0
    numbers_read: int = 0
    numbers_added: int = 0
    waits: int = 0
    """Gets that had to wait."""
    waiting_peak: int = 0


@dataclass(frozen=True, slots=True)
class MatrixStatistics:
    """One matrix on one shard at one moment."""

    matrix: str
    consistency: str
    minimum_clock: int
    clocks: Mapping[int, int]
    """Where each worker stands."""
    gets: int
    adds: int
    clock_calls: int
    updates: int
    aggregates: int
    numbers_read: int
    numbers_added: int
    waits: int
    """Gets that had to wait, since the matrix was made."""
    waiting: int
    """Gets that wait now."""
    waiting_peak: int
    buffered_adds: int
    """Adds that wait for a clock."""
    blocks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """One shard at one moment."""

    shard: int
    matrices: tuple[MatrixStatistics, ...]
    held: int
    """Requests held while a checkpoint's barrier has passed some workers and not others."""

    @property
    def size_bytes(self) -> int:
        """Memory of its blocks."""
        return sum(matrix.size_bytes for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class ParameterServerStatistics:
    """All shards at one moment."""

    name: str
    workers: tuple[int, ...]
    shards: tuple[ShardStatistics, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a drawing says of it, a line each: its workers while it has any, and where each matrix stands."""
        found = [self.matrix(name) for name in self._names()]
        count = len(self.workers)
        workers = [f"{count:,} worker{'s' if count > 1 else ''}"] if count else []
        return (
            *workers,
            *(
                f"{one.matrix}, {one.consistency.removesuffix('()')}: minimum clock {one.minimum_clock:,}"
                for one in found
            ),
        )

    def matrix(self, name: str) -> MatrixStatistics:
        """A matrix on all shards together; raises UnknownMatrix."""
        parts = [matrix for shard in self.shards for matrix in shard.matrices if matrix.matrix == name]
        if not parts:
            known = ", ".join(map(repr, self._names())) or "none yet"
            raise UnknownMatrix(
                f"{self.name}, statistics of matrix {name!r}: expected one of {known}, given {name!r}; make it first, "
                "with create_matrix"
            )
        slowest = min(parts, key=lambda part: part.minimum_clock)
        return MatrixStatistics(
            matrix=name,
            consistency=slowest.consistency,
            minimum_clock=slowest.minimum_clock,
            clocks=slowest.clocks,
            gets=sum(part.gets for part in parts),
            adds=sum(part.adds for part in parts),
            clock_calls=max(part.clock_calls for part in parts),
            updates=sum(part.updates for part in parts),
            aggregates=sum(part.aggregates for part in parts),
            numbers_read=sum(part.numbers_read for part in parts),
            numbers_added=sum(part.numbers_added for part in parts),
            waits=sum(part.waits for part in parts),
            waiting=sum(part.waiting for part in parts),
            waiting_peak=max(part.waiting_peak for part in parts),
            buffered_adds=sum(part.buffered_adds for part in parts),
            blocks=sum(part.blocks for part in parts),
            size_bytes=sum(part.size_bytes for part in parts),
        )

    def _names(self) -> Iterable[str]:
        return dict.fromkeys(matrix.matrix for shard in self.shards for matrix in shard.matrices)
