"""The runs and commits in a store, and the checkpoint for a restart, compared with the whole history."""

from dataclasses import dataclass, field
from random import Random

import pytest
from support.examples import random_examples

from streamiter.engine.checkpointing.commit import CommitRecord
from streamiter.engine.checkpointing.restore import Restore, check_restore_option, choose_checkpoint
from streamiter.engine.storage.flow_record import CommitPointer, FlowRecord
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotHeader
from streamiter.errors import CheckpointError, ProducerFenced


@dataclass
class History:
    """Runs one after another, their snapshots, and the committed ones of these."""

    record: FlowRecord = field(default_factory=lambda: FlowRecord("clicks"))
    late: FlowRecord = field(default_factory=lambda: FlowRecord("clicks"))
    """The record without the last commit: the process died before the store had it."""
    runs: list[str] = field(default_factory=list)
    taken: list[CheckpointId] = field(default_factory=list)
    committed: list[CheckpointId] = field(default_factory=list)

    def claim(self, *, forgets: bool) -> None:
        self.runs.append(f"run {len(self.runs)}")
        self.record = self.record.claimed_by(self.runs[-1], forget_committed=forgets)
        self.late = self.late.claimed_by(self.runs[-1], forget_committed=forgets)
        if forgets:
            self.committed = []

    def take(self, *, commits: bool) -> None:
        """Let the owner take the next snapshot after the last committed one, or after its own last one."""
        own = [each.number for each in self.taken if each.run == self.runs[-1]]
        last = self.committed[-1].number if self.committed else 0
        checkpoint = CheckpointId(max([last, *own]) + 1, self.runs[-1])
        self.taken.append(checkpoint)
        if commits:
            self.late, self.record = self.record, self.record.with_commit(checkpoint)
            self.committed.append(checkpoint)

    @property
    def last(self) -> CheckpointId | None:
        return self.committed[-1] if self.committed else None

    def led_to_commit(self, checkpoint: CheckpointId) -> bool:
        """Return whether the run of the checkpoint has committed it, or a later one."""
        return any(each.run == checkpoint.run and each.number >= checkpoint.number for each in self.committed)


def histories(random: Random) -> History:
    history = History()
    history.claim(forgets=False)
    for _ in range(random.randrange(16)):
        if random.random() < 0.3:
            history.claim(forgets=random.random() < 0.15)
        else:
            history.take(commits=random.random() < 0.6)
    return history


@random_examples(histories)
def test_the_record_has_the_owner_and_all_checkpoints_with_a_later_commit(history: History) -> None:
    """A restart used a snapshot of a run whose outputs had been aborted."""
    pointer = history.record.pointer
    assert pointer is not None
    assert (pointer.run, pointer.committed) == (history.runs[-1], history.last)
    assert [each for each in history.taken if pointer.has_led_to_commit(each)] == [
        each for each in history.taken if history.led_to_commit(each)
    ]
    history.record.check_owner(history.runs[-1], "save")
    for run in history.runs[:-1]:
        with pytest.raises(ProducerFenced, match=f"run {run} cannot save: run {history.runs[-1]} has claimed"):
            history.record.check_owner(run, "save")
        with pytest.raises(ProducerFenced, match="cannot claim the flow again"):
            history.record.claimed_by(run)
    assert history.record.claimed_by(history.runs[-1]) == history.record


@random_examples(lambda random: (histories(random), random.randint(1, 4), random.random() < 0.5))
def test_removed_snapshots_are_never_needed(example: tuple[History, int, bool]) -> None:
    """The snapshot for the next restart was pruned, or snapshots of a lost run filled the disk."""
    history, keep, newer = example
    last = history.last
    removed = history.record.removable(history.taken, keep=keep, newer=newer)
    if last is None:
        assert removed == []
        return
    kept = sorted(set(history.taken) - set(removed))
    good = [each for each in history.taken if history.led_to_commit(each) and each.number <= last.number]
    spare = [each for each in kept if not newer and each.number > last.number]
    assert [each for each in kept if each not in spare] == sorted(set(good), key=lambda each: each.number)[-keep:]
    assert [each for each in spare if each.number <= last.number] == []
    assert removed == sorted(removed)
    assert history.record.removable([each for each in history.taken if each != last], keep=keep, newer=newer) == []


def test_runs_are_forgotten_after_a_hundred() -> None:
    """The record of a flow that restarts every hour grew for years."""
    record = FlowRecord("clicks")
    for number in range(150):
        record = record.claimed_by(f"run {number}")
    assert [each.run for each in record.runs] == [f"run {number}" for number in range(50, 150)]


