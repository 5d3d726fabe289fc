"""The logical graph: what a flow is made of before it is planned. Flow builds it, the plan reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamiter.errors import GraphError
from streamiter.operators.operator import OperatorFactory, Service
from streamiter.operators.rejection import RejectionPolicy
from streamiter.operators.source import SourceFactory
from streamiter.records import OutputTag
from streamiter.runtime.output import Forward, Partitioning
from streamiter.topics.topic import Topic

__all__ = [
    "SINGLE_INPUT",
    "Edge",
    "FeedbackLimits",
    "Graph",
    "KeySelector",
    "Savepoint",
    "Step",
    "edge_number",
]

SINGLE_INPUT = "input"
"""Name of the input of a step that has only one."""


@dataclass(frozen=True, slots=True)
class KeySelector:
    """How a keyed step finds the key of a record."""

    key_of: Callable[[Any], Any]
    time_to_live_s: float | None = None


@dataclass(frozen=True, slots=True)
class FeedbackLimits:
    """How much feedback may wait in one channel of a feedback edge: from one subtask to one head.

    A forward edge has one channel for each head; one that repartitions has one from each subtask to each
    head, and each may hold as much. The same holds for each queue of records that wait for their epoch's turn.
    """

    memory_bytes: int = 64 << 20
    """Above it feedback goes to disk, and new input falls to one batch in sixteen. 64 MiB: a few seconds
    of a fast loop, and small beside the memory of a machine that trains."""
    disk_bytes: int = 8 << 30
    """Above it the job fails. 8 GiB: minutes of a loop that has run away."""
    directory: str | None = None
    """Where it spills; None is the system's folder for temporary files."""

    def __post_init__(self) -> None:
        for name, limit in (("memory_bytes", self.memory_bytes), ("disk_bytes", self.disk_bytes)):
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise GraphError(
                    f"FeedbackLimits: expected {name} of at least 0, given {limit!r}; use a whole number of bytes"
                )


@dataclass(eq=False, slots=True)
class Step:
    """A node of the graph: an operator, or a source with an operator behind it."""

    name: str
    parallelism: int
    where: str
    """The user's line, ``file:line``."""
    factory: OperatorFactory
    source: SourceFactory | None = None
    inputs: list[Edge] = field(default_factory=list)
    keys: KeySelector | None = None
    policy: RejectionPolicy = "fail"
    service: Service | None = None
    """What its subtasks are workers of."""
    has_lasting_name: bool = False
    """Whether an edit of the flow leaves the name to this step: it was chosen, or follows from a topic or model."""
    loop: Any = None
    """The iteration whose body it belongs to, or None."""
    round_scope: Any = None
    """The part of that body whose steps begin anew in each epoch, if it belongs to one."""
    bounded: bool = True
    stamped: bool = False
    """Whether its records carry epochs from outside an iteration."""
    emits_at_end: bool = False
    """Whether it emits only when its inputs have ended: in the body of an iteration, when the iteration ends."""
    shape: str = "operator"
    """For drawings: operator, source, sink or iteration."""
    epochs_seen: str = ""
    """For drawings: where records enter an iteration, of which epochs they are."""

    @property
    def hears_of_epochs(self) -> bool:
        """Whether epochs end here: in the body of an iteration, and behind stamped records."""
        return self.loop is not None or any(edge.upstream.stamped for edge in self.inputs)

    @property
    def per_round(self) -> bool:
        """Whether each epoch has an operator of its own."""
        return self.round_scope is not None

    def input_names(self) -> list[str]:
        """Names of the inputs, in the order they were connected."""
        return list(dict.fromkeys(edge.input_name for edge in self.inputs))


@dataclass(eq=False, slots=True)
class Edge:
    """Records of a step's main or side output on their way to an input of another."""

    upstream: Step
    input_name: str = SINGLE_INPUT
    partitioning: Partitioning = field(default_factory=Forward)
    tag: OutputTag | None = None
    feedback: FeedbackLimits | None = None
    """Set on the edge that closes a loop."""
    feedback_topic: Topic | None = None
    """What such an edge goes through, if not through memory."""


class Savepoint(NamedTuple):
    """How much of a graph there is at one moment."""

    steps: int
    numbered_names: int


class Graph:
    """The steps of one flow, in the order in which they were added, and their names.

    Steps are only added, and an edge belongs to the step that reads it. So what was added since a savepoint can be
    taken out again, and the rest is as it was.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._by_name: dict[str, Step] = {}
        self._numbered: dict[str, None] = {}
        """Names with a number, in the order in which they were given."""

    def __contains__(self, step: Step) -> bool:
        return self._by_name.get(step.name) is step

    def add(self, step: Step) -> None:
        """Add a step, whose name ``unique_name`` gave."""
        self.steps.append(step)
        self._by_name[step.name] = step

    def unique_name(self, label: str, *, named: bool) -> str:
        """The name of a new step. Raises GraphError where the user chose it (``named``) and another step has it."""
        taken = self._by_name
        if label not in taken:
            return label
        if named:
            raise GraphError(
                f"step {label!r}: expected a name of its own, given one that {taken[label].where} already uses; "
                "choose another"
            )
        number = 2
        while f"{label}-{number}" in taken:
            number += 1
        self._numbered[f"{label}-{number}"] = None
        return f"{label}-{number}"

    def is_numbered(self, name: str) -> bool:
        """Whether the name has a number only because it was taken, so that an edit may change it."""
        return name in self._numbered

    def savepoint(self) -> Savepoint:
        """What ``roll_back`` goes back to."""
        return Savepoint(len(self.steps), len(self._numbered))

    def roll_back(self, savepoint: Savepoint) -> None:
        """Take out what was added since the savepoint."""
        for step in self.steps[savepoint.steps :]:
            del self._by_name[step.name]
        del self.steps[savepoint.steps :]
        while len(self._numbered) > savepoint.numbered_names:
            self._numbered.popitem()


def edge_number(step: Step, edge: Edge) -> int:
    """Which of the edges it is that bring the same output to the same input of ``step``; mostly there is one."""
    alike = [
        other
        for other in step.inputs
        if (other.upstream, other.input_name, other.tag) == (edge.upstream, edge.input_name, edge.tag)
    ]
    return alike.index(edge)
