"""The jobs of the other processes of a run: how they stop, fail and end together with the job of process 0.

Process 0 speaks for the run: its job is stopped, and has the statistics and the error of all. It has an
:class:`OtherJobs`. The job of each other process has a :class:`FirstJob`. They send these messages:

==============  ================================================================================================
``stop``        to the others: a mode, ``drain`` or ``abort``
``statistics``  to process 0: a :class:`Report`, before records flow and then once a second
``job ended``   to process 0: the last report of a job that has closed its steps, and its error or None
==============  ================================================================================================

Messages of one process arrive in order, so after the meeting of all processes process 0 knows all tasks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

import msgspec

from streamiter.channels import ChannelStatistics
from streamiter.clock import Clock
from streamiter.deferred import PlainValue
from streamiter.runtime.failures import error_from_plain, error_to_plain
from streamiter.runtime.messages import Messages
from streamiter.runtime.placement import Placement
from streamiter.runtime.statistics import JobState, JobStatistics, ProcessStatistics, TaskStatistics

REPORT_EVERY_S: Final = 1.0
"""As often as a person looks; a report of a thousand channels is 200 KB."""


class Report(msgspec.Struct, frozen=True):
    """What a job tells process 0 about itself."""

    statistics: JobStatistics
    """Its statistics, without loops."""
    shares: list[list[Mapping[str, int]]]
    """For each loop: the shares of its members in this process."""


@final
class FirstJob:
    """The job of process 0, seen from the job of another process."""

    def __init__(self, messages: Messages, stop: Callable[[str], None]) -> None:
        """``stop`` is called with the mode when process 0 stops the run."""
        self._messages = messages
        messages.handle("stop", lambda process, mode: stop(mode))

    def report(self, report: Report) -> None:
        """Tell the statistics."""
        self._messages.send(0, "statistics", msgspec.msgpack.encode(report))

    async def report_regularly(self, clock: Clock, report: Callable[[], Report]) -> None:
        """Tell the statistics once a second."""
        while True:
            await clock.sleep(REPORT_EVERY_S)
            self.report(report())

    def report_end(self, report: Report, error: BaseException | None) -> None:
        """Tell that the job has ended. No report follows."""
        plain = None if error is None else error_to_plain(error)
        self._messages.send(0, "job ended", msgspec.msgpack.encode(report), plain)


@final
class OtherJobs:
    """The jobs of all other processes, seen from the job of process 0."""

    def __init__(self, messages: Messages, placement: Placement, clock: Clock, end: Callable[[], None]) -> None:
        """``end`` is called when one of them has failed or was aborted, so that process 0 ends, too."""
        self._messages = messages
        self._clock = clock
        self._end = end
        self._running = set(range(1, placement.processes))
        self._all_ended = asyncio.Event()
        self._errors: list[BaseException] = []
        """The errors of all processes, in the order of their arrival."""
        self._reports: dict[int, tuple[float, Report]] = {}
        """The last report of each process, and when it has arrived."""
        heads = (step for step in placement.steps if step.chained_to is None)
        names = (f"{step.description.name}[{subtask}]" for step in heads for subtask in range(len(step.processes)))
        self._places = {name: place for place, name in enumerate(names)}
        self._unpack = msgspec.msgpack.Decoder(Report).decode
        messages.handle("statistics", self._report)
        messages.handle("job ended", self._job_ended)

    def _report(self, process: int, report: bytes) -> None:
        self._reports[process] = self._clock.monotonic_s(), self._unpack(report)

    def _job_ended(self, process: int, report: bytes, error: PlainValue) -> None:
        self._report(process, report)
        self._running.discard(process)
        if error is not None:
            self._errors.append(error_from_plain(error))
        if self._reports[process][1].statistics.state in ("failed", "aborted"):
            self._end()
        if not self._running:
            self._all_ended.set()

    # -- the end ---------------------------------------------------------------------------------------

    def stop(self, mode: str) -> None:
        """Stop the jobs that have not ended."""
        for process in self._running:
            self._messages.send(process, "stop", mode)

    def failed(self, error: BaseException) -> None:
        """End the run, because a step in process 0 has failed."""
        self._errors.append(error)
        self.stop("abort")

    async def ended(self, state: JobState, error: BaseException | None) -> tuple[JobState, BaseException | None]:
        """Wait until all jobs have ended; return the state and the error of the run.

        ``state`` and ``error`` are those of process 0. The error is the first that has arrived; the others are notes.
        """
        if error is not None and error not in self._errors:
            self._errors.append(error)
        if state in ("failed", "aborted"):
            self.stop("abort")
        await self._all_ended.wait()
        if self._errors:
            first, *others = self._errors
            for other in others:
                first.add_note(f"then: {other}")
            return "failed", first
        states = {report.statistics.state for _, report in self._reports.values()}
        return next((worse for worse in ("failed", "aborted", "suspended") if worse in (state, *states)), state), None

    # -- statistics ------------------------------------------------------------------------------------

    def shares(self, loop: int) -> list[Mapping[str, int]]:
        """Return the shares of the other processes in the statistics of a loop."""
        return [share for _, report in self._reports.values() for share in report.shares[loop]]

    def joined(self, own: JobStatistics) -> JobStatistics:
        """Return the statistics of the run; ``own`` are those of process 0, with the loops."""
        parts = [own, *(report.statistics for _, report in self._reports.values())]
        tasks = _joined_halves([task for part in parts for task in part.tasks])
        return replace(
            own,
            tasks=tuple(sorted(tasks, key=lambda task: self._places[task.name])),
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
