"""The coordinator and the progress of a loop do what each section of ``loop_scripts.txt`` says.

``PYTHONPATH=tests python tests/iteration/test_loop_scripts.py`` writes what they do now. A line has calls of the loop
that the first line makes, and below it what its members are told, or what is decided. Of a loop of a coordinator, the
members 0 and 1 are heads, 2 is the head of the criteria, 3 and 4 are entrances.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.refusals import scripts_test, write_scripts

from streamiter.iteration.coordinator import LoopCoordinator, LoopDecisions, RestoredMember
from streamiter.iteration.progress import Decision, LoopProgress

FILE = Path(__file__).with_name("loop_scripts.txt")


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
    """The coordinator of a loop: by default of two heads, a criteria head and two entrances."""

    def __init__(
        self,
        heads: Sequence[str] = ("left", "right"),
        entrances: Sequence[str] = ("fast", "slow"),
        criteria: Sequence[str] = ("more",),
        joins: bool = True,
        **options: Any,
    ) -> None:
        self.heads, self.criteria = range(len(heads)), range(len(heads), len(heads) + len(criteria))
        self.members = range(len(heads) + len(criteria) + len(entrances))
        self.coordinator = LoopCoordinator(heads, entrances, criteria, where="flow.py:7", **options)
        self._told: list[str] = []
        for number in self.members if joins else ():
            self.coordinator.join(number, Told(number, self.coordinator, self._told))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coordinator, name)

    def told(self) -> str:
        """Return what the members were told since the last call."""
        told = ", ".join(self._told)
        self._told.clear()
        return told

    def receive(self, epoch: int, *counts: int) -> None:
        """Report that the heads, and those of the criteria, have received an epoch."""
        for member, count in zip([*self.heads, *self.criteria], counts, strict=True):
            self.coordinator.received(member, epoch, count)

    def restore(self, left: dict[str, Any] | None = None, **others: Any) -> None:
        """Restore all members: the left head from a state that differs, the others as far as they have one."""
        for member in self.members:
            state = RestoredMember(**{"ended_in": None, **others, **(left or {} if member == 0 else {})})
            advanced = None if member in self.criteria else state.advanced
            released = state.released if member in self.heads else None
            self.coordinator.restored(member, state._replace(advanced=advanced, released=released))

    def restore_one(self, member: int, **state: Any) -> None:
        self.coordinator.restored(member, RestoredMember(None, **state))


def two_heads() -> Loop:
    return Loop(["a", "b"], [], [])


class Progress(LoopProgress):
    """The progress of a loop, with a short call for what a head has received."""

    def head(self, head: int, epoch: int, count: int) -> list[Decision]:
        return self.head_received(head, epoch=epoch, count=count)


class Script:
    """Runs the lines of a section."""

    def __init__(self) -> None:
        self.loop: Any = None

    def act(self, line: str) -> str:
        """Evaluate the calls of a line; return what followed from them."""
        answers = list[str]()
        for call in line.split("; "):
            try:
                if call[0].isupper() or call.startswith("two_heads"):
                    self.loop = eval(call, dict(NAMES))
                    return ""
                answers.append(shown(eval(f"loop.{call}", {"loop": self.loop})))
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
        if isinstance(self.loop, Loop):
            answers.append(self.loop.told())
        return ", ".join(filter(None, answers)) or "nothing"


def shown(answer: object) -> str:
    """Return decisions in words, and all else as it is."""
    if isinstance(answer, list):
        return ", ".join(map(str, answer))
    return "" if answer is None else str(answer)


NAMES = {"Loop": Loop, "Progress": Progress, "two_heads": two_heads}


test_a_loop_does_what_the_section_says = scripts_test(FILE, Script)


def test_the_statistics_have_the_end_and_the_figures_of_all_heads() -> None:
    """A loop that ended had no reason in its statistics, or the figures of one head."""
    loop = Loop()
    for entrance in (3, 4):
        loop.ended(entrance)
    for epoch, counts in enumerate([(0, 0, 0), (1, 0, 1), (1, 1, 0)]):
        loop.receive(epoch, *counts)
    found = loop.statistics(["left"], [{"epoch_reached": 9, "held_records": 3}, {"waiting_records": 2}])
    assert (found.ended_in, found.end_reason) == (2, "the termination criteria brought nothing")
    assert (found.epoch_reached, found.held_records, found.waiting_records) == (9, 3, 2)
    assert loop.statistics([], [{}]).epoch_reached == 2
    begins = Loop().coordinator
    assert begins.statistics([], []).epoch_reached == begins.statistics([], [{}]).epoch_reached == 0


def test_heads_whose_feedback_has_ended_end_the_iteration(caplog: pytest.LogCaptureFixture) -> None:
    """The criteria asked for another round, the data was over, and nobody said why the iteration ended."""
    loop = Loop()
    for member in (3, 4, 0, 1):
        loop.ended(member)
    for epoch in range(2):
        loop.received(2, epoch, 1)
    assert loop.told().endswith(", ".join(f"{member} terminate 1" for member in loop.members))
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == (
        "the iteration at flow.py:7 ended in epoch 1: nothing was fed back, though the termination criteria asked to "
        "continue; to send its data in every epoch, pass replayed(stream)"
    )


if __name__ == "__main__":
    write_scripts(FILE, Script)
