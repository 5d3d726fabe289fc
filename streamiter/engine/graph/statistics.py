"""The statistics of a job: frozen pictures of the job, its tasks, loops and checkpoints at one moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final, Literal

from streamiter.engine.graph.channels import ChannelStatistics
from streamiter.engine.graph.feedback import FeedbackStatistics
from streamiter.errors import did_you_mean
from streamiter.operators.operator import OperatorStatistics
from streamiter.operators.output import RejectionPolicy
from streamiter.values.helpers.notebooks import html_table, text_table, without_empty_columns

JobState = Literal["running", "finished", "suspended", "aborted", "failed"]
"""``finished``: the inputs have ended or were drained; ``suspended``: stopped between two batches; ``aborted``: stopped
at once; ``failed``: ended by an error."""

REPORT_EVERY_S: Final = 1.0
"""A process reports to process 0 as often as a person looks; a report of a thousand channels is 200 KB."""

STEP_COLUMNS: Final = ("step", "in", "out", "in/s", "epoch", "rejected", "late", "kept", "waiting", "lag", "process")
"""The columns of ``JobStatistics.step_rows``."""


@dataclass(frozen=True, slots=True)
class HistogramStatistics:
    """How often a quantity was at most each of some bounds."""

    bounds: tuple[float, ...]
    """The upper bounds, ascending."""
    counts: tuple[int, ...]
    """The number of observations up to each bound; one more, the last, is the number of all observations."""
    total: float
    """The sum of all observations."""


class Histogram:
    """Counts observations in buckets with fixed upper bounds, as Prometheus does; its memory does not grow.

    >>> seconds = Histogram((0.1, 1.0))
    >>> for observed in (0.05, 0.1, 0.5, 7.0):
    ...     seconds.observe(observed)
    >>> seconds.statistics().counts
    (2, 3, 4)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def statistics(self) -> HistogramStatistics:
        """Return the counts so far."""
        return HistogramStatistics(self._bounds, tuple(accumulate(self._counts)), self._total)


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One operator in one subtask."""

    step: str
    """The name of the step."""
    subtask: int
    """The number of the subtask, from 0."""
    policy: RejectionPolicy
    """What happens to a record that the step refuses."""
    counts: OperatorStatistics
    """The records and batches that it has handled."""
    late: int = 0
    """For windows and joins by time: the late records since the start."""
    kept: int = 0
    """For windows: how many are open. For joins by time: the records that wait, or that may still be needed. For
    trainings: the questions whose label is not known."""


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """The source of a task."""

    topic: str | None
    """The name of the topic; None for a source that reads no topic."""
    answered_at_ms: int | None
    """When the last answer of the server was complete, also an empty one, in milliseconds since 1970-01-01 UTC. Now, if
    no answer is owed. None: the source was never open."""
    unanswered_s: float
    """The seconds for which the server has owed an answer; 0 if none is owed."""
    lag_s: dict[str, float]
    """By partition: the age of the record read last, by its time stamp; 0 if no more are known, and left out if no time
    stamp is."""
    read_records: int | None = None
    """About how many records a source that ends has read since its first start; the lag is what is left. None: it does
    not end, or is not known."""
    brings_events: bool = True
    """Whether its records are events; False for records that only pass through the flow."""


@dataclass(frozen=True, slots=True)
class TaskStatistics:
    """One task: a chain of operators in one subtask."""

    name: str
    """The name of the first step, with the number of the subtask."""
    steps: tuple[StepStatistics, ...]
    """The operators of the chain, in order."""
    loop: int | None
    """The index of the task's iteration among the ``loops`` of the job; None for a task outside of all iterations."""
    epoch_watermark: int
    """The last complete epoch; below 0 before the first epoch is complete."""
    inputs: tuple[ChannelStatistics, ...]
    """The channels that the task reads."""
    outputs: tuple[ChannelStatistics, ...]
    """The channels that the task writes."""
    waiting_records: int
    """Emitted records that wait for room in these channels."""
    feedback: tuple[FeedbackStatistics, ...]
    """The channels of feedback edges that the task reads."""
    held_records: int
    """Records that were taken from channels and not handled: not wanted now, before their turn, or rests of batches."""
    blocked_s: float
    """The seconds that the task has waited for room in channels."""
    busy_s: float
    """The seconds that the task has handled batches and control records; what it awaits meanwhile counts."""
    held_s: float
    """The seconds that the task has waited although it had input: not wanted yet, or before its turn."""
    source: SourceStatistics | None
    """The source, if the task reads one."""
    lag: dict[str, int]
    """For a source: unread records by partition. The number of the partition is text, as JSON requires of keys."""
    is_paused: bool
    """For a source: whether it does not read now, because a step downstream holds more records than channels do."""
    ended: bool
    """Whether the task has ended."""
    process: int = 0
    """The number of the process that the task is in."""
    event_time: int | None = None
    """The event-time watermark that the task has passed on, in milliseconds since 1970-01-01 UTC; None for none."""
    event_time_lag_s: float | None = None
    """How far the clock is ahead of it, in seconds; None without a watermark, and at the end of the input."""
    event_time_held_by: str | None = None
    """Who holds the watermark back: a partition, a channel, or a step of the task that keeps records."""
    waits_for: str | None = None
    """For a join that waits for its table: the channels that have not brought the table yet, in words."""
    late_records: int = 0
    """For a task where event time begins: records that were below the watermark when they arrived."""


