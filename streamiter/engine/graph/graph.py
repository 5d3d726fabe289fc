"""The logical graph of a flow: its steps, and the edges that bring records from one step to another.

``Flow`` and ``Stream`` build the graph, and the plan of a job (:mod:`streamiter.engine.plan.plan`) reads it. A step
inside the body of an iteration refers to its *loop*; ``StepLoop`` states what a running job asks of a loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.engine.graph.output import Forward, Partitioning
from streamiter.engine.graph.statistics import LoopStatistics
from streamiter.engine.states.backends import StateBackend
from streamiter.errors import GraphError
from streamiter.operators.operator import JobScope, Operator, OperatorFactory
from streamiter.operators.output import RejectionPolicy
from streamiter.operators.services import Service
from streamiter.operators.source import SourceFactory
from streamiter.topics.topic import Topic
from streamiter.values.plain_data import PlainData
from streamiter.values.records import OutputTag

SINGLE_INPUT = "input"
"""The name of the input of a step that has only one."""


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """A node of the graph: an operator, or a source with an operator behind it. It never changes."""

    name: str
    parallelism: int
    """The number of its subtasks."""
    where: str
    """The user's line that added the step, as ``file:line``."""
    factory: OperatorFactory
    """Makes the operator of one subtask."""
    source: SourceFactory | None = None
    """Makes the source of one subtask; None for a step that reads other steps."""
    edges: Sequence[Edge] = ()
    """The edges that bring its records, without feedback."""
    keys: KeySelector | None = None
    """How a keyed step finds the key of a record; None for a step without keys."""
    policy: RejectionPolicy = "fail"
    """What happens to a record that the operator refuses."""
    service: Service | None = None
    """The parameter server whose workers the subtasks are."""
    has_lasting_name: bool = False
    """Whether the name stays the same when other steps are added: the user chose it, or it names a topic or model."""
    loop: StepLoop | None = None
    """The iteration whose body contains the step, or None."""
    round_scope: object | None = None
    """The part of that body that contains the step and gives each epoch its own operators; None for no such part."""
    bounded: bool = True
    """Whether its output ends by itself."""
    stamped: bool = False
    """Whether its records carry epochs that they were given outside an iteration."""
    timed: bool = False
    """Whether its records have timestamps."""
    watermarked: bool = False
    """Whether it passes on event-time watermarks."""
    emits_at_end: bool = False
    """Whether it emits only when its inputs have ended: in the body of an iteration, when the iteration ends."""
    order: Literal["begins", "spans", "needs"] | None = None
    """What the step has to do with the order in which records were read; None for nothing.

    "begins": it notes the order of its records, if a step behind it needs the order. "spans": its records are pairs,
    and it notes when the earlier record came, and when the pair was known. "needs": it needs the order."""
    awaited_input: str | None = None
    """The input that it reads first at each start, up to the end that its topics have then; None for no such input."""
    others_follow: bool = False
    """Whether the records of the other inputs come behind the end of the awaited input, also in event time: until then
    the sources of the other inputs read nothing."""
    topic: Topic | None = None
    """The topic that it reads or writes."""
    shape: str = "operator"
    """For drawings: operator, source, sink or iteration."""
    epochs_seen: str = ""
    """For drawings: the epochs of the records that enter an iteration here."""

    @property
    def inputs(self) -> Sequence[Edge]:
        """The edges that bring its records. The last edges of the head of a loop bring feedback."""
        return self.edges if self.loop is None else (*self.edges, *self.loop.feedback_to(self))

    @property
    def hears_of_epochs(self) -> bool:
        """Whether epochs end at this step: in the body of an iteration, and behind stamped records."""
        return self.loop is not None or any(edge.upstream.stamped for edge in self.edges)

    @property
    def reads_times(self) -> bool:
        """Whether records with timestamps arrive at it."""
        return has_timestamps(self.inputs)

    @property
    def has_event_time(self) -> bool:
        """Whether its operators hear of event time: from its inputs or, in a part of a body, in each round."""
        return has_watermarks(self.edges) or (self.round_scope is not None and self.reads_times)

    @property
    def per_round(self) -> bool:
        """Whether each epoch has an operator of its own."""
        return self.round_scope is not None

    @property
    def limits(self) -> FeedbackLimits:
        """The limits of the feedback, and of records set aside, in the iteration that contains the step."""
        return FeedbackLimits() if self.loop is None else self.loop.limits

    def input_names(self) -> list[str]:
        """Return the names of the inputs, in the order in which they were connected."""
        return list(dict.fromkeys(edge.input_name for edge in self.inputs))


