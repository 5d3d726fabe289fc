"""The progress of a loop, compared with its definition, applied to all reports again."""

import math
from random import Random

from support.examples import random_examples

from streamiter.iteration.progress import Completed, Decision, Ended, EndReason, LoopProgress, ReleasedEpoch


class History:
    """All reports, and the decisions that follow from them by the definition."""

    def __init__(self, heads: int, entrances: int, criteria_heads: int = 0) -> None:
        self.received: list[list[int]] = [[] for _ in range(heads)]
        """The feedback records of epoch 0, 1, 2, … for each head."""
        self.criteria: list[list[int]] = [[] for _ in range(criteria_heads)]
        """The criteria records of epoch 0, 1, 2, … for each head of the criteria stream."""
        self.passed = [-1.0] * entrances
        self.data_epochs = [0]
        self.is_drained = False
        self.decided: list[Decision] = []

    @property
    def last_complete(self) -> int:
        return sum(not isinstance(decision, ReleasedEpoch) for decision in self.decided) - 1

    def counts(self, head: int) -> list[int]:
        """Return the reports of a head; the numbers of criteria heads follow those of the other heads."""
        return [*self.received, *self.criteria][head]

    def follows(self) -> list[Decision]:
        new: list[Decision] = []
        while not any(isinstance(decision, Ended) for decision in self.decided):
            epoch = self.last_complete + 1
            if ReleasedEpoch(epoch) not in self.decided:
                if not all(len(counts) > epoch for counts in [*self.received, *self.criteria]):
                    break
                new.append(ReleasedEpoch(epoch))
                self.decided.append(ReleasedEpoch(epoch))
            if not all(passed >= epoch for passed in self.passed):
                break
            new.append(Ended(epoch) if self._ends_in(epoch) else Completed(epoch))
            self.decided.append(new[-1])
        return new

    def end_reason(self) -> EndReason | None:
        """Return the reason of the end, found from the records of the last epoch."""
        last = self.decided[-1] if self.decided else None
        if not isinstance(last, Ended):
            return None
        fed_back = sum(counts[last.epoch] for counts in self.received)
        criteria = sum(counts[last.epoch] for counts in self.criteria)
        if fed_back and criteria:
            return EndReason.DRAINED
        if fed_back:
            return EndReason.NO_CRITERIA if self.criteria else EndReason.DRAINED
        return EndReason.NO_FEEDBACK_DESPITE_CRITERIA if criteria else EndReason.NO_FEEDBACK

    def rounds(self) -> list[tuple[int, int]]:
        """Return the complete epochs with feedback, and the number of records in each."""
        sums = [sum(counts[epoch] for counts in self.received) for epoch in range(self.last_complete + 1)]
        return [(epoch, fed_back) for epoch, fed_back in enumerate(sums) if fed_back]

    def awaited(self) -> tuple[list[int], list[int]]:
        """Return the heads and entrances that the next epoch waits for."""
        epoch = self.last_complete + 1
        heads = [*self.received, *self.criteria]
        return (
            [head for head, counts in enumerate(heads) if len(counts) <= epoch],
            [entrance for entrance, passed in enumerate(self.passed) if passed < epoch],
        )

    def _ends_in(self, epoch: int) -> bool:
        brought_nothing = sum(counts[epoch] for counts in self.received) == 0
        is_enough = bool(self.criteria) and sum(counts[epoch] for counts in self.criteria) == 0
        nothing_more = all(passed == math.inf for passed in self.passed) and epoch > max(self.data_epochs)
        return epoch > 0 and nothing_more and (brought_nothing or is_enough or self.is_drained)


Reports = tuple[int, int, int, list[tuple[str, int, int]]]


def reports(random: Random) -> Reports:
    heads, entrances, criteria = random.randint(1, 4), random.randint(0, 3), random.randint(0, 2)
    kinds = ["received"] * 8 + (["passed"] * 4 + ["ended"] * 2 if entrances else []) + ["drained"]
    steps = [
        (random.choice(kinds), random.randrange(12), random.choice((0, 0, 0, 1, 5)))
        for _ in range(random.randrange(61))
    ]
    return heads, entrances, criteria, steps


@random_examples(reports)
def test_decisions_are_those_of_the_definition_after_every_report(given_: Reports) -> None:
    """A callback was lost because an epoch completed too early, or the loop stalled or ended too early."""
    heads, entrances, criteria, steps = given_
    progress, history = LoopProgress(heads, entrances, criteria), History(heads, entrances, criteria)
    for kind, who, number in steps:
        if kind == "received":
            head = who % (heads + criteria)
            counts = history.counts(head)
            counts.append(0 if not counts else number)
            decisions = progress.head_received(head, epoch=len(counts) - 1, count=counts[-1])
        elif kind == "passed" and history.passed[who % entrances] < math.inf:
            entrance = who % entrances
            history.passed[entrance] += 1 + number
            history.data_epochs.append(int(history.passed[entrance]))
            decisions = progress.entrance_passed(entrance, int(history.passed[entrance]))
        elif kind == "ended" and history.passed[who % entrances] < math.inf:
            # A record emitted at the end of an input belongs at the latest to the epoch after the passed ones.
            history.data_epochs.append(int(history.passed[who % entrances]) + 1)
            history.passed[who % entrances] = math.inf
            decisions = progress.entrance_ended(who % entrances)
        elif kind == "drained":
            history.is_drained = True
            progress.end_soon()
            continue
        else:
            continue
        assert decisions == history.follows()
        assert progress.end_reason == history.end_reason()
    assert progress.last_complete == history.last_complete
    assert progress.awaited() == history.awaited()
    assert rounds_of(progress) == history.rounds()


def rounds_of(progress: LoopProgress) -> list[tuple[int, int]]:
    return [(epoch, count) for first, last, count in progress.rounds.runs for epoch in range(first, last + 1)]


def test_only_the_last_thousand_runs_of_rounds_are_kept() -> None:
    """A loop whose rounds alternate between few and many records grew by 100 bytes in each round for months."""
    progress = LoopProgress(heads=1, entrances=0)
    for epoch in range(1_502):
        progress.head_received(0, epoch=epoch, count=epoch % 2 + 1 if epoch else 0)
    assert [first for first, _, _ in progress.rounds.runs] == list(range(502, 1_502))
