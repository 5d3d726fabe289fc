"""What functions that make several steps of a stream have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import check_name
from streamiter.flow.stream import Stream
from streamiter.operators.rejection import shortened

__all__ = ["check_stream", "step_names"]


def step_names(flow: Flow, name: str | None) -> Callable[[str], str]:
    """What gives each step its name: what it does, behind the ``name`` that the user chose for the algorithm.

    Without one, the names of a second algorithm of the same kind get a number.

    >>> flow = Flow("names")
    >>> step_names(flow, None)("train"), step_names(flow, "clicks")("train")
    ('train', 'clicks: train')
    """
    check_name(name)

    def name_of(step: str) -> str:
        return flow.unique_name(step if name is None else f"{name}: {step}", named=name is not None)

    return name_of


def check_stream(owner: str, given: Any, of_what: str, *, bounded: bool = False) -> None:
    """Raise GraphError for what is no stream; ``bounded`` only says how to make one."""
    if not isinstance(given, Stream):
        source = 'flow.source(…, stop="latest")' if bounded else "flow.source(…)"
        raise GraphError(
            f"{owner}: expected a stream of {of_what}, given {shortened(given)}; make one with {source} or "
            "flow.from_items(…)"
        )
