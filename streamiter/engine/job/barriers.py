"""The barriers of a job, seen from its coordinator: one checkpoint of all processes at a time.

:class:`Barriers` lets the :class:`~streamiter.engine.checkpointing.checkpoint_follower.CheckpointFollower` of each
process send a barrier into its tasks, and waits until it has passed all tasks and their state is taken. If that takes
too long, the checkpoint is *abandoned*: its barrier still passes all tasks, but their state is dropped. Before a
barrier, the workers of each parameter server stop at the same clock
(:class:`~streamiter.engine.tasks.task_barriers.ClockAlignment`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import msgspec

from streamiter.engine.checkpointing.checkpoint_follower import GIVEN_UP, some
from streamiter.engine.checkpointing.committed import PositionsByStep, joined_positions
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.storage.snapshot import PartsFile
from streamiter.engine.tasks.task_barriers import TakenParts
from streamiter.errors import CheckpointError
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import Clock

FIRST_CHECKPOINT: Final = 1


class CheckpointTimedOut(CheckpointError):
    """A barrier did not pass all tasks in time."""


class WorkersApart(CheckpointTimedOut):
    """The workers of a parameter server did not reach the same clock in time, so no barrier was sent."""


class JobIsOver(CheckpointError):
    """The last checkpoint of the job is taken."""


@dataclass
class _Sent:
    """The last barrier that was sent."""

    checkpoint: int
    suspends: bool
    waiting_for: set[int]
    """The processes in which it has not passed all tasks."""
    runs: bool = False
    """Whether tasks still run, or were suspended, in a process that it has passed."""
    is_abandoned: bool = False
    passed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has passed all tasks of all processes, also if the checkpoint was abandoned."""
    answers: dict[int, list[Any]] = field(default_factory=dict)
    """What each process has taken: the file with its state, the positions of its sources, an error."""
    taken_here: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this process has answered."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all processes have answered."""


