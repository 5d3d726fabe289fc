"""The barriers of a job, seen from its coordinator: one at a time goes through all processes.

In each process a :class:`~streamiter.engine.checkpointing.checkpoint_follower.CheckpointFollower` sends the barrier to
the tasks, and answers when the barrier has passed them, and when their state is taken. If that takes too long, the
checkpoint is *abandoned*: its barrier still passes all tasks, but their state is dropped. Before a barrier, the workers
of each parameter server stop at the same clock (:class:`~streamiter.engine.tasks.task_barriers.ClockAlignment`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, final

import msgspec

from streamiter.engine.checkpointing.checkpoint_follower import GIVEN_UP, some
from streamiter.engine.checkpointing.committed import PositionsByStep, joined_positions
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.plan.messages import ProcessAnswers
from streamiter.engine.storage.snapshot import PartsFile
from streamiter.engine.tasks.task_barriers import TakenParts, release_taken
from streamiter.errors import CheckpointError
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import Clock, in_time
from streamiter.values.helpers.closing import undone_on_failure

FIRST_CHECKPOINT: Final = 1


class CheckpointTimedOut(CheckpointError):
    """A barrier did not pass all tasks in time."""


class WorkersApart(CheckpointTimedOut):
    """The workers of a parameter server did not reach the same clock in time, so no barrier was sent."""


class SentBarrier:
    """A barrier that was sent through all processes, and what they have answered."""

    def __init__(self, checkpoint: int, processes: int, *, suspends: bool) -> None:
        self.checkpoint = checkpoint
        self.suspends = suspends
        self.is_abandoned = False
        self.passed = ProcessAnswers(processes)
        """By process that it has passed, also if the checkpoint was abandoned: whether tasks still run there, or were
        suspended."""
        self.parts: TakenParts = {}
        """The state of the tasks of this process."""
        self.taken_here = asyncio.Event()
        """Set when this process has answered."""
        self.taken = ProcessAnswers(processes)
        """What each process has taken: the file with its state, the positions of its sources, an error."""

    @property
    def runs(self) -> bool:
        """Whether tasks still run, or were suspended, in a process that it has passed."""
        return any(self.passed.by_process())


@final
class JobBarriers:
    """Sends the barriers of one job, and collects the answers of its processes. Only the checkpointer uses it."""

    def __init__(self, follower: JobFollower, clock: Clock) -> None:
        """``follower`` is the follower of process 0."""
        self._follower = follower
        self._exchange = exchange = follower.exchange
        exchange.handle("checkpoint passed", self._has_passed)
        exchange.handle("checkpoint taken", self._has_taken)
        self._clock = clock
        self.next_number = FIRST_CHECKPOINT
        """The number of the next checkpoint."""
        self.any_suspended = False
        """Whether a barrier has stopped a task, in any process. For reading only."""
        self._last: SentBarrier | None = None

    async def send(
        self,
        *,
        suspend: bool = False,
        timeout_s: float | None = None,
        stand_still_timeout_s: float | None = None,
        keeps_state: bool = True,
        seal_sinks: Callable[[], None] | None = None,
    ) -> SentBarrier:
        """Send a barrier through the job; return it with the state of this process, which the caller releases.

        The barrier before it must have passed all tasks first. Then, if the state of parameter servers is kept
        (``keeps_state``), their workers must reach the same clock, within ``stand_still_timeout_s`` seconds. The state
        of a task that has ended is taken when the barrier has passed all others of its process. ``seal_sinks`` lets
        sinks hold back the records behind the barrier.

        Raises CheckpointTimedOut after ``timeout_s`` seconds, and WorkersApart for workers that are late; then no
        barrier was sent. If it was sent, an error or a cancelled call abandons the checkpoint.
        """
        due_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        if self._last is not None:
            # A second barrier in a loop would end the feedback log of the one before it.
            await self._until_passed(self._last, due_s)
        if keeps_state and self._follower.services:
            await self._align_workers(self._sooner(due_s, stand_still_timeout_s))
        sent = self._last = SentBarrier(self.next_number, self._exchange.processes, suspends=suspend)
        self.next_number += 1
        if seal_sinks is not None:
            seal_sinks()
        try:
            self._exchange.tell("checkpoint barrier", sent.checkpoint, suspend, keeps_state)
            await self._until_passed(sent, due_s)
            await sent.taken_here.wait()
        except BaseException as error:
            self._abandon(sent, is_late=isinstance(error, CheckpointTimedOut))
            raise
        return sent

    def _sooner(self, due_s: float | None, timeout_s: float | None) -> float | None:
        if timeout_s is None:
            return due_s
        then_s = self._clock.monotonic_s() + timeout_s
        return then_s if due_s is None else min(due_s, then_s)

    async def _align_workers(self, due_s: float | None) -> None:
        """Wait until all workers of parameter servers stop at one clock. Raises WorkersApart at ``due_s``."""
        services = self._follower.services
        with undone_on_failure(services.resume_reading):
            have_stopped = await in_time(services.stop_reading(), self._clock, due_s)
        if not have_stopped:
            behind = services.behind()
            services.resume_reading()
            raise WorkersApart(
                f"checkpoint {self.next_number}: expected all workers of a parameter server at the same clock, given "
                f"{some(behind)} behind the others; check whether their input has stopped, or raise "
                "alignment_timeout_s"
            )

    async def _until_passed(self, sent: SentBarrier, due_s: float | None) -> None:
        passed = sent.passed.are_given
        if passed.is_set() or await in_time(passed.wait(), self._clock, due_s):
            return
        if missing := sent.passed.missing():
            others = [f"process {process}" for process in missing if process]
            late = some([*others, *self._follower.checkpoints.delayed_by(sent.checkpoint)])
            raise CheckpointTimedOut(
                f"checkpoint {sent.checkpoint}: its barrier has not passed {late} in time; "
                "check what delays these tasks, or raise alignment_timeout_s"
            )

    def _abandon(self, sent: SentBarrier, *, is_late: bool) -> None:
        """Drop the state of a checkpoint. If its barrier has not passed all tasks, it still passes the others."""
        if sent.is_abandoned:
            return
        sent.is_abandoned = True
        release_taken(sent.parts)
        self._exchange.tell("checkpoint abandoned", sent.checkpoint, is_late)
        self._follower.services.resume_reading()
        for loop in self._follower.loops if sent.passed.missing() else ():
            loop.checkpoint_abandoned(self._follower.scope, sent.checkpoint)

    def _has_passed(self, process: int, checkpoint: int, runs: bool) -> None:
        sent = self._last
        if sent is not None and sent.checkpoint == checkpoint:
            sent.passed.give(process, runs)
            self.any_suspended |= sent.suspends and sent.passed.are_given.is_set() and sent.runs

    def _has_taken(
        self, process: int, checkpoint: int, state: PlainValue, positions: PlainValue, error: PlainValue
    ) -> None:
        sent, is_here = self._last, process == self._exchange.own
        if sent is None or sent.checkpoint != checkpoint or sent.is_abandoned:
            if is_here:
                release_taken(state)
            return
        if is_here:
            sent.parts, state = state, None
            sent.taken_here.set()
        sent.taken.give(process, [state, positions, error])

    async def _taken_at(self, sent: SentBarrier) -> Sequence[list[PlainValue]]:
        await sent.taken.are_given.wait()
        return sent.taken.by_process()

    async def files_of(self, sent: SentBarrier) -> list[PartsFile]:
        """Return the files of the other processes. Raises the error of a process that had no room for its file."""
        taken = await self._taken_at(sent)
        for process, [_, _, error] in enumerate(taken):
            if error is not None:
                kind, text = error
                raise GIVEN_UP[kind](f"process {process}: {text}")
        return [msgspec.convert(file, PartsFile) for [file, _, _] in taken if file is not None]

    async def positions_at(self, sent: SentBarrier) -> PositionsByStep:
        """Return the positions of the sources of all processes."""
        return joined_positions(positions for [_, positions, _] in await self._taken_at(sent))
