"""Everything that is known about a running service: :class:`Observations`.

Steps of the flow and the runner write to it. Health, metrics, the page and the log only read from it, in the event loop
of the job. Every list has a fixed length.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final, Literal

from streamiter.engine.graph.statistics import CheckpointStatistics, Histogram, JobState, JobStatistics, TaskStatistics
from streamiter.errors import shortened
from streamiter.models.update import learner_in
from streamiter.models.versions import ModelVersion
from streamiter.operators import DeadLetter, Origin
from streamiter.service.observing.quality import ModelQuality
from streamiter.service.settings.tables import HealthSettings
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.origins import BatchOrigin

if TYPE_CHECKING:
    from streamiter.engine.job.job import Job
    from streamiter.models import ModelUpdate, ServedModel
    from streamiter.service.observing.challenger import Challenger
    from streamiter.service.observing.prediction_log import PredictionLog

_log = logging.getLogger("streamiter.service")

Phase = JobState | Literal["starting", "restoring", "waiting", "stopping", "following"]
"""The state of the job, or ``starting``: it opens its topics; ``restoring``: it reads the state of a checkpoint;
``waiting``: it has ended by an outage of a topic, and starts again soon; ``stopping``: a signal has told it to stop;
``following``: a replica or a standby, which has no job."""

ProcessRole = Literal["service", "leader", "standby", "replica"]
"""What the process is for: ``service``: it learns, and no other process does; ``leader``: it learns, and a standby
would take over; ``standby``: it predicts, and would take over from the leader; ``replica``: it predicts."""

# An hour of samples, at one a second: what the charts of the page show. A longer history is kept by Prometheus.
HISTORY: Final = 3_600
SAMPLE_S: Final = 1.0
# The rate of a minute: files are read in bursts, and a checkpoint takes a second.
_RATE_SAMPLES: Final = 60
# The newest dead letters are for reading; all of them are in their topic.
REJECTED_MAX: Final = 50
CHECKPOINTS_MAX: Final = 20
VERSIONS_MAX: Final = 20
# Weights of now are compared with those of one to two minutes ago: at each second, few would have moved.
_COMPARED_MS: Final = 60_000
# The loop is asked ten times a second, so that a delay of a tenth of a second is seen at its full length.
_TICK_S: Final = 0.1
# A loop that is late by more is blocked; below, a garbage collection or a busy machine is the usual reason.
_BLOCKED_S: Final = 1.0
LOOP_LAG_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PREDICTION_BOUNDS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0, 10.0)


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The phase of the service, and why and since when it has this phase."""

    phase: Phase
    reason: str | None
    """Why, for instance the error of a failed job; None where the name of the phase says it."""
    since_ms: int
    """When the phase began, in milliseconds since 1970-01-01 UTC."""
    since_s: float
    """When the phase began, by the monotonic clock."""


@dataclass(frozen=True, slots=True)
class TaskRates:
    """The work of a task since the sample before; the four shares have the sum 1."""

    task: str
    """The name of the first step, with the number of the subtask."""
    steps: tuple[str, ...]
    """The steps of the task, in order."""
    steps_per_s: tuple[float, ...]
    """The records that each of these steps has received, in a second."""
    busy: float
    """The share of time in which the task handled records."""
    blocked: float
    """The share of time in which it waited for room downstream."""
    held: float
    """The share of time in which it had input that it did not want yet: of a later epoch, or because of staleness."""
    idle: float
    """The share of time in which it waited for input."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Rates since the sample before, and the lag now. None: not known."""

    at_ms: int
    """Milliseconds since 1970-01-01 UTC."""
    events_per_s: float | None
    """Records that the sources have brought."""
    lag_records: int | None
    """Unread records of all topics."""
    lag_s: float | None
    """The age of the oldest record read last by a source that has more to read; 0 without unread records."""


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """How far the history has been read that comes before the topic.

    >>> HistoryRead(0.431, 130.0).shown, HistoryRead(None, None).shown
    ('catching up: 43 % of the history, about 2 min left', 'catching up: the history')
    """

    share: float | None
    """The share of its records that was read; None while its size is not known."""
    left_s: float | None
    """The seconds that the rest takes at the rate of the last minute; None while that is not known."""

    @property
    def shown(self) -> str:
        """The progress in words."""
        share = "" if self.share is None else f"{int(100 * self.share)} % of "
        return f"catching up: {share}the history{'' if self.left_s is None else f', {_about(self.left_s)} left'}"


def _about(seconds: float) -> str:
    """Return a time in words.

    >>> [_about(seconds) for seconds in (7, 150, 9000)]
    ['about 7 s', 'about 2 min', 'about 2.5 h']
    """
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6_000 else f"about {seconds / 3600:.1f} h"


