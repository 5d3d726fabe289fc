"""The follower of a job in one process: it makes, opens, runs and closes the tasks of this process.

Process 0 has a follower like all others, and beside it the coordinator, which is the
:class:`~streamiter.engine.job.job.Job`. A :class:`JobFollower` runs its tasks in one asyncio task, which owns all
others. If one of them fails, it stops the others and closes everything. It exchanges these messages with the
coordinator:

==============  ================================================================================================
``stop``        to the followers: ``drain`` the sources, or ``abort``
``statistics``  to the coordinator: a :class:`Report`, before records flow and then once a second
``failed``      to the coordinator: the error, before the steps are closed
``ended``       to the coordinator: the last report, when the steps are closed, and the error or None
==============  ================================================================================================

The coordinator looks itself at the report and the error of the follower beside it. Messages of one process arrive in
order, so when all steps are open, the coordinator knows all tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import final

import msgspec

from streamiter.engine.checkpointing.checkpoint_follower import ALL_ENDED, ALL_OPEN, BEGUN, OVER, CheckpointFollower
from streamiter.engine.checkpointing.committed import id_of
from streamiter.engine.checkpointing.services import JobServices
from streamiter.engine.graph.graph import Step
from streamiter.engine.graph.statistics import REPORT_EVERY_S, JobState, JobStatistics
from streamiter.engine.plan.job_settings import JobOptions, OwnProcess
from streamiter.engine.plan.messages import Exchange, Meeting, SharedObjects
from streamiter.engine.plan.plan import Planner
from streamiter.engine.states.backends import MemoryStates
from streamiter.engine.tasks.failures import Failures, call_unless_cancelled, check_stopped, first_failure, noted
from streamiter.engine.tasks.task import Task
from streamiter.engine.tasks.task_barriers import TaskStates
from streamiter.engine.tasks.watchdog import Watchdog, task_statistics
from streamiter.operators.operator import JobScope
from streamiter.operators.output import RecordFailure
from streamiter.topics.source_and_sink import ConsumerGroup, Outputs, TopicSink
from streamiter.values.helpers.closing import close_each, note_unclosed
from streamiter.values.plain_data import PlainData
from streamiter.values.plain_errors import error_to_plain

_log = logging.getLogger("streamiter.job")


class Report(msgspec.Struct, frozen=True):
    """What a follower tells the coordinator about its process."""

    statistics: JobStatistics
    """Its statistics, without loops."""
    shares: list[list[Mapping[str, int]]]
    """For each loop: the shares of its members in this process."""
    owed_s: float
    """For how long a server of an output has owed an answer; 0 if none does."""


@final
class JobFollower:
    """The tasks of one process. Its methods are called in the event loop that it was started in."""

    def __init__(
        self, flow: str, steps: Sequence[Step], plain_data: PlainData, options: JobOptions, own: OwnProcess
    ) -> None:
        """``own`` is the process, whose placement says which tasks it has."""
        if own.number:
            own.placement.check(flow, steps)
        self.flow = flow
        self.process = own.number
        self.exchange = Exchange(own.messages, own.number, own.placement.processes)
        self.meeting = Meeting(self.exchange)
        self.scope = JobScope()
        self.loops = list(dict.fromkeys(step.loop for step in steps if step.loop is not None))
        self._clock = options.clock
        # A thread is started only when a step that runs in threads gets its first batch.
        self._executor = ThreadPoolExecutor(
            max_workers=max(1, sum(step.parallelism for step in steps)), thread_name_prefix=f"{flow}-step"
        )
        self._states = MemoryStates(plain_data) if options.state is None else options.state._of_job(flow, plain_data)
        planner = Planner(
            own=own,
            steps=steps,
            options=options,
            scope=self.scope,
            plain_data=plain_data,
            states=self._states,
            acknowledge=lambda *taken: self.checkpoints.acknowledge(*taken),
            executor=self._executor,
        )
        self.tasks = planner.make_tasks()
        self._topic_feedback, self._departures = planner.topic_feedback, planner.departures
        self._encodings = planner.encodings
        has_checkpoints = options.checkpoints is not None
        self.services = JobServices(
            flow, steps, self.tasks, own.messages, self.exchange, plain_data=plain_data, has_checkpoints=has_checkpoints
        )
        self.checkpoints = CheckpointFollower(
            flow,
            options.checkpoints,
            self.exchange,
            self.meeting,
            tasks=self.tasks,
            tasks_of_all=own.placement.tasks,
            services=self.services,
            plain_data=plain_data,
            clock=options.clock,
        )
        group = ConsumerGroup(id_of(flow), lambda step: options.restore is None or step in options.changed_steps)
        self.scope.put(ConsumerGroup, group)
        if own.messages is not None:
            self.scope.put(SharedObjects, SharedObjects(own.messages, own.number))
        self.watchdog = Watchdog(self.tasks, options.clock, options.stall_after_s, own.number)
        process = own.number if own.placement.processes > 1 else None
        self.failures = Failures(flow, {step.name: step.where for step in steps}, options.checkpoints, process)
        self.error: BaseException | None = None
        """The error that has ended the tasks of this process."""
        self.users: set[asyncio.Task[object]] = set()
        """Asyncio tasks of the coordinator that use state of steps here: they are ended before the steps are closed."""
        self.state: JobState = "running"
        self._is_aborting = self._has_started = self._has_closed = False
        self._started_at_s = options.clock.monotonic_s()
        self._elapsed_s: float | None = None
        self._running: asyncio.Task[None] | None = None
        self._exits = False
        """Whether a task exits the program, which has ended the event loop: a second exit would leave tasks behind."""
        self.has_begun = False
        """Whether the tasks have begun to run."""
        self._left_start = asyncio.Event()
        """Set when the tasks run, or the start has failed."""
        self.exchange.handle("stop", lambda process, mode: self._stop(mode))

    # -- start and end ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open all steps, then run the tasks. Raises JobFailed if a step cannot be opened.

        An abort before the end of the start is no error.
        """
        self._running = asyncio.create_task(self._run(), name=f"job {self.flow}")
        try:
            await self._left_start.wait()
        except asyncio.CancelledError:
            self.abort()
            await self.closed()
            raise
        if self.state != "running":
            await self.wait()

    async def wait(self) -> JobStatistics:
        """Return the final statistics of this process when its steps are closed; raise the error that has ended them.

        Cancelling the wait leaves the tasks running.
        """
        assert self._running is not None
        await asyncio.shield(self._running)
        if self.error is not None:
            raise self.error from self.error.__cause__
        return self.statistics()

    async def closed(self) -> None:
        """Wait until the steps are closed."""
        if self._running is not None:
            await asyncio.wait([self._running])

    def abort(self) -> None:
        """End the tasks immediately; the coordinator then ends the tasks of the other processes."""
        # Only once: a second cancellation would interrupt the closing of the steps.
        if not self._is_aborting and self.state == "running":
            self._is_aborting = True
            # A task that is cancelled before it begins does not close anything; it asks for an abort itself.
            if self._running is not None and self._has_started and not self._has_closed:
                self._running.cancel()

    def _stop(self, mode: str) -> None:
        if mode == "abort":
            self.abort()
        else:
            self.when_tables_are_read(self._drain_sources)

    def when_tables_are_read(self, drain: Callable[[], None]) -> None:
        """Drain when no source has records left to read that a join waits for.

        Otherwise the join would use a part of its table for the records of the stream that were read already.
        """
        feeders = [task.feeder for task in self.tasks if task.feeder is not None and not task.ended]
        awaited = next((feeder for feeder in feeders if feeder.is_awaited), None)
        if awaited is None:
            drain()
        else:
            awaited.when_read(lambda: self.when_tables_are_read(drain))

    def _drain_sources(self) -> None:
        for task in self.tasks:
            if task.feeder is not None:  # Else one that follows another one could begin to read when that one ends.
                task.feeder.intake.shut()
        for task in self.tasks:
            if task.brings_input and not task.ended:
                task.drain()

    async def _run(self) -> None:
        """Open, run and close the tasks."""
        self._has_started = True
        failures: list[BaseException] = []
        try:
            try:
                await self._open_and_run()
            except ExceptionGroup as errors:
                failures.append(self._fails(self.failures.error_of(first_failure(errors))))
            except Exception as error:  # The state of the tasks cannot be read.
                failures.append(self._fails(error))
            failures += await self._close(went_well=not failures)
        except BaseException as ending:
            # Mostly an abort. It may have interrupted the closing, so the rest is closed here.
            failures += await self._close()
            is_cancelled = isinstance(ending, asyncio.CancelledError)
            if isinstance(ending, Exception):  # Of the engine, as where it tells of a failure: that is no abort.
                failures.insert(0, self._fails(self.failures.error_of(ending)))
            elif not (is_cancelled and failures):
                await self._end("aborted", [])
                if not (is_cancelled and self._is_aborting) and not self._exits:
                    raise
                return
        await self._end("suspended" if any(task.suspended for task in self.tasks) else "finished", failures)

    async def _open_and_run(self) -> None:
        if self._is_aborting:
            raise asyncio.CancelledError
        await self._open(await self.checkpoints.open())
        self.has_begun = True
        self._left_start.set()
        await self._run_tasks()

    def _fails(self, error: BaseException) -> BaseException:
        """Tell the coordinator, which ends the other processes, too."""
        self._tell_error("failed", error)
        return error

    def _tell_error(self, kind: str, error: BaseException | None) -> None:
        self.error = error
        if self.process:
            plain = None if error is None else error_to_plain(error)
            self.exchange.send(0, kind, msgspec.msgpack.encode(self.report()), plain)
        else:
            self.exchange.send(0, kind, None, None)

    async def _end(self, state: JobState, failures: Sequence[BaseException]) -> None:
        """Set the state, when the steps are closed, and tell the coordinator."""
        self._has_closed = True
        # Here, since steps use the states until all of them are closed.
        unclosed = [self.failures.error_of(error) for error in await close_each([self._states.close])]
        if state == "aborted" and not failures:
            for left in unclosed:
                _log.warning("%s", left)
        else:
            failures = [*failures, *unclosed]
            state = "failed" if failures else state
        self.state = state
        self._elapsed_s = self._clock.monotonic_s() - self._started_at_s
        self._left_start.set()
        self._tell_error("ended", first_failure_of(failures))

    async def _open(self, states: TaskStates) -> None:
        """Open services, then tasks, then feedback through topics: each needs the ones before it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.services.open(states), name=f"open services of {self.flow}")
        if self.services:
            await self.meeting.reach("all services are open")
        async with asyncio.TaskGroup() as group:
            for task in self.tasks:
                opening = call_unless_cancelled(partial(task.open, states.get(task.name)), task.first.step.name)
                group.create_task(opening, name=f"open {task.name}")
            for step, encoding in self._encodings.items():
                group.create_task(
                    call_unless_cancelled(encoding.open, step.name), name=f"open encoding for {step.name}"
                )
        # Only now the heads have restored the ranges of topics that they need.
        async with asyncio.TaskGroup() as group:
            for feedback in self._topic_feedback:
                group.create_task(feedback.open(), name=f"open feedback of {self.flow}")
        if self.process:
            self._tell_report()
        # Before that, a record or a message could reach a step that is not open.
        await self.meeting.reach(ALL_OPEN, self.checkpoints.restored())
        # Before that, the checkpoint, or where the sources begin, is not committed.
        await self.meeting.until(BEGUN)

    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            meanwhile = [group.create_task(self.watchdog.run(), name="watchdog")]
            if self.process:
                meanwhile.append(group.create_task(self._report_regularly(), name="reports"))
            running = [group.create_task(self._run_task(task), name=task.name) for task in self.tasks]
            for task in self.tasks:
                if task.feeder is not None and not task.ended:
                    task.feeder.start(group)
            for feedback in self._topic_feedback:
                feedback.start(group)
            meanwhile.append(group.create_task(self.checkpoints.run(), name=f"checkpoints of {self.flow}"))
            await asyncio.wait(running)
            # Until the run is over, a process without running tasks answers barriers, and calls of its shards.
            await self.meeting.reach(ALL_ENDED)
            for feedback in self._topic_feedback:
                await feedback.finish()
            await self.meeting.until(OVER)
            for task_beside in meanwhile:
                task_beside.cancel()

    async def _run_task(self, task: Task) -> None:
        first = task.first
        try:
            await noted(task.run(), first.step.name, first.note)
        except asyncio.CancelledError as error:  # As unless_cancelled does: each turn of a task would pass it.
            check_stopped(error, first.step.name)
            raise
        except (SystemExit, KeyboardInterrupt):
            self._exits = True
            raise
        except MemoryError as error:  # Not in a call of a step: while its records are taken, kept or passed on.
            raise RecordFailure(first.step.name) from error
        await self.services.task_ended(task)
        self.checkpoints.ended(task)

    async def _close(self, *, went_well: bool = False) -> list[BaseException]:
        users = [*self.users]
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
        # First wait for calls in threads: an operator is used by one call at a time.
        if any(task.first.operator.runs_in_thread for task in self.tasks):
            await asyncio.to_thread(self._executor.shutdown)
        errors: list[Exception] = []
        for task in self.tasks:
            errors += await task.close()
        for feedback in self._topic_feedback:
            errors += await feedback.close()
        errors += await close_each(departure.close for departure in self._departures)
        errors += await self.services.close(went_well=went_well)
        errors += await close_each([self.checkpoints.close])
        return [self.failures.error_of(error) for error in errors]

    # -- statistics ------------------------------------------------------------------------------------

    def statistics(self) -> JobStatistics:
        """Return the statistics of this process now, without loops and checkpoints."""
        elapsed_s = self._elapsed_s
        if elapsed_s is None:
            elapsed_s = self._clock.monotonic_s() - self._started_at_s
        return JobStatistics(
            flow=self.flow,
            state=self.state,
            elapsed_s=elapsed_s,
            tasks=tuple(task_statistics(task, self.loops, self.process) for task in self.tasks),
            loops=(),
            checkpoints=None,
            stalled=self.watchdog.stalled() if self.state == "running" else (),
            parameter_servers=self.services.statistics(),
        )

    def report(self) -> Report:
        """Return what the coordinator wants to know."""
        return Report(self.statistics(), [loop.shares(self.scope) for loop in self.loops], self.owed_s())

    def owed_s(self) -> float:
        """Return for how long a server of an output of this process has owed an answer; 0 if none does."""
        operators = (instance.operator for task in self.tasks for instance in task.instances)
        since_s = [each.unanswered_since_s() for each in operators if isinstance(each, TopicSink)]
        since_s.append(self.scope.get(Outputs, Outputs).unanswered_since_s())
        return max((self._clock.monotonic_s() - each for each in since_s if each is not None), default=0.0)

    def _tell_report(self) -> None:
        self.exchange.send(0, "statistics", msgspec.msgpack.encode(self.report()))

    async def _report_regularly(self) -> None:
        while True:
            await self._clock.sleep(REPORT_EVERY_S)
            self._tell_report()


def first_failure_of(failures: Sequence[BaseException]) -> BaseException | None:
    """Return the first failure, with the others as notes; None if there is none."""
    if not failures:
        return None
    error, *others = failures
    # A full disk is full at the close, too.
    note_unclosed(error, (other for other in others if str(other.__cause__) not in str(error)))
    return error