@dataclass(frozen=True, slots=True)
class StalledTask:
    """A task that has work, and has made no progress for the time after which the watchdog warns."""

    name: str
    """The name of the task."""
    reason: str
    """Why it waits, in words."""
    stalled_s: float
    """The seconds without progress."""
    cause: Literal["held", "topic", "step"]
    """``held``: it has input that it does not want yet. ``topic``: a topic takes no records from it, or from a
    task that it waits for. ``step``: neither, so a step hangs."""
    process: int = 0
    """The number of the process that the task is in."""
    is_at_work: bool = False
    """Whether it handles a batch, so that it waits for no other task."""


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """Consecutive rounds of a loop with the same number of records."""

    first_epoch: int
    """The epoch of the first of these rounds."""
    last_epoch: int
    """The epoch of the last of these rounds."""
    records: int
    """Records that were fed back in each of these rounds."""


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """One iteration, all subtasks together.

    An epoch is reached when its first record is fed back. It is received when its last record is back at every head,
    and complete when the data has passed it, too.
    """

    heads: tuple[str, ...]
    """The names of the steps where variable streams enter the loop."""
    epoch_reached: int
    """The last epoch that was reached; 0 before any feedback."""
    epoch_received: int
    """The last epoch that was received; below 0 before the first, whose feedback is the initial variables."""
    epoch_complete: int
    """The last complete epoch; below 0 before the first."""
    ended_in: int | None
    """The epoch in which the iteration has ended, or None."""
    end_reason: str | None
    """The reason why the iteration has ended in this epoch, or None."""
    fed_back_records: int
    """Records that were fed back since the start."""
    criteria_records: int
    """Records of the termination criteria since the start."""
    rounds: tuple[RoundStatistics, ...]
    """The complete epochs with feedback. If very many of them differ, the last thousand."""
    waiting_records: int
    """Records of the feedback that no head has taken."""
    held_records: int
    """Records that heads have taken, and hold until the records of earlier epochs are received."""
    bytes_in_memory: int
    """The estimated size of the waiting and held records that are in memory."""
    bytes_on_disk: int
    """The size of the files with the other waiting and held records."""
    replayed_records: int
    """Records that are kept to be sent again in each epoch."""
    replayed_bytes_in_memory: int
    """The estimated size of the replayed records that are in memory."""
    replayed_bytes_on_disk: int
    """The size of the files with the other replayed records."""

    @property
    def progress(self) -> str:
        """The progress of the iteration in words."""
        if self.ended_in is not None:
            return f"ended in epoch {self.ended_in:,}"
        return f"epoch {self.epoch_complete:,} complete" if self.epoch_complete >= 0 else "no epoch complete"


@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """One of several processes that run a flow."""

    process: int
    """The number of the process."""
    state: JobState
    """Whether its part of the job is running, or how it has ended."""
    age_s: float
    """The seconds since the numbers of its tasks have arrived in process 0; 0 if they are final."""


