"""Late messages, as between processes: of the members of a loop and its coordinator, and barriers to tasks."""

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest

from streamiter.engine.tasks.task import Task
from streamiter.iteration.coordinator import LoopCoordinator
from streamiter.iteration.stamping_pace import StampingClock, StampingPace
from streamiter.operators.operator import JobScope
from streamiter.values.records import CheckpointBarrier

DELAYS_S: Final = (0.0, 0.001, 0.001, 0.003, 0.01, 0.1)

Way = tuple[str, int | str]
"""The way of a message: ``"from"`` or ``"to"``, and the number of a member or the name of a task."""

Delays = Sequence[float] | Callable[[Way], float]
"""Seconds of which each message takes one by chance, or the function of the seconds that each way takes."""


class Late:
    """Calls functions later, in order for each member and direction. Each argument must be plain data."""

    def __init__(self, seed: object, delays_s: Delays = DELAYS_S) -> None:
        chosen = random.Random(f"{seed}")
        self._delay_s = delays_s if callable(delays_s) else lambda _: chosen.choice(delays_s)
        self._last_s: dict[Way, float] = {}
        self._waiting: dict[Way, deque[Callable[[], object]]] = {}

    def call(self, way: Way, function: Callable[..., object], *arguments: Any) -> None:
        loop = asyncio.get_running_loop()
        due_s = max(loop.time() + self._delay_s(way), self._last_s.get(way, 0.0))
        self._last_s[way] = due_s
        waiting = self._waiting.setdefault(way, deque())
        waiting.append(partial(function, *json.loads(json.dumps(arguments))))
        loop.call_at(due_s, lambda: waiting.popleft()())


class LateAnswers:
    """Answers to a member that arrive later."""

    def __init__(self, member: object, way: Way, late: Late) -> None:
        self._member = member
        self._way = way
        self._late = late

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(self._late.call, self._way, getattr(self._member, name))


class LateReports:
    """Reports to an object that arrive later, and answers that arrive later."""

    def __init__(self, shared: LoopCoordinator | StampingPace, late: Late) -> None:
        self._shared = shared
        self._late = late

    def join(self, number: int, member: Any) -> None:
        answers: Any = LateAnswers(member, ("to", number), self._late)
        self._shared.join(number, answers)

    def __getattr__(self, name: str) -> Callable[..., None]:
        report = getattr(self._shared, name)
        return lambda member, *arguments: self._late.call(("from", member), report, member, *arguments)


def make_late(patch: pytest.MonkeyPatch, seed: object, delays_s: Delays = DELAYS_S) -> None:
    """Let all messages of loops, and of steps that stamp by records or marks, be late from now on; barriers, too.

    Each task hears of a barrier at another time. So members of a loop take their snapshots apart.
    """
    get = JobScope.get

    def get_late(scope: JobScope, key: object, create: Callable[[], Any]) -> Any:
        def create_late() -> Any:
            shared, late = create(), Late(seed, delays_s)
            if isinstance(shared, StampingClock):
                return shared  # Epochs by time need one clock.
            return LateReports(shared, late)

        is_asked = isinstance(key, tuple) and (key[0] == "stamping" or key[1] == "reports")
        return get(scope, key, create_late if is_asked else create)

    patch.setattr(JobScope, "get", get_late)
    barriers, expect_barrier = dict[asyncio.AbstractEventLoop, Late](), Task.expect_barrier

    def expect_late(task: Task, barrier: CheckpointBarrier) -> None:
        late = barriers.setdefault(asyncio.get_running_loop(), Late(f"barriers {seed}", delays_s))
        late.call(("to", task.name), lambda: expect_barrier(task, barrier))

    patch.setattr(Task, "expect_barrier", expect_late)
