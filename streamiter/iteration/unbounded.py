"""Unbounded iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from streamiter.flow.stream import Stream
from streamiter.iteration.builder import Body, IterationBuilder
from streamiter.iteration.checks import check_arguments, check_body, check_config
from streamiter.iteration.config import IterationConfig

__all__ = ["iterate_unbounded_streams"]


@overload
def iterate_unbounded_streams(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream],
    body: Body[Sequence[Stream]],
    config: IterationConfig | None = None,
) -> list[Stream]: ...
@overload
def iterate_unbounded_streams(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream],
    body: Body[Mapping[str, Stream]],
    config: IterationConfig | None = None,
) -> dict[str, Stream]: ...
def iterate_unbounded_streams(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream],
    body: Body[Any],
    config: IterationConfig | None = None,
) -> list[Stream] | dict[str, Stream]:
    """Iterate for as long as data comes in; source: FLIP-176.

    ``body(variables, data)`` is called once, to build the graph of the loop: ``variables`` are the initial
    values followed by what is fed back, ``data`` the data streams. It gives an
    :class:`IterationBodyResult`; the iteration gives its output streams (a list, or a dict as it was given).

    Records of the initial variables and of the data have epoch 0, what is emitted has the epoch of what
    it was emitted for, and each way round the loop adds one. When all inputs have ended, the iteration
    ends at the first complete epoch from 1 on that brought no feedback; where the data is stamped and its last
    epoch is k, from k + 2 on: steps hear of the end of the data in epoch k + 1, and what they emit then in
    ``input_ended`` is fed back and handled.

    Raises GraphError for a graph that cannot run, naming the stream.

    >>> from streamiter import Flow, IterationBodyResult
    >>> flow = Flow("count to five")
    >>> def body(variables, data):
    ...     raised = variables[0].map(lambda x: x + 1)
    ...     return IterationBodyResult([raised.filter(lambda x: x < 5)], [raised])
    >>> [numbers] = iterate_unbounded_streams([flow.from_items([0])], [], body)
    >>> seen = numbers.collect()
    >>> flow.run().state, seen.items
    ('finished', [1, 2, 3, 4, 5])
    """
    initial, data = check_arguments(init_variable_streams, data_streams)
    check_body(body)
    return IterationBuilder(initial, data, check_config(config), bounded=False).build(body)