@dataclass(frozen=True, eq=False, slots=True)
class Edge:
    """The way of a step's main or side output to an input of another step."""

    upstream: Step
    """The step that emits the records."""
    input_name: str = SINGLE_INPUT
    """The input of the reading step."""
    partitioning: Partitioning = field(default_factory=Forward)
    """Which subtask of the reading step receives a record."""
    tag: OutputTag | None = None
    """The side output that is read; None for the main output."""
    feedback: FeedbackLimits | None = None
    """Set on the edge that closes a loop."""
    feedback_topic: Topic | None = None
    """The topic that such an edge goes through; None for memory."""


@dataclass(frozen=True, slots=True)
class KeySelector:
    """How a keyed step finds the key of a record."""

    by_input: Mapping[str, Callable[[Any], Any]]
    """By input: returns the key of a record, or an array of keys for a batch."""
    time_to_live_s: float | None = None
    """The state of a key is dropped when it was not used for this many seconds; None keeps it."""


class StepLoop(Protocol):
    """What a job asks of the iteration whose body contains a step; the iteration gives it."""

    @property
    def bounded(self) -> bool:
        """Whether it is a bounded iteration."""

    @property
    def limits(self) -> FeedbackLimits:
        """The limits of each channel of feedback, and of each queue of records whose epoch is not due."""

    @property
    def max_epochs_ahead(self) -> int | None:
        """How far feedback may run ahead of the last complete epoch; None: any distance."""

    @property
    def members(self) -> Sequence[Step]:
        """The steps at its border, which report to it: heads, heads of criteria, entrances.

        Their subtasks are numbered in this order.
        """

    def feedback_to(self, step: Step) -> Sequence[Edge]:
        """Return the edges that bring feedback to a step; none unless the step is a head of the loop."""

    def check_operator(self, step: Step, operator: Operator | type[Operator]) -> None:
        """Raise GraphError for an operator, or its class, that cannot work in this loop."""

    def check_wanted(self, step: Step, names: Collection[str] | None) -> None:
        """Raise GraphError if the step wants only inputs that come at the end of the loop: both would wait."""

    def drain(self, scope: JobScope, *, again: bool) -> None:
        """End the iteration of this job early, because the job is drained; ``again``: for the second time."""

    def checkpoint_abandoned(self, scope: JobScope, checkpoint: int) -> None:
        """Let the loop of this job continue, because a checkpoint is given up."""

    def shares(self, scope: JobScope) -> list[Mapping[str, int]]:
        """Return the shares of this process in the statistics of the loop."""

    def statistics(self, scope: JobScope, shares: Sequence[Mapping[str, int]] = ()) -> LoopStatistics:
        """Return how far the loop of this job has come; ``shares`` is what the other processes add."""


class RunnableFlow:
    """A flow as a job needs it; ``streamiter.Flow`` is one."""

    name: str
    """The name of the flow."""
    plain_data: PlainData
    """The encoding of its states and records."""
    state: StateBackend | None
    """Where the states of keys are kept; None: in memory."""

    @property
    def steps(self) -> Sequence[Step]:
        """The steps, in the order in which they were added."""
        raise NotImplementedError


