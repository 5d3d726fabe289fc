"""What a head has received of each epoch, and what of it the loop has been told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamiter.iteration.coordinator import LoopCoordinator
from streamiter.iteration.epoch_counts import EpochCounts

__all__ = ["ReceivedEpochs"]

_NOTHING = -1


class ReceivedEpochs:
    """Counts the records that come back to one head, and reports an epoch when all of it is in."""

    def __init__(self, coordinator: LoopCoordinator, head: int) -> None:
        self._coordinator = coordinator
        self._head = head
        self._counts = EpochCounts()
        """Of epochs that are not received to their end."""
        self._unacknowledged: dict[int, int] = {}
        """Counts of epochs that were reported and are not known to be complete."""
        self._reported = _NOTHING
        self._has_ended = False

    def add(self, epoch: int, records: int) -> None:
        """Records of ``epoch`` have come back."""
        self._counts.add(epoch, records)
        self._coordinator.feedback_handled()

    def report_up_to(self, epoch: int) -> None:
        """All that comes back of epochs up to ``epoch`` is in. That may be more than one epoch, or none that is new."""
        if self._has_ended:
            return
        for received in range(self._reported + 1, epoch + 1):
            self._unacknowledged[received] = count = self._counts.take(received)
            self._reported = received
            self._coordinator.head_received(self._head, received, count)

    def end(self) -> None:
        """Nothing will ever come back any more."""
        self.report_up_to(self._counts.last_epoch or 0)
        self._has_ended = True
        self._coordinator.head_finished(self._head)

    def acknowledge(self, complete: int) -> None:
        """The loop knows that ``complete`` and all epochs before it are."""
        for epoch in [reported for reported in self._unacknowledged if reported <= complete]:
            del self._unacknowledged[epoch]

    def report_again(self) -> None:
        """Report what the loop may not know, after a restore."""
        complete = self._coordinator.progress.last_complete
        for epoch, count in self._unacknowledged.items():
            if epoch > complete:
                self._coordinator.head_received(self._head, epoch, count)
        if self._has_ended:
            self._coordinator.head_finished(self._head)

    def snapshot(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "counts": self._counts.snapshot(),
            "unacknowledged": list(self._unacknowledged.items()),
            "reported": self._reported,
            "has ended": self._has_ended,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``snapshot`` gave."""
        self._counts.restore(state["counts"])
        self._unacknowledged = dict(state["unacknowledged"])
        self._reported = state["reported"]
        self._has_ended = state["has ended"]

    @staticmethod
    def redistribute(states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """The first head has received what all had; the others have reported the same epochs, without records."""
        reported = min(state["reported"] for state in states)
        epochs = dict.fromkeys(epoch for state in states for epoch, _ in state["unacknowledged"])
        known = [dict(state["unacknowledged"]) for state in states]
        sums = {epoch: sum(of_head.get(epoch, 0) for of_head in known) for epoch in sorted(epochs)}
        again = [(epoch, epoch, count) for epoch, count in sums.items() if epoch > reported and count]
        runs = EpochCounts.added([again, *(state["counts"] for state in states)])
        has_ended = all(state["has ended"] for state in states)
        return [
            {
                "counts": [] if head else runs,
                "unacknowledged": [
                    (epoch, 0 if head else count) for epoch, count in sums.items() if epoch <= reported
                ],
                "reported": reported,
                "has ended": has_ended,
            }
            for head in range(parallelism)
        ]
