"""The other jobs of a run in several processes: how all of them start, stop, fail and end together.

Each job has an :class:`OtherJobs`. Process 0 leads, and speaks for the run: its job is stopped, and has the statistics
and the error of all. There it is a :class:`LedJobs`; in each other process, a :class:`LeadingJob`. They send these
messages:

==============  ================================================================================================
``stop``        to the others: a mode, ``drain`` or ``abort``
``statistics``  to process 0: a :class:`Report`, before records flow and then once a second
``job ended``   to process 0: the last report of a job that has closed its steps, and its error or None
==============  ================================================================================================

Messages of one process arrive in order, so when all steps are open, process 0 knows all tasks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import msgspec

from streamiter.channels import ChannelStatistics
from streamiter.clock import Clock
from streamiter.closing import note_unclosed
from streamiter.deferred import PlainValue
from streamiter.runtime.failures import error_from_plain, error_to_plain
from streamiter.runtime.job_settings import OwnProcess
from streamiter.runtime.messages import Meeting, Messages
from streamiter.runtime.placement import Placement
from streamiter.runtime.statistics import REPORT_EVERY_S, JobState, JobStatistics, ProcessStatistics, TaskStatistics


class Report(msgspec.Struct, frozen=True):
    """What a job tells process 0 about itself."""

    statistics: JobStatistics
    """Its statistics, without loops."""
    shares: list[list[Mapping[str, int]]]
    """For each loop: the shares of its members in this process."""
    owed_s: float
    """For how long a server of an output has owed an answer; 0 if none does."""


class OtherJobs:
    """The other jobs of the run, seen from the job of one process; in a run of one process there are none."""

    def __init__(self, meeting: Meeting | None = None) -> None:
        self._meeting = meeting

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return self._meeting is not None

    async def reach(self, point: str) -> None:
        """Wait until the jobs of all processes have reached this point."""
        if self._meeting is not None:
            await self._meeting.reach(point)

    def report(self) -> None:
        """Tell process 0 the statistics of this job."""

    def report_regularly(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Tell process 0 the statistics once a second; return the tasks that do it until they are cancelled."""
        return []

    def report_end(self, error: BaseException | None) -> None:
        """Tell process 0 that this job has ended. No report follows."""

    def stop(self, mode: str) -> None:
        """Stop the jobs that have not ended; only process 0 can."""

    def failed(self, error: BaseException) -> None:
        """End the run, because a step in process 0 has failed."""

    def lost(self) -> None:
        """Wait for no other job: a process was lost."""

    async def ended(self, state: JobState, error: BaseException | None) -> tuple[JobState, BaseException | None]:
        """In process 0, wait until all jobs have ended; return the state and the error of the run.

        ``state`` and ``error`` are those of this job. The error is the first that has arrived; the others are notes.
        """
        return state, error

    def shares(self, loop: int) -> list[Mapping[str, int]]:
        """Return the shares of the other processes in the statistics of a loop, in process 0."""
        return []

    def owed_s(self) -> float:
        """Return for how long a server of an output of another process has owed an answer, in process 0."""
        return 0.0

    def joined(self, own: JobStatistics) -> JobStatistics:
        """Return the statistics of the run in process 0; ``own`` are those of this job."""
        return own


def other_jobs(
    own: OwnProcess, clock: Clock, report: Callable[[], Report], abort: Callable[[], None], stop: Callable[[str], None]
) -> OtherJobs:
    """Return the other jobs of the run, for the job of this process.

    ``abort`` ends this job after another has failed; ``stop`` is called with the mode when process 0 stops the run.
    """
    placement, messages = own.placement, own.messages
    if messages is None or placement.processes == 1:
        return OtherJobs()
    meeting = Meeting(messages, own.number, placement.processes)
    if own.number:
        return LeadingJob(meeting, messages, clock, report, stop)
    return LedJobs(meeting, messages, placement, clock, abort)