@dataclass(frozen=True, slots=True, repr=False)
class JobStatistics:
    """A job at one moment; ``print`` and notebooks show a table of it.

    If several processes run the flow, the statistics of process 0 are those of all.

    ``dataclasses.asdict`` turns it into plain dicts, texts and finite numbers, which are a JSON document.

    >>> import dataclasses, json
    >>> from streamiter import Flow
    >>> flow = Flow("squares")
    >>> squares = flow.from_items([1, 2, 3]).map(lambda x: x * x).collect()
    >>> document = json.loads(json.dumps(dataclasses.asdict(flow.run())))
    >>> document["state"], document["tasks"][0]["steps"][1]["counts"]["records_out"]
    ('finished', 3)
    """

    flow: str
    """The name of the flow."""
    state: JobState
    """Whether the job is running, or how it has ended."""
    elapsed_s: float
    """The seconds since the job was started."""
    tasks: tuple[TaskStatistics, ...]
    """The tasks of the job, sources first."""
    loops: tuple[LoopStatistics, ...]
    """The iterations, in the order in which they were built."""
    checkpoints: CheckpointStatistics | None = None
    """The checkpoints of the job, if it takes any."""
    stalled: tuple[StalledTask, ...] = ()
    """The tasks without progress, at the last look of the watchdog."""
    parameter_servers: dict[str, Any] = field(default_factory=dict)
    """The parameter servers of the steps, by name: a ``ParameterServerStatistics`` for each."""
    processes: tuple[ProcessStatistics, ...] = ()
    """The processes, if there are several. Those other than 0 report once a second."""

    def processes_of(self, step: str) -> str:
        """Return the numbers of the processes that the subtasks of a step are in, as 0, 2 or 0–7; empty for one."""
        numbers = sorted({task.process for task in self.tasks if any(one.step == step for one in task.steps)})
        if not self.processes or not numbers:
            return ""
        first, last = numbers[0], numbers[-1]
        if last - first == len(numbers) - 1 > 0:
            return f"{first}–{last}"
        return ", ".join(map(str, numbers))

    @property
    def title(self) -> str:
        """The flow, the state and the time of the job, in a line."""
        silent = [
            f", process {one.process} silent for {one.age_s:.0f} s"
            for one in self.processes
            if one.age_s >= 3 * REPORT_EVERY_S
        ]
        waiting = dict.fromkeys(task.steps[0].step for task in self.tasks if task.waits_for)
        told = silent + [f", {step} waits for its table" for step in waiting]
        return f"{self.flow}: {self.state}, {self.elapsed_s:.1f} s{''.join(told)}"

    def step_rows(self, since: JobStatistics | None = None) -> list[tuple[str, ...]]:
        """Return the texts of a table: a row for each step, with all its subtasks. Rates start at ``since``."""
        seconds = max(self.elapsed_s - (since.elapsed_s if since else 0.0), 1e-9)
        rows = []
        for name in dict.fromkeys(step.step for task in self.tasks for step in task.steps):
            counts = self.step(name)
            before = since.step(name).records_in if since else 0
            tasks = [task for task in self.tasks if any(step.step == name for step in task.steps)]
            heads = [task for task in tasks if task.steps[0].step == name]
            waiting = sum(channel.records for task in heads for channel in task.inputs)
            fed_back = sum(channel.records for task in heads for channel in task.feedback)
            lag = sum(sum(task.lag.values()) for task in heads)
            epoch = min(task.epoch_watermark for task in tasks)
            own = [step for task in tasks for step in task.steps if step.step == name]
            late, kept = sum(step.late for step in own), sum(step.kept for step in own)
            rows.append(
                (
                    name,
                    _count(counts.records_in),
                    f"{counts.records_out:,}",
                    _count(round((counts.records_in - before) / seconds)),
                    f"{epoch:,}" if epoch >= 0 else "",
                    *map(_count, (counts.rejected, late, kept, waiting + fed_back, lag)),
                    self.processes_of(name),
                )
            )
        return rows

    def __repr__(self) -> str:
        table = text_table(*without_empty_columns(STEP_COLUMNS, self.step_rows()))
        return "\n".join(filter(None, [self.title, table, *(stalled.reason for stalled in self.stalled)]))

    def _repr_html_(self) -> str:
        """Return a table of the steps, for notebooks."""
        table = without_empty_columns(STEP_COLUMNS, self.step_rows())
        return html_table(self.title, *table, [stalled.reason for stalled in self.stalled])

    def step(self, name: str) -> OperatorStatistics:
        """Return the counts of a step, all subtasks together. Raises KeyError if no step has this name."""
        counts = [step.counts for task in self.tasks for step in task.steps if step.step == name]
        if not counts:
            known = dict.fromkeys(step.step for task in self.tasks for step in task.steps)
            raise KeyError(f"no step {name!r}; there are {', '.join(known)}{did_you_mean(name, known)}")
        return OperatorStatistics(
            records_in=sum(count.records_in for count in counts),
            batches_in=sum(count.batches_in for count in counts),
            records_out=sum(count.records_out for count in counts),
            rejected=sum(count.rejected for count in counts),
        )


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """The checkpoints of a job at one moment."""

    run: str
    """The run of the job, which takes the checkpoints."""
    durations_s: HistogramStatistics
    """The seconds from the barrier to the commit, of all checkpoints of this run."""
    restored: int | None = None
    """The checkpoint from which this run was restored, or None."""
    committed: int | None = None
    """The last committed checkpoint, or None."""
    taken: int = 0
    """The number of checkpoints that this run has committed."""
    given_up: int = 0
    """The number of checkpoints that this run has abandoned: too slow, or no room in the store."""
    last_duration_s: float = 0.0
    """The seconds from the barrier to the commit of the last checkpoint."""
    last_alignment_s: float = 0.0
    """The part of these seconds until all steps had given their state."""
    last_size_bytes: int = 0
    """The size of the last snapshot in the store."""
    committed_at_ms: int | None = None
    """When this run has committed its last checkpoint, in milliseconds since 1970-01-01 UTC; None before its first."""
    committed_after_s: float = 0.0
    """The seconds from the start of the job to this commit, or, before the first one, until its state was restored."""


def joined_halves(tasks: Sequence[TaskStatistics]) -> Iterator[TaskStatistics]:
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
