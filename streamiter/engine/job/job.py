"""The job: a running flow.

A :class:`Job` is the coordinator of a running flow. Its tasks belong to *followers*
(:class:`~streamiter.engine.job.follower.JobFollower`): one in each process, also beside the coordinator in process 0,
and in a job of one process only that. The coordinator tells them when to begin, to stop and to end; it has the
statistics and the first error of all. What they exchange travels between processes as messages, and is a call within
process 0.

Stopping, snapshots and checkpoints are barriers that the coordinator sends through the tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from typing import Any, Final, Literal, TypeVar

import msgspec

from streamiter.engine.checkpointing.checkpoint_follower import BEGUN, CHOSEN, OVER
from streamiter.engine.checkpointing.commit import JobSnapshot
from streamiter.engine.checkpointing.committed import checkpoints_of, warn_of_doubled_outputs
from streamiter.engine.checkpointing.services import service_key
from streamiter.engine.graph.graph import Step
from streamiter.engine.graph.statistics import JobState, JobStatistics, ProcessStatistics, joined_halves
from streamiter.engine.job.checkpointer import Checkpointer
from streamiter.engine.job.follower import JobFollower, Report, first_failure_of
from streamiter.engine.plan.job_settings import JobOptions, OwnProcess
from streamiter.engine.plan.plan import first_process
from streamiter.engine.tasks.failures import first_failure
from streamiter.errors import CheckpointError, ConfigurationError, StreamiterError
from streamiter.operators.keyed_state import independent_copy
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.closing import close_each, closed_after, note_unclosed
from streamiter.values.numbers import one_of
from streamiter.values.plain_data import PlainData
from streamiter.values.plain_errors import error_from_plain

_log = logging.getLogger("streamiter.job")

StopMode = Literal["suspend", "drain", "abort"]

# Kubernetes kills a process 30 s after SIGTERM, docker 10 s after it unless told otherwise. A broker that restarts in
# order answers within a few seconds, by way of another broker; what follows an abort takes up to 8 s.
_UNANSWERED_S: Final = 8.0
_LOOK_EVERY_S: Final = 0.5

_COORDINATOR: Final = -1
"""Stands for the number of a process among the errors."""

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
        """``own``: process 0, if other processes run the flow, too; each of them has a follower."""
        self.flow = flow
        self.steps = steps
        """The steps of the flow, for drawings."""
        own = first_process(flow, steps) if own is None else own
        processes = own.placement.processes
        if processes > 1 and options.on_rejected is not None:
            raise ConfigurationError(
                f"flow {flow!r}: expected no on_rejected in {processes} processes, given one; each process would "
                "call its own; give steps dead_letter=topic, which gets the refused records of all processes"
            )
        self._clock = options.clock
        follower = self._follower = JobFollower(flow, steps, plain_data, options, own)
        self._tasks, self._loops, self._scope = follower.tasks, follower.loops, follower.scope
        self._exchange, self._meeting = follower.exchange, follower.meeting
        settings = follower.failures.checkpoints = checkpoints_of(flow, follower.tasks, options)
        self._checkpointer = Checkpointer(flow, settings, options, follower=follower, plain_data=plain_data)
        self._state: JobState = "running"
        self._is_draining = False
        self._coordinating: asyncio.Task[None] | None = None
        self._running = set(range(processes))
        """The processes whose followers have not ended."""
        self._all_ended = asyncio.Event()
        self._errors: dict[int, BaseException] = {}
        """The errors of the processes, in the order of their arrival."""
        self._reports: dict[int, tuple[float, Report]] = {}
        """The last report of each other process, and when it has arrived."""
        self._placement = own.placement
        self._exchange.handle("statistics", self._reported)
        self._exchange.handle("failed", self._has_failed)
        self._exchange.handle("ended", self._has_ended)

    # -- start and end ---------------------------------------------------------------------------------

    async def start(self, snapshot: JobSnapshot | None = None) -> None:
        """Open all steps, then run the tasks. Raises JobFailed if a step cannot be opened."""
        if snapshot is not None:
            self._check_same_tasks(snapshot)
            # Operators keep the state that they restore, and other jobs may start from the same snapshot.
            self._follower.checkpoints.states = independent_copy(snapshot)
        elif self._checkpointer.settings is None:
            warn_of_doubled_outputs(self.flow, self._tasks)
        conducting = self._conduct()
        self._coordinating = asyncio.create_task(self._coordinate(conducting), name=f"coordinate {self.flow}")
        try:
            with contextlib.suppress(Exception):  # The job raises it, too.
                await self._follower.start()
            if not self._follower.has_begun:
                await self.wait()
        except asyncio.CancelledError:
            # Who cancels the start waits for no other process: one of them may be lost.
            self._stop_followers("abort")
            leave_other_processes(self)
            with contextlib.suppress(Exception):
                await self.wait()
            raise

    def _check_same_tasks(self, snapshot: JobSnapshot) -> None:
        if self._checkpointer.settings is not None:
            raise ConfigurationError(
                f'flow {self.flow!r}: expected either sources with start="committed" or snapshot=, given both; the '
                "snapshot has other positions than the topics"
            )
        names = {task.name: None for task in self._tasks}
        names.update({service_key(name): None for name in self._follower.services.names()})
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
        assert self._coordinating is not None
        await asyncio.shield(self._coordinating)
        return self.statistics()

    def _conduct(self) -> asyncio.Task[None] | None:
        """Let the checkpointer tell the followers when to go on; without checkpoints, they wait for each other only."""
        if self._checkpointer.settings is None:
            self._meeting.open(CHOSEN, None, None, {})
            self._meeting.open(BEGUN)
            self._meeting.open(OVER)
            return None
        conducting = asyncio.create_task(self._checkpointer.conduct(), name=f"checkpoints of {self.flow}")
        # It stores the state of steps, so these are not closed before it has ended.
        self._follower.users.add(conducting)
        return conducting

    async def _coordinate(self, conducting: asyncio.Task[None] | None) -> None:
        """Wait until all followers have ended, then set the state of the run. Raises the first error of all."""
        closing = [self._checkpointer.close]
        try:
            if conducting is not None:
                await self._end_if_failed(conducting)
            await self._all_ended.wait()
        except asyncio.CancelledError:
            # Who cancels a job without an abort waits for no other process.
            self._stop_followers("abort", but=[0])
            await self._follower.closed()
            await close_each(closing)
            self._state = "aborted"
            raise
        unclosed = [self._follower.failures.error_of(error) for error in await close_each(closing)]
        states = {self._follower.state, *(report.statistics.state for _, report in self._reports.values())}
        state: JobState = "aborted" if "aborted" in states else "suspended" if "suspended" in states else "finished"
        if state == "suspended" and self._checkpointer.waits_at_end:
            state = "finished"
        errors = [*self._errors.values()]
        error = first_failure_of([*errors[:1], *unclosed])
        self._state = state if error is None else "failed"
        if error is not None:
            note_unclosed(error, errors[1:])
            raise error from error.__cause__

    async def _end_if_failed(self, conducting: asyncio.Task[None]) -> None:
        await asyncio.wait([conducting])
        if not conducting.cancelled() and (error := conducting.exception()) is not None:
            failures = self._follower.failures
            self._errors[_COORDINATOR] = failures.error_of(first_failure(error)) if self._follower.has_begun else error
            self._stop_followers("abort", but=self._errors)

    # -- the followers ---------------------------------------------------------------------------------

    @cached_property
    def _unpack(self) -> msgspec.msgpack.Decoder[Report]:
        return msgspec.msgpack.Decoder(Report)

    def _reported(self, process: int, report: bytes | None) -> None:
        if report is not None:  # The follower of this process is asked itself.
            self._reports[process] = self._clock.monotonic_s(), self._unpack.decode(report)

    def _has_failed(self, process: int, report: bytes | None, error: PlainValue) -> None:
        self._reported(process, report)
        failure = error_from_plain(error) if process else self._follower.error
        assert failure is not None
        self._errors[process] = failure
        self._stop_followers("abort", but=self._errors)

    def _has_ended(self, process: int, report: bytes | None, error: PlainValue) -> None:
        self._reported(process, report)
        self._running.discard(process)
        state = self._reports[process][1].statistics.state if process else self._follower.state
        if state == "failed":
            self._has_failed(process, report, error)
        elif state == "aborted":
            self._stop_followers("abort", but=self._errors)
        if not self._running:
            self._all_ended.set()

    def _stop_followers(self, mode: StopMode, but: Collection[int] = ()) -> None:
        """Tell the followers; a process that has failed closes its steps already, which an abort would interrupt."""
        for process in sorted(self._running.difference(but), reverse=True):
            self._exchange.send(process, "stop", mode)

    # -- stopping and snapshots ------------------------------------------------------------------------

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
        assert self._coordinating is not None
        one_of("job.stop", mode, "suspend", "drain", "abort")
        if self._coordinating.done():
            return await self.wait()
        if mode == "abort":
            self._abort()
        elif mode == "drain" and not await self._waits_at_end():
            self._follower.when_tables_are_read(self._drain)
        else:
            await self._suspend()
        return await self.wait()

    async def _waits_at_end(self) -> bool:
        """Return whether the inputs had ended before this run, which has read nothing: a second end would have results
        for nothing.
        """
        if not self._checkpointer.waits_at_end:
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
        async with closed_after(aborting.cancel):
            await self.stop(mode)

    async def _abort_if_unanswered(self) -> None:
        since_s = self._clock.monotonic_s()
        while self._state == "running":
            await self._clock.sleep(_LOOK_EVERY_S)
            owed_s = min(self._owed_s(), self._clock.monotonic_s() - since_s)
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
        """Return for how long a server of an output has owed an answer; 0 if none does."""
        return max((self._follower.owed_s(), *(report.owed_s for _, report in self._reports.values())))

    def _abort(self) -> None:
        if self._state == "running":
            self._stop_followers("abort")

    def _drain(self) -> None:
        self._stop_followers("drain")
        for loop in self._loops:
            loop.drain(self._scope, again=self._is_draining)
        self._is_draining = True

    async def _suspend(self) -> None:
        if self._checkpointer.settings is None:
            await self._while_running(self._checkpointer.suspend())
            return
        # wait() raises the failure of a job without its last checkpoint.
        with contextlib.suppress(StreamiterError):
            await self._while_running(self._checkpointer.take(suspend=True), survives_cancelling=True)

    async def snapshot(self) -> JobSnapshot:
        """Send a barrier through the running job; return the state of all tasks as plain data.

        Raises JobFailed if a step fails before that, and ConfigurationError if the job ends.
        """
        if (processes := self._exchange.processes) > 1:
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a job of a single process, given one of {processes}; take "
                "checkpoints instead, which contain the state of all processes"
            )
        snapshot = await self._while_running(self._checkpointer.snapshot())
        if snapshot is None:
            await self.wait()  # raises the failure of the job
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a running job, given one that has ended; take its snapshot earlier"
            )
        return snapshot

    async def checkpoint(self) -> int:
        """Take a checkpoint now and commit it, besides the checkpoints of the interval; return its number.

        Raises ConfigurationError for a job without checkpoints, and CheckpointError if none can be taken now.
        Cancelling this call, for example with ``asyncio.wait_for``, does not cancel the checkpoint.
        """
        if self._checkpointer.settings is None:
            raise ConfigurationError(
                f"flow {self.flow!r}: expected a job with checkpoints, given one without; "
                "start it with checkpoints=Checkpoints(…)"
            )
        number = await self._while_running(self._checkpointer.take(), survives_cancelling=True)
        if number is None:
            await self.wait()
            raise CheckpointError(f"flow {self.flow!r}: expected a running job, given one that has ended")
        return number

    async def _while_running(self, taking: Coroutine[Any, Any, T], *, survives_cancelling: bool = False) -> T | None:
        """Return the result of ``taking``; None if the job ends before it.

        If this call is cancelled, ``taking`` is cancelled too, unless it ``survives_cancelling``: half a commit would
        leave outputs uncommitted.
        """
        assert self._coordinating is not None
        if self._coordinating.done():
            taking.close()
            return None
        taking_task = asyncio.create_task(taking, name="barrier")
        self._follower.users.add(taking_task)
        taking_task.add_done_callback(self._forget_taking)
        try:
            await asyncio.wait({taking_task, self._coordinating}, return_when=asyncio.FIRST_COMPLETED)
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
            raise self._follower.failures.error_of(result)
        return result

    def _forget_taking(self, taking_task: asyncio.Task[object]) -> None:
        self._follower.users.discard(taking_task)
        if not taking_task.cancelled():
            taking_task.exception()  # marks the error as retrieved: wait() raises it

    # -- statistics ------------------------------------------------------------------------------------

    def stall_after(self, seconds: float) -> None:
        """Set the seconds without progress after which a step is stalled, from the next look of the watchdog on."""
        self._follower.watchdog.stall_after_s = seconds

    def __repr__(self) -> str:
        return f"Job({self.statistics().title}{self._why_failed})"

    def _repr_html_(self) -> str:
        """Return the statistics of this moment, and why the job has failed, for notebooks."""
        why = f"<div>{escape(self._why_failed[2:])}</div>" if self._errors else ""
        return self.statistics()._repr_html_() + why

    @property
    def _why_failed(self) -> str:
        """The first error with a colon before it; empty without one. A cell that does not await the job shows it."""
        return next((f": {error}" for error in self._errors.values()), "")

    def statistics(self) -> JobStatistics:
        """Return the statistics of this process now, and the last statistics that the other processes have sent."""
        reports = [report for _, report in self._reports.values()]
        own = replace(
            self._follower.statistics(),
            state=self._state,
            loops=tuple(
                loop.statistics(self._scope, [share for report in reports for share in report.shares[number]])
                for number, loop in enumerate(self._loops)
            ),
            checkpoints=self._checkpointer.statistics(),
        )
        if self._exchange.processes == 1:
            return own
        parts = [own, *(report.statistics for report in reports)]
        tasks = joined_halves([task for part in parts for task in part.tasks])
        return replace(
            own,
            tasks=tuple(sorted(tasks, key=lambda task: self._order[task.name])),
            stalled=tuple(stalled for part in parts if part.state == "running" for stalled in part.stalled),
            processes=(ProcessStatistics(0, own.state, 0.0), *self._processes()),
        )

    @cached_property
    def _order(self) -> Mapping[str, int]:
        """The number of each task in the statistics of several processes."""
        heads = (step for step in self._placement.steps if step.chained_to is None)
        names = (f"{step.description.name}[{subtask}]" for step in heads for subtask in range(len(step.processes)))
        return {name: number for number, name in enumerate(names)}

    def _processes(self) -> Iterator[ProcessStatistics]:
        now_s = self._clock.monotonic_s()
        for process, (at_s, report) in sorted(self._reports.items()):
            age_s = now_s - at_s if process in self._running else 0.0
            yield ProcessStatistics(process, report.statistics.state, age_s)


def leave_other_processes(job: Job) -> None:
    """Let the job not wait for the followers of other processes at the end, because a process was lost."""
    job._running &= {0}
    if not job._running:
        job._all_ended.set()