def test_a_commit_of_a_forgotten_or_lost_run_is_recorded() -> None:
    """The record was lost with its disk, and the commit record in the topic, valid for any run, was refused."""
    lost = FlowRecord("clicks", is_lost=True).claimed_by("b")
    assert lost.pointer is None
    found = lost.with_commit(CheckpointId(7, "a"))
    assert found.pointer == CommitPointer("b", CheckpointId(7, "a"))
    assert found.pointer is not None
    assert found.pointer.committed_by_run == {"a": 7}
    assert FlowRecord("clicks").pointer is None
    assert FlowRecord("clicks").run is None
    anew = FlowRecord("clicks", is_lost=True).claimed_by("b", forget_committed=True)
    assert anew.pointer == CommitPointer("b", None)


def headers(history: History) -> list[SnapshotHeader]:
    return [SnapshotHeader("clicks", each, 0, {}) for each in history.taken]


@random_examples(lambda random: (histories(random), random.random() < 0.5))
def test_a_job_resumes_from_the_last_commit(example: tuple[History, bool]) -> None:
    """A job resumed from another checkpoint than the last commit in the topic of the outputs, or else in the store."""
    history, has_topic = example
    chosen = choose_checkpoint(
        "clicks",
        "last",
        record=CommitRecord("clicks", history.last) if has_topic else None,
        pointer=history.record.pointer,
        stored=headers(history),
        commits_in="topic commits" if has_topic else None,
    )
    assert chosen == history.last


@random_examples(lambda random: (histories(random), random.randrange(1, 12), random.random() < 0.5))
def test_a_checkpoint_is_chosen_by_its_number_only_if_its_run_committed_it_or_a_later_one(
    example: tuple[History, int, bool],
) -> None:
    """Two runs had used the number, and the restart used the snapshot of the fenced run, whose outputs were aborted."""
    history, number, is_late = example
    of_number = [each for each in history.taken if each.number == number]
    good = [each for each in of_number if history.led_to_commit(each)]

    def choose() -> CheckpointId | None:
        return choose_checkpoint(
            "clicks",
            number,
            record=CommitRecord("clicks", history.last) if is_late else None,
            pointer=(history.late if is_late else history.record).pointer,
            stored=headers(history),
            commits_in=None,
        )

    if good:
        assert choose() == good[-1]
        return
    numbers = ", ".join(str(each.number) for each in history.taken) or "none"
    wanted = (
        f"flow 'clicks': checkpoint {number} was never committed: its run ended before, and its outputs were "
        'aborted, so outputs would be missing; resume with restore="last", or from one that was committed'
        if of_number
        else f"flow 'clicks': expected a checkpoint {number} in the store, given {numbers}; choose one of these"
    )
    with pytest.raises(CheckpointError) as raised:
        choose()
    assert str(raised.value) == wanted


def test_if_the_commit_is_unknown_a_number_is_required() -> None:
    """The engine chose a checkpoint although every choice can lose or double outputs."""
    history = History()
    history.claim(forgets=False)
    history.take(commits=True)
    history.take(commits=True)
    with pytest.raises(CheckpointError) as raised:
        choose_checkpoint("clicks", "last", record=None, pointer=None, stored=headers(history), commits_in=None)
    assert str(raised.value) == (
        "flow 'clicks': the store has checkpoints (1, 2), but does not say which one is committed; choose one with "
        "restore=<number>, or start without state with restore=None"
    )
    with pytest.raises(CheckpointError) as raised:
        choose_checkpoint(
            "clicks",
            "last",
            record=None,
            pointer=history.record.pointer,
            stored=headers(history),
            commits_in="topic commits",
        )
    assert str(raised.value) == (
        "flow 'clicks': the store has checkpoints (1, 2), but topic commits has no commit record of this flow, so "
        "it is unknown what was committed: is it another server, or was the topic deleted? Resume from one with "
        "restore=<number> (later outputs are written twice), or start without state with restore=None"
    )
    assert choose_checkpoint(
        "clicks", 2, record=None, pointer=None, stored=headers(history), commits_in=None
    ) == CheckpointId(2, "run 0")


@pytest.mark.parametrize("commits_in", [None, "topic commits"])
def test_a_job_starts_fresh_without_snapshots_or_on_request(commits_in: str | None) -> None:
    """The first start of a flow failed, or a start without state used a checkpoint."""
    for restore, stored in (("last", []), (None, [SnapshotHeader("clicks", CheckpointId(1, "a"), 0, {})])):
        given: Restore = "last" if restore == "last" else None
        assert (
            choose_checkpoint("clicks", given, record=None, pointer=None, stored=stored, commits_in=commits_in) is None
        )


@pytest.mark.parametrize("restore", ["last", None, 0, 7])
def test_options_of_restore_are_accepted(restore: Restore) -> None:
    """A valid option was refused."""
    check_restore_option("clicks", restore)
