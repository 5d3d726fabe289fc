"""Health: whether the process works (``/livez``), and whether it does its job now (``/readyz``).

:func:`facts_of` takes from the observations what counts; :func:`liveness` and :func:`readiness` are pure functions of
these facts. A topic that does not answer makes the service not ready, never not alive: a restart of the process would
not help. A step that is *held*, by an epoch, by slower workers or because it waits for new parameters, is neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streamiter.engine.graph.statistics import JobStatistics, StalledTask
from streamiter.errors import ModelError
from streamiter.service.observing.observations import Observations, Phase
from streamiter.service.observing.quality import QualityNow
from streamiter.service.settings.tables import HealthSettings

# A checkpoint that fails, or that is slower than the interval, is followed by the next one. Five in a row are trouble.
_INTERVALS_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A source, and how long its topic has owed an answer."""

    task: str
    topic: str | None
    unanswered_s: float


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """What health depends on."""

    limits: HealthSettings
    phase: Phase
    reason: str | None
    """Why the service is in this phase."""
    seconds_in_phase: float
    loop_blocked_s: float
    """By how much the event loop is late now, or was when it was blocked last."""
    at_work: str | None
    """The task that worked most in this time."""
    since_block_s: float | None = None
    """How long ago this block has ended; None if it lasts."""
    stalled: tuple[StalledTask, ...] = ()
    sources: tuple[SourceFacts, ...] = ()
    checkpoint_age_s: float | None = None
    """The age of the last checkpoint, or of the job before its first one; None for a job without checkpoints."""
    checkpoint_interval_s: float | None = None
    worse_s: float = 0.0
    """For how many seconds predictions have been worse than always predicting the mean of the labels."""
    quality: QualityNow | None = None
    model_trouble: str | None = None
    """Why no model answers, or an outdated one; None if the newest one does, or if no predictions are served."""
    catching_up: str | None = None
    """While a history is read that comes before the topic: how far. That is no problem."""
    without_model_s: float | None = None
    """For how many seconds, since the start of the process, no model has answered; None if one does."""


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """A condition that does not hold."""

    condition: str
    """``event loop``, ``job``, ``step``, ``source``, ``checkpoint``, ``quality`` or ``model``."""
    detail: str
    """What is wrong, with its figure."""
    for_s: float | None
    """For how many seconds it has been so; None where it is not known."""


def facts_of(observations: Observations, statistics: JobStatistics | None) -> HealthFacts:
    """Return what health depends on; ``statistics`` are those of the job now."""
    checkpoints = None if statistics is None else statistics.checkpoints
    tasks = () if statistics is None else statistics.tasks
    blocked_s, at_work, since_block_s = _block(observations)
    return HealthFacts(
        limits=observations.limits,
        phase=observations.phase.phase,
        reason=observations.phase.reason,
        seconds_in_phase=observations.seconds_in_phase,
        loop_blocked_s=blocked_s,
        at_work=at_work,
        since_block_s=since_block_s,
        stalled=() if statistics is None else statistics.stalled,
        sources=tuple(
            SourceFacts(task.name, task.source.topic, task.source.unanswered_s)
            for task in tasks
            if task.source is not None and not task.ended
        ),
        checkpoint_age_s=(
            statistics.elapsed_s - checkpoints.committed_after_s
            if statistics is not None and checkpoints is not None
            else None
        ),
        checkpoint_interval_s=observations.checkpoint_interval_s,
        worse_s=observations.quality.worse_s,
        quality=observations.quality.now,
        model_trouble=_model_trouble(observations),
        catching_up=None if observations.catching_up is None else observations.catching_up.shown,
        without_model_s=(
            None if observations.model is not None else observations.clock.monotonic_s() - observations.started_s
        ),
    )


def _block(observations: Observations) -> tuple[float, str | None, float | None]:
    """Return the seconds, the task and the age of the block of the event loop that counts."""
    blocked_s, ended = observations.loop_lag.blocked_s, observations.loop_lag.too_long
    if blocked_s > observations.limits.loop_limit_s:
        return blocked_s, observations.busiest_task(), None
    if ended is None:
        return blocked_s, None, None
    return ended.seconds, ended.task, observations.clock.monotonic_s() - ended.ended_s


