"""The documents of the page of a service, and how they are made from observations.

Figures that are not known are None. The schemas are in the OpenAPI document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Any, Final, Literal

from streamiter.engine.graph.graph import Step
from streamiter.engine.graph.statistics import JobStatistics, TaskStatistics
from streamiter.flow.drawing.formats import svg_path
from streamiter.flow.drawing.layout import lay_out
from streamiter.flow.drawing.picture import Picture, picture_of
from streamiter.models.differences import ModelDifference, names_with_texts
from streamiter.models.explanations import Effects
from streamiter.models.published_embeddings import EmbeddingFigures
from streamiter.models.versions import ModelVersion
from streamiter.service.observing.challenger import ChallengerNow
from streamiter.service.observing.health import HealthProblem, facts_of, liveness, readiness
from streamiter.service.observing.observations import (
    CheckpointSeen,
    Observations,
    ProcessRole,
    RejectedRecord,
    Sample,
    TaskRates,
    mean_rate,
)
from streamiter.service.observing.quality import DriftFound, QualityNow, ValidationReport, WatchedWindow, quality_of

# Points of a chart that is 600 pixels wide and shows an hour.
_POINT_MS: Final = 5_000
# The rate on the page is the mean of this many seconds, since sources read in bursts.
_SMOOTHED: Final = 5
# A step with a smaller share of work is drawn as idle.
_IDLE: Final = 0.02

# As many are shown as fit beside each other.
_EFFECTS: Final = 8

Level = Literal["well", "attention", "not ready", "failing"]
StepActivity = Literal["busy", "blocked", "held", "idle", "ended"]


# -- documents ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepNow:
    """A step, all its subtasks together. Shares and rates are of the last second; None: not known."""

    name: str
    state: StepActivity | None
    """``idle`` if its task had next to no work; otherwise what it did most of the time."""
    busy: float | None
    """The share of time in which the task handled records, as all shares a mean of the subtasks."""
    blocked: float | None
    """The share of time in which it waited for room downstream."""
    held: float | None
    """The share of time in which it had only input that it did not want yet."""
    records_per_s: float | None
    """The records that the step has received; of a source: has read."""
    records: int
    """These records since the job was started."""
    waiting_records: int
    """The records in the channels before the step."""
    rejected: int
    epoch_watermark: int | None
    """The last epoch that is complete at all subtasks; None before the first one, and outside of iterations."""


@dataclass(frozen=True, slots=True)
class LoopNow:
    """An iteration of the flow."""

    heads: tuple[str, ...]
    """The steps at which it begins."""
    progress: str | None
    """The progress in words; None before the first complete epoch, thus always in a loop without epochs."""
    epoch_complete: int | None
    """The last complete epoch; None before the first one."""
    fed_back_records: int
    waiting_records: int
    spilled_bytes: int


@dataclass(frozen=True, slots=True)
class ModelNow:
    """The version that answers."""

    generation: int
    version: int
    created_at_ms: int
    age_s: float
    records: int | None


@dataclass(frozen=True, slots=True)
class PageState:
    """All figures of now. None: not known."""

    service: str
    role: ProcessRole
    """What the process is for."""
    started_at_ms: int
    """When the process was started; another number tells that it was started again."""
    at_ms: int
    phase: str
    phase_since_ms: int
    level: Level
    sentence: str
    """Whether the service is well, and the reason if not."""
    problems: tuple[HealthProblem, ...]
    events_per_s: float | None
    events: int | None
    lag_records: int | None
    lag_s: float | None
    rejected: int | None
    quality: QualityNow | None
    model: ModelNow | None
    challenger: ChallengerNow | None
    """None: the service has no challenger."""
    checkpoint: CheckpointSeen | None
    checkpoint_age_s: float | None
    steps: tuple[StepNow, ...]
    loops: tuple[LoopNow, ...]


@dataclass(frozen=True, slots=True)
class PageHistory:
    """The last hour, as columns of one point for each five seconds; None: not known."""

    started_at_ms: int
    point_ms: int
    at_ms: tuple[int, ...]
    events_per_s: tuple[float | None, ...]
    lag_records: tuple[int | None, ...]
    lag_s: tuple[float | None, ...]
    loss: tuple[float | None, ...]
    baseline: tuple[float | None, ...]
    auc: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class PageDetails:
    """What changes more seldom; each list has the newest first."""

    weights: ModelDifference | None
    """The weights that changed most in one to two minutes; None before there are two versions."""
    effects: Effects | None
    """What the fields and pairs of fields that matter most do; None for a model without tables."""
    embeddings: EmbeddingFigures | None
    """What the model knows of features; None for a model without embeddings."""
    versions: tuple[ModelVersion, ...]
    drifts: tuple[DriftFound, ...]
    fields: WatchedWindow | None
    """The fields of the last window of rows; None before the first one, and where they are not watched."""
    checkpoints: tuple[CheckpointSeen, ...]
    checkpoints_given_up: int | None
    dead_letters: tuple[RejectedRecord, ...]


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step in the drawing; lengths are in pixels."""

    name: str
    lines: tuple[str, ...]
    """The name in lines that fit."""
    times: str
    """The number of subtasks, such as ×4; empty for one."""
    shape: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class DrawnLink:
    """A link between two steps."""

    source: str
    target: str
    kind: str
    path: str
    """The data of a path in SVG."""


