"""The progress of a loop: when an epoch is complete, and when the iteration ends. Pure data, no input or output.

A head has *received* epoch e when all feedback of e has arrived at it (epoch 0: when the initial variables have ended).
Epoch e is *released* when every head has received it, and *complete* when also every data stream has passed it or
ended. The iteration ends at the first complete epoch that brought no feedback to any head, or no record of the
termination criteria if the body has them. This is epoch 1 or later; if the data is stamped and its last epoch is k, it
is epoch k + 2 or later, because steps are told of the end of the data in epoch k + 1.

``LoopProgress`` makes these decisions, and ``EpochCounts`` counts the records of many epochs in little memory.

>>> progress = LoopProgress(heads=2, entrances=1)
>>> progress.head_received(0, epoch=0, count=0), progress.head_received(1, epoch=0, count=0)
([], [ReleasedEpoch(epoch=0)])
>>> progress.entrance_ended(0)
[Completed(epoch=0)]
>>> progress.head_received(0, epoch=1, count=3), progress.head_received(1, epoch=1, count=0)
([], [ReleasedEpoch(epoch=1), Completed(epoch=1)])
>>> progress.head_received(0, epoch=2, count=0), progress.head_received(1, epoch=2, count=0)
([], [ReleasedEpoch(epoch=2), Ended(epoch=2)])
>>> stamped = LoopProgress(heads=1, entrances=1)
>>> [stamped.entrance_passed(0, 0), stamped.entrance_ended(0)]
[[], []]
>>> [stamped.head_received(0, epoch=epoch, count=0)[-1] for epoch in range(3)]
[Completed(epoch=0), Completed(epoch=1), Ended(epoch=2)]
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import msgspec

from streamiter.errors import InternalError
from streamiter.operators.declared_state import LISTS, DeclaredState, declared


class ReleasedEpoch(msgspec.Struct):
    """Every head has received ``epoch``: the heads may pass on its feedback."""

    epoch: int


class Completed(msgspec.Struct):
    """``epoch`` is complete and the iteration continues: the heads send its watermark."""

    epoch: int


class Ended(msgspec.Struct):
    """The iteration ends in ``epoch``."""

    epoch: int


Decision = ReleasedEpoch | Completed | Ended


class EndReason(enum.Enum):
    """Why an iteration has ended."""

    NO_FEEDBACK = "nothing was fed back"
    NO_FEEDBACK_DESPITE_CRITERIA = "nothing was fed back, though the termination criteria asked to continue"
    NO_CRITERIA = "the termination criteria brought nothing"
    DRAINED = "the job was drained"


# The number of runs of rounds with equal counts that statistics show; more than a reader looks at.
_ROUNDS_TOLD: Final = 1000


class LoopProgress:
    """Turns the reports of the heads and entrances of one iteration into decisions.

    Heads are numbered from 0; the numbers of criteria heads follow those of the others. Each report returns the
    decisions that follow from it, in order. Only the loop's coordinator makes reports. Invariants: epochs are released
    and completed one after the other, each once; a completed epoch was released; no decision follows ``Ended``.
    """

    def __init__(self, heads: int, entrances: int, criteria_heads: int = 0) -> None:
        self._heads = heads
        self._has_criteria = criteria_heads > 0
        self._received = [-1.0] * (heads + criteria_heads)
        self._passed = [-1.0] * entrances
        self._last_data_epoch = 0
        self._feedback: dict[int, int] = {}
        """The number of records fed back in each epoch that is not complete."""
        self._criteria: dict[int, int] = {}
        """The number of records of the criteria in each epoch that is not complete."""
        self._ends_soon = False
        self.rounds = EpochCounts()
        """The number of records fed back in each complete epoch, except epochs without any; only the latest runs."""
        self.last_released = -1
        self.last_complete = -1
        self.ended_in: int | None = None
        self.end_reason: EndReason | None = None
        self._is_restoring = False

    def head_restored(self, head: int, *, received: int, counts: Iterable[tuple[int, int]]) -> None:
        """Note that head ``head`` resumes, after it has received all epochs up to ``received``.

        ``counts`` are the numbers of records of epochs that may not be complete. No decision is made before
        :meth:`resume_after`: the number of records of an epoch is known only when every head has been restored.
        """
        self._is_restoring = True
        self._received[head] = received
        known = self._feedback if head < self._heads else self._criteria
        for epoch, count in counts:
            known[epoch] = known.get(epoch, 0) + count

    def resume_after(self, *, released: int, complete: int, ended_in: int | None) -> list[Decision]:
        """Resume from these epochs, because every head and entrance has been restored."""
        if min(self._received) < complete:
            raise InternalError(f"loop: epoch {complete} is complete, but heads resume after {self._received}")
        self.last_released, self.last_complete, self.ended_in = released, complete, ended_in
        for counts in (self._feedback, self._criteria):
            for epoch in [epoch for epoch in counts if epoch <= complete]:
                del counts[epoch]
        self._is_restoring = False
        return self._decide()

    def head_received(self, head: int, *, epoch: int, count: int) -> list[Decision]:
        """Note that head ``head`` has received all ``count`` records of ``epoch``."""
        if epoch != self._received[head] + 1:
            raise InternalError(f"loop: head {head} reports epoch {epoch} after epoch {self._received[head]:.0f}")
        self._received[head] = epoch
        counts = self._feedback if head < self._heads else self._criteria
        counts[epoch] = counts.get(epoch, 0) + count
        # Most reports of several heads decide nothing: the others have not received the epoch.
        return [] if min(self._received) <= self.last_released else self._decide()

    def head_finished(self, head: int) -> list[Decision]:
        """Note that head ``head`` will receive no more feedback."""
        self._received[head] = math.inf
        return self._decide()

    def entrance_passed(self, entrance: int, epoch: int) -> list[Decision]:
        """Note that all stamped data up to ``epoch`` has passed entrance ``entrance``."""
        self._passed[entrance] = epoch
        self._last_data_epoch = max(self._last_data_epoch, epoch)
        return self._decide()

    def entrance_ended(self, entrance: int) -> list[Decision]:
        """Note that the data of entrance ``entrance`` has ended.

        Operators are told of the end, and their watermark is at most the last epoch of the data. So the records that
        they emit then belong to the next epoch at the latest. That epoch cannot be the last one: feedback of these
        records belongs to the epoch after it, and would be dropped.
        """
        self._last_data_epoch = max(self._last_data_epoch, int(self._passed[entrance]) + 1)
        self._passed[entrance] = math.inf
        return self._decide()

    def awaited(self) -> tuple[list[int], list[int]]:
        """Return the heads that have not received the current epoch, and the entrances that it has not passed."""
        epoch = self.last_complete + 1
        heads = [head for head, received in enumerate(self._received) if received < epoch]
        return heads, [entrance for entrance, passed in enumerate(self._passed) if passed < epoch]

    def end_soon(self) -> None:
        """End at the next complete epoch in which the iteration may end, even if it brings records."""
        self._ends_soon = True

    def _decide(self) -> list[Decision]:
        decisions: list[Decision] = []
        if self.ended_in is not None or self._is_restoring:
            return decisions
        received = min(self._received)
        passed = min(self._passed, default=math.inf)
        while self.ended_in is None:
            epoch = self.last_complete + 1
            if self.last_released < epoch:
                if received < epoch:
                    break
                self.last_released = epoch
                decisions.append(ReleasedEpoch(epoch))
            if passed < epoch:
                break
            self.last_complete = epoch
            fed_back, criteria = self._feedback.pop(epoch, 0), self._criteria.pop(epoch, 0)
            if fed_back:
                self.rounds.add(epoch, fed_back)
                if len(self.rounds.runs) > _ROUNDS_TOLD:
                    self.rounds.forget_older(_ROUNDS_TOLD)
            may_end = passed == math.inf and epoch > self._last_data_epoch
            if may_end and (not fed_back or (self._has_criteria and not criteria) or self._ends_soon):
                self.ended_in = epoch
                self.end_reason = _end_reason(fed_back, criteria, has_criteria=self._has_criteria)
                decisions.append(Ended(epoch))
            else:
                decisions.append(Completed(epoch))
        return decisions


def _end_reason(fed_back: int, criteria: int, *, has_criteria: bool) -> EndReason:
    if not fed_back:
        return EndReason.NO_FEEDBACK_DESPITE_CRITERIA if criteria else EndReason.NO_FEEDBACK
    return EndReason.NO_CRITERIA if has_criteria and not criteria else EndReason.DRAINED


# With more runs than this, neighbouring runs with different counts are joined: of old epochs the loop only asks whether
# they brought any record. 1024 runs need about 100 KiB.
_RUNS_MAX: Final = 1024

# With more runs than this, separated by gaps, the gaps between older runs are filled. 65,536 runs need about 6 MiB.
# A token that visits one head after the other leaves a gap at each head in every round, but no gap in all heads
# together; and the counts of all heads together decide the end of a loop.
_RUNS_WITH_GAPS_MAX: Final = 65_536


class EpochCounts(DeclaredState):
    """The number of records in each epoch, stored as runs of epochs with equal counts.

    A loop that has run for months has seen more epochs than can be counted one by one. Records are added in any order
    of their epochs, mostly growing, and taken from the lowest epoch up.

    Counts are exact while there are at most about a thousand runs. With more runs, the counts of older epochs become
    lower bounds: never 0 for an epoch with records, and never more than the records. With tens of thousands of gaps
    between runs, gaps in the older half are filled. Invariant: runs are in order, do not overlap, and neighbours
    without a gap between them differ in their count.

    >>> counts = EpochCounts()
    >>> for epoch in range(1, 100_001):
    ...     counts.add(epoch, 1)
    >>> counts.runs
    [[1, 100000, 1]]
    >>> counts.take(1), counts.take(2), counts.take(100_001)
    (1, 1, 0)
    """

    runs: list[list[int]] = declared(made=list, form=LISTS)
    """For each run the first epoch, the last epoch, and the number of records in each of its epochs."""

    def __init__(self) -> None:
        self._runs_max = _RUNS_MAX

    @property
    def last_epoch(self) -> int | None:
        """The highest epoch that has a count."""
        return self.runs[-1][1] if self.runs else None

    def add(self, epoch: int, count: int) -> None:
        """Add ``count`` records (1 or more) of ``epoch``."""
        if not self.runs:
            self.runs.append([epoch, epoch, count])
            return
        if (last := self.runs[-1])[1] + 1 == epoch and last[2] == count:
            last[1] = epoch  # The case of most loops most of the time.
            return
        index = self._index_of(epoch)
        if index >= 0 and epoch <= self.runs[index][1]:
            index = self._split_out(index, epoch)
            self.runs[index][2] += count
        else:
            index += 1
            self.runs.insert(index, [epoch, epoch, count])
        self._join_if_alike(index)
        self._join_if_alike(index - 1)
        if len(self.runs) > self._runs_max:
            self._join_older()

    def take(self, epoch: int) -> int:
        """Return the count of ``epoch``, and forget this and all earlier epochs."""
        if self.runs and self.runs[0][0] == self.runs[0][1] == epoch:
            return self.runs.pop(0)[2]
        index = self._index_of(epoch)
        if index < 0:
            return 0
        first, last, count = self.runs[index]
        del self.runs[: index + 1]
        if last > epoch:
            self.runs.insert(0, [epoch + 1, last, count])
        return count if first <= epoch <= last else 0

    def _index_of(self, epoch: int) -> int:
        """Return the index of the last run that begins at or before ``epoch``; -1 if there is none."""
        if self.runs and self.runs[-1][0] <= epoch:
            return len(self.runs) - 1
        return bisect_right(self.runs, epoch, key=lambda run: run[0]) - 1

    def _split_out(self, index: int, epoch: int) -> int:
        """Split run ``index`` so that ``epoch`` has a run of its own; return the index of that run."""
        first, last, count = self.runs[index]
        before = [[first, epoch - 1, count]] if first < epoch else []
        after = [[epoch + 1, last, count]] if epoch < last else []
        self.runs[index : index + 1] = [*before, [epoch, epoch, count], *after]
        return index + len(before)

    def _join_if_alike(self, index: int) -> None:
        """Join a run and the next one if there is no gap between them and their counts are equal."""
        if 0 <= index < len(self.runs) - 1:
            run, following = self.runs[index : index + 2]
            if run[1] + 1 == following[0] and run[2] == following[2]:
                self.runs[index : index + 2] = [[run[0], following[1], run[2]]]

    def forget_older(self, keep_runs: int) -> None:
        """Keep only the last ``keep_runs`` runs."""
        del self.runs[:-keep_runs]

    def _join_older(self) -> None:
        """Join neighbouring runs in the older half, even if their counts differ."""
        half = len(self.runs) // 2
        fills_gaps = len(self.runs) > _RUNS_WITH_GAPS_MAX
        joined: list[list[int]] = []
        for run in self.runs[:half]:
            if joined and (fills_gaps or joined[-1][1] + 1 == run[0]):
                joined[-1][1:] = [run[1], min(joined[-1][2], run[2])]
            else:
                joined.append(run)
        self.runs[:half] = joined
        self._join_if_alike(len(joined) - 1)
        # If gaps separate the runs, the next attempt comes when there are half as many more.
        self._runs_max = max(_RUNS_MAX, min(len(self.runs) * 3 // 2, _RUNS_WITH_GAPS_MAX))

    @classmethod
    def added(cls, many: Iterable[Iterable[tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
        """Return the sum of several lists of runs.

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