@final
class LeadingJob(OtherJobs):
    """The job of process 0, which leads, seen from the job of another process."""

    def __init__(
        self,
        meeting: Meeting,
        messages: Messages,
        clock: Clock,
        report: Callable[[], Report],
        stop: Callable[[str], None],
    ) -> None:
        super().__init__(meeting)
        self._messages = messages
        self._clock = clock
        self._own_report = report
        messages.handle("stop", lambda process, mode: stop(mode))

    def report(self) -> None:
        self._messages.send(0, "statistics", msgspec.msgpack.encode(self._own_report()))

    def report_regularly(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        return [group.create_task(self._report_regularly(), name="reports")]

    async def _report_regularly(self) -> None:
        while True:
            await self._clock.sleep(REPORT_EVERY_S)
            self.report()

    def report_end(self, error: BaseException | None) -> None:
        plain = None if error is None else error_to_plain(error)
        self._messages.send(0, "job ended", msgspec.msgpack.encode(self._own_report()), plain)


@final
class LedJobs(OtherJobs):
    """The jobs of all other processes, seen from the job of process 0, which leads."""

    def __init__(
        self, meeting: Meeting, messages: Messages, placement: Placement, clock: Clock, abort: Callable[[], None]
    ) -> None:
        super().__init__(meeting)
        self._messages = messages
        self._clock = clock
        self._abort = abort
        self._running = set(range(1, placement.processes))
        self._all_ended = asyncio.Event()
        self._errors: list[BaseException] = []
        """The errors of all processes, in the order of their arrival."""
        self._reports: dict[int, tuple[float, Report]] = {}
        """The last report of each process, and when it has arrived."""
        heads = (step for step in placement.steps if step.chained_to is None)
        names = (f"{step.description.name}[{subtask}]" for step in heads for subtask in range(len(step.processes)))
        self._order = {name: number for number, name in enumerate(names)}
        """The number of each task in the statistics."""
        self._unpack = msgspec.msgpack.Decoder(Report).decode
        messages.handle("statistics", self._reported)
        messages.handle("job ended", self._job_ended)

    def _reported(self, process: int, report: bytes) -> None:
        self._reports[process] = self._clock.monotonic_s(), self._unpack(report)

    def _job_ended(self, process: int, report: bytes, error: PlainValue) -> None:
        self._reported(process, report)
        self._running.discard(process)
        if error is not None:
            self._errors.append(error_from_plain(error))
        if self._reports[process][1].statistics.state in ("failed", "aborted"):
            self._abort()
        if not self._running:
            self._all_ended.set()

    # -- the end ---------------------------------------------------------------------------------------

    def stop(self, mode: str) -> None:
        for process in self._running:
            self._messages.send(process, "stop", mode)

    def failed(self, error: BaseException) -> None:
        self._errors.append(error)
        self.stop("abort")

    def lost(self) -> None:
        self._all_ended.set()

    async def ended(self, state: JobState, error: BaseException | None) -> tuple[JobState, BaseException | None]:
        if error is not None and error not in self._errors:
            self._errors.append(error)
        if state in ("failed", "aborted"):
            self.stop("abort")
        await self._all_ended.wait()
        if self._errors:
            first, *others = self._errors
            note_unclosed(first, others)
            return "failed", first
        states = {report.statistics.state for _, report in self._reports.values()}
        return next((worse for worse in ("failed", "aborted", "suspended") if worse in (state, *states)), state), None

    # -- statistics ------------------------------------------------------------------------------------

    def shares(self, loop: int) -> list[Mapping[str, int]]:
        return [share for _, report in self._reports.values() for share in report.shares[loop]]

    def owed_s(self) -> float:
        return max((report.owed_s for _, report in self._reports.values()), default=0.0)

    def joined(self, own: JobStatistics) -> JobStatistics:
        parts = [own, *(report.statistics for _, report in self._reports.values())]
        tasks = _joined_halves([task for part in parts for task in part.tasks])
        return replace(
            own,
            tasks=tuple(sorted(tasks, key=lambda task: self._order[task.name])),
            stalled=tuple(stalled for part in parts if part.state == "running" for stalled in part.stalled),
            processes=(ProcessStatistics(0, own.state, 0.0), *self._processes()),
        )

    def _processes(self) -> Iterator[ProcessStatistics]:
        now_s = self._clock.monotonic_s()
        for process, (at_s, report) in sorted(self._reports.items()):
            age_s = now_s - at_s if process in self._running else 0.0
            yield ProcessStatistics(process, report.statistics.state, age_s)


def _joined_halves(tasks: Sequence[TaskStatistics]) -> Iterator[TaskStatistics]:
    """Give the tasks; of a channel between two processes, both ends have the same numbers.

    The producer's half knows what is on its way, and the consumer's half what is set aside. When the consumer has
    ended, its half knows that all was taken; the report of it may not have reached the producer.
    """
    departing = {key: (task, half) for task in tasks for key, half in _by_name(task.outputs)}
    joined: dict[tuple[str, int], ChannelStatistics] = {}
    for task in tasks:
        for key, half in _by_name(task.inputs):
            producer, channel = departing.get(key, (task, half))
            if producer.process != task.process:
                known = half if task.ended else channel
                joined[key] = replace(
                    channel,
                    records=known.records,
                    size_bytes=known.size_bytes,
                    aside_records=half.aside_records,
                    aside_bytes=half.aside_bytes,
                )
    for task in tasks:
        inputs, outputs = (
            tuple(joined.get(key, half) for key, half in _by_name(halves)) for halves in (task.inputs, task.outputs)
        )
        yield replace(task, inputs=inputs, outputs=outputs)


def _by_name(channels: Iterable[ChannelStatistics]) -> Iterator[tuple[tuple[str, int], ChannelStatistics]]:
    """Give each channel with a key: its name, and its number among the channels of this name of a task.

    Two edges between the same steps have channels of equal names, in the same order at both ends.
    """
    seen: Counter[str] = Counter()
    for channel in channels:
        yield (channel.name, seen[channel.name]), channel
        seen[channel.name] += 1