@dataclass(frozen=True, slots=True)
class DrawnLoop:
    """The frame around an iteration."""

    steps: tuple[str, ...]
    """The steps in the frame."""
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class FlowDrawing:
    """The place of each step of the flow."""

    width: float
    height: float
    steps: tuple[DrawnStep, ...]
    links: tuple[DrawnLink, ...]
    loops: tuple[DrawnLoop, ...]


# -- from observations to documents ------------------------------------------------------------------------


def page_state(observations: Observations) -> PageState:
    """Return all figures of now.

    >>> page_state(Observations("late-flights")).sentence
    'Not ready: starting, 0.0 s'
    """
    statistics, phase = observations.statistics(), observations.phase
    facts, quality = facts_of(observations, statistics), observations.quality.now
    level, sentence, problems = _verdict(liveness(facts), readiness(facts), quality)
    if level == "well" and phase.phase == "following":
        sentence = f"All is well: this {observations.role} predicts with the newest version of the service"
    challenger = observations.challenger
    if level == "well" and challenger is not None and challenger.stopped is not None:
        level, sentence = "attention", f"The service works, but its challenger has stopped: {challenger.stopped}"
    log = observations.prediction_log
    if level == "well" and log is not None and log.trouble is not None:
        level, sentence = "attention", f"The service works, but refuses predictions: {log.trouble}"
    if facts.catching_up is not None and not problems:
        sentence = f"The service is {facts.catching_up}; it predicts with what it has learned so far"
    newest = observations.samples[-1] if observations.samples else None
    tasks = () if statistics is None else statistics.tasks
    update = observations.model
    return PageState(
        service=observations.name,
        role=observations.role,
        started_at_ms=observations.started_at_ms,
        at_ms=observations.clock.now_ms(),
        phase=phase.phase,
        phase_since_ms=phase.since_ms,
        level=level,
        sentence=sentence,
        problems=problems,
        events_per_s=mean_rate(list(observations.samples)[-_SMOOTHED:]),
        events=sum(each.steps[0].counts.records_in for each in tasks if _is_topic(each)) if tasks else None,
        lag_records=None if newest is None else newest.lag_records,
        lag_s=None if newest is None else newest.lag_s,
        rejected=sum(step.counts.rejected for task in tasks for step in task.steps) if tasks else None,
        quality=quality,
        model=None
        if update is None
        else ModelNow(
            update.generation, update.version, update.created_at_ms, update.age_s(observations.clock), update.records
        ),
        challenger=None if challenger is None else ChallengerNow.of(challenger, update),
        checkpoint=observations.checkpoints[-1] if observations.checkpoints else None,
        checkpoint_age_s=facts.checkpoint_age_s if observations.checkpoints else None,
        steps=() if statistics is None else _steps(statistics, observations.rates),
        loops=() if statistics is None else _loops(statistics),
    )


def _verdict(
    dead: Sequence[HealthProblem], unready: Sequence[HealthProblem], quality: QualityNow | None
) -> tuple[Level, str, tuple[HealthProblem, ...]]:
    """Return how well the service is, in a sentence, and all problems."""
    problems = tuple(dict.fromkeys((*dead, *unready)))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        kind: Level = "failing" if dead else "not ready"
        return kind, f"{kind.capitalize()}: {problems[0].detail}{more}", problems
    if quality is not None and (quality.loss or 0.0) > (quality.baseline or math.inf):
        said = f"its {quality.measure} of {quality.loss:.4f} is above the baseline of {quality.baseline:.4f}"
        return "attention", f"The service works, but the model predicts badly: {said}", ()
    return "well", "All is well: the sources answer, the steps make progress, and a model predicts", ()


def _steps(statistics: JobStatistics, rates: Sequence[TaskRates]) -> tuple[StepNow, ...]:
    rates_of = {each.task: each for each in rates}
    parts: dict[str, list[tuple[TaskStatistics, int]]] = {}
    for task in statistics.tasks:
        for place, step in enumerate(task.steps):
            parts.setdefault(step.step, []).append((task, place))
    return tuple(_step(name, instances, rates_of) for name, instances in parts.items())


def _step(name: str, instances: Sequence[tuple[TaskStatistics, int]], rates_of: dict[str, TaskRates]) -> StepNow:
    counts = [task.steps[place].counts for task, place in instances]
    rates = [(rates_of[task.name], place) for task, place in instances if task.name in rates_of]
    busy, blocked, held, per_s = (
        (
            fmean(rate.busy for rate, _ in rates),
            fmean(rate.blocked for rate, _ in rates),
            fmean(rate.held for rate, _ in rates),
            sum(rate.steps_per_s[place] for rate, place in rates),
        )
        if rates
        else (None, None, None, None)
    )
    watermark = min(task.epoch_watermark for task, _ in instances)
    return StepNow(
        name=name,
        state="ended" if all(task.ended for task, _ in instances) else _state_of(busy, blocked, held),
        busy=busy,
        blocked=blocked,
        held=held,
        records_per_s=per_s,
        records=sum(each.records_in for each in counts),
        waiting_records=sum(channel.records for task, place in instances if place == 0 for channel in task.inputs),
        rejected=sum(each.rejected for each in counts),
        epoch_watermark=watermark if watermark >= 0 and instances[0][0].loop is not None else None,
    )


