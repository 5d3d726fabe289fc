"""The placement of a flow: which steps form a task, and in which process each subtask runs.

A flow runs in one process or in several. One process makes an operator of each step, and :func:`place` reads its
*traits* and decides. The :class:`Placement` is plain data, so the other processes receive it and make only the
operators of their own subtasks. In each process a :class:`~streamiter.engine.plan.plan.Planner` builds the tasks.

Steps are *chained*: a step joins the task of the step before it if each of its subtasks reads exactly one subtask of
that step, in the same process, and nothing else. Each other edge has a channel from each upstream subtask to each
downstream subtask, with a number that is the same in all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NoReturn

import msgspec

from streamiter.engine.graph.graph import SINGLE_INPUT, Edge, Step, StepLoop, leaves_loop
from streamiter.engine.graph.output import Forward
from streamiter.engine.tasks.chain import is_per_round
from streamiter.engine.tasks.making import is_awaited
from streamiter.errors import GraphError
from streamiter.operators.holding import MiniBatch
from streamiter.operators.operator import Boundary, Operator, known_of
from streamiter.operators.source import Collect
from streamiter.topics.source_and_sink import TopicSink


class Traits(msgspec.Struct, frozen=True):
    """The properties of a step's operators that the tasks of the flow depend on."""

    boundary: bool
    """Whether they are at the border of an iteration, and handle control records themselves."""
    in_thread: bool
    """Whether they handle batches in a worker thread."""
    awaited: bool
    """Whether their task awaits them."""
    chooses_inputs: bool
    """Whether they have ``wanted_inputs``."""
    epochs_in_order: bool
    """Whether they receive one epoch after the other."""
    per_round: bool
    """Whether each epoch has operators of its own."""
    any_order: bool
    """Whether the order of the records of an epoch makes no difference to them."""
    stateless: bool
    """Whether they keep nothing from one batch to the next."""
    emits_at_once: bool
    """Whether what they emit for a batch was made of records of this batch."""
    mini_batches: bool
    """Whether they emit mini-batches."""
    central: bool
    """Whether all of them are in process 0: sinks that write in the job's transaction, and collected results."""
    takes_encoded: bool
    """Whether the other processes encode their records before they send them."""


class PlacedEdge(msgspec.Struct, frozen=True):
    """The channels of an edge."""

    first: int
    """The number of the first channel."""
    readers: int
    """The number of subtasks that read the edge."""
    forward: bool
    """Whether subtask i sends all records to subtask i."""
    one_at_a_time: bool
    """Whether the reader handles single records of it, because they are mini-batches."""

    def number(self, source: int, target: int) -> int | None:
        """Return the number of the channel between two subtasks; None if there is none."""
        if self.forward:
            return self.first + source if source == target else None
        return self.first + source * self.readers + target


class StepDescription(msgspec.Struct, frozen=True):
    """The properties of a step that must be the same in all processes."""

    name: str
    parallelism: int
    factory: str
    """The qualified name of the factory of its operators."""
    source: str
    """The qualified name of the factory of its sources; empty for a step that reads other steps."""
    loop: str
    """The kind and the number of its loop; empty outside loops."""
    inputs: tuple[str, ...]
    """Its edges: input, step and side output, partitioning."""


class PlacedStep(msgspec.Struct, frozen=True):
    """A step of the flow, with its place."""

    description: StepDescription
    traits: Traits
    chained_to: str | None
    """The step before it in its task; None for the first step of a task."""
    processes: tuple[int, ...]
    """The process of each subtask."""
    edges: tuple[PlacedEdge, ...]
    """The channels of each of its edges; none if it is chained."""
    first_member: int
    """The number of its first subtask among the members of its loop; 0 for a step that is none."""

    def check_operator(self, step: Step, operator: Operator) -> None:
        """Raise GraphError for an operator with other traits than the operators of the step in process 0."""
        given, expected = traits_of(step, operator), msgspec.structs.asdict(self.traits)
        for trait, value in msgspec.structs.asdict(given).items():
            if value != expected[trait]:
                _refuse_difference(
                    f"step {step.name!r}",
                    f"an operator with {trait}={expected[trait]}",
                    f"{type(operator).__name__} with {value}",
                    step.where,
                )


