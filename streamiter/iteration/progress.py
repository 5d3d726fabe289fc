"""Progress of a loop: when an epoch is complete, and when the iteration ends. Pure data, no I/O.

A head has *received* epoch e when all feedback of e has come in at it (epoch 0: when the initial
variables have ended). Epoch e is *complete* when every head has received it and every data stream has
passed it or ended. The iteration ends at the first complete epoch that brought no feedback at any head, or no record
of the criteria stream where there is one: from 1 on, and where the data is stamped and its last epoch is k, from k + 2
on, since the end of the data is heard in epoch k + 1.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol, final

from streamiter.errors import InternalError
from streamiter.operators.output import Output
from streamiter.operators.steps import fail_at, records_of
from streamiter.records import Batch, slice_batch

__all__ = [
    "Completed",
    "Decision",
    "EndReason",
    "Ended",
    "EpochCounts",
    "EpochGrouping",
    "GroupsOf",
    "GroupsUpToMarks",
    "LoopProgress",
    "ReleasedEpoch",
]


@dataclass(slots=True)
class ReleasedEpoch:
    """Every head has received ``epoch``: what was fed back of it may go on."""

    epoch: int


@dataclass(slots=True)
class Completed:
    """``epoch`` is complete and the iteration goes on: the heads send its watermark."""

    epoch: int


@dataclass(slots=True)
class Ended:
    """The iteration ends in ``epoch``."""

    epoch: int


Decision = ReleasedEpoch | Completed | Ended


class EndReason(enum.Enum):
    """Why an iteration has ended."""

    NO_FEEDBACK = "nothing was fed back"
    NO_FEEDBACK_DESPITE_CRITERIA = "nothing was fed back, though the termination criteria asked to go on"
    NO_CRITERIA = "the termination criteria brought nothing"
    DRAINED = "the job was drained"


# Runs of rounds that brought as much each: as many as anybody looks at.
_ROUNDS_TOLD: Final = 1000


class LoopProgress:
    """Brings together what the heads and entrances of one iteration report.

    Heads are numbered from 0, those of the criteria stream behind the others. Every report gives the
    decisions that follow from it, in order. Invariants: epochs are released and completed one after the
    other, each once; a completed epoch was released; nothing follows ``Ended``.
    """

    def __init__(self, heads: int, entrances: int, criteria_heads: int = 0) -> None:
        self._heads = heads
        self._has_criteria = criteria_heads > 0
        self._received = [-1.0] * (heads + criteria_heads)
        self._passed = [-1.0] * entrances
        self._last_data_epoch = 0
        self._feedback: dict[int, int] = {}
        """Records fed back, by epoch that is not complete."""
        self._criteria: dict[int, int] = {}
        """Records of the criteria stream, by epoch that is not complete."""
        self._ends_soon = False
        self.rounds = EpochCounts()
        """Records fed back, by complete epoch that brought any: the last ones."""
        self.last_released = -1
        self.last_complete = -1
        self.ended_in: int | None = None
        self.end_reason: EndReason | None = None
        self._awaits_reports = False

    def go_on_after(self, *, released: int, complete: int, ended_in: int | None) -> None:
        """Begin where a restored loop stands; what is not complete has to be reported again.

        Nothing is decided until :meth:`all_reported`: an epoch that was released before is complete once the
        data has passed it, but whether it brought anything is known only when every head has said so again.
        """
        self.last_released, self.last_complete, self.ended_in = released, complete, ended_in
        self._received = [float(complete)] * len(self._received)
        self._awaits_reports = True

    def all_reported(self) -> list[Decision]:
        """Every head and entrance of a restored loop has reported again."""
        self._awaits_reports = False
        return self._decide()

    def head_received(self, head: int, *, epoch: int, count: int) -> list[Decision]:
        """Head ``head`` has received all of ``epoch``, ``count`` records of it."""
        if epoch != self._received[head] + 1:
            raise InternalError(
                f"loop: head {head} reports epoch {epoch} after epoch {self._received[head]:.0f}"
            )
        self._received[head] = epoch
        counts = self._feedback if head < self._heads else self._criteria
        counts[epoch] = counts.get(epoch, 0) + count
        return self._decide()

    def head_finished(self, head: int) -> list[Decision]:
        """Nothing will ever be fed back to head ``head`` any more."""
        self._received[head] = math.inf
        return self._decide()

    def entrance_passed(self, entrance: int, epoch: int) -> list[Decision]:
        """All stamped data up to ``epoch`` has gone through entrance ``entrance``."""
        self._passed[entrance] = epoch
        self._last_data_epoch = max(self._last_data_epoch, epoch)
        return self._decide()

    def entrance_ended(self, entrance: int) -> list[Decision]:
        """The data of entrance ``entrance`` has ended.

        What operators emit when they hear of it belongs at the latest to the epoch after those the data has
        passed, since their watermark cannot be beyond. So that epoch cannot be the last: what is fed back of it
        comes one later, and would be dropped.
        """
        self._last_data_epoch = max(self._last_data_epoch, int(self._passed[entrance]) + 1)
        self._passed[entrance] = math.inf
        return self._decide()

    def awaited(self) -> tuple[list[int], list[int]]:
        """The heads that have not received the epoch under way, and the entrances that it has not passed."""
        epoch = self.last_complete + 1
        heads = [head for head, received in enumerate(self._received) if received < epoch]
        return heads, [entrance for entrance, passed in enumerate(self._passed) if passed < epoch]

    def end_soon(self) -> None:
        """End at the next complete epoch in which all may end, whatever it brought."""
        self._ends_soon = True

    def _decide(self) -> list[Decision]:
        decisions: list[Decision] = []
        if self.ended_in is not None or self._awaits_reports:
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
            decisions.append(self._complete(epoch))
        return decisions

    def _complete(self, epoch: int) -> Decision:
        self.last_complete = epoch
        fed_back = self._feedback.pop(epoch, 0)
        criteria = self._criteria.pop(epoch, 0)
        if fed_back:
            self.rounds.add(epoch, fed_back)
            self.rounds.forget_older(_ROUNDS_TOLD)
        may_end = epoch > self._last_data_epoch and self._data_has_ended()
        has_no_reason_to_go_on = not fed_back or (self._has_criteria and not criteria) or self._ends_soon
        if may_end and has_no_reason_to_go_on:
            self.ended_in = epoch
            self.end_reason = _end_reason(fed_back, criteria, has_criteria=self._has_criteria)
            return Ended(epoch)
        return Completed(epoch)

    def _data_has_ended(self) -> bool:
        return all(passed == math.inf for passed in self._passed)


def _end_reason(fed_back: int, criteria: int, *, has_criteria: bool) -> EndReason:
    if not fed_back:
        return EndReason.NO_FEEDBACK_DESPITE_CRITERIA if criteria else EndReason.NO_FEEDBACK
    return EndReason.NO_CRITERIA if has_criteria and not criteria else EndReason.DRAINED


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

    How many records came in each epoch, kept as runs of equal counts.

    A loop that has run for months has seen more epochs than could be counted one by one.

    >>> counts = EpochCounts()
    >>> for epoch in range(1, 100_001):
    ...     counts.add(epoch, 1)
    >>> counts.runs
    [(1, 100000, 1)]
    >>> counts.take(1), counts.take(2), counts.take(100_001)
    (1, 1, 0)
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


class EpochGrouping(Protocol):
    """A way to cut. It keeps nothing between two batches.

    Where the records of a subtask are cut into epochs, one class for each way.
    """

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """The pieces of a batch (some may be empty), each with whether its epoch ends behind it.

        ``count`` is how many records the epoch has already; ``step`` is for errors.
        """


@final
class GroupsOf:
    """Groups of so many records.

    >>> list(GroupsOf(3).cut(["b", "c", "d", "e"], 1, "stamp"))
    [(['b', 'c'], True), (['d', 'e'], False)]
    """

    def __init__(self, records: int) -> None:
        self._records = records

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """See :class:`EpochGrouping`."""
        start, length = 0, len(batch)
        while start < length:
            # A restored step may have been told to make smaller groups than the one it is in.
            missing = max(0, self._records - count)
            stop = min(length, start + missing)
            yield slice_batch(batch, start, stop), stop - start == missing
            start, count = stop, 0


@final
class GroupsUpToMarks:
    """Groups of the records between two marks, which are left out.

    >>> list(GroupsUpToMarks(lambda record: record == "|").cut(["a", "b", "|", "c"], 0, "stamp"))
    [(['a', 'b'], True), (['c'], False)]
    """

    def __init__(self, marks: Callable[[Any], object]) -> None:
        self._marks = marks

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """See :class:`EpochGrouping`."""
        start = 0
        for mark in self._places(batch, step):
            yield slice_batch(batch, start, mark), True
            start = mark + 1
        yield slice_batch(batch, start, len(batch)) if start else batch, False

    def _places(self, batch: Batch, step: str) -> list[int]:
        marks = self._marks
        records, progress = records_of(batch)
        try:
            return [index for index, record in enumerate(records) if marks(record)]
        except Exception as error:
            fail_at(batch, progress, error, Output(step))
