"""Parts of an iteration body whose operators begin anew in each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.stream import Stream
from streamiter.operators.output import asynchronous_kind, misfit
from streamiter.operators.rejection import shortened
from streamiter.records import OutputTag
from streamiter.runtime.graph import Edge, Step

__all__ = ["RoundScope", "for_each_epoch", "for_each_round"]

_StepOutput = tuple[Step, OutputTag | None]


class RoundScope:
    """Marks the steps of which each epoch has its own instances, and which streams may come in and go out."""

    def __init__(self, *, whole_body: bool = False, given: Iterable[Stream] = ()) -> None:
        self.whole_body = whole_body
        self._given = _outputs_of(given)
        self._given_back: set[_StepOutput] = set()

    def give_back(self, streams: Iterable[Stream]) -> None:
        """These streams may be used outside."""
        self._given_back |= _outputs_of(streams)

    def check_use_inside(self, label: str, edge: Edge) -> None:
        """Raise GraphError for a stream that did not come in through the arguments."""
        if self.whole_body or edge.upstream.round_scope is self or (edge.upstream, edge.tag) in self._given:
            return
        raise GraphError(
            f"step {label!r}: for_each_round expected streams that come in through its sub-body's argument, given "
            f"{edge.upstream.name!r} from outside; add it to the list: for_each_round([…, stream], sub_body)"
        )

    def check_use_outside(self, label: str, edge: Edge) -> None:
        """Raise GraphError for a stream that the sub-body did not give back."""
        if self.whole_body or (edge.upstream, edge.tag) in self._given_back:
            return
        raise GraphError(
            f"step {label!r}: expected a stream from outside for_each_round, given {edge.upstream.name!r} of its "
            "sub-body; return it from the sub-body and use what for_each_round gives"
        )


def for_each_round(
    streams: Sequence[Stream], sub_body: Callable[[list[Stream]], Sequence[Stream]]
) -> list[Stream]:
    """Have the steps that ``sub_body`` adds begin anew in each epoch of a bounded iteration.

    They are made for the first record of an epoch, and finish at its end, so that steps for bounded input
    work inside a loop: ``reduce_all``, ``sort``, ``join``. Data that is not replayed is seen in epoch 0 only.
    ``sub_body(streams)`` is called once and gives a list of streams, which is what this gives. Source:
    FLIP-176's ``forEachRound``.

    Raises GraphError outside the body of a bounded iteration, and for streams that come in past the
    argument.

    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination, replayed
    >>> flow = Flow("sums")
    >>> def body(variables, data):
    ...     [sums] = for_each_round([*data], lambda streams: [streams[0].reduce_all(lambda a, b: a + b)])
    ...     rounds = variables[0].map(lambda n: n + 1).filter(lambda n: n < 3)
    ...     return IterationBodyResult([rounds], [sums])
    >>> [sums] = iterate_bounded_streams_until_termination(
    ...     [flow.from_items([0])], [replayed(flow.from_items([10, 20]))], body
    ... )
    >>> collected = sums.collect()
    >>> flow.run().state, collected.items
    ('finished', [30, 30, 30])
    """
    given = _listed(streams, "expected a list of streams")
    if not given:
        raise GraphError(
            "for_each_round: expected at least one stream, given none; write for_each_round([stream], …)"
        )
    if not callable(sub_body) or (kind := asynchronous_kind(sub_body)):
        shown = shortened(sub_body) if not callable(sub_body) else f"a {kind}"
        raise GraphError(
            f"for_each_round: expected the sub-body to be a plain function, given {shown}; write def "
            "sub_body(streams) that gives a list of streams"
        )
    if reason := misfit(sub_body, ["streams"]):
        raise GraphError(
            f"for_each_round: expected the sub-body to take one argument, the list of streams, given {reason}; write "
            "def sub_body(streams)"
        )
    loop: Any = given[0].flow.loop
    if loop is None:
        raise GraphError(
            f"for_each_round: expected to be called in the body of an iteration, given {given[0].name!r} outside; "
            "outside a step begins once anyway"
        )
    if not loop.bounded:
        raise GraphError(
            "for_each_round: expected the body of a bounded iteration, given an unbounded one, whose steps live as "
            "long as it does; keep a state for each epoch in an IterationListener"
        )
    around: RoundScope | None = loop.round_scope
    if around is not None and around.whole_body:  # All of it begins anew in each round already.
        with given[0].flow.all_or_nothing():
            return _result(sub_body(given))
    if around is not None:
        raise GraphError(
            "for_each_round: expected no for_each_round inside another, given one; leave the inner one out"
        )
    for stream in given:
        loop.check_streams("for_each_round", stream.edges())
    with given[0].flow.all_or_nothing():
        scope = loop.round_scope = RoundScope(given=given)
        result = _result(sub_body(given))
        loop.round_scope = None
        for stream in result:
            for edge in stream.edges():
                scope.check_use_inside("for_each_round", edge)
    scope.give_back(result)
    return result


def for_each_epoch(*, bounded: bool) -> str:
    """What to write instead of a step that waits for the end of the iteration."""
    sub_body = "for_each_round([stream], lambda streams: [streams[0].reduce_all(f)]), or "
    return f"for a result of each epoch write {sub_body if bounded else ''}all_reduce(stream, f)"


def _outputs_of(streams: Iterable[Stream]) -> set[_StepOutput]:
    return {(edge.upstream, edge.tag) for stream in streams for edge in stream.edges()}


def _result(streams: Any) -> list[Stream]:
    return _listed(streams, "expected the sub-body to give a list of streams")


def _listed(streams: Any, expected: str) -> list[Stream]:
    if not isinstance(streams, (list, tuple)) or not all(isinstance(stream, Stream) for stream in streams):
        raise GraphError(f"for_each_round: {expected}, given {shortened(streams)}; write [stream]")
    return list(streams)
