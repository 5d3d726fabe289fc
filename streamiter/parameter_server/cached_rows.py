"""What the calls of a client mean for its row cache: which reads it answers, which it keeps, what writes do to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from streamiter.numbers import whole_number
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange, Partitioning
from streamiter.parameter_server.requests import Add, GetReply, Update
from streamiter.parameter_server.row_cache import CacheRules, Reading, RowCache, cache_rules
from streamiter.parameter_server.storage.block import Columns, Numbers

__all__ = ["CachedRows"]


@final
class CachedRows:
    """The rows that one client keeps, in at most ``limit_bytes``; 0: none. Each matrix must be made known first."""

    def __init__(self, limit_bytes: int, *, read_my_writes: bool) -> None:
        self._cache = RowCache(whole_number("client(cache_bytes=)", limit_bytes, 0))
        self._read_my_writes = read_my_writes
        self._rules: dict[str, CacheRules] = {}
        self._blocks: dict[str, Sequence[BlockRange]] = {}
        self.is_on = self._cache.is_on
        """Whether any row is kept; where none is, nothing else here needs to be called."""

    def make_known(self, matrix: Matrix, partitioning: Partitioning) -> None:
        """Its rows may be read and written from now on."""
        self._rules[matrix.name] = cache_rules(matrix.consistency, read_my_writes=self._read_my_writes)
        self._blocks[matrix.name] = partitioning.blocks

    def find(
        self, matrix: str, rows: Sequence[int], columns: Columns | None, my_clock: int
    ) -> Numbers | None:
        """What a read would give; None unless all of its rows are here, and new enough."""
        staleness = self._rules[matrix].staleness
        if staleness is None:
            return None
        found = []
        for row in rows:
            values = self._cache.find(matrix, row, my_clock, staleness, columns)
            if values is None:
                return None
            found.append(values)
        return np.stack(found) if found else None

    def begin(self, matrix: str, rows: Sequence[int], columns: Columns | None) -> list[Reading]:
        """A read is about to be sent; gives what ``keep`` needs. Only whole rows are kept."""
        return [self._cache.begin(matrix, row) for row in rows] if columns is None else []

    def keep(self, readings: Sequence[Reading], result: Numbers, replies: Sequence[GetReply]) -> None:
        """It has been answered, with one row of the result for each reading."""
        lowest = min((reply.clock for reply in replies), default=0)
        for reading, values in zip(readings, result, strict=True):
            self._cache.put(reading, values, lowest)

    def show_writes(self, requests: Sequence[tuple[int, Any]]) -> None:
        """Show what is being sent to the shards, no sooner (it may yet be cancelled) and no later."""
        for _, request in requests:
            update = request.update if isinstance(request, Add) else request
            if isinstance(update, Update) and not update.only_check:
                self._cache.invalidate(request.matrix)
            elif isinstance(request, Add) and self._rules[request.matrix].own_adds_show:
                blocks = self._blocks[request.matrix]
                for block, row, columns, values in request.parts:
                    of_block = blocks[block].columns
                    whole = slice(of_block.start, of_block.stop)
                    self._cache.own_add(request.matrix, row, whole if columns is None else columns, values)

    def clear(self) -> None:
        """Keep nothing of what is here, or is being read."""
        self._cache.clear()
