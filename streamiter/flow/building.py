"""What a flow, its streams and its iterations share while the graph is built.

``FlowUnderConstruction`` owns the graph, and ``Flow`` derives from it. ``Outlets`` are outputs of steps, and ``Stream``
derives from it. ``BodyLoop`` states what a flow asks of an iteration while the body of the iteration is built.
The module is below ``Flow`` and ``Stream``, so that everything that adds a step can use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import ConfigurationError, GraphError
from streamiter.flow.graph_checks import check_parallelism
from streamiter.records import OutputTag
from streamiter.runtime.graph import SINGLE_INPUT, Edge, FeedbackLimits, Graph, Step, StepLoop
from streamiter.runtime.output import Forward, Partitioning, Rebalance
from streamiter.topics.topic import Topic


class BodyLoop(StepLoop, Protocol):
    """What a flow asks of the iteration whose body is being built."""

    @property
    def round_scope(self) -> object | None:
        """The part of the body that is being built now and gives each epoch operators of its own, or None."""

    def check_streams(self, label: str, edges: Iterable[Edge]) -> None:
        """Raise GraphError if a step would read a stream across the border of such a part."""


class FlowUnderConstruction:
    """The part of a flow that its streams and iterations change: the graph, and what belongs to it."""

    def __init__(self, name: str, parallelism: int = 1) -> None:
        if not name or not isinstance(name, str):
            raise GraphError(f"Flow: expected a name, given {name!r}; it keys checkpoints and transactions")
        self.name = name
        self.parallelism = check_parallelism(parallelism, step=name)
        self.plain_data = PlainData()
        self.graph = Graph()
        """For the engine: the steps and their names."""
        self.published_models: dict[tuple[str, str], str] = {}
        """For the engine: the line that publishes a model, by topic and model."""
        self._loop: BodyLoop | None = None

    @property
    def steps(self) -> Sequence[Step]:
        """For the engine: the steps, in the order in which they were added."""
        return self.graph.steps

    @property
    def loop(self) -> BodyLoop | None:
        """For the engine: the iteration whose body is being built, or None."""
        return self._loop

    @contextlib.contextmanager
    def body_of(self, loop: BodyLoop) -> Iterator[None]:
        """For the engine: all steps that are added in this block belong to the body of an iteration."""
        self._loop = loop
        try:
            yield
        finally:
            self._loop = None

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """For the engine: if the block raises, remove all that the block has added to the flow.

        Any exception counts, KeyboardInterrupt too: the session of a notebook continues after it. Blocks may be nested.
        """
        steps = self.graph.savepoint()
        models, structs = len(self.published_models), self.plain_data.struct_count
        try:
            yield
        except BaseException:
            self.graph.roll_back(steps)
            while len(self.published_models) > models:
                self.published_models.popitem()
            self.plain_data.forget_structs(structs)
            raise

    def register(self, struct: type[msgspec.Struct]) -> None:
        """Let a ``msgspec.Struct`` count as plain data, under its class name, so that it can be stored."""
        self.plain_data.register(struct)

    def register_struct_of(self, codec: Any) -> None:
        """For the engine: register the ``msgspec.Struct`` s that a decoder or encoder of a user names.

        Of two classes of one name only the first is registered; the second is refused where it would be stored.
        """
        for struct in getattr(codec, "struct_types", ()):
            with contextlib.suppress(ConfigurationError):
                self.register(struct)


class StepOutput(NamedTuple):
    """One output of one step, with the partitioning that was chosen for the next step."""

    step: Step
    tag: OutputTag | None = None
    """The side output; None for the main output."""
    partitioning: Partitioning | None = None
    """None: records of subtask i go to subtask i, or to all in turn if their number differs."""
    is_outside: bool = False
    """Whether the records leave the iteration of the step."""

    @property
    def loop(self) -> StepLoop | None:
        """The iteration whose body these records belong to, or None."""
        return None if self.is_outside else self.step.loop

    def outside(self) -> StepOutput:
        """Return the same output as it is read outside the iteration, where its records have no epochs."""
        return self._replace(is_outside=True)


class Outlets:
    """Outputs of one or more steps: the records of a stream, without the methods that add steps."""

    def __init__(self, flow: FlowUnderConstruction, *outlets: Step | StepOutput) -> None:
        self._building = flow
        self._outlets = tuple(
            outlet if isinstance(outlet, StepOutput) else StepOutput(outlet) for outlet in outlets
        )

    @property
    def flow(self) -> FlowUnderConstruction:
        """The flow that contains the stream."""
        return self._building

    @property
    def outlets(self) -> tuple[StepOutput, ...]:
        """For the engine: the outputs."""
        return self._outlets

    @property
    def name(self) -> str:
        """The step (or steps) that emits the records."""
        return " ∪ ".join(outlet.step.name for outlet in self._outlets)

    @property
    def parallelism(self) -> int:
        """The number of subtasks of the step that emits the records (of the widest step, for a union)."""
        return max(outlet.step.parallelism for outlet in self._outlets)

    @property
    def is_bounded(self) -> bool:
        """Whether the stream ends by itself."""
        return all(outlet.step.bounded for outlet in self._outlets)

    @property
    def emits_at_end(self) -> bool:
        """For the engine: whether its records come only at the end, in an iteration at the end of the iteration."""
        return all(outlet.step.emits_at_end for outlet in self._outlets)

    @property
    def loop(self) -> StepLoop | None:
        """For the engine: the iteration whose body contains the stream, or None."""
        return self._outlets[0].loop

    @property
    def steps(self) -> tuple[Step, ...]:
        """For the engine: the steps that emit the records."""
        return tuple(outlet.step for outlet in self._outlets)

    def edges(
        self,
        input_name: str = SINGLE_INPUT,
        *,
        feedback: FeedbackLimits | None = None,
        feedback_topic: Topic | None = None,
    ) -> list[Edge]:
        """For the engine: return new edges that bring the records to an input of a step.

        ``feedback`` and ``feedback_topic`` are those of the edges. Raises GraphError if a step was removed.
        """
        for step in self.steps:
            if step not in self._building.graph:
                raise GraphError(
                    f"stream {self.name!r}: expected a step of flow {self._building.name!r}, given {step.name!r}, "
                    "which was taken out again when the call that added it failed; make the stream again"
                )
        return [
            Edge(
                outlet.step,
                input_name,
                outlet.partitioning or Forward(),
                outlet.tag,
                feedback,
                feedback_topic,
            )
            for outlet in self._outlets
        ]


def matched(edges: Iterable[Edge], parallelism: int) -> list[Edge]:
    """Return the edges to a step of this parallelism: records are dealt out in turn if subtasks differ in number."""
    return [
        replace(edge, partitioning=Rebalance())
        if isinstance(edge.partitioning, Forward) and edge.upstream.parallelism != parallelism
        else edge
        for edge in edges
    ]


# -- checks of streams -------------------------------------------------------------------------------------


def check_same_flow(stream: Outlets, other: Outlets, method: str) -> None:
    """Raise GraphError if two streams belong to different flows."""
    if other.flow is not stream.flow:
        raise GraphError(
            f"{method}: expected streams of one flow, given {stream.name!r} of flow {stream.flow.name!r} and "
            f"{other.name!r} of flow {other.flow.name!r}; make both with methods of one flow"
        )


def check_bounded(stream: Outlets, method: str) -> None:
    """Raise GraphError for a stream that never ends: the result of ``method`` would never come."""
    if not stream.is_bounded:
        otherwise = (
            'read the topic with stop="latest", or use key_by(…).reduce(…) for running results'
            if stream.flow.loop is None
            else "in an IterationListener emit a result for each epoch of stamped data"
        )
        raise GraphError(
            f"{method}: expected a bounded stream, given {stream.name!r}, which never ends; {otherwise}"
        )


def check_outside_loops(stream: Outlets, method: str, label: str) -> None:
    """Raise GraphError for a stream in the body of an iteration, or while any body is being built."""
    if stream.flow.loop is not None or stream.loop is not None:
        raise GraphError(
            f"step {label!r}: expected no {method} inside an iteration body, given one; return the stream "
            "in output_streams and put the sink behind the iteration"
        )
