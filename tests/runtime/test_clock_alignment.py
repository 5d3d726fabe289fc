"""Workers in several processes stop at one clock, however late the messages between the processes are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest

from streamiter.engine.tasks.task_barriers import ClockAlignment, ClockCoordinator

STALENESS = 2


@dataclass
class Worker:
    clock: int
    further: Callable[[], None] = lambda: None
    stands: bool = False
    is_called: bool = False

    def counted_clocks(self) -> dict[str, int]:
        return {"w": self.clock}

    def call_when_further(self, further: Callable[[], None]) -> None:
        self.further = further

    def call_again(self) -> None:
        self.is_called = True


@dataclass
class Processes:
    """Tasks and messages, of which the random generator chooses the next one that goes on."""

    random: Random
    count: int
    messages: dict[tuple[int, int], deque[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = range(self.count)
        self.messages = {(number, other): deque() for number in numbers for other in numbers if 0 in (number, other)}
        self.together = ClockCoordinator(self.count, self._tell)
        self.alignments = [ClockAlignment(partial(self._report, number)) for number in numbers]
        self.workers: list[tuple[Worker, ClockAlignment, str]] = []
        for number in range(4):
            worker, alignment = Worker(self.random.randrange(STALENESS + 1)), self.random.choice(self.alignments)
            alignment.add(str(number), worker, worker.call_again)  # type: ignore[arg-type]
            self.workers.append((worker, alignment, str(number)))

    def _report(self, number: int, *report: Any) -> None:
        if number:
            self.messages[number, 0].append(partial(self.together.reported, number, *report))
        else:
            self.together.reported(number, *report)

    def _tell(self, *told: Any) -> None:
        for number in range(1, self.count):
            self.messages[0, number].append(partial(self.alignments[number].told, *told))
        self.alignments[0].told(*told)

    def go_on(self) -> None:
        waiting = [queue for queue in self.messages.values() if queue]
        if waiting and self.random.random() < 0.5:
            self.random.choice(waiting).popleft()()
            return
        worker, alignment, task = self.random.choice(self.workers)
        if not worker.stands and worker.clock <= min(each.clock for each, _, _ in self.workers) + STALENESS:
            worker.clock += 1
            worker.further()
            worker.is_called = True
        if worker.is_called:
            worker.is_called = False
            worker.stands = alignment.stands_still(task)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_workers_stand_at_one_clock_when_the_alignment_is_done(count: int) -> None:
    """A barrier was sent after a process had reported that it stood, and before it heard of a higher clock."""
    for seed in range(400):
        processes = Processes(Random(seed), count)
        for attempt in range(3):
            is_done = processes.together.seek()
            for _ in range(Random(seed + attempt).choice((3, 2000)) if attempt < 2 else 5000):
                if is_done.is_set():
                    clocks = {worker.clock for worker, _, _ in processes.workers if worker.stands}
                    assert [worker.stands for worker, _, _ in processes.workers] == [True] * 4, f"seed {seed}"
                    assert len(clocks) == 1, f"seed {seed}"
                    break
                processes.go_on()
            assert attempt < 2 or is_done.is_set(), f"seed {seed}"
            processes.together.give_up()


def test_a_process_that_has_not_answered_is_named() -> None:
    """A checkpoint that came too late because of a connection named no task, and the cause was sought in the flow."""
    together = ClockCoordinator(2, lambda *told: None)
    together.seek()
    together.reported(0, 1, {"w": 3}, ["work[0]"])
    assert together.behind() == ["work[0]", "process 1"]
