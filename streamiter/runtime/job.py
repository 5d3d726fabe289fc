"""The job: a running flow.

A :class:`Job` makes its tasks by way of the :class:`~streamiter.runtime.plan.Planner`, opens them, and runs them under
a *supervisor*, an asyncio task that owns all others. If one task fails, the supervisor stops the others and closes
everything. Stopping, snapshots and checkpoints are barriers that the job sends through its tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from streamiter.checkpoints.plain_data import PlainData
from streamiter.deferred import PlainValue
from streamiter.errors import (
    CheckpointError,
    ConfigurationError,
    InternalError,
    JobFailed,
    OffsetOutOfRange,
    StreamiterError,
    shortened,
)
from streamiter.operators.keyed_state import independent_copy
from streamiter.operators.operator import JobScope
from streamiter.operators.output import RecordFailure
from streamiter.runtime.checkpointing.barriers import Barriers, JobServices, service_key
from streamiter.runtime.checkpointing.commit import JobSnapshot, snapshot_in_memory
from streamiter.runtime.checkpointing.committed import checkpoints_of, id_of, warn_of_doubled_outputs
from streamiter.runtime.checkpointing.task_barriers import TaskStates
from streamiter.runtime.graph import Step
from streamiter.runtime.instance import DrainInput, call_unless_cancelled, unless_cancelled
from streamiter.runtime.messages import Meeting
from streamiter.runtime.plan import JobOptions, OwnProcess, Planner, first_process
from streamiter.runtime.statistics import JobState, JobStatistics
from streamiter.runtime.task import Task
from streamiter.runtime.topic_feedback import check_shared
from streamiter.runtime.watchdog import Watchdog, task_statistics
from streamiter.topics.source_and_sink import ConsumerGroup

if TYPE_CHECKING:
    from streamiter.checkpoints.store import Checkpoints
    from streamiter.runtime.checkpointing.checkpointer import Checkpointer

StopMode = Literal["suspend", "drain", "abort"]

T = TypeVar("T")


class Job:
    """A running flow, made by ``await flow.start()``.

    Call its methods only in the event loop that the job was started in.
    """

    def __init__(
        self,
        flow: str,
        steps: Sequence[Step],
        plain_data: PlainData,
        options: JobOptions,
        own: OwnProcess | None = None,
    ) -> None:
        """``own``: the process, if other processes run the flow, too; its job has only the tasks of this process."""
        self.flow = flow
        self.steps = steps
        """The steps of the flow, for drawings."""
        self._clock = options.clock
        self._lines = {step.name: step.where for step in steps}
        self._plain_data = plain_data
        self._barriers = Barriers(options.clock)
        # A thread is started only when a step that runs in threads gets its first batch.
        self._executor = ThreadPoolExecutor(
            max_workers=max(1, sum(step.parallelism for step in steps)), thread_name_prefix=f"{flow}-step"
        )
        self._scope = JobScope()
        self._loops = list(dict.fromkeys(step.loop for step in steps if step.loop is not None))
        self._worker = options.worker
        if self._worker.shares:
            check_shared(flow, steps)
        if own is None:
            own = first_process(flow, steps)
        elif own.number:
            own.placement.check(flow, steps)
        planner = Planner(
            own=own,
            steps=steps,
            options=options,
            scope=self._scope,
            plain_data=plain_data,
            acknowledge=self._barriers.acknowledge,
            executor=self._executor,
        )
        self._tasks = planner.make_tasks()
        self._topic_feedback = planner.topic_feedback
        checkpoints = self._checkpoints = checkpoints_of(flow, self._tasks, options)
        self._services = JobServices(flow, self._tasks, plain_data=plain_data, has_checkpoints=checkpoints is not None)
        self._barriers.watch(self._tasks, self._services, self._checkpoint_abandoned)
        self._checkpointer = None if checkpoints is None else self._make_checkpointer(checkpoints, options)
        group = ConsumerGroup(id_of(flow), lambda step: options.restore is None or step in options.changed_steps)
        self._scope.put(ConsumerGroup, group)
        self._watchdog = Watchdog(self._tasks, options.clock, options.stall_after_s)
        self._state: JobState = "running"
        self._is_aborting = False
        self._is_draining = False
        self._started_at_s = options.clock.monotonic_s()
        self._elapsed_s: float | None = None
        self._supervisor: asyncio.Task[None] | None = None
        messages = own.messages
        self._meeting = None if messages is None else Meeting(messages, own.number, own.placement.processes)
        self._taking: set[asyncio.Task[object]] = set()
        """Snapshots and checkpoints that are being taken, also if their caller has stopped waiting."""

    def _make_checkpointer(self, checkpoints: Checkpoints, options: JobOptions) -> Checkpointer:
        # Imported only for jobs with checkpoints.
        from streamiter.runtime.checkpointing.checkpointer import Checkpointer

        return Checkpointer(
            self.flow,
            checkpoints,
            options,
            tasks=self._tasks,
            barriers=self._barriers,
            services=self._services,
            scope=self._scope,
            plain_data=self._plain_data,
        )

    # -- start and end ---------------------------------------------------------------------------------

    async def start(self, snapshot: JobSnapshot | None = None) -> None:
        """Open all steps, then run the tasks. Raises JobFailed if a step cannot be opened."""
        if self._checkpointer is None and snapshot is None:
            warn_of_doubled_outputs(self.flow, self._tasks)
        if snapshot is not None:
            self._check_same_tasks(snapshot)
            # Operators keep the state that they restore, and other jobs may start from the same snapshot.
            snapshot = independent_copy(snapshot)
        states = snapshot if self._checkpointer is None else await self._load_states(self._checkpointer)
        try:
            await self._open(states)
        except ExceptionGroup as errors:
            also = await self._close()
            self._set_ended("failed")
            error = self._failure_error(_first_failure(errors), also)
            raise error from error.__cause__
        except BaseException:
            await self._close()
            self._set_ended("aborted")
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name=f"job {self.flow}")
        try:
            # Let it start: a task that is cancelled before its start never runs, and would close nothing.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await self.stop("abort")
            raise

    async def _load_states(self, checkpointer: Checkpointer) -> TaskStates:
        """Shut out older runs, and return the states of the checkpoint that this run starts from."""
        try:
            return await checkpointer.open()
        except BaseException:
            await checkpointer.close()
            self._set_ended("failed")
            raise

    async def _open(self, states: Mapping[str, PlainValue] | None) -> None:
        """Open services, then tasks, then feedback through topics: each needs the ones before it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._services.open(states), name=f"open services of {self.flow}")
        async with asyncio.TaskGroup() as group:
            for task in self._tasks:
                state = None if states is None else states.get(task.name)
                opening = call_unless_cancelled(partial(task.open, state), task.first.step.name)
                group.create_task(opening, name=f"open {task.name}")
        # Only now the heads have restored the ranges of topics that they need.
        async with asyncio.TaskGroup() as group:
            for feedback in self._topic_feedback:
                group.create_task(feedback.open(), name=f"open feedback of {self.flow}")
        if self._meeting is not None:
            # Before that, a record or a message could reach a step that is not open.
            await self._meeting.reach("all steps are open")
        if self._checkpointer is not None:
            await self._checkpointer.restored()

    def _check_same_tasks(self, snapshot: JobSnapshot) -> None:
        if self._checkpointer is not None:
            raise ConfigurationError(
                f'flow {self.flow!r}: expected either sources with start="committed" or snapshot=, given both; the '
                "snapshot has other positions than the topics"
            )
        names = {task.name: None for task in self._tasks}
        names.update({service_key(name): None for name in self._services.names()})
        for given, expected, kind in ((snapshot, names, "only in the snapshot"), (names, snapshot, "only in the flow")):
            different = [name for name in given if name not in expected]
            if different:
                raise ConfigurationError(
                    f"flow {self.flow!r}: expected a snapshot of the same steps with the same parallelism, given "
                    f"one of another flow: {different[0]!r} is {kind}; start without it, or restore the flow "
                    "as it was"
                )

    async def wait(self) -> JobStatistics:
        """Return the final statistics when the job has ended; raise JobFailed if a step failed.

        Cancelling the wait leaves the job running.
        """
        assert self._supervisor is not None
        await asyncio.shield(self._supervisor)
        return self.statistics()

    async def stop(self, mode: StopMode = "suspend") -> JobStatistics:
        """End the job and return its final statistics. In all modes but ``abort``, batches already read are handled.

        ``suspend``: the job reads no more input, sinks are flushed, and no step is told that its input has ended. With
        checkpoints, a last one is committed, and the next run starts from it. Without, the state of steps is lost, and
        records of inputs that an operator does not want at the moment.

        ``drain``: the inputs end here, loops finish, and the job ends as finished. A bounded iteration finishes its
        present epoch; an unbounded one finishes when no feedback is left, or, after a second call, with its present
        epoch.

        ``abort``: the job ends immediately.

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
            self._drain()
        else:
            await self._suspend()
        return await self.wait()

    def _abort(self) -> None:
        assert self._supervisor is not None
        # Only once: a second cancellation would interrupt the closing of the steps.
        if not self._is_aborting and self._state == "running":
            self._is_aborting = True
            self._supervisor.cancel()

    def _drain(self) -> None:
        for task in self._tasks:
            if task.brings_input and not task.ended:
                task.post(DrainInput())
        for loop in self._loops:
            loop.drain(self._scope, again=self._is_draining)
        self._is_draining = True

    async def _suspend(self) -> None:
        if self._checkpointer is None:
            await self._while_running(self._take_snapshot(suspend=True, keeps_state=False))
            return
        # wait() raises the failure of a job without its last checkpoint.
        with contextlib.suppress(StreamiterError):
            await self._while_running(self._checkpointer.take(suspend=True), survives_cancelling=True)

    async def snapshot(self) -> JobSnapshot:
        """Send a barrier through the running job; return the state of all tasks as plain data.

        Raises JobFailed if a step fails before that, and ConfigurationError if the job ends.
        """
        if self._worker.shares:
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a job of a single process, given one of {self._worker.count} workers; "
                "a snapshot of one of them would not contain the feedback on its way to the others"
            )
        snapshot = await self._while_running(self._take_snapshot())
        if snapshot is None:
            await self.wait()  # raises the failure of the job
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a running job, given one that has ended; take its snapshot earlier"
            )
        return snapshot

    async def checkpoint(self) -> int:
        """Take a checkpoint now and commit it, besides those of the interval; return its number.

        Raises ConfigurationError for a job without checkpoints, and CheckpointError if none can be taken now.
        Cancelling this call, for example with ``asyncio.wait_for``, does not cancel the checkpoint.
        """
        if self._checkpointer is None:
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a job with checkpoints, given one without; "
                "start it with checkpoints=Checkpoints(…)"
            )
        number = await self._while_running(self._checkpointer.take(), survives_cancelling=True)
        if number is None:
            await self.wait()
            raise CheckpointError(f"flow {self.flow!r}: expected a running job, given one that has ended")
        return number

    async def _take_snapshot(self, *, suspend: bool = False, keeps_state: bool = True) -> JobSnapshot:
        async with self._barriers.one_at_a_time:
            taken = await self._barriers.take(suspend=suspend, keeps_state=keeps_state)
            return snapshot_in_memory(taken, self._plain_data)

    def _checkpoint_abandoned(self, checkpoint: int) -> None:
        for loop in self._loops:
            loop.checkpoint_abandoned(self._scope, checkpoint)

    async def _while_running(self, taking: Coroutine[Any, Any, T], *, survives_cancelling: bool = False) -> T | None:
        """Return the result of ``taking``; None if the job ends before it.

        If this call is cancelled, ``taking`` is cancelled too, unless it ``survives_cancelling``: half a commit would
        leave outputs uncommitted.
        """
        assert self._supervisor is not None
        if self._supervisor.done():
            taking.close()
            return None
        taking_task = asyncio.create_task(taking, name="barrier")
        self._taking.add(taking_task)
        taking_task.add_done_callback(self._forget_taking)
        try:
            await asyncio.wait({taking_task, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if survives_cancelling:
                raise
            taking_task.cancel()
            await asyncio.gather(taking_task, return_exceptions=True)
            raise
        taking_task.cancel()
        [result] = await asyncio.gather(taking_task, return_exceptions=True)
        if isinstance(result, asyncio.CancelledError):
            return None
        if isinstance(result, StreamiterError):
            raise result
        if isinstance(result, BaseException):
            raise self._failure_error(result)
        return result

    def _forget_taking(self, taking_task: asyncio.Task[object]) -> None:
        self._taking.discard(taking_task)
        if not taking_task.cancelled():
            taking_task.exception()  # marks the error as retrieved: wait() raises it

    async def _supervise(self) -> None:
        failures: list[BaseException] = []
        try:
            try:
                await self._run_tasks()
            except ExceptionGroup as errors:
                failures.append(_first_failure(errors))
            failures += await self._close(went_well=not failures)
        except BaseException as ending:
            # Mostly an abort. It may have interrupted the closing, so the rest is closed here.
            failures += await self._close()
            is_cancelled = isinstance(ending, asyncio.CancelledError)
            if not (is_cancelled and failures):
                self._set_ended("aborted")
                if is_cancelled and self._is_aborting:
                    return
                raise
        if failures:
            self._set_ended("failed")
            error = self._failure_error(failures[0], failures[1:])
            raise error from error.__cause__
        self._set_ended("suspended" if any(task.suspended for task in self._tasks) else "finished")

    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            watchdog = group.create_task(self._watchdog.run(), name="watchdog")
            running = [group.create_task(self._run(task), name=task.name) for task in self._tasks]
            for task in self._tasks:
                if task.feeder is not None and not task.ended:
                    task.feeder.start(group)
            for feedback in self._topic_feedback:
                feedback.start(group)
            checkpointing = None
            if self._checkpointer is not None:
                name = f"checkpoints of {self.flow}"
                checkpointing = group.create_task(self._checkpointer.run(), name=name)
            await asyncio.wait(running)
            for feedback in self._topic_feedback:
                await feedback.finish()
            if self._checkpointer is not None:
                await self._checkpointer.finish(suspended=any(task.suspended for task in self._tasks))
            if checkpointing is not None:
                checkpointing.cancel()
            watchdog.cancel()

    async def _run(self, task: Task) -> None:
        await unless_cancelled(task.run(), task.first.step.name)
        await self._services.task_ended(task)
        self._barriers.ended(task)

    async def _close(self, *, went_well: bool = False) -> list[Exception]:
        for taking_task in self._taking:
            taking_task.cancel()
        await asyncio.gather(*self._taking, return_exceptions=True)
        # First wait for calls in threads: an operator is used by one call at a time.
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

    def _set_ended(self, state: JobState) -> None:
        self._state = state
        self._elapsed_s = self._clock.monotonic_s() - self._started_at_s

    def _failure_error(self, failure: BaseException, also: Sequence[BaseException] = ()) -> BaseException:
        error = self._error_of(failure)
        for other in also:
            error.add_note(f"then, while closing: {self._error_of(other)}")
        return error

    def _error_of(self, failure: BaseException) -> BaseException:
        if isinstance(failure, RecordFailure):
            return _job_failed(self.flow, failure, self._lines, self._checkpoints)
        if isinstance(failure, StreamiterError):  # the error of a checkpoint, which no step has caused
            subject = f"flow {self.flow!r}: "
            failed = JobFailed(f"{subject}{str(failure).removeprefix(subject)}", step="checkpoint")
            failed.__cause__ = failure
            return failed
        error = InternalError(f"flow {self.flow!r}: {type(failure).__name__}: {failure}; please report this")
        error.__cause__ = failure
        return error

    # -- statistics ------------------------------------------------------------------------------------

    def stall_after(self, seconds: float) -> None:
        """Set the seconds without progress after which a step is stalled, from the next look of the watchdog on."""
        self._watchdog.stall_after_s = seconds

    def statistics(self) -> JobStatistics:
        """Return the statistics of the job now."""
        elapsed_s = self._elapsed_s
        if elapsed_s is None:
            elapsed_s = self._clock.monotonic_s() - self._started_at_s
        return JobStatistics(
            flow=self.flow,
            state=self._state,
            elapsed_s=elapsed_s,
            tasks=tuple(task_statistics(task, self._loops) for task in self._tasks),
            loops=tuple(loop.statistics(self._scope) for loop in self._loops),
            checkpoints=None if self._checkpointer is None else self._checkpointer.statistics(),
            stalled=self._watchdog.stalled() if self._state == "running" else (),
            parameter_servers=self._services.statistics(),
        )


def _first_failure(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _job_failed(
    flow: str, failure: RecordFailure, lines: Mapping[str, str], checkpoints: Checkpoints | None
) -> JobFailed:
    """Return the error for a failed job; it names the step, the user's line, and the record or its offsets."""
    cause = failure.__cause__ or failure
    step = failure.step
    where = f" ({lines[step]})" if step in lines else ""
    what = str(cause) if isinstance(cause, StreamiterError) else f"{type(cause).__name__}: {cause}"
    message = f"flow {flow!r}, step {step!r}{where}{_place(failure)}: {what}"
    if checkpoints is not None and isinstance(cause, OffsetOutOfRange):
        message += f"; changed_steps=[{step!r}] lets this source begin where its "
        if not checkpoints.has_store:
            message += "first_start= says, in one run; restore=None does so with all sources"
        else:
            message += (
                'start= says (its first_start= if that is "committed"), and keeps the state of all other steps; '
                "restore=None is a fresh start of the whole flow; restore=<number> resumes from another checkpoint"
            )
    error = JobFailed(message, step=step)
    error.__cause__ = cause
    return error


def _place(failure: RecordFailure) -> str:
    if failure.origin is not None:
        return f" at {failure.origin}"
    if failure.has_record:
        return f" on record {shortened(failure.record)}"
    return f" in {failure.place}" if failure.place else ""
