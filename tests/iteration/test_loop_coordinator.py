"""The coordinator of a loop: what its members report, and what each of them is told."""

import logging

import pytest

from streamiter.iteration.coordinator import LoopCoordinator, LoopDecisions, RestoredMember

HEADS, CRITERIA, ENTRANCES = [0, 1], 2, [3, 4]
MEMBERS = [*HEADS, CRITERIA, *ENTRANCES]


class Told(LoopDecisions):
    """A member that writes down what it is told, and reports at once that it has stopped."""

    def __init__(self, number: int, loop: LoopCoordinator, told: list[str]) -> None:
        self._number = number
        self._loop = loop
        self._told = told

    def _note(self, *what: object) -> None:
        self._told.append(" ".join(map(str, [self._number, *what])))

    def advance(self, epoch: int) -> None:
        self._note("advance", epoch)

    def release(self, epoch: int) -> None:
        self._note("release", epoch)

    def stop(self, epoch: int) -> None:
        self._note("stop", epoch)
        self._loop.stopped(self._number, epoch)

    def terminate(self, epoch: int) -> None:
        self._note("terminate", epoch)

    def admit(self) -> None:
        self._note("admit")

    def overload(self, is_overloaded: bool) -> None:
        self._note("overload", is_overloaded)

    def awaits(self, text: str) -> None:
        self._note("awaits", text)


class Loop:
    """A loop of two heads, a criteria head and two entrances. ``told`` is what they were told since the last call."""

    def __init__(self, **options: bool) -> None:
        self.coordinator = LoopCoordinator(["left", "right"], ["fast", "slow"], ["more"], where="flow.py:7", **options)
        self._told: list[str] = []
        for number in MEMBERS:
            self.coordinator.join(number, Told(number, self.coordinator, self._told))

    def told(self) -> list[str]:
        told = self._told.copy()
        self._told.clear()
        return told

    def receive(self, epoch: int, *counts: int) -> None:
        """Report that both heads and the criteria head have received an epoch."""
        for member, count in zip([*HEADS, CRITERIA], counts, strict=True):
            self.coordinator.received(member, epoch, count)

    def restore(self, left: RestoredMember, others: RestoredMember) -> None:
        """Restore all members: the left head from its state, the others from theirs, as far as they have one."""
        for member in MEMBERS:
            state = left if member == 0 else others
            advanced = None if member == CRITERIA else state.advanced
            released = state.released if member in HEADS else None
            self.coordinator.restored(member, state._replace(advanced=advanced, released=released))


def to(members: list[int], what: str) -> list[str]:
    return [f"{member} {what}" for member in members]


def test_an_epoch_is_released_to_heads_and_complete_for_heads_and_entrances() -> None:
    """A criteria head was told of complete epochs, and an entrance of released ones."""
    loop = Loop()
    loop.receive(0, 0, 0, 0)
    assert loop.told() == to(HEADS, "release 0")
    loop.coordinator.passed(3, 1)
    loop.coordinator.passed(4, 0)
    assert loop.told() == to([*HEADS, *ENTRANCES], "advance 0")
    loop.coordinator.passed(4, 1)
    loop.receive(1, 1, 0, 1)
    assert loop.told() == to([*HEADS, *ENTRANCES], "advance 1"), "a complete epoch is released, too"


def test_feedback_that_waits_for_its_data_is_not_released_early() -> None:
    """A bounded iteration passed on the feedback of an epoch before the replayed data of the epoch."""
    loop = Loop(releases_early=False)
    loop.receive(0, 0, 0, 0)
    assert loop.told() == []


def test_an_iteration_ends_when_all_heads_have_stopped() -> None:
    """A member that ended first passed on what steps emit at the end, and a head that had not stopped took it."""
    loop = Loop()
    for entrance in ENTRANCES:
        loop.coordinator.ended(entrance)
    loop.receive(0, 0, 0, 0)
    loop.receive(1, 1, 0, 1)
    loop.told()
    loop.receive(2, 1, 1, 0)
    assert loop.told() == [*to(HEADS, "stop 2"), *to(MEMBERS, "terminate 2")]
    found = loop.coordinator.statistics(["left"], [{"epoch_reached": 9, "held_records": 3}, {"waiting_records": 2}])
    assert (found.ended_in, found.end_reason) == (2, "the termination criteria brought nothing")
    assert (found.epoch_reached, found.held_records, found.waiting_records) == (9, 3, 2)
    assert loop.coordinator.statistics([], [{}]).epoch_reached == 2
    begins = Loop().coordinator
    assert begins.statistics([], []).epoch_reached == begins.statistics([], [{}]).epoch_reached == 0


