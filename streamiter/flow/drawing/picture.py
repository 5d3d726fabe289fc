"""What a drawing shows, whatever it is drawn with: nodes, links, and a box for each iteration.

A service that steps share, a parameter server, is a node behind them that no data flows to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from streamiter.errors import ConfigurationError
from streamiter.operators.service import Service
from streamiter.runtime.graph import SINGLE_INPUT, Edge, Step
from streamiter.runtime.partitioning import Broadcast, ByFunction, ByKey, Rebalance
from streamiter.runtime.statistics import JobStatistics, LoopStatistics

__all__ = ["Box", "Link", "LinkKind", "Node", "Picture", "picture_of"]

LinkKind = Literal["data", "feedback", "criteria", "service"]
"""``feedback`` and ``criteria`` go back; ``service`` leads to what a step works with, and both ways."""

_PARTITIONINGS = {Broadcast: "broadcast", Rebalance: "rebalance", ByKey: "by key", ByFunction: "by function"}
_BACK_LABELS = {"feedback": "feedback, epoch + 1", "criteria": "criteria, epoch + 1"}
_SERVICE_LABEL = "get, add"


@dataclass(frozen=True, slots=True)
class Node:
    """A step, or a service."""

    name: str
    shape: str
    """operator, source, sink, iteration or service."""
    parallelism: int = 1
    notes: tuple[str, ...] = ()
    """Lines below the name: the epochs it sees, what it has handled."""
    box: int | None = None
    """Which box it lies in."""

    @property
    def times(self) -> str:
        """How many subtasks it has, if more than one."""
        return f"×{self.parallelism}" if self.parallelism > 1 else ""


@dataclass(frozen=True, slots=True)
class Link:
    """An edge between two nodes, by their numbers."""

    source: int
    target: int
    kind: LinkKind = "data"
    label: str = ""

    @property
    def goes_back(self) -> bool:
        """Whether it closes a loop."""
        return self.kind in _BACK_LABELS


@dataclass(frozen=True, slots=True)
class Box:
    """An iteration."""

    title: str
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """All it says, in one line."""
        return " · ".join((self.title, *self.notes))


@dataclass(frozen=True, slots=True)
class Picture:
    """Nodes, each behind those it takes data from; links; boxes."""

    title: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    boxes: tuple[Box, ...] = ()


def picture_of(flow: str, steps: Sequence[Step], statistics: JobStatistics | None = None) -> Picture:
    """The picture of a flow; with statistics of one of its jobs it shows what they count."""
    if statistics is not None:
        _check_statistics(flow, steps, statistics)
    numbers = {step: number for number, step in enumerate(steps)}
    services = list(dict.fromkeys(step.service for step in steps if step.service is not None))
    loops = list(dict.fromkeys(step.loop for step in steps if step.loop is not None))
    return Picture(
        title=flow if statistics is None else f"{flow} ({statistics.state})",
        nodes=(
            *(_step(step, loops, statistics) for step in steps),
            *(_service(service, statistics) for service in services),
        ),
        links=(
            *(
                Link(
                    numbers[edge.upstream], numbers[step], kind := _kind(edge, step), _label(edge, step, kind)
                )
                for step in steps
                for edge in step.inputs
            ),
            *(
                Link(numbers[step], len(steps) + services.index(step.service), "service", _SERVICE_LABEL)
                for step in steps
                if step.service is not None
            ),
        ),
        boxes=tuple(
            Box(f"iteration {number}", _progress_notes(loop, steps, statistics))
            for number, loop in enumerate(loops, 1)
        ),
    )


# -- nodes -------------------------------------------------------------------------------------------------


def _step(step: Step, loops: Sequence[Any], statistics: JobStatistics | None) -> Node:
    return Node(
        name=step.name,
        shape=step.shape,
        parallelism=step.parallelism,
        notes=(*_notes(step), *(() if statistics is None else _counts(step, statistics))),
        box=None if step.loop is None else loops.index(step.loop),
    )


def _service(service: Service, statistics: JobStatistics | None) -> Node:
    told = None if statistics is None else statistics.parameter_servers.get(service.name)
    return Node(service.name, "service", notes=(service.drawn_as, *(() if told is None else told.notes)))


# -- links -------------------------------------------------------------------------------------------------


def _kind(edge: Edge, step: Step) -> LinkKind:
    if edge.feedback is None:
        return "data"
    # A head has initial values too; only what decides about the end lives on what comes back alone.
    return "criteria" if all(given.feedback is not None for given in step.inputs) else "feedback"


def _label(edge: Edge, step: Step, kind: LinkKind) -> str:
    return ", ".join(_label_parts(edge, step, kind))


def _label_parts(edge: Edge, step: Step, kind: LinkKind) -> Iterable[str]:
    if kind != "data":
        yield _BACK_LABELS[kind]
    elif edge.input_name != SINGLE_INPUT:
        yield edge.input_name
    if edge.tag is not None:
        yield f"side output {edge.tag.name}"
    partitioning = _PARTITIONINGS.get(type(edge.partitioning))
    # To a single subtask all records go anyway.
    if partitioning is not None and (partitioning != "rebalance" or step.parallelism > 1):
        yield partitioning


# -- notes -------------------------------------------------------------------------------------------------


def _notes(step: Step) -> Iterable[str]:
    if step.epochs_seen:
        yield step.epochs_seen
    if step.per_round:
        yield "per round"


def _counts(step: Step, statistics: JobStatistics) -> Iterable[str]:
    counts = statistics.step(step.name)
    shown = [] if step.shape == "source" else [f"{counts.records_in:,} in"]
    if step.shape != "sink":
        shown.append(f"{counts.records_out:,} out")
    if counts.rejected:
        shown.append(f"{counts.rejected:,} rejected")
    yield " · ".join(shown)
    watermark = min(
        task.epoch_watermark
        for task in statistics.tasks
        if any(instance.step == step.name for instance in task.steps)
    )
    if watermark >= 0:
        yield f"epoch watermark {watermark:,}"


def _progress_notes(loop: Any, steps: Sequence[Step], statistics: JobStatistics | None) -> tuple[str, ...]:
    if statistics is None:
        return ()
    members = {step.name for step in steps if step.loop is loop}
    return next((_counts_of_loop(told) for told in statistics.loops if members.issuperset(told.heads)), ())


def _counts_of_loop(loop: LoopStatistics) -> tuple[str, ...]:
    return loop.progress, f"{loop.fed_back_records:,} records fed back"


def _check_statistics(flow: str, steps: Sequence[Step], statistics: JobStatistics) -> None:
    if not isinstance(statistics, JobStatistics):
        raise ConfigurationError(
            f"flow {flow!r}: draw expected statistics of a job, given {statistics!r}; "
            "pass job.statistics() or what flow.run() returned"
        )
    counted = {instance.step for task in statistics.tasks for instance in task.steps}
    missing = [step.name for step in steps if step.name not in counted]
    if statistics.flow != flow or missing:
        given = f"those of flow {statistics.flow!r}" + (f" without step {missing[0]!r}" if missing else "")
        raise ConfigurationError(
            f"flow {flow!r}: draw expected statistics of a job of this flow, given {given}; "
            "pass job.statistics() or what flow.run() returned"
        )
