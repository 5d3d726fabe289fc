"""What a parameter server tells of itself."""

from __future__ import annotations

from collections.abc import Iterable
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
    """One matrix on one shard at one moment, or on all of them. Counts are since it was made there.

    On all of them (``ParameterServerStatistics.matrix``) counts are sums: a call to two shards counts twice.
    """

    matrix: str
    """Its name."""
    consistency: str
    """As it is written: ``"SSP(staleness=2)"``."""
    minimum_clock: int
    """That of the slowest worker; on all shards, the lowest."""
    clocks: dict[str, int]
    """Where each worker stands, by its number, as text, which JSON wants of keys."""
    gets: int
    """Requests to read; those of ``add_get``, too."""
    adds: int
    """Requests to add."""
    clock_calls: int
    """How often workers have clocked, all together; on all shards, the highest."""
    updates: int
    """How often a function has run that changes parameters, ``init`` and ``on_clock`` included."""
    aggregates: int
    """How often one has run that computes something."""
    numbers_read: int
    """By gets."""
    numbers_added: int
    """By adds that were applied."""
    waits: int
    """Gets that had to wait."""
    waiting: int
    """Gets that wait now."""
    waiting_peak: int
    """The most that waited at the same time; on all shards, the highest of one shard."""
    buffered_adds: int
    """Adds that wait for a clock."""
    blocks: int
    """How many there are."""
    size_bytes: int
    """Memory of its blocks."""


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """One shard at one moment."""

    shard: int
    """Its number, from 0."""
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
    """Of the server."""
    workers: tuple[int, ...]
    """Those of this process that take part."""
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