class Placement(msgspec.Struct, frozen=True):
    """The tasks and channels of a flow, and their processes: plain data, the same for all processes."""

    flow: str
    processes: int
    """The number of processes."""
    steps: tuple[PlacedStep, ...]
    """The steps, upstream first."""

    @property
    def tasks(self) -> int:
        """The number of tasks of all processes."""
        return sum(len(step.processes) for step in self.steps if step.chained_to is None)

    @property
    def fingerprint(self) -> str:
        """A short text that is equal for equal flows: of all names, edges, loops and factories, but no functions."""
        return _hash(self.flow, [step.description for step in self.steps])

    def check(self, flow: str, steps: Sequence[Step]) -> None:
        """Raise GraphError if the flow of this process has other steps; the error names the first one."""
        if flow != self.flow:
            _refuse_difference(f"flow {flow!r}", f"flow {self.flow!r}", "another flow", None)
        loops = _loops(steps)
        described_here = (_description(step, loops) for step in steps)
        for placed, described in zip_longest((step.description for step in self.steps), described_here):
            if placed is None or described is None or placed.name != described.name:
                expected = "no further step" if placed is None else f"step {placed.name!r}"
                given = "none" if described is None else f"step {described.name!r}"
                _refuse_difference(f"flow {flow!r}", expected, given, None)
            here = msgspec.structs.asdict(described)
            for what, value in msgspec.structs.asdict(placed).items():
                if here[what] != value:
                    where = next(step.where for step in steps if step.name == placed.name)
                    _refuse_difference(f"step {placed.name!r}", f"{what} {value!r}", repr(here[what]), where)


def fingerprint(flow: str, steps: Sequence[Step]) -> str:
    """Return the fingerprint that each placement of the flow has."""
    loops = _loops(steps)
    return _hash(flow, [_description(step, loops) for step in steps])


def _hash(flow: str, described: Sequence[StepDescription]) -> str:
    import hashlib  # for several processes only

    return hashlib.sha256(msgspec.msgpack.encode([flow, *described])).hexdigest()[:16]


def _refuse_difference(subject: str, expected: str, given: str, where: str | None) -> NoReturn:
    raise GraphError(
        f"{subject}: expected {expected} as in process 0, given {given}; start all processes with the same program, "
        "whose flow does not depend on the process",
        where=where,
    )


def traits_of(step: Step, operator: Operator) -> Traits:
    """Return the traits of an operator of this step. A user's class may have set numbers as truth values."""
    boundary, per_round = isinstance(operator, Boundary), is_per_round(step, operator)
    known = known_of(operator)
    sink = operator if isinstance(operator, TopicSink) and operator.is_transactional else None
    return Traits(
        boundary=boundary,
        in_thread=bool(operator.runs_in_thread),
        awaited=not boundary and is_awaited(operator, step.input_names(), step=step.name, keyed=step.keys is not None),
        chooses_inputs=hasattr(operator, "wanted_inputs"),
        epochs_in_order=bool(operator.epochs_in_order or per_round),
        per_round=per_round,
        any_order=bool(operator.any_order),
        stateless=bool(known.is_stateless),
        emits_at_once=bool(known.is_stateless or known.emits_at_once),
        mini_batches=isinstance(operator, MiniBatch),
        central=sink is not None or isinstance(operator, Collect),
        takes_encoded=sink is not None and sink.takes_encoded,
    )


def place(flow: str, steps: Sequence[Step], operators: Mapping[Step, Operator], processes: int) -> Placement:
    """Decide the tasks and channels of a flow, and their processes. ``operators`` has one operator of each step.

    Subtask i is in process i modulo ``processes``, so that chains and edges that forward stay in a process. Raises
    GraphError for a flow that cannot run in this many processes.
    """
    traits = {step: traits_of(step, operators[step]) for step in steps}
    if processes > 1:
        _check_can_be_divided(flow, steps, traits, processes)
    homes = {
        step: tuple(0 if traits[step].central else subtask % processes for subtask in range(step.parallelism))
        for step in steps
    }
    loops, members = _loops(steps), _first_members(steps)
    placed: list[PlacedStep] = []
    channels = 0
    for step in steps:
        is_chained = _is_chained(step, traits) and homes[step] == homes[step.inputs[0].upstream]
        edges: list[PlacedEdge] = []
        for edge in () if is_chained else step.inputs:
            forward = isinstance(edge.partitioning, Forward)
            edges.append(PlacedEdge(channels, step.parallelism, forward, _brings_mini_batches(step, edge, traits)))
            channels += step.parallelism * (1 if forward else edge.upstream.parallelism)
        placed.append(
            PlacedStep(
                _description(step, loops),
                traits[step],
                chained_to=step.inputs[0].upstream.name if is_chained else None,
                processes=homes[step],
                edges=tuple(edges),
                first_member=members.get(step, 0),
            )
        )
    return Placement(flow, processes, tuple(placed))


