"""The job: a flow that runs, its supervisor, and how it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from streamiter.channels import Channel
from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import Clock, SystemClock
from streamiter.errors import ConfigurationError, InternalError, JobFailed
from streamiter.operators.context import JobScope
from streamiter.operators.rejection import RecordFailure
from streamiter.runtime.coordinator import Coordinator, JobSnapshot
from streamiter.runtime.failure import first_failure, job_failed
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.graph import Step
from streamiter.runtime.plan import ChannelLimits, Planner
from streamiter.runtime.statistics import (
    FeedbackStatistics,
    JobState,
    JobStatistics,
    StepStatistics,
    TaskStatistics,
)
from streamiter.runtime.task import DrainInput, Task
from streamiter.runtime.watchdog import STALL_AFTER_S, Watchdog

__all__ = ["Job", "JobOptions", "StopMode"]

StopMode = Literal["suspend", "drain", "abort"]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a job is given besides its flow."""

    clock: Clock = field(default_factory=SystemClock)
    channel_limits: ChannelLimits = field(default_factory=ChannelLimits)
    stall_after_s: float = STALL_AFTER_S


class Job:
    """A running flow. Made by ``await flow.start()``; all its tasks are owned by one supervisor.

    Every method is to be called in the event loop the job was started in.
    """

    def __init__(self, flow: str, steps: Sequence[Step], plain_data: PlainData, options: JobOptions) -> None:
        self.flow = flow
        self._clock = options.clock
        self._lines = {step.name: step.where for step in steps}
        self._coordinator = Coordinator()
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(
            max_workers=max(1, sum(step.parallelism for step in steps)), thread_name_prefix=f"{flow}-step"
        )
        planner = Planner(
            steps=steps,
            clock=options.clock,
            scope=JobScope(),
            plain_data=plain_data,
            acknowledge=self._coordinator.acknowledge,
            executor=self._executor,
            limits=options.channel_limits,
        )
        self._tasks = planner.tasks()
        self._coordinator.watch(self._tasks)
        self._watchdog = Watchdog(self._tasks, options.clock, options.stall_after_s)
        self._state: JobState = "running"
        self._ends_as: JobState = "finished"
        self._started_at_s = options.clock.monotonic_s()
        self._elapsed_s: float | None = None
        self._supervisor: asyncio.Task[None] | None = None

    # -- start and end ---------------------------------------------------------------------------------

    async def start(self, snapshot: JobSnapshot | None = None) -> None:
        """Open every step, then let the tasks run. Raises JobFailed if a step cannot be opened."""
        try:
            async with asyncio.TaskGroup() as group:
                for task in self._tasks:
                    state = None if snapshot is None else snapshot.get(task.name)
                    group.create_task(task.open(state), name=f"open {task.name}")
        except BaseExceptionGroup as errors:
            await self._close()
            self._ended("failed")
            raise self._failed(first_failure(errors)) from None
        except BaseException:
            await self._close()
            self._ended("aborted")
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name=f"job {self.flow}")

    async def wait(self) -> JobStatistics:
        """Return the final statistics when the job has ended; raises JobFailed if a step failed.

        Cancelling the wait leaves the job running.
        """
        assert self._supervisor is not None
        await asyncio.shield(self._supervisor)
        return self.statistics()

    async def stop(self, mode: StopMode = "suspend") -> JobStatistics:
        """End the job and return its final statistics.

        ``suspend``: every record already read is handled, sinks are flushed, nothing hears of an end of
        input. ``drain``: the inputs end here, loops finish, the job ends as finished. ``abort``: now.
        """
        assert self._supervisor is not None
        if mode not in ("suspend", "drain", "abort"):
            raise ConfigurationError(
                f'job.stop: expected "suspend", "drain" or "abort", given {mode!r}; choose one of these'
            )
        if self._supervisor.done():
            return await self.wait()
        if mode == "abort":
            self._ends_as = "aborted"
            self._supervisor.cancel()
        elif mode == "drain":
            for task in self._tasks:
                if task.source is not None and not task.ended:
                    task.post(DrainInput())
        else:
            self._ends_as = "suspended"
            suspending = asyncio.create_task(self._coordinator.trigger(suspend=True))
            await asyncio.wait({suspending, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
            suspending.cancel()
        try:
            return await self.wait()
        except asyncio.CancelledError:
            if self._state == "aborted":
                return self.statistics()
            raise

    async def snapshot(self) -> JobSnapshot:
        """Send a barrier through the running job and return the state of every task as plain data."""
        assert self._supervisor is not None
        gathering = asyncio.create_task(self._coordinator.trigger())
        await asyncio.wait({gathering, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        if gathering.done():
            return await gathering
        gathering.cancel()
        raise ConfigurationError(f"flow {self.flow!r}: the job ended before its snapshot was complete")

    async def _supervise(self) -> None:
        try:
            await self._run_tasks()
        except* asyncio.CancelledError:
            raise
        except* Exception as errors:
            failure = first_failure(errors)
            await self._close()
            self._ended("failed")
            raise self._failed(failure) from None
        finally:
            if self._state == "running":
                closing = await self._close()
                if closing and self._ends_as != "aborted":
                    self._ended("failed")
                    raise self._failed(closing[0]) from None
                self._ended(self._ends_as)

    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            watchdog = group.create_task(self._watchdog.run(), name="watchdog")
            running = [group.create_task(self._run(task), name=task.name) for task in self._tasks]
            for task in self._tasks:
                if task.source is not None:
                    group.create_task(task.feed(), name=f"feed {task.name}")
            await asyncio.wait(running)
            watchdog.cancel()

    async def _run(self, task: Task) -> None:
        await task.run()
        self._coordinator.ended(task)

    async def _close(self) -> list[Exception]:
        errors: list[Exception] = []
        for task in self._tasks:
            errors += await task.close()
        if self._executor is not None:
            executor, self._executor = self._executor, None
            await asyncio.to_thread(executor.shutdown)
        return errors

    def _ended(self, state: JobState) -> None:
        self._state = state
        self._elapsed_s = self._clock.monotonic_s() - self._started_at_s

    def _failed(self, failure: BaseException) -> BaseException:
        if isinstance(failure, RecordFailure):
            return job_failed(self.flow, failure, self._lines)
        if isinstance(failure, JobFailed):
            return failure
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
        feedback=tuple(
            FeedbackStatistics(
                name=channel.name,
                records=channel.records,
                total_records=channel.total_records,
                bytes_in_memory=channel.queue.bytes_in_memory,
                bytes_on_disk=channel.queue.bytes_on_disk,
            )
            for channel in channels
            if isinstance(channel, FeedbackChannel)
        ),
        blocked_s=sum(lane.blocked_s for writer in task.writers for lane in writer.lanes),
        lag={} if task.source is None else dict(task.source.lag()),
        ended=task.ended,
    )
