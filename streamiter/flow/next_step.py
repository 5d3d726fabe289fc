"""The next step: what all methods that add one have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import check_name, check_parallelism, check_policy, check_service
from streamiter.flow.step_options import StepOptions
from streamiter.operators.operator import IterationListener, Operator, OperatorFactory
from streamiter.operators.rejection import DEAD_LETTERS
from streamiter.runtime.entries import check_can_listen
from streamiter.runtime.graph import Edge, KeySelector, Step
from streamiter.runtime.partitioning import Forward, Rebalance
from streamiter.user_code import user_line

if TYPE_CHECKING:
    from streamiter.flow.flow import Flow
    from streamiter.flow.stream import Stream

__all__ = ["add_next_step", "label_of", "may_emit_unasked", "rebalance_unequal"]


def add_next_step(
    streams: Mapping[str, Stream],
    label: str,
    factory: OperatorFactory,
    options: StepOptions,
    *,
    keys: KeySelector | None = None,
    shape: str = "operator",
    label_lasts: bool = False,
    waits_for_end: bool = False,
    emits_unasked: bool = False,
) -> Stream:
    """Add a step behind streams of one flow, each under the name of an input; gives the stream of its output.

    ``label`` names it where the options do not; ``label_lasts`` if it says which step it is, whatever others there are.
    ``waits_for_end``: it emits when its inputs have ended; ``emits_unasked``: it may emit before it is given a record.
    """
    flow = next(iter(streams.values())).flow
    check_name(options.name)
    named = options.name is not None
    label = options.name or label
    edges = [edge for name, stream in streams.items() for edge in stream.edges(name)]
    parallelism = check_parallelism(
        _default_parallelism(edges, flow) if options.parallelism is None else options.parallelism, step=label
    )
    policy = check_policy(options.on_error, options.dead_letter, step=label)
    service = check_service(options.service, step=label)
    for stream in streams.values():
        _check_loop(stream, label)
    rebalance_unequal(edges, parallelism)
    round_scope = getattr(flow.loop, "round_scope", None)
    with flow.all_or_nothing():
        name = flow.graph.unique_name(label, named=named)
        step = Step(
            name=name,
            parallelism=parallelism,
            where=user_line(),
            factory=factory,
            inputs=edges,
            keys=keys,
            policy=policy,
            service=service,
            has_lasting_name=(named or label_lasts) and not flow.graph.is_numbered(name),
            loop=flow.loop,
            round_scope=round_scope,
            bounded=all(stream.is_bounded for stream in streams.values()),
            stamped=all(edge.upstream.stamped for edge in edges),
            emits_at_end=(waits_for_end and round_scope is None)
            or (not emits_unasked and all(edge.upstream.emits_at_end for edge in edges)),
            shape=shape,
        )
        if isinstance(factory, type):
            _check_class(factory, step)
        output = flow.add_step(step)
        if options.dead_letter is not None:
            output.side_output(DEAD_LETTERS).to_dead_letters(options.dead_letter)
    return output


def may_emit_unasked(factory: OperatorFactory) -> bool:
    """Whether an operator of the user may emit without a record: in a callback, at a timer or the end of an input."""
    if not isinstance(factory, type):
        return True  # Nothing is known of what it makes.
    return (
        issubclass(factory, IterationListener)
        or hasattr(factory, "input_ended")
        or hasattr(factory, "on_timer")
    )


def _check_class(operator: type[Operator], step: Step) -> None:
    """What can be told of an operator before there is one."""
    check_can_listen(operator, step.hears_of_epochs, step=step.name)
    if step.loop is not None:
        step.loop.check_operator(step, operator)


def label_of(factory: OperatorFactory) -> str:
    """The name of a class or function; a lambda has none that says anything."""
    return getattr(factory, "__name__", "process").replace("<lambda>", "process")


def _default_parallelism(edges: list[Edge], flow: Flow) -> int:
    straight = [edge.upstream.parallelism for edge in edges if isinstance(edge.partitioning, Forward)]
    return max(straight, default=flow.parallelism)


def rebalance_unequal(edges: list[Edge], parallelism: int) -> None:
    """Deal records out in turn where subtask cannot go to subtask."""
    for edge in edges:
        if isinstance(edge.partitioning, Forward) and edge.upstream.parallelism != parallelism:
            edge.partitioning = Rebalance()


def _check_loop(stream: Stream, label: str) -> None:
    """A step and its inputs are of the same iteration body, or all outside."""
    loop = stream.flow.loop
    if loop is not None and stream.loop is loop:
        loop.check_streams(label, stream.edges())
    for step in stream.steps:
        if step.loop is loop:
            continue
        if loop is None:
            raise GraphError(
                f"step {label!r}: expected a stream from outside the iteration, given {step.name!r} "
                "of its body; return it in output_streams and use what the iteration gives"
            )
        raise GraphError(
            f"step {label!r}: expected streams that come in through the body's arguments, given "
            f"{step.name!r} from outside; pass it as a data stream"
        )
