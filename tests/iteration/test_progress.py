"""The progress of a loop, compared with its definition, applied to all reports again."""

import math
from random import Random

import pytest
from support.examples import random_examples

from streamiter.errors import InternalError
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


def test_a_loop_that_was_restored_after_its_end_decides_nothing_more() -> None:
    """The heads report their received epochs again, and the loop ended twice."""
    progress = LoopProgress(heads=1, entrances=0)
    progress.head_restored(0, received=2, counts=[])
    assert progress.resume_after(released=2, complete=2, ended_in=2) == []
    assert progress.head_received(0, epoch=3, count=1) == []


def test_heads_of_two_variables_are_aligned_together() -> None:
    """The second or third of five heads, of variables with parallelism 2 and 3, decided instead of the fifth."""
    progress = LoopProgress(heads=5, entrances=0)
    for epoch, counts, expected in (
        (0, [0, 0, 0, 0, 0], Completed(0)),
        (1, [0, 0, 0, 0, 7], Completed(1)),
        (2, [0, 0, 0, 0, 0], Ended(2)),
    ):
        given_ = [progress.head_received(head, epoch=epoch, count=count) for head, count in enumerate(counts)]
        assert given_ == [[], [], [], [], [ReleasedEpoch(epoch), expected]]


def test_the_criteria_end_a_loop_and_never_keep_an_empty_one_alive() -> None:
    """Records of the criteria stream counted as feedback, and a loop without feedback never ended."""
    for fed_back, criteria, expected in ((3, 0, Ended(2)), (0, 5, Ended(2)), (3, 5, Completed(2))):
        progress = LoopProgress(heads=1, entrances=0, criteria_heads=2)
        for epoch, counts in ((0, (0, 0, 0)), (1, (2, 1, 0)), (2, (fed_back, 0, criteria))):
            decided = [progress.head_received(head, epoch=epoch, count=count) for head, count in enumerate(counts)]
            assert decided[:2] == [[], []]
        assert decided[2] == [ReleasedEpoch(2), expected]


def test_a_drained_loop_ends_at_the_next_complete_epoch_but_never_in_epoch_0() -> None:
    """A loop that was drained in epoch 0 ended before its first records were handled once."""
    progress = LoopProgress(heads=1, entrances=1)
    progress.end_soon()
    assert progress.head_received(0, epoch=0, count=0) == [ReleasedEpoch(0)]
    assert progress.entrance_ended(0) == [Completed(0)]
    assert progress.head_received(0, epoch=1, count=7) == [ReleasedEpoch(1), Ended(1)]


def test_a_finished_head_holds_no_other_head_back() -> None:
    """One of two variables had no more feedback, and the other waited for it."""
    progress = LoopProgress(heads=2, entrances=0)
    assert progress.head_finished(1) == []
    assert progress.head_received(0, epoch=0, count=0) == [ReleasedEpoch(0), Completed(0)]
    assert progress.head_received(0, epoch=1, count=1) == [ReleasedEpoch(1), Completed(1)]
    assert progress.head_received(0, epoch=2, count=0) == [ReleasedEpoch(2), Ended(2)]


def test_a_loop_ends_when_nothing_can_be_fed_back_to_any_head() -> None:
    """All feedback topics had ended, and the loop waited for a report of a head."""
    progress = LoopProgress(heads=2, entrances=0)
    assert progress.head_finished(0) == []
    assert progress.head_finished(1) == [ReleasedEpoch(0), Completed(0), ReleasedEpoch(1), Ended(1)]
    assert progress.end_reason is EndReason.NO_FEEDBACK


def test_an_epoch_reported_twice_or_left_out_is_a_mistake_of_the_engine() -> None:
    """A wrong report was found only when the loop stalled, and not at once, as a bug in the engine."""
    progress = LoopProgress(heads=1, entrances=1)
    progress.head_received(0, epoch=0, count=0)
    for epoch in (0, 2):
        with pytest.raises(InternalError, match=rf"head 0 reports epoch {epoch} after epoch 0"):
            progress.head_received(0, epoch=epoch, count=0)


def test_after_a_restore_nothing_is_decided_before_all_have_reported() -> None:
    """The first head's old report completed an epoch with records at another head."""
    progress = LoopProgress(heads=2, entrances=1)
    assert progress.entrance_ended(0) == []
    progress.head_restored(0, received=4, counts=[(4, 0)])
    assert progress.head_received(0, epoch=5, count=0) == []
    progress.head_restored(1, received=4, counts=[(3, 7), (4, 2)])
    assert progress.resume_after(released=4, complete=3, ended_in=None) == [Completed(4)]
    assert progress.rounds.runs == [[4, 4, 2]]
    assert progress.head_received(1, epoch=5, count=0) == [ReleasedEpoch(5), Ended(5)]


def test_a_restored_loop_decides_nothing_until_every_head_has_reported_again() -> None:
    """The entrances reported first: an epoch counted as without feedback, and the loop ended with records in it."""
    progress = LoopProgress(heads=2, entrances=1)
    assert progress.entrance_ended(0) == []
    progress.head_restored(0, received=1, counts=[(1, 0)])
    progress.head_restored(1, received=1, counts=[(1, 5)])
    decisions = progress.resume_after(released=1, complete=0, ended_in=None)
    assert not any(isinstance(decision, Ended) for decision in decisions)
    assert progress.last_complete == 1
