"""The job: a flow that runs, its supervisor, and how it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from streamiter.channels import Channel
from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.store import Checkpoints
from streamiter.clock import Clock, SystemClock
from streamiter.errors import CheckpointError, ConfigurationError, InternalError, JobFailed, StreamiterError
from streamiter.operators.keyed_state import independent_copy
from streamiter.operators.operator import JobScope
from streamiter.operators.output import RecordFailure
from streamiter.runtime.checkpointing.barriers import Barriers
from streamiter.runtime.checkpointing.commit import JobSnapshot, in_memory
from streamiter.runtime.checkpointing.restore import Restore
from streamiter.runtime.controls import DrainInput
from streamiter.runtime.failure import (
    call_unless_cancelled,
    first_failure,
    job_failed,
    unless_cancelled,
)
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.graph import Step
from streamiter.runtime.plan import ChannelLimits, Planner, new_id
from streamiter.runtime.services import JobServices, service_key
from streamiter.runtime.statistics import (
    JobState,
    JobStatistics,
    StepStatistics,
    TaskStatistics,
)
from streamiter.runtime.task import Task
from streamiter.runtime.topic_feedback import Worker, check_shared
from streamiter.runtime.watchdog import STALL_AFTER_S, Watchdog

if TYPE_CHECKING:
    from streamiter.runtime.checkpointing.checkpointer import Checkpointer

__all__ = ["Job", "JobOptions", "StopMode"]

StopMode = Literal["suspend", "drain", "abort"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a job is given besides its flow."""

    clock: Clock = field(default_factory=SystemClock)
    channel_limits: ChannelLimits = field(default_factory=ChannelLimits)
    stall_after_s: float = STALL_AFTER_S
    worker: Worker = field(default_factory=Worker)
    """Which of several processes this is that run the flow together."""
    new_id: Callable[[], str] | None = None
    """Names runs, for checkpoints and for feedback through topics; None: at random."""
    checkpoints: Checkpoints | None = None
    restore: Restore = "last"
    changed_steps: Collection[str] = ()
    """Steps whose state may be left behind, or begin anew."""