def _model_trouble(observations: Observations) -> str | None:
    served = observations.served
    if served is None:
        return None
    if served.update is None:
        why = "its topic has not been read yet" if served.is_searching else "none was published"
        return f"no model to predict with: {served.statistics().last_error or why}"
    challenger = observations.challenger
    if challenger is not None and challenger.stopped is not None and challenger.is_served_in(served.update):
        return f"the challenger {challenger.name!r} was promoted, and has stopped; roll back to a version of before"
    try:
        served.check()
    except ModelError:  # Its text has the topic's URL, and probes need no token.
        return "the topic of the model is not followed, so predictions become outdated; see the log"
    return None


def liveness(facts: HealthFacts) -> tuple[HealthProblem, ...]:
    """Return the problems for which the process should be started again; none if it is alive.

    >>> limits = HealthSettings(loop_limit_s=10)
    >>> facts = HealthFacts(limits, "running", None, 60.0, loop_blocked_s=12.5, at_work="train[0]")
    >>> [problem.detail for problem in liveness(facts)]
    ['the event loop has been blocked for 12.5 s; at work is train[0]']
    """
    return tuple(_loop_problems(facts)) + tuple(_end_problems(facts)) + tuple(_stalls(facts, "step"))


def readiness(facts: HealthFacts) -> tuple[HealthProblem, ...]:
    """Return the conditions that do not hold; none if the service is ready.

    >>> facts = HealthFacts(HealthSettings(), "restoring", "checkpoint 812", 4.2, 0.0, None)
    >>> [problem.detail for problem in readiness(facts)]
    ['restoring, 4.2 s, checkpoint 812']
    """
    problems = list(_loop_problems(facts))
    if facts.phase == "running":
        problems += _stalls(facts, "step")
        problems += _stalls(facts, "topic")
        problems += _source_problems(facts)
        problems += _checkpoint_problems(facts)
        problems += _quality_problems(facts)
    elif facts.phase != "following":
        told = "" if facts.reason is None else f", {facts.reason}"
        detail = f"{facts.phase}, {facts.seconds_in_phase:.1f} s{told}"
        problems.append(HealthProblem("job", detail, facts.seconds_in_phase))
    if facts.model_trouble is not None:
        seconds = facts.without_model_s
        told = "" if seconds is None else f", {seconds:.1f} s after the start"
        problems.append(HealthProblem("model", f"{facts.model_trouble}{told}", seconds))
    return tuple(problems)


def _loop_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    """Return a block that lasts, or has ended lately: while the loop is blocked, the service cannot answer."""
    blocked_s, limit_s, since_s = facts.loop_blocked_s, facts.limits.loop_limit_s, facts.since_block_s
    if blocked_s > limit_s and (since_s is None or since_s <= limit_s):
        is_so = "has been" if since_s is None else "was"
        told = f"the event loop {is_so} blocked for {blocked_s:.1f} s"
        told += "" if since_s is None else f", until {since_s:.1f} s ago"
        told += "" if facts.at_work is None else f"; at work {'is' if since_s is None else 'was'} {facts.at_work}"
        yield HealthProblem("event loop", told, blocked_s)


def _end_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    if facts.phase in ("failed", "aborted"):
        told = "" if facts.reason is None else f": {facts.reason}"
        yield HealthProblem("job", f"the job is {facts.phase}{told}", facts.seconds_in_phase)


def _stalls(facts: HealthFacts, cause: str) -> Iterator[HealthProblem]:
    for stalled in facts.stalled:
        if stalled.cause == cause:
            detail = f"no progress for {stalled.stalled_s:.1f} s although there is input: {stalled.reason}"
            yield HealthProblem("step", detail, stalled.stalled_s)


def _source_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    for source in facts.sources:
        if source.unanswered_s > facts.limits.source_limit_s:
            detail = f"{source.task}: no answer of the topic {source.topic!r} for {source.unanswered_s:.1f} s"
            yield HealthProblem("source", detail, source.unanswered_s)


def _checkpoint_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    age_s, interval_s = facts.checkpoint_age_s, facts.checkpoint_interval_s
    if age_s is not None and interval_s is not None and age_s > _INTERVALS_MAX * interval_s:
        detail = f"the last checkpoint is {age_s:.1f} s old, more than {_INTERVALS_MAX} intervals of {interval_s:g} s"
        yield HealthProblem("checkpoint", detail, age_s)


def _quality_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    if facts.worse_s > facts.limits.quality_limit_s and facts.quality is not None:
        loss = f"a {facts.quality.measure} of {facts.quality.loss:.4g}, where it has {facts.quality.baseline:.4g}"
        detail = f"predictions have been worse than the mean of the labels for {facts.worse_s:.0f} s: {loss}"
        yield HealthProblem("quality", detail, facts.worse_s)