def _is_chained(step: Step, traits: Mapping[Step, Traits]) -> bool:
    """Return whether a step can be called directly by the only step that it reads, if both are in one process."""
    if step.source is not None or len(step.inputs) != 1:
        return False
    [edge] = step.inputs
    upstream = edge.upstream
    single = step.parallelism == upstream.parallelism == 1
    straight = isinstance(edge.partitioning, Forward) and step.parallelism == upstream.parallelism
    return (
        (single or straight)
        and edge.feedback is None
        and edge.input_name == SINGLE_INPUT
        and not leaves_loop(edge, step)
        and not _begins_task(step, traits[step])
        and not traits[upstream].in_thread
    )


def _begins_task(step: Step, traits: Traits) -> bool:
    return (
        traits.boundary
        or step.service is not None  # it stops reading at a clock, and must not be between two steps then
        or traits.epochs_in_order
        or traits.chooses_inputs
        or traits.awaited
    )


def _brings_mini_batches(step: Step, edge: Edge, traits: Mapping[Step, Traits]) -> bool:
    """Return whether an edge brings mini-batches to a step of a loop that has other inputs too.

    Such a step handles one mini-batch at a time: a batch of several would be handled with the same state of the
    model, although newer states have arrived at another input.
    """
    if step.loop is None or len(step.input_names()) < 2 or edge.feedback is not None:
        return False
    upstream = edge.upstream
    while not traits[upstream].mini_batches:
        if len(upstream.inputs) != 1 or upstream.loop is not step.loop:
            return False
        upstream = upstream.inputs[0].upstream
    return True


def _loops(steps: Sequence[Step]) -> list[StepLoop]:
    return list(dict.fromkeys(step.loop for step in steps if step.loop is not None))


def _first_members(steps: Sequence[Step]) -> dict[Step, int]:
    """Return the number of the first subtask of each step that is a member of a loop."""
    numbers: dict[Step, int] = {}
    for loop in _loops(steps):
        following = 0
        for step in loop.members:
            numbers[step] = following
            following += step.parallelism
    return numbers


def _description(step: Step, loops: Sequence[StepLoop]) -> StepDescription:
    loop = ""
    if step.loop is not None:
        loop = f"{'bounded' if step.loop.bounded else 'unbounded'} loop {loops.index(step.loop)}"
    return StepDescription(
        step.name,
        step.parallelism,
        factory=_qualified_name(step.factory),
        source="" if step.source is None else _qualified_name(step.source),
        loop=loop,
        inputs=tuple(_described_edge(edge) for edge in step.inputs),
    )


def _described_edge(edge: Edge) -> str:
    side = "" if edge.tag is None else f" side {edge.tag.name!r}"
    feedback = "" if edge.feedback is None else " fed back"
    return f"{edge.input_name} from {edge.upstream.name!r}{side} by {type(edge.partitioning).__name__}{feedback}"


def _qualified_name(factory: Callable[[], object]) -> str:
    name = getattr(factory, "__qualname__", None)
    return name if isinstance(name, str) else type(factory).__qualname__


def _check_can_be_divided(flow: str, steps: Sequence[Step], traits: Mapping[Step, Traits], processes: int) -> None:
    most = max(step.parallelism for step in steps if not traits[step].central)
    if processes > most:
        raise GraphError(
            f"flow {flow!r}: expected at most {most} processes, the highest parallelism of the steps that can be in "
            f"several processes, given {processes}; raise the parallelism of the flow, or of the steps around a "
            "learner of one subtask, which stays in the first process; or use fewer processes"
        )
    for step in steps:
        if any(edge.feedback_topic is not None for edge in step.inputs):
            raise GraphError(
                f"step {step.name!r}: expected a flow without feedback through topics in {processes} processes, given "
                "one; feed back in memory: leave feedback_through out",
                where=step.where,
            )