@final
class Barriers:
    """Sends barriers into the tasks of all processes, one at a time."""

    def __init__(self, beside: JobFollower, clock: Clock) -> None:
        """``beside`` is the follower of process 0."""
        exchange = self._exchange = beside.exchange
        self._beside = beside.checkpoints
        self._loops, self._scope = beside.loops, beside.scope
        self._clock = clock
        self._alignments = [*beside.services.alignments.values()]
        exchange.handle("checkpoint passed", self._has_passed)
        exchange.handle("checkpoint taken", self._has_taken)
        self._next = FIRST_CHECKPOINT
        self._sent: _Sent | None = None
        self.all_ended = False
        """Whether all tasks had ended with their input at the last barrier."""
        self.any_suspended = False
        """Whether a barrier has stopped a task, in any process."""
        self.one_at_a_time = asyncio.Lock()
        """The caller holds it from the barrier until the collected state is committed or dropped."""

    def number_after(self, checkpoint: int) -> None:
        """Give the next barriers numbers above the number of an existing checkpoint."""
        self._next = max(self._next, checkpoint + 1)

    @property
    def last_number(self) -> int:
        return self._next - 1

    async def take(
        self,
        *,
        suspend: bool = False,
        timeout_s: float | None = None,
        stand_still_timeout_s: float | None = None,
        keeps_state: bool = True,
        on_begin: Callable[[], None] = lambda: None,
    ) -> TakenParts:
        """Send a barrier through the job; return the state of the tasks of this process, which the caller releases.

        A task that ended before the barrier gives its state at its end. ``on_begin`` is called when the barrier is
        sent, after all earlier barriers have passed. Raises CheckpointTimedOut after ``timeout_s`` seconds; then, and
        if the call is cancelled, the checkpoint is abandoned. If the state of parameter servers is kept
        (``keeps_state``), all their workers must reach the same clock first, within ``stand_still_timeout_s``.
        """
        due_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        if self._sent is not None:
            # A second barrier in a loop would end the feedback log of the one before it.
            await self._until_passed(self._sent, due_s)
        if keeps_state and self._alignments:
            await self._align_workers(self._sooner(due_s, stand_still_timeout_s))
        sent = self._sent = _Sent(self._next, suspend, set(range(self._exchange.processes)))
        self._next += 1
        on_begin()
        try:
            self._exchange.tell("checkpoint barrier", sent.checkpoint, suspend, keeps_state)
            await self._until_passed(sent, due_s)
            await sent.taken_here.wait()
        except BaseException as error:
            self._abandon(sent, is_late=isinstance(error, CheckpointTimedOut))
            raise
        taken, self._beside.taken = self._beside.taken, {}
        return taken

    def _sooner(self, due_s: float | None, timeout_s: float | None) -> float | None:
        if timeout_s is None:
            return due_s
        then_s = self._clock.monotonic_s() + timeout_s
        return then_s if due_s is None else min(due_s, then_s)

    async def _align_workers(self, due_s: float | None) -> None:
        """Wait until all workers of parameter servers stop at one clock. Raises WorkersApart at ``due_s``."""
        try:
            in_time = await self._in_time(self.stop_reading(), due_s)
        except BaseException:
            self.resume_reading()
            raise
        if not in_time:
            behind = [task for alignment in self._alignments for task in alignment.behind()]
            self.resume_reading()
            raise WorkersApart(
                f"checkpoint {self._next}: expected all workers of a parameter server at the same clock, given "
                f"{some(behind)} behind the others; check whether their input has stopped, or raise "
                "alignment_timeout_s"
            )

    async def stop_reading(self) -> None:
        """Wait until all workers of each service are at the same clock. Then they read no more until a barrier."""
        for event in [alignment.seek() for alignment in self._alignments]:
            await event.wait()

    def resume_reading(self) -> None:
        """Let workers that have stopped read again, because no barrier follows."""
        for alignment in self._alignments:
            alignment.give_up()

    async def _until_passed(self, sent: _Sent, due_s: float | None) -> None:
        if not sent.passed.is_set() and not await self._in_time(sent.passed.wait(), due_s) and sent.waiting_for:
            others = [f"process {process}" for process in sorted(sent.waiting_for) if process]
            late = some([*others, *self._beside.delayed_by(sent.checkpoint)])
            raise CheckpointTimedOut(
                f"checkpoint {sent.checkpoint}: its barrier has not passed {late} in time; "
                "check what delays these tasks, or raise alignment_timeout_s"
            )

    async def _in_time(self, waiting: Coroutine[object, object, object], due_s: float | None) -> bool:
        """Wait until a coroutine is done or the time is over; return whether it is done. If not, it is cancelled."""
        if due_s is None:
            await waiting
            return True
        limit = self._clock.sleep(max(0.0, due_s - self._clock.monotonic_s()))
        done, late = asyncio.ensure_future(waiting), asyncio.ensure_future(limit)
        try:
            await asyncio.wait([done, late], return_when=asyncio.FIRST_COMPLETED)
            return done.done()
        finally:
            late.cancel()
            done.cancel()

    def _abandon(self, sent: _Sent, *, is_late: bool) -> None:
        """Drop the state of a checkpoint. If its barrier has not passed all tasks, it still passes the others."""
        if sent.is_abandoned:
            return
        sent.is_abandoned = True
        self._exchange.tell("checkpoint abandoned", sent.checkpoint, is_late)
        self.resume_reading()
        for loop in self._loops if sent.waiting_for else ():
            loop.checkpoint_abandoned(self._scope, sent.checkpoint)

    def _has_passed(self, process: int, checkpoint: int, runs: bool) -> None:
        sent = self._sent
        if sent is None or sent.checkpoint != checkpoint:
            return
        sent.runs |= runs
        sent.waiting_for.discard(process)
        if not sent.waiting_for:
            self.all_ended = not sent.runs
            self.any_suspended |= sent.suspends and sent.runs
            sent.passed.set()

    def _has_taken(self, process: int, checkpoint: int, *answer: PlainValue) -> None:
        sent = self._sent
        if sent is None or sent.checkpoint != checkpoint:  # It is about an abandoned checkpoint.
            return
        sent.answers[process] = list(answer)
        if process == self._exchange.own:
            sent.taken_here.set()
        if len(sent.answers) == self._exchange.processes:
            sent.taken.set()

    async def _answers(self) -> Mapping[int, list[Any]]:
        """Return what each process has taken at the last barrier."""
        assert self._sent is not None
        await self._sent.taken.wait()
        return dict(sorted(self._sent.answers.items()))

    async def files(self) -> list[PartsFile]:
        """Return the files of the other processes at the last barrier.

        Raises the error of a process that had no room for its file.
        """
        answers = await self._answers()
        for process, [_, _, error] in answers.items():
            if error is not None:
                kind, text = error
                raise GIVEN_UP[kind](f"process {process}: {text}")
        return [msgspec.convert(file, PartsFile) for [file, _, _] in answers.values() if file is not None]

    async def positions(self) -> PositionsByStep:
        """Return the positions of the sources of all processes at the last barrier."""
        return joined_positions(positions for [_, positions, _] in (await self._answers()).values())