class Graph:
    """The steps of one flow, in the order in which they were added, and their names.

    Steps are only added and never change, and an edge belongs to the step that reads it. So the steps that were added
    since a savepoint can be removed, and all others are as before. A loop keeps the feedback to its heads: those edges
    begin at steps that are added after the heads.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._adapt: Callable[[Step], Step] = lambda step: step
        self._by_name: dict[str, Step] = {}
        self._numbered: dict[str, None] = {}
        """Names with a number, in the order in which they were given."""

    def __contains__(self, step: Step) -> bool:
        return self._by_name.get(step.name) is step

    @property
    def steps(self) -> Sequence[Step]:
        return self._steps

    def add(self, step: Step) -> Step:
        """Add a step, whose name ``unique_name`` gave; return the step of the graph."""
        adapted = self._adapt(step)
        self._steps.append(adapted)
        self._by_name[adapted.name] = adapted
        return adapted

    @contextlib.contextmanager
    def adapting(self, adapt: Callable[[Step], Step]) -> Iterator[None]:
        """In this block, add the step that ``adapt`` returns in place of each new step; its name must be the same."""
        before, self._adapt = self._adapt, adapt
        try:
            yield
        finally:
            self._adapt = before

    def unique_name(self, label: str, *, named: bool) -> str:
        """Return the name of a new step: ``label``, with a number if another step has that name.

        Raises GraphError if the user chose the name (``named``) and another step has it.
        """
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
        """Return whether a name has a number only because it was taken, so that a change of the flow may change it."""
        return name in self._numbered

    def savepoint(self) -> Savepoint:
        return Savepoint(len(self._steps), len(self._numbered))

    def roll_back(self, savepoint: Savepoint) -> None:
        for step in self._steps[savepoint.steps :]:
            del self._by_name[step.name]
        del self._steps[savepoint.steps :]
        while len(self._numbered) > savepoint.numbered_names:
            self._numbered.popitem()


class Savepoint(NamedTuple):
    """The size of a graph at one moment."""

    steps: int
    numbered_names: int


def has_timestamps(edges: Iterable[Edge]) -> bool:
    """Return whether any of these edges brings records with timestamps."""
    return any(edge.upstream.timed for edge in edges)


def has_watermarks(edges: Iterable[Edge]) -> bool:
    """Return whether any of these edges brings event-time watermarks."""
    return any(edge.upstream.watermarked for edge in edges)


def upstream_of(edges: Iterable[Edge], *, but_awaited: bool = False) -> dict[Step, None]:
    """Return the steps that the records of these edges come from, but not by feedback.

    With ``but_awaited``, steps that only bring awaited inputs are left out, too.
    """
    return _found_upstream(
        edges, lambda step: [each for each in step.edges if not but_awaited or each.input_name != step.awaited_input]
    )


def _found_upstream(edges: Iterable[Edge], before: Callable[[Step], Iterable[Edge]]) -> dict[Step, None]:
    """Return the steps upstream of these edges; ``before`` returns the edges to follow further from a step."""
    found: dict[Step, None] = {}
    waiting = [edge.upstream for edge in edges]
    while waiting:
        if (step := waiting.pop()) not in found:
            found[step] = None
            waiting += [edge.upstream for edge in before(step)]
    return found


def awaited_edges(step: Step) -> list[Edge]:
    """Return the edges to the awaited input of a step; none if it awaits no input."""
    return [edge for edge in step.edges if edge.input_name == step.awaited_input]


def read_to_end(steps: Iterable[Step]) -> dict[Step, None]:
    """Return the steps before tables that others wait for, whose sources tell when they have read to the end.

    The records of the start are before that end, or the records that have replaced them meanwhile. In a loop, the table
    ends, and its end says enough.
    """
    awaiting = (step for step in steps if step.loop is None and not step.others_follow)
    return upstream_of(edge for step in awaiting for edge in awaited_edges(step))


def order_numbers(steps: Sequence[Step]) -> dict[Step, int]:
    """Return the steps that must tell the order of their records, with a number for each."""
    telling = telling_order(edge for step in steps if step.order == "needs" for edge in step.edges)
    return {step: number for number, step in enumerate(step for step in steps if step in telling)}


def telling_order(edges: Iterable[Edge]) -> dict[Step, None]:
    """Return the last steps before these edges that can tell the order of their records."""
    found = _found_upstream(edges, lambda step: step.edges if step.order is None else ())
    return {step: None for step in found if step.order in ("begins", "spans")}


def comes_one_way(edges: Sequence[Edge]) -> bool:
    """Return whether records come from one subtask that tells their order, through steps with one subtask."""
    while len(edges) == 1 and edges[0].upstream.parallelism == 1:
        if edges[0].upstream.order is not None:
            return True
        edges = edges[0].upstream.edges
    return False


def leaves_loop(edge: Edge, reader: Step) -> bool:
    """Return whether an edge brings records out of the body of an iteration; their epochs end with the body."""
    return edge.upstream.loop is not None and edge.upstream.loop is not reader.loop


def edge_key(step: Step, edge: Edge) -> tuple[str, str, str | None, int]:
    """Return the input of an edge, the step and the side output that it begins at, and its number.

    It is the number among the edges that bring the same output to the same input of ``step``; mostly 0.
    """
    alike = [
        other
        for other in step.inputs
        if (other.upstream, other.input_name, other.tag) == (edge.upstream, edge.input_name, edge.tag)
    ]
    tag = None if edge.tag is None else edge.tag.name
    return edge.input_name, edge.upstream.name, tag, alike.index(edge)
