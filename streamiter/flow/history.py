"""The step behind ``stream.then(other)``: one stream to its end, and then another one."""

from __future__ import annotations

from streamiter.engine.graph.output import InStep
from streamiter.errors import GraphError, shortened
from streamiter.flow.building import Outlets, StepOutput, add_next_step, check_same_flow, edges_of, outlets_of
from streamiter.flow.event_time import has_event_time
from streamiter.flow.graph_checks import check_can_wait
from streamiter.flow.options import StepOptions, check_step_options
from streamiter.operators.steps import Then


def add_then(first: Outlets, following: object, options: StepOptions) -> StepOutput:
    """Add the step of ``Stream.then``."""
    check_step_options("then", options)
    if not isinstance(following, Outlets):
        raise GraphError(f"then: expected a stream, given {shortened(following)}; write history.then(flow.source(…))")
    check_same_flow(first, following, "then")
    label = options.get("name") or f"{first.name} then {following.name}"
    if first.flow.graph.loop is not None:
        raise GraphError(
            f"step {label!r}: expected no then() inside an iteration body, given one; put it before the iteration"
        )
    if not first.is_bounded:
        raise GraphError(
            f"step {label!r}: expected a first stream that ends, given {first.name!r}, which never ends; read its "
            'topic with stop="latest"'
        )
    if has_event_time(first) is not has_event_time(following):
        with_time, without = (first, following) if has_event_time(first) else (following, first)
        raise GraphError(
            f"step {label!r}: expected two streams with event time or two without, given {with_time.name!r} with and "
            f"{without.name!r} without; write .event_time(…) before .then(…) on both"
        )
    check_can_wait(edges_of(following), edges_of(first), first.flow.steps, step=label, waits="then")
    inputs = {"first": _in_step(first), "following": _in_step(following)}
    parallelism = options.get("parallelism") or max(first.parallelism, following.parallelism)
    return add_next_step(
        inputs,
        label,
        Then,
        {**options, "parallelism": parallelism},
        label_lasts=True,
        awaited_input="first",
        others_follow=True,
    )


def _in_step(stream: Outlets) -> Outlets:
    """Return the stream with ends that reach every subtask, unless its own partitioning does that."""
    outlets = outlets_of(stream)
    return Outlets(stream.flow, *(each._replace(partitioning=each.partitioning or InStep()) for each in outlets))
