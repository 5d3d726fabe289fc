"""A worker's own copies of whole rows, which its consistency lets it read again without asking a shard."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np

from streamiter.numbers import whole_number
from streamiter.parameter_server.consistency.settings import BSP, SSP, Consistency
from streamiter.parameter_server.storage.block import Columns, Numbers

__all__ = ["CacheRules", "Reading", "RowCache", "RowCacheStatistics", "cache_rules"]

# Writes are counted by this many groups of rows, and not by row, so that the counters have a bound. Rows of one group
# only keep each other from being cached while one of them is under way.
_GROUPS: Final = 1024


class CacheRules(NamedTuple):
    """What a consistency means for cached rows."""

    staleness: int | None
    """A row is valid while its clock ≥ my clock − staleness; None: never, do not cache."""
    own_adds_show: bool
    """Whether a read that goes to the shard has the worker's own adds in it; then a cached row must have them, too."""


def cache_rules(consistency: Consistency, *, read_my_writes: bool = False) -> CacheRules:
    """What the cache may do, so that a hit gives what a read that goes to the shard could have given.

    - ASP: a read is answered with what is there at that moment, so no older row will do.
    - BSP: nothing that other workers add is applied within a clock, so a row that was read in this clock is valid for
      all of it. Own adds wait for the end of the clock like those of others, and show only with ``read_my_writes``.
    - SSP(s): a row may miss what others added in the last s clocks (Ho et al. 2013). Own adds are applied at once: they
      show.

    >>> from streamiter.parameter_server.consistency.settings import SSP
    >>> cache_rules(SSP(staleness=2))
    CacheRules(staleness=2, own_adds_show=True)
    """
    if isinstance(consistency, SSP):
        return CacheRules(consistency.staleness, True)
    if isinstance(consistency, BSP):
        return CacheRules(0, read_my_writes)
    return CacheRules(None, False)


class Reading(NamedTuple):
    """A read of a row that has begun. It is kept nowhere: a read that fails is simply forgotten."""

    matrix: str
    row: int
    generation: int
    writes: int


@dataclass(frozen=True, slots=True)
class RowCacheStatistics:
    """What a cache has done, and what it holds."""

    hits: int
    misses: int
    evictions: int
    """Rows that were still there and had to go for others; rows too old to be used are not counted."""
    rows: int
    size_bytes: int


@dataclass(slots=True)
class _CachedRow:
    values: Numbers
    clock: int


@final
class RowCache:
    """Whole rows by matrix and row, each with its *row clock*, in at most ``limit_bytes`` of values; 0: no row is kept.

    The row clock is the minimum clock when the row was read: the lowest, where several shards hold it. A row may be
    used while row clock ≥ my clock − staleness. When there is no room, the one goes that was used least recently.

    A read that goes to the shards is bracketed by ``begin`` and ``put``. If the worker writes to the row in between,
    the row is not kept: nobody can say whether the write is in what was read (a read that had to wait is answered
    later than it was sent). So ``own_add`` and ``invalidate`` are called as the write is sent, nothing awaited in
    between. If the shard refuses the write, ``invalidate`` the matrix.

    All arrays are copied, coming and going: those handed out belong to the caller, as those that come from a shard do.
    What other workers' update functions (psfs) do is seen once the row is too old, as they belong to no clock.

    >>> cache = RowCache(limit_bytes=1024)
    >>> cache.put(cache.begin("w", row=0), np.zeros(3), clock=4)
    >>> cache.own_add("w", 0, np.array([1, 1]), np.array([1.0, 2.0]))
    >>> cache.find("w", 0, my_clock=6, staleness=2)
    array([0., 3., 0.])
    >>> cache.find("w", 0, my_clock=7, staleness=2)
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = whole_number("RowCache(limit_bytes=)", limit_bytes, 0)
        self._rows: OrderedDict[tuple[str, int], _CachedRow] = OrderedDict()
        self._size_bytes = 0
        self._generation = 0
        self._writes = [0] * _GROUPS
        self._hits = self._misses = self._evictions = 0

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything at all."""
        return self._limit_bytes > 0

    def find(
        self, matrix: str, row: int, my_clock: int, staleness: int, columns: Columns | None = None
    ) -> Numbers | None:
        """The row, or some columns of it, if there is one that is new enough."""
        key = (matrix, row)
        cached = self._rows.get(key)
        if cached is None:
            self._misses += 1
            return None
        if cached.clock < my_clock - staleness:
            self._misses += 1
            self._drop(key)  # clocks only go up: it will not be valid again
            return None
        self._hits += 1
        self._rows.move_to_end(key)
        return cached.values.copy() if columns is None else cached.values[columns]

    def begin(self, matrix: str, row: int) -> Reading:
        """A read of the row is about to be sent."""
        return Reading(matrix, row, self._generation, self._writes[_group(matrix, row)])

    def put(self, reading: Reading, values: Numbers, clock: int) -> None:
        """It has been answered with the whole row, of this row clock."""
        key = (reading.matrix, reading.row)
        if reading != self.begin(*key) or values.nbytes > self._limit_bytes:
            return
        cached = self._rows.get(key)
        if cached is not None:
            if cached.clock > clock:
                return  # a read that was sent later has been answered first
            self._drop(key)
        self._rows[key] = _CachedRow(values.copy(), clock)
        self._size_bytes += values.nbytes
        while self._size_bytes > self._limit_bytes:
            self._drop(next(iter(self._rows)))
            self._evictions += 1

    def own_add(self, matrix: str, row: int, columns: Columns | slice, values: Numbers) -> None:
        """The worker is sending an add that its reads are to show: wherever ``own_adds_show``, and only there."""
        self._writes[_group(matrix, row)] += 1
        cached = self._rows.get((matrix, row))
        if cached is None:
            return
        if isinstance(columns, slice):
            cached.values[columns] += values
        else:
            np.add.at(cached.values, columns, values)

    def invalidate(self, matrix: str) -> None:
        """The worker is sending an update function (psf) on this matrix: what it changes is known to the shard only."""
        self._generation += 1
        for key in [key for key in self._rows if key[0] == matrix]:
            self._drop(key)

    def clear(self) -> None:
        """Clocks have gone back (reset, rollback), or the client leaves."""
        self._generation += 1
        self._rows.clear()
        self._size_bytes = 0

    def statistics(self) -> RowCacheStatistics:
        """What it has done, and what it holds."""
        return RowCacheStatistics(
            self._hits, self._misses, self._evictions, len(self._rows), self._size_bytes
        )

    def _drop(self, key: tuple[str, int]) -> None:
        self._size_bytes -= self._rows.pop(key).values.nbytes


def _group(matrix: str, row: int) -> int:
    return hash((matrix, row)) % _GROUPS
