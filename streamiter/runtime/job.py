"""The job: a running flow.

A :class:`Job` makes its tasks by way of the :class:`~streamiter.runtime.plan.Planner`, opens them, and runs them under
a *supervisor*, an asyncio task that owns all others. If one task fails, the supervisor stops the others and closes
everything. Stopping, snapshots and checkpoints are barriers that the job sends through its tasks.

If several processes run the flow, each has a job with the tasks of this process. What they tell each other is in
:mod:`~streamiter.runtime.other_jobs`. The job of process 0 ends after the others, with the statistics and the error of
all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

from streamiter.checkpoints.plain_data import PlainData
from streamiter.closing import close_each, note_unclosed
from streamiter.errors import CheckpointError, ConfigurationError, StreamiterError
from streamiter.operators.keyed_state import independent_copy
from streamiter.operators.operator import JobScope
from streamiter.operators.output import RecordFailure
from streamiter.runtime.checkpointing.barriers import Barriers, JobServices, service_key
from streamiter.runtime.checkpointing.checkpoint_messages import CheckpointMessages
from streamiter.runtime.checkpointing.commit import JobSnapshot, snapshot_in_memory
from streamiter.runtime.checkpointing.committed import checkpoints_of, id_of, warn_of_doubled_outputs
from streamiter.runtime.checkpointing.task_barriers import TaskStates
from streamiter.runtime.failures import Failures, call_unless_cancelled, first_failure, noted, unless_cancelled
from streamiter.runtime.graph import Step
from streamiter.runtime.job_settings import JobOptions, OwnProcess
from streamiter.runtime.messages import SharedObjects
from streamiter.runtime.other_jobs import Report, other_jobs
from streamiter.runtime.plan import Planner, first_process
from streamiter.runtime.statistics import JobState, JobStatistics
from streamiter.runtime.task import Task
from streamiter.runtime.watchdog import Watchdog, task_statistics
from streamiter.states.backends import MemoryStates
from streamiter.topics.source_and_sink import ConsumerGroup, Outputs, TopicSink

if TYPE_CHECKING:
    from streamiter.checkpoints.store import Checkpoints
    from streamiter.runtime.checkpointing.checkpointer import Checkpointer
    from streamiter.runtime.checkpointing.following_checkpointer import FollowingCheckpointer

_log = logging.getLogger("streamiter.job")

StopMode = Literal["suspend", "drain", "abort"]

# Kubernetes kills a process 30 s after SIGTERM, docker 10 s after it unless told otherwise. A broker that restarts in
# order answers within a few seconds, by way of another broker; what follows an abort takes up to 8 s.
_UNANSWERED_S: Final = 8.0
_LOOK_EVERY_S: Final = 0.5

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
        self._plain_data = plain_data
        # A thread is started only when a step that runs in threads gets its first batch.
        self._executor = ThreadPoolExecutor(
            max_workers=max(1, sum(step.parallelism for step in steps)), thread_name_prefix=f"{flow}-step"
        )
        self._scope = JobScope()
        self._loops = list(dict.fromkeys(step.loop for step in steps if step.loop is not None))
        if own is None:
            own = first_process(flow, steps)
        elif own.number:
            own.placement.check(flow, steps)
        self._process = own.number
        self._processes = own.placement.processes
        if self._processes > 1 and options.on_rejected is not None:
            raise ConfigurationError(
                f"flow {flow!r}: expected no on_rejected in {self._processes} processes, given one; each process would "
                "call its own; give steps dead_letter=topic, which gets the refused records of all processes"
            )
        self._checkpoint_messages = CheckpointMessages(own.messages, own.number, self._processes)
        self._barriers = Barriers(options.clock, self._checkpoint_messages)
        self._states = MemoryStates(plain_data) if options.state is None else options.state._of_job(flow, plain_data)
        planner = Planner(
            own=own,
            steps=steps,
            options=options,
            scope=self._scope,
            plain_data=plain_data,
            states=self._states,
            acknowledge=self._barriers.acknowledge,
            executor=self._executor,
        )
        self._tasks = planner.make_tasks()
        self._topic_feedback, self._departures = planner.topic_feedback, planner.departures
        self._encodings = planner.encodings
        # Process 0 starts, decides and commits.
        checkpoints = self._checkpoints = None if own.number else checkpoints_of(flow, self._tasks, options)
        self._services = JobServices(
            flow, steps, self._tasks, own, plain_data=plain_data, has_checkpoints=options.checkpoints is not None
        )
        self._barriers.watch(self._tasks, self._services, self._checkpoint_abandoned)
        self._checkpointer = None if checkpoints is None else self._make_checkpointer(checkpoints, options, own)
        self._keeper = self._checkpointer if own.messages is None or not own.number else self._follow(options, own)
        """Restores the tasks of this process, and keeps their state; None in process 0 of a job without checkpoints."""
        group = ConsumerGroup(id_of(flow), lambda step: options.restore is None or step in options.changed_steps)
        self._scope.put(ConsumerGroup, group)
        self._watchdog = Watchdog(self._tasks, options.clock, options.stall_after_s, self._process)
        process = self._process if self._processes > 1 else None
        self._failures = Failures(flow, {step.name: step.where for step in steps}, checkpoints, process)
        self._state: JobState = "running"
        self._is_aborting = False
        self._is_draining = False
        self._has_begun = self._has_closed = False
        self._started_at_s = options.clock.monotonic_s()
        self._elapsed_s: float | None = None
        self._opening: asyncio.Task[Any] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._others = other_jobs(own, options.clock, self._report, self._abort, self._stopped_by_first)
        if own.messages is not None:
            self._scope.put(SharedObjects, SharedObjects(own.messages, own.number))
        self._taking: set[asyncio.Task[object]] = set()
        """Snapshots and checkpoints that are being taken, also if their caller has stopped waiting."""

    def _make_checkpointer(self, checkpoints: Checkpoints, options: JobOptions, own: OwnProcess) -> Checkpointer:
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
            messages=self._checkpoint_messages,
            tasks_of_all=own.placement.tasks,
        )

    def _follow(self, options: JobOptions, own: OwnProcess) -> FollowingCheckpointer:
        from streamiter.runtime.checkpointing.following_checkpointer import FollowingCheckpointer

        assert own.messages is not None
        return FollowingCheckpointer(
            self.flow,
            options.checkpoints,
            own.number,
            own.messages,
            tasks=self._tasks,
            tasks_of_all=own.placement.tasks,
            barriers=self._barriers,
            plain_data=self._plain_data,
            clock=options.clock,
        )

    # -- start and end ---------------------------------------------------------------------------------

    async def start(self, snapshot: JobSnapshot | None = None) -> None:
        """Open all steps, then run the tasks. Raises JobFailed if a step cannot be opened."""
        if self._keeper is None and snapshot is None:
            warn_of_doubled_outputs(self.flow, self._tasks)
            self._checkpoint_messages.send_restore(None, None)
        if snapshot is not None:
            self._check_same_tasks(snapshot)
            # Operators keep the state that they restore, and other jobs may start from the same snapshot.
            snapshot = independent_copy(snapshot)
        states = snapshot if self._keeper is None else await self._load_states(self._keeper)
        try:
            await self._unless_aborted(self._open(states))
        except ExceptionGroup as errors:
            failure = self._has_failed(errors)
            await self._end("failed", [failure, *await self._close()])
        except BaseException as ending:
            await self._end_early(ending, await self._close())
        self._supervisor = asyncio.create_task(self._supervise(), name=f"job {self.flow}")
        if self._is_aborting:  # Another process has failed before all steps were open.
            await self.wait()
        try:
            # Let it start: a task that is cancelled before its start never runs, and would close nothing.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await self.stop("abort")
            raise

    async def _unless_aborted(self, part: Coroutine[Any, Any, T]) -> T | None:
        """Await a part of the start; return None if another process has failed before or meanwhile."""
        if not self._others.exist:
            return await part
        self._opening = opening = asyncio.create_task(part, name=f"open {self.flow}")
        if self._is_aborting:
            opening.cancel()
        try:
            return await opening
        except asyncio.CancelledError:
            if not self._is_aborting or _is_cancelled():
                raise
            return None

    async def _load_states(self, keeper: Checkpointer | FollowingCheckpointer) -> TaskStates | None:
        """Shut out older runs, and return the states of the checkpoint that this run starts from."""
        try:
            return await self._unless_aborted(keeper.open())
        except BaseException as ending:
            await self._end_early(ending, await close_each([keeper.close]))

    async def _open(self, states: TaskStates | None) -> None:
        """Open services, then tasks, then feedback through topics: each needs the ones before it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._services.open(states), name=f"open services of {self.flow}")
        if self._services:
            await self._others.reach("all services are open")
        async with asyncio.TaskGroup() as group:
            for task in self._tasks:
                state = None if states is None else states.get(task.name)
                opening = call_unless_cancelled(partial(task.open, state), task.first.step.name)
                group.create_task(opening, name=f"open {task.name}")
            for step, encoding in self._encodings.items():
                group.create_task(
                    call_unless_cancelled(encoding.open, step.name), name=f"open encoding for {step.name}"
                )
        # Only now the heads have restored the ranges of topics that they need.
        async with asyncio.TaskGroup() as group:
            for feedback in self._topic_feedback:
                group.create_task(feedback.open(), name=f"open feedback of {self.flow}")
        self._others.report()
        # Before that, a record or a message could reach a step that is not open.
        await self._others.reach("all steps are open")
        if self._keeper is not None:
            await self._keeper.restored()
        # Before that, the checkpoint, or where the sources begin, is not committed.
        await self._others.reach("the run has begun")

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
        epoch. If a join waits for its table, the inputs end when the table is read.

        ``abort``: the job ends immediately.

        The job is ``finished`` even after ``suspend`` if all its inputs had ended before.
        """
        assert self._supervisor is not None
        if mode not in ("suspend", "drain", "abort"):
            raise ConfigurationError(
                f'job.stop: expected "suspend", "drain" or "abort", given {mode!r}; choose one of these'
            )
        if mode != "abort" and self._process:
            raise ConfigurationError(
                f"flow {self.flow!r}: expected stop({mode!r}) in process 0, which stops all processes, given process "
                f'{self._process}; stop process 0, or end the run with stop("abort")'
            )
        if self._supervisor.done():
            return await self.wait()
        if mode == "abort":
            self._abort()
        elif mode == "drain" and not await self._waits_at_end():
            self._when_tables_are_read(self._drain)
        else:
            await self._suspend()
        return await self.wait()

    async def _waits_at_end(self) -> bool:
        """Return whether the inputs had ended before this run, which has read nothing: a second end would have results
        for nothing.
        """
        if self._checkpointer is None or not self._checkpointer.waits_at_end:
            return False
        # With records, workers of a parameter server may be at several clocks, so a barrier would wait in vain.
        if any(task.steps[0].counts.records_in for task in self.statistics().tasks if task.source is not None):
            return False
        try:
            await self._while_running(self._checkpointer.take(), survives_cancelling=True)
        except StreamiterError:
            return False
        return self._checkpointer.waits_at_end

    async def stop_on_signal(self, mode: StopMode) -> None:
        """Stop the job as ``stop`` does, but abort it if the servers of its outputs do not answer.

        So the process ends before a supervisor kills it. While they answer, the last checkpoint may take any time.
        """
        aborting = asyncio.create_task(self._abort_if_unanswered(), name="abort without servers")
        try:
            await self.stop(mode)
        finally:
            aborting.cancel()

    async def _abort_if_unanswered(self) -> None:
        since_s = self._clock.monotonic_s()
        while self._state == "running":
            await self._clock.sleep(_LOOK_EVERY_S)
            owed_s = min(max(self._owed_s(), self._others.owed_s()), self._clock.monotonic_s() - since_s)
            if owed_s >= _UNANSWERED_S:
                _log.warning(
                    "flow %r: the server of an output has not answered for %.0f s, so the job is aborted; with "
                    "checkpoints, the next run resumes from the last one",
                    self.flow,
                    owed_s,
                )
                self._abort()
                return

    def _owed_s(self) -> float:
        """Return for how long a server of an output of this process has owed an answer; 0 if none does."""
        operators = (instance.operator for task in self._tasks for instance in task.instances)
        since_s = [each.unanswered_since_s() for each in operators if isinstance(each, TopicSink)]
        since_s.append(self._scope.get(Outputs, Outputs).unanswered_since_s())
        return max((self._clock.monotonic_s() - each for each in since_s if each is not None), default=0.0)

    def _abort(self) -> None:
        # Only once: a second cancellation would interrupt the closing of the steps.
        if not self._is_aborting and self._state == "running":
            self._is_aborting = True
            self._others.stop("abort")
            # A task that is cancelled before it begins does not close anything; it asks for an abort itself.
            running = self._opening if self._supervisor is None else self._supervisor if self._has_begun else None
            if running is not None and not self._has_closed:
                running.cancel()

    def others_are_lost(self) -> None:
        """Do not wait for the jobs of other processes at the end, because a process was lost."""
        self._others.lost()

    def _stopped_by_first(self, mode: str) -> None:
        if mode == "abort":
            self._abort()
        else:
            self._when_tables_are_read(self._drain_sources)

    def _when_tables_are_read(self, drain: Callable[[], None]) -> None:
        """Drain when no source has records left to read that a join waits for.

        Otherwise the join would use a part of its table for the records of the stream that were read already.
        """
        feeders = [task.feeder for task in self._tasks if task.feeder is not None and not task.ended]
        awaited = next((feeder for feeder in feeders if feeder.is_awaited), None)
        if awaited is None:
            drain()
        else:
            awaited.when_read(lambda: self._when_tables_are_read(drain))

    def _drain(self) -> None:
        self._drain_sources()
        self._others.stop("drain")
        for loop in self._loops:
            loop.drain(self._scope, again=self._is_draining)
        self._is_draining = True

    def _drain_sources(self) -> None:
        for task in self._tasks:
            if task.brings_input and not task.ended:
                task.drain()

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
        if self._processes > 1:
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a job of a single process, given one of {self._processes}; take "
                "checkpoints instead, which contain the state of all processes"
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
        for loop in () if self._process else self._loops:
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
            raise self._failures.error_of(result)
        return result

    def _forget_taking(self, taking_task: asyncio.Task[object]) -> None:
        self._taking.discard(taking_task)
        if not taking_task.cancelled():
            taking_task.exception()  # marks the error as retrieved: wait() raises it

    async def _supervise(self) -> None:
        self._has_begun = True
        failures: list[BaseException] = []
        try:
            try:
                if self._is_aborting:
                    raise asyncio.CancelledError
                await self._run_tasks()
            except ExceptionGroup as errors:
                failures.append(self._has_failed(errors))
            failures += await self._close(went_well=not failures)
        except BaseException as ending:
            # Mostly an abort. It may have interrupted the closing, so the rest is closed here.
            failures += await self._close()
            is_cancelled = isinstance(ending, asyncio.CancelledError)
            if not (is_cancelled and failures):
                await self._end("aborted")
                if is_cancelled and self._is_aborting:
                    return
                raise
        if failures:
            await self._end("failed", failures)
        await self._end("suspended" if self._barriers.any_suspended else "finished")

    def _has_failed(self, errors: BaseException) -> BaseException:
        """Return the error of the job; the other processes end, too."""
        error = self._failures.error_of(first_failure(errors))
        self._others.failed(error)
        return error

    async def _end_early(self, ending: BaseException, unclosed: Sequence[BaseException]) -> NoReturn:
        """End a job that cannot start, and raise the reason; ``unclosed`` are the errors of its closing."""
        if isinstance(ending, Exception):
            await self._end("failed", [ending, *unclosed])
        await self._end("aborted")
        raise ending

    async def _end(self, state: JobState, failures: Sequence[BaseException] = ()) -> None:
        """Set the state of the job, whose steps are closed; process 0 first waits for the jobs of the others.

        Raises the first of the failures, or the first error of another process.
        """
        self._has_closed = True
        # Here, since steps use the states until all of them are closed.
        unclosed = [self._failures.error_of(error) for error in await close_each([self._states.close])]
        if state == "aborted" and not failures:
            for left in unclosed:
                _log.warning("%s", left)
        else:
            failures = [*failures, *unclosed]
            state = "failed" if failures else state
        error, *others = failures or (None,)
        if error is not None:
            # A full disk is full at the close, too.
            note_unclosed(error, (other for other in others if str(other.__cause__) not in str(error)))
        try:
            # Whoever cancels a job without an abort does not wait for anything.
            if state == "aborted" and not self._is_aborting:
                self._others.stop("abort")
            else:
                state, error = await self._others.ended(state, error)
                if state == "suspended" and self._checkpointer is not None and self._checkpointer.waits_at_end:
                    state = "finished"
        except asyncio.CancelledError:
            state = "aborted"
            raise
        finally:
            self._state = state
            self._elapsed_s = self._clock.monotonic_s() - self._started_at_s
        self._others.report_end(error)
        if error is not None:
            raise error from error.__cause__

    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            meanwhile = [group.create_task(self._watchdog.run(), name="watchdog")]
            meanwhile += self._others.report_regularly(group)
            running = [group.create_task(self._run(task), name=task.name) for task in self._tasks]
            for task in self._tasks:
                if task.feeder is not None and not task.ended:
                    task.feeder.start(group)
            for feedback in self._topic_feedback:
                feedback.start(group)
            if self._keeper is not None:
                name = f"checkpoints of {self.flow}"
                meanwhile.append(group.create_task(self._keeper.run(), name=name))
            await asyncio.wait(running)
            # Until the run is over, a process without running tasks answers barriers, and calls of its shards.
            await self._others.reach("all tasks have ended")
            for feedback in self._topic_feedback:
                await feedback.finish()
            if self._keeper is not None:
                await self._keeper.finish(suspended=self._barriers.any_suspended)
            await self._others.reach("the run is over")
            for task_beside in meanwhile:
                task_beside.cancel()

    async def _run(self, task: Task) -> None:
        first = task.first
        try:
            await unless_cancelled(noted(task.run(), first.step.name, first.note), first.step.name)
        except MemoryError as error:  # Not in a call of a step: while its records are taken, kept or passed on.
            raise RecordFailure(first.step.name) from error
        await self._services.task_ended(task)
        self._barriers.ended(task)

    async def _close(self, *, went_well: bool = False) -> list[BaseException]:
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
        errors += await close_each(departure.close for departure in self._departures)
        errors += await self._services.close(went_well=went_well)
        if self._keeper is not None:
            errors += await close_each([self._keeper.close])
        return [self._failures.error_of(error) for error in errors]

    # -- statistics ------------------------------------------------------------------------------------

    def stall_after(self, seconds: float) -> None:
        """Set the seconds without progress after which a step is stalled, from the next look of the watchdog on."""
        self._watchdog.stall_after_s = seconds

    def _repr_html_(self) -> str:
        """Return the statistics of this moment, for notebooks."""
        return self.statistics()._repr_html_()

    def statistics(self) -> JobStatistics:
        """Return the statistics of the job now; in process 0 those of all processes."""
        elapsed_s = self._elapsed_s
        if elapsed_s is None:
            elapsed_s = self._clock.monotonic_s() - self._started_at_s
        # The coordinators of loops are in process 0.
        loops = () if self._process else enumerate(self._loops)
        statistics = JobStatistics(
            flow=self.flow,
            state=self._state,
            elapsed_s=elapsed_s,
            tasks=tuple(task_statistics(task, self._loops, self._process) for task in self._tasks),
            loops=tuple(loop.statistics(self._scope, self._others.shares(number)) for number, loop in loops),
            checkpoints=None if self._checkpointer is None else self._checkpointer.statistics(),
            stalled=self._watchdog.stalled() if self._state == "running" else (),
            parameter_servers=self._services.statistics(),
        )
        return self._others.joined(statistics)

    def _report(self) -> Report:
        return Report(self.statistics(), [loop.shares(self._scope) for loop in self._loops], self._owed_s())


def _is_cancelled() -> bool:
    """Return whether the current task is cancelled, and not only a task that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
