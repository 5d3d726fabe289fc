"""Bounded iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from streamiter.flow.stream import Stream
from streamiter.iteration.builder import Body, IterationBuilder
from streamiter.iteration.checks import check_arguments, check_body, check_config
from streamiter.iteration.config import IterationConfig
from streamiter.iteration.replayed import Replayed

__all__ = ["iterate_bounded_streams_until_termination"]


@overload
def iterate_bounded_streams_until_termination(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream | Replayed],
    body: Body[Sequence[Stream]],
    config: IterationConfig | None = None,
) -> list[Stream]: ...
@overload
def iterate_bounded_streams_until_termination(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream | Replayed],
    body: Body[Mapping[str, Stream]],
    config: IterationConfig | None = None,
) -> dict[str, Stream]: ...
def iterate_bounded_streams_until_termination(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream | Replayed],
    body: Body[Any],
    config: IterationConfig | None = None,
) -> list[Stream] | dict[str, Stream]:
    """Iterate over bounded data until nothing is fed back, or the criteria say so; source: FLIP-176.

    ``body(variables, data)`` is called once, to build the graph of the loop: ``variables`` are the initial
    values followed by what is fed back, ``data`` the data streams: each as it is, seen in epoch 0 only, or
    ``replayed(stream)``, seen in every epoch. It gives an :class:`IterationBodyResult`; the iteration gives
    its output streams (a list, or a dict as it was given).

    Records of the initial variables and of the data have epoch 0, what is emitted has the epoch of what it was
    emitted for, and each way round the loop adds one. Epoch e is complete when all feedback of it has come
    back and the data has ended. The iteration ends at the first complete epoch from 1 on that brought no
    feedback, or, where the body gives ``termination_criteria``, no record of that stream. The feedback of that last
    epoch is still handled, and what it leads to is output.

    Feedback waits until its epoch is complete (``IterationConfig(max_epochs_ahead=0)``), so that the result does not
    depend on who is faster; a larger number, or None, lets it run ahead.

    Raises GraphError for a graph that cannot run, naming the stream.

    >>> from streamiter import Flow, IterationBodyResult
    >>> flow = Flow("count to five")
    >>> def body(variables, data):
    ...     raised = variables[0].map(lambda x: x + 1)
    ...     return IterationBodyResult([raised.filter(lambda x: x < 5)], [raised])
    >>> [numbers] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    >>> seen = numbers.collect()
    >>> flow.run().state, seen.items
    ('finished', [1, 2, 3, 4, 5])
    """
    initial, data = check_arguments(init_variable_streams, data_streams)
    check_body(body)
    return IterationBuilder(initial, data, check_config(config), bounded=True).build(body)
