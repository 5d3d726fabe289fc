"""What functions that make several steps of a stream have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from streamiter.errors import GraphError
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import check_name
from streamiter.flow.stream import Stream
from streamiter.operators.rejection import shortened

__all__ = ["all_or_nothing", "check_stream", "step_names"]

P = ParamSpec("P")
T = TypeVar("T")


def all_or_nothing(build: Callable[P, T]) -> Callable[P, T]:
    """For a function that adds several steps: where it raises, it leaves none of them in the flow.

    The flow is one of its arguments, or that of a stream among them.

    >>> @all_or_nothing
    ... def halves(stream):
    ...     return stream.map(lambda x: x / 2, name="half"), stream.map(None)
    >>> flow = Flow("halves")
    >>> halves(flow.from_items([1]))
    Traceback (most recent call last):
    streamiter.errors.GraphError: map: expected a function, given None; write a function or a lambda (at ...)
    >>> flow
    Flow('halves', 1 steps)
    """

    @wraps(build)
    def build_or_roll_back(*args: P.args, **kwargs: P.kwargs) -> T:
        flow = _flow_of(*args, *kwargs.values())
        if flow is None:  # It will be refused.
            return build(*args, **kwargs)
        with flow.all_or_nothing():
            return build(*args, **kwargs)

    return build_or_roll_back


def _flow_of(*arguments: object) -> Flow | None:
    for given in arguments:
        if isinstance(given, Flow):
            return given
        if isinstance(given, Stream):
            return given.flow
    return None


def step_names(flow: Flow, name: str | None) -> Callable[[str], str]:
    """What gives each step its name: what it does, behind the ``name`` that the user chose for the algorithm.

    Without one, the names of a second algorithm of the same kind get a number.

    >>> flow = Flow("names")
    >>> step_names(flow, None)("train"), step_names(flow, "clicks")("train")
    ('train', 'clicks: train')
    """
    check_name(name)

    def name_of(step: str) -> str:
        return flow.graph.unique_name(step if name is None else f"{name}: {step}", named=name is not None)

    return name_of


def check_stream(owner: str, given: Any, of_what: str, *, bounded: bool = False) -> None:
    """Raise GraphError for what is no stream; ``bounded`` only says how to make one."""
    if not isinstance(given, Stream):
        source = 'flow.source(…, stop="latest")' if bounded else "flow.source(…)"
        raise GraphError(
            f"{owner}: expected a stream of {of_what}, given {shortened(given)}; make one with {source} or "
            "flow.from_items(…)"
        )