class Job:
    """A running flow. Made by ``await flow.start()``; all its tasks are owned by one supervisor.

    Every method is to be called in the event loop the job was started in.
    """

    def __init__(self, flow: str, steps: Sequence[Step], plain_data: PlainData, options: JobOptions) -> None:
        self.flow = flow
        self._clock = options.clock
        self._lines = {step.name: step.where for step in steps}
        self._plain_data = plain_data
        self._barriers = Barriers(options.clock)
        # Its threads begin only when a step that runs in one has its first batch.
        self._executor = ThreadPoolExecutor(
            max_workers=max(1, sum(step.parallelism for step in steps)), thread_name_prefix=f"{flow}-step"
        )
        self._scope = JobScope()
        self._loops = list(dict.fromkeys(step.loop for step in steps if step.loop is not None))
        planner = Planner(
            steps=steps,
            clock=options.clock,
            scope=self._scope,
            plain_data=plain_data,
            acknowledge=self._barriers.acknowledge,
            executor=self._executor,
            limits=options.channel_limits,
            worker=options.worker,
            new_id=options.new_id,
        )
        self._worker = options.worker
        if self._worker.shares:
            check_shared(flow, steps)
        self._tasks = planner.tasks()
        self._topic_feedback = planner.topic_feedback
        self._services = JobServices(
            flow, self._tasks, plain_data=plain_data, has_checkpoints=options.checkpoints is not None
        )
        self._barriers.watch(self._tasks, self._services, self._checkpoint_abandoned)
        self._checkpointer = self._make_checkpointer(options)
        self._watchdog = Watchdog(self._tasks, options.clock, options.stall_after_s)
        self._state: JobState = "running"
        self._is_aborting = False
        self._is_draining = False
        self._started_at_s = options.clock.monotonic_s()
        self._elapsed_s: float | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._gathering: set[asyncio.Task[Any]] = set()
        """Barriers that somebody has asked for, whether or not they still wait."""

    def _make_checkpointer(self, options: JobOptions) -> Checkpointer | None:
        if options.checkpoints is None:
            return None
        # For jobs with checkpoints only.
        from streamiter.runtime.checkpointing.checkpointer import Checkpointer

        return Checkpointer(
            self.flow,
            options.checkpoints,
            restore=options.restore,
            changed_steps=options.changed_steps,
            tasks=self._tasks,
            barriers=self._barriers,
            services=self._services,
            scope=self._scope,
            plain_data=self._plain_data,
            clock=options.clock,
            run_id=(options.new_id or new_id)(),
        )

    # -- start and end ---------------------------------------------------------------------------------

    async def start(self, snapshot: JobSnapshot | None = None) -> None:
        """Open every step, then let the tasks run. Raises JobFailed if a step cannot be opened."""
        if snapshot is not None:
            self._check_same_tasks(snapshot)
            # Operators keep what they are given to restore, and other jobs may go on from the same snapshot.
            snapshot = independent_copy(snapshot)
        states = snapshot if self._checkpointer is None else await self._take_over(self._checkpointer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._services.open(states), name=f"open services of {self.flow}")
            async with asyncio.TaskGroup() as group:
                for task in self._tasks:
                    state = None if states is None else states.get(task.name)
                    opening = call_unless_cancelled(partial(task.open, state), task.first.step.name)
                    group.create_task(opening, name=f"open {task.name}")
            # Only now do the heads know what they go on with from topics.
            async with asyncio.TaskGroup() as group:
                for feedback in self._topic_feedback:
                    group.create_task(feedback.open(), name=f"open feedback of {self.flow}")
            if self._checkpointer is not None:
                await self._checkpointer.restored()
        except ExceptionGroup as errors:
            also = await self._close()
            self._ended("failed")
            error = self._failed(first_failure(errors), also)
            raise error from error.__cause__
        except BaseException:
            await self._close()
            self._ended("aborted")
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name=f"job {self.flow}")
        try:
            # It has to begin: a task that is cancelled before it has begun never runs, and would close nothing.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await self.stop("abort")
            raise

    async def _take_over(self, checkpointer: Checkpointer) -> dict[str, dict[str, Any]]:
        """Fence older runs, and find what this one goes on from."""
        try:
            return await checkpointer.open()
        except BaseException:
            await checkpointer.close()
            self._ended("failed")
            raise

    def _check_same_tasks(self, snapshot: JobSnapshot) -> None:
        names = {task.name: None for task in self._tasks}
        names.update({service_key(name): None for name in self._services.names()})
        for given, expected, kind in (
            (snapshot, names, "only in the snapshot"),
            (names, snapshot, "only in the flow"),
        ):
            different = [name for name in given if name not in expected]
            if different:
                raise ConfigurationError(
                    f"flow {self.flow!r}: expected a snapshot of the same steps with the same parallelism, given "
                    f"one of another flow: {different[0]!r} is {kind}; start without it, or restore the flow "
                    "as it was"
                )

    async def wait(self) -> JobStatistics:
        """Return the final statistics when the job has ended; raises JobFailed if a step failed.

        Cancelling the wait leaves the job running.
        """
        assert self._supervisor is not None
        await asyncio.shield(self._supervisor)
        return self.statistics()

    async def stop(self, mode: StopMode = "suspend") -> JobStatistics:
        """End the job and return its final statistics. In all modes but ``abort``, what was read is handled.

        ``suspend``: nothing more is read, sinks are flushed, no step hears of an end of its input. With checkpoints
        a last one is committed, from which the next run goes on. Without, what steps keep as state, and records of
        inputs that an operator does not want now, are gone. ``drain``: the inputs end here, loops finish (a bounded
        iteration with the epoch under way; an unbounded one when nothing is fed back any more, or, asked a second
        time, also with the epoch under way), the job ends as finished. ``abort``: now.

        The job is ``finished`` even after ``suspend`` if all its inputs had ended before.
        """
        assert self._supervisor is not None
        if mode not in ("suspend", "drain", "abort"):
            raise ConfigurationError(
                f'job.stop: expected "suspend", "drain" or "abort", given {mode!r}; choose one of these'
            )
        if mode == "drain" and self._worker.shares:
            raise ConfigurationError(
                f'flow {self.flow!r}: expected stop("suspend") or stop("abort") of a worker, given "drain"; a loop '
                "that workers share does not end when the inputs of one of them do"
            )
        if self._supervisor.done():
            return await self.wait()
        if mode == "abort":
            self._abort()
        elif mode == "drain":
            for task in self._tasks:
                if task.brings_input and not task.ended:
                    task.post(DrainInput())
            for loop in self._loops:
                loop.drain(self._scope, again=self._is_draining)
            self._is_draining = True
        elif self._checkpointer is not None:
            with contextlib.suppress(StreamiterError):  # wait() raises what the job ends with for want of it.
                await self._while_running(self._checkpointer.take(suspend=True), to_its_end=True)
        else:
            await self._while_running(self._take(suspend=True, keeps_state=False))
        return await self.wait()

    def _abort(self) -> None:
        assert self._supervisor is not None
        # Once only: a second cancellation would interrupt the closing of the steps.
        if not self._is_aborting and self._state == "running":
            self._is_aborting = True
            self._supervisor.cancel()

    async def snapshot(self) -> JobSnapshot:
        """Send a barrier through the running job and return the state of every task as plain data.

        Raises JobFailed if a step fails meanwhile, ConfigurationError if the job ends.
        """
        if self._worker.shares:
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a job of a single process, given one of {self._worker.count} workers; "
                "a snapshot of one of them would not hold what is on its way to the others"
            )
        snapshot = await self._while_running(self._take())
        if snapshot is None:
            await self.wait()  # Raises what the job failed with.
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a running job, given one that has ended; take its snapshot earlier"
            )
        return snapshot

    async def checkpoint(self) -> int:
        """Take a checkpoint now and commit it, besides those of the interval; gives its number.

        Raises ConfigurationError for a job without checkpoints, CheckpointError if none can be taken now. Whoever stops
        waiting for it, by ``asyncio.wait_for`` for instance, does not stop the checkpoint.
        """
        if self._checkpointer is None:
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a job with checkpoints, given one without; "
                "start it with checkpoints=Checkpoints(…)"
            )
        number = await self._while_running(self._checkpointer.take(), to_its_end=True)
        if number is None:
            await self.wait()
            raise CheckpointError(f"flow {self.flow!r}: expected a running job, given one that has ended")
        return number

    async def _take(self, *, suspend: bool = False, keeps_state: bool = True) -> JobSnapshot:
        async with self._barriers.one_at_a_time:
            return in_memory(
                await self._barriers.take(suspend=suspend, keeps_state=keeps_state), self._plain_data
            )

    def _checkpoint_abandoned(self, checkpoint: int) -> None:
        for loop in self._loops:
            loop.checkpoint_abandoned(self._scope, checkpoint)

    async def _while_running(self, taking: Coroutine[Any, Any, T], *, to_its_end: bool = False) -> T | None:
        """What a barrier brings; None if the job ended before all tasks had given their state.

        What is to come ``to_its_end`` is not given up with the wait for it, while the job runs: half a commit leaves
        outputs behind.
        """
        assert self._supervisor is not None
        if self._supervisor.done():
            taking.close()
            return None
        gathering = asyncio.create_task(taking, name="barrier")
        self._gathering.add(gathering)
        gathering.add_done_callback(self._gathered)
        try:
            await asyncio.wait({gathering, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if to_its_end:
                raise
            gathering.cancel()
            await asyncio.gather(gathering, return_exceptions=True)
            raise
        gathering.cancel()
        [result] = await asyncio.gather(gathering, return_exceptions=True)
        if isinstance(result, asyncio.CancelledError):
            return None
        if isinstance(result, StreamiterError):
            raise result
        if isinstance(result, BaseException):
            raise self._failed(result)
        return result

    def _gathered(self, gathering: asyncio.Task[Any]) -> None:
        self._gathering.discard(gathering)
        if not gathering.cancelled():
            gathering.exception()  # Heard: what ends the job is raised where one waits for the job.

    async def _supervise(self) -> None:
        failures: list[BaseException] = []
        try:
            try:
                await self._run_tasks()
            except ExceptionGroup as errors:
                failures.append(first_failure(errors))
            failures += await self._close(went_well=not failures)
        except BaseException as ending:
            # Most often an abort; where it came while one was closing, the others are still to be closed.
            failures += await self._close()
            is_cancelled = isinstance(ending, asyncio.CancelledError)
            if not (is_cancelled and failures):
                self._ended("aborted")
                if is_cancelled and self._is_aborting:
                    return
                raise
        if failures:
            self._ended("failed")
            error = self._failed(failures[0], failures[1:])
            raise error from error.__cause__
        self._ended("suspended" if any(task.suspended for task in self._tasks) else "finished")

    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            watchdog = group.create_task(self._watchdog.run(), name="watchdog")
            running = [group.create_task(self._run(task), name=task.name) for task in self._tasks]
            for task in self._tasks:
                if task.feeder is not None and not task.ended:
                    task.feeder.start(group)
            for feedback in self._topic_feedback:
                feedback.start(group)
            checkpointing = self._start_checkpoints(group)
            await asyncio.wait(running)
            for feedback in self._topic_feedback:
                await feedback.finish()
            if self._checkpointer is not None:
                await self._checkpointer.finish(suspended=any(task.suspended for task in self._tasks))
            if checkpointing is not None:
                checkpointing.cancel()
            watchdog.cancel()

    def _start_checkpoints(self, group: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        if self._checkpointer is None:
            return None
        return group.create_task(self._checkpointer.run(), name=f"checkpoints of {self.flow}")

    async def _run(self, task: Task) -> None:
        await unless_cancelled(task.run(), task.first.step.name)
        await self._services.task_ended(task)
        self._barriers.ended(task)

    async def _close(self, *, went_well: bool = False) -> list[Exception]:
        for gathering in self._gathering:
            gathering.cancel()
        await asyncio.gather(*self._gathering, return_exceptions=True)
        # First what still runs in threads: an operator is used by one call at a time.
        if any(task.first.operator.runs_in_thread for task in self._tasks):
            await asyncio.to_thread(self._executor.shutdown)
        errors: list[Exception] = []
        for task in self._tasks:
            errors += await task.close()
        for feedback in self._topic_feedback:
            errors += await feedback.close()
        errors += await self._services.close(went_well=went_well)
        if self._checkpointer is not None:
            try:
                await self._checkpointer.close()
            except Exception as error:
                errors.append(error)
        return errors

    def _ended(self, state: JobState) -> None:
        self._state = state
        self._elapsed_s = self._clock.monotonic_s() - self._started_at_s

    def _failed(self, failure: BaseException, also: Sequence[BaseException] = ()) -> BaseException:
        error = self._told(failure)
        for other in also:
            error.add_note(f"then, while closing: {self._told(other)}")
        return error

    def _told(self, failure: BaseException) -> BaseException:
        if isinstance(failure, RecordFailure):
            has_checkpoints = self._checkpointer is not None
            return job_failed(self.flow, failure, self._lines, has_checkpoints=has_checkpoints)
        if isinstance(failure, StreamiterError):  # Of a checkpoint, which no step is to blame for.
            subject = f"flow {self.flow!r}: "
            failed = JobFailed(f"{subject}{str(failure).removeprefix(subject)}", step="checkpoint")
            failed.__cause__ = failure
            return failed
        error = InternalError(f"flow {self.flow!r}: {type(failure).__name__}: {failure}; please report this")
        error.__cause__ = failure
        return error

    # -- statistics ------------------------------------------------------------------------------------

    def statistics(self) -> JobStatistics:
        """The job now."""
        elapsed_s = self._elapsed_s
        if elapsed_s is None:
            elapsed_s = self._clock.monotonic_s() - self._started_at_s
        return JobStatistics(
            flow=self.flow,
            state=self._state,
            elapsed_s=elapsed_s,
            tasks=tuple(_task_statistics(task) for task in self._tasks),
            loops=tuple(loop.statistics(self._scope) for loop in self._loops),
            checkpoints=None if self._checkpointer is None else self._checkpointer.statistics(),
            parameter_servers=self._services.statistics(),
        )


def _task_statistics(task: Task) -> TaskStatistics:
    channels = [port.channel for port in task.gate.ports]
    return TaskStatistics(
        name=task.name,
        steps=tuple(
            StepStatistics(instance.step.name, instance.subtask, instance.statistics())
            for instance in task.instances
        ),
        epoch_watermark=task.progress.watermark,
        inputs=tuple(channel.statistics() for channel in channels if isinstance(channel, Channel)),
        outputs=tuple(lane.channel.statistics() for writer in task.writers for lane in writer.lanes),
        waiting_records=sum(lane.waiting_records for writer in task.writers for lane in writer.lanes),
        feedback=tuple(channel.statistics() for channel in channels if isinstance(channel, FeedbackChannel)),
        held_records=task.gate.held_records,
        blocked_s=sum(lane.blocked_s for writer in task.writers for lane in writer.lanes),
        lag={} if task.feeder is None else {str(part): int(left) for part, left in task.feeder.lag().items()},
        is_paused=task.feeder is not None and not task.ended and task.feeder.intake.is_shut,
        ended=task.ended,
    )