class HistoryProgress:
    """How far a history has been read, and how long the rest takes, from what was read and left at each sample.

    >>> progress = HistoryProgress()
    >>> progress.seen(0.0, read=300, left=2700).shown, progress.seen(20.0, read=1290, left=1710).shown
    ('catching up: 10 % of the history', 'catching up: 43 % of the history, about 35 s left')
    """

    def __init__(self) -> None:
        self._left: deque[tuple[float, int]] = deque(maxlen=_RATE_SAMPLES)

    def seen(self, now_s: float, read: int, left: int) -> HistoryRead:
        """Note how many records are read and left at a time."""
        if not read:  # Files tell what is left when the first record was read.
            return HistoryRead(None, None)
        self._left.append((now_s, left))
        since_s, left_then = self._left[0]
        per_s = (left_then - left) / (now_s - since_s) if now_s > since_s else 0.0
        return HistoryRead(read / (read + left), left / per_s if per_s > 0 else None)


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A record that a step has refused: it was skipped, or became a dead letter."""

    at_ms: int
    step: str
    error: str
    value: str
    """The record, cut."""
    topic: str | None
    """The URL of the topic without its secrets; None where it is not known."""
    partition: int | None
    offset: int | None
    """The offset of the record, or the first one of its batch."""


@dataclass(frozen=True, slots=True)
class CheckpointSeen:
    """A committed checkpoint; of several in a second the last one."""

    number: int
    committed_at_ms: int
    duration_s: float
    """The seconds from the barrier to the commit."""
    size_bytes: int
    """The size of the snapshot in the store."""


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """A time in which the event loop did not turn."""

    seconds: float
    task: str | None
    """The task that worked most in this time; None if none did."""
    ended_s: float
    """When the loop turned again, by the monotonic clock."""


class LoopLag:
    """How late the event loop is: it is asked for a turn ten times a second.

    ``limit_s`` returns the longest time that the loop may be blocked, ``at_work`` the task that worked most lately.
    """

    def __init__(self, clock: Clock, limit_s: Callable[[], float], at_work: Callable[[], str | None]) -> None:
        self._clock, self._limit_s, self._at_work = clock, limit_s, at_work
        self.too_long: LoopBlock | None = None
        """The last block above the limit: the loop itself can be asked only when it turns again."""
        self.turned_at_s = clock.monotonic_s()
        """When the loop turned last."""
        self.histogram = Histogram(LOOP_LAG_BOUNDS_S)
        """All delays, in seconds."""

    async def run(self, on_block: Callable[[LoopBlock], None]) -> None:
        """Measure until cancelled; call ``on_block`` with each delay above one second, or above the limit."""
        while True:
            await self._clock.sleep(_TICK_S)
            lag_s, limit_s = self.blocked_s, self._limit_s()
            self.turned_at_s = self._clock.monotonic_s()
            if lag_s > min(_BLOCKED_S, limit_s):
                block = LoopBlock(lag_s, self._at_work(), self.turned_at_s)
                if lag_s > limit_s:
                    self.too_long = block
                on_block(block)
            self.histogram.observe(lag_s)

    @property
    def blocked_s(self) -> float:
        """By how many seconds the loop is late now."""
        return max(0.0, self._clock.monotonic_s() - self.turned_at_s - _TICK_S)


class Observations:
    """All that is known about a service. Surfaces read it; only the service and its steps call its methods.

    >>> observations = Observations("late-flights")
    >>> observations.enter("restoring")
    >>> observations.phase.phase, observations.statistics(), observations.model
    ('restoring', None, None)
    """

    def __init__(
        self,
        name: str,
        *,
        limits: HealthSettings | None = None,
        checkpoint_interval_s: float | None = None,
        clock: Clock | None = None,
        role: ProcessRole = "service",
    ) -> None:
        self.name = name
        """The name of the service, of its flow and of its model."""
        self.role = role
        """What the process is for; that of a leader, and of its standbys, changes."""
        self.limits = limits or HealthSettings()
        """The limits of ``/livez`` and ``/readyz``."""
        self.checkpoint_interval_s = checkpoint_interval_s
        """The interval of checkpoints; None without checkpoints."""
        self.clock = clock or SystemClock()
        self.started_at_ms, self.started_s = self.clock.now_ms(), self.clock.monotonic_s()
        self.phase = self._phase("starting", None)
        self.job: Job | None = None
        """The job that runs, or ran last."""
        self.served: ServedModel | None = None
        """Follows the published model; None before the service has started."""
        self.challenger: Challenger | None = None
        """Follows the challenger, and says for which rows it answers; None if there is none."""
        self.loop_lag = LoopLag(self.clock, lambda: self.limits.loop_limit_s, self.busiest_task)
        self.samples: deque[Sample] = deque(maxlen=HISTORY)
        """One each second, oldest first, as all the lists here."""
        self.history_steps: Collection[str] = ()
        """The sources of histories that come before their topics."""
        self.catching_up: HistoryRead | None = None
        """How far it has been read, at the last sample; None when it is read."""
        self._history = HistoryProgress()
        self.rates: tuple[TaskRates, ...] = ()
        """The work of each task at the last sample; empty while it is not known."""
        self.quality = ModelQuality(self.clock, HISTORY)
        """How good its predictions are, and which fields have shifted."""
        self.rejected: deque[RejectedRecord] = deque(maxlen=REJECTED_MAX)
        self._refusing = set[str]()
        self.versions: deque[ModelVersion] = deque(maxlen=VERSIONS_MAX)
        """Those that were read from the topic; of several in a second the last one."""
        self.texts_at: Callable[[Collection[int]], dict[int, str]] = lambda _: {}
        """Returns the texts that were read lately, by the places of their weights."""
        self.compared: deque[ModelUpdate] = deque(maxlen=2)
        """The versions that answered one and two minutes ago, to compare weights with."""
        self.checkpoints: deque[CheckpointSeen] = deque(maxlen=CHECKPOINTS_MAX)
        self.prediction_log: PredictionLog | None = None
        """Logs predictions; None: they are not logged."""
        self.predictions: Counter[str] = Counter()
        """The number of rows of requests for predictions, by outcome."""
        self.prediction_s = Histogram(PREDICTION_BOUNDS_S)
        """The seconds of each request for predictions."""
        self.requests: Counter[tuple[str, int]] = Counter()
        """The number of HTTP requests by route and status code."""
        self._before: tuple[Job, float, Sequence[TaskStatistics]] | None = None
        """Of the sample before: the job that ran, the time and the tasks."""

    # -- read --------------------------------------------------------------------------------------------

    def statistics(self) -> JobStatistics | None:
        """Return the statistics of the job now; None before the first job is open."""
        return None if self.job is None else self.job.statistics()

    @property
    def model(self) -> ModelUpdate | None:
        """The version of the model that answers now; None before the first one."""
        return None if self.served is None else self.served.update

    @property
    def seconds_in_phase(self) -> float:
        """How long the service has been in its phase."""
        return self.clock.monotonic_s() - self.phase.since_s

    # -- write -------------------------------------------------------------------------------------------

    def enter(self, phase: Phase, reason: str | None = None) -> None:
        """Note the phase of the service, unless it is in this phase for the same reason."""
        if (self.phase.phase, self.phase.reason) != (phase, reason):
            self.phase = self._phase(phase, reason)

    def follow(self) -> None:
        """Note that the process has no job, or none any more, and predicts with what others publish."""
        self.job = None
        self.quality.forget()
        self.enter("following")

    def validated(self, metrics: dict[str, float], *, learner: str = "") -> None:
        """Note a report of progressive validation; where there is a challenger, of the learner that is served."""
        if self.challenger is not None and self.model is not None and learner_in(self.model.parameters) != learner:
            return
        self.quality.reported(metrics)

    def refused(self, letter: DeadLetter) -> None:
        """Note a record that a step has skipped, or written to a topic of dead letters; threads may call this, too.

        The log has the first one of each step: where a file is wrong, all are refused, and the service learns nothing.
        """
        self.rejected.append(_rejected(letter, self.clock.now_ms()))
        if letter.step not in self._refusing:
            self._refusing.add(letter.step)
            _log.warning("the step %r refuses records; the first one: %s", letter.step, letter.error)

    def requested(self, route: str, code: int) -> None:
        """Count an HTTP request. ``route`` is the pattern of the path, never the path itself."""
        self.requests[route, code] += 1

    def predicted(self, seconds: float, **rows: int) -> None:
        """Note a request for predictions: the seconds that it took, and its rows by outcome."""
        self.predictions.update(rows)
        self.prediction_s.observe(seconds)

    def sample(self) -> JobStatistics | None:
        """Take one sample; return the statistics of the job that runs, if any. The service calls it each second."""
        now_s, at_ms = self.clock.monotonic_s(), self.clock.now_ms()
        self._see_version()
        job = self.job if self.phase.phase in ("running", "stopping") else None
        statistics = None if job is None else job.statistics()
        tasks = () if statistics is None else statistics.tasks
        if statistics is not None and statistics.checkpoints is not None:
            self._see_checkpoint(statistics.checkpoints)
        before, self._before = self._before, None if job is None else (job, now_s, tasks)
        events_per_s = None
        self.rates = ()
        if job is not None and before is not None and before[0] is job:
            seconds = max(now_s - before[1], 1e-9)
            events_per_s = (_events(tasks) - _events(before[2])) / seconds
            self.rates = tuple(_rates(*pair, seconds) for pair in zip(before[2], tasks, strict=True))
        of_events = [(task, task.source) for task in tasks if task.source is not None and task.source.brings_events]
        lags = [records for task, _ in of_events for records in task.lag.values()]
        lags_s = [lag_s for _, source in of_events for lag_s in source.lag_s.values()]
        lag_records, lag_s = sum(lags) if lags else None, max(lags_s, default=None)
        self.samples.append(Sample(at_ms, events_per_s, lag_records, lag_s))
        self._see_history([task for task in tasks if task.steps[0].step in self.history_steps], now_s)
        return statistics

    def _see_history(self, tasks: Sequence[TaskStatistics], now_s: float) -> None:
        if all(task.ended for task in tasks):
            self.catching_up, self._history = None, HistoryProgress()
            return
        read = sum(task.source.read_records or 0 for task in tasks if task.source is not None)
        left = sum(records for task in tasks for records in task.lag.values())
        self.catching_up = self._history.seen(now_s, read, left)

    def busiest_task(self) -> str | None:
        """Return the task that has worked most since the last sample; None if none has worked."""
        if self._before is None:
            return None
        job, _, tasks = self._before
        before = {task.name: task.busy_s for task in tasks}
        worked = {task.name: task.busy_s - before[task.name] for task in job.statistics().tasks}
        busiest = max(worked, key=worked.__getitem__, default=None)
        return busiest if busiest is not None and worked[busiest] > 0.0 else None

    def _see_version(self) -> None:
        update = self.model
        if update is None:
            return
        last = self.versions[-1] if self.versions else None
        if last is None or (last.generation, last.version) != update.rank:
            self.versions.append(ModelVersion.of(update))
        if not self.compared or update.created_at_ms - self.compared[-1].created_at_ms >= _COMPARED_MS:
            self.compared.append(update)

    def _see_checkpoint(self, taken: CheckpointStatistics) -> None:
        last = self.checkpoints[-1].committed_at_ms if self.checkpoints else None
        if taken.committed is not None and taken.committed_at_ms not in (None, last):
            assert taken.committed_at_ms is not None
            seen = (taken.committed, taken.committed_at_ms, taken.last_duration_s, taken.last_size_bytes)
            self.checkpoints.append(CheckpointSeen(*seen))

    def _phase(self, phase: Phase, reason: str | None) -> PhaseChange:
        return PhaseChange(phase, reason, self.clock.now_ms(), self.clock.monotonic_s())


def mean_rate(samples: Sequence[Sample]) -> float | None:
    """Return the mean of the events in a second, as far as they are known; None if the last sample does not know it."""
    if not samples or samples[-1].events_per_s is None:
        return None
    return fmean(each.events_per_s for each in samples if each.events_per_s is not None)


def _events(tasks: Sequence[TaskStatistics]) -> int:
    """Return the records that sources of events have brought."""
    sources = [task for task in tasks if task.source is not None and task.source.brings_events]
    return sum(task.steps[0].counts.records_in for task in sources)


def _rates(before: TaskStatistics, now: TaskStatistics, seconds: float) -> TaskRates:
    def per_s(old: float, new: float) -> float:
        return max(0.0, new - old) / seconds

    blocked = min(1.0, per_s(before.blocked_s, now.blocked_s))
    held = min(1.0 - blocked, per_s(before.held_s, now.held_s))
    busy = min(1.0 - blocked - held, per_s(before.busy_s, now.busy_s))
    return TaskRates(
        task=now.name,
        steps=tuple(step.step for step in now.steps),
        steps_per_s=tuple(
            per_s(old.counts.records_in, new.counts.records_in)
            for old, new in zip(before.steps, now.steps, strict=True)
        ),
        busy=busy,
        blocked=blocked,
        held=held,
        idle=max(0.0, 1.0 - busy - blocked - held),
    )


def _rejected(letter: DeadLetter, at_ms: int) -> RejectedRecord:
    origin = letter.origin
    topic = partition = offset = None
    if isinstance(origin, Origin):
        topic, partition, offset = origin.topic, origin.partition, origin.offset
    elif isinstance(origin, BatchOrigin):
        topic, partition, offset = origin.topic, origin.partition, origin.first_offset
    return RejectedRecord(at_ms, letter.step, letter.error, shortened(letter.record), topic, partition, offset)