def test_heads_whose_feedback_has_ended_end_the_iteration(caplog: pytest.LogCaptureFixture) -> None:
    """The criteria asked for another round, the data was over, and nobody said why the iteration ended."""
    loop = Loop()
    for member in [*ENTRANCES, *HEADS]:
        loop.coordinator.ended(member)
    for epoch in range(2):
        loop.coordinator.received(CRITERIA, epoch, 1)
    assert loop.told()[-len(MEMBERS) :] == to(MEMBERS, "terminate 1")
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == (
        "the iteration at flow.py:7 ended in epoch 1: nothing was fed back, though the termination criteria asked to "
        "continue; to send its data in every epoch, pass replayed(stream)"
    )


def test_reports_behind_a_checkpoint_wait_for_the_members_before_it() -> None:
    """An entrance's data counted for an epoch that another member's snapshot did not have."""
    loop = Loop()
    loop.receive(0, 0, 0, 0)
    loop.coordinator.passed(4, 1)
    loop.told()
    loop.coordinator.checkpoint_begins(3, 1)
    loop.coordinator.passed(3, 0)
    loop.coordinator.ended(3)
    for member in (0, 1, 2):
        loop.coordinator.checkpoint_begins(member, 1)
    assert loop.told() == []
    loop.coordinator.checkpoint_begins(4, 1)
    assert loop.told() == to([*HEADS, *ENTRANCES], "advance 0")


def test_decisions_that_only_some_members_know_are_repeated_after_a_restore() -> None:
    """The left head knew that epoch 1 was released and complete, the other members waited for it for ever."""
    others = RestoredMember(None, advanced=0, complete=0, released=0, reported=1)
    loop = Loop()
    loop.restore(others._replace(advanced=1, complete=1, released=1), others)
    assert loop.told() == to([1, *ENTRANCES], "advance 1")
    loop = Loop()
    loop.restore(others._replace(released=1), others)
    assert loop.told()[:1] == to([1], "release 1")


def test_data_that_had_passed_before_a_restore_counts() -> None:
    """Epoch 0 waited for the data of an entrance that had reported it before the snapshot."""
    loop = Loop()
    state = RestoredMember(None, advanced=-1, complete=-1, released=-1, reported=0)
    loop.restore(state, state)
    assert loop.told() == to([*HEADS, *ENTRANCES], "advance 0")


def test_an_end_that_one_member_knows_is_the_end_of_all_after_a_restore() -> None:
    """After a restart the iteration continued behind its end, with the feedback that the heads had not dropped."""
    loop = Loop()
    others = RestoredMember(None, advanced=0, complete=0, released=1, reported=1)
    loop.restore(others._replace(ended_in=1), others)
    assert loop.told() == [*to(HEADS, "stop 1"), *to(MEMBERS, "terminate 1")]
    loop.receive(2, 1, 1, 1)
    assert loop.told() == []


def test_the_epochs_before_an_end_that_a_head_knows_are_complete_after_a_restore() -> None:
    """A head knew the end at once, and the epochs before it only behind its snapshot: their callbacks were lost."""
    loop = Loop()
    others = RestoredMember(None, advanced=-1, complete=-1, released=-1, reported=2)
    loop.restore(others._replace(ended_in=2), others)
    of_each = [line for member in [*HEADS, *ENTRANCES] for line in (f"{member} advance 0", f"{member} advance 1")]
    assert loop.told() == [*of_each, *to(HEADS, "stop 2"), *to(MEMBERS, "terminate 2")]


def test_entrances_hear_when_feedback_begins_and_ceases_to_wait_on_disk() -> None:
    """The second head's feedback was read back from disk, and entrances stayed slow, or were never slowed."""
    loop = Loop()
    for head, is_overloaded, told in [
        (0, True, to(ENTRANCES, "overload True")),
        (1, True, []),
        (0, False, []),
        (1, False, to(ENTRANCES, "overload False")),
    ]:
        loop.coordinator.overloaded(head, is_overloaded)
        assert loop.told() == told
    loop.coordinator.handled(0)
    assert loop.told() == to(ENTRANCES, "admit")
    early = LoopCoordinator(["head"], ["data"], where="")
    early.overloaded(0, True)  # The head is restored, and the entrance has not joined.


def test_an_entrance_hears_what_the_epoch_waits_for() -> None:
    """A loop stood still for an hour, and its log said that the entrance was held."""
    loop = Loop()
    silent = "(a silent source needs idle_timeout= of epochs_every)"
    loop.coordinator.asks_awaited(3)
    assert loop.told() == [f"3 awaits feedback to left, right and data at fast, slow {silent}"]
    loop.receive(0, 0, 0, 0)
    loop.coordinator.passed(3, 0)
    loop.told()
    loop.coordinator.asks_awaited(3)
    assert loop.told() == [f"3 awaits data at slow {silent}"]
    loop.coordinator.passed(4, 0)
    loop.coordinator.passed(3, 1)
    loop.coordinator.passed(4, 1)
    loop.coordinator.received(0, 1, 0)
    loop.coordinator.received(1, 1, 0)
    loop.told()
    loop.coordinator.asks_awaited(3)
    assert loop.told() == ["3 awaits the end of the epoch"], "the criteria have no name that a user knows"
