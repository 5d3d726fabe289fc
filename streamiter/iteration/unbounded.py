"""Unbounded iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.iteration.checks import (
    check_arguments,
    check_body,
    check_bounded,
    check_config,
    check_result,
    check_stamps,
    is_stamped,
)
from streamiter.iteration.config import AS_THE_ENTRY_POINT_SAYS, IterationBodyResult, IterationConfig
from streamiter.iteration.entrance import Entrance
from streamiter.iteration.exit import Exit
from streamiter.iteration.head import FEEDBACK, INITIAL, Head
from streamiter.iteration.loop import Loop
from streamiter.runtime.graph import Edge, Step
from streamiter.runtime.partitioning import Forward, Rebalance
from streamiter.user_code import user_line

__all__ = ["Body", "iterate_unbounded_streams"]

Body = Callable[[list[Stream], list[Stream]], IterationBodyResult]


def iterate_unbounded_streams(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream],
    body: Body,
    config: IterationConfig | None = None,
) -> Any:
    """Iterate for as long as data comes in; source: FLIP-176.

    ``body(variables, data)`` is called once, to build the graph of the loop: ``variables`` are the initial
    values followed by what is fed back, ``data`` the data streams. It gives an
    :class:`IterationBodyResult`; the iteration gives its output streams (a list, or a dict as it was given).

    Records of the initial variables and of the data have epoch 0, what is emitted has the epoch of what
    it was emitted for, and each way round the loop adds one. When all inputs have ended, the iteration
    ends at the first complete epoch, above those of the data, that brought no feedback.

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
    return _Builder(initial, data, check_config(config)).build(body)


class _Builder:
    """Checks one iteration and puts its border into the graph."""

    def __init__(self, initial: list[Stream], data: list[Stream], config: IterationConfig) -> None:
        self._initial = initial
        self._data = data
        self._config = config
        self._flow: Flow = initial[0].flow
        self._where = user_line()
        ahead = config.max_epochs_ahead
        self._ahead: int | None = None if ahead is AS_THE_ENTRY_POINT_SAYS else ahead
        check_bounded(initial)
        check_stamps(self._ahead, data)

    def build(self, body: Body) -> Any:
        endless = any(not stream.is_bounded and not is_stamped(stream) for stream in self._data)
        loop = self._loop = Loop(has_plain_endless_data=endless, limits=self._config.feedback_limits)
        self._flow.loop = loop
        try:
            variables = [self._add_head(number, stream) for number, stream in enumerate(self._initial)]
            data = [self._add_entrance(number, stream) for number, stream in enumerate(self._data)]
            result = body(variables, data)
        finally:
            self._flow.loop = None
        result = check_result(result, loop, self._initial)
        for head, initial, feedback in zip(
            loop.heads, self._initial, result.feedback_variable_streams, strict=True
        ):
            self._close_loop(head, initial, feedback)
        for stream, then in loop.leaving:
            then(self._add_exit(f"exit {stream.name}", stream))
        outputs = result.output_streams
        if isinstance(outputs, Mapping):
            return {key: self._add_exit(f"output {key}", stream) for key, stream in outputs.items()}
        return [self._add_exit(f"output {number}", stream) for number, stream in enumerate(outputs)]

    # -- the border ----------------------------------------------------------------------------------------

    def _add_head(self, number: int, stream: Stream) -> Stream:
        loop, ahead = self._loop, self._ahead
        variable = self._add(
            f"variable {number}", stream, INITIAL, lambda: Head(loop.coordinator, ahead), loop=loop
        )
        loop.heads += variable.steps
        return variable

    def _add_entrance(self, number: int, stream: Stream) -> Stream:
        loop, ahead, stamped = self._loop, self._ahead, is_stamped(stream)
        data = self._add(
            f"data {number}",
            stream,
            "input",
            lambda: Entrance(loop.coordinator, stamped=stamped, max_epochs_ahead=ahead),
            loop=loop,
        )
        loop.entrances += data.steps
        return data

    def _add_exit(self, label: str, stream: Stream) -> Stream:
        return self._add(label, stream, "input", Exit, loop=None)

    def _add(
        self, label: str, stream: Stream, input_name: str, factory: Callable[[], Any], *, loop: Loop | None
    ) -> Stream:
        edges = stream.edges(input_name)
        _match(edges, stream.parallelism)
        return self._flow.add_step(
            Step(
                name=self._flow.unique_name(label, named=False),
                parallelism=stream.parallelism,
                where=self._where,
                factory=factory,
                inputs=edges,
                loop=loop,
                bounded=all(given.is_bounded for given in self._data),
                shape="iteration",
            )
        )

    def _close_loop(self, head: Step, initial: Stream, feedback: Stream) -> None:
        edges = feedback.edges(FEEDBACK)
        _match(edges, initial.parallelism)
        for edge in edges:
            edge.feedback = self._loop.limits
        head.inputs.extend(edges)


def _match(edges: Sequence[Edge], parallelism: int) -> None:
    for edge in edges:
        if isinstance(edge.partitioning, Forward) and edge.upstream.parallelism != parallelism:
            edge.partitioning = Rebalance()