def _is_topic(task: TaskStatistics) -> bool:
    return task.source is not None and task.source.topic is not None and task.source.brings_events


def _state_of(busy: float | None, blocked: float | None, held: float | None) -> StepActivity | None:
    if busy is None or blocked is None or held is None:
        return None
    shares: dict[StepActivity, float] = {"blocked": blocked, "held": held, "busy": busy, "idle": _IDLE}
    return max(shares, key=shares.__getitem__)


def _loops(statistics: JobStatistics) -> tuple[LoopNow, ...]:
    return tuple(
        LoopNow(
            heads=loop.heads,
            progress=loop.progress if loop.epoch_complete >= 0 or loop.ended_in is not None else None,
            epoch_complete=loop.epoch_complete if loop.epoch_complete >= 0 else None,
            fed_back_records=loop.fed_back_records,
            waiting_records=loop.waiting_records,
            spilled_bytes=loop.bytes_on_disk,
        )
        for loop in statistics.loops
    )


def page_history(observations: Observations) -> PageHistory:
    """Return the last hour.

    >>> observations = Observations("late-flights")
    >>> observations.sample()
    >>> page_history(observations).lag_records
    (None,)
    """

    def point_of(each: Sample | ValidationReport) -> int:
        return each.at_ms // _POINT_MS

    reports = {point: quality_of(list(group)[-1]) for point, group in groupby(observations.quality.reports, point_of)}
    rows = []
    for point, group in groupby(observations.samples, point_of):
        samples = list(group)
        quality = reports.get(point)
        rows.append(
            (
                point * _POINT_MS,
                mean_rate(samples),
                samples[-1].lag_records,
                samples[-1].lag_s,
                *((None, None, None) if quality is None else (quality.loss, quality.baseline, quality.auc)),
            )
        )
    columns: list[tuple[Any, ...]] = list(zip(*rows, strict=True)) if rows else [()] * 7
    return PageHistory(observations.started_at_ms, _POINT_MS, *columns)


def page_details(observations: Observations, weights: ModelDifference | None, effects: Effects | None) -> PageDetails:
    """Return the lists of the page."""
    statistics = observations.statistics()
    checkpoints = None if statistics is None else statistics.checkpoints
    return PageDetails(
        weights=weights,
        effects=effects,
        embeddings=None if observations.model is None else EmbeddingFigures.of(observations.model.parameters),
        versions=tuple(observations.versions)[::-1],
        drifts=tuple(observations.quality.drifts)[::-1],
        fields=observations.quality.window,
        checkpoints=tuple(observations.checkpoints)[::-1],
        checkpoints_given_up=None if checkpoints is None else checkpoints.given_up,
        dead_letters=tuple(observations.rejected)[::-1],
    )


def effects_shown(effects: Effects, observations: Observations) -> Effects:
    """Return the strongest effects, with texts in place of the places of their bins, where the texts are known."""
    columns = effects.columns[:_EFFECTS]
    names = names_with_texts((each.name for column in columns for each in column.bins), observations.texts_at)
    shown = [
        replace(column, bins=tuple(replace(each, name=names.get(each.name, each.name)) for each in column.bins))
        for column in columns
    ]
    return replace(effects, columns=shown, pairs=effects.pairs[:_EFFECTS])


def flow_drawing(flow: str, steps: Sequence[Step]) -> FlowDrawing:
    """Return the place of each step, with room below its name for its rate and its epoch."""
    whole = picture_of(flow, steps)
    picture = Picture(
        title="",
        nodes=tuple(
            # As an operator: without the lid of a cylinder, which takes height.
            replace(node, shape="operator", notes=("0,000,000/s", "epoch 0,000")[: 1 if node.box is None else 2])
            for node in whole.nodes
        ),
        links=tuple(replace(link, label="") for link in whole.links),
        boxes=whole.boxes,
    )
    layout = lay_out(picture)
    return FlowDrawing(
        width=layout.width,
        height=layout.height,
        steps=tuple(
            DrawnStep(
                name=node.name,
                lines=tuple(line.text for line in spot.caption.lines if not line.is_note),
                times=node.times,
                shape=node.shape,
                x=spot.x,
                y=spot.top,
                width=spot.width,
                height=spot.height,
            )
            for node, spot in zip(whole.nodes, layout.nodes, strict=True)
        ),
        links=tuple(
            DrawnLink(whole.nodes[link.source].name, whole.nodes[link.target].name, link.kind, svg_path(route))
            for link, route in zip(whole.links, layout.routes, strict=True)
        ),
        loops=tuple(
            DrawnLoop(
                tuple(node.name for node in whole.nodes if node.box == number),
                spot.x,
                spot.top,
                spot.width,
                spot.height,
            )
            for number, spot in enumerate(layout.boxes)
        ),
    )
