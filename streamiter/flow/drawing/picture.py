"""What a drawing shows, in every format: nodes, links between them, and a box around each iteration.

``picture_of`` makes the picture of a flow. A service that steps share, such as a parameter server, is a node of its
own; no data flows to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from streamiter.engine.graph.graph import SINGLE_INPUT, Edge, Step
from streamiter.engine.graph.output import Broadcast, ByFunction, ByKey, Rebalance
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.errors import ConfigurationError
from streamiter.operators.services import Service
from streamiter.values.times import shown_time

LinkKind = Literal["data", "feedback", "criteria", "service"]
"""``feedback`` and ``criteria`` close a loop; ``service`` joins a step and the service that it uses, both ways."""

_PARTITIONINGS: Final = {Broadcast: "broadcast", Rebalance: "rebalance", ByKey: "by key", ByFunction: "by function"}
_FEEDBACK_LABELS: Final = {"feedback": "feedback, epoch + 1", "criteria": "criteria, epoch + 1"}
_SERVICE_LABEL: Final = "get, add"


@dataclass(frozen=True, slots=True)
class Node:
    """A step, a service, or a layer of a network."""

    name: str
    """The first text in the node."""
    shape: str
    """``operator``, ``source``, ``sink``, ``iteration`` or ``service``."""
    parallelism: int = 1
    """The number of subtasks; shown if it is above 1."""
    notes: tuple[str, ...] = ()
    """Lines below the name, such as the epochs of the step and the number of its records."""
    box: int | None = None
    """The number of the box around the node."""

    @property
    def times(self) -> str:
        """Return the number of subtasks as text, empty for a single one."""
        return f"×{self.parallelism}" if self.parallelism > 1 else ""


@dataclass(frozen=True, slots=True)
class Link:
    """An arrow from one node to another; nodes are given by their numbers."""

    source: int
    """The node where the link begins."""
    target: int
    """The node where the link ends."""
    kind: LinkKind = "data"
    """Sets the colour and the dashes."""
    label: str = ""
    """The text at the link."""

    @property
    def closes_loop(self) -> bool:
        """Whether the link carries feedback."""
        return self.kind in _FEEDBACK_LABELS


@dataclass(frozen=True, slots=True)
class Box:
    """A frame around the steps of an iteration."""

    title: str
    """The name of the iteration."""
    notes: tuple[str, ...] = ()
    """Its progress."""

    @property
    def heading(self) -> str:
        """Return title and notes in one line."""
        return " · ".join((self.title, *self.notes))


@dataclass(frozen=True, slots=True)
class Picture:
    """A graph to draw. Without the links that close loops it has no cycle."""

    title: str
    """The text above the drawing."""
    nodes: tuple[Node, ...]
    """Each node comes after the nodes that it takes data from."""
    links: tuple[Link, ...]
    """The arrows."""
    boxes: tuple[Box, ...] = ()
    """The iterations."""


def picture_of(flow: str, steps: Sequence[Step], statistics: JobStatistics | None = None) -> Picture:
    """Return the picture of a flow; with statistics of one of its jobs it shows their counts."""
    if statistics is not None:
        _check_statistics(flow, steps, statistics)
    numbers = {step: number for number, step in enumerate(steps)}
    services = list(dict.fromkeys(step.service for step in steps if step.service is not None))
    loops = list(dict.fromkeys(step.loop for step in steps if step.loop is not None))
    nodes = [_step_node(step, loops, statistics) for step in steps]
    nodes += [_service_node(service, statistics) for service in services]
    links = [_data_link(edge, step, numbers) for step in steps for edge in step.inputs]
    served = {step: len(steps) + services.index(step.service) for step in steps if step.service is not None}
    links += [Link(numbers[step], service, "service", _SERVICE_LABEL) for step, service in served.items()]
    boxes = [Box(f"iteration {number}", _progress(loop, steps, statistics)) for number, loop in enumerate(loops, 1)]
    title = flow if statistics is None else f"{flow} ({statistics.state})"
    return Picture(title, tuple(nodes), tuple(links), tuple(boxes))


def _check_statistics(flow: str, steps: Sequence[Step], statistics: JobStatistics) -> None:
    if not isinstance(statistics, JobStatistics):
        raise ConfigurationError(
            f"flow {flow!r}: draw expected statistics of a job, given {statistics!r}; "
            "pass job.statistics() or the result of flow.run()"
        )
    counted = {instance.step for task in statistics.tasks for instance in task.steps}
    missing = [step.name for step in steps if step.name not in counted]
    if statistics.flow != flow or missing:
        given = f"the statistics of flow {statistics.flow!r}" + (f" without step {missing[0]!r}" if missing else "")
        raise ConfigurationError(
            f"flow {flow!r}: draw expected statistics of a job of this flow, given {given}; "
            "pass job.statistics() or the result of flow.run()"
        )


# -- nodes -------------------------------------------------------------------------------------------------


def _step_node(step: Step, loops: Sequence[object], statistics: JobStatistics | None) -> Node:
    notes = [step.epochs_seen] if step.epochs_seen else []
    notes += ["per round"] if step.per_round else []
    notes += () if statistics is None else _counts(step, statistics)
    return Node(
        step.name, step.shape, step.parallelism, tuple(notes), None if step.loop is None else loops.index(step.loop)
    )


def _counts(step: Step, statistics: JobStatistics) -> Iterable[str]:
    counts = statistics.step(step.name)
    shown = [] if step.shape == "source" else [f"{counts.records_in:,} in"]
    if step.shape != "sink":
        shown.append(f"{counts.records_out:,} out")
    if counts.rejected:
        shown.append(f"{counts.rejected:,} rejected")
    yield " · ".join(shown)
    tasks = [task for task in statistics.tasks if any(instance.step == step.name for instance in task.steps)]
    watermark = min(task.epoch_watermark for task in tasks)
    if watermark >= 0:
        yield f"epoch watermark {watermark:,}"
    if step.timed and (times := [task.event_time for task in tasks if task.event_time is not None]):
        yield f"event time {shown_time(min(times))}"
    if processes := statistics.processes_of(step.name):
        yield f"in process {processes}"


def _service_node(service: Service, statistics: JobStatistics | None) -> Node:
    known = None if statistics is None else statistics.parameter_servers.get(service.name)
    return Node(service.name, "service", notes=(service.drawn_as, *(() if known is None else known.notes)))


# -- links and boxes ---------------------------------------------------------------------------------------


def _data_link(edge: Edge, step: Step, numbers: dict[Step, int]) -> Link:
    kind: LinkKind = "data"
    if edge.feedback is not None:
        # The head of a variable also has initial values; the criteria head has feedback alone.
        kind = "criteria" if all(given.feedback is not None for given in step.inputs) else "feedback"
    return Link(numbers[edge.upstream], numbers[step], kind, ", ".join(_label_parts(edge, step, kind)))


def _label_parts(edge: Edge, step: Step, kind: LinkKind) -> Iterable[str]:
    if kind != "data":
        yield _FEEDBACK_LABELS[kind]
    elif edge.input_name != SINGLE_INPUT:
        yield edge.input_name
    if edge.tag is not None:
        yield f"side output {edge.tag.name}"
    partitioning = _PARTITIONINGS.get(type(edge.partitioning))
    # A single subtask receives all records anyway.
    if partitioning is not None and (partitioning != "rebalance" or step.parallelism > 1):
        yield partitioning


def _progress(loop: object, steps: Sequence[Step], statistics: JobStatistics | None) -> tuple[str, ...]:
    members = {step.name for step in steps if step.loop is loop}
    for each in () if statistics is None else statistics.loops:
        if members.issuperset(each.heads):
            return each.progress, f"{each.fed_back_records:,} records fed back"
    return ()
