"""Aggregates of ranges of time that overlap: a long range is aggregated by blocks, which several ranges share.

Blocks begin at multiples of their length. So how a range is divided depends only on its records, and its aggregate is
the same after a restart, or whatever the order of arrival.

>>> from streamiter.operators.timed.several_aggregates import Aggregates
>>> ranges = RangeAggregates(Aggregates.of(["sum"], {}), longest_ms=1_000)
>>> times, values = list(range(2_000)), [[1]] * 2_000
>>> ranges.accumulators("ann", times, values, 500, 1_500), ranges.blocks
([1000], 61)
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

from streamiter.operators.timed.several_aggregates import Aggregates

# A range has at most this many whole blocks, and as many records as one block at its ends: 64 + 2 · 156 steps for
# 10,000 records.
_BLOCKS: Final = 64

# After this many computed blocks all are dropped, since their keys may have been stored on disk meanwhile: some 50 MB.
_MOST_COMPUTED: Final = 1 << 18

# Below it, records are added one by one: finding the blocks would take longer.
_FEWEST: Final = 64


class RangeAggregates:
    """Aggregates the records of a key in ranges of time. What it keeps follows from the records, and may be dropped."""

    def __init__(self, aggregates: Aggregates, longest_ms: int) -> None:
        """``longest_ms`` is the length of the longest range."""
        self._aggregates = aggregates
        self._block_ms = -(-longest_ms // _BLOCKS)
        self._digests: dict[Any, dict[int, list[Any]]] = {}
        """By key and number of a block, whose records are all known: its digests."""
        self._computed = 0

    @property
    def blocks(self) -> int:
        """The number of blocks that are kept."""
        return sum(map(len, self._digests.values()))

    def accumulators(self, key: Any, times: list[int], values: list[list[Any]], start: int, end: int) -> list[Any]:
        """Return the accumulators of the records with ``start ≤ time < end``.

        ``times`` are the times of the key's records, in order, and ``values`` their values.
        """
        first, last = bisect_left(times, start), bisect_left(times, end)
        aggregates = self._aggregates
        if last - first < _FEWEST or not aggregates.have_digests:
            return aggregates.added(times[first:last], values[first:last])
        known, digests, at = self._digests.setdefault(key, {}), [], first
        while at < last:
            block = times[at] // self._block_ms
            stop = bisect_left(times, (block + 1) * self._block_ms, at, last)
            is_whole = start <= block * self._block_ms and (block + 1) * self._block_ms <= end
            digest = known.get(block) if is_whole else None
            if digest is None:
                digest = aggregates.digests(times[at:stop], values[at:stop])
                if is_whole:
                    known[block] = digest
                    self._computed += 1
            digests.append(digest)
            at = stop
        if self._computed > _MOST_COMPUTED:
            self.clear()
        combined = aggregates.combined(digests)
        return aggregates.added(times[first:last], values[first:last]) if combined is None else combined

    def changed(self, key: Any, time: int) -> None:
        """Note that a record was added to a key."""
        if key in self._digests:
            self._digests[key].pop(time // self._block_ms, None)

    def removed(self, key: Any, before: list[int], has_more: bool) -> None:
        """Note that the records with these times, the earliest of a key, were removed."""
        if key not in self._digests:
            return
        for time in before:
            self._digests[key].pop(time // self._block_ms, None)
        if not has_more:
            del self._digests[key]

    def clear(self) -> None:
        """Drop what is kept: the records are others now."""
        self._digests.clear()
        self._computed = 0
