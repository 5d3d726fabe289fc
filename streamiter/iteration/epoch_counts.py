"""How many records came in each epoch, kept as runs of equal counts.

A loop that has run for months has seen more epochs than could be counted one by one.

>>> counts = EpochCounts()
>>> for epoch in range(1, 1_000_001):
...     counts.add(epoch, 1)
>>> counts.runs
[(1, 1000000, 1)]
>>> counts.take(1), counts.take(2), counts.take(1_000_001)
(1, 1, 0)
"""

from __future__ import annotations

__all__ = ["EpochCounts"]


class EpochCounts:
    """Counts by epoch; epochs are added to in any order (mostly growing) and taken from the lowest up."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """First epoch, last epoch, records in each of them."""
        return [(first, last, count) for first, last, count in self._runs]

    def add(self, epoch: int, count: int) -> None:
        """``count`` more records of ``epoch``."""
        runs = self._runs
        if runs and runs[-1][0] <= epoch <= runs[-1][1]:
            self._split_out(len(runs) - 1, epoch)[2] += count
        elif not runs or epoch > runs[-1][1]:
            runs.append([epoch, epoch, count])
        else:
            self._add_earlier(epoch, count)
        self._join_before_last()

    def take(self, epoch: int) -> int:
        """The count of ``epoch``; forgets it and all before it."""
        while self._runs and self._runs[0][1] < epoch:
            self._runs.pop(0)
        if not self._runs or self._runs[0][0] > epoch:
            return 0
        run = self._runs[0]
        run[0] = epoch + 1
        if run[0] > run[1]:
            self._runs.pop(0)
        return run[2]

    def _add_earlier(self, epoch: int, count: int) -> None:
        for index, run in enumerate(self._runs):
            if run[0] <= epoch <= run[1]:
                self._split_out(index, epoch)[2] += count
                return
            if epoch < run[0]:
                self._runs.insert(index, [epoch, epoch, count])
                return

    def _split_out(self, index: int, epoch: int) -> list[int]:
        """Give ``epoch`` a run of its own within run ``index``."""
        first, last, count = self._runs[index]
        own = [epoch, epoch, count]
        before = [[first, epoch - 1, count]] if first < epoch else []
        after = [[epoch + 1, last, count]] if epoch < last else []
        self._runs[index : index + 1] = [*before, own, *after]
        return own

    def _join_before_last(self) -> None:
        """The last run still grows; the two before it are final enough to be joined when alike."""
        runs = self._runs
        if len(runs) >= 3 and runs[-3][2] == runs[-2][2] and runs[-3][1] + 1 == runs[-2][0]:
            runs[-3][1] = runs[-2][1]
            del runs[-2]

    def snapshot(self) -> list[tuple[int, int, int]]:
        """Plain data."""
        return self.runs

    def restore(self, runs: list[tuple[int, int, int]]) -> None:
        """Take over what ``snapshot`` gave."""
        self._runs = [list(run) for run in runs]
