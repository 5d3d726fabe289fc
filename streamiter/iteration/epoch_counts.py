"""How many records came in each epoch, kept as runs of equal counts.

A loop that has run for months has seen more epochs than could be counted one by one.

>>> counts = EpochCounts()
>>> for epoch in range(1, 100_001):
...     counts.add(epoch, 1)
>>> counts.runs
[(1, 100000, 1)]
>>> counts.take(1), counts.take(2), counts.take(100_001)
(1, 1, 0)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

__all__ = ["EpochCounts"]

# Beyond so many runs neighbours are joined whose counts differ. What is asked of old epochs is only whether
# they brought anything; 1024 runs are some 100 KiB.
_RUNS_MAX: Final = 1024

# Beyond so many runs that gaps keep apart, gaps between older ones are filled: some 6 MiB. A token that visits
# now this head and now that leaves a gap at each of them in every round, and none in all of them together; the
# end of a loop is decided by what all have.
_RUNS_WITH_GAPS_MAX: Final = 65_536


class EpochCounts:
    """Counts by epoch; epochs are added to in any order (mostly growing) and taken from the lowest up.

    Counts are exact while they make up to some thousand runs; beyond that those of older epochs are
    "at least": never 0 where something came, never more than came, unless tens of thousands of gaps lie
    between them: then those of the older half are filled. Invariant: runs are in order, do not overlap, and
    neighbours without a gap differ in their count.
    """

    def __init__(self) -> None:
        self._runs: list[list[int]] = []
        self._runs_max = _RUNS_MAX

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """First epoch, last epoch, records in each of them."""
        return [(first, last, count) for first, last, count in self._runs]

    @property
    def last_epoch(self) -> int | None:
        """The highest epoch that has a count."""
        return self._runs[-1][1] if self._runs else None

    def add(self, epoch: int, count: int) -> None:
        """``count`` (1 or more) more records of ``epoch``."""
        if self._runs and (last := self._runs[-1])[1] + 1 == epoch and last[2] == count:
            last[1] = epoch  # What most loops do most of the time.
            return
        index = self._index_of(epoch)
        if index >= 0 and epoch <= self._runs[index][1]:
            index = self._split_out(index, epoch)
            self._runs[index][2] += count
        else:
            index += 1
            self._runs.insert(index, [epoch, epoch, count])
        self._join_if_alike(index)
        self._join_if_alike(index - 1)
        if len(self._runs) > self._runs_max:
            self._join_older()

    def take(self, epoch: int) -> int:
        """The count of ``epoch``; forgets it and all before it."""
        index = self._index_of(epoch)
        if index < 0:
            return 0
        first, last, count = self._runs[index]
        del self._runs[: index + 1]
        if last > epoch:
            self._runs.insert(0, [epoch + 1, last, count])
        return count if first <= epoch <= last else 0

    def _index_of(self, epoch: int) -> int:
        """The last run that begins at or before ``epoch``; -1 if there is none."""
        if self._runs and self._runs[-1][0] <= epoch:
            return len(self._runs) - 1
        return bisect_right(self._runs, epoch, key=lambda run: run[0]) - 1

    def _split_out(self, index: int, epoch: int) -> int:
        """Give ``epoch`` a run of its own within run ``index``; gives its place."""
        first, last, count = self._runs[index]
        before = [[first, epoch - 1, count]] if first < epoch else []
        after = [[epoch + 1, last, count]] if epoch < last else []
        self._runs[index : index + 1] = [*before, [epoch, epoch, count], *after]
        return index + len(before)

    def _join_if_alike(self, index: int) -> None:
        """Make one of a run and the next, where no gap and no difference is between them."""
        if 0 <= index < len(self._runs) - 1:
            run, following = self._runs[index : index + 2]
            if run[1] + 1 == following[0] and run[2] == following[2]:
                self._runs[index : index + 2] = [[run[0], following[1], run[2]]]

    def forget_older(self, keep_runs: int) -> None:
        """Keep the last runs only."""
        del self._runs[:-keep_runs]

    def _join_older(self) -> None:
        """Make one of neighbours in the older half, whatever their counts."""
        half = len(self._runs) // 2
        fills_gaps = len(self._runs) > _RUNS_WITH_GAPS_MAX
        joined: list[list[int]] = []
        for run in self._runs[:half]:
            if joined and (fills_gaps or joined[-1][1] + 1 == run[0]):
                joined[-1][1:] = [run[1], min(joined[-1][2], run[2])]
            else:
                joined.append(run)
        self._runs[:half] = joined
        self._join_if_alike(len(joined) - 1)
        # Where gaps keep them apart, not to try again before there are half as many more.
        self._runs_max = max(_RUNS_MAX, min(len(self._runs) * 3 // 2, _RUNS_WITH_GAPS_MAX))

    @classmethod
    def added(cls, many: Iterable[Iterable[tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
        """The runs of several as one.

        >>> EpochCounts.added([[(1, 4, 2)], [(3, 5, 1)]])
        [(1, 2, 2), (3, 4, 3), (5, 5, 1)]
        """
        changes: dict[int, int] = {}
        for first, last, count in (run for runs in many for run in runs):
            changes[first] = changes.get(first, 0) + count
            changes[last + 1] = changes.get(last + 1, 0) - count
        runs: list[tuple[int, int, int]] = []
        total = 0
        for begin, end in pairwise(sorted(changes)):
            total += changes[begin]
            if total:
                runs.append((begin, end - 1, total))
        return runs

    def snapshot(self) -> list[tuple[int, int, int]]:
        """Plain data."""
        return self.runs

    def restore(self, runs: list[tuple[int, int, int]]) -> None:
        """Take over what ``snapshot`` gave."""
        self._runs = [list(run) for run in runs]
