"""Progress of a loop: when an epoch is complete, and when the iteration ends. Pure data, no I/O.

A head has *received* epoch e when all feedback of e has come in at it (epoch 0: when the initial
variables have ended). Epoch e is *complete* when every head has received it and every data stream has
passed it or ended. The iteration ends at the first complete epoch that brought no feedback at any head, or no record
of the criteria stream where there is one: from 1 on, and where the data is stamped and its last epoch is k, from k + 2
on, since the end of the data is heard in epoch k + 1.

>>> progress = LoopProgress(heads=2, entrances=1)
>>> progress.head_received(0, epoch=0, count=0), progress.head_received(1, epoch=0, count=0)
([], [Released(epoch=0)])
>>> progress.entrance_ended(0)
[Completed(epoch=0)]
>>> progress.head_received(0, epoch=1, count=3), progress.head_received(1, epoch=1, count=0)
([], [Released(epoch=1), Completed(epoch=1)])
>>> progress.head_received(0, epoch=2, count=0), progress.head_received(1, epoch=2, count=0)
([], [Released(epoch=2), Ended(epoch=2)])
>>> stamped = LoopProgress(heads=1, entrances=1)
>>> [stamped.entrance_passed(0, 0), stamped.entrance_ended(0)]
[[], []]
>>> [stamped.head_received(0, epoch=epoch, count=0)[-1] for epoch in range(3)]
[Completed(epoch=0), Completed(epoch=1), Ended(epoch=2)]
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from streamiter.errors import InternalError
from streamiter.iteration.epoch_counts import EpochCounts

__all__ = ["Completed", "Decision", "EndReason", "Ended", "LoopProgress", "Released"]


@dataclass(slots=True)
class Released:
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


Decision = Released | Completed | Ended


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
                decisions.append(Released(epoch))
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
